"""Who takes the spans of the instances of this process, if somebody does."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sdcpd.config_sections import TracesSection
from sdcpd.traces import Tracer

if TYPE_CHECKING:
    from sdcpd.traces.export import Export


class Tracers:
    """One exporter for all; opened with the first instance, and closed after all of them."""

    def __init__(self, section: TracesSection, stack: AsyncExitStack) -> None:
        self._section, self._stack = section, stack
        self._export: Export | None = None

    def of(self, role: str, name: str, *, ca: Path | None) -> Tracer | None:
        """What an instance tells its spans to; None where no collector is configured.

        `ca` is the file of `[traces]`, with the instance's names filled in.
        """
        section = self._section
        if not section.endpoint:
            return None
        if self._export is None:
            from sdcpd.traces.export import Export  # here alone: it takes time and memory

            self._export = Export(section.endpoint, ca=ca, sample_percent=section.sample)
            self._stack.push_async_callback(self._export.aclose)
        return self._export.tracer(role=role, name=name)
