"""One trial of a probe: chunks of one length for the workers of one device, as in a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import FITS, NO_START, TOO_LONG, Chunk, ChunkResult, ChunkStarted, Trial, WorkerPlan
from badcjobs.planning.probe_search import ProbeStep
from badcjobs.seams import Clock, Engine
from badcjobs.settings import refuse
from badcjobs.sources.cutter import AudioCutter, CannotCut, write_repeated
from badcjobs.store.live_files import read_memory_peaks
from badcjobs.task.records import Records
from badcjobs.workers.policy import HOST_MEMORY, OUT_OF_MEMORY, RetryPolicy
from badcjobs.workers.supervise import Supervisor
from badcjobs.workers.worker_loop import BatchOver, Event

_LOOK_S = 0.1
_MOST_ROUNDS = 64
_FIRST_ROUNDS = 4  # while the speed is not known
_SAME_MOMENT_MS = 5
_TOO_SHORT = 0.5  # of the wanted seconds: a shorter measurement is noise
_NOT_WORTH_A_SECOND = 5.0  # times the wanted seconds: the warm-up of such a trial does not count


def count_rounds(
    length_s: float,
    lanes: int,
    seconds: float,
    times_real_time: float | None,
) -> int:
    """Return how many chunks each lane gets, to work about so many seconds.

    The first chunk warms a lane up, unless one takes so long already. ``lanes``: chunks worked on at the same time.
    """
    if times_real_time is None:
        return _FIRST_ROUNDS
    one_s = length_s * lanes / times_real_time
    if one_s >= _NOT_WORTH_A_SECOND * seconds:
        return 1
    return min(_MOST_ROUNDS, 1 + math.ceil(seconds / max(one_s, 1e-6)))


def is_too_short(trial: Trial, seconds: float) -> bool:
    """Return whether a trial has to be repeated with more chunks to know its speed."""
    return trial.outcome == FITS and (trial.work_s or 0.0) < _TOO_SHORT * seconds


class Trouble(NamedTuple):
    """Something that did not work."""

    error_class: str
    error: str
    at_start: bool = False  # before the engine had anything to do with a chunk


class TrialEvents:
    """Events of the workers of one trial."""

    def __init__(self) -> None:
        self.done: list[ChunkResult] = []
        self.begun_at_ms: list[int] = []
        self.trouble: Trouble | None = None  # out of memory, else the first failure
        self.closed = False  # later failures are caused by ourselves

    def note(self, event: Event) -> None:
        """Store an event of a worker."""
        if isinstance(event, ChunkStarted):
            self.begun_at_ms.append(event.at_ms)
        elif isinstance(event, ChunkResult) and event.ok:
            self.done.append(event)
            self.begun_at_ms.append(event.started_at_ms)
        elif self.closed:
            return
        elif isinstance(event, ChunkResult):
            if event.charged or event.error_class == OUT_OF_MEMORY:  # else lost with others; the reason follows
                self._blame(Trouble(event.error_class or "", event.error or ""))
        elif isinstance(event, BatchOver) and event.broken is not None:
            broken = event.broken
            self._blame(Trouble(broken.error_class, str(broken), at_start=broken.at_start))

    def _blame(self, trouble: Trouble) -> None:
        decided = self.trouble is not None and self.trouble.error_class == OUT_OF_MEMORY
        if self.trouble is None or (trouble.error_class == OUT_OF_MEMORY and not decided):
            self.trouble = trouble


class Bench(NamedTuple):
    """What all trials of a probe have in common."""

    records: Records
    engine: Engine
    sounds: Sequence[Path]  # WAV
    clock: Clock


@dataclass
class TrialRun:
    """A trial under way."""

    bench: Bench
    step: ProbeStep
    plans: Sequence[WorkerPlan]  # all of one device
    chunks_wanted: int
    lanes: int
    number: int
    host_peak_bytes: int | None = None
    watch: TrialEvents = field(default_factory=TrialEvents)

    def begin(self) -> None:
        """Make the audio, list the chunks and start the workers; raise NotWav, EOFError or OSError without audio."""
        self._began_at_ms = self.bench.clock.now_ms()
        self._folder = self.bench.records.local.scratch / f"trial-{self.number}"
        self._folder.mkdir(parents=True)
        chunks = self._make_chunks()
        self.bench.records.writer.fill(chunks, lambda rows: None)
        self._supervisor = Supervisor(
            self.bench.engine,
            self.plans,
            self.bench.records.writer,
            clock=self.bench.clock,
            policy=RetryPolicy(retries=0, backoff_s=0.0),
            scratch=self._folder,
            device_state=self.bench.records.device_state,
            chunks=chunks,
            listen=self.watch.note,
        )
        self._supervisor.start()

    def _make_chunks(self) -> list[Chunk]:
        """Make the audio; chunks of one sound share it under names of their own, as some engines want it."""
        length_s = self.step.length_s
        way = "lean" if self.step.lean else "usual"
        audio: dict[Path, Path] = {}
        chunks = []
        for number in range(self.chunks_wanted):
            sound = self.bench.sounds[number % len(self.bench.sounds)]
            target = self._folder / f"{number:03d}.wav"
            if sound not in audio:
                write_repeated(sound, length_s, target)
                audio[sound] = target
            else:
                target.symlink_to(audio[sound])
            name = f"{self.number}-{way}-{length_s:g}s-{number}"
            chunks.append(Chunk("probe", name, str(sound), str(target.absolute()), 0, round(length_s * 1000)))
        return chunks

    def run(self, look: Callable[[TrialRun], bool]) -> Trial | Trouble | None:
        """Work until all is done or something fails, and leave nothing behind.

        ``look`` is called all the while, and returns whether to stop; None: it did.
        """
        stopped = False
        while self._supervisor.busy:
            self._supervisor.handle_events(_LOOK_S)
            stopped = stopped or look(self)
            if (stopped or self.watch.trouble is not None) and not self._supervisor.killed:
                self.watch.closed = True
                self._supervisor.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        if stopped:
            return None
        return self._outcome()

    def _outcome(self) -> Trial | Trouble:
        """Return what came of it, or what had nothing to do with the length."""
        done = self.watch.done
        trouble = self.watch.trouble
        on_cpu = self.plans[0].device is None
        trial = Trial(self.step.length_s, self.step.lean, FITS, len(done), host_peak_bytes=self.host_peak_bytes)
        if trouble is None and len(done) < self.lanes:
            return Trouble("no_output", "the engine ended without results")
        if trouble is None:
            work_s, rate = measure(done, self.lanes)
            return replace(
                trial,
                work_s=work_s,
                times_real_time=rate,
                peak_bytes=self.host_peak_bytes if on_cpu else self._peak_bytes(),
                start_up_s=self.start_up_s,
            )
        if trouble.error_class == OUT_OF_MEMORY or (on_cpu and trouble.error_class == HOST_MEMORY):
            return replace(trial, outcome=NO_START if trouble.at_start else TOO_LONG)
        return trouble

    @property
    def start_up_s(self) -> float:
        """How long it took until the first chunk was begun."""
        return (min(self.watch.begun_at_ms, default=self._began_at_ms) - self._began_at_ms) / 1000

    def _peak_bytes(self) -> int | None:
        """Return the most memory in use while chunks were worked on; None: there was no reading in that time."""
        device_id = self.plans[0].device_id
        if device_id is None:
            return None
        from_ms = min(ended.started_at_ms for ended in self.watch.done)
        to_ms = max(ended.ended_at_ms for ended in self.watch.done)
        return read_memory_peaks(self.bench.records.readings_at_hand(), from_ms, to_ms).get(device_id)


def measure(done: Sequence[ChunkResult], lanes: int) -> tuple[float | None, float | None]:
    """Return the seconds of work that count, and the seconds of audio done in each.

    From the end of the first round on, which warms up; from the first begin where there is no second round, or where
    engines report nothing before their whole batch is done.
    """
    counted = sorted(done, key=lambda ended: ended.ended_at_ms)
    from_ms = min(ended.started_at_ms for ended in done)
    first_end_ms = counted[0].ended_at_ms
    last_end_ms = counted[-1].ended_at_ms
    later = counted[lanes:]
    if len(later) >= lanes and all(ended.started_at_ms >= first_end_ms - _SAME_MOMENT_MS for ended in later):
        from_ms = counted[lanes - 1].ended_at_ms
        counted = later
    work_s = (last_end_ms - from_ms) / 1000
    audio_s = sum(ended.chunk.audio_s or 0.0 for ended in counted)
    return work_s, round(audio_s / work_s, 2) if work_s > 0 else None


# --- audio ------------------------------------------------------------------------------------------------------------


def prepare_sounds(
    paths: Sequence[Path],
    cutter: AudioCutter,
    folder: Path,
    longest_s: float,
) -> list[Path]:
    """Return copies of the audio as WAV files, as long as a trial needs them; all mistakes are named at once."""
    sounds = []
    mistakes = []
    for number, path in enumerate(paths):
        try:
            sound = folder / f"sound-{number}.wav"
            cutter.cut(path, 0.0, longest_s, sound)
            sounds.append(sound)
        except OSError as error:
            mistakes.append(f"{path} cannot be read: {error.strerror}")
        except CannotCut as error:
            mistakes.append(str(error))
    fix = "badcjobs probe RECORDING.wav   (one of your own recordings; it is repeated where it is too short)"
    refuse(mistakes, fix, "this audio cannot be used")
    return sounds
