"""What can go wrong with a call to etcd, by what its caller must do then."""

from __future__ import annotations

import grpc
import grpc.aio

_CODE = grpc.StatusCode


class EtcdError(Exception):
    """A call without the answer that was hoped for; the text is one sentence."""


class Lost(EtcdError):
    """No answer, or none that tells: what was asked for may have happened, or may happen yet."""


class NoSpace(EtcdError):
    """The database is full. Nothing more will happen, but what was asked for may have: the write
    that reaches the quota is done and refused at once."""


class Compacted(EtcdError):
    """The revision that was to be read is gone."""


class Refused(EtcdError):
    """Refused for a reason that time does not mend; nothing was done."""


class TokenRefused(Refused):
    """The login is not known, or no longer; another one may be."""


# What connecting can fail of, in the words of gRPC: what it means, and what to do.
_CONNECTING = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of the authority in [mlc.etcd] ca, or not for this name: correct"
        " ca, or name the endpoint as its certificate does",
    ),
    (
        "Hostname Verification",
        "its certificate is not for this name: name the endpoint as its certificate does",
    ),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: remove ca, cert and key from [mlc.etcd]"),
    (
        "Handshake read failed",
        "it breaks off the TLS handshake: check ca, cert and key in [mlc.etcd], or remove them if"
        " it does not speak TLS",
    ),
    (
        "Ssl handshake failed",
        "the TLS handshake fails: check ca, cert and key in [mlc.etcd] against etcd's",
    ),
    (
        "refused",
        "nobody listens there: start etcd, or correct [mlc.etcd] endpoints",
    ),
    (
        "errors resolving",
        "its name cannot be resolved: correct [mlc.etcd] endpoints",
    ),
    (
        # What is left of the alert that etcd sends under TLS 1.3.
        "TSI_DATA_CORRUPTED",
        "it refuses this client's certificate: set cert and key in [mlc.etcd] to a pair that its"
        " trusted authority has signed",
    ),
)
_CLOSED = ("Socket closed", "reset by peer", "Broken pipe", "GOAWAY", "end of file", "EOF")


def error_of(failure: grpc.aio.AioRpcError, address: str) -> EtcdError:
    """Translate an error of gRPC, once and here."""
    code, details = failure.code(), " ".join((failure.details() or "").split())
    if code is _CODE.RESOURCE_EXHAUSTED and "space exceeded" in details:
        return NoSpace(
            f"etcd at {address} has no space left (NOSPACE): compact and defragment it, raise its"
            " --quota-backend-bytes if need be, then run etcdctl alarm disarm"
        )
    if code is _CODE.OUT_OF_RANGE and "compacted" in details:
        return Compacted(f"etcd at {address} has compacted what was being read")
    if "invalid auth token" in details or "revision of auth store is old" in details:
        return TokenRefused(f"etcd at {address} does not know this login any more ({details})")
    if "authentication failed" in details:
        return Refused(
            f"etcd at {address} does not take the login ({details}): correct [mlc.etcd] user and"
            " password_file"
        )
    if "authentication is not enabled" in details:
        return Refused(
            f"etcd at {address} has no users ({details}): run etcdctl auth enable, or remove user"
            " and password_file from [mlc.etcd]"
        )
    if code in (_CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED) or "user name is empty" in details:
        return Refused(
            f"etcd at {address} does not permit this client what it needs ({details}): grant the"
            " user of [mlc.etcd] user or cert reads and writes below prefix"
        )
    if code is _CODE.UNIMPLEMENTED:
        return Refused(
            f"etcd at {address} does not know the calls of etcd 3 ({details}): name members of an"
            " etcd 3.4 or newer in [mlc.etcd] endpoints"
        )
    if code in (_CODE.INVALID_ARGUMENT, _CODE.FAILED_PRECONDITION):
        return Refused(
            f"etcd at {address} refuses the request ({details}): run it with its default"
            " --max-txn-ops and --max-request-bytes, or larger ones"
        )
    if code is _CODE.DEADLINE_EXCEEDED:
        return Lost(
            f"etcd at {address} does not answer in time: see whether a majority of its members"
            " runs, and [mlc.etcd] timeout"
        )
    return Lost(f"etcd at {address} does not answer: {_reason(details)}")


def _reason(details: str) -> str:
    for sign, words in _CONNECTING:
        if sign in details:
            return words
    if any(sign in details for sign in _CLOSED):
        return (
            "it closes the connection: see whether it runs, and whether [mlc.etcd] ca, cert and"
            " key are what it wants"
        )
    return f"{details or 'no reason given'}: see the state of its members"
