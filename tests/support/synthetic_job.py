"""A job of a thousand array tasks as a cluster leaves it: start-up, tails, a slow node, poison, gaps, a lost device.

A dozen tasks are written and published as a real task does it; the others are made from them, with other devices, other
recordings and a later start.
"""

import heapq
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rooms.model import ArrayShape, Submitted, TaskKey, stable_id
from rooms.root import FrozenRun
from rooms.store import TABLES, Record, columns_of, move_into_place, write_record, write_row_counts
from support.cases import read_data
from support.story import JOB_ID, Card, Play, Story, write_story
from support.task_files import START_MS

DEVICES, CHUNKS, NODES = 4, 100, 44
EVEN_CHUNKS = 240  # of each task of write_tasks
SLOW_NODE = "gpu17"
TIME_LIMIT_S = 5400
_SILENT, _SILENCE_S = 22, 1500  # every so many tasks at work one has published nothing for a while
_OF_TIME = ("at_ms", "from_ms", "to_ms")
_SPECIES = read_data("species.txt").splitlines()
_SETTINGS = {
    "out": "/scratch/lab/runs/june", "source": ["/scratch/lab/june.csv"], "engine": "hawkears",
    "engine_arg": ["--min_score=0.6"], "interval": 1.0, "retries": 2, "workers_per_gpu": "auto", "max_gpus": None,
    "alerts": {"temperature_c": None, "memory_percent": 90.0},
}  # fmt: skip
_V100 = Card("Tesla V100-SXM2-16GB", 10.5, 16, 300, 42, 1530, 87)
_STEADY = Story(
    card=_V100, devices=DEVICES, workers=1, cores=8, start_up_s=95, prepare_s=12, end_s=6, pause_s=2.0, cpu_s=1.0,
    memory_limit_gib=16, settings=_SETTINGS,
    species=tuple((one[:4], one[5:]) for one in _SPECIES),
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """When and where one array task runs, and what becomes of it."""

    key: TaskKey
    story: Story
    begin_s: float  # from the start of the job
    end_s: float


def schedule(tasks: int, chunks: int = CHUNKS, nodes: int = NODES) -> Iterator[Planned]:
    """Yield the tasks of a job: each starts where a node becomes free."""
    free = [(index % 4 * 20 + index * 1.5, f"gpu{index:02d}") for index in range(1, nodes + 1)]
    heapq.heapify(free)
    for index in range(tasks):
        begin_s, node = heapq.heappop(free)
        story = story_of(index, node, chunks)
        end_s = begin_s + Play(story).end_s
        heapq.heappush(free, (end_s + 20, node))
        yield Planned(TaskKey(JOB_ID, index, 0, node), story, begin_s, end_s)


def story_of(index: int, node: str, chunks: int) -> Story:
    """Return how this task goes: a few are rare, and one node is slow; with fewer chunks all happens sooner."""
    all_, part = range(DEVICES), chunks / CHUNKS
    limit_s = TIME_LIMIT_S * part
    steady = replace(_STEADY, chunks=(300.0,) * chunks, time_limit_s=limit_s)
    if node == SLOW_NODE:
        slower = 1.7 + 0.05 * (index % 5 - 2)
        return replace(steady, seed=20 + index % 5, slowness=dict.fromkeys(all_, slower),
                       throttle=dict.fromkeys(all_, 0x40))  # fmt: skip
    bad = [round(chunks * share) for share in (0.2, 0.45 + index % 3 / 10, 0.9)]
    rare: dict[int, dict[str, object]] = {
        7: {"seed": 30 + index % 3, "hopeless": dict(zip(bad, ("poison", "failed", "failed"), strict=True)),
            "fails": dict(zip(bad, (("engine_crash",) * 2, *[("bad_audio",) * 3] * 2), strict=True))},
        19: {"seed": 41, "pause_s": 70.0}, 23: {"seed": 42, "gaps": ((900 * part, 1500 * part, "the recorder died"),)},
        31: {"seed": 43, "lost": {2: 1500 * part}},
        37: {"seed": 44, "pause_s": 160.0, "killed_s": limit_s, "slurm_state": "TIMEOUT"},
    }  # fmt: skip
    n = index * 7 % 6
    usual = {"seed": n, "start_up_s": 80.0 + 9 * n % 40, "slowness": dict.fromkeys(all_, 0.94 + 0.02 * n)}
    return replace(steady, **rare.get(index % 41, usual))


def write_job(folder: Path, tasks: int, *, chunks: int = CHUNKS, nodes: int = NODES) -> list[Path]:
    """Write the task databases of a job, ready to be merged, into ``folder``/tasks."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        templates, plan = Templates(Path(local), tasks), schedule(tasks, chunks, nodes)
        return [templates.write(one.story, one.key, one.begin_s, folder / "tasks") for one in plan]


def write_source(folder: Path, tasks: int, *, chunks: int = CHUNKS) -> None:
    """Write the manifest of the job and its run.toml, so that someone can tell what is complete."""
    rows = ["recording_id,chunk_id,source_path,start_ms,end_ms"]
    stories = [Story(index=index, chunks=(300.0,) * chunks) for index in range(tasks)]
    for number in range(chunks):  # row by row a source is dealt out to the tasks like cards
        dealt = (story.chunk(number) for story in stories)
        rows += [f"{one.recording_id},{one.chunk_id},{one.source_path},{one.start_ms},{one.end_ms}" for one in dealt]
    manifest = folder / "june.csv"
    manifest.write_text("\n".join(rows) + "\n")
    frozen = FrozenRun({"source": (str(manifest),), "engine": "hawkears"}, ArrayShape(0, 1, tasks))
    (folder / "run.toml").write_text(frozen.to_toml("0.7.0"))


def write_mid_run(folder: Path, tasks: int, *, now_ms: int) -> None:
    """Write the folder of the job as it looks when half of its time is over, which is now."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        templates, plan = Templates(Path(local), tasks), list(schedule(tasks))
        at_s = 0.55 * max(one.end_s for one in plan)
        old = [one for one in plan if one.begin_s + _SILENCE_S < at_s < one.end_s]
        silent = {one.key for one in old[len(old) // 3 :: _SILENT]}
        for one in (one for one in plan if one.begin_s < at_s):
            story, late_s = one.story, _SILENCE_S if one.key in silent else 0
            ran_s, now_s = at_s - late_s - one.begin_s, now_ms / 1000 - late_s
            if at_s - late_s < one.end_s:
                story = replace(story, killed_s=None, slurm_state=None, under_way_s=round(max(60, ran_s)))
            path = templates.write(story, one.key, now_s - START_MS / 1000 - ran_s, folder / "tasks")
            os.utime(path, (now_s,) * 2)
    write_source(folder, tasks)
    job = Submitted(JOB_ID, None, tuple(range(tasks)))
    begun_ms = now_ms - round(1000 * at_s) - 60_000
    write_record(folder, Record("slurm", job, ("run", "june.csv"), tasks * CHUNKS, begun_ms))


def write_tasks(
    folder: Path, tasks: range, seconds: int = 3600, later_s: Callable[[int], float] = lambda index: 0.0
) -> list[Path]:
    """Write even tasks at 1 Hz, one for each array index: an hour on four devices, of which each may begin later."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    pause_s = seconds * DEVICES / EVEN_CHUNKS - 0.3  # as long as a chunk takes
    story = Story(
        devices=DEVICES, workers=1, chunks=(30.0,) * EVEN_CHUNKS, prepare_s=0.0, start_up_s=0.0, tick_s=1.0,
        pause_s=pause_s, end_s=pause_s, species=[(f"SP{n:02d}", "A species") for n in range(4)],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as local:
        templates, keys = Templates(Path(local)), [TaskKey(JOB_ID, n, 0, f"gpu{n % NODES}") for n in tasks]
        return [templates.write(story, key, later_s(key.array_index), folder / "tasks") for key in keys]


class Templates:
    """Writes tasks of which many have the same story."""

    def __init__(self, local: Path, tasks: int = 1000) -> None:
        self._local, self._tasks = local, tasks
        self._written: dict[str, Path] = {}

    def write(self, story: Story, key: TaskKey, begin_s: float, folder: Path) -> Path:
        """Give the rows of a task with this story another task, devices, recordings and times, and seal them."""
        name = repr(story)
        if name not in self._written:
            self._written[name] = write_story(self._local, replace(story, node=f"template{len(self._written)}"))
        copy = self._local / "variant.sqlite"
        shutil.copyfile(self._written[name], copy)
        target = folder / f"{key.name}.sqlite"
        self._change(copy, story, key, round(begin_s * 1000))
        move_into_place(copy, target)
        return target

    def _change(self, copy: Path, story: Story, key: TaskKey, later_ms: int) -> None:
        day, new_day = (replace(story, index=n).chunk(0).source_path[7:15] for n in (0, key.array_index))
        values = {"task": key.task_id, "later": later_ms, "suffix": f"-{key.array_index:04d}", "day": day,
                  "new_day": new_day}  # fmt: skip
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = OFF")
            db.execute("BEGIN")
            db.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER)")
            for kind in ("device", "worker"):
                old = [row[0] for row in db.execute(f"SELECT {kind}_id FROM {kind} ORDER BY rowid")]
                new = [(one, stable_id(key.name, kind, n)) for n, one in enumerate(old)]
                db.executemany("INSERT INTO ids VALUES (?, ?)", new)
            for table in (table for table in TABLES if table != "meta"):
                db.execute(f"UPDATE {table} SET {', '.join(_changes(columns_of(table)))}", values)
            db.execute("UPDATE device SET uuid = ? || '-' || device_index", (f"GPU-{stable_id(key.node):x}",))
            of_task = "name = ?, array_index = ?, node = ?, shard_index = ?, shard_count = ?"
            db.execute(
                f"UPDATE task SET {of_task}", (key.name, key.array_index, key.node, key.array_index, self._tasks)
            )
            write_row_counts(db)
            db.execute("COMMIT")


def _changes(columns: Sequence[str]) -> Iterator[str]:
    yield "task_id = :task"
    for column in columns:
        if column in ("device_id", "worker_id"):
            yield f"{column} = (SELECT new FROM ids WHERE old = {column})"
        elif column in _OF_TIME or column.endswith("_at_ms"):
            yield f"{column} = {column} + :later"
        elif column == "recording_id":
            yield "recording_id = replace(recording_id, '-0000', :suffix)"
        elif column in ("source_path", "audio_path"):
            yield f"{column} = replace({column}, :day, :new_day)"
