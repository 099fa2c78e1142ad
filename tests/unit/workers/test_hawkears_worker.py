"""The worker program that feeds HawkEars, on the stand-in package: what it says, and what the engine makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Device, WorkerPlan
from rooms.root import BadInput, NotHere, RunSettings, SessionBroken, SubprocessLauncher, SystemClock
from rooms.workers import WORKER, EngineStart, HangTimeout, HawkEarsEngine, choose_engine, python_of, query_hawkears
from support.audio import make_wav
from support.fake_hawkears import hear, make_fake_root
from support.fake_hawkears_package import fake_package_environ
from support.fake_prefix import install_fake_prefix

GPU = WorkerPlan(0, Device("0", "test", uuid="GPU-1", backend="nvml"), 1, 6)
NAMES = {"ROPT": "Rock Ptarmigan", "RUGR": "Ruffed Grouse", "SPGR": "Spruce Grouse", "STGR": "Sharp-tailed Grouse"}
SIMULATED = WorkerPlan(0, Device("0", "test", uuid="GPU-sim", backend="simulated"), 1, 6)


class Place:
    """A stand-in installation and some audio."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = make_fake_root(folder / "root")
        self.loads = folder / "loads"
        self.environ = {"PATH": os.environ["PATH"], "FAKE_HAWKEARS_LOADS": str(self.loads), **fake_package_environ()}

    def good(self, name: str, seconds: float = 3) -> str:
        tone_hz = 900 + sum(name.encode())
        return str(make_wav(self.folder / "audio" / f"{name}.wav", seconds, tone_hz=tone_hz))

    def fake(self, name: str, word: str) -> str:
        return self.file(name, f"#fake {word} {name}\n".encode())

    def file(self, name: str, content: bytes) -> str:
        path = self.folder / "audio" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return str(path)

    def start(self, *options: str) -> Talk:
        (self.folder / "out").mkdir(exist_ok=True)
        return Talk([sys.executable, str(WORKER), str(self.folder / "out"), *options], self.environ, self.root)

    def engine(self, *options: str, hang_timeout: HangTimeout | None = None, allow_cpu: bool = False) -> HawkEarsEngine:
        start = EngineStart(options, self.environ, SubprocessLauncher("test"), SystemClock())
        hang_timeout = hang_timeout or HangTimeout()
        return HawkEarsEngine(start, sys.executable, self.root, allow_cpu=allow_cpu, hang_timeout=hang_timeout)

    def process(self, engine: HawkEarsEngine, paths: Sequence[str], plan: WorkerPlan = GPU) -> dict[str, ChunkResult]:
        scratch = self.folder / "scratch" / "worker-0"
        scratch.mkdir(parents=True, exist_ok=True)
        session = engine.open(plan, scratch)
        try:
            news = list(session.process([chunk(path) for path in paths]))
        finally:
            session.close()
        return {one.chunk.chunk_id: one for one in news if isinstance(one, ChunkResult)}


def chunk(path: str, end_ms: int | None = None) -> Chunk:
    return Chunk(Path(path).stem, Path(path).stem, path, path, 0, end_ms)


class Talk:
    """A conversation with a worker process."""

    def __init__(self, argv: list[str], environ: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            argv, env=environ, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.events: list[dict[str, Any]] = []

    def give(self, *paths: str) -> Talk:
        assert self.process.stdin is not None
        for number, path in enumerate(paths):
            self.process.stdin.write(json.dumps({"id": number, "audio": path}).encode() + b"\n")
        self.process.stdin.flush()
        return self

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, kind: str, times: int = 1) -> list[dict[str, Any]]:
        """Read on until there were so many events of a kind, and return those."""
        assert self.process.stdout is not None
        while sum(event["event"] == kind for event in self.events) < times:
            line = self.process.stdout.readline()
            assert line, f"it ended after {self.events}: {self.process.stderr and self.process.stderr.read()!r}"
            self.events.append(json.loads(line))
        return self.of(kind)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def end(self) -> int:
        """Close its input and return its exit code."""
        out, err = self.process.communicate(timeout=60)
        self.events += map(json.loads, out.splitlines())
        self.said = err.decode()
        return self.process.returncode


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# --- the conversation -------------------------------------------------------------------------------------------------


def test_it_says_at_the_start_where_it_computes_and_with_what(place: Place) -> None:
    place.environ["CUDA_VISIBLE_DEVICES"] = "GPU-8f1c"
    talk = place.start("--threads", "2", "--models", "2")
    [ready] = talk.hear("ready")
    assert (ready["device"], ready["uuid"], ready["name"]) == ("cuda", "GPU-8f1c", "Tesla V100")
    assert (ready["threads"], ready["models"]) == (2, 2)
    assert ready["versions"]["hawkears"] == "2.3.0"
    assert talk.end() == 0
    assert talk.events[-1] == {"event": "bye"}


def test_without_a_gpu_it_says_so(place: Place) -> None:
    talk = place.start()
    assert talk.hear("ready")[0]["device"] == "cpu"
    assert talk.hear("ready")[0]["uuid"] is None
    talk.end()


def test_every_recording_is_answered_with_what_hawkears_heard(place: Place) -> None:
    paths = [place.good(name) for name in "abcdef"]
    talk = place.start("--threads", "3").give(*paths)
    done = talk.hear("done", 6)
    assert talk.end() == 0
    for event in done:
        expected = hear(Path(paths[event["id"]]).read_bytes())
        assert event["detections"] == [
            [round(start * 1000), round(end * 1000), code, round(score, 3), NAMES.get(code)]
            for start, end, code, score in expected
        ]
        assert (event["audio_s"], event["analysed"]) == (3.0, True)
        assert event["took_s"] >= event["predict_s"] > 0
    assert sorted(event["id"] for event in talk.of("started")) == [0, 1, 2, 3, 4, 5]
    assert "HawkEars prints what it likes" in talk.said


def test_models_are_loaded_once_per_thread_whatever_the_recordings_are_like(place: Place) -> None:
    words = {"b": b"no audio", "c": b"", "d": b"#fake traceback", "f": b"#fake oom", "g": b"RIFF", "i": b"#fake full"}
    paths = [place.file(name, words[name]) if name in words else place.good(name) for name in "abcdefghijkl"]
    talk = place.start("--threads", "2").give(*paths, place.folder.as_posix(), "/no/such/file.wav")
    talk.hear("done", 6)
    failed = talk.hear("failed", 8)
    assert talk.end() == 0
    assert {event["id"] for event in failed} == {1, 2, 3, 5, 6, 8, 12, 13}
    assert len(place.loads.read_text().splitlines()) == 2


def test_the_word_stop_lets_it_finish_what_is_in_progress_and_nothing_else(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_S"] = "0.4"
    talk = place.start("--threads", "2").give(*(place.good(name) for name in "abcdefgh"))
    talk.hear("started", 2)
    talk.say('{"stop": true}')
    assert talk.end() == 0
    assert len(talk.of("started")) == len(talk.of("done")) == 2
    assert talk.events[-1] == {"event": "bye"}


def test_the_signals_of_slurm_do_not_disturb_it(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_S"] = "0.3"
    talk = place.start("--threads", "1").give(place.good("a"), place.good("b"))
    talk.hear("started")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        talk.process.send_signal(signum)
    talk.hear("done", 2)
    assert talk.end() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--region", "XX-YY"), "location XX-YY not found"),
        (("--loudly",), "No such option: --loudly"),
        (("--threads", "many"), "Invalid value"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(place: Place, options: tuple[str, ...], words: str) -> None:
    talk = place.start(*options).give(place.good("a"), place.good("b"))
    assert words in talk.hear("broken")[0]["error"]
    talk.end()
    assert talk.of("done") == []


def test_missing_models_are_said_at_once(place: Place) -> None:
    place.root = make_fake_root(place.folder / "empty", models=0)
    talk = place.start().give(place.good("a"))
    assert "No models loaded" in talk.hear("broken")[0]["error"]
    talk.end()


def test_where_only_some_threads_find_room_for_their_models_it_goes_on_with_those(place: Place) -> None:
    place.environ |= {"FAKE_HAWKEARS_ROOM": "2", "FAKE_HAWKEARS_S": "0.05"}
    talk = place.start("--threads", "3").give(*(place.good(name) for name in "abcdef"))
    talk.hear("done", 6)
    assert talk.hear("fewer")[0]["threads"] == 2
    assert talk.end() == 0


def test_a_gpu_with_no_room_at_all_is_said(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_OOM"] = "load"
    talk = place.start("--threads", "2").give(place.good("a"))
    assert "CUDA out of memory" in talk.hear("broken")[0]["error"]
    talk.end()


@pytest.mark.parametrize(
    "options", [("--lat", "50", "--lon", "-120"), ("--region", "CA-BC"), ("--region", "CA-NT"), ("--min_score", "0.9")]
)
def test_locations_and_scores_filter_as_they_do_in_one_call_with_a_list(place: Place, options: tuple[str, ...]) -> None:
    """HawkEars knows the recordings of its list by their names; ours come one by one."""
    paths = [place.good(name) for name in "abcd"]
    talk = place.start("--threads", "2", *options).give(*paths)
    found = {event["id"]: event["detections"] for event in talk.hear("done", 4)}
    talk.end()
    assert found == {number: one_call_with_a_list(place, paths, options)[path] for number, path in enumerate(paths)}
    everything = sum(len(hear(Path(path).read_bytes())) for path in paths)
    assert (sum(map(len, found.values())) < everything) == (options != ("--region", "CA-NT"))


def one_call_with_a_list(place: Place, paths: list[str], options: tuple[str, ...]) -> dict[str, Any]:
    """What HawkEars finds when its own command line calls it once for all recordings."""
    program = """
import json, sys
from badcjobs.workers.hawkears_worker import read_call, rows, species_names
from hawkears.core import analyzer
paths, *options = json.loads(sys.argv[1])
found, made, Analyzer = {}, [], analyzer.Analyzer
analyzer.Analyzer = lambda *args, **named: made.append(Analyzer(*args, **named)) or made[-1]
analyze, call = read_call(options)
def note(result):
    found[str(result.recording_path)] = rows(result.detections, species_names(made[-1]))
call.update(input_path=".", output_path=".", rtype=None, quiet=True, raise_errors=True)
analyze(**{**call, "recording_paths": paths, "recording_callback": note})
print(json.dumps(found))
"""
    argv = [sys.executable, "-c", program, json.dumps([paths, *options])]
    done = subprocess.run(argv, env=place.environ, cwd=place.root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_hawkears_of_another_shape_is_a_mistake_of_the_installation(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_SHAPE"] = "other"
    with pytest.raises(SessionBroken, match=r"needs HawkEars 2\.3 or later") as broken:
        place.process(place.engine(), [place.good("a")])
    assert (broken.value.error_class, broken.value.at_start) == ("configuration", True)


def test_the_engine_takes_results_as_they_come_and_says_what_began(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_S"] = "0.1"
    scratch = place.folder / "scratch"
    scratch.mkdir()
    session = place.engine("--threads", "1").open(GPU, scratch)
    news = list(session.process([chunk(place.good(name)) for name in "abc"]))
    session.close()
    assert [type(one) for one in news] == [ChunkStarted, ChunkResult] * 3
    results = [one for one in news if isinstance(one, ChunkResult)]
    assert [one.audio_s for one in results] == [3.0] * 3
    assert all(90 <= one.ended_at_ms - one.started_at_ms < 2000 for one in results)


@pytest.mark.parametrize(
    ("word", "error_class"),
    [("oom", "out_of_memory"), ("traceback", "engine_error"), ("full", "no_space")],
)
def test_a_failure_has_its_class_and_the_others_go_on(place: Place, word: str, error_class: str) -> None:
    results = place.process(place.engine("--threads", "1"), [place.good("a"), place.fake("b", word), place.good("c")])
    assert (results["a"].ok, results["b"].error_class, results["c"].ok) == (True, error_class, True)
    assert results["b"].charged


def test_bad_audio_is_bad_audio(place: Place) -> None:
    short = place.good("short", 0.2)
    paths = [place.file("a", b"no audio" * 9), place.file("b", b""), "/no/such/c.wav", short]
    results = place.process(place.engine(), paths)
    assert [results[name].error_class for name in "abc"] == ["bad_audio"] * 3
    assert results["short"].ok, "a crumb of a recording whose length nobody promised"
    assert results["short"].detections == ()


def test_a_chunk_much_shorter_than_promised_is_bad(place: Place) -> None:
    scratch = place.folder / "scratch"
    scratch.mkdir()
    session = place.engine().open(GPU, scratch)
    [result] = [one for one in session.process([chunk(place.good("a", 0.2), 30_000)]) if isinstance(one, ChunkResult)]
    session.close()
    assert result.error_class == "bad_audio"
    assert "0.20 s of audio instead of 30.00 s" in (result.error or "")


def test_a_length_that_was_promised_counts_also_where_the_file_has_another(place: Place) -> None:
    scratch = place.folder / "scratch"
    scratch.mkdir()
    session = place.engine().open(GPU, scratch)
    batch = [chunk(place.good("longer", 3.0), 2_500), chunk(place.good("shorter", 3.0), 3_500)]
    results = [one for one in session.process(batch) if isinstance(one, ChunkResult)]
    session.close()
    assert sorted((one.chunk.chunk_id, one.ok, one.audio_s) for one in results) == [
        ("longer", True, 2.5),
        ("shorter", True, 3.5),
    ]


@pytest.mark.parametrize(
    ("word", "error_class"),
    [("SIGSEGV", "engine_crash"), ("SIGKILL", "worker_died"), ("assert", "gpu_error"), ("lost", "gpu_lost")],
)
def test_what_ends_the_process_breaks_the_session_with_its_class(place: Place, word: str, error_class: str) -> None:
    with pytest.raises(SessionBroken) as broken:
        place.process(place.engine("--threads", "1"), [place.fake("a", word), place.good("b")])
    assert (broken.value.error_class, broken.value.at_start) == (error_class, False)


def test_a_hang_is_ended_after_the_patience_that_the_engines_own_rate_allows(place: Place) -> None:
    hang_timeout = HangTimeout(start_s=20, least_s=0.5)
    hang_timeout.learn(0.01, 3)
    start_s = time.monotonic()
    with pytest.raises(SessionBroken, match="no output from the worker") as broken:
        place.process(
            place.engine("--threads", "1", hang_timeout=hang_timeout), [place.good("a"), place.fake("b", "hang")]
        )
    assert (broken.value.error_class, broken.value.at_start) == ("hang", False)
    assert time.monotonic() - start_s < 19


def test_a_start_that_takes_too_long_is_a_hang_of_no_chunk(place: Place) -> None:
    place.environ["FAKE_HAWKEARS_START_S"] = "60"
    with pytest.raises(SessionBroken) as broken:
        place.process(place.engine(hang_timeout=HangTimeout(start_s=1)), [place.good("a")])
    assert (broken.value.error_class, broken.value.at_start) == ("hang", True)


@pytest.mark.parametrize(
    ("setting", "error_class"),
    [
        ({"FAKE_HAWKEARS_CUDA": "0"}, "ran_on_cpu"),
        ({"FAKE_HAWKEARS_OOM": "load"}, "out_of_memory"),
        ({"FAKE_HAWKEARS_NO_TORCH": "1"}, "configuration"),
    ],
)
def test_an_engine_that_does_not_get_ready_is_no_chunks_fault(
    place: Place, setting: dict[str, str], error_class: str
) -> None:
    place.environ |= setting
    with pytest.raises(SessionBroken) as broken:
        place.process(place.engine(), [place.good("a")])
    assert (broken.value.error_class, broken.value.at_start) == (error_class, True)


@pytest.mark.parametrize(("plan", "allow_cpu"), [(GPU, True), (SIMULATED, False)])
def test_the_cpu_is_accepted_where_it_was_agreed(place: Place, plan: WorkerPlan, allow_cpu: bool) -> None:
    place.environ["FAKE_HAWKEARS_CUDA"] = "0"
    assert place.process(place.engine(allow_cpu=allow_cpu), [place.good("a")], plan)["a"].ok


def test_the_log_says_what_runs_where(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="badcjobs"):
        place.process(place.engine("--threads", "2"), [place.good("a")])
    [line] = [record.getMessage() for record in caplog.records if "threads" in record.getMessage()]
    assert "hawkears 2.3.0" in line
    assert line.endswith("on CUDA GPU-1 Tesla V100, threads: 2, models: 3")


# --- finding HawkEars -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "python"),
    [
        ("#!/opt/hawkears/bin/python3\n# -*- coding: utf-8 -*-\n", "/opt/hawkears/bin/python3"),
        ("#!/usr/bin/env python3.11\n", "python3.11"),
        ("#!/usr/bin/env -S python3 -E\n", "python3"),
        ("#!/bin/sh\n'''exec' \"/a long/path/python3\" \"$0\" \"$@\"\n' '''\n", "/a long/path/python3"),
        ('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n', None),
        ("\x7fELF\x02\x01", None),
        ("", None),
    ],
)
def test_the_python_of_a_script_is_in_its_first_lines(tmp_path: Path, head: str, python: str | None) -> None:
    script = tmp_path / "hawkears"
    script.write_text(head)
    assert python_of(script) == python


def test_a_script_that_is_not_there_has_no_python(tmp_path: Path) -> None:
    assert python_of(tmp_path / "gone") is None


def test_a_hawkears_without_its_api_is_refused_with_the_version_that_is_needed(place: Place) -> None:
    assert query_hawkears([sys.executable], ["--region", "CA-NT"], environ=place.environ, cwd=place.root) == (
        "2.3.0",
        None,
    )
    place.environ["FAKE_HAWKEARS_SHAPE"] = "none"
    with pytest.raises(NotHere, match=r"needs HawkEars 2\.3 or later") as refused:
        place.engine().check()
    assert "analyze() has no raise_errors" in (refused.value.why or "")
    assert "pip install 'hawkears>=2.3'" in (refused.value.fix or "")


def test_a_program_on_path_that_is_no_python_script_is_refused(place: Place) -> None:
    script = place.folder / "bin" / "hawkears"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n')
    script.chmod(0o755)
    environ, launcher = {"PATH": str(script.parent)}, SubprocessLauncher("test")
    engine = choose_engine(
        RunSettings(place.folder, engine="hawkears"), environ, launcher, SystemClock(), cwd=place.root, allow_cpu=False
    )
    with pytest.raises(NotHere, match="program 'hawkears' was not found"):
        engine.check()


def test_behind_a_prefix_the_python_is_looked_for_there(place: Place) -> None:
    inside = install_fake_prefix(place.folder / "bin")
    words = ["bash", "-c", f'{inside} "$0" "{sys.executable}" "${{@:2}}"', f"{place.folder}/{{worker}}"]
    start = EngineStart([], place.environ, SubprocessLauncher("task", words), SystemClock())
    engine = HawkEarsEngine(start, "/only/in/the/container/python", place.root, allow_cpu=True)
    engine.check()
    assert (place.folder / "task-check.report").exists()


def test_the_check_refuses_wrong_options_and_a_python_without_hawkears_before_anything_is_started(place: Place) -> None:
    place.engine("--threads", "2").check()
    with pytest.raises(BadInput, match="--loudly") as refused:
        place.engine("--loudly").check()
    assert "No such option" in (refused.value.why or "")
    place.environ.pop("PYTHONPATH")
    with pytest.raises(NotHere, match="HawkEars is not installed in "):
        place.engine().check()
