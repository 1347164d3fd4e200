"""What a router must not forget about a session (D-F5), as it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from sdcpd.protocol import cbor
from sdcpd.protocol.codec import decode, encode, encode_item
from sdcpd.protocol.messages import Contract, Policy, Resume, Sampling, SessionOpen
from sdcpd.protocol.problems import Problem

FORMAT = "sdcp-router-session-1"


class RecordCorrupt(Exception):
    """A stored record can't be read; the text says why."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One open session: all that cannot be had again from its verifier or its log."""

    session: bytes
    contract: Contract
    prompt: tuple[int, ...]
    commit_log: str
    epoch: int
    verifier: str
    drafter: str | None
    drafter_wanted: bool
    profile: Sampling | None
    resume: Resume | None
    failing_over: bool = False
    """Whether `epoch` still has to be fenced and opened."""

    def encode(self) -> bytes:
        """One CBOR map; the draft's members travel in the draft's messages."""
        opened = SessionOpen(
            session=self.session,
            epoch=self.epoch,
            contract=self.contract,
            prompt=self.prompt,
            commit_log=self.commit_log,
            resume=self.resume,
        )
        members: dict[str, object] = {
            "format": FORMAT,
            "open": encode(opened),
            "verifier": self.verifier,
            "drafter_wanted": self.drafter_wanted,
            "failing_over": self.failing_over,
        }
        if self.drafter is not None:
            members["drafter"] = self.drafter
        if self.profile is not None:
            policy = Policy(session=self.session, from_round=1, sampling=self.profile)
            members["policy"] = encode(policy)
        return encode_item(members)


def decode_record(octets: bytes) -> SessionRecord:
    """Read a stored record; raises RecordCorrupt."""
    try:
        members = cbor.decode_one(octets)
        if not isinstance(members, dict) or members.get("format") != FORMAT:
            raise RecordCorrupt(f"it is not in the format {FORMAT}")
        opened = decode(SessionOpen, members["open"])
        policy = decode(Policy, members["policy"]) if "policy" in members else None
        if isinstance(opened.prompt, str):
            raise RecordCorrupt("its prompt is a reference")
        return SessionRecord(
            session=opened.session,
            contract=opened.contract,
            prompt=opened.prompt,
            commit_log=opened.commit_log,
            epoch=opened.epoch,
            verifier=str(members["verifier"]),
            drafter=members.get("drafter"),
            drafter_wanted=bool(members["drafter_wanted"]),
            profile=policy.sampling if policy else None,
            resume=opened.resume,
            failing_over=bool(members["failing_over"]),
        )
    except (cbor.NotWellFormed, Problem, KeyError) as error:
        raise RecordCorrupt(str(error)) from error
