"""``badcjobs merge`` says whether every row of the source is done, and its commands really finish what is left."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import Any

from support.badcjobs_program import ON_CPU, Outcome, Site, array_task
from support.waiting import wait_for

TASKS = (0, 1, 2, 3)
ENGINE = 'echo start_time,end_time,label,score > "$2"'


def merged(site: Site) -> dict[str, Any]:
    done = site.badcjobs("merge", site.out, "--json")
    assert done.exit_code == 0, done.stderr
    return dict(done.json)


def paste(site: Site, command: str) -> Outcome:
    """Run a command that was printed, as a shell would."""
    program, *words = shlex.split(command)
    assert program == "badcjobs"
    return site.badcjobs(*words)


def run_array(site: Site, manifest: Path, *indices: int, job_id: int = 4821) -> None:
    site.run_tasks(manifest, *ON_CPU, envs=[array_task(index, TASKS, job_id=job_id) for index in indices])


def scripted(site: Site, text: str) -> tuple[object, ...]:
    """Return the options that run a shell script for every chunk."""
    script = site.script("engine of mine.sh", text)
    command = f"{shlex.quote(str(script))} {{input}} {{output}}"
    return "--command", command, "--cpu-workers", 1, "--no-emit-gpu-telemetry"


def test_the_array_index_that_never_ran_is_named_and_running_it_completes_the_job(site: Site) -> None:
    manifest = site.manifest(10)
    run_array(site, manifest, 0, 1, 3)
    told = site.badcjobs("merge", site.out)
    assert told.exit_code == 0, told.stderr
    assert "complete    no: 8 of 10 rows of the source done; 2 rows of array index 2 not started\n" in told.stdout
    assert "\n    sbatch --array=2 …\n" in told.stdout
    assert "not started" in (site.out / "report.html").read_text()
    run_array(site, manifest, 2, job_id=5000)
    after = merged(site)
    assert (after["verdict"], after["completeness"]["complete"], after["completeness"]["finish"]) == ("done", True, [])


def test_the_command_without_slurm_finishes_what_an_array_has_left(site: Site) -> None:
    run_array(site, site.manifest(10), 0, 3)
    before = merged(site)
    assert before["completeness"]["missing_indices"] == before["tasks_missing"] == [1, 2]
    in_slurm, here = before["completeness"]["finish"]
    assert in_slurm == "sbatch --array=1,2 …"
    done = paste(site, here)
    assert done.exit_code == 0, done.stderr
    assert "5 done, 5 skipped of 10" in done.stdout
    after = merged(site)
    assert (after["verdict"], after["completeness"]["complete"], after["tasks_missing"]) == ("done", True, [])


def test_a_manifest_that_grew_after_the_run_has_rows_in_no_task_until_the_command_is_run(site: Site) -> None:
    manifest = site.manifest(6)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    assert merged(site)["completeness"]["complete"] is True
    site.manifest(16)
    proof = merged(site)["completeness"]
    assert (proof["expected"], proof["done"], proof["not_listed"], proof["strangers"]) == (16, 6, 10, 0)
    assert proof["not_listed_examples"][:2] == ["rec2 c006", "rec2 c007"]
    (here,) = proof["finish"]
    assert paste(site, here).exit_code == 0
    after = merged(site)
    assert (after["verdict"], after["completeness"]["done"], after["completeness"]["complete"]) == ("done", 16, True)


def test_a_manifest_that_was_deleted_is_a_remark_and_no_failure(site: Site) -> None:
    manifest = site.manifest(3)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    manifest.unlink()
    told = site.badcjobs("merge", site.out)
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.startswith("run: all done\n")
    # A page is 100 columns wide, and a path that is longer is cut.
    assert re.search(
        rf"complete unknown: {re.escape(str(manifest)[:40])}\S* does not exist", " ".join(told.stdout.split())
    )
    assert site.badcjobs("report", site.out).exit_code == 0


def test_rows_that_were_renamed_are_named_on_both_sides(site: Site) -> None:
    manifest = site.manifest(4)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    manifest.write_text(manifest.read_text().replace("rec1,c003", "rec1,dawn"))
    told = site.badcjobs("merge", site.out)
    assert told.stdout.startswith("run: not finished")
    complete = "no: 3 of 4 rows of the source done; 1 row in no task; 1 row in the job but not in the source"
    assert complete in " ".join(told.stdout.split())
    assert "  in no task: rec1 dawn\n" in told.stdout
    assert "  not in the source: rec1 c003\n" in told.stdout
    assert "rec1 dawn" in (site.out / "report.html").read_text()


def test_failed_and_poison_rows_are_counted_apart_and_tried_again_by_the_command(site: Site) -> None:
    mended = site.folder / "mended"
    trouble = f"[ -e {mended} ] || case $BADCJOBS_CHUNK_ID in c001) exit 1 ;; c004) kill -9 $$ ;; esac"
    assert site.run(site.manifest(6), *scripted(site, f"{trouble}\n{ENGINE}"), "--retries", 1).exit_code == 1
    before = merged(site)
    proof = before["completeness"]
    assert (before["verdict"], proof["done"], proof["failed"], proof["poison"]) == ("failed", 4, 1, 1)
    assert (proof["expected"], proof["pending"], proof["not_listed"], proof["complete"]) == (6, 0, 0, False)
    mended.touch()
    (here,) = proof["finish"]
    done = paste(site, here)
    assert done.exit_code == 0, done.stderr
    assert merged(site)["completeness"]["complete"] is True


def test_a_run_outside_slurm_that_was_stopped_is_finished_by_its_command(site: Site) -> None:
    gate = site.folder / "gate"
    wait = f"while [ $BADCJOBS_CHUNK_ID != c000 ] && [ ! -e {gate} ]; do sleep 0.02; done"
    program = site.start_run(site.manifest(5), *scripted(site, f"{wait}\n{ENGINE}"), "--config", "run.grace_s=0")
    wait_for(lambda: site.count_now("chunk", "status = 'done'"), "the first chunk is done")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75
    before = merged(site)
    proof = before["completeness"]
    assert (before["verdict"], proof["expected"], proof["done"], proof["pending"]) == ("stopped", 5, 1, 4)
    (here,) = proof["finish"]
    gate.touch()
    done = paste(site, here)
    assert done.exit_code == 0, done.stderr
    after = merged(site)
    assert (after["verdict"], after["completeness"]["complete"]) == ("done", True)
