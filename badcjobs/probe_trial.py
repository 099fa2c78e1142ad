"""One trial of a probe: chunks of one length, given to the workers of one device as a run would give them.

It begins, is looked at until it is over, and says what came of it. Which length comes next is probe/search.py's
business; when a trial has to be broken off, probing.py's.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.audio.repeat import write_repeated
from badcjobs.model import FITS, NO_START, TOO_LONG, Chunk, ChunkResult, Trial, WorkerPlan
from badcjobs.probe.search import Step
from badcjobs.records import Records
from badcjobs.seams import Clock, Engine
from badcjobs.store.live.readings import read_memory_peaks
from badcjobs.store.live.task_writer import TaskWriter
from badcjobs.workers.failures import HOST_MEMORY
from badcjobs.workers.supervise import RetryPolicy, Supervisor
from badcjobs.workers.watched_engine import Trouble, Watch, WatchedEngine

_MOST_ROUNDS = 64
_FIRST_ROUNDS = 4  # while nobody knows how fast it is
_SAME_MOMENT_MS = 5
_TOO_SHORT = 0.5  # of the wanted seconds: what is told by so little is chance
_NOT_WORTH_A_SECOND = 5.0  # times the wanted seconds: a trial as long as that has forgotten its beginning


@dataclass(frozen=True, slots=True)
class Measure:
    """How much is given to the workers in one trial."""

    lanes: int  # chunks that are worked on at the same time
    seconds: float  # that they shall work

    def rounds(self, length_s: float, times_real_time: float | None) -> int:
        """Return how many chunks one lane gets: the first warms it up, unless one takes so long already."""
        if times_real_time is None:
            return _FIRST_ROUNDS
        one_s = length_s * self.lanes / times_real_time
        if one_s >= _NOT_WORTH_A_SECOND * self.seconds:
            return 1
        return min(_MOST_ROUNDS, 1 + math.ceil(self.seconds / max(one_s, 1e-6)))

    def is_too_short(self, trial: Trial) -> bool:
        """Say whether a trial is worth another one with more chunks: nobody knew how fast it would be."""
        was_a_guess = trial.chunks == self.lanes * _FIRST_ROUNDS
        return trial.outcome == FITS and was_a_guess and (trial.work_s or 0.0) < _TOO_SHORT * self.seconds


@dataclass(frozen=True)
class Bench:
    """What all trials of a probe have in common."""

    records: Records
    engine: Engine
    sounds: Sequence[Path]  # WAV
    clock: Clock


@dataclass
class TrialRun:
    """A trial under way."""

    bench: Bench
    step: Step
    plans: Sequence[WorkerPlan]  # all of one device
    chunks_wanted: int
    lanes: int
    number: int
    host_peak_bytes: int | None = None
    watch: Watch = field(default_factory=Watch)

    def begin(self) -> None:
        """Make the audio, list the chunks and start the workers; raise NotWav or OSError where there is no audio."""
        self._began_at_ms = self.bench.clock.now_ms()
        self._folder = self.bench.records.local.scratch / f"trial-{self.number}"
        self._folder.mkdir(parents=True)
        chunks = list(self._make_chunks())
        self.bench.records.writer.fill(chunks, lambda rows: None)
        self._supervisor = Supervisor(
            WatchedEngine(self.bench.engine, self.watch, lean=self.step.lean),
            list(self.plans),
            _TrialJournal(self.bench.records.writer, chunks),
            clock=self.bench.clock,
            policy=RetryPolicy(retries=0, backoff_s=0.0),
            scratch=self._folder,
            device_state=self.bench.records.device_state,
        )
        self._supervisor.start()

    def look(self, timeout_s: float) -> None:
        """Write down what there is; the first thing that does not work ends the trial."""
        self._supervisor.handle_events(timeout_s)
        if self.watch.trouble is not None and not self._supervisor.killed:
            self.break_off()

    def break_off(self) -> None:
        """End it now."""
        self.watch.closed = True
        self._supervisor.kill()

    @property
    def busy(self) -> bool:
        """Whether its workers are still there."""
        return self._supervisor.busy

    def end(self) -> Trial | Trouble:
        """Leave nothing behind, and return what came of it, or what had nothing to do with the length."""
        shutil.rmtree(self._folder, ignore_errors=True)
        trouble = self.watch.trouble
        if trouble is None and len(self.watch.done) < self.lanes:
            trouble = Trouble("no_output", "the engine ended without a word about its chunks")
        on_cpu = self.plans[0].device is None
        if trouble is not None and not (trouble.is_out_of_memory or (on_cpu and trouble.error_class == HOST_MEMORY)):
            return trouble
        outcome = FITS if trouble is None else NO_START if trouble.at_start else TOO_LONG
        work_s, rate = measure(self.watch.done, self.lanes) if trouble is None else (None, None)
        return Trial(
            self.step.length_s,
            self.step.lean,
            outcome,
            chunks=len(self.watch.done),
            work_s=work_s,
            times_real_time=rate,
            peak_bytes=None if trouble is not None else self.host_peak_bytes if on_cpu else self._peak_bytes(),
            host_peak_bytes=self.host_peak_bytes,
        )

    @property
    def start_up_s(self) -> float:
        """How long it took until the first chunk was begun."""
        begun_at_ms = [*self.watch.begun_at_ms[:1], *(result.started_at_ms for result in self.watch.done[:1])]
        return (min(begun_at_ms, default=self._began_at_ms) - self._began_at_ms) / 1000

    def _peak_bytes(self) -> int | None:
        """Return the most memory in use while chunks were worked on; None: there was no reading in that time."""
        device_id, done = self.plans[0].device_id, self.watch.done
        from_ms, to_ms = min(one.started_at_ms for one in done), max(one.ended_at_ms for one in done)
        peaks = read_memory_peaks(self.bench.records.readings_at_hand(), from_ms, to_ms)
        return None if device_id is None else peaks.get(device_id)

    def _make_chunks(self) -> Iterator[Chunk]:
        """Yield the chunks; those of one sound share its audio under names of their own, as some engines want it."""
        way = "lean" if self.step.lean else "usual"
        audio: dict[Path, Path] = {}
        for number in range(self.chunks_wanted):
            sound = self.bench.sounds[number % len(self.bench.sounds)]
            target = self._folder / f"{number:03d}.wav"
            if sound in audio:
                _link(audio[sound], target)
            else:
                write_repeated(sound, self.step.length_s, target)
                audio[sound] = target
            name = f"{self.number}-{way}-{self.step.length_s:g}s-{number}"
            yield Chunk("probe", name, str(sound), str(target.absolute()), 0, round(self.step.length_s * 1000))


class _TrialJournal:
    """The task's own journal, but with the chunks of this trial alone (seams.Journal)."""

    def __init__(self, writer: TaskWriter, chunks: Sequence[Chunk]) -> None:
        self.batch, self.add_decision = writer.batch, writer.add_decision
        self.worker_started, self.worker_ended = writer.worker_started, writer.worker_ended
        self.attempt_started, self.attempt_ended = writer.attempt_started, writer.attempt_ended
        self._chunks = list(chunks)

    def next_pending(self, limit: int) -> list[Chunk]:
        """Return the next chunks of this trial."""
        taken, self._chunks = self._chunks[:limit], self._chunks[limit:]
        return taken


def measure(done: Sequence[ChunkResult], lanes: int) -> tuple[float | None, float | None]:
    """Return the seconds of work that count, and the seconds of audio done in each.

    From the end of the first round on, which warms up; from the first begin where there is no second round, or where
    nobody can tell: some engines say nothing before their whole batch is done.
    """
    counted, from_ms = sorted(done, key=lambda one: one.ended_at_ms), min(one.started_at_ms for one in done)
    first_end_ms, last_end_ms = counted[0].ended_at_ms, counted[-1].ended_at_ms
    later = counted[lanes:]
    if len(later) >= lanes and all(one.started_at_ms >= first_end_ms - _SAME_MOMENT_MS for one in later):
        counted, from_ms = later, counted[lanes - 1].ended_at_ms
    work_s = (last_end_ms - from_ms) / 1000
    audio_s = sum(result.chunk.audio_s or 0.0 for result in counted)
    return work_s, round(audio_s / work_s, 2) if work_s > 0 else None


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)
