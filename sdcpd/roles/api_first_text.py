"""Whether the cluster has ever written a token for this front end: what /ready waits for.

Every part may say that it is ready, and a log, a certificate or a route between them be wrong.
"""

from __future__ import annotations

import asyncio
import logging

from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.messages import Sampling
from sdcpd.roles.generation import GenerationError, GenerationRequest, Generator, closing_parts

log = logging.getLogger("sdcpd.api")
LOOK_S = 0.2
RETRY_S = 2.0


class FirstText:
    """Has one token written once the router says that it can be."""

    def __init__(self, generator: Generator, text: TextModel) -> None:
        self._generator = generator
        first = text.eos[0] if text.eos else 0
        greedy = Sampling(temperature_milli=0)
        self._request = GenerationRequest((first,), 1, (), greedy, speculate=False)
        self.missing: str | None = "no token has been written yet"
        """Why no text may be expected; None once a token has come."""

    async def run(self) -> None:
        """Try until it has worked once."""
        while self.missing is not None:
            if not self._generator.readiness().ready:
                await asyncio.sleep(LOOK_S)  # a clock tick: readiness is a matter of time too
                continue
            try:
                await self._write()
            except GenerationError as e:
                told = f"the first token could not be written: {e}"
                if self.missing != told:
                    log.warning("%s", told)
                self.missing = told
                await asyncio.sleep(RETRY_S)  # before the next try
            else:
                self.missing = None

    async def _write(self) -> None:
        generation = await self._generator.generate(self._request)
        async with closing_parts(aiter(generation)) as parts:
            async for part in parts:
                if part.finished:
                    return
        raise GenerationError("the session ended before its text did")
