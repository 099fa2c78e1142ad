"""``badcjobs template``: the list, a script on stdout or in a file, what it refuses; and the cores that srun gets."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rooms.root import folder
from support.behaviour import FixedSite
from support.pages import Pages

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
FILL = "template sockeye-array --set account=st-pi-1-gpu -o"
ASKED = (
    "template", "template --json", "template arrray", "template array --set colour=red",
    "template sockeye-array -o job.sbatch", "template array -o no/such/folder/job.sbatch", "template array -o .",
    "template --set account=x", f"{FILL} job.sbatch", f"{FILL} job.sbatch",
)  # fmt: skip


def test_a_template_is_listed_filled_from_project_file_and_options_refused_and_never_replaces_a_file(
    pages: Pages,
) -> None:
    site = FixedSite()
    said = [site.say(*words.split()) for words in ASKED]
    plain = site.badcjobs("template", "sockeye-array")
    assert plain.stdout == (folder("templates") / "sockeye-array.sbatch").read_text()
    said.append(plain.stderr)
    other = site.badcjobs(*f"{FILL} other.sbatch --json".split()).json
    text = (site.folder / "other.sbatch").read_text()
    assert [other[key] for key in ("text", "file", "open")] == [text, "other.sbatch", ["source", "out"]]
    (site.folder / "badcjobs.toml").write_text(PROJECT)
    said.append(site.say("template", "sockeye-array", "--set", "time=1:00:00", "-o", "third.sbatch"))
    written = site.plain((site.folder / "third.sbatch").read_text())
    assert sorted(path.name for path in site.folder.glob("*.sbatch")) == ["job.sbatch", "other.sbatch", "third.sbatch"]
    site.close()
    pages({"said.txt": "\n\n".join(said), "third.sbatch": written})


def test_the_multinode_script_gives_its_steps_the_cores_that_the_job_has(tmp_path: Path) -> None:
    """Since Slurm 22.05 srun does not inherit them from sbatch, and a task would work with one core."""
    (tmp_path / "srun").symlink_to("/bin/echo")
    for given, cores in (({"SLURM_CPUS_PER_TASK": "6"}, 6), ({}, 1)):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SOURCE": "m.csv", "OUT": "o", "BADCJOBS": "true", **given}
        words = ["bash", str(folder("templates") / "multinode.sbatch")]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
        before, _, after = done.stdout.partition(" true ")
        assert (f"--cpus-per-task={cores}" in before.split(), after.startswith("run m.csv --out o")) == (True, True)
