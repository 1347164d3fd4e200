"""The processes of `sdcpd dev`: started in order, watched, and gone when it ends."""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask, dev_state_path
from sdcpd.dev.plan import SOCKET_PATH_MAX, TRUST_DOMAIN, DevOptions, Planned, make_plan

START_S = 600.0  # loading and compiling a large model takes minutes
STOP_S = 5.0
_PR_SET_PDEATHSIG = 1


class DevError(Exception):
    """The cluster could not be started; `status` is the exit code."""

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Process:
    """One instance's process and what it says of itself through sd_notify."""

    def __init__(self, plan: Planned, sockets: Path) -> None:
        self.plan = plan
        self.ready_s: float | None = None
        self.phases: list[str] = []
        self._begin = time.monotonic()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = sockets / f"{plan.role}.{plan.name}.notify"
        self._notify.bind(str(path))
        self._notify.setblocking(False)
        environment = {**os.environ, "NOTIFY_SOCKET": str(path), "OMP_WAIT_POLICY": "PASSIVE"}
        environment.pop("JOURNAL_STREAM", None)
        command = [sys.executable, "-m", "sdcpd", "--role", f"{plan.role}-{plan.name}"]
        with plan.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "-c", str(plan.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches us alone, and we stop them in order
                preexec_fn=_die_with_parent,
            )

    def fileno(self) -> int:
        """For select: readable when the process says something."""
        return self._notify.fileno()

    def read(self) -> None:
        """Take in what the process has said."""
        while True:
            try:
                message = self._notify.recv(4096).decode()
            except BlockingIOError:
                return
            for line in message.splitlines():
                if line == "READY=1":
                    self.ready_s = time.monotonic() - self._begin
                elif line.startswith("STATUS="):
                    self.phases.append(line.removeprefix("STATUS="))

    def failure(self) -> str:
        """Its last words, without the time."""
        lines = [line for line in self.plan.log.read_text(errors="replace").splitlines() if line]
        last = lines[-1] if lines else "it said nothing"
        return last.split(" E sdcpd: ", 1)[-1]

    def stop(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def finish(self, deadline: float) -> None:
        """Wait for its end, by force after the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._notify.close()


def _die_with_parent() -> None:
    """A killed `sdcpd dev` takes its instances with it (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class DevCluster:
    """A context: the directory and all processes exist inside it."""

    def __init__(self, options: DevOptions) -> None:
        self.options = options
        self.processes: list[Process] = []
        self.certs_s = 0.0
        self.is_ready = False
        self._own_directory = options.keep is None
        self.directory = self._make_directory()
        self._sockets = self.directory / "run"
        if len(str(self._sockets / "verifier.v00.notify")) > SOCKET_PATH_MAX:
            self._sockets = Path(tempfile.mkdtemp(prefix="sdcpd-"))
        self._sockets.mkdir(exist_ok=True)

    def _make_directory(self) -> Path:
        keep = self.options.keep
        if keep is None:
            return Path(tempfile.mkdtemp(prefix="sdcpd-dev-"))
        keep = keep.resolve()
        try:
            keep.mkdir(parents=True, exist_ok=True)
            empty = not any(keep.iterdir())
        except OSError as e:
            raise DevError(f"--keep {keep}: {e.strerror}; name a new directory", status=2) from e
        if not empty:
            raise DevError(f"--keep {keep}: the directory is not empty; name a new one", status=2)
        return keep

    def __enter__(self) -> DevCluster:
        try:
            begin = time.monotonic()
            self.plans = make_plan(self.options, self.directory, self._sockets)
            self.certs_s = time.monotonic() - begin
            for plan in self.plans:
                self.processes.append(Process(plan, self._sockets))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        # The router last: the others tell it that they go.
        for process in self.processes[1:]:
            process.stop()
        deadline = time.monotonic() + STOP_S
        for process in self.processes[1:]:
            process.finish(deadline)
        for process in self.processes[:1]:
            process.stop()
            process.finish(time.monotonic() + STOP_S)
        link = dev_state_path()
        if link is not None and link.is_symlink() and link.readlink().parent == self.directory:
            link.unlink()
            with suppress(OSError):  # others may keep something there
                link.parent.rmdir()
        shutil.rmtree(self._sockets, ignore_errors=True)
        if self._own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def router(self) -> Planned:
        """The router's plan."""
        return self.plans[0]

    def wait_ready(self) -> None:
        """Wait until every process is ready and known to the router; raises DevError."""
        deadline = time.monotonic() + START_S
        while any(process.ready_s is None for process in self.processes):
            readable, _, _ = select.select(self.processes, [], [], 0.2)
            for process in readable:
                process.read()
            self.check_alive()
            if time.monotonic() > deadline:
                late = [p.plan.label for p in self.processes if p.ready_s is None]
                raise DevError(f"{', '.join(late)}: not ready after {START_S:.0f} s")
        self._wait_known(deadline)
        self.is_ready = True

    def _wait_known(self, deadline: float) -> None:
        wanted = {plan.base_uri for plan in self.plans[1:]}
        while True:
            status = self.ask("GET", "/status")
            known = {i["base_uri"] for i in status["instances"] if i["state"] == "ready"}
            if known >= wanted:
                return
            self.check_alive()
            if time.monotonic() > deadline:
                raise DevError("some instances do not reach the router; see the logs with --keep")
            select.select([], [], [], 0.05)

    def check_alive(self) -> None:
        """Raise DevError if a process has ended, with its own words and exit code."""
        for process in self.processes:
            code = process.process.poll()
            if code is not None:
                raise DevError(process.failure(), status=code if code > 0 else 1)

    def ask(
        self,
        method: str,
        resource: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = 10,
    ) -> dict[str, Any]:
        """Ask the router's admin socket; raises DevError."""
        try:
            return ask(self.router.admin, method, resource, body, timeout_s=timeout_s)
        except (AdminUnreachable, AdminRefused) as e:
            raise DevError(str(e)) from e

    def write_state(self, *, announce: bool = True) -> Path:
        """Write `dev.json`; `announce`: point to it from where `sdcpctl` looks."""
        port = self.options.port
        state = {
            "api": None if port is None else f"http://127.0.0.1:{port}/v1",
            "ca": str(self.directory / "pki" / "ca.crt"),
            "trust_domain": TRUST_DOMAIN,
            "instances": [
                {
                    "role": p.plan.role,
                    "name": p.plan.name,
                    "base_uri": p.plan.base_uri,
                    "pid": p.process.pid,
                    "cert": str(p.plan.cert),
                    "key": str(p.plan.key),
                    "admin": str(p.plan.admin),
                    "metrics": f"http://127.0.0.1:{p.plan.metrics_port}/metrics",
                }
                for p in self.processes
            ],
        }
        path = self.directory / "dev.json"
        path.write_text(json.dumps(state, indent=1) + "\n")
        link = dev_state_path()
        if announce and link is not None:
            link.parent.mkdir(mode=0o700, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        return path
