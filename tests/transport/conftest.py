"""Runs every transport test on both event loops: the daemon has uvloop where it can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
