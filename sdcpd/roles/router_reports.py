"""What instances report to a router, and which have gone (sections 6.1 and 6.5; D-R1, D-V1)."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from sdcpd.protocol.codec import decode
from sdcpd.protocol.instances import Board
from sdcpd.protocol.messages import Event, InstanceRole, Status
from sdcpd.protocol.problems import Forbidden, Malformed, NotFound, StaleEpoch, WrongRole
from sdcpd.protocol.router_io import (
    DrafterLost,
    EventArrived,
    VerifierAppeared,
    VerifierLost,
    Woken,
)
from sdcpd.roles.base import Call, Route, message_response
from sdcpd.roles.peers import Identity
from sdcpd.roles.router_session import RoutedSession
from sdcpd.transport.http import Response

log = logging.getLogger("sdcpd.router")


class Reports:
    """Takes statuses and events in, and tells sessions of whoever has come or gone."""

    def __init__(
        self,
        board: Board,
        sessions: Mapping[bytes, RoutedSession],
        ended: Mapping[bytes, RoutedSession],
        counts: Counter[str],
        may_verify: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`sessions` and `ended` are the router's own, which change.

        `may_verify` tells by its base URI whether the operator wants a verifier.
        """
        self._may_verify = may_verify
        self._board, self._open, self._ended, self._counts = board, sessions, ended, counts
        self.alive: dict[tuple[str, int], bool] = {}
        """Whether an instance's last status had not expired when that was looked at."""

    def routes(self) -> list[Route]:
        """The resources that instances report to."""
        return [
            Route("PUT", "instances/{name}/status", self._status, ("drafter", "verifier")),
            Route("POST", "events", self._event, ("verifier",)),
        ]

    async def _status(self, call: Call) -> Response:
        status = decode(Status, call.request.body)
        if status.instance != call.name:
            raise Malformed("the path names another instance than the status")
        base = self._base(call.identity, status)
        now = time.monotonic()
        role = InstanceRole(status.role)
        if role is InstanceRole.VERIFIER and not self._may_verify(base):
            raise Forbidden(f"verifier {base} is none of those that this router's file names")
        appeared = self._board.status(base, role) is None
        restarted = self._board.report(base, status, now=now)
        gone = not self._board.fresh(base, role, now=now)
        # One that is stuck withdraws again and again: what was lost with it is lost once.
        left = gone and self.alive.get((base, role)) is not False
        if restarted or left:
            self._lost(base, role, "it has restarted" if restarted else "it has withdrawn")
        if appeared and role is InstanceRole.VERIFIER:
            for one in list(self._open.values()):
                one.step(VerifierAppeared(base))
        for session in status.dropped or ():
            if (routed := self._open.get(session)) is not None:
                routed.step(DrafterLost(base))
        if not self.alive.get((base, role)) and not gone:
            log.info("%s %s (%s) is here", role.name.lower(), status.instance, base)
        self.alive[(base, role)] = not gone
        self._wake_waiting()
        return message_response(None)

    def _base(self, identity: Identity, status: Status) -> str:
        """The base URI that a status belongs to, fixed by the certificate (D-R2)."""
        if InstanceRole(status.role).name.lower() not in identity.roles:
            raise WrongRole(f"{identity.name} has not the role that its status reports")
        if not identity.bases:
            raise Forbidden(f"the certificate of {identity.name} names no base URI")
        return identity.bases[0]

    async def _event(self, call: Call) -> Response:
        event = decode(Event, call.request.body)
        routed = self._open.get(event.session) or self._ended.get(event.session)
        if routed is None:
            raise NotFound("no such session")
        if event.epoch < routed.machine.epoch:
            raise StaleEpoch(f"the session's epoch is {routed.machine.epoch}")
        if not call.identity.is_instance(routed.machine.verifier):
            raise Forbidden("another verifier serves the session")
        self._counts[f"event_{event.kind.name.lower()}"] += 1
        routed.step(EventArrived(event.kind, event.committed))
        return message_response(None)

    def watch(self) -> None:
        """Notice whose status has expired."""
        now = time.monotonic()
        for (base, role), alive in list(self.alive.items()):
            if alive and not self._board.fresh(base, InstanceRole(role), now=now):
                self.alive[(base, role)] = False
                log.warning(
                    "%s %s: no status within its ttl", InstanceRole(role).name.lower(), base
                )
                self._lost(base, InstanceRole(role), "its status has expired")

    def _lost(self, base: str, role: InstanceRole, reason: str) -> None:
        for routed in list(self._open.values()):
            if role is InstanceRole.DRAFTER:
                routed.step(DrafterLost(base))
            else:
                routed.step(VerifierLost(base, reason))

    def _wake_waiting(self) -> None:
        """Sessions wait by the thousand where there is no drafter, and each report comes here."""
        if not self._board.has_drafter(now=time.monotonic()):
            return
        for routed in list(self._open.values()):
            if routed.waiting_for_drafter:
                routed.step(Woken())
