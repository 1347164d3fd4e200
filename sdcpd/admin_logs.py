"""A router's commit logs at its admin socket: look at one, check it, fence it (Section 6.8)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sdcpd.protocol.commit_log import (
    CommitRecord,
    FenceRecord,
    LogCorrupt,
    LogSummary,
    decode_log,
    encode_record,
    read_log,
)
from sdcpd.protocol.log_check import log_faults
from sdcpd.protocol.uris import parse_session_id
from sdcpd.roles.log_retention import LogRetention
from sdcpd.units import duration_text
from tiers.api import LogContent, LogError, LogStore, Mismatch

ATTEMPTS = 10  # a session that runs appends meanwhile


class LogsRefused(Exception):
    """The request can't be met; one sentence for a person."""


class LogsAdmin:
    """Answers for one log store."""

    def __init__(self, logs: LogStore, *, retention: LogRetention | None = None) -> None:
        """`retention` tells of logs that are no longer there."""
        self._logs, self._retention = logs, retention

    @property
    def resources(self) -> dict[tuple[str, str], Callable[[dict[str, Any]], Awaitable[Any]]]:
        """By method and path; members of a request: session, for show also tokens."""
        return {
            ("POST", "/logs/show"): self.show,
            ("POST", "/logs/verify"): self.verify,
            ("POST", "/logs/fence"): self.fence,
        }

    async def show(self, body: dict[str, Any]) -> dict[str, Any]:
        """The records of a log; the tokens themselves only where `tokens` is true (D-M12)."""
        log_id = _session(body)
        content, summary = await self._read(log_id)
        records = [_shown(one, tokens=body.get("tokens") is True) for one in summary.records]
        return {**_about(log_id, content, summary), "records": records}

    async def verify(self, body: dict[str, Any]) -> dict[str, Any]:
        """Whether a log holds together; `faults` says where not."""
        log_id = _session(body)
        content, summary = await self._read(log_id)
        return {**_about(log_id, content, summary), "faults": log_faults(summary.records)}

    async def fence(self, body: dict[str, Any]) -> dict[str, Any]:
        """End the authority of whoever writes a log; returns the new epoch."""
        log_id = _session(body)
        for _ in range(ATTEMPTS):
            content, summary = await self._read(log_id)
            epoch = summary.highest_epoch + 1
            record = encode_record(FenceRecord(epoch=epoch))
            try:
                await self._logs.append(log_id, record, offset=None, if_match=content.etag)
            except Mismatch:
                continue
            except LogError as error:
                raise LogsRefused(f"the log of {log_id} was not fenced: {error}") from error
            return {"session": log_id, "epoch": epoch}
        raise LogsRefused(f"the log of {log_id} was not fenced: others kept appending to it")

    async def _read(self, log_id: str) -> tuple[LogContent, LogSummary]:
        try:
            content = await self._logs.read(log_id)
        except LogError as error:
            raise LogsRefused(f"the log of {log_id} cannot be read: {error}") from error
        if content is None:
            raise LogsRefused(self._absent(log_id))
        try:
            return content, read_log(decode_log(content.data))
        except LogCorrupt as error:
            raise LogsRefused(f"the log of {log_id} cannot be read to its end: {error}") from error

    def _absent(self, log_id: str) -> str:
        if self._retention is None:
            return f"there is no log of {log_id} here; is it another router's?"
        kept = (
            f"log_retention = {duration_text(self._retention.retention_s)} after its session ended"
        )
        ago_s = self._retention.deleted_ago_s(log_id)
        if ago_s is not None:
            return f"the log of {log_id} was deleted {duration_text(ago_s)} ago, {kept}"
        return f"there is no log of {log_id} here; is it another router's, or deleted, {kept}?"


def _session(body: dict[str, Any]) -> str:
    session = body.get("session")
    if not isinstance(session, str) or parse_session_id(session) is None:
        raise LogsRefused(f'"{session}" is no session id: sdcpctl status -o json names those open')
    return session


def _about(log_id: str, content: LogContent, summary: LogSummary) -> dict[str, Any]:
    last = summary.last_valid
    return {
        "session": log_id,
        "epoch": summary.highest_epoch,
        "round": last.round if last else 0,
        "committed": last.committed if last else 0,
        "records_count": len(summary.records),
        "size_bytes": len(content.data),
        "etag": content.etag,
    }


def _shown(record: CommitRecord | FenceRecord, *, tokens: bool) -> dict[str, Any]:
    if isinstance(record, FenceRecord):
        return {"kind": "fence", "epoch": record.epoch}
    shown: dict[str, Any] = {
        "kind": "commit",
        "epoch": record.epoch,
        "round": record.round,
        "emitted": len(record.emitted),
        "committed": record.committed,
        "digest": record.digest.hex(),
    }
    return {**shown, "tokens": list(record.emitted)} if tokens else shown
