"""The life of a probe: look around → try one length after the other on every model of device → keep what was found.

What is tried next is decided in probe/search.py, what it all means in probe/verdict.py; one trial is probe_trial.py.
After each trial everything is written down, so that the same command goes on wherever this one stopped.
"""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.allocation.grant import Grant
from badcjobs.audio.cutter import AudioCutter
from badcjobs.audio.wav import NotWav
from badcjobs.config import RunSettings
from badcjobs.deadline import find_end
from badcjobs.errors import BadcjobsError, BadInput, ExitCode
from badcjobs.model import Allocation, Probed
from badcjobs.paths import RunFolder
from badcjobs.probe.search import Bounds
from badcjobs.probe_bench import Round
from badcjobs.probe_model import ModelSearch
from badcjobs.probe_subjects import check_sounds, find_engine, find_grant, find_subjects, prepare_sounds
from badcjobs.probe_trial import Bench
from badcjobs.probed import NoStore, ProbeStore, default_store
from badcjobs.records import Recording, Records
from badcjobs.seams import CannotCut, Engine
from badcjobs.stop import StopRequest
from badcjobs.store.live.readings import read_memory_peaks
from badcjobs.surroundings import mark_of, read_allocation
from badcjobs.workers.leftovers import end_leftovers
from badcjobs.world import World

log = logging.getLogger(__name__)

_RECORDER_PATIENCE_S = 10.0
_OTHERS_SHARE = 0.05  # of a device; a driver keeps less for itself
_RESERVE_S = 20.0  # of a job's time, for the end


@dataclass(frozen=True)
class ProbeOrder:
    """What somebody wants to know."""

    settings: RunSettings  # the engine, the devices, and the audio as its source
    bounds: Bounds = field(default_factory=Bounds)
    margin_percent: float = 10.0
    most_s: float = 600.0  # that it may take
    trial_s: float = 3.0  # that the chunks of one trial shall take
    store: Path | None = None  # None: in the user's cache
    keep: Path | None = None  # where the task database of the trials goes; None: nowhere
    again: bool = False  # forget what was found before


@dataclass(frozen=True)
class ProbeEnd:
    """What a probe has found."""

    exit_code: int
    probes: tuple[Probed, ...]
    store: Path
    aside: Path | None = None  # where a damaged file was put
    problems: tuple[BadcjobsError, ...] = ()
    notes: tuple[str, ...] = ()


def run_probe(order: ProbeOrder, world: World) -> ProbeEnd:
    """Find out how long a chunk may be on each model of device that is here."""
    settings, cutter = order.settings, AudioCutter(world.environ.get("PATH"))
    paths = [world.cwd / path for path in settings.source]
    check_sounds(paths, cutter)
    allocation = read_allocation(world, world.clock.now_ms())
    grant = find_grant(settings, world, allocation)
    mark = mark_of(allocation, world)
    with make_workplace(allocation) as workplace:
        engine = find_engine(settings, world, mark, grant, workplace / "memory")
        subjects = find_subjects(settings, grant, engine, allocation.cpus or world.cores)
        store, aside = open_store(order, world)
        searches = [
            ModelSearch(one, store, order.bounds, margin_percent=order.margin_percent, trial_s=order.trial_s)
            for one in subjects
        ]
        if order.again:
            for search in searches:
                search.forget()
        if all(search.is_over for search in searches):
            notes = ["it was known already; --again tries it anew"]
            return ProbeEnd(ExitCode.DONE, tuple(one.keep() for one in searches), store.file, aside, notes=tuple(notes))
        with open_records(order, world, allocation, grant, engine, mark, workplace) as records:
            notes = say_who_else(records, grant)
            sounds = prepare(paths, cutter, records, order.bounds.longest_s)
            round_ = Round(Bench(records, engine, sounds, world.clock), world, searches)
            round_.go_on(until_s=world.clock.monotonic_s() + time_left_s(order, world, allocation))
        return conclude(searches, store.file, aside, world, notes)


@contextmanager
def make_workplace(allocation: Allocation) -> Iterator[Path]:
    """Make a folder on the node for what is only needed meanwhile."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="badcjobs-probe-", dir=allocation.local_dir))
    except OSError as error:
        raise BadInput(
            f"there is no node-local folder to work in: {error.filename}",
            why=error.strerror,
            fix="export TMPDIR=/a/local/folder",
        ) from error
    try:
        (folder / "memory").mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_store(order: ProbeOrder, world: World) -> tuple[ProbeStore, Path | None]:
    """Return the file that results are kept in; that it cannot be written is said before hours of trials."""
    file = order.store or default_store(world.environ)
    if file is None:
        raise BadInput("there is nowhere to keep the result", why="HOME is not set", fix="--store probe.toml")
    store = ProbeStore(world.cwd / file)
    try:
        return store, store.open()
    except NoStore as error:
        raise BadInput(
            f"--store {file} is not written",
            why=f"it is there already, and no probe has written it ({error})",
            fix="the same command with --store probe.toml",
        ) from error
    except OSError as error:
        raise BadInput(
            f"the result cannot be kept in {store.file}",
            why=error.strerror or str(error),
            fix="--store OUT/probe.toml   (in the folder of a run, which finds it there)",
        ) from error


@contextmanager
def open_records(
    order: ProbeOrder,
    world: World,
    allocation: Allocation,
    grant: Grant,
    engine: Engine,
    mark: str,
    workplace: Path,
) -> Iterator[Records]:
    """Open a task database for the trials, and record the devices meanwhile, as a run does."""
    settings = order.settings
    out = RunFolder((order.keep or workplace / "run").absolute())
    out.create()
    key = out.claim(allocation.key)
    started_at_ms = world.clock.now_ms()
    records = Records(
        key, out.task_database(key), allocation, world, started_at_ms=started_at_ms, mark=mark,
        live_mode=settings.live_mode,
    )  # fmt: skip
    verdict = "failed"
    if order.keep is not None:
        world.log_to(out.task_log(key))
    try:
        records.begin(engine=engine.name, telemetry=settings.telemetry)
        records.writer.write_meta({"settings": settings.to_json(world.cwd)})
        records.writer.add_devices(grant.devices)
        records.start_publishing(settings.publish_every_s)
        if grant.devices and settings.telemetry:
            pretended = settings.engine == "demo"  # no other engine tells what it would have of a simulated device
            ledger = str(workplace / "memory") if pretended else None
            stand_in = replace(settings.stand_in(world.cwd), ledger=ledger)
            limits = replace(settings.alerts, memory_percent=100.0)  # filling the memory is what we are here for
            how = Recording(settings.interval_s, stand_in, limits)
            records.start_recorder(grant.devices, how, wait_s=_RECORDER_PATIENCE_S)
        yield records
        verdict = "done"
    finally:
        end_leftovers(mark)
        records.close(exit_code=0 if verdict == "done" else 1, verdict=verdict)
        records.writer.close()


def say_who_else(records: Records, grant: Grant) -> list[str]:
    """Name the devices that somebody uses before we have begun: less fits into them than into others of their model."""
    used = read_memory_peaks(records.readings_at_hand(), 0)
    full = [(d, used.get(records.writer.device_id(d), 0), d.memory_total_bytes) for d in grant.devices]
    return [
        f"{device.name or 'a device'} ({device.pin}): {bytes_ / 2**30:.1f} GiB are in use by others;"
        " on an empty one longer chunks may fit: badcjobs gpus --all shows by whom"
        for device, bytes_, total in full
        if total is not None and bytes_ > _OTHERS_SHARE * total and device.backend != "simulated"
    ]


def prepare(paths: list[Path], cutter: AudioCutter, records: Records, longest_s: float) -> list[Path]:
    """Return the audio as WAV, or say why not."""
    try:
        return prepare_sounds(paths, cutter, records.local.scratch / "sounds", longest_s)
    except (CannotCut, NotWav, OSError) as problem:
        raise BadInput(
            "the audio cannot be prepared", why=str(problem), fix="badcjobs probe RECORDING.wav   (WAV needs nothing)"
        ) from problem


def time_left_s(order: ProbeOrder, world: World, allocation: Allocation) -> float:
    """Return how long we may try: as long as was asked for, and no longer than the job has."""
    now_ms = world.clock.now_ms()
    end = find_end(order.settings.time_left, allocation, world.environ, now_ms)
    left_s = order.most_s if end is None else (end.at_ms - now_ms) / 1000 - _RESERVE_S
    return min(order.most_s, max(0.0, left_s))


def conclude(searches: list[ModelSearch], store: Path, aside: Path | None, world: World, notes: list[str]) -> ProbeEnd:
    """Say what was found, what was not, and what to do about it."""
    problems = tuple(search.problem for search in searches if search.problem is not None)
    notes = [*notes, *(search.host_words for search in searches if search.host_words)]
    exit_code = max((int(problem.exit_code) for problem in problems), default=int(ExitCode.DONE))
    if not all(search.is_over or search.problem for search in searches):
        by_hand = world.stop.ended_by is signal.SIGINT
        notes.append(why_not_finished(world.stop, any(search.trials for search in searches)))
        exit_code = exit_code or (128 + signal.SIGINT if by_hand else int(ExitCode.RUN_ME_AGAIN))
    return ProbeEnd(exit_code, tuple(one.probed for one in searches), store, aside, problems, tuple(notes))


def why_not_finished(stop: StopRequest, something_is_kept: bool) -> str:
    """Say why there is more to try, and what the same command will do; a first trial that was too short is not kept."""
    why = f"stopped by {stop.name}" if stop.requested else "the time is over"
    if something_is_kept:
        return f"{why}; what was tried is kept, and the same command goes on"
    begins = "so the same command begins anew" + ("" if stop.requested else ": give it more time with --max-minutes")
    return f"{why} before a trial that counts had come to its end; nothing is kept, {begins}"
