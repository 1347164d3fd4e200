"""Which instances are alive, and who gets the next session (D-R1, D-R6)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sdcpd.protocol.messages import Contract, InstanceRole, Rule, Status
from sdcpd.protocol.problems import Forbidden
from sdcpd.protocol.uris import normalize_base_uri

NAMES_MAX = 16  # process names remembered of one base URI
SESSION_LOAD = 2
"""Percent of load that a session given since the last report counts as: bursts spread."""


@dataclass(frozen=True, slots=True)
class Permitted:
    """What the operator says of an instance: its model's digest and whether rule 2 may trust it."""

    model: bytes | None = None
    trusted: bool = False


@dataclass(slots=True)
class Instance:
    """The latest status of one base URI."""

    base: str
    status: Status
    expires: float
    names: dict[str, float] = field(default_factory=dict)
    """Names that report for this base and role, and when each expires (D-R2)."""
    assigned_since: int = 0
    sessions: int = 0


class Board:
    """All instances that have reported, by base URI; time is monotonic seconds."""

    def __init__(self, permitted: Mapping[str, Permitted], *, trust_all: bool = False) -> None:
        # The operator's spelling need not be that of the certificates (D-H5).
        self._permitted = {normalize_base_uri(base): said for base, said in permitted.items()}
        self._trust_all = trust_all
        self._instances: dict[tuple[str, int], Instance] = {}
        self._drained: set[tuple[str, int]] = set()

    def drain(self, base: str, role: InstanceRole, *, on: bool) -> None:
        """Give an instance no sessions any more, or again; a restart of it changes nothing."""
        (self._drained.add if on else self._drained.discard)((base, role))

    def drained(self, base: str, role: int) -> bool:
        """Whether an instance gets no sessions because somebody wants it so."""
        return (base, role) in self._drained

    def report(self, base: str, status: Status, *, now: float) -> bool:
        """Take a status; True if it is a new process under the same identity (D-R2).

        Raises Forbidden if the name belongs to another base URI.
        """
        for (other, _), known in self._instances.items():
            if other != base and known.names.get(status.instance, 0.0) > now:
                raise Forbidden(f"instance name {status.instance} belongs to another identity")
        key = (base, status.role)
        expires = now + status.ttl_ms / 1000
        mine = self._instances.get(key)
        if mine is None:
            self._instances[key] = Instance(base, status, expires, {status.instance: expires})
            return False
        restarted = status.instance not in mine.names
        if restarted and not status.ttl_ms:
            return False  # one that was never seen withdraws: whoever is here stays
        if restarted:
            mine.names = dict.fromkeys(mine.names, 0.0)  # replaced, unless they report again
        mine.names.pop(status.instance, None)
        mine.names[status.instance] = expires
        while len(mine.names) > NAMES_MAX:
            del mine.names[next(iter(mine.names))]
        mine.expires = max(mine.names.values())
        if status.ttl_ms or mine.expires <= now:
            mine.status, mine.assigned_since = status, 0
        return restarted

    def fresh(self, base: str, role: InstanceRole, *, now: float) -> bool:
        """Whether an instance's status has not expired; counted from receipt (D-R1)."""
        known = self._instances.get((base, role))
        return known is not None and now < known.expires

    def status(self, base: str, role: InstanceRole) -> Status | None:
        """The last status of an instance, expired or not."""
        known = self._instances.get((base, role))
        return known.status if known else None

    def all(self) -> list[Instance]:
        """Every instance that ever reported."""
        return list(self._instances.values())

    def drafters(self, contract: Contract, *, now: float) -> list[Instance]:
        """Fresh drafters that the contract and the operator permit, best first (D-R6)."""
        found = [
            instance
            for (base, role), instance in self._instances.items()
            if role == InstanceRole.DRAFTER
            and self._serves(base, instance, now)
            and self._allows(base, instance.status, contract)
        ]
        return sorted(found, key=_preference)

    def has_drafter(self, *, now: float) -> bool:
        """Whether any drafter at all is fresh and ready."""
        return any(
            role == InstanceRole.DRAFTER and self._serves(base, one, now)
            for (base, role), one in self._instances.items()
        )

    def choose_drafter(
        self, contract: Contract, *, now: float, exclude: Collection[str] = ()
    ) -> str | None:
        """The drafter for a session, None if there is none."""
        for instance in self.drafters(contract, now=now):
            if instance.base not in exclude:
                return instance.base
        return None

    def choose_verifier(
        self, *, now: float, exclude: Collection[str] = (), target: bytes | None = None
    ) -> str | None:
        """The least loaded fresh verifier; an excluded one only if there is no other.

        `target` is the model it must serve; one whose model nobody has told may be any.
        """
        fresh = [
            instance
            for (base, role), instance in self._instances.items()
            if role == InstanceRole.VERIFIER
            and self._serves(base, instance, now)
            and target in (None, self._model(base, instance.status) or target)
        ]
        fresh.sort(key=lambda i: (i.base in exclude, *_preference(i)))
        return fresh[0].base if fresh else None

    def _serves(self, base: str, one: Instance, now: float) -> bool:
        """Whether an instance may be given sessions, as far as it and the operator say."""
        ready = now < one.expires and one.status.ready is not False
        return ready and not self.drained(base, one.status.role)

    def assigned(self, base: str, role: InstanceRole, change: int) -> None:
        """Count a session given to an instance (+1), or taken from it (-1)."""
        known = self._instances.get((base, role))
        if known is not None:
            known.sessions = max(0, known.sessions + change)
            known.assigned_since = max(0, known.assigned_since + change)

    def given(self, base: str, role: InstanceRole) -> None:
        """Count work that is no session; the instance's next report has it in its load."""
        known = self._instances.get((base, role))
        if known is not None:
            known.assigned_since += 1

    def _model(self, base: str, status: Status) -> bytes | None:
        return self._said(base).model or status.model

    def _said(self, base: str) -> Permitted:
        return self._permitted.get(normalize_base_uri(base), Permitted())

    def _allows(self, base: str, status: Status, contract: Contract) -> bool:
        permitted = self._said(base)
        model = self._model(base, status)
        if contract.drafters is not None and model not in contract.drafters:
            return False
        if contract.rule == Rule.SPECULATIVE_SAMPLING:
            return permitted.trusted or self._trust_all
        if contract.rule == Rule.RACE:
            return status.rules is not None and Rule.RACE in status.rules
        return True


def _preference(instance: Instance) -> tuple[int, int, int, int, str]:
    status = instance.status
    load = min(100, status.load + SESSION_LOAD * instance.assigned_since)
    return (load, status.queue, -(status.accept_milli or 0), instance.sessions, status.instance)
