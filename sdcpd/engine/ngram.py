"""Prompt look-up: propose what followed the same few tokens earlier in the text (no torch)."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from sdcpd.engine.api import Draft, DraftWork
from sdcpd.engine.without_kv import WithoutKv
from sdcpd.protocol.sparse import SparseRows

ORDERS = (4, 3, 2, 1)
SESSIONS_MAX = 4096  # indexes kept; one is rebuilt from its tokens when needed again
NGRAM_MODEL = hashlib.sha256(b"sdcpd n-gram drafter 1").digest()
"""The "weights" digest under which routers know an n-gram drafter (D-C6)."""


class NgramIndex:
    """Where each n-gram of a session's tokens was last followed by something."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: list[int]) -> None:
        """Take in the tokens that follow those already known."""
        for token in tokens:
            at = len(self.tokens)
            for order in ORDERS:
                if at >= order:
                    self._last[tuple(self.tokens[at - order : at])] = at
            self.tokens.append(token)

    def propose(self, m: int, after: Sequence[int] = ()) -> list[int]:
        """Up to `m` continuations of the longest known n-gram; at least one token.

        The text ends with `after`, which is not taken in: it may never be committed.
        """
        end = [*self.tokens[-ORDERS[0] :], *after]
        for order in ORDERS:
            at = self._last.get(tuple(end[-order:])) if len(end) >= order else None
            if at is not None:
                return self._copy(at, m, after)
        return [end[-1] if end else 0]

    def _copy(self, at: int, m: int, after: Sequence[int]) -> list[int]:
        # The source may run into the text being proposed: a repeating text goes on repeating.
        text = [*self.tokens[at:], *after]
        while len(text) < m:
            text += text[: m - len(text)]
        return text[:m]


class NgramDrafter(WithoutKv):
    """The drafter that needs no model; its proposals cost microseconds."""

    model = NGRAM_MODEL
    tokenizer: bytes | None = None
    vocab: int | None = None

    def __init__(self) -> None:
        self._indexes: OrderedDict[bytes, NgramIndex] = OrderedDict()

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """See DraftEngine; under rule 2 each row is certain of its token."""
        begin = time.perf_counter()
        index = self._index(work)
        tokens = tuple(t if t < work.vocab else 0 for t in index.propose(work.m, work.after))
        rows = None
        if work.rule == 2:
            places = array("I", (at * work.vocab + token for at, token in enumerate(tokens)))
            rows = SparseRows(work.vocab, len(tokens), places, array("f", [1.0] * len(tokens)))
        return Draft(tokens, rows, time.perf_counter() - begin)

    def forget(self, session: bytes) -> None:
        """Drop a session's index."""
        self._indexes.pop(session, None)

    async def aclose(self) -> None:
        """Nothing to stop."""

    def _index(self, work: DraftWork) -> NgramIndex:
        index = self._indexes.pop(work.session, None) or NgramIndex()
        known = len(index.tokens)
        prefix = work.prefix
        if known > prefix.length or index.tokens != list(prefix.tokens[:known]):
            index, known = NgramIndex(), 0
        index.extend(list(prefix.tokens[known : prefix.length]))
        self._indexes[work.session] = index
        while len(self._indexes) > SESSIONS_MAX:
            self._indexes.popitem(last=False)
        return index
