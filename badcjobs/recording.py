"""The life of the recorder's process, from the first sample to, if need be, the last publication.

Started by the wrapper as ``python -m badcjobs.recording [--again] ORDER``. It obeys words on its input, not signals:
Slurm sends TERM to every process of a job, and the last seconds are worth recording.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.gpu.choose import open_reader
from badcjobs.model import METRICS
from badcjobs.seams import Clock, GpuReader
from badcjobs.store.connect import create_live
from badcjobs.store.live.telemetry_writer import TelemetryWriter
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.conversation import Conversation, Snapshots
from badcjobs.telemetry.cost import CostBook, Effort, Life
from badcjobs.telemetry.gaps import Gaps
from badcjobs.telemetry.host import HostReader
from badcjobs.telemetry.notes import Notes
from badcjobs.telemetry.order import AGAIN, ALERT, COST, PUBLISHED, REFUSED, STOP, STOPPED, TROUBLE, SidecarOrder
from badcjobs.telemetry.process_lookup import RECORDING_MARK, ProcessLookup
from badcjobs.telemetry.processes import ProcessBook
from badcjobs.telemetry.recorder import Recorder
from badcjobs.telemetry.sampler import Sampler
from badcjobs.telemetry.sources import SourceBook
from badcjobs.telemetry.unwritten import Unwritten
from badcjobs.telemetry.words import WRAPPER_GONE, Words
from badcjobs.workers.launch import TASK_MARK

log = logging.getLogger(__name__)

_LAST_PUBLICATION_TRIES = 3
_TAKE_OVER_PATIENCE_S = 30.0
_EARLIER_THAN_OTHERS = -5  # niceness


def run_recorder(order: SidecarOrder, reader: GpuReader, words: Words, clock: Clock, *, again: bool) -> None:
    """Record until the wrapper says stop or is gone; in the second case publish for it."""
    word, unwritten = record_until_told(order, reader, words, clock, again=again)
    if word != WRAPPER_GONE:
        words.say(f"{STOPPED} {unwritten.to_json()}")
        word = words.wait()
    if word != PUBLISHED:
        finish_for_the_wrapper(order, clock, unwritten)


def record_until_told(
    order: SidecarOrder, reader: GpuReader, words: Words, clock: Clock, *, again: bool
) -> tuple[str, Unwritten]:
    """Sample on the grid until a word comes; return it, and what could not be written.

    ``again``: a recorder before us has died.
    """
    if again:
        bring_up_gaps(Path(order.recorder_file), shared=order.shared)
    writer = TelemetryWriter(Path(order.recorder_file), order.task_id, shared=order.shared)
    snapshots = Snapshots(writer)
    sampler = Sampler(reader, order.devices, Gaps(writer, clock.now_ms()))
    alerts = AlertBook(writer, order.devices, order.limits, lambda alert: words.mention(f"{ALERT} {alert.to_json()}"))
    marks = [f"{name}={order.mark}" for name in (TASK_MARK, RECORDING_MARK)]
    lookup = ProcessLookup(wrapper_pid=order.wrapper_pid, marks=marks)
    processes = ProcessBook(writer, lookup.look_up)
    effort = Effort()
    cost = CostBook(writer, life_of(order, reader, clock), effort)
    if again:
        go_on(alerts, processes)
    recorder = Recorder(
        sampler,
        HostReader().read,
        writer,
        clock=clock,
        interval_s=order.interval_s,
        since_ms=order.asked_at_ms,
        again=again,
        refused=lambda reason: words.say(f"{REFUSED} {reason}"),
        notes=Notes(
            writer, [alerts, processes, SourceBook(writer), cost], lambda text: words.mention(f"{TROUBLE} {text}")
        ),
        effort=effort,
    )
    talk = Conversation(words, clock, snapshots, alerts)

    def wait(seconds: float) -> bool:
        if not words.ready_said and not again:
            for text in say_what_is_silent(sampler.unreadable):
                words.mention(f"{TROUBLE} {text}")
        return talk.wait(seconds)

    recorder.run(wait)
    reader.close()
    words.mention(f"{COST} {cost.words}")
    last_copy = talk.last_word.removeprefix(STOP).strip()
    if last_copy:
        snapshots.finish()
        snapshots.take(Path(last_copy))
    snapshots.finish()
    writer.close()
    return talk.last_word, recorder.unwritten


def life_of(order: SidecarOrder, reader: GpuReader, clock: Clock) -> Life:
    """Return what the recorder's own row says from beginning to end."""
    return Life(os.getpid(), order.interval_s, clock.now_ms(), lambda: (reader.backend, reader.why))


def go_on(alerts: AlertBook, processes: ProcessBook) -> None:
    """Take over what a recorder that died has left open; without it, the same things are told twice."""
    try:
        alerts.resume()
        processes.resume()
    except (sqlite3.Error, TypeError, ValueError) as error:
        log.warning("what the earlier recorder has noted cannot be read: %s", error)


def bring_up_gaps(file: Path, *, shared: bool) -> None:
    """Let the gaps of metrics that a dead recorder left open reach its last sample: it stretched them now and then."""
    latest = "SELECT max(rowid), device_id, metric, max(to_ms) FROM gap WHERE metric IS NOT NULL GROUP BY 2, 3"
    try:
        with closing(create_live(file, shared=shared)) as db:
            for row, device_id, metric, to_ms in db.execute(latest).fetchall():
                if metric in METRICS:
                    later = f"SELECT max(at_ms), count({metric}) FROM sample WHERE device_id = ? AND at_ms >= ?"
                    last_ms, given = db.execute(later, (device_id, to_ms)).fetchone()
                    if last_ms is not None and not given:  # a value since then would have ended the gap
                        db.execute("UPDATE gap SET to_ms = ? WHERE rowid = ?", (last_ms, row))
    except sqlite3.Error as error:
        log.warning("the gaps of the earlier recorder stay as they are: %s", error)


def say_what_is_silent(unreadable: Mapping[int, str]) -> list[str]:
    """Return one sentence per reason for which devices gave no first reading; a lost one is an alert already."""
    reasons = [reason for reason in unreadable.values() if "lost" not in reason.lower()]
    many = {reason: reasons.count(reason) for reason in reasons}
    return [
        f"{'1 device' if count == 1 else f'{count} devices'} cannot be read: {reason};"
        f" the work goes on, {'its' if count == 1 else 'their'} telemetry is a gap"
        for reason, count in many.items()
    ]


def finish_for_the_wrapper(order: SidecarOrder, clock: Clock, unwritten: Unwritten) -> None:
    """Do what a killed wrapper cannot: end its workers, publish both files a last time, tidy up."""
    # Imported now: few recorders ever come here, and all would carry them.
    import shutil

    from badcjobs.left_behind import take_over
    from badcjobs.paths import LocalFolder
    from badcjobs.store.into_place import remove_unfinished
    from badcjobs.store.live.halves import left_behind, work_left_behind
    from badcjobs.store.live.publish import publish
    from badcjobs.workers.leftovers import end_leftovers

    log.warning("the wrapper is gone: ending its workers and publishing what there is")
    end_leftovers(order.mark)
    if not take_over(LocalFolder(Path(order.local_folder)), _TAKE_OVER_PATIENCE_S, clock):
        return  # the next task was quicker
    ended_at_ms = clock.now_ms()
    target = Path(order.publish_to)
    for number in range(_LAST_PUBLICATION_TRIES):
        try:
            publish(
                [
                    work_left_behind(Path(order.wrapper_file), target, shared=order.shared),
                    left_behind(Path(order.recorder_file), shared=order.shared),
                ],
                target,
                workplace=Path(order.local_folder),
                closing={"ended_at_ms": ended_at_ms, "verdict": "killed"},
                gaps=unwritten.gaps(ended_at_ms),
            )
            remove_unfinished(target)
        except (OSError, sqlite3.Error) as error:
            log.warning("publication %d failed: %s", number + 1, error)
            time.sleep(1)
        else:
            shutil.rmtree(order.local_folder, ignore_errors=True)
            return
    log.error("the last publication failed; the files stay in %s", order.local_folder)


def main(args: Sequence[str]) -> None:
    """Run as the wrapper's sidecar."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s recorder %(levelname)s %(message)s")
    come_first()
    words = Words(sys.stdin.fileno(), sys.stdout.fileno())
    order, clock = SidecarOrder.read(Path(args[-1])), SystemClock()
    reader = open_reader(order.stand_in, clock, order.started_at_ms, order.search_path)
    run_recorder(order, reader, words, clock, again=AGAIN in args)


def come_first() -> None:
    """Ask to be woken in time on a machine where everybody computes; only few are allowed to."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _EARLIER_THAN_OTHERS)
    except OSError:
        pass  # then lateness, if there is any, becomes a gap


if __name__ == "__main__":
    main(sys.argv[1:])
