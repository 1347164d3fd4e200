"""Stop strings: text is cut where one is complete, whatever pieces it comes in."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Passes text on, holding back only what may be the beginning of a stop string.

    The string that is complete first counts; of two complete at once, the longer.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.hit = False
        """Whether a stop string was found; all text after it is dropped."""

    def add(self, piece: str) -> str:
        """The text that is now sure to come before any stop string."""
        if self.hit:
            return ""
        text = self._held + piece
        if (start := self._found(text)) is not None:
            self.hit, self._held = True, ""
            return text[:start]
        kept = self._beginning(text) if self._strings else 0
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        best: tuple[int, int] | None = None
        for string in self._strings:
            start = text.find(string)
            if start >= 0 and (best is None or (start + len(string), start) < best):
                best = (start + len(string), start)
        return best and best[1]

    def _beginning(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(len(string) for string in self._strings) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
