"""The span of a client's request for text, until its answer was given or its client has gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sdcpd.roles.api_errors import ApiError
from sdcpd.traces import HEADER, Attribute, Place, Tracer
from sdcpd.transport.http import Request

GONE = "client_gone"
FAILED = "failed"


class RequestTrace:
    """One request that is traced; whoever is last to know of its end tells it, once."""

    def __init__(self, tracer: Tracer, place: Place, *, operation: str, model: str) -> None:
        """`operation` is one of gen_ai.operation.name, `model` what the client is served."""
        self._tracer, self._place = tracer, place
        self._begin = time.monotonic()
        self._name = f"{operation} {model}"
        self._attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "sdcpd",
            "gen_ai.request.model": model,
        }
        self._over = False

    @property
    def traceparent(self) -> str:
        """As whoever works for the request is told of it."""
        return self._place.traceparent

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """What its texts have come to; numbers alone, never a text."""
        self._attributes["gen_ai.usage.input_tokens"] = input_tokens
        self._attributes["gen_ai.usage.output_tokens"] = output_tokens

    def ended(self, error: str = "") -> None:
        """It is over; `error` is a word for what went wrong, or an HTTP status."""
        if self._over:
            return
        self._over = True
        if error:
            self._attributes["error.type"] = error
        self._tracer.told(
            self._name,
            self._place,
            begin=self._begin,
            end=time.monotonic(),
            attributes=self._attributes,
            serves=True,
            error=error,
        )


@contextmanager
def traced(
    tracer: Tracer | None, request: Request, *, operation: str, model: str
) -> Iterator[RequestTrace | None]:
    """The trace of what is answered within; None for what is not traced.

    An error that leaves it ends it; otherwise the text's end does, which may come later.
    """
    place = None if tracer is None else tracer.begin(request.header(HEADER))
    if tracer is None or place is None:
        yield None
        return
    trace = RequestTrace(tracer, place, operation=operation, model=model)
    try:
        yield trace
    except ApiError as e:
        trace.ended(e.code or str(e.status))
        raise
    except Exception:
        trace.ended(FAILED)
        raise
    except BaseException:  # a client that goes away cancels us
        trace.ended(GONE)
        raise
