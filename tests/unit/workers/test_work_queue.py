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


def sizes(queue: WorkQueue) -> list[int]:
    """Take and finish everything; return the sizes of the batches."""
    found = []
    while (batch := queue.take()) is not None:
        found.append(len(batch.chunks))
        queue.finish(len(batch.chunks))
    return found


class Taker(threading.Thread):
    """Takes once, in a thread of its own, as a worker does."""

    def __init__(self, take: Callable[[], Batch | None]) -> None:
        super().__init__(daemon=True)
        self._take = take
        self.batch: Batch | None = None
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
        self.join(60)
        assert not self.is_alive(), "take never returned"
        return None if self.batch is None else self.batch.chunks


# --- what there is time for -------------------------------------------------------------------------------------------


def of_lengths(*lengths_s: int) -> WorkQueue:
    queue = WorkQueue(SystemClock(), workers=1, wants=100)
    queue.add([Chunk("r", f"{s}s", "a.wav", "/a.wav", 0, 1000 * s) for s in lengths_s], complete=True)
    return queue


class Hours:
    """Room for so many seconds of audio in all."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    def __call__(self, chunk: Chunk) -> bool:
        assert chunk.audio_s is not None
        if chunk.audio_s > self.left_s:
            return False
        self.left_s -= chunk.audio_s
        return True


def test_where_the_longest_does_not_fit_the_longest_that_does_is_taken() -> None:
    queue = of_lengths(90, 60, 50, 30, 30, 10)
    batch = queue.take(Hours(95))
    assert batch is not None
    assert [chunk.chunk_id for chunk in batch.chunks] == ["90s"]
    assert [chunk.chunk_id for chunk in queue.more(9, idle=9, fits=Hours(75)) or ()] == ["60s", "10s"]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 300))
def test_each_chunk_taken_is_the_longest_that_still_fits(lengths_s: list[int], seconds: int) -> None:
    expected, left_s = [], seconds
    for length_s in sorted(lengths_s, reverse=True):
        if length_s <= left_s:
            expected.append(float(length_s))
            left_s -= length_s
    queue = of_lengths(*lengths_s)
    fresh = queue.more(99, idle=99, fits=Hours(seconds)) or []
    assert [chunk.audio_s for chunk in fresh] == expected
    rest = [chunk.audio_s or 0.0 for chunk in queue.more(99, idle=99) or []]
    assert rest == sorted(rest, reverse=True), "who has more time gets what is left, the longest first"


def test_a_worker_with_no_time_for_anything_goes_home_and_what_is_left_stays() -> None:
    queue = of_lengths(60, 50)
    assert queue.more(9, idle=9, fits=Hours(40)) == []
    assert queue.take(Hours(40)) is None
    assert [chunk.chunk_id for chunk in taken(queue)] == ["60s", "50s"]


def test_suspects_for_whom_there_is_no_time_keep_nobody_waiting() -> None:
    queue = of_lengths(60)
    queue.put_back(taken(queue), alone=True)
    assert queue.take(Hours(40)) is None
    assert queue.take(Hours(60)) is not None


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(0, 300))
def test_nothing_that_fits_is_left_when_a_worker_goes_home(lengths_s: list[int], seconds: int) -> None:
    queue, room, got = of_lengths(*lengths_s), Hours(seconds), 0
    while (batch := queue.take(room)) is not None:
        got += len(batch.chunks)
        queue.finish(len(batch.chunks))
    rest = [chunk.audio_s or 0 for chunk in queue.upcoming(99)]
    assert got + len(rest) == len(lengths_s)
    assert all(length_s > room.left_s for length_s in rest)


def test_a_worker_that_waits_goes_home_when_it_is_told_to() -> None:
    queue, over = filled(1), threading.Event()
    taken(queue)
    waiting = Taker(lambda: queue.take(over=over.is_set))
    assert waiting.waits
    over.set()
    queue.change_workers(-1)
    assert waiting.answer() is None


# --- one after the other ----------------------------------------------------------------------------------------------


def test_chunks_come_one_by_one_in_the_order_of_the_source() -> None:
    queue = filled(5)
    assert [taken(queue) for _ in range(5)] == [[chunk] for chunk in chunks(5)]


def test_the_longest_chunks_come_first_and_those_of_unknown_length_before_them() -> None:
    lengths = [30, 5, None, 600, 30, None]
    source = [
        Chunk("r", f"c{n}", "a.wav", "/a.wav", 1000, None if length is None else 1000 + length * 1000)
        for n, length in enumerate(lengths)
    ]
    queue = WorkQueue(SystemClock(), workers=1, wants=10)
    queue.add(source, complete=True)
    assert [chunk.chunk_id for chunk in taken(queue)] == ["c2", "c5", "c3", "c0", "c4", "c1"]


def test_an_empty_source_is_over_at_once() -> None:
    assert filled(0).take() is None


@pytest.mark.parametrize(
    ("count", "workers", "shares"),
    [(10, 3, [4, 3, 3]), (2, 4, [1, 1]), (7, 1, [7]), (0, 3, []), (4, 4, [1, 1, 1, 1]), (9, 2, [5, 4])],
)
def test_batches_are_fair_shares(count: int, workers: int, shares: list[int]) -> None:
    assert sizes(filled(count, workers=workers, wants=1000)) == shares


def test_a_share_is_cut_where_it_would_be_too_long_and_the_last_ones_are_shared() -> None:
    assert sizes(filled(23, workers=2, wants=5)) == [5, 5, 5, 5, 2, 1]


def test_every_fresh_load_is_shared_out_anew() -> None:
    queue = WorkQueue(SystemClock(), workers=2, wants=1000)
    queue.add(chunks(4), complete=False)
    assert [len(taken(queue)) for _ in range(2)] == [2, 2]
    queue.add(chunks(6, first=4), complete=True)
    assert [len(taken(queue)) for _ in range(2)] == [3, 3]


def test_the_queue_asks_for_more_when_it_is_half_empty_and_not_before() -> None:
    queue = WorkQueue(SystemClock(), workers=2, wants=1000)
    wanted = queue.room
    assert wanted == WorkQueue.WINDOW
    queue.add(chunks(wanted), complete=False)
    rooms = []
    while queue.room == 0:
        rooms.append(len(taken(queue)))
    assert wanted // 2 <= sum(rooms) <= wanted // 2 + 1000
    assert queue.room == sum(rooms)


def test_a_million_chunks_are_never_in_the_queue_at_once() -> None:
    assert WorkQueue(SystemClock(), workers=400, wants=4096).room <= 20_000


# --- keeping a worker fed ---------------------------------------------------------------------------------------------


def test_a_worker_gets_more_while_it_has_some() -> None:
    queue = filled(100, workers=2, wants=4)
    assert taken(queue) == chunks(4)
    assert queue.more(3, idle=0) == chunks(3, first=4)


def test_near_the_end_nobody_hoards_and_nobody_is_idle() -> None:
    queue = filled(10, workers=2, wants=4)
    assert len(taken(queue)) == 4
    assert queue.more(3, idle=0) == [], "six are left for two workers that like to hold four each"
    assert queue.more(3, idle=2) == chunks(2, first=4), "but who could begin at once may"
    assert queue.more(9, idle=9) == chunks(4, first=6)
    assert queue.more(1, idle=1) == [], "and an empty queue is no reason to wait"


def test_what_a_worker_got_later_is_in_flight_as_well() -> None:
    queue = filled(3, wants=1)
    batch = [*taken(queue), *(queue.more(2, idle=2) or [])]
    assert batch == chunks(3)
    taker = Taker(queue.take)
    assert taker.waits
    queue.finish(2)
    assert taker.waits
    queue.finish()
    assert taker.answer() is None


def test_a_chunk_that_has_rested_goes_to_a_worker_at_work() -> None:
    clock = HandClock()
    queue = WorkQueue(clock, workers=1, wants=2)
    queue.add(chunks(9), complete=True)
    first = taken(queue)
    queue.put_back(first[:1], delay_s=5)
    assert queue.more(1, idle=0) == chunks(1, first=2)
    clock.sleep(5)
    assert queue.more(1, idle=0) == first[:1]


def test_for_suspects_one_worker_comes_to_an_end_and_only_one() -> None:
    queue = filled(20, workers=2, wants=2)
    suspects = taken(queue)
    taken(queue)
    queue.put_back(suspects, alone=True)
    assert queue.more(1, idle=1) is None
    assert queue.more(1, idle=1) == chunks(1, first=4), "the other worker goes on"
    batch = queue.take()
    assert batch is not None
    assert (batch.chunks, batch.alone) == (suspects, True)
    assert queue.more(1, idle=1) == chunks(1, first=5)


def test_each_time_suspects_wait_a_worker_comes_to_an_end_for_them() -> None:
    queue = filled(20, workers=2, wants=2)
    for _ in range(3):
        suspects = taken(queue)
        queue.put_back(suspects, alone=True)
        assert queue.more(1, idle=1) is None
        assert queue.take() == Batch(suspects, alone=True)
        queue.finish(len(suspects))


def test_for_suspects_that_a_free_worker_has_taken_no_other_comes_to_an_end() -> None:
    queue = filled(20, workers=2, wants=2)
    suspects = taken(queue)
    queue.put_back(suspects, alone=True)
    assert queue.take() == Batch(suspects, alone=True)
    assert queue.more(1, idle=1) == chunks(1, first=2)


def test_a_queue_that_drains_gives_no_more() -> None:
    queue = filled(20, wants=2)
    taken(queue)
    queue.drain()
    assert queue.more(5, idle=5) == []


# --- looking ahead ----------------------------------------------------------------------------------------------------


def test_what_comes_next_can_be_seen_and_is_not_taken() -> None:
    queue = filled(5, wants=2)
    assert queue.upcoming(3) == chunks(3)
    assert queue.upcoming(99) == chunks(5)
    assert taken(queue) == chunks(2)
    assert queue.upcoming(2) == chunks(2, first=2)
    assert queue.upcoming(0) == []


@given(st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=60), st.integers(0, 70))
def test_what_is_seen_ahead_is_what_comes_in_the_same_order(lengths: list[int | None], count: int) -> None:
    queue = WorkQueue(SystemClock(), workers=1, wants=1000)
    ends = [None if length is None else length * 1000 for length in lengths]
    queue.add([Chunk("r", f"c{n}", "a.wav", "/a.wav", 0, end) for n, end in enumerate(ends)], complete=True)
    seen = queue.upcoming(count)
    assert seen == (taken(queue) if lengths else [])[:count]


def test_a_look_ahead_costs_no_more_in_a_full_queue_than_in_a_small_one() -> None:
    def best_s(queue: WorkQueue) -> float:
        times = []
        for _ in range(20):
            start_s = time.perf_counter()
            assert len(queue.upcoming(64)) == 64
            times.append(time.perf_counter() - start_s)
        return min(times)

    assert best_s(filled(WorkQueue.WINDOW)) < 4 * best_s(filled(100)) + 0.0002


def test_of_a_queue_that_drains_nothing_comes_next() -> None:
    queue = filled(5)
    queue.drain()
    assert queue.upcoming(5) == []


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_taker_waits_while_a_chunk_in_flight_may_come_back() -> None:
    queue = filled(1)
    first = taken(queue)
    taker = Taker(queue.take)
    assert taker.waits
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
    queue = WorkQueue(SystemClock(), workers=1, wants=1)
    queue.add([], complete=False)
    taker = Taker(queue.take)
    assert taker.waits
    queue.add(chunks(1), complete=True)
    assert taker.answer() == chunks(1)


def test_a_chunk_that_rests_is_not_handed_out_before_its_time_and_others_pass_it() -> None:
    queue = filled(2)
    first = taken(queue)
    queue.put_back(first, delay_s=0.2)
    assert taken(queue) == [chunks(2)[1]]
    taker = Taker(queue.take)
    assert taker.answer() == first
    assert taker.took_s >= 0.15


def test_of_two_that_rest_the_one_whose_time_comes_first_is_first() -> None:
    queue = filled(2)
    long, short = taken(queue), taken(queue)
    queue.put_back(long, delay_s=0.1)
    queue.put_back(short, delay_s=0.02)
    assert [taken(queue), taken(queue)] == [short, long]


def test_suspects_that_are_put_back_stay_together_and_alone() -> None:
    queue = filled(9, workers=1, wants=1000)
    batch = taken(queue)
    queue.put_back(batch[:3], alone=True)
    queue.put_back(batch[3:4], alone=True)
    queue.add(chunks(2, first=9), complete=True)
    queue.finish(5)
    assert [queue.take(), queue.take()] == [Batch(batch[:3], True), Batch(batch[3:4], True)]
    assert queue.take() == Batch(chunks(2, first=9))


def test_a_worker_whose_engine_is_lean_gets_what_wants_it_so_first_and_others_the_other() -> None:
    queue = filled(4, workers=1, wants=1000)
    one, two, three, four = taken(queue)
    queue.put_back([one], alone=True)
    queue.put_back([two], lean=True)
    queue.put_back([three], alone=True)
    queue.put_back([four], lean=True)
    assert queue.take(lean=True) == Batch([two], alone=True, lean=True)
    assert queue.take(lean=True) == Batch([four], alone=True, lean=True)
    assert queue.take(lean=True) == Batch([one], alone=True)
    assert queue.take() == Batch([three], alone=True)


def test_draining_hands_out_nothing_more_and_wakes_everybody() -> None:
    queue = filled(3)
    queue.take()
    drained = WorkQueue(SystemClock(), workers=1, wants=1)
    drained.add([], complete=False)
    taker = Taker(drained.take)
    assert taker.waits
    for one in (queue, drained):
        one.drain()
    assert taker.answer() is None
    assert queue.take() is None


# --- in a crowd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", [1, 5])
def test_many_workers_settle_every_chunk_exactly_once(wants: int) -> None:
    queue = WorkQueue(SystemClock(), workers=6, wants=wants)
    lock = threading.Lock()
    in_hand: set[str] = set()
    settled: Counter[str] = Counter()
    trouble: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while (batch := queue.take()) is not None:
            held = [*batch.chunks, *([] if batch.alone else queue.more(wants, idle=1) or [])]
            ids = {chunk.chunk_id for chunk in held}
            with lock:
                trouble.extend(ids & in_hand)
                in_hand.update(ids)
            time.sleep(chance.random() / 2000)
            back = [chunk for chunk in held if chance.random() < 0.3]
            with lock:
                in_hand.difference_update(ids)
                settled.update(ids - {chunk.chunk_id for chunk in back})
            if back:
                queue.put_back(back, delay_s=chance.choice([0, 0.001, 0.003]), alone=chance.random() < 0.5)
            queue.finish(len(held) - len(back))

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
        st.tuples(st.just("more"), st.integers(0, 4)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("put back"), st.integers(0, 9)),
        st.tuples(st.just("put back alone"), st.integers(0, 9)),
        st.tuples(st.just("sleep"), st.integers(0, 4)),
        st.tuples(st.just("add"), st.integers(0, 7)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(deeds, st.integers(1, 6), st.integers(1, 4))
def test_whatever_happens_every_chunk_is_in_one_place(script: list[tuple[str, int]], wants: int, workers: int) -> None:
    clock = HandClock()
    queue = WorkQueue(clock, workers=workers, wants=wants)
    outside: Counter[str] = Counter()  # in flight
    in_flight: list[list[Chunk]] = []
    inside: list[tuple[float, str]] = []  # (when it may come at the earliest, chunk)
    added = 0

    def hand_out(batch: list[Chunk]) -> None:
        ready = Counter(chunk_id for due_s, chunk_id in inside if due_s <= clock.monotonic_s())
        for chunk in batch:
            assert ready[chunk.chunk_id] == 1, "it rests, or is in flight"
            inside[:] = [entry for entry in inside if entry[1] != chunk.chunk_id]
            outside[chunk.chunk_id] += 1
        in_flight.append(batch)

    for deed, number in script:
        if deed == "add":
            queue.add(chunks(number, first=added), complete=False)
            inside += [(0.0, f"c{n}") for n in range(added, added + number)]
            added += number
        elif deed == "sleep":
            clock.sleep(number)
        elif deed == "take" and any(due_s <= clock.monotonic_s() for due_s, _ in inside):
            batch = queue.take()
            assert batch is not None
            assert batch.alone or 1 <= len(batch.chunks) <= wants
            hand_out(batch.chunks)
        elif deed == "more":
            if fresh := queue.more(number, idle=number // 2):
                hand_out(fresh)
        elif deed in ("finish", "put back", "put back alone") and in_flight:
            held = in_flight.pop(number % len(in_flight))
            if deed == "finish":
                queue.finish(len(held))
            else:
                queue.put_back(held, delay_s=number, alone=deed.endswith("alone"))
                inside += [(clock.monotonic_s() + number, chunk.chunk_id) for chunk in held]
    for held in in_flight:
        queue.finish(len(held))
    queue.add([], complete=True)
    clock.sleep(100)
    rest: Counter[str] = Counter()
    while (last := queue.take()) is not None:
        rest.update(chunk.chunk_id for chunk in last.chunks)
        queue.finish(len(last.chunks))
    assert rest == Counter(chunk_id for _, chunk_id in inside)
