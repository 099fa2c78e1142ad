"""The tables as the contract promises them: names, units, NULL for the unknown, and few bytes."""

import math
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import store
from rooms.cli import read_topic
from rooms.model import Detection, Reading
from rooms.root import DatabaseProblem
from rooms.store import SCHEMA_VERSION, StateTime, read_job, read_tasks
from rooms.workers import Stretch, join_detections
from support.behaviour import lay_out, pretty
from support.databases import change, query
from support.task_files import START_MS, TaskFile, merge_run

from badcjobs import __version__


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    task = TaskFile(run, states={"a": "done", "b": "failed"}).write()
    merge_run(run)
    return {"task": task, "job": run / "job.sqlite"}


def columns(path, table):
    return [(row[1], row[2], row[3]) for row in query(path, f"PRAGMA table_info({table})")]


def test_tables(databases, pages):
    """Other people's queries name these: a change of a page is a change of the schema."""
    said = {}
    for kind, path in databases.items():
        lines = []
        for form, table, sql in query(path, "SELECT type, name, sql FROM sqlite_master WHERE type != 'index'"):
            marks = " ".join(mark for mark in ("STRICT", "WITHOUT ROWID") if mark in sql.rpartition(")")[2])
            lines.append(f"{form} {table} {marks}".rstrip())
            lines += [f"    {name} {sql_type}{' NOT NULL' * needed}" for name, sql_type, needed in columns(path, table)]
            keys = query(path, f"PRAGMA foreign_key_list({table})")
            lines += sorted(f"    {key[3]} → {key[2]} ({key[4]})" for key in keys)
        said[f"{kind}.txt"] = "\n".join(lines)
        assert query(path, "PRAGMA foreign_key_check") == []
        assert (query(path, "PRAGMA user_version"), path.read_bytes()[68:72]) == ([(SCHEMA_VERSION,)], b"BADC")
    indexes = query(databases["job"], "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    said["indexes.txt"] = "\n".join(" ".join(sql.split()) for _, sql in sorted(indexes))
    pages(said)
    with closing(store.open_sealed(databases["task"])) as db, pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM task")


def test_every_column_is_explained_in_the_database_and_in_the_guide(databases):
    job, page = databases["job"], read_topic("tables")
    reported = {(table, column): text for table, column, text in query(job, "SELECT * FROM column_help")}
    tables = query(job, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    assert set(reported) == {(table, column[0]) for (table,) in tables for column in columns(job, table)}
    assert all(len(text) >= 4 for text in reported.values())
    for table in (*store.JOB_TABLES, *store.JOB_VIEWS):
        assert f"## {table.name}\n" in page
        assert [name for name in table.meanings if f"    {name} " not in page] == []


def test_views(tmp_path, pages):
    """The common questions, of a task that has ended and of one that was killed: until the last sign of it."""
    TaskFile(
        tmp_path, index=0, states={"a": "done", "b": "failed", "c": "poison"}, devices=2, samples=5,
        reading=Reading(utilization_percent=60, memory_used_bytes=2**30, temperature_c=55, power_w=100.0, energy_j=9.0,
                        busy_percent=12.5),
        gaps=[(1000, 3000, "the recorder was late")],
    ).write()  # fmt: skip
    TaskFile(tmp_path, index=1, states={"d": "done", "e": "pending"}, ended_at_ms=None, samples=0).write()
    merge_run(tmp_path)
    said = {}
    for view in ("task_summary", "device_summary", "chunk_summary", "job_summary", "recording_detection"):
        names = [name for name, _, _ in columns(tmp_path / "job.sqlite", view) if name not in ("task_id", "device_id")]
        order = "ORDER BY (SELECT name FROM task t WHERE t.task_id = v.task_id), device_index" * (view[:3] == "dev")
        rows = query(tmp_path / "job.sqlite", f"SELECT {', '.join(names)} FROM {view} v {order}")
        rows = rows if order else sorted(rows, key=repr)
        said[f"{view}.txt"] = "\n\n".join(
            "\n".join(f"{name} = {value!r}" for name, value in zip(names, row, strict=True)) for row in rows
        )
    pages(said)


def test_a_path_with_any_letters_can_be_opened_and_what_is_not_a_job_database_is_named(tmp_path, pages):
    path = tmp_path / "a b?c#d%e ü.sqlite"
    store.create_live(path).close()
    for uri in (store.read_only_uri(path), store.file_uri(path, "mode=ro")):
        with closing(sqlite3.connect(uri, uri=True)) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    store.open_sealed(path).close()
    wrong = [TaskFile(tmp_path, states={"a": "done"}).write()]
    wrong += [tmp_path / f"{name}.sqlite" for name in ("newer", "other", "empty", "text")]
    wrong[1].write_bytes(path.read_bytes()[:60] + (99).to_bytes(4, "big") + path.read_bytes()[64:])
    change(wrong[2], "CREATE TABLE x (y)")
    wrong[3].touch()
    wrong[4].write_text("text" * 2000)
    said = []
    for there in ("", "there is a job database beside them\n"):
        said.append(there)
        for path in wrong:
            with pytest.raises(DatabaseProblem) as refused:
                read_job(path)
            said.append(f"{refused.value}\n".replace(str(tmp_path), "HERE").replace(__version__, "VERSION"))
        (tmp_path / "job.sqlite").touch()
    pages({"said.txt": "".join(said)})


def plain(value):
    """Return facts without what is different on every machine, or has its default value."""
    value = asdict(value) if is_dataclass(value) else value
    if isinstance(value, Mapping):
        left_out = ("task_id", "device_id", "heard_at_ms", "settings", "trail", "spark", "means")
        return {str(k): plain(v) for k, v in value.items() if k not in left_out and v not in (None, (), {}, 0, 0.0)}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def test_tasks_and_devices(tmp_path, pages):
    run = lay_out("live", tmp_path / "run")
    said = {}
    for path in sorted((run / "tasks").glob("*.sqlite"))[:3]:
        tasks = read_tasks(path)
        (account,) = store.read_accounts(path, tasks)
        now, so_far = ([plain(asdict(device)) for device in one.its_devices[:1]] for one in (tasks[0], account))
        said[f"{path.stem}.json"] = pretty({"task": plain(asdict(replace(tasks[0], its_devices=()))), "now": now,
                                            "so far": so_far})  # fmt: skip
        assert read_tasks(path, known=[tasks[0].name]) == ()
        trail = tasks[0].its_devices[0].trail
        assert len(trail.utilization_percent) == len(trail.power_w) > 1 and trail.step_ms >= 1000
    merge_run(run)
    one = read_tasks(run / "job.sqlite")
    assert {task.name for task in one} == {path.stem for path in (run / "tasks").glob("*.sqlite")}
    for task in one:
        (alone,) = read_tasks(run / "tasks" / f"{task.name}.sqlite")
        ours, theirs = ([(d.reading, d.trail, d.work, d.chunks, d.rate) for d in t.its_devices] for t in (task, alone))
        assert ours == theirs, "a job database says the same as the task's own file"
    names = {device.device_id: f"{device.task} {device.token}" for device in read_job(run / "job.sqlite").devices}
    with store.read_chart_data(run / "job.sqlite") as chart:
        given_up = {name: chart.stretches(one, True).states.count("lost") for one, name in names.items()}
        states = {name: chart.stretches(one, False).states for one, name in names.items()}
        said["chart.json"] = pretty({
            "sets_of_settings": chart.sets_of_settings, "versions": chart.versions,
            "stretches": {name: [len(states[name]), *sorted(set(states[name]))] for name in sorted(states)},
            "given_up": {name: lost for name, lost in sorted(given_up.items()) if lost},
        })  # fmt: skip
        assert chart.stretches(1, True) is None
    pages(said)
    (run / "text.sqlite").write_text("text")
    assert store.read_processes(run / "text.sqlite") == {}


def test_gpus_that_a_task_left_unused_have_no_workers(tmp_path):
    path = TaskFile(tmp_path, devices=4).write()
    assert [task.workers for task in read_tasks(path)] == [4], "what was planned, without a decision"
    for at_ms, many in ((5, 3), (1, 2)):
        figures = f"'{{\"workers\": {many}}}'"
        change(path, f"INSERT INTO decision SELECT task_id, {at_ms}, 'workers.x', 'V100', {figures}, 'x' FROM task")
    assert [task.workers for task in read_tasks(path)] == [6], "two of the GPUs had two each, then three"


def test_what_has_changed_since_the_merge_is_counted_and_an_ended_task_does_not_change(tmp_path):
    def fresh():
        job = read_job(tmp_path / "job.sqlite")
        changed = [task.changed for task in sorted(job.tasks, key=lambda task: task.name)]
        return job.merged.changed, job.merged.gone, job.merged.new, job.merged.new_indices, changed

    ended = TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, ended_at_ms=None).write()
    merge_run(tmp_path)
    for path, changed in ((ended, 0), (running, 1)):
        os.utime(path, (START_MS // 1000 + 100_000,) * 2)  # the task that runs was silent by then
        assert fresh() == (changed, 0, 0, (), [False, bool(changed)])
    TaskFile(tmp_path, index=5, states={"c": "done"}).write()
    TaskFile(tmp_path, index=0, job_id="local17", states={"d": "done"}).write()
    (tmp_path / "tasks" / ".hidden_1.r0.gpu1.sqlite").touch()
    assert fresh() == (1, 0, 2, (5,), [False, True])
    ended.write_bytes(ended.read_bytes() + b"x")
    assert fresh()[0] == 2
    running.unlink()
    assert fresh() == (1, 1, 2, (5,), [False, False])
    ended.unlink()
    assert fresh()[:2] == (0, 1), "the file of an ended task may go"


def figures(facts, names):
    return ", ".join(f"{name} = {getattr(facts, name)}" for name in names.split())


def test_figures_that_follow(pages):
    device = store.DeviceFacts("t", "n", 0, "GPU-0", "0", "V100", "nvml", span_s=100.0, energy_integrated_j=500.0)
    states = {"working": StateTime(80.0, 20.0, 5.0, 100.0), "idle": StateTime(20.0, 10.0, None, 25.0)}
    energy, said = "energy_source energy_j energy_measured_s state_energy_j total_s state_s", {}
    for counter_j, span_s in ((700.0, 90.0), (700.0, 89.9), (700.0, 0.0), (None, 95.0)):
        its = replace(device, energy_counter_j=counter_j, energy_counter_span_s=span_s, states=states)
        said[f"energy: {counter_j} J counted in {span_s} of 100 s"] = figures(its, energy)
    said["energy: not by state"] = figures(replace(its, states={"working": StateTime(80.0)}), energy)
    said["energy: not known"] = figures(replace(device, energy_integrated_j=None), energy)
    for numbers in ((), (10, None, 20), (2**40, None, -5), (None, 2**15 - 1), (None, -(2**15) - 1, 2**15)):
        packed = store.PackedSteps(numbers)
        assert packed == numbers and packed[1:] == numbers[1:] and len(packed) == len(numbers)
        assert [packed[n] for n in range(len(numbers))] == list(numbers)
    trail = store.Trail(0, 1000, (10, None, 20), (50, 50, 50), (None,) * 3, (7, 8, 9))
    assert (
        trail.means == Reading(utilization_percent=15, memory_used_bytes=50, power_w=8) and store.Trail().means is None
    )
    load = {"utilization_percent": store.MetricFacts(4, 0.0, 37.5, 50.0, 50.0, 50.0)}
    full = replace(device, metrics=load, throttled={"gpu_idle": 4, "sw_power_cap": 2},
                   memory_total_bytes=200, means=trail.means, trail=trail)  # fmt: skip
    names = "utilization_mean_percent held_back memory_percent card label"
    said["device"], said["device: not known"] = figures(full, names), figures(device, names)
    said["device: no index"] = figures(replace(device, uuid=None, index=None, token="x"), "card label")
    task = store.TaskFacts("4821_7.r0.n", "4821", 7, devices=2, started_at_ms=START_MS, last_sign_ms=START_MS + 10_000,
                     done=4, failed=1, failed_before=2, before=3, pending=5, audio_s=120.0,
                     heard_at_ms=START_MS + 12_000, silent_after_s=60.0, its_devices=(full,),
                     working_on=("a",))  # fmt: skip
    killed, names = task.as_killed(), "state verdict alive working_on wall_s gpu_s rate chunks_per_s failed_for_good "
    names += "settled chunks ends_at_ms label part begun"
    tasks = {
        "": task, "step": replace(task, procid=2, job_id="", state="waiting"), "all done": replace(task, pending=0),
        "idle": replace(task, done=0, audio_s=0.0, state="unbegun"), "silent": task.at(START_MS + 72_001),
        "killed": killed,
    }  # fmt: skip
    said |= {f"task: {name}": figures(one, names) for name, one in tasks.items()}
    said["device of a killed task"] = figures(killed.its_devices[0], "trouble alive")
    pages({"figures.txt": "\n".join(f"{name}\n    {text}" for name, text in said.items())})
    assert task.at(START_MS + 72_000) is task and killed.its_devices[0].shown == trail.means
    assert not tasks["silent"].its_devices[0].alive
    whole = store.Completeness(4, None, 4, 4, 0, 0, 0, 0)
    assert [c.complete for c in (whole, replace(whole, done=3), replace(whole, expected=None))] == [True, False, False]


Heard = Sequence[tuple[Stretch, Sequence[Detection]]]


@pytest.fixture(scope="module")
def db():
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(store.ddl_script(table.ddl() for table in store.JOB_TABLES))
    store.create_indexes(db)
    store.follow_changes(db)
    yield db
    db.close()


def add(db, recording, heard, status="done", end_known=True):
    """Write chunks of a recording as merge leaves them, and what was heard in them."""
    columns = "task_id, recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, audio_s, status, attempts"
    insert = f"INSERT INTO chunk ({columns}) VALUES (1, ?, ?, '', '', ?, ?, ?, ?, 1)"
    for number, (stretch, found) in enumerate(heard):
        start_ms, end_ms, chunk = round(stretch[0] * 1000), round(stretch[1] * 1000), f"{status}{number:03d}"
        length_s = (end_ms - start_ms) / 1000
        db.execute(insert, (recording, chunk, start_ms, end_ms if end_known else None, length_s, status))
        rows = [(1, recording, chunk, d.start_ms, d.end_ms, d.label, d.label_name, d.score) for d in found]
        db.executemany("INSERT INTO detection VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def on_its_clock(db, recording="rec"):
    store.note_changes(db, ["chunk"], 1)
    store.settle_overlaps(db)
    columns = "start_ms, end_ms, label, score, label_name"
    rows = db.execute(f"SELECT {columns} FROM recording_detection WHERE recording_id = ?", (recording,))
    return in_order([Detection(*row) for row in rows])


def in_order(found):
    return sorted(found, key=lambda d: (d.start_ms, d.end_ms, d.label, d.score or -1.0, d.label_name or ""))


def clear(db):
    for table in ("detection", "chunk", "recording", "recording_detection", "overlap"):
        db.execute(f"DELETE FROM {table}")


tenths = st.integers(0, 119)
scores = st.one_of(st.none(), st.sampled_from([0.1, 0.5, 0.9]))
detections = st.builds(
    lambda start, length, label, score: Detection(start * 100, (start + length) * 100, label, score, f"{score}"),
    tenths, st.integers(0, 40) | st.integers(100, 300), st.sampled_from(["ROPT", "RUGR"]), scores,
)  # fmt: skip
found_in_one = st.lists(detections, max_size=8).map(
    lambda found: sorted(found, key=lambda d: (d.start_ms, d.end_ms, d.label, d.score is not None, d.score))
)


def by_definition(heard):
    """Return the sounds of stretches that overlap, joint by joint, with all of them at hand."""
    joints = [round(1000 * (before[0][1] + after[0][0])) // 2 for before, after in pairwise(heard)]
    limits = pairwise([-math.inf, *joints, math.inf])
    parts = list[list[Detection]]()
    for ((start_s, _), found), (low, high) in zip(heard, limits, strict=True):
        ms = round(1000 * start_s)
        moved = [replace(d, start_ms=d.start_ms + ms, end_ms=d.end_ms + ms) for d in found]
        parts.append([d for d in moved if d.end_ms > low and (d.start_ms < high or d.end_ms <= high)])
    for before, after in pairwise(parts):
        for place, late in enumerate(after):
            twins = [d for d in before if d.label == late.label and late.start_ms < d.end_ms]
            if twins:
                distances = [abs(d.start_ms - late.start_ms) + abs(d.end_ms - late.end_ms) for d in twins]
                twin = twins[distances.index(min(distances))]
                best = late if (late.score or 0) > (twin.score or 0) else twin
                after[place] = replace(best, start_ms=twin.start_ms, end_ms=late.end_ms)
                before.remove(twin)
    return [d for part in parts for d in part]


@given(st.lists(found_in_one, min_size=2, max_size=5), st.integers(1, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_neighbours_and_pieces_are_joined_by_the_definition(db, found, overlap):
    """Whatever was heard, near the joint or not, several times or once, also through several chunks."""
    clear(db)
    heard = [((12 * n - (overlap / 10 if n else 0), 12 * (n + 1)), one) for n, one in enumerate(found)]
    add(db, "rec", heard)
    assert on_its_clock(db) == in_order(by_definition(heard)) == in_order(join_detections(heard))
    shared = [query[0] for query in db.execute("SELECT overlap_s FROM overlap ORDER BY chunk_id")]
    assert shared == pytest.approx([overlap / 10] * (len(found) - 1))


def rock_ptarmigan(start_ms, end_ms, score=0.9):
    return Detection(start_ms, end_ms, "ROPT", score)


ROPT, LATE = rock_ptarmigan(1000, 4000), rock_ptarmigan(26_000, 28_000)
LONG = rock_ptarmigan(2000, 4000)
# recording: its chunks with what was heard, and the times on its clock
CASES = {
    "side by side": ([((0, 30), [ROPT]), ((30, 60), [ROPT])], [(1000, 4000), (31_000, 34_000)]),
    "one within another": (
        [((0, 60), [ROPT, rock_ptarmigan(50_000, 52_000)]), ((10, 20), [ROPT]), ((55, 90), [ROPT])],
        [(1000, 4000), (11_000, 14_000), (50_000, 52_000), (56_000, 59_000)],
    ),
    "two of one chunk": (
        [((0, 4), [LONG]), ((2, 6), [rock_ptarmigan(600, 1200), rock_ptarmigan(1300, 1900)])],
        [(2000, 3200), (3300, 3900)],
    ),
    "a": ([((0, 30), [rock_ptarmigan(28_000, 30_000)])], [(28_000, 30_000)]),
    "b": ([((24, 54), [rock_ptarmigan(4000, 6000, 0.8)])], [(28_000, 30_000)]),
    "no end": ([((0, 30), [LATE]), ((24, 54), [rock_ptarmigan(2000, 4000, 0.8)])], [(26_000, 28_000)]),
    "next to a failure": ([((0, 30), [rock_ptarmigan(26_000, 29_500)])], [(26_000, 29_500)]),
}


def test_only_chunks_of_one_recording_that_are_done_and_overlap_are_neighbours(db):
    clear(db)
    for recording, (heard, _) in CASES.items():
        add(db, recording, heard, end_known=recording != "no end")
    add(db, "next to a failure", [((20, 50), [])], status="failed")
    names = "(task_id, recording_id, source_path, study_area, location, recorded_at)"
    db.execute(f"INSERT INTO recording {names} VALUES (1, 'a', 'x', 'Gameti', 'G1', '2022-05-01T06:00:00')")
    for recording, (_, times) in CASES.items():
        assert [(d.start_ms, d.end_ms) for d in on_its_clock(db, recording)] == times, recording
    place = "SELECT study_area, location, recorded_at FROM recording_detection WHERE recording_id = 'a'"
    assert db.execute(place).fetchall() == [("Gameti", "G1", "2022-05-01T06:00:00")], "by the task that heard it"
