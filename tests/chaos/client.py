"""A client that streams one text after another and comes back when its stream breaks."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from tests.chaos.texts import Text, Undisturbed

RETRY_S = 0.2
HAND_OVER = 0.15  # share of the texts whose client goes while it reads them by session already
SILENCE_S = 90.0  # nothing for so long, not even a comment: the client gives up and that is a fault
STALLED_S = 120.0  # comments, but no token


@dataclass
class Stream:
    """One text as one client has seen it."""

    text: Text
    session: str = ""
    received: str = ""
    times: list[float] = field(default_factory=list)
    """When something of the text came (monotonic)."""
    reconnects: int = 0
    ids: tuple[int, ...] = ()
    """Of what came by session, token by token; empty where the first stream was whole."""
    again: str = ""
    """The text of those."""
    finish_reason: str | None = None
    """As the last event by session says."""
    came: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once something has come by session."""
    whole: bool = False


class Wrong(Exception):
    """What a client must never see; the text says what."""


class Client:
    """Asks for texts until told to stop; what it has seen is in `streams`, faults in `wrong`."""

    def __init__(
        self,
        number: int,
        http: httpx.AsyncClient,
        texts: Sequence[Text],
        known: dict[Text, Undisturbed],
        *,
        seed: int,
        pause_s: float = 0.0,
    ) -> None:
        """`pause_s` between two texts."""
        self._pause_s = pause_s
        self._number, self._http, self._known = number, http, known
        self._texts = list(texts)
        self._chooser = random.Random((seed << 8) + number)
        self._second: asyncio.Task[None] | None = None
        self.streams: list[Stream] = []
        self.wrong: list[str] = []
        self.refused = 0
        """Requests that were told to come again, or met nobody."""

    async def run(self, more: Callable[[], bool]) -> None:
        """Stream texts while there are to be more; a text that was begun is ended."""
        while more():
            stream = Stream(self._chooser.choice(self._texts))
            try:
                await self._stream(stream)
                self._check(stream)
            except Wrong as e:
                self.wrong.append(
                    f"client {self._number}, session {stream.session or '-'}, "
                    f"{len(stream.received)} characters received: {e}"
                )
            if stream.session:
                self.streams.append(stream)
            await asyncio.sleep(self._pause_s)

    # ---- one text

    async def _stream(self, stream: Stream) -> None:
        while not stream.session:
            await self._first(stream)
        if self._second is not None:
            second, self._second = self._second, None
            await second
        begun = time.monotonic()
        while not stream.whole:
            await self._again(stream)
            last = stream.times[-1] if stream.times else begun
            if time.monotonic() > last + STALLED_S:
                raise Wrong(f"no token for {STALLED_S:.0f} s")

    async def _first(self, stream: Stream) -> None:
        """Ask for the text; returns with a session, or for another try."""
        request = self._http.stream(
            "POST",
            "/v1/completions",
            json=stream.text.body | {"stream": True},
            headers=stream.text.headers,
            timeout=SILENCE_S,
        )
        try:
            async with request as response:
                if response.status_code in (429, 503):
                    self.refused += 1
                    await response.aread()
                    await asyncio.sleep(RETRY_S)
                    return
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    raise Wrong(f"{response.status_code}: {said}")
                async for event in _events(response):
                    self._take_chunk(stream, event)
                    if not stream.whole and self._hands_over(stream):
                        await self._read_beside(stream)
                        return  # whoever reads by session keeps it open
        except httpx.ReadTimeout as e:
            raise Wrong(f"nothing for {SILENCE_S:.0f} s") from e
        except httpx.TransportError:
            if not stream.session:
                self.refused += 1
            await asyncio.sleep(RETRY_S)

    def _take_chunk(self, stream: Stream, event: Any) -> None:
        if event is None:
            stream.whole = True
            return
        if (error := event.get("error")) is not None:
            if not stream.session and error["code"] == "unavailable":
                self.refused += 1  # it had waited in a stream that had begun
                raise httpx.ReadError("to be tried again")
            raise Wrong(f"the stream ended with an error: {error}")
        stream.session = event["id"].partition("-")[2]
        if piece := event["choices"][0]["text"]:
            stream.received += piece
            stream.times.append(time.monotonic())

    def _hands_over(self, stream: Stream) -> bool:
        return len(stream.times) == 2 and self._chooser.random() < HAND_OVER

    async def _read_beside(self, stream: Stream) -> None:
        """Begin to read by session, and wait until something has come that way."""
        self._second = asyncio.ensure_future(self._again(stream))
        came = asyncio.ensure_future(stream.came.wait())
        await asyncio.wait({self._second, came}, return_when=asyncio.FIRST_COMPLETED)
        came.cancel()

    async def _again(self, stream: Stream) -> None:
        """Read the session on by its id: from its first token, then from the last that came so."""
        stream.reconnects += 1
        path = f"/v1/sdcp/sessions/{stream.session}/output"
        params = {"from": len(stream.ids)}
        try:
            async with self._http.stream("GET", path, params=params, timeout=SILENCE_S) as response:
                if response.status_code in (429, 503):
                    await response.aread()
                    await asyncio.sleep(RETRY_S)
                    return
                if response.status_code != 200:
                    said = (await response.aread()).decode(errors="replace")
                    raise Wrong(f"reading the session again: {response.status_code}: {said}")
                async for event in _events(response):
                    self._take_output(stream, event)
        except httpx.ReadTimeout as e:
            raise Wrong(f"nothing for {SILENCE_S:.0f} s") from e
        except httpx.TransportError:
            await asyncio.sleep(RETRY_S)

    def _take_output(self, stream: Stream, event: Any) -> None:
        """Of the session's output: what was received before must be the beginning of its text."""
        if event is None:
            stream.whole = True
            if stream.again != stream.received:
                raise Wrong(f"it was {stream.received!r}, and by session {stream.again!r}")
            if stream.finish_reason != "length":
                raise Wrong(f"its finish_reason is {stream.finish_reason}")
            return
        if (error := event.get("error")) is not None:
            raise Wrong(f"reading the session again: {error}")
        if event["from"] != len(stream.ids):
            raise Wrong(f"{len(stream.ids)} tokens are here, and the next are from {event['from']}")
        stream.ids = (*stream.ids, *event["tokens"])
        stream.again += event["text"]
        stream.finish_reason = event["finish_reason"]
        longer, shorter = sorted((stream.again, stream.received), key=len, reverse=True)
        if not longer.startswith(shorter):
            raise Wrong(f"it began {stream.received!r}, and by session {stream.again!r}")
        if len(stream.again) > len(stream.received):
            stream.received = stream.again
            stream.times.append(time.monotonic())
        stream.came.set()

    def _check(self, stream: Stream) -> None:
        known = self._known.get(stream.text)
        if known is None:
            return
        if stream.received != known.text:
            raise Wrong(f"the text is {stream.received!r} instead of {known.text!r}")
        if stream.ids and stream.ids != known.ids:
            raise Wrong(f"the ids are {stream.ids} instead of {known.ids}")


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    """Server-sent events as JSON; None for the last."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)
