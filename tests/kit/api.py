"""A front end over a cluster in memory, served on loopback, with a small tokenizer made here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sdcpd.engine.fake import FakeDrafter, FakeModel
from sdcpd.engine.tokenizer import TextModel
from sdcpd.protocol.logprobs import Row
from sdcpd.roles.frontend import ApiSettings, FrontEnd
from sdcpd.roles.generation import (
    Generation,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    Readiness,
    SessionOutput,
    Tokens,
)
from sdcpd.traces import Tracer
from sdcpd.transport.http1 import Http1Server
from tests.kit.cluster import Cluster

NAME = "lab/tiny"
FOX = "The quick brown fox jumps over the lazy dog. "
STORY = FOX + "Naïve café, 中文字 🙂👨‍👩‍👧 done. "
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE that knows a few English words and no character beyond ASCII."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([FOX] * 4, trainer)
    return made


def text_model(*, context_max: int = 512, template: str | None = TEMPLATE) -> TextModel:
    """The tokenizer with what a model directory says beside it."""
    made = tokenizer()
    return TextModel(
        name=NAME,
        digest=bytes(32),
        tokenizer=made,
        eos=(made.token_to_id(END),),
        context_max=context_max,
        vocab=made.get_vocab_size(),
        template=template,
    )


class ScriptModel(FakeModel):
    """Writes one text again and again; where in it depends on the length of the prompt."""

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__(vocab=tokenizer().get_vocab_size())
        self.script = tuple(script)

    def scores(self, prefix: Sequence[int]) -> list[float]:
        """See FakeModel: all mass on the next token of the text, as good as."""
        scores = [0.0] * self.vocab
        scores[self.script[len(prefix) % len(self.script)]] = 100.0
        return scores

    def next(self, prompt_length: int, count: int) -> list[int]:
        """The tokens after a prompt."""
        size = len(self.script)
        return [self.script[(prompt_length + n) % size] for n in range(count)]


@dataclass
class Scripted:
    """A generator that yields what a test says, in the grouping it says."""

    parts: list[Sequence[int] | Exception | asyncio.Event] = field(default_factory=list)
    opening: asyncio.Event | Exception | None = None
    """What generate() waits for, or fails with."""
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    session: bytes = bytes(16)
    stats: GenerationStats = field(default_factory=GenerationStats)
    ready: Readiness = field(default_factory=lambda: Readiness(True, "ready"))
    rounds: list[tuple[int, ...]] = field(default_factory=list)
    """What its rounds are said to have been like, as `Output.parts` does."""
    seen: dict[str, Any] = field(
        default_factory=lambda: {"sessions": 0, "instances": [], "counts": {}}
    )

    def readiness(self) -> Readiness:
        return self.ready

    def overview(self) -> dict[str, Any]:
        return self.seen

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        if isinstance(self.opening, Exception):
            raise self.opening
        if self.opening is not None:
            await self.opening.wait()
        return self

    @property
    def stop(self) -> tuple[int, ...]:
        return (tokenizer().token_to_id(END),)

    async def output(self, session: bytes) -> SessionOutput | None:
        return self if session == self.session else None

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        count = 0
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                asked = self.requests[-1].logprobs if self.requests else None
                rows = () if asked is None else scripted_rows(part, asked)
                begin, count = count, count + len(part)
                told = tuple(one for one in self.rounds if begin < one[0] <= count)
                yield Tokens(tuple(part), finished=False, logprobs=rows, parts=told)
        yield Tokens((), finished=True)

    async def logprobs(self, tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
        return scripted_rows(tokens[1:], alternatives)

    async def cancel(self) -> None:
        self.cancelled.set()


def scripted_rows(tokens: Sequence[int], alternatives: int) -> tuple[Row, ...]:
    """Rows in which a token has its own number as its log-probability, in hundredths."""
    others = [value for one in range(alternatives) for value in (one + 40, 5_000_000 + one)]
    return tuple((token * 10_000, *others) for token in tokens)


NO_VERIFIER = GenerationError("no verifier has reported", retry_after_s=1)


def api_settings(**changes: Any) -> ApiSettings:
    """Settings of a listener on loopback without keys."""
    values: dict[str, Any] = {
        "model_name": "",
        "keys_file": None,
        "allow_anonymous": False,
        "cors_origins": (),
        "hosts_loopback_only": True,
        "sse_ping_s": 5.0,
        "max_queue": 16,
    }
    return ApiSettings(**(values | changes))


@dataclass
class Api:
    """A served front end, and what its tests ask of it."""

    port: int
    front_end: FrontEnd
    text: TextModel

    def client(self, **options: Any) -> AsyncOpenAI:
        """The real client."""
        values: dict[str, Any] = {"api_key": "none", "max_retries": 0} | options
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **values)

    async def open(
        self, method: str, path: str, *, body: bytes = b"", headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send one request as octets."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        host = "" if "host:" in headers.lower() else f"Host: 127.0.0.1:{self.port}\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{host}{headers}Content-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        return reader, writer

    async def raw(
        self, method: str, path: str, *, body: object = b"", headers: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, fields and body of one request."""
        octets = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self.open(method, path, body=octets, headers=headers)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        head, _, rest = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        if method != "HEAD" and fields.get("transfer-encoding") == "chunked":
            rest = unchunked(rest)
        return int(lines[0].split()[1]), fields, rest

    async def json(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of one request."""
        status, _, body = await self.raw(method, path, **options)
        return status, json.loads(body)

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, as JSON but for [DONE]; comments are left out."""
        status, _, octets = await self.raw("POST", path, body=body | {"stream": True})
        assert status == 200, octets
        return events_of(octets)


def events_of(octets: bytes) -> list[Any]:
    """Parse server-sent events."""
    blocks = [block for block in octets.decode().split("\n\n") if not block.startswith(":")]
    assert blocks.pop() == "", "every event ends with an empty line"
    assert all(block.startswith("data: ") for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def unchunked(octets: bytes) -> bytes:
    """The content of a whole chunked body."""
    content = b""
    while True:
        size, _, octets = octets.partition(b"\r\n")
        if int(size, 16) == 0:
            return content
        content += octets[: int(size, 16)]
        octets = octets[int(size, 16) + 2 :]


@asynccontextmanager
async def served(
    generator: Any, *, text: TextModel | None = None, tracer: Tracer | None = None, **changes: Any
) -> AsyncIterator[Api]:
    """A front end over any generator."""
    text = text or text_model()
    front_end = FrontEnd(generator, text, api_settings(**changes), tracer=tracer)
    server = Http1Server(front_end.handle, refuse=front_end.refuse, body_bytes_max=1 << 20)
    port = await server.start()
    try:
        yield Api(port, front_end, text)
    finally:
        await server.aclose()
        await front_end.aclose()


@asynccontextmanager
async def cluster_api(
    script: Sequence[int],
    *,
    pass_time_s: float = 0.0,
    drafters: int = 1,
    tracer: Callable[[str, str], Tracer | None] = lambda role, name: None,
    **changes: Any,
) -> AsyncIterator[tuple[Api, Cluster]]:
    """A front end over real roles whose model writes `script`; the drafter is a perfect one."""
    model = ScriptModel(script)
    made = Cluster(model=model, tracer=tracer)
    made.add_router()
    made.add_verifier("v0", pass_time_s=pass_time_s)
    for index in range(drafters):
        made.add_drafter(f"d{index}", engine=FakeDrafter(model, name=f"d{index}"))
    try:
        await made.ready()
        async with served(made.router, tracer=tracer("router", "r0"), **changes) as api:
            yield api, made
    finally:
        await made.aclose()
