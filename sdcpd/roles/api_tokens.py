"""Which log-probabilities go with which piece of a text, and which tokens came from which round."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

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
    """Tells of each round what text it added, from what its verifier told of it.

    A round is held back until all of its text is given out; of one that a stop string cuts, the
    rest of its text is never told.
    """

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._count = self._made = 0
        self._held: deque[tuple[int, Round]] = deque()  # with where its text begins

    def add(self, texts: Sequence[str], parts: Sequence[Part]) -> None:
        """Take in tokens that came together, of which each added one of `texts`."""
        for one in self._of(texts, parts):
            self._held.append((self._made, one))
            self._made += len(one.accepted) + len(one.own)

    def release(self, shown: int, *, ended: bool) -> list[Round]:
        """The rounds whose text lies in the first `shown` characters; all, if it has `ended`."""
        found = []
        while self._held:
            begin, one = self._held[0]
            size = len(one.accepted) + len(one.own)
            if begin + size > shown and not ended:
                break
            self._held.popleft()
            if begin + size > shown:
                left = max(0, shown - begin)
                accepted = one.accepted[:left]
                one = replace(one, accepted=accepted, own=one.own[: left - len(accepted)])
            if begin < shown or not size:
                found.append(one)
        return found

    def _of(self, texts: Sequence[str], parts: Sequence[Part]) -> list[Round]:
        """What no part tells of is the verifier's: after a failover it knows no earlier rounds."""
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
    return [Round("", "", "".join(texts), self_decoded=False, known=False)] if texts else []
