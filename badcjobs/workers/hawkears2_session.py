"""One worker's HawkEars processes: started, followed, stopped, and judged by what they leave.

HawkEars' exit code says nothing: it is 0 for a missing model and a broken file, 1 after an orderly stop.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult
from badcjobs.seams import Clock, Launcher, More, Process, SessionBroken, nothing_more
from badcjobs.workers.detections import parse_audacity_labels
from badcjobs.workers.failures import (
    BAD_AUDIO,
    BAD_OUTPUT,
    BATCH_LOST,
    CONFIGURATION,
    EXIT_CODE,
    HANG,
    NO_OUTPUT,
    NO_PROGRAM,
    NO_SPACE,
    OUT_OF_MEMORY,
    RAN_ON_CPU,
    RETIRING,
    classify,
    signal_name,
    signal_of,
)
from badcjobs.workers.hawkears2_log import HawkEarsLog
from badcjobs.workers.hawkears2_outputs import POLL_S, Output, OutputWatch
from badcjobs.workers.hawkears2_staging import NotStaged, Staged, stage_batch
from badcjobs.workers.patience import Patience

_SHORTEST_HEARD_S = 0.5
_LOADING = "Failed to load model"  # what HawkEars says before the reason


class HawkEarsSession:
    """A HawkEars process per batch, its results as they are finished.

    HawkEars does not say when it begins a recording: ``started_at_ms`` is the end of the result before it (for
    the first: when the device was named). The sum is right; each one's own time is an approximation.
    """

    pid: int | None = None

    def __init__(
        self,
        program: Sequence[str],
        extra_args: Sequence[str],
        *,
        root: Path | None,
        env: Mapping[str, str],
        scratch: Path,
        launcher: Launcher,
        clock: Clock,
        must_use_cuda: bool,
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._program = list(program)
        self._extra_args = list(extra_args)
        self._root = root
        self._env = env
        self._scratch = scratch.absolute()
        self._launcher = launcher
        self._clock = clock
        self._must_use_cuda = must_use_cuda
        self._process: Process | None = None
        self._stopping = False
        self._lock = threading.Lock()

    # --- called from another thread -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ask HawkEars, once, to finish the recordings in progress; a second SIGINT would throw them away."""
        with self._lock:
            if not self._stopping:
                self._signal(signal.SIGINT)
            self._stopping = True

    def kill(self) -> None:
        """End HawkEars now."""
        with self._lock:
            self._stopping = True
            self._signal(signal.SIGKILL)

    # --- the life of a batch --------------------------------------------------------------------------------------

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkResult]:
        """Yield what became of each chunk; after ``interrupt`` or ``kill`` only of those already decided."""
        run = _Run(self._scratch)
        try:
            placed = self._stage(batch, run.inputs)
            for item in placed:
                if isinstance(item, NotStaged):
                    yield self._failure(item.chunk, self._clock.now_ms(), BAD_AUDIO, item.why)
            staged = [item for item in placed if isinstance(item, Staged)]
            if staged and (process := self._start(run)) is not None:
                yield from self._follow(process, staged, run)
        finally:
            self._end_process()
            shutil.rmtree(run.inputs, ignore_errors=True)

    def close(self) -> int | None:
        """Leave nothing running and no audio behind; return the last exit code."""
        self._end_process()
        for inputs in self._scratch.glob("in-*"):
            shutil.rmtree(inputs, ignore_errors=True)
        return None if self._process is None else self._process.returncode

    def _stage(self, batch: Sequence[Chunk], inputs: Path) -> list[Staged | NotStaged]:
        placed: list[Staged | NotStaged] = []
        try:
            for item in stage_batch(batch, inputs):
                placed.append(item)
                if self._stopping:
                    break
            return placed
        except OSError as error:
            raise SessionBroken(NO_SPACE, f"no place for the batch in {inputs}: {error}", at_start=True) from error

    def _start(self, run: _Run) -> Process | None:
        argv = [*self._program, str(run.inputs), "-o", str(run.outputs), "--rtype", "csv+audacity", *self._extra_args]
        with self._lock:
            if self._stopping:
                return None
            try:
                self._process = self._launcher.start(argv, env=self._env, cwd=self._root, stderr=run.log)
            except OSError as error:
                raise SessionBroken(NO_PROGRAM, f"{argv[0]}: {error}", at_start=True) from error
            self.pid = self._process.pid
            return self._process

    def _follow(self, process: Process, staged: Sequence[Staged], run: _Run) -> Iterator[ChunkResult]:
        log, watch = HawkEarsLog(run.log), OutputWatch(staged, run.outputs)
        unfinished = {item.chunk.key: item for item in staged}
        last_end_ms = self._clock.now_ms()
        last_word_s = self._clock.monotonic_s()
        exit_code = None
        while exit_code is None:
            self._clock.sleep(POLL_S)
            words_before = log.offset
            was_silent = log.device is None
            exit_code = process.poll()  # asked first: then everything written before the end is seen below
            log.read_on()
            outputs = watch.look(threads=log.threads, ended=exit_code is not None and not signal_of(exit_code))
            log.read_on(final=exit_code is not None)  # again: an output counts only with all that was said before it
            self._refuse_what_cannot_work(log, bool(outputs))
            if was_silent and log.device is not None:
                last_end_ms = self._clock.now_ms()
            if outputs or log.offset != words_before:
                last_word_s = self._clock.monotonic_s()
            self._refuse_silence(log, list(unfinished.values()), self._clock.monotonic_s() - last_word_s)
            for output in outputs:
                if output.staged.stem not in log.not_written:
                    result = self._result(output, last_end_ms)
                    self._patience.learn((result.ended_at_ms - last_end_ms) / 1000, result.audio_s)
                    last_end_ms = result.ended_at_ms
                    del unfinished[output.staged.chunk.key]
                    yield result
        yield from self._judge(list(unfinished.values()), log, exit_code, of=len(staged), started_at_ms=last_end_ms)

    def _refuse_what_cannot_work(self, log: HawkEarsLog, has_outputs: bool) -> None:
        if log.misconfigured is not None and not log.out_of_memory:
            raise SessionBroken(CONFIGURATION, f"HawkEars cannot work like this: {log.misconfigured}")
        if self._must_use_cuda and log.device != "CUDA" and (log.device is not None or has_outputs):
            raise SessionBroken(
                RAN_ON_CPU,
                f"HawkEars took the {log.device or 'CPU'} although this worker has a GPU:"
                " CUDA does not work here for its PyTorch, and on the CPU it uses fewer models",
            )

    def _refuse_silence(self, log: HawkEarsLog, unfinished: Sequence[Staged], silent_s: float) -> None:
        lengths = [item.chunk.audio_s for item in unfinished]
        limit_s = self._patience.start_s
        if log.device is not None:
            limit_s = self._patience.limit_s(None if None in lengths else max((n or 0.0 for n in lengths), default=0.0))
        if silent_s >= limit_s:
            raise SessionBroken(HANG, f"no word from HawkEars for {silent_s:.0f} s", at_start=log.device is None)

    # --- verdicts -------------------------------------------------------------------------------------------------

    def _result(self, output: Output, started_at_ms: int) -> ChunkResult:
        chunk = output.staged.chunk
        try:
            detections = tuple(parse_audacity_labels(output.text))
        except ValueError as error:
            return self._failure(chunk, started_at_ms, BAD_OUTPUT, f"HawkEars' labels cannot be read: {error}")
        ended_at_ms = min(max(started_at_ms, output.written_at_ms), self._clock.now_ms())
        return ChunkResult(chunk, started_at_ms, ended_at_ms, detections, audio_s=chunk.audio_s)

    def _judge(
        self, unfinished: Sequence[Staged], log: HawkEarsLog, exit_code: int, *, of: int, started_at_ms: int
    ) -> Iterator[ChunkResult]:
        """Say what became of the recordings without output."""
        unexplained = []
        for staged in unfinished:
            if (length_s := log.unheard_s.get(staged.path)) is not None:
                yield self._too_short(staged.chunk, length_s, started_at_ms)
            elif (accusation := log.accusation(staged.path)) is not None:
                said = accusation.replace(staged.path, staged.chunk.audio_path)
                yield self._failure(staged.chunk, started_at_ms, BAD_AUDIO, said)
            else:
                unexplained.append(staged.chunk)
        if not unexplained or self._stopping:
            return
        error_class, error = explain_end(log, exit_code)
        if error_class == OUT_OF_MEMORY and len(unexplained) == of and _LOADING in error:
            raise SessionBroken(OUT_OF_MEMORY, error, at_start=True)  # no recording had anything to do with it
        if error_class == CONFIGURATION or error_class in RETIRING or len(unexplained) == of > 1:
            # Not one recording came through. Halving thousands of chunks would start HawkEars thousands of times.
            raise SessionBroken(error_class, error)
        for chunk in unexplained:
            if of == 1:
                yield self._failure(chunk, started_at_ms, error_class, error)
            else:
                why = f"lost with its batch of {of} ({error_class}): {error.splitlines()[-1][:200]}"
                yield self._failure(chunk, started_at_ms, BATCH_LOST, why, charged=False)

    def _too_short(self, chunk: Chunk, length_s: float, started_at_ms: int) -> ChunkResult:
        """Accept the last crumb of a recording, but not a chunk that should have been longer."""
        if chunk.audio_s is None or chunk.audio_s <= _SHORTEST_HEARD_S:
            return ChunkResult(chunk, started_at_ms, self._clock.now_ms(), audio_s=length_s)
        why = f"{chunk.audio_path} has {length_s:.2f} s of audio instead of {chunk.audio_s:.2f} s"
        return self._failure(chunk, started_at_ms, BAD_AUDIO, why)

    def _failure(
        self, chunk: Chunk, started_at_ms: int, error_class: str, error: str, *, charged: bool = True
    ) -> ChunkResult:
        now_ms = self._clock.now_ms()
        return ChunkResult(chunk, started_at_ms, now_ms, error_class=error_class, error=error, charged=charged)

    # --- the process ----------------------------------------------------------------------------------------------

    def _signal(self, signum: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._launcher.signal(self._process, signum)

    def _end_process(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()


class _Run:
    """The places of one batch; a session that was opened before in the same scratch keeps its own."""

    def __init__(self, scratch: Path) -> None:
        number = 1
        while (scratch / f"in-{number}").exists() or (scratch / f"hawkears-{number}.log").exists():
            number += 1
        self.inputs = scratch / f"in-{number}"
        self.outputs = scratch / f"out-{number}"
        self.log = scratch / f"hawkears-{number}.log"


def explain_end(log: HawkEarsLog, exit_code: int) -> tuple[str, str]:
    """Return the class and the story of a process that left recordings undone."""
    said = log.last_words()
    if log.out_of_memory:
        return OUT_OF_MEMORY, said
    error_class = classify(said, exit_code)
    if error_class in (EXIT_CODE, BAD_AUDIO) or (error_class == CONFIGURATION and log.device is not None):
        error_class = NO_OUTPUT  # its exit code says nothing, and the audio that it complained of is not this one
    signum = signal_of(exit_code)
    how = f"HawkEars was ended by {signal_name(signum)}, signal {signum}" if signum else ""
    return error_class, f"{said}\n{how or f'HawkEars ended with exit code {exit_code} and no output'}".strip()
