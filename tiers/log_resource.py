"""Commit logs over HTTP: `logs/{session id}` and `logs` (D-M5 to D-M8, D-Z3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sdcpd.protocol.commit_log import MEDIA_TYPE, FenceRecord, LogCorrupt, decode_log
from sdcpd.protocol.problems import (
    Conflict,
    InsufficientStorage,
    Malformed,
    NotFound,
    PreconditionFailed,
    PreconditionRequired,
    Problem,
    TooLarge,
    Unavailable,
    UnsupportedMediaType,
)
from sdcpd.protocol.uris import parse_session_id
from sdcpd.transport.http import Headers, Request, Response
from tiers import log_group
from tiers.api import (
    BadRecords,
    LogAppend,
    LogError,
    LogStore,
    Mismatch,
    NotExtending,
    StaleEpoch,
    StoreFull,
)
from tiers.http_fields import Tags, content_range, essence, field, media_type, tags
from tiers.log_group import GroupItem, GroupOutcome, encode_outcomes, parse_group
from tiers.representation import conditional, representation

METHODS = ("GET", "HEAD", "PUT", "OPTIONS")
GROUP_METHODS = ("POST", "OPTIONS")
# A record is about a hundred octets, so a log of a hundred thousand rounds fits.
LOG_BYTES_MAX = 16 * 1024 * 1024
GROUP_BYTES_MAX = 1024 * 1024
RETRY_AFTER_S = 1.0

# Announces appends in place (1) and in groups (2).
APPEND: Headers = (("sdcp-append", "2"),)

AuthorizeFence = Callable[[Request], None]

T = TypeVar("T")


class LogResource:
    """Serves one log store."""

    def __init__(self, logs: LogStore, *, authorize_fence: AuthorizeFence | None = None) -> None:
        """`authorize_fence` raises Problem for who may not write fences (D-M11)."""
        self._logs = logs
        self._authorize_fence = authorize_fence

    async def handle(self, log_id: str, request: Request) -> Response:
        """Answer a request to one log, authorized and of a known method; raises Problem."""
        if request.method == "GET":
            content = await _told(self._logs.read(log_id))
            if content is None:
                raise NotFound("no such log")
            return representation(
                request, content.data, etag=content.etag, media_type=MEDIA_TYPE, extra=APPEND
            )
        if request.method == "HEAD":
            return await self._head(log_id, request)
        return await self._put(log_id, request)

    async def append_group(self, request: Request) -> Response:
        """Answer `POST logs`: one group commit, each outcome for itself; raises Problem."""
        _check_body(request, log_group.MEDIA_TYPE, bytes_max=GROUP_BYTES_MAX)
        items = parse_group(request.body)
        for item in items:
            self._check_fence(request, item.record)
        outcomes = await self._group_outcomes(items)
        body = encode_outcomes(outcomes)
        return Response(200, (("content-type", log_group.MEDIA_TYPE), *APPEND), body)

    async def _head(self, log_id: str, request: Request) -> Response:
        head = await _told(self._logs.head(log_id))
        if head is None:
            raise NotFound("no such log")
        common: Headers = (("etag", head.etag), ("accept-ranges", "bytes"), *APPEND)
        return conditional(request, head.etag, common) or Response(
            200,
            (
                ("content-type", MEDIA_TYPE),
                *common,
                ("content-length", str(head.size_bytes)),
            ),
        )

    async def _put(self, log_id: str, request: Request) -> Response:
        _check_body(request, MEDIA_TYPE, bytes_max=LOG_BYTES_MAX)
        span = content_range(request)
        if_match, create = await self._precondition(log_id, request)
        if span is not None:
            self._check_fence(request, request.body)
            etag = await _told(
                self._logs.append(
                    log_id, request.body, offset=span[0], if_match=if_match, create=create
                )
            )
        else:
            await self._check_fences_of_whole(log_id, request)
            etag = await _told(
                self._logs.put(log_id, request.body, if_match=if_match, if_none_match=create)
            )
        return Response(201 if create else 204, (("etag", etag), *APPEND))

    async def _precondition(self, log_id: str, request: Request) -> tuple[str | None, bool]:
        """Return the tag to match and whether to create, exactly one of them; raises Problem."""
        if_match, if_none_match = tags(request, "if-match"), tags(request, "if-none-match")
        if if_match is not None and if_none_match is not None:
            raise PreconditionFailed("if-match and if-none-match exclude each other here")
        if if_none_match is not None and if_none_match.any:
            return None, True
        if if_match is None or if_match.any:
            # "*" says nothing of what the writer has read (Section 6.8).
            raise PreconditionRequired(
                "a write to a log needs If-Match with its entity tag, or If-None-Match: *"
            )
        return await self._one_tag(log_id, if_match), False

    async def _one_tag(self, log_id: str, given: Tags) -> str:
        if len(given.tags) == 1:
            return given.tags[0]
        head = await _told(self._logs.head(log_id))
        # The store compares again, so a change in between is found.
        return head.etag if head and given.match_strongly(head.etag) else given.tags[0]

    async def _check_fences_of_whole(self, log_id: str, request: Request) -> None:
        if self._authorize_fence is not None:
            old = await _told(self._logs.read(log_id))
            if old is None or request.body.startswith(old.data):
                self._check_fence(request, request.body[len(old.data) if old else 0 :])

    def _check_fence(self, request: Request, octets: bytes) -> None:
        if self._authorize_fence is None:
            return
        try:
            records = decode_log(octets)
        except LogCorrupt:
            return  # refused by the store, with its reason
        if any(isinstance(record, FenceRecord) for record in records):
            self._authorize_fence(request)

    async def _group_outcomes(self, items: list[GroupItem]) -> list[GroupOutcome]:
        named = [item for item in items if parse_session_id(item.log) is not None]
        appends = [
            LogAppend(log_id=item.log, record_bytes=item.record, if_match=_quoted(item.etag))
            for item in named
        ]
        results = iter(await _told(self._logs.append_many(appends)) if appends else [])
        outcomes = []
        for item in items:
            if parse_session_id(item.log) is None:
                outcomes.append(GroupOutcome(NotFound.status))
                continue
            result = next(results)
            if isinstance(result, str):
                outcomes.append(GroupOutcome(204, result))
            else:
                problem = problem_of(result)
                outcomes.append(GroupOutcome(problem.status, problem.headers.get("etag")))
        return outcomes


def problem_of(error: LogError) -> Problem:
    """Translate a refusal or failure of the store (D-M7, D-H14)."""
    match error:
        case Mismatch(etag=etag):
            return PreconditionFailed(str(error), headers={"etag": etag} if etag else {})
        case NotExtending() | StaleEpoch():
            return Conflict(str(error))
        case BadRecords():
            return Malformed(str(error))
        case StoreFull():
            return InsufficientStorage(str(error), retry_after_s=RETRY_AFTER_S)
        case _:
            return Unavailable(str(error), retry_after_s=RETRY_AFTER_S)


async def _told(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except LogError as error:
        raise problem_of(error) from error


def _quoted(etag: str) -> str:
    return etag if etag.startswith('"') else f'"{etag}"'


def _check_body(request: Request, wanted: str, *, bytes_max: int) -> None:
    given = essence(media_type(request))
    if given not in (None, wanted):
        raise UnsupportedMediaType(f"the body must be {wanted}", headers={"accept": wanted})
    if (field(request, "content-encoding") or "identity").lower() != "identity":
        raise UnsupportedMediaType(
            "logs have no content coding", headers={"accept-encoding": "identity"}
        )
    if len(request.body) > bytes_max:
        raise TooLarge(f"the body has at most {bytes_max} octets")
