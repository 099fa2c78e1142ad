"""``badcjobs check`` as a shell runs it: this machine's own folders, programs on PATH, and the verdict as exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.badcjobs_program import MANIFEST_HEADER, Outcome, Site, assert_refused
from support.fake_hawkears import install_fake_hawkears, make_fake_root

GOOD_SCRIPT = """#!/bin/bash
#SBATCH --account=st-lab-1-gpu
#SBATCH --array=0-3
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --mem=4G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
module load gcc cuda
exec badcjobs run manifest.csv --out results --engine demo
"""
BAD_SCRIPT = """#!/bin/bash
#SBATCH --account=st-lab-1
#SBATCH --array=0-11999
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --time=72:00:00
#SBATCH --output=logs/%A.log
module load cuda
badcjobs run manifest.csv --out "$HOME/results" --engine demo
"""
CONFIG = """Configuration data as of $(date +%s)
ClusterName             = pretend
KillWait                = 10 sec
MaxArraySize            = 3
"""
MODULES = """
echo "Welcome to the cluster"
module() {
    case $1 in
        load) shift; for one in "$@"; do
            if [ "$one" = gcc ]; then LOADED="$LOADED gcc/9.4.0"; else echo "Lmod error: unknown: $one" >&2; fi
        done ;;
        -t) for one in $LOADED; do echo "$one"; done >&2 ;;
    esac
}
"""
OWN_SITE = """
name = "mine"
[limits]
array_tasks = 2
[modules]
load = ["gcc", "cuda"]
"""

# name → arguments, which of the machines below
ASKED: dict[str, tuple[str, str]] = {
    "good": ("good.sbatch manifest.csv", "bare"),
    "bad, on sockeye": ("bad.sbatch manifest.csv --site sockeye", "bare"),
    "with Slurm and modules": ("good.sbatch --site mine.toml", "cluster"),
    "a silent Slurm": ("-- --engine demo", "silent"),
    "no HawkEars": ("--out results", "bare"),
    "no models": ("--out results -- --hawkears-root {folder}", "hawkears"),
    "HawkEars": ("--out results -- --hawkears-root {folder}/hawkears", "hawkears"),
    "broken source": ("broken.csv --json -- --engine demo", "bare"),
    "broken source, quick": ("broken.csv --quick --json -- --engine demo", "bare"),
    "twice, quick": ("twice.csv --quick --json -- --engine demo", "bare"),
    "json": ("manifest.csv --out results --tasks 2 --json -- --engine demo", "bare"),
    "quick": ("manifest.csv --quick --json -- --engine demo", "bare"),
    "unwritable": ("--out /proc/results --json -- --engine demo", "bare"),
    "another run": ("manifest.csv --out used --tasks 9 --json -- --engine demo", "bare"),
    "another source": ("broken.csv --out used --quick --json -- --engine demo", "bare"),
    "line of submit": (
        "manifest.csv -o x --cluster local --root . --again --dry-run --wait --tasks 200 --parallel 2 --gpus-per-task 4"
        " --cpus 8 --mem 64G --time 72:00:00 --constraint gpu_mem_32 --sbatch=--partition=gpu --site sockeye --json"
        " -- --engine demo",
        "bare",
    ),
    "merge account": ("manifest.csv --account st-lab-1-gpu --config site=sockeye --json -- --engine demo", "bare"),
    "variables": ("own.sbatch manifest.csv --out results --time 30 --json -- --engine demo", "bare"),
    "site of the project": (
        "manifest.csv --account st-lab-1-gpu --config site=sockeye --out used --json -- --engine demo",
        "bare",
    ),
    "no variable": ("good.sbatch -- --engine demo", "bare"),
    "before the dashes": ("manifest.csv --engine demo", "bare"),
    "no such site": ("--site atlantis", "bare"),
    "no such script": ("nowhere.sbatch", "bare"),
    "no such engine": ("-- --engine kazoo", "bare"),
    "no such time": ("--time noon", "bare"),
    "wrong site": ("--site wrong.toml", "bare"),
}


def programs(folder: Path, **scripts: str) -> str:
    """Make a folder for PATH that holds a shell, date, and what is given; return its path."""
    folder.mkdir()
    for name in ("bash", "date"):
        (folder / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """What the program answers, asked for together because that takes half the time."""
    folder = shared_site.folder
    shared_site.manifest(6)
    files = {"good.sbatch": GOOD_SCRIPT, "bad.sbatch": BAD_SCRIPT, "mine.toml": OWN_SITE}
    files["own.sbatch"] = GOOD_SCRIPT.replace(
        "manifest.csv --out results --engine demo", '"$SOURCE" --out "$OUT" $BADCJOBS_ARGS'
    )
    files["wrong.toml"] = 'name = "x"\n[limits]\nbirds = 3\n'
    files["broken.csv"] = "\n".join([MANIFEST_HEADER, *(f"r,c{i},gone{i}.wav,0,600,0,," for i in range(30))]) + "\n"
    files["twice.csv"] = "\n".join([MANIFEST_HEADER, *["r,c,gone.wav,0,600,0,,"] * 3]) + "\n"
    shape = "[array]\nfirst = 0\nstep = 1\ncount = 4\n"
    files["used/run.toml"] = f'written_by = "badcjobs 0"\n[run]\nsource = ["{folder}/manifest.csv"]\n{shape}'
    files["home/.bash_profile"] = MODULES
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    make_fake_root(folder / "hawkears")
    bare = {"PATH": programs(folder / "bare"), "HOME": str(folder / "nobody")}
    machines = {
        "bare": bare,
        "cluster": {
            "PATH": programs(folder / "cluster", scontrol=f"cat <<EOF\n{CONFIG}EOF"),
            "HOME": str(folder / "home"),
        },
        "silent": {**bare, "PATH": programs(folder / "silent", scontrol="echo 'Unable to contact' >&2; exit 1")},
        "hawkears": {**bare, "PATH": f"{install_fake_hawkears(folder / 'bin').parent}:{bare['PATH']}"},
    }
    (folder / "cluster" / "cat").symlink_to(shutil.which("cat") or "/bin/cat")
    commands = [("check", *args.format(folder=folder).split()) for args, _ in ASKED.values()]
    before = sorted(path.name for path in folder.iterdir())
    found = shared_site.badcjobs_each(commands, [machines[name] for _, name in ASKED.values()])
    assert sorted(path.name for path in folder.iterdir()) == before, "a check leaves nothing behind"
    return dict(zip(ASKED, found, strict=True))


def line_of(outcome: Outcome, severity: str, subject: str) -> str:
    """Return one finding with the lines that belong to it."""
    lines = outcome.stdout.splitlines()
    (start,) = [n for n, line in enumerate(lines) if (line[2:10].strip(), line[11:25].strip()) == (severity, subject)]
    end = next((n for n, line in enumerate(lines) if n > start and line[2:3].strip()), len(lines))
    return " ".join(" ".join(lines[start:end]).split())


def findings(outcome: Outcome, severity: str) -> dict[str, dict[str, Any]]:
    return {one["subject"]: one for one in outcome.json["findings"] if one["severity"] == severity}


def test_a_job_that_is_ready_exits_0_with_everything_that_was_looked_at(answers: dict[str, Outcome]) -> None:
    found = answers["good"]
    assert found.exit_code == 0, found.stdout + found.stderr
    assert found.stdout.startswith("0 problems and ")
    assert "6 chunks, 0.0 hours of audio; every file is there" in line_of(found, "fine", "source")
    assert "will be created" in line_of(found, "fine", "out")
    assert "4 tasks × 4 GPUs × 12 h = 192 GPU-hours" in line_of(found, "fine", "GPU-hours")
    assert "0.0 s apart" in line_of(found, "fine", "clock")
    assert "demo can be started here" in line_of(found, "fine", "engine")
    assert "none here" in line_of(found, "warning", "GPUs")


def test_on_sockeye_every_problem_comes_with_its_numbers_and_the_line_that_fixes_it(
    answers: dict[str, Outcome],
) -> None:
    found = answers["bad, on sockeye"]
    assert found.exit_code == 1
    for subject, words in {
        "out": ("~ (", "try: --out /scratch/<alloc>/<you>"),
        "array": ("12,000 tasks", "10,000", "try: #SBATCH --array=0-9999"),
        "GPU-hours": ("12,000 tasks × 4 GPUs × 72 h = 3,456,000", "2,400", "try: #SBATCH --array=0-7"),
        "account": ("st-lab-1 does not end in -gpu", "try: #SBATCH --account=st-lab-1-gpu"),
    }.items():
        assert all(word in line_of(found, "problem", subject) for word in words), subject
    assert "64 GB × 5 = 320" in line_of(found, "warning", "billing")
    assert "try: #SBATCH --signal=B:USR1@180" in line_of(found, "warning", "signal")
    assert "try: #SBATCH --open-mode=append" in line_of(found, "warning", "log")
    assert 'try: exec badcjobs run manifest.csv --out "$HOME/results"' in line_of(found, "warning", "start")
    assert "does not load gcc" in found.stdout
    assert "no module command" in found.stdout


def test_a_slurm_at_hand_and_a_site_file_of_ones_own_give_limits(answers: dict[str, Outcome]) -> None:
    found = answers["with Slurm and modules"]
    assert found.exit_code == 1
    assert "mine allows 2" in found.stdout
    assert "this Slurm (MaxArraySize) allows 3" in found.stdout
    assert "10 s after TERM" in line_of(found, "warning", "grace")
    assert "--config run.grace_s=5" in line_of(found, "warning", "grace")
    assert "Slurm's controller agrees" in " ".join(found.stdout.split())
    assert "cuda cannot be loaded: Lmod error: unknown: cuda" in line_of(found, "problem", "modules")


def test_a_slurm_that_does_not_answer_is_a_warning_in_its_own_words(answers: dict[str, Outcome]) -> None:
    assert answers["a silent Slurm"].exit_code == 0
    assert "Unable to contact" in line_of(answers["a silent Slurm"], "warning", "Slurm")


def test_missing_hawkears_and_missing_models_are_problems_and_a_whole_one_is_fine(answers: dict[str, Outcome]) -> None:
    assert "--hawkears-python" in line_of(answers["no HawkEars"], "problem", "engine")
    assert "HawkEars has no models in" in line_of(answers["no models"], "problem", "engine")
    assert "hawkears init" in line_of(answers["no models"], "problem", "engine")
    assert "hawkears can be started here" in line_of(answers["HawkEars"], "fine", "engine")
    assert [answers[name].exit_code for name in ("no HawkEars", "no models", "HawkEars")] == [1, 1, 0]


def test_mistakes_of_a_source_are_all_counted_and_the_first_twenty_named(answers: dict[str, Outcome]) -> None:
    found = answers["broken source"]
    assert found.exit_code == 1
    (source,) = findings(found, "problem").values()
    assert "30 mistakes" in source["text"]
    assert len(source["details"]) == 21
    assert "no such file: gone0.wav" in source["details"][0]
    assert "and 10 more" in source["details"][-1]


def test_quick_looks_at_no_audio_but_still_finds_rows_that_repeat(answers: dict[str, Outcome]) -> None:
    assert answers["broken source, quick"].exit_code == 0
    assert answers["quick"].json["source"]["chunks"] == 6
    assert "--quick" in findings(answers["quick"], "fine")["source"]["text"]
    assert answers["twice, quick"].exit_code == 1
    assert "2 rows" in findings(answers["twice, quick"], "problem")["source"]["text"]


def test_the_document_has_the_verdict_what_was_asked_and_every_finding(answers: dict[str, Outcome]) -> None:
    found = answers["json"]
    assert (found.exit_code, found.json["verdict"], found.json["problems"]) == (0, "ready", 0)
    assert found.json["asked"]["tasks"] == 2
    assert (found.json["source"]["chunks"], found.json["source"]["audio_s"]) == (6, pytest.approx(3.6))
    assert all(one["fix"] for one in found.json["findings"] if one["severity"] != "fine")
    assert found.json["warnings"] == sum(one["severity"] == "warning" for one in found.json["findings"])


def test_the_line_of_submit_is_judged_and_fixes_are_options_of_submit(answers: dict[str, Outcome]) -> None:
    found = answers["line of submit"]
    assert found.exit_code == 1, found.stderr
    asked = found.json["asked"]
    assert (asked["tasks"], asked["gpus_per_task"], asked["cpus"], asked["time_s"]) == (200, 4, 8, 72 * 3600)
    assert (asked["partition"], asked["constraint"]) == ("gpu", "gpu_mem_32")
    problems = findings(found, "problem")
    assert problems["account"]["fix"] == "--account <your allocation>-gpu"
    assert problems["GPU-hours"]["fix"].startswith("--time 3:00:00 ")
    assert findings(found, "warning")["billing"]["fix"].startswith("--mem 16G ")
    merged = answers["site of the project"].json
    assert merged["asked"]["merge_account"] == "st-lab-1"
    assert "merge account" not in [one["subject"] for one in merged["findings"]]
    usual = answers["quick"].json["asked"]
    assert (usual["gpus_per_task"], usual["cpus"], usual["memory_gb_per_node"], usual["time_s"]) == (1, 2, 4, 43200)


def test_the_merge_job_is_paid_as_submit_would_pay_it(answers: dict[str, Outcome]) -> None:
    found = answers["merge account"]
    assert findings(found, "fine")["account"]["text"] == "st-lab-1-gpu ends in -gpu"
    assert "merge account" not in findings(found, "warning")


def test_source_out_and_run_options_reach_a_script_in_its_variables(answers: dict[str, Outcome]) -> None:
    found = answers["variables"]
    assert found.exit_code == 0, found.stdout
    fine = findings(found, "fine")
    assert "6 chunks" in fine["source"]["text"]
    assert "/results can be written here" in fine["out"]["text"]
    assert fine["engine"]["text"] == "demo can be started here"
    assert found.json["asked"]["time_s"] == 1800


def test_a_folder_that_cannot_be_written_here_is_a_problem_with_the_reason(answers: dict[str, Outcome]) -> None:
    assert answers["unwritable"].exit_code == 1
    assert "/proc/results cannot be written here: " in findings(answers["unwritable"], "problem")["out"]["text"]


def test_a_folder_with_another_run_in_it_is_a_problem(answers: dict[str, Outcome]) -> None:
    assert "the array 0-3" in findings(answers["another run"], "problem")["run.toml"]["text"]
    assert "another source" in findings(answers["another source"], "problem")["run.toml"]["text"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no such site", ("atlantis", "sockeye")),
        ("no such script", ("nowhere.sbatch",)),
        ("no such engine", ("kazoo", "hawkears")),
        ("no such time", ("--time", "noon", "H:M:S")),
        ("no variable", ("good.sbatch does not use BADCJOBS_ARGS", "--engine=demo")),
        ("before the dashes", ("No such option: --engine", "badcjobs check manifest.csv -- --engine demo")),
        ("wrong site", ("birds", "array_tasks")),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_known(
    answers: dict[str, Outcome], case: str, words: tuple[str, ...]
) -> None:
    assert_refused(answers[case], 2, *words)
