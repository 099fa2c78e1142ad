"""What each engine does to get by with less memory."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, Device, WorkerPlan
from rooms.root import Engine, SessionBroken, SubprocessLauncher, SystemClock
from rooms.workers import (
    CommandEngine,
    DemoEngine,
    EngineStart,
    HawkEars1Engine,
    HawkEarsEngine,
    hawkears_environment,
    sized_arguments,
)
from support.audio import make_wav
from support.fake_hawkears import make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.fake_hawkears_package import fake_package_environ

USUAL = WorkerPlan(0, Device("0", "test", uuid="GPU-1", backend="simulated"), 1, 8)
LEAN = replace(USUAL, lean=True)
THREE_AT_ONCE = ("--min_score", "0.1", "--threads", "3")


def environment(folder: Path, **others: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), **fake_package_environ(), **others}


def hawkears(folder: Path, **others: str) -> Engine:
    environ = environment(folder, FAKE_HAWKEARS_ROOM_S="40", **others)
    start = EngineStart(THREE_AT_ONCE, environ, SubprocessLauncher("lean"), SystemClock())
    return HawkEarsEngine(start, sys.executable, make_fake_root(folder / "root"), allow_cpu=True)


def version_1(folder: Path) -> Engine:
    environ = environment(folder, FAKE_HAWKEARS_ROOM_S="40")
    start = EngineStart(THREE_AT_ONCE, environ, SubprocessLauncher("lean"), SystemClock())
    return HawkEars1Engine(start, sys.executable, make_fake_hawkears1(folder / "root"), allow_cpu=True)


def demo(folder: Path) -> Engine:
    environ = environment(folder)
    return DemoEngine(EngineStart(["--room-s=40"], environ, SubprocessLauncher("lean"), SystemClock()))


def analyse(engine: Engine, plan: WorkerPlan, folder: Path, lengths_s: Sequence[float]) -> list[ChunkResult]:
    batch = []
    for number, length_s in enumerate(lengths_s):
        path = make_wav(folder / f"c{number}.wav", length_s, 1000)
        batch.append(Chunk("r", f"c{number}", path.name, str(path), 0, round(length_s * 1000)))
    (folder / "scratch").mkdir(exist_ok=True)
    session = engine.open(plan, folder / "scratch")
    try:
        return [news for news in session.process(batch) if isinstance(news, ChunkResult)]
    finally:
        session.close()


@pytest.mark.parametrize("make", [hawkears, version_1, demo])
def test_what_does_not_fit_as_usual_fits_lean_and_more_does_not(tmp_path: Path, make: Callable[[Path], Engine]) -> None:
    engine = make(tmp_path)
    for plan, length_s, error_class in ((USUAL, 25, "out_of_memory"), (LEAN, 25, None), (LEAN, 41, "out_of_memory")):
        (result,) = analyse(engine, plan, tmp_path, [length_s])
        assert result.error_class == error_class, result.error


@pytest.mark.parametrize(
    ("given", "lean"),
    [
        ([], ["--threads", "1"]),
        (["--threads", "6", "--region", "CA-NT"], ["--region", "CA-NT", "--threads", "1"]),
        (["--threads=6", "--region=CA-NT"], ["--region=CA-NT", "--threads", "1"]),
        (["--threads"], ["--threads", "1"]),
    ],
)
def test_hawkears_has_one_thread_whatever_was_asked_for(given: list[str], lean: list[str]) -> None:
    assert sized_arguments(given, LEAN) == lean


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (16, 3)])
def test_a_worker_has_as_many_threads_as_its_cores_can_feed_unless_somebody_says_otherwise(
    cores: int, threads: int
) -> None:
    plan = replace(USUAL, threads=cores)
    assert sized_arguments(["--region=CA-NT"], plan) == ["--region=CA-NT", "--threads", str(threads)]
    assert sized_arguments(["--threads=7"], plan) == ["--threads=7"]
    assert sized_arguments(["--threads", "7"], plan) == ["--threads", "7"]


def test_the_one_thread_gets_the_cores_of_all(tmp_path: Path) -> None:
    cores = {
        len(args): hawkears_environment({}, USUAL, args, tmp_path)["OMP_NUM_THREADS"]
        for args in (THREE_AT_ONCE, sized_arguments(["--threads=3"], LEAN))
    }
    assert cores == {4: "1", 2: "4"}


def test_models_that_do_not_fit_are_no_recordings_fault(tmp_path: Path) -> None:
    engine = hawkears(tmp_path, FAKE_HAWKEARS_OOM="load")
    for lengths_s in ([1], [1, 1, 1]):
        with pytest.raises(SessionBroken, match="CUDA out of memory") as broken:
            analyse(engine, USUAL, tmp_path, lengths_s)
        assert (broken.value.error_class, broken.value.at_start) == ("out_of_memory", True)


PROGRAM = """
import os, pathlib, sys
words = [os.environ.get(name, "-") for name in ("BADCJOBS_LEAN", "OMP_NUM_THREADS")]
paths = open(sys.argv[1]).read().splitlines() if "many" in sys.argv[3:] else []
pathlib.Path(sys.argv[0]).with_name("runs").open("a").write(" ".join([*words, str(len(paths))]) + "\\n")
head = "start_time,end_time,label,score\\n"
for path in paths:
    (pathlib.Path(sys.argv[2]) / (pathlib.Path(path).stem + ".csv")).write_text(head)
if not paths:
    open(sys.argv[2], "w").write(head)
"""


@pytest.mark.parametrize(
    ("template", "usual", "lean"),
    [
        ("{input} {output}", ["- 8 0", "- 8 0"], ["1 1 0", "1 1 0"]),
        ("{inputs} {outputs} many", ["- 8 2"], ["1 1 1", "1 1 1"]),
    ],
)
def test_a_command_is_told_and_gets_one_chunk_at_a_time(
    tmp_path: Path, template: str, usual: list[str], lean: list[str]
) -> None:
    program = tmp_path / "listen.py"
    program.write_text(PROGRAM)
    command = f"{shlex.quote(sys.executable)} {program} {template}"
    environ = {"PATH": os.environ["PATH"]}
    engine = CommandEngine(EngineStart((), environ, SubprocessLauncher("lean"), SystemClock()), command)
    for plan, expected in ((USUAL, usual), (LEAN, lean)):
        assert all(result.ok for result in analyse(engine, plan, tmp_path, [1, 1]))
        assert (tmp_path / "runs").read_text().splitlines() == expected
        (tmp_path / "runs").unlink()
