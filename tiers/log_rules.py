"""What a store enforces for commit logs, without storage: preconditions and fences (D-M7)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sdcpd.protocol.commit_log import FenceRecord, LogCorrupt, Record, decode_log
from tiers.api import BadRecords, Fenced, LogAppend, Mismatch, StaleEpoch

_LOG_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_log_id(log_id: str) -> None:
    """Raise ValueError unless the id is one plain path segment."""
    if not is_log_id(log_id):
        raise ValueError("a log id is 1 to 64 characters of base64url")


def is_log_id(text: str) -> bool:
    """Tell whether a text is one plain path segment that can name a log."""
    return _LOG_ID.fullmatch(text) is not None


def check_condition(*, if_match: str | None, create: bool) -> None:
    """Raise ValueError unless a write has exactly one precondition (D-M7)."""
    if (if_match is None) is not create:
        raise ValueError("a write to a log has exactly one of if_match and create")


def check_group(items: Sequence[LogAppend]) -> None:
    """Raise ValueError unless each log is named at most once, with one precondition (D-Z3)."""
    if len({item.log_id for item in items}) < len(items):
        raise ValueError("a log is named twice in a group")
    for item in items:
        check_log_id(item.log_id)
        check_condition(if_match=item.if_match, create=item.create)


def check_tag(etag: str | None, *, if_match: str | None) -> None:
    """Compare the log's tag (None: no log) with a precondition (None: create); raises Mismatch."""
    if etag != if_match:
        raise Mismatch(etag)


def parse_records(octets: bytes) -> list[Record]:
    """Decode what is to be appended; raises BadRecords."""
    try:
        return decode_log(octets)
    except LogCorrupt as error:
        raise BadRecords(f"what is to be appended is no sequence of records: {error}") from None


def highest_epoch(highest: int, records: Iterable[Record]) -> int:
    """Return the highest epoch after the records are appended in order (D-M7, D-M9).

    Raises Fenced for a commit below the highest epoch, StaleEpoch for a fence not above it.
    """
    for record in records:
        if isinstance(record, FenceRecord):
            if record.epoch <= highest:
                raise StaleEpoch(
                    f"a fence of epoch {record.epoch} is not above epoch {highest}",
                    highest_epoch=highest,
                )
        elif record.epoch < highest:
            raise Fenced(
                f"a record of epoch {record.epoch} comes after epoch {highest}",
                highest_epoch=highest,
            )
        highest = record.epoch
    return highest
