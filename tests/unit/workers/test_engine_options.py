"""What engines make of their options before anything starts, and of the tables that programs write."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk, Detection, Device, WorkerPlan
from rooms.root import BadcjobsError, RunSettings, SubprocessLauncher, SystemClock
from rooms.workers import (
    CommandEngine,
    DemoEngine,
    EngineStart,
    HangTimeout,
    HawkEars1Engine,
    HawkEarsEngine,
    choose_engine,
    chunks_at_once_of,
    hawkears_environment,
    parse_batch_size,
    parse_command,
    parse_detections_csv,
    python_of,
    sized_arguments,
    split_batch,
)
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.pages import Pages

GPU = WorkerPlan(slot=0, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1, threads=6)
CPU = WorkerPlan(slot=0, device=None, device_id=None, threads=2)
LEAN = replace(GPU, lean=True)


def start(*args: str, environ: dict[str, str] | None = None, raw: Path | None = None) -> EngineStart:
    return EngineStart(args, environ or {"PATH": "/usr/bin:/bin"}, SubprocessLauncher("test"), SystemClock(), raw)


def refusals(tries: dict[str, object]) -> str:
    """Return what is said to each wrong use, with the words to paste."""
    lines = []
    for name, refused in tries.items():
        with pytest.raises(BadcjobsError) as caught:
            refused()  # type: ignore[operator]
        error = caught.value
        fix = " ".join((error.fix or "").split())
        lines.append(f"## {name}\n{error.exit_code}: {error.what}\nwhy: {error.why}\nfix: {fix}\n")
    return "\n".join(lines)


# --- the command engine -----------------------------------------------------------------------------------------------


def test_a_command_is_split_as_a_shell_splits_it_and_every_fault_is_named(pages: Pages) -> None:
    for template, words, per_batch in [
        ("prog {input} {output}", ["prog", "{input}", "{output}"], False),
        ("'my prog' --in=\"{input}\" -o{output} a\\ b", ["my prog", "--in={input}", "-o{output}", "a b"], False),
        ("sh -c 'cat {input} > {output}'", ["sh", "-c", "cat {input} > {output}"], False),
        ("awk '{{print}}' {input} {output}", ["awk", "{{print}}", "{input}", "{output}"], False),
        ("p {input} {output} {device} {device_index} {chunk_id} {recording_id}", None, False),
        ("prog {inputs} {outputs} {device} {device_index}", None, True),
    ]:
        assert parse_command(template) == (words or template.split(), per_batch)
    wrong = [
        "", "prog", "prog {input}", "prog {inputs}", "prog {inputs} {output}", "prog {inputs} {outputs} {chunk_id}",
        "prog {entry} {output}", "prog {input} {output} {}", "prog {input} {output} {0}",
        "prog {input} {output} {device.uuid}", "prog {input} {output", "prog {input} {output} }",
        "prog '{input} {output}", "prog {input} {output:>9q}", "prog {input!x} {output}", "prog {input:{output}}",
    ]  # fmt: skip
    tries: dict[str, object] = {one: lambda one=one: parse_command(one) for one in wrong}
    tries |= {
        arg: lambda arg=arg: parse_batch_size([arg]) for arg in ("--batch=0", "--batch=many", "--batch", "--threads=3")
    }
    tries["no such program"] = CommandEngine(start(), "no-such-program {input} {output}").check
    pages({"refused.txt": refusals(tries)})


def test_a_batch_is_as_large_as_was_asked_for() -> None:
    many, one = (CommandEngine(start("--batch=1"), words) for words in ("p {inputs} {outputs}", "p {input} {output}"))
    assert (parse_batch_size([]), parse_batch_size(["--batch=5", "--batch=7"]), many.wants, one.wants) == (64, 7, 1, 1)
    assert CommandEngine(start(), "p {inputs} {outputs}").wants == 64


def test_another_program_or_another_model_is_another_version(tmp_path: Path) -> None:
    program = tmp_path / "listen.sh"
    program.write_text("one")
    root, root1 = make_fake_root(tmp_path / "root"), make_fake_hawkears1(tmp_path / "HawkEars")
    engines = {
        "command": CommandEngine(start(), f"sh {program} {{input}} {{output}}"),
        "hawkears": HawkEarsEngine(start(), sys.executable, root, allow_cpu=True),
        "hawkears1": HawkEars1Engine(start(), sys.executable, root1, allow_cpu=True),
    }
    before = {name: engine.version or "" for name, engine in engines.items()}
    assert {name: re.sub(r"\b[0-9a-f]{6,}\b", "#", mark) for name, mark in before.items()} == {
        "command": "sh listen.sh #", "hawkears": "3 models #", "hawkears1": "analyze.py #",
    }  # fmt: skip
    program.write_text("two")
    for models in (root, root1):
        (models / "data" / "ckpt" / "another.ckpt").write_text("weights")
    assert not {engine.version for engine in engines.values()} & set(before.values())
    nothing = tmp_path / "nothing"
    assert HawkEarsEngine(start(), None, nothing, allow_cpu=True).version is None
    assert HawkEars1Engine(start(), "python3", nothing, allow_cpu=True).version is None
    assert CommandEngine(start(), "no-such-program {input} {output}").version is None


@given(st.lists(st.sampled_from(["/x/a.wav", "/y/A.flac", "/x/b.wav", "/z/a.mp3", "/x/c.wav"])), st.integers(1, 4))
@settings(max_examples=40)
def test_no_part_of_a_batch_is_too_long_or_has_two_files_of_one_name(paths: list[str], most: int) -> None:
    """Their tables would have one name, too."""
    batch = [Chunk("r", str(number), path, path) for number, path in enumerate(paths)]
    parts = split_batch(batch, most)
    assert sorted(int(chunk.chunk_id) for part in parts for chunk in part) == list(range(len(batch)))
    for part in parts:
        names = [Path(chunk.audio_path).stem.lower() for chunk in part]
        assert 1 <= len(set(names)) == len(names) <= most
    if len({Path(path).stem.lower() for path in paths}) == len(paths):
        assert len(parts) == -(-len(paths) // most), "none is shorter than it must be"


def test_raw_files_are_kept_byte_for_byte_inside_their_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = CommandEngine(start(raw=tmp_path / "raw"), "program {input} {output}")
    for content in (b"\xff first", b"second\r\n"):
        engine.keep_raw(Chunk("Area/rec 1", "c0", "a.wav", "a.wav"), content)
    engine.keep_raw(Chunk("../..", "../../c", "a.wav", "a.wav"), b"1")
    CommandEngine(start(), "program {input} {output}").keep_raw(Chunk("r", "c", "a.wav", "a.wav"), b"not asked for")
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"raw/Area/rec 1/c0.csv": b"second\r\n", "raw/%2E%2E/%2E%2E/..%2F..%2Fc.csv": b"1"}
    (tmp_path / "file").write_text("not a folder")
    blocked = CommandEngine(start(raw=tmp_path / "file"), "program {input} {output}")
    with caplog.at_level(logging.WARNING):
        for name in ("c0", "c1"):
            blocked.keep_raw(Chunk("r", name, "a.wav", "a.wav"), b"1")
    assert len(caplog.records) == 1, "a warning once, and the work continues"


OURS = "start_time,end_time,label,score\n"
GROUSE = Detection(500, 3500, "RUGR", 0.81)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OURS + "0.5,3.5,RUGR,0.81\n", GROUSE),
        ("label,score,start_time,end_time\nRUGR,0.81,0.5,3.5\n", GROUSE),
        ("\ufeff" + OURS.replace("\n", "\r\n") + "0.5,3.5, RUGR ,\r\n\r\n", replace(GROUSE, score=None)),
        ("start_time, end_time,label,score,channel\n0.5,3.5,RUGR,0.81,left\n", GROUSE),
        (OURS + '0.5,3.5,"Owl, Boreal",0.81\n', replace(GROUSE, label="Owl, Boreal")),
        (OURS + "2,2,RUGR,1", Detection(2000, 2000, "RUGR", 1.0)),
        ("recording,name,start_time,end_time,score\na,RUGR,0.500,3.500,0.810\n", GROUSE),
        (
            "filename,start_time,end_time,class_name,class_code,score\na.wav,0.5,3.5,Ruffed Grouse,RUGR,0.81\n",
            replace(GROUSE, label_name="Ruffed Grouse"),
        ),
        (OURS, None),
        ("recording,name,start_time,end_time,score", None),
        ("", "line 1: column start_time, end_time, label, score is missing; the header is empty"),
        (
            "start_time,end_time,species,score\n",
            "line 1: column label is missing; the header is start_time,end_time,sp",
        ),
        (OURS + "0,1,RUGR,0.9\n1,2,RU", "line 3 has 3 cells, the header has 4 (column score)"),
        (OURS + "0,1,RUGR,0.9,7\n", "line 2 has 5 cells, the header has 4 (column number 5)"),
        (OURS + "0,1,RUGR,0.9\nsoon,2,RUGR,0.9\n", "line 3, column start_time: 'soon' is not a number"),
        (OURS + "0,nan,RUGR,0.9\n", "line 2, column end_time: 'nan' is not a number"),
        (OURS + "5,2,RUGR,0.9\n", "line 2, column end_time: 2.0 is before the start, 5.0"),
        (OURS + "0,1, ,0.9\n", "line 2, column label: empty"),
        (OURS + "0,1,RUGR,loud\n", "line 2, column score: 'loud' is not a number"),
        (OURS + '0,1,"RUGR,0.9\n', "line 2: unexpected end of data"),
    ],
)
def test_every_known_table_is_read_and_one_that_is_not_whole_is_refused(
    text: str, expected: Detection | str | None
) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match="^" + re.escape(expected)):
            parse_detections_csv(text)
    else:
        assert parse_detections_csv(text) == ([expected] if expected else [])


# --- HawkEars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "given_words", "usual", "lean"),
    [
        (6, "", "--threads 3", "--threads 1"),
        (1, "--region=CA-NT", "--region=CA-NT --threads 1", "--region=CA-NT --threads 1"),
        (2, "", "--threads 1", "--threads 1"),
        (3, "", "--threads 2", "--threads 1"),
        (4, "", "--threads 2", "--threads 1"),
        (5, "--date file", "--date file --threads 3", "--date file --threads 1"),
        (16, "", "--threads 3", "--threads 1"),
        (6, "--threads 7 --region CA-NT", "--threads 7 --region CA-NT", "--region CA-NT --threads 1"),
        (6, "--threads=7 --region=CA-NT", "--threads=7 --region=CA-NT", "--region=CA-NT --threads 1"),
        (6, "--threads", "--threads", "--threads 1"),
    ],
)
def test_a_worker_has_as_many_threads_as_its_cores_can_feed_unless_told_and_a_lean_one_has_one(
    cores: int, given_words: str, usual: str, lean: str
) -> None:
    args, plan = given_words.split(), replace(GPU, threads=cores)
    assert " ".join(sized_arguments(args, plan)) == usual
    assert " ".join(sized_arguments(args, replace(plan, lean=True))) == lean


def test_an_engine_asks_for_what_its_threads_can_do() -> None:
    at_once = [
        chunks_at_once_of(engine, args, plan)
        for engine, args, plan in (
            ("hawkears", ["--threads=7"], GPU), ("hawkears1", [], GPU), ("hawkears", [], LEAN),
            ("hawkears", ["--threads=0"], GPU), ("hawkears", ["--threads=x"], GPU), ("demo", ["--threads=7"], GPU),
        )
    ]  # fmt: skip
    assert at_once == [7, 3, 1, 3, 3, 1]
    wants = [HawkEarsEngine(start(*args), None, Path(), allow_cpu=True).wants for args in ((), ("--threads", "5"))]
    assert [*wants, DemoEngine(start()).wants] == [5, 7, 2], "those in progress, and what waits"


@pytest.mark.parametrize(
    ("plan", "args", "omp"),
    [
        (GPU, (), "1"),
        (GPU, ("--threads", "1"), "4"),
        (GPU, ("--threads=2",), "3"),
        (GPU, ("--threads", "12"), "1"),
        (replace(GPU, threads=5), ("--threads", "2"), "1"),
        (CPU, ("--threads", "1"), "1"),
    ],
)
def test_more_hawkears_threads_leave_fewer_cores_to_each(
    plan: WorkerPlan, args: Sequence[str], omp: str, tmp_path: Path
) -> None:
    env = hawkears_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, plan, args, tmp_path)
    visible = plan.device.uuid if plan.device else ""
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == (omp, visible)
    assert hawkears_environment({"OMP_NUM_THREADS": "7"}, plan, args, tmp_path)["OMP_NUM_THREADS"] == "7"


def test_caches_stay_warm_from_one_task_to_the_next_where_the_user_can_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a home that cannot be written")
    scratch = tmp_path / "node" / "worker-0"
    for environ, where in [
        ({}, "node"),
        ({"HOME": str(tmp_path / "home")}, "home/.cache/badcjobs"),
        ({"HOME": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "xdg")}, "xdg/badcjobs"),
        ({"HOME": str(tmp_path / "file")}, "node"),
    ]:
        env = hawkears_environment(environ, GPU, (), scratch)
        names = {name: value.removeprefix(f"{tmp_path / where}/") for name, value in env.items() if "-cache" in value}
        assert names == {
            "NUMBA_CACHE_DIR": "numba-cache", "MPLCONFIGDIR": "matplotlib-cache", "CUDA_CACHE_PATH": "nv-cache",
            "TORCHINDUCTOR_CACHE_DIR": "torchinductor-cache",
        }  # fmt: skip
    assert hawkears_environment({"NUMBA_CACHE_DIR": "/warm"}, GPU, (), scratch)["NUMBA_CACHE_DIR"] == "/warm"


def test_the_python_of_a_script_is_in_its_first_lines(tmp_path: Path) -> None:
    script = tmp_path / "hawkears"
    assert python_of(script) is None
    for head, python in [
        ("#!/opt/hawkears/bin/python3\n# -*- coding: utf-8 -*-\n", "/opt/hawkears/bin/python3"),
        ("#!/usr/bin/env python3.11\n", "python3.11"),
        ("#!/usr/bin/env -S python3 -E\n", "python3"),
        ("#!/bin/sh\n'''exec' \"/a long/path/python3\" \"$0\" \"$@\"\n' '''\n", "/a long/path/python3"),
        ('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n', None),
        ("#!/bin/sh", None),
        ("#!\n", None),
        ("/usr/bin/python3\n", None),
        ("\x7fELF\x02\x01", None),
        ("", None),
    ]:
        script.write_text(head)
        assert python_of(script) == python, head


def test_an_engine_is_chosen_by_name_and_refuses_what_badcjobs_sets_itself(tmp_path: Path, pages: Pages) -> None:
    """What the check of HawkEars 2 says needs its Python: tests/contract."""
    install_fake_hawkears(tmp_path / "bin")
    root = make_fake_hawkears1(tmp_path / "HawkEars")
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}

    def choose(engine: str, *args: str, **more: object) -> HawkEarsEngine:
        settings = RunSettings(Path("run"), engine=engine, engine_args=args, **more)  # type: ignore[arg-type]
        launcher = SubprocessLauncher("test")
        return choose_engine(settings, environ, launcher, SystemClock(), cwd=tmp_path, allow_cpu=False)  # type: ignore[return-value]

    for name in ("demo", "command", "hawkears", "hawkears1"):
        assert choose(name, command="p {input} {output}").name == name
    found = choose("hawkears", hawkears_root="root")
    assert (found.python, found.root) == (str(tmp_path / "bin" / "python-of-hawkears"), tmp_path / "root")
    assert choose("hawkears", hawkears_python="/my/python").python == "/my/python"
    assert choose("demo", keep_raw=True).start.raw == tmp_path / "run" / "raw"
    assert choose("demo").start.raw is None
    choose("hawkears1", hawkears_root=root).check()
    one = {"hawkears_root": str(root)}
    tries: dict[str, object] = {
        "demo --loudly": choose("demo", "--loudly").check,
        "demo --burn-s=much": choose("demo", "--burn-s=much").check,
        "hawkears1 --rtype=csv --region XX": choose("hawkears1", "--rtype=csv", "--region", "XX", **one).check,
        "hawkears1 elsewhere": choose("hawkears1", hawkears_root="elsewhere").check,
        "hawkears1 without Python": choose("hawkears1", hawkears_python="no-python", **one).check,
        "hawkears -o out --quiet": choose("hawkears", "-o", "out", "--quiet").check,
    }
    (tmp_path / "bin" / "hawkears").write_text('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n')
    tries["hawkears in a container"] = choose("hawkears").check
    pages({"refused.txt": refusals(tries).replace(str(tmp_path), "/…")})


# --- silence ----------------------------------------------------------------------------------------------------------


def test_how_long_a_worker_may_be_silent_follows_from_its_slowest_chunk() -> None:
    limit = HangTimeout(start_s=100, least_s=10, slowest=2)
    assert (limit.limit_s(30), limit.limit_s(None)) == (160, 7300), "nothing is known: the start, and slow work"
    limit.learn(0.1, None)
    assert (limit.limit_s(30), limit.limit_s(None)) == (10, 10), "never shorter than the least"
    limit.learn(3, 30)
    assert (limit.limit_s(30), limit.limit_s(300), limit.limit_s(None)) == (60, 600, 60), "20 times the slowest"
    limit.learn(1, 30)
    assert (limit.limit_s(30), limit.limit_s(1), limit.limit_s(None)) == (60, 10, 60), "a quick one changes nothing"
    assert (HangTimeout().limit_s(None), HangTimeout().start_s, HangTimeout().least_s) == (8100, 900, 120)
