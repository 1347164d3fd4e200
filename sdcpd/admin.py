"""The admin socket: what `sdcpctl` and `sdcpd dev` ask an instance, as JSON over HTTP/1.1.

Whoever may open the socket may ask; its file mode and directory are the access control.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import sdcpd
from sdcpd.admin_cluster import WATCH, ClusterAdmin
from sdcpd.admin_logs import LogsAdmin
from sdcpd.admin_resources import AdminError, JsonResources, Resource
from sdcpd.engine.api import KvUsage
from sdcpd.engine.tokenizer import TextModel
from sdcpd.metrics import Metrics
from sdcpd.protocol.digest import output_digest
from sdcpd.protocol.messages import Sampling
from sdcpd.protocol.uris import session_path_id
from sdcpd.roles.drafter import Drafter
from sdcpd.roles.generation import GenerationRequest
from sdcpd.roles.overview import digest_text, instances_in_full
from sdcpd.roles.router import Router
from sdcpd.roles.verifier import Verifier


class RouterAdmin(JsonResources):
    """The router's socket: the cluster as it sees it, and texts for `sdcpd dev --once`."""

    def __init__(
        self,
        name: str,
        router: Router,
        text: TextModel,
        *,
        api: str | None = None,
        metrics: Metrics | None = None,
        logs: LogsAdmin | None = None,
    ) -> None:
        """`api` is where clients reach the model, if they can."""
        self._name, self._router, self._text, self._api = name, router, text, api
        self._begun = time.monotonic()
        resources: dict[tuple[str, str], Resource] = {
            ("GET", "/status"): self.status,
            ("POST", "/generate"): self.generate,
        }
        cluster = ClusterAdmin(router, text)
        resources |= cluster.resources | (logs.resources if logs else {})
        super().__init__(resources, health=router.health, metrics=metrics)
        self._streams[("POST", WATCH)] = cluster.watch

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Instances, sessions and counts."""
        return {
            **_about("router", self._name, self._begun),
            "base_uri": self._router.config.base_uri,
            "model": self._text.name,
            "tokenizer": digest_text(self._text.digest),
            "api": self._api,
            **self.readiness(),
            "reason": self._router.readiness().reason,
            "instances": instances_in_full(self._router.board),
            "missing_verifiers": self._router.missing_verifiers,
            "sessions": [
                {
                    "session": session.label,
                    "phase": session.machine.phase.value,
                    "epoch": session.machine.epoch,
                    "verifier": session.machine.verifier,
                    "drafter": session.machine.drafter,
                    "committed": session.machine.committed,
                }
                for session in self._router.sessions
            ],
            "counts": dict(self._router.counts),
        }

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One text, with what it took.

        Members: prompt, max_tokens, temperature (0 is greedy), seed, chat (the prompt is a user's
        message), ignore_eos.
        """
        prompt, max_tokens = body.get("prompt", ""), body.get("max_tokens", 64)
        temperature, seed = body.get("temperature", 0.0), body.get("seed")
        if not isinstance(prompt, str) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise AdminError("prompt must be text and max_tokens a number above 0")
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
            raise AdminError("temperature must be a number from 0 to 2")
        if not isinstance(seed, int | None):
            raise AdminError("seed must be a whole number")
        if body.get("chat"):
            rendered = self._text.chat_prompt([{"role": "user", "content": prompt}])
            ids = self._text.encode(rendered, special=False)
        else:
            ids = self._text.encode(prompt)
        room = self._text.context_max - len(ids)
        if max_tokens > room:
            raise AdminError(
                f"the prompt has {len(ids)} tokens and max_tokens is {max_tokens}; "
                f"together they must not exceed the model's context of {self._text.context_max}"
            )
        sampling = Sampling(
            temperature_milli=round(1000 * temperature),
            seed=None if seed is None else seed % (1 << 64),
        )
        stop = () if body.get("ignore_eos") else self._text.eos
        begin = time.monotonic()
        reader = await self._router.generate(
            GenerationRequest(tuple(ids), max_tokens, stop, sampling)
        )
        tokens: list[int] = []
        async for part in reader:
            tokens += part.tokens
        seconds = time.monotonic() - begin
        stats = reader.stats
        return {
            "text": self._text.decode(tokens),
            "tokens": tokens,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "self_decoded": stats.self_decoded,
            "tokens_per_pass": round(len(tokens) / stats.passes, 3) if stats.passes else 0.0,
            "seconds": round(seconds, 3),
            "digest": output_digest(tokens),
            "session": session_path_id(reader.session),
        }


def _kv(usage: KvUsage | None) -> dict[str, int] | None:
    return None if usage is None else asdict(usage)


class VerifierAdmin(JsonResources):
    """A verifier's socket."""

    def __init__(self, name: str, verifier: Verifier, *, metrics: Metrics | None = None) -> None:
        self._name, self._verifier = name, verifier
        self._begun = time.monotonic()
        resources = {("GET", "/status"): self.status}
        super().__init__(resources, health=verifier.health, metrics=metrics)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Sessions and counts."""
        verifier = self._verifier
        return {
            **_about("verifier", self._name, self._begun),
            "base_uri": verifier.config.base_uri,
            "instance": verifier.instance,
            **self.readiness(),
            "load": verifier.load(),
            "engine": verifier.status().engine,
            "kv": _kv(verifier.kv_usage()),
            "sessions": [
                {
                    "session": served.label,
                    "epoch": served.machine.epoch,
                    "round": served.machine.round,
                    "committed": served.machine.committed,
                    "state": served.machine.state_message().state,
                    "fenced": served.machine.fenced,
                    "drafter": served.machine.drafter,
                }
                for served in verifier.sessions
            ],
            "counts": {**verifier.counts, **verifier.rounds.as_json()},
        }


class DrafterAdmin(JsonResources):
    """A drafter's socket."""

    def __init__(self, name: str, drafter: Drafter, *, metrics: Metrics | None = None) -> None:
        self._name, self._drafter = name, drafter
        self._begun = time.monotonic()
        resources = {("GET", "/status"): self.status}
        super().__init__(resources, health=drafter.health, metrics=metrics)

    async def status(self, _: dict[str, Any]) -> dict[str, Any]:
        """Sessions and counts."""
        drafter = self._drafter
        return {
            **_about("drafter", self._name, self._begun),
            "base_uri": drafter.config.base_uri,
            **self.readiness(),
            "kv": _kv(drafter.kv_usage()),
            "instance": drafter.instance,
            "sessions": [
                {
                    "session": session.label,
                    "epoch": session.machine.epoch,
                    "round": session.machine.round,
                    "committed": session.machine.committed,
                    "alpha": round(session.machine.alpha.value, 3),
                }
                for session in drafter.sessions
            ],
            "counts": {**drafter.counts, **drafter.rounds.as_json()},
        }


def _about(role: str, name: str, begun: float) -> dict[str, Any]:
    return {
        "role": role,
        "name": name,
        "version": sdcpd.__version__,
        "up_s": round(time.monotonic() - begun, 1),
    }
