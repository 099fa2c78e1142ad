"""A login node: sbatch, srun and squeue as stand-ins on PATH, which do what the environment of a command says."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.badcjobs_program import Site

TAKES = "echo '--> Checking allocation...OK'; echo Submitted batch job 4821"
LOST = "echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
REFUSES = "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
SILENT = "echo Unable to contact slurm controller >&2; exit 1"
FORGOTTEN = "echo Invalid job id specified >&2; exit 1"
HAS_IT = 'echo "4821|$(cat $0.script)"'
HAS_BOTH = HAS_IT + '; echo "4822|$(cat $0.merge)"'
HAS_OTHERS = "echo '4821|/somebody/elses.sh'"
SBATCH = """
{ echo "$@"; env | grep -E '^(SLURM|SBATCH|CUDA|TMPDIR)' | sort; } >> $0.called
case "$*" in *--parsable*) echo "$3" > $(dirname $0)/squeue.merge; eval "${TEST_MERGE:-echo 4822}"; exit ;; esac
echo "$1" > $(dirname $0)/squeue.script
eval "$TEST_SBATCH"
"""
SQUEUE = """
case "$*" in *%o*) eval "$TEST_SCRIPTS" ;; *) eval "$TEST_STATES" ;; esac
"""


def hit(name: str) -> str:
    """Return what ends whoever has called sbatch, before that has ended itself."""
    return f"kill -{name} $PPID; sleep 0.1"


def states(*lines: str) -> str:
    """Return what squeue does to say this."""
    return f"printf '%s\\n' {' '.join(repr(line) for line in lines)}"


class LoginNode:
    """Slurm's programs in a folder of a site; the array that is submitted is 4821, its merge job 4822."""

    def __init__(self, site: Site) -> None:
        self.folder = site.folder / "slurm-bin"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, text in (("sbatch", SBATCH), ("srun", "exit 1"), ("squeue", SQUEUE), ("sacct", 'eval "$TEST_SACCT"')):
            site.script(f"slurm-bin/{name}", text)

    def env(self, **does: str) -> dict[str, str]:
        """Return the environment of a command on this node: what sbatch does (SBATCH), also with the merge job (MERGE),
        what squeue says about scripts (SCRIPTS) and states (STATES), and what sacct says (SACCT).
        """
        usual = {"SBATCH": TAKES, "SCRIPTS": SILENT, "STATES": states("4821_0 PENDING 0 Resources"), "SACCT": "exit 1"}
        done = {f"TEST_{name}": text for name, text in {**usual, **does}.items() if name.isupper()}
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "BADCJOBS_POLL_S": "0.05", **done}

    @property
    def calls(self) -> str:
        """How sbatch was called, each time, and with which variables."""
        log: Path = self.folder / "sbatch.called"
        return log.read_text() if log.exists() else ""
