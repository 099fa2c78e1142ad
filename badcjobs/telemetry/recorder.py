"""The recorder's loop: a sample of every device at fixed intervals, and a gap where a sample is missing.

Also the protocol between the wrapper and its recorder: the order that starts it, and messages over pipes.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import METRICS, AlertLimits, HostReading, Reading, StandIn
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable
from badcjobs.store.connect import create_live, read_value, transaction
from badcjobs.store.live_files import LAST_READING, take_snapshot
from badcjobs.store.schema import insert_sql

log = logging.getLogger(__name__)

_SLOW_START_S = 1.5
_ASKED_FOR = (*METRICS, "processes")
_values_of = attrgetter(*_ASKED_FOR)

Readings = Sequence[tuple[int, Reading]]  # of one sample, by device
Unreadable = Mapping[int, str]  # device → why it is not in the sample
_Place = tuple[int, str | None]  # device, metric (None: all of them)


# The messages between the wrapper and the recorder, one per line.
# From the recorder
#     ready           the first sample is taken
#     alert JSON      an alert has started or ended
#     trouble TEXT    a line for the task's log
#     cost TEXT       what it has used; then
#     stopped JSON    the last sample is taken; the JSON says what could not be written. The recorder keeps running, to
#                     publish if the wrapper dies.
# From the wrapper
#     work waits      an idle device is worth an alert
#     work none       it is not
#     snapshot FILE   copy the rows so far, because no other process may open the recorder's file
#     stop [FILE]     take a last sample (and a last snapshot)
#     published       everything is published: exit
# If the pipe closes without a message, the wrapper is dead.
MODULE = "badcjobs.telemetry.recorder_process"
AGAIN = "--again"
CLOSED = ""
READY = "ready"
ALERT = "alert"
TROUBLE = "trouble"
COST = "cost"
STOPPED = "stopped"
WORK_WAITS = "work waits"
WORK_NONE = "work none"
SNAPSHOT = "snapshot"
STOP = "stop"
PUBLISHED = "published"


@dataclass
class LinePipe:
    """One end of the pipes between the wrapper and its recorder: one line per message."""

    lines_in: int
    lines_out: int
    # The process whose end means that the other end is closed, even while a process that it forked holds the pipe open.
    parent: int | None = None
    _unread: bytes = b""

    def send(self, line: str, timeout_s: float | None = None) -> None:
        """Write a line, or drop it if the pipe stays full; a closed pipe is noticed by ``receive``."""
        with suppress(OSError, ValueError):
            if select.select([], [self.lines_out], [], timeout_s)[1]:
                os.write(self.lines_out, line.encode() + b"\n")

    def receive(self, timeout_s: float) -> str | None:
        """Return the next line; None: timeout; CLOSED: the other end is closed."""
        while b"\n" not in self._unread:
            if not select.select([self.lines_in], [], [], timeout_s)[0]:
                is_orphan = self.parent not in (None, os.getppid())
                return CLOSED if is_orphan else None
            part = os.read(self.lines_in, 4096)
            if not part:
                return CLOSED
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")


class Followed(NamedTuple):
    """A device that is recorded; a tuple, so that it is a short list in the recorder's order."""

    device_id: int
    uuid: str | None  # None: it cannot be read on this machine
    device_index: int | None = None
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    slowdown_c: float | None = None

    @property
    def label(self) -> str:
        """The name of the device in messages."""
        if self.device_index is None:
            return f"device {self.device_id}"
        return f"device {self.device_index}"


@dataclass(frozen=True)
class SidecarOrder:
    """Everything that the recorder's process needs, as a JSON file."""

    mark: str
    task_id: int
    wrapper_pid: int
    devices: list[Followed]
    interval_s: float
    stand_in: StandIn
    search_path: str | None
    sysfs: str | None  # instead of /sys
    started_at_ms: int
    asked_at_ms: int
    publish_to: str
    local_folder: str
    shared: bool  # the files are on a shared filesystem: the safe mode
    limits: AlertLimits
    own_marks: list[str]  # NAME=VALUE in the environment of the task's own processes
    claim_file: str | None  # the task's claim on its part of the source

    def write(self, path: Path) -> None:
        """Write the order for the recorder's process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> SidecarOrder:
        """Read the order that the wrapper wrote."""
        order = json.loads(path.read_text())
        order["devices"] = [Followed(*device) for device in order["devices"]]
        order["stand_in"] = StandIn(**order["stand_in"])
        order["limits"] = AlertLimits(**order["limits"])
        return cls(**order)


@dataclass
class Effort:
    """The work of the recorder's loop so far."""

    ticks: int = 0
    worst_late_s: float = 0.0  # the largest delay of a sample
    reading_s: float = 0.0


@dataclass(frozen=True)
class Unwritten:
    """Why readings could not be written ("": all could), and since when (None: they can be written again)."""

    reason: str = ""
    since_ms: int | None = None

    @property
    def text(self) -> str | None:
        """The loss as text; None: nothing was lost."""
        if not self.reason:
            return None
        return f"readings could not be written: {self.reason}"

    def gaps(self, to_ms: int) -> list[tuple[int, int, str]]:
        """Return the gap that is not in a file yet, as (from, to, reason)."""
        if self.since_ms is None:
            return []
        return [(self.since_ms, max(to_ms, self.since_ms), f"could not be written: {self.reason}")]


class Book(ABC):
    """Rows that are written in the transaction of a sample: alerts, processes, sources, the recorder's cost."""

    @abstractmethod
    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the rows of one sample."""

    def finish(self) -> None:  # noqa: B027
        """Write the remaining rows, in the last transaction; most books have none."""

    def written(self) -> None:  # noqa: B027
        """Note that the sample is on disk; most books do not need this."""


@dataclass
class Recorder:
    """Takes samples at start, start + interval, start + 2 × interval, …, even if a sample takes long.

    Samples are more important than the rows of the books: a book that fails is reported once, and tried again with the
    next sample.
    """

    sampler: Sampler
    read_host: Callable[[], HostReading | None]
    writer: TelemetryWriter
    clock: Clock
    interval_s: float
    books: Sequence[Book]
    trouble: Callable[[str], None]
    effort: Effort
    since_ms: int | None  # when recording was requested
    again: bool  # an earlier recorder has died
    _last_ms: int | None = None
    unwritten: Unwritten = Unwritten()
    _failed_books: set[str] = field(default_factory=set)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Record until ``wait(seconds)`` returns True; then take one last sample."""
        start_s = self.clock.monotonic_s()
        before_s = start_s - self.interval_s  # when the last sample was taken
        number = 0
        over = False
        while not over:
            now_s = self.clock.monotonic_s()
            self.effort.worst_late_s = max(self.effort.worst_late_s, now_s - before_s - self.interval_s)
            before_s = now_s
            self.tick()
            number = max(number, int((self.clock.monotonic_s() - start_s) / self.interval_s)) + 1
            over = wait(start_s + number * self.interval_s - self.clock.monotonic_s())
        self.sampler.reader.force_full_read()  # the last sample includes all metrics
        self.tick(last=True)

    def tick(self, *, last: bool = False) -> None:
        """Take and write one sample; a disk error costs this sample, but does not stop the recorder."""
        at_ms = self.clock.now_ms()
        if self._last_ms is not None:
            at_ms = max(at_ms, self._last_ms + 1)  # the last sample may follow immediately; times are unique
        self.sampler.gaps.save()
        gap = self._gap_before(at_ms)
        try:
            with self.writer.batch():
                if gap is not None:
                    from_ms, reason = gap
                    self.writer.open_gap(None, None, from_ms, at_ms, reason)
                self._write(at_ms, last)
        except sqlite3.Error as error:
            self.sampler.gaps.restore()  # rolled back with the rest
            if self.unwritten.since_ms is None:
                log.warning("readings cannot be written: %s", error)
                if not self.unwritten.reason:  # once: a nearly full disk fails often
                    self.trouble(f"readings cannot be written: {error}; the telemetry has a gap")
                since_ms = gap[0] if gap else self._last_ms or at_ms
                self.unwritten = Unwritten(str(error), since_ms)
            return
        self.unwritten = replace(self.unwritten, since_ms=None)
        self._last_ms = at_ms
        for book in self.books:
            book.written()

    def _write(self, at_ms: int, last: bool) -> None:
        began_s = self.clock.monotonic_s()
        readings = self.sampler.sample(at_ms)
        self.effort.reading_s += self.clock.monotonic_s() - began_s
        self.effort.ticks += 1
        self.writer.write_tick(at_ms, readings, self.read_host())
        for book in self.books:
            try:
                with self.writer.aside():
                    book.write(at_ms, readings, self.sampler.unreadable)
                    if last:
                        book.finish()
            except sqlite3.OperationalError:
                raise  # a disk error: the complete sample is lost, and becomes a gap
            except Exception as error:  # broad: samples are more important than any error in a book
                name = type(book).__name__
                if name not in self._failed_books:
                    self._failed_books.add(name)
                    log.exception("%s cannot write", name)
                    self.trouble(f"the recorder's {name} has failed and may be incomplete: {error!r}")

    def _gap_before(self, at_ms: int) -> tuple[int, str] | None:
        """Return start and reason of the gap before this sample; None: the last sample was on time."""
        if self.unwritten.since_ms is not None:
            return self.unwritten.since_ms, f"could not be written: {self.unwritten.reason}"
        if self._last_ms is None:
            return self._gap_at_start(at_ms)
        late_s = (at_ms - self._last_ms) / 1000
        if late_s <= 1.5 * self.interval_s:  # up to half an interval late is still on time
            return None
        missed = round(late_s / self.interval_s) - 1
        reason = f"the recorder was late; readings missed: {missed}"
        log.warning(reason)
        return self._last_ms, reason

    def _gap_at_start(self, at_ms: int) -> tuple[int, str] | None:
        last_ms = self.writer.last_sample_ms()
        if self.again or last_ms is not None:
            return last_ms or self.since_ms or at_ms, "the recorder died and was restarted"
        usual_ms = 1000 * max(_SLOW_START_S, 1.5 * self.interval_s)  # of a program's start: not a gap
        if self.since_ms is not None and at_ms - self.since_ms > usual_ms:
            return self.since_ms, "the recorder was slow to start"
        return None


@dataclass(eq=False)
class Sampler:
    """Reads devices by UUID; a device without a reading becomes a gap."""

    reader: GpuReader
    devices: Sequence[Followed]
    gaps: Gaps
    unreadable: Unreadable = field(default_factory=dict)  # in the last sample
    no_reader: str = "no driver library to read it with"  # for example in a container without the library

    def __post_init__(self) -> None:
        if any(device.uuid is None for device in self.devices):
            try:
                self.reader.inventory()
            except ReaderUnavailable as error:
                self.no_reader += f": {error}"

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]:
        """Read all devices; a device or metric that cannot be read becomes a gap, never an exception or a zero."""
        readings = []
        unreadable = {}
        for device in self.devices:
            device_id = device.device_id
            try:
                if device.uuid is None:
                    raise DeviceUnreadable(self.no_reader)
                reading = self.reader.read(device.uuid)
            except DeviceUnreadable as error:
                unreadable[device_id] = str(error)
                if self.gaps.missing((device_id, None), at_ms, str(error)):
                    log.warning("%s (%s) cannot be read: %s", device.label, device.uuid, error)
                continue
            self.gaps.good((device_id, None), at_ms)
            self._note_metrics(device_id, at_ms, reading)
            readings.append((device_id, reading))
        self.unreadable = unreadable
        return readings

    def _note_metrics(self, device_id: int, at_ms: int, reading: Reading) -> None:
        for metric, value in zip(_ASKED_FOR, _values_of(reading), strict=True):
            reason = reading.missing.get(metric)
            place = (device_id, metric)
            if reason is not None:
                if self.gaps.missing(place, at_ms, reason):
                    log.info("device %d does not report %s: %s", device_id, metric, reason)
            elif value is not None:  # None: not requested this time
                self.gaps.good(place, at_ms)


@dataclass(eq=False)
class Gaps:
    """The open gaps: one row for each gap and reason, whose end is updated while it lasts."""

    writer: TelemetryWriter
    started_at_ms: int
    _last_good_ms: dict[_Place, int] = field(default_factory=dict)
    _open: dict[_Place, tuple[int, str]] = field(default_factory=dict)  # row, reason

    def good(self, place: _Place, at_ms: int) -> None:
        """Note a reading: it ends an open gap."""
        if place in self._open:
            row, _ = self._open.pop(place)
            self.writer.extend_gap(row, at_ms)
        self._last_good_ms[place] = at_ms

    def missing(self, place: _Place, at_ms: int, reason: str) -> bool:
        """Note a missing reading; return whether the gap or its reason is new."""
        # A metric that was never read is missing since the start of the recording.
        from_ms = self._last_good_ms.get(place, self.started_at_ms)
        if place in self._open:
            row, reason_before = self._open[place]
            self.writer.extend_gap(row, at_ms)
            if reason == reason_before:
                return False
            from_ms = at_ms
        self._open[place] = (self.writer.open_gap(*place, from_ms, at_ms, reason), reason)
        return True

    def save(self) -> None:
        """Save the current state for ``restore``."""
        self._saved = (dict(self._last_good_ms), dict(self._open))

    def restore(self) -> None:
        """Return to the saved state, because the writer has rolled back."""
        self._last_good_ms, self._open = self._saved


# --- writing: samples, gaps and the rows of the books, one transaction per sample -------------------------------------

_metrics_of = attrgetter(*METRICS)
_SAMPLE = insert_sql("sample", ("task_id", "device_id", "at_ms", *METRICS))


class TelemetryWriter:
    """Writes the readings of one task; a reopened file continues where a dead recorder stopped."""

    def __init__(self, path: Path, task_id: int, *, shared: bool = False) -> None:
        self.task_id = task_id
        self._db = create_live(path, shared=shared)
        self._db.execute("PRAGMA cache_size = -256")  # it adds rows: the usual 2 MB would fill up within the hour

    def last_sample_ms(self) -> int | None:
        """Return the time of the last sample; None in a new file."""
        last_ms: int | None = read_value(self._db, LAST_READING)
        return last_ms

    def batch(self) -> sqlite3.Connection:
        """Hold one transaction open over several calls: ``with writer.batch(): …``."""
        if self._db.in_transaction:  # a commit failed on a full disk and was not rolled back
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN")
        return self._db  # commits on leaving the with block, rolls back on an exception

    def write_tick(self, at_ms: int, readings: Readings, host: HostReading | None) -> None:
        """Write one sample: all devices that were read, and the host."""
        self._db.executemany(
            _SAMPLE, [(self.task_id, device_id, at_ms, *_metrics_of(reading)) for device_id, reading in readings]
        )
        if host is not None:
            self._db.execute(insert_sql("host_sample"), (self.task_id, at_ms, *astuple(host)))

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        """Write a new gap and return its row, whose end is updated while it lasts."""
        cursor = self._db.execute(insert_sql("gap"), (self.task_id, device_id, metric, from_ms, to_ms, reason))
        return int(cursor.lastrowid or 0)

    def extend_gap(self, gap: int, to_ms: int) -> None:
        """Move the end of a gap."""
        self._db.execute("UPDATE gap SET to_ms = ? WHERE rowid = ?", (to_ms, gap))

    # --- rows of the books ----------------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        """Open a savepoint: if it fails, only its own part of the transaction is undone."""
        return transaction(self._db)

    def write_alert(self, values: Mapping[str, object]) -> None:
        """Write an alert, or its new state; device, kind, start and message identify it."""
        changed = self._db.execute(
            """UPDATE alert SET severity = :severity, ended_at_ms = :ended_at_ms, peak = :peak
               WHERE device_id = :device_id AND kind = :kind AND message = :message
                     AND started_at_ms = :started_at_ms""",
            values,
        )
        if changed.rowcount == 0:
            self.put("alert", values)

    def end_open_alerts(self) -> None:
        """End the alerts of a recorder that died; if a problem lasts, it is a new alert."""
        last_ms = f"max(started_at_ms, ({LAST_READING}))"
        with suppress(sqlite3.Error):  # on a full disk they stay open
            self._db.execute(f"UPDATE alert SET ended_at_ms = {last_ms} WHERE ended_at_ms IS NULL")

    def write_process_samples(self, rows: Sequence[tuple[int, int, int, int | None, int | None]]) -> None:
        """Write the processes of one sample: device, time, pid, memory, share of the multiprocessors."""
        self._db.executemany(insert_sql("process_sample"), [(self.task_id, *row) for row in rows])

    def put(self, table: str, values: Mapping[str, object]) -> None:
        """Insert a row, or replace the row with the same key."""
        columns = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        changes = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._db.execute(
            f"INSERT INTO {table} (task_id, {columns}) VALUES (:task_id, {marks}) ON CONFLICT DO UPDATE SET {changes}",
            {"task_id": self.task_id, **values},
        )

    # --- the file -------------------------------------------------------------------------------------------------

    def snapshot(self, target: Path) -> None:
        """Write a sealed copy of all committed rows; may be called by any thread during the recording."""
        take_snapshot(self._db, target)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
