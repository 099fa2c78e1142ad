"""``badcjobs submit`` before Slurm says anything: what it checks, what it hands to sbatch, what it refuses.

sbatch, srun and squeue are stand-ins on PATH; what a real Slurm makes of it is in tests/slurm.
"""

from __future__ import annotations

import json

import pytest
from support.badcjobs_program import ON_CPU, Site, array_task, assert_refused
from support.login_node import LoginNode

RUN = ("--gpus-per-task", "0", "--", *ON_CPU)


@pytest.fixture
def login(site: Site) -> LoginNode:
    return LoginNode(site)


def test_the_array_and_then_its_merge_job_are_handed_to_sbatch_and_the_ids_read_past_the_banner(
    site: Site, login: LoginNode
) -> None:
    done = login.submit(site.manifest(6), "--tasks", 3, "--json", *RUN)
    assert done.exit_code == 0, done.stderr
    assert (done.json["job_id"], done.json["merge_job_id"], done.json["array"]) == ("4821", "4822", "0-2")
    assert (done.json["tasks"], done.json["chunks"], done.json["found"]) == (3, 6, False)
    array, merge = login.calls
    assert array.startswith(str(site.out / "logs"))
    assert merge == f"--parsable --dependency=afterany:4821 {site.out}/logs/4821_merge.sh"
    [work] = (site.out / "logs").glob("*.pkl")
    [link] = [line for line in (site.out / "logs" / "4821_submission.sh").read_text().splitlines() if "ln -s" in line]
    assert link.startswith(f"ln -s {work.name} {site.out}/logs/"), "each task finds there what it is to do"


def test_the_step_of_an_array_task_is_given_the_cores_that_the_job_has(site: Site, login: LoginNode) -> None:
    """Since Slurm 22.05 srun does not inherit them from sbatch, and a task would work with one core."""
    assert login.submit(site.manifest(6), "--tasks", 3, "--cpus", 7, *RUN).exit_code == 0
    [script] = (site.out / "logs").glob("4821_submission*.sh")
    lines = script.read_text().splitlines()
    assert "#SBATCH --cpus-per-task=7" in lines
    [step] = [line for line in lines if line.startswith("srun ")]
    assert "--cpus-per-task=7" in step.split()


def test_the_same_command_finds_its_job_and_submits_nothing_until_it_has_ended(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(6)
    assert login.submit(manifest, *RUN).exit_code == 0
    again = login.submit(manifest, *RUN)
    assert again.exit_code == 0
    assert "job 4821 exists already" in again.stdout
    assert_refused(login.submit(manifest, "--again", *RUN), 2, "job 4821 has not ended yet", "scancel 4821 4822")
    assert_refused(
        login.submit(manifest, "--config", "run.backoff_s=3", *RUN),
        2,
        "was submitted with other options",
        "--config=run.backoff_s=3",
    )
    assert len(login.calls) == 2
    login.program("squeue", "echo Unable to contact slurm controller >&2; exit 1")
    unknown = login.submit(manifest, *RUN)
    assert (unknown.exit_code, "it is not known whether the job has ended" in unknown.stderr) == (0, True)
    silent = login.submit(manifest, "--again", *RUN)
    assert_refused(silent, 5, "it is not known whether job 4821 has ended", "try: squeue -j 4821")
    login.forget()
    # It has ended, and no task of it has left anything: nobody began.
    nobody = login.submit(manifest, "--wait", *RUN)
    assert nobody.exit_code == 3
    assert "no task of job 4821 could start" in nobody.stderr
    assert login.submit(manifest, "--again", *RUN).exit_code == 0
    assert len(login.calls) == 4


def test_inside_a_job_nothing_of_it_is_passed_on_and_outside_a_users_own_variables_are(
    site: Site, login: LoginNode
) -> None:
    manifest = site.manifest(3)
    inside = {**array_task(2, [0, 1, 2]), "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_PER_NODE": "1"}
    assert login.submit(manifest, *RUN, env={**inside, "SLURM_CONF": "/somewhere/slurm.conf"}).exit_code == 0
    for call in (1, 2):
        seen = login.environment(call)
        assert [name for name in seen if name.startswith("SLURM")] == ["SLURM_CONF"]
        assert not {"CUDA_VISIBLE_DEVICES", "TMPDIR"} & set(seen)
    (site.out / "submitted.json").unlink()
    assert login.submit(manifest, *RUN, env={"SBATCH_ACCOUNT": "st-pi-1", "CUDA_VISIBLE_DEVICES": "0"}).exit_code == 0
    seen = login.environment(3)
    assert (seen["SBATCH_ACCOUNT"], seen["CUDA_VISIBLE_DEVICES"]) == ("st-pi-1", "0")


def test_options_of_run_reach_the_tasks_with_absolute_paths_and_auto_workers_unless_the_file_says_otherwise(
    site: Site, login: LoginNode
) -> None:
    site.manifest(3)
    config = site.folder / "badc.toml"
    config.write_text("[run]\nretries = 5\n")
    args = (
        "manifest.csv",
        "--root",
        "audio",
        "--config",
        "badc.toml",
        *RUN,
        "--engine-arg=--burn-s=0.1",
        "--no-resume",
    )
    assert login.submit(*args).exit_code == 0
    record = json.loads((site.out / "submitted.json").read_text())
    assert record["run_arguments"] == [
        "run", f"{site.folder}/manifest.csv", f"--out={site.out}", f"--config={config}", "--no-resume",
        "--engine=demo", "--engine-arg=--burn-s=0.1", f"--root={site.folder}/audio", "--workers-per-gpu=auto",
        "--cpu-workers=1", "--no-emit-gpu-telemetry",
    ]  # fmt: skip
    (site.out / "submitted.json").unlink()
    config.write_text("[run]\nretries = 5\nworkers_per_gpu = 2\n")
    assert login.submit(*args).exit_code == 0
    record = json.loads((site.out / "submitted.json").read_text())
    assert not [word for word in record["run_arguments"] if "workers-per-gpu" in word]


def test_a_job_script_is_refused_for_slurm_and_options_that_stand_elsewhere_with_a_line_to_paste(
    site: Site, login: LoginNode
) -> None:
    manifest = site.manifest(3)
    assert_refused(login.submit(manifest, "--share-gpus", *RUN), 2, "try: --config submit.share_gpus=true")
    assert_refused(login.submit(manifest, "--kill-wait", 30, *RUN), 2, "try: --config submit.kill_wait_s=30")
    assert_refused(login.submit(manifest, "--engine", "demo"), 2, " -- --engine demo")
    assert_refused(login.submit(manifest, *RUN, "--shard", "0/2"), 2, "--shard cannot be given after --")
    assert_refused(login.submit("a.sbatch"), 2, "a.sbatch is a job script", "try: sbatch a.sbatch")
    assert login.calls == []


def test_a_merge_job_that_sbatch_refuses_is_told_in_the_answer_and_the_array_stays(
    site: Site, login: LoginNode
) -> None:
    manifest = site.manifest(3)
    refuses = "*--parsable*) echo 'sbatch: error: Memory specification can not be satisfied' >&2; exit 1 ;;"
    login.program("sbatch", f'case "$*" in {refuses} *) echo Submitted batch job 4821 ;; esac')
    told = login.submit(manifest, "--json", *RUN)
    assert told.exit_code == 0, told.stderr
    assert (told.json["job_id"], told.json["merge_job_id"]) == ("4821", None)
    assert "Memory specification can not be satisfied" in told.json["merge_refused"]
    (site.out / "submitted.json").unlink()
    said = login.submit(manifest, *RUN)
    assert f"there is no merge job; later: badcjobs merge {site.out}" in said.stdout
    assert "Memory specification can not be satisfied" in said.stderr


def test_a_list_of_manifests_gets_a_task_for_each_line(site: Site, login: LoginNode) -> None:
    for name in ("a", "b", "c"):
        site.manifest(3, name=f"{name}.csv", prefix=name)
    listed = site.folder / "manifests.txt"
    listed.write_text("a.csv\nb.csv\nc.csv\n")
    assert_refused(login.submit(listed, "--tasks", 2, *RUN), 2, "the list names 3 manifests")
    done = login.submit(listed, "--json", *RUN)
    assert (done.json["array"], done.json["chunks"]) == ("0-2", 9)


def test_a_source_that_cannot_be_used_is_refused_before_anything_is_submitted(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(6)
    (site.folder / "audio" / "c002.wav").unlink()
    assert_refused(login.submit(manifest, *RUN), 2, "c002.wav")
    site.manifest(6)
    manifest.write_text(manifest.read_text() + manifest.read_text().splitlines()[3] + "\n")
    assert_refused(login.submit(manifest, *RUN), 2, "already on line 4")
    assert login.calls == []
    assert not site.out.exists()


def test_every_mistake_in_the_options_is_told_at_once(site: Site, login: LoginNode) -> None:
    wrong = login.submit(
        site.manifest(3), "--time", "soon", "--mem", "much", "--sbatch=--array=1,2,5", "--", "--engine", "crow",
        "--retries", -1,
    )  # fmt: skip
    assert_refused(
        wrong, 2, '--time = "soon"', '--mem = "much"', "--array=1,2,5", '--engine = "crow"', "--retries = -1"
    )
    assert_refused(login.submit(), 2, "SOURCE is missing")
    assert_refused(site.badcjobs("submit", "m.csv"), 2, "--out DIR is missing")
    assert_refused(site.badcjobs("submit", "m.csv", "--out", ""), 2, "--out DIR is missing")  # an empty shell variable
    assert_refused(login.submit("m.csv", "--cluster", "pbs"), 2, '--cluster = "pbs" must be one of slurm, local')


def test_a_run_folder_that_belongs_to_another_run_is_refused(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(4)
    envs = [array_task(index, [0, 1]) for index in (0, 1)]
    site.run_tasks(manifest, *ON_CPU, envs=envs)
    same = (*RUN, "--interval", "0.1")
    assert_refused(login.submit(manifest, *same, "--retries", 9), 2, "retries was 2, now 9")
    assert_refused(login.submit(manifest, "--tasks", 4, *same), 2, "was started as an array of 2 (0-1)")
    assert login.calls == []
    done = login.submit(manifest, "--sbatch=--array=1", "--json", *same)  # and the shape is taken over from there
    assert (done.exit_code, done.json["array"], done.json["tasks"]) == (0, "1", 1)


def test_without_slurm_there_is_the_script_but_no_submission(site: Site) -> None:
    nowhere = {"PATH": str(site.folder / "no-programs")}
    setup = ("--config", "submit.setup=['module load gcc cuda']")
    args = (site.manifest(3), "--out", site.out, *setup, "--account=st-pi-1", *RUN)
    shown = site.badcjobs("submit", "--dry-run", *args, env=nowhere)
    assert shown.exit_code == 0, shown.stderr
    assert "\nmodule load gcc cuda\n" in shown.stdout
    assert shown.stdout.count("#SBATCH --account=st-pi-1\n") == 2
    assert not site.out.exists()
    assert_refused(site.badcjobs("submit", *args, env=nowhere), 3, "there is no Slurm here", "--cluster local")


def test_what_sbatch_refuses_is_told_in_its_own_words(site: Site, login: LoginNode) -> None:
    login.program("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert_refused(login.submit(site.manifest(3), *RUN), 5, "Invalid account")
    assert not (site.out / "submitted.json").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_submitted(site: Site, login: LoginNode) -> None:
    site.out.write_text("a file")
    assert_refused(login.submit(site.manifest(3), *RUN), 2, str(site.out))
    assert login.calls == []


def test_a_record_that_somebody_has_edited_is_named(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(3)
    assert login.submit(manifest, *RUN).exit_code == 0
    (site.out / "submitted.json").write_text('{"job": 1}')
    assert_refused(login.submit(manifest, *RUN), 2, "submitted.json is damaged", "mv ")


# --- a job that is there already --------------------------------------------------------------------------------------


def test_other_options_than_those_of_the_job_that_is_there_are_named_with_both_values(
    site: Site, login: LoginNode
) -> None:
    manifest = site.manifest(3)
    first = ("--time", "12:00:00", "--mem", "16GB", "--account", "st-pi-1", "--sbatch=--array=0-1%1")
    assert login.submit(manifest, *first, *RUN).exit_code == 0
    same = login.submit(
        manifest, "--time", "720", "--mem", "16G", "--account=st-pi-1", "--tasks=2", "--parallel=1", *RUN
    )
    assert (same.exit_code, "exists already" in same.stdout) == (0, True), same.stderr
    other = login.submit(manifest, "--time", "1-0", "--mem", "32G", "--sbatch=--array=0-3", "--sbatch=--qos=high", *RUN)
    assert_refused(
        other, 2, "--time was 720, now 1440", "--mem was 16G, now 32G", "--account was st-pi-1, now not given",
        "--array was 0-1%1, now 0-3", "--sbatch was not given, now --qos=high", "--again", "scancel 4821 4822",
    )  # fmt: skip
    assert len(login.calls) == 2
    login.forget()
    assert login.submit(manifest, *first, "--mem", "32G", "--again", *RUN).exit_code == 0  # and the last --mem wins
    assert json.loads((site.out / "submitted.json").read_text())["asked"]["--mem"] == "32G"


def test_a_job_that_an_earlier_version_has_submitted_is_found(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(3)
    assert login.submit(manifest, "--json", *RUN).json["audio_looked_at"] == 3
    file = site.out / "submitted.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({key: record[key] for key in record if key not in ("asked", "listed")}))
    found = login.submit(manifest, "--mem", "9G", "--json", *RUN)
    assert (found.exit_code, found.json["found"], found.json["audio_looked_at"]) == (0, True, None)


def test_a_list_of_manifests_finds_its_job_before_any_task_has_begun(site: Site, login: LoginNode) -> None:
    site.manifest(3, name="a.csv", prefix="a")
    site.manifest(3, name="b.csv", prefix="b")
    (site.folder / "manifests.txt").write_text("a.csv\nb.csv\n")
    assert login.submit("manifests.txt", *RUN).exit_code == 0
    found = login.submit("manifests.txt", *RUN)
    assert (found.exit_code, "exists already: 2 array tasks for 6 chunks" in found.stdout) == (0, True), found.stderr


def test_the_help_says_how_a_job_is_found_again_and_what_again_does(site: Site) -> None:
    said = " ".join(site.badcjobs("submit", "--help").stdout.split())
    assert "The same command finds its job again and never submits it twice" in said
    assert "--again Submit what is left after the job has ended" in said


# --- a project file ---------------------------------------------------------------------------------------------------


def test_with_a_project_file_submit_needs_no_words_and_options_win_over_it(site: Site, login: LoginNode) -> None:
    site.manifest(4)
    engine = 'engine = "demo"\ncpu_workers = 1\nemit_gpu_telemetry = false\n'
    (site.folder / "badcjobs.toml").write_text(
        f'site = "sockeye"\n[run]\nsource = ["manifest.csv"]\nout = "run"\n{engine}'
        '[submit]\ntasks = 2\ngpus_per_task = 0\naccount = "st-lab-1-gpu"\nsetup = ["module load gcc"]\n'
    )
    path = {"PATH": f"{login.folder}:/usr/bin:/bin"}
    shown = site.badcjobs("submit", "--dry-run", "--config", "submit.requeues=3", "--mem", "9G", env=path)
    assert shown.exit_code == 0, shown.stderr
    array, merge = shown.stdout.split("# ---- the merge job")
    assert "#SBATCH --array=0-1\n" in array and "#SBATCH --mem=9G\n" in array and "\nmodule load gcc\n" in array
    assert "#SBATCH --account=st-lab-1-gpu\n" in array and "#SBATCH --account=st-lab-1\n" in merge
    assert "settings: badcjobs.toml\n" in shown.stderr
    done = site.badcjobs("submit", "--json", env=path)
    assert (done.exit_code, done.json["array"], done.json["chunks"]) == (0, "0-1", 4), done.stderr
    record = json.loads((site.out / "submitted.json").read_text())
    assert record["run_arguments"] == [
        "run", f"{site.folder}/manifest.csv", f"--out={site.out}", f"--config={site.folder}/badcjobs.toml",
        "--workers-per-gpu=auto",
    ]  # fmt: skip
    found = site.badcjobs("submit", env=path)
    assert "job 4821 exists already" in found.stdout, found.stderr
    assert_refused(site.badcjobs("submit", "--tasks", 3, env=path), 2, "--sbatch=--array was 0-1, now 0-2")


# --- what is told -----------------------------------------------------------------------------------------------------


def test_one_task_is_one_task_and_a_large_source_is_said_to_be_looked_at_in_part(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(3)
    header, *rows = manifest.read_text().splitlines()
    many = [row.replace(f",c00{i % 3},", f",c{i},") for i, row in enumerate(rows * 2000)]
    manifest.write_text("\n".join([header, *many]) + "\n")
    done = login.submit(manifest, *RUN)
    assert done.exit_code == 0, done.stderr
    assert "job 4821 is submitted: 1 array task for 6,000 chunks, merge job 4822" in done.stdout
    assert "checked the audio of 2,000 of 6,000 chunks; badcjobs check opens all" in done.stdout
    (site.out / "submitted.json").unlink()
    as_json = login.submit(manifest, "--json", *RUN).json
    assert (as_json["audio_looked_at"], as_json["chunks"]) == (2000, 6000)


def test_a_refused_submit_leaves_no_folder_and_says_its_reason_once(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(3)
    login.program("sbatch", "echo 'sbatch: error: invalid partition specified: none' >&2; exit 1")
    refused = login.submit(manifest, "--sbatch=--partition=none", *RUN)
    assert_refused(refused, 5, "Slurm did not accept the array")
    assert refused.stderr.count("invalid partition specified") == 1
    assert not site.out.exists()
    (site.out / "logs").mkdir(parents=True)
    assert_refused(login.submit(manifest, *RUN), 5, "Slurm did not accept the array")
    assert [path.name for path in site.out.rglob("*")] == ["logs"]  # what was there stays
    nowhere = site.badcjobs("submit", manifest, "--out", site.out / "new", *RUN, env={"PATH": str(site.folder)})
    assert_refused(nowhere, 3, "there is no Slurm here")
    assert not (site.out / "new").exists()


def test_several_nodes_are_refused_with_the_way_that_there_is(site: Site, login: LoginNode) -> None:
    manifest = site.manifest(3)
    assert_refused(login.submit(manifest, "--sbatch=--nodes=2", *RUN), 2, "one node", "badcjobs template multinode")
    assert_refused(login.submit(manifest, "--sbatch=-N2", *RUN), 2, "not a long option of sbatch")
    assert login.submit(manifest, "--sbatch=--nodes=1", *RUN).exit_code == 0


def test_a_poll_that_is_no_time_is_refused(site: Site, login: LoginNode) -> None:
    for text in ("soon", "0", "nan"):
        wrong = login.submit(site.manifest(3), *RUN, env={"BADCJOBS_POLL_S": text})
        assert_refused(wrong, 2, f"BADCJOBS_POLL_S={text} is not a number of seconds")
