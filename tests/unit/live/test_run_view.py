"""Run folders, and what a look at them shows: the page of a scene is the monitor's text and the figures.

Then /metrics of a run that goes on: the same names, labels and values as in the file of a report.
"""

import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from rooms.devices import NoReader
from rooms.live import (
    DEVICES,
    LiveSource,
    UiState,
    add_up,
    as_plain_text,
    device_document,
    draw,
    open_machine_view,
    open_run,
    open_run_view,
)
from rooms.model import AlertLimits, Reading, StandIn, Submitted
from rooms.report import METRICS, TEXTFILE, job_samples, prometheus_text, state_of, summarize_database
from rooms.root import BadcjobsError, LocalFolder, NotHere, SystemClock
from rooms.store import (
    MergeOrder,
    Record,
    TaskFacts,
    emulation_lock,
    file_in,
    merge,
    read_job,
    write_intent,
    write_record,
)
from rooms.telemetry import LatestBook
from support.cases import read_data
from support.databases import change
from support.facts import calls, moments
from support.filesystems import powerless_folder
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile, merge_run

NOW_MS = START_MS + 10_000
STATES = {"d": "done", "f": "failed", "p": "pending", "s": "skipped"}


def parse_states(text):
    """Return the states of chunks: ``a:d b*3:p`` is a, which is done, and b0 to b2, which are pending."""
    found = {}
    for name, letter in (word.split(":") for word in text.split()):
        stem, _, many = name.partition("*")
        names = [f"{stem}{n}" for n in range(int(many))] if many else [name]
        found |= dict.fromkeys(names, STATES[letter])
    return found


def task_of(folder, index=0, states="a:d b:d c:f d:p", **changes):
    return TaskFile(folder, index, states=parse_states(states), **changes)


def running(folder, *args, **changes):
    return task_of(folder, *args, **{"ended_at_ms": None, "samples": 11, **changes})


def record(*indices, job="4821", chunks=None, at_s=0):
    return Record("slurm", Submitted(job, None, indices), (), chunks, START_MS + round(1000 * at_s))


def publish(make, folder, *args, **values):
    """Write a task as it was published for the last time."""
    made = make(folder, *args, **values)
    os.utime(made.write(), ((made.ended_at_ms or made.started_at_ms + 1000 * made.samples - 1000) / 1000,) * 2)


def sql(folder, statement, *values, where="*.sqlite"):
    for path in (folder / "tasks").glob(where):
        change(path, statement, *values)
        os.utime(path, (NOW_MS / 1000,) * 2)


def begin_chunk(folder):
    sql(folder, "UPDATE attempt SET ended_at_ms = NULL, outcome = NULL WHERE chunk_id = 'c'")
    for kind, ended in (("thermal", None), ("memory", NOW_MS)):
        alert = "INSERT INTO alert SELECT task_id, device_id, ?, 'warning', ?, ?, 90, 83, 'too much' FROM device"
        sql(folder, f"{alert} WHERE device_index = 1", kind, START_MS, ended)


def idle(folder):
    now = "json_set(last_reading, '$.utilization_percent', 0, '$.power_w', 60.0)"
    sql(folder, f"UPDATE device_work SET last_reading = {now}")


def tell_ends(folder):
    for index, announced in enumerate(
        ({"state": "FAILED"}, {"state": "CANCELLED by 1000"}, {"state": "COMPLETED"}, [])
    ):
        (folder / "tasks" / f"4821_{index}.r0.gpu1.slurm.json").write_text(json.dumps(announced))


def damage(folder):
    for index, content in enumerate((b"SQLite format 3\0" + bytes(4000), b""), 1):
        (folder / "tasks" / f"4821_{index}.r0.gpu1.sqlite").write_bytes(content)
    (folder / "tasks" / ".4821_3.r0.gpu1.sqlite.tmp").write_bytes(b"half a copy")
    (folder / "run.toml").write_text("[runs]\n")


def merged(folder):
    merge(MergeOrder([folder], folder / "job.sqlite"), HandClock(NOW_MS))
    os.utime(folder / "job.sqlite", (NOW_MS / 1000,) * 2)


def merge_and_lose_one(folder):
    merged(folder)
    next((folder / "tasks").glob("*_0.*")).unlink()


def frozen(folder, count=0, first=0, step=1, source="/data/m.csv"):
    array = f"[array]\nfirst = {first}\nstep = {step}\ncount = {count}\n" if count else ""
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "run.toml").write_text(f'[run]\nsource = ["{source}"]\nengine = "demo"\n{array}')


ACTIONS = {
    **{one.__name__: one for one in (sql, begin_chunk, idle, tell_ends, damage, merged, merge_and_lose_one, frozen)},
    "task": partial(publish, task_of), "run": partial(publish, running),
    "submitted": lambda out, *indices, **more: write_record(out, record(*indices, **more)),
    "cut_short": lambda out: write_intent(out, out / "job.sh", record(0, job="", chunks=2)),
}  # fmt: skip


def play(line, folder):
    """Make a run folder, as a line in data/run_scenes.txt says, and return what a look shows."""
    after_s, target, asked = 10.0, "", set()
    folder.mkdir(exist_ok=True)
    for name, args, values in calls(line):
        if name in ACTIONS:
            ACTIONS[name](folder, *args, **moments(values))
        elif name == "after":
            after_s = args[0]
        elif name == "target":
            target = args[0]
        else:
            asked.add(name)
    clock = HandClock(START_MS + round(1000 * after_s))
    frame = open_run_view(folder / target, clock).look()
    said = page_of(frame, folder, devices="devices" in asked)
    if "gpu_time" in asked:
        left = {name: value for name, value in served(folder, clock).items() if "left_gpu" in name}
        said += f"\n{left}"
    if asked & {"ends", "believed"}:
        merge(MergeOrder([folder], folder / "job.sqlite"), HandClock(NOW_MS))
    if "ends" in asked:
        end_at_ms = summarize_database(folder / "job.sqlite", now_ms=NOW_MS).outlook.end_at_ms or 0
        said += f"\nthe report expects the end {(end_at_ms - NOW_MS) / 1000:g} s later"
    if "believed" in asked:
        reported = [state_of(one, NOW_MS) for one in read_job(folder / "job.sqlite").tasks]
        assert sorted(reported) == sorted(one.state for one in frame.tasks), "monitor and report believe the same"
    return said


SCENES = dict(line.split(": ", 1) for line in read_data("run_scenes.txt").splitlines() if line[:2] != "==")


def test_what_a_look_at_a_run_shows(tmp_path, pages):
    usual = {name: line for name, line in SCENES.items() if not name.startswith("emulated-")}
    pages({f"{name}.txt": play(line, tmp_path / name) for name, line in usual.items()})


def text_of(page):
    return "\n".join(line.plain.rstrip() for line in page.lines).rstrip()


def page_of(frame, folder, *, devices=False):
    """Return the monitor's text, the totals that say something, and a line for each task."""
    go_on = tuple(line.replace(str(folder), "/runs/july") for line in frame.total.go_on)
    title, *remarks = (text.replace(str(folder), "runs/july") for text in (frame.title, *frame.remarks))
    shown = replace(frame, title=title, remarks=tuple(remarks), total=replace(frame.total, go_on=go_on))
    text = [text_of(draw(shown, UiState(page=page), width=110)) for page in ("tasks", DEVICES)[: 1 + devices]]
    document = shown.to_dict()
    total = {key: value for key, value in document["total"].items() if value not in (None, 0, False, (), [])}
    text.append("\n".join(f"{key}: {in_seconds(key, value)}" for key, value in total.items()))
    keys = ("label", "state", "done", "failed", "before", "pending", "rate", "ends_at_ms", "working_on")
    known = [{key: one.get(key) for key in keys if one.get(key)} for one in document["tasks"]]
    lines = (json.dumps({k: in_seconds(k, value) for k, value in one.items()}) for one in (*known, *document["alerts"]))
    return "\n\n".join([*text, "\n".join(lines)])


def in_seconds(key, value):
    """Return a time as seconds after the start of the first task."""
    return (value - START_MS) / 1000 if key.endswith("_at_ms") and value else value


def test_an_emulated_array_waits_while_its_emulation_lives_and_is_unbegun_when_that_has_ended(tmp_path, pages):
    said, since = {}, record(0, 1, 2, 3, chunks=8, at_s=60)
    for full_name, line in SCENES.items():
        name = full_name.removeprefix("emulated-")
        if name == full_name:
            continue
        folder = tmp_path / name
        folder.mkdir()
        with emulation_lock(folder, ("badcjobs", "submit", "m.csv")):
            (folder / "logs" / "1794.json").write_text('{"tasks": []}')
            said[f"{name}-lives"] = play(line, folder)
        said[f"{name}-over"] = play(line, folder)
        write_record(folder, since)
        said[f"{name}-submitted-since"] = play(line, folder)
        file_in(folder).unlink()
        write_intent(folder, folder / "job.sh", since)
        said[f"{name}-perhaps-submitted"] = play(line, folder)
    kept = ("states:", "standstill:", "go_on:")  # the other lines are those of the scenes above
    lines = []
    for name, text in said.items():
        lines += [f"# {name}", *(line for line in text.splitlines() if line.startswith(kept)), ""]
    pages({"stories.txt": "\n".join(lines)})


def test_a_file_is_read_again_when_it_was_replaced_and_slurm_is_believed_until_it_tells_its_end(tmp_path):
    task = running(tmp_path)
    path = task.write()
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
    for made in (running(tmp_path / "new", states="a:d b:d c:d d:d"),
                 TaskFile(tmp_path / "new", index=1, states={"x": "done"})):  # fmt: skip
        made.write().replace(tmp_path / "tasks" / made.path.name)
    assert [task.done for task in view.look().tasks] == [4, 0], "one that has ended is not looked at for a minute"
    clock.sleep(59)
    assert view.look().tasks[1].done == 0
    clock.sleep(1)
    assert view.look().tasks[1].done == 1
    over.unlink()
    alive = view.look()
    assert ([one.array_index for one in alive.tasks], alive.total.devices) == ([0], 1)
    path.with_suffix(".slurm.json").write_text('{"state": "NODE_FAIL"}')
    killed = view.look()
    assert (killed.total.states, killed.total.devices, killed.devices[0].alive) == ({"killed": 1}, 0, False)
    replace(task, ended_at_ms=NOW_MS, verdict="stopped").write()
    clock.sleep(60)
    assert view.look().total.states == {"stopped": 1}
    shutil.rmtree(tmp_path / "tasks")
    assert view.look().remarks == ("no task has published anything yet",)


def test_what_there_was_no_time_for_comes_with_the_next_look_and_a_pipe_does_not_hang_it(tmp_path):
    for index in range(3):
        tasks = running(tmp_path, index=index).write().parent
    os.mkfifo(tasks / "4821_7.r0.gpu1.sqlite")
    (tasks / "4821_8.r0.gpu1.sqlite").symlink_to("4821_7.r0.gpu1.sqlite")
    frozen(tmp_path, 4)
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    looks = [view.look(patience_s=0.0) for _ in range(3)]
    assert [(len(one.tasks), one.unread, one.remarks) for one in looks] == [(1, 2, ()), (2, 1, ()), (4, 0, ())]
    assert "\nreading 1 of 3 task databases\n" in as_plain_text(looks[0])


def test_a_task_of_this_machine_shows_the_latest_readings_of_its_recorder(tmp_path):
    """They are found by the live folder that its database names; one not read now is seconds old."""
    publish(running, tmp_path)
    (device,) = open_run_view(tmp_path, HandClock(NOW_MS + 4000)).look().devices
    for name, fresh in (("badcjobs-4821_0.r0.gpu1-x1", 77), ("badcjobs-4821_1.r0.gpu1-x1", None), ("other", None)):
        folder = tmp_path / "local" / name
        folder.mkdir(parents=True)
        reader = NoReader("there is no GPU")
        book = LatestBook(LocalFolder(folder), reader)
        book.write(NOW_MS - 1000, [(device.device_id, Reading(5, decoder_percent=9))], {})
        book.write(NOW_MS + 1000, [(device.device_id, Reading(10, fan_percent=40))], {})
        book.write(NOW_MS + 3000, [(device.device_id, Reading(77))], {})
        assert not reader.watched
        sql(tmp_path, "INSERT OR REPLACE INTO meta VALUES ('live_folder', ?)", str(folder))
        (now,) = open_run_view(tmp_path, HandClock(NOW_MS + 4000)).look().devices
        shown = [getattr(now.reading, f"{name}_percent") for name in ("utilization", "fan", "decoder")]
        assert [*shown, now.read_at_ms] == [77, 40, None, NOW_MS + 3000] if fresh else now == device, name
        assert (folder / "watched").exists() == bool(fresh)
        if fresh:
            os.utime(folder / "watched", (NOW_MS / 1000, NOW_MS / 1000))
            for after_ms, watched in ((14_000, True), (16_000, False)):
                book.write(NOW_MS + after_ms, [], {})
                assert reader.watched == watched
    book.write(NOW_MS + 9000, [], {device.device_id: "GPU is lost"})
    assert json.loads((folder / "latest.json").read_text())["devices"] == {}


def test_the_end_is_not_sooner_than_the_longest_chunk_and_tasks_to_come_start_up_first():
    times = {"started_at_ms": 0, "last_sign_ms": 100_000, "startup_s": 20.0, "longest_s": 30.0}
    task = TaskFacts("4821_0.r0.gpu1", "4821", 0, done=100, pending=1, **times)
    assert add_up([task], [], [task], source_chunks=101).ends_at_ms == 130_000
    assert add_up([task], [], [task], source_chunks=200).ends_at_ms == 220_000


def test_what_is_gone_closed_or_no_run_is_an_error_and_shown_again_when_it_is_back(pages):
    said = []

    def refused(look):
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


def alerts_of(machine):
    source = LiveSource(machine)
    text = source.prometheus(source.look())
    found = re.findall(r'badcjobs_alerts_(\w+){kind="(\w+)",severity="critical"} (\d)', text)
    return {f"{kind} {what}": int(many) for what, kind, many in found}


def test_a_machine_shows_every_device_its_course_and_what_is_lost(tmp_path, pages):
    script, clock, said = tmp_path / "script.toml", HandClock(), {}
    one = "[[device]]\nindex = 0\nload = [[0, 50]]\n"
    script.write_text(f"{one}[[device]]\nindex = 1\nload = [[0, 90]]\nlost_at_s = 59.0\nback_at_s = 200.0\n")
    usual = {"hostname": "node1", "limits": AlertLimits()}
    view = open_machine_view({"CUDA_VISIBLE_DEVICES": "1"}, clock, StandIn(script=str(script)), **usual)
    with closing(view):
        for second in (0, 30, 60, 120):
            clock.sleep(START_MS / 1000 + second - clock.monotonic_s())
            frame = view.look()
            said[f"after-{second}.txt"] = text_of(draw(frame, UiState.at_start(of_run=False), width=120))
        said["document.json"] = json.dumps(frame.to_dict(), indent=1)
        assert alerts_of(view) == {"lost total": 1, "lost open": 1}
        for _ in range(300):
            clock.sleep(1)
            trail = (device := view.look().devices[0]).trail
        assert alerts_of(view) == {"lost total": 1, "lost open": 0}, "it is back"
    assert device_document(device)["trail"]["power_w"] is trail.power_w, "a copy for each of 40,000 devices is large"
    assert (len(trail.power_w), trail.step_ms, trail.from_ms) == (240, 1000, clock.now_ms() - 239_000)
    pages(said)
    with pytest.raises(NotHere, match="no GPU"):
        open_machine_view({"PATH": str(tmp_path)}, HandClock(), StandIn(), **usual)


NOW = SystemClock()
OF_A_READING = {m.name for m in METRICS if m.of in ("reading", "host")}


def series(text):
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def names(found):
    return {name.partition("{")[0] for name in found}


def served(folder, clock=NOW):
    source = open_run(folder, clock)
    return series(source.prometheus(source.look()).replace(str(folder), folder.name))


def reported(folder, clock=NOW):
    merge_run(folder)
    summary = summarize_database(folder / "job.sqlite", now_ms=clock.now_ms())
    return series(prometheus_text(job_samples(summary, folder.name)))


@pytest.fixture
def run(tmp_path):
    """Write a run of which one task has failed and was followed by another, one was stopped and one goes on."""
    folder = tmp_path / "july"
    manifest = tmp_path / "manifest.csv"
    rows = "".join(f"rec,{name},{name}.wav,0,30000\n" for name in "abcdefgh")
    manifest.write_text(f"recording_id,chunk_id,source_path,start_ms,end_ms\n{rows}")
    TaskFile(folder, index=0, states={"a": "done", "b": "failed"}, verdict="failed", gaps=[(1000, 3000, "x")]).write()
    TaskFile(folder, index=1, states={"c": "done", "d": "pending"}, verdict="stopped", devices=2).write()
    now_ms = NOW.now_ms()
    states = {"e": "done", "f": "done", "g": "pending", "h": "pending"}
    goes_on = TaskFile(folder, index=2, states=states, ended_at_ms=None, samples=30, started_at_ms=now_ms - 30_000,
                       chunk_ended_at_ms=now_ms - 2_000).write()  # fmt: skip
    alert = "INSERT INTO alert SELECT task_id, device_id, 'thermal', 'warning', ?, ?, 90, 83, 'hot' FROM device"
    for ended_at_ms in (None, now_ms):
        change(goes_on, alert, now_ms - 20_000, ended_at_ms)
    frozen(folder, 3, source=manifest)
    return folder


def test_metrics_are_told_where_the_table_says_and_the_same_live_as_in_a_report(run, pages):
    elsewhere = OF_A_READING | {metric.name for metric in METRICS if metric.where == TEXTFILE}
    for hours_later, alerts in ((0, 1), (1, 0)):  # the task goes on, or went silent
        clock = HandClock(NOW.now_ms() + hours_later * 3_600_000)
        live, file = served(run, clock), reported(run, clock)
        known = {name: value for name, value in file.items() if name.partition("{")[0] not in elsewhere}
        assert len(known) > 60 and {name: live.get(name) for name in known} == pytest.approx(known)
        state, end = "silent" if hours_later else "running", "badcjobs_predicted_end_timestamp_seconds"
        assert live[f'badcjobs_tasks{{run="july",verdict="{state}"}}'] == 1
        assert live['badcjobs_alerts_open{run="july",kind="thermal",severity="warning"}'] == alerts
        assert [end in names(one) for one in (live, file)] == [not hours_later] * 2
        assert any("host" in name for name in names(live)) == (not hours_later)
        found = [alert.kind for alert in open_run_view(run, clock).look().alerts]
        assert found == (["chunks_failed", "thermal"] if alerts else ["chunks_failed", "tasks_silent"])
    live, file = names(served(run)), names(reported(run))
    said = []
    for metric in METRICS:
        where = [name for name, announced in (("live", live), ("in a report", file)) if metric.name in announced]
        said.append(f"{metric.name} ({metric.where or 'both'}): {', '.join(where) or 'never said by these devices'}")
    pages({"metrics.txt": "\n".join(said)})


def test_no_counter_of_a_report_falls_when_a_later_task_has_done_the_same_chunk(tmp_path):
    TaskFile(tmp_path, job_id="1", states={"a": "done"}).write()
    before = reported(tmp_path)
    times = {"started_at_ms": START_MS + 60_000, "ended_at_ms": START_MS + 70_000}
    TaskFile(tmp_path, job_id="2", states={"a": "done"}, **times).write()
    after = reported(tmp_path)
    assert {name for name, value in before.items() if "_total{" in name and after[name] < value} == set()
    assert sum(before[name] - after[name] for name in before if "task_audio" in name) > 0, "its result was replaced"


def test_rows_that_are_in_no_task_yet_are_of_the_source_and_no_chunks_in_both(run):
    wanted = 'source_rows{run="july"}', 'chunks{run="july",state="pending"}', 'audio_left_seconds{run="july"}'
    with (run.parent / "manifest.csv").open("a") as manifest:
        manifest.writelines(f"rec,{name},{name}.wav,0,30000\n" for name in "ijkl")
    write_record(run, record(0, 1, 2, 3, chunks=12))
    live, file = ([announced[f"badcjobs_{one}"] for one in wanted] for announced in (served(run), reported(run)))
    assert live[:2] == file[:2] == [12, 3]
    assert live[2] == pytest.approx(file[2])
