"""Answers to GET and HEAD that objects and logs have in common."""

from __future__ import annotations

from collections.abc import Collection

from sdcpd.protocol.problems import PreconditionFailed
from sdcpd.transport.http import Headers, Request, Response
from tiers.api import Octets
from tiers.http_fields import tags, wanted_range


def representation(
    request: Request,
    data: Octets,
    *,
    etag: str,
    media_type: str,
    extra: Headers = (),
    size_bytes: int | None = None,
    others: Collection[str] = (),
) -> Response:
    """Answer 200, 206 or 304; raises PreconditionFailed, RangeNotSatisfiable or Malformed.

    `size_bytes` is that of the content where an answer to HEAD is made without it; `others` are
    tags of other representations of the same, which satisfy If-Match as well.
    """
    common: Headers = (("etag", etag), ("accept-ranges", "bytes"), *extra)
    early = conditional(request, etag, common, others=others)
    if early is not None:
        return early
    common = (("content-type", media_type), *common)
    if request.method == "HEAD":
        return Response(
            200, (*common, ("content-length", str(len(data) if size_bytes is None else size_bytes)))
        )
    wanted = wanted_range(request, etag=etag, size_bytes=len(data))
    if wanted is None and isinstance(data, memoryview) and request.takes_view:
        return Response(200, common, view=data)
    # Else copied, where it is a view: a reader that is slow must not hold a tier's memory.
    if wanted is None:
        return Response(200, common, bytes(data))
    span = f"bytes {wanted.start}-{wanted.stop - 1}/{len(data)}"
    return Response(
        206, (*common, ("content-range", span)), bytes(data[wanted.start : wanted.stop])
    )


def conditional(
    request: Request, etag: str, common: Headers, *, others: Collection[str] = ()
) -> Response | None:
    """Answer 304 if the client has it already; raises PreconditionFailed (RFC 9110 13.2.2).

    `others` as in `representation`.
    """
    if_match = tags(request, "if-match")
    if if_match is not None and not any(map(if_match.match_strongly, (etag, *others))):
        raise PreconditionFailed("the entity tag is another", headers={"etag": etag})
    if_none_match = tags(request, "if-none-match")
    if if_none_match is not None and if_none_match.match_weakly(etag):
        return Response(304, common)
    return None
