"""The behaviour pack: what badcjobs says and writes for fixed inputs, compared with what it said and wrote before.

Jobs are merged and reported in this process, because that is quick; the rest goes through the command line. What is
wanted is recorded anew, in the commit that makes it: ``pytest tests/flow/test_behaviour_pack.py --update-pages``.
"""

import os
from contextlib import closing

import pytest
from rooms.report import report_job
from rooms.store import MergeOrder, merge
from support.audio import make_wav
from support.badcjobs_program import QUICK, array_task, rows
from support.behaviour import START_MS, FixedSite, lay_out, pretty, some_rows, tables
from support.hand_clock import HandClock

JOBS = ("array", "cpu-bound", "done-again", "few-workers", "healthy", "memory", "no-telemetry", "on-cpu", "power",
        "requeued", "silent", "slice", "start-up", "tail", "time-limit", "troubled", "waiting", "live")  # fmt: skip


@pytest.fixture
def site():
    with closing(FixedSite()) as site:
        yield site


def clock_of(job):
    """Return a clock at which a job is looked at: a day after the start of its first task, or while it runs."""
    return HandClock(START_MS + 1000 * (110 if job == "live" else 86400))


def merged(job, folder, only="*"):
    lay_out(job, folder, only)
    merge(MergeOrder([folder], folder / "job.sqlite"), clock_of(job))
    return folder / "job.sqlite"


def test_jobs(site, pages):
    """What is found in each recorded job, and its numbers; of some in other forms, too."""
    said = {}
    for job in JOBS:
        with report_job(merged(job, site.folder / job), clock_of(job)) as reported:
            said[f"{job}.txt"] = reported.to_text()
            if job == "live":
                said |= {"live.json": pretty(reported.to_dict()), "live.prom": "".join(reported.to_prometheus()),
                         "live.md": reported.to_markdown()}  # fmt: skip
    with report_job(site.folder / "healthy" / "job.sqlite", HandClock(2 * START_MS)) as later:
        assert later.to_text() == said["healthy.txt"], "of a job that has ended the same is said at any time"
    with report_job(site.folder / "array" / "job.sqlite", clock_of("array"), site.folder / "requeued") as two:
        said |= {"compare.txt": two.to_text(), "compare.json": pretty(two.to_dict())}
    said["export.txt"] = site.say("export", "array", "-o", "-", "--species", "OVEN,REVI", "--min-score", 0.98)
    said["array-tables.txt"] = tables(site.folder / "array" / "job.sqlite")
    pages({name: site.plain(text) for name, text in said.items()})


def test_a_job_that_grows_from_merge_to_merge_is_the_same_as_one_that_is_merged_at_once(site, pages):
    said = {}
    for which in ("4821_0*", "4821_[12].r0*", "*", "*"):
        merged("small", site.out, which)
    again = tables(site.out / "job.sqlite")
    assert tables(merged("small", site.folder / "all")).replace("all/", "run/") == again
    said["remove.txt"] = site.say("merge", site.out, "--remove-merged")
    said["left.txt"] = "\n".join(sorted(path.name for path in (site.out / "tasks").iterdir()))
    assert tables(site.out / "job.sqlite") == again
    lay_out("small", site.folder / "damaged")
    damage(site.folder / "damaged" / "tasks")
    said["damaged-said.txt"] = site.say("merge", "damaged")
    said["damaged.txt"] = site.plain(tables(site.folder / "damaged" / "job.sqlite"))
    pages({**said, "tables.txt": site.plain(again)})


def damage(folder):
    """Cut one file short, empty one, change a value in one, and put a text beside them."""
    names = ("0.r0.gpu1", "2.r0.gpu3", "2.r1.gpu4", "9")
    cut, empty, changed, text = paths = [folder / f"4821_{name}.sqlite" for name in names]
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    empty.write_bytes(b"")
    changed.write_bytes(changed.read_bytes().replace(b"LOUD", b"LOUE", 1))
    text.write_text("slurmstepd: error: *** JOB 4821 CANCELLED ***\n" * 100)
    for path in paths:
        os.utime(path, (START_MS / 1000,) * 2)


# What a task database says that is the same in every run of the same work; of devices: flow/test_task_database.py.
SAME = {
    "task": "name, array_index, restart, node, shard_index, shard_count, engine, telemetry, devices, workers, "
    "exit_code, verdict, ended_at_ms >= started_at_ms",
    "chunk": "recording_id, chunk_id, source_path, start_ms, end_ms, status, attempts, audio_s, detections, "
    "error_class, is_cut, audio_bytes",
    "attempt": "recording_id, chunk_id, try_number, outcome, error_class, pieces",
    "detection": "recording_id, chunk_id, start_ms, end_ms, label, label_name, round(score, 4)",
    "recording": "recording_id, study_area, location, recorded_at, duration_s, sample_rate_hz, channels",
    "worker": "engine, exit_code", "meta": "key", "usage_sample": "count(*) > 0",
}  # fmt: skip
COLUMNS = "SELECT t.name, group_concat(c.name, ', ') FROM sqlite_master t, pragma_table_info(t.name) c GROUP BY 1"


def test_two_array_tasks_and_a_restart_over_recordings_that_are_cut(site, pages):
    site.after_s = None
    for name in ("Fort Smith/FS-01_20220501_060000", "Edehzhie/E-07_20221399_060000"):
        calls = [(0.5, 1.0), (3.2, 3.8), (6.0, 10.5)]
        make_wav(site.folder / "data" / f"{name}.wav", 12.0, 1000, loud=calls, tone_hz=100)
    words = ("run", "data", "--chunk-length", 4, "--overlap", 1, "--cpu-workers", 1, "--no-emit-gpu-telemetry")
    said = {}
    for index in (0, 1, 0):
        env = {**array_task(index, [0, 1]), "SLURM_RESTART_COUNT": str(len(said))}
        done = site.badcjobs(*words, "--out", "run", "--engine", "demo", *QUICK, "--json", env=env)
        document = {key: value for key, value in done.json.items() if key != "wall_s"}
        said[f"end-{len(said)}.json"] = site.plain(f"// exit code {done.exit_code}\n{pretty(document)}")
    said["run.toml"] = site.plain((site.out / "run.toml").read_text())
    said["files.txt"] = "\n".join(sorted(str(path.relative_to(site.out)) for path in site.out.rglob("*")))
    for database in site.task_databases():
        parts = [f"## {table}\n{some_rows([what], rows(database, f'SELECT {what} FROM {table}'))}"
                 for table, what in SAME.items()]  # fmt: skip
        said[f"{database.stem}.txt"] = site.plain("\n".join(parts))
        said["columns.txt"] = some_rows(["table", "columns"], rows(database, COLUMNS))
    site.merged()
    report = site.badcjobs("report", site.out, "--json").json
    figures = ("done", "failed", "tries", "chunks", "detections", "labels", "completeness", "recording_names")
    said["report.json"] = site.plain(pretty({key: report[key] for key in figures if key in report}))
    pages(said)
