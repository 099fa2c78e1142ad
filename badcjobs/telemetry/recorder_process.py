"""The recorder's process, from the first sample to the last publication if the wrapper is killed.

The wrapper starts it as ``python -m badcjobs.telemetry.recorder_process [--again] ORDER``. It obeys messages on stdin
(see recorder.py) and ignores signals: Slurm sends TERM to every process of a job, and the last seconds must be
recorded."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.devices.choose import open_reader
from badcjobs.paths import LocalFolder
from badcjobs.seams import Clock, GpuReader
from badcjobs.telemetry import recorder as protocol
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.books import CostBook, HostReader, LatestBook, ProcessBook, ProcessLookup, SourceBook
from badcjobs.telemetry.recorder import (
    Book,
    Gaps,
    LinePipe,
    Recorder,
    Sampler,
    SidecarOrder,
    TelemetryWriter,
    Unwritten,
)

log = logging.getLogger(__name__)

_RECEIVE_TIMEOUT_S = 5.0
_LAST_PUBLICATION_TRIES = 3
_TAKE_OVER_TIMEOUT_S = 30.0


def main(args: Sequence[str]) -> None:
    """Run as the recorder of a wrapper."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s recorder %(levelname)s %(message)s")
    pipe = LinePipe(sys.stdin.fileno(), sys.stdout.fileno(), parent=os.getppid())
    order = SidecarOrder.read(Path(args[-1]))
    clock = SystemClock()
    reader = open_reader(order.stand_in, clock, order.started_at_ms, order.search_path, order.sysfs)
    run_recorder(order, reader, pipe, clock, again=protocol.AGAIN in args)


def run_recorder(order: SidecarOrder, reader: GpuReader, pipe: LinePipe, clock: Clock, *, again: bool) -> None:
    """Record until the wrapper sends stop or dies; if it dies, publish for it.

    ``again``: an earlier recorder has died.
    """
    message, unwritten = RecorderProcess(order, reader, pipe, clock, again).record()
    if message != protocol.CLOSED:
        pipe.send(f"{protocol.STOPPED} {json.dumps(asdict(unwritten))}")
        answer = None
        while answer is None:
            answer = pipe.receive(_RECEIVE_TIMEOUT_S)
        message = answer
    if message != protocol.PUBLISHED:
        publish_for_wrapper(order, clock, unwritten)


@dataclass(eq=False)
class RecorderProcess:
    """The recorder, its file, and the requests of the wrapper between two samples."""

    order: SidecarOrder
    reader: GpuReader
    pipe: LinePipe
    clock: Clock
    again: bool
    _is_ready: bool = False
    _last_message: str = protocol.CLOSED
    _snapshot: threading.Thread | None = None

    def __post_init__(self) -> None:
        order = self.order
        reader = self.reader
        now_ms = self.clock.now_ms()
        folder = LocalFolder(Path(order.local_folder))
        writer = self._writer = TelemetryWriter(folder.recorder_file, order.task_id, shared=order.shared)
        self._sampler = Sampler(reader, order.devices, Gaps(writer, now_ms))
        lookup = ProcessLookup(wrapper_pid=order.wrapper_pid, marks=order.own_marks)
        self._alerts = AlertBook(
            writer,
            order.devices,
            order.limits,
            tell=lambda alert: self._report(protocol.ALERT, json.dumps(asdict(alert))),
        )
        self._cost = CostBook(writer, order.interval_s, now_ms, lambda: (reader.backend, reader.why))
        books: list[Book] = [self._alerts, ProcessBook(writer, lookup.look_up), SourceBook(writer), self._cost]
        if not order.shared:
            books.append(LatestBook(folder, reader))
        self._recorder = Recorder(
            self._sampler,
            HostReader().read,
            writer,
            clock=self.clock,
            interval_s=order.interval_s,
            since_ms=order.asked_at_ms,
            again=self.again,
            books=books,
            trouble=lambda text: self._report(protocol.TROUBLE, text),
            effort=self._cost.effort,
        )

    def record(self) -> tuple[str, Unwritten]:
        """Take samples until the wrapper stops it; return the last message, and what could not be written."""
        if self.again:
            self._writer.end_open_alerts()
        self._recorder.run(self._wait)
        self.reader.close()
        self._report(protocol.COST, self._cost.text)
        if self._snapshot is not None:
            self._snapshot.join()
        last_copy = self._last_message.removeprefix(protocol.STOP).strip()
        if last_copy:
            self._copy(Path(last_copy))
        self._writer.close()
        return self._last_message, self._recorder.unwritten

    def _wait(self, seconds: float) -> bool:
        """Handle messages of the wrapper until the next sample; return whether the recording is over."""
        if not self._is_ready:  # the first call is after the first sample
            self._is_ready = True
            if not self.again:
                self._report_unreadable()
            self.pipe.send(protocol.READY)
        end_s = self.clock.monotonic_s() + seconds
        while True:
            message = self.pipe.receive(max(0.0, end_s - self.clock.monotonic_s()))
            if message is None:
                return False
            if message.startswith(protocol.SNAPSHOT):
                if self._snapshot is None or not self._snapshot.is_alive():  # in a thread: no sample waits
                    self._snapshot = threading.Thread(target=self._copy, args=(Path(message.partition(" ")[2]),))
                    self._snapshot.start()
            elif message in (protocol.WORK_WAITS, protocol.WORK_NONE):
                self._alerts.work_waits = message == protocol.WORK_WAITS
            else:
                self._last_message = message
                return True

    def _report_unreadable(self) -> None:
        """Say how many devices no reader can read; one that is lost later is an alert."""
        unread = [device for device in self.order.devices if device.uuid is None]
        if unread:
            why = f"{self._sampler.no_reader}; the work continues, with a gap in the telemetry"
            self._report(protocol.TROUBLE, f"devices that cannot be read: {len(unread)}; {why}")

    def _report(self, message: str, text: str) -> None:
        """Send a message without waiting: samples are more important."""
        self.pipe.send(f"{message} {text}", 0)

    def _copy(self, target: Path) -> None:
        try:
            self._writer.snapshot(target)
        except (OSError, sqlite3.Error) as error:
            log.warning("no snapshot for the wrapper: %s", error)


def publish_for_wrapper(order: SidecarOrder, clock: Clock, unwritten: Unwritten) -> None:
    """Act for a killed wrapper: end its workers, publish both files a last time, remove the live files."""
    # Imported here to save memory: few recorders need these modules.
    from badcjobs.processes import end_leftovers
    from badcjobs.store.live_folder import publish_killed, take_over

    log.warning("the wrapper has died: ending its workers and publishing its results")
    end_leftovers(order.mark)
    folder = LocalFolder(Path(order.local_folder))
    if not take_over(folder, _TAKE_OVER_TIMEOUT_S, clock):
        return  # the next task has taken over the folder
    ended_at_ms = clock.now_ms()
    for number in range(_LAST_PUBLICATION_TRIES):
        try:
            gaps = unwritten.gaps(ended_at_ms)
            publish_killed(folder, Path(order.publish_to), ended_at_ms, gaps, shared=order.shared)
        except (OSError, sqlite3.Error) as error:
            log.warning("publication %d failed: %s", number + 1, error)
            time.sleep(1)
        else:
            folder.remove()
            if order.claim_file is not None:
                Path(order.claim_file).unlink(missing_ok=True)
            return
    log.error("the last publication failed; the files stay in %s", order.local_folder)


if __name__ == "__main__":
    main(sys.argv[1:])
