"""The order of eviction: what is used once does not push out what is used again."""

from __future__ import annotations

import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.tier_contract import Clock
from tiers.api import Key
from tiers.ledger import Ledger
from tiers.s3fifo import S3Fifo

SLOTS = 50


def key(number: int) -> Key:
    return Key("s", str(number))


def test_what_is_new_and_unused_goes_first() -> None:
    order = S3Fifo(10)
    for number in range(4):
        order.add(key(number), 1)
    order.use(key(0))
    assert [order.evict(), order.evict()] == [key(1), key(2)]
    assert [order.evict(), order.evict()] == [key(0), key(3)], "the newest keep a tenth of the room"
    assert order.evict() is None


def test_what_was_missed_is_proven_when_it_comes_again() -> None:
    order = S3Fifo(4)
    order.add(key(0), 1)
    assert order.evict() == key(0)
    order.add(key(0), 1)
    for number in range(1, 4):
        order.add(key(number), 1)
    assert [order.evict() for _ in range(4)] == [key(1), key(2), key(3), key(0)]


def test_uses_earn_rounds_in_the_main_queue_and_no_more_than_a_few() -> None:
    order = S3Fifo(4)
    for number in (0, 1):
        order.add(key(number), 1)
        order.evict()
        order.add(key(number), 1)  # both are in the main queue now
    for _ in range(100):
        order.use(key(0))
    assert order.evict() == key(1) and order.evict() == key(0)


def test_what_sends_another_ahead_keeps_its_place() -> None:
    order = S3Fifo(4)
    for number in range(3):
        order.add(key(number), 1)
        order.evict()
        order.add(key(number), 1)  # all are in the main queue now
    instead = {key(0): key(2)}
    assert order.evict(lambda one: instead.get(one, one)) == key(2)
    assert [order.evict() for _ in range(3)] == [key(0), key(1), None]


def test_what_was_spared_keeps_its_uses() -> None:
    """What an object continues is passed over while room is made for it, and is no less wanted."""
    ledger = Ledger(10, clock=Clock())
    first, after, other, new = key(0), key(1), key(2), key(3)
    ledger.add(first, 1, lease_s=0)
    ledger.touch(first)
    ledger.touch(first)
    for number, size_bytes in ((10, 4), (11, 4), (12, 1)):
        ledger.add(key(number), size_bytes, lease_s=0)
    ledger.add(after, 9, lease_s=0, after=first.name)
    assert first in ledger and len(ledger) == 2
    ledger.remove(after)
    ledger.add(other, 9, lease_s=0)
    ledger.add(new, 1, lease_s=0)
    assert first in ledger and other not in ledger
    ledger.check()


def test_a_scan_does_not_push_out_what_is_used() -> None:
    """As in a cache of prompts: each scanned block is used once, a few prefixes again and again."""
    ledger = Ledger(SLOTS, clock=Clock())
    lru: OrderedDict[Key, None] = OrderedDict()
    hits = {"ledger": 0, "lru": 0}
    rng = random.Random(1)
    hot = [key(number) for number in range(SLOTS // 2)]
    for step in range(20_000):
        wanted = rng.choice(hot) if rng.random() < 0.3 else key(1000 + step)
        if wanted in ledger:
            hits["ledger"] += 1
            ledger.touch(wanted)
        else:
            ledger.add(wanted, 1, lease_s=0)
        if wanted in lru:
            hits["lru"] += 1
            lru.move_to_end(wanted)
        else:
            lru[wanted] = None
            if len(lru) > SLOTS:
                lru.popitem(last=False)
    assert hits["ledger"] > 1.25 * hits["lru"], hits
    ledger.check()


steps = st.lists(
    st.tuples(st.sampled_from(["add", "first", "use", "remove", "evict"]), st.integers(0, 9))
)


@given(steps)
def test_it_holds_what_was_entered_and_not_taken_out(actions: list[tuple[str, int]]) -> None:
    order, model = S3Fifo(12), dict[Key, int]()
    for action, number in actions:
        one, size = key(number), number % 3 + 1
        if action in ("add", "first") and one not in model:
            order.add(one, size) if action == "add" else order.add_first(one, size)
            model[one] = size
        elif action == "use":
            order.use(one)
        elif action == "remove":
            order.remove(one)
            model.pop(one, None)
        elif action == "evict":
            gone = order.evict()
            assert (gone is None) == (not model)
            model.pop(gone, None) if gone else None
        order.check()
        assert order.keys() == set(model) and len(order) == len(model)
    while model:
        gone = order.evict()
        assert gone is not None
        del model[gone]
