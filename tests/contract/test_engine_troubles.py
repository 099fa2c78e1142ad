"""What can go wrong inside an engine, one after another: how it is told apart, and who is blamed.

HawkEars is a stand-in here; ``tests/flow/test_hawkears_engine.py`` has the real one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Device, WorkerPlan
from rooms.root import BadcjobsError, Engine, SessionBroken, SubprocessLauncher, SystemClock
from rooms.workers import WORKER, CommandEngine, DemoEngine, EngineStart, HangTimeout, HawkEars1Engine, HawkEarsEngine
from support.audio import make_wav
from support.fake_hawkears import hear, make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.fake_hawkears_package import fake_package_environ
from support.fake_prefix import install_fake_prefix
from support.pages import Pages
from support.waiting import wait_for

GPU = WorkerPlan(0, Device("0", "test", index=3, uuid="GPU-1", backend="nvml"), 1, 8)
SIMULATED = replace(GPU, device=Device("0", "test", uuid="GPU-sim", backend="simulated"))
LEAN = replace(SIMULATED, lean=True)
CPU = WorkerPlan(0, None, None, 2)
NAMES = {"ROPT": "Rock Ptarmigan", "RUGR": "Ruffed Grouse", "SPGR": "Spruce Grouse", "STGR": "Sharp-tailed Grouse"}


@dataclass
class Place:
    """Stand-in installations and some audio."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = make_fake_root(self.folder / "root")
        self.root1 = make_fake_hawkears1(self.folder / "HawkEars")
        self.loads = self.folder / "loads"
        self.environ |= {"PATH": os.environ["PATH"], "FAKE_HAWKEARS_LOADS": str(self.loads), **fake_package_environ()}

    def good(self, name: str, seconds: float = 3, end_ms: int | None = None) -> Chunk:
        tone_hz = 900 + sum(name.encode())
        return chunk(make_wav(self.folder / "audio" / f"{name}.wav", seconds, tone_hz=tone_hz), end_ms)

    def file(self, name: str, content: bytes) -> Chunk:
        path = self.folder / "audio" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return chunk(path)

    def fake(self, name: str, word: str) -> Chunk:
        """Make a recording at which a stand-in misbehaves."""
        return self.file(name, f"#fake {word} {name}\n".encode())

    def start(self, options: Sequence[str], environ: dict[str, str]) -> EngineStart:
        return EngineStart(options, {**self.environ, **environ}, SubprocessLauncher("test"), SystemClock())

    def hawkears(self, *options: str, limit: HangTimeout | None = None, cpu: bool = False, **env: str) -> Engine:
        start = self.start(options, env)
        return HawkEarsEngine(start, sys.executable, self.root, allow_cpu=cpu, hang_timeout=limit or HangTimeout())

    def first(self, *options: str, **env: str) -> Engine:
        return HawkEars1Engine(self.start(options, env), sys.executable, self.root1, allow_cpu=False)

    def events(
        self, engine: Engine, batch: Sequence[Chunk], plan: WorkerPlan = GPU
    ) -> list[ChunkStarted | ChunkResult]:
        scratch = self.folder / "scratch" / "worker-0"
        scratch.mkdir(parents=True, exist_ok=True)
        session = engine.open(plan, scratch)
        try:
            return list(session.process(batch))
        finally:
            session.close()

    def process(self, engine: Engine, batch: Sequence[Chunk], plan: WorkerPlan = GPU) -> dict[str, ChunkResult]:
        events = self.events(engine, batch, plan)
        return {one.chunk.chunk_id: one for one in events if isinstance(one, ChunkResult)}

    def broken(self, engine: Engine, batch: Sequence[Chunk], plan: WorkerPlan = GPU) -> tuple[str, bool, str]:
        with pytest.raises(SessionBroken) as broken:
            self.process(engine, batch, plan)
        return broken.value.error_class, broken.value.at_start, str(broken.value)


def chunk(path: Path, end_ms: int | None = None) -> Chunk:
    return Chunk(path.stem, path.stem, str(path), str(path), 0, end_ms)


def classes(results: dict[str, ChunkResult]) -> dict[str, str | None]:
    return {name: result.error_class for name, result in sorted(results.items())}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- HawkEars 2 -------------------------------------------------------------------------------------------------------


def test_the_worker_says_where_it_computes_finishes_what_it_began_and_ignores_signals(place: Place) -> None:
    """The lines between us and the worker program: its own docstring promises them."""
    batch = [place.good(name) for name in "abcdefgh"]
    (place.folder / "out").mkdir()
    with subprocess.Popen(
        [sys.executable, str(WORKER), str(place.folder / "out"), "--threads", "2", "--models", "2"],
        env={**place.environ, "CUDA_VISIBLE_DEVICES": "GPU-8f1c", "FAKE_HAWKEARS_S": "0.4"}, cwd=place.root,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdin is not None and worker.stdout is not None
        orders = [json.dumps({"id": number, "audio": one.audio_path}) for number, one in enumerate(batch)]
        worker.stdin.write("\n".join(orders) + "\n")
        worker.stdin.flush()
        ready, *begun = [json.loads(worker.stdout.readline()) for _ in range(3)]
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            worker.send_signal(signum)
        out, said = worker.communicate('{"stop": true}\n', timeout=60)
    assert ready.pop("versions").keys() == {"hawkears", "torch", "python"}
    assert ready == {
        "event": "ready", "threads": 2, "models": 2, "holds": 4, "device": "cuda", "uuid": "GPU-8f1c",
        "name": "Tesla V100",
    }  # fmt: skip
    assert sorted(map(str, begun)) == ["{'event': 'started', 'id': 0}", "{'event': 'started', 'id': 1}"]
    *done, bye = map(json.loads, out.splitlines())
    assert (worker.returncode, bye, sorted(event["id"] for event in done)) == (0, {"event": "bye"}, [0, 1])
    for event in done:
        heard = hear(Path(batch[event["id"]].audio_path).read_bytes())
        assert event["detections"] == [
            [round(start_s * 1000), round(end_s * 1000), code, round(score, 3), NAMES.get(code)]
            for start_s, end_s, code, score in heard
        ]
        assert (event["audio_s"], event["analysed"]) == (3.0, True) and event["took_s"] >= event["predict_s"] >= 0.4
    assert "HawkEars prints what it likes" in said, "not between our lines"


def test_a_recording_that_fails_has_its_class_and_costs_no_reload(place: Place) -> None:
    batch = [
        place.good("a"), place.file("bad", b"no audio" * 9), place.file("empty", b""), place.fake("oom", "oom"),
        place.good("b"), place.fake("error", "traceback"), place.fake("full", "full"),
        chunk(Path("/no/such/gone.wav")), replace(chunk(place.folder), recording_id="folder", chunk_id="folder"),
        place.good("crumb", 0.2), place.good("crumb of 30 s", 0.2, 30_000), place.good("half a second", 0.4, 500),
        place.good("longer", 3, 2_500), place.good("shorter", 3, 3_500), place.fake("quiet", "silence"),
        place.good("z"),
    ]  # fmt: skip
    events = place.events(place.hawkears("--threads", "1"), batch)
    assert [type(one) for one in events] == [ChunkStarted, ChunkResult] * len(batch)
    assert [one.chunk for one in events[::2]] == batch, "in the order of the batch, each told when it begins"
    results = {one.chunk.chunk_id: one for one in events if isinstance(one, ChunkResult)}
    assert {name: error_class for name, error_class in classes(results).items() if error_class} == {
        "bad": "bad_audio", "empty": "bad_audio", "gone": "bad_audio", "folder": "bad_audio",
        "crumb of 30 s": "bad_audio", "oom": "out_of_memory", "error": "engine_error", "full": "no_space",
    }  # fmt: skip
    assert all(result.charged for result in results.values())
    assert "0.20 s of audio instead of 30.00 s" in (results["crumb of 30 s"].error or "")
    assert [results[name].audio_s for name in ("a", "longer", "shorter")] == [3.0, 2.5, 3.5], "what was promised counts"
    assert results["crumb"].detections == results["quiet"].detections == () != results["z"].detections
    assert len(place.loads.read_text().splitlines()) == 1, "the models were loaded once"


def test_where_only_some_threads_find_room_the_others_do_all_and_the_log_says_what_runs_where(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    engine = place.hawkears("--threads", "3", FAKE_HAWKEARS_ROOM="2", FAKE_HAWKEARS_S="0.05")
    with caplog.at_level("INFO", logger="badcjobs"):
        results = place.process(engine, [place.good(name) for name in "abcdef"])
    assert set(classes(results)) == set("abcdef") and all(result.ok for result in results.values())
    ready, fewer = [record.getMessage() for record in caplog.records]
    assert ready.endswith("on CUDA GPU-1 Tesla V100, threads: 3, models: 3") and "hawkears 2.3.0" in ready
    assert "a worker continues with fewer threads (2): " in fewer


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--lat", "50", "--lon", "-120"), lambda code, score: code not in ("RUGR", "STGR")),
        (("--region", "CA-BC"), lambda code, score: code not in ("RUGR", "STGR")),
        (("--region", "CA-NT"), lambda code, score: True),
        (("--min_score", "0.9"), lambda code, score: score >= 0.9),
    ],
)
def test_locations_and_scores_filter_also_recordings_that_come_one_by_one(
    place: Place, options: tuple[str, ...], kept: object
) -> None:
    """HawkEars knows the recordings of its list by their names."""
    results = place.process(place.hawkears("--threads", "2", *options), [place.good(name) for name in "abcd"])
    heard = {name: hear(Path(result.chunk.audio_path).read_bytes()) for name, result in results.items()}
    assert {name: [d.label for d in result.detections] for name, result in results.items()} == {
        name: [code for _, _, code, score in found if kept(code, score)]  # type: ignore[operator]
        for name, found in heard.items()
    }


def test_what_breaks_a_session_has_its_class_and_only_what_began_is_suspect(place: Place) -> None:
    good, long_ago = place.good("good"), HangTimeout(start_s=60, least_s=0.5)
    long_ago.learn(0.01, 3)
    no_models = replace(place, folder=place.folder / "other")
    (place.folder / "other" / "root" / "data").mkdir(exist_ok=True, parents=True)
    for path in (no_models.root / "data" / "ckpt").iterdir():
        path.unlink()
    one = ("--threads", "1")
    cases = {
        "SIGSEGV": (place.hawkears(*one), [place.fake("SIGSEGV", "SIGSEGV"), good], ("engine_crash", False)),
        "SIGKILL": (place.hawkears(*one), [place.fake("SIGKILL", "SIGKILL"), good], ("worker_died", False)),
        "assert": (place.hawkears(*one), [place.fake("assert", "assert"), good], ("gpu_error", False)),
        "lost": (place.hawkears(*one), [place.fake("lost", "lost"), good], ("gpu_lost", False)),
        "hang": (place.hawkears(*one, limit=long_ago), [good, place.fake("hang", "hang")], ("hang", False)),
        "start": (place.hawkears(limit=HangTimeout(start_s=1), FAKE_HAWKEARS_START_S="60"), [good], ("hang", True)),
        "CPU": (place.hawkears(FAKE_HAWKEARS_CUDA="0"), [good], ("ran_on_cpu", True)),
        "no room": (place.hawkears(FAKE_HAWKEARS_OOM="load"), [good] * 3, ("out_of_memory", True)),
        "no torch": (place.hawkears(FAKE_HAWKEARS_NO_TORCH="1"), [good], ("configuration", True)),
        "shape": (place.hawkears(FAKE_HAWKEARS_SHAPE="other"), [good], ("configuration", True)),
        "region": (place.hawkears("--region", "XX-YY"), [good], ("configuration", False)),
        "option": (place.hawkears("--threads", "many"), [good], ("configuration", True)),
        "no models": (no_models.hawkears(), [good], ("configuration", True)),
    }
    assert {name: place.broken(engine, batch)[:2] for name, (engine, batch, _) in cases.items()} == {
        name: told for name, (_, _, told) in cases.items()
    }


def test_the_cpu_is_accepted_where_it_was_agreed(place: Place) -> None:
    for plan, cpu in ((GPU, True), (SIMULATED, False), (CPU, False)):
        assert place.process(place.hawkears(cpu=cpu, FAKE_HAWKEARS_CUDA="0"), [place.good("a")], plan)["a"].ok


def test_the_check_asks_hawkears_itself_also_behind_a_prefix(place: Place, pages: Pages) -> None:
    fine = place.hawkears("--threads", "2", "--region", "CA-NT")
    fine.check()
    assert (fine.version or "").startswith("2.3.0, 3 models ")
    words = ["bash", "-c", f'{install_fake_prefix(place.folder / "bin")} "$0" "{sys.executable}" "${{@:2}}"',
             f"{place.folder}/{{worker}}"]  # fmt: skip
    inside = EngineStart([], place.environ, SubprocessLauncher("task", words), SystemClock())
    HawkEarsEngine(inside, "/only/in/the/container/python", place.root, allow_cpu=True).check()
    assert (place.folder / "task-check.report").exists()
    engines = {
        "wrong option": place.hawkears("--loudly"),
        "another API": place.hawkears(FAKE_HAWKEARS_SHAPE="none"),
        "no HawkEars": place.hawkears(PYTHONPATH=""),
    }
    said = []
    for name, engine in {**engines, "no models": fine}.items():
        for path in (place.root / "data" / "ckpt").iterdir() if engine is fine else ():
            path.unlink()
        with pytest.raises(BadcjobsError) as refused:
            engine.check()
        error = refused.value
        said.append(f"## {name}\n{error.exit_code}: {error.what}\nwhy: {error.why}\nfix: {error.fix}\n")
    text = "\n".join(said).replace(str(place.folder), "/…")
    pages({"refused.txt": text.replace(shlex.quote(sys.executable), "PYTHON").replace(sys.executable, "PYTHON")})


# --- HawkEars 1 -------------------------------------------------------------------------------------------------------


def test_version_1_brings_labels_back_to_their_chunks_and_nothing_of_a_lost_batch_counts(place: Place) -> None:
    batch = [place.good("a"), place.file("bad", b"no audio"), place.good("b"), place.fake("quiet", "silence")]
    results = place.process(place.first(), [*batch, chunk(Path("/no/such/gone.wav"))])
    assert classes(results) == {"a": None, "b": None, "bad": "no_output", "gone": "no_output", "quiet": None}
    assert f"Caught exception in audio load of {batch[1].audio_path}" in (results["bad"].error or "")
    for one in (batch[0], batch[2]):
        heard = hear(Path(one.audio_path).read_bytes())
        assert sorted((d.start_ms, d.label, d.score, d.label_name) for d in results[one.chunk_id].detections) == sorted(
            (round(start_s * 1000), code, round(score, 3), NAMES.get(code, code)) for start_s, _, code, score in heard
        )
    # A thread that dies in silence: it writes its table and ends with 0 all the same.
    for word, alone in (("oom", "out_of_memory"), ("SIGSEGV", "engine_crash"), ("SIGKILL", "worker_died")):
        for others, expected in (([place.good("a"), place.good("b")], ("batch_lost", False)), ([], (alone, True))):
            results = place.process(place.first("--threads", "2"), [place.fake("x", word), *others])
            assert {(result.error_class, result.charged) for result in results.values()} == {expected}, word


def test_version_1_mistakes_are_mistakes(place: Place) -> None:
    cases = [
        (place.first("--region", "XX-YY"), "configuration", "no eBird county found"),
        (place.first("--loudly"), "configuration", "unrecognized arguments"),
        (place.first(FAKE_HAWKEARS_CUDA="0"), "ran_on_cpu", "uses the CPU although this worker has a GPU"),
    ]
    for engine, error_class, said in cases:
        told = place.broken(engine, [place.good("a")])
        assert (told[0], said in told[2]) == (error_class, True), told
    assert place.process(place.first(), [place.good("a")], CPU)["a"].ok


# --- less memory ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_as_usual_fits_lean_and_more_does_not(place: Place) -> None:
    three, room = ("--min_score", "0.1", "--threads", "3"), {"FAKE_HAWKEARS_ROOM_S": "40"}
    engines = [
        place.hawkears(*three, **room),
        place.first(*three, **room),
        DemoEngine(place.start(["--room-s=40"], {})),
    ]
    for engine in engines:
        told = [
            place.process(engine, [place.good("a", length_s)], plan)["a"].error_class
            for plan, length_s in ((SIMULATED, 25), (LEAN, 25), (LEAN, 40), (LEAN, 41))
        ]
        assert told == ["out_of_memory", None, None, "out_of_memory"], engine.name


# --- any program ------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, pathlib, signal, sys, time
first, second, *words = sys.argv[1:]
names = ("BADCJOBS_LEAN", "OMP_NUM_THREADS", "BADCJOBS_CHUNK_ID", "BADCJOBS_RECORDING_ID", "CUDA_VISIBLE_DEVICES")
inputs = open(first).read().splitlines() if "many" in words else [first]
seen = " ".join(os.environ.get(name, "-") for name in names)
open(os.environ["RUNS"], "a").write(" ".join([seen, str(len(inputs)), *words]) + "\\n")
for path in inputs:
    trouble = open(path, "rb").read(30).decode(errors="replace").removeprefix("#fake ").split()[0]
    if trouble.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, trouble))
    if trouble.startswith("exit"):
        said = {"exit-memory": "CUDA out of memory", "exit-lost": "no CUDA-capable device is detected"}
        sys.exit(said.get(trouble, 3))
    if trouble == "hang":
        signal.pause()
    if trouble == "leave":
        pathlib.Path(os.environ["RUNS"] + ".left").write_text(str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")))
    for _ in range(30 if trouble == "talk" else 0):
        print("still at it", file=sys.stderr, flush=True)
        time.sleep(0.1)
    table = pathlib.Path(second, pathlib.Path(path).stem + ".csv") if "many" in words else pathlib.Path(second)
    if trouble != "nothing":
        table.write_text("start_time,end_time,label,score\\n" + ("half a ro" if trouble == "half" else ""))
"""


def command(place: Place, template: str, limit: HangTimeout | None = None, **env: str) -> CommandEngine:
    (place.folder / "listen.py").write_text(PROGRAM)
    words = f"{shlex.quote(sys.executable)} {place.folder}/listen.py {template}"
    environ = {"RUNS": str(place.folder / "runs"), **env}
    return CommandEngine(place.start((), environ), words, limit)


ONE, MANY = "{input} {output}", "{inputs} {outputs} many"


@pytest.mark.parametrize(
    ("template", "plan", "runs"),
    [
        (ONE + " {device} {device_index} {chunk_id}", GPU, ["- 8 a a GPU-1 1 GPU-1 3 a", "- 8 b b GPU-1 1 GPU-1 3 b"]),
        (ONE + " [{device}{device_index}]", CPU, ["- 2 a a  1 []", "- 2 b b  1 []"]),
        (ONE, LEAN, ["1 1 a a GPU-sim 1", "1 1 b b GPU-sim 1"]),
        (MANY, GPU, ["- 8 - - GPU-1 2 many"]),
        (MANY, LEAN, ["1 1 - - GPU-sim 1 many", "1 1 - - GPU-sim 1 many"]),
    ],
)
def test_a_program_is_told_what_and_where_and_lean_it_gets_one_chunk_at_a_time(
    place: Place, template: str, plan: WorkerPlan, runs: list[str]
) -> None:
    results = place.process(command(place, template), [place.good("a"), place.good("b")], plan)
    assert all(result.ok for result in results.values())
    assert (place.folder / "runs").read_text().splitlines() == runs


@pytest.mark.parametrize("template", [ONE, MANY])
def test_a_program_that_fails_is_blamed_on_its_chunk_only_if_that_was_alone(place: Place, template: str) -> None:
    good = place.good("good")
    expected = {
        "nothing": "no_output", "half": "bad_output", "exit-3": "exit_code", "exit-memory": "out_of_memory",
        "SIGSEGV": "engine_crash", "SIGKILL": "worker_died",
    }  # fmt: skip
    for word, error_class in expected.items():
        alone = place.process(command(place, template), [place.fake("x", word)])["x"]
        assert (alone.error_class, alone.charged) == (error_class, True) and "x.wav" in (alone.error or ""), word
        both = place.process(command(place, template), [place.fake("x", word), good])
        kept = template == ONE or word in ("nothing", "half")
        assert (both["good"].ok, both["x"].charged) == (kept, kept), word
        if not kept:
            assert classes(both) == {"good": "batch_lost", "x": "batch_lost"}
            assert f"lost with its batch of 2 chunks ({error_class})" in (both["x"].error or "")
    hasty = HangTimeout(start_s=0, least_s=1.0, slowest=0.1)
    hasty.learn(0.01, 3)
    for word, limit, told in (
        ("hang", hasty, ("hang", False)),
        ("SIGTERM", None, ("terminated", False)),
        ("exit-lost", None, ("gpu_lost", False)),
    ):
        assert place.broken(command(place, template, limit), [place.fake("x", word), good])[:2] == told
    patient = HangTimeout(start_s=0, least_s=2.0, slowest=0.1)
    patient.learn(0.01, 3)
    assert place.process(command(place, template, patient), [place.fake("x", "talk")])["x"].ok, "it is not silent"
    assert place.process(command(place, template), [place.fake("x", "leave")])["x"].ok
    left = int((place.folder / "runs.left").read_text())
    wait_for(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie", "its child is gone")
    gone = CommandEngine(place.start((), {}), f"/no/such/program {template}")
    assert place.broken(gone, [good])[:2] == ("no_program", True)
