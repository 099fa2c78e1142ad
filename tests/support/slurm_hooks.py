"""Installs the scripts of slurm/ for a throw-away cluster, as slurm/README.md tells an administrator to."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
SPANK_HEADER = Path("/usr/include/slurm/spank.h")


def build_spank(folder: Path) -> list[str]:
    """Build the plugin as its Makefile does; return the lines of slurm.conf that load it."""
    shutil.copytree(SCRIPTS / "spank", folder)
    subprocess.run(["make", "-C", folder, "CFLAGS=-Wall -Wextra -Werror"], check=True, capture_output=True)
    (folder / "plugstack.conf").write_text(f"optional {folder}/badc_telemetry.so\n")
    return [f"PlugStackConfig={folder}/plugstack.conf"]


class Hooks:
    """Copies of the scripts with their EDIT lines filled in, and the shared folder that they write to."""

    def __init__(self, folder: Path) -> None:
        self.scripts, self.spool = folder / "slurm", folder / "spool"
        self.epilog = self.scripts / "epilog.d" / "50-badcjobs.sh"
        shutil.copytree(SCRIPTS, self.scripts)
        for name in ("wanted", "ends"):
            (self.spool / name).mkdir(parents=True)
        (self.spool / "wanted").chmod(0o1777)
        spool, hooks = ("SPOOL=\n", f"SPOOL={self.spool}\n"), ("=/usr/local/lib/badcjobs/slurm\n", f"={self.scripts}\n")
        for script, (old, new) in (
            ("task_prolog.sh", spool),
            ("jobcomp.sh", spool),
            ("epilog.d/50-badcjobs.sh", hooks),
        ):
            text = (self.scripts / script).read_text()
            assert text.count(old) == 1, f"{script} has no line {old}"
            (self.scripts / script).write_text(text.replace(old, new))

    @property
    def conf(self) -> list[str]:
        """The lines of slurm.conf."""
        tasks = [f"Task{name.title()}={self.scripts}/task_{name}.sh" for name in ("prolog", "epilog")]
        return [*tasks, f"Epilog={self.epilog}", "JobCompType=jobcomp/script", f"JobCompLoc={self.scripts}/jobcomp.sh"]

    def ends(self, job_id: int) -> list[dict[str, Any]]:
        """What the jobcomp hook has written of a job."""
        file = self.spool / "ends" / f"{job_id}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
