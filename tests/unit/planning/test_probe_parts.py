"""The parts of a probe: pretended memory, an engine that is listened to, and the page."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rooms.devices import open_reader, simulated_uuid
from rooms.model import TOO_LONG, Chunk, StandIn, Trial, WorkerPlan
from rooms.planning import TrialEvents, evaluate, probe_page, probe_text, why_not_finished
from rooms.root import SessionBroken
from rooms.task import StopRequest
from rooms.workers import BATCH_LOST, EXIT_CODE, OUT_OF_MEMORY, RetryPolicy, Supervisor, parse_arguments, take_memory
from support.hand_clock import HandClock
from support.probes import GIB, KEY, trial
from support.scripted_engine import CLOCK, News, Notebook, Script, ScriptedEngine, ScriptedSession, done, failed

MIB = 2**20
CHUNKS = [Chunk("r", name, f"{name}.wav", f"/{name}.wav") for name in ("a", "b")]


# --- memory that does not exist ---------------------------------------------------------------------------------------


def test_a_simulated_device_shows_what_living_processes_pretend_to_have(tmp_path: Path) -> None:
    uuid = simulated_uuid(0)
    for name, text in ((f"{uuid}.{os.getpid()}", str(5 * MIB)), (f"{uuid}.1", str(MIB)), (f"{uuid}.999999999", "7"),
                       (f"{simulated_uuid(1)}.1", "9"), (f"{uuid}.{os.getppid()}", "half a num")):  # fmt: skip
        (tmp_path / name).write_text(text)
    clock = HandClock()
    reader = open_reader(StandIn(2, ledger=str(tmp_path)), clock, clock.now_ms(), None)
    assert [reader.read(simulated_uuid(index)).memory_used_bytes for index in (0, 1)] == [6 * MIB, 9]
    plain = open_reader(StandIn(1), clock, clock.now_ms(), None)
    assert (plain.read(uuid).memory_used_bytes or 0) > 100 * MIB


def test_the_demo_engine_takes_memory_by_the_second_and_runs_out_of_it_as_pytorch_does(tmp_path: Path) -> None:
    place = ["--memory-per-s=4", "--device=GPU-x", f"--device-bytes={100 * MIB}", f"--ledger={tmp_path}"]
    usual, lean = parse_arguments(place), parse_arguments([*place, "--lean"])
    assert take_memory(usual, 12.5) is None
    assert (tmp_path / f"GPU-x.{os.getpid()}").read_text() == str(100 * MIB)
    refusal = take_memory(usual, 12.6)
    assert refusal is not None and refusal.startswith("CUDA out of memory. Tried to allocate 101 MiB.")
    assert take_memory(lean, 25) is None
    assert take_memory(lean, 25.5) is not None


def test_workers_of_one_pretended_device_share_its_memory_as_long_as_they_live(tmp_path: Path) -> None:
    place = ["--memory-per-s=1", "--lean", "--device=GPU-x", f"--device-bytes={100 * MIB}", f"--ledger={tmp_path}"]
    memory = parse_arguments(place)
    (tmp_path / f"GPU-x.{os.getppid()}").write_text(str(60 * MIB))
    (tmp_path / f"GPU-y.{os.getppid()}").write_text(str(60 * MIB))
    (tmp_path / "GPU-x.999999999").write_text(str(60 * MIB))
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # nobody has taken leave of it yet
    (tmp_path / f"GPU-x.{ended}").write_text(str(60 * MIB))
    try:
        assert "of which 40 MiB is free" in (take_memory(memory, 41) or "")
        assert take_memory(memory, 40) is None
        assert (tmp_path / f"GPU-x.{os.getpid()}").read_text() == str(40 * MIB)
        assert take_memory(memory, 40) is None  # it has it already
    finally:
        os.waitpid(ended, 0)


# --- what an engine said ----------------------------------------------------------------------------------------------


def listen(script: Script, tmp_path: Path, *, lean: bool = False) -> tuple[TrialEvents, ScriptedEngine]:
    watch = TrialEvents()
    engine = ScriptedEngine(script, wants=2)
    supervisor = Supervisor(
        engine,
        [WorkerPlan(0, None, None, 1, lean=lean)],
        Notebook(CHUNKS),
        clock=CLOCK,
        policy=RetryPolicy(retries=0, backoff_s=0.0),
        scratch=tmp_path,
        listen=watch.note,
    )
    supervisor.start()
    while supervisor.busy and watch.trouble is None:
        supervisor.handle_events(timeout_s=0.02)
    watch.closed = True
    supervisor.kill()
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    return watch, engine


def test_what_went_well_is_no_trouble_and_the_engine_is_as_lean_as_the_trial(tmp_path: Path) -> None:
    watch, engine = listen(lambda session, batch: map(done, batch), tmp_path, lean=True)
    assert [result.chunk.chunk_id for result in watch.done] == ["a", "b"]
    assert watch.trouble is None
    assert [session.plan.lean for session in engine.sessions] == [True]


def test_that_the_memory_ran_out_counts_more_than_what_came_before_it(tmp_path: Path) -> None:
    def fail(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0], BATCH_LOST, charged=False)
        raise SessionBroken(OUT_OF_MEMORY, "CUDA out of memory", at_start=True)

    watch, _ = listen(fail, tmp_path)
    trouble = watch.trouble
    assert trouble is not None and trouble.is_out_of_memory and trouble.at_start


def test_a_chunk_lost_with_others_decides_only_where_its_words_say_why() -> None:
    watch, other = TrialEvents(), TrialEvents()
    watch.note(failed(CHUNKS[0], BATCH_LOST, charged=False))
    assert watch.trouble is None
    other.note(failed(CHUNKS[0], EXIT_CODE))
    assert other.trouble is not None and not other.trouble.is_out_of_memory


def test_what_is_said_after_the_end_is_of_our_own_making(tmp_path: Path) -> None:
    watch = TrialEvents()
    watch.closed = True
    watch.note(failed(CHUNKS[0], EXIT_CODE))
    assert watch.trouble is None


# --- what is shown ----------------------------------------------------------------------------------------------------

TRIALS = [trial(60, 400, peak_bytes=3 * GIB), trial(120, 800, peak_bytes=5 * GIB), Trial(126.0, False, TOO_LONG)]
FOUND = KEY.probed(evaluate(TRIALS, 10.0), TRIALS)


def test_the_text_has_the_curve_the_best_length_and_what_is_safe() -> None:
    lines = probe_text([FOUND], "cache/probe.toml; later runs read it", ["a note"]).splitlines()
    assert lines[0] == "Tesla V100, 16.0 GiB; demo (1.0), 1 worker per GPU, 2 chunks at once"
    assert lines[2].split() == ["60", "s", "3.0", "GiB", "19%", "400", "←", "best"]
    assert lines[4].split() == ["126", "s", "–", "–", "–", "out", "of", "memory"]
    assert "  longest: 120 s fits, 126 s does not; safe, with a margin of 10 %: 108 s" in lines
    assert "  stored in cache/probe.toml; later runs read it" in lines
    assert lines[-1] == "  note: a note"


def test_an_unfinished_probe_says_that_the_same_command_goes_on() -> None:
    text = probe_text([KEY.probed(None, TRIALS[:1], finished=False)], "probe.toml")
    assert "not finished: the same command continues" in text
    assert "kept in" not in text


def test_the_page_draws_memory_and_speed_of_every_model_and_escapes_names() -> None:
    pytest.importorskip("bokeh")
    page = probe_page([FOUND, KEY.probed(None, [trial(60, None)], finished=False)], ["<b>a note</b>"])
    assert 'id="chart-memory-0"' in page and 'id="chart-speed-0"' in page
    assert 'id="chart-memory-1"' not in page  # nothing was read of it, and nothing timed
    assert page.count("<table") == 2
    assert "&lt;b&gt;a note" in page
    assert "script-src 'sha256-" in page and "pip install" not in page


@pytest.mark.parametrize(
    ("came", "kept", "said"),
    [
        (signal.SIGINT, True, "stopped by SIGINT; the trials are stored, and the same command continues"),
        (signal.SIGTERM, False, "stopped by SIGTERM before the first trial ended; nothing is stored,"
         " so the same command starts again"),
        (None, False, "the time is over before the first trial ended; nothing is stored, so the same"
         " command starts again: give it more time with --time"),
    ],
)  # fmt: skip
def test_a_probe_that_is_not_finished_says_what_is_really_kept(
    came: signal.Signals | None, kept: bool, said: str
) -> None:
    stop = StopRequest(lambda: 0.0)
    if came is not None:
        stop.receive(came)
    assert why_not_finished(stop, kept) == said
