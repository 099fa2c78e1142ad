"""``badcjobs submit`` before Slurm says anything: what it checks, what it hands to sbatch, what it refuses.

sbatch, srun and squeue are stand-ins on PATH; what a real Slurm makes of it is in tests/slurm.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.badcjobs_program import ON_CPU, Outcome, Site, array_task, assert_refused

Submit = Callable[..., Outcome]
RUN = (*ON_CPU, "--gpus-per-task", "0")

SBATCH = """
echo "$@" >> $0.called
env > $0.env.$(wc -l < $0.called)
echo '--> Checking allocation...OK'
case "$*" in *--parsable*) echo 4822 ;; *) echo Submitted batch job 4821 ;; esac
"""


@pytest.fixture
def login(site: Site) -> Path:
    """The folder of Slurm's programs, as a login node has them; sacct is not among them."""
    (site.folder / "slurm-bin").mkdir()
    site.script("slurm-bin/sbatch", SBATCH)
    site.script("slurm-bin/srun", "exit 1")
    site.script("slurm-bin/squeue", "printf '4821|0|RUNNING\\n4822|N/A|PENDING\\n'")
    return site.folder / "slurm-bin"


@pytest.fixture
def submit(site: Site, login: Path) -> Submit:
    """Call ``badcjobs submit`` with Slurm's programs on PATH."""

    def call(*args: object, env: dict[str, str] | None = None) -> Outcome:
        return site.badcjobs(
            "submit",
            *args,
            "--out",
            site.out,
            env={"PATH": f"{login}:/usr/bin:/bin", "BADCJOBS_POLL_S": "1", **(env or {})},
        )

    return call


def calls(login: Path) -> list[str]:
    log = login / "sbatch.called"
    return log.read_text().splitlines() if log.exists() else []


def environment(login: Path, call: int) -> dict[str, str]:
    lines = (login / f"sbatch.env.{call}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_the_array_and_then_its_merge_job_are_handed_to_sbatch_and_the_ids_read_past_the_banner(
    site: Site, submit: Submit, login: Path
) -> None:
    done = submit(site.manifest(6), "--tasks", 3, *RUN, "--json")
    assert done.exit_code == 0, done.stderr
    assert (done.json["job_id"], done.json["merge_job_id"], done.json["array"]) == ("4821", "4822", "0-2")
    assert (done.json["tasks"], done.json["chunks"], done.json["found"]) == (3, 6, False)
    array, merge = calls(login)
    assert array.startswith(str(site.out / "logs"))
    assert merge == f"--parsable --dependency=afterany:4821 {site.out}/logs/4821_merge.sh"
    assert {path.name for path in (site.out / "logs").glob("*_submitted.pkl")} == {
        f"4821_{index}_submitted.pkl" for index in range(3)
    }


@pytest.mark.parametrize(("array", "indices"), [("5", [5]), ("3-9:3", [3, 6, 9]), ("1-2%1", [1, 2])])
def test_every_array_index_finds_its_file_whatever_the_array_looks_like(
    site: Site, submit: Submit, array: str, indices: list[int]
) -> None:
    assert submit(site.manifest(3), "--array", array, *RUN).exit_code == 0
    names = sorted(path.name for path in (site.out / "logs").glob("*.pkl"))
    assert names == [f"4821_{index}_submitted.pkl" for index in indices]


def test_the_same_command_finds_its_job_and_submits_nothing_until_it_has_ended(
    site: Site, submit: Submit, login: Path
) -> None:
    manifest = site.manifest(6)
    assert submit(manifest, *RUN).exit_code == 0
    again = submit(manifest, *RUN)
    assert again.exit_code == 0
    assert "job 4821 is there already" in again.stdout
    assert_refused(submit(manifest, *RUN, "--again"), 2, "job 4821 has not ended yet", "scancel 4821 4822")
    assert_refused(submit(manifest, *RUN, "--backoff", 3), 2, "it was told something else", "--backoff=3.0")
    assert len(calls(login)) == 2
    site.script("slurm-bin/squeue", "echo Unable to contact slurm controller >&2; exit 1")
    unknown = submit(manifest, *RUN)
    assert (unknown.exit_code, "nobody knows whether it has ended" in unknown.stderr) == (0, True)
    site.script("slurm-bin/squeue", "echo Invalid job id specified >&2; exit 1")
    # It has ended, and no task of it has left anything: nobody began.
    nobody = submit(manifest, *RUN, "--wait")
    assert nobody.exit_code == 3
    assert "no task of job 4821 could begin" in nobody.stderr
    assert submit(manifest, *RUN, "--again").exit_code == 0
    assert len(calls(login)) == 4


def test_inside_a_job_nothing_of_it_is_passed_on_and_outside_a_users_own_variables_are(
    site: Site, submit: Submit, login: Path
) -> None:
    manifest = site.manifest(3)
    inside = {**array_task(2, [0, 1, 2]), "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_PER_NODE": "1"}
    assert submit(manifest, *RUN, env={**inside, "SLURM_CONF": "/somewhere/slurm.conf"}).exit_code == 0
    for call in (1, 2):
        seen = environment(login, call)
        assert [name for name in seen if name.startswith("SLURM")] == ["SLURM_CONF"]
        assert not {"CUDA_VISIBLE_DEVICES", "TMPDIR"} & set(seen)
    (site.out / "submitted.json").unlink()
    assert submit(manifest, *RUN, env={"SBATCH_ACCOUNT": "st-pi-1", "CUDA_VISIBLE_DEVICES": "0"}).exit_code == 0
    seen = environment(login, 3)
    assert (seen["SBATCH_ACCOUNT"], seen["CUDA_VISIBLE_DEVICES"]) == ("st-pi-1", "0")


def test_options_of_run_reach_the_tasks_with_absolute_paths_and_auto_workers_unless_the_file_says_otherwise(
    site: Site, submit: Submit
) -> None:
    site.manifest(3)
    config = site.folder / "badc.toml"
    config.write_text("[run]\nretries = 5\n")
    args = (
        "manifest.csv",
        "--root",
        "audio",
        "--engine-arg=--burn-s=0.1",
        "--no-resume",
        "--config",
        "badc.toml",
        *RUN,
    )
    assert submit(*args).exit_code == 0
    record = json.loads((site.out / "submitted.json").read_text())
    assert record["run_arguments"] == [
        "run", f"{site.folder}/manifest.csv", f"--out={site.out}", f"--config={config}", f"--root={site.folder}/audio",
        "--engine=demo", "--engine-arg=--burn-s=0.1", "--workers-per-gpu=auto", "--cpu-workers=1", "--no-resume",
        "--no-emit-gpu-telemetry",
    ]  # fmt: skip
    (site.out / "submitted.json").unlink()
    config.write_text("[run]\nretries = 5\nworkers_per_gpu = 2\n")
    assert submit(*args).exit_code == 0
    record = json.loads((site.out / "submitted.json").read_text())
    assert not [word for word in record["run_arguments"] if "workers-per-gpu" in word]


def test_a_list_of_manifests_gets_a_task_for_each_line(site: Site, submit: Submit) -> None:
    for name in ("a", "b", "c"):
        site.manifest(3, name=f"{name}.csv", prefix=name)
    listed = site.folder / "manifests.txt"
    listed.write_text("a.csv\nb.csv\nc.csv\n")
    assert_refused(submit(listed, "--tasks", 2, *RUN), 2, "the list names 3 manifests")
    done = submit(listed, *RUN, "--json")
    assert (done.json["array"], done.json["chunks"]) == ("0-2", 9)


def test_a_source_that_cannot_be_used_is_refused_before_anything_is_submitted(
    site: Site, submit: Submit, login: Path
) -> None:
    manifest = site.manifest(6)
    (site.folder / "audio" / "c002.wav").unlink()
    assert_refused(submit(manifest, *RUN), 2, "c002.wav")
    site.manifest(6)
    manifest.write_text(manifest.read_text() + manifest.read_text().splitlines()[3] + "\n")
    assert_refused(submit(manifest, *RUN), 2, "already on line 4")
    assert calls(login) == []
    assert not site.out.exists()


def test_every_mistake_in_the_options_is_told_at_once(site: Site, submit: Submit) -> None:
    wrong = submit(
        site.manifest(3), "--time", "soon", "--mem", "much", "--array", "1,2,5", "--engine", "crow", "--retries", -1
    )
    assert_refused(wrong, 2, "--time soon", "--mem much", "--array=1,2,5", "--engine crow", "--retries = -1")
    assert_refused(submit(), 2, "no SOURCE was given")
    assert_refused(site.badcjobs("submit", "m.csv"), 2, "--out DIR is missing")
    assert_refused(submit("m.csv", "--cluster", "pbs"), 2, "--cluster pbs is not known")


def test_a_run_folder_that_belongs_to_another_run_is_refused(site: Site, submit: Submit, login: Path) -> None:
    manifest = site.manifest(4)
    envs = [array_task(index, [0, 1]) for index in (0, 1)]
    site.run_tasks(manifest, *ON_CPU, envs=envs)
    same = ("--interval", "0.1")
    assert_refused(submit(manifest, *RUN, *same, "--retries", 9), 2, "retries was 2, now 9")
    assert_refused(submit(manifest, *RUN, *same, "--tasks", 4), 2, "began as an array of 2 (0-1)")
    assert calls(login) == []
    done = submit(manifest, *RUN, *same, "--array", "1", "--json")  # and the shape is taken over from there
    assert (done.exit_code, done.json["array"], done.json["tasks"]) == (0, "1", 1)


def test_without_slurm_there_is_the_script_but_no_submission(site: Site) -> None:
    nowhere = {"PATH": str(site.folder / "no-programs")}
    args = ("submit", site.manifest(3), "--out", site.out, *RUN, "--setup", "module load gcc cuda", "--account=st-pi-1")
    shown = site.badcjobs(*args, "--dry-run", env=nowhere)
    assert shown.exit_code == 0, shown.stderr
    assert "\nmodule load gcc cuda\n" in shown.stdout
    assert shown.stdout.count("#SBATCH --account=st-pi-1\n") == 2
    assert not site.out.exists()
    assert_refused(site.badcjobs(*args, env=nowhere), 3, "there is no Slurm here", "--cluster local")


def test_what_sbatch_refuses_is_told_in_its_own_words(site: Site, submit: Submit) -> None:
    site.script("slurm-bin/sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert_refused(submit(site.manifest(3), *RUN), 5, "Invalid account")
    assert not (site.out / "submitted.json").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_submitted(
    site: Site, submit: Submit, login: Path
) -> None:
    site.out.write_text("a file")
    assert_refused(submit(site.manifest(3), *RUN), 2, str(site.out))
    assert calls(login) == []


def test_a_record_that_somebody_has_edited_is_named(site: Site, submit: Submit) -> None:
    manifest = site.manifest(3)
    assert submit(manifest, *RUN).exit_code == 0
    (site.out / "submitted.json").write_text('{"job": 1}')
    assert_refused(submit(manifest, *RUN), 2, "submitted.json is not as badcjobs wrote it", "mv ")
