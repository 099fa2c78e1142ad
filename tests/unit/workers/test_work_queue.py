"""The one queue of a task: nothing lost, nothing handed out twice, whoever comes when."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk
from rooms.root import SystemClock
from rooms.workers import Batch, WorkQueue
from support.hand_clock import HandClock


def chunks(count: int, first: int = 0) -> list[Chunk]:
    return [Chunk("r", f"c{number}", "a.wav", "/a.wav") for number in range(first, first + count)]


def filled(count: int, *, workers: int = 1, wants: int = 1) -> WorkQueue:
    queue = WorkQueue(SystemClock(), workers=workers, wants=wants)
    queue.add(chunks(count), complete=True)
    return queue


def taken(queue: WorkQueue) -> list[Chunk]:
    batch = queue.take()
    assert batch is not None
    return batch.chunks


# --- what comes, and in which order -----------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=40), st.integers(0, 50), st.integers(1, 9))
def test_the_longest_come_first_and_can_be_seen_before_they_are_taken(
    lengths: list[int | None], count: int, wants: int
) -> None:
    """A chunk of unknown length may be the longest; of equal ones the first of the source comes first."""
    queue = WorkQueue(SystemClock(), workers=1, wants=wants)
    source = [Chunk("r", str(n), "a", "/a", 500, s and 500 + s * 1000) for n, s in enumerate(lengths)]
    queue.add(source, complete=True)
    expected = sorted(source, key=lambda chunk: -99 if chunk.audio_s is None else -chunk.audio_s)
    assert queue.upcoming(count) == expected[:count]
    found = []
    while (batch := queue.take()) is not None:
        assert batch == Batch(batch.chunks)
        found += batch.chunks
        assert queue.upcoming(99) == expected[len(found) :]
        queue.finish(len(batch.chunks))
    assert found == expected


@pytest.mark.parametrize(
    ("count", "workers", "wants", "shares"),
    [
        (10, 3, 1000, [4, 3, 3]), (2, 4, 1000, [1, 1]), (7, 1, 1000, [7]), (0, 3, 1000, []), (4, 4, 1000, [1] * 4),
        (9, 2, 1000, [5, 4]), (23, 2, 5, [5, 5, 5, 5, 2, 1]), (5, 0, 2, [2, 2, 1]),
    ],
)  # fmt: skip
def test_batches_are_fair_shares_up_to_what_a_worker_holds(
    count: int, workers: int, wants: int, shares: list[int]
) -> None:
    queue, sizes = filled(count, workers=workers, wants=wants), []
    while (batch := queue.take()) is not None:
        sizes.append(len(batch.chunks))
        queue.finish(len(batch.chunks))
    assert sizes == shares


def test_every_fresh_load_is_shared_out_anew() -> None:
    queue = WorkQueue(SystemClock(), workers=2, wants=1000)
    queue.add(chunks(4), complete=False)
    assert len(taken(queue)) == 2
    queue.add([], complete=False)
    assert len(taken(queue)) == 2
    queue.add(chunks(6, first=4), complete=False)
    assert len(taken(queue)) == 3
    queue.add(chunks(5, first=10), complete=True)
    assert [len(taken(queue)) for _ in range(2)] == [4, 4]


def test_the_queue_asks_for_more_when_it_is_half_empty_and_never_holds_a_million() -> None:
    queue = WorkQueue(SystemClock(), workers=400, wants=1)
    window = queue.room
    assert window <= 20_000
    queue.add(chunks(window // 2), complete=False)
    assert queue.room == window // 2
    queue.add(chunks(1), complete=False)
    assert queue.room == 0
    taken(queue)
    assert queue.room == window // 2


def test_near_the_end_nobody_hoards_and_nobody_is_idle() -> None:
    queue = filled(20, workers=2, wants=4)
    assert taken(queue) == chunks(4)
    assert queue.more(3, idle=0) == chunks(3, first=4), "there is plenty: 16 for two that like to hold four"
    assert queue.more(9, idle=0) == chunks(5, first=7), "beyond the eight that they may want"
    assert queue.more(3, idle=0) == []
    assert queue.more(3, idle=2) == chunks(2, first=12), "but who could begin at once may"
    queue.change_workers(-1)
    assert queue.more(3, idle=0) == chunks(2, first=14), "one worker less, four chunks more"
    queue.change_workers(-5)  # there is always one
    assert queue.more(9, idle=9) == chunks(4, first=16)
    assert queue.more(1, idle=1) == [], "and an empty queue is no reason to wait"


# --- what there is time for -------------------------------------------------------------------------------------------


class Hours:
    """Room for so many seconds of audio in all."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def __call__(self, chunk: Chunk) -> bool:
        fits = (chunk.audio_s or 0.0) <= self.left_s
        self.left_s -= fits * (chunk.audio_s or 0.0)
        return fits


def of_lengths(lengths_s: Sequence[int]) -> WorkQueue:
    queue = WorkQueue(SystemClock(), workers=1, wants=100)
    queue.add([Chunk("r", f"{n}", "a.wav", "/a.wav", 0, 1000 * s) for n, s in enumerate(lengths_s)], complete=True)
    return queue


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 300), st.booleans())
def test_each_chunk_taken_is_the_longest_that_still_fits_and_nothing_that_fits_is_left(
    lengths_s: list[int], seconds: int, at_work: bool
) -> None:
    expected, left_s = [], seconds
    for length_s in sorted(lengths_s, reverse=True):
        if length_s <= left_s:
            expected.append(length_s)
            left_s -= length_s
    queue, room, got = of_lengths(lengths_s), Hours(seconds), list[float | None]()
    if at_work:
        got = [chunk.audio_s for chunk in queue.more(99, idle=99, fits=room) or []]
    else:
        while (batch := queue.take(room)) is not None:
            got += [chunk.audio_s for chunk in batch.chunks]
            queue.finish(len(batch.chunks))
    assert got == expected
    rest = [chunk.audio_s or 0 for chunk in queue.more(99, idle=99) or []]
    assert rest == sorted(rest, reverse=True), "who has more time gets what is left, the longest first"
    assert len(got) + len(rest) == len(lengths_s)


@pytest.mark.parametrize("alone", [False, True])
def test_chunks_for_which_there_is_no_time_keep_nobody_waiting_for_those_in_flight(alone: bool) -> None:
    queue = of_lengths([60, 50])
    queue.put_back(taken(queue)[:1], alone=alone)
    assert queue.take(Hours(40)) is None
    assert queue.take(Hours(60)) is not None


# --- what comes back --------------------------------------------------------------------------------------------------


def test_suspects_stay_together_and_alone_and_lean_ones_go_to_lean_engines_first() -> None:
    queue = filled(7, wants=1000)
    one, two, three, four, *both = taken(queue)
    queue.put_back([one], alone=True)
    queue.put_back([two], lean=True)
    queue.put_back([three], alone=True)
    queue.put_back([four], lean=True)
    queue.put_back(both, alone=True)
    queue.add(chunks(1, first=9), complete=True)
    assert queue.take(lean=True) == Batch([two], alone=True, lean=True)
    assert queue.take(lean=True) == Batch([four], alone=True, lean=True)
    assert [queue.take(lean=True) for _ in range(2)] == [Batch(both, alone=True), Batch([one], alone=True)]
    assert queue.take() == Batch([three], alone=True)
    assert queue.take() == Batch(chunks(1, first=9))


def test_for_suspects_one_worker_comes_to_an_end_each_time_and_only_one() -> None:
    queue = filled(20, workers=2, wants=2)
    for n in range(3):
        suspects = taken(queue)
        queue.put_back(suspects, alone=True)
        assert queue.more(1, idle=1) is None
        assert queue.more(1, idle=1) == chunks(1, first=3 * n + 2), "the other worker goes on"
        assert queue.take() == Batch(suspects, alone=True)
    suspects = taken(queue)
    queue.put_back(suspects, alone=True)
    assert queue.take() == Batch(suspects, alone=True), "a worker that was free has taken them"
    assert queue.more(1, idle=1) == chunks(1, first=11)


def test_what_has_rested_comes_before_fresh_chunks_and_whose_time_comes_first_is_first() -> None:
    clock = HandClock()
    queue = WorkQueue(clock, workers=1, wants=1)
    queue.add(chunks(9), complete=True)
    long, short, now = taken(queue), taken(queue), taken(queue)
    queue.put_back(long, delay_s=5)
    queue.put_back(short, delay_s=4)
    queue.put_back(now)
    assert taken(queue) == now
    assert queue.more(1, idle=1) == chunks(1, first=3)
    clock.sleep(4)
    assert queue.more(1, idle=1) == short, "a worker at work gets it, too"
    clock.sleep(1)
    assert taken(queue) == long


# --- waiting ----------------------------------------------------------------------------------------------------------


class Taker(threading.Thread):
    """Takes once, in a thread of its own, as a worker does."""

    def __init__(self, queue: WorkQueue, over: Callable[[], bool] = lambda: False) -> None:
        super().__init__(daemon=True)
        self.batch: Batch | None = None
        self._asked = threading.Event()

        def look() -> bool:
            self._asked.set()
            return over()

        self._take = lambda: queue.take(over=look)
        self.start()
        assert self._asked.wait(60)

    def run(self) -> None:
        self.batch = self._take()

    def answer(self) -> list[Chunk] | None:
        self.join(60)
        assert not self.is_alive(), "take never returned"
        return None if self.batch is None else self.batch.chunks


@pytest.mark.parametrize(
    ("news", "answer"),
    [
        (lambda queue, first: queue.put_back(first), chunks(1)),
        (lambda queue, first: queue.put_back(first, delay_s=0.02), chunks(1)),
        (lambda queue, first: queue.put_back(first, alone=True), chunks(1)),
        (lambda queue, first: queue.add(chunks(1, first=5), complete=True), chunks(1, first=5)),
        (lambda queue, first: queue.finish(), None),
        (lambda queue, first: queue.drain(), None),
    ],
    ids=["comes back", "comes back later", "comes back alone", "fresh", "settled", "drained"],
)
def test_while_a_chunk_in_flight_may_come_back_a_taker_waits_for_news(
    news: Callable[[WorkQueue, list[Chunk]], None], answer: list[Chunk] | None
) -> None:
    queue = filled(1)
    first = taken(queue)
    taker = Taker(queue)
    assert taker.is_alive()
    news(queue, first)
    assert taker.answer() == answer


def test_every_taker_goes_home_when_the_last_chunk_is_settled_and_what_came_later_counts_as_well() -> None:
    queue = filled(3)
    assert [*taken(queue), *(queue.more(2, idle=2) or [])] == chunks(3)
    takers = [Taker(queue) for _ in range(3)]
    queue.finish(2)
    assert all(taker.is_alive() for taker in takers)
    queue.finish()
    assert [taker.answer() for taker in takers] == [None] * 3


def test_a_taker_waits_for_a_source_that_has_more_and_goes_home_when_it_is_told_to() -> None:
    queue, over = WorkQueue(SystemClock(), workers=2, wants=1), threading.Event()
    told, waiting = Taker(queue, over.is_set), Taker(queue)
    over.set()
    queue.change_workers(-1)
    assert told.answer() is None
    assert waiting.is_alive()
    queue.add([], complete=True)
    assert waiting.answer() is None


def test_a_queue_that_drains_hands_out_nothing() -> None:
    queue = filled(9, wants=2)
    suspects = taken(queue)
    queue.put_back(suspects[:1], alone=True)
    queue.drain()
    assert (queue.take(), queue.more(5, idle=5), queue.upcoming(5)) == (None, [], [])


# --- in any order -----------------------------------------------------------------------------------------------------


deeds = st.lists(
    st.one_of(
        st.just(("take", 0)),
        *(st.tuples(st.just(deed), st.integers(0, 9)) for deed in ("finish", "put back", "put back alone", "add")),
        *(st.tuples(st.just(deed), st.integers(0, 4)) for deed in ("more", "sleep")),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(deeds, st.integers(1, 6), st.integers(1, 4))
def test_whatever_happens_every_chunk_is_in_one_place(script: list[tuple[str, int]], wants: int, workers: int) -> None:
    clock = HandClock()
    queue = WorkQueue(clock, workers=workers, wants=wants)
    in_flight: list[list[Chunk]] = []
    inside: dict[str, float] = {}  # chunk → when it may come at the earliest
    added = 0

    def hand_out(batch: list[Chunk]) -> None:
        for chunk in batch:
            assert inside.pop(chunk.chunk_id) <= clock.monotonic_s(), "it rests"
        in_flight.append(batch)

    for deed, number in script:
        if deed == "add":
            queue.add(chunks(number, first=added), complete=False)
            inside.update((f"c{n}", 0.0) for n in range(added, added + number))
            added += number
        elif deed == "sleep":
            clock.sleep(number)
        elif deed == "take" and any(due_s <= clock.monotonic_s() for due_s in inside.values()):
            batch = queue.take()
            assert batch is not None
            assert batch.alone or 1 <= len(batch.chunks) <= wants
            hand_out(batch.chunks)
        elif deed == "more":
            if fresh := queue.more(number, idle=number // 2):
                assert len(fresh) <= number
                hand_out(fresh)
        elif deed in ("finish", "put back", "put back alone") and in_flight:
            held = in_flight.pop(number % len(in_flight))
            if deed == "finish":
                queue.finish(len(held))
            else:
                queue.put_back(held, delay_s=number, alone=deed.endswith("alone"))
                inside.update((chunk.chunk_id, clock.monotonic_s() + number) for chunk in held)
    queue.finish(sum(map(len, in_flight)))
    queue.add([], complete=True)
    clock.sleep(100)
    rest: Counter[str] = Counter()
    while (last := queue.take()) is not None:
        rest.update(chunk.chunk_id for chunk in last.chunks)
        queue.finish(len(last.chunks))
    assert rest == Counter(list(inside))
