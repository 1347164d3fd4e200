"""Each resource of the verifier over each transport: in memory, HTTP/2 and HTTP/3."""

from __future__ import annotations

from tests.kit.answers import output_of, refused, state_of, verdict_of
from tests.kit.verifier_wire import OTHER, Wire


async def test_a_session_from_its_opening_to_its_end(any_wire: Wire) -> None:
    """R-5.1-2, R-5.1-9, R-6.1-4, R-6.3-2, R-6.3-7, R-6.6-2, R-6.7-1, R-6.7-13, R-7-2, R-9-2: POST sessions,
    PUT drafter, POST policy, POST proposals, GET output and DELETE session, and refusals of each.
    """
    wire = any_wire
    opened = state_of(await wire.open())
    assert (opened.round, opened.committed) == (0, 0)
    refused(await wire.propose(wire.good(1)), 403, "sdcp-not-assigned")
    assert state_of(await wire.name()).digest == opened.digest
    refused(await wire.name(epoch=2), 409, "sdcp-stale-epoch")
    assert state_of(await wire.policy(3, top_k=2)).round == 0
    first = verdict_of(await wire.propose(wire.good(3)))
    assert first.emitted == tuple(wire.model.text((1, 2, 3), 4))
    assert await wire.propose([9], round=1) == first
    refused(await wire.policy(1, top_k=2), 409, "sdcp-stale-base")
    problem = refused(await wire.propose(wire.good(1), base=0), 409, "sdcp-stale-base")
    assert problem.session_state is not None and problem.session_state.digest == first.digest
    refused(await wire.propose(wire.good(1), who="other", drafter=OTHER), 403, "sdcp-not-assigned")
    assert output_of(await wire.output(1)).tokens == first.emitted[1:]
    refused(await wire.output(who="other"), 403)
    for who, method, path in (
        ("drafter", "POST", "sessions"),
        ("front_end", "PUT", f"sessions/{wire.log_name}/drafter"),
        ("drafter", "POST", f"sessions/{wire.log_name}/policy"),
        ("front_end", "DELETE", f"sessions/{wire.log_name}"),
    ):
        assert (await wire.send(who, method, path, b"\xa0")).status == 403
    for _ in range(2):
        assert (await wire.send("router", "DELETE", f"sessions/{wire.log_name}")).status == 204
    output = output_of(await wire.output())
    assert (output.tokens, output.final, output.finish) == (first.emitted, True, 5)
    refused(await wire.propose([1]), 410, "sdcp-session-closed")
    assert await wire.propose([1], round=1) == first
