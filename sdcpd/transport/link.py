"""What carries HTTP between two hosts: TLS over TCP or QUIC over UDP, alike to what is above."""

from __future__ import annotations

from typing import Protocol

from sdcpd.transport.http import Address, HttpConnection, Outgoing, Peer
from sdcpd.transport.limits import H2Limits


class Link(Protocol):
    """One connection to one peer, either side."""

    paused: bool
    """Whether what is written waits already."""
    address: str

    @property
    def is_open(self) -> bool:
        """Whether octets can be sent."""
        ...

    @property
    def had_socket(self) -> bool:
        """Whether there ever was a connection, and so `link_gone` comes or came."""
        ...

    @property
    def presented_leaf(self) -> bytes | None:
        """The leaf that the peer presented, verified or not; for messages only."""
        ...

    @property
    def alternative(self) -> bool:
        """Whether an answer may name another transport to the same server (Alt-Svc)."""
        ...

    def peer(self) -> Peer:
        """Who is at the other end; only once the link is open."""
        ...

    def codec(self, *, client: bool, now: float, limits: H2Limits | None) -> HttpConnection:
        """The HTTP that is spoken over it; only once the link is open."""
        ...

    def send(self, outgoing: Outgoing) -> None:
        """Send what a codec queued; dropped when the connection is no longer open."""
        ...

    def flushed(self) -> None:
        """All that was queued has been sent: a time to look at timers."""
        ...

    def close(self, error: Exception | None = None) -> None:
        """Say goodbye, send what is buffered, and end."""
        ...

    def abort(self) -> None:
        """Drop the connection at once."""
        ...


class LinkUser(Protocol):
    """What a link tells the code above it."""

    def link_open(self, link: Link) -> None:
        """The peer's certificate is verified."""
        ...

    def link_data(self, data: memoryview, address: Address | None = None) -> None:
        """Octets for the codec; the view is valid during this call only."""
        ...

    def link_flooded(self, what: str) -> None:
        """The peer sends too much of what carries nothing; say goodbye."""
        ...

    def link_resumed(self) -> None:
        """The write buffer drained below its mark."""
        ...

    def link_lost(self, error: Exception | None) -> None:
        """No more octets will come; called once, with the reason if there is one."""
        ...

    def link_gone(self, link: Link) -> None:
        """The socket is closed; the last call."""
        ...
