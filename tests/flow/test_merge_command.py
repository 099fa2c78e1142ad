"""``badcjobs merge`` and ``badcjobs report`` of a real array: the numbers are right, whatever lies around."""

import random
import re
import shlex
import shutil
import signal
import time

import pytest
from support.badcjobs_program import ON_CPU, array_task, assert_refused, rows
from support.databases import canonical, names_in
from support.task_files import TaskFile
from support.waiting import wait_for

NASTY = "<script>alert(1)</script>"
CHUNKS = 10


def test_a_job_is_what_its_tasks_are_and_report_says_what_merge_said(site):
    """Take an array of two tasks with two devices each; one has no energy counter, one chunk always fails."""
    manifest = site.manifest(CHUNKS)
    manifest.write_text(manifest.read_text().replace("rec2,c006", f"{NASTY},c006"))
    (site.folder / "audio" / "c006.wav").write_bytes(b"not audio")
    script = site.folder / "devices.toml"
    script.write_text('[[device]]\nindex = 1\nunsupported = ["energy_j"]\nload = [[0, 20], [0.7, 90]]\n')
    words = (manifest, "--engine", "demo", "--engine-arg=--burn-s=0.25", "--simulate", script)
    envs = [{"CUDA_VISIBLE_DEVICES": "0,1", **array_task(index, (0, 1))} for index in (0, 1)]
    programs = [site.start_run(*words, env=env) for env in envs]
    assert [program.wait().exit_code for program in programs] == [1, 0]
    reported = site.badcjobs("merge", site.out)
    summary = site.badcjobs("merge", site.out, "--json").json
    job = site.out / "job.sqlite"
    for table in ("task", "device", "sample", "host_sample", "gap", "worker", "chunk", "attempt", "detection"):
        apart = sorted(site.rows(f"SELECT * FROM {table}"), key=repr)
        assert apart and sorted(rows(job, f"SELECT * FROM {table}"), key=repr) == apart, table
    heard = sum(i % 3 for i in range(CHUNKS) if i != 6)
    wanted = {"tasks": 2, "tasks_by_verdict": {"failed": 1, "done": 1}, "verdict": "failed", "chunks": CHUNKS,
              "done": 9, "failed": 1, "left": 0, "tries": CHUNKS, "detections": heard}  # fmt: skip
    assert {key: summary[key] for key in wanted} == wanted
    sources = {(device["index"], device["energy_source"]) for device in summary["devices"]}
    assert sources == {(0, "counter"), (1, "integrated power")}
    (failed,) = summary["failed_chunks"]
    assert (failed["recording_id"], failed["chunk_id"], failed["error_class"]) == (NASTY, "c006", "not_audio")
    assert [gap["reason"] for gap in summary["gaps"] if gap["metric"]] == ["Not Supported (simulated)"]

    page = site.folder / "elsewhere.html"
    again = site.badcjobs("report", site.out, "--html", page)
    said, _, following = again.stdout.partition("\nnext: ")
    assert reported.stdout.startswith(said.rstrip()) and reported.stdout.endswith(f"\nnext: {following}")
    assert (site.out / "report.html").read_text().rpartition("<!--")[0] == page.read_text()
    files = {"files": summary["files"], "removed": None, "why_no_report": None}  # what merge alone knows
    assert {**site.badcjobs("report", job, "--json").json, **files} == summary
    text = page.read_text()
    assert NASTY not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    ours = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Bokeh's licence names addresses
    for word in ("<img", "<iframe", "src=", "url(", "@import", "http:", "https:"):
        assert word not in ours.lower(), f"the page is not alone: {word}"


def content(job):
    assert rows(job, "PRAGMA integrity_check") == [("ok",)]
    return hash(canonical(job))


def copied(start, run):
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(start, run)  # with the times of the files
    return run


def test_a_killed_merge_leaves_the_old_content_or_the_new(site, seed, request, tmp_path):
    """Killed at any moment; by hand again and again: ``pytest tests/flow/test_merge_command.py --count 100 -s``."""
    kills = max(1, request.config.getoption("--count") // 4)
    chance, start, job = random.Random(seed), tmp_path / "start", site.out / "job.sqlite"
    for n in range(16):
        if n == 12:
            assert site.badcjobs("merge", start).exit_code == 0
        TaskFile(start, index=n, states={f"c{n}": "done", "all": "done"}, samples=800).write()
    copied(start, site.out)
    started_s = time.monotonic()
    assert site.start("merge", site.out).wait().exit_code == 0
    duration_s = time.monotonic() - started_s
    old, finished = content(start / "job.sqlite"), content(job)
    seen = {old: 0, finished: 0}
    assert len(seen) == 2
    for _ in range(kills):
        program = site.start("merge", copied(start, site.out))
        time.sleep(chance.uniform(0.3, 1.05) * duration_s)  # the moment itself is what is tried here
        program.kill()
        seen[content(job)] += 1
        assert content(site.merged()) == finished
        assert names_in(site.out) == ["job.sqlite", "report.html", "tasks"]
    print(f"killed {kills} times: {seen[old]} times the old content, {seen[finished]} times the new")


def test_runs_are_mixed_only_when_asked_and_nothing_is_written_into_a_folder_that_is_no_run(site, pages):
    runs = site.folder / "runs"
    for name, engine in (("june", "demo"), ("ju ly", "other"), ("far/below/march", "demo")):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.toml").write_text(f'[run]\nengine = "{engine}"\n')
        for index in range(2):
            settings = f'{{"out": "{name}", "source": ["{name}.csv"]}}'
            of_run = {"job_id": str(len(name)), "engine": engine, "settings": settings}
            TaskFile(runs / name, index=index, states={f"c{index}": "done"}, **of_run).write()
    (runs / "notes").mkdir()
    said, june = [], ("runs/june/tasks/4_0.r0.gpu1.sqlite", "runs/june/tasks/4_1.r0.gpu1.sqlite")
    assert site.badcjobs("merge", *june[:1]).exit_code == 0
    before = (runs / "june" / "job.sqlite").read_bytes()
    for words in (
        ["."],
        ["runs"],
        ["runs/notes"],
        ["runs/june", "runs/ju ly"],
        [june[1], "runs/far/below/march/tasks"],
    ):
        refused = site.badcjobs("merge", *words)
        said += [f"$ badcjobs merge {shlex.join(words)}", refused.stderr, f"exit code {refused.exit_code}", ""]
        assert (runs / "june" / "job.sqlite").read_bytes() == before
    left = [path for path in site.folder.rglob("job.sqlite") if path.parent.name != "june"]
    assert left == [], "nothing is written"
    pages({"refused.txt": "\n".join(said).replace(str(site.folder), "FOLDER")})
    assert site.badcjobs("merge", *june).exit_code == 0
    mixed = site.badcjobs("merge", "--mix", "runs", "-o", "all.sqlite", "--json")
    assert (mixed.exit_code, mixed.json["tasks"]) == (0, 6)
    assert site.badcjobs("merge", june[1], "-o", "all.sqlite").exit_code == 0, "its run is in it"


def answer(site, command, *keys):
    """Merge or report; return some of what it says of the job and of its completeness, and the latter."""
    document = site.badcjobs(command, site.out, "--json").json
    proof = document["completeness"]
    return [{**document, **proof}[key] for key in keys], proof


def paste(site, command, exit_code=0):
    """Run a command that was printed, as a shell would."""
    program, *words = shlex.split(command)
    done = site.badcjobs(*words)
    assert (program, done.exit_code) == ("badcjobs", exit_code), done.stderr
    return done.stdout


def test_what_an_array_has_left_is_named_and_its_command_does_it(site):
    site.run_tasks(site.manifest(10), *ON_CPU, envs=[array_task(index, range(4)) for index in (0, 3)])
    reported = site.badcjobs("merge", site.out)
    assert "run: not finished – 5 of 10 chunks done, 5 left\n" in reported.stdout
    assert "\n  sbatch --array=1,2 …\n" in reported.stdout
    assert "no database from array index" in (site.out / "report.html").read_text()
    missing, proof = answer(site, "report", "missing_indices", "tasks_missing")
    assert missing == [[1, 2], [1, 2]]
    assert "5 done, 5 skipped of 10" in paste(site, proof["finish"][1])
    assert answer(site, "merge", "verdict", "complete", "tasks_missing")[0] == ["done", True, []]
    manifest = site.manifest(13)
    counts, proof = answer(site, "report", "expected", "done", "not_listed", "strangers")
    assert counts == [13, 10, 3, 0]
    paste(site, proof["finish"][-1])
    assert answer(site, "merge", "complete")[0] == [True]
    for path in (site.out / "tasks").iterdir():
        path.unlink()
    assert "13 skipped of 13" in paste(site, proof["finish"][-1]), "the job database alone knows what is done"
    site.merged()
    manifest.unlink()
    reported = site.badcjobs("report", site.out)
    assert (reported.exit_code, reported.stderr) == (0, "")
    assert reported.stdout.startswith("run: all done – ") and "\n  source      not compared:" in reported.stdout


def test_a_run_that_was_stopped_and_one_with_failed_rows_are_finished_by_their_command(site):
    gate, repaired = site.folder / "gate", site.folder / "repaired"
    wait = f"while [ $BADCJOBS_CHUNK_ID != c000 ] && [ ! -e {gate} ]; do sleep 0.02; done"
    trouble = f"[ -e {repaired} ] || case $BADCJOBS_CHUNK_ID in c001) exit 1 ;; c004) kill -9 $$ ;; esac"
    script = site.script("engine of mine.sh", f'{wait}\n{trouble}\necho start_time,end_time,label,score > "$2"')
    engine = ("--command", f"{shlex.quote(str(script))} {{input}} {{output}}", "--cpu-workers", 1, "--retries", 1)
    program = site.start_run(site.manifest(6), *engine, "--no-emit-gpu-telemetry", "--config", "run.grace_s=0")
    wait_for(lambda: site.count_now("chunk", "status = 'done'"), "the first chunk is done")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75
    words, proof = answer(site, "merge", "verdict", "expected", "done", "pending")
    assert words == ["stopped", 6, 1, 5]
    gate.touch()
    paste(site, proof["finish"][0], exit_code=1)
    words, proof = answer(site, "merge", "verdict", "done", "failed", "poison")
    assert words == ["failed", 4, 1, 1]
    repaired.touch()
    paste(site, proof["finish"][0])
    assert answer(site, "merge", "verdict", "complete", "finish")[0] == ["done", True, []]


def test_a_run_remembers_what_its_site_bills_and_a_site_that_does_not_exist_is_refused(site):
    """Merged on another machine, the run has no site file: 1 GPU, 2 cores and 4 GB are 20 units an hour."""
    rules = site.folder / "mine.toml"
    rules.write_text('name = "mine"\n[billing]\ngpu = 6\nmemory_gb = 5\ncpu = 1\nrule = "max"\n')
    granted = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_CPUS_PER_TASK": "2", "SLURM_MEM_PER_NODE": "4096"}
    words = (site.manifest(2), "--engine", "demo", "--simulate", 1, "--config", "site=mine.toml")
    refused = site.run(*words[:-1], "site=nosuch")
    assert_refused(refused, 2, "there is no site 'nosuch'", "the same command with --config site=sockeye")
    assert site.run(*words, env={**array_task(0, (0,)), **granted}).exit_code == 0
    rules.unlink()
    merged, other, wrong = site.badcjobs_each([
        ("merge", site.out, "--json"), ("report", site.out, "--json", "--config", "site=other.toml"),
        ("merge", site.out, "--config", "site=nosuch"),
    ])  # fmt: skip
    (wall_ms,) = rows(site.out / "job.sqlite", "SELECT ended_at_ms - started_at_ms FROM task")[0]
    assert merged.json["bill"]["units"] == pytest.approx(20 * wall_ms / 3_600_000, rel=0.2)
    assert_refused(other, 2, "other.toml does not exist")
    assert_refused(wrong, 2, "there is no site 'nosuch'", "the same command with --config site=sockeye")
    (site.folder / "other.toml").write_text('name = "other"\n[billing]\ngpu = 100\nmemory_gb = 1e-9\n')
    given = site.badcjobs("report", site.out, "--json", "--config", "site=other.toml")
    assert given.json["bill"]["units"] == pytest.approx(5 * merged.json["bill"]["units"]), "what is given wins"
    (site.folder / "badcjobs.toml").write_text('site = "gone.toml"\n')
    reported = site.badcjobs("merge", site.out)
    assert reported.exit_code == 0 and re.search(r"\n  bill +\S+ units per 1,000 audio-hours", reported.stdout)
    unknown = {**array_task(0, (0,)), **granted, "SLURM_MEM_PER_NODE": "abc"}
    words = (*words[:-1], "site=other.toml", "--out", "abc")
    assert site.badcjobs("run", *words, env=unknown).exit_code == 0
    reported = site.badcjobs("merge", "abc")
    assert "all done" in reported.stdout and not re.search(r"\n  bill ", reported.stdout), "no figure without a request"


def test_nothing_is_billed_outside_slurm(site):
    (site.folder / "mine.toml").write_text('name = "mine"\n[billing]\ngpu = 6\n')
    (site.folder / "badcjobs.toml").write_text('site = "mine.toml"\n')
    demo, array = ("--engine", "demo", "--simulate", 1), ("--cluster", "local", "--wait", "--tasks", 1, "--mem", "4G")
    for out, words in (("array", ("submit", *array, "--", *demo)), ("here", ("run", *demo))):
        done = site.badcjobs(words[0], site.manifest(2), "--out", out, *words[1:])
        assert done.exit_code == 0, done.stderr
        assert "gpu = 6" in (site.folder / out / "run.toml").read_text()
        assert site.badcjobs("merge", out, "--json").json["bill"] is None, out
