"""Commit logs in etcd: enforced by etcd itself, so that several routers share them (D-Z8).

An append is one transaction that holds only while the log is what its writer saw and its epoch is
not fenced (D-M7, D-M9); what waits goes out together, each with its own outcome (D-Z3). An append
that fails with StoreFailed may have happened, as with every store.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdcpd.protocol.commit_log import CommitRecord
from tiers.api import (
    LogAppend,
    LogContent,
    LogEntry,
    LogError,
    LogHead,
    Mismatch,
    NotExtending,
    StoreFailed,
)
from tiers.etcd_client import EtcdClient, EtcdSettings
from tiers.etcd_commit import Committer, Outcome
from tiers.etcd_errors import EtcdError
from tiers.etcd_groups import Groups
from tiers.etcd_ops import Append, Delete, check_authority
from tiers.etcd_reader import EtcdReader
from tiers.etcd_requests import LogState
from tiers.etcd_staging import Stager
from tiers.etcd_start import check_start
from tiers.log_rules import (
    check_condition,
    check_group,
    check_log_id,
    check_tag,
    parse_records,
)


class EtcdLogStore:
    """The log store of all routers that name the same etcd and prefix (`commit_log = "etcd"`)."""

    def __init__(self, client: EtcdClient, prefix: str) -> None:
        """Use `open`, which sees whether etcd is there and does what it must."""
        self._client = client
        self._reader = EtcdReader(client, prefix)
        self._stager = Stager(client, self._reader, prefix)
        self._committer = Committer(client, self._reader, prefix)
        self._groups = Groups(self._committer.perform, prefix=prefix, patience_s=client.patience_s)

    @classmethod
    async def open(cls, settings: EtcdSettings) -> EtcdLogStore:
        """Connect and check; raises TierError with a sentence for who runs it."""
        client = EtcdClient(settings)
        try:
            await check_start(client, settings)
        except BaseException:
            await client.aclose()
            raise
        return cls(client, settings.prefix)

    async def read(self, log_id: str) -> LogContent | None:
        check_log_id(log_id)
        return (await self._content(log_id))[1]

    async def head(self, log_id: str) -> LogHead | None:
        check_log_id(log_id)
        self._check_open()
        try:
            state = await self._reader.state(log_id, self._client.budget())
        except EtcdError as error:
            raise StoreFailed(f"the log cannot be read: {error}") from error
        if state.head is None:
            return None
        return LogHead(state.head.etag, state.head.size_bytes, state.highest_epoch)

    async def put(
        self, log_id: str, data: bytes, *, if_match: str | None, if_none_match: bool
    ) -> str:
        check_log_id(log_id)
        check_condition(if_match=if_match, create=if_none_match)
        old = b""
        if if_match is not None:
            state, content = await self._content(log_id)
            self._check_put(state, data, if_match)
            assert content is not None, "no log has no tag"
            if not data.startswith(content.data):
                raise NotExtending("the new content does not begin with the old")
            if data == content.data:
                return content.etag
            old = content.data
        # From here on it is an append to what was read, on the same condition.
        new = data[len(old) :]
        append = Append(log_id=log_id, octets=new, records=parse_records(new), if_match=if_match)
        return _tag((await self._append_all([append]))[0])

    async def append(
        self,
        log_id: str,
        record_bytes: bytes,
        *,
        offset: int | None,
        if_match: str | None,
        create: bool = False,
    ) -> str:
        item = LogAppend(
            log_id=log_id,
            record_bytes=record_bytes,
            if_match=if_match,
            create=create,
            offset=offset,
        )
        (outcome,) = await self.append_many([item])
        return _tag(outcome)

    async def append_many(self, items: Sequence[LogAppend]) -> list[str | LogError]:
        check_group(items)
        parsed = [_parsed(item) for item in items]
        appends = [append for append in parsed if isinstance(append, Append)]
        written = iter(await self._append_all(appends))
        return [next(written) if isinstance(one, Append) else one for one in parsed]

    async def entries(self, *, after: str = "", count_max: int) -> Sequence[LogEntry]:
        self._check_open()
        try:
            return await self._reader.entries(after, count_max)
        except EtcdError as error:
            raise StoreFailed(f"the logs cannot be listed: {error}") from error

    async def delete(self, log_id: str, *, if_match: str | None = None) -> None:
        check_log_id(log_id)
        (outcome,) = await self._groups.submit([Delete(log_id, if_match)])
        if isinstance(outcome, LogError):
            raise outcome

    async def aclose(self) -> None:
        await self._groups.aclose()
        await self._client.aclose()

    async def _append_all(self, appends: Sequence[Append]) -> list[str | LogError]:
        """Stage what is large, and commit all of it together."""
        self._check_open()
        staged = [await self._staged(append) for append in appends]
        ready = [append for append in staged if isinstance(append, Append)]
        committed = iter(await self._groups.submit(ready) if ready else [])
        return [_written(next(committed)) if isinstance(one, Append) else one for one in staged]

    async def _staged(self, append: Append) -> Append | LogError:
        try:
            return await self._stager.stage(append)
        except LogError as refusal:
            return refusal
        except EtcdError as error:
            return StoreFailed(str(error))

    async def _content(self, log_id: str) -> tuple[LogState, LogContent | None]:
        self._check_open()
        try:
            return await self._reader.content(log_id, self._client.budget())
        except EtcdError as error:
            raise StoreFailed(f"the log cannot be read: {error}") from error

    def _check_put(self, state: LogState, data: bytes, if_match: str) -> None:
        """Compare the tag, unless the newest record is one whose writer has lost authority."""
        try:
            check_tag(state.head.etag if state.head else None, if_match=if_match)
        except Mismatch:
            records = parse_records(data)
            if records and isinstance(records[-1], CommitRecord):
                check_authority(state.highest_epoch, records[-1:])
            raise

    def _check_open(self) -> None:
        if self._groups.closed:
            raise StoreFailed("the log store is closed")


def _parsed(item: LogAppend) -> Append | LogError:
    try:
        records = parse_records(item.record_bytes)
    except LogError as refusal:
        return refusal
    return Append(
        log_id=item.log_id,
        octets=item.record_bytes,
        records=records,
        if_match=item.if_match,
        offset=item.offset,
    )


def _written(outcome: Outcome) -> str | LogError:
    assert outcome is not None, "an append has a tag or an error"
    return outcome


def _tag(outcome: str | LogError) -> str:
    if isinstance(outcome, LogError):
        raise outcome
    return outcome
