"""``badcjobs submit --cluster local JOB.sbatch``: a job script of a user, with the options of sbatch beside it."""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.badcjobs_program import ON_CPU, Outcome, Site, assert_refused
from support.waiting import wait_for

LOCAL = ("submit", "--cluster", "local")


def write_script(site: Site, *lines: str, name: str = "job.sbatch") -> Path:
    script = site.folder / name
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return script


def filled_template(site: Site, *settings: str, name: str = "array") -> Path:
    """Fill in a template as a user does, with this badcjobs in it."""
    program = site.script("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
    words = [f"--set={one}" for one in (*settings, f"badcjobs={program}", *(f"args={word}" for word in ON_CPU))]
    script = site.folder / "filled.sbatch"
    done = site.badcjobs("template", name, *words, "-o", script)
    assert done.exit_code == 0, done.stderr
    return script


@pytest.mark.parametrize("asks", ["--gpus-per-node=4", "--gres=gpu:4", "-G4", "--ntasks=4 --gpus-per-task=1"])
def test_options_that_sbatch_has_too_win_over_the_lines_of_the_script(site: Site, asks: str) -> None:
    script = write_script(
        site,
        f"#SBATCH --time=5 --job-name=mine --cpus-per-task=2 --mem=1G {asks} --array=0-9",
        f"env > {site.folder}/env-$SLURM_ARRAY_TASK_ID",
    )
    options = ("--time", "1:00:00", "--sbatch=--job-name=theirs", "--cpus", 1, "--mem", "16GB", "--gpus-per-task", 2)
    more = ("--account", "st-pi-1", "--sbatch=--array=3", "--config", "run.simulate=2")
    done = site.badcjobs(*LOCAL, script, *options, *more)
    assert done.exit_code == 0, done.stderr
    env = dict(line.split("=", 1) for line in (site.folder / "env-3").read_text().splitlines() if "=" in line)
    assert int(env["SLURM_JOB_END_TIME"]) - int(env["SLURM_JOB_START_TIME"]) == 3600
    assert (env["SLURM_JOB_NAME"], env["SLURM_CPUS_PER_TASK"], env["SLURM_MEM_PER_NODE"]) == ("theirs", "1", "16384")
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "--account" in done.stderr  # left to Slurm, and said so
    assert [path.name for path in site.folder.glob("env-*")] == ["env-3"]


def test_options_that_would_never_reach_the_script_are_refused_by_name(site: Site) -> None:
    script = write_script(site, f"touch {site.folder}/ran")
    lost = ("--config", "submit.setup=['module load gcc']", "--config", "submit.merge_mem=8G", "--root", "audio")
    assert_refused(
        site.badcjobs(*LOCAL, script, *lost),
        2,
        "[submit] setup, [submit] merge_mem, --root: not with a job script",
        "edit ",
    )
    (site.folder / "x.toml").write_text("[run]\nretries = 5\n")
    of_run = ("--config", "x.toml", "--config", "alerts.idle_s=9", "--", "--engine", "demo", "--no-resume")
    words = f"--config={site.folder}/x.toml --config=alerts.idle_s=9 --no-resume --engine=demo"
    refused = site.badcjobs(*LOCAL, script, *of_run)
    assert_refused(refused, 2, f"would not get {words}", "BADCJOBS_ARGS, which this one does not use", f"add {words}")
    uses = write_script(site, "badcjobs run m.csv --out out $BADCJOBS_ARGS", name="uses.sbatch")
    exported = site.badcjobs(*LOCAL, uses, "--sbatch=--export=ALL,BADCJOBS_ARGS=--no-resume", "--", "--engine", "demo")
    assert_refused(exported, 2, "would not get --engine=demo", "--export sets BADCJOBS_ARGS")
    nowhere = site.badcjobs(*LOCAL, "nope.sbatch")
    assert_refused(nowhere, 2, "the job script nope.sbatch cannot be read", "try: ls -l .")
    assert not (site.folder / "ran").exists()


def test_one_source_reaches_a_script_with_its_blanks_and_two_are_refused(site: Site) -> None:
    script = write_script(site, f'printf %s "$SOURCE" > {site.folder}/source')
    assert site.badcjobs(*LOCAL, script, "my birds/july.csv").exit_code == 0
    assert (site.folder / "source").read_text() == "my birds/july.csv"
    two = site.badcjobs(*LOCAL, script, "a.csv", "b.csv")
    assert_refused(two, 2, "2 sources, but a job script takes one", "SOURCE")


def test_a_script_is_emulated_as_it_is_whatever_the_project_file_asks_of_a_source(site: Site) -> None:
    manifest = site.manifest(4)
    (site.folder / "badcjobs.toml").write_text(
        f'[run]\nout = "{site.out}"\nengine = "demo"\ncpu_workers = 1\nemit_gpu_telemetry = false\nretries = 7\n'
        '[submit]\ncluster = "local"\ntasks = 9\ngpus_per_task = 4\nsetup = ["exit 9"]\n'
    )
    run = f"exec {sys.executable} -m badcjobs run {manifest}"
    script = write_script(site, "#SBATCH --array=0-1 --cpus-per-task=1", run)
    done = site.badcjobs("submit", script, "--json")
    assert done.exit_code == 0, done.stderr
    assert (len(done.json["tasks"]), done.json["out"], done.json["summary"]["done"]) == (2, str(site.out), 4)
    assert "retries = 7" in (site.out / "run.toml").read_text(), "its badcjobs has read the same file"


@pytest.mark.parametrize("array", ["0-1", "0-1%1"])
def test_a_script_that_says_itself_where_its_results_go_is_merged_and_named_to_go_on(site: Site, array: str) -> None:
    manifest = site.manifest(4)
    script = filled_template(site, f"source={manifest}", f"out={site.out}", f"array={array}", "gpus-per-node=1")
    done = site.badcjobs(*LOCAL, script, "--gpus-per-task", 0, "--json")
    assert done.exit_code == 0, done.stderr
    assert (done.json["out"], done.json["summary"]["done"]) == (str(site.out), 4)
    assert (site.out / "job.sqlite").exists()


def test_what_an_emulated_run_has_left_is_finished_by_the_command_that_is_named(site: Site) -> None:
    stops = f"[ -e {site.folder}/well ] || case $BADCJOBS_CHUNK_ID in c001|c003) kill -TERM $PPID; sleep 5 ;; esac"
    engine = site.script("engine", f'{stops}\necho start_time,end_time,label,score > "$2"')
    work = (
        "--command",
        f"{engine} {{input}} {{output}}",
        "--cpu-workers",
        1,
        "--no-emit-gpu-telemetry",
    )
    keys = ("submit.requeues=0", "submit.kill_wait_s=2", "run.grace_s=0.1")
    wished = ("--tasks", 2, "--gpus-per-task", 0, "--time", 90, *(f"--config={key}" for key in keys))
    first = site.badcjobs(*LOCAL, site.manifest(4), "--out", site.out, *wished, "--json", "--", *work)
    assert first.exit_code == 75, first.stderr
    proof = first.json["summary"]["completeness"]
    assert proof["left_indices"] == [1]
    (command,) = proof["finish"]
    assert command.startswith("badcjobs submit /")
    before, after = (set(shlex.split(part)) for part in command.split(" -- "))
    assert {"--cluster=local", "--sbatch=--array=0-1", "--time=90", *(f"--config={key}" for key in keys)} <= before
    assert "--cpu-workers=1" in after
    (site.folder / "well").touch()
    last = site.badcjobs("submit", "--json", *shlex.split(command)[2:])
    assert last.exit_code == 0, last.stderr
    assert last.json["summary"]["completeness"]["complete"]


def test_a_script_that_left_something_names_the_log_of_who_said_nothing_and_the_command_that_goes_on(
    site: Site,
) -> None:
    manifest = site.manifest(4)
    refuses = "[ -e well ] || [ $SLURM_ARRAY_TASK_ID = 0 ] || exit 9"
    script = filled_template(site, f"source={manifest}", "array=0-1", "gpus-per-node=1", f"setup={refuses}")
    words = (script.name, "--out", site.out.name, "--gpus-per-task", 0, "--sbatch=--comment='two words'")
    first = site.badcjobs(*LOCAL, *words, "--json")
    assert first.exit_code == 75, first.stderr
    proof = first.json["summary"]["completeness"]
    log = site.folder / f"badcjobs-{first.json['job_id']}_1.log"
    assert (proof["missing_indices"], proof["missing_logs"], log.exists()) == ([1], [str(log)], True)
    (command,) = proof["finish"]
    assert shlex.split(command)[2:] == [
        str(script), "--cluster=local", f"--out={site.out}", "--sbatch=--gres=", "--sbatch=--gpus=",
        "--sbatch=--gpus-per-task=", "--sbatch=--gpus-per-node=0",
        "--sbatch='--comment=two words'",
    ]  # fmt: skip
    (site.folder / "well").touch()
    last = site.badcjobs(*shlex.split(command)[1:], "--json")
    assert (last.exit_code, last.json["summary"]["completeness"]["complete"]) == (0, True), last.stderr


def test_a_job_belongs_to_whoever_runs_it_whatever_the_variables_say(site: Site) -> None:
    script = write_script(site, f"echo $SLURM_JOB_USER > {site.folder}/user")
    assert site.badcjobs(*LOCAL, script, env={"USER": "nobody-else"}).exit_code == 0
    assert (site.folder / "user").read_text().strip() == pwd.getpwuid(os.getuid()).pw_name


def test_a_script_that_calls_srun_is_said_to_before_it_starts(site: Site) -> None:
    path = {"PATH": "/usr/bin:/bin"}
    script = write_script(site, "# srun is for several nodes", 'echo "no srun"', "X=1 exec srun -n1 true")
    told = site.badcjobs(*LOCAL, script, env=path)
    assert "line 4 of the script calls srun, which does not work" in told.stderr
    assert told.stderr.index("calls srun") < told.stderr.index("RUNNING")
    quiet = write_script(site, "# srun is for several nodes", 'echo "no srun"')
    assert "calls srun" not in site.badcjobs(*LOCAL, quiet, env=path).stderr


# --- devices that are not there ---------------------------------------------------------------------------------------


def test_the_badcjobs_in_a_template_knows_the_simulated_devices_of_the_emulation(site: Site) -> None:
    manifest = site.manifest(4)
    program = site.script("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
    script = site.folder / "filled.sbatch"
    words = [f"--set={one}" for one in (f"source={manifest}", f"out={site.out}", f"badcjobs={program}")]
    assert site.badcjobs("template", "array", *words, "--set=array=0-1", "-o", script).exit_code == 0
    more = {"BADCJOBS_ARGS": "--engine demo --interval 0.1"}
    options = ("--gpus-per-task", 2, "--cpus", 1, "--json", "--", "--simulate", 4)
    done = site.badcjobs(*LOCAL, script, *options, env=more)
    assert done.exit_code == 0, done.stderr
    devices = done.json["summary"]["devices"]
    assert {device["backend"] for device in devices} == {"simulated"}
    assert len(devices) == 4 and all(device["samples"] > 0 for device in devices)


@pytest.mark.parametrize(
    "run", ["run $SOURCE --out $OUT --engine demo", "run a.csv --out b --engine demo --config run.grace_s=3"]
)
def test_a_script_whose_badcjobs_would_not_hear_of_simulated_devices_is_refused(site: Site, run: str) -> None:
    script = write_script(site, "#SBATCH --gpus-per-node=1", "echo hello", f"exec badcjobs {run}")
    refused = site.badcjobs(*LOCAL, script, site.manifest(2), "--out", site.out, "--", "--simulate", 2)
    assert_refused(refused, 2, "line 4: the badcjobs there would not get --simulate=2", "add --simulate=2 to its line")
    assert not site.out.exists()


def interrupt(site: Site, *args: object) -> Outcome:
    script = write_script(site, f"touch {site.folder}/up", "exec sleep 60")
    program = site.start(*LOCAL, script, *args)
    wait_for(lambda: (site.folder / "up").exists(), "it runs")
    program.send(signal.SIGINT)
    return program.wait()


@pytest.mark.parametrize("out", [(), ("--out", "run")], ids=["without an out", "with one"])
def test_ctrl_c_is_130_whether_or_not_the_script_has_an_out(site: Site, out: tuple[str, ...]) -> None:
    assert interrupt(site, *out).exit_code == 130


def test_what_cannot_begin_leaves_no_folder(site: Site) -> None:
    of_run = ("--engine", "demo", "--simulate", 2)
    options = (site.manifest(2), "--out", site.out, "--gpus-per-task", 3, "--", *of_run)
    assert_refused(site.badcjobs(*LOCAL, *options), 3, "asks for 3 GPUs")
    assert not site.out.exists()
