"""Which log-probabilities go with which piece of a text, and which tokens came from which round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sdcpd.engine.token_octets import TokenOctets
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.logprobs import Row
from sdcpd.roles.api_answers import Round
from sdcpd.roles.api_logprobs import TokenEntry, entry

Part = tuple[int, ...]


class Entries:
    """Holds tokens' entries back until text that they begin is given out.

    Text behind a stop string is never given out, and neither are the tokens of it.
    """

    def __init__(self, octets: TokenOctets) -> None:
        self._octets = octets
        self._held: deque[TokenEntry] = deque()

    def add(self, token: int, row: Row, *, offset: int) -> None:
        """Take a token in, before which there are `offset` characters."""
        self._held.append(entry(self._octets, token, row, offset=offset))

    def release(self, shown: int) -> list[TokenEntry]:
        """The entries of tokens that begin in the first `shown` characters."""
        found = []
        while self._held and self._held[0].offset < shown:
            found.append(self._held.popleft())
        return found

    def finish(self) -> list[TokenEntry]:
        """All that are left, when the text has ended by itself: some have no text."""
        found = list(self._held)
        self._held.clear()
        return found


class Rounds:
    """Tells of each round what text it added, from what its verifier told of it."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._count = 0

    def of(self, texts: Sequence[str], parts: Sequence[Part]) -> list[Round]:
        """The rounds of tokens that came together, of which each added one of `texts`.

        What no part tells of is the verifier's: one that took a session over knows no rounds of
        the one before it.
        """
        first, self._count = self._count, self._count + len(texts)
        found, at = [], first
        for part in parts:
            end, accepted = part[0], part[1]
            if at < end <= self._count:
                size = min(end - at, accepted + 1)
                found += _unknown(texts[at - first : end - size - first])
                found.append(self._round(texts[end - size - first : end - first], part))
                at = end
        return found + _unknown(texts[at - first :])

    def _round(self, texts: Sequence[str], part: Part) -> Round:
        _, accepted, *rejected = part
        alone = not accepted and not rejected
        vain = self._text.decode(rejected) if rejected else ""
        own = "".join(texts[accepted:])
        return Round("".join(texts[:accepted]), vain, own, self_decoded=alone)


def _unknown(texts: Sequence[str]) -> list[Round]:
    return [Round("", "", "".join(texts), self_decoded=False)] if texts else []
