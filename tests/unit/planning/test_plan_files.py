"""Sources read for a plan, and what is written of it: nothing lost, nothing twice, the same every time."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rooms.model import FITS, Chunk, Probed, ProbeKey, ProbeResult, Trial
from rooms.planning import Planned, PlanOrder, plan_sources, plan_text, version_here
from rooms.root import BadcjobsError, BadInput, PlanSettings, Project, RunSettings, SubmitSettings, SystemClock
from rooms.sources import WHOLE, open_sources
from rooms.store import MergeOrder, merge
from rooms.workers import subject_of, to_toml
from support.pages import Pages, tree
from support.source_files import HEADER, read_cases, write_files
from support.task_files import START_MS, TaskFile

DATA = Path(__file__).parents[2] / "data"


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


def test_a_source_is_planned_named_or_refused(short_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages) -> None:
    said, seen = ["(what an earlier plan on this page says is left out)\n"], set[str]()
    for number, (name, files, sources, options) in enumerate(read_cases("plans")):
        here = short_path / f"{number:02}"
        here.mkdir()
        monkeypatch.chdir(here)
        write_files(files)
        before = sorted(here.rglob("*"))
        said.append(f"## {name}")
        order: dict[str, Any] = {
            "flags": {key: float(options[key]) for key in ("chunk_length", "overlap") if key in options},
            "rate": None if options.get("rate") == "none" else float(options.get("rate", 400)),
            "submit": SubmitSettings(time=options.get("time")),
            "site": options.get("site"),
            "plan": PlanSettings(template=options["template"]) if "template" in options else PlanSettings(),
        }
        try:
            planned = plan(here, *sources, out=Path(options.get("out", "p")), **order)
        except BadInput as error:
            text = f"refused: {error.what}\n{error.why}\ntry: {error.fix}"
            assert sorted(here.rglob("*")) == before
        else:
            parts = re.split(r"\n(?=  \w|\n)", plan_text(planned))
            written = [*sorted((here / "p").rglob("*.csv")), *here.glob("p/left-out.txt")]
            text = "\n".join(part for part in parts if part not in seen)
            text += "".join(f"\n--- {path.name}\n{path.read_text()}" for path in written)
            seen |= {*parts}
        said.append(text.replace(str(here), "HERE") + "\n")
    pages({"plans.txt": "\n".join(said)})


# --- writing ----------------------------------------------------------------------------------------------------------

NAMES = st.text(st.sampled_from("ab ,\"'\n\ré"), min_size=1, max_size=4).filter(str.strip)


@settings(max_examples=15, phases=[Phase.generate])  # to shrink an example of files takes minutes
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
    names = extra.split(",") if extra else []
    table: list[Sequence[object]] = [[*HEADER.split(","), *names]]
    for (recording, chunk, start, length), file in zip(chunks, files, strict=False):
        values = [("yes" if "own" in file else "") if name == "badcjobs_cut" else "?" for name in names]
        table.append([recording, chunk, file, start, start + length, 0, "", "x", *values])
    with (here / "m.csv").open("w", newline="") as manifest:
        csv.writer(manifest).writerows(table)
    write_files(read_cases("long_and_own")[0].files, here)
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


def test_shards_and_scripts_follow_the_project(short_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages) -> None:
    monkeypatch.chdir(short_path)
    (project,) = read_cases("project")
    write_files(project.files)
    plan(short_path, *project.sources, out=Path("columns"), flags={"root": str(short_path)})
    assert [one.key[1] for one in tasks_of(short_path / "columns")] == ["c3", "c0", "c1", "c2"]
    plan_sources(PlanOrder({}, Project.read([], short_path), rate=400.0, out=Path("cut")), {}, short_path)
    assert [one.start_ms for one in tasks_of(short_path / "cut")] == [0, 20_000, 40_000]
    planned = plan(
        short_path, "waves.csv", rate=0.0015, site="sockeye", out=Path("waves"), config="x.toml",
        submit=SubmitSettings(time="24:00:00", parallel=10),
        flags={"engine": "demo", "engine_arg": ["--burn-s=0.1"]},
    )  # fmt: skip
    sizes = [wave.tasks for wave in planned.plan.waves]
    assert sizes[0] > sizes[-1] and len(sizes) > 3, "waves of different sizes"
    shards = sorted((short_path / "waves").glob("wave-*/task-*.csv"))
    written = [row for path in shards for row in path.read_text().splitlines()[1:]]
    assert written == Path("waves.csv").read_text().splitlines()[1:]
    with pytest.raises(BadInput, match="exists already"):
        plan(short_path, "plain.csv", out=Path("columns"))
    (short_path / "new").mkdir()
    assert plan(short_path, "plain.csv", out=Path("new")).written[0][0].exists(), "an empty folder may be used"
    shown = ("columns/wave-1/task-0000.csv", "cut/wave-1.sbatch", "cut/wave-1/tasks.txt", "waves/wave-2.sbatch")
    said = {name: (short_path / name).read_text().replace(str(short_path), "HERE") for name in shown}
    pages({**said, "said.txt": plan_text(planned).replace(str(short_path), "HERE")})


# --- where the speed comes from ---------------------------------------------------------------------------------------


def probed(text: str, subject: str, here: str) -> list[Probed]:
    """Return a probe of each line: model, GiB, version, workers, rate, day; without a rate nothing was found."""
    found = []
    for model, gib, version, workers, rate, day in (line.split(" | ") for line in text.strip().splitlines()):
        speed = float(rate) if rate != "-" else None
        trials = (Trial(300.0, False, FITS, 3, 2.0, speed, host_peak_bytes=3 * 2**30),)
        key = ProbeKey(model, int(gib) * 2**30, "x", version.replace("THIS", here), subject, int(workers), int(workers))
        result = ProbeResult(600.0, None, 600.0, 300.0, speed) if speed else None
        found.append(Probed(key, trials, result, True, f"2026-07-{day}"))
    return found


STORES = dict(one.split("\n", 1) for one in (DATA / "probes.txt").read_text().split("=== ")[1:])


def test_the_speed_is_that_of_the_best_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages) -> None:
    monkeypatch.chdir(tmp_path)
    write_files("m.csv: rows\n  4 × r#,c#,audio/r#.wav,0,30000,0,,x\nprog: lines\n  #!/bin/sh")
    for workers in (1, 2):
        Path(f"w{workers}.toml").write_text(f"[run]\nworkers_per_gpu = {workers}\n")
    flags = {"engine": "command", "command": f"sh {tmp_path / 'prog'} {{input}} {{output}}"}
    settings = Project().make(RunSettings, {"source": ["m.csv"], **flags}, "plan")
    here, mine = version_here(settings, {}, tmp_path), subject_of(settings)
    assert here is not None and here.startswith("sh prog ")
    os.utime(tmp_path / "prog", (1, 1))
    assert version_here(settings, {}, tmp_path) == here, "a copy is the same program"
    said = []

    def tell(name: str, **order: Any) -> None:
        try:
            made = plan(tmp_path, "m.csv", **{"rate": None, "flags": flags, **order}).plan
            speed = made.speed
            lines = [f"{speed.audio_hours_per_gpu_hour:g} {speed.origin}; {made.asking.mem_gb} GB; {speed.remedy}"]
            lines += [f"{remark.text} try: {remark.fix}" for remark in made.remarks if remark.subject == "speed"]
        except BadcjobsError as error:
            lines = [f"refused: {error.what}", *(error.why or "").splitlines(), f"try: {error.fix}"]
        said.append("\n".join([f"## {name}", *lines, ""]).replace(here, "THIS").replace(str(tmp_path), "HERE"))

    def store(path: str, probes: list[Probed]) -> Path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(to_toml(probes))
        return Path(path)

    for name, text in STORES.items():
        tell(name, speed_from=store("p.toml", probed(text, mine, here)), config="w1.toml")
    others = [one for subject in ("other --x", "b", "c", "d") for one in probed(STORES["other workers"], subject, here)]
    tell("other engines", speed_from=store("p.toml", others), config="w1.toml")
    four = store("my probes.toml", probed(STORES["mine of four"], mine, here))
    tell("any workers", speed_from=four)
    tell("a rate beside a probe", speed_from=four, rate=7.0)
    tell("damaged", speed_from=Path("w1.toml"))
    tell("not there", speed_from=Path("gone.toml"), flags={**flags, "engine_arg": ["--burn-s=1"]})
    tell("a rate alone", rate=7.0)
    tell("nothing is known", environ={"HOME": str(tmp_path)})
    store(".cache/badcjobs/probe.toml", probed(STORES["two models"], "hawkears", here)[:1])
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
