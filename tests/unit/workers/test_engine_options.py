"""What engines make of their options before anything starts, and of the tables that programs write."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import workers
from rooms.model import Chunk, Device, WorkerPlan
from rooms.root import BadcjobsError, RunSettings, SubprocessLauncher, SystemClock
from rooms.workers import CommandEngine, EngineStart, HawkEarsEngine, hawkears_environment
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_hawkears1 import make_fake_hawkears1
from support.pages import Pages

GPU = WorkerPlan(slot=0, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1, threads=6)


def start(*args: str, raw: Path | None = None) -> EngineStart:
    return EngineStart(args, {"PATH": "/usr/bin:/bin"}, SubprocessLauncher("test"), SystemClock(), raw)


def refusals(tries: Mapping[str, Callable[[], object]]) -> str:
    """Return what is said to each wrong use, with the words to paste."""
    lines = []
    for name, refused in tries.items():
        with pytest.raises(BadcjobsError) as caught:
            refused()
        error = caught.value
        fix = " ".join((error.fix or "").split())
        lines.append(f"## {name}\n{error.exit_code}: {error.what}\nwhy: {error.why}\nfix: {fix}\n")
    return "\n".join(lines)


# --- the command engine -----------------------------------------------------------------------------------------------

RIGHT = [
    "prog {input} {output}", "'my prog' --in=\"{input}\" -o{output} a\\ b", "sh -c 'cat {input} > {output}'",
    "awk '{{print}}' {input} {output}", "p {input} {output} {device} {device_index} {chunk_id} {recording_id}",
    "prog {inputs} {outputs} {device} {device_index}",
]  # fmt: skip
WRONG = [
    "", "prog", "prog {input}", "prog {inputs}", "prog {inputs} {output}", "prog {inputs} {outputs} {chunk_id}",
    "prog {entry} {output}", "prog {input} {output} {}", "prog {input} {output} {0}",
    "prog {input} {output} {device.uuid}", "prog {input} {output", "prog {input} {output} }",
    "prog '{input} {output}", "prog {input} {output:>9q}", "prog {input!x} {output}", "prog {input:{output}}",
]  # fmt: skip


def test_a_command_is_split_as_a_shell_splits_it_and_every_fault_is_named(pages: Pages) -> None:
    sizes = ("--batch=0", "--batch=many", "--batch", "--threads=3")
    tries: dict[str, Callable[[], object]] = {one: lambda one=one: workers.parse_command(one) for one in WRONG}
    tries |= {one: lambda one=one: workers.parse_batch_size([one]) for one in sizes}
    tries["no such program"] = CommandEngine(start(), "no-such-program {input} {output}").check
    words = [f"{one}\n  {workers.parse_command(one)}" for one in RIGHT]
    wants = [CommandEngine(start("--batch=1"), f"p {{input{s}}} {{output{s}}}").wants for s in ("", "s")]
    wants += [workers.parse_batch_size([]), workers.parse_batch_size(["--batch=5", "--batch=7"])]
    assert [*wants, CommandEngine(start(), "p {inputs} {outputs}").wants] == [1, 1, 64, 7, 64]
    pages({"refused.txt": refusals(tries), "words.txt": "\n".join(words)})


def test_another_program_or_another_model_is_another_version(tmp_path: Path) -> None:
    program, nothing = tmp_path / "listen.sh", tmp_path / "nothing"
    program.write_text("one")
    root, root1 = make_fake_root(tmp_path / "root"), make_fake_hawkears1(tmp_path / "HawkEars")
    engines = [
        CommandEngine(start(), f"sh {program} {{input}} {{output}}"),
        HawkEarsEngine(start(), sys.executable, root, allow_cpu=True),
        workers.HawkEars1Engine(start(), sys.executable, root1, allow_cpu=True),
        HawkEarsEngine(start(), None, nothing, allow_cpu=True),
        workers.HawkEars1Engine(start(), "python3", nothing, allow_cpu=True),
        CommandEngine(start(), "no-such-program {input} {output}"),
    ]
    before = [engine.version for engine in engines]
    marks = ["sh listen.sh #", "3 models #", "analyze.py #"]
    assert [re.sub(r"\b[0-9a-f]{6,}\b", "#", mark or "") for mark in before[:3]] == marks
    program.write_text("two")
    for models in (root, root1):
        (models / "data" / "ckpt" / "another.ckpt").write_text("weights")
    assert not {engine.version for engine in engines[:3]} & {*before}
    assert before[3:] == [None] * 3


@given(st.lists(st.sampled_from(["/x/a.wav", "/y/A.flac", "/x/b.wav", "/z/a.mp3", "/x/c.wav"])), st.integers(1, 4))
@settings(max_examples=40)
def test_no_part_of_a_batch_is_too_long_or_has_two_files_of_one_name(paths: list[str], most: int) -> None:
    """Their tables would have one name, too."""
    parts = workers.split_batch([Chunk("r", str(number), path, path) for number, path in enumerate(paths)], most)
    assert sorted(int(chunk.chunk_id) for part in parts for chunk in part) == list(range(len(paths)))
    for part in parts:
        names = [Path(chunk.audio_path).stem.lower() for chunk in part]
        assert 1 <= len(set(names)) == len(names) <= most
    if len({Path(path).stem.lower() for path in paths}) == len(paths):
        assert len(parts) == -(-len(paths) // most), "none is shorter than it must be"


def test_raw_files_are_kept_byte_for_byte_inside_their_folder(tmp_path: Path) -> None:
    engine = CommandEngine(start(raw=tmp_path / "raw"), "program {input} {output}")
    kept = [("Area/rec 1", "c0", b"\xff first"), ("Area/rec 1", "c0", b"second\r\n"), ("../..", "../../c", b"1")]
    for recording_id, chunk_id, content in kept:
        engine.keep_raw(Chunk(recording_id, chunk_id, "a.wav", "a.wav"), content)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"raw/Area/rec 1/c0.csv": b"second\r\n", "raw/%2E%2E/%2E%2E/..%2F..%2Fc.csv": b"1"}


OURS = "start_time,end_time,label,score\n"
TABLES = [
    OURS + "0.5,3.5,RUGR,0.81\n",
    "label,score,start_time,end_time\nRUGR,0.81,0.5,3.5\n",
    "\ufeff" + OURS.replace("\n", "\r\n") + "0.5,3.5, RUGR ,\r\n\r\n",
    "start_time, end_time,label,score,channel\n0.5,3.5,RUGR,0.81,left\n",
    OURS + '0.5,3.5,"Owl, Boreal",0.81\n',
    OURS + "2,2,RUGR,1",
    "recording,name,start_time,end_time,score\na,RUGR,0.500,3.500,0.810\n",
    "filename,start_time,end_time,class_name,class_code,score\na.wav,0.5,3.5,Ruffed Grouse,RUGR,0.81\n",
    OURS,
    "recording,name,start_time,end_time,score",
    "",
    "start_time,end_time,species,score\n",
    *(OURS + "0,1,RUGR,0.9\n" + last for last in ("1,2,RU", "soon,2,RUGR,0.9\n")),
    *(OURS + line for line in ("0,1,RUGR,0.9,7\n", "0,nan,RUGR,0.9\n", "5,2,RUGR,0.9\n", "0,1, ,0.9\n")),
    *(OURS + line for line in ("0,1,RUGR,loud\n", '0,1,"RUGR,0.9\n')),
]


def test_every_known_table_is_read_and_one_that_is_not_whole_is_refused(pages: Pages) -> None:
    lines = []
    for text in TABLES:
        try:
            found = [f"{one.start_ms} to {one.end_ms} ms: {one.label}, {one.label_name}, {one.score}"
                     for one in workers.parse_detections_csv(text)] or ["nothing"]  # fmt: skip
        except ValueError as error:
            found = [f"refused: {error}"]
        lines += [ascii(text), *(f"  {one}" for one in found)]
    pages({"tables.txt": "\n".join(lines)})


# --- HawkEars ---------------------------------------------------------------------------------------------------------


def test_a_worker_has_as_many_threads_as_its_cores_can_feed_unless_told_and_a_lean_one_has_one(
    tmp_path: Path, pages: Pages
) -> None:
    lines = []
    for cores, words in [
        (1, "--region=CA-NT"), (2, ""), (3, ""), (4, ""), (5, "--date file"), (6, ""), (16, ""),
        (6, "--threads 7 --region CA-NT"), (6, "--threads=7 --region=CA-NT"), (6, "--threads"), (6, "--threads=0"),
        (6, "--threads=x"), (6, "--threads 1"), (6, "--threads=2"), (6, "--threads 12"), (5, "--threads 2"),
    ]:  # fmt: skip
        lines.append(f"{cores} cores, {words or 'no options'}")
        for kind, plan in {"usual": GPU, "lean": replace(GPU, lean=True), "CPU": replace(GPU, device=None)}.items():
            plan = replace(plan, threads=cores)
            args = workers.sized_arguments(words.split(), plan)
            env = hawkears_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, plan, args, tmp_path)
            at_once = [
                workers.chunks_at_once_of(engine, words.split(), plan) for engine in ("hawkears", "hawkears1", "demo")
            ]
            said = f"OMP {env['OMP_NUM_THREADS']}, sees '{env['CUDA_VISIBLE_DEVICES']}'; at once {at_once}"
            lines.append(f"  {kind}: {' '.join(args)}; {said}")
    assert hawkears_environment({"OMP_NUM_THREADS": "7"}, GPU, (), tmp_path)["OMP_NUM_THREADS"] == "7"
    wants = [HawkEarsEngine(start(*args), None, Path(), allow_cpu=True).wants for args in ((), ("--threads", "5"))]
    assert [*wants, workers.DemoEngine(start()).wants] == [5, 7, 2], "those in progress, and what waits"
    pages({"threads.txt": "\n".join(lines)})


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


HEADS = {
    "#!/opt/hawkears/bin/python3\n# -*- coding: utf-8 -*-\n": "/opt/hawkears/bin/python3",
    "#!/usr/bin/env python3.11\n": "python3.11",
    "#!/usr/bin/env -S python3 -E\n": "python3",
    "#!/bin/sh\n'''exec' \"/a long/path/python3\" \"$0\" \"$@\"\n' '''\n": "/a long/path/python3",
    '#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n': None,
    **dict.fromkeys(("#!/bin/sh", "#!\n", "/usr/bin/python3\n", "\x7fELF\x02\x01", "")),
}


def test_an_engine_is_chosen_by_name_and_refuses_what_badcjobs_sets_itself(tmp_path: Path, pages: Pages) -> None:
    """What the check of HawkEars 2 says needs its Python: tests/contract."""
    install_fake_hawkears(tmp_path / "bin")
    root = make_fake_hawkears1(tmp_path / "HawkEars")
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}

    def choose(engine: str, *args: str, **more: object) -> HawkEarsEngine:
        settings = RunSettings(Path("run"), engine=engine, engine_args=args, **more)  # type: ignore[arg-type]
        launcher = SubprocessLauncher("test")
        return workers.choose_engine(settings, environ, launcher, SystemClock(), cwd=tmp_path, allow_cpu=False)  # type: ignore[return-value]

    for name in ("demo", "command", "hawkears", "hawkears1"):
        assert choose(name, command="p {input} {output}").name == name
    found = choose("hawkears", hawkears_root="root")
    assert (found.python, found.root) == (str(tmp_path / "bin" / "python-of-hawkears"), tmp_path / "root")
    assert choose("hawkears", hawkears_python="/my/python").python == "/my/python"
    assert [choose("demo", keep_raw=kept).start.raw for kept in (True, False)] == [tmp_path / "run" / "raw", None]
    choose("hawkears1", hawkears_root=root).check()
    one = {"hawkears_root": str(root)}
    tries = {
        "demo --loudly": choose("demo", "--loudly").check,
        "demo --burn-s=much": choose("demo", "--burn-s=much").check,
        "hawkears1 --rtype=csv --region XX": choose("hawkears1", "--rtype=csv", "--region", "XX", **one).check,
        "hawkears1 elsewhere": choose("hawkears1", hawkears_root="elsewhere").check,
        "hawkears1 without Python": choose("hawkears1", hawkears_python="no-python", **one).check,
        "hawkears -o out --quiet": choose("hawkears", "-o", "out", "--quiet").check,
    }
    script = tmp_path / "bin" / "hawkears"
    for head, python in HEADS.items():
        script.write_text(head)
        assert workers.python_of(script) == python, head
    assert workers.python_of(tmp_path / "nowhere") is None
    script.write_text('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n')
    tries["hawkears in a container"] = choose("hawkears").check
    pages({"refused.txt": refusals(tries).replace(str(tmp_path), "/…")})
