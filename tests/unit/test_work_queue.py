"""The one queue of a task: nothing lost, nothing handed out twice, whoever comes when."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hand_clock import HandClock

from badcjobs.clock import SystemClock
from badcjobs.model import Chunk
from badcjobs.workers.work_queue import WorkQueue


class ShortShares(WorkQueue):
    LONGEST_SHARE = 5


def chunks(count: int, first: int = 0) -> list[Chunk]:
    return [Chunk("r", f"c{number}", "a.wav", "/a.wav") for number in range(first, first + count)]


def filled(count: int, *, workers: int = 1, whole_share: bool = False, kind: type[WorkQueue] = WorkQueue) -> WorkQueue:
    queue = kind(SystemClock(), workers=workers, whole_share=whole_share)
    queue.add(chunks(count), complete=True)
    return queue


def sizes(queue: WorkQueue) -> list[int]:
    """Take and finish everything; return the sizes of the batches."""
    found = []
    while (batch := queue.take()) is not None:
        found.append(len(batch))
        queue.finish(len(batch))
    return found


class Taker(threading.Thread):
    """Takes once, in a thread of its own, as a worker does."""

    def __init__(self, take: Callable[[], list[Chunk] | None]) -> None:
        super().__init__(daemon=True)
        self._take = take
        self.batch: list[Chunk] | None = None
        self.took_s = 0.0
        self._start_s = time.monotonic()
        self.start()

    def run(self) -> None:
        self.batch = self._take()
        self.took_s = time.monotonic() - self._start_s

    @property
    def waits(self) -> bool:
        self.join(0.05)
        return self.is_alive()

    def answer(self) -> list[Chunk] | None:
        self.join(5)
        assert not self.is_alive(), "take never returned"
        return self.batch


# --- one after the other ----------------------------------------------------------------------------------------------


def test_chunks_come_one_by_one_in_the_order_of_the_source() -> None:
    queue = filled(5)
    assert [queue.take() for _ in range(5)] == [[chunk] for chunk in chunks(5)]


def test_an_empty_source_is_over_at_once() -> None:
    assert filled(0).take() is None


@pytest.mark.parametrize(
    ("count", "workers", "shares"),
    [(10, 3, [4, 3, 3]), (2, 4, [1, 1]), (7, 1, [7]), (0, 3, []), (4, 4, [1, 1, 1, 1]), (9, 2, [5, 4])],
)
def test_whole_shares_are_fair(count: int, workers: int, shares: list[int]) -> None:
    assert sizes(filled(count, workers=workers, whole_share=True)) == shares


def test_a_share_is_cut_where_it_would_be_too_long() -> None:
    assert sizes(filled(23, workers=2, whole_share=True, kind=ShortShares)) == [5, 5, 5, 5, 3]


def test_every_fresh_load_is_shared_out_anew() -> None:
    queue = WorkQueue(SystemClock(), workers=2, whole_share=True)
    queue.add(chunks(4), complete=False)
    assert [len(queue.take() or []) for _ in range(2)] == [2, 2]
    queue.add(chunks(6, first=4), complete=True)
    assert [len(queue.take() or []) for _ in range(2)] == [3, 3]


def test_the_queue_asks_for_more_as_it_empties() -> None:
    queue = WorkQueue(SystemClock(), workers=2, whole_share=False)
    wanted = queue.room
    assert wanted > 2
    queue.add(chunks(wanted), complete=False)
    assert queue.room == 0
    queue.take()
    assert queue.room == 1


def test_a_million_chunks_are_never_in_the_queue_at_once() -> None:
    assert WorkQueue(SystemClock(), workers=4, whole_share=True).room <= 4 * WorkQueue.LONGEST_SHARE


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_taker_waits_while_a_chunk_in_flight_may_come_back() -> None:
    queue = filled(1)
    first = queue.take()
    taker = Taker(queue.take)
    assert taker.waits
    assert first is not None
    queue.put_back(first)
    assert taker.answer() == first


def test_when_the_last_chunk_is_settled_every_waiting_taker_goes_home() -> None:
    queue = filled(1)
    queue.take()
    takers = [Taker(queue.take) for _ in range(3)]
    assert all(taker.waits for taker in takers)
    queue.finish()
    assert [taker.answer() for taker in takers] == [None, None, None]


def test_a_taker_waits_for_a_source_that_has_more() -> None:
    queue = WorkQueue(SystemClock(), workers=1, whole_share=False)
    queue.add([], complete=False)
    taker = Taker(queue.take)
    assert taker.waits
    queue.add(chunks(1), complete=True)
    assert taker.answer() == chunks(1)


def test_a_chunk_that_rests_is_not_handed_out_before_its_time_and_others_pass_it() -> None:
    queue = filled(2)
    first = queue.take()
    assert first is not None
    queue.put_back(first, rest_s=0.2)
    assert queue.take() == [chunks(2)[1]]
    taker = Taker(queue.take)
    assert taker.answer() == first
    assert taker.took_s >= 0.15


def test_of_two_that_rest_the_one_whose_time_comes_first_is_first() -> None:
    queue = filled(2)
    long, short = queue.take(), queue.take()
    assert long is not None and short is not None
    queue.put_back(long, rest_s=0.1)
    queue.put_back(short, rest_s=0.02)
    assert [queue.take(), queue.take()] == [short, long]


def test_a_batch_that_is_put_back_stays_together_and_alone() -> None:
    queue = filled(9, workers=1, whole_share=True)
    batch = queue.take()
    assert batch is not None
    queue.put_back(batch[:3])
    queue.put_back(batch[3:4])
    queue.add(chunks(2, first=9), complete=True)
    queue.finish(5)
    assert [queue.take(), queue.take()] == [batch[:3], batch[3:4]]
    assert queue.take() == chunks(2, first=9)


def test_draining_hands_out_nothing_more_and_wakes_everybody() -> None:
    queue = filled(3)
    queue.take()
    drained = WorkQueue(SystemClock(), workers=1, whole_share=False)
    drained.add([], complete=False)
    taker = Taker(drained.take)
    assert taker.waits
    for one in (queue, drained):
        one.drain()
    assert taker.answer() is None
    assert queue.take() is None


# --- in a crowd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_share", [False, True])
def test_many_workers_settle_every_chunk_exactly_once(whole_share: bool) -> None:
    queue = ShortShares(SystemClock(), workers=6, whole_share=whole_share)
    lock = threading.Lock()
    in_hand: set[str] = set()
    settled: Counter[str] = Counter()
    trouble: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while (batch := queue.take()) is not None:
            ids = {chunk.chunk_id for chunk in batch}
            with lock:
                trouble.extend(ids & in_hand)
                in_hand.update(ids)
            time.sleep(chance.random() / 2000)
            back = [chunk for chunk in batch if chance.random() < 0.3]
            with lock:
                in_hand.difference_update(ids)
                settled.update(ids - {chunk.chunk_id for chunk in back})
            if back:
                queue.put_back(back, rest_s=chance.choice([0, 0.001, 0.003]))
            queue.finish(len(batch) - len(back))

    workers = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for worker in workers:
        worker.start()
    for first in range(0, 300, 50):
        queue.add(chunks(50, first=first), complete=first == 250)
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive(), "a worker never came home"
    assert trouble == []
    assert settled == Counter({chunk.chunk_id: 1 for chunk in chunks(300)})


deeds = st.lists(
    st.one_of(
        st.just(("take", 0)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("put back"), st.integers(0, 9)),
        st.tuples(st.just("sleep"), st.integers(0, 4)),
        st.tuples(st.just("add"), st.integers(0, 7)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(deeds, st.booleans(), st.integers(1, 4))
def test_whatever_happens_every_chunk_is_in_one_place(
    script: list[tuple[str, int]], whole_share: bool, workers: int
) -> None:
    clock = HandClock()
    queue = ShortShares(clock, workers=workers, whole_share=whole_share)
    waiting: list[str] = []
    in_flight: list[list[Chunk]] = []
    resting: list[tuple[float, list[Chunk]]] = []
    added = 0
    for deed, number in script:
        if deed == "add":
            fresh = chunks(number, first=added)
            added += number
            waiting += [chunk.chunk_id for chunk in fresh]
            queue.add(fresh, complete=False)
        elif deed == "sleep":
            clock.sleep(number)
        elif deed == "take" and (waiting or any(due_s <= clock.monotonic_s() for due_s, _ in resting)):
            batch = queue.take()
            assert batch
            in_flight.append(batch)
            due = [entry for entry in resting if entry[0] <= clock.monotonic_s()]
            if due:  # those that had their rest go first, as they were put back
                assert batch in [entry[1] for entry in due]
                resting.remove(next(entry for entry in due if entry[1] == batch))
            else:
                taken = [chunk.chunk_id for chunk in batch]
                assert taken == waiting[: len(taken)]
                assert len(taken) == 1 or (whole_share and len(taken) <= 5)
                del waiting[: len(taken)]
        elif deed in ("finish", "put back") and in_flight:
            batch = in_flight.pop(number % len(in_flight))
            if deed == "finish":
                queue.finish(len(batch))
            else:
                queue.put_back(batch, rest_s=number)
                resting.append((clock.monotonic_s() + number, batch))
    for batch in in_flight:
        queue.finish(len(batch))
    queue.add([], complete=True)
    clock.sleep(100)
    left = Counter(waiting) + Counter(chunk.chunk_id for _, batch in resting for chunk in batch)
    rest: Counter[str] = Counter()
    while (last := queue.take()) is not None:
        rest.update(chunk.chunk_id for chunk in last)
        queue.finish(len(last))
    assert rest == left
