"""Run folders, and what a look at them shows: each scene is a folder, its page the monitor's text and the figures."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rooms.live import DEVICES, Snapshot, UiState, as_plain_text, open_machine_view, open_run_view
from rooms.model import StandIn, Submitted
from rooms.report import state_of, summarize_database
from rooms.root import BadcjobsError, NotHere
from rooms.store import MergeOrder, Record, emulation_lock, file_in, merge, read_job, write_intent, write_record
from support.hand_clock import HandClock
from support.pages import Pages
from support.powerless import powerless_folder
from support.task_files import START_MS, TaskFile

NOW_MS = START_MS + 10_000
HALF = {"a": "done", "b": "done", "c": "failed", "d": "pending"}
DONE, LEFT = {"a": "done", "b": "done"}, {"a": "done", "b": "pending"}
ARRAY = "[array]\nfirst = 0\nstep = 1\ncount = {}\n"


def task(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {"index": index, **changes}


def run(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {"index": index, "states": HALF, "ended_at_ms": None, "samples": 11, **changes}


def running(folder: Path, **changes: Any) -> TaskFile:
    return TaskFile(folder, **run(**changes))


def pending(many: int, *done: str) -> dict[str, str]:
    return dict.fromkeys(done, "done") | {f"p{n}": "pending" for n in range(many)}


def record(*indices: int, job: str = "4821", chunks: int | None = None, at_s: float = 0) -> Record:
    return Record("slurm", Submitted(job, None, indices), (), chunks, START_MS + round(1000 * at_s))


def change(folder: Path, sql: str, *values: object, where: str = "*.sqlite") -> None:
    for path in (folder / "tasks").glob(where):
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(sql, values)
        os.utime(path, (NOW_MS / 1000,) * 2)


@dataclass
class Scene:
    """A run folder: its tasks, its run.toml ("": none), what is done to it then, and when it is looked at."""

    tasks: Sequence[Mapping[str, Any]]
    array: str | None = None  # of run.toml; None: there is no such file
    then: Callable[[Path], object] = lambda folder: None
    after_s: float = 10
    target: str = ""
    devices: bool = False  # their page is shown, too
    ends: bool = False  # what the report expects is told, too

    def play(self, folder: Path) -> Snapshot:
        folder.mkdir(exist_ok=True)
        for values in self.tasks:
            made = TaskFile(folder, **values)
            path = made.write()
            os.utime(path, ((made.ended_at_ms or made.started_at_ms + 1000 * made.samples - 1000) / 1000,) * 2)
        if self.array is not None:
            (folder / "tasks").mkdir(exist_ok=True)
            (folder / "run.toml").write_text(f'[run]\nsource = ["/data/m.csv"]\nengine = "demo"\n{self.array}')
        self.then(folder)
        return open_run_view(folder / self.target, HandClock(START_MS + round(1000 * self.after_s))).look()


def begin_chunk(folder: Path) -> None:
    change(folder, "UPDATE attempt SET ended_at_ms = NULL, outcome = NULL WHERE chunk_id = 'c'")
    for kind, ended in (("thermal", None), ("memory", NOW_MS)):
        sql = "INSERT INTO alert SELECT task_id, device_id, ?, 'warning', ?, ?, 90, 83, 'too much' FROM device"
        change(folder, f"{sql} WHERE device_index = 1", kind, START_MS, ended)


def tell_ends(folder: Path) -> None:
    for index, told in enumerate(({"state": "FAILED"}, {"state": "CANCELLED by 1000"}, {"state": "COMPLETED"}, [])):
        (folder / "tasks" / f"4821_{index}.r0.gpu1.slurm.json").write_text(json.dumps(told))


def damage(folder: Path) -> None:
    for index, content in enumerate((b"SQLite format 3\0" + bytes(4000), b""), 1):
        (folder / "tasks" / f"4821_{index}.r0.gpu1.sqlite").write_bytes(content)
    (folder / "tasks" / ".4821_3.r0.gpu1.sqlite.tmp").write_bytes(b"half a copy")
    (folder / "run.toml").write_text("[runs]\n")


def merge_and_lose_one(folder: Path) -> None:
    merge(MergeOrder([folder], folder / "job.sqlite"), HandClock(NOW_MS))
    next((folder / "tasks").glob("*_0.*")).unlink()


def two_divisions(folder: Path) -> None:
    change(folder, "UPDATE task SET shard_index = array_index, shard_count = 2", where="4821*")


IDLE = "UPDATE sample SET utilization_percent = 0, power_w = 60 WHERE at_ms = (SELECT max(at_ms) FROM sample)"
WHOLE = {f"{index}{n}": "skipped" for index in range(2) for n in range(3)} | {"0x": "done", "1x": "pending"}
PARTS = [task(index, states={f"{index}a": "done"}, shard=(index, 4)) for index in range(3)]
HOURS_MS = START_MS + 9_000_000
SCENES = {
    # a task that runs, and its silence
    "running": Scene([run(devices=2)], then=begin_chunk, devices=True),
    "not-silent-yet": Scene([run()], after_s=130),
    "silent": Scene([run()], after_s=130.001, devices=True),
    "verdicts": Scene(
        [task(n, states=HALF, verdict=one) for n, one in enumerate(("done", "failed", "stopped", "killed"))],
        after_s=10**6),
    "ends-told-by-slurm": Scene([run(n, states={f"{n}": "pending"}) for n in range(5)], then=tell_ends),
    "end-told-by-slurm-of-one-file": Scene([run()], then=tell_ends, target="tasks/4821_0.r0.gpu1.sqlite"),
    # many tasks
    "newest-attempt": Scene([task(states=LEFT, verdict="stopped"), run(restart=1, node="gpu2", samples=20,
                            states={"a": "skipped", "b": "pending"}, started_at_ms=START_MS + 20_000)], after_s=30),
    "array-waits": Scene([run(4)], "[array]\nfirst = 2\nstep = 2\ncount = 3\n"),
    "submitted": Scene([run()], then=lambda out: write_record(out, record(0, 1, chunks=40))),
    "fewer-submitted-than-listed": Scene([run()], then=lambda out: write_record(out, record(0, 1, chunks=3))),
    "parts-not-listed": Scene([run(shard=(0, 3))], ARRAY.format(3)),
    "parts-counted": Scene([run(shard=(0, 3))], ARRAY.format(3),
                           lambda out: write_record(out, record(0, 1, 2, chunks=12))),
    "submitted-again": Scene(
        [task(0, states={"a": "failed"}, verdict="failed"), task(1, states={"b": "done"})], after_s=70,
        then=lambda out: write_record(out, record(0, 1, job="4900", at_s=60))),
    "submitted-before-its-end": Scene([task(0, states={"a": "failed"}, verdict="failed")], after_s=70,
                                      then=lambda out: write_record(out, record(0, job="4900", at_s=10))),
    "two-divisions": Scene([*(task(n, states={f"{n}{m}": "done" for m in range(3)} | {f"{n}x": "pending"},
                                   verdict="stopped") for n in range(2)),
                            run(job_id="local1", states=WHOLE, shard=(0, 1))], then=two_divisions),
    "slowest-task": Scene([run(states=pending(1, "a")), run(1, states=pending(9, "c"))]),
    "nothing-done-yet": Scene(
        [run(states=pending(9, "a")), *(run(n, states={f"{n}{m}": "pending" for m in range(10)}) for n in range(1, 5)),
         run(5, states={})], ends=True),
    "slow-and-nothing-done": Scene(
        [run(states=pending(9, "a")), run(1, states={f"q{n}": "pending" for n in range(10)}, samples=101,
                                            started_at_ms=START_MS - 90_000)], ends=True),
    "as-those-before": Scene([task(states=DONE, started_at_ms=START_MS - 10_000),
                              run(1, states=pending(3), samples=6, started_at_ms=NOW_MS - 5000)], ends=True),
    "longer-chunks-left": Scene([run(states=pending(1, "a"))], ends=True,
                                then=lambda out: change(out, "UPDATE chunk SET audio_s = 90 WHERE status = 'pending'")),
    "unreadable": Scene([run()], then=damage),
    "nothing-yet": Scene([], then=lambda out: out.mkdir(exist_ok=True)),
    "array-not-begun": Scene([], ARRAY.format(4)),
    # a run that has ended
    "ended": Scene([task(states=DONE), task(1, states={"c": "done"}, started_at_ms=HOURS_MS,
                                            ended_at_ms=HOURS_MS + 10_000, chunk_ended_at_ms=HOURS_MS + 5_000)],
                   after_s=10_000),
    "idle-at-the-end": Scene([task(states=DONE, samples=9)], then=lambda out: change(out, IDLE), devices=True),
    "idle-and-at-work": Scene([run(samples=9)], then=lambda out: change(out, IDLE), devices=True),
    "devices-by-job-and-index": Scene(
        [task(n, job_id=job, devices=2, states={f"{n}": "done"}, started_at_ms=START_MS + 1000 * s,
              ended_at_ms=START_MS + 1000 * s + 10_000)
         for job, n, s in (("998", 2, 0), ("998", 10, 900), ("1002", 1, 300))], after_s=10_000, devices=True),
    "from-the-job-database": Scene([task(states={"a": "done"}), task(1, states={"b": "done"})],
                                   then=merge_and_lose_one),
    "job-database": Scene([run(), task(1, states={"z": "done"})], then=merge_and_lose_one, target="job.sqlite"),
    "tasks-folder": Scene([run(), task(1, states={"z": "done"})], target="tasks"),
    # work is left
    "left": Scene([task(states=LEFT, verdict="stopped", job_id="local1")], "", after_s=99),
    "left-of-an-array": Scene([task(states=DONE, verdict="stopped"),
                               task(1, states={"c": "pending"}, verdict="stopped")], ARRAY.format(4)),
    "left-and-silent": Scene([run(states=LEFT, samples=3)], "", after_s=9999),
    "parts-without-a-task": Scene([task(states=DONE, job_id="local1", shard=(0, 8))], ""),
    "parts-of-one-file": Scene([task(states=DONE, job_id="local1", shard=(0, 8))], "",
                               target="tasks/local1_0.r0.gpu1.sqlite"),
    "part-done-twice": Scene([*PARTS, task(job_id="local1", states={"2a": "done"}, shard=(2, 4))]),
    "all-parts-done": Scene([*PARTS, task(job_id="local1", states={"3a": "done"}, shard=(3, 4))]),
    "died-before-its-list": Scene([task(states=DONE, shard=(0, 2)), task(1, states={}, verdict="killed")],
                                  ARRAY.format(2)),
    "list-of-manifests": Scene([task(states=DONE, shard=(0, 1))], ARRAY.format(4)),
    "parts-left": Scene([task(states=LEFT, shard=(0, 8), verdict="stopped")]),
    "parts-left-and-counted": Scene([task(states=LEFT, shard=(0, 8), verdict="stopped")],
                                    then=lambda out: write_record(out, record(0, chunks=19, at_s=-1))),
    "empty-part": Scene([task(states={}, shard=(0, 8))]),
    "failed-for-good": Scene([task(states={"a": "done", "b": "failed"})], ""),
    "done-before": Scene([task(states={"a": "skipped"})], ""),
    # a submit that was cut short
    **{f"cut-short-{name}": Scene([task(states=states, verdict="done" if states == DONE else "stopped")],
                                  then=lambda out: write_intent(out, out / "job.sh", record(0, job="", chunks=2)))
       for name, states in (("left", LEFT), ("failed", {"a": "done", "b": "failed"}), ("done", DONE))},
}  # fmt: skip


def test_what_a_look_at_a_run_shows(tmp_path: Path, pages: Pages) -> None:
    said = {}
    for name, scene in SCENES.items():
        folder = tmp_path / name
        frame = scene.play(folder)
        said[f"{name}.txt"] = page_of(frame, folder, devices=scene.devices)
        if scene.ends or name == "ends-told-by-slurm":
            merge(MergeOrder([folder], folder / "job.sqlite"), HandClock(NOW_MS))
        if scene.ends:
            end_at_ms = summarize_database(folder / "job.sqlite", now_ms=NOW_MS).outlook.end_at_ms or 0
            said[f"{name}.txt"] += f"\nthe report expects the end {(end_at_ms - NOW_MS) / 1000:g} s later"
        elif name == "ends-told-by-slurm":
            reported = [state_of(one, NOW_MS) for one in read_job(folder / "job.sqlite").tasks]
            assert sorted(reported) == sorted(one.state for one in frame.tasks), "monitor and report believe the same"
    pages(said)


def page_of(frame: Snapshot, folder: Path, *, devices: bool = False) -> str:
    """Return the monitor's text, the totals that say something, and a line for each task."""
    go_on = tuple(line.replace(str(folder), "/runs/july") for line in frame.total.go_on)
    title, *remarks = (text.replace(str(folder), "runs/july") for text in (frame.title, *frame.remarks))
    shown = replace(frame, title=title, remarks=tuple(remarks), total=replace(frame.total, go_on=go_on))
    text = [as_plain_text(shown, UiState(page=page), width=110) for page in ("tasks", DEVICES)[: 1 + devices]]
    document = shown.to_dict()
    total = {key: value for key, value in document["total"].items() if value not in (None, 0, False, (), [])}
    text.append("\n".join(f"{key}: {in_seconds(key, value)}" for key, value in total.items()))
    keys = ("label", "state", "done", "failed", "before", "pending", "rate", "ends_at_ms", "working_on")
    known = [{key: one.get(key) for key in keys if one.get(key)} for one in document["tasks"]]
    lines = (json.dumps({k: in_seconds(k, value) for k, value in one.items()}) for one in (*known, *document["alerts"]))
    return "\n\n".join([*text, "\n".join(lines)])


def in_seconds(key: str, value: Any) -> Any:
    """Return a time as seconds after the start of the first task."""
    return (value - START_MS) / 1000 if key.endswith("_at_ms") and value else value


def test_an_emulated_array_waits_while_its_emulation_lives_and_is_unbegun_when_that_has_ended(
    tmp_path: Path, pages: Pages
) -> None:
    submit = ("badcjobs", "submit", "m.csv")
    scenes = {
        "nothing": Scene([]), "frozen": Scene([], ARRAY.format(4)),
        "stopped": Scene([task(states=LEFT, verdict="stopped", job_id="1794")], ARRAY.format(4)),
        "running": Scene([run(states=LEFT, job_id="1794")], ARRAY.format(4)),
        "silent": Scene([run(states=LEFT, job_id="1794")], ARRAY.format(4), after_s=9999),
    }  # fmt: skip
    said = {}
    for name, scene in scenes.items():
        folder = tmp_path / name
        folder.mkdir()
        with emulation_lock(folder, submit):
            (folder / "logs" / "1794.json").write_text('{"tasks": []}')
            said[f"{name}-lives.txt"] = page_of(scene.play(folder), folder)
        said[f"{name}-over.txt"] = page_of(scene.play(folder), folder)
        write_record(folder, record(0, 1, 2, 3, chunks=8, at_s=60))
        said[f"{name}-submitted-since.txt"] = page_of(scene.play(folder), folder)
        file_in(folder).unlink()
        write_intent(folder, folder / "job.sh", record(0, 1, 2, 3, chunks=8, at_s=60))
        said[f"{name}-perhaps-submitted.txt"] = page_of(scene.play(folder), folder)
    pages(said)


# --- one view, looked at again and again ------------------------------------------------------------------------------


def test_a_file_is_read_again_when_it_was_replaced_and_only_then(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    over = TaskFile(tmp_path, index=1, states={"x": "pending"}, verdict="stopped").write()
    clock = HandClock(NOW_MS)
    view = open_run_view(tmp_path, clock)
    first, same = view.look(), view.look()
    assert same.tasks[0] is first.tasks[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])  # broken for a moment
    broken = view.look()
    assert (broken.tasks[0].done, len(broken.remarks)) == (2, 1)
    path.write_bytes(whole)
    assert view.look().remarks == ()
    for made in (running(tmp_path / "new", states=dict.fromkeys(HALF, "done")),
                 TaskFile(tmp_path / "new", index=1, states={"x": "done"})):  # fmt: skip
        made.write().replace(tmp_path / "tasks" / made.path.name)
    assert [task.done for task in view.look().tasks] == [4, 0], "one that has ended is not looked at for a minute"
    clock.sleep(59)
    assert view.look().tasks[1].done == 0
    clock.sleep(1)
    assert view.look().tasks[1].done == 1
    over.unlink()
    assert [task.array_index for task in view.look().tasks] == [0]
    shutil.rmtree(tmp_path / "tasks")
    assert view.look().remarks == ("no task has published anything yet",)


def test_what_slurm_tells_of_an_end_is_believed_until_the_task_tells_it(tmp_path: Path) -> None:
    task, clock = running(tmp_path), HandClock(NOW_MS)
    path = task.write()
    view = open_run_view(tmp_path, clock)
    assert (view.look().total.states, view.look().total.devices) == ({"running": 1}, 1)
    path.with_suffix(".slurm.json").write_text('{"state": "NODE_FAIL"}')
    killed = view.look()
    assert (killed.total.states, killed.total.devices, killed.devices[0].alive) == ({"killed": 1}, 0, False)
    replace(task, ended_at_ms=NOW_MS, verdict="stopped").write()
    clock.sleep(60)
    assert view.look().total.states == {"stopped": 1}


def test_what_there_was_no_time_for_comes_with_the_next_look_and_a_pipe_does_not_hang_it(tmp_path: Path) -> None:
    for index in range(3):
        tasks = running(tmp_path, index=index).write().parent
    os.mkfifo(tasks / "4821_7.r0.gpu1.sqlite")
    (tasks / "4821_8.r0.gpu1.sqlite").symlink_to("4821_7.r0.gpu1.sqlite")
    (tmp_path / "run.toml").write_text(f"[run]\n{ARRAY.format(4)}")
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    looks = [view.look(patience_s=0.0) for _ in range(3)]
    assert [(len(one.tasks), one.unread, one.remarks) for one in looks] == [(1, 2, ()), (2, 1, ()), (4, 0, ())]
    assert "2 databases not read yet" in as_plain_text(looks[0])


def test_what_is_gone_closed_or_no_run_is_an_error_and_shown_again_when_it_is_back(pages: Pages) -> None:
    said = []

    def refused(look: Callable[[], object]) -> None:
        with pytest.raises(BadcjobsError) as caught:
            look()
        said.append(str(caught.value).replace(str(folder), "FOLDER"))

    with powerless_folder() as folder:
        path = running(folder / "run").write()
        view, one = (open_run_view(target, HandClock(NOW_MS)) for target in (folder / "run", path))
        for closed in (path.parent, folder / "run"):
            closed.chmod(0)
            refused(view.look)
            refused(lambda: open_run_view(path.parent, HandClock(NOW_MS)))
            closed.chmod(0o700)
        (folder / "run").rename(folder / "june")
        refused(view.look)
        refused(one.look)
        (folder / "june").rename(folder / "run")
        assert view.look().tasks == one.look().tasks != ()
        (folder / "notes").mkdir()
        (folder / "notes" / "letter.txt").write_text("hello")
        for wrong in ("nowhere", "notes/letter.txt", "notes"):
            refused(lambda wrong=wrong: open_run_view(folder / wrong, HandClock(NOW_MS)).look())  # type: ignore[misc]
    pages({"refusals.txt": "\n\n".join(said)})


# --- this machine -----------------------------------------------------------------------------------------------------


def test_a_machine_shows_every_device_its_course_and_what_is_lost(tmp_path: Path, pages: Pages) -> None:
    script = tmp_path / "script.toml"
    script.write_text(
        "[[device]]\nindex = 0\nload = [[0, 50]]\n[[device]]\nindex = 1\nload = [[0, 90]]\nlost_at_s = 59.0\n"
    )
    clock, said = HandClock(), {}
    with closing(
        open_machine_view({"CUDA_VISIBLE_DEVICES": "1"}, clock, StandIn(script=str(script)), hostname="node1")
    ) as view:
        for second in (0, 30, 60, 120):
            clock.sleep(START_MS / 1000 + second - clock.monotonic_s())
            frame = view.look()
            said[f"after-{second}.txt"] = as_plain_text(frame, width=120)
        said["document.json"] = json.dumps(frame.to_dict(), indent=1)
        for _ in range(300):
            clock.sleep(1)
            trail = view.look().devices[0].trail
    assert (len(trail.power_w), trail.step_ms, trail.from_ms) == (240, 1000, clock.now_ms() - 239_000)
    pages(said)
    with pytest.raises(NotHere, match="no GPU"):
        open_machine_view({"PATH": str(tmp_path)}, HandClock(), hostname="node1")
