"""HawkEars fed by our worker, on the real one, and HawkEars 1 on a stand-in.

The real one is used when BADCJOBS_TEST_HAWKEARS (the program) and BADCJOBS_TEST_HAWKEARS_ROOT (its models) are set.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, Device, WorkerPlan
from rooms.root import BadInput, NotHere, SessionBroken, SubprocessLauncher, SystemClock
from rooms.workers import (
    EngineStart,
    HangTimeout,
    HawkEars1Engine,
    HawkEarsEngine,
    hawkears_environment,
    parse_detections_csv,
    python_of,
)
from support.audio import make_wav
from support.fake_hawkears import hear
from support.fake_hawkears1 import make_fake_hawkears1
from support.needs import missing

CPU = WorkerPlan(slot=0, device=None, device_id=None, threads=2)
GPU = WorkerPlan(slot=0, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1, threads=6)
SIMULATED = WorkerPlan(slot=0, device=Device("0", "test", uuid="GPU-sim", backend="simulated"), device_id=1, threads=6)


@dataclass
class Bench:
    """A HawkEars installation, a folder of audio, and an engine between them."""

    folder: Path
    program: Path
    root: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": os.environ["PATH"]})
    extra_args: tuple[str, ...] = ("--threads", "2")
    allow_cpu: bool = False
    hang_timeout: HangTimeout | None = None

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch" / "worker-0"

    def engine(self) -> HawkEarsEngine:
        start = EngineStart(self.extra_args, self.environ, SubprocessLauncher("test"), SystemClock())
        hang_timeout = self.hang_timeout or HangTimeout()
        return HawkEarsEngine(
            start, python_of(self.program), self.root, allow_cpu=self.allow_cpu, hang_timeout=hang_timeout
        )

    def open(self, plan: WorkerPlan = CPU):
        self.scratch.mkdir(parents=True, exist_ok=True)
        return self.engine().open(plan, self.scratch)

    def process(self, batch: list[Chunk], plan: WorkerPlan = CPU) -> dict[str, ChunkResult]:
        session = self.open(plan)
        try:
            return by_name(session.process(batch))
        finally:
            session.close()

    def good(self, name: str, seconds: float = 3) -> Chunk:
        tone_hz = 1000 + 150 * sum(name.encode()) % 2000
        path = make_wav(self.folder / "audio" / f"{name}.wav", seconds, 22050, loud=[(0.5, 1.5)], tone_hz=tone_hz)
        return chunk(name, path, round(seconds * 1000))

    def bad(self, name: str, content: bytes = b"this is not audio" * 50) -> Chunk:
        path = self.folder / "audio" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return chunk(name, path)

    def fake(self, name: str, word: str) -> Chunk:
        """Make a recording at which the stand-in misbehaves."""
        return self.bad(name, f"#fake {word} {name}\n".encode())

    def analyze(self, folder: Path) -> dict[str, list]:
        """Run ``hawkears analyze`` itself on a folder and return its table."""
        out = self.folder / "own"
        words = [self.program, "analyze", folder, "-o", out, "--rtype", "csv", *self.extra_args]
        env = {**self.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        subprocess.run(list(map(str, words)), cwd=self.root, env=env, check=True, capture_output=True, timeout=170)
        table = out / "scores.csv"
        if not table.exists():
            return {}
        rows = list(csv.DictReader(table.open()))
        found: dict[str, list] = {row["recording"]: [] for row in rows}
        for row, detection in zip(rows, parse_detections_csv(table.read_text()), strict=True):
            found[row["recording"]].append(detection)
        return found


def chunk(name: str, path: Path, end_ms: int | None = None) -> Chunk:
    return Chunk(recording_id=name, chunk_id=name, source_path=path.name, audio_path=str(path), end_ms=end_ms)


def by_name(results: Iterable[object]) -> dict[str, ChunkResult]:
    found = [result for result in results if isinstance(result, ChunkResult)]
    named = {result.chunk.recording_id: result for result in found}
    assert len(named) == len(found), "a chunk came twice"
    return named


def done(results: dict[str, ChunkResult]) -> set[str]:
    return {name for name, result in results.items() if result.ok}


@pytest.fixture(scope="session")
def numba_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiling takes half a minute: once for all tests."""
    return os.environ.get("NUMBA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "numba"))


@pytest.fixture
def fed(tmp_path: Path, numba_cache: str) -> Bench:
    program, root = (os.environ.get(f"BADCJOBS_TEST_HAWKEARS{end}") for end in ("", "_ROOT"))
    if not (program and root):
        missing("hawkears", "no real HawkEars: BADCJOBS_TEST_HAWKEARS and BADCJOBS_TEST_HAWKEARS_ROOT are not set")
    bench = Bench(tmp_path, Path(program), Path(root))
    bench.environ["NUMBA_CACHE_DIR"] = numba_cache
    return bench


def test_worker_sees_its_device_and_its_share_of_the_cores(tmp_path: Path):
    env = hawkears_environment({"CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin"}, GPU, (), tmp_path / "scratch")
    assert env["CUDA_VISIBLE_DEVICES"] == env["BADCJOBS_DEVICE_UUID"] == "GPU-1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["OMP_NUM_THREADS"] == "1"  # 6 cores for 3 threads
    assert env["NUMBA_CACHE_DIR"] == str(tmp_path / "numba-cache"), "there is no home that could keep it"


@pytest.mark.parametrize(
    ("extra_args", "omp"), [(("--threads", "1"), "4"), (("--threads=6",), "1"), (("--threads", "12"), "1")]
)
def test_more_hawkears_threads_leave_fewer_cores_to_each(extra_args: tuple[str, ...], omp: str, tmp_path: Path):
    assert hawkears_environment({}, GPU, extra_args, tmp_path)["OMP_NUM_THREADS"] == omp


def test_settings_of_the_user_win(tmp_path: Path):
    env = hawkears_environment({"OMP_NUM_THREADS": "7", "NUMBA_CACHE_DIR": "/warm"}, CPU, (), tmp_path)
    assert (env["OMP_NUM_THREADS"], env["NUMBA_CACHE_DIR"]) == ("7", "/warm")
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_caches_stay_warm_from_one_task_to_the_next_where_the_users_own_folder_can_be_written(tmp_path: Path):
    scratch = tmp_path / "node" / "worker-0"
    env = hawkears_environment({"HOME": str(tmp_path / "home")}, GPU, (), scratch)
    assert env["NUMBA_CACHE_DIR"] == str(tmp_path / "home" / ".cache" / "badcjobs" / "numba-cache")
    env = hawkears_environment({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, GPU, (), scratch)
    assert env["NUMBA_CACHE_DIR"] == str(tmp_path / "xdg" / "badcjobs" / "numba-cache")
    (tmp_path / "file").write_text("a home that cannot be written")
    env = hawkears_environment({"HOME": str(tmp_path / "file")}, GPU, (), scratch)
    assert env["NUMBA_CACHE_DIR"] == str(tmp_path / "node" / "numba-cache")


# --- the real one, fed --------------------------------------------------------------------------------------------
# What does not need real models is in tests/unit/workers/test_hawkears_worker.py, on the stand-in package.


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--region", "CA-NT", "--date", "file", "--low-band"),
        ("--lat", "62.45", "--lon", "-114.37", "--date", "20230615", "--min_score", "0.5"),
        ("--models", "2", "--seg", "3", "--label", "names", "--start", "1"),
    ],
    ids=["as it is", "region and date of the file", "latitude and longitude", "models, segments, names, start"],
)
def test_fed_it_finds_exactly_what_it_finds_by_itself(fed: Bench, options: tuple[str, ...]):
    fed.extra_args = ("--threads", "2", *options)
    names = [f"site{n}_202306{10 + n}_040000" for n in range(5)]
    batch = [fed.good(name, 3 + n) for n, name in enumerate(names)]
    own = fed.analyze(Path(batch[0].audio_path).parent)
    results = fed.process(batch)
    assert done(results) == set(names)
    assert any(own.values())
    for name, result in results.items():
        assert all(found.label_name for found in result.detections)
        unnamed = [replace(found, label_name=None) for found in result.detections]
        assert sorted(unnamed, key=repr) == sorted(own.get(name, []), key=repr)


def test_fed_a_bad_file_costs_only_itself_and_no_reload(fed: Bench):
    fed.extra_args = ("--threads", "1")
    batch = [fed.good("a"), fed.bad("b"), fed.bad("c", b""), fed.good("d"), fed.good("crumb", 0.3), fed.good("e")]
    start_s = time.monotonic()
    results = fed.process(batch)
    assert done(results) == {"a", "d", "e", "crumb"}
    assert [results[name].error_class for name in "bc"] == ["bad_audio"] * 2
    in_time = sorted(results.values(), key=lambda result: result.started_at_ms)
    reload_s = (in_time[-1].ended_at_ms - in_time[1].started_at_ms) / 1000
    assert reload_s < 0.5 * (time.monotonic() - start_s), "only the first one waits for the models"


def test_fed_on_the_cpu_by_surprise_it_is_stopped_before_its_first_recording(fed: Bench):
    with pytest.raises(SessionBroken, match="uses the CPU although this worker has a GPU") as broken:
        fed.process([fed.good("a")], GPU)
    assert (broken.value.error_class, broken.value.at_start) == ("ran_on_cpu", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--region", "XX-YY"), "location XX-YY not found"),
        (("--lat", "0", "--lon", "0"), "No eBird county found"),
        (("--loudly",), "No such option: --loudly"),
    ],
)
def test_fed_a_mistake_is_a_mistake(fed: Bench, options: tuple[str, ...], said: str):
    fed.extra_args = options
    with pytest.raises(SessionBroken, match=said) as broken:
        fed.process([fed.good("a"), fed.good("b")])
    assert broken.value.error_class == "configuration"


def test_fed_without_models_nothing_is_tried(fed: Bench):
    fed.root = fed.folder / "empty-root"
    fed.root.mkdir()
    with pytest.raises(SessionBroken, match="Model checkpoint files not found") as broken:
        fed.process([fed.good("a")])
    assert broken.value.error_class == "configuration"


def test_fed_an_interrupt_finishes_what_is_in_progress(fed: Bench):
    batch = [fed.good(name, 20) for name in "abcdefghijkl"]
    session = fed.open()
    results = []
    for news in session.process(batch):
        if isinstance(news, ChunkResult):
            results.append(news)
            session.interrupt()
    assert session.close() == 0
    assert all(result.ok for result in results)
    assert 1 <= len(results) <= 3  # two threads, and one of them may have begun its next before the word came


def test_the_real_installation_passes_its_check(fed: Bench):
    fed.engine().check()
    fed.extra_args = ("--threads", "x")
    with pytest.raises(BadInput, match="--threads x"):
        fed.engine().check()


# --- HawkEars 1 ---------------------------------------------------------------------------------------------------


@pytest.fixture
def first(tmp_path: Path) -> FirstBench:
    return FirstBench(tmp_path, Path("analyze.py"), make_fake_hawkears1(tmp_path / "HawkEars"))


class FirstBench(Bench):
    """The stand-in of HawkEars 1."""

    def engine(self) -> HawkEars1Engine:  # type: ignore[override]
        start = EngineStart(self.extra_args, self.environ, SubprocessLauncher("test"), SystemClock())
        return HawkEars1Engine(start, sys.executable, self.root, allow_cpu=self.allow_cpu)


def test_version_1_labels_come_back_to_their_chunks_with_names(first: FirstBench):
    batch = [first.good(name) for name in "abc"]
    results = first.process([*batch, first.fake("quiet", "silence")])
    assert done(results) == {"a", "b", "c", "quiet"}
    assert results["quiet"].detections == ()
    for one in batch:
        expected = hear(Path(one.audio_path).read_bytes())
        found = results[one.recording_id].detections
        assert [(d.start_ms, d.label, d.score) for d in sorted(found, key=lambda d: d.label)] == [
            (round(start_s * 1000), code, round(score, 3)) for start_s, _, code, score in expected
        ]
        assert found[0].label_name


def test_version_1_a_bad_file_is_blamed_alone(first: FirstBench):
    results = first.process([first.good("a"), first.bad("b"), first.bad("c", b""), first.good("d")])
    assert done(results) == {"a", "d"}
    assert [results[name].error_class for name in "bc"] == ["no_output"] * 2
    assert f"Caught exception in audio load of {first.folder}/audio/b.wav" in (results["b"].error or "")


def test_version_1_a_thread_that_died_in_silence_is_noticed(first: FirstBench):
    """It writes its table and ends with 0 all the same."""
    first.extra_args = ("--threads", "2")
    results = first.process([first.fake("a", "oom"), first.good("b"), first.good("c"), first.good("d")])
    assert {(result.error_class, result.charged) for result in results.values()} == {("batch_lost", False)}
    alone = first.process([first.fake("a", "oom")])["a"]
    assert (alone.error_class, alone.charged) == ("out_of_memory", True)


@pytest.mark.parametrize("word", ["SIGSEGV", "SIGKILL"])
def test_version_1_nothing_of_a_process_that_was_killed_counts(first: FirstBench, word: str):
    first.extra_args = ("--threads", "1")
    results = first.process([first.good("a"), first.fake("b", word)])
    assert {result.error_class for result in results.values()} == {"batch_lost"}
    assert not any(result.charged for result in results.values())


def test_version_1_mistakes_are_mistakes(first: FirstBench):
    first.extra_args = ("--region", "XX-YY")
    with pytest.raises(SessionBroken, match="no eBird county found") as broken:
        first.process([first.good("a")])
    assert broken.value.error_class == "configuration"
    first.extra_args = ("--loudly",)
    with pytest.raises(SessionBroken, match="unrecognized arguments") as broken:
        first.process([first.good("a")])
    assert broken.value.error_class == "configuration"


def test_version_1_on_the_cpu_by_surprise_is_no_success(first: FirstBench):
    first.environ["FAKE_HAWKEARS_CUDA"] = "0"
    with pytest.raises(SessionBroken, match="uses the CPU") as broken:
        first.process([first.good("a")], GPU)
    assert broken.value.error_class == "ran_on_cpu"
    assert done(first.process([first.good("a")], CPU)) == {"a"}


def test_version_1_is_looked_for_before_anything_starts(first: FirstBench):
    first.engine().check()
    first.extra_args = ("--rtype", "csv")
    with pytest.raises(BadInput, match="--rtype"):
        first.engine().check()
    first.extra_args, first.root = (), first.folder
    with pytest.raises(NotHere, match=r"analyze\.py does not exist"):
        first.engine().check()
