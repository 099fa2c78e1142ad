"""A login node for one test: sbatch, srun and squeue as stand-ins on PATH, so that a test says what Slurm answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from support.badcjobs_program import Outcome, Site

SBATCH = """
echo "$@" >> $0.called
env > $0.env.$(wc -l < $0.called)
echo '--> Checking allocation...OK'
case "$*" in *--parsable*) echo 4822 ;; *) echo Submitted batch job 4821 ;; esac
"""


@dataclass(frozen=True)
class LoginNode:
    """Slurm's programs, sacct not among them; the array that is submitted is 4821, its merge job 4822."""

    site: Site

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.program("sbatch", SBATCH)
        self.program("srun", "exit 1")
        self.states("4821_0 RUNNING 0", "4822 PENDING 0")

    @property
    def folder(self) -> Path:
        return self.site.folder / "slurm-bin"

    def program(self, name: str, text: str) -> None:
        self.site.script(f"slurm-bin/{name}", text)

    def states(self, *lines: str) -> None:
        """Let squeue say this from now on."""
        self.program("squeue", f"printf '%s\\n' {' '.join(repr(line) for line in lines)}")

    def forget(self) -> None:
        """Let squeue say what it says some minutes after the end of a job."""
        self.program("squeue", "echo Invalid job id specified >&2; exit 1")

    def submit(self, *args: object, env: dict[str, str] | None = None) -> Outcome:
        """Call ``badcjobs submit`` here."""
        path = {"PATH": f"{self.folder}:/usr/bin:/bin", "BADCJOBS_POLL_S": "1"}
        return self.site.badcjobs("submit", "--out", self.site.out, *args, env={**path, **(env or {})})

    @property
    def calls(self) -> list[str]:
        """How sbatch was called, each time."""
        log = self.folder / "sbatch.called"
        return log.read_text().splitlines() if log.exists() else []

    def environment(self, call: int) -> dict[str, str]:
        lines = (self.folder / f"sbatch.env.{call}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
