"""``badcjobs merge`` says whether every row of the source is done, and its commands really finish what is left."""

from __future__ import annotations

import shlex
import signal
from typing import Any

from support.badcjobs_program import ON_CPU, Site, array_task
from support.waiting import wait_for

ENGINE = 'echo start_time,end_time,label,score > "$2"'


def merged(site: Site) -> dict[str, Any]:
    done = site.badcjobs("merge", site.out, "--json")
    assert done.exit_code == 0, done.stderr
    return dict(done.json)


def reported(site: Site) -> dict[str, Any]:
    return dict(site.badcjobs("report", site.out, "--json").json)


def paste(site: Site, command: str) -> str:
    """Run a command that was printed, as a shell would."""
    program, *words = shlex.split(command)
    assert program == "badcjobs"
    done = site.badcjobs(*words)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_what_an_array_has_left_is_named_and_its_command_does_it(
    site: Site,
) -> None:
    site.run_tasks(site.manifest(10), *ON_CPU, envs=[array_task(index, range(4)) for index in (0, 3)])
    told = site.badcjobs("merge", site.out)
    assert "complete    no: 5 of 10 rows of the source done; 5 rows of array index 1,2 not started\n" in told.stdout
    assert "\n    sbatch --array=1,2 …\n" in told.stdout
    assert "not started" in (site.out / "report.html").read_text()
    before = reported(site)
    assert before["completeness"]["missing_indices"] == before["tasks_missing"] == [1, 2]
    _, here = before["completeness"]["finish"]
    assert "5 done, 5 skipped of 10" in paste(site, here)
    after = merged(site)
    assert (after["verdict"], after["completeness"]["complete"], after["tasks_missing"]) == ("done", True, [])
    manifest = site.manifest(13)
    proof = reported(site)["completeness"]
    assert (proof["expected"], proof["done"], proof["not_listed"], proof["strangers"]) == (13, 10, 3, 0)
    paste(site, proof["finish"][-1])
    assert merged(site)["completeness"]["complete"] is True
    manifest.unlink()
    told = site.badcjobs("report", site.out)
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.startswith("run: all done\n") and "\n  complete    unknown:" in told.stdout


def test_a_run_that_was_stopped_and_one_with_failed_rows_are_finished_by_their_command(site: Site) -> None:
    gate, mended = site.folder / "gate", site.folder / "mended"
    wait = f"while [ $BADCJOBS_CHUNK_ID != c000 ] && [ ! -e {gate} ]; do sleep 0.02; done"
    trouble = f"[ -e {mended} ] || case $BADCJOBS_CHUNK_ID in c001) exit 1 ;; c004) kill -9 $$ ;; esac"
    script = site.script("engine of mine.sh", f"{wait}\n{trouble}\n{ENGINE}")
    engine = ("--command", f"{shlex.quote(str(script))} {{input}} {{output}}", "--cpu-workers", 1, "--retries", 1)
    program = site.start_run(site.manifest(6), *engine, "--no-emit-gpu-telemetry", "--config", "run.grace_s=0")
    wait_for(lambda: site.count_now("chunk", "status = 'done'"), "the first chunk is done")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75
    before = merged(site)
    proof = before["completeness"]
    assert (before["verdict"], proof["expected"], proof["done"], proof["pending"]) == ("stopped", 6, 1, 5)
    gate.touch()
    _, *words = shlex.split(proof["finish"][0])
    assert site.badcjobs(*words).exit_code == 1
    before = merged(site)
    proof = before["completeness"]
    assert (before["verdict"], proof["done"], proof["failed"], proof["poison"]) == ("failed", 4, 1, 1)
    mended.touch()
    paste(site, proof["finish"][0])
    after = merged(site)
    assert (after["verdict"], after["completeness"]["complete"], after["completeness"]["finish"]) == ("done", True, [])
