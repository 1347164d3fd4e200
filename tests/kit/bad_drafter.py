"""`python -m tests.kit.bad_drafter KIND ...`: an sdcpd drafter that is no help.

wrong: proposes tokens at random; slow: takes half a second for each proposal; hostile: proposes at
random, and besides sends its verifier what no drafter may, as fast as it is answered.
The rest of the command line is sdcpd's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from sdcpd import __main__, daemon
from sdcpd.engine.api import Draft, DraftWork
from sdcpd.engine.ngram import NgramDrafter
from sdcpd.protocol.codec import MEDIA_TYPE, decode, encode
from sdcpd.protocol.messages import Assignment, Proposal
from sdcpd.protocol.uris import join
from sdcpd.roles.drafter import Drafter
from sdcpd.transport.http import TransportError

SLOW_S = 0.5
VOCAB = 4096


class BadDrafter(NgramDrafter):
    """Proposes without looking at the text."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    async def draft(self, work: DraftWork, *, blocks: Sequence[bytes | memoryview] = ()) -> Draft:
        """As many tokens as may be, late or at once."""
        if self._kind == "slow":
            await asyncio.sleep(SLOW_S)  # it is as slow as that
        return Draft(tokens=tuple(random.randrange(VOCAB) for _ in range(work.m)))


class Attack:
    """Requests of a certified drafter that break a rule each."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    async def run(self, assignment: Assignment) -> None:
        """Until the verifier is gone."""
        client, uri = self._drafter._client, join(assignment.verifier, "proposals")
        for number in itertools.count():
            body = self._body(assignment, number)
            headers = (("content-type", MEDIA_TYPE),)
            try:
                await client.request("POST", uri, headers=headers, body=body, timeout_s=5.0)
            except TransportError:
                return

    def _body(self, assignment: Assignment, number: int) -> bytes:
        proposal = Proposal(
            session=assignment.session,
            epoch=assignment.epoch,
            drafter=self._drafter.config.base_uri,
            round=1 + number,
            base=0,
            base_digest=secrets.token_bytes(32),
            tokens=(VOCAB + number,) * 16,
            status=self._drafter.status(),
        )
        octets = encode(proposal)
        return (octets, octets[: len(octets) // 2], secrets.token_bytes(900_000))[number % 3]


def main() -> None:
    kind, *rest = sys.argv[1:]

    async def engine(_: Any) -> BadDrafter:
        return BadDrafter(kind)

    daemon.draft_engine = engine
    if kind == "hostile":
        _attack_verifiers()
    sys.argv[1:] = rest
    __main__.main()


def _attack_verifiers() -> None:
    """Each assignment begins an attack on the verifier that it names, one at a time."""
    attacked: dict[str, asyncio.Task[None]] = {}
    honest = Drafter._assign

    async def assign(self: Drafter, call: Any) -> Any:
        assignment = decode(Assignment, call.request.body)
        task = attacked.get(assignment.verifier)
        if task is None or task.done():
            attacked[assignment.verifier] = asyncio.ensure_future(Attack(self).run(assignment))
        return await honest(self, call)

    Drafter._assign = assign  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
