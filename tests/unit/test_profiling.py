"""A profiler before one worker: the right words, N chunks, a report in the run folder, and no harm done."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.audio import make_wav
from support.fake_hawkears1 import make_fake_hawkears1
from support.fake_profiler import install_fake_profiler
from support.scripted_engine import CLOCK, News, Script, ScriptedEngine, ScriptedSession, done, failed

from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Engine, Launcher, Session, SessionBroken
from badcjobs.workers.command import CommandEngine
from badcjobs.workers.demo import DemoEngine
from badcjobs.workers.hawkears1 import HawkEars1Engine
from badcjobs.workers.launch import TASK_MARK, SubprocessLauncher
from badcjobs.workers.profiled_engine import ProfiledEngine, ProfileOrder
from badcjobs.workers.profiling import MOST_REPORTS, Profiler, find_profiler

PLAN = WorkerPlan(slot=0, device=None, device_id=None, threads=1)
FAULTS = ["refuses", "runs nothing", "dies", "leaves nothing", "ends badly"]
LISTEN = "import sys; open(sys.argv[2], 'w').write('start_time,end_time,label,score\\n0.3,0.6,LOUD,0.9\\n')"


@dataclass
class Bench:
    """Engines of three kinds behind a stand-in profiler."""

    folder: Path

    @property
    def keep(self) -> Path:
        return self.folder / "out" / "profiles" / "4821_7.r0.gpu3"

    @property
    def mark(self) -> str:
        return f"profiling-{os.getpid()}-{self.folder.name}"

    def chunks(self, count: int) -> list[Chunk]:
        paths = [make_wav(self.folder / "audio" / f"c{n}.wav", 1, loud=[(0.3, 0.6)]) for n in range(count)]
        return [Chunk("r", path.stem, path.name, str(path), 0, 1000) for path in paths]

    def make(self, kind: str, launcher: Launcher) -> Engine:
        environ = {"PATH": os.environ["PATH"]}
        if kind == "command":
            template = f"{shlex.quote(sys.executable)} -c {shlex.quote(LISTEN)} {{input}} {{output}}"
            return CommandEngine(template, environ=environ, launcher=launcher, clock=CLOCK)
        if kind == "hawkears1":
            return HawkEars1Engine(
                sys.executable, root=self.folder / "HawkEars", extra_args=["--threads", "1"], environ=environ,
                launcher=launcher, clock=CLOCK, allow_cpu=True,
            )  # fmt: skip
        return DemoEngine(["--threshold=0.2"], environ=environ, launcher=launcher, clock=CLOCK)

    def engine(self, kind: str = "demo", *, profiler: str = "nsys", chunks: int = 3, **fake: Any) -> ProfiledEngine:
        program = install_fake_profiler(self.folder / "bin", profiler, **fake)
        launcher = SubprocessLauncher(self.mark)
        found = find_profiler(profiler, str(program.parent))
        order = ProfileOrder(found, chunks, lambda behind: self.make(kind, behind), launcher)
        return ProfiledEngine(self.make(kind, launcher), order, keep=self.keep)

    def open(self, engine: Engine) -> Session:
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        return engine.open(PLAN, scratch)

    def report(self, name: str = "4821_7.r0.gpu3.nsys-rep") -> dict[str, list[str]]:
        return dict(json.loads((self.keep.parent / name).read_text()))

    def reports(self) -> list[str]:
        return sorted(path.name for path in self.keep.parent.iterdir()) if self.keep.parent.exists() else []

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TASK_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    make_fake_hawkears1(tmp_path / "HawkEars")
    bench = Bench(tmp_path)
    yield bench
    assert bench.processes() == [], "something is still running"


def run(session: Session, batch: Sequence[Chunk]) -> list[str]:
    """Process a batch to its end; return what was done, each chunk with one beginning and one end."""
    news = list(session.process(batch))
    results = [one for one in news if isinstance(one, ChunkResult)]
    started = [one.chunk.chunk_id for one in news if isinstance(one, ChunkStarted)]
    assert all(result.ok for result in results), [result.error for result in results]
    assert len(set(started)) == len(started)
    return sorted(result.chunk.chunk_id for result in results)


def names(chunks: Sequence[Chunk]) -> list[str]:
    return sorted(chunk.chunk_id for chunk in chunks)


# --- the profilers ----------------------------------------------------------------------------------------------------


def test_a_profiler_that_is_not_on_the_path_is_refused_with_a_line_to_paste(tmp_path: Path) -> None:
    with pytest.raises(NotHere) as refused:
        find_profiler("nsys", str(tmp_path))
    assert refused.value.exit_code == ExitCode.NOT_HERE
    assert "'nsys'" in refused.value.what and "Nsight Systems" in (refused.value.why or "")
    assert "command -v nsys" in (refused.value.fix or "")


def test_nsys_gets_its_words_before_those_of_the_program(bench: Bench) -> None:
    session = bench.open(bench.engine())
    chunks = bench.chunks(2)
    assert run(session, chunks) == names(chunks)
    session.close()
    report = bench.report()
    assert report["options"][:2] == ["profile", "-o"]
    assert report["options"][3:] == [
        "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true", "--wait=primary",
        "--kill=none",
    ]  # fmt: skip
    assert report["program"][4:] == [sys.executable, "-m", "badcjobs.workers.demo_worker", "--threshold=0.2"]


def test_ncu_gets_its_own_words(bench: Bench) -> None:
    session = bench.open(bench.engine(profiler="ncu"))
    chunks = bench.chunks(2)
    assert run(session, chunks) == names(chunks)
    session.close()
    options = bench.report("4821_7.r0.gpu3.ncu-rep")["options"]
    assert options[0] == "--export"
    assert options[2:] == [
        "--force-overwrite", "--target-processes", "all", "--launch-count", "2000", "--log-file", "stderr",
    ]  # fmt: skip


def test_the_log_says_where_the_profile_is_and_how_to_look_at_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        session = bench.open(bench.engine())
        run(session, bench.chunks(1))
    target = f"{bench.keep}.nsys-rep"
    assert f"profile: {target}; to look at it: nsys stats {target}" in caplog.text


def test_a_report_that_nsys_could_not_convert_is_kept_too(tmp_path: Path) -> None:
    profiler = Profiler("nsys", "/opt/nsys")
    (tmp_path / "report.qdstrm").touch()
    assert profiler.find_report(tmp_path) == tmp_path / "report.qdstrm"
    assert profiler.how_to_open(tmp_path / "report.qdstrm").startswith("QdstrmImporter --input-file ")
    (tmp_path / "report.nsys-rep").touch()
    assert profiler.find_report(tmp_path) == tmp_path / "report.nsys-rep"


# --- one worker, N chunks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["demo", "command", "hawkears1"])
def test_every_chunk_is_done_once_whatever_the_engine_and_the_first_ones_are_profiled(bench: Bench, kind: str) -> None:
    session = bench.open(bench.engine(kind, chunks=2))
    chunks = bench.chunks(5)
    for batch in (chunks[:3], chunks[3:]):
        assert run(session, batch) == names(batch)
    session.close()
    processes = 2 if kind == "command" else 1  # for the two chunks that are profiled
    assert len(bench.reports()) == processes and "4821_7.r0.gpu3.nsys-rep" in bench.reports()


def test_only_the_first_worker_is_profiled_and_only_once(bench: Bench) -> None:
    engine = bench.engine()
    sessions = [bench.open(engine) for _ in range(3)]
    [chunk] = bench.chunks(1)
    for session in sessions:
        assert run(session, [chunk]) == [chunk.chunk_id]
        session.close()
    assert bench.reports() == ["4821_7.r0.gpu3.nsys-rep"]


def test_a_program_per_chunk_leaves_a_report_each_but_not_hundreds(bench: Bench) -> None:
    session = bench.open(bench.engine("command", chunks=20))
    for chunk in (chunks := bench.chunks(MOST_REPORTS + 3)):  # one at a time, as the queue gives them
        assert run(session, [chunk]) == [chunk.chunk_id]
    session.close()
    assert len(chunks) > len(bench.reports()) == MOST_REPORTS
    assert "4821_7.r0.gpu3-5.nsys-rep" in bench.reports()


class Pair:
    """A scripted engine behind the profiler and another one as it is."""

    def __init__(self, folder: Path, chunks: int, behind: Script, plain: Script | None = None) -> None:
        self.behind = ScriptedEngine(behind)
        self.plain = ScriptedEngine(plain or all_well)
        order = ProfileOrder(
            Profiler("nsys", "/opt/nsys"), chunks, lambda launcher: self.behind, SubprocessLauncher("pair")
        )
        engine = ProfiledEngine(self.plain, order, keep=folder / "profile")
        self.session = engine.open(PLAN, folder)


def all_well(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    waiting = list(batch)
    while waiting:
        yield ChunkStarted(waiting[0], 0)
        yield done(waiting.pop(0))
        waiting.extend(session.more(2, idle=1))


def some(count: int) -> list[Chunk]:
    return [Chunk("r", f"c{n}", "a.wav", "/a.wav", 0, 1000) for n in range(count)]


@pytest.mark.parametrize(("profiled", "batch"), [(1, 5), (4, 2), (20, 3), (3, 3)])
def test_exactly_n_chunks_go_through_the_profiler_and_the_others_past_it(
    tmp_path: Path, profiled: int, batch: int
) -> None:
    pair = Pair(tmp_path, profiled, all_well)
    waiting = some(12)
    begin, waiting = waiting[:batch], waiting[batch:]

    def more(wanted: int, *, idle: int = 0) -> list[Chunk]:
        return [waiting.pop(0) for _ in range(min(len(waiting), max(wanted, idle)))]

    results = [one for one in pair.session.process(begin, more) if isinstance(one, ChunkResult)]
    while waiting:  # what the queue hands out next
        results += [one for one in pair.session.process([waiting.pop(0)], more) if isinstance(one, ChunkResult)]
    assert sorted(result.chunk.chunk_id for result in results) == sorted(chunk.chunk_id for chunk in some(12))
    behind = [session.batches for session in pair.behind.sessions]
    assert len(behind) == 1 and len(behind[0]) == 1
    seen_plain = sum(len(one) for one in pair.plain.batches)
    assert pair.behind.sessions[0].closed == 1
    if profiled < 12:
        assert seen_plain > 0 and len(behind[0][0]) == min(profiled, batch)


# --- a profile is a favour --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["demo", "command"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_profiler_that_fails_costs_nothing_but_the_profile(bench: Bench, kind: str, fault: str) -> None:
    session = bench.open(bench.engine(kind, fault=fault))
    chunks = bench.chunks(5)
    assert run(session, chunks[:4]) == names(chunks[:4])
    assert run(session, chunks[4:]) == names(chunks[4:])
    session.close()


def test_what_fails_behind_the_profiler_is_judged_without_it(tmp_path: Path) -> None:
    def one_fails(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, 0)
            yield failed(chunk) if chunk.chunk_id == "c1" else done(chunk)

    pair = Pair(tmp_path, 3, one_fails, one_fails)
    news = list(pair.session.process(some(3)))
    results = [one for one in news if isinstance(one, ChunkResult)]
    assert [(one.chunk.chunk_id, one.ok) for one in results] == [("c0", True), ("c2", True), ("c1", False)]
    assert [one.chunk.chunk_id for one in news if isinstance(one, ChunkStarted)] == ["c0", "c1", "c2"]
    assert pair.plain.batches == [["c1"]]


def test_a_crash_behind_the_profiler_is_not_the_chunks_fault(tmp_path: Path) -> None:
    def crash(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0])
        raise SessionBroken("engine_crash", "CUPTI_ERROR_UNKNOWN")

    pair = Pair(tmp_path, 3, crash)
    assert run(pair.session, some(4)) == ["c0", "c1", "c2", "c3"]
    assert pair.plain.batches == [["c1", "c2", "c3"]]


def test_a_worker_that_somebody_kills_is_left_to_whoever_forgives_that(tmp_path: Path) -> None:
    def killed(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield done(batch[0])
        raise SessionBroken("worker_died", "SIGKILL")

    pair = Pair(tmp_path, 3, killed)
    with pytest.raises(SessionBroken, match="SIGKILL"):
        list(pair.session.process(some(3)))
    assert pair.plain.sessions == []


def test_an_engine_that_cannot_be_started_again_without_the_profiler_breaks_the_session(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 1, all_well)

    def refuse(plan: WorkerPlan) -> None:
        raise NotHere("the engine is gone")

    pair.plain._on_open = refuse
    with pytest.raises(SessionBroken, match="the engine is gone") as broken:
        list(pair.session.process(some(2)))
    assert broken.value.at_start


def test_a_run_folder_that_cannot_be_written_costs_the_profile_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    (bench.folder / "out").write_text("a file in the way")
    session = bench.open(bench.engine())
    chunks = bench.chunks(4)
    assert run(session, chunks) == names(chunks)
    assert "the profile cannot be kept" in caplog.text
    session.close()


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_profiler_gets_time_to_write_its_report(bench: Bench) -> None:
    session = bench.open(bench.engine(report_s=1.0))
    chunks = bench.chunks(1)
    assert run(session, chunks) == names(chunks)
    assert bench.reports() == ["4821_7.r0.gpu3.nsys-rep"]


def test_a_kill_does_not_wait_for_the_report(bench: Bench) -> None:
    session = bench.open(bench.engine(report_s=60))
    working = threading.Thread(target=lambda: list(session.process(bench.chunks(1))), daemon=True)
    working.start()
    time.sleep(1)
    assert working.is_alive(), "the report takes a minute"
    start_s = time.monotonic()
    session.kill()
    working.join(40)
    assert not working.is_alive() and time.monotonic() - start_s < 40
    session.close()
    assert bench.reports() == []


def test_a_profiler_that_dies_at_once_is_noticed_at_once(bench: Bench) -> None:
    session = bench.open(bench.engine(fault="refuses"))
    start_s = time.monotonic()
    chunks = bench.chunks(1)
    assert run(session, chunks) == names(chunks)
    assert time.monotonic() - start_s < 60, "its pipes were never opened by anybody"
    session.close()
