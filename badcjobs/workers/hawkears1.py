"""HawkEars 1 (``analyze.py``): a process per batch, in a folder of links, its labels taken back to the chunks.

Its exit code says nothing: it is 0 for a missing model, a broken file and a thread that died. A recording is done when
its own label file is there *and* the common table, which is written at the very end.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from badcjobs.seams import Clock, Launcher, More, SessionBroken, nothing_more
from badcjobs.workers.detections import parse_labels_csv
from badcjobs.workers.failures import (
    BAD_AUDIO,
    BAD_OUTPUT,
    BATCH_LOST,
    CONFIGURATION,
    EXIT_CODE,
    NO_OUTPUT,
    NO_SPACE,
    RAN_ON_CPU,
    RETIRING,
    TERMINATED,
    classify,
    signal_name,
    signal_of,
)
from badcjobs.workers.fingerprints import fingerprint_of
from badcjobs.workers.hawkears2 import hawkears_environment, sized_arguments
from badcjobs.workers.hawkears2_staging import NotStaged, Staged, stage_batch
from badcjobs.workers.launch import last_lines
from badcjobs.workers.patience import Patience
from badcjobs.workers.program_run import ProgramRunner

_BATCH = 256  # nothing of a batch is seen before its end, so it must not be long
_OURS = ("-i", "--input", "-o", "--output", "--rtype", "-d", "--debug", "--filelist", "--recurse")
_DEVICE = re.compile(r"Using (CUDA|CPU|MPS)")


class HawkEars1Engine:
    """Runs the user's own HawkEars 1: a folder with ``analyze.py``, and a Python that can run it."""

    name = "hawkears1"

    def __init__(
        self,
        python: str,
        *,
        root: Path | None,
        extra_args: Sequence[str],
        environ: Mapping[str, str],
        launcher: Launcher,
        clock: Clock,
        allow_cpu: bool,
        patience: Patience | None = None,
        batch: int = _BATCH,
    ) -> None:
        self.wants = batch
        self._python = python
        self._root = root
        self._extra_args = list(extra_args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock
        self._allow_cpu = allow_cpu
        # Its word may be one line per recording, and its start a compilation: only minutes are silence.
        self._patience = patience or Patience(least_s=600.0)

    @property
    def version(self) -> str | None:
        """Its program and its models, which have no other name."""
        root = (self._root or Path()).absolute()
        mark = fingerprint_of([root / "analyze.py", *(root / "data" / "ckpt").glob("*")], content=False)
        return mark and f"analyze.py {mark}"

    def check(self) -> None:
        """Look for Python, for analyze.py, and for options that would blind us."""
        wrong = [arg for arg in self._extra_args if arg.split("=")[0] in _OURS]
        if wrong:
            raise BadInput(
                f"--engine-arg {' '.join(wrong)} cannot be used with this engine",
                why="badcjobs chooses HawkEars' input and output itself",
                fix="leave it out; --region, --date, --min_score, --band, --threads and the like are fine",
            )
        self._find_python()
        script = (self._root or Path()).absolute() / "analyze.py"
        if not script.is_file():
            raise NotHere(
                f"there is no {script}",
                why="HawkEars 1 is a folder with analyze.py, its data and its models, and works there",
                fix="badcjobs run … --engine hawkears1 --hawkears-root /path/to/HawkEars",
            )

    def open(self, plan: WorkerPlan, scratch: Path) -> HawkEars1Session:
        """Prepare a place; the process starts with the batch."""
        is_real = plan.device is not None and plan.device.backend != "simulated"
        args = sized_arguments(self._extra_args, plan)
        merge = [] if {"-m", "--merge"} & {arg.split("=")[0] for arg in self._extra_args} else ["--merge", "0"]
        return HawkEars1Session(
            [self._find_python(), "analyze.py", *merge, *args],
            root=(self._root or Path()).absolute(),
            env=hawkears_environment(self._environ, plan, args, scratch),
            scratch=scratch.absolute(),
            launcher=self._launcher,
            clock=self._clock,
            must_use_cuda=is_real and not self._allow_cpu,
            patience=self._patience,
            most=self.wants,
        )

    def _find_python(self) -> str:
        found = shutil.which(self._python, path=self._environ.get("PATH"))
        if found is None:
            raise NotHere(
                f"the Python for HawkEars 1, {self._python!r}, was not found",
                why="it is neither a file that can be run nor on PATH",
                fix="badcjobs run … --engine hawkears1 --hawkears-python /path/to/venv/bin/python",
            )
        return str(Path(found).absolute())


class HawkEars1Session:
    """A HawkEars 1 process per batch."""

    pid: int | None = None

    def __init__(
        self,
        program: Sequence[str],
        *,
        root: Path,
        env: Mapping[str, str],
        scratch: Path,
        launcher: Launcher,
        clock: Clock,
        must_use_cuda: bool,
        patience: Patience,
        most: int,
    ) -> None:
        self._most = most
        self._program = list(program)
        self._root = root
        self._env = env
        self._folder = scratch / "hawkears1"
        self._inputs, self._outputs = self._folder / "in", self._folder / "out"
        self._log = self._folder / "hawkears.log"
        self._clock = clock
        self._runner = ProgramRunner(launcher, clock)
        self._must_use_cuda = must_use_cuda
        self._patience = patience
        self._interrupted = False

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Run HawkEars on the batch, and yield what became of each chunk when it has ended."""
        for first in range(0, len(batch), self._most):
            if not (self._interrupted or self._runner.killed):
                yield from self._process(batch[first : first + self._most])

    def _process(self, batch: Sequence[Chunk]) -> Iterator[ChunkStarted | ChunkResult]:
        started_at_ms = self._clock.now_ms()
        staged: list[Staged] = []
        for item in self._stage(batch):
            if isinstance(item, NotStaged):
                yield ChunkResult(item.chunk, started_at_ms, started_at_ms, error_class=BAD_AUDIO, error=item.why)
            else:
                staged.append(item)
        yield from (ChunkStarted(item.chunk, started_at_ms) for item in staged)
        if staged and (code := self._run(staged)) is not None:
            yield from self._judge(staged, code, started_at_ms)

    def interrupt(self) -> None:
        """Finish the batch at hand, then stop."""
        self._interrupted = True

    def kill(self) -> None:
        """End HawkEars now."""
        self._runner.kill()

    def close(self) -> int | None:
        """Leave no audio behind; return the last exit code."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._runner.exit_code

    def _stage(self, batch: Sequence[Chunk]) -> list[Staged | NotStaged]:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return list(stage_batch(batch, self._inputs, may_link=False))
        except OSError as error:
            raise SessionBroken(
                NO_SPACE, f"no place for the batch in {self._inputs}: {error}", at_start=True
            ) from error

    def _run(self, staged: Sequence[Staged]) -> int | None:
        lengths = [item.chunk.audio_s for item in staged]
        audio_s = None if None in lengths else sum(length or 0.0 for length in lengths)
        began_s = self._clock.monotonic_s()
        code = self._runner.run(
            [*self._program, "-i", str(self._inputs), "-o", str(self._outputs), "--rtype", "both"],
            env=self._env,
            cwd=self._root,
            log=self._log,
            limit_s=self._patience.limit_s(audio_s),
            hears_term=False,
        )
        self.pid = self._runner.pid
        if code == 0:
            self._patience.learn(self._clock.monotonic_s() - began_s, audio_s)
        return code

    # --- verdicts -------------------------------------------------------------------------------------------------

    def _judge(self, staged: Sequence[Staged], code: int, started_at_ms: int) -> Iterator[ChunkResult]:
        """Say what became of each chunk of a process that has ended."""
        words = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._refuse_what_cannot_work(words)
        now_ms = self._clock.now_ms()
        found = self._labels()
        left: list[Staged] = []
        for item in staged:
            if found is not None and (self._outputs / f"{item.stem}_HawkEars.txt").exists():
                detections = tuple(found.get(Path(item.path).name, ()))
                yield ChunkResult(item.chunk, started_at_ms, now_ms, detections, item.chunk.audio_s)
            elif complaint := _complaint(words, item.path):
                said = complaint.replace(item.path, item.chunk.audio_path)
                yield ChunkResult(item.chunk, started_at_ms, now_ms, error_class=BAD_AUDIO, error=said)
            else:
                left.append(item)
        if left and not self._runner.killed:
            yield from self._judge_silence(left, of=len(staged), code=code, started_at_ms=started_at_ms)

    def _labels(self) -> dict[str, list[Detection]] | None:
        try:
            return parse_labels_csv((self._outputs / "HawkEars_labels.csv").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise SessionBroken(BAD_OUTPUT, f"HawkEars_labels.csv cannot be read: {error}") from error

    def _judge_silence(self, left: list[Staged], *, of: int, code: int, started_at_ms: int) -> Iterator[ChunkResult]:
        error_class, error = self._explain(code)
        if error_class in RETIRING or error_class in (CONFIGURATION, TERMINATED):
            raise SessionBroken(error_class, error)
        now_ms = self._clock.now_ms()
        for item in left:
            if of == 1:
                yield ChunkResult(item.chunk, started_at_ms, now_ms, error_class=error_class, error=error)
            else:
                why = f"lost with its batch of {of} ({error_class}): {error.splitlines()[-1][:200]}"
                yield ChunkResult(item.chunk, started_at_ms, now_ms, (), None, BATCH_LOST, why, charged=False)

    def _explain(self, code: int) -> tuple[str, str]:
        said = last_lines(self._log)
        error_class = classify(said, code)
        if error_class in (EXIT_CODE, BAD_AUDIO):
            error_class = NO_OUTPUT
        signum = signal_of(code)
        how = f"was ended by {signal_name(signum)}" if signum else f"ended with exit code {code} and no output"
        return error_class, f"{said}\nHawkEars {how}".strip()

    def _refuse_what_cannot_work(self, words: str) -> None:
        for line in words.splitlines():
            if classify(line) == CONFIGURATION:
                raise SessionBroken(CONFIGURATION, f"HawkEars cannot work like this: {line}")
        device = _DEVICE.search(words)
        if self._must_use_cuda and device and device[1] != "CUDA":
            raise SessionBroken(RAN_ON_CPU, f"HawkEars took the {device[1]} although this worker has a GPU")


def _complaint(words: str, path: str) -> str | None:
    """Return the last line in which HawkEars complains about a recording; that it analyses it is no complaint."""
    lines = [line for line in words.splitlines() if path in line and ": Analyzing " not in line]
    return lines[-1][:2000] if lines else None
