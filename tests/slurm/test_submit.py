"""``badcjobs submit`` on a real Slurm: arrays that are throttled, cut short, cancelled, requeued, nested; no sacct.

Every scenario starts at once, on one cluster, and each test then asks for the outcome of one: most of the time is
Slurm's own patience.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.badcjobs_program import Site
from support.databases import query
from support.slurm_cluster import SlurmCluster
from support.waiting import wait_for

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
ON_GPUS = ("--engine", "demo", "--simulate", "4", "--interval", "0.5")
NO_GPU = ("--gpus-per-task", "0", "--config", "run.publish_every_s=0.5")
ON_CPU = ("--cpu-workers", "1", "--no-emit-gpu-telemetry")
DEMO_ON_CPU = (*NO_GPU, "--", "--engine", "demo", *ON_CPU)


@dataclass
class User:
    """Somebody at a login node, in a folder of their own."""

    cluster: SlurmCluster
    folder: Path
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        self.site = Site(self.folder)
        self.out = self.folder / "out"
        (self.folder / "bin").mkdir()
        self.program("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
        self.program("sacct", f"echo asked >> {self.folder}/sacct-was-asked; exit 1")  # as where there is no accounting

    def program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    @property
    def env(self) -> dict[str, str]:
        env = self.cluster.env
        return {**env, "PATH": f"{self.folder / 'bin'}{os.pathsep}{env['PATH']}", "BADCJOBS_POLL_S": "0.5"}

    def start(self, *args: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "badcjobs", *map(str, args)]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=self.env, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def badcjobs(self, *args: object, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        program = self.start(*args)
        stdout, stderr = program.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(program.args, program.returncode, stdout, stderr)

    def submit(self, *args: object) -> dict[str, Any]:
        """Submit and return at once."""
        done = self.badcjobs("submit", "--json", *args)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def gated(self, *gates: str) -> tuple[str, ...]:
        """Return the options for a program that holds the chunks from c003 on until a file ``go`` lies there: ``3=go``.

        So a test knows where a task stands, however busy the machine is.
        """
        number = "${BADCJOBS_CHUNK_ID#c}"
        lines = [
            f"while [ {number} -ge {chunk} ] && [ ! -e {self.folder}/{name} ]; do sleep 0.1; done"
            for chunk, name in (gate.split("=") for gate in gates)
        ]
        return self.analyse("\n".join(lines))

    def analyse(self, before: str) -> tuple[str, ...]:
        """Return the options for a program of a few lines of shell."""
        write = f"printf 'start_time,end_time,label,score\\n0,1,HEARD,1\\n' > $2; echo x >> {self.folder}/calls"
        program = self.program("analyse", f"{before}\n{write}")
        return (*NO_GPU, "--", "--command", f"{program} {{input}} {{output}}", *ON_CPU)

    def open(self, gate: str) -> None:
        (self.folder / gate).touch()

    def calls(self) -> int:
        log = self.folder / "calls"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.out / "logs").glob("*.out")))

    @property
    def job_database(self) -> Path:
        return self.out / "job.sqlite"

    def statuses(self) -> dict[str, int]:
        return dict(query(self.job_database, "SELECT status, count(*) FROM chunk GROUP BY status"))

    def done_twice(self) -> int:
        twice = "SELECT 1 FROM attempt WHERE outcome = 'done' GROUP BY recording_id, chunk_id HAVING count(*) > 1"
        return int(query(self.job_database, f"SELECT count(*) FROM ({twice})")[0][0])


Scenario = Callable[[User], dict[str, Any]]


# --- the scenarios ----------------------------------------------------------------------------------------------------


def both_ways(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(18)
    args = (*ON_GPUS, "--workers-per-gpu", "auto")
    export = f"SOURCE={manifest},OUT={user.folder / 'by-template'},BADCJOBS={user.folder / 'bin' / 'badcjobs'}"
    job_id = user.cluster.sbatch(
        TEMPLATES / "array.sbatch",
        "--array=0-2", "--gpus-per-node=2",
        f"--export=ALL,{export},BADCJOBS_ARGS={' '.join(args)}",
        cwd=user.folder,
    )  # fmt: skip
    options = (manifest, "--out", "out", "--tasks", 3, "--gpus-per-task", 2, "--mem", "8G", "--", *args)
    shown = user.badcjobs("submit", "--dry-run", *options)
    shown_json = user.badcjobs("submit", "--dry-run", "--json", *options)
    made_nothing = not user.out.exists()
    ended = user.badcjobs("submit", "--wait", *options)
    number = json.loads((user.out / "submitted.json").read_text())["job"]["job_id"]
    kept = user.cluster.run(["scontrol", "write", "batch_script", f"{number}_0", "-"], check=False).stdout
    user.cluster.wait(job_id, timeout_s=120)
    user.badcjobs("merge", "by-template")
    return {
        "dry_run": shown.stdout, "dry_run_json": json.loads(shown_json.stdout), "made_nothing": made_nothing,
        "ended": ended, "script": (user.out / "logs" / f"{number}_submission.sh").read_text(), "kept": kept,
        "merge_script": (user.out / "logs" / f"{number}_merge.sh").read_text(),
        "databases": [user.folder / "by-template" / "job.sqlite", user.job_database],
    }  # fmt: skip


def twenty_tasks_four_at_a_time(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(40)
    options = (manifest, "--out", "out", "--sbatch=--array=1-39:2%4", *user.analyse("sleep 0.1"))
    ended = user.badcjobs("submit", "--wait", "--json", *options)
    return {"ended": ended, "document": json.loads(ended.stdout)}


def requeued_in_mid_run(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(12)
    options = (manifest, "--out", "out", "--tasks", 2, *user.gated("6=go"))
    job_id = user.submit(*options)["job_id"]
    wait_for(lambda: user.calls() == 6, "both tasks are half done", 60)
    user.cluster.run(["scontrol", "requeue", f"{job_id}_1"])
    wait_for(lambda: "SIGTERM" in user.logs(), "it is told to stop")
    user.open("go")
    return {"ended": user.badcjobs("submit", "--wait", *options)}


def warned(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(12)
    options = (
        manifest,
        "--out",
        "out",
        "--tasks",
        1,
        "--config",
        "submit.requeues=1",
        *user.gated("3=first", "6=second"),
    )
    job_id = user.submit(*options)["job_id"]
    for times, gate in ((1, "first"), (2, "second")):  # the second warning is once too often
        wait_for(lambda times=times: user.calls() == 3 * times, "some chunks are done", 60)  # type: ignore[misc]
        user.cluster.run(["scancel", "--signal=USR2", f"{job_id}_0"])
        wait_for(lambda times=times: user.logs().count("starting nothing new") == times, "it is warned")  # type: ignore[misc]
        user.open(gate)
    first = user.badcjobs("submit", "--wait", *options)
    states = user.cluster.query_ends(int(job_id))
    user.badcjobs("submit", "--again", *options)
    return {"first": first, "states": list(states.values()), "ended": user.badcjobs("submit", "--wait", *options)}


def out_of_time(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(60)
    slow_at_first = user.analyse('[ -n "$SLURM_RESTART_COUNT" ] || sleep 2')
    options = (manifest, "--out", "out", "--tasks", 1, "--time", "1", *slow_at_first)
    return {"ended": user.badcjobs("submit", "--wait", *options)}


def one_task_cancelled(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(18)
    options = (manifest, "--out", "out", "--tasks", 3, *user.gated("9=go"))
    job = user.submit(*options)
    wait_for(lambda: user.calls() == 9, "every task is half done", 60)
    early = user.badcjobs("submit", "--again", *options)
    user.cluster.run(["scancel", f"{job['job_id']}_1"])
    wait_for(lambda: "SIGTERM" in user.logs(), "it is told to stop")
    user.open("go")
    stopped = user.badcjobs("submit", "--wait", *options)
    left = user.statuses()
    merged_by_the_job = (user.out / "logs" / f"{job['merge_job_id']}_merge.out").read_text()
    ended_before = user.badcjobs("submit", *options)
    again = json.loads(user.badcjobs("submit", "--again", "--json", *options).stdout)
    ended = user.badcjobs("submit", "--wait", *options)
    tasks = query(user.job_database, "SELECT array_index, restart, exit_code FROM task ORDER BY started_at_ms")
    return {
        "early": early, "stopped": stopped, "left": left, "merged": merged_by_the_job, "ended_before": ended_before,
        "again": again, "ended": ended, "finished": user.badcjobs("submit", "--again", *options), "exit_codes": tasks,
    }  # fmt: skip


def one_chunk_fails(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(6)
    (user.folder / "audio" / "c004.wav").write_bytes(b"not a wav file")
    options = (manifest, "--out", "out", "--tasks", 2, "--config", "run.backoff_s=0.05")
    ended = user.badcjobs("submit", "--wait", "--json", *options, "--", *ON_GPUS)
    document = json.loads(ended.stdout)
    states = {key: end.exit_code for key, end in user.cluster.query_ends(int(document["job_id"])).items()}
    failed = user.statuses()
    (user.folder / "audio" / "c004.wav").write_bytes((user.folder / "audio" / "c001.wav").read_bytes())
    mended = user.badcjobs("submit", "--again", "--wait", "--mem", "2GB", "--json", *options, "--", *ON_GPUS)
    return {"ended": ended, "document": document, "states": states, "statuses": failed, "mended": mended}


def fails_beside_old_results(user: User) -> dict[str, Any]:
    options = (user.site.manifest(4), "--out", "out", "--tasks", 2, "--wait", *DEMO_ON_CPU)
    first = user.badcjobs("submit", *options)
    (user.out / "submitted.json").unlink()
    fails = ("--config", "submit.setup=['exit 9']")
    return {"first": first, "ended": user.badcjobs("submit", "--json", *fails, *options)}


def inside_a_job(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(6)
    script = user.folder / "outer.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=7-9:2\n#SBATCH --gpus-per-node=1\n#SBATCH --output=outer-%a.log\n"
        '[ "$SLURM_ARRAY_TASK_ID" = 7 ] || exit 0\n'
        f"exec badcjobs submit {manifest} --out out --tasks 2 --wait {' '.join(DEMO_ON_CPU)}\n"
    )
    argv = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(argv, env=user.env, cwd=user.folder, capture_output=True, text=True, check=True)
    ends = user.cluster.wait(int(done.stdout), timeout_s=120)
    facts = query(user.job_database, "SELECT array_index, job_id FROM task ORDER BY array_index")
    return {
        "ends": ends,
        "log": (user.folder / "outer-7.log").read_text(),
        "tasks": facts,
        "outer": done.stdout.strip(),
    }


def interrupted(user: User) -> dict[str, Any]:
    manifest = user.site.manifest(8)
    options = (manifest, "--out", "out", "--tasks", 2, "--wait", *user.gated("4=go"))
    waiting = user.start("submit", *options)
    wait_for(lambda: user.calls() == 4, "some chunks are done", 60)
    waiting.send_signal(signal.SIGINT)
    stdout, stderr = waiting.communicate(timeout=60)
    other = user.badcjobs("submit", "--config", "run.backoff_s=9", *options)
    user.open("go")
    resumed = user.badcjobs("submit", *options)
    jobs = query(user.job_database, "SELECT DISTINCT job_id FROM task")
    return {"code": waiting.returncode, "said": stdout + stderr, "other": other, "ended": resumed, "jobs": jobs}


SCENARIOS: list[Scenario] = [
    out_of_time, warned, requeued_in_mid_run, one_task_cancelled, interrupted, inside_a_job, both_ways, one_chunk_fails,
    twenty_tasks_four_at_a_time, fails_beside_old_results,
]  # fmt: skip


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory, slurm_cluster: SlurmCluster) -> dict[str, User]:
    names = [scenario.__name__ for scenario in SCENARIOS]
    return {name: User(slurm_cluster, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(scope="module")
def outcomes(users: dict[str, User]) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    with ThreadPoolExecutor(max_workers=len(SCENARIOS)) as pool:
        yield {scenario.__name__: pool.submit(scenario, users[scenario.__name__]) for scenario in SCENARIOS}


# --- what is to be seen -----------------------------------------------------------------------------------------------

Outcomes = dict[str, Future[dict[str, Any]]]


def finished(user: User, chunks: int, ended: subprocess.CompletedProcess[str]) -> None:
    """Check what holds after every story: merged, each chunk once, nothing done twice."""
    assert ended.returncode == 0, ended.stdout + ended.stderr + user.logs()
    assert user.statuses() == {"done": chunks}
    assert user.done_twice() == 0
    assert not (user.folder / "sacct-was-asked").exists()


def test_template_and_submit_lead_to_the_same_chunks_and_detections(users: dict[str, User], outcomes: Outcomes) -> None:
    found = outcomes["both_ways"].result()
    finished(users["both_ways"], 18, found["ended"])
    for rows in (
        "SELECT recording_id, chunk_id, source_path, start_ms, end_ms, status, attempts FROM chunk ORDER BY 1, 2",
        "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1, 2, 3",
        "SELECT array_index, verdict, exit_code FROM task ORDER BY 1",
        "SELECT chunk_id, array_index FROM chunk JOIN task USING (task_id) ORDER BY 1",
        "SELECT array_index, count(*) FROM device JOIN task USING (task_id) GROUP BY 1 ORDER BY 1",
    ):
        by_template, by_submit = (query(database, rows) for database in found["databases"])
        assert by_template == by_submit
        assert by_submit


def test_a_dry_run_shows_byte_for_byte_what_is_then_submitted_and_makes_nothing(outcomes: Outcomes) -> None:
    found = outcomes["both_ways"].result()
    array, merge = found["script"], found["merge_script"]
    assert found["dry_run_json"] == {"script": array, "merge_script": merge}
    assert found["dry_run"].startswith(array)
    assert found["dry_run"].endswith(merge)
    assert found["kept"].rstrip("\n") == array.rstrip("\n")  # what Slurm itself has kept
    assert found["made_nothing"]


def test_submit_says_the_job_ids_the_folder_and_three_commands_to_follow_it(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    said = outcomes["both_ways"].result()["ended"].stdout.splitlines()
    out = users["both_ways"].out
    job, merge = re.fullmatch(r"job (\d+) is submitted: 3 array tasks for 18 chunks, merge job (\d+)", said[0]).groups()  # type: ignore[union-attr]
    assert [line.split(maxsplit=1)[1] for line in said[1:4]] == [
        str(out), f"squeue -j {job},{merge}", f"tail -F {out}/logs/{job}_*_log.out",
    ]  # fmt: skip
    assert said[4].endswith(f"badcjobs merge {out}")


def test_an_array_of_twenty_with_a_step_runs_four_at_a_time_and_counts_its_chunks(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["twenty_tasks_four_at_a_time"], outcomes["twenty_tasks_four_at_a_time"].result()
    finished(user, 40, found["ended"])
    assert [index for (index,) in query(user.job_database, "SELECT array_index FROM task ORDER BY 1")] == [
        *range(1, 40, 2)
    ]
    spans = query(user.job_database, "SELECT started_at_ms, ended_at_ms FROM task")
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) <= 4
    assert (found["document"]["verdict"], found["document"]["tasks"], found["document"]["exit_code"]) == ("done", 20, 0)
    lines = [line for line in found["ended"].stderr.splitlines() if " chunks; tasks: " in line]
    assert lines == list(dict.fromkeys(lines))  # one for each change, none twice
    assert lines[-1].startswith(f"badcjobs: {found['document']['job_id']} [####################] 40 of 40 chunks;")
    assert "tasks: 20 completed; merge completed" in lines[-1]


def test_a_task_that_slurm_requeues_goes_on_where_it_was(users: dict[str, User], outcomes: Outcomes) -> None:
    user, found = users["requeued_in_mid_run"], outcomes["requeued_in_mid_run"].result()
    finished(user, 12, found["ended"])
    attempts = query(user.job_database, "SELECT array_index, restart, exit_code FROM task ORDER BY 1, 2")
    assert attempts == [(0, 0, 0), (1, 0, 75), (1, 1, 0)]


def test_a_warned_task_is_requeued_as_often_as_was_allowed_and_then_ends_with_75(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["warned"], outcomes["warned"].result()
    assert found["first"].returncode == 75, found["first"].stderr + user.logs()
    assert [end.exit_code for end in found["states"]] == [75]
    finished(user, 12, found["ended"])
    attempts = query(user.job_database, "SELECT restart, exit_code FROM task ORDER BY started_at_ms")
    assert attempts == [(0, 75), (1, 75), (0, 0)]


def test_a_task_that_runs_out_of_time_is_started_again_until_all_is_done(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["out_of_time"], outcomes["out_of_time"].result()
    finished(user, 60, found["ended"])
    attempts = query(user.job_database, "SELECT restart, exit_code FROM task ORDER BY restart")
    *before, (restart, exit_code) = attempts  # the first is warned at once: perhaps before it has begun with anything
    assert (restart > 0, exit_code) == (True, 0)
    assert [code for _, code in before] == [75] * len(before)


def test_a_cancelled_task_leaves_its_chunks_named_and_they_alone_are_submitted_again(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["one_task_cancelled"], outcomes["one_task_cancelled"].result()
    assert found["early"].returncode == 2
    assert "has not ended yet" in found["early"].stderr
    assert found["stopped"].returncode == 75, found["stopped"].stderr + user.logs()
    assert found["left"]["pending"] > 0
    assert sum(found["left"].values()) == 18
    for text in (found["stopped"].stdout, found["merged"]):
        assert f"{found['left']['pending']} left of 18" in text
    assert found["ended_before"].returncode == 75  # without --again it says how the job ended, and submits nothing
    assert "--again" in found["ended_before"].stdout
    assert (found["again"]["array"], found["again"]["tasks"]) == ("1", 1)
    finished(user, 18, found["ended"])
    assert [(index, code) for index, _, code in found["exit_codes"]][-1] == (1, 0)
    assert (1, 0, 75) in found["exit_codes"]
    assert found["finished"].returncode == 0
    assert "all done" in found["finished"].stdout


def test_a_chunk_that_fails_for_good_is_the_verdict_and_the_exit_code_of_its_task_alone(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["one_chunk_fails"], outcomes["one_chunk_fails"].result()
    assert found["ended"].returncode == 1, found["ended"].stderr
    assert found["statuses"] == {"done": 5, "failed": 1}
    assert found["document"]["verdict"] == "failed"
    assert [end["state"] for end in found["document"]["task_ends"]] == ["FAILED", "COMPLETED"]
    assert [chunk["chunk_id"] for chunk in found["document"]["summary"]["failed_chunks"]] == ["c004"]
    job_id = found["document"]["job_id"]
    assert found["states"] == {f"{job_id}_0": 1, f"{job_id}_1": 0}
    assert json.loads(found["mended"].stdout)["array"] == "0"  # only the task that has something left
    finished(user, 6, found["mended"])


def test_tasks_that_end_at_once_beside_the_results_of_an_older_job_are_not_all_done(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["fails_beside_old_results"], outcomes["fails_beside_old_results"].result()
    assert found["first"].returncode == 0, found["first"].stderr + user.logs()
    assert found["ended"].returncode == 1, found["ended"].stdout + found["ended"].stderr
    document = json.loads(found["ended"].stdout)
    assert (document["verdict"], document["summary"]["verdict"]) == ("failed", "done")
    assert [end["state"] for end in document["task_ends"]] == ["FAILED", "FAILED"]
    assert user.statuses() == {"done": 4}


def test_a_job_can_submit_another_one_and_passes_nothing_of_its_own_on(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["inside_a_job"], outcomes["inside_a_job"].result()
    assert {end.exit_code for end in found["ends"].values()} == {0}, found["log"] + user.logs()
    assert user.statuses() == {"done": 6}
    assert user.done_twice() == 0
    assert [index for index, _ in found["tasks"]] == [0, 1]
    assert {job for _, job in found["tasks"]}.isdisjoint({found["outer"]})
    assert query(user.job_database, "SELECT count(*) FROM device") == [(0,)]  # not even the outer job's GPU


def test_a_wait_that_was_interrupted_finds_its_job_again_and_submits_none(
    users: dict[str, User], outcomes: Outcomes
) -> None:
    user, found = users["interrupted"], outcomes["interrupted"].result()
    assert found["code"] == 130
    assert "the same command waits for it again" in found["said"]
    assert found["other"].returncode == 2
    assert "which was submitted with other options" in found["other"].stderr
    finished(user, 8, found["ended"])
    assert "exists already" in found["ended"].stdout
    assert len(found["jobs"]) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_slurm_refuses_is_told_in_its_own_words_with_exit_code_5(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    user = User(slurm_cluster, tmp_path)
    done = user.badcjobs("submit", user.site.manifest(3), "--out", "out", "--sbatch=--partition=none", *DEMO_ON_CPU)
    assert done.returncode == 5
    assert "invalid partition specified: none" in done.stderr
    assert not (user.out / "submitted.json").exists()


def test_a_merge_job_that_slurm_refuses_is_a_warning_and_whoever_waits_merges(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    user = User(slurm_cluster, tmp_path)
    options = (user.site.manifest(3), "--out", "out", "--config", "submit.merge_mem=999999G", *DEMO_ON_CPU)
    started = time.monotonic()
    done = user.badcjobs("submit", "--wait", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert "but not its merge job" in done.stderr
    assert json.loads(done.stdout)["merge_job_id"] is None
    assert user.statuses() == {"done": 3}
    assert time.monotonic() - started < 150
