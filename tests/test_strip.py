"""The failover strip of `sdcpd dev`: where tokens, silence and the death are drawn."""

from __future__ import annotations

import pytest

from sdcpd.dev.strip import WIDTH_MAX, longest_gap_s, strip


def test_a_character_is_a_tenth_of_a_second() -> None:
    lines = strip([0.01, 0.02, 0.15, 0.29], [0.05, 0.15, 0.55, 0.61], death_s=0.21)
    assert lines == [
        "undisturbed |###|",
        "killed      |##x..##|",
        "             100 ms a character",
    ]


@pytest.mark.parametrize("end_s", [0.0, 0.99, 5.8, 5.8999, 7.3, 60.0, 4321.0])
def test_every_strip_fits_a_terminal(end_s: float) -> None:
    undisturbed, killed, scale = strip([0.0], [0.0, end_s], death_s=end_s / 2)
    assert len(undisturbed) <= len(killed) <= WIDTH_MAX
    assert killed.count("x") == 1 and killed.endswith("|")
    assert scale.endswith(" ms a character")


def test_a_death_before_any_token_and_after_all() -> None:
    assert strip([0.0], [0.2], death_s=0.0)[1] == "killed      |x.#|"
    assert strip([0.0], [0.0], death_s=0.2)[1] == "killed      |#.x|"


def test_the_longest_gap() -> None:
    assert longest_gap_s([1.0, 1.5, 4.0, 4.0]) == 2.5
    assert longest_gap_s([1.0]) == longest_gap_s([]) == 0.0
