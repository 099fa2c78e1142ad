"""HawkEars 2 through its Python API (since 2.3): our worker program ``hawkears_worker`` runs in HawkEars' Python.

Where it is possible, workers are forked from one process that has imported HawkEars.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput, NotHere, SlowStart
from badcjobs.model import USUAL_MEMORY, WorkerPlan
from badcjobs.paths import ANOTHER_CACHE, shell_line, user_cache
from badcjobs.processes import ForkParent, ParentGone, ParentLate, fingerprint_of, worker_environment
from badcjobs.seams import EngineTraits
from badcjobs.settings import RunSettings
from badcjobs.workers import policy
from badcjobs.workers.error_patterns import ErrorPattern
from badcjobs.workers.hawkears_worker import PLACES
from badcjobs.workers.program_start import EngineStart, HangTimeout
from badcjobs.workers.stream_session import StreamSession

log = logging.getLogger(__name__)

VERSION_NEEDED = "2.3"
WORKER = Path(__file__).with_name("hawkears_worker.py")
_GIVE_PYTHON = "badcjobs run … --hawkears-python /path/to/the/venv/of/hawkears/bin/python"
_QUERY_TRIES = 2
_CACHES = {
    "NUMBA_CACHE_DIR": "numba-cache",
    "MPLCONFIGDIR": "matplotlib-cache",
    "CUDA_CACHE_PATH": "nv-cache",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor-cache",
    "PYTORCH_KERNEL_CACHE_PATH": "torch-kernels-cache",
}
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # Arrow's allocator starts one when it is loaded
_THREADS = "OMP_NUM_THREADS"
_THREADS_OPTION = "--threads"
_DEFAULT_THREADS = 3  # the default of HawkEars
_MOST_OMP_THREADS = 4  # more threads only compete for the cores
_CORES_TO_SPARE = 3  # with fewer cores per HawkEars thread, OpenMP threads slow each other down
# --quiet hides the device, --top and --help stop early, and badcjobs reads --filelist itself.
_RESERVED = ("-i", "--input", "-o", "--output", "-r", "--rtype", "--quiet", "--top", "--help", "--filelist")
_FILES = ("-c", "--cfg", "--include", "--exclude")
# Those of HawkEars 1 and 2.
HAWKEARS_PATTERNS: tuple[ErrorPattern, ...] = (
    (
        policy.CONFIGURATION,
        # HawkEars 2 only logs an unknown location, then continues without the filter of the region.
        r"Model checkpoint files not found|(?i:no (?:onnx )?checkpoints found)|No models loaded from|\.yaml not found"
        r"|Error\. invalid |Error: location .* not found|[Nn]o eBird county found|Error: invalid date"
        r"|Error: (?:No such option|Invalid value|Option |Got unexpected|Missing |--rtype|min_score)"
        r"|ValueError: m(?:ax|in)_label_length|analyze\.py: error: |(?:^|\n)(?:Import|ModuleNotFound)Error: ",
    ),
    (
        policy.BAD_AUDIO,
        r"Caught exception in audio load|Could not load recording|Recording \".*\" (?:not found|is not a file)"
        r"|Invalid data found when processing input|No audio (?:samples|stream) found|audio_error=(?!None)"
        r"|Format not recognised|unknown format|not start with RIFF id|Error opening .*(?:wav|flac|mp3|ogg)\b"
        r"|file is not a supported audio|Header missing",
    ),
)

TRAITS = EngineTraits(
    memory_per_worker=USUAL_MEMORY,
    cores_per_chunk=1,
    error_patterns=HAWKEARS_PATTERNS,
    reads_places=True,
)


def make_engine(settings: RunSettings, start: EngineStart) -> HawkEarsEngine:
    """Return HawkEars 2 as the settings describe it."""
    python = settings.hawkears_python
    script = shutil.which("hawkears", path=start.environ.get("PATH"))
    if not python and script:
        python = python_of(Path(script))
    environ = dict(start.environ)
    if settings.workers_wanted is None and not start.allow_cpu:
        environ.pop(_THREADS, None)  # a job script may set as many threads as the job has cores
    return HawkEarsEngine(
        replace(start, environ=environ, args=with_absolute_paths(split_options(start.args), start.cwd)),
        python,
        start.cwd / (settings.hawkears_root or ""),
        hang_timeout=HangTimeout(start_s=start.start_s),
        forks=settings.workers_wanted != 1 and not start.allow_cpu,
    )


@dataclass(eq=False)
class HawkEarsEngine:
    """Runs the user's own HawkEars 2 installation."""

    start: EngineStart
    python: str | None  # the Python that has HawkEars; None: not known from ``hawkears`` on PATH
    root: Path  # the folder with its models and settings, its working folder
    _: KW_ONLY
    hang_timeout: HangTimeout = field(default_factory=HangTimeout)
    forks: bool = False  # workers are forked from one process that has imported HawkEars, where that is possible
    release: str | None = None  # found by ``check``
    _parent: ForkParent | None = None
    _facts: Mapping[str, Any] | None = None  # what it has answered
    _lock: threading.Lock = field(default_factory=threading.Lock)
    name = "hawkears"
    traits = TRAITS

    @property
    def _models(self) -> Path:
        return self.root.absolute() / "data" / "ckpt"

    @property
    def version(self) -> str | None:
        """The release, as found by ``check``, and its models; None: not known."""
        parts = [self.release]
        models = list(self._models.glob("*.ckpt"))
        if models:
            parts.append(f"{len(models)} models {fingerprint_of(models, content=False)}")
        return ", ".join(filter(None, parts)) or None

    @property
    def wants(self) -> int:
        """One chunk per thread, and two that wait."""
        return threads_of(self.start.args) + 2

    def chunks_at_once(self, plan: WorkerPlan) -> int:
        """Return the number of threads of a worker."""
        return threads_of(sized_arguments(self.start.args, plan))

    def check(self) -> None:
        """Check HawkEars' Python and its models; let HawkEars parse the options."""
        args = self._options(self.start.args)
        refuse_arguments(self.start, _RESERVED)
        python = self._python
        if not any(self._models.glob("*.ckpt")):
            raise NotHere(
                f"HawkEars has no models in {self._models}",
                why="it looks for models in its working folder; without models it ends immediately, with exit code 0",
                fix=f"cd {self._models.parent.parent} && hawkears init   (needs the network; or give --hawkears-root)",
            )
        self._fork_early(args)
        answer = self._facts or self.query(args)
        self.release = answer.get("versions", {}).get("hawkears")
        error = answer.get("error")
        if self.release is None and error is not None:
            raise self._refusal(error, python)

    def query(self, options: Sequence[str]) -> Mapping[str, Any]:
        """Let HawkEars' own command line parse the options; return its versions or, without them, its error message."""
        launcher = self.start.launcher
        limit_s = self.hang_timeout.start_s
        for _ in range(_QUERY_TRIES):
            try:
                done = subprocess.run(
                    [*launcher.prefix_for("check"), self._python, str(WORKER), "--probe", *options],
                    env={**self.start.environ, **launcher.marks},
                    cwd=self.root,
                    capture_output=True,
                    text=True,
                    timeout=limit_s,
                )
            except subprocess.TimeoutExpired as error:
                raise slow_start(self._python, limit_s) from error
            except OSError as error:
                return {"error": str(error)}
            if done.returncode >= 0:  # negative: killed by a signal
                break
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        answer = {"error": lines[-1]}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                answer.update(json.loads(line))
                break
        return answer

    def _fork_early(self, args: Sequence[str]) -> None:
        """Start the process that forks workers, which answers more than a query; ``open`` does it where this cannot."""
        caches = user_cache(self.start.environ)
        if not self.forks or caches is None or why_not_writable(caches):
            return  # a check leaves no caches behind; only ``open`` knows another folder for them
        plan = WorkerPlan(0, None, None, threads=1)
        self._find_parent(hawkears_environment(self.start.environ, plan, args, caches))

    def _refusal(self, error: str, python: str) -> BadInput | NotHere:
        """Return the error for what HawkEars has answered."""
        if error.startswith("Error: "):
            what = f"HawkEars does not understand --engine-arg {' '.join(self.start.args)}"
            return BadInput(what, why=error.removeprefix("Error: "), fix="hawkears analyze --help")
        if "No module named 'hawkears'" in error:
            return NotHere(f"HawkEars is not installed in {python}", why=error, fix=_GIVE_PYTHON)
        return NotHere(
            f"HawkEars in {python} cannot be used: badcjobs needs HawkEars {VERSION_NEEDED} or later",
            why=error,
            fix=f"{shell_line(python)} -m pip install 'hawkears>={VERSION_NEEDED}'",
        )

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process."""
        args = sized_arguments(self.start.args, plan)
        scratch = scratch.absolute()
        out = scratch / "hawkears"
        out.mkdir(exist_ok=True)
        env = hawkears_environment(self.start.environ, plan, args, scratch)
        while True:
            try:
                return StreamSession(
                    self.start,
                    [self._python, str(WORKER), str(out), *self._options(args)],
                    env=env,
                    cwd=self.root,
                    log_file=scratch / "hawkears.log",
                    hang_timeout=self.hang_timeout,
                    error_patterns=HAWKEARS_PATTERNS,
                    must_use_cuda=has_real_device(plan) and not self.start.allow_cpu,
                    pin=plan.device.pin if plan.device else None,
                    parent=self._find_parent(env),
                )
            except ParentGone as error:
                self._stop_forking(error)

    @property
    def _python(self) -> str:
        return find_python(self.python, self.start)

    def _options(self, args: Sequence[str]) -> list[str]:
        """Return the options for our worker program."""
        return [PLACES, *args] if self.start.places else list(args)

    def _stop_forking(self, why: object) -> None:
        if self.forks:
            self.forks = False
            self._parent = None
            log.info("workers are started one by one, not forked: %s", why)

    def _find_parent(self, env: Mapping[str, str]) -> ForkParent | None:
        """Return the process that forks workers; None: start them one by one."""
        with self._lock:
            if self.forks and self._parent is None:
                try:
                    self._parent = self._start_parent(env)
                except (ParentGone, OSError) as error:
                    self._stop_forking(error)
            return self._parent

    def _start_parent(self, env: Mapping[str, str]) -> ForkParent:
        """Start the process that forks workers; raise ParentGone if workers cannot be forked."""
        if self.start.launcher.prefix_for(""):
            raise ParentGone("--engine-prefix is set")
        if env[_THREADS] != "1":  # libraries count their threads when they are loaded, in the parent
            raise ParentGone(f"{_THREADS} is {env[_THREADS]}")
        python = self._python
        options = self._options(self.start.args)
        limit_s = self.hang_timeout.start_s
        try:
            parent = ForkParent(
                self.start.launcher,
                lambda fd: [python, str(WORKER), "--parent", str(fd), *options],
                {**env, **_NO_THREADS},
                self.root,
                limit_s=limit_s,
            )
        except ParentLate as error:
            raise slow_start(python, limit_s) from error
        self._facts = parent.facts
        why = parent.facts.get("unfit") or parent.facts.get("error")
        if why is not None:
            raise ParentGone(why)
        log.info("workers are forked from process %d, which has imported HawkEars", parent.pid)
        return parent


# --- the Python of HawkEars -------------------------------------------------------------------------------------------


def find_python(python: str | None, start: EngineStart) -> str:
    """Return the absolute path of HawkEars' Python; unchanged if it is not found but a prefix (a container) is set."""
    if not python:
        raise NotHere(
            "the program 'hawkears' was not found", why="the script hawkears is not on PATH", fix=_GIVE_PYTHON
        )
    path = shutil.which(python, path=start.environ.get("PATH"))
    if path:
        return str(Path(path).absolute())  # do not resolve links: the Python of a venv is a link
    if start.launcher.prefix_for(""):
        return python
    raise NotHere(
        f"the Python of HawkEars, {python!r}, was not found",
        why="it is neither an executable file nor on PATH",
        fix=_GIVE_PYTHON,
    )


def python_of(script: Path) -> str | None:
    """Return the Python in the first line of a script of pip, else the one beside it; None: there is none."""
    with suppress(OSError), script.open("rb") as file:
        first_line = file.readline(2048).decode(errors="replace")
        named = re.match(r"#!\s*(?:/\S*/env\s+(?:-\S+\s+)*)?(\S*python[^\s/]*)(?:\s|$)", first_line)
        if named:
            return named[1]
    beside = script.with_name("python")
    return str(beside) if beside.exists() else None


def slow_start(python: str, limit_s: float) -> SlowStart:
    """Return the error for a HawkEars that is not imported in time."""
    venv = shell_line(Path(python).parent.parent)
    copy = f'cp -a {venv} "$TMPDIR/he" && badcjobs run … --hawkears-python "$TMPDIR/he/bin/python"'
    return SlowStart(
        f"HawkEars in {python} is slow to start: it was not imported in {limit_s:,.0f} s",
        why="the filesystem with its files is slow or busy",
        fix=f"{copy}   (or the same command again)",
    )


# --- arguments and environment ----------------------------------------------------------------------------------------


def split_options(args: Sequence[str]) -> list[str]:
    """Return options with each value as a word of its own: ``--name=value`` becomes ``--name value``."""
    words = []
    for arg in args:
        words += arg.split("=", 1) if arg.startswith("--") else [arg]
    return words


def refuse_arguments(start: EngineStart, reserved: Sequence[str]) -> None:
    """Refuse options that badcjobs sets itself; a letter may have its value attached."""
    wrong = [word for word in start.args if word in reserved or word[:2] in reserved]
    if wrong:
        raise BadInput(
            f"--engine-arg {' '.join(wrong)} cannot be used with this engine",
            why="badcjobs sets HawkEars' input and output itself, reads its messages, and has its own --filelist",
            fix="remove it; options such as --region, --date, --min_score and --threads are allowed",
        )


def with_absolute_paths(words: Sequence[str], cwd: Path) -> list[str]:
    """Return HawkEars' options with absolute paths, because it runs in its own folder."""
    return [str(cwd / word) if before in _FILES else word for before, word in pairwise(["", *words])]


def hawkears_environment(
    environ: Mapping[str, str],
    plan: WorkerPlan,
    extra_args: Sequence[str],
    scratch: Path,
) -> dict[str, str]:
    """Return a worker's environment, with cache folders and a thread limit for its share of the cores.

    The first run compiles for half a minute; later workers and tasks use its result. The caches are in the user's cache
    folder, or in the task's own folder where compute nodes cannot write to home.
    """
    env = worker_environment(environ, plan)
    caches = user_cache(environ)
    why = "" if caches is None else why_not_writable(caches)
    if why and plan.slot == 0:  # once per task
        log.warning("%s cannot be written: %s; every task compiles again; %s", caches, why, ANOTHER_CACHE)
    if caches is None or why:
        caches = scratch.absolute().parent
    for name, folder in _CACHES.items():
        env.setdefault(name, str(caches / folder))
    if _THREADS not in environ:
        share = plan.threads // threads_of(extra_args)
        env[_THREADS] = str(min(_MOST_OMP_THREADS, share) if share >= _CORES_TO_SPARE else 1)
    return env


def why_not_writable(folder: Path) -> str:
    """Return why a folder, made if it does not exist, cannot be written; "": it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK) else "it is read-only here"


def sized_arguments(words: Sequence[str], plan: WorkerPlan) -> list[str]:
    """Return HawkEars' options with a number of threads that fits the worker's cores, unless the user has set it.

    A thread keeps two cores busy: while it waits for the device, the next recording is decoded. A lean worker always
    has one thread, because each thread loads its own models.
    """
    if _THREADS_OPTION in words and not plan.lean:
        return list(words)
    threads = 1 if plan.lean else min(_DEFAULT_THREADS, max(1, (plan.threads + 1) // 2))
    kept = [word for before, word in pairwise(["", *words]) if _THREADS_OPTION not in (before, word)]
    return [*kept, _THREADS_OPTION, str(threads)]


def threads_of(words: Sequence[str]) -> int:
    """Return the number of threads in the options, or the default of HawkEars."""
    value = dict(pairwise(words)).get(_THREADS_OPTION, "")
    if value.isdecimal() and int(value) > 0:
        return int(value)
    return _DEFAULT_THREADS


def has_real_device(plan: WorkerPlan) -> bool:
    """Return whether a worker has a real device, not a simulated one."""
    return plan.device is not None and plan.device.backend != "simulated"
