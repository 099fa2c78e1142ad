"""Installs the scripts of slurm/ for a throw-away cluster, as slurm/README.md tells an administrator to."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
SPANK_HEADER = Path("/usr/include/slurm/spank.h")


def build_spank(folder: Path) -> list[str]:
    """Build the plugin as its Makefile does; return the lines of slurm.conf that load it."""
    folder.mkdir()
    for name in ("Makefile", "badc_telemetry.c"):
        (folder / name).write_text((SCRIPTS / "spank" / name).read_text())
    subprocess.run(["make", "-C", folder, "CFLAGS=-Wall -Wextra -Werror"], check=True, capture_output=True)
    (folder / "plugstack.conf").write_text(f"optional {folder}/badc_telemetry.so\n")
    return [f"PlugStackConfig={folder}/plugstack.conf"]


@dataclass(frozen=True)
class Hooks:
    """Copies of the scripts with their EDIT lines filled in, and the shared folder that they write to."""

    folder: Path

    @classmethod
    def install(cls, folder: Path) -> Hooks:
        shutil.copytree(SCRIPTS, folder / "slurm")
        hooks = cls(folder)
        for name in ("wanted", "ends"):
            (hooks.spool / name).mkdir(parents=True)
        (hooks.spool / "wanted").chmod(0o1777)
        for script in ("task_prolog.sh", "jobcomp.sh"):
            _edit(folder / "slurm" / script, "SPOOL=", f"SPOOL={hooks.spool}")
        _edit(hooks.epilog, "HOOKS=/usr/local/lib/badcjobs/slurm", f"HOOKS={folder / 'slurm'}")
        return hooks

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def epilog(self) -> Path:
        return self.folder / "slurm" / "epilog.d" / "50-badcjobs.sh"

    @property
    def conf(self) -> list[str]:
        """The lines of slurm.conf."""
        scripts = self.folder / "slurm"
        return [
            f"TaskProlog={scripts}/task_prolog.sh",
            f"TaskEpilog={scripts}/task_epilog.sh",
            f"Epilog={self.epilog}",
            "JobCompType=jobcomp/script",
            f"JobCompLoc={scripts}/jobcomp.sh",
        ]

    def ends(self, job_id: int) -> list[dict[str, Any]]:
        """What the jobcomp hook has written of a job."""
        file = self.spool / "ends" / f"{job_id}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _edit(script: Path, old: str, new: str) -> None:
    lines = script.read_text().splitlines()
    assert lines.count(old) == 1, f"{script} has no line {old}"
    script.write_text("\n".join(new if line == old else line for line in lines) + "\n")
