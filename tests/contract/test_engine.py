"""What every Engine promises; each implementation brings a bench with audio that it can hear and audio that it cannot.

HawkEars is a stand-in here, as a package and as version 1; ``tests/flow/test_hawkears_engine.py`` holds
the same against the real one.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Device, WorkerPlan
from rooms.root import (
    TASK_MARK,
    BadcjobsError,
    Engine,
    ExitCode,
    Launcher,
    More,
    Session,
    SessionBroken,
    SubprocessLauncher,
    SystemClock,
    nothing_more,
)
from rooms.workers import (
    CommandEngine,
    DemoEngine,
    EngineStart,
    HawkEars1Engine,
    HawkEarsEngine,
)
from support.audio import make_wav
from support.fake_hawkears import hear, make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.fake_hawkears_package import fake_package_environ
from support.fake_prefix import install_fake_prefix
from support.waiting import wait_for

CLOCK = SystemClock()
DEVICE = Device("1", "test", index=1, uuid="GPU-1b2c", name="Tesla V100", backend="nvml")
ON_GPU = WorkerPlan(slot=0, device=DEVICE, device_id=7, threads=2)
ON_CPU = WorkerPlan(slot=0, device=None, device_id=None, threads=2)

PROGRAM = """\
import os, pathlib, sys, time, wave
source, target = map(pathlib.Path, sys.argv[1:])
many = target.is_dir()
for path in source.read_text().splitlines() if many else [source]:
    time.sleep(float(os.environ["FAKE_HAWKEARS_S"]))
    try:
        wave.open(str(path)).close()
    except Exception as error:
        print(f"cannot hear {path}: {error!r}", file=sys.stderr)
        if many:
            continue
        sys.exit(1)
    table = target / (pathlib.Path(path).stem + ".csv") if many else target
    table.write_text("start_time,end_time,label,score\\n0.3,0.6,LOUD,0.9\\n")
"""
# The class of a chunk that it cannot hear, for each engine.
ENGINES = {
    "demo": "bad_audio", "command": "exit_code", "command for many": "no_output", "hawkears": "bad_audio",
    "hawkears1": "no_output", "demo behind a program": "bad_audio", "command behind a program": "exit_code",
    "hawkears behind a program": "bad_audio",
}  # fmt: skip


def make_engine(name: str, folder: Path, launcher: Launcher, slow_s: float, *, broken: bool) -> Engine:
    """Make one kind of engine; it takes so long for a chunk."""
    environ = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_ID": "4821",
               "FAKE_HAWKEARS_S": str(slow_s), **fake_package_environ()}  # fmt: skip

    def start(*args: str) -> EngineStart:
        return EngineStart(args, environ, launcher, CLOCK)

    if name == "demo":
        return DemoEngine(start("--no-such-option" if broken else f"--burn-s={slow_s}"))
    if name.startswith("command"):
        (folder / "listen.py").write_text(PROGRAM)
        words = "/no/such/program" if broken else f"{shlex.quote(sys.executable)} {folder}/listen.py"
        if "many" in name:
            return CommandEngine(start("--batch=4"), f"{words} {{inputs}} {{outputs}}")
        return CommandEngine(start(), f"{words} {{input}} {{output}}")
    root = folder / ("empty" if broken else name)
    if broken:
        root.mkdir()
    elif not root.exists():
        (make_fake_root if name == "hawkears" else make_fake_hawkears1)(root)
    if name == "hawkears":
        return HawkEarsEngine(start("--threads", "1"), sys.executable, root, allow_cpu=True)
    return HawkEars1Engine(start("--threads", "1"), sys.executable, root, allow_cpu=True, batch=4)


@dataclass
class Workplace:
    """Sessions of one engine, audio, and a look at the processes that carry this test's mark."""

    folder: Path
    name: str
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = f"contract-{os.getpid()}-{self.folder.name}"
        self.kind, behind, _ = self.name.partition(" behind")
        prefix = [str(install_fake_prefix(self.folder / "bin")), f"{self.folder}/{{worker}}"] if behind else []
        self.launcher = SubprocessLauncher(self.mark, prefix)

    def engine(self, slow_s: float = 0.0, *, broken: bool = False) -> Engine:
        return make_engine(self.kind, self.folder, self.launcher, slow_s, broken=broken)

    def expected(self, chunk: Chunk) -> set[tuple[int, int]]:
        """Return (start_ms, end_ms) of what there is to hear."""
        if "hawkears" not in self.name:
            return {(300, 600)}
        heard = hear(Path(chunk.audio_path).read_bytes())
        return {(round(start_s * 1000), round(end_s * 1000)) for start_s, end_s, *_ in heard}

    def open(self, plan: WorkerPlan = ON_GPU, *, slow_s: float = 0.0) -> Session:
        scratch = self.folder / "scratch" / "worker-0"
        scratch.mkdir(parents=True, exist_ok=True)
        self.sessions.append(self.engine(slow_s).open(plan, scratch))
        return self.sessions[-1]

    def good(self, *names: str) -> list[Chunk]:
        return [
            chunk(name, make_wav(self.folder / "audio" / f"{name}.wav", 1, loud=[(0.3, 0.6)], tone_hz=900 + number))
            for number, name in enumerate(names)
        ]

    def bad(self, name: str, content: bytes) -> Chunk:
        path = self.folder / "audio" / f"{name}.wav"
        path.write_bytes(content)
        return chunk(name, path)

    def processes(self) -> list[psutil.Process]:
        return [process for process, _ in self._marked()]

    def environs(self) -> list[dict[str, str]]:
        """Return what the workers have in their environments; one that becomes another program shows none."""
        return [environ for _, environ in self._marked()]

    def _marked(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        for process in psutil.process_iter():
            try:
                environ = process.environ()
                if environ.get(TASK_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, environ
            except psutil.Error:
                continue  # gone meanwhile, or somebody else's


@pytest.fixture(params=ENGINES)
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path, request.param)
    Feeding.over = threading.Event()
    yield place
    Feeding.over.set()
    for session in place.sessions:
        session.kill()
        session.close()
    assert place.processes() == [], "something is still running"


def chunk(name: str, path: Path) -> Chunk:
    return Chunk(name, name, path.name, str(path), 0, 1000)


class Feeding(threading.Thread):
    """Feeds a batch to a session as a worker's thread does, and keeps what comes.

    The thread stays until its test is over: a process dies with the thread that has started it.
    """

    over = threading.Event()

    def __init__(self, session: Session, batch: Sequence[Chunk], more: More = nothing_more) -> None:
        super().__init__(daemon=True)
        self._session = session
        self._batch = batch
        self._more = more
        self.started: list[str] = []
        self.results: list[ChunkResult] = []
        self.broken: SessionBroken | None = None
        self.bug: BaseException | None = None
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        over = Feeding.over
        self._feed()
        self._ended.set()
        over.wait()

    def _feed(self) -> None:
        try:
            for news in self._session.process(self._batch, self._more):
                if isinstance(news, ChunkStarted):
                    self.started.append(news.chunk.chunk_id)
                else:
                    self.results.append(news)
        except SessionBroken as error:
            self.broken = error
        except BaseException as error:
            self.bug = error

    def end(self, within_s: float) -> Feeding:
        assert self._ended.wait(within_s), f"still at it after {within_s} s"
        assert self.bug is None, self.bug
        return self

    @property
    def answered(self) -> list[str]:
        return [result.chunk.chunk_id for result in self.results]


def feed(session: Session, batch: Sequence[Chunk], more: More = nothing_more) -> dict[str, ChunkResult]:
    feeding = Feeding(session, batch, more).end(30)
    assert feeding.broken is None, feeding.broken
    assert len(set(feeding.answered)) == len(feeding.answered), "a chunk has two results"
    return {result.chunk.chunk_id: result for result in feeding.results}


NAMES = ["a", "two words", "it's {braces} $HOME", "été ☃", "-dash", "100%"]
BAD = {"text": b"this is not audio" * 20, "empty": b"", "half a header": b"RIFF\x24\0\0\0WAVEfm"}


def test_an_engine_says_before_the_first_chunk_whether_it_can_run(work: Workplace) -> None:
    engine = work.engine()
    engine.check()
    assert engine.name in ("demo", "command", "hawkears", "hawkears1") and engine.wants >= 1
    if work.name == "command behind a program":
        return  # the program may be in the prefix's container
    with pytest.raises(BadcjobsError) as refused:
        work.engine(broken=True).check()
    assert refused.value.exit_code in (ExitCode.USAGE, ExitCode.NOT_HERE) and refused.value.fix


@pytest.mark.parametrize("plan", [ON_GPU, replace(ON_CPU, lean=True)], ids=["GPU", "CPU, lean"])
def test_every_chunk_gets_one_answer_and_bad_audio_costs_only_itself(work: Workplace, plan: WorkerPlan) -> None:
    session, good, before_ms = work.open(plan), work.good(*NAMES), CLOCK.now_ms()
    moved = replace(good[0], start_ms=60_000, end_ms=61_000)
    broken = [*(work.bad(name, content) for name, content in BAD.items()), chunk("gone", work.folder / "gone.wav")]
    results = feed(session, [moved, *broken[:2], *good[1:], *broken[2:]])
    # Some may have been lost in bad company, but none is blamed, and alone they are fine.
    lost = [one for one in good if not results[one.chunk_id].ok]
    assert not any(results[one.chunk_id].charged for one in lost)
    results |= feed(session, lost)
    assert set(results) == {one.chunk_id for one in [*good, *broken]}
    for one in good:
        result = results[one.chunk_id]
        assert (result.ok, result.error, result.audio_s) == (True, None, 1.0)
        assert before_ms <= result.started_at_ms <= result.ended_at_ms <= CLOCK.now_ms()
        found = {(d.start_ms, d.end_ms) for d in result.detections}
        assert found == work.expected(one), "from the start of the chunk, not of the recording"
        assert all(d.label and 0 <= (d.score or 0) <= 1 for d in result.detections)
    for one in broken:
        result = results[one.chunk_id]
        assert (result.error_class, result.charged, result.detections) == (ENGINES[work.name], True, ())
        assert Path(one.audio_path).name in (result.error or "")
    waiting, asked = work.good(*"cdefgh"), list[Chunk]()

    def more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
        assert wanted >= 0 and idle >= 0
        fresh = [waiting.pop(0) for _ in range(min(len(waiting), max(wanted, idle)))]
        asked.extend(fresh)
        return fresh

    again = feed(session, work.good("a", "b"), more)
    assert set(again) == {"a", "b", *(one.chunk_id for one in asked)} and all(result.ok for result in again.values())
    assert session.close() == session.close() in (None, 0)
    assert work.processes() == []


def test_an_interrupt_finishes_what_runs_and_a_worker_sees_only_its_device(work: Workplace) -> None:
    session = work.open(slow_s=0.3)
    feeding = Feeding(session, work.good(*"abcdefghijkl"))
    environ = wait_for(work.environs, "a worker")[0]
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["BADCJOBS_DEVICE_UUID"]) == ("GPU-1b2c", "GPU-1b2c")
    assert (environ["CUDA_DEVICE_ORDER"], environ["SLURM_JOB_ID"]) == ("PCI_BUS_ID", "4821")
    wait_for(lambda: feeding.results, "a first result")
    session.interrupt()
    session.interrupt()
    feeding.end(25)
    assert feeding.broken is None and 1 <= len(set(feeding.answered)) == len(feeding.answered) < 12
    assert all(result.ok for result in feeding.results), [result.error for result in feeding.results]
    early = work.open()
    early.interrupt()
    assert feed(early, work.good("a", "b")) == {}


def test_killed_from_inside_or_outside_nothing_counts_as_done_and_the_next_session_works(work: Workplace) -> None:
    for outside in (False, True):
        session = work.open(ON_CPU, slow_s=60)
        feeding = Feeding(session, work.good("a", "b", "c"))
        wait_for(lambda feeding=feeding: feeding.started and work.processes(), "a chunk in progress")  # type: ignore[misc]
        if not outside:
            assert wait_for(work.environs, "a worker")[0]["CUDA_VISIBLE_DEVICES"] == ""
            session.kill()
        for process in work.processes() if outside else ():
            process.kill()
        if outside and feeding.broken is None:
            wait_for(lambda feeding=feeding: feeding.results or feeding.broken, "it is noticed")  # type: ignore[misc]
            session.kill()
        feeding.end(25)
        session.close()
        assert not any(result.ok for result in feeding.results)
        classes = {result.error_class for result in feeding.results} | {feeding.broken and feeding.broken.error_class}
        expected = {"worker_died", "engine_crash", "batch_lost"} if outside else {"worker_died", "terminated"}
        assert classes - {None} <= expected and (classes - {None} or not outside)
        assert work.processes() == []
    early = work.open(slow_s=60)
    early.kill()
    assert not any(result.ok for result in Feeding(early, work.good("a", "b")).end(25).results)
    assert all(result.ok for result in feed(work.open(), work.good("a")).values())
