"""What an output message tells beside tokens (Section 6.7, D-Z5)."""

from __future__ import annotations

from sdcpd.protocol.verifier_state import PARTS_MAX, Parts


def test_parts_tell_of_the_last_rounds() -> None:
    """What each round since a token was like; of what is long ago nothing is kept."""
    parts = Parts()
    assert parts.after(0) == ()
    made = [(3 * n + 3, n % 4, *[7] * (n % 3)) for n in range(2 * PARTS_MAX + 5)]
    for one in made[:10]:
        parts.add(*one)
    assert parts.after(0) == tuple(made[:10])
    assert parts.after(6) == tuple(made[2:10])
    assert parts.after(30) == ()
    for one in made[10:]:
        parts.add(*one)
    assert parts.after(0) == tuple(made[PARTS_MAX:])
    assert parts.after(made[-2][0]) == (made[-1],)
