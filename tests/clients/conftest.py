"""One cluster of real processes for all clients, and nobody to talk to but it."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.client_site import PROXIES, environment, only_loopback
from tests.kit.dev import Dev, dev


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """`sdcpd dev` with the bundled pair."""
    with dev(tmp_path_factory.mktemp("dev") / "state") as running:
        yield running


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where clients may write."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients have a home of their own, and fail the test that sees them ask anybody else."""
    for name in (*PROXIES, *(name for name in os.environ if name.startswith("OPENAI_"))):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(home).items():
        monkeypatch.setenv(name, value)
    tried = only_loopback(monkeypatch)
    yield
    if {"litellm", "langchain_openai"} & sys.modules.keys():
        with warnings.catch_warnings():  # they leave sockets behind, whenever those are collected
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    assert not tried, "a client wanted to talk to somebody else"
