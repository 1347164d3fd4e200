"""A log store without room."""

from __future__ import annotations

from sdcpd.protocol.commit_log import FenceRecord, encode_record
from tiers.api import StoreFull
from tiers.lmdb_log import LmdbLogStore

BIG = "big"
"""The log that takes all the room; deleted, there is some again."""


async def filled(store: LmdbLogStore) -> None:
    """Append to one log until not even the smallest record fits any more."""
    tag, epoch = None, 0
    for records in (2000, 100, 1):
        try:
            while True:
                epoch += records
                octets = b"".join(
                    encode_record(FenceRecord(epoch=one))
                    for one in range(epoch - records + 1, epoch + 1)
                )
                tag = await store.append(BIG, octets, offset=None, if_match=tag, create=tag is None)
        except StoreFull:
            epoch -= records
