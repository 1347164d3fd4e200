"""Whether a commit log holds together, record by record (D-M5, D-M8); for people who ask."""

from __future__ import annotations

from collections.abc import Sequence

from sdcpd.protocol.commit_log import CommitRecord, FenceRecord, Record
from sdcpd.protocol.digest import extend


def log_faults(records: Sequence[Record]) -> list[str]:
    """One sentence for each thing that no writer of this project's stores could have written."""
    faults: list[str] = []
    highest_epoch = 0
    last: CommitRecord | None = None
    for number, record in enumerate(records):
        if record.epoch < highest_epoch:
            faults.append(f"record {number} has epoch {record.epoch} after {highest_epoch}: void")
            continue
        if isinstance(record, FenceRecord):
            if record.epoch == highest_epoch:
                faults.append(f"record {number} is a fence that raises no epoch: {record.epoch}")
        else:
            faults += [f"record {number} {fault}" for fault in _continues(last, record)]
            last = record
        highest_epoch = record.epoch
    return faults


def _continues(last: CommitRecord | None, record: CommitRecord) -> list[str]:
    """What is wrong with a commit after the one before it."""
    faults = []
    round_, committed = (last.round, last.committed) if last else (0, 0)
    if record.round != round_ + 1:
        faults.append(f"has round {record.round} after {round_}")
    if not record.emitted:
        faults.append("commits no token")
    if record.committed != committed + len(record.emitted):
        faults.append(
            f"has {record.committed} committed after {committed} and {len(record.emitted)} emitted"
        )
    # Where the first begins depends on contract and prompt, which the log does not hold.
    if last is not None and extend(last.digest, record.emitted) != record.digest:
        faults.append("has a digest that its tokens do not give")
    return faults
