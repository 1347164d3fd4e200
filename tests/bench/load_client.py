"""What a token costs the client of `sdcpctl bench`, whose streams come from a process of their own.

    python -m tests.bench.load_client --streams 64 --apart-ms 5

Each event has one token and comes by itself, which is the dearest case: a round of speculation
brings several in one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import uvloop

from cli.bench.client import Client, Wanted
from cli.bench.figures import tokens_per_s
from cli.bench.load import Block, closed_loop
from cli.bench.prompts import Prompts

TOKENS = 64
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(octets: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(octets), octets)


def event(**more: object) -> bytes:
    """As long as those of the API are."""
    base = {"id": "cmpl-" + 22 * "x", "object": "text_completion", "created": 1, "model": "tiny"}
    return chunk(f"data: {json.dumps(base | more)}\n\n".encode())


def serve(port: Connection, apart_s: float) -> None:
    """Send tokens one by one, each stream at its pace."""
    choice = {"index": 0, "text": " sea", "logprobs": None, "finish_reason": None}
    token = event(choices=[choice])
    own = {"rounds": 20, "tokens_per_pass": 3.2, "self_decoded": 0}
    usage = event(choices=[], usage={"completion_tokens": TOKENS, "prompt_tokens": 9, "sdcp": own})
    last = usage + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:  # the client has enough
                return
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
            writer.write(HEAD)
            for _ in range(TOKENS):
                await asyncio.sleep(apart_s)
                writer.write(token)
            writer.write(last)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def load(port: int, streams: int, seconds: float) -> Block:
    """The loop of the command, over its client."""
    wanted = Wanted(
        url=urlsplit(f"http://127.0.0.1:{port}/v1"),
        key=None,
        model="tiny",
        max_tokens=TOKENS,
        temperature=0.0,
        seed=0,
        chat=False,
        ignore_eos=True,
        timeout_s=30.0,
    )
    client, prompts = Client(wanted), Prompts(None, seed=time.time_ns())

    async def ask(prompt: str, due_s: float) -> object:
        return await client.ask(prompt, due_s, speculate=True)

    block = await closed_loop(
        ask,  # type: ignore[arg-type]
        prompts.take,
        clients=streams,
        duration_s=seconds,
        requests=None,
    )
    client.close()
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--apart-ms", type=float, default=5.0, help="between tokens of a stream")
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, options.apart_ms / 1000), daemon=True
    )
    server.start()
    block = uvloop.run(load(ours.recv(), options.streams, options.seconds))
    server.terminate()
    tokens = sum(one.tokens for one in block.texts)
    failed = sum(one.failure is not None for one in block.texts)
    print(
        f"{options.streams} streams: {tokens_per_s(block):.0f} tokens/s, {failed} failed,"
        f" {1e6 * block.cpu_s / tokens:.1f} us of processor a token,"
        f" {block.cpu_s / block.wall_s:.0%} of a core"
    )


if __name__ == "__main__":
    main()
