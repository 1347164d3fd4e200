# Two commands do everything on a fresh machine with Python 3.11 and pip:
#   make dev     set up .venv and run a whole cluster on this machine
#   make test    set up .venv, then ruff, mypy and the tests
# PIP_ARGS goes to pip, for example to take torch from an index of CPU wheels.

PYTHON ?= python3
PIP_ARGS ?=
DEV_ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=
ROOT ?=
INSTALL_ARGS ?=
BIN := .venv/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: install install-host docs dev test test-slow chaos soak conformance mutants lint clean train

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) -e '.[engine,test]'
	touch $@

# What people call the API with; only tests need it, and it is as large as the rest.
.venv/clients: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt $(PIP_ARGS) -e '.[clients]'
	touch $@

# On this host, or below ROOT; packaging/install.sh --help has INSTALL_ARGS.
install-host:
	packaging/install.sh $(if $(ROOT),--root $(ROOT)) $(INSTALL_ARGS)

# The pages that are made from the program: docs/configuration.md and docs/commands.md.
docs: install
	$(BIN)/python -m tests.kit.references

dev: install
	$(BIN)/sdcpd dev $(DEV_ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint .venv/clients
	$(BIN)/pytest -q

test-slow: install .venv/clients
	$(BIN)/pytest -q -m slow --timeout 1200

# Real processes under kill -9, freezes and cut links for 20 minutes, and what it came to.
# CHAOS_ARGS="--seconds 120 --seed 7 --etcd"
chaos: install
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

# Constant load for half an hour, and whether memory, files, tasks or logs grow.
soak: install
	$(BIN)/python -m tests.chaos.soak $(SOAK_ARGS)

# All tests, and docs/conformance.md from what they came to.
conformance: install .venv/clients
	$(BIN)/pytest -q -m 'not device' --timeout 1200 --conformance=docs/conformance.md tests

# STORIES=stories.jsonl OUT=DIR
train: install
	$(BIN)/python -m sdcpd.dev.train --stories $(STORIES) --out $(OUT)

# Planted faults, and whether the tests of their requirements notice them.  IDS="R-2-1 ..."
mutants: install
	$(BIN)/python -m tests.mutants $(IDS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
