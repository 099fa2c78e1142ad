"""Sources read for a plan, and what is written of it: nothing lost, nothing twice, the same every time."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rooms.model import FITS, AudioHeader, Chunk, Probed, ProbeKey, ProbeResult, Trial
from rooms.planning import (
    SOURCE_REMARKS,
    Planned,
    PlanOrder,
    apply_rules,
    plan_sources,
    plan_text,
    read_sources,
    version_here,
)
from rooms.root import BadcjobsError, BadInput, PlanSettings, Project, RunSettings, SubmitSettings, SystemClock
from rooms.sources import WHOLE, open_sources, read_header
from rooms.store import MergeOrder, merge
from rooms.workers import subject_of, to_toml
from support.pages import Pages, tree
from support.powerless import powerless_folder
from support.source_files import HEADER, Files, link, rows, truncated, write
from support.task_files import START_MS, TaskFile

GIB = 2**30
SHA = "ab" * 32
FOUND = ProbeResult(600.0, None, 600.0, 300.0, 431.5)
QUARTER = SubmitSettings(time="15")
LINES = [
    f"r{n // 4},c{n},audio/r{n // 4}.wav,{n % 4 * 30_000},{n % 4 * 30_000 + 30_000},0,{SHA},x" for n in range(1201)
]
MORE = 'observer,notes,sha256,end_ms,"a, b",overlap_ms,notes,start_ms,source_path,chunk_id,recording_id'


def plan(
    cwd: Path, *sources: Path | str, environ: Mapping[str, str] | None = None, rate: float | None = 400.0, **order: Any
) -> Planned:
    flags = {"source": [str(one) for one in sources], **order.pop("flags", {})}
    project = Project.read([str(order.pop("config"))], cwd) if "config" in order else Project()
    return plan_sources(PlanOrder(flags=flags, project=project, rate=rate, **order), environ or {}, cwd)


def tasks_of(folder: Path) -> list[Chunk]:
    """Return what the tasks of a plan would do, each with nothing but its own shard and the options of its script."""
    found = []
    for script in sorted(folder.glob("wave-*.sbatch")):
        (root,) = re.findall(r"^    --root=(.*)$", script.read_text(), re.M) or [None]
        many = len((folder / script.stem / "tasks.txt").read_text().splitlines())
        assert re.findall(r"^#SBATCH --array=0-(\d+)", script.read_text(), re.M) == [str(many - 1)]
        for task in range(many):
            sources = open_sources([folder / script.stem / "tasks.txt"], root=root and Path(root), position=task)
            found += sources.chunks(WHOLE)
    return found


def fields_of(chunks: list[Chunk]) -> list[tuple[object, ...]]:
    return [(one.key, one.audio_path, one.start_ms, one.end_ms, one.is_cut, one.fingerprint) for one in chunks]


# --- reading ----------------------------------------------------------------------------------------------------------

# case → files, sources, more
SOURCES: dict[str, tuple[Files, str, dict[str, Any]]] = {
    "rows without their audio": ({"m.csv": rows(*LINES[:40])}, "m.csv", {}),
    "headers, rates, names": (
        {"audio/a.wav": 4, "audio/Zürich ♪.wav": 2, "audio/b.wav": lambda path: link("../other.wav")(path),
            "other.wav": 6}, "audio", {}),
    "cut, with overlap": ({"audio/a.wav": 90, "audio/b.wav": 10}, "audio", {"flags": {"chunk_length": 20.0,
        "overlap": 5.0}, "submit": QUARTER}),
    "cut, without": ({"audio/a.wav": 60}, "audio", {"flags": {"chunk_length": 20.0}}),
    "rows of one recording that overlap": (
        {"m.csv": rows(*(f"{r},c{n},a.wav,{start},{end},,," for n, (r, start, end) in enumerate((
            ("r", 0, 9000), ("r", 5000, 8000), ("r", 8000, 12_000), ("r", 11_000, 20_000), ("s", 0, 4000), ("s", 4000,
                5000)))))}, "m.csv", {}),
    "no length, no audio": ({"r/good.wav": 4, "r/empty.wav": 0, "r/short.wav": b"RIFF\0\0\0\0WAVEfmt ",
        "r/nothing.flac": b""}, "r", {}),
    "truncated": ({"r/a.wav": truncated(8, 3), "r/b.wav": truncated(8, 0)}, "r", {"flags": {"chunk_length": 4.0,
        "overlap": 2.0}}),
    "truncated, whole": ({"r/a.wav": truncated(8, 3), "r/b.wav": truncated(8, 0)}, "r", {}),
    "a truncated file of two rows": ({"a.wav": truncated(8, 3), "m.csv": rows("a,a,a.wav,,,,,", "b,b,a.wav,,,,,",
        "b,c,a.wav,4000,,,,")}, "m.csv", {}),
    "nothing but headers": ({"r/a.wav": truncated(8, 0)}, "r", {}),
    "a pipe and a broken link": ({"r/a.wav": 3, "r/pipe.wav": os.mkfifo, "r/b.wav": link("gone.wav")}, "r", {}),
    "one broken link": ({"r/a.wav": 3, "r/b.wav": link("gone.wav"), "m.csv": rows("a,a,r/a.wav,,,,,",
        "b,b,r/b.wav,,,,,")}, "m.csv", {}),
    "rows that a run would refuse": (
        {"m.csv": rows("r9,e,x.wav,5000,4000,0,,", *LINES[:8], LINES[0], "n,n,gone.wav,,,0,,",
            *(f"r9,w{n},x.wav,5,4,0,,," for n in range(30))).encode()
         + b"r8,c8,audio/\xff.wav,0,30000,0,,\n,,,x,y,0,,\n"}, "m.csv", {}),
    "a whole source": ({"m.csv": rows(*LINES[:3]), "semi.csv": HEADER.replace(",", ";") + "\na;b\n", "d/x.txt": ""},
        "m.csv semi.csv d", {}),
    "only a header": ({"m.csv": HEADER}, "m.csv", {}),
    "equal names": ({"one/a.wav": 4, "two/a.wav": 4}, "one two", {}),
    "hidden": ({"audio/a.wav": 5, "audio/.old/b.wav": 5}, "audio", {}),
    "many sources": ({f"{n}.wav": 1 for n in range(2)} | {f"{n}/x{n}.wav": 1 for n in range(5)}, "0 1 2 3 4 0.wav", {}),
    "no such source, no speed": ({}, "nope", {"rate": None}),
    "no audio": ({"audio/x.txt": ""}, "audio", {}),
    "a wrong option": ({"audio/a.wav": 1}, "audio", {"flags": {"chunk_length": -1.0}}),
    "no speed": ({"audio/a.wav": 1}, "audio", {"rate": float("nan")}),
    "no speed, either": ({"audio/a.wav": 1}, "audio", {"rate": 0.0}),
    "no site": ({"audio/a.wav": 1}, "audio", {"site": "narval"}),
    "no account": ({"audio/a.wav": 1}, "audio", {"site": "sockeye"}),
    "no template": ({"audio/a.wav": 1}, "audio", {"plan": PlanSettings(template="cooking")}),
    "a place that is taken": ({"audio/a.wav": 1, "p": ""}, "audio", {}),
    "a place that cannot be": ({"audio/a.wav": 1}, "audio", {"out": Path("audio/a.wav/p")}),
}  # fmt: skip


def test_whatever_a_source_holds_is_planned_or_named_and_a_refusal_leaves_nothing(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    said, seen = ["(what an earlier plan on this page says is left out)\n"], set[str]()
    for number, (name, (files, sources, more)) in enumerate(SOURCES.items()):
        here = short_path / f"{number:02}"
        here.mkdir()
        monkeypatch.chdir(here)
        write(files)
        before = sorted(here.rglob("*"))
        said.append(f"## {name}")
        try:
            planned = plan(here, *sources.split(), **{"out": Path("p"), **more})
        except BadInput as error:
            text = f"refused: {error.what}\n{error.why}\ntry: {error.fix}"
            assert sorted(here.rglob("*")) == before
        else:
            parts = re.split(r"\n(?=  \w|\n)", plan_text(planned))
            text = "\n".join(part for part in parts if part not in seen)
            seen |= {*parts}
            text += "".join(f"\n--- {path.name}\n{path.read_text()}" for path in sorted((here / "p").rglob("*.csv")))
            text += "".join(f"\n--- {path.name}\n{path.read_text()}" for path in here.glob("p/left-out.txt"))
        said.append(text.replace(str(here), "HERE") + "\n")
    pages({"plans.txt": "\n".join(said)})


def test_what_may_not_be_read_is_counted_apart_with_the_reason() -> None:
    with powerless_folder() as folder:
        write({"audio/a.wav": 3, "audio/b.wav": 3, "closed/a.wav": 3, "b/x/y.wav": 1, "shut/x.wav": 1,
               "m.csv": rows("a,a,closed/a.wav,0,3000,0,,", "b,b,b/x,0,3000,0,,")})  # fmt: skip
        for name in ("audio/x", "audio/y"):
            Path(name).mkdir(mode=0)
        for name in ("audio/b.wav", "closed", "shut"):
            Path(name).chmod(0)
        unreadable, left_out = sorted(
            plan(folder, "audio", "shut").plan.remarks, key=lambda one: one.subject, reverse=True
        )
        (missing,) = plan(folder, "m.csv").plan.remarks
        with pytest.raises(BadInput, match="the length of the audio is not known: 1 file cannot be read") as refusal:
            plan(folder, "audio/b.wav")
    assert left_out.text.startswith("2 closed folders and 1 whole source cannot be planned")
    assert left_out.details[0] == f"{folder}/audio contains a folder that cannot be read: x/ (Permission denied)"
    assert left_out.fix == f"ls -ld {folder}/audio/x"
    assert (unreadable.severity, unreadable.subject, unreadable.details) == (
        "problem",
        "unreadable",
        ("b.wav: Permission denied",),
    )
    assert missing.details == ("cannot access closed/a.wav: Permission denied", "a folder, not an audio file: b/x")
    assert refusal.value.why == f"{folder}/audio/b.wav: Permission denied"


@pytest.mark.parametrize("kind", ["audio", "m.csv"])
def test_files_that_cannot_be_read_and_those_without_a_length_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write({"audio/a.wav": 3, "audio/b.wav": 3, "audio/noise.wav": b"no header",
           "m.csv": rows(*(f"{one},{one},{one}.wav,,,0,," for one in ("a", "b", "noise")))})  # fmt: skip

    def read_badly(path: str) -> AudioHeader:
        return AudioHeader(unreadable="Input/output error") if path.endswith("b.wav") else read_header(path)

    sources = replace(open_sources([tmp_path / kind], root=tmp_path / "audio"), read_header=read_badly)
    found = read_sources(sources, None, lambda rows: None)
    assert (found.lengths.unknown, found.unreadable, found.without_length) == (2, 1, 1)
    problem, note = apply_rules(SOURCE_REMARKS, SimpleNamespace(survey=found))
    assert (problem.subject, problem.details, problem.fix) == (
        "unreadable", ("b.wav: Input/output error",), f"ls -l {tmp_path}/audio/b.wav",
    )  # fmt: skip
    assert (note.subject, note.details) == ("unknown length", ("noise.wav",))


# --- writing ----------------------------------------------------------------------------------------------------------

NAMES = st.text(st.sampled_from("ab ,\"'\n\ré"), min_size=1, max_size=4).filter(str.strip)


@settings(max_examples=30, phases=[Phase.generate])  # to shrink an example of files takes minutes
@given(
    chunks=st.lists(st.tuples(NAMES, NAMES, st.integers(0, 70_000), st.integers(1, 40_000)), min_size=1, max_size=12,
                    unique_by=lambda row: row[:2]),
    files=st.lists(st.sampled_from(["./long.wav", "own.wav"]), min_size=12, max_size=12),
    extra=st.sampled_from(["", "observer", "observer,sha256", "badcjobs_cut"]),
    minutes=st.sampled_from([11, 15, 60]),
    more=st.sampled_from([(), ("list.txt",), ("other/m.csv",)]),
)  # fmt: skip
def test_the_tasks_of_a_plan_do_every_chunk_once_as_the_whole_source_says_and_so_does_a_plan_of_the_plan(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[tuple[str, str, int, int]], files: list[str], extra: str,
    minutes: int, more: tuple[str, ...],
) -> None:  # fmt: skip
    here = tmp_path_factory.mktemp("plan")
    quoted = ['"{}"'.format(one.replace('"', '""')) for row in chunks for one in row[:2]]
    lines = [
        f"{quoted[2 * n]},{quoted[2 * n + 1]},{files[n]},{start},{start + length},0,,x"
        + ",?" * (len(extra.split(",")) if extra else 0)
        for n, (_, _, start, length) in enumerate(chunks)
    ]
    if extra == "badcjobs_cut":
        lines = [line[:-1] + ("yes" if "own" in line else "") for line in lines]
    manifests = {
        "other/m.csv": rows("o,o,x.wav,1000,,,,"),
        "m.csv": rows(*lines, header=HEADER + (extra and f",{extra}")),
    }
    write({"long.wav": 60, "own.wav": 30, "other/x.wav": 5, "list.txt": "other/x.wav\n", **manifests}, here)
    whole = list(open_sources([here / name for name in ("m.csv", *more)], root=None).chunks(WHOLE))
    order: dict[str, Any] = {"rate": 0.05, "submit": SubmitSettings(time=str(minutes))}
    planned = plan(here, "m.csv", *more, out=Path("p"), **order)
    assert sum(share.rows for share in planned.plan.sizing.shares) == len(whole)
    assert fields_of(tasks_of(here / "p")) == fields_of(whole)
    shards = [line for path in sorted((here / "p").glob("wave-*/tasks.txt")) for line in path.read_text().splitlines()]
    plan(here, *shards, out=Path("q"), **order, flags={"root": str(here)})
    assert fields_of(tasks_of(here / "q")) == fields_of(whole), "also in a plan of a plan"
    again = plan(here, "m.csv", *more, out=Path("r"), **order)
    texts = [{name: text.replace(f"{here}/r", f"{here}/p") for name, text in tree(here / one).items()} for one in "pr"]
    assert texts[0] == texts[1] and plan_text(planned) == plan_text(again).replace(f"{here}/r", f"{here}/p")


def test_shards_and_scripts_have_what_the_sources_and_the_project_say(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    monkeypatch.chdir(short_path)
    write({
        "plain.csv": rows(f"r2,c3,z.wav,0,5000,250,{SHA},windy"), "x.wav": 9, "y.wav": 9, "z.wav": 9, "audio/a.wav": 60,
        "more.csv": f'{MORE}\nÉva,"wind, rain",{SHA},9000,7,1500,"two\nlines",0,x.wav,c0,r0\n,,,9000,,,,0,x.wav,c1,r0',
        "other.csv": rows("r1,c2,y.wav,8000,1,2,S,Ann", header=f"{HEADER[:33]},end_ms,sha256,sha256,station,observer"),
        "badcjobs.toml": '[run]\nsource = ["audio"]\nchunk_length = 20\nworkers_per_gpu = 2\n[submit]\ntime = "15"',
        "x.toml": '[run]\nout = "/scratch/x"\n[submit]\naccount = "st-pi-1-gpu"\nsetup = ["source venv/bin/act"]\n',
        "waves.csv": rows(*LINES),
    })  # fmt: skip
    plan(short_path, "plain.csv", "more.csv", "other.csv", out=Path("columns"), flags={"root": str(short_path)})
    assert [one.key[1] for one in tasks_of(short_path / "columns")] == ["c3", "c0", "c1", "c2"]
    plan_sources(PlanOrder({}, Project.read([], short_path), rate=400.0, out=Path("cut")), {}, short_path)
    assert [(one.start_ms, one.end_ms) for one in tasks_of(short_path / "cut")] == [
        (0, 20_000),
        (20_000, 40_000),
        (40_000, 60_000),
    ]
    options = {"engine": "demo", "engine_arg": ["--burn-s=0.1"]}
    planned = plan(short_path, "waves.csv", rate=0.003, site="sockeye", submit=SubmitSettings(time="24:00:00",
        parallel=10),
                   out=Path("waves"), config="x.toml", flags=options)  # fmt: skip
    sizes = [wave.tasks for wave in planned.plan.waves]
    assert sizes[0] > sizes[1] and len(sizes) > 2, "waves of different sizes"
    shards = sorted((short_path / "waves").glob("wave-*/task-*.csv"))
    assert [row.rpartition(",")[0] for path in shards for row in path.read_text().splitlines()[1:]] == LINES
    with pytest.raises(BadInput, match="exists already"):
        plan(short_path, "plain.csv", out=Path("columns"))
    (short_path / "new").mkdir()
    assert plan(short_path, "plain.csv", out=Path("new")).written[0][0].exists(), "an empty folder may be used"
    shown = ("columns/wave-1/task-0000.csv", "cut/wave-1.sbatch", "cut/wave-1/tasks.txt", "waves/wave-2.sbatch")
    said = {name: (short_path / name).read_text().replace(str(short_path), "HERE") for name in shown}
    pages({**said, "said.txt": plan_text(planned).replace(str(short_path), "HERE")})


# --- where the speed comes from ---------------------------------------------------------------------------------------


def probed(
    subject: str, *models: str, version: str = "2.3.0", workers: int = 1, rate: float = 431.5, at: str = "2026-07-01",
    gib: int = 16, result: ProbeResult | None = FOUND,
) -> list[Probed]:  # fmt: skip
    tried = (Trial(300.0, False, FITS, 3, 2.0, rate, host_peak_bytes=3 * GIB),)
    keys = [ProbeKey(model, gib * GIB, "x", version, subject, workers, workers) for model in models]
    return [Probed(key, tried, result and replace(result, times_real_time=rate), True, at) for key in keys]


def test_the_speed_is_that_of_the_probe_which_fits_best_and_doubts_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    monkeypatch.chdir(tmp_path)
    write(
        {
            "m.csv": rows(*LINES[:4]),
            "prog": "#!/bin/sh\n",
            "w1.toml": "[run]\nworkers_per_gpu = 1\n",
            "w2.toml": "[run]\nworkers_per_gpu = 2\n",
        }
    )
    flags = {"engine": "command", "command": f"sh {tmp_path / 'prog'} {{input}} {{output}}"}
    settings = Project().make(RunSettings, {"source": ["m.csv"], **flags}, "plan")
    here, mine = version_here(settings, {}, tmp_path), subject_of(settings)
    assert here is not None and here.startswith("sh prog ")
    os.utime(tmp_path / "prog", (1, 1))
    assert version_here(settings, {}, tmp_path) == here, "a copy is the same program"
    one, two, old, newer = (
        probed(mine, "V100", version=here, rate=100), probed(mine, "V100", version=f"1.0, {here}", workers=2, rate=200,
            at="2026-07-02"),
        probed(mine, "V100", version="sh prog 0000", rate=300, at="2026-07-03"), probed(mine, "V100", version="zzzz",
            rate=400, at="2026-07-04"),
    )  # fmt: skip
    stores: dict[str, list[Probed]] = {
        "mine of four": [*one, *two, *old, *newer], "other workers": two, "other versions": [*newer, *old],
            "two models": probed(mine, "V100", "H200"),
        "two sizes": [*one, *probed(mine, "V100", gib=32)], "other engines": probed("other --x", "V100") + probed("b",
            "V") + probed("c", "V") + probed("d", "V"),
        "nothing found": probed(mine, "V100", result=None), "the CPU alone": probed(mine, "cpu"), "none": [],
    }  # fmt: skip
    said = []

    def tell(name: str, **order: Any) -> None:
        try:
            made = plan(tmp_path, "m.csv", **{"rate": None, "flags": flags, **order}).plan
            speed = made.speed
            doubts = [f"{remark.text} try: {remark.fix}" for remark in made.remarks if remark.subject == "speed"]
            lines = [
                f"{speed.audio_hours_per_gpu_hour:g} {speed.origin}; {made.asking.mem_gb} GB; {speed.remedy}",
                *doubts,
            ]
        except BadcjobsError as error:
            lines = [f"refused: {error.what}", *(error.why or "").splitlines(), f"try: {error.fix}"]
        said.append("\n".join([f"## {name}", *lines, ""]).replace(here, "THIS").replace(str(tmp_path), "HERE"))

    for name, probes in stores.items():
        Path("p.toml").write_text(to_toml(probes))
        tell(name, speed_from=Path("p.toml"), config="w1.toml")
    Path("my probes.toml").write_text(to_toml(stores["mine of four"]))
    tell("any workers", speed_from=Path("my probes.toml"))
    tell("a rate beside a probe", speed_from=Path("my probes.toml"), rate=7.0)
    tell("damaged", speed_from=Path("w1.toml"))
    tell("not there", speed_from=Path("gone.toml"), flags={**flags, "engine_arg": ["--burn-s=1"]})
    tell("a rate alone", rate=7.0)
    tell("nothing is known", environ={"HOME": str(tmp_path)})
    Path(".cache/badcjobs").mkdir(parents=True)
    Path(".cache/badcjobs/probe.toml").write_text(to_toml(probed("hawkears", "V100")))
    tell("from the cache", environ={"HOME": str(tmp_path)}, flags={}, config="w2.toml")
    tell("the cache, but another engine", environ={"HOME": str(tmp_path)})
    (tmp_path / "raw" / "tasks").mkdir(parents=True)
    tell("never merged", speed_from=Path("raw"))
    task = TaskFile(tmp_path / "july", states={"a": "done"}, ended_at_ms=None).write()
    merge(MergeOrder([tmp_path / "july"], tmp_path / "july" / "job.sqlite"), SystemClock())
    tell("of a job", speed_from=Path("july"))
    os.utime(task, (START_MS // 1000 + 9000,) * 2)  # published again
    tell("of a job that went on", speed_from=Path("july"))
    pages({"speeds.txt": re.sub(r"as of \S+ \S+ UTC", "as of NOW", "\n".join(said))})
