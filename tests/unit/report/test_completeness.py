"""Is a job complete? Every row of the source against the job database, and the commands that do the rest."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import find_place
from rooms.model import Allocation, ArrayOrder, ArrayShape, Submitted
from rooms.report import Summary, find_shares, summarize_database, summary_text
from rooms.root import FrozenRun, RunSettings, SystemClock
from rooms.sources import Shard
from rooms.store import Completeness, MergeOrder, Record, TaskFacts, asked_of, merge, write_record
from support.pages import Pages
from support.task_files import START_MS, TaskFile

FOUR = ArrayShape(0, 1, 4)
HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms\n"
States = Mapping[int | str, Mapping[str, str]]  # array index, or the number of a job outside Slurm → chunk → state


def names(rows: int, prefix: str = "c") -> list[str]:
    return [f"{prefix}{row}" for row in range(rows)]


def write_manifest(path: Path, chunks: Sequence[str]) -> Path:
    """Write a manifest of one recording; nobody needs its audio to count its rows."""
    path.write_text(HEADER + "".join(f"rec,{chunk},{chunk}.wav,0,30000\n" for chunk in chunks))
    return path


@dataclass(frozen=True)
class Run:
    """A run folder: run.toml and task databases, merged."""

    folder: Path
    source: Path
    shape: ArrayShape | None = None

    def freeze(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = RunSettings(self.folder, source=(str(self.source),), engine="demo")
        (self.folder / "run.toml").write_text(FrozenRun.of(wanted, self.shape, self.folder).to_toml("0.1.0"))

    def tasks(self, states: States, shards: int | None = None) -> None:
        for key, chunks in states.items():
            index, job_id = (key, "4821") if isinstance(key, int) else (0, key)
            shard = None if shards is None else (index, shards)
            TaskFile(self.folder, index=index, states=chunks, job_id=job_id, samples=0, devices=0, shard=shard).write()

    def merge(self, *others: Path, target: Path | None = None) -> Path:
        target = target or self.folder / "job.sqlite"
        merge(MergeOrder([self.folder, *others], target), SystemClock())
        return target

    def copy(self, folder: Path) -> Run:
        """Return a copy, to change something in; its source is its own."""
        shutil.copytree(self.folder, folder / "run")
        source = folder / self.source.name
        (shutil.copytree if self.source.is_dir() else shutil.copy)(self.source, source)
        copied = Run(folder / "run", source, self.shape)
        copied.freeze()
        return copied


def all_done(rows: Sequence[str], tasks: int, **states: str) -> dict[int | str, dict[str, str]]:
    return {n: {row: states.get(row, "done") for row in rows[n::tasks]} for n in range(tasks)}


def told(summary: Summary, folder: Path) -> str:
    """Return a proof as text: whatever is not as by default."""
    proof = summary.completeness
    assert proof is not None
    said = [f"{summary.verdict}, {'complete' if proof.complete else 'not complete'}"]
    for field in fields(proof):
        value = getattr(proof, field.name)
        if value and value != (None if field.default is MISSING else field.default):
            said += [f"  {field.name}: {one}" for one in (value if field.name == "finish" else [value])]
    text = re.sub(r"(run.toml cannot be read): .*", r"\1: …", "\n".join(said))  # the words are those of Python
    return text.replace(str(folder), "")


# --- stories ----------------------------------------------------------------------------------------------------------


def runs(folder: Path) -> dict[str, Run]:
    """Return merged runs: most of an array of four tasks."""
    made: dict[str, Run] = {}

    def run(name: str, states: States, source: Path | None = None, shape: ArrayShape | None = FOUR,
            shards: int | None = None) -> None:  # fmt: skip
        place = folder / f"run of {name}"
        place.mkdir()
        made[name] = Run(place / "run", source or write_manifest(place / "m.csv", names(8)), shape)
        made[name].freeze()
        made[name].tasks(states, shards)
        made[name].merge()

    done = all_done(names(8), 4)
    missing = {n: chunks for n, chunks in all_done(names(8), 4, c1="pending", c3="failed").items() if n != 2}
    run("done", done)
    run("missing", missing)
    run("all states", all_done(names(8), 4, c1="pending", c2="failed", c6="poison", c3="skipped"))
    run("failed", all_done(names(8), 4, c2="failed", c3="poison"))
    run("outside the array", {**{n: done[n] for n in (0, 1, 3)}, "local1-1": {"c2": "done", "c6": "failed"}})
    run("all of it outside", {0: done[0], "local1-1": {**dict.fromkeys(names(8), "skipped"), "c1": "done"}}, shards=1)
    run("a part of a share", {**done, 1: {"c1": "done"}})
    run("every second index", {1: {"c0": "done"}, 5: {"c2": "pending"}}, shape=ArrayShape(1, 2, 3))
    run("two tasks per index", {0: {"c0": "done"}, 1: {"c2": "done"}}, shape=ArrayShape(0, 1, 3), shards=6)
    run("other shares", {0: done[0]}, shards=4)
    made["other shares"].tasks({1: {"c1": "pending"}}, 8)
    made["other shares"].merge()
    run("more indices than rows", {n: done[n] for n in range(4)}, shape=ArrayShape(0, 1, 12))
    run("alone", {"local1-1": {"c0": "done", "c1": "pending"}}, shape=None)
    listed = [write_manifest(folder / f"{name}.csv", names(3, name)) for name in ("dawn", "noon", "dusk")]
    (folder / "manifests.txt").write_text("".join(f"{path}\n" for path in listed))
    by_line: States = {
        1: dict.fromkeys(names(3, "dawn"), "done"),
        3: {**dict.fromkeys(names(3, "dusk"), "done"), "dusk1": "pending"},
    }
    run("manifests", by_line, folder / "manifests.txt", ArrayShape(1, 1, 3))
    run("more manifests than tasks", {1: by_line[1]}, folder / "manifests.txt", ArrayShape(1, 1, 1))
    (folder / "audio").mkdir()
    for name in ("a.wav", "b.flac", "b.wav", "notes.txt"):
        (folder / "audio" / name).touch()
    run("audio", {"local1-1": {"c": "done"}}, folder / "audio", None)
    return made


def record(run: Run, job_id: str = "4821", *, asked: bool = True) -> None:
    """Leave what submit leaves of a job of Slurm."""
    words = ("run", str(run.source), f"--out={run.folder}", "--engine=demo")
    options = asked_of(ArrayOrder(run.folder, ("run",), tasks=4, cpus=2, mem="4G", account="st-pi-1"))
    submitted = Submitted(job_id, None, (0, 1, 2, 3))
    write_record(run.folder, Record("slurm", submitted, words, 8, START_MS, options if asked else None))


def leave_logs(run: Run) -> None:
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "4821_2_0_log.out").touch()


def emulate(run: Run) -> None:
    """Leave what a stopped emulation leaves; only one of its tasks has a log."""
    notes = {0: ("CANCELLED", "exit code 75"), 2: ("FAILED", "exit code 1 after 0 s"), 3: ("PENDING", None)}
    rows = [{"index": n, "state": state, "log": str(run.folder / "logs" / f"4821_{n}.out"), "note": note}
            for n, (state, note) in notes.items()]  # fmt: skip
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "4821.json").write_text(json.dumps({"tasks": rows}))
    (run.folder / "logs" / "4821_2.out").touch()


def rows_are(*chunks: str) -> Callable[[Run], None]:
    return lambda run: write_manifest(run.source, chunks) and None


def append(text: str) -> Callable[[Run], None]:
    return lambda run: run.source.write_text(run.source.read_text() + text) and None


def run_toml(text: str) -> Callable[[Run], None]:
    return lambda run: (run.folder / "run.toml").write_text(text) and None


# What becomes of a run after its merge: the name of the run, and of the change.
CHANGES: dict[tuple[str, str], Callable[[Run], object]] = {
    ("done", "rows were added"): rows_are(*names(8), *names(9, "n")),
    ("done", "rows were renamed"): rows_are(*names(6), "x1", "x2"),
    ("done", "rows were taken out"): rows_are(*names(5)),
    ("done", "a row is repeated"): rows_are(*names(8), "c3"),
    ("done", "the source is gone"): lambda run: run.source.unlink(),
    ("done", "the source has a mistake"): append("rec,cut"),
    ("done", "a new task database"): lambda run: run.tasks({9: {"x": "done"}}),
    ("missing", "the source is gone"): lambda run: run.source.unlink(),
    ("missing", "run.toml is gone"): lambda run: (run.folder / "run.toml").unlink(),
    ("missing", "run.toml is cut"): run_toml("[run"),
    ("missing", "run.toml has no source"): run_toml("[run]\nengine = 'demo'"),
    ("missing", "run.toml has a source that is none"): run_toml("[run]\nsource = 'm.csv'"),
    ("missing", "it was submitted"): lambda run: (record(run), leave_logs(run)),
    ("missing", "another job was submitted"): lambda run: record(run, "4000"),
    ("missing", "submitted by an earlier version"): lambda run: record(run, asked=False),
    ("missing", "the record was edited"): lambda run: (run.folder / "submitted.json").write_text("{"),
    ("missing", "it was emulated"): emulate,
    ("missing", "its last task has a database now"): lambda run: run.tasks({2: {"c2": "done", "c6": "done"}}),
    ("outside the array", "the source is gone"): lambda run: run.source.unlink(),
    ("alone", "one more row"): rows_are(*names(9)),
}


def test_a_job_is_compared_with_its_source_and_what_finishes_it_is_told(tmp_path: Path, pages: Pages) -> None:
    made = runs(tmp_path)
    said = {name: told(summarize_database(run.folder / "job.sqlite"), tmp_path) for name, run in made.items()}
    for n, ((name, what), change) in enumerate(CHANGES.items()):
        run = made[name].copy(tmp_path / f"changed{n}")
        change(run)
        said[f"{name}; {what}"] = told(summarize_database(run.folder / "job.sqlite"), run.source.parent)
    pages({"proofs.txt": "\n".join(f"## {name}\n{text}" for name, text in said.items())})


def test_a_job_database_elsewhere_is_compared_with_the_runs_of_its_task_files(tmp_path: Path, pages: Pages) -> None:
    runs, task = [], {"samples": 0, "devices": 0}
    for name in ("p", "q"):
        source = write_manifest(tmp_path / f"{name}.csv", names(4, name))
        runs.append(Run(tmp_path / f"wave-{name}", source, ArrayShape(0, 1, 2)))
        runs[-1].freeze()
        TaskFile(runs[-1].folder, job_id=name, states=dict.fromkeys(names(4, name)[::2], "done"), **task).write()
    first, second = runs
    (tmp_path / "link").symlink_to(first.folder)
    said = {"above it": told(summarize_database(first.merge(target=tmp_path / "all.sqlite")), tmp_path)}
    TaskFile(first.folder, index=1, job_id="p", states=dict.fromkeys(names(4, "p")[1::2], "done"), **task).write()
    one, other = sorted((first.folder / "tasks").iterdir())
    target = tmp_path / "two paths.sqlite"
    merge(MergeOrder([one, tmp_path / "link" / "tasks" / other.name], target), SystemClock())
    said["given by two paths"] = told(summarize_database(target), tmp_path)
    (tmp_path / "both").mkdir()
    both = first.merge(second.folder, target=tmp_path / "both" / "job.sqlite")
    said["two waves"] = told(summarize_database(both), tmp_path)
    TaskFile(second.folder, index=1, job_id="q", states=dict.fromkeys(names(4, "q")[1::2], "done"), **task).write()
    said["two waves, done"] = told(summarize_database(first.merge(second.folder, target=both)), tmp_path)
    second.source.unlink()
    said["a source is gone"] = told(summarize_database(both), tmp_path)
    (second.folder / "run.toml").unlink()
    said["one has no run.toml"] = told(summarize_database(both), tmp_path)
    pages({"proofs.txt": "\n".join(f"## {name}\n{text}" for name, text in said.items())})


STATES = ("done", "failed", "poison", "pending", "skipped")


@settings(max_examples=8)
@given(
    st.lists(st.sampled_from((*STATES, None)), min_size=1, max_size=12), st.lists(st.sampled_from(STATES), max_size=3)
)
def test_the_numbers_always_add_up(rows: list[str | None], strangers: list[str]) -> None:
    """None is a row of the source that no task has."""
    with tempfile.TemporaryDirectory() as folder:
        chunks = dict(zip(names(len(rows)), rows, strict=True))
        run = Run(Path(folder) / "run", write_manifest(Path(folder) / "m.csv", list(chunks)))
        run.freeze()
        listed = {name: state for name, state in chunks.items() if state}
        run.tasks({"local1-1": listed | dict(zip(names(3, "s"), strangers, strict=False))})
        proof = summarize_database(run.merge()).completeness
    assert proof is not None
    assert tuple(getattr(proof, "elsewhere" if state == "skipped" else state) for state in STATES) == tuple(
        rows.count(state) for state in STATES
    )
    assert (proof.not_listed, proof.strangers, proof.expected) == (rows.count(None), len(strangers), len(rows))
    assert proof.complete == (rows.count("done") == len(rows)) != bool(proof.finish)


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
def test_rows_are_shared_out_as_the_tasks_themselves_take_them(first: int, step: int, count: int, tasks: int) -> None:
    shape = ArrayShape(first, step, count)
    taken: dict[int, int] = {}
    for index in range(first, first + count * step, step):
        for procid in range(tasks):
            allocation = Allocation(True, "4821", "gpu1", array_index=index, step_tasks=tasks, procid=procid)
            place = find_place(allocation, shape)
            taken |= {row: index for row in range(60) if Shard(place.index, place.count).takes(row)}
    task = TaskFacts("4821_0.r0.gpu1", "4821", 0, shard_count=count * tasks)
    index_of = find_shares([task, replace(task, job_id="local1-1", shard_count=7)], shape, by_manifest=False)
    assert index_of is not None
    assert {row: index_of(row, 0) for row in range(60)} == taken


def test_progress_is_told_while_rows_are_read_and_no_folder_for_temporary_files_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", write_manifest(tmp_path / "m.csv", names(2)))
    run.freeze()
    run.tasks({"local1-1": dict.fromkeys(names(2), "done")})
    job = run.merge()
    write_manifest(run.source, names(20_001))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    heard: list[int] = []
    proof = summarize_database(job, heard.append).completeness
    assert heard == [10_000, 20_000]
    assert proof is not None and proof.expected == 20_001


def test_the_command_line_holds_every_setting_that_is_not_a_default_and_nothing_of_one_task(tmp_path: Path) -> None:
    frozen = FrozenRun(
        {
            "source": ("/data/a b.csv", "/data/it's.csv"), "root": "/data/x y", "engine": "command", "interval": 0.5,
            "engine_arg": ("--region=CA NT", "-v"), "command": "prog {input} '{output}'", "retries": 2,
        },
        None,
    )  # fmt: skip
    of_one_task = {"shard": "1/4", "resume": False, "retry_failed": False, "stop_after": "1:00:00"}
    also = {**of_one_task, "cpu_workers": 2, "emit_gpu_telemetry": False, "interval": 9.0, "old": 1}
    assert shlex.split(frozen.command_line(Path("/out/my run"), also)) == [
        "badcjobs", "run", "/data/a b.csv", "/data/it's.csv", "--out=/out/my run", "--engine=command",
        "--engine-arg=--region=CA NT", "--engine-arg=-v", "--command=prog {input} '{output}'", "--root=/data/x y",
        "--cpu-workers=2", "--interval=0.5", "--no-emit-gpu-telemetry",
    ]  # fmt: skip
    for source in (tuple(f"/data/{i:060d}.wav" for i in range(100)), ("/data/two\nlines.csv",)):
        line = FrozenRun({"source": source, "engine": "demo"}, None).command_line(
            tmp_path, {"simulate": 2, "engine": "x"}
        )
        assert line == f"badcjobs run --config={tmp_path}/run.toml --out={tmp_path} --simulate=2"
    proof = Completeness(2, None, 1, 1, 0, 0, 0, 0, 1, finish=(shlex.join(["badcjobs", "run", "a b " * 60]),))
    run = Run(tmp_path / "run", write_manifest(tmp_path / "m.csv", ["c0"]))
    run.freeze()
    run.tasks({"local1-1": {"c0": "done"}})
    text = summary_text(replace(summarize_database(run.merge()), completeness=proof), "july")
    assert text.endswith(f"\n    {proof.finish[0]}"), "a long command is never cut"
