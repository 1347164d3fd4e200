"""Every bound of the transport, with its reason: what one peer can cost, and no more.

A role's own bounds (bodies by resource, rounds a second) are in `protocol/limits.py` and
`roles/rates.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

# ---- connections

LISTEN_BACKLOG = 256
# Handshakes cost milliseconds, so more than this at once is a flood: the oldest are dropped.
PENDING_HANDSHAKES_MAX = 128
# Of a client to one server, as more requests are in flight than streams go into one: each session
# of a router (at most 1024) holds a stream while its verifier has nothing to tell.
CONNECTIONS_PER_SERVER_MAX = 12
# Of one certificate: a peer has two sets of them while it changes its certificate. Each holds
# windows and buffers, and the limits below are of one connection.
CONNECTIONS_PER_PEER_MAX = 2 * CONNECTIONS_PER_SERVER_MAX
# How long a closed connection waits for the peer's end, so that no RST overtakes our last words.
LINGER_S = 2.0
# Of those that were not let in. Each holds a socket, and who opens them needs no certificate.
LINGERING_MAX = 128
# How long a stop waits for handlers that were cancelled.
ABORT_WAIT_S = 2.0
# A flood of refused connections must not fill the disk with log: a line a second, and the number.
REFUSAL_LINES_BURST = 30
REFUSAL_LINES_PER_S = 1.0
# Datagrams of connections that nobody knows: after a restart each client sends a few, while from
# a made-up address they would make us send to it, if never more than we got.
STATELESS_RESETS_BURST = 200
STATELESS_RESETS_PER_S = 50.0
# After the second failure to connect in a row. The longest pause is what a server that is back may
# go unnoticed; where certificates are wrong it takes a person, and each try costs a handshake.
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
BACKOFF_REFUSED_MAX_S = 5.0
BACKOFF_KEPT_MAX = 1024

# ---- memory of one connection

# Unfinished bodies, in and out; above it, new requests are refused.
BUFFERED_BYTES_MAX = 256 << 20
# What waits in the socket; more makes a small answer wait behind bulk (measured).
WRITE_HIGH_WATER_BYTES = 64 << 10
# Bodies stop at the high-water mark. Only replies that the peer provokes (PING, SETTINGS) get
# beyond it, so a backlog of this size means a peer that provokes and does not read.
REPLY_BACKLOG_BYTES = 1 << 20
# Bodies up to this size go out first and whole.
SMALL_BYTES_MAX = 16 << 10
# Bodies up to this size, announced, go the short way through HTTP/2 (h2_fast.py).
FAST_BODY_BYTES_MAX = 64 << 10
# What header blocks of one connection said is kept, since the same ones come again and again; as
# objects they take a few times their size.
BLOCKS_KEPT_MAX = 128
BLOCK_KEPT_LIST_BYTES_MAX = 1 << 10
# TLS records that carry nothing (key updates, records of an octet) cost us and not the peer; an
# octet that is worth reading pays for a few. Records may be padded, so that what is left is charged
# to a bucket that lets a good deal pass.
SILENT_TLS_BYTES_BURST = 1 << 20
SILENT_TLS_BYTES_PER_S = 512 << 10
SILENT_TLS_BYTES_PER_OCTET = 4
# After so long in one turn a connection waits for the others' turns before it is read again: the
# loop reads a socket many times in a row. What costs that much then comes in small pieces.
READ_TURN_S = 0.001
SLOW_PIECE_BYTES = 16 << 10
# Timers go by milliseconds: what QUIC's pacing allows in two of them must be allowed at once.
PACE_TICK_S = 0.002
# What one turn of the event loop may encrypt and write, so that other connections get theirs.
SMALL_TURN_BYTES = 256 << 10
BULK_TURN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server takes on, over all its connections or for each."""

    connections_per_peer: int = CONNECTIONS_PER_PEER_MAX
    handshakes: int = PENDING_HANDSHAKES_MAX
    buffered_bytes: int = BUFFERED_BYTES_MAX


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """How slow a body may be; no trickle of window updates or octets can stretch it."""

    grace_s: float = 30.0
    bytes_per_s_min: float = 64 << 10

    def too_slow(self, *, started: float, moved_bytes: int, now: float) -> bool:
        """Whether a body that moved so many octets since `started` is below the pace."""
        return now > started + self.grace_s + moved_bytes / self.bytes_per_s_min


@dataclass(frozen=True, slots=True)
class H2Limits:
    """Bounds of one HTTP/2 connection; the defaults are the measured ones."""

    # h2 scans all open streams at each new one, so many streams cost more than they give.
    streams_max: int = 100
    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 4 << 20
    # 64 KiB is the knee: smaller costs throughput, larger is buffered whole before any event.
    frame_bytes_max: int = 64 << 10
    header_list_bytes_max: int = 16 << 10
    # Rapid reset and its server-side twin: both kinds of reset leak away at 20 a second.
    resets_burst: int = 200
    resets_per_s: float = 20.0
    # PING, SETTINGS, PRIORITY, unknown and empty DATA frames cost us work and them nothing.
    idle_frames_burst: int = 2000
    idle_frames_per_s: float = 200.0
    # DATA frames of an octet are legal and cost as much as large ones: each must be paid for by
    # so many octets of body, or by one of the first few of its message.
    octets_per_data_frame: int = 32
    data_frames_per_message: int = 4
    # Window updates are owed for what we send: two for each frame of the smallest size allowed
    # would be one in 8 KiB, and clients with small windows send more.
    octets_per_window_update: int = 2 << 10
    preface_timeout_s: float = 5.0
    # A host that was restarted says so when it is spoken to, one that is cut off never does. While
    # somebody waits for an answer, silence is asked about soon.
    ping_after_busy_s: float = 0.5
    ping_after_s: float = 10.0
    ping_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class H3Limits:
    """Bounds of one HTTP/3 connection, most of which aioquic leaves to its user."""

    streams_max: int = 100
    # aioquic doubles its windows as data arrives, in order or not, so that one octet far ahead
    # would make it allocate the gap before it. Ours move with what has arrived in order.
    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 4 << 20
    # aioquic buffers whatever it is given: no more than this waits for the peer's ACKs.
    send_buffer_bytes_max: int = 128 << 10
    # On a path shorter than this, so many datagrams in flight keep both ends busy; each costs its
    # receiver tens of microseconds, and a small message waits behind all of them.
    short_path_s: float = 0.004
    # The shortest of so long: the path may become another, and queues come and go.
    short_path_window_s: float = 5.0
    short_path_datagrams_max: int = 48
    frame_bytes_max: int = 16 << 10
    header_list_bytes_max: int = 16 << 10
    resets_burst: int = 200
    resets_per_s: float = 20.0
    # Frames cost microseconds each, and a packet holds a thousand of the shortest. A packet of
    # messages has fewer than one in 32 octets; what goes beyond that leaks away as in HTTP/2.
    frames_free: int = 16
    octets_per_frame: int = 32
    idle_frames_burst: int = 2000
    idle_frames_per_s: float = 200.0
    idle_timeout_s: float = 15.0
    # As for HTTP/2; UDP has nobody else who notices that a peer is gone.
    ping_after_busy_s: float = 0.5
    ping_after_s: float = 2.0
    ping_timeout_s: float = 3.0
    # Refused datagrams end a connection that has been silent for so long: the network may lie.
    refused_after_s: float = 0.5
