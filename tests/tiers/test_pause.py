"""When a server that fails is asked again."""

from __future__ import annotations

import logging

import pytest

from tests.kit.tier_contract import Clock
from tiers.pause import FAILURES_MAX, PAUSE_S_MAX, PAUSE_S_MIN, Pause


def fail(pause: Pause) -> None:
    assert pause.enter()
    pause.leave(failed=True)


def test_a_success_in_between_counts_anew() -> None:
    pause = Pause("the bucket", Clock())
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            fail(pause)
        assert pause.enter()
        pause.leave(failed=False)


def test_one_call_tries_after_each_pause_and_each_is_longer() -> None:
    clock = Clock()
    pause = Pause("the bucket", clock)
    for _ in range(FAILURES_MAX):
        fail(pause)
    length_s = PAUSE_S_MIN
    for _ in range(8):
        assert not pause.enter()
        clock.now += length_s
        assert pause.enter() and not pause.enter()
        pause.leave(failed=True)
        length_s = min(2 * length_s, PAUSE_S_MAX)
    clock.now += length_s
    assert pause.enter()
    pause.leave(failed=False)
    assert pause.enter() and pause.enter()


def test_a_trial_that_was_given_up_leaves_the_way_free() -> None:
    clock = Clock()
    pause = Pause("the bucket", clock)
    for _ in range(FAILURES_MAX):
        fail(pause)
    clock.now += PAUSE_S_MIN
    assert pause.enter()
    pause.leave(failed=None)
    assert pause.enter()


def test_calls_that_were_under_way_make_the_pause_no_longer() -> None:
    clock = Clock()
    pause = Pause("the bucket", clock)
    for _ in range(20):
        assert pause.enter()
    for _ in range(20):
        pause.leave(failed=True)
    clock.now += PAUSE_S_MIN
    assert pause.enter()


def test_people_are_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Once each, however often it fails in between."""
    caplog.set_level(logging.INFO, "sdcpd.mlc")
    clock = Clock()
    pause = Pause("the bucket", clock)
    for _ in range(2):
        caplog.clear()
        for _ in range(FAILURES_MAX):
            assert not caplog.messages
            fail(pause)
        for _ in range(5):
            clock.now += PAUSE_S_MAX
            fail(pause)
        (text,) = caplog.messages
        assert text.startswith(f"the bucket failed {FAILURES_MAX} times in a row: the cache does")
        caplog.clear()
        clock.now += PAUSE_S_MAX
        for _ in range(3):
            assert pause.enter()
            pause.leave(failed=False)
        assert caplog.messages == ["the bucket answers again: it is used as before"]
