"""The front end: OpenAI's API over texts that the router beside it generates (D-R8, D-G9)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sdcpd.engine.tokenizer import TextModel
from sdcpd.roles.api_access import Access
from sdcpd.roles.api_answers import octets_of
from sdcpd.roles.api_bodies import ChatBody, CompletionBody, read_body
from sdcpd.roles.api_counts import GONE
from sdcpd.roles.api_errors import JSON_HEADERS, ApiError, refuse, retry_after
from sdcpd.roles.api_first_text import FirstText
from sdcpd.roles.api_page import PATHS, Page
from sdcpd.roles.api_sessions import SESSIONS, Sessions
from sdcpd.roles.api_texts import Texts
from sdcpd.roles.api_tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize, version
from sdcpd.roles.api_trace import traced
from sdcpd.roles.generation import Generator, Readiness
from sdcpd.roles.overview import status_for_clients
from sdcpd.traces import Tracer
from sdcpd.transport.http import Request, Response
from sdcpd.transport.http1 import StreamingResponse
from sdcpd.transport.shown import one_line

log = logging.getLogger("sdcpd.api")
MODELS = "/v1/models"
STATUS = "/v1/sdcp/status"
NOT_READY_RETRY_S = 2

AnyResponse = Response | StreamingResponse


@dataclass(frozen=True)
class ApiSettings:
    """`[api]` as the front end needs it."""

    model_name: str
    """What clients call the model; empty for the name of its directory."""
    keys_file: Path | None
    allow_anonymous: bool
    """Checked with the configuration: without it, a listener for others must have keys."""
    cors_origins: tuple[str, ...]
    hosts_loopback_only: bool
    sse_ping_s: float
    """Silence in a stream before a comment is sent; 0 sends none."""
    max_queue: int
    """Texts that may wait for their session to open; more get 429."""
    log_kept: str = "1h"
    """How long a session can be read after its end, as `[mlc] log_retention` has it."""
    log_prompts: bool = False
    """Whether prompts and texts may be written to the log."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for the model, as clients may have them in their settings."""
    hosts: tuple[str, ...] = ()
    """Names beside those of loopback that a loopback listener answers to."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that was let in; `owner` is the name of its key, `named` what its path names."""

    request: Request
    owner: str
    named: str = ""


Resource = Callable[[_Call], Awaitable[AnyResponse]]
Methods = dict[str, Resource]


class FrontEnd:
    """Answers every request of the API's listener; everything it needs is given to it."""

    refuse = staticmethod(refuse)
    """How the HTTP server words what it refuses before a request exists."""

    def __init__(
        self,
        generator: Generator,
        text: TextModel,
        settings: ApiSettings,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer` takes the spans of requests for texts; raises KeysError."""
        self._generator, self._text, self._tracer = generator, text, tracer
        self._model = settings.model_name or text.name
        self._created = int(time.time())
        self._first: FirstText | None = None
        self._page = Page()
        self._texts = Texts(generator, text, model=self._model)
        self.counts = self._texts.counts
        self.configure(settings)
        self._keyless: dict[str, Methods] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            **{path: {"GET": self._page_file} for path in PATHS},
        }
        self._keyed: dict[str, Methods] = {
            MODELS: {"GET": self._models},
            STATUS: {"GET": self._status},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/version": {"GET": self._version},
        }

    def configure(self, settings: ApiSettings) -> None:
        """Go by other settings from the next request on; raises KeysError."""
        self._texts.configure(
            ping_s=settings.sse_ping_s,
            max_queue=settings.max_queue,
            log_prompts=settings.log_prompts,
        )
        self._aliases = settings.model_aliases
        self._sessions = Sessions(
            self._generator, self._text, ping_s=settings.sse_ping_s, log_kept=settings.log_kept
        )
        self._access = Access(
            keys_file=settings.keys_file,
            origins=settings.cors_origins,
            loopback_only=settings.hosts_loopback_only,
            hosts=settings.hosts,
        )

    def reload_keys(self) -> list[str]:
        """Read the file of keys again; a sentence if it can't be used."""
        return self._access.reload_keys()

    async def write_first_text(self) -> None:
        """Have a token written, before which /ready says no; a daemon runs this at its start."""
        self._first = FirstText(self._generator, self._text)
        await self._first.run()

    async def handle(self, request: Request) -> AnyResponse:
        """Answer one request; never raises, and has the error shape on every path."""
        response: AnyResponse
        self.counts.arrived()
        try:
            response = await self._dispatch(request)
        except ApiError as e:
            response = e.response()
        except Exception:
            log.exception("%s failed", one_line(f"{request.method} {request.path}"))
            response = refuse(500, "the request failed here; the log says why")
        except BaseException:  # a client that goes away cancels us
            self.counts.answered(self._route(request.path), GONE)
            raise
        self.counts.answered(self._route(request.path), response.status)
        return self._access.with_cors(request, response)

    async def aclose(self) -> None:
        """Let sessions end whose clients have gone; called after the listener was closed."""
        await self._texts.aclose()

    async def _dispatch(self, request: Request) -> AnyResponse:
        self._access.check_host(request)
        owner = "anonymous"
        if request.path not in self._keyless and request.method != "OPTIONS":
            # Before anything is looked up: whoever has no key learns nothing.
            owner = self._access.check_key(request)
        methods, named = self._find(request)
        allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"])
        if request.method == "OPTIONS":
            return self._access.preflight(request, allowed)
        resource = methods.get("GET" if request.method == "HEAD" else request.method)
        if resource is None:
            headers = (("allow", allowed),)
            raise ApiError(405, f"{request.path} takes {allowed} only", headers=headers)
        if request.method == "POST":
            self._access.check_origin(request)
        return await resource(_Call(request, owner, named))

    def _find(self, request: Request) -> tuple[Methods, str]:
        path = request.path
        if path.startswith(f"{MODELS}/"):
            # The name may hold a slash, plain or encoded.
            return {"GET": self._model_by_id}, unquote(path.removeprefix(f"{MODELS}/"))
        session, _, rest = path.removeprefix(f"{SESSIONS}/").partition("/")
        if path.startswith(f"{SESSIONS}/") and rest == "output":
            return {"GET": self._session_output}, session
        methods = self._keyless.get(path) or self._keyed.get(path)
        if methods is None:
            raise ApiError(404, f"no such resource: {request.method} {path}", code="not_found")
        return methods, ""

    def _route(self, path: str) -> str:
        """A path as metrics name it, which are as many as there are resources."""
        if path.startswith(f"{MODELS}/"):
            return f"{MODELS}/{{model}}"
        if path.startswith(f"{SESSIONS}/"):
            return f"{SESSIONS}/{{session}}/output"
        return path if path in self._keyless or path in self._keyed else "other"

    # ---- resources

    async def _health(self, _: _Call) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, _: _Call) -> Response:
        found = self._generator.readiness()
        if found.ready and self._first is not None and self._first.missing is not None:
            found = Readiness(False, self._first.missing)
        state = {"ready": found.ready, "reason": found.reason}
        if found.ready:
            return _json(state)
        error = ApiError(503, found.reason, code="not_ready")
        headers = (*JSON_HEADERS, *retry_after(NOT_READY_RETRY_S))
        return Response(503, headers, json.dumps(state | error.body()).encode())

    async def _page_file(self, call: _Call) -> Response:
        return self._page.answer(call.request)

    async def _status(self, _: _Call) -> Response:
        return _json(status_for_clients(self._generator, self._model))

    async def _models(self, _: _Call) -> Response:
        return _json({"object": "list", "data": [self._model_object()]})

    async def _model_by_id(self, call: _Call) -> Response:
        self._check_model(call.named)
        return _json(self._model_object())

    async def _completions(self, call: _Call) -> AnyResponse:
        body = read_body(CompletionBody, call.request.body)
        self._check_model(body.model)
        request, model = call.request, self._model
        with traced(self._tracer, request, operation="text_completion", model=model) as trace:
            return await self._texts.complete(body, request, owner=call.owner, trace=trace)

    async def _chat(self, call: _Call) -> AnyResponse:
        body = read_body(ChatBody, call.request.body)
        self._check_model(body.model)
        request, model = call.request, self._model
        with traced(self._tracer, request, operation="chat", model=model) as trace:
            return await self._texts.chat(body, request, owner=call.owner, trace=trace)

    async def _tokenize(self, call: _Call) -> Response:
        body = read_body(TokenizeBody, call.request.body)
        self._check_model(body.model)
        return _json(await tokenize(body, self._text))

    async def _detokenize(self, call: _Call) -> Response:
        body = read_body(DetokenizeBody, call.request.body)
        self._check_model(body.model)
        return _json(await detokenize(body, self._text))

    async def _version(self, _: _Call) -> Response:
        return _json(version())

    async def _session_output(self, call: _Call) -> AnyResponse:
        return await self._sessions.output(call.named, call.request, owner=call.owner)

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "sdcpd",
            "max_model_len": self._text.context_max,
        }

    def _check_model(self, name: str | None) -> None:
        """Whoever names no model means the one there is."""
        if name is not None and self._model not in (name, self._aliases.get(name)):
            raise ApiError(
                404,
                f"no model {name!r} here; the models are: {self._model}",
                param="model",
                code="model_not_found",
            )


def _json(value: dict[str, Any]) -> Response:
    return Response(200, JSON_HEADERS, octets_of(value))
