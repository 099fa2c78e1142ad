"""The life of one array task, from its allocation to its exit code. Read this file first.

    resolve_task     read the allocation; find our part of the source, our devices, the engine, the end time
    open_task        take a file name in the run folder; claim our part; open the task database
    list_work        write one row for each chunk of our part
    skip_done        mark the chunks that earlier tasks have already done
    freeze_run       write run.toml: all tasks of a run have the same settings
    plan_workers     one worker (an engine process) per core of a device, or as many as the memory holds
    start_recorder   start a second process that samples the devices
    run_workers      give chunks to the workers until the work or the time is over
    decide_verdict   choose the exit code
    close_task       stop the recorder, publish the task database, return the result

The task database is on the node. A copy is published to the run folder at the start, every half minute and at the end,
so that a task that is killed leaves a readable file. If we are killed, the recorder publishes for us; without a
recorder, the next task on this node does. Exit code 75 asks Slurm for another try (``cli/job_signals.py``).
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from badcjobs.devices.allocation import own_memory_bytes
from badcjobs.errors import BadcjobsError, DatabaseProblem, ExitCode
from badcjobs.locks import LONGEST_BEAT_S, Holder, find_process
from badcjobs.model import USUAL_MEMORY, Device, TaskKey, WorkerPlan
from badcjobs.model.decisions import Code, Decision
from badcjobs.paths import RunFolder, shell_line
from badcjobs.processes import end_leftovers
from badcjobs.run_toml import check_against, freeze
from badcjobs.seams import Engine
from badcjobs.settings import RunSettings
from badcjobs.sources.cutter import AudioCutter
from badcjobs.sources.mistakes import Remarks, left_out_words
from badcjobs.sources.places import place_words, refuse_moved
from badcjobs.sources.recording_names import gap_lines
from badcjobs.store.live_files import read_lost_devices, read_pulse
from badcjobs.store.live_folder import publish_left_behind
from badcjobs.store.read_job import merged_files
from badcjobs.store.task_writer import TaskWriter
from badcjobs.task.progress import TimeBudget, count_progress, heartbeat_line
from badcjobs.task.records import RecordingOptions, Records
from badcjobs.task.startup import (
    Claim,
    Part,
    PartTaken,
    ResolvedTask,
    World,
    announce,
    forbid_restart,
    raise_if_stopped,
    resolve_task,
)
from badcjobs.telemetry.sidecar import wait_for_orphans
from badcjobs.version import __version__
from badcjobs.words import count, duration, moment
from badcjobs.workers.autoscale import Autoscaler, Meter
from badcjobs.workers.feed import AudioSteps
from badcjobs.workers.learned import LESSONS, STORE, Learned, find_limits, known_files, subject_of
from badcjobs.workers.mps import MpsDaemons, find_site_pipe
from badcjobs.workers.policy import RetryPolicy
from badcjobs.workers.supervise import Supervisor, Tally

log = logging.getLogger(__name__)

_ORPHAN_TIMEOUT_S = 10.0
_NAMED_FAILURES = 20
_AGAIN = "run the same command again to continue"


def run_task(settings: RunSettings, world: World) -> dict[str, Any]:
    """Run one array task to its end; return the JSON document of ``badcjobs run --json``."""
    resolved = resolve_task(settings, world)  # raises before anything is written
    with resolved.locks, open_task(resolved, settings, world) as task:
        list_work(task)
        if settings.resume:
            skip_done(task)
        freeze_run(task)
        workers = plan_workers(task)
        task.records.start_publishing(settings.publish_every_s)
        if workers.plans:
            task.records.start_usage()
        if workers.plans and settings.telemetry:
            start_recorder(task)
        try:
            verdict = decide_verdict(task, run_workers(task, workers))
        except sqlite3.OperationalError as error:
            why = f"this node cannot work now: {error}: {task.records.local.path.parent}"
            verdict = Verdict(ExitCode.RUN_ME_AGAIN, "stopped", f"{why}; {_AGAIN}, on another node if possible")
        except sqlite3.Error as error:
            verdict = Verdict(ExitCode.DATABASE, "failed", f"{error} in {task.records.local.path.parent}")
        except BaseException:  # a bug: publish what exists, then let the CLI report it
            close_task(task, Verdict(ExitCode.BUG, "killed"))
            raise
        return close_task(task, verdict)


class Task(NamedTuple):
    """The values that the steps below share."""

    settings: RunSettings  # options and config file
    world: World  # environment, clock, signals
    resolved: ResolvedTask  # allocation, place in the array, sources, devices, engine
    out: RunFolder
    key: TaskKey  # our name: job, array index, restart, node
    claim: Claim  # no other live task has our part of the source
    records: Records  # the task database, its publication, and the recorder
    time: TimeBudget  # the time until Slurm ends the job
    learned: Learned  # limits that earlier tasks found for these devices
    mps: MpsDaemons  # started for devices that several workers share

    @property
    def writer(self) -> TaskWriter:
        return self.records.writer

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that get work."""
        return self.resolved.grant.devices[: self.settings.max_gpus]

    @property
    def elapsed_s(self) -> float:
        return (self.world.clock.now_ms() - self.records.started_at_ms) / 1000

    @property
    def pending(self) -> int:
        """The number of chunks that are not settled."""
        return self.writer.counts().pending

    def add_decision(self, decision: Decision) -> None:
        """Record something that the program has decided by itself."""
        self.writer.add_decision(decision, self.world.clock.now_ms())


# --- before the work --------------------------------------------------------------------------------------------------


@contextmanager
def open_task(resolved: ResolvedTask, settings: RunSettings, world: World) -> Iterator[Task]:
    """Take a file name in the run folder and open the task database; a task that cannot start leaves no files."""
    out = RunFolder(settings.out.absolute())
    out.create()
    key = out.claim(resolved.allocation.key)
    database = out.task_database(key)
    records = None
    try:
        with make_claim(resolved, settings, world, out, key) as claim:
            records = Records(key, database, resolved.allocation, world, live_mode=settings.live_mode)
            records.claim_file = str(claim.path)
            world.log_to(out.task_log(key))
            records.begin(engine=resolved.engine.name, telemetry=settings.telemetry, end=resolved.end)
            used = replace(settings, filelist_digest=resolved.run.filelist_sha256 or None)
            records.writer.write_meta({"settings": used.to_json(world.cwd)})
            records.writer.write_meta(announce(world.environ, key, database))
            time = TimeBudget(resolved.end, world.clock)
            learned = Learned(subject_of(settings), known_files(LESSONS, out.path, world.environ))
            with closing(MpsDaemons()) as mps:
                yield Task(settings, world, resolved, out, key, claim, records, time, learned, mps)
    except (BadcjobsError, sqlite3.Error) as error:
        if records is not None and not database.exists():  # after a publication, the live files may have more rows
            records.local.remove()
        out.give_back(key)
        if isinstance(error, PartTaken):
            forbid_restart(world.environ)
        if isinstance(error, BadcjobsError):
            raise
        raise DatabaseProblem(
            f"the task database cannot be written: {error}",
            why=f"its live files: {records.local.path if records else resolved.allocation.local_dir}",
            fix="export TMPDIR=/a/local/folder/with/space   (in the job script, before badcjobs)",
        ) from error
    finally:
        if records is not None:
            records.writer.close()


def make_claim(
    resolved: ResolvedTask,
    settings: RunSettings,
    world: World,
    out: RunFolder,
    key: TaskKey,
) -> Claim:
    """Return the claim on our part of the source, which two live tasks never have at the same time."""
    run = resolved.run.settings
    source = zlib.crc32(repr((run.get("source"), run.get("root"))).encode(errors="surrogateescape"))
    line = str(resolved.place.position) if resolved.sources.picked_by_position else "all"
    part = Part(f"{source:08x}", line, resolved.shard.index, resolved.shard.count)
    now_ms = world.clock.now_ms()
    me = Holder(
        name=key.name,
        pid=world.pid,
        process=find_process(world.pid),
        every_s=min(LONGEST_BEAT_S, settings.heartbeat_every_s),
        since_ms=now_ms,
        restart=resolved.allocation.restart,
        beat_at_ms=now_ms,
    )
    return Claim(out, part, me, world.clock, lambda: raise_if_stopped(world.stop))


def list_work(task: Task) -> None:
    """Write one pending row for each chunk of our part of the source."""
    log_start(task)
    stop = task.world.stop
    shard = task.resolved.shard
    sources = task.resolved.sources

    def keep_going(rows: int) -> None:
        raise_if_stopped(stop)
        task.world.progress(rows)

    remarks = Remarks(keeps_missing=True)
    chunks = sources.chunks(shard, remarks, while_waiting=lambda: raise_if_stopped(stop))
    rows = task.writer.fill(chunks, keep_going, task.resolved.names.of)
    task.writer.update_task(shard_index=shard.index, shard_count=shard.count)

    log.info("source: %s; shard %s: %s", ", ".join(sources.descriptions), shard, count(rows, "chunk"))
    report_remarks(task, remarks)


def report_remarks(task: Task, remarks: Remarks) -> None:
    """Log what is remarkable about our part of the source: missing audio, gaps, places, files that are left out."""
    for line in remarks.lines():
        log.warning("%s", line)
    for line in (*remarks.notes(), *gap_lines(task.writer.name_gaps(), task.settings.patterns)):
        log.info("%s", line)
    places = task.writer.count_places()
    if places is not None:
        level = logging.WARNING if places.left_out else logging.INFO
        log.log(level, "places: %s", place_words(places))
    if remarks.left_out:
        log.info("left out: %s", left_out_words(remarks.left_out))
    for ending, files in remarks.left_out.items():
        task.add_decision(Decision.of(Code.LEFT_OUT, ending, files=files))


def log_start(task: Task) -> None:
    """Log who we are, and until when we may work."""
    log.info("badcjobs %s, task %s on %s", __version__, task.key.name, task.key.node)
    end = task.resolved.end
    if end is None:
        log.info("time: no time limit is known; working until all chunks are done")
        return
    left = duration((end.at_ms - task.records.started_at_ms) / 1000)
    log.info("time: until %s, %s from now (%s)", moment(end.at_ms), left, end.source)


def skip_done(task: Task) -> None:
    """Skip the chunks that are done in job.sqlite, or in task databases that are not merged into it.

    First publish the live files of tasks that were killed on this node.
    """
    out = task.out
    writer = task.writer
    wait_for_orphans(out.tasks, task.world.clock, _ORPHAN_TIMEOUT_S)
    publish_left_behind(
        out,
        task.records.local,
        task.key,
        hostname=task.world.hostname,
        replaced=task.claim.replaced,
        sleep=task.world.clock.sleep,
    )
    databases = [out.job_database] if out.job_database.exists() else []
    moved: dict[str, None] = {}
    for database in databases + out.earlier_databases(task.key, merged_files(out.job_database)):
        try:
            moved |= dict.fromkeys(writer.moved_since(database))
            writer.skip_done_in(database, retry_failed=task.settings.retry_failed)
        except DatabaseProblem as problem:
            log.warning("%s", problem.what)
    refuse_moved(list(moved))
    counts = writer.counts()
    if counts.done_before:
        log.info("already done, skipped: %s", count(counts.done_before, "chunk"))
    if counts.failed_before:
        failed = count(counts.failed_before, "chunk")
        log.warning("failed in earlier tasks, not tried again (run.retry_failed = false): %s", failed)
    if writer.changed:
        log.warning("done earlier, but with different audio, so analysed again: %s", count(writer.changed, "chunk"))


def freeze_run(task: Task) -> None:
    """Write run.toml if we are the first; refuse to continue if another task was first with other settings."""
    mine = task.resolved.run
    path = task.out.run_toml
    check_against(freeze(path, mine, __version__), mine, path)


def plan_workers(task: Task) -> Autoscaler:
    """Plan the workers of each device; no workers if no chunks are pending."""
    settings = task.settings
    writer = task.writer
    grant = task.resolved.grant
    writer.add_devices(grant.devices)
    pins = ", ".join(device.pin for device in grant.devices)
    log.info("devices: %s; %s", pins or "none", grant.why.replace("\n", "; "))

    devices = []
    cpu_workers = 0
    if task.pending > 0:
        devices = [(writer.device_id(device), device) for device in task.devices]
        if not grant.devices:
            cpu_workers = settings.cpu_workers
    # The server of a site's MPS daemon is the one process that may use an exclusive device.
    is_shared = settings.mps != "off" and find_site_pipe(task.world.environ) is not None
    is_exclusive = not is_shared and any(device.exclusive for device in task.devices)
    engine = task.resolved.engine
    granted_bytes = own_memory_bytes(task.resolved.allocation.facts)
    meter = Meter(granted_bytes, task.world.clock, task.records.memory_peaks, task.records.memory_held)
    workers = Autoscaler(
        devices,
        meter,
        task.learned,
        task.add_decision,
        cpus=task.resolved.allocation.cpus or task.world.cores,
        per_gpu=None if is_exclusive else settings.workers_wanted,
        cpu_workers=cpu_workers,
        chunk_s=writer.counts().longest_pending_s,
        exclusive=is_exclusive,
        cores_each=cores_of_worker(engine),
        memory_per_worker=engine.traits.memory_per_worker or USUAL_MEMORY,
    )
    writer.update_task(devices=len(grant.devices), workers=len(workers.plans))
    start_mps(task, workers)
    return workers


def cores_of_worker(engine: Engine) -> int | None:
    """Return how many cores a worker with one thread keeps busy; None: not known."""
    if engine.traits.cores_per_chunk is None:
        return None
    one_core = WorkerPlan(slot=0, device=None, device_id=None, threads=1)
    return engine.traits.cores_per_chunk * engine.chunks_at_once(one_core)


def start_mps(task: Task, workers: Autoscaler) -> None:
    """Start a daemon for each device that several workers share."""
    task.mps.start(
        task.settings.mps if workers.plans else "auto",
        workers.devices,
        most=workers.most_per_device,
        environ=task.world.environ,
        mark=task.records.mark,
        local=task.records.local,
        hostname=task.world.hostname,
    )


def start_recorder(task: Task) -> None:
    """Start to sample the devices, until the task is closed."""
    settings = task.settings
    options = RecordingOptions(
        settings.interval_s,
        settings.stand_in(task.world.cwd),
        settings.alerts,
        hooks=settings.hooks,
    )
    task.records.start_recorder(task.resolved.grant.devices, options)


# --- the work ---------------------------------------------------------------------------------------------------------


def run_workers(task: Task, workers: Autoscaler) -> Tally:
    """Give chunks to the workers until the work or the time is over."""
    if task.world.stop.requested or task.time.over or task.claim.lost:
        return Tally()  # the signal arrived, or the time ended, while the work was listed
    audio = set_up_audio(task, workers)
    supervisor = set_up_supervisor(task, workers, audio)
    chunks = task.pending
    next_beat_s = task.world.clock.monotonic_s() + task.settings.heartbeat_every_s
    supervisor.start()
    try:
        if workers.plans:
            log.info("workers: %d, engine %s", len(workers.plans), task.resolved.engine.name)
            if task.settings.keep_raw and not task.resolved.engine.traits.writes_tables:
                log.info("run.keep_raw: the engine %s writes no output files", task.resolved.engine.name)
            audio.start_staging(supervisor.upcoming)
        while supervisor.busy:
            supervisor.handle_events(timeout_s=0.2)
            look_after(task, supervisor, workers, left=chunks - supervisor.tally.done - supervisor.tally.failed)
            note_decisions(task, audio)
            if task.world.clock.monotonic_s() >= next_beat_s:
                next_beat_s = task.world.clock.monotonic_s() + task.settings.heartbeat_every_s
                log_heartbeat(task, supervisor)
        note_decisions(task, audio)
    except BaseException:
        supervisor.kill()
        raise
    finally:
        audio.stop_staging()
        task.mps.close()
    return supervisor.tally


def look_after(task: Task, supervisor: Supervisor, workers: Autoscaler, *, left: int) -> None:
    """Do what is due while the workers work, about five times a second; ``left``: chunks that are not settled."""
    handle_signals(task, supervisor)
    check_claim(task, supervisor)
    check_deadline(task, supervisor)
    if supervisor.killed:
        end_leftovers(task.records.mark)  # also a process that is still importing the engine
    work_waits = left >= len(workers.plans) and not supervisor.draining  # else an idle device is no problem
    task.records.check_recorder(work_waits=work_waits)
    workers.update(supervisor, left)
    task.mps.check(supervisor.end_shared, supervisor.give_up)
    task.world.show(lambda: count_progress(task.writer, task.elapsed_s, task.devices))


def note_decisions(task: Task, audio: AudioSteps) -> None:
    """Write what threads of workers have decided: only this thread writes to the database."""
    for decisions in (audio.decisions, task.mps.decisions):
        while not decisions.empty():
            task.add_decision(decisions.get())


def log_heartbeat(task: Task, supervisor: Supervisor) -> None:
    """Log the load of the machine, and how far the work is."""
    readings = task.records.readings_at_hand()
    since_ms = task.world.clock.now_ms() - round(1000 * task.settings.heartbeat_every_s)
    device_ids = {task.writer.device_id(device) for device in task.devices}
    lost = device_ids & (supervisor.lost_devices | read_lost_devices(readings))
    progress = count_progress(task.writer, task.elapsed_s)
    log.info("%s", heartbeat_line(progress, read_pulse(readings, since_ms), len(task.devices), len(lost)))


def set_up_audio(task: Task, workers: Autoscaler) -> AudioSteps:
    """Prepare staging and cutting of audio, with the limits known from probes and earlier tasks."""
    engine = task.resolved.engine
    probes = known_files(STORE, task.out.path, task.world.environ)
    return AudioSteps(
        stage=task.settings.stage,
        local=task.records.local.path,
        wants=engine.wants,
        plans=workers.plans,
        cutter=AudioCutter(task.world.environ.get("PATH")),
        learned=task.learned,
        probed=find_limits(probes, workers.plans, engine, task.settings),
    )


def set_up_supervisor(task: Task, workers: Autoscaler, audio: AudioSteps) -> Supervisor:
    """Prepare the queue of chunks, and a thread for each worker."""
    policy = RetryPolicy(task.settings.retries, task.settings.backoff_s)
    task.writer.patience_s = sum(map(policy.delay_s, range(1, policy.node_pauses + 1)))
    return Supervisor(
        task.resolved.engine,
        workers.plans,
        task.writer,
        clock=task.world.clock,
        policy=policy,
        scratch=task.records.local.scratch,
        timetable=task.time.fit_test,
        audio=audio,
        mps=task.mps,
        device_state=task.records.device_state,
        is_taken_over=lambda: not task.claim.check(),
    )


def handle_signals(task: Task, supervisor: Supervisor) -> None:
    """After a signal start nothing new; when the grace period is over, end what is still running."""
    stop = task.world.stop
    if stop.requested and not supervisor.draining:
        log.warning("%s: starting nothing new, finishing what is running", stop.name)
        supervisor.drain()
        task.records.publish_soon()
    if stop.overdue(task.settings.grace_s) and not supervisor.killed:
        log.warning("%s: ending what is still running", stop.name)
        supervisor.kill()


def check_claim(task: Task, supervisor: Supervisor) -> None:
    """End the work if another attempt has taken over our part: Slurm gave up this node, or we were suspended."""
    if task.claim.lost and not supervisor.killed:
        log.warning("another task has taken over this part of the source: ending what is running")
        supervisor.kill()


def check_deadline(task: Task, supervisor: Supervisor) -> None:
    """Start no chunk that would not finish before Slurm ends the job."""
    task.time.learn(task.writer.recent_work)
    if task.time.over and not supervisor.draining:
        supervisor.drain()
    if task.time.is_news:
        log.warning("the time limit is near: starting only chunks that can finish")
        task.records.publish_soon()


# --- the end ----------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How a task ends."""

    exit_code: int
    verdict: str  # done, failed, stopped or killed, as in the task's row
    note: str | None = None  # for the user


def decide_verdict(task: Task, tally: Tally) -> Verdict:
    """Choose the exit code from the chunks left, the failures and the signals."""
    counts = task.writer.counts()
    if not counts.pending:
        note = None
        if tally.retired:
            note = f"workers that stopped early: {len(tally.retired)}; the last one: {tally.retired[-1]}"
        if counts.failed + counts.failed_before:
            return Verdict(ExitCode.CHUNKS_FAILED, "failed", note)
        return Verdict(ExitCode.DONE, "done", note)

    if task.claim.lost:
        forbid_restart(task.world.environ)
        why = "another task has taken over this part of the source, and continues it"
    elif task.world.stop.requested:
        return Verdict(task.world.stop.exit_code, "stopped", _AGAIN)
    elif tally.node_fault is not None:
        why = f"{tally.node_fault}; {_AGAIN}, on another node if possible"
    elif task.time.out_of_time and tally.gave_up is None:
        why = f"the time limit is near; {_AGAIN}"
    else:
        why = tally.gave_up or next(iter(tally.retired), "no worker could be started; see the log")
        return Verdict(ExitCode.NOT_HERE, "failed", why)
    return Verdict(ExitCode.RUN_ME_AGAIN, "stopped", why)


def close_task(task: Task, end: Verdict) -> dict[str, Any]:
    """Kill the remaining processes, stop the recorder, publish the task database, and return the result."""
    records = task.records
    exit_code = end.exit_code
    note = end.note
    if exit_code == ExitCode.NOT_HERE:
        task.add_decision(Decision.of(Code.GAVE_UP, why=note))
    end_leftovers(records.mark)
    published = records.close(exit_code=exit_code, verdict=end.verdict)
    if not published:
        note = describe_unpublished(task)
        if exit_code == ExitCode.DONE:
            exit_code = ExitCode.DATABASE
    counts = task.writer.count_by_status()
    places = task.writer.count_places()
    log.info("task ends: %s, exit code %d, chunks %s", end.verdict, exit_code, counts)
    names = ("recording_id", "chunk_id", "error_class", "error")
    return {
        "exit_code": int(exit_code),
        "verdict": end.verdict,
        "task": task.key.name,
        "out": str(task.settings.out),
        "database": str(task.settings.out / "tasks" / f"{task.key.name}.sqlite"),
        "chunks": counts,
        "left_out": places.left_out if places else 0,  # recordings
        "left_out_names": places.left_out_names if places else [],  # the first five
        "audio_s": task.writer.counts().audio_done_s,
        "overlap": task.settings.overlap_s,  # seconds that count in both chunks until the merge
        "wall_s": records.wall_s,
        "devices": len(task.resolved.grant.devices),
        "workers": task.writer.workers_started,
        "telemetry": describe_telemetry(task),
        "failed": [dict(zip(names, row, strict=True)) for row in task.writer.failed_chunks(_NAMED_FAILURES)],
        "note": note,
    }


def describe_telemetry(task: Task) -> str:
    """Say whether the devices were recorded."""
    if not task.settings.telemetry:
        return "off (--no-emit-gpu-telemetry)"
    if task.records.telemetry_failure is not None:
        return f"incomplete: {task.records.telemetry_failure}"
    return "on" if task.records.recorder is not None else "not needed: no chunks were pending"


def describe_unpublished(task: Task) -> str:
    """Say where the results are if the last publication failed, and how to merge them."""
    live_folder = task.records.local.path
    note = f"the last publication failed; the task's own files stay in {live_folder}"
    merge = shell_line("badcjobs", "merge", task.settings.out, live_folder)
    return f"{note}; as long as this node exists: {merge}"
