"""sdcpctl chat: a conversation with the API, by the real command."""

from __future__ import annotations

import asyncio
import ssl
import sys
from pathlib import Path

from certs.commands import init
from sdcpd.roles.generation import GenerationError
from tests.kit.api import FOX, NAME, STORY, Api, Scripted, cluster_api, served, tokenizer

SCRIPT = tokenizer().encode(FOX).ids


async def chat(api: Api, *arguments: str, said: str = "") -> tuple[int, str, str]:
    base = f"http://127.0.0.1:{api.port}/v1"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "chat", "--api", base, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate(said.encode())
    assert process.returncode is not None
    assert b"Traceback" not in err
    return process.returncode, out.decode(), err.decode()


async def test_one_message_and_its_strip() -> None:
    async with cluster_api(tokenizer().encode(STORY).ids) as (api, _):
        options = ("--once", "Hello", "--temperature", "0", "--max-tokens", "20")
        code, plain, told = await chat(api, *options)
        assert code == 0
        assert "20 tokens" in told
        code, strip, _ = await chat(api, *options, "--strip")
        assert code == 0
        shown = strip.strip().replace("[", "").replace("]", "").replace("(", "").replace(")", "")
        assert shown.replace("�", "") == plain.strip().replace("�", "")
        assert "[" in strip or "(" in strip


async def test_a_conversation_remembers() -> None:
    generator = Scripted(parts=[SCRIPT[:4]])
    async with served(generator) as api:
        code, out, _ = await chat(api, said="Hi\n\nAnd then?\n")
    assert code == 0
    first, second = generator.requests
    text = api.text.decode(SCRIPT[:4])
    assert out.splitlines() == [text, text]
    assert len(second.prompt) > len(first.prompt)
    assert text in api.text.decode(second.prompt)


async def test_what_goes_wrong_is_a_sentence() -> None:
    async with served(Scripted(parts=[SCRIPT[:2], GenerationError("it broke")])) as api:
        code, out, err = await chat(api, "--once", "x")
        assert code == 1
        assert "it broke" in err
        assert api.text.decode(SCRIPT[:2]) in out
        code, _, err = await chat(api, "--once", "x", "-m", "other")
        assert code == 5
        assert f"the models are: {NAME}" in err
        code, _, err = await chat(api, "--once", "x", "--api", "http://127.0.0.1:9/v1")
        assert code == 3
        assert "nobody answers" in err
        assert (await chat(api, "--once", "x", "--api", "file:///etc/passwd"))[0] == 2


async def test_an_answer_that_breaks_off_is_none() -> None:
    """Also where what answers is no API, or the address none."""
    chunk = b'data: {"choices": [{"delta": {"content": "The"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    for octets, said in (
        (head + chunk, "broke off"),
        (head + b"data: hello\n\n", "no OpenAI-compatible API"),
        (head + b"data: {}\n\n", "no OpenAI-compatible API"),
        (head + b"data: 3\n\n", "no OpenAI-compatible API"),
        (head + b'data: {"error": {"message": ""}}\n\n', ""),
        (head + b'data: {"error": 3}\n\n', "no OpenAI-compatible API"),
        (head + b'data: {"choices": [{"delta": {"content": 3}}]}\n\n', "no OpenAI-compatible"),
        (head + b"data: " + b"[" * 100_000 + b"\n\n", "no OpenAI-compatible API"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda", "broke off"),
        (b"hello\r\n", "can't be asked"),
    ):

        async def answer(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, octets: bytes = octets
        ) -> None:
            await reader.readuntil(b"}}")
            writer.write(octets)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            code, _, err = await chat(_At(port), "--once", "x")  # type: ignore[arg-type]
        assert code == 1, octets
        assert said in err
    async with served(Scripted()) as api:
        for more in (("--api", "http://127.0.0.1:abc/v1"), ("--key", "ключ"), ("--key", "a\nb")):
            code, _, err = await chat(api, "--once", "x", *more)
            assert code == 1
            assert "can't be asked" in err


async def test_an_api_that_speaks_https(tmp_path: Path) -> None:
    """Its authority must be known, by --ca or the variable of OpenSSL, which is said."""
    issued = init(tmp_path, "lab.example", ["router/r0=https://127.0.0.1:7442/"], sans=()).issued
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(issued[0].crt_path, issued[0].key_path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\ndata: [DONE]\n\n')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    at = ("--once", "x", "--api", f"https://127.0.0.1:{port}/v1")
    async with server:
        code, _, err = await chat(_At(port), *at)  # type: ignore[arg-type]
        assert code == 4 and "certificate is not trusted" in err
        assert "--ca FILE" in err and "SSL_CERT_FILE" in err
        known = ("--ca", str(tmp_path / "ca.crt"))
        code, _, err = await chat(_At(port), *at, *known)  # type: ignore[arg-type]
        assert code == 0, err
    code, _, err = await chat(_At(port), *at, "--ca", __file__)  # type: ignore[arg-type]
    assert code == 1 and "holds no certificates" in err


class _At:
    def __init__(self, port: int) -> None:
        self.port = port
