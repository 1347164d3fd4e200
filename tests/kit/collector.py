"""A collector of traces on loopback: takes OTLP over HTTP, as any other, and keeps the spans."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Got:
    """A span as it was sent."""

    name: str
    trace: str
    span: str
    parent: str
    begin_ns: int
    end_ns: int
    kind: int
    failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.span}-01"


@dataclass
class Collector:
    """What has been sent so far; `answer` is the status that senders get."""

    port: int = 0
    answer: int = 200
    spans: list[Got] = field(default_factory=list)
    batches: int = 0
    paths: set[str] = field(default_factory=set)
    scheme: str = "http"
    endless: bool = False
    """Whether its answers have no end."""

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.batches += 1
        if self.answer == 200:
            self.spans += _spans(body)

    def named(self, name: str) -> list[Got]:
        return [one for one in self.spans if one.name == name]

    def wait_for(self, *names: str, timeout_s: float = 10.0) -> None:
        """Block until there is a span of each name; for tests whose senders are processes."""
        until = time.monotonic() + timeout_s
        while not all(map(self.named, names)):
            assert time.monotonic() < until, f"only {sorted({one.name for one in self.spans})} came"
            time.sleep(0.05)


@contextmanager
def collector(tls: ssl.SSLContext | None = None) -> Iterator[Collector]:
    """One that listens."""
    made = Collector(scheme="https" if tls else "http")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(made.answer)
            if made.endless:
                self.end_headers()
                with suppress(OSError):  # until the other side has had enough
                    while True:
                        self.wfile.write(bytes(1 << 16))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _spans(body: bytes) -> Iterator[Got]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _values(group.resource.attributes)
        for scope in group.scope_spans:
            for one in scope.spans:
                yield Got(
                    name=one.name,
                    trace=one.trace_id.hex(),
                    span=one.span_id.hex(),
                    parent=one.parent_span_id.hex(),
                    begin_ns=one.start_time_unix_nano,
                    end_ns=one.end_time_unix_nano,
                    kind=one.kind,
                    failed=one.status.code == 2,
                    attributes=_values(one.attributes),
                    resource=resource,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
