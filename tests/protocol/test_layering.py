"""Imports point one way: daemon -> roles -> protocol, transport, engine, tiers; checked by reading.

The walk is over the source, so an import inside a function counts as well.
"""

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("sdcpd", "tiers", "cli", "certs")
# A role is its shell and the modules that are named after it; what several roles use is shared.
ROLE_OF_MODULE = {
    "router": "router",
    "router_session": "router",
    "contracts": "router",
    "output_reader": "router",
    "session_output": "router",
    "router_reports": "router",
    "logprobs": "router",
    "verifier": "verifier",
    "verifier_session": "verifier",
    "verifier_opening": "verifier",
    "verifier_logprobs": "verifier",
    "drafter": "drafter",
    "drafter_session": "drafter",
    "frontend": "frontend",
}
CUDA_TIER = Path("tiers/cuda_memory.py")
CBOR2_USERS = {"codec.py", "commit_log.py"}
# What the core gets as arguments instead: time, randomness, I/O and somewhere to log.
NOT_SANS_IO = {
    "asyncio",
    "logging",
    "random",
    "secrets",
    "selectors",
    "socket",
    "threading",
    "time",
}

FILES = sorted(
    path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
)


@cache
def tree(path: Path) -> ast.Module:
    text = (ROOT / path).read_text()
    # A collection in the middle of it makes CPython 3.11 lose count of its depth (gh-106905).
    gc.disable()
    try:
        return ast.parse(text, filename=str(path))
    finally:
        gc.enable()


def imports(path: Path) -> Iterator[str]:
    """Yield every module a file imports, as an absolute dotted name."""
    package = path.parent.parts
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # "from package import module" names the module only in the aliases.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def files_below(*folders: str) -> list[Path]:
    return [path for path in FILES if any(path.is_relative_to(folder) for folder in folders)]


def offences(paths: list[Path], *packages: str) -> list[str]:
    return [
        f"{path}: {name}" for path in paths for name in imports(path) if within(name, *packages)
    ]


def test_the_walk_sees_the_project() -> None:
    assert Path("sdcpd/protocol/codec.py") in FILES
    assert "cbor2.dumps" in imports(Path("sdcpd/protocol/codec.py"))


@pytest.mark.parametrize("path", files_below("sdcpd/protocol"), ids=str)
def test_protocol_imports_the_standard_library_and_itself(path: Path) -> None:
    for name in imports(path):
        if within(name, "sdcpd.protocol") or (within(name, "cbor2") and path.name in CBOR2_USERS):
            continue
        top = name.partition(".")[0]
        assert top in sys.stdlib_module_names, f"{path} imports {name}"
        assert top not in NOT_SANS_IO, f"{path} imports {name}, which is the shell's business"


@pytest.mark.parametrize("path", files_below("sdcpd/protocol"), ids=str)
def test_protocol_awaits_nothing(path: Path) -> None:
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node.lineno for node in ast.walk(tree(path)) if isinstance(node, waiting)]


def test_transport_knows_nothing_of_sdcp() -> None:
    paths = files_below("sdcpd/transport")
    assert not offences(paths, "sdcpd.protocol", "sdcpd.roles", "sdcpd.engine")


def test_engine_and_tiers_do_not_import_roles() -> None:
    assert not offences(files_below("sdcpd/engine", "tiers"), "sdcpd.roles")


def test_torch_is_imported_by_the_engine_alone() -> None:
    """And by the tier that registers its memory with CUDA, when it is configured."""
    allowed = [*files_below("sdcpd/engine", "sdcpd/dev"), CUDA_TIER]
    assert not offences([path for path in FILES if path not in allowed], "torch")
    whole = tree(CUDA_TIER)
    functions = [node for node in ast.walk(whole) if isinstance(node, ast.FunctionDef)]
    within_functions = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(whole):
        if isinstance(node, ast.Import) and "torch" in {alias.name for alias in node.names}:
            assert id(node) in within_functions, "not by who only imports the tiers"


def test_traces_know_of_nobody_and_nobody_below_the_roles_of_them() -> None:
    """Roles have the interface alone; OpenTelemetry comes with what sends, where it is wanted."""
    assert not offences(files_below("sdcpd/transport", "sdcpd/engine", "tiers"), "sdcpd.traces")
    assert not offences(files_below("sdcpd/traces"), "sdcpd.roles", "sdcpd.protocol")
    sender = Path("sdcpd/traces/export.py")
    assert not offences([path for path in FILES if path != sender], "opentelemetry")
    opener = Path("sdcpd/tracers.py")
    assert not offences([path for path in FILES if path != opener], "sdcpd.traces.export")


def role_of(module: str) -> str | None:
    return "frontend" if module.startswith("api_") else ROLE_OF_MODULE.get(module)


def test_roles_do_not_import_each_other() -> None:
    """Two roles in one process talk through loopback, by the same requests as over a socket."""
    for path in files_below("sdcpd/roles"):
        for name in imports(path):
            if within(name, "sdcpd.roles") and name != "sdcpd.roles":
                other, own = role_of(name.split(".")[2]), role_of(path.stem)
                assert other in (own, None), f"{path} imports {name}"


def test_importing_the_protocol_leaves_torch_out() -> None:
    modules = ["sdcpd.protocol." + path.stem for path in files_below("sdcpd/protocol")]
    code = (
        "import importlib, sys\n"
        f"for name in {[m.removesuffix('.__init__') for m in modules]!r}: "
        "importlib.import_module(name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
