"""Spans to a collector, over OTLP/HTTP, by a thread of OpenTelemetry's that holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sdcpd.traces import Span, Tracer

log = logging.getLogger("sdcpd.traces")
PATH = "/v1/traces"
SPANS_MAX = 8192  # that wait to be sent, some 10 MB; more are dropped, the oldest first
BATCH_SPANS = 512
EVERY_S = 1.0  # how often what there is is sent
SEND_S = 5.0  # given to one batch, its repetitions included
ANSWER_BYTES_MAX = 64 << 10  # a few octets, or why it was refused
CLOSE_S = 2.0  # given to what is left at the end
_SCOPE = InstrumentationScope("sdcpd")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Export:
    """Sends the spans of all roles of a process to one collector."""

    def __init__(self, endpoint: str, *, ca: Path | None = None, sample_percent: int = 100) -> None:
        """`endpoint` is the collector's URL without /v1/traces; `ca` a file, for https."""
        self._sample_percent = sample_percent
        self._sender = _Sender(endpoint.rstrip("/") + PATH, ca=ca)
        self._processor = BatchSpanProcessor(
            self._sender,
            max_queue_size=SPANS_MAX,
            schedule_delay_millis=EVERY_S * 1000,
            max_export_batch_size=BATCH_SPANS,
            export_timeout_millis=SEND_S * 1000,
        )

    def tracer(self, *, role: str, name: str) -> Tracer:
        """What an instance of a role tells its spans to."""
        resource = Resource.create(
            {"service.name": "sdcpd", "service.instance.id": name, "sdcp.role": role}
        )

        def emit(span: Span) -> None:
            self._processor.on_end(_as_sdk(span, resource))

        return Tracer(emit, sample_percent=self._sample_percent)

    async def aclose(self) -> None:
        """Send what is left, for at most two seconds; what is not taken then is dropped."""
        # OpenTelemetry waits for its thread for up to 30 s; a thread of ours may, and we do not.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True, name="traces")
        closing.start()
        await anyio.to_thread.run_sync(closing.join, CLOSE_S)
        self._sender.end()


class _Sender(SpanExporter):
    """OpenTelemetry's exporter; what goes wrong is told once, until something goes right."""

    def __init__(self, url: str, *, ca: Path | None) -> None:
        self._url = url
        session = _Session()
        # REQUESTS_CA_BUNDLE of the environment would count for more than what is configured.
        session.trust_env = ca is None
        self._inner = OTLPSpanExporter(
            endpoint=url, certificate_file=str(ca) if ca else None, timeout=SEND_S, session=session
        )
        self._failing = False
        self._closed = threading.Event()
        self._said = _Said()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some; called by the thread of the queue."""
        self._said.first = ""
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning(
                "traces are not taken by %s: %s; they are dropped until they are, and nothing "
                "waits for them",
                self._url,
                self._said.first or "no reason is known",
            )
        elif self._failing and not failed:
            log.info("traces are taken by %s again", self._url)
        self._failing = failed
        return result

    def end(self) -> None:
        """Give up what is being sent."""
        if not self._closed.is_set():
            self._closed.set()
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        """Called once all was sent, or given up."""
        self.end()


class _Session(requests.Session):
    """Answers are read to an end: the library would take in one that has none."""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        """See requests.Session."""
        options |= {"stream": True, "allow_redirects": False}
        response: requests.Response = super().request(*arguments, **options)
        end, said = time.monotonic() + SEND_S, bytearray()
        for piece in response.iter_content(1024):
            said += piece
            if len(said) > ANSWER_BYTES_MAX or time.monotonic() > end:
                response.close()
                raise requests.exceptions.ConnectionError("its answer does not end")
        response._content = bytes(said)
        return response


class _Said(logging.Handler):
    """Takes what OpenTelemetry logs, a line for each try, and keeps the first of a batch.

    What it says at last is that it has given up.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""
        self._dropped = False
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        text = record.getMessage()
        if not text.startswith("Queue full"):
            why = " ".join(text.split()).removeprefix("Transient error ")
            self.first = self.first or why.partition(" encountered while ")[0][:300]
        elif not self._dropped:
            self._dropped = True  # once is enough: whoever reads it lowers the share
            log.warning(
                "spans come faster than they are taken, and some are dropped: lower [traces] "
                "sample, or see to the collector"
            )


def _as_sdk(span: Span, resource: Resource) -> ReadableSpan:
    """As the SDK has it: made at once, as a span that is begun and ended there costs ten times."""
    place = span.place
    return ReadableSpan(
        span.name,
        context=_context(place.trace_id, place.span_id),
        parent=_context(place.trace_id, place.parent_id) if place.parent_id else None,
        resource=resource,
        attributes=dict(span.attributes),
        kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR) if span.error else Status(StatusCode.UNSET),
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)
