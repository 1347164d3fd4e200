"""The verifier as a peer meets it: in memory, and over HTTP/2 and HTTP/3."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.verifier_wire import Wire
from tests.kit.wire_peers import tls_wire


@pytest.fixture
async def make_wire() -> AsyncIterator[Callable[..., Wire]]:
    """Makes wires; `changes` are those of Wire, contract members in `members`."""
    made: list[Wire] = []

    def make(**changes: Any) -> Wire:
        made.append(Wire(**changes))
        return made[-1]

    yield make
    for wire in made:
        await wire.verifier.aclose()


@pytest.fixture
def wire(make_wire: Callable[..., Wire]) -> Wire:
    """A verifier in memory, its session not open yet."""
    return make_wire()


@pytest.fixture(params=["memory", "h2", "h3"])
async def any_wire(
    request: pytest.FixtureRequest, make_wire: Callable[..., Wire], tmp_path: Path
) -> AsyncIterator[Wire]:
    """The same verifier over each transport."""
    if request.param == "memory":
        yield make_wire()
        return
    async with tls_wire(tmp_path, request.param) as made:
        yield made
