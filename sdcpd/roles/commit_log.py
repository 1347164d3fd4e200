"""A session's commit log as its writer sees it: read, append, and know what became of it.

Section 6.8, D-M5 to D-M9, D-P16, D-P17.  An append whose outcome is unknown is never written a
second time with other content: the log is read until it tells.
"""

from __future__ import annotations

import logging
from enum import Enum

from sdcpd.protocol.commit_log import (
    MEDIA_TYPE,
    CommitRecord,
    FenceRecord,
    LogCorrupt,
    LogSummary,
    decode_log,
    encode_record,
    read_log,
)
from sdcpd.protocol.problems import parse_problem
from sdcpd.transport.http import Client, Response, TransportError

log = logging.getLogger("sdcpd.commit_log")


class LogUnavailable(Exception):
    """The log can't be read or written now; the text says why."""


class Outcome(Enum):
    """What became of an append."""

    COMMITTED = "committed"
    FENCED = "fenced"
    UNKNOWN = "unknown"


class CommitLog:
    """One commit log behind a URI; remembers the tag and content of its last success (D-M6).

    Where the store appends in place (D-Z3) the length is all that it remembers of the content.
    """

    def __init__(
        self, client: Client, uri: str, *, enforcing: bool = False, timeout_s: float = 5.0
    ) -> None:
        """`enforcing`: whether the store itself refuses appends below a fence (D-M7)."""
        self.uri = uri
        self._client = client
        self._enforcing = enforcing
        self._timeout_s = timeout_s
        self._etag: str | None = None
        self._content = b""
        self._length = 0
        self._in_place = False
        self._known = False
        self._highest_epoch = 0

    @property
    def etag(self) -> str | None:
        """The tag of the content last seen, None if there was no log."""
        return self._etag

    async def read(self) -> LogSummary:
        """Read the whole log; raises LogUnavailable, also for one that does not parse."""
        response = await self._request("GET")
        if response.status == 404:
            self._etag, self._known = None, True
            self._remember(b"")
            return read_log([])
        if response.status != 200:
            raise LogUnavailable(self._refusal("read", response))
        etag = response.header("etag")
        if etag is None:
            raise LogUnavailable(f"commit log {self.uri}: the answer has no ETag")
        try:
            summary = read_log(decode_log(response.body))
        except LogCorrupt as e:
            raise LogUnavailable(f"commit log {self.uri} is damaged: {e}") from e
        self._etag, self._known = etag, True
        self._highest_epoch = summary.highest_epoch
        self._in_place = response.header("sdcp-append") is not None
        self._remember(response.body)
        return summary

    def drop_content(self) -> None:
        """The session has ended: keep nothing; a later append reads first."""
        self._known = False
        self._remember(b"")

    def _remember(self, content: bytes) -> None:
        self._content, self._length = b"" if self._in_place else content, len(content)

    async def append(self, record: CommitRecord) -> Outcome:
        """Append a commit record; raises LogUnavailable if the store refuses for now."""
        if self._highest_epoch > record.epoch:
            return Outcome.FENCED  # a fence was seen behind our last record: nothing more of ours
        if not self._known and (found := await self.settle(record)) is not Outcome.UNKNOWN:
            return found
        try:
            response = await self._write(encode_record(record))
        except TransportError as e:
            self._known = False
            log.warning("commit log %s: outcome of an append unknown: %s", self.uri, e)
            return Outcome.UNKNOWN
        if 200 <= response.status < 300:
            return await self._after_success(record, response)
        self._known = False
        if response.status in (409, 412):
            return await self.settle(record, refused=True)
        raise LogUnavailable(self._refusal("append to", response))

    async def settle(self, record: CommitRecord, *, refused: bool = False) -> Outcome:
        """Read the log and tell what became of a record (D-P16, D-P17).

        COMMITTED: it is there and counts.  FENCED: a higher epoch, or another record of its round,
        stands in its way for ever, or the log is gone, which happens long after a session's end
        only.  UNKNOWN: it is not there; append it again.  Raises LogUnavailable.
        """
        was_there = self._etag is not None
        summary = await self.read()
        if was_there and self._etag is None:
            return Outcome.FENCED
        if any(known == record for known in summary.commits):
            return Outcome.COMMITTED
        if summary.highest_epoch > record.epoch:
            return Outcome.FENCED
        last = summary.last_valid
        # Of whatever epoch: its writer was never fenced, and the round is taken.
        foreign = last is not None and last.round >= record.round
        return Outcome.FENCED if foreign else Outcome.UNKNOWN

    async def fence(self, epoch: int, *, etag: str | None) -> bool:
        """Append a fence if the log is still as `etag` says; False if it is not (D-F2 step 2).

        Raises LogUnavailable; the fence may then have been written.
        """
        if etag != self._etag or not self._known:
            return False
        try:
            response = await self._write(encode_record(FenceRecord(epoch=epoch)))
        except TransportError as e:
            self._known = False
            raise LogUnavailable(str(e)) from e
        self._known = False
        if 200 <= response.status < 300:
            return True
        if response.status in (409, 412):
            return False
        raise LogUnavailable(self._refusal("fence", response))

    async def _after_success(self, record: CommitRecord, response: Response) -> Outcome:
        etag = response.header("etag")
        if not self._enforcing:
            self._known = False
            return await self.settle(record)
        if etag is None:
            self._known = False  # the next append reads first
        else:
            self._etag = etag
            octets = encode_record(record)
            self._length += len(octets)
            self._content += b"" if self._in_place else octets
        return Outcome.COMMITTED

    async def _write(self, octets: bytes) -> Response:
        headers: tuple[tuple[str, str], ...] = (("content-type", MEDIA_TYPE),)
        if self._etag is None:
            headers += (("if-none-match", "*"),)
            body = octets
        else:
            headers += (("if-match", self._etag),)
            body = self._content + octets
            if self._in_place:
                first = self._length
                headers += (("content-range", f"bytes {first}-{first + len(octets) - 1}/*"),)
                body = octets
        response = await self._request("PUT", headers, body, map_errors=False)
        if 200 <= response.status < 300 and self._etag is None:
            # A log that we created: whether it takes appends in place shows at the next read.
            self._known = self._known and response.header("sdcp-append") is not None
            self._in_place = response.header("sdcp-append") is not None
        return response

    async def _request(
        self,
        method: str,
        headers: tuple[tuple[str, str], ...] = (),
        body: bytes = b"",
        *,
        map_errors: bool = True,
    ) -> Response:
        try:
            return await self._client.request(
                method, self.uri, headers=headers, body=body, timeout_s=self._timeout_s
            )
        except TransportError as e:
            if not map_errors:
                raise
            raise LogUnavailable(str(e)) from e

    def _refusal(self, verb: str, response: Response) -> str:
        problem = parse_problem(response.status, response.body, response.header("content-type"))
        return f"cannot {verb} commit log {self.uri}: {problem}"
