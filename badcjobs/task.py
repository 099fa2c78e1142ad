"""The life of one array task, from its allocation to its exit code. Read this file first.

look around → take a name → list the work → one worker per device, one recorder beside them
→ feed, watch, publish → say how it ended
"""

from __future__ import annotations

import logging
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from badcjobs import __version__
from badcjobs.allocation.end_time import end_words
from badcjobs.allocation.memory import own_memory_bytes
from badcjobs.announcement import announce
from badcjobs.audio.cutter import AudioCutter
from badcjobs.config import RunSettings
from badcjobs.crew import Crew, Terms
from badcjobs.deadline import Deadline, Pace
from badcjobs.errors import BadcjobsError, DatabaseProblem, ExitCode
from badcjobs.frozen_run import check_against, freeze
from badcjobs.heartbeat import Beat, heartbeat_line
from badcjobs.learned import Learned, learned_files, subject_of
from badcjobs.manifest import Remarks, Shard
from badcjobs.model import Device, TaskKey
from badcjobs.naming import gap_lines, name_reader
from badcjobs.outfit import Outfit
from badcjobs.paths import RunFolder
from badcjobs.probed import probe_files
from badcjobs.probed_limits import find_limits
from badcjobs.records import Recording, Records
from badcjobs.resume import skip_what_is_done
from badcjobs.store.live.task_writer import TaskWriter
from badcjobs.surroundings import Given, heed, look_around
from badcjobs.task_end import TaskEnd, Verdict
from badcjobs.work_now import count_progress, count_work
from badcjobs.workers.leftovers import end_leftovers
from badcjobs.workers.supervise import RetryPolicy, Supervisor, Tally
from badcjobs.world import World

log = logging.getLogger(__name__)

_NAMED_FAILURES = 20


def run_task(settings: RunSettings, world: World) -> TaskEnd:
    """Run one array task to its end."""
    given = look_around(settings, world)  # nothing is written before all of this has worked
    with given.locks, take_name(given, settings, world) as task:
        list_work(task)
        freeze_run(task)
        crew = plan_work(task)
        task.records.start_publishing(settings.publish_every_s)
        if crew.plans and settings.telemetry:
            stand_in = settings.stand_in(task.world.cwd)
            how = Recording(settings.interval_s, stand_in, settings.alerts, hooks=settings.hooks)
            task.records.start_recorder(given.grant.devices, how)
            task.records.start_usage()
        try:
            verdict = judge(task, work_off(task, crew))
        except sqlite3.Error as error:
            verdict = Verdict(ExitCode.DATABASE, "failed", f"{error} in {task.records.local.path.parent}")
        except BaseException:  # a bug: publish what there is, then let the CLI say so
            finish(task, Verdict(ExitCode.BUG, "killed"))
            raise
        return finish(task, verdict)


@dataclass(frozen=True)
class Task:
    """A task with a name and a place for its records."""

    settings: RunSettings
    world: World
    given: Given
    out: RunFolder
    key: TaskKey
    records: Records
    pace: Pace
    learned: Learned

    @property
    def writer(self) -> TaskWriter:
        return self.records.writer

    def note_decision(self, kind: str, subject: str | None, value: float | None, reason: str) -> None:
        """Write down what we decided by ourselves."""
        self.writer.add_decision(kind, subject, value, reason, self.world.clock.now_ms())

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that work is given to."""
        return self.given.grant.devices[: self.settings.max_gpus]

    @property
    def elapsed_s(self) -> float:
        return (self.world.clock.now_ms() - self.given.started_at_ms) / 1000


@contextmanager
def take_name(given: Given, settings: RunSettings, world: World) -> Iterator[Task]:
    """Claim a file name in the run folder and open the records; a task that cannot begin leaves nothing behind."""
    out = RunFolder(settings.out.absolute())
    out.create()
    key = out.claim(given.allocation.key)
    records = None
    try:
        records = Records(
            key,
            out.task_database(key),
            given.allocation,
            world,
            started_at_ms=given.started_at_ms,
            mark=given.mark,
            live_mode=settings.live_mode,
        )
        world.log_to(out.task_log(key))
        records.begin(engine=given.engine.name, telemetry=settings.telemetry, end=given.end)
        records.writer.write_meta({"settings": settings.to_json(world.cwd)})
        records.writer.write_meta(announce(world.environ, key, out.task_database(key)))
        pace = Pace(None if given.end is None else Deadline(given.end, world.clock))
        learned = Learned(subject_of(settings), learned_files(out.path, world.environ))
        yield Task(settings, world, given, out, key, records, pace, learned)
    except (BadcjobsError, sqlite3.Error) as error:
        if records is not None and not out.task_database(key).exists():  # else there may be more in it
            records.local.remove()
        out.give_back(key)
        if isinstance(error, BadcjobsError):
            raise
        raise DatabaseProblem(
            f"the task database cannot be written: {error}",
            why=f"its live files: {records.local.path if records else given.allocation.local_dir}",
            fix="export TMPDIR=/a/local/folder/with/space   (in the job script, before badcjobs)",
        ) from error
    finally:
        if records is not None:
            records.writer.close()


# --- what is to be done -----------------------------------------------------------------------------------------------


def list_work(task: Task) -> None:
    """Write every row of our part of the source as pending, then skip what earlier tasks have done."""
    place, sources = task.given.place, task.given.sources
    log.info("badcjobs %s, task %s on %s", __version__, task.key.name, task.key.node)
    log.info("%s", end_words(task.given.end, task.given.started_at_ms))
    shard = Shard(place.index, place.count)
    if sources.picked_by_position:  # our line of a list of manifests: only the tasks of a step share it
        shard = Shard(place.step_index, place.step_count)
    names = name_reader(task.settings, task.world.cwd)
    remarks = Remarks(keeps_missing=True)
    chunks = sources.chunks(shard, remarks, while_waiting=lambda: heed(task.world.stop))
    rows = task.writer.fill(chunks, lambda rows: keep_listing(task, rows), names.of)
    log.info("source: %s; part %s: %d chunks", ", ".join(sources.descriptions), shard, rows)
    for line in remarks.lines():
        log.warning("%s", line)
    for line in remarks.notes():
        log.info("%s", line)
    for line in gap_lines(task.writer.name_gaps(), names.patterns):
        log.info("%s", line)
    task.writer.set_shard(shard.index, shard.count)
    if task.settings.resume:
        skip_what_is_done(
            task.out,
            task.key,
            task.records,
            retry_failed=task.settings.retry_failed,
            hostname=task.world.hostname,
            clock=task.world.clock,
        )


def keep_listing(task: Task, rows: int) -> None:
    """Show progress; a signal ends a long listing, with nothing started and nothing written."""
    heed(task.world.stop)
    task.world.progress(rows)


def freeze_run(task: Task) -> None:
    """Write run.toml if we are the first; another task may have been first with other settings."""
    check_against(freeze(task.out.run_toml, task.given.run, __version__), task.given.run, task.out.run_toml)


def plan_work(task: Task) -> Crew:
    """Write down our devices and plan the workers of each; none when there is nothing left to do."""
    settings, writer, devices = task.settings, task.writer, task.given.grant.devices
    writer.add_devices(devices)
    log.info("devices: %s; %s", ", ".join(d.pin for d in devices) or "none", task.given.grant.why.replace("\n", "; "))
    work = writer.count_by_status().get("pending", 0)
    terms = Terms(
        [(writer.device_id(device), device) for device in task.devices if work],
        cpus=task.given.allocation.cpus or task.world.cores,
        per_gpu=settings.workers_wanted,
        cpu_workers=settings.cpu_workers if work and not devices else 0,
        memory_bytes=own_memory_bytes(task.given.allocation.facts),
    )
    crew = Crew(terms, task.learned, task.note_decision, task.world.clock)
    writer.set_plan(devices=len(devices), workers=len(crew.plans))
    return crew


# --- the work ---------------------------------------------------------------------------------------------------------


def work_off(task: Task, crew: Crew) -> Tally:
    """Feed the workers until the work or the time is over."""
    if task.world.stop.requested or task.pace.over:
        return Tally()  # the signal came, or the time ran out, while we were listing the work
    outfit = equip(task, crew)
    supervisor = Supervisor(
        outfit.engine,
        crew.plans,
        task.writer,
        clock=task.world.clock,
        policy=RetryPolicy(task.settings.retries, task.settings.backoff_s),
        scratch=task.records.local.scratch,
        timetable=task.pace,
        device_state=task.records.device_state,
    )
    pending = task.writer.count_by_status().get("pending", 0)
    beat = Beat(task.settings.heartbeat_every_s, task.world.clock)
    supervisor.start()
    try:
        if crew.plans:
            log.info("workers: %d, engine %s", len(crew.plans), task.given.engine.name)
            outfit.begin(supervisor.upcoming)
        while supervisor.busy:
            supervisor.handle_events(timeout_s=0.2)
            obey_signals(task, supervisor)
            obey_time(task, supervisor)
            task.records.look_after_recorder()
            task.records.write_usage()
            left = pending - supervisor.tally.done - supervisor.tally.failed
            records = task.records
            crew.look(supervisor, left=left, memory_peaks=records.memory_peaks, memory_held=records.memory_held)
            waits = left >= len(crew.plans) and not supervisor.draining  # enough for every worker
            task.records.tell_of_work(waits=waits)
            write_decisions(task, outfit)
            if beat.is_due:
                log.info("%s", heartbeat(task))
            task.world.show(lambda: count_work(task.writer, task.devices, task.elapsed_s))
        write_decisions(task, outfit)
    except BaseException:
        supervisor.kill()
        raise
    finally:
        outfit.end()
    return supervisor.tally


def equip(task: Task, crew: Crew) -> Outfit:
    """Put around the engine what the settings ask for, and what earlier tasks have learned about our devices."""
    outfit = Outfit(
        task.given.engine,
        task.given.profile,
        stage=task.settings.stage,
        keep=task.out.path / "profiles" / task.key.name,
        local=task.records.local.path,
        workers=len(crew.plans),
        cutter=AudioCutter(task.world.environ.get("PATH")),
        clock=task.world.clock,
    )
    probed = find_limits(probe_files(task.out.path, task.world.environ), crew.plans, task.given.engine, task.settings)
    outfit.cut_what_is_too_long(task.learned, crew.plans, probed)
    return outfit


def write_decisions(task: Task, outfit: Outfit) -> None:
    """Write down what was decided beside the work, by threads that may not write themselves."""
    for decision in outfit.news():
        task.note_decision(*decision)


def obey_signals(task: Task, supervisor: Supervisor) -> None:
    """Stop in order when asked to, and at once when the time for that is over."""
    stop = task.world.stop
    if stop.requested and not supervisor.draining:
        log.warning("%s: starting nothing new, finishing what is running", stop.name)
        supervisor.drain()
        task.records.publish_soon()
    if stop.overdue(task.settings.grace_s) and not supervisor.killed:
        log.warning("%s: ending what is still running", stop.name)
        supervisor.kill()


def obey_time(task: Task, supervisor: Supervisor) -> None:
    """Stop in order at the end of the time; what would not be finished by then is not even started."""
    task.pace.learn(task.writer.recent_work)
    if task.pace.over and not supervisor.draining:
        supervisor.drain()
    if task.pace.is_news:
        log.warning("the time is nearly over: starting nothing that would not finish")
        task.records.publish_soon()


def heartbeat(task: Task) -> str:
    """Return the heartbeat line of this moment."""
    pulse = task.records.pulse(task.settings.heartbeat_every_s)
    return heartbeat_line(
        count_progress(task.writer, task.elapsed_s),
        cpu_percent=pulse.cpu_percent,
        memory_percent=pulse.memory_percent,
        gpu_percent=pulse.gpu_percent,
        devices=len(task.given.grant.devices),
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def judge(task: Task, tally: Tally) -> Verdict:
    """Say how it went: the exit codes are the contract's."""
    stop = task.world.stop
    counts = task.writer.count_by_status()
    left = counts.get("pending", 0)
    failed = counts.get("failed", 0) + counts.get("poison", 0) + task.writer.count_failed_before()
    again = "run the same command again to go on where this stopped"
    if left and stop.cut_short_by is not None:
        return Verdict(128 + stop.cut_short_by, "stopped", again)
    if left and stop.ended_by is signal.SIGINT:
        return Verdict(128 + stop.ended_by, "stopped", again)
    if left and stop.requested:
        return Verdict(ExitCode.RUN_ME_AGAIN, "stopped", again)
    if left and task.pace.out_of_time and tally.hopeless is None:
        return Verdict(ExitCode.RUN_ME_AGAIN, "stopped", f"the time is nearly over; {again}")
    if left:
        no_worker = tally.retired[0] if tally.retired else "no worker could be started; the log says why"
        return Verdict(ExitCode.NOT_HERE, "failed", tally.hopeless or no_worker)
    early = len(tally.retired)
    note = f"{early} of the workers ended before the work did; the last one: {tally.retired[-1]}" if early else None
    if failed:
        return Verdict(ExitCode.CHUNKS_FAILED, "failed", note)
    return Verdict(ExitCode.DONE, "done", note)


def finish(task: Task, end: Verdict) -> TaskEnd:
    """Leave nothing running, close the records, and say how it ended."""
    end_leftovers(task.given.mark)
    closing = task.records.close(exit_code=end.exit_code, verdict=end.verdict)
    telemetry = "on" if task.records.recorder_started else "not needed: there was nothing to do"
    if not task.settings.telemetry:
        telemetry = "off (--no-emit-gpu-telemetry)"
    elif closing.telemetry_failure is not None:
        telemetry = f"incomplete: {closing.telemetry_failure}"
    exit_code, note = int(end.exit_code), end.note
    if not closing.published:
        note = f"the last publication failed; the task's own files stay in {task.records.local.path}"
        note += f", without the last {closing.unsaved} changes, which no disk would take" if closing.unsaved else ""
        note += f"; while this node is there: badcjobs merge {task.settings.out} {task.records.local.path}"
        exit_code = ExitCode.DATABASE if exit_code == ExitCode.DONE else exit_code
    counts = task.writer.count_by_status()
    log.info("task ends: %s, exit code %d, chunks %s", end.verdict, exit_code, counts)
    names = ("recording_id", "chunk_id", "error_class", "error")
    return TaskEnd(
        exit_code=exit_code,
        verdict=end.verdict,
        task=task.key.name,
        out=str(task.settings.out),
        database=str(task.settings.out / "tasks" / f"{task.key.name}.sqlite"),
        chunks=counts,
        audio_s=task.writer.audio_done_s(),
        wall_s=task.elapsed_s,
        devices=len(task.given.grant.devices),
        workers=task.writer.workers_started,
        telemetry=telemetry,
        failed=[dict(zip(names, row, strict=True)) for row in task.writer.failed_chunks(_NAMED_FAILURES)],
        note=note,
    )
