"""A UNIX socket between two processes of one user: packets of messages, and descriptors with them.

Packets (SOCK_SEQPACKET) keep their bounds, so there is nothing to reassemble. Whatever is wrong
ends the link, which tells its owner once.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence

from sdcpd.transport.local_messages import MESSAGE_BYTES_MAX, BadMessage, Message, decode, encode

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_CUT_SHORT = socket.MSG_TRUNC | socket.MSG_CTRUNC


def new_socket() -> socket.socket:
    """A socket of the kind that is used here, which never blocks."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def is_own_user(other: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user, as the kernel says."""
    _, uid, _ = _CREDENTIALS.unpack(
        other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(uid == os.geteuid())


class LocalLink:
    """One connected socket; `received` gets each message, and owns the descriptor with it."""

    def __init__(
        self,
        connected: socket.socket,
        *,
        received: Callable[[Message, int | None], None],
        lost: Callable[[str], None],
    ) -> None:
        """Take the socket over; `lost` is called once, with why, unless `close` was."""
        self._socket = connected
        self._received = received
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connected.fileno(), self._read)
        self.is_open = True

    def send(self, message: Message, *, descriptors: Sequence[int] = ()) -> None:
        """Send a message; one that cannot be sent at once ends the link."""
        if not self.is_open:
            return
        try:
            packet = encode(message)
            if descriptors:
                socket.send_fds(self._socket, [packet], list(descriptors))
            else:
                self._socket.send(packet)
        except (OSError, BadMessage) as error:
            # They take turns, so that a queue is never full with one that keeps to it.
            self._end(f"a message could not be sent: {error}")

    def close(self) -> None:
        """Close; nobody is told."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _end(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._lost(reason)

    def _read(self) -> None:
        # One packet a turn of the loop, so that a link that floods holds nobody else up.
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                self._socket, MESSAGE_BYTES_MAX + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error))
            return
        descriptor = descriptors[0] if descriptors else None
        try:
            if not packet:
                raise BadMessage("the other side is gone")
            if flags & _CUT_SHORT or len(packet) > MESSAGE_BYTES_MAX:
                raise BadMessage("a message was longer than one may be")
            message = decode(packet)
        except BadMessage as error:
            if descriptor is not None:
                os.close(descriptor)
            self._end(str(error))
            return
        self._received(message, descriptor)
