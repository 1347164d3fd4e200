"""Reading metrics in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample; other lines are left out."""
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            try:
                value = float(found[3])
            except ValueError:
                continue
            yield found[1], dict(_LABEL.findall(found[2] or "")), value
