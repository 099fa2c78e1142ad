"""The life of one array task, from its allocation to its exit code. Read this file first.

look around → take a name → list the work → one worker per device, one recorder beside them
→ feed, watch, publish → say how it ended
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from badcjobs import __version__
from badcjobs.allocation.place import Place, array_shape, find_place
from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.allocation.visible_devices import Grant, resolve_devices
from badcjobs.config import RunSettings
from badcjobs.errors import BadcjobsError, BadInput, DatabaseProblem, ExitCode, NotHere
from badcjobs.frozen_run import FrozenRun, check_against, freeze
from badcjobs.gpu.choose import load_script, open_reader
from badcjobs.heartbeat import Progress, heartbeat_line
from badcjobs.manifest import Shard, Sources, open_sources, parse_shard
from badcjobs.model import Allocation, TaskKey, WorkerPlan
from badcjobs.paths import LocalFolder, RunFolder
from badcjobs.seams import Clock, Engine, ReaderUnavailable
from badcjobs.stop import StopRequest
from badcjobs.store.live_readings import last_reading_ms, read_pulse
from badcjobs.store.look_back import merged_files
from badcjobs.store.publisher import Publisher
from badcjobs.store.task_writer import TaskWriter
from badcjobs.telemetry.orphans import wait_for_orphans
from badcjobs.telemetry.sidecar import Sidecar, SidecarOrder
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher
from badcjobs.workers.leftovers import end_leftovers
from badcjobs.workers.plan import plan_workers
from badcjobs.workers.supervise import RetryPolicy, Supervisor, Tally

log = logging.getLogger(__name__)

_NAMED_FAILURES = 20
_SIDECAR_PATIENCE_S = 5.0
_ORPHAN_PATIENCE_S = 10.0


@dataclass(frozen=True)
class World:
    """What a task takes from outside; nothing below the CLI looks for it by itself."""

    environ: Mapping[str, str]
    clock: Clock
    stop: StopRequest
    hostname: str
    pid: int
    cwd: Path
    cores: int
    log_to: Callable[[Path], None] = field(default=lambda path: None)
    progress: Callable[[int], None] = field(default=lambda rows: None)


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended, for people and for scripts."""

    exit_code: int
    verdict: str
    task: str
    out: str
    database: str
    chunks: dict[str, int]
    audio_s: float
    wall_s: float
    devices: int
    workers: int
    telemetry: str
    failed: list[dict[str, str]]
    note: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs run --json``."""
        return asdict(self)


def run_task(settings: RunSettings, world: World) -> TaskEnd:
    """Run one array task to its end."""
    given = look_around(settings, world)
    with take_name(given, settings, world) as task:
        list_work(task)
        freeze_run(task)
        plans = plan_work(task)
        publisher = Publisher(task.live_files, task.database, base_interval_s=settings.publish_every_s)
        publisher.start()
        sidecar = start_recorder(task) if plans and settings.telemetry else None
        try:
            tally = work_off(task, plans, publisher, sidecar)
            exit_code, verdict, note = judge(task, tally)
        except BaseException:
            finish(task, publisher, sidecar, ExitCode.BUG, "killed", None)
            raise
        return finish(task, publisher, sidecar, exit_code, verdict, note)


# --- look around: nothing is written before all of this has worked ----------------------------------------------------


@dataclass(frozen=True)
class Given:
    """What this task was given, and what it will do with it."""

    started_at_ms: int
    allocation: Allocation
    run: FrozenRun
    place: Place
    sources: Sources
    grant: Grant
    engine: Engine


def look_around(settings: RunSettings, world: World) -> Given:
    """Read the allocation, find our part of the source, our devices and our engine."""
    started_at_ms = world.clock.now_ms()
    allocation = parse_allocation(world.environ, hostname=world.hostname, pid=world.pid, started_at_ms=started_at_ms)
    run_toml = RunFolder(settings.out).run_toml
    mine = FrozenRun.of(settings, array_shape(allocation), world.cwd)
    frozen = FrozenRun.read(run_toml) or mine
    check_against(frozen, mine, run_toml)
    place = find_my_place(settings, allocation, frozen)
    sources = open_sources(
        [world.cwd / path for path in settings.source],
        root=None if settings.root is None else world.cwd / settings.root,
        position=place.position,
    )
    check_every_manifest_has_a_task(sources, place)
    grant = find_devices(settings, world, allocation)
    engine = make_engine(settings, world, allocation, grant)
    return Given(started_at_ms, allocation, mine, place, sources, grant, engine)


def find_my_place(settings: RunSettings, allocation: Allocation, frozen: FrozenRun) -> Place:
    """Return which part of the source is ours: --shard, else our position in the array."""
    if settings.shard is not None:
        shard = parse_shard(settings.shard)
        return Place(shard.index, shard.count, position=shard.index, positions=shard.count)
    return find_place(allocation, frozen.array)


def check_every_manifest_has_a_task(sources: Sources, place: Place) -> None:
    """Refuse an array that is shorter than its list of manifests: the rest would silently never be done."""
    listed = sources.manifests_listed
    if listed is not None and place.positions is not None and listed > place.positions:
        raise BadInput(
            f"the list names {listed} manifests, but the array has {place.positions} tasks",
            why="each array task takes one line of the list; the others would never be done",
            fix=f"sbatch --array=0-{listed - 1} …   (with a new --out)",
        )


def find_devices(settings: RunSettings, world: World, allocation: Allocation) -> Grant:
    """Return the devices that this task really has; without one, the CPU must have been asked for."""
    script = load_script(world.cwd / settings.simulate_script) if settings.simulate_script else None
    reader = open_reader(settings.simulate, script, world.clock, world.clock.now_ms())
    trouble = None
    try:
        inventory = reader.inventory()
    except ReaderUnavailable as error:
        inventory, trouble = None, str(error)
    finally:
        reader.close()
    grant = resolve_devices(world.environ, inventory, in_slurm=allocation.in_slurm)
    if not grant.devices and settings.cpu_workers == 0:
        raise NotHere(
            "this task has no GPU",
            why=grant.why + (f"\n{trouble}" if trouble else ""),
            fix="ask Slurm for one (#SBATCH --gpus-per-node=1), or add --cpu-workers 2, or --simulate 2 to try it out",
        )
    return grant


def make_engine(settings: RunSettings, world: World, allocation: Allocation, grant: Grant) -> Engine:
    """Return the engine, checked: a missing program is found here, not by every chunk."""
    engine = choose_engine(
        settings.engine,
        args=settings.engine_args,
        command=settings.command,
        hawkears_python=settings.hawkears_python,
        hawkears_root=None if settings.hawkears_root is None else world.cwd / settings.hawkears_root,
        allow_cpu=not grant.devices,
        environ=world.environ,
        launcher=SubprocessLauncher(mark_of(allocation, world)),
        clock=world.clock,
    )
    engine.check()
    return engine


def mark_of(allocation: Allocation, world: World) -> str:
    """Return what every process below our workers carries.

    Not the name in the run folder: that is taken later, and ``badcjobs record`` in the same job has the same one.
    """
    return f"{allocation.key.name}-{world.pid}"


# --- take a name, list the work ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A task with a name, a place to write, and a database of its own."""

    settings: RunSettings
    world: World
    given: Given
    out: RunFolder
    key: TaskKey
    local: LocalFolder
    writer: TaskWriter

    @property
    def live_files(self) -> list[Path]:
        return [self.local.wrapper_file, self.local.recorder_file]

    @property
    def database(self) -> Path:
        return self.out.task_database(self.key)

    @property
    def elapsed_s(self) -> float:
        return (self.world.clock.now_ms() - self.given.started_at_ms) / 1000


@contextmanager
def take_name(given: Given, settings: RunSettings, world: World) -> Iterator[Task]:
    """Claim a file name in the run folder and open the live database; leave nothing behind but what is published."""
    out = RunFolder(settings.out.absolute())
    out.create()
    key = out.claim(given.allocation.key)
    try:
        local = LocalFolder.create(given.allocation.local_dir, key)
    except BadcjobsError:
        out.give_back(key)
        raise
    writer = TaskWriter(local.wrapper_file, key)
    world.log_to(out.task_log(key))
    try:
        writer.begin_task(
            given.allocation,
            started_at_ms=given.started_at_ms,
            pid=world.pid,
            version=__version__,
            engine=given.engine.name,
            telemetry=settings.telemetry,
        )
        writer.write_meta({"settings": settings.to_json()})
        yield Task(settings, world, given, out, key, local, writer)
    except BadcjobsError:
        local.remove()
        out.give_back(key)
        raise
    finally:
        writer.close()


def list_work(task: Task) -> None:
    """Write every row of our part of the source as pending, then skip what earlier tasks have done."""
    place, sources = task.given.place, task.given.sources
    log.info("badcjobs %s, task %s on %s", __version__, task.key.name, task.key.node)
    shard = Shard(place.index, place.count)
    if sources.picked_by_position:  # our line of a list of manifests: only the tasks of a step share it
        shard = Shard(place.step_index, place.step_count)
    rows = task.writer.fill(sources.chunks(shard), task.world.progress)
    log.info("source: %s; part %s: %d chunks", ", ".join(sources.descriptions), shard, rows)
    task.writer.set_shard(shard.index, shard.count)
    if task.settings.resume:
        skip_what_is_done(task)


def skip_what_is_done(task: Task) -> None:
    """Look into job.sqlite and the task databases it does not hold."""
    wait_for_orphans(task.out.tasks, task.world.clock, _ORPHAN_PATIENCE_S)
    databases = [task.out.job_database] if task.out.job_database.exists() else []
    databases += task.out.earlier_databases(task.key, merged_files(task.out.job_database))
    skipped = 0
    for database in databases:
        try:
            skipped += task.writer.skip_done_in(database)
        except DatabaseProblem as problem:
            log.warning("%s", problem.what)
    if skipped:
        log.info("%d chunks are done already and are skipped", skipped)


def freeze_run(task: Task) -> None:
    """Write run.toml if we are the first; another task may have been first with other settings."""
    check_against(freeze(task.out.run_toml, task.given.run, __version__), task.given.run, task.out.run_toml)


def plan_work(task: Task) -> list[WorkerPlan]:
    """Write down our devices and plan one worker for each; none when there is nothing left to do."""
    devices = task.given.grant.devices
    task.writer.add_devices(devices)
    settings, allocation = task.settings, task.given.allocation
    plans = plan_workers(
        [(task.writer.device_id(device), device) for device in devices],
        max_gpus=settings.max_gpus,
        per_gpu=settings.workers_per_gpu,
        cpu_workers=settings.cpu_workers,
        cpus=allocation.cpus or task.world.cores,
    )
    if task.writer.count_by_status().get("pending", 0) == 0:
        plans = []
    task.writer.set_plan(devices=len(devices), workers=len(plans))
    log.info("devices: %s; %s", ", ".join(device.pin for device in devices) or "none", task.given.grant.why)
    return plans


# --- work -------------------------------------------------------------------------------------------------------------


def start_recorder(task: Task) -> Sidecar:
    """Start the recorder as a process of its own; it follows the same devices by UUID."""
    settings = task.settings
    devices = task.given.grant.devices
    return Sidecar(
        SidecarOrder(
            task_name=mark_of(task.given.allocation, task.world),
            task_id=task.key.task_id,
            wrapper_pid=task.world.pid,
            devices=[(task.writer.device_id(device), device.uuid) for device in devices],
            interval_s=settings.interval_s,
            simulate=settings.simulate,
            simulate_script=str(task.world.cwd / settings.simulate_script) if settings.simulate_script else None,
            started_at_ms=task.given.started_at_ms,
            recorder_file=str(task.local.recorder_file),
            wrapper_file=str(task.local.wrapper_file),
            publish_to=str(task.database),
            local_folder=str(task.local.path),
        )
    )


def work_off(task: Task, plans: list[WorkerPlan], publisher: Publisher, sidecar: Sidecar | None) -> Tally:
    """Feed the workers until the work or the time is over."""
    settings, stop, clock = task.settings, task.world.stop, task.world.clock
    supervisor = Supervisor(
        task.given.engine,
        plans,
        task.writer,
        clock=clock,
        policy=RetryPolicy(settings.retries, settings.backoff_s),
        scratch=task.local.scratch,
    )
    if stop.requested:
        return supervisor.tally  # the signal came while we were listing the work
    if plans:
        log.info("workers: %d, engine %s", len(plans), task.given.engine.name)
    supervisor.start()
    draining = killed = False
    next_heartbeat_s = clock.monotonic_s() + settings.heartbeat_every_s
    try:
        while supervisor.busy:
            supervisor.handle_events(timeout_s=0.2)
            if stop.requested and not draining:
                draining = True
                log.warning("%s: starting nothing new, finishing what is running", stop.name)
                supervisor.drain()
                publisher.publish_soon()
            if stop.overdue(settings.grace_s) and not killed:
                killed = True
                log.warning("%s: ending what is still running", stop.name)
                supervisor.kill()
            if sidecar is not None:
                sidecar.check()
            if clock.monotonic_s() >= next_heartbeat_s:
                next_heartbeat_s += settings.heartbeat_every_s
                log.info("%s", heartbeat(task))
    except BaseException:
        supervisor.kill()
        raise
    return supervisor.tally


def heartbeat(task: Task) -> str:
    """Return the heartbeat line of this moment."""
    counts = task.writer.count_by_status()
    settled = counts.get("done", 0) + counts.get("failed", 0) + counts.get("poison", 0)
    progress = Progress(settled, settled + counts.get("pending", 0), task.writer.audio_done_s(), task.elapsed_s)
    since_ms = task.world.clock.now_ms() - int(task.settings.heartbeat_every_s * 1000)
    pulse = read_pulse(task.local.recorder_file, since_ms)
    return heartbeat_line(
        progress,
        cpu_percent=pulse.cpu_percent,
        memory_percent=pulse.memory_percent,
        gpu_percent=pulse.gpu_percent,
        devices=len(task.given.grant.devices),
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def judge(task: Task, tally: Tally) -> tuple[int, str, str | None]:
    """Return the exit code, the verdict and a word to the user."""
    stop = task.world.stop
    counts = task.writer.count_by_status()
    left = counts.get("pending", 0)
    failed = counts.get("failed", 0) + counts.get("poison", 0)
    again = "run the same command again to go on where this stopped"
    if left and stop.cut_short_by is not None:
        return 128 + stop.cut_short_by, "stopped", again
    if left and stop.ended_by is not None and stop.ended_by.name == "SIGINT":
        return 128 + stop.ended_by, "stopped", again
    if left and stop.requested:
        return ExitCode.RUN_ME_AGAIN, "stopped", again
    if left:
        no_worker = tally.retired[0] if tally.retired else "no worker could be started; the log says why"
        return ExitCode.NOT_HERE, "failed", tally.hopeless or no_worker
    if failed:
        return ExitCode.CHUNKS_FAILED, "failed", None
    return ExitCode.DONE, "done", None


def finish(
    task: Task, publisher: Publisher, sidecar: Sidecar | None, exit_code: int, verdict: str, note: str | None
) -> TaskEnd:
    """Stop the recorder, write the end, publish a last time."""
    end_leftovers(mark_of(task.given.allocation, task.world))
    telemetry = "on" if sidecar else "off (--no-emit-gpu-telemetry)" if not task.settings.telemetry else "not needed"
    if sidecar is not None:
        sidecar.stop(_SIDECAR_PATIENCE_S)
        if sidecar.failure is not None:
            telemetry = f"incomplete: {sidecar.failure}"
            since_ms = last_reading_ms(task.local.recorder_file) or task.given.started_at_ms
            task.writer.add_gap(None, since_ms, task.world.clock.now_ms(), sidecar.failure)
    task.writer.end_task(ended_at_ms=task.world.clock.now_ms(), exit_code=exit_code, verdict=verdict)
    publisher.stop()
    published = publisher.publish_now()
    if not published:
        note = f"the last publication failed; the task's own files stay in {task.local.path}"
        exit_code = ExitCode.DATABASE if exit_code == ExitCode.DONE else exit_code
    if sidecar is not None:
        sidecar.release(_SIDECAR_PATIENCE_S)
    if published:
        task.local.remove()
    end = summary_of(task, exit_code, verdict, telemetry, note)
    log.info("task ends: %s, exit code %d, chunks %s", verdict, exit_code, end.chunks)
    return end


def summary_of(task: Task, exit_code: int, verdict: str, telemetry: str, note: str | None) -> TaskEnd:
    """Return what is said at the end."""
    names = ("recording_id", "chunk_id", "error_class", "error")
    return TaskEnd(
        exit_code=exit_code,
        verdict=verdict,
        task=task.key.name,
        out=str(task.settings.out),
        database=str(task.settings.out / "tasks" / task.database.name),
        chunks=task.writer.count_by_status(),
        audio_s=task.writer.audio_done_s(),
        wall_s=task.elapsed_s,
        devices=len(task.given.grant.devices),
        workers=task.writer.workers_started,
        telemetry=telemetry,
        failed=[dict(zip(names, row, strict=True)) for row in task.writer.failed_chunks(_NAMED_FAILURES)],
        note=note,
    )
