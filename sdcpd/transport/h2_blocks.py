"""What the header blocks of the steady exchange say, read once and kept (RFC 7541)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hpack import Decoder, HPACKError

from sdcpd.transport.h2_fields import fields_of, request_of, response_of
from sdcpd.transport.hpack_static import NotPlain, list_bytes, read_plain
from sdcpd.transport.http import RequestHeaders, ResponseHeaders
from sdcpd.transport.limits import BLOCK_KEPT_LIST_BYTES_MAX, BLOCKS_KEPT_MAX


@dataclass(frozen=True, slots=True)
class Block:
    """What a header block says; the event is of stream 0."""

    event: RequestHeaders | ResponseHeaders
    announced: int | None

    def fits(self, bytes_max: int, *, end: bool) -> bool:
        """Whether the body is announced and small, or there is none."""
        if end:
            return not self.announced
        return self.announced is not None and self.announced <= bytes_max


class BlockReader:
    """Reads the blocks of one direction, while their table is empty, and checks them as h2 does."""

    def __init__(self, decoder: Decoder, *, client: bool, header_list_bytes_max: int) -> None:
        self._decoder = decoder
        self._client, self._list_bytes_max = client, header_list_bytes_max
        self._validation = HeaderValidationFlags(
            is_client=client, is_trailer=False, is_response_header=client, is_push_promise=False
        )
        self._kept: dict[bytes, Block] = {}

    def read(self, raw: bytes) -> Block | None:
        """What a block says if it is one that h2 would take; None leaves it to h2."""
        kept = self._kept.get(raw)
        if kept is not None:
            return kept
        try:
            fields = list(validate_headers(self._fields(raw), self._validation))
            announced = _announced(fields)
        except (NotPlain, ProtocolError):
            return None  # h2 reads it again, and says what is wrong with it
        event = self._event(fields)
        if event is None:
            return None
        block = Block(event, announced)
        if list_bytes(fields) <= BLOCK_KEPT_LIST_BYTES_MAX:
            if len(self._kept) >= BLOCKS_KEPT_MAX:
                self._kept.clear()
            self._kept[raw] = block
        return block

    def _fields(self, raw: bytes) -> Iterable[tuple[bytes, bytes]]:
        if raw[:1] and raw[0] & 0xE0 == 0x20:
            raise NotPlain("a size update")
        try:
            return read_plain(raw, list_bytes_max=self._list_bytes_max)
        except NotPlain:
            pass
        try:
            return self._decoder.decode(raw, raw=True)
        except (HPACKError, IndexError, TypeError) as error:  # as h2 takes it
            raise NotPlain(str(error)) from error

    def _event(
        self, fields: Iterable[tuple[bytes, bytes]]
    ) -> RequestHeaders | ResponseHeaders | None:
        pseudo, headers = fields_of(fields)
        if not self._client:
            return request_of(0, pseudo, headers)
        answer = response_of(0, pseudo, headers)
        return answer if answer.status >= 200 else None


def _announced(fields: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length of the body; NotPlain where h2 must say what is wrong with it."""
    values = [value for name, value in fields if name == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > 18:
        raise NotPlain("an unusual length")
    return int(values[0])
