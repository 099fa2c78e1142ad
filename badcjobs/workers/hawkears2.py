"""HawkEars 2 as it comes: one ``hawkears analyze`` process per device for a whole batch.

Here is what it needs before it can start; ``hawkears2_session`` runs it and judges what it leaves.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import WorkerPlan
from badcjobs.seams import Clock, Launcher
from badcjobs.workers.hawkears2_session import HawkEarsSession
from badcjobs.workers.launch import worker_environment

_DEFAULT_THREADS = 3  # HawkEars' own
_MOST_OMP_THREADS = 4  # more only fight over the cores
# --quiet hides the device, --top stops early, and a filelist has the names from before staging.
_OURS = ("-i", "--input", "-o", "--output", "-r", "--rtype", "--quiet", "--top", "--filelist")


class HawkEarsEngine:
    """Runs the user's own HawkEars 2 installation.

    Parameters
    ----------
    program: the words that start it, ``["/path/to/hawkears"]``.
    root: the folder with its models and settings (None: the current one); HawkEars works there.
    """

    name = "hawkears"
    takes_whole_share = True

    def __init__(
        self,
        program: Sequence[str],
        *,
        root: Path | None,
        extra_args: Sequence[str],
        environ: Mapping[str, str],
        launcher: Launcher,
        clock: Clock,
        allow_cpu: bool,
    ) -> None:
        self._program = list(program)
        self._root = root
        self._extra_args = list(extra_args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock
        self._allow_cpu = allow_cpu

    def check(self) -> None:
        """Look for the program, for its models, and for options that would blind us."""
        self._check_arguments()
        self._find_program()
        models = (self._root or Path()).absolute() / "data" / "ckpt"
        if not any(models.glob("*.ckpt")):
            raise NotHere(
                f"HawkEars has no models in {models}",
                why="it looks for them in its working folder, and without them it ends at once, with exit code 0",
                fix=f"cd {models.parent.parent} && hawkears init   (needs the network; or give --hawkears-root)",
            )

    def open(self, plan: WorkerPlan, scratch: Path) -> HawkEarsSession:
        """Prepare a place; the process starts with the batch."""
        return HawkEarsSession(
            [*self._find_program(), "analyze"],
            self._extra_args,
            root=self._root,
            env=hawkears_environment(self._environ, plan, self._extra_args, scratch),
            scratch=scratch,
            launcher=self._launcher,
            clock=self._clock,
            must_use_cuda=_is_real(plan) and not self._allow_cpu,
        )

    def _check_arguments(self) -> None:
        wrong = [arg for arg in self._extra_args if arg.split("=")[0] in _OURS]
        if wrong:
            raise BadInput(
                f"--engine-arg {' '.join(wrong)} cannot be used with this engine",
                why="badcjobs chooses HawkEars' input and output itself, and has to see what it says",
                fix="leave it out; --region, --date, --min_score, --threads and the like are fine",
            )

    def _find_program(self) -> list[str]:
        found = shutil.which(self._program[0], path=self._environ.get("PATH"))
        if found is None:
            raise NotHere(
                f"the HawkEars program {self._program[0]!r} was not found",
                why="it is neither a file that can be run nor on PATH",
                fix="badcjobs run … --hawkears-python /path/to/the/venv/of/hawkears/bin/python",
            )
        # HawkEars works in another folder. Links stay as they are: the Python of a venv is one.
        return [str(Path(found).absolute()), *self._program[1:]]


def hawkears_environment(
    environ: Mapping[str, str], plan: WorkerPlan, extra_args: Sequence[str], scratch: Path
) -> dict[str, str]:
    """Return a worker's environment, its cores shared out among HawkEars' threads."""
    env = worker_environment(environ, plan)
    # The first run compiles for half a minute; the workers of a task share what it made.
    env.setdefault("NUMBA_CACHE_DIR", str(scratch.absolute().parent / "numba-cache"))
    if "OMP_NUM_THREADS" not in environ:
        share = plan.threads // _parse_threads(extra_args)
        env["OMP_NUM_THREADS"] = str(min(_MOST_OMP_THREADS, max(1, share)))
    return env


def _parse_threads(extra_args: Sequence[str]) -> int:
    words = [word for arg in extra_args for word in arg.split("=", 1)]
    value = dict(pairwise(words)).get("--threads", "")
    return int(value) if value.isdecimal() and int(value) > 0 else _DEFAULT_THREADS


def _is_real(plan: WorkerPlan) -> bool:
    return plan.device is not None and plan.device.backend != "simulated"
