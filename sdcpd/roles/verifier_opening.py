"""From a session-open to a session machine: what the log, the cache and the model say (D-O*)."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from sdcpd.engine.api import EngineBusy, EngineError, Prefix, TargetEngine
from sdcpd.protocol.commit_log import LogSummary
from sdcpd.protocol.contract import contract_digest
from sdcpd.protocol.digest import extend, prefix_digest0
from sdcpd.protocol.messages import SessionOpen, SessionState
from sdcpd.protocol.problems import (
    BadContract,
    StaleBase,
    StaleEpoch,
    TooManyRequests,
    Unavailable,
    Unprocessable,
)
from sdcpd.protocol.verifier import VerifierSession
from sdcpd.protocol.verifier_state import VerifierSettings
from sdcpd.roles.commit_log import CommitLog, LogUnavailable
from sdcpd.roles.objects import Objects
from sdcpd.roles.prefix_kv import PrefixKv
from sdcpd.roles.target_kv import TargetKv
from sdcpd.transport.http import Client

log = logging.getLogger("sdcpd.verifier")


class Opener:
    """Opens sessions for one engine; `enforcing` as in CommitLog."""

    def __init__(
        self,
        engine: TargetEngine,
        *,
        client: Client,
        objects: Objects,
        target_kv: TargetKv,
        prefix_kv: PrefixKv,
        enforcing: bool,
        reused: Callable[[int], None],
    ) -> None:
        """`reused` is told how many tokens' KV an opening did not have to compute."""
        self._engine, self._client, self._objects = engine, client, objects
        self._target_kv, self._prefix_kv, self._enforcing = target_kv, prefix_kv, enforcing
        self._reused = reused

    def check_models(self, opened: SessionOpen) -> None:
        """Raise BadContract unless the contract is for the model served here (D-C5)."""
        info = self._engine.info
        if opened.contract.target != info.model:
            raise BadContract("the contract's target is not the model served here")
        if opened.contract.tokenizer != info.tokenizer:
            raise BadContract("the contract's tokenizer is not the one used here")

    async def open(
        self, opened: SessionOpen, *, settings: VerifierSettings
    ) -> tuple[VerifierSession, CommitLog]:
        """Read the log, check it against what was sent, load or compute the prefix's KV.

        Raises StaleEpoch, StaleBase, Unprocessable, or Unavailable for what can't be had now.
        """
        contract = opened.contract
        scope = contract.scope
        if not self._objects.trusted(opened.commit_log, None):
            raise Unprocessable("commit_log is not in a trusted cache")
        commit_log = CommitLog(self._client, opened.commit_log, enforcing=self._enforcing)
        prompt = await self._prompt(opened)
        try:
            summary = await commit_log.read()
        except LogUnavailable as e:
            raise Unavailable(str(e), retry_after_s=1) from e
        if opened.epoch < summary.highest_epoch:
            raise StaleEpoch(f"the log's epoch is {summary.highest_epoch}")
        committed = check_resume(opened, prompt, summary)
        if committed is None:
            assert opened.resume is not None, "only a resumed session has committed tokens to get"
            committed = await self._committed(opened, scope, summary)
            start = prefix_digest0(contract_digest(contract), prompt)
            if extend(start, committed) != opened.resume.digest:
                raise Unprocessable("committed_tokens do not give the digest of resume")
        machine = VerifierSession(
            session=opened.session,
            epoch=opened.epoch,
            contract=contract,
            prompt=prompt,
            vocab=self._engine.info.vocab,
            settings=settings,
            entropy=lambda: secrets.randbits(53) / (1 << 53),
            now=time.monotonic(),
            round_=opened.resume.round if opened.resume else 0,
            committed=committed,
        )
        await self._prepare(machine, opened)
        return machine, commit_log

    async def _prepare(self, machine: VerifierSession, opened: SessionOpen) -> None:
        if machine.closed:
            return
        scope = opened.contract.scope or b""
        prefix = Prefix(machine.tokens, len(machine.tokens), machine.prompt_length, scope)
        kv = await self._target_kv.fetch(
            (opened.resume and opened.resume.target_kv) or opened.prompt_kv,
            scope=opened.contract.scope,
            tokens=prefix.length,
        )
        blocks: Sequence[bytes | memoryview] = ()
        if kv is None and prefix.prompt:
            blocks = await self._prefix_kv.find(machine.tokens, opened.contract.scope)
        begin = time.monotonic()
        try:
            reused = await self._engine.prepare(
                machine.session, machine.epoch, prefix, kv=kv, blocks=blocks
            )
        except EngineBusy as e:
            # Not open here, and nothing is left of it: the router may try another verifier.
            raise TooManyRequests(str(e), retry_after_s=1) from e
        except EngineError as e:
            raise Unavailable(f"the prompt's KV could not be computed: {e}", retry_after_s=1) from e
        self._prefix_kv.cost.computed(prefix.length - reused, time.monotonic() - begin)
        self._reused(reused)

    async def _prompt(self, opened: SessionOpen) -> tuple[int, ...]:
        prompt = opened.prompt
        if isinstance(prompt, str):
            prompt = await self._objects.fetch_tokens(prompt, scope=opened.contract.scope)
        if any(token >= self._engine.info.vocab for token in prompt):
            raise Unprocessable("a prompt token is beyond the vocabulary")
        room = self._engine.info.context_max
        if len(prompt) + min(opened.contract.max_new, 1) > room:
            raise Unprocessable(
                f"the prompt has {len(prompt)} tokens; the model's context is {room}"
            )
        return prompt

    async def _committed(
        self, opened: SessionOpen, scope: bytes | None, summary: LogSummary
    ) -> tuple[int, ...]:
        """The committed tokens of a resume: the object, else what the log holds (D-O6)."""
        assert opened.resume is not None
        try:
            tokens = await self._objects.fetch_tokens(opened.resume.committed_tokens, scope=scope)
        except (Unprocessable, Unavailable) as e:
            log.info("committed tokens taken from the log: %s", e)
            return summary.tokens
        if len(tokens) != opened.resume.committed:
            raise Unprocessable("committed_tokens is not as long as resume says")
        return tokens


def check_resume(
    opened: SessionOpen, prompt: Sequence[int], summary: LogSummary
) -> tuple[int, ...] | None:
    """Check an opening against its log; the tokens to start from, None if they are to be fetched.

    Raises StaleBase with the log's state or Unprocessable (D-O5, D-O6).
    """
    resume, last = opened.resume, summary.last_valid
    start = prefix_digest0(contract_digest(opened.contract), prompt)
    state = SessionState(
        session=opened.session,
        epoch=max(summary.highest_epoch, 1),
        round=last.round if last else 0,
        committed=last.committed if last else 0,
        digest=last.digest if last else start,
    )
    if resume is None:
        if last is not None:
            raise StaleBase("the log holds commits; resume them", session_state=state)
        return ()
    if (resume.committed == 0) != (resume.round == 0) or resume.committed < resume.round:
        raise Unprocessable("resume: every round commits at least one token")
    if (resume.round, resume.committed, resume.digest) != (
        state.round,
        state.committed,
        state.digest,
    ):
        raise StaleBase("resume is not the log's last commit", session_state=state)
    return None if resume.committed else ()
