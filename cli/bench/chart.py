"""The load curve as an SVG, readable on light and dark ground, with its figures as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from cli.errors import CtlError

WIDTH, PLOT_HEIGHT, TOP, ROW = 760, 300, 92, 20
LEFT, RIGHT = 72, 24
COLUMNS = (LEFT, LEFT + 120, LEFT + 270, LEFT + 420)
SAID = {"helps": "helps", "hurts": "hurts", "no_difference": "no difference", "unknown": "unknown"}
APART = 3  # of the two lines, so that bars do not hide each other
INSET = 36  # of the first and last load from the edges of the plot
LINES = (("speculation", "with speculation", "on"), ("self_decode", "self-decode", "off"))
STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #333; }
  .title { font-size: 17px; font-weight: 600; fill: #111; }
  .faint { fill: #666; font-size: 12px; }
  .ground { fill: #fff; }
  .grid { stroke: #ddd; } .axis { stroke: #888; }
  .on { stroke: #0b6bcb; } .off { stroke: #c2410c; stroke-dasharray: 6 4; }
  .line { fill: none; stroke-width: 2.5; } .bar { stroke-width: 1.5; stroke-dasharray: none; }
  .dot { stroke-width: 2; fill: #fff; stroke-dasharray: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #d4d4d4; } .title { fill: #fafafa; } .faint { fill: #a3a3a3; }
    .ground { fill: #18181b; } .dot { fill: #18181b; }
    .grid { stroke: #333338; } .axis { stroke: #71717a; }
    .on { stroke: #60a5fa; } .off { stroke: #fb923c; }
  }"""


def write_chart(path: Path, told: dict[str, Any]) -> None:
    """Write the chart of a run; raises CtlError."""
    try:
        path.write_text(chart(told), "utf-8")
    except OSError as e:
        raise CtlError(f"{path} can't be written: {e.strerror}") from e


def chart(told: dict[str, Any]) -> str:
    """The text of the SVG."""
    points = sorted(told["points"], key=_load)
    scale = _Scale([_load(one) for one in points], _highest(points))
    height = TOP + PLOT_HEIGHT + 72 + ROW * (len(points) + 1) + 4
    title = f"Tokens per second of {told['model']}, with speculation and without"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img">'
    )
    parts = [head, f"<title>{escape(title)}</title>", f"<style>\n{STYLE}\n</style>"]
    parts.append(f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>')
    parts += [_text(LEFT, 32, title, "title"), _text(LEFT, 52, _about(told), "faint")]
    parts += [*_legend(told), *_axes(scale, points, told)]
    for key, _, style in LINES:
        parts += _line(scale, [one for one in points if _rate(one, key)], key, style)
    parts += _figures(points)
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Where a load and a rate lie: loads by their logarithm, rates from zero on."""

    def __init__(self, loads: Sequence[float], highest: float) -> None:
        self._least, self._most = math.log2(loads[0]), math.log2(loads[-1])
        self.step = _step(highest)
        self.top = self.step * math.ceil(highest / self.step)

    def x(self, load: float) -> float:
        """Points from the left edge."""
        width, span = WIDTH - LEFT - RIGHT - 2 * INSET, self._most - self._least
        share = (math.log2(load) - self._least) / span if span else 0.5
        return round(LEFT + INSET + width * share, 1)

    def y(self, rate: float) -> float:
        """Points from the upper edge."""
        return round(TOP + PLOT_HEIGHT * (1 - rate / self.top), 1)


def _step(highest: float) -> float:
    """A round number, of which four to eight make the axis."""
    power: float = 10.0 ** math.floor(math.log10(highest / 4))
    return next(one * power for one in (1, 2, 5, 10) if highest / (one * power) <= 8)


def _load(point: dict[str, Any]) -> float:
    return float(point.get("concurrency") or point["rate"])


def _rate(point: dict[str, Any], key: str) -> dict[str, float] | None:
    found: dict[str, float] | None = point[key] and point[key]["tokens_per_s"]
    return found


def _highest(points: Sequence[dict[str, Any]]) -> float:
    rates = [_rate(one, key) for one in points for key, _, _ in LINES]
    return max([one["most"] for one in rates if one] or [0.0]) or 1.0


def _about(told: dict[str, Any]) -> str:
    length = f"{told['duration_s']:g} s" if told["duration_s"] else f"{told['requests']} texts"
    incomplete = "" if told["complete"] else "   INCOMPLETE"
    return (
        f"{told['loop']} loop, {told['max_tokens']} tokens a text, temperature"
        f" {told['temperature']:g}; medians of {told['repeats']} x {length}, bars from least to"
        f" most{incomplete}"
    )


def _legend(told: dict[str, Any]) -> Iterator[str]:
    for at, (key, name, style) in enumerate(LINES):
        if told["points"][0][key] is None:
            continue
        x = LEFT + 180 * at
        yield f'<path class="line {style}" d="M{x} 72h28"/>'
        yield _text(x + 36, 76, name)


def _axes(scale: _Scale, points: Sequence[dict[str, Any]], told: dict[str, Any]) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, TOP + PLOT_HEIGHT
    for count in range(round(scale.top / scale.step) + 1):
        rate = count * scale.step
        style = "grid" if count else "axis"
        yield f'<path class="{style}" d="M{LEFT} {scale.y(rate)}H{right}"/>'
        yield _text(LEFT - 8, scale.y(rate) + 4, f"{rate:g}", "faint", anchor="end")
    for one in points:
        x = scale.x(_load(one))
        yield f'<path class="axis" d="M{x} {bottom}v5"/>'
        yield _text(x, bottom + 20, f"{_load(one):g}", "faint", anchor="middle")
    name = "sessions at a time" if told["loop"] == "closed" else "requests a second"
    yield _text((LEFT + right) / 2, bottom + 40, name, anchor="middle")
    middle = TOP + PLOT_HEIGHT / 2
    yield _text(20, middle, "tokens a second", anchor="middle", turn=f"rotate(-90 20 {middle:g})")


def _line(scale: _Scale, points: Sequence[dict[str, Any]], key: str, style: str) -> Iterator[str]:
    aside = -APART if style == "on" else APART
    found = [(scale.x(_load(one)) + aside, rate) for one in points if (rate := _rate(one, key))]
    way = " ".join(f"{x:g},{scale.y(rate['median'])}" for x, rate in found)
    yield f'<polyline class="line {style}" points="{way}"/>'
    for x, rate in found:
        least, most = scale.y(rate["least"]), scale.y(rate["most"])
        bar = f"M{x:g} {most}V{least}M{x - 5:g} {most}h10M{x - 5:g} {least}h10"
        yield f'<path class="bar {style}" d="{bar}"/>'
        yield f'<circle class="dot {style}" cx="{x:g}" cy="{scale.y(rate["median"])}" r="4"/>'


def _figures(points: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of what the curves show, and the verdicts."""
    rows = [("", *(name for _, name, _ in LINES), "speculation")]
    for point in points:
        rates = [_spread(_rate(point, key), "") for key, _, _ in LINES]
        said = SAID[point["verdict"]] if point["verdict"] else "-"
        ratio = _spread(point["ratio"], " x") if point["ratio"] else ""
        rows.append((point["name"], *rates, f"{said} {ratio}".strip()))
    y = TOP + PLOT_HEIGHT + 72
    for at, row in enumerate(rows):
        for x, cell in zip(COLUMNS, row, strict=True):
            yield _text(x, y + ROW * at, cell, "" if at else "faint")


def _spread(found: dict[str, float] | None, unit: str) -> str:
    if found is None:
        return "-"
    digits = 2 if unit else 0
    median, least, most = (f"{found[one]:.{digits}f}" for one in ("median", "least", "most"))
    return f"{median}{unit} ({least} to {most})"


def _text(
    x: float, y: float, text: str, style: str = "", *, anchor: str = "", turn: str = ""
) -> str:
    values = {"class": style, "text-anchor": anchor, "transform": turn}
    more = "".join(f' {name}="{value}"' for name, value in values.items() if value)
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'
