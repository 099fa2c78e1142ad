"""``badcjobs template``: the list, a script on stdout or in a file, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.badcjobs_program import Site, assert_refused

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
PROJECT = """[run]
source = ["july.csv"]
out = "runs/july"
[submit]
account = "st-lab-1-gpu"
time = "3:00:00"
tasks = 8
parallel = 2
setup = ["module load x"]
"""


def test_templates_are_listed_printed_as_they_are_and_refused_with_what_there_is(site: Site) -> None:
    text, document, plain, name, key, missing, nowhere, folder, nothing = site.badcjobs_each(
        [
            ("template",),
            ("template", "--json"),
            ("template", "sockeye-array"),
            ("template", "arrray"),
            ("template", "array", "--set", "colour=red"),
            ("template", "sockeye-array", "-o", "job.sbatch"),
            ("template", "array", "-o", "no/such/folder/job.sbatch"),
            ("template", "array", "-o", "."),
            ("template", "--set", "account=x"),
        ]
    )
    assert (text.exit_code, document.exit_code, plain.exit_code) == (0, 0, 0)
    names = [template["name"] for template in document.json["templates"]]
    assert names == sorted(path.stem for path in TEMPLATES.glob("*.sbatch"))
    assert all(f"\n  {one} " in text.stdout for one in names)
    assert document.json["templates"][-1]["open"] == ["account", "source", "out"]
    assert plain.stdout == (TEMPLATES / "sockeye-array.sbatch").read_text()
    assert "still open, to edit or to give in sbatch --export: account, source, out" in plain.stderr
    assert_refused(name, 2, "there is no template 'arrray'", "sockeye-array")
    assert_refused(key, 2, "array has no key 'colour'", "gpus-per-node")
    assert_refused(missing, 2, "missing: account")
    assert_refused(nowhere, 2, "cannot be written", "mkdir -p no/such/folder")
    assert_refused(folder, 2, "cannot be written", "try: ls -ld . .")
    assert_refused(nothing, 2, "NAME is missing")
    assert not (site.folder / "job.sbatch").exists()


def test_a_template_is_filled_from_the_project_file_set_wins_and_it_is_never_replaced(site: Site) -> None:
    fill = ("template", "sockeye-array", "--set", "account=st-pi-1-gpu", "--set", "setup=module load gcc cuda")
    script = site.folder / "job.sbatch"
    first = site.badcjobs(*fill, "-o", "job.sbatch")
    assert (first.exit_code, first.stdout) == (0, "job.sbatch is written; next: sbatch job.sbatch\n")
    assert "#SBATCH --account=st-pi-1-gpu" in script.read_text().splitlines()
    assert script.read_text().count("module load gcc cuda") == 1, "this template has the line already"
    script.write_text("edited")
    assert_refused(site.badcjobs(*fill, "-o", "job.sbatch"), 2, "job.sbatch exists already", "try: --out job-2.sbatch")
    assert script.read_text() == "edited"
    other = site.badcjobs(*fill, "-o", "other.sbatch", "--json")
    assert other.json["text"] == (site.folder / "other.sbatch").read_text()
    assert (other.json["file"], other.json["open"]) == ("other.sbatch", ["source", "out"])
    (site.folder / "badcjobs.toml").write_text(PROJECT)
    done = site.badcjobs("template", "sockeye-array", "--set", "time=1:00:00", "-o", "third.sbatch")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = (site.folder / "third.sbatch").read_text().splitlines()
    for line in (
        "#SBATCH --account=st-lab-1-gpu", "#SBATCH --time=1:00:00", "#SBATCH --array=0-7%2", "module load x",
        f': "${{SOURCE:={site.folder}/july.csv}}"', f': "${{OUT:={site.folder}/runs/july}}"',
    ):  # fmt: skip
        assert line in lines


def test_the_multinode_script_gives_its_steps_the_cores_that_the_job_has(site: Site) -> None:
    """Since Slurm 22.05 srun does not inherit them from sbatch, and a task would work with one core."""
    assert site.badcjobs("template", "multinode", "-o", "job.sbatch").exit_code == 0
    (site.folder / "bin").mkdir()
    site.script("bin/srun", 'echo "$@"')
    environ = {"PATH": f"{site.folder}/bin:/usr/bin:/bin", "SOURCE": "m.csv", "OUT": "o", "BADCJOBS": "true"}
    for given, cores in (({"SLURM_CPUS_PER_TASK": "6"}, 6), ({}, 1)):
        command = ["bash", str(site.folder / "job.sbatch")]
        done = subprocess.run(command, env={**environ, **given}, capture_output=True, text=True, check=True)
        words = done.stdout.split()
        assert f"--cpus-per-task={cores}" in words
        assert words[words.index("true") :][:5] == ["true", "run", "m.csv", "--out", "o"]
