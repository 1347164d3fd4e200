"""From where a bucket is to a tier in it: keys, address and probe.

Imported only where an s3 tier is configured, since obstore need not be installed otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError
from obstore.store import S3Store

from tiers.api import TierError
from tiers.s3_place import S3Place
from tiers.s3_probe import probe
from tiers.s3_server import S3Server
from tiers.s3_tier import OBJECT_BYTES_MIN, S3Tier
from tiers.secret_file import secret_of

if TYPE_CHECKING:
    from obstore.store import S3Config

# Beyond every deadline of S3Server, which counts; this one only ends what nobody waits for.
_CLIENT_S = 600
_KEYS_OF_AWS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


async def open_s3(
    place: S3Place,
    size_bytes: int,
    *,
    scope_bytes_max: int | None = None,
    object_bytes_min: int = OBJECT_BYTES_MIN,
    clock: Callable[[], float] = time.monotonic,
) -> S3Tier:
    """Probe the bucket, for PROBE_S at most, and open a tier in it; raises TierError."""
    store = open_store(place)
    await probe(store, prefix=place.prefix, where=place.where)
    return S3Tier(
        S3Server(store, where=place.where, clock=clock),
        size_bytes,
        prefix=place.prefix,
        object_bytes_min=object_bytes_min,
        scope_bytes_max=scope_bytes_max,
        clock=clock,
    )


def open_store(place: S3Place) -> S3Store:
    """The bucket, with the keys of the files named or of the environment; raises TierError."""
    config: S3Config = {}
    if place.access_key_id_file and place.secret_access_key_file:
        config["access_key_id"] = _key(place.access_key_id_file, setting="access_key_id_file")
        config["secret_access_key"] = _key(
            place.secret_access_key_file, setting="secret_access_key_file"
        )
    elif place.address and not any(os.environ.get(name) for name in _KEYS_OF_AWS):
        raise TierError(
            f"{place.where}: there is no key for it: set access_key_id_file and"
            " secret_access_key_file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if place.endpoint:
        config["endpoint"] = place.endpoint
    if place.region:
        config["region"] = place.region
    try:
        return S3Store(
            place.bucket,
            config=config,
            client_options={
                "allow_http": place.address.startswith("http://"),
                "timeout": timedelta(seconds=_CLIENT_S),
            },
            retry_config={"max_retries": 0},
        )
    except (BaseError, ValueError) as error:
        # Without its text, which may tell keys.
        raise TierError(
            f"{place.where}: bucket, endpoint and region don't go together: correct them in [mlc]"
            " tiers"
        ) from error


def _key(path: Path, *, setting: str) -> str:
    return secret_of(path, setting=f"[mlc] tiers: {setting}", what="key")
