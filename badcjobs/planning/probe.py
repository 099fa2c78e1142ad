"""``badcjobs probe``: try chunk lengths on every model of device; each trial is stored, and not repeated later."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import psutil

from badcjobs.devices.allocation import Grant, requested_memory_bytes
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.model import FITS, Allocation, Probed, ProbeKey, Trial, WorkerPlan, not_none
from badcjobs.paths import LocalFolder, RunFolder
from badcjobs.planning.probe_search import Bounds, ProbeStep, evaluate, next_step, usual_is_over
from badcjobs.planning.probe_trial import Bench, TrialRun, Trouble, count_rounds, is_too_short, prepare_sounds
from badcjobs.processes import end_leftovers
from badcjobs.seams import Engine
from badcjobs.settings import ProbeSettings, RunSettings
from badcjobs.sources.audio_formats import NotWav
from badcjobs.sources.cutter import AudioCutter
from badcjobs.task.progress import find_end
from badcjobs.task.records import RecordingOptions, Records
from badcjobs.task.startup import StopRequest, World, find_devices, make_engine, read_allocation, task_mark
from badcjobs.telemetry.usage import UsageReader
from badcjobs.words import memory, speed
from badcjobs.workers.engines import traits_of
from badcjobs.workers.learned import ProbeStore, default_store, subject_of
from badcjobs.workers.memory_limits import model_of
from badcjobs.workers.policy import CONFIGURATION, GPU_LOST, HOST_MEMORY, NO_PROGRAM, RAN_ON_CPU

log = logging.getLogger(__name__)

_HOST_EVERY_S = 0.5
_RECORDER_PATIENCE_S = 10.0
_RESERVE_S = 20.0  # of a job's time, for the end
_HOST_SHARE = 0.8  # of the node's memory; beyond it the kernel may kill any process
_NOT_HERE = frozenset({CONFIGURATION, RAN_ON_CPU, GPU_LOST, NO_PROGRAM})
_LONGEST_WHY = 1500
_FASTER_THAN_ANYTHING = 1e6  # times real time


class ProbeOrder(NamedTuple):
    """What ``badcjobs probe`` was given."""

    settings: RunSettings  # the engine, the devices, and the audio as its source
    probe: ProbeSettings
    most_s: float  # time limit
    store: Path | None  # None: in the user's cache
    again: bool  # discard earlier results


class ProbeEnd(NamedTuple):
    """The result of a probe."""

    exit_code: int
    probes: Sequence[Probed]
    store: Path
    problems: Sequence[BadcjobsError]
    notes: Sequence[str]


def run_probe(order: ProbeOrder, world: World) -> ProbeEnd:
    """Find how long a chunk may be on each model of device here."""
    workers = str(order.settings.workers_wanted or 1)
    settings = replace(order.settings, keep_raw=False, workers_per_gpu=workers)
    cutter = AudioCutter(world.environ.get("PATH"))
    allocation = read_allocation(world)
    with make_work_folder(allocation) as work_folder:
        (work_folder / "memory").mkdir()
        paths = [world.cwd / path for path in settings.source]
        sounds = prepare_sounds(paths, cutter, work_folder, order.probe.lengths_s[1])
        grant = find_grant(settings, world)
        if traits_of(settings.engine).simulates_memory and settings.simulate is not None:
            settings = replace(settings, engine_args=(*settings.engine_args, f"--ledger={work_folder / 'memory'}"))
        engine = make_engine(settings, world, task_mark(allocation, world), grant)
        store = open_store(order, world)
        searches = list(make_searches(order, grant, engine, allocation.cpus or world.cores, store))
        if all(search.is_over for search in searches):
            notes = ["already known; --again repeats the trials"]
            return ProbeEnd(ExitCode.DONE, [search.keep() for search in searches], store.file, [], notes)

        now_ms = world.clock.now_ms()
        left_s = order.most_s
        end = find_end(settings.stop_after, allocation, world.environ, now_ms)
        if end is not None:
            left_s = min(left_s, max(0.0, (end.at_ms - now_ms) / 1000 - _RESERVE_S))
        with open_records(order, world, allocation, grant, engine, work_folder) as records:
            bench = Bench(records, engine, sounds, world.clock)
            run_trials(bench, world, searches, until_s=world.clock.monotonic_s() + left_s)
        return _conclude(searches, world.stop, store.file)


def _conclude(searches: Sequence[ModelSearch], stop: StopRequest, store: Path) -> ProbeEnd:
    """Return what the searches have found, and whether all of them are finished."""
    problems = not_none(search.problem for search in searches)
    notes = not_none(search.host_note for search in searches)
    exit_code = max((int(problem.exit_code) for problem in problems), default=int(ExitCode.DONE))
    if not all(search.is_over or search.problem for search in searches):
        notes.append(why_not_finished(stop))
        by_hand = stop.ended_by is signal.SIGINT
        exit_code = exit_code or (128 + signal.SIGINT if by_hand else int(ExitCode.RUN_ME_AGAIN))
    probes = [search.probed for search in searches]
    return ProbeEnd(exit_code, probes, store, problems, notes)


@contextmanager
def make_work_folder(allocation: Allocation) -> Iterator[Path]:
    """Make a temporary folder on the node."""
    parent = Path(allocation.local_dir or tempfile.gettempdir())
    folder = LocalFolder.create(parent, "badcjobs-probe-").path
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_grant(settings: RunSettings, world: World) -> Grant:
    """Return the devices that are probed; without any, the CPU has to be asked for."""
    grant = find_devices(world, settings.stand_in(world.cwd)).for_work()
    if not grant.devices and settings.cpu_workers == 0:
        raise NotHere(
            "there is no GPU here to probe",
            why=f"{grant.why}\n--cpu-workers 1 measures the CPU instead: time, and memory of the node",
            fix="srun --gpus-per-node=1 badcjobs probe …   (or badcjobs probe … -- --cpu-workers 1)",
        )
    return Grant(grant.devices[: settings.max_gpus], grant.why)


def open_store(order: ProbeOrder, world: World) -> ProbeStore:
    """Return the file that results are kept in; refuse one that cannot be written, before hours of trials."""
    file = order.store or default_store(world.environ)
    if file is None:
        raise BadInput(
            "there is no folder for the result",
            why="HOME is not set",
            fix="--out probe.json",
        )
    store = ProbeStore(world.cwd / file)
    try:
        store.open()
    except OSError as error:
        raise BadInput(
            f"the result cannot be written to {store.file}",
            why=error.strerror or str(error),
            fix="--out RUN/probe.json   (in the folder of a run, which finds it there)",
        ) from error
    return store


def make_searches(
    order: ProbeOrder,
    grant: Grant,
    engine: Engine,
    cores: int,
    store: ProbeStore,
) -> Iterator[ModelSearch]:
    """Yield one search for each model of device, on the first of these, in the order in which they are granted."""
    settings = order.settings
    workers = (settings.workers_wanted or 1) if grant.devices else settings.cpu_workers
    threads = max(1, cores // (workers * max(1, len(grant.devices))))
    models: dict[tuple[str, int | None], WorkerPlan] = {}
    for device in grant.devices or (None,):
        plan = WorkerPlan(0, device, None, threads)
        memory_bytes = None if device is None else device.memory_total_bytes
        models.setdefault((model_of(plan), memory_bytes), plan)
    for (name, memory_bytes), plan in models.items():
        at_once = workers * engine.chunks_at_once(plan)
        version = engine.version or "unknown"
        key = ProbeKey(name, memory_bytes, engine.name, version, subject_of(settings), at_once, workers)
        if order.again:
            store.put(Probed(key))
        yield ModelSearch(key, plan, store, order)


@contextmanager
def open_records(
    order: ProbeOrder, world: World, allocation: Allocation, grant: Grant, engine: Engine, work_folder: Path
) -> Iterator[Records]:
    """Open a task database for the trials, and record the devices meanwhile, as a run does."""
    settings = order.settings
    keep = order.probe.keep
    out = RunFolder(work_folder / "run" if keep is None else world.cwd / keep)
    out.create()
    key = out.claim(allocation.key)
    records = Records(
        key,
        out.task_database(key),
        allocation,
        world,
        live_mode=settings.live_mode,
    )
    verdict = "failed"
    if keep is not None:
        world.log_to(out.task_log(key))
    try:
        records.begin(engine=engine.name, telemetry=settings.telemetry)
        records.writer.write_meta({"settings": settings.to_json(world.cwd)})
        records.writer.add_devices(grant.devices)
        records.start_publishing(settings.publish_every_s)
        if grant.devices and settings.telemetry:
            ledger = str(work_folder / "memory") if engine.traits.simulates_memory else None
            stand_in = replace(settings.stand_in(world.cwd), ledger=ledger)
            limits = replace(settings.alerts, memory_percent=100.0)  # a probe fills the memory on purpose
            how = RecordingOptions(settings.interval_s, stand_in, limits)
            records.start_recorder(grant.devices, how).wait_until_ready(_RECORDER_PATIENCE_S)
        yield records
        verdict = "done"
    finally:
        end_leftovers(records.mark)
        records.close(exit_code=int(verdict != "done"), verdict=verdict)
        records.writer.close()


def why_not_finished(stop: StopRequest) -> str:
    """Explain why the search is not finished."""
    why = f"stopped by {stop.name}" if stop.requested else "the time is over"
    return f"{why}; finished trials are stored, and the same command continues (--time gives it more time)"


# --- the search for one model of device -------------------------------------------------------------------------------


class ModelSearch:
    """The search for one model of device: what was tried, and what is being tried."""

    def __init__(
        self,
        key: ProbeKey,
        plan: WorkerPlan,
        store: ProbeStore,
        order: ProbeOrder,
    ) -> None:
        before = store.find(key)
        self.key = key
        self.plan = plan  # of a worker
        self.trials: list[Trial] = list(before.trials)
        self.problem: BadcjobsError | None = None
        self.host_note: str | None = None
        self._at = before.at
        self._store = store
        self._bounds = Bounds(*order.probe.lengths_s)
        self._settings = order.probe
        self._start_up_s = 0.0
        self._guess: float | None = None  # the speed of a trial that was too short to count

    @property
    def is_over(self) -> bool:
        """Whether all trials are done."""
        return next_step(self.trials, self._bounds) is None

    @property
    def probed(self) -> Probed:
        """What is known so far."""
        finished = bool(self.trials) and self.is_over
        result = None
        if self.trials and usual_is_over(self.trials, self._bounds):
            result = evaluate(self.trials, self._settings.margin_percent, finished=finished)
        return Probed(self.key, tuple(self.trials), result, finished, self._at)

    def keep(self) -> Probed:
        """Store what is known so far."""
        self._store.put(self.probed)
        return self.probed

    def next_step(self, host_bytes: int) -> ProbeStep | None:
        """Return what to try next; never what would fill the memory of the node."""
        measured = [trial for trial in self.trials if trial.outcome == FITS and trial.host_peak_bytes]
        if measured:
            longest = max(measured, key=lambda trial: trial.length_s)
            room = _HOST_SHARE * host_bytes / (longest.host_peak_bytes or 1)
            ceiling_s = max(longest.length_s, round(longest.length_s * room))
            if ceiling_s < self._bounds.longest_s:
                self._bounds = self._bounds._replace(longest_s=ceiling_s)
                self.host_note = (
                    f"{self.key.gpu}: nothing longer than {ceiling_s:g} s is tried: the node's memory may not hold it"
                )
        if self.problem:
            return None
        return next_step(self.trials, self._bounds)

    def expected_s(self, step: ProbeStep) -> float:
        """Return about how long a trial will take; 0: not known."""
        rate = self.rate
        if rate is None:
            return 0.0
        return self._start_up_s + self.chunks(step) * step.length_s / rate

    def lanes(self, step: ProbeStep) -> int:
        """Return how many chunks of a trial are worked on at the same time."""
        if step.lean:
            return self.key.workers
        return self.key.chunks_at_once

    def chunks(self, step: ProbeStep) -> int:
        """Return how many chunks a trial gets."""
        lanes = self.lanes(step)
        return lanes * count_rounds(step.length_s, lanes, self._settings.trial_s, self.rate)

    @property
    def rate(self) -> float | None:
        """How fast the longest audio was that has been measured."""
        measured = [trial for trial in self.trials if trial.times_real_time]
        if not measured:
            return self._guess
        return max(measured, key=lambda trial: trial.length_s).times_real_time

    def end(self, run: TrialRun, outcome: Trial | Trouble) -> None:
        """Store the outcome of a trial."""
        if isinstance(outcome, Trouble):
            self.problem = explain(outcome, self.key, run.step)
            return
        end = f"{self.key.gpu}: {run.step.length_s:g} s: {outcome.outcome}, {memory(outcome.peak_bytes)} at most"
        log.info("%s, %s real time", end, speed(outcome.times_real_time))
        if self.rate is None and is_too_short(outcome, self._settings.trial_s):
            self._guess = outcome.times_real_time or _FASTER_THAN_ANYTHING
            log.info("%s: too short to count: repeated with more chunks", self.key.gpu)
            return
        self.trials.append(outcome)
        self._at = datetime.fromtimestamp(run.bench.clock.now_ms() / 1000, timezone.utc).strftime("%FT%TZ")
        self._start_up_s = run.start_up_s
        self.keep()


def explain(trouble: Trouble, key: ProbeKey, step: ProbeStep) -> BadcjobsError:
    """Return an error for a failure that was not due to the device's memory."""
    fix = "badcjobs probe … --config probe.keep=DIR   (then look into DIR/tasks/)"
    if trouble.error_class == HOST_MEMORY:
        fix = f"#SBATCH --mem=64G   (or shorter trials: {_shorter(step)})"
    elif trouble.error_class in _NOT_HERE:
        fix = "badcjobs check AUDIO -- --engine …   (with the same options of run)"
    problem = BadcjobsError(
        f"{key.gpu}: chunks of {step.length_s:g} s failed for another reason than its memory"
        f" ({trouble.error_class}); no result is stored",
        why=trouble.error.strip()[-_LONGEST_WHY:] or None,
        fix=fix,
    )
    problem.exit_code = ExitCode.NOT_HERE if trouble.error_class in _NOT_HERE else ExitCode.CHUNKS_FAILED
    return problem


def _shorter(step: ProbeStep) -> str:
    return f"--config 'probe.lengths_s=[{min(60, step.length_s / 2):g}, {step.length_s / 2:g}]'"


# --- all searches together --------------------------------------------------------------------------------------------


def run_trials(
    bench: Bench,
    world: World,
    searches: Sequence[ModelSearch],
    until_s: float,
) -> None:
    """Run the trials of one search after the other until all are done or the time is over."""
    clock = world.clock
    host = _HostMemory(world)

    def is_over() -> bool:
        return world.stop.requested or clock.monotonic_s() >= until_s

    def look(run: TrialRun) -> bool:
        host.read(run)
        bench.records.check_recorder()
        return is_over()

    begun = 0
    for search in searches:
        while not is_over():
            step = search.next_step(host.bytes)
            if step is None or search.expected_s(step) > until_s - clock.monotonic_s():
                break
            begun += 1
            run = _begin(bench, search, step, begun)
            outcome = run.run(look)
            if outcome is not None:
                search.end(run, outcome)


class _HostMemory:
    """Our memory on the node."""

    def __init__(self, world: World) -> None:
        # What was requested, else what is free now.
        self.bytes = requested_memory_bytes(world.environ) or psutil.virtual_memory().available
        self._clock = world.clock
        self._usage = UsageReader(world.pid)
        self._next_s = 0.0

    def read(self, run: TrialRun) -> None:
        """Note the memory of all our processes with the trial that is running, if it is time to."""
        now_s = self._clock.monotonic_s()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _HOST_EVERY_S
        reading = self._usage.read(now_s)
        if reading is not None and reading.memory_bytes is not None:
            run.host_peak_bytes = max(run.host_peak_bytes or 0, reading.memory_bytes)


def _begin(bench: Bench, search: ModelSearch, step: ProbeStep, number: int) -> TrialRun:
    key = search.key
    device = search.plan.device
    device_id = None if device is None else bench.records.writer.device_id(device)
    slots = range((number - 1) * key.workers, number * key.workers)
    plans = [replace(search.plan, slot=slot, device_id=device_id, lean=step.lean) for slot in slots]
    run = TrialRun(bench, step, plans, search.chunks(step), search.lanes(step), number)
    log.info("%s: trying %g s%s", key.gpu, step.length_s, " with one thread" if step.lean else "")
    try:
        run.begin()
    except (NotWav, EOFError, OSError) as problem:
        raise BadInput(
            f"no audio of {step.length_s:g} s can be made: {problem}",
            why=f"it is written to {bench.records.local.path}",
            fix=f"export TMPDIR=/a/local/folder/with/space   (or shorter trials: {_shorter(step)})",
        ) from problem
    return run
