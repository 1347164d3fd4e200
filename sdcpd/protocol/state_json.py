"""The JSON form of session-state, which problem documents carry (D-H10).

RFC 9457 documents are JSON and session-state is CBOR with octet strings; written as base64url
without padding, read in any of the forms that another make may have chosen.
"""

import binascii
from base64 import b64decode, urlsafe_b64encode

from sdcpd.protocol.limits import DIGEST_BYTES, SESSION_ID_BYTES, UINT_MAX
from sdcpd.protocol.messages import SessionState, State


def state_to_json(state: SessionState) -> dict[str, object]:
    """Return the members of a session-state as JSON values."""
    members: dict[str, object] = {
        "session": _base64url(state.session),
        "epoch": state.epoch,
        "round": state.round,
        "committed": state.committed,
        "digest": _base64url(state.digest),
    }
    if state.state is not None:
        members["state"] = int(state.state)
    return members


def state_from_json(value: object) -> SessionState | None:
    """Read a session-state, or return None if a member is missing or cannot be read."""
    if not isinstance(value, dict):
        return None
    session = _octets(value.get("session"), SESSION_ID_BYTES)
    digest = _octets(value.get("digest"), DIGEST_BYTES)
    epoch, round_, committed = (json_uint(value.get(k)) for k in ("epoch", "round", "committed"))
    state = json_uint(value.get("state"))
    if session is None or digest is None or epoch is None or round_ is None or committed is None:
        return None
    return SessionState(
        session=session,
        epoch=epoch,
        round=round_,
        committed=committed,
        digest=digest,
        state=None if state is None else State.received(state),
    )


def json_uint(value: object) -> int | None:
    """Read a number that a CBOR uint could hold, else None."""
    # JSON has one kind of number, so a peer may write 5.0 or 5e0 for 5.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= UINT_MAX else None


def _base64url(octets: bytes) -> str:
    return urlsafe_b64encode(octets).rstrip(b"=").decode("ascii")


def _octets(value: object, size: int) -> bytes | None:
    """Read base64url, padded or standard base64, or hexadecimal, told apart by length."""
    if not isinstance(value, str) or not value.isascii():
        return None
    try:
        if len(value) == 2 * size:
            octets = bytes.fromhex(value)
        else:
            digits = value.rstrip("=").translate(str.maketrans("-_", "+/"))
            octets = b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except (ValueError, binascii.Error):
        return None
    return octets if len(octets) == size else None
