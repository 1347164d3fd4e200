"""`[mlc] tiers`: what only several keys of them together tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tiers.sizes import LMDB_BYTES_MAX, SIZE_BYTES_MIN

if TYPE_CHECKING:
    from sdcpd.config_sections import TierSection

_KEY_FILES = ("access_key_id_file", "secret_access_key_file")
_OF_S3 = ("bucket", "prefix", "endpoint", "region", *_KEY_FILES)


def tier_problems(tiers: Sequence[TierSection]) -> Iterator[str]:
    """A sentence for each thing that is wrong, which begins with the entry."""
    if not tiers:
        yield 'mlc.tiers is empty: give at least { kind = "host", size = "256MiB" }'
    if tiers and (tiers[0].kind == "remote" or [one.kind for one in tiers] == ["s3"]):
        yield (
            f"mlc.tiers[0]: a {tiers[0].kind} tier takes only some objects: put an entry before it,"
            ' as in { kind = "host", size = "1GiB" }'
        )
    for index, tier in enumerate(tiers):
        here = f"mlc.tiers[{index}]"
        if tier.kind == "lmdb" and not tier.path:
            yield f"{here}: an lmdb tier needs a path"
        if tier.kind == "lmdb" and tier.size > LMDB_BYTES_MAX:
            yield f"{here}.size: a file of an lmdb tier must be at most 16TiB"
        if tier.kind == "pinned" and tier.path:
            yield f"{here}: a pinned tier is memory and has no path: leave path away"
        if tier.kind == "remote":
            yield from (f"{here}: {text}" for text in _remote_problems(tier))
        else:
            if "size" not in tier.model_fields_set:
                yield f'key "size" is missing in [mlc.tiers.{index}]; add size = "1GiB"'
            elif tier.size < SIZE_BYTES_MIN:
                yield f"{here}.size is {tier.size} octets: must be at least 64KiB"
            if tier.base is not None:
                yield f'{here}: base is of a tier of kind = "remote", this one is "{tier.kind}"'
        if tier.kind == "s3":
            yield from (f"{here}: {text}" for text in _s3_problems(tier))
            if index < len(tiers) - 1:
                yield f"{here}: the s3 tier is the slowest: put its entry last"
        else:
            for key in _OF_S3:
                if key in tier.model_fields_set:
                    yield f'{here}: {key} is of a tier of kind = "s3", this one is "{tier.kind}"'


def _remote_problems(tier: TierSection) -> Iterator[str]:
    if tier.base is None:
        yield 'a remote tier needs the base_uri of the instance, as in base = "https://r1.lab:7442/"'
    for key in ("size", "path"):
        if key in tier.model_fields_set:
            yield f"a remote tier has no {key}: what it may hold is the other instance's to say"


def _s3_problems(tier: TierSection) -> Iterator[str]:
    if tier.bucket is None:
        yield 'an s3 tier needs a bucket that exists, as in bucket = "sdcpd-cache"'
    if tier.path:
        yield "an s3 tier has no path: name the place in the bucket by prefix"
    if bool(tier.access_key_id_file) != bool(tier.secret_access_key_file):
        yield "access_key_id_file and secret_access_key_file belong together: set both, or neither"
    for key in _KEY_FILES:
        path = getattr(tier, key)
        if path and not path.startswith("/"):
            yield f"{key} must be a path that begins with /"  # not shown: it may be the key itself
