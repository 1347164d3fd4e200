"""The arena: parts never overlap, none is lost, and none is reused while it is looked at."""

from __future__ import annotations

import fcntl
import gc
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sdcpd.transport.local_memory import BadMemory, attach, create
from tiers.api import TierError
from tiers.arena import Arena
from tiers.arena_firm import Firm
from tiers.arena_slots import GRANULE_BYTES, Slots, rounded

MFD_HUGETLB = 4
SIZE_BYTES = 64 * GRANULE_BYTES


class SlotsMachine(RuleBasedStateMachine):
    """Takes and gives back; a model says which octets are whose."""

    @initialize(chunk=st.sampled_from((7, 16, 64)))
    def begin(self, chunk: int) -> None:
        self.chunk_bytes = chunk * GRANULE_BYTES
        self.slots = Slots(SIZE_BYTES + 100, chunk_bytes=self.chunk_bytes)
        self.taken: dict[int, int] = {}
        self.firm = Firm(SIZE_BYTES + 100, chunk_bytes=self.chunk_bytes)
        self.until: dict[int, int] = {}
        self.now = 0

    @rule(size=st.integers(0, 20 * GRANULE_BYTES))
    def take(self, size: int) -> None:
        largest_bytes = self.slots.largest_bytes
        start = self.slots.take(size)
        if start is None:
            assert largest_bytes < rounded(size), "what fits is handed out"
            return
        end = start + rounded(size)
        assert all(end <= s or start >= s + n for s, n in self.taken.items()), "no overlap"
        assert 0 <= start < end <= SIZE_BYTES
        assert start // self.chunk_bytes == (end - 1) // self.chunk_bytes
        self.taken[start] = rounded(size)

    @rule(size=st.integers(0, 40 * GRANULE_BYTES), data=st.data())
    def fits_between_what_stays(self, size: int, data: st.DataObject) -> None:
        """As a plain count says, granule by granule."""
        starts = sorted(self.taken)
        viewed = {start: self.taken[start] for start in starts if data.draw(st.booleans())}
        replaced = data.draw(st.sampled_from([None, *starts]))
        kept = {start for start in {*self.until, *viewed} if start in viewed or start != replaced}
        granules = {
            at // GRANULE_BYTES
            for start in kept
            for at in range(start, start + self.taken[start], GRANULE_BYTES)
        }
        longest = run = 0
        for at in range(SIZE_BYTES // GRANULE_BYTES):
            if at % (self.chunk_bytes // GRANULE_BYTES) == 0:
                run = 0
            run = 0 if at in granules else run + 1
            longest = max(longest, run)
        fits = longest * GRANULE_BYTES >= rounded(size)
        found = self.firm.leaves(rounded(size), self.now, besides=viewed, replaced=replaced)
        assert found == fits

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), time=st.integers(1, 5))
    def hold(self, data: st.DataObject, time: int) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.until[start] = self.now + time
        self.firm.hold(start, self.taken[start], self.until[start])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        self.until.pop(start, None)
        self.firm.let_go(start)

    @rule()
    def wait(self) -> None:
        self.now += 1
        self.until = {start: until for start, until in self.until.items() if until > self.now}

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[start]
        self.until.pop(start, None)
        self.firm.let_go(start)
        self.slots.give_back(start)

    @invariant()
    def books_agree(self) -> None:
        self.slots.check()
        self.firm.check()
        assert set(self.firm.held(self.now)) == set(self.until)
        assert self.slots.taken_bytes == sum(self.taken.values())
        assert len(self.slots) == len(self.taken)

    def teardown(self) -> None:
        for start in self.taken:
            self.slots.give_back(start)
        self.slots.check()
        assert self.slots.largest_bytes == min(self.chunk_bytes, SIZE_BYTES), "all came together"


SlotsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = SlotsMachine.TestCase


@given(st.integers(0, 1 << 40))
def test_less_than_a_granule_is_wasted(size_bytes: int) -> None:
    assert 0 <= rounded(size_bytes) - max(1, size_bytes) < GRANULE_BYTES


def test_the_smallest_piece_that_fits_is_taken() -> None:
    slots = Slots(10 * GRANULE_BYTES, chunk_bytes=SIZE_BYTES)
    a, _, c, _ = (slots.take(size * GRANULE_BYTES) for size in (3, 1, 2, 4))
    assert a is not None and c is not None
    slots.give_back(a)
    slots.give_back(c)
    assert slots.take(2 * GRANULE_BYTES) == c


def test_a_slot_is_not_reused_while_a_piece_of_a_view_is_left() -> None:
    arena = Arena(2 * GRANULE_BYTES)
    slot = arena.take(300)
    assert slot is not None
    arena.write(slot, 0, b"x" * 300)
    piece = slot.view()[10:20]
    del slot
    assert arena.take(300) is None
    assert bytes(piece) == b"x" * 10
    del piece
    gc.collect()
    assert arena.take(300) is not None
    arena.check()
    arena.close()


def test_what_is_viewed_or_held_is_not_counted_on() -> None:
    arena = Arena(3 * GRANULE_BYTES)
    slots = [arena.take(GRANULE_BYTES) for _ in range(3)]
    middle = slots[1]
    assert middle is not None
    assert arena.could_take(3 * GRANULE_BYTES, 0.0), "all of them may go"
    arena.hold(middle, 5.0)
    assert not arena.could_take(2 * GRANULE_BYTES, 4.9)
    assert arena.could_take(3 * GRANULE_BYTES, 4.9, replaced=middle)
    assert arena.could_take(3 * GRANULE_BYTES, 5.0)
    piece = middle.view()[:1]
    assert not arena.could_take(2 * GRANULE_BYTES, 5.0)
    assert not arena.could_take(2 * GRANULE_BYTES, 5.0, replaced=middle), "it can be freed no more"
    del piece
    assert arena.could_take(3 * GRANULE_BYTES, 5.0)
    arena.check()
    arena.close()


def test_reading_alone_leaves_nothing_behind() -> None:
    arena = Arena(GRANULE_BYTES)
    slot = arena.take(10)
    assert slot is not None
    for _ in range(100):
        slot.view()
    assert len(arena._views) + len(arena._returned) <= 2
    arena.close()


def test_views_may_go_in_another_thread_and_outlive_the_arena() -> None:
    arena = Arena(4 * GRANULE_BYTES)
    slot, other = arena.take(5), arena.take(5)
    assert slot is not None and other is not None
    arena.write(slot, 0, b"first")
    arena.write(other, 0, b"other")
    views = [slot.view()]
    del slot
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    arena.check()
    assert arena.held_bytes() == GRANULE_BYTES
    left = other.view()
    arena.close()
    assert bytes(left) == b"other"


def test_what_is_read_cannot_be_written() -> None:
    arena = Arena(GRANULE_BYTES)
    slot = arena.take(4)
    assert slot is not None
    with pytest.raises(TypeError):
        slot.view()[0] = 1
    arena.close()


def test_memory_that_cannot_be_had_is_told() -> None:
    with pytest.raises(TierError, match="pinned tier cannot be had"):
        Arena(1 << 62)


def test_shared_memory_is_what_the_other_wrote_and_keeps_its_size() -> None:
    ours, fd = create(8192, name="test")
    theirs = attach(fd, bytes_max=8192)
    ours.write(100, b"hello")
    theirs.write(105, memoryview(b" you"))
    assert theirs.read(100, 9) == b"hello you" == ours.read(100, 9)
    for size_bytes in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)
    os.close(fd)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("flaw", ["file", "unsealed", "large", "empty", "pipe", "huge pages"])
def test_memory_that_could_hurt_is_refused(
    flaw: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if flaw == "file":
        path = tmp_path_factory.mktemp("memory") / "file"
        path.write_bytes(b"x" * 4096)
        fd = os.open(path, os.O_RDWR)
    elif flaw == "pipe":
        fd, writer = os.pipe()
        os.close(writer)
    elif flaw == "huge pages":
        # That none are set aside does not matter: their file can be made all the same.
        fd = os.memfd_create("test", MFD_HUGETLB | os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    elif flaw == "large":
        memory, fd = create(8192, name="test")
        memory.close()
    else:
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        if flaw == "unsealed":
            os.ftruncate(fd, 4096)
        else:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(BadMemory):
            attach(fd, bytes_max=4 << 20 if flaw == "huge pages" else 4096)
    finally:
        os.close(fd)
