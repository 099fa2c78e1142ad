"""HawkEars 2: what it needs before it can start, and which way it is run.

With its Python known our own worker program feeds it (``hawkears_worker``); without, or where it cannot be fed, it runs
as it comes: one ``hawkears analyze`` process per batch (``hawkears2_session``).
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import WorkerPlan
from badcjobs.seams import Clock, Launcher, Session
from badcjobs.workers.fingerprints import fingerprint_of
from badcjobs.workers.hawkears2_session import HawkEarsSession
from badcjobs.workers.hawkears_python import WORKER, probe_hawkears
from badcjobs.workers.launch import worker_environment
from badcjobs.workers.patience import Patience
from badcjobs.workers.stream_session import StreamSession

log = logging.getLogger(__name__)

_CACHES = (
    ("NUMBA_CACHE_DIR", "numba"), ("MPLCONFIGDIR", "matplotlib"), ("CUDA_CACHE_PATH", "nv"),
    ("TORCHINDUCTOR_CACHE_DIR", "torchinductor"),
)  # fmt: skip
_DEFAULT_THREADS = 3  # HawkEars' own
_MOST_OMP_THREADS = 4  # more only fight over the cores
_CORES_TO_SPARE = 3  # with fewer for each of its threads, helpers of theirs only get in each other's way
_BATCH = 4096  # for a process per batch: long enough to forget its start, short enough to share what is left
# --quiet hides the device, --top stops early, and a filelist means the recordings of one call, which we never make.
_OURS = ("-i", "--input", "-o", "--output", "-r", "--rtype", "--quiet", "--top", "--filelist")


class HawkEarsEngine:
    """Runs the user's own HawkEars 2 installation.

    Parameters
    ----------
    program: the words that start it, ``["/path/to/hawkears"]``.
    python: the Python that it is installed in; None: not known, and it can only be run as it comes.
    root: the folder with its models and settings (None: the current one); HawkEars works there.
    """

    name = "hawkears"

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
        python: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._program = list(program)
        self._python = python
        self._root = root
        self._extra_args = list(extra_args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock
        self._allow_cpu = allow_cpu
        self._patience = patience or Patience()
        self._release: str | None = None

    @property
    def version(self) -> str | None:
        """Its release, as ``check`` has found it, and its models; None: not known."""
        models = list(((self._root or Path()).absolute() / "data" / "ckpt").glob("*.ckpt"))
        parts = [self._release or "", f"{len(models)} models {fingerprint_of(models, content=False)}" if models else ""]
        return ", ".join(filter(None, parts)) or None

    @property
    def wants(self) -> int:
        """What its threads work on and two behind them, or a batch."""
        return _BATCH if self._python is None else threads_of(self._extra_args) + 2

    def check(self) -> None:
        """Look for the program, for its models, and for options that would blind us; ask whether it can be fed."""
        self._check_arguments()
        if self._python is not None:
            self._probe(self._find([self._python])[0])
        if self._python is None:
            self._find(self._program)
        models = (self._root or Path()).absolute() / "data" / "ckpt"
        if not any(models.glob("*.ckpt")):
            raise NotHere(
                f"HawkEars has no models in {models}",
                why="it looks for them in its working folder, and without them it ends at once, with exit code 0",
                fix=f"cd {models.parent.parent} && hawkears init   (needs the network; or give --hawkears-root)",
            )

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Start a worker, or prepare a place where a process starts with each batch."""
        args = sized_arguments(self._extra_args, plan)
        env = hawkears_environment(self._environ, plan, args, scratch)
        must_use_cuda = _is_real(plan) and not self._allow_cpu
        if self._python is None:
            return HawkEarsSession(
                [*self._find(self._program), "analyze"],
                args,
                root=self._root,
                env=env,
                scratch=scratch,
                launcher=self._launcher,
                clock=self._clock,
                must_use_cuda=must_use_cuda,
                patience=self._patience,
            )
        scratch = scratch.absolute()
        (scratch / "hawkears").mkdir(exist_ok=True)
        return StreamSession(
            [*self._find([self._python]), str(WORKER), str(scratch / "hawkears"), *args],
            env=env,
            cwd=self._root,
            log_file=scratch / "hawkears.log",
            launcher=self._launcher,
            clock=self._clock,
            patience=self._patience,
            must_use_cuda=must_use_cuda,
            pin=plan.device.pin if plan.device else None,
        )

    def _probe(self, python: str) -> None:
        """Ask HawkEars' Python; one that cannot be fed is run as it comes, one that refuses the options not at all."""
        answer = probe_hawkears(python, self._extra_args, environ=self._environ, cwd=self._root)
        self._release = answer.version
        if answer.can_be_fed:
            return
        if (answer.problem or "").startswith("Error: "):
            raise BadInput(
                f"HawkEars does not understand --engine-arg {' '.join(self._extra_args)}",
                why=(answer.problem or "").removeprefix("Error: "),
                fix="hawkears analyze --help",
            )
        if "No module named 'hawkears'" in (answer.problem or ""):
            raise NotHere(
                f"{python} has no HawkEars",
                why=answer.problem,
                fix="badcjobs run … --hawkears-python /path/to/the/venv/of/hawkears/bin/python",
            )
        log.warning("HawkEars is run as it comes, a process per batch: %s", answer.problem)
        self._python = None

    def _check_arguments(self) -> None:
        wrong = [arg for arg in self._extra_args if arg.split("=")[0] in _OURS]
        if wrong:
            raise BadInput(
                f"--engine-arg {' '.join(wrong)} cannot be used with this engine",
                why="badcjobs chooses HawkEars' input and output itself, and has to see what it says",
                fix="leave it out; --region, --date, --min_score, --threads and the like are fine",
            )

    def _find(self, program: Sequence[str]) -> list[str]:
        found = shutil.which(program[0], path=self._environ.get("PATH"))
        if found is None:
            raise NotHere(
                f"the HawkEars program {program[0]!r} was not found",
                why="it is neither a file that can be run nor on PATH",
                fix="badcjobs run … --hawkears-python /path/to/the/venv/of/hawkears/bin/python",
            )
        # HawkEars works in another folder. Links stay as they are: the Python of a venv is one.
        return [str(Path(found).absolute()), *program[1:]]


def hawkears_environment(
    environ: Mapping[str, str], plan: WorkerPlan, extra_args: Sequence[str], scratch: Path
) -> dict[str, str]:
    """Return a worker's environment, its cores shared out among HawkEars' threads."""
    env = worker_environment(environ, plan)
    caches = find_caches(environ, scratch)
    # The first run compiles for half a minute; the workers and the tasks after it share what it made.
    for name, folder in _CACHES:
        env.setdefault(name, str(caches / f"{folder}-cache"))
    if "OMP_NUM_THREADS" not in environ:
        share = plan.threads // threads_of(extra_args)
        env["OMP_NUM_THREADS"] = str(min(_MOST_OMP_THREADS, share) if share >= _CORES_TO_SPARE else 1)
    return env


def find_caches(environ: Mapping[str, str], scratch: Path) -> Path:
    """Return the user's cache folder where it can be written, else one that the workers of this task share."""
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.cache")
    if home:
        shared = Path(home) / "badcjobs"
        try:
            shared.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass  # many sites give compute nodes a home that cannot be written
        if os.access(shared, os.W_OK):
            return shared
    return scratch.absolute().parent


def sized_arguments(extra_args: Sequence[str], plan: WorkerPlan) -> list[str]:
    """Return HawkEars' options with as many threads as the worker has cores for, unless the user has said how many.

    A thread keeps two cores busy: while one waits for the device, the next recording is decoded. A lean worker has
    one thread whatever was asked for: each has models of its own.
    """
    if plan.lean:
        return _with_threads(extra_args, 1)
    if any(word.split("=")[0] == "--threads" for word in extra_args):
        return list(extra_args)
    return _with_threads(extra_args, min(_DEFAULT_THREADS, max(1, (plan.threads + 1) // 2)))


def _with_threads(extra_args: Sequence[str], threads: int) -> list[str]:
    kept: list[str] = []
    words = iter(extra_args)
    for word in words:
        if word == "--threads":
            next(words, None)
        elif not word.startswith("--threads="):
            kept.append(word)
    return [*kept, "--threads", str(threads)]


def threads_of(extra_args: Sequence[str]) -> int:
    """Return how many threads the options ask for, or HawkEars' own number."""
    words = [word for arg in extra_args for word in arg.split("=", 1)]
    value = dict(pairwise(words)).get("--threads", "")
    return int(value) if value.isdecimal() and int(value) > 0 else _DEFAULT_THREADS


def _is_real(plan: WorkerPlan) -> bool:
    return plan.device is not None and plan.device.backend != "simulated"
