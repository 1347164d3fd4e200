"""Who is at the other end of a loopback connection, by what the kernel says (proc(5))."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TCP, UDP = Path("/proc/net/tcp"), Path("/proc/net/udp")


def owner_of(local: int, remote: int, pids: Mapping[str, int], *, table: Path) -> str | None:
    """Who of `pids` holds the socket from port `local` to port `remote`; None: nobody."""
    inode = _inode(local, remote, table)
    if inode is None:
        return None
    wanted = f"socket:[{inode}]"
    for name, pid in pids.items():
        if _holds(pid, wanted):
            return name
    return None


def _inode(local: int, remote: int, table: Path) -> str | None:
    """Of the socket between two ports; 0 stands where it belongs to nobody any more."""
    for line in table.read_text().splitlines()[1:]:
        _, here, there, *rest = line.split()
        if (_port(here), _port(there)) == (local, remote) and rest[6] != "0":
            return rest[6]
    return None


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _holds(pid: int, socket: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False  # it has died
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") == socket:
                return True
        except OSError:
            continue  # closed meanwhile
    return False
