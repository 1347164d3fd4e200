"""Whether a bucket can be used as it is configured, and its server keeps what it promises.

Some servers let several of concurrent conditional creates win, and then two machines may each
believe that their octets are the object's.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import suppress

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from tiers.api import TierError

RACERS = 16
# One server was seen to let the losers of a race wait for a lock for 8 s, a second at a time.
PROBE_S = 30.0
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_HINTS = {
    "InvalidAccessKeyId": "the access key is not known there: correct access_key_id_file, or"
    " AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is another: correct secret_access_key_file, or"
    " AWS_SECRET_ACCESS_KEY",
    "NoSuchBucket": "there is no such bucket: create it, or correct bucket",
    "InvalidBucketName": "the server takes no bucket of that name: correct bucket",
}


async def probe(store: S3Store, *, prefix: str, where: str) -> None:
    """Race, read back and delete one object; raises TierError, which names `where`.

    Cancelled, or out of time, it may leave the object behind.
    """
    path = "/".join(part for part in (prefix.strip("/"), "=probe", secrets.token_hex(8)) if part)
    try:
        async with asyncio.timeout(PROBE_S):
            try:
                await _race(store, path, where)
            except (TierError, BaseError, OSError):
                with suppress(BaseError, OSError):  # what happened first is what is told
                    await _delete(store, path)
                raise
            await _delete(store, path)
    except TimeoutError as error:
        raise TierError(
            f"{where} did not answer within {PROBE_S:.0f} s: check that the server runs, or correct"
            " endpoint"
        ) from error
    except (BaseError, OSError) as error:
        raise TierError(f"{where} can't be used: {_reason(error)}") from error


async def _race(store: S3Store, path: str, where: str) -> None:
    results = await asyncio.gather(
        *(obstore.put_async(store, path, b"%d" % n, mode="create") for n in range(RACERS)),
        return_exceptions=True,
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, AlreadyExistsError):
            raise result
    winners = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
    if len(winners) != 1:
        raise TierError(
            f"{where} can't be shared: of {RACERS} creates of one object under the condition that"
            f" it doesn't exist (If-None-Match: *) {len(winners)} were granted instead of one; use"
            " a server that keeps the condition, or take the s3 entry out of [mlc] tiers"
        )
    found = bytes(await (await obstore.get_async(store, path)).bytes_async())
    if found != b"%d" % winners[0]:
        raise TierError(
            f"{where} can't be used: it answered a read with other octets than were written; use"
            " another server, or take the s3 entry out of [mlc] tiers"
        )


async def _delete(store: S3Store, path: str) -> None:
    try:
        await obstore.delete_async(store, path)
    except FileNotFoundError:
        return


def _reason(error: Exception) -> str:
    """What happened and what to do; never the error's own text, which is long and may tell keys."""
    text = str(error)
    code, status = _CODE.search(text), _STATUS.search(text)
    if code and code[1] in _HINTS:
        return _HINTS[code[1]]
    if isinstance(error, UnauthenticatedError | PermissionDeniedError):
        return (
            "access to the bucket is denied: check that it exists, and let the key read, write and"
            " delete there"
        )
    if isinstance(error, FileNotFoundError):
        return _HINTS["NoSuchBucket"]
    if status:
        named = f" ({code[1]})" if code else ""
        return f"it answered {status[1]}{named}: look at the server's log, or correct endpoint"
    return "it can't be reached: check that the server runs, or correct endpoint"
