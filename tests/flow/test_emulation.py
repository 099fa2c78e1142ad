"""A job on a machine without Slurm: the scenarios of the cluster, emulated. Nothing is lost, nothing is done twice.

All of them run side by side; after each the merge has run, every chunk is accounted for exactly once, what is left is
named, and the same command finishes it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from rooms.devices import DeviceLocks, simulated_uuid
from rooms.root import SystemClock
from support.badcjobs_program import ON_CPU, Outcome, Program, Site, rows
from support.waiting import wait_for

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "array.sbatch"
HEARD = "printf 'start_time,end_time,label,score\\n0,0.5,%s,0.5\\n' $BADCJOBS_CHUNK_ID > \"$2\""
ROUGH = ("misfortunes", "limit", "stopped", "killed")  # the scenarios to which something happens
KEYS = ("--config", "run.publish_every_s=0.1", "--config", "run.backoff_s=0.05")
LEAN = ("--no-emit-gpu-telemetry", "--retries", 0, "--interval", 0.1)

# What happens to a chunk, by the array index that has it; once `finish` is there, all is well.
MISFORTUNES = """
[ -e {folder}/finish ] || case $SLURM_ARRAY_TASK_ID-$BADCJOBS_CHUNK_ID in
1-c001) exit 1 ;;
2-*) [ -n "$SLURM_RESTART_COUNT" ] || kill -USR1 $PPID ;;
3-c007) kill -KILL $PPID; sleep 60 ;;
esac
"""
# Deaf to TERM, like a program deep in a driver.
HANGS = """
[ -e {folder}/finish ] || [ $BADCJOBS_CHUNK_ID = c000 ] || { trap '' TERM; touch {folder}/hangs-$$; sleep 300; }
"""
ALONE = """
mkdir {folder}/busy-$CUDA_VISIBLE_DEVICES || exit 1
sleep 0.3
rmdir {folder}/busy-$CUDA_VISIBLE_DEVICES
"""


@dataclass
class Scenario:
    """One emulated job, from its start to whatever its end leaves."""

    site: Site
    chunks: int
    arguments: tuple[object, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    program: Program | None = None
    first: Outcome | None = None
    refused: Outcome | None = None  # what the same command got while tasks of a killed emulation were still ending
    second: Outcome | None = None

    def start(self) -> Program:
        self.program = self.site.start(*self.arguments, env={**self.env, **self.machine})
        return self.program

    @property
    def machine(self) -> dict[str, str]:
        """The environment of a machine whose locks are these tests' own."""
        return {"BADCJOBS_LOCK_DIR": str(self.site.folder.parent / "locks")}

    def finish(self) -> None:
        """Take what was in the way out of it, and give the same command again."""
        (self.site.folder / "finish").touch()
        self.second = self.start().wait(90)

    @property
    def tasks(self) -> list[tuple[str, int | None, int]]:
        assert self.first is not None
        return [(task["state"], task["exit_code"], task["restarts"]) for task in self.first.json["tasks"]]

    @property
    def summary(self) -> dict[str, Any]:
        assert self.first is not None, "it has not ended"
        return dict(self.first.json["summary"])

    def job(self, sql: str) -> list[tuple[Any, ...]]:
        return rows(self.site.out / "job.sqlite", sql)


def make_site(parent: Path, name: str) -> Site:
    return Site(parent / name)


def per_chunk(site: Site, what: str) -> list[object]:
    """Return the options of an engine that does this with each chunk."""
    script = site.script("engine.sh", what.replace("{folder}", str(site.folder)) + HEARD)
    return ["--command", f"{script} {{input}} {{output}}"]


def array(site: Site, chunks: int, *options: object, simulate: int, what: str = "") -> Scenario:
    manifest = site.manifest(chunks)
    words = (
        "submit",
        manifest,
        "--out",
        site.out,
        "--cluster",
        "local",
        "--json",
        *options,
        *KEYS,
        "--",
        *per_chunk(site, what),
        *LEAN,
        "--simulate",
        simulate,
    )
    return Scenario(site, chunks, words)


def template(site: Site, chunks: int) -> Scenario:
    """The template as it is shipped; everything comes from the environment, as with sbatch --export."""
    program = site.script("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
    env = {
        "SOURCE": str(site.manifest(chunks)),
        "OUT": str(site.out),
        "BADCJOBS": str(program),
        "BADCJOBS_ARGS": " ".join(map(str, [*KEYS, *LEAN, "--engine", "demo"])),
    }
    words = ("submit", "--cluster", "local", TEMPLATE, "--json", "--sbatch=--array=0-19%4", "--gpus-per-task", 1)
    return Scenario(site, chunks, (*words, "--", "--simulate", 4), env)


def limited(site: Site, chunks: int) -> Scenario:
    """A job whose time is over in the middle of chunks that will not end."""
    (manifest, (flag, command)) = site.manifest(chunks), per_chunk(site, HANGS)
    run = f"run {manifest} --out {site.out} --simulate 2 {flag} '{command}' {' '.join(map(str, [*KEYS, *LEAN]))}"
    script = site.folder / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --time=0:10 --gpus-per-node=2 --signal=B:USR1@30\n#SBATCH --open-mode=append\n"
        f"{sys.executable} -m badcjobs {run} &\nchild=$!\ntrap 'touch {site.folder}/warned' USR1\n"
        "while ! wait $child; do kill -0 $child 2>/dev/null || break; done\n"
    )
    words = ("submit", "--cluster", "local", script, "--out", site.out, "--json")
    return Scenario(site, chunks, (*words, "--config", "submit.kill_wait_s=1", "--", "--simulate", 2))


def nested(site: Site, chunks: int) -> Scenario:
    """A job that submits an array from inside, on what it was granted itself."""
    inner = array(site, chunks, "--tasks", 2, simulate=4, what="echo $CUDA_VISIBLE_DEVICES >> {folder}/seen\n")
    words = " ".join(f"'{word}'" for word in inner.arguments)
    script = site.folder / "outer.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=5 --gpus-per-node=2\n"
        f"echo $CUDA_VISIBLE_DEVICES > {site.folder}/granted\nexec {sys.executable} -m badcjobs {words}\n"
    )
    return Scenario(site, chunks, ("submit", "--cluster", "local", script, "--json", "--", "--simulate", 4))


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scenario]]:
    """All of them, over; and the same commands once more where something was left.

    But for the one with a time limit, which goes on beside the tests: its own, the last, waits for it.
    """
    parent = tmp_path_factory.mktemp("emulation")
    names = ("misfortunes", "limit", "stopped", "killed", "nested", "twenty")
    sites = {name: make_site(parent, name) for name in names}
    found = {
        "misfortunes": array(
            sites["misfortunes"], 16, "--tasks", 4, "--config", "run.grace_s=0.5", simulate=8, what=MISFORTUNES
        ),
        "limit": limited(sites["limit"], 4),
        "stopped": array(sites["stopped"], 4, "--tasks", 2, "--config", "run.grace_s=0.5", simulate=8, what=HANGS),
        "killed": array(sites["killed"], 4, "--tasks", 2, "--config", "submit.kill_wait_s=60", simulate=8, what=HANGS),
        "nested": nested(sites["nested"], 4),
        "twenty": template(sites["twenty"], 40),
    }
    try:
        for name in ROUGH:
            found[name].env["BADCJOBS_LOCK_DIR"] = str(parent / f"locks-{name}")
        run_all(found)
        yield found
    finally:
        for scenario in found.values():
            if scenario.program is not None:
                scenario.program.kill()
            scenario.site.close()


def run_all(found: dict[str, Scenario]) -> None:
    rough = {name: found[name].start() for name in ROUGH}
    for name in ("stopped", "killed"):
        folder = found[name].site.folder
        wait_for(lambda folder=folder: len(list(folder.glob("hangs-*"))) >= 2, f"chunks of {name} hang", 60)
    rough["stopped"].send(signal.SIGINT)
    rough["killed"].kill()
    last = found["nested"].start(), found["twenty"].start()
    site = found["killed"].site
    found["killed"].refused = found["killed"].start().wait(30)
    (site.folder / "finish").touch()
    wait_for(lambda: not site.processes(), "the tasks of the killed emulation have ended", 60)
    found["killed"].finish()
    for name in ("stopped", "misfortunes"):
        found[name].first = rough[name].wait(90)
        found[name].finish()
    found["nested"].first, found["twenty"].first = (program.wait(120) for program in last)


# --- an array of twenty -----------------------------------------------------------------------------------------------


def test_an_array_of_twenty_with_four_at_a_time_does_every_row_exactly_once(scenarios: dict[str, Scenario]) -> None:
    twenty = scenarios["twenty"]
    assert twenty.first is not None and twenty.first.exit_code == 0, twenty.first
    assert twenty.tasks == [("COMPLETED", 0, 0)] * 20
    assert (twenty.summary["verdict"], twenty.summary["done"], twenty.summary["tasks"]) == ("done", 40, 20)
    done = twenty.job("SELECT chunk_id, count(*) FROM chunk WHERE status = 'done' GROUP BY 1")
    assert done == [(f"c{number:03d}", 1) for number in range(40)]
    placed = twenty.job("SELECT c.chunk_id, t.array_index FROM chunk c JOIN task t USING (task_id)")
    assert sorted(placed) == [(f"c{number:03d}", number % 20) for number in range(40)]


def test_never_more_than_four_of_them_run_at_a_time_and_never_two_on_one_device(scenarios: dict[str, Scenario]) -> None:
    spans = scenarios["twenty"].job(
        "SELECT t.started_at_ms, t.ended_at_ms, d.uuid FROM task t JOIN device d USING (task_id)"
    )
    assert len(spans) == 20
    together = [[uuid for start, end, uuid in spans if start <= moment < end] for moment, _, _ in spans]
    assert max(map(len, together)) <= 4
    assert all(len(set(uuids)) == len(uuids) for uuids in together)


def test_every_task_has_its_log_under_the_name_that_slurm_would_give_it(scenarios: dict[str, Scenario]) -> None:
    twenty = scenarios["twenty"]
    assert twenty.first is not None
    job_id = twenty.first.json["job_id"]
    assert {path.name for path in twenty.site.folder.glob("*.log")} == {f"badcjobs-{job_id}_{i}.log" for i in range(20)}
    assert twenty.job("SELECT DISTINCT job_id, restart FROM task") == [(job_id, 0)]


# --- misfortunes ------------------------------------------------------------------------------------------------------


def test_each_task_ends_in_the_way_that_slurm_would_call_it(scenarios: dict[str, Scenario]) -> None:
    assert scenarios["misfortunes"].tasks == [
        ("COMPLETED", 0, 0),
        ("FAILED", 1, 0),
        ("COMPLETED", 0, 1),
        ("FAILED", 137, 0),
    ]


def test_the_requeued_task_has_two_databases_and_did_each_chunk_once(scenarios: dict[str, Scenario]) -> None:
    rough = scenarios["misfortunes"]
    assert rough.first is not None
    mine = f"job_id = '{rough.first.json['job_id']}' AND array_index = 2"
    done = "(SELECT count(*) FROM chunk WHERE status = 'done')"
    attempts = sorted(rough.site.rows(f"SELECT restart, verdict, {done} FROM task WHERE {mine}"))
    assert [(restart, verdict) for restart, verdict, _ in attempts] == [(0, "stopped"), (1, "done")]
    assert sum(done for *_, done in attempts) == 4
    assert min(done for *_, done in attempts) > 0


def test_the_verdict_is_that_work_is_left_and_what_is_left_is_named(scenarios: dict[str, Scenario]) -> None:
    rough = scenarios["misfortunes"]
    assert rough.first is not None
    assert (rough.first.exit_code, rough.first.json["verdict"]) == (75, "stopped"), rough.first.stderr
    summary = rough.summary
    assert [chunk["chunk_id"] for chunk in summary["failed_chunks"]] == ["c001"]
    assert summary["done"] + summary["failed"] + summary["left"] == 16
    assert summary["left"] >= 1
    assert summary["completeness"]["left_indices"] == [3]
    (command,) = summary["completeness"]["finish"]  # no sbatch: there is none here
    assert command.startswith("badcjobs submit ") and "--cluster=local" in command


def test_state_changes_are_told_one_line_each(scenarios: dict[str, Scenario]) -> None:
    first = scenarios["misfortunes"].first
    assert first is not None
    words = Counter(
        line.split()[2] for line in first.stderr.splitlines() if line.startswith(f"badcjobs: {first.json['job_id']}_")
    )
    assert words == {"RUNNING": 5, "PENDING": 1, "COMPLETED": 2, "FAILED": 2}
    assert "of 4 ended" in first.stderr


def test_ctrl_c_ends_the_tasks_in_order_merges_and_says_so(scenarios: dict[str, Scenario]) -> None:
    stopped = scenarios["stopped"]
    assert stopped.first is not None
    assert stopped.first.exit_code == 130, stopped.first.stderr
    assert [(state, code) for state, code, _ in stopped.tasks] == [("CANCELLED", 75)] * 2
    assert (stopped.summary["done"], stopped.summary["left"]) == (1, 3)


@pytest.mark.parametrize("name", ["misfortunes", "stopped", "killed"])
def test_the_same_command_finishes_what_was_left(scenarios: dict[str, Scenario], name: str) -> None:
    assert_finished(scenarios[name])


def assert_finished(scenario: Scenario) -> None:
    """See that the second try has done what was left, and nothing twice."""
    assert_all_done(scenario, scenario.second)


def assert_all_done(scenario: Scenario, outcome: Outcome | None) -> None:
    """See that a try has left every chunk done, once."""
    assert outcome is not None
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["verdict"] == "done"
    done = scenario.job("SELECT chunk_id, count(*) FROM chunk WHERE status = 'done' GROUP BY 1")
    assert done == [(f"c{number:03d}", 1) for number in range(scenario.chunks)]
    assert scenario.job("SELECT count(*) FROM detection") == [(scenario.chunks,)]
    assert outcome.json["summary"]["completeness"]["complete"] is True


def test_nested_arrays_run_on_what_the_outer_job_was_granted(scenarios: dict[str, Scenario]) -> None:
    outer = scenarios["nested"]
    assert outer.first is not None and outer.first.exit_code == 0, outer.first
    granted = (outer.site.folder / "granted").read_text().strip().split(",")
    seen = set((outer.site.folder / "seen").read_text().split())
    assert len(granted) == 2
    assert seen == {f"GPU-51a0d000-0000-4000-8000-{int(index):012d}" for index in granted}
    ((jobs, indices, done),) = outer.job(
        "SELECT count(DISTINCT job_id), group_concat(DISTINCT array_index), (SELECT count(*) FROM chunk) FROM task"
    )
    assert (jobs, sorted(indices.split(",")), done) == (1, ["0", "1"], outer.chunks)
    assert outer.job(f"SELECT count(*) FROM task WHERE job_id = '{outer.first.json['job_id']}'") == [(0,)]


@pytest.mark.parametrize("name", ["misfortunes", "stopped", "killed", "nested", "twenty"])
def test_nothing_stays_on_the_machine(scenarios: dict[str, Scenario], name: str) -> None:
    assert_nothing_stays(scenarios[name].site)


def assert_nothing_stays(site: Site) -> None:
    """See that neither a process nor a file is left."""
    wait_for(lambda: not site.processes(), "everybody has ended")
    assert [path.name for path in site.local.iterdir()] == []


# --- two at a time ----------------------------------------------------------------------------------------------------


def test_two_emulations_of_one_machine_never_take_the_same_card_and_one_waits(tmp_path: Path) -> None:
    site, other = Site(tmp_path / "one"), Site(tmp_path / "other")
    what = ALONE.replace("{folder}", str(tmp_path))
    both = [array(one, 3, "--tasks", 3, simulate=2, what=what) for one in (site, other)]
    ends = [scenario.start() for scenario in both]
    outcomes = [program.wait() for program in ends]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], [outcome.stderr for outcome in outcomes]
    assert any("waiting for GPUs that other runs use: GPU" in outcome.stderr for outcome in outcomes)
    site.close()
    other.close()


def test_a_second_emulation_of_the_same_run_is_refused(site: Site) -> None:
    gate = site.folder / "gate"
    scenario = array(site, 1, "--tasks", 1, simulate=1, what=f"while [ ! -e '{gate}' ]; do sleep 0.1; done\n")
    first = scenario.start()
    wait_for(lambda: list(site.out.glob("logs/*.out")), "it runs")
    second = scenario.start().wait()
    gate.touch()
    assert (second.exit_code, "another emulation" in second.stderr) == (2, True)
    assert first.wait().exit_code == 0


def test_a_run_stays_locked_until_the_last_task_of_a_killed_emulation_is_gone(scenarios: dict[str, Scenario]) -> None:
    refused = scenarios["killed"].refused
    assert refused is not None
    assert (refused.exit_code, "another emulation" in refused.stderr) == (2, True), refused


def test_a_killed_emulation_leaves_nobody_not_even_what_a_script_without_exec_has_set_free(site: Site) -> None:
    script = site.script("job.sbatch", f"setsid sleep 300 &\nsh -c 'trap \"\" TERM; touch {site.folder}/up; sleep 300'")
    words = ("submit", "--cluster", "local", script, "--config", "submit.kill_wait_s=1")
    program = Scenario(site, 0, words).start()
    wait_for(lambda: (site.folder / "up").exists(), "it runs")
    program.kill()
    wait_for(lambda: not site.processes(), "everybody has ended")
    wait_for(lambda: not list(site.local.iterdir()), "its folder is gone")


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_cards_of_a_killed_emulation_stay_locked_until_its_last_process_is_gone(site: Site) -> None:
    up = site.folder / "up"
    script = site.script("job.sbatch", f"sh -c 'trap \"\" TERM; echo $$ > {up}; while :; do sleep 0.1; done'; true")
    keys = ("--config", "submit.kill_wait_s=2", "--config", "run.simulate=1")
    scenario = Scenario(site, 0, ("submit", "--cluster", "local", script, "--gpus-per-task", 1, *keys))
    program = scenario.start()
    wait_for(lambda: up.exists() and up.read_text(), "it runs")
    locks = DeviceLocks(Path(scenario.machine["BADCJOBS_LOCK_DIR"]), SystemClock(), None)
    program.kill()
    looks = 0
    while (holder := locks.claim(simulated_uuid(0))) is not None or lives(int(up.read_text())):
        assert holder is not None, "the card is free while a process of the task lives"
        looks += 1
        time.sleep(0.05)
    assert looks > 3, "it took its two seconds"


def test_under_nohup_it_outlives_its_terminal(site: Site) -> None:
    scenario = array(site, 1, "--tasks", 1, simulate=1, what="sleep 0.5\n")
    words = [sys.executable, "-m", "badcjobs", *map(str, scenario.arguments)]
    env = site.environ(scenario.machine)
    with subprocess.Popen(["nohup", *words], env=env, cwd=site.folder, stdout=subprocess.PIPE) as quiet:
        wait_for(lambda: list(site.out.glob("logs/*.out")), "it runs")
        quiet.send_signal(signal.SIGHUP)
        assert quiet.wait(30) == 0
    assert site.count("chunk", "status = 'done'") == 1


def test_more_gpus_than_there_are_and_tasks_that_cannot_begin_are_errors_with_a_line_to_paste(site: Site) -> None:
    few = array(site, 1, "--tasks", 1, "--gpus-per-task", 4, simulate=2).start().wait()
    assert few.exit_code == 3 and "--gpus-per-task 2" in few.stderr
    here = ("submit", site.manifest(1), "--out", site.out, "--cluster", "local", "--tasks", 1)
    broken = Scenario(site, 1, (*here, "--gpus-per-task", 4, "--", "--simulate", 4)).start().wait()
    assert broken.exit_code == 3, broken.stderr
    assert "no task of job " in broken.stderr and "could start" in broken.stderr
    none = Scenario(site, 1, (*here, "--gpus-per-task", 0, "--", "--engine", "demo")).start().wait()
    assert none.exit_code == 2 and "try: the same command with -- --cpu-workers 2" in none.stderr
    fails = ("--config", "submit.setup=['echo no module; exit 1']")
    setup = Scenario(site, 1, (*here, "--gpus-per-task", 0, *fails, "--", *ON_CPU)).start().wait()
    assert setup.exit_code == 3, setup.stderr  # as with --cluster slurm --wait, whatever it has ended with
    assert "FAILED, exit code 1\n       no module\n  try: less " in setup.stderr
    assert "without effect" not in setup.stderr, "nobody has given --mem"


def test_tasks_that_fail_beside_old_results_are_not_all_done(site: Site) -> None:
    manifest = site.manifest(4)
    here = ("--out", site.out, "--cluster", "local")
    done = site.badcjobs("submit", manifest, *here, "--tasks", 2, "--", "--engine", "demo", "--simulate", 2)
    assert done.exit_code == 0, done.stderr
    fails = site.folder / "fails.sbatch"
    fails.write_text("#!/bin/bash\n#SBATCH --array=0-1\nexit 3\n")
    failed = site.badcjobs("submit", fails, *here)
    assert failed.exit_code == 1, failed.stdout + failed.stderr
    assert "did not complete, but every chunk is done" in failed.stdout
    assert "_0: FAILED, exit code 3; less " in failed.stdout
    assert "what is left" not in failed.stdout
    fails.write_text("#!/bin/bash\nexit 3\n")  # without an array, too
    failed = site.badcjobs("submit", fails, *here)
    assert failed.exit_code == 1
    assert re.search(r"^  job \d+: FAILED, exit code 3; less ", failed.stdout, re.MULTILINE)
    assert "None" not in failed.stdout + failed.stderr


def test_tasks_that_end_badly_after_their_work_are_named_and_the_job_is_done(site: Site) -> None:
    run = f"{sys.executable} -m badcjobs run {site.manifest(4)} --out {site.out} {' '.join(map(str, ON_CPU))}"
    script = site.folder / "job.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --array=0-1 --no-requeue\n{run}\nexit $((75 + 62 * SLURM_ARRAY_TASK_ID))\n"
    )
    done = site.badcjobs("submit", "--cluster", "local", script)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "every chunk is done; 2 tasks failed after their last chunk:" in done.stdout
    assert "_0: FAILED, exit code 75; less " in done.stdout and "_1: FAILED, exit code 137; less " in done.stdout
    assert "what is left" not in done.stdout and "did not complete" not in done.stdout


def test_a_script_with_line_ends_of_dos_is_refused_as_sbatch_does(site: Site) -> None:
    script = site.folder / "dos.sbatch"
    script.write_bytes(b"#!/bin/bash\r\n#SBATCH --array=0-1\r\necho hello\r\n")
    refused = site.badcjobs("submit", "--cluster", "local", script)
    assert refused.exit_code == 2
    assert "CRLF" in refused.stderr


# --- a time limit, which is a minute at least -------------------------------------------------------------------------


def test_a_time_limit_warns_and_kills_and_keeps_what_was_done_and_the_same_command_finishes_it(
    scenarios: dict[str, Scenario],
) -> None:
    limit = scenarios["limit"]
    assert limit.program is not None
    limit.first = limit.program.wait(120)
    assert [task[0] for task in limit.tasks] == ["TIMEOUT"], limit.first.stderr
    assert limit.first.exit_code == 75
    assert (limit.site.folder / "warned").exists()
    assert (limit.summary["done"], limit.summary["left"]) == (1, 3)
    limit.finish()
    assert_finished(limit)
    assert_nothing_stays(limit.site)
