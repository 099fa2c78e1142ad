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
from rooms.report import find_shares, summarize_database, summary_text
from rooms.root import FrozenRun, RunSettings, SystemClock
from rooms.sources import Shard
from rooms.store import Completeness, MergeOrder, Record, TaskFacts, asked_of, merge, write_record
from support.pages import Pages
from support.task_files import START_MS, TaskFile

FOUR = ArrayShape(0, 1, 4)
STATES = {"d": "done", "f": "failed", "x": "poison", "p": "pending", "s": "skipped"}
Tasks = Mapping[
    int | str, str
]  # array index, or the number of a job outside Slurm → a letter for the state of each row


def manifest(path: Path, rows: int | Sequence[str], prefix: str = "c") -> Path:
    """Write a manifest of one recording; nobody needs its audio to count its rows."""
    chunks = [f"{prefix}{row}" for row in range(rows)] if isinstance(rows, int) else rows
    lines = [f"rec,{chunk},{chunk}.wav,0,30000\n" for chunk in chunks]
    path.write_text("recording_id,chunk_id,source_path,start_ms,end_ms\n" + "".join(lines))
    return path


@dataclass(frozen=True)
class Run:
    """A run folder: run.toml and task databases, merged."""

    folder: Path
    source: Path
    shape: ArrayShape | None = None

    def freeze(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = RunSettings(self.folder, source=(str(self.source),), engine="demo")
        (self.folder / "run.toml").write_text(FrozenRun.of(wanted, self.shape, self.folder).to_toml("0.1.0"))
        return self

    def tasks(self, states: Tasks, shards: int | None = None, prefix: str = "c", job_id: str = "4821") -> Run:
        """Write task databases; a space is a row that the task does not have."""
        for key, letters in states.items():
            index, number = (key, job_id) if isinstance(key, int) else (0, key)
            chunks = {f"{prefix}{n}": STATES[letter] for n, letter in enumerate(letters) if letter != " "}
            shard = None if shards is None else (index, shards)
            TaskFile(self.folder, index=index, states=chunks, job_id=number, samples=0, devices=0, shard=shard).write()
        return self

    def merge(self, *others: Path, target: Path | None = None) -> Path:
        target = target or self.folder / "job.sqlite"
        merge(MergeOrder([self.folder, *others], target), SystemClock())
        return target

    def copy(self, folder: Path) -> Run:
        """Return a copy, to change something in; its source is its own."""
        shutil.copytree(self.folder, folder / "run")
        return Run(folder / "run", shutil.copy(self.source, folder / self.source.name), self.shape).freeze()


def deal(letters: str, *without: int) -> dict[int | str, str]:
    """Return the states of rows as four tasks have them: each every fourth."""
    every = {n: "".join(x if row % 4 == n else " " for row, x in enumerate(letters)) for n in range(4)}
    return {n: of_task for n, of_task in every.items() if n not in without}


def told(job: Path, folder: Path) -> str:
    """Return a proof as text: whatever is not as by default."""
    summary = summarize_database(job)
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
    """Return merged runs: most of an array of four tasks, of a source of eight rows."""
    listed = [manifest(folder / f"{name}.csv", 3, name) for name in ("dawn", "noon", "dusk")]
    lines = folder / "manifests.txt"
    lines.write_text("".join(f"{path}\n" for path in listed))
    (folder / "audio").mkdir()
    for name in ("a.wav", "b.flac", "b.wav", "notes.txt"):
        (folder / "audio" / name).touch()

    def run(name: str, states: Tasks, shape: ArrayShape | None = FOUR, shards: int | None = None,
            source: Path | None = None, prefix: str = "c") -> Run:  # fmt: skip
        place = folder / f"run of {name}"
        place.mkdir()
        made = Run(place / "run", source or manifest(place / "m.csv", 8), shape).freeze()
        made.tasks(states, shards, prefix).merge()
        return made

    done, some = deal("dddddddd"), deal("dpdfdddd", 2)
    made = {
        "done": run("done", done), "missing": run("missing", some),
        "all states": run("all states", deal("dpfsddxd")), "failed": run("failed", deal("ddfxdddd")),
        "outside the array": run("outside the array", {**deal("dddddddd", 2), "local1-1": "  d   f"}),
        "all of it outside": run("all of it outside", {0: done[0], "local1-1": "sdssssss"}, shards=1),
        "a part of a share": run("a part of a share", {**done, 1: " d"}),
        "every second index": run("every second index", {1: "d", 5: "  p"}, ArrayShape(1, 2, 3)),
        "two tasks per index": run("two tasks per index", {0: "d", 1: "  d"}, ArrayShape(0, 1, 3), 6),
        "other shares": run("other shares", {0: done[0]}, shards=4).tasks({1: " p"}, 8),
        "more indices than rows": run("more indices than rows", done, ArrayShape(0, 1, 12)),
        "alone": run("alone", {"local1-1": "dp"}, None),
        "manifests": run("manifests", {1: "ddd"}, ArrayShape(1, 1, 3), source=lines, prefix="dawn"),
        "more manifests than tasks": run(
            "more manifests than tasks", {1: "ddd"}, ArrayShape(1, 1, 1), source=lines, prefix="dawn"),
        "audio": run("audio", {"local1-1": "d"}, None, source=folder / "audio"),
    }  # fmt: skip
    made["manifests"].tasks({3: "dpd"}, prefix="dusk")
    for name in ("other shares", "manifests"):
        made[name].merge()
    return made


def record(run: Run, job_id: str = "4821", *, asked: bool = True) -> None:
    """Leave what submit leaves of a job of Slurm."""
    words = ("run", str(run.source), f"--out={run.folder}", "--engine=demo")
    options = asked_of(ArrayOrder(run.folder, ("run",), tasks=4, cpus=2, mem="4G", account="st-pi-1"))
    submitted = Submitted(job_id, None, (0, 1, 2, 3))
    write_record(run.folder, Record("slurm", submitted, words, 8, START_MS, options if asked else None))


def submit(run: Run) -> None:
    record(run)
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


def rows_are(*rows: str) -> Callable[[Run], object]:
    return lambda run: manifest(run.source, rows)


def write(name: str, text: str) -> Callable[[Run], object]:
    return lambda run: (run.folder / name).write_text(text)


EIGHT = [f"c{n}" for n in range(8)]
# What becomes of a run after its merge: the name of the run, and of the change.
CHANGES: dict[tuple[str, str], Callable[[Run], object]] = {
    ("done", "rows were added"): rows_are(*EIGHT, *(f"n{n}" for n in range(9))),
    ("done", "rows were renamed"): rows_are(*EIGHT[:6], "x1", "x2"),
    ("done", "rows were taken out"): rows_are(*EIGHT[:5]),
    ("done", "a row is repeated"): rows_are(*EIGHT, "c3"),
    ("done", "the source is gone"): lambda run: run.source.unlink(),
    ("done", "the source has a mistake"): lambda run: run.source.write_text(run.source.read_text() + "rec,cut"),
    ("done", "a new task database"): lambda run: run.tasks({9: "d"}, prefix="x"),
    ("missing", "the source is gone"): lambda run: run.source.unlink(),
    ("missing", "run.toml is gone"): lambda run: (run.folder / "run.toml").unlink(),
    ("missing", "run.toml is cut"): write("run.toml", "[run"),
    ("missing", "run.toml has no source"): write("run.toml", "[run]\nengine = 'demo'"),
    ("missing", "run.toml has a source that is none"): write("run.toml", "[run]\nsource = 'm.csv'"),
    ("missing", "it was submitted"): submit,
    ("missing", "another job was submitted"): lambda run: record(run, "4000"),
    ("missing", "submitted by an earlier version"): lambda run: record(run, asked=False),
    ("missing", "the record was edited"): write("submitted.json", "{"),
    ("missing", "it was emulated"): emulate,
    ("missing", "its last task has a database now"): lambda run: run.tasks({2: "  d   d"}),
    ("outside the array", "the source is gone"): lambda run: run.source.unlink(),
    ("alone", "one more row"): rows_are(*EIGHT, "c8"),
}


def test_a_job_is_compared_with_its_source_and_what_finishes_it_is_told(tmp_path: Path, pages: Pages) -> None:
    made = runs(tmp_path)
    said = {name: told(run.folder / "job.sqlite", tmp_path) for name, run in made.items()}
    for n, ((name, what), change) in enumerate(CHANGES.items()):
        (tmp_path / f"changed{n}").mkdir()
        run = made[name].copy(tmp_path / f"changed{n}")
        change(run)
        said[f"{name}; {what}"] = told(run.folder / "job.sqlite", run.source.parent)
    pages({"proofs.txt": "\n".join(f"## {name}\n{text}" for name, text in said.items())})


def test_a_job_database_elsewhere_is_compared_with_the_runs_of_its_task_files(tmp_path: Path, pages: Pages) -> None:
    first, second = (
        Run(tmp_path / f"wave-{name}", manifest(tmp_path / f"{name}.csv", 4, name), ArrayShape(0, 1, 2)).freeze()
        for name in ("p", "q")
    )
    first.tasks({0: "d d"}, prefix="p", job_id="p")
    second.tasks({0: "d d"}, prefix="q", job_id="q")
    (tmp_path / "link").symlink_to(first.folder)
    said = {"above it": told(first.merge(target=tmp_path / "all.sqlite"), tmp_path)}
    first.tasks({1: " d d"}, prefix="p", job_id="p")
    one, other = sorted((first.folder / "tasks").iterdir())
    target = tmp_path / "two paths.sqlite"
    merge(MergeOrder([one, tmp_path / "link" / "tasks" / other.name], target), SystemClock())
    said["given by two paths"] = told(target, tmp_path)
    (tmp_path / "both").mkdir()
    both = first.merge(second.folder, target=tmp_path / "both" / "job.sqlite")
    said["two waves"] = told(both, tmp_path)
    second.tasks({1: " d d"}, prefix="q", job_id="q")
    said["two waves, done"] = told(first.merge(second.folder, target=both), tmp_path)
    second.source.unlink()
    said["a source is gone"] = told(both, tmp_path)
    (second.folder / "run.toml").unlink()
    said["one has no run.toml"] = told(both, tmp_path)
    pages({"proofs.txt": "\n".join(f"## {name}\n{text}" for name, text in said.items())})


@settings(max_examples=8)
@given(st.text("dfxps ", min_size=1, max_size=12), st.text("dfxps", max_size=3))
def test_the_numbers_always_add_up(rows: str, strangers: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", manifest(Path(folder) / "m.csv", len(rows))).freeze()
        run.tasks({"local1-1": rows})
        run.tasks({"local1-2": strangers}, prefix="s")
        proof = summarize_database(run.merge()).completeness
    assert proof is not None
    counted = (proof.done, proof.failed, proof.poison, proof.pending, proof.elsewhere, proof.not_listed)
    assert counted == tuple(map(rows.count, "dfxps "))
    assert (proof.strangers, proof.expected) == (len(strangers), len(rows))
    assert proof.complete == (rows.count("d") == len(rows)) != bool(proof.finish)


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


def test_progress_is_told_no_temporary_folder_is_needed_and_a_long_command_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run", manifest(tmp_path / "m.csv", 2)).freeze()
    job = run.tasks({"local1-1": "dd"}).merge()
    manifest(run.source, 20_001)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    heard: list[int] = []
    summary = summarize_database(job, heard.append)
    assert heard == [10_000, 20_000]
    assert summary.completeness is not None and summary.completeness.expected == 20_001
    proof = Completeness(2, None, 1, 1, 0, 0, 0, 0, 1, finish=(shlex.join(["badcjobs", "run", "a b " * 60]),))
    assert summary_text(replace(summary, completeness=proof), "july").endswith(f"\n    {proof.finish[0]}")
