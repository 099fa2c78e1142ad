"""The verdict on a job of Slurm: what its own tasks have done, not what an older job has left in the same folder."""

from __future__ import annotations

import pytest
from support.badcjobs_program import ON_CPU, Outcome, Site, array_task
from support.login_node import LoginNode
from support.waiting import wait_for

RUN = ("--gpus-per-task", "0", "--", *ON_CPU, "--interval", "0.1")
MERGED = "4822 COMPLETED 0"


@pytest.fixture
def login(site: Site) -> LoginNode:
    """A login node; in the run folder everything has been done by an older job, 4000."""
    manifest = site.manifest(4)
    site.run_tasks(manifest, *ON_CPU, envs=[array_task(index, [0, 1], job_id=4000) for index in (0, 1)])
    return LoginNode(site)


def follow(login: LoginNode, *args: object) -> Outcome:
    """Submit, and see what comes of it."""
    manifest = login.site.folder / "manifest.csv"
    return login.submit(manifest, "--wait", *args, *RUN)


def ends(outcome: Outcome) -> list[tuple[int, str | None]]:
    return [(end["index"], end["state"]) for end in outcome.json["task_ends"]]


def test_tasks_that_fail_at_once_beside_old_results_are_not_all_done(login: LoginNode) -> None:
    login.states("4821_0 FAILED 0", "4821_1 FAILED 0", MERGED)
    failed = follow(login)
    assert failed.exit_code == 1, failed.stdout + failed.stderr
    assert "job 4821 did not complete, but every chunk is done" in failed.stdout
    assert "task 4821_0: FAILED; no log" in failed.stdout
    assert "what is left" not in failed.stdout
    assert "--again -- --no-resume repeats all of it" in failed.stdout
    told = follow(login, "--json")  # the same job once more
    assert (told.json["verdict"], told.json["exit_code"], told.json["summary"]["verdict"]) == ("failed", 1, "done")


def test_a_task_of_which_nobody_knows_is_named_with_its_log_and_work_may_be_left(login: LoginNode) -> None:
    login.forget()
    log = login.site.out / "logs" / "4821_1_0_log.out"
    log.parent.mkdir()
    log.write_text("slurmstepd: error\n")
    unknown = follow(login)
    assert unknown.exit_code == 75, unknown.stdout + unknown.stderr
    assert f"array index 1: state not known; less {log}" in unknown.stdout
    assert "array index 0: state not known; no log" in unknown.stdout


def test_what_squeue_has_forgotten_is_asked_of_accounting_where_there_is_some(login: LoginNode) -> None:
    login.program("squeue", f"printf '4821_1 COMPLETED 0\\n{MERGED}\\n'")
    said = "echo Welcome; echo '4821_0|CANCELLED by 1000'; echo '4821_1|FAILED'; echo '4822|COMPLETED'"
    login.program("sacct", f'printf "%s\\n" "$*" >> $0.called; {said}')
    done = follow(login, "--json")
    assert ends(done) == [(0, "CANCELLED"), (1, "COMPLETED")]  # squeue goes before
    assert (done.exit_code, done.json["verdict"]) == (75, "stopped")
    asked = (login.folder / "sacct.called").read_text()
    assert asked == "-n -X -P -j 4821 -o JobID,State\n"
    login.states("4821_0 COMPLETED 0", "4821_1 COMPLETED 0", MERGED)
    assert follow(login).exit_code == 0
    assert (login.folder / "sacct.called").read_text() == asked, "nobody is asked what is known"


def test_what_its_own_tasks_have_left_speaks_for_them_where_slurm_says_nothing(login: LoginNode) -> None:
    site = login.site
    login.states("4821_0 RUNNING 0", "4821_1 RUNNING 0")
    assert login.submit(site.folder / "manifest.csv", *RUN).exit_code == 0
    login.forget()
    site.run_tasks(site.folder / "manifest.csv", *ON_CPU, envs=[array_task(1, [0, 1])])  # of job 4821
    half = follow(login, "--json")
    assert (half.exit_code, ends(half)) == (75, [(0, None), (1, "COMPLETED")])
    site.run_tasks(site.folder / "manifest.csv", *ON_CPU, envs=[array_task(0, [0, 1])])
    whole = follow(login, "--json")
    assert (whole.exit_code, ends(whole)) == (0, [(0, "COMPLETED"), (1, "COMPLETED")])


def test_a_task_that_was_seen_to_end_is_remembered_when_squeue_has_forgotten_it(login: LoginNode) -> None:
    answers = (
        f"case $(wc -l < $0.asked) in 1) echo '4821_0 TIMEOUT 0'; echo '4821_1 RUNNING 0' ;; *) echo '{MERGED}' ;; esac"
    )
    login.program("squeue", f"echo x >> $0.asked\n{answers}")
    seen = follow(login, "--json")
    assert (seen.exit_code, ends(seen)) == (75, [(0, "TIMEOUT"), (1, None)])


def test_tasks_that_ended_badly_after_their_work_do_not_spoil_the_verdict_and_are_named(login: LoginNode) -> None:
    site = login.site
    login.states("4821_0 RUNNING 0", "4821_1 RUNNING 0")
    assert login.submit(site.folder / "manifest.csv", *RUN).exit_code == 0
    tasks = [array_task(index, [0, 1]) for index in (0, 1)]
    site.run_tasks(site.folder / "manifest.csv", *ON_CPU, envs=tasks)  # of job 4821
    login.states("4821_0 FAILED 0", "4821_1 NODE_FAIL 0", MERGED)
    done = follow(login)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "every chunk is done; 2 tasks failed after their last chunk:\n  task 4821_0: FAILED" in done.stdout
    assert "task 4821_1: NODE_FAIL" in done.stdout
    assert "what is left" not in done.stdout and "did not complete" not in done.stdout
    assert ends(follow(login, "--json")) == [(0, "FAILED"), (1, "NODE_FAIL")]


def test_where_no_task_could_begin_its_exit_code_and_the_end_of_its_log_are_quoted(site: Site) -> None:
    login, manifest = LoginNode(site), site.manifest(2)
    answer = "printf '4821_0 FAILED 256 NonZeroExitCode\\n4821_1 FAILED 256 NonZeroExitCode\\n4822 FAILED 256\\n'"
    login.program("squeue", f"echo x >> $0.asked; {answer}")
    assert login.submit(manifest, "--tasks", 2, *RUN).exit_code == 0
    (site.out / "logs" / "4821_0_0_log.out").write_text("module: command not found\n")
    nobody = login.submit(manifest, "--tasks", 2, "--wait", *RUN)
    assert nobody.exit_code == 3, nobody.stdout
    assert "no task of job 4821 could start\n  why: task 4821_0: FAILED, exit code 1\n" in nobody.stderr
    assert "module: command not found\n  try: less " in nobody.stderr
    assert (login.folder / "squeue.asked").read_text() == "x\n", "one question, and all that Slurm knows"


# --- what is submitted again ------------------------------------------------------------------------------------------


def test_again_on_a_finished_run_submits_nothing_unless_nothing_is_to_be_taken_over(login: LoginNode) -> None:
    manifest = login.site.folder / "manifest.csv"
    done = login.submit(manifest, "--again", *RUN)
    assert (done.exit_code, login.calls) == (0, [])
    assert (login.site.out / "job.sqlite").exists()
    assert not (login.site.out / "report.html").exists(), "nobody draws a page to print a text"
    anew = login.submit(manifest, "--again", "--json", *RUN, "--no-resume")
    assert anew.exit_code == 0, anew.stderr
    assert (anew.json["array"], anew.json["tasks"], anew.json["left"]) == ("0-1", 2, None)
    assert "chunks that are done will be done again" in anew.stderr
    assert len(login.calls) == 2


def test_again_says_how_many_chunks_are_left_and_a_dry_run_of_it_does_nothing(site: Site) -> None:
    login, manifest = LoginNode(site), site.manifest(9)
    site.run_tasks(manifest, *ON_CPU, envs=[array_task(index, [0, 1, 2], job_id=4000) for index in (0, 2)])
    for _ in range(2):
        before = {path: path.stat().st_mtime_ns for path in site.out.rglob("*")}
        shown = login.submit(manifest, "--again", "--dry-run", *RUN)
        assert "#SBATCH --array=1\n" in shown.stdout, shown.stderr
        assert {path: path.stat().st_mtime_ns for path in site.out.rglob("*")} == before, "it does nothing"
        site.badcjobs("merge", site.out, "--remove-merged")  # then only job.sqlite knows what is done
        assert site.task_databases() == []
    again = login.submit(manifest, "--again", *RUN)
    assert "job 4821 is submitted: 1 array task for the 3 of 9 chunks that were left, merge job 4822" in again.stdout
    found = login.submit(manifest, "--json", *RUN)
    assert (found.json["found"], found.json["chunks"], found.json["left"]) == (True, 9, 3), found.stderr


# --- Slurm and an emulation in one folder -----------------------------------------------------------------------------


def test_an_emulation_and_a_job_of_slurm_in_one_folder_each_refuse_the_other_while_it_lives(site: Site) -> None:
    login = LoginNode(site)
    manifest = site.manifest(2)
    waits = f"while [ ! -e {site.folder}/go ]; do sleep 0.05; done"
    engine = site.script("engine", f"{waits}; echo start_time,end_time,label,score > $2")
    work = ("--command", f"{engine} {{input}} {{output}}", "--cpu-workers", 1, "--no-emit-gpu-telemetry")
    options = (manifest, "--gpus-per-task", 0, "--", *work)
    local = ("--cluster", "local")
    emulation = site.start("submit", "--out", site.out, *local, *options)
    wait_for(lambda: list(site.out.glob("tasks/*.sqlite")), "it is at work")
    refused = login.submit(*options)
    assert refused.exit_code == 2, refused.stderr
    assert f"another emulation, process {emulation.pid}" in refused.stderr
    assert f"kill {emulation.pid} ends it" in refused.stderr
    assert login.calls == []
    (site.folder / "go").touch()
    assert emulation.wait().exit_code == 0
    assert login.submit(*options).exit_code == 0  # it has ended: nothing is in the way
    for more in ((), ("--again",)):
        other = login.submit(*local, *more, *options)
        assert other.exit_code == 2, other.stderr
        assert "already has job 4821 of --cluster slurm" in other.stderr
        assert "scancel 4821 4822" in other.stderr
    login.program("squeue", "exit 7")
    unknown = login.submit(*local, *options)
    assert (unknown.exit_code, "it is not known whether it has ended" in unknown.stderr) == (2, True)
    assert login.submit(*local, "--again", *options).exit_code == 0
    login.forget()
    assert login.submit(*local, *options).exit_code == 0
