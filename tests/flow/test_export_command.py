"""``badcjobs export`` as a shell calls it: results on stdout, the conversation on stderr, the promised exit codes."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from support.audio import make_wav
from support.badcjobs_program import ON_CPU, array_task, assert_refused, rows
from support.cases import read_data
from support.fake_hawkears import make_fake_hawkears1
from support.pages import tree
from support.stand_ins import install
from support.task_files import TaskFile, add_host_samples, make_job
from support.terminal import Terminal
from support.waiting import wait_for

EXPORT = (sys.executable, "-m", "badcjobs", "export")
HOSTS = ("--table", "host_sample", "--format")


def long_task(folder, count):
    task = TaskFile(folder, samples=0, states={"a": "done"}, labels=("Grüne-漢",)).write()
    return add_host_samples(task, count)


def test_what_is_written_is_named_on_stdout_and_what_cannot_be_is_refused(site):
    make_job(site.out)
    out, export = site.folder / "for-badc", ("export", site.out, "-o", site.folder / "x", "--format")
    done = site.badcjobs("export", site.out, "--format", "badc", "-o", out)
    files = {"/chunks": "4 rows (chunk)", "/telemetry.jsonl": "8 rows (attempt)",
             "/telemetry.jsonl.summary": "4 rows (chunk)"}  # fmt: skip
    assert f"4 chunk files will be written to {out}, one for each chunk that is done or failed\n" in done.stderr
    *named, following = done.stdout.splitlines()
    assert named == [f"{out}{name}: {what}" for name, what in files.items()]
    assert following == f"next: badc infer aggregate {out}"
    (site.folder / "pyarrow.py").write_text("raise ImportError('no pyarrow here')")
    without = {"PYTHONPATH": os.pathsep.join([str(site.folder), site.environ()["PYTHONPATH"]])}
    assert_refused(site.badcjobs(*export, "csv", "--table", "nope"), 2, "detection")
    assert_refused(site.badcjobs(*export, "parquet", env=without), 3, "try: pip install 'badcjobs[parquet]'")
    assert not (site.folder / "x").exists()


def test_stdout_is_utf_8_in_any_locale_and_no_room_for_it_is_answered_with_what_helps(site):
    task = long_task(site.out, 3000)
    env = site.environ({"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "TASK": str(task)})
    said = subprocess.check_output([*EXPORT, str(task), "--table", "detection", "-o", "-"], env=env)
    assert [row["label"] for row in csv.DictReader(io.StringIO(said.decode("utf-8")))] == ["Grüne-漢"]
    line = """write() { "$0" -m badcjobs export "$TASK" --format csv --table host_sample -o "$1"; echo $? >&2; }
              write - > /dev/full; ulimit -S -f 4; write rows.csv"""
    argv = ["bash", "-c", line, sys.executable]
    reported = subprocess.run(argv, env=env, cwd=site.folder, capture_output=True, text=True)
    tries = [said.removeprefix("  try: ") for said in reported.stderr.splitlines() if said.startswith("  try: ")]
    assert tries == ["df -h .", "ulimit -f unlimited   (then the same command again)"], reported.stderr
    assert reported.stderr.count("\n2\n") == 2 and not (site.folder / "rows.csv").exists()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_reader_who_leaves_early_is_no_failure(site, form):
    command = [*EXPORT, str(long_task(site.out, 20_000)), *HOSTS, form, "-o", "-"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=site.environ(), **pipes) as process:  # type: ignore[call-overload]
        process.stdout.read(2)
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_somebody_who_watches_sees_the_rows_count_up_and_a_kill_leaves_the_old_file(site):
    pipe, folder, task = site.folder / "pipe", site.folder / "tables", long_task(site.out, 60_000)
    os.mkfifo(pipe)
    folder.mkdir()
    (folder / "h.json").write_text("old")
    command, counts = [*EXPORT, str(task), *HOSTS, "csv", "-o", str(pipe)], b"rows of host_sample, "
    with closing(Terminal(command, site.environ(), site.folder)) as terminal, pipe.open("rb") as slow_reader:
        terminal.wait_for(lambda _: slow_reader.read(20_000) and counts in terminal.raw, "the rows count up")
        slow_reader.read()
        assert terminal.end() == 0
    order = ("export", task, *HOSTS, "json", "-o", folder / "h.json")
    program = site.start(*order)
    wait_for(lambda: [p for p in folder.iterdir() if p.name != "h.json" and p.stat().st_size], "it has begun")
    program.send(signal.SIGKILL)
    assert (program.wait().exit_code, (folder / "h.json").read_text()) == (-signal.SIGKILL, "old")
    assert site.badcjobs(*order).exit_code == 0
    assert len(json.loads((folder / "h.json").read_text())) == 60_000


def test_an_export_of_a_run_that_is_not_complete_says_so_with_counts(site):
    """One of two array tasks has run: the job database lists only its chunks."""
    site.run_tasks(site.manifest(6), *ON_CPU, envs=[array_task(0, [0, 1])])
    site.merged()
    said = "badcjobs: the run is not complete: 3 of 6 chunks done, 3 left; only chunks that are done have detect"
    forms = [("-o", "-"), ("--table", "chunk", "-o", "-"), ("--format", "badc", "-o", site.folder / "badc")]
    for done in site.badcjobs_each([("export", site.out, *form) for form in forms]):
        assert (done.exit_code, done.stderr.count(said)) == (0, 1), done.stderr
    site.run_tasks(site.manifest(6), *ON_CPU, envs=[array_task(1, [0, 1])])
    site.merged()
    assert "complete" not in site.badcjobs("export", site.out, "-o", "-").stderr
    manifest = site.manifest(6)
    manifest.rename(site.folder / "moved.csv")
    assert "not known whether the run is complete: " in site.badcjobs("export", site.out, "-o", "-").stderr


CALLS_S = [(0.5, 1.0), (3.2, 3.8), (6.0, 10.5)]  # across a joint; across two of them
PATTERNS = ["{study_area}/**/{location}_0+1_{date}?{time}.wav", "{study_area}/ARU_data/SM/{location}/*/Data/*"]
FORT_SMITH = "Fort Smith/ARU_data/SM/FS-01/A/Data/S4A10293_20220501_060000"
SAMBAA = "Sambaa K'e 2018/b2/x/SK-7_0+1_20180612$053000"
UNDATED = "Edehzhie/E-07/E-07_20221399_060000"
LOOSE = "loose_20220501_060000"
CUT = ("--chunk-length", 4, "--overlap", 1)


def test_recordings_in_the_folders_of_a_lab_become_a_table_per_study_area(site, pages):
    """Two tasks of an array cut them on the fly with an overlap; each call is heard once, on the recording's clock."""
    data, folder, lab = site.folder / "data", site.folder / "july", site.folder / "lab.toml"
    for name in (FORT_SMITH, SAMBAA, UNDATED, LOOSE):
        make_wav(data / f"{name}.wav", 12.0, 1000, loud=CALLS_S, tone_hz=100)
    make_wav(data / ".trash" / "x.wav", 1.0, 1000)
    (data / "notes.TXT").write_text("not audio")
    lab.write_text(f"[recordings]\npatterns = {PATTERNS}\n")
    tasks = [array_task(index, [0, 1]) for index in (0, 1)]
    site.run_tasks(data, *ON_CPU, *CUT, "--config", lab, envs=tasks)
    columns = "recording_id, study_area, location, recorded_at, duration_s, sample_rate_hz, channels"
    recordings = rows(site.merged(), f"SELECT {columns} FROM recording ORDER BY 1")
    logs = "".join(path.read_text() for path in site.out.glob("tasks/*.log"))
    assert logs.count("1 hidden name is skipped (the first: .trash/)") == 2
    assert f"1 of 2 recordings has no date in the name, e.g. {UNDATED}.wav (badcjobs guide audio)" in logs
    summary = site.badcjobs("report", site.out, "--json").json
    names, left_out = summary["recording_names"], summary["left_out"]
    assert left_out == {".txt": 1} and logs.count("left out: 1 .txt") == 2, "counted once, however many tasks there are"
    assert (names["recordings"], names["undated"], names["untimed"], names["no_study_area"]) == (4, 1, 0, 2)
    done = site.badcjobs("export", site.out, "--format", "csv", "--by-study-area", "-o", folder)
    assert done.exit_code == 0, done.stderr
    assert f"2 of 4 recordings have no study area in the path, e.g. {UNDATED}.wav" in done.stderr
    assert site.badcjobs("export", site.out, "--format", "audacity", "-o", folder / "labels").exit_code == 0
    pages({"recordings.txt": "\n".join(map(str, recordings)), **tree(folder)})
    again = site.run(data, *ON_CPU, *CUT, env=tasks[1])
    both = ('[recordings] patterns was ["{study_area}/**/{location}_0+1_{date}?{time}.wav", ', "now []")
    assert_refused(again, 2, "[recordings] patterns: different from", *both, "use the same settings (--config=")


ONE_WORKER = ("--cpu-workers", 1, "--no-emit-gpu-telemetry", "--retries", 1)
KEEP_RAW = ("--config", "run.keep_raw=true")
PROGRAM = """
    case $BADCJOBS_CHUNK_ID in
    c001) printf 'broken' > "$2" ;;
    c002) exit 3 ;;
    *) printf 'start_time,end_time,label,score,mood\\r\\n0.5,1.25,AMRO,0.9,good\\r\\n' > "$2" ;;
    esac"""


def test_an_engines_own_files_are_kept_when_asked_and_what_cannot_be_kept_does_not_stop_the_work(site):
    engine = ("--command", f"{site.script('engine.sh', PROGRAM)} {{input}} {{output}}", *ONE_WORKER)
    site.out.mkdir()
    (site.out / "raw").write_text("a file")
    blocked = site.run(site.manifest(1), *engine, *KEEP_RAW)
    assert blocked.exit_code == 0, blocked.stderr
    assert blocked.stderr.count("cannot be written (Not a directory); the work continues") == 1
    (site.out / "raw").unlink()
    assert site.run(site.manifest(4), *engine, *KEEP_RAW, "--no-resume").exit_code == 1
    table = "start_time,end_time,label,score,mood\n0.5,1.25,AMRO,0.9,good\n"
    assert tree(site.out / "raw") == {"rec0/c000.csv": table, "rec0/c001.csv": "broken", "rec1/c003.csv": table}
    assert (site.out / "raw" / "rec0" / "c000.csv").read_bytes().count(b"\r\n") == 2, "as they are"
    assert "keep_raw" not in (site.out / "run.toml").read_text()
    site.out = site.folder / "of demo"
    without = site.run(site.manifest(1), *ON_CPU, *KEEP_RAW)
    assert (without.exit_code, (site.out / "raw").exists()) == (0, False)
    assert "run.keep_raw: the engine demo writes no output files" in without.stderr
    site.out, root = site.folder / "of HawkEars 1", make_fake_hawkears1(site.folder / "HawkEars")
    hawkears = ("--engine", "hawkears1", "--hawkears-root", root, "--hawkears-python", sys.executable, "--no-resume")
    for asked in ("false", "true"):
        done = site.run(site.manifest(2), *hawkears, *ONE_WORKER, "--config", f"run.keep_raw={asked}")
        assert (done.exit_code, (site.out / "raw").exists()) == (0, asked == "true"), done.stderr
    kept = tree(site.out / "raw")
    assert sorted(kept) == ["rec0/c000.csv", "rec0/c001.csv"]
    assert all(text.startswith("filename,start_time,end_time,class_name,class_code,score") for text in kept.values())


def test_the_birdnet_example_of_the_guide_works_as_it_is_pasted(site):
    for name in ("FS-01_20220501_060000", "quiet"):
        make_wav(site.folder / "recordings" / "Fort Smith" / "FS-01" / f"{name}.wav", 4.0, 1000)
    install(site.folder / "bin" / "birdnet-analyze", read_data("birdnet-analyze.sh"))
    install(site.folder / "bin" / "badcjobs", f'#!/bin/sh\nexec {sys.executable} -m badcjobs "$@"\n')
    page = site.badcjobs("guide", "own-detector").stdout
    lines = page[page.index("    badcjobs run") :].partition("\n\n")[0]
    env = site.environ({"PATH": f"{site.folder / 'bin'}:{os.environ['PATH']}"})
    subprocess.run(["bash", "-ec", lines], env=env, cwd=site.folder, check=True, capture_output=True)
    [row] = csv.DictReader((site.folder / "birdnet.csv").open(newline=""))
    wanted = {"recording_date_time": "2022-05-01T06:00:00", "start_s": "0.0", "end_s": "3.0", "score": "0.8141",
              "species_code": "Bonasa umbellus", "species_name": "Ruffed Grouse"}  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
