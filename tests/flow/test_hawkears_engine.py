"""HawkEars as it comes (a process per batch) and HawkEars fed by our worker, on stand-ins and on the real one.

The real one is used when BADCJOBS_TEST_HAWKEARS (the program) and BADCJOBS_TEST_HAWKEARS_ROOT (its models) are set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.audio import make_wav
from support.fake_hawkears import hear, install_fake_hawkears, make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.needs import missing

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Chunk, ChunkResult, Device, WorkerPlan
from badcjobs.seams import Engine, SessionBroken
from badcjobs.workers.detections import parse_scores_csv
from badcjobs.workers.hawkears1 import HawkEars1Engine
from badcjobs.workers.hawkears2 import HawkEarsEngine, hawkears_environment
from badcjobs.workers.hawkears_python import python_of
from badcjobs.workers.launch import SubprocessLauncher
from badcjobs.workers.patience import Patience

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
    patience: Patience | None = None

    @property
    def scratch(self) -> Path:
        return self.folder / "scratch" / "worker-0"

    def engine(self) -> HawkEarsEngine:
        return HawkEarsEngine(
            [str(self.program)],
            root=self.root,
            extra_args=self.extra_args,
            environ=self.environ,
            launcher=SubprocessLauncher("test"),
            clock=SystemClock(),
            allow_cpu=self.allow_cpu,
            patience=self.patience,
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

    def scores(self) -> dict[str, list]:
        """Read HawkEars' own table of the first batch, by the chunk's name."""
        table = parse_scores_csv((self.scratch / "out-1" / "scores.csv").read_text())
        return {stem.partition("~")[2] or stem: detections for stem, detections in table.items()}


def chunk(name: str, path: Path, end_ms: int | None = None) -> Chunk:
    return Chunk(recording_id=name, chunk_id=name, source_path=path.name, audio_path=str(path), end_ms=end_ms)


def by_name(results: Iterable[object]) -> dict[str, ChunkResult]:
    found = [result for result in results if isinstance(result, ChunkResult)]
    named = {result.chunk.recording_id: result for result in found}
    assert len(named) == len(found), "a chunk came twice"
    return named


def done(results: dict[str, ChunkResult]) -> set[str]:
    return {name for name, result in results.items() if result.ok}


@pytest.fixture
def stand_in(tmp_path: Path) -> Bench:
    return Bench(tmp_path, install_fake_hawkears(tmp_path / "bin"), make_fake_root(tmp_path / "root"))


@pytest.fixture(scope="session")
def numba_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compiling takes half a minute: once for all tests."""
    return os.environ.get("NUMBA_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "numba"))


@pytest.fixture
def real(tmp_path: Path, numba_cache: str) -> Bench:
    program, root = (os.environ.get(f"BADCJOBS_TEST_HAWKEARS{end}") for end in ("", "_ROOT"))
    if not (program and root):
        missing("hawkears", "no real HawkEars: BADCJOBS_TEST_HAWKEARS and BADCJOBS_TEST_HAWKEARS_ROOT are not set")
    bench = Bench(tmp_path, Path(program), Path(root))
    bench.environ["NUMBA_CACHE_DIR"] = numba_cache
    return bench


@pytest.fixture(params=["stand-in", "real"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return request.getfixturevalue("stand_in" if request.param == "stand-in" else "real")


# --- promises kept with the real program too ----------------------------------------------------------------------


def test_every_chunk_gets_the_detections_of_scores_csv(bench: Bench):
    batch = [bench.good(name) for name in ("a", "b", "c", "d", "e")]
    results = bench.process(batch)
    assert done(results) == {"a", "b", "c", "d", "e"}
    scores = bench.scores()
    assert any(scores.values())
    for name, result in results.items():
        assert sorted(result.detections, key=repr) == sorted(scores.get(name, []), key=repr)
        assert result.audio_s == 3
    in_time = sorted(results.values(), key=lambda result: result.ended_at_ms)
    assert all(result.started_at_ms <= result.ended_at_ms for result in in_time)
    assert all(a.ended_at_ms <= b.started_at_ms for a, b in pairwise(in_time))


@pytest.mark.parametrize("content", [b"this is not audio" * 50, b""], ids=["corrupt", "0 bytes"])
def test_bad_file_is_blamed_and_its_company_is_not(bench: Bench, content: bytes):
    bench.extra_args = ("--threads", "1")  # then everything behind the bad one is lost
    bad = bench.bad("b", content)
    results = bench.process([bench.good("a"), bad, bench.good("c")])
    assert results["a"].ok
    assert (results["b"].error_class, results["b"].charged) == ("bad_audio", True)
    assert bad.audio_path in (results["b"].error or "")
    assert (results["c"].error_class, results["c"].charged) == ("batch_lost", False)


def test_interrupt_finishes_the_recordings_in_progress(bench: Bench):
    bench.environ["FAKE_HAWKEARS_S"] = "1"
    batch = [bench.good(name, 20) for name in "abcdefghijklmnop"]
    session = bench.open()
    results = []
    for result in session.process(batch):
        results.append(result)
        session.interrupt()
        session.interrupt()  # a second SIGINT would throw away what is in progress
    assert session.close() == 1
    found = by_name(results)
    assert done(found) == set(found)
    assert 1 <= len(found) < len(batch)
    assert set(bench.scores()) <= set(found)


def test_interrupt_before_the_first_recording_leaves_all_unanswered(bench: Bench):
    bench.environ["FAKE_HAWKEARS_START_S"] = "2"
    session = bench.open()
    threading.Timer(1, session.interrupt).start()
    assert list(session.process([bench.good("a"), bench.good("b")])) == []
    session.close()


def test_unknown_region_is_a_mistake_and_not_a_silent_success(bench: Bench):
    bench.extra_args = ("--region", "XX-YY")
    with pytest.raises(SessionBroken, match="location XX-YY not found") as broken:
        bench.process([bench.good("a")])
    assert broken.value.error_class == "configuration"


def test_unknown_option_is_a_mistake(bench: Bench):
    bench.extra_args = ("--loudly",)
    with pytest.raises(SessionBroken, match="No such option: --loudly") as broken:
        bench.process([bench.good("a"), bench.good("b")])
    assert broken.value.error_class == "configuration"


def test_missing_models_are_a_mistake(bench: Bench):
    bench.root = bench.folder / "empty-root"
    bench.root.mkdir()
    with pytest.raises(NotHere, match=r"no models in .*empty-root"):
        bench.engine().check()
    with pytest.raises(SessionBroken, match="Model checkpoint files not found") as broken:
        bench.process([bench.good("a"), bench.good("b")])
    assert broken.value.error_class == "configuration"


def test_gpu_worker_that_runs_on_the_cpu_is_stopped_at_once(bench: Bench):
    bench.environ |= {"FAKE_HAWKEARS_CUDA": "0", "FAKE_HAWKEARS_S": "60"}
    session = bench.open(GPU)
    with pytest.raises(SessionBroken, match="took the CPU although this worker has a GPU") as broken:
        list(session.process([bench.good("a", 60), bench.good("b", 60)]))
    assert broken.value.error_class == "ran_on_cpu"
    assert session.close() == -9
    assert not list((bench.scratch / "out-1").glob("*_scores.txt"))


def test_crumb_shorter_than_half_a_second_is_done_without_detections(bench: Bench):
    results = bench.process([bench.good("a"), bench.good("crumb", 0.3)])
    assert results["crumb"].ok
    assert results["crumb"].detections == ()


def test_check_is_content_with_a_whole_installation(bench: Bench):
    bench.engine().check()


def test_chunks_of_the_same_stem_stay_apart(bench: Bench):
    first = make_wav(bench.folder / "station1" / "20230615_040000.wav", 3, 22050, tone_hz=3000)
    second = make_wav(bench.folder / "station2" / "20230615_040000.WAV", 4, 22050, tone_hz=5000)
    results = bench.process([chunk("one", first, 3000), chunk("two", second, 4000)])
    assert done(results) == {"one", "two"}
    assert results["one"].detections != results["two"].detections


def test_annexed_recording_is_found_under_its_own_name_and_date(bench: Bench):
    bench.extra_args = ("--region", "CA-NT", "--date", "file")
    content = make_wav(bench.folder / ".git" / "annex" / "SHA256E-s64044--0123.wav", 3, 22050)
    link = bench.folder / "rec" / "20230615_040000.wav"
    link.parent.mkdir()
    link.symlink_to(content)
    assert done(bench.process([chunk("linked", link, 3000)])) == {"linked"}
    assert "unable to extract valid date" not in (bench.scratch / "hawkears-1.log").read_text()


def test_audio_on_another_file_system_is_reached(bench: Bench, other_file_system: Path):
    bench.extra_args = ("--threads", "3")  # a thread for each: none is lost behind the bad one
    kept = make_wav(other_file_system / "one" / "20230615_040000.wav", 3, 22050, tone_hz=3000)
    same_stem = make_wav(other_file_system / "two" / "20230615_040000.wav", 4, 22050, tone_hz=5000)
    bad = other_file_system / "bad.wav"
    bad.write_bytes(b"no audio")
    results = bench.process([chunk("kept", kept), chunk("same_stem", same_stem), chunk("bad", bad)])
    assert done(results) == {"kept", "same_stem"}
    assert results["kept"].detections != results["same_stem"].detections
    assert (results["bad"].error_class, results["bad"].charged) == ("bad_audio", True)
    assert kept.exists()


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK) or shared_memory.stat().st_dev == tmp_path.stat().st_dev:
        missing("shm", "no second file system here: /dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared_memory))
    yield folder
    shutil.rmtree(folder)


# --- the device ---------------------------------------------------------------------------------------------------


def test_gpu_worker_says_cuda_and_is_believed(stand_in: Bench):
    assert done(stand_in.process([stand_in.good("a")], GPU)) == {"a"}


@pytest.mark.parametrize(("plan", "allow_cpu"), [(GPU, True), (SIMULATED, False), (CPU, False)])
def test_cpu_is_accepted_where_it_was_agreed(stand_in: Bench, plan: WorkerPlan, allow_cpu: bool):
    stand_in.environ["FAKE_HAWKEARS_CUDA"] = "0"
    stand_in.allow_cpu = allow_cpu
    assert done(stand_in.process([stand_in.good("a")], plan)) == {"a"}


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


# --- check --------------------------------------------------------------------------------------------------------


def test_missing_program_is_not_here(stand_in: Bench):
    stand_in.program = stand_in.folder / "nowhere" / "hawkears"
    with pytest.raises(NotHere, match="nowhere/hawkears' was not found"):
        stand_in.engine().check()


def test_program_is_found_on_path_and_works_in_its_root(stand_in: Bench, monkeypatch: pytest.MonkeyPatch):
    stand_in.environ["PATH"] = f"{stand_in.program.parent}:{os.environ['PATH']}"
    stand_in.program = Path("hawkears")
    monkeypatch.chdir(stand_in.folder)
    stand_in.root = Path("root")
    stand_in.engine().check()
    assert done(stand_in.process([stand_in.good("a")])) == {"a"}


@pytest.mark.parametrize("arg", ["--quiet", "-o", "--output=x", "--rtype", "--filelist=list.csv"])
def test_option_that_would_blind_us_is_refused(stand_in: Bench, arg: str):
    stand_in.extra_args = (arg,)
    with pytest.raises(BadInput, match=arg):
        stand_in.engine().check()


def test_engine_is_an_engine(stand_in: Bench):
    engine: Engine = stand_in.engine()
    assert engine.name == "hawkears"
    assert engine.wants >= 1000, "a start costs as much as two hundred chunks"


# --- staging ------------------------------------------------------------------------------------------------------


def test_annexed_content_that_was_not_fetched_fails_alone(stand_in: Bench):
    link = stand_in.folder / "audio" / "absent.wav"
    link.parent.mkdir()
    link.symlink_to(stand_in.folder / ".git" / "annex" / "SHA256E-s64044--0123.wav")
    results = stand_in.process([chunk("absent", link), stand_in.good("b")])
    assert done(results) == {"b"}
    assert results["absent"].error_class == "bad_audio"
    assert "absent.wav: No such file" in (results["absent"].error or "")


def test_staged_audio_is_gone_after_the_batch_and_the_original_is_not(stand_in: Bench):
    batch = [stand_in.good("a")]
    session = stand_in.open()
    list(session.process(batch))
    assert not list(stand_in.scratch.glob("in-*"))
    assert Path(batch[0].audio_path).exists()
    assert session.close() == 0


# --- results as they come -----------------------------------------------------------------------------------------


def test_results_come_before_the_batch_is_over(stand_in: Bench):
    stand_in.environ["FAKE_HAWKEARS_S"] = "0.7"
    stand_in.extra_args = ("--threads", "1")
    early = 0
    session = stand_in.open()
    for _ in session.process([stand_in.good(name) for name in "abcdef"]):
        early += not (stand_in.scratch / "out-1" / "scores.csv").exists()
    assert early >= 4


@pytest.mark.parametrize("word", ["opened", "torn"])
def test_label_file_half_written_for_seconds_is_not_believed(stand_in: Bench, word: str):
    results = stand_in.process([stand_in.fake("slow", word), stand_in.good("b")])
    assert done(results) == {"slow", "b"}
    assert list(results["slow"].detections) == stand_in.scores()["slow"]
    assert results["slow"].detections


def test_silence_is_done_without_detections(stand_in: Bench):
    results = stand_in.process([stand_in.fake("a", "silence"), stand_in.good("b"), stand_in.good("c")])
    assert done(results) == {"a", "b", "c"}
    assert results["a"].detections == ()


def test_last_result_comes_while_hawkears_still_works_on_others(stand_in: Bench):
    # The first thread has nothing after "a"; only the rest of its file says that it is finished.
    stand_in.environ["FAKE_HAWKEARS_S"] = "0"
    session = stand_in.open()
    first = next(iter(session.process([stand_in.good("a"), stand_in.fake("slow", "opened")])))
    assert first.chunk.recording_id == "a"
    assert session.close() == -9


def test_two_batches_in_one_session_do_not_mix(stand_in: Bench):
    session = stand_in.open()
    first = by_name(session.process([stand_in.good("a"), stand_in.good("b")]))
    second = by_name(session.process([stand_in.bad("c"), stand_in.good("d")]))
    assert done(first) == {"a", "b"}
    assert done(second) == {"d"}
    again = stand_in.process([stand_in.good("e")])  # a new session in the old scratch
    assert done(again) == {"e"}


# --- what the end of the process means ----------------------------------------------------------------------------


def test_two_bad_files_are_both_blamed(stand_in: Bench):
    results = stand_in.process([stand_in.bad("a"), stand_in.bad("b"), stand_in.good("c"), stand_in.good("d")])
    assert {name: (result.error_class, result.charged) for name, result in results.items()} == {
        "a": ("bad_audio", True),
        "b": ("bad_audio", True),
        "c": ("batch_lost", False),
        "d": ("batch_lost", False),
    }


def test_chunk_much_shorter_than_promised_is_bad(stand_in: Bench):
    path = make_wav(stand_in.folder / "short.wav", 0.2)
    results = stand_in.process([chunk("short", path, 30_000), stand_in.good("b")])
    assert (results["short"].error_class, results["short"].charged) == ("bad_audio", True)
    assert "0.20 s of audio instead of 30.00 s" in (results["short"].error or "")


@pytest.mark.parametrize(
    ("word", "error_class", "said"),
    [
        ("oom", "out_of_memory", "CUDA out of memory"),
        ("SIGSEGV", "engine_crash", "signal 11"),
        ("traceback", "no_output", "expected input to have 1 channels"),
        ("full", "no_space", "No space left on device"),
    ],
)
def test_chunk_alone_is_charged(stand_in: Bench, word: str, error_class: str, said: str):
    result = stand_in.process([stand_in.fake("a", word)])["a"]
    assert (result.error_class, result.charged) == (error_class, True)
    assert said in (result.error or "")
    assert len(result.error or "") <= 2100


@pytest.mark.parametrize("word", ["oom", "SIGSEGV", "traceback", "full"])
def test_chunks_in_company_are_not_charged(stand_in: Bench, word: str):
    stand_in.extra_args = ("--threads", "1")
    batch = [stand_in.good("a"), stand_in.good("b"), stand_in.fake("c", word), stand_in.good("d")]
    results = stand_in.process(batch)
    assert set(results) == {"a", "b", "c", "d"}
    assert results["a"].ok
    lost = [results[name] for name in ("c", "d")]
    assert [(result.error_class, result.charged) for result in lost] == [("batch_lost", False)] * 2


def test_crash_leaves_no_half_written_file_behind_as_silence(stand_in: Bench):
    # First thread: "slow" is open and empty when the second one takes the process down.
    words = {"slow": "opened", "b": "", "c": "", "d": "", "e": "", "deadly": "SIGKILL"}
    batch = [stand_in.fake(name, word) if word else stand_in.good(name) for name, word in words.items()]
    results = stand_in.process(batch)
    assert set(results) == set(words)
    assert done(results) <= {"b", "d"}
    assert "b" in done(results)
    assert results["slow"].error_class == "batch_lost"


@pytest.mark.parametrize(
    ("setting", "error_class", "said"),
    [
        ({"FAKE_HAWKEARS_OOM": "load"}, "out_of_memory", "CUDA out of memory"),
        ({"FAKE_HAWKEARS_NO_TORCH": "1"}, "configuration", "No module named 'torch'"),
    ],
)
def test_batch_of_which_nothing_came_breaks_the_session(
    stand_in: Bench, setting: dict[str, str], error_class: str, said: str
):
    stand_in.environ |= setting
    with pytest.raises(SessionBroken, match=said) as broken:
        stand_in.process([stand_in.good(name) for name in "abcd"])
    assert broken.value.error_class == error_class


def test_empty_model_folder_is_a_mistake(stand_in: Bench):
    stand_in.root = make_fake_root(stand_in.folder / "no-models", models=0)
    with pytest.raises(SessionBroken, match="No checkpoints found") as broken:
        stand_in.process([stand_in.good("a")])
    assert broken.value.error_class == "configuration"


def test_silence_without_end_is_a_hang(stand_in: Bench):
    stand_in.environ["FAKE_HAWKEARS_S"] = "60"
    stand_in.patience = Patience(start_s=1, least_s=1, slowest=0)
    with pytest.raises(SessionBroken, match="no word from HawkEars") as broken:
        stand_in.process([stand_in.good("a"), stand_in.good("b")])
    assert (broken.value.error_class, broken.value.at_start) == ("hang", False)


def test_kill_ends_it_now_and_keeps_what_was_finished(stand_in: Bench):
    stand_in.environ["FAKE_HAWKEARS_S"] = "1"
    stand_in.extra_args = ("--threads", "1")
    session = stand_in.open()
    results = []
    killed_at_s = 0.0
    for result in session.process([stand_in.good(name) for name in "abcdefgh"]):
        results.append(result)
        killed_at_s = time.monotonic()
        session.kill()
    assert time.monotonic() - killed_at_s < 5, "the others would take seven"
    assert session.close() == -9
    assert done(by_name(results)) == set(by_name(results)) >= {"a"}
    assert len(results) < 8
    assert list(session.process([stand_in.good("i")])) == []


def test_caller_that_walks_away_leaves_no_process(stand_in: Bench):
    stand_in.environ["FAKE_HAWKEARS_S"] = "1"
    session = stand_in.open()
    results = session.process([stand_in.good(name) for name in "abcdef"])
    next(results)
    results.close()
    assert session.pid is not None
    assert not Path(f"/proc/{session.pid}").exists()


def test_session_starts_no_process_when_stopped_before(stand_in: Bench):
    session = stand_in.open()
    session.interrupt()
    assert list(session.process([stand_in.good("a")])) == []
    assert session.pid is None
    assert session.close() is None


# --- the real one, fed --------------------------------------------------------------------------------------------
# What does not need real models is in tests/unit/test_hawkears_worker.py, on the stand-in package.


class FedBench(Bench):
    """The real HawkEars behind our worker program."""

    def engine(self) -> HawkEarsEngine:
        return HawkEarsEngine(
            ["not-this-way"],
            python=python_of(self.program),
            root=self.root,
            extra_args=self.extra_args,
            environ=self.environ,
            launcher=SubprocessLauncher("test"),
            clock=SystemClock(),
            allow_cpu=self.allow_cpu,
        )

    def analyze(self, folder: Path) -> dict[str, list]:
        """Run ``hawkears analyze`` itself on a folder and return its table."""
        out = self.folder / "own"
        words = [self.program, "analyze", folder, "-o", out, "--rtype", "csv", *self.extra_args]
        env = {**self.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        subprocess.run(list(map(str, words)), cwd=self.root, env=env, check=True, capture_output=True, timeout=170)
        table = out / "scores.csv"
        return parse_scores_csv(table.read_text()) if table.exists() else {}


@pytest.fixture
def fed(real: Bench) -> FedBench:
    return FedBench(real.folder, real.program, real.root, real.environ)


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
def test_fed_it_finds_exactly_what_it_finds_by_itself(fed: FedBench, options: tuple[str, ...]):
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


def test_fed_a_bad_file_costs_only_itself_and_no_reload(fed: FedBench):
    fed.extra_args = ("--threads", "1")
    batch = [fed.good("a"), fed.bad("b"), fed.bad("c", b""), fed.good("d"), fed.good("crumb", 0.3), fed.good("e")]
    start_s = time.monotonic()
    results = fed.process(batch)
    assert done(results) == {"a", "d", "e", "crumb"}
    assert [results[name].error_class for name in "bc"] == ["bad_audio"] * 2
    in_time = sorted(results.values(), key=lambda result: result.started_at_ms)
    reload_s = (in_time[-1].ended_at_ms - in_time[1].started_at_ms) / 1000
    assert reload_s < 0.5 * (time.monotonic() - start_s), "only the first one waits for the models"


def test_fed_on_the_cpu_by_surprise_it_is_stopped_before_its_first_recording(fed: FedBench):
    with pytest.raises(SessionBroken, match="took the CPU although this worker has a GPU") as broken:
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
def test_fed_a_mistake_is_a_mistake(fed: FedBench, options: tuple[str, ...], said: str):
    fed.extra_args = options
    with pytest.raises(SessionBroken, match=said) as broken:
        fed.process([fed.good("a"), fed.good("b")])
    assert broken.value.error_class == "configuration"


def test_fed_without_models_nothing_is_tried(fed: FedBench):
    fed.root = fed.folder / "empty-root"
    fed.root.mkdir()
    with pytest.raises(SessionBroken, match="Model checkpoint files not found") as broken:
        fed.process([fed.good("a")])
    assert broken.value.error_class == "configuration"


def test_fed_an_interrupt_finishes_what_is_in_progress(fed: FedBench):
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


def test_the_real_installation_passes_its_check(fed: FedBench):
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
        return HawkEars1Engine(
            sys.executable,
            root=self.root,
            extra_args=self.extra_args,
            environ=self.environ,
            launcher=SubprocessLauncher("test"),
            clock=SystemClock(),
            allow_cpu=self.allow_cpu,
            patience=self.patience,
        )


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
    assert [results[name].error_class for name in "bc"] == ["bad_audio"] * 2
    assert "b.wav" in (results["b"].error or "")


def test_version_1_a_thread_that_died_in_silence_is_noticed(first: FirstBench):
    """It writes its table and ends with 0 all the same."""
    first.extra_args = ("--threads", "2")
    results = first.process([first.fake("a", "oom"), first.good("b"), first.good("c"), first.good("d")])
    assert done(results) == {"b", "d"}
    assert [(results[name].error_class, results[name].charged) for name in "ac"] == [("batch_lost", False)] * 2
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
    with pytest.raises(SessionBroken, match="took the CPU") as broken:
        first.process([first.good("a")], GPU)
    assert broken.value.error_class == "ran_on_cpu"
    assert done(first.process([first.good("a")], CPU)) == {"a"}


def test_version_1_is_looked_for_before_anything_starts(first: FirstBench):
    first.engine().check()
    first.extra_args = ("--rtype", "csv")
    with pytest.raises(BadInput, match="--rtype"):
        first.engine().check()
    first.extra_args, first.root = (), first.folder
    with pytest.raises(NotHere, match=r"there is no .*analyze\.py"):
        first.engine().check()
