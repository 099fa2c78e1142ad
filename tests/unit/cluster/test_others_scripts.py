"""Job scripts as other people write them, checked for Sockeye: every finding is true, and there are no others.

The scripts stand in tests/data/job_scripts.txt, what is found in the page.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import typer
from rooms.cli import app, make_parser
from rooms.planning import Checked, CheckOrder, check
from rooms.root import RunSettings, SubmitSettings, SystemClock, folder
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER
from support.brief import without_hints
from support.pages import Pages

PARSE = make_parser(typer.main.get_command(app))
SHARED = {
    "@HEAD": "#!/bin/bash\n#SBATCH --account=st-lab-1-gpu --time=12:00:00 --mem=16G\n"
    "#SBATCH --gpus-per-node=4 --cpus-per-task=24\n#SBATCH --signal=B:USR1@180 --open-mode=append",
    "@LOAD": "module load gcc cuda",
    "@RUN": "badcjobs run manifest.csv --out results --engine demo",
    "@CR": "\r",
}
MODULES = """
module() {
    case $1 in
        load) shift; LOADED="$LOADED $*" ;;
        -t) for one in $LOADED; do echo "$one/1.0"; done >&2 ;;
    esac
}
"""
BEGUN = 'written_by = "badcjobs 0"\n[run]\nsource = ["{source}"]\n[array]\nfirst = 1\nstep = 2\ncount = 4\n'
UNCHECKED = ("start", "source")  # of what is fine, what was not checked is said


class Sockeye:
    """A machine with Sockeye's rules, its scratch in a folder of ours, and somebody who is there."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "scratch" / "jobs"
        for name in ("jobs/begun", "july", "venv/bin", "../home", "../bin"):
            (root / "scratch" / name).mkdir(parents=True, exist_ok=True)
        make_wav(root / "scratch" / "a.wav")
        rows = "".join(f"r,c{number},{root}/scratch/a.wav,0,600,0,,\n" for number in range(4))
        for name in ("jobs/manifest.csv", "jobs/other.csv", "jobs/m.csv", "july/manifest.csv"):
            (root / "scratch" / name).write_text(f"{MANIFEST_HEADER}\n{rows}")
        (root / "home/.bash_profile").write_text(MODULES)
        (root / "bin/bash").symlink_to(shutil.which("bash") or "/bin/bash")
        (root / "scratch/venv/bin/sing").write_text("#!/bin/sh\n")
        (root / "scratch/venv/bin/sing").chmod(0o755)
        (self.work / "run.toml").write_text('[run]\nengine = "demo"\n')
        (self.work / "begun/run.toml").write_text(BEGUN.format(source=self.work / "manifest.csv"))
        rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch", str(root / "scratch"))
        (root / "site.toml").write_text(rules)

    def check(self, text: str, submit: SubmitSettings | None = None, **environ: str) -> Checked:
        for word, meant in SHARED.items():
            text = text.replace(word, meant)
        (self.work / "job.sbatch").write_text(text.replace("{scratch}", str(self.root / "scratch")), newline="")
        known = {"HOME": str(self.root / "home"), "PATH": str(self.root / "bin"), **environ}
        where = (
            known,
            SystemClock(),
            self.work,
            submit or SubmitSettings(),
            str(self.root / "site.toml"),
            "job.sbatch",
        )
        return check(CheckOrder(RunSettings(), *where, parse=PARSE))

    def page(self, checked: Checked) -> str:
        said = [
            f"  {one.severity} {one.subject}: {one.text}" + (f"\n    try: {one.fix}" if one.fix else "")
            for one in checked.findings
            if one.severity != "fine" or (one.subject in UNCHECKED and one.text.startswith("not checked"))
        ]
        return without_hints("\n".join(said)).replace(str(self.root), "ROOT")


def test_nothing_that_check_says_about_a_script_is_false(tmp_path: Path, pages: Pages) -> None:
    sockeye, said = Sockeye(tmp_path), []
    scripts = (Path(__file__).parents[2] / "data" / "job_scripts.txt").read_text().split("\n=== ")[1:]
    found = {name: sockeye.check(text.rstrip("\n") + "\n") for name, text in (one.split("\n", 1) for one in scripts)}
    plain = "@HEAD\n@LOAD\nexec @RUN\n"
    found["with another account in the environment"] = sockeye.check(plain, SBATCH_ACCOUNT="st-lab-1")
    found["with more GPUs on the command line"] = sockeye.check(plain, SubmitSettings(gpus_per_task=8, cpus=6))
    for name, one in found.items():
        said += [f"{name} → exit code {one.exit_code}", *filter(None, [sockeye.page(one)])]
    pages({"findings.txt": "\n".join(said)})
