"""What the supervisor makes of its workers' news: done, try again, or failed for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from rooms.devices import EndTime
from rooms.model import Chunk, ChunkStarted, Device, WorkerPlan
from rooms.root import NotHere, SessionBroken
from rooms.task import TimeBudget
from rooms.workers import RetryPolicy, Supervisor, WorkQueue
from support.hand_clock import HandClock
from support.scripted_engine import CLOCK, News, Notebook, Script, ScriptedEngine, ScriptedSession, done, failed

FAST = RetryPolicy(retries=2, backoff_s=0.005)


class Bench:
    """A supervisor over a scripted engine, run to its end in the test's own thread."""

    def __init__(
        self,
        tmp_path: Path,
        script: Script,
        *,
        chunks: int = 4,
        workers: int = 1,
        policy: RetryPolicy = FAST,
        wants: int = 1,
        on_open: Callable[[WorkerPlan], None] = lambda plan: None,
        notebook: type[Notebook] = Notebook,
    ) -> None:
        self.engine = ScriptedEngine(script, wants=wants, on_open=on_open)
        self.notes = notebook([Chunk("r", f"c{n}", "a.wav", "/a.wav") for n in range(chunks)])
        plans = [WorkerPlan(n, Device(str(n), "test", uuid=f"GPU-{n}"), 100 + n, 1) for n in range(workers)]
        self.supervisor = Supervisor(
            self.engine, plans, self.notes, clock=CLOCK, policy=policy, scratch=tmp_path / "scratch"
        )

    def run(self, until: Callable[[], bool] = lambda: False) -> Bench:
        """Handle events until all is over, or ``until`` says so."""
        if not self.supervisor.busy:
            self.supervisor.start()
        end_s = time.monotonic() + 60
        while self.supervisor.busy and not until():
            assert time.monotonic() < end_s, f"it never ends: {self.notes.status}"
            self.supervisor.handle_events(timeout_s=0.02)
        return self

    def with_status(self, status: str) -> list[str]:
        return sorted(chunk_id for chunk_id, found in self.notes.status.items() if found == status)


def all_well(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    for chunk in batch:
        yield ChunkStarted(chunk, 0)
        yield done(chunk)


def together(workers: int) -> Script:
    """Make a script that waits until every worker has a batch."""
    barrier = threading.Barrier(workers)

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        barrier.wait(60)
        yield from all_well(session, batch)

    return script


# --- done, retried, failed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants", [1, 7, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_chunk_is_done_once(tmp_path: Path, workers: int, wants: int) -> None:
    bench = Bench(tmp_path, all_well, chunks=200, workers=workers, wants=wants).run()
    assert len(bench.with_status("done")) == 200
    assert sorted(chunk_id for batch in bench.engine.batches for chunk_id in batch) == sorted(bench.notes.status)
    assert (bench.supervisor.tally.done, bench.supervisor.tally.tries, bench.supervisor.tally.failed) == (200, 200, 0)


def test_a_worker_is_written_down_with_its_device_process_and_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, together(2), chunks=40, workers=2, wants=1000).run()
    rows = sorted(bench.notes.workers.values(), key=lambda row: str(row["device_id"]))
    assert [row["device_id"] for row in rows] == [100, 101]
    assert {row["pid"] for row in rows} == {1000, 1001}
    assert all(row["engine"] == "scripted" and row["exit_code"] == 0 for row in rows)
    assert all(session.closed == 1 for session in bench.engine.sessions)


def test_each_worker_has_its_own_scratch_folder(tmp_path: Path) -> None:
    Bench(tmp_path, together(2), chunks=40, workers=2, wants=1000).run()
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == ["worker-0", "worker-1"]


def test_without_workers_nothing_begins(tmp_path: Path) -> None:
    bench = Bench(tmp_path, all_well, workers=0).run()
    assert len(bench.with_status("pending")) == 4


def test_a_chunk_that_fails_is_tried_again_after_growing_rests(tmp_path: Path) -> None:
    tries: list[float] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        tries.append(time.monotonic())
        yield done(batch[0]) if len(tries) == 4 else failed(batch[0])

    bench = Bench(tmp_path, script, chunks=1, policy=RetryPolicy(retries=3, backoff_s=0.04)).run()
    assert bench.with_status("done") == ["c0"]
    rests = [later - earlier for earlier, later in pairwise(tries)]
    assert [rest >= least for rest, least in zip(rests, (0.04, 0.08, 0.16), strict=True)] == [True] * 3
    assert [attempt.try_number for attempt in bench.notes.attempts] == [1, 2, 3, 4]
    assert [attempt.status for attempt in bench.notes.attempts] == ["pending"] * 3 + ["done"]
    assert (bench.supervisor.tally.tries, bench.supervisor.tally.done) == (4, 1)


def test_rests_double_up_to_the_longest() -> None:
    policy = RetryPolicy(backoff_s=2.0, longest_backoff_s=10.0)
    assert [policy.delay_s(failures) for failures in range(1, 6)] == [2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_others_are_done_while_one_rests(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        first_time = batch[0].chunk_id == "c0" and len(session.batches) == 1
        yield failed(batch[0]) if first_time else done(batch[0])

    bench = Bench(tmp_path, script, policy=RetryPolicy(retries=1, backoff_s=0.1)).run()
    assert bench.engine.batches == [["c0"], ["c1"], ["c2"], ["c3"], ["c0"]]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_chunk_that_always_fails_fails_for_good_and_alone(tmp_path: Path, retries: int) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0], "bad_audio") if batch[0].chunk_id == "c2" else done(batch[0])

    bench = Bench(tmp_path, script, chunks=20, policy=RetryPolicy(retries, 0.001)).run()
    assert bench.with_status("failed") == ["c2"]
    assert len(bench.with_status("done")) == 19
    assert [attempt.error_class for attempt in bench.notes.tries_of("c2")] == ["bad_audio"] * (retries + 1)
    assert bench.supervisor.tally.failed == 1
    assert len(bench.engine.sessions) == 1, "a failure is no reason to start the engine anew"


# --- workers that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("death", ["engine_crash", "hang", "gpu_error"])
@pytest.mark.parametrize("retries", [1, 5])
def test_a_chunk_that_takes_its_worker_down_twice_is_poison_however_many_retries_there_are(
    tmp_path: Path, death: str, retries: int
) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if batch[0].chunk_id == "c1":
            raise SessionBroken(death, "segmentation fault")
        yield done(batch[0])

    bench = Bench(tmp_path, script, policy=RetryPolicy(retries=retries, backoff_s=0.001)).run()
    assert bench.with_status("poison") == ["c1"]
    assert bench.with_status("done") == ["c0", "c2", "c3"]
    assert [attempt.status for attempt in bench.notes.tries_of("c1")] == ["pending", "poison"]
    assert all(session.closed == 1 for session in bench.engine.sessions)
    assert len(bench.engine.sessions) == len(bench.notes.workers) >= 2


def test_a_worker_that_is_killed_is_not_its_chunks_fault_at_once_but_is_in_the_end(tmp_path: Path) -> None:
    """Nobody but an outsider sends KILL; a chunk that it happens to again and again is poison all the same."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        kills = {"c1": 2, "c2": 99}.get(batch[0].chunk_id, 0)
        if len(bench.notes.tries_of(batch[0].chunk_id)) < kills + 1:
            raise SessionBroken("worker_died", "SIGKILL")
        yield done(batch[0])

    bench = Bench(tmp_path, script, policy=RetryPolicy(retries=1, backoff_s=0.02))
    bench.run()
    assert bench.with_status("done") == ["c0", "c1", "c3"]
    assert bench.with_status("poison") == ["c2"]
    assert [attempt.error_class for attempt in bench.notes.tries_of("c2")] == ["worker_died"] * 4


def test_of_several_in_progress_nobody_is_charged_before_it_was_alone(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, 0)
        if any(chunk.chunk_id == "c5" for chunk in batch):
            raise SessionBroken("engine_crash", "segmentation fault")
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, chunks=8, wants=8, policy=RetryPolicy(retries=2, backoff_s=0.001)).run()
    assert bench.with_status("poison") == ["c5"]
    assert len(bench.with_status("done")) == 7
    classes = [attempt.error_class for attempt in bench.notes.tries_of("c5")]
    assert classes == ["batch_lost"] * 3 + ["engine_crash"] * 2, "8, 4, 2, then twice alone"


@pytest.mark.parametrize("error_class", ["engine_crash", "hang", "gpu_error", "out_of_memory"])
def test_what_may_take_others_down_is_tried_again_with_nothing_beside_it(tmp_path: Path, error_class: str) -> None:
    """Its batch has no other chunk, and no further ones are given to the engine meanwhile."""
    beside: list[int] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        if any(chunk.chunk_id == "c1" for chunk in batch) and bench.notes.tries_of("c1"):
            held += session.more(3, idle=3)
            beside.append(len(held) - 1)
        for chunk in held:
            yield ChunkStarted(chunk, 0)
            if chunk.chunk_id == "c1" and not beside:
                if error_class == "out_of_memory":
                    yield failed(chunk, error_class)
                    continue
                raise SessionBroken(error_class, "no luck")
            yield done(chunk)

    bench = Bench(tmp_path, script, chunks=400, wants=4, policy=RetryPolicy(retries=1, backoff_s=0.0))
    bench.run()
    assert len(bench.with_status("done")) == 400
    assert beside == [0]


def test_what_only_waited_in_a_broken_session_is_no_suspect(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if batch[0].chunk_id == "c0":
            raise SessionBroken("engine_crash", "segmentation fault")
        yield done(batch[0])
        for chunk in batch[1:]:
            yield ChunkStarted(chunk, 0)
            yield done(chunk)

    bench = Bench(tmp_path, script, chunks=6, wants=6, policy=RetryPolicy(retries=0, backoff_s=0.001)).run()
    assert bench.with_status("failed") == ["c0"]
    assert [len(bench.notes.tries_of(f"c{n}")) for n in range(6)] == [1] * 6


def test_a_chunk_whose_worker_died_once_is_failed_not_poison(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.number == 1:
            raise SessionBroken("engine_crash", "segmentation fault")
        yield failed(batch[0], "exit_code")

    assert Bench(tmp_path, script, chunks=1).run().with_status("failed") == ["c0"]


def test_a_broken_session_blames_only_the_first_chunk_without_an_answer(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            if chunk.chunk_id == "c3":
                raise SessionBroken("engine_crash", "segmentation fault")
            yield done(chunk)

    bench = Bench(tmp_path, script, chunks=8, wants=1000).run()
    assert bench.with_status("poison") == ["c3"]
    assert len(bench.with_status("done")) == 7
    assert [attempt.chunk_id for attempt in bench.notes.attempts if attempt.error_class] == ["c3"] * 2


def test_an_engine_that_passes_over_a_chunk_in_silence_has_failed_it(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (done(chunk) for chunk in batch if chunk.chunk_id != "c1")

    bench = Bench(tmp_path, script, chunks=4, wants=1000).run()
    assert (bench.with_status("done"), bench.with_status("failed")) == (["c0", "c2", "c3"], ["c1"])
    assert [attempt.error_class for attempt in bench.notes.attempts if attempt.chunk_id == "c1"] == ["no_output"] * 3


def test_the_engine_is_opened_anew_after_it_broke_and_not_otherwise(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.number == 1 and batch[0].chunk_id == "c2":
            raise SessionBroken("worker_died", "killed")
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=5).run()
    assert bench.with_status("done") == ["c0", "c1", "c2", "c3", "c4"]
    assert len(bench.engine.sessions) == 2


def test_a_worker_ended_from_outside_costs_its_chunk_nothing(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if session.number <= 3:
            raise SessionBroken("terminated", "SIGTERM")
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=1, policy=RetryPolicy(retries=0, backoff_s=0.001)).run()
    assert bench.with_status("done") == ["c0"]
    assert bench.supervisor.tally.tries == 1
    assert [attempt.status for attempt in bench.notes.attempts] == [None, None, None, "done"]


def test_a_chunk_that_is_ended_from_outside_again_and_again_is_not_forgiven_for_ever(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        raise SessionBroken("terminated", "SIGTERM")
        yield

    bench = Bench(tmp_path, script, chunks=1, policy=RetryPolicy(retries=1, backoff_s=0.001)).run()
    assert bench.with_status("failed") == ["c0"]
    assert len(bench.engine.sessions) == 5


# --- a batch that is lost together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("guilty", ["c0", "c5", "c15"])
def test_a_lost_batch_is_halved_until_the_guilty_one_is_alone_and_only_it_fails(tmp_path: Path, guilty: str) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        ids = [chunk.chunk_id for chunk in batch]
        for chunk in batch:
            if guilty not in ids:
                yield done(chunk)
            elif len(ids) == 1:
                yield failed(chunk, "no_output")
            else:
                yield failed(chunk, "batch_lost", charged=False)

    bench = Bench(tmp_path, script, chunks=16, wants=1000, policy=RetryPolicy(retries=1, backoff_s=0.001)).run()
    assert bench.with_status("failed") == [guilty]
    assert len(bench.with_status("done")) == 15
    sizes = [len(batch) for batch in bench.engine.batches if guilty in batch]
    assert sizes == [16, 8, 4, 2, 1, 1]
    assert [attempt.try_number for attempt in bench.notes.tries_of(guilty)] == [1, 2, 3, 4, 5, 6]
    innocent = next(chunk_id for chunk_id in bench.notes.status if chunk_id != guilty)
    assert bench.notes.tries_of(innocent)[-1].status == "done"


def test_being_lost_with_others_is_never_charged(tmp_path: Path) -> None:
    rounds: list[int] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        rounds.append(len(batch))
        for chunk in batch:
            yield done(chunk) if len(batch) == 1 else failed(chunk, "batch_lost", charged=False)

    bench = Bench(tmp_path, script, chunks=32, wants=1000, policy=RetryPolicy(retries=0, backoff_s=0.001)).run()
    assert len(bench.with_status("done")) == 32
    assert rounds.count(1) == 32


# --- giving up --------------------------------------------------------------------------------------------------------


def test_a_configuration_that_cannot_work_is_given_up_at_once(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        raise SessionBroken("configuration", "no such region: CA-XX")
        yield

    # Opening takes its time, as it does in life: whatever was being opened at that moment may still be seen.
    bench = Bench(tmp_path, script, chunks=500, on_open=lambda plan: time.sleep(0.1)).run()
    assert bench.supervisor.tally.gave_up == "no such region: CA-XX"
    assert len(bench.engine.batches) <= 2
    assert len(bench.with_status("pending")) == 500


def test_a_worker_whose_device_does_not_work_for_the_engine_retires_and_the_others_go_on(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.slot == 0:
            raise SessionBroken("ran_on_cpu", "the engine took the CPU")
        time.sleep(0.005)  # so that both workers get their turn
        yield from all_well(session, batch)

    bench = Bench(tmp_path, script, chunks=20, workers=2).run()
    assert len(bench.with_status("done")) == 20
    assert [session.plan.slot for session in bench.engine.sessions] in ([0, 1], [1, 0])
    assert bench.supervisor.tally.retired == ["the engine took the CPU"]
    assert all(attempt.error_class is None for attempt in bench.notes.attempts)


@pytest.mark.parametrize("error_class", ["gpu_lost", "ran_on_cpu"])
def test_the_chunks_of_a_lost_gpu_go_to_the_others_uncharged(tmp_path: Path, error_class: str) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (ChunkStarted(chunk, 0) for chunk in batch)
        if session.plan.slot == 0:
            raise SessionBroken(error_class, "CUDA error: no CUDA-capable device is detected")
        time.sleep(0.005)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, chunks=20, workers=2, wants=4, policy=RetryPolicy(0, 0.001)).run()
    assert len(bench.with_status("done")) == 20
    assert len(bench.supervisor.tally.retired) == 1
    assert [session.plan.slot for session in bench.engine.sessions].count(0) == 1
    lost = [attempt for attempt in bench.notes.attempts if attempt.error_class is not None]
    assert 1 <= len(lost) <= 4
    assert {(attempt.error_class, attempt.status) for attempt in lost} == {(error_class, "pending")}


def test_a_device_with_one_error_after_the_other_is_lost_and_its_chunks_are_not(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if session.plan.slot == 0:
            raise SessionBroken("gpu_error", "CUDA error: unspecified launch failure")
        time.sleep(0.01)
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=60, workers=2, policy=RetryPolicy(3, 0.02)).run()
    assert len(bench.with_status("done")) >= 58
    assert [session.plan.slot for session in bench.engine.sessions].count(0) == 3
    assert "3 errors in a row on this device" in bench.supervisor.tally.retired[0]


def test_one_error_of_a_device_costs_a_new_process_and_no_device(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if batch[0].chunk_id in ("c2", "c5", "c8"):
            raise SessionBroken("gpu_error", "CUDA error: device-side assert triggered")
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=12, policy=RetryPolicy(2, 0.001)).run()
    assert bench.with_status("poison") == ["c2", "c5", "c8"]
    assert len(bench.with_status("done")) == 9
    assert bench.supervisor.tally.retired == []


def test_an_engine_that_breaks_before_it_is_ready_charges_no_chunk_and_ends_its_worker(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.slot == 0:
            raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
        time.sleep(0.01)
        yield from all_well(session, batch)

    bench = Bench(tmp_path, script, chunks=40, workers=2).run()
    assert len(bench.with_status("done")) == 40
    assert [session.plan.slot for session in bench.engine.sessions].count(0) <= 3
    assert all(attempt.error_class is None for attempt in bench.notes.attempts)


def test_when_no_engine_gets_ready_everything_stays_pending_and_the_reason_is_kept(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
        yield

    bench = Bench(tmp_path, script, workers=2).run()
    assert len(bench.with_status("pending")) == 4
    assert bench.supervisor.tally.retired == ["no room for the models"] * 2
    tried = sorted((session.plan.slot, session.plan.lean) for session in bench.engine.sessions)
    assert tried == [(0, False), (0, True), (1, False), (1, True)], "once as usual, once with less, and no third time"


def test_an_engine_that_never_works_is_given_up_after_a_number_of_chunks(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0], "exit_code")

    bench = Bench(tmp_path, script, chunks=100, policy=RetryPolicy(0, 0.001, give_up_after=5)).run()
    assert bench.supervisor.tally.gave_up is not None
    assert bench.supervisor.tally.gave_up.startswith(
        "5 chunks failed and no chunk was done; last error: exit_code: no luck"
    )
    assert len(bench.with_status("failed")) == 5
    assert len(bench.with_status("pending")) == 95


def test_missing_files_say_nothing_about_the_engine(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0]) if batch[0].chunk_id == "c29" else failed(batch[0], "missing_audio")

    bench = Bench(tmp_path, script, chunks=30, policy=RetryPolicy(0, 0.001, give_up_after=5)).run()
    assert bench.supervisor.tally.gave_up is None
    assert (len(bench.with_status("failed")), len(bench.with_status("done"))) == (29, 1)


def test_one_success_is_hope(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0]) if batch[0].chunk_id == "c3" else failed(batch[0])

    bench = Bench(tmp_path, script, chunks=30, policy=RetryPolicy(0, 0.001, give_up_after=5)).run()
    assert bench.supervisor.tally.gave_up is None
    assert len(bench.with_status("failed")) == 29


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_leaves_the_rest_pending(tmp_path: Path) -> None:
    running = threading.Barrier(3)
    go_on = threading.Event()

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        running.wait(60)
        go_on.wait(60)
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=50, workers=2)
    bench.supervisor.start()
    running.wait(60)
    bench.supervisor.drain()
    go_on.set()
    bench.run()
    assert len(bench.with_status("done")) == 2
    assert len(bench.with_status("pending")) == 48
    assert all(session.interrupted.is_set() and not session.killed.is_set() for session in bench.engine.sessions)


def test_draining_interrupts_a_whole_share_and_what_it_had_answered_counts(tmp_path: Path) -> None:
    answered = threading.Event()

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0])
        yield done(batch[1])
        answered.set()
        assert session.interrupted.wait(60)

    bench = Bench(tmp_path, script, chunks=50, wants=1000)
    bench.supervisor.start()
    assert answered.wait(60)
    bench.supervisor.drain()
    bench.run()
    assert bench.with_status("done") == ["c0", "c1"]
    assert len(bench.with_status("pending")) == 48
    assert len(bench.engine.batches) == 1


def test_draining_reaches_a_session_that_is_just_being_opened(tmp_path: Path) -> None:
    opening, drained = threading.Event(), threading.Event()

    def open_slowly(plan: WorkerPlan) -> None:
        opening.set()
        assert drained.wait(60)

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            if session.interrupted.is_set():
                return
            yield done(chunk)

    bench = Bench(tmp_path, script, chunks=50, wants=1000, on_open=open_slowly)
    bench.supervisor.start()
    assert opening.wait(60)
    bench.supervisor.drain()
    drained.set()
    bench.run()
    assert len(bench.with_status("pending")) == 50


def test_killing_leaves_what_ran_pending(tmp_path: Path) -> None:
    running = threading.Barrier(3)

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        running.wait(60)
        assert session.killed.wait(60)
        if session.plan.slot == 0:
            raise SessionBroken("worker_died", "killed")
        yield failed(batch[0], "worker_died")

    bench = Bench(tmp_path, script, chunks=10, workers=2, policy=RetryPolicy(retries=0, backoff_s=0.001))
    bench.supervisor.start()
    running.wait(60)
    bench.supervisor.kill()
    bench.run()
    assert len(bench.with_status("pending")) == 10
    assert [attempt.status for attempt in bench.notes.attempts] == [None, None]
    assert bench.supervisor.tally.failed == 0
    assert {row["exit_code"] for row in bench.notes.workers.values()} == {-9}


def test_a_chunk_that_was_done_when_the_kill_came_stays_done(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        bench.supervisor.kill()
        yield done(batch[0])

    bench = Bench(tmp_path, script, chunks=3)
    bench.run()
    assert bench.with_status("done") == ["c0"]


def test_killing_reaches_a_session_that_is_just_being_opened(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        assert session.killed.wait(60)
        raise SessionBroken("worker_died", "killed")
        yield

    bench = Bench(tmp_path, script, on_open=lambda plan: bench.supervisor.kill())
    bench.run()
    assert len(bench.with_status("pending")) == 4


def test_stopping_while_a_chunk_rests_does_not_wait_for_it(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0])

    bench = Bench(tmp_path, script, chunks=1, policy=RetryPolicy(retries=2, backoff_s=60))
    start_s = time.monotonic()
    bench.run(until=lambda: bench.supervisor.tally.tries == 1)
    bench.supervisor.drain()
    bench.run()
    assert time.monotonic() - start_s < 40
    assert bench.with_status("pending") == ["c0"]


# --- trouble of our own -----------------------------------------------------------------------------------------------


def test_a_bug_in_a_session_comes_out_where_the_task_can_see_it(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0])
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        Bench(tmp_path, script).run()


@pytest.mark.parametrize("error", [NotHere("no licence left"), OSError("no more processes")])
def test_a_worker_that_cannot_open_its_engine_leaves_the_work_to_the_others(tmp_path: Path, error: Exception) -> None:
    def refuse_slot_0(plan: WorkerPlan) -> None:
        if plan.slot == 0:
            raise error

    def slowly(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        time.sleep(0.005)  # so that both workers get their turn
        yield from all_well(session, batch)

    bench = Bench(tmp_path, slowly, chunks=20, workers=2, on_open=refuse_slot_0).run()
    assert len(bench.with_status("done")) == 20
    assert {row["device_id"] for row in bench.notes.workers.values()} == {101}


def test_when_no_worker_can_open_its_engine_everything_stays_pending(tmp_path: Path) -> None:
    openings: list[int] = []

    def refuse(plan: WorkerPlan) -> None:
        openings.append(plan.slot)
        raise NotHere("no licence left")

    bench = Bench(tmp_path, all_well, workers=2, on_open=refuse).run()
    assert len(bench.with_status("pending")) == 4
    assert sorted(openings) == [0, 0, 0, 1, 1, 1]


def test_a_worker_whose_engine_breaks_at_each_start_ends_after_as_many_starts_as_a_chunk_has_tries(
    tmp_path: Path,
) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        raise SessionBroken("engine_crash", "the models could not be read", at_start=True)
        yield

    bench = Bench(tmp_path, script, policy=RetryPolicy(retries=2, backoff_s=0.001)).run()
    assert len(bench.engine.sessions) == 3
    assert bench.supervisor.tally.retired == ["the models could not be read"]
    assert len(bench.with_status("pending")) == 4


def test_an_engine_that_opens_at_the_second_try_is_given_its_chance(tmp_path: Path) -> None:
    openings: list[int] = []

    def refuse_once(plan: WorkerPlan) -> None:
        openings.append(plan.slot)
        if len(openings) == 1:
            raise OSError("try again")

    assert len(Bench(tmp_path, all_well, on_open=refuse_once).run().with_status("done")) == 4
    assert len(openings) == 2


@pytest.mark.parametrize("refused", ["by the system", "by the engine itself"])
def test_openings_that_failed_are_forgotten_as_soon_as_one_works(tmp_path: Path, refused: str) -> None:
    """Each session does one chunk; two openings fail before each. A third in a row would end the worker."""
    openings: list[int] = []

    def open_every_third_time(plan: WorkerPlan) -> None:
        openings.append(plan.slot)
        if refused == "by the system" and len(openings) % 3:
            raise OSError("try again")

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if refused == "by the engine itself" and len(openings) % 3:
            raise SessionBroken("engine_crash", "the models could not be read", at_start=True)
        yield done(batch[0])
        raise SessionBroken("terminated", "SIGTERM")

    start_s = time.monotonic()
    policy = RetryPolicy(retries=2, backoff_s=0.001)
    bench = Bench(tmp_path, script, chunks=7, policy=policy, on_open=open_every_third_time).run()
    assert len(bench.with_status("done")) == 7
    assert len(openings) == 21
    assert time.monotonic() - start_s < 10, "the rests, 1 and 2 ms before each session, add up to 16 s if they grow on"


# --- more workers, and fewer ------------------------------------------------------------------------------------------


def slowly(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    for chunk in batch:
        yield ChunkStarted(chunk, 0)
        time.sleep(0.01)
        yield done(chunk)


def test_a_worker_that_is_hired_later_takes_its_share(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slowly, chunks=60)
    bench.run(until=lambda: bench.supervisor.tally.done >= 5)
    bench.supervisor.add_worker(WorkerPlan(1, Device("1", "test", uuid="GPU-1"), 101, 1))
    assert bench.supervisor.slots_at_work == {0: 100, 1: 101}
    bench.run()
    assert len(bench.with_status("done")) == 60
    assert bench.supervisor.finished[1] >= 10
    assert sum(bench.supervisor.finished.values()) == 60


def test_a_worker_that_retires_finishes_what_it_has_and_the_others_do_the_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slowly, chunks=60, workers=2)
    bench.run(until=lambda: bench.supervisor.tally.done >= 10)
    bench.supervisor.retire(1)
    assert bench.supervisor.slots_at_work == {0: 100}
    at_most = bench.supervisor.finished.get(1, 0) + 2  # in hand, or finished and not yet told
    bench.run()
    assert len(bench.with_status("done")) == 60
    assert bench.supervisor.finished[1] <= at_most
    assert len(bench.notes.attempts) == 60


def test_near_the_end_the_work_is_shared_among_as_many_workers_as_there_are_now(tmp_path: Path) -> None:
    begun, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    fresh: list[int] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        begun[session.plan.slot].set()
        assert go_on[session.plan.slot].wait(60)
        if session.plan.slot == 0:
            held += session.more(3, idle=0)
            fresh.append(len(held) - len(batch))
        yield from (done(chunk) for chunk in held)

    bench = Bench(tmp_path, script, chunks=14, wants=4)
    bench.supervisor.start()
    assert begun[0].wait(60)
    bench.supervisor.add_worker(WorkerPlan(1, Device("1", "test", uuid="GPU-1"), 101, 1))
    assert begun[1].wait(60)
    go_on[0].set()
    bench.run(until=lambda: bool(fresh))
    go_on[1].set()
    bench.run()
    assert fresh[0] == 0, "six wait for two workers that like to hold four each"
    assert len(bench.with_status("done")) == 14


def test_near_the_end_nothing_is_kept_for_a_worker_that_retires(tmp_path: Path) -> None:
    begun, go_on = threading.Barrier(3), threading.Event()
    fresh: list[int] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        if not fresh:
            begun.wait(60)
            assert go_on.wait(60)
        if session.plan.slot == 0:
            held += session.more(3, idle=0)
            fresh.append(len(held) - len(batch))
        yield from (done(chunk) for chunk in held)

    bench = Bench(tmp_path, script, chunks=14, workers=2, wants=4)
    bench.supervisor.start()
    begun.wait(60)
    bench.supervisor.retire(1)
    go_on.set()
    bench.run()
    assert fresh[0] == 2, "six wait for one worker that likes to hold four"
    assert len(bench.with_status("done")) == 14


@pytest.mark.parametrize("count", [WorkQueue.WINDOW + 1, 2 * WorkQueue.WINDOW])
def test_a_source_with_more_chunks_than_the_queue_holds_at_once_is_done_to_its_end(tmp_path: Path, count: int) -> None:
    answered = threading.Event()

    class SlowNotebook(Notebook):
        """Takes its time for all but the first chunks: meanwhile the worker has nothing to do."""

        def next_pending(self, limit: int) -> Sequence[Chunk]:
            if len(self._fresh) < count:
                time.sleep(0.02)
            return super().next_pending(limit)

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (done(chunk) for chunk in batch)
        answered.set()

    bench = Bench(tmp_path, script, chunks=count, wants=WorkQueue.WINDOW, notebook=SlowNotebook)
    bench.supervisor.start()
    assert answered.wait(60)
    bench.run()
    assert len(bench.with_status("done")) == count
    assert sorted(chunk_id for batch in bench.engine.batches for chunk_id in batch) == sorted(bench.notes.status)


def test_a_failed_try_has_the_state_of_its_device_and_a_good_one_has_none(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (failed(chunk) if chunk.chunk_id == "c1" else done(chunk) for chunk in batch)

    engine = ScriptedEngine(script)
    notes = Notebook([Chunk("r", f"c{n}", "a.wav", "/a.wav") for n in range(2)])
    supervisor = Supervisor(
        engine,
        [WorkerPlan(0, Device("0", "test", uuid="GPU-0"), 100, 1)],
        notes,
        clock=CLOCK,
        policy=RetryPolicy(retries=0),
        scratch=tmp_path,
        device_state=lambda device_id, at_ms: f"{device_id} before {at_ms > 0}",
    )
    supervisor.start()
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    assert [(a.chunk_id, a.gpu_state) for a in notes.attempts] == [("c0", None), ("c1", "100 before True")]


@pytest.mark.parametrize(
    ("lengths_s", "at_once", "later_s", "more"),
    [
        ([2000, 1500], 1, 0, []),
        ([2000, 1400], 1, 0, ["1400s-1"]),
        ([2000, 1400], 1, 1000, ["1400s-1"]),
        ([1850, 1500, 1500], 2, 0, ["1500s-2"]),
        ([1850, 1500, 1900], 2, 0, ["1850s-0"]),
    ],
    ids=[
        "too long after it",
        "fits after it",
        "it is half done",
        "two at once",
        "what did not fit after one fits beside two",
    ],
)
def test_a_worker_gets_what_it_finishes_in_time_after_what_it_has_begun(
    tmp_path: Path, lengths_s: list[int], at_once: int, later_s: float, more: list[str]
) -> None:
    """There are 3580 s for work, a second of audio takes a second, and a tenth of a chunk is kept in reserve."""
    clock = HandClock()
    pace = TimeBudget(EndTime(clock.now_ms() + 3_600_000, "run.stop_after"), clock)
    pace.learn(lambda limit: [(100, 1.0, 1.0)])
    fresh: list[list[str]] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (ChunkStarted(chunk, clock.now_ms()) for chunk in batch)
        clock.sleep(later_s)
        held = [*batch, *session.more(1, idle=1)]
        fresh.append([chunk.chunk_id for chunk in held[len(batch) :]])
        yield from (done(chunk) for chunk in held)

    chunks = [Chunk("r", f"{s}s-{n}", "a.wav", "/a.wav", 0, 1000 * s) for n, s in enumerate(lengths_s)]
    plans = [WorkerPlan(0, Device("0", "test", uuid="GPU-0"), 100, 1)]
    supervisor = Supervisor(
        ScriptedEngine(script, wants=at_once), plans, Notebook(chunks), clock=CLOCK, policy=FAST, scratch=tmp_path,
        timetable=pace.fit_test,
    )  # fmt: skip
    supervisor.start()
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    assert fresh[0] == more
