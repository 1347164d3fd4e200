"""The processes of a cluster under attack: started, killed, frozen, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdcpd.admin_client import AdminRefused, AdminUnreachable, ask

START_S = 60.0
LOOK_S = 0.5  # how often a process that starts is looked at: those that have died say nothing
STOP_S = 15.0


class Process:
    """One instance's process over all its lives; what each says goes on in one log."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        directory: Path,
        config: Path,
        program: Sequence[str] = ("sdcpd",),
    ) -> None:
        """`program`: the module to run, and what stands before sdcpd's own arguments."""
        self.name, self.role, self.config = name, role, config
        self._program = tuple(program)
        self.log_path = directory / f"{name}.log"
        self.socket_path = directory / f"{role}-{name}.sock"
        self._notify_path = directory / f"{name}.notify"
        self.lives = 0
        self.is_down = False
        """From its death until it is ready again."""
        self._process: subprocess.Popen[bytes] | None = None
        self._notify: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that runs, frozen or not."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start it, without waiting for anything."""
        assert self.pid is None, f"{self.name} runs already"
        self._close_notify()
        self._notify_path.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(self._notify_path))
        self._notify.setblocking(False)
        environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
        command = [sys.executable, "-m", *self._program, "--role", f"{self.role}-{self.name}"]
        self.lives += 1
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-c", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"NOTIFY_SOCKET": str(self._notify_path)},
            )

    async def ready(self) -> None:
        """Wait until it says that it is ready; raises RuntimeError if it ends before."""
        assert self._notify is not None, "it was started"
        loop, said = asyncio.get_running_loop(), asyncio.Event()
        # A receive that is cancelled could have taken what was said with it.
        loop.add_reader(self._notify, said.set)
        try:
            async with asyncio.timeout(START_S):
                while not self._is_ready():
                    said.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(said.wait(), LOOK_S)
                    if self.pid is None:
                        raise RuntimeError(f"{self.name} did not start:\n{self.log}")
        except TimeoutError as e:
            raise RuntimeError(f"{self.name} is not ready after {START_S:.0f} s") from e
        finally:
            loop.remove_reader(self._notify)

    def _is_ready(self) -> bool:
        """Whether it has said so by now."""
        assert self._notify is not None, "it was started"
        while True:
            try:
                if b"READY=1" in self._notify.recv(4096).splitlines():
                    return True
            except BlockingIOError:
                return False

    def kill(self) -> None:
        """SIGKILL: it has no say in it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if (pid := self.pid) is not None:
            os.kill(pid, number)

    async def stop(self) -> int | None:
        """SIGTERM, and its exit code; None if it had to be killed."""
        process = self._process
        if process is None:
            return 0
        self.thaw()
        self._signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        self._close_notify()
        return code

    def _close_notify(self) -> None:
        if self._notify is not None:
            self._notify.close()

    @property
    def log(self) -> str:
        """All that it has said."""
        return self.log_path.read_text(errors="replace")

    @property
    def last_words(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.splitlines()[-5:])

    async def ask(
        self,
        method: str,
        resource: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Any:
        """Ask its admin socket; None where it does not answer."""
        try:
            return await asyncio.to_thread(
                ask, self.socket_path, method, resource, body, timeout_s=timeout_s
            )
        except (AdminRefused, AdminUnreachable):
            return None
