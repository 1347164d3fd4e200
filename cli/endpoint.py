"""Which admin socket to ask: the one named, else of `sdcpd dev`, else of the installed router."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from cli.errors import EXIT_UNREACHABLE, CtlError

RUN = Path("/run/sdcpd")


class Kept(str):
    """What a context says; a value that is wrong is told with its name."""

    context = ""

    @classmethod
    def of(cls, value: str, context: str) -> Kept:
        """A value of a context."""
        made = cls(value)
        made.context = context
        return made

    def wrong(self, key: str, why: str) -> str:
        """A sentence with what to do about it."""
        name = shlex.quote(self.context)
        return (
            f'context {self.context}: its {key} "{self}" {why}; keep another with: sdcpctl context'
            f" add {name}, or forget it: sdcpctl context remove {name}"
        )


class Endpoint(click.ParamType[Path]):
    """`unix:PATH`, or a path that is recognised as one."""

    name = "endpoint"

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """The path of the socket; a usage error for anything else."""
        if isinstance(value, Path):
            return value
        path = value.removeprefix("unix:")
        if (path != value and path) or value.startswith("/"):
            return Path("/" + path.lstrip("/")) if path.startswith("//") else Path(path)
        why = f"must look like unix:{RUN}/router/admin.sock"
        if isinstance(value, Kept):
            raise CtlError(value.wrong("endpoint", why))
        self.fail(f'"{value}" {why}', param, ctx)


def default_endpoint(run: Path = RUN) -> Path:
    """The socket to ask when none is named; raises CtlError when there is nothing to ask."""
    from sdcpd.admin_client import dev_state_path

    dev = dev_state_path()
    if dev is not None and (socket := _dev_router(dev)) is not None:
        return socket
    installed = run / "router" / "admin.sock"
    if installed.parent.is_dir():
        return installed
    tried = f"no running `sdcpd dev` is known here and {installed} does not exist"
    others = sorted(run.glob("*/admin.sock"))
    if others:
        raise CtlError(
            f"{tried}; on this host there is --endpoint unix:{others[0]}", status=EXIT_UNREACHABLE
        )
    raise CtlError(
        f"{tried}; use the line that sdcpd dev prints (with --endpoint), "
        "or: systemctl start sdcpd@router",
        status=EXIT_UNREACHABLE,
    )


def is_dev(socket: Path) -> bool:
    """Whether a socket is that of the router of the running `sdcpd dev`."""
    from sdcpd.admin_client import dev_state_path

    state = dev_state_path()
    return state is not None and _dev_router(state) == socket


def default_endpoints(run: Path = RUN) -> list[Path]:
    """All sockets to ask when none is named, whatever their role; of no cluster: none."""
    from sdcpd.admin_client import dev_state_path

    dev = dev_state_path()
    if dev is not None and _dev_router(dev) is not None:
        return [socket for _, socket in _dev_sockets(dev)]
    return sorted(run.glob("*/admin.sock"))


def _dev_router(state: Path) -> Path | None:
    """The router's socket in `dev.json`; None where there is no such cluster any more."""
    sockets = (socket for role, socket in _dev_sockets(state) if role == "router")
    socket = next(sockets, None)
    return socket if socket is not None and socket.exists() else None


def _dev_sockets(state: Path) -> list[tuple[str, Path]]:
    """Roles and sockets of the instances in `dev.json`; none where it can't be read."""
    try:
        instances = json.loads(state.read_text("utf-8"))["instances"]
        return [(str(one["role"]), Path(one["admin"])) for one in instances]
    except (OSError, ValueError, KeyError, TypeError):
        return []
