"""A login node: stand-ins for Slurm's programs on PATH, which do what the environment of a command says.

That are lines of shell, in which these functions are known; $0 is the stand-in, whose caller is $PPID.
"""

import shutil

from support.badcjobs_program import Site

FUNCTIONS = """
says() { printf '%s\\n' "$@"; }
fails() { echo "$1" >&2; exit 1; }
takes() { echo '--> Checking allocation...OK'; echo Submitted batch job 4821; }
lost() { fails 'Batch job submission failed: Socket timed out on send/recv operation'; }
refuses() { fails 'sbatch: error: Batch job submission failed: Invalid account'; }
silent() { fails 'Unable to contact slurm controller'; }
forgotten() { fails 'Invalid job id specified'; }
has_it() { echo "4821|$(cat $0.script)"; }
has_both() { has_it; echo "4822|$(cat $0.merge)"; }
has_others() { echo '4821|/somebody/elses.sh'; }
late() { kill -KILL $PPID; until_waited_for; touch $0.late; takes; }
until_waited_for() {
    inode=$(stat -c %i $(cat $(dirname $0)/squeue.script))
    for _ in $(seq 400); do grep -q -- "->.*:$inode " /proc/locks && break; sleep 0.05; done
}
has_late() { [ ! -e $(dirname $0)/sbatch.late ] || has_it; }
queued() { for one; do set -- $one; echo "${1%_*}|$2|$3"; done; }
at_first() { [ ! -e $0.seen ] && touch $0.seen && says "$@"; }
hit() { kill -$1 $PPID; sleep 0.1; }
two_nodes() { node gpu1 mixed 1; node gpu2 idle 0; }
node() { echo "$1|gpu*|${up:-up}|$2|7-00:00:00|0/24/0/24|(null)|gpu:v100:4|gpu:v100:$3(IDX:0)|180000|"; }
"""
SBATCH = """
{ echo "$@"; env | grep -E '^(SLURM|SBATCH|CUDA|TMPDIR)' | sort; } >> $0.called
case "$*" in *--parsable*) echo "$3" > $(dirname $0)/squeue.merge; eval "${TEST_MERGE:-echo 4822}"; exit ;; esac
echo "$1" > $(dirname $0)/squeue.script
eval "$TEST_SBATCH"
"""
SQUEUE = 'case "$*" in *%r*) eval "$TEST_QUEUE" ;; *%o*) eval "$TEST_SCRIPTS" ;; *) eval "$TEST_STATES" ;; esac'
SINFO = '[ -z "$SINFO_FORMAT" ] || exit 3; echo "sinfo $*" >> $(dirname $0)/sbatch.called; eval "$TEST_SINFO"'
USUAL = {"SBATCH": "takes", "SCRIPTS": "silent", "STATES": "says '4821_0 PENDING 0 Resources'", "SACCT": "exit 1",
         "QUEUE": "silent"}  # fmt: skip


class LoginNode:
    """Slurm's programs in a folder of a site; the array that is submitted is 4821, its merge job 4822."""

    def __init__(self, site: Site) -> None:
        self.folder = site.folder / "slurm-bin"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        programs = {"sbatch": SBATCH, "srun": "exit 1", "squeue": SQUEUE, "sacct": 'eval "$TEST_SACCT"', "sinfo": SINFO}
        for name, text in programs.items():
            site.script(f"slurm-bin/{name}", FUNCTIONS + text)

    def env(self, **does: str) -> dict[str, str]:
        """Return the environment of a command on this node: what sbatch does (SBATCH), also with the merge job (MERGE),
        what squeue says about scripts (SCRIPTS), states (STATES) and the queue (QUEUE), what sacct and sinfo say.
        """
        done = {f"TEST_{name}": text for name, text in {**USUAL, **does}.items()}
        return {"PATH": f"{self.folder}:/usr/bin:/bin", "BADCJOBS_POLL_S": "0.05", **done}

    @property
    def calls(self) -> str:
        """How sbatch was called, each time, and with which variables."""
        log = self.folder / "sbatch.called"
        return log.read_text() if log.exists() else ""
