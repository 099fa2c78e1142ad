"""The recorder's loop: a sample of every device at each point of a fixed grid, and a gap where there is none.

And what the wrapper and its recorder tell each other: the order that starts it, and words over pipes.
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
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.model import METRICS, AlertLimits, HostReading, Reading, StandIn
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable
from badcjobs.store.connect import create_live, rows_by_name, transaction
from badcjobs.store.live_files import LAST_READING, take_snapshot
from badcjobs.store.schema import columns_of, insert_sql

log = logging.getLogger(__name__)

_SLOW_START_S = 1.5
_ASKED_FOR = (*METRICS, "processes")
_values_of = attrgetter(*_ASKED_FOR)

_Place = tuple[int, str | None]  # device, metric (None: all of them)


# What the wrapper and the recorder tell each other over pipes.
# The recorder says
#     ready           the first sample is taken
#     refused WHY     the disk takes no readings
#     alert JSON      an alert has begun or ended
#     trouble TEXT    a line for the task's log
#     cost TEXT       what it has used; then
#     stopped JSON    the last sample is taken, and this is missing. It stays, ready to publish if the wrapper dies.
# The wrapper says
#     work waits      an idle device is worth an alert
#     work none       it is not
#     snapshot FILE   copy what is written so far, since nothing else may open your file
#     stop [FILE]     take a last sample (and a last snapshot)
#     published       everything is published: exit
# A pipe that closes without a word means that the wrapper is dead.
MODULE, AGAIN = "badcjobs.telemetry.recorder_process", "--again"
CLOSED = ""
READY, STOP, STOPPED, PUBLISHED = "ready", "stop", "stopped", "published"
REFUSED, SNAPSHOT = "refused", "snapshot"
ALERT, TROUBLE, COST = "alert", "trouble", "cost"
WORK_WAITS, WORK_NONE = "work waits", "work none"


class LinePipe:
    """One end of the pipes between the wrapper and its recorder: one line per message.

    ``parent``: the process whose end means that the other end is closed, even while a process that it forked holds
    the pipe open.
    """

    def __init__(self, lines_in: int, lines_out: int, *, parent: int | None = None) -> None:
        self._in = lines_in
        self._out = lines_out
        self._parent = parent
        self._unread = b""

    def say(self, line: str, timeout_s: float | None = None) -> None:
        """Write a line, or drop it if the pipe stays full; a closed pipe is noticed when its answers are read."""
        with suppress(OSError, ValueError):
            if select.select([], [self._out], [], timeout_s)[1]:
                os.write(self._out, line.encode() + b"\n")

    def next(self, timeout_s: float) -> str | None:
        """Return the next line; None: it did not come in time; CLOSED: no line will come any more."""
        while b"\n" not in self._unread:
            if not select.select([self._in], [], [], timeout_s)[0]:
                return None if self._parent in (None, os.getppid()) else CLOSED
            part = os.read(self._in, 4096)
            if not part:
                return CLOSED
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")


class Followed(NamedTuple):
    """A device that is recorded; a tuple, so that it travels as a short list in the recorder's order."""

    device_id: int
    uuid: str | None  # None: nothing here can read it
    device_index: int | None = None
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    slowdown_c: float | None = None

    @property
    def label(self) -> str:
        """The device in a sentence."""
        return f"device {self.device_id if self.device_index is None else self.device_index}"


@dataclass(frozen=True, slots=True)
class SidecarOrder:
    """Everything the recorder's process needs to know; travels as JSON."""

    mark: str
    task_id: int
    wrapper_pid: int
    devices: list[Followed]
    interval_s: float
    stand_in: StandIn
    search_path: str | None
    started_at_ms: int
    asked_at_ms: int
    recorder_file: str
    wrapper_file: str
    publish_to: str
    local_folder: str
    shared: bool = False  # the files lie on a shared filesystem: the safe mode
    limits: AlertLimits = field(default_factory=AlertLimits)
    own_marks: list[str] = field(default_factory=list)  # NAME=VALUE in the environment of the task's own processes

    def write(self, path: Path) -> None:
        """Write the order for the recorder's process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> SidecarOrder:
        """Read the order that the wrapper wrote."""
        order = json.loads(path.read_text())
        parts = {
            "devices": [Followed(*device) for device in order["devices"]],
            "stand_in": StandIn(**order["stand_in"]),
            "limits": AlertLimits(**order["limits"]),
        }
        return cls(**{**order, **parts})


@dataclass(slots=True)
class Effort:
    """What the loop knows about its own cost; it adds to this as it goes."""

    ticks: int = 0
    worst_late_s: float = 0.0  # how long after its point on the grid a sample was taken
    reading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unwritten:
    """How much the disk refused, why, and since when it still does (None: it takes readings again)."""

    lost_s: float = 0.0
    reason: str = ""
    since_ms: int | None = None

    @property
    def words(self) -> str | None:
        """The loss in words; None: there is none."""
        if self.lost_s == 0 and self.since_ms is None:
            return None
        return f"{self.lost_s:.1f} s of readings could not be written: {self.reason}"

    def gaps(self, to_ms: int) -> list[tuple[int, int, str]]:
        """Return the gap that is in no file yet, as (from, to, reason)."""
        if self.since_ms is None:
            return []
        return [(self.since_ms, max(to_ms, self.since_ms), f"could not be written: {self.reason}")]


class Book(ABC):
    """Rows that are written beside the samples, in the same transaction: alerts, processes, sources, the cost."""

    @abstractmethod
    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write what is new at one instant."""

    def finish(self) -> None:  # noqa: B027
        """Write what is left, in the last transaction; most books have nothing to add."""

    def written(self) -> None:  # noqa: B027
        """Take note that the disk has taken the instant; most books write a refused row anew by themselves."""


@dataclass(slots=True)
class Recorder:
    """Samples on the grid start, start + interval, start + 2 × interval, … whatever a tick costs.

    A sample is worth more than what the books add: a book that fails is reported once, and tried again at the next
    instant.
    """

    sampler: Sampler
    read_host: Callable[[], HostReading | None]
    writer: TelemetryWriter
    clock: Clock
    interval_s: float
    since_ms: int | None = None  # when recording was asked for
    again: bool = False  # whether a recorder before us has died
    refused: Callable[[str], None] = lambda reason: None  # called once per stretch in which the disk refuses
    books: Sequence[Book] = ()
    trouble: Callable[[str], None] = lambda text: None
    effort: Effort = field(default_factory=Effort)
    _last_ms: int | None = None
    _unwritten: tuple[int, str] | None = None  # since when, and why
    _lost_ms: int = 0
    _lost_why: str = ""
    _failed_books: set[str] = field(default_factory=set)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Record until ``wait(seconds)`` says that it is over; take one last sample then."""
        start_s = self.clock.monotonic_s()
        number = expected = 0  # points of the grid: the one to be read now, the one that follows the last one read
        over = False
        while not over:
            now_s = self.clock.monotonic_s()
            late_s = now_s - start_s - expected * self.interval_s
            self.effort.worst_late_s = max(self.effort.worst_late_s, late_s)
            expected = max(number, int((now_s - start_s) / self.interval_s)) + 1
            self.tick()
            number = max(expected, int((self.clock.monotonic_s() - start_s) / self.interval_s) + 1)
            over = wait(start_s + number * self.interval_s - self.clock.monotonic_s())
        self.sampler.reader.force_full_read()  # the last instant leaves nothing out
        self.tick(last=True)

    def tick(self, *, last: bool = False) -> None:
        """Write one instant; a disk that refuses costs this instant, not the recorder."""
        at_ms = self.clock.now_ms()
        if self._last_ms is not None:
            at_ms = max(at_ms, self._last_ms + 1)  # the last sample may follow a tick at once; no two share an instant
        self.sampler.gaps.save()
        hole = self._hole_before(at_ms)
        try:
            with self.writer.batch():
                if hole is not None:
                    self.writer.open_gap(None, None, hole[0], at_ms, hole[1])
                self._write(at_ms, last)
        except sqlite3.Error as error:
            self.sampler.gaps.restore()  # rolled back with the rest
            if self._unwritten is None:
                log.warning("readings cannot be written: %s", error)
                self._unwritten = (hole[0] if hole else self._last_ms or at_ms, str(error))
                self._lost_why = str(error)
                self.refused(str(error))
            return
        if self._unwritten is not None:
            self._lost_ms += at_ms - self._unwritten[0]
            self._unwritten = None
        self._last_ms = at_ms
        for book in self.books:
            book.written()

    @property
    def unwritten(self) -> Unwritten:
        """What the disk has refused so far."""
        since_ms = None if self._unwritten is None else self._unwritten[0]
        lost_ms = self._lost_ms + (0 if since_ms is None else max(0, self.clock.now_ms() - since_ms))
        return Unwritten(lost_ms / 1000, self._lost_why, since_ms)

    def _write(self, at_ms: int, last: bool) -> None:
        begun_s = self.clock.monotonic_s()
        readings = self.sampler.sample(at_ms)
        self.effort.reading_s += self.clock.monotonic_s() - begun_s
        self.effort.ticks += 1
        self.writer.write_tick(at_ms, readings, self.read_host())
        for book in self.books:
            try:
                with self.writer.aside():
                    book.write(at_ms, readings, self.sampler.unreadable)
                    if last:
                        book.finish()
            except sqlite3.OperationalError:
                raise  # the disk: the whole instant is refused, and will be a gap
            except Exception as error:  # broad: whatever goes wrong in here, the samples are worth more
                name = type(book).__name__
                if name not in self._failed_books:
                    self._failed_books.add(name)
                    log.exception("%s cannot write", name)
                    self.trouble(f"the recorder's {name} has failed and may be incomplete: {error!r}")

    def _hole_before(self, at_ms: int) -> tuple[int, str] | None:
        """Return since when, and why, there was no reading before this one; None: it follows the last as it should."""
        if self._unwritten is not None:
            return self._unwritten[0], f"could not be written: {self._unwritten[1]}"
        if self._last_ms is None:
            last_ms, since_ms = self.writer.last_sample_ms(), self.since_ms
            if self.again or last_ms is not None:
                return last_ms or since_ms or at_ms, "the recorder died and was started again"
            # The moment that any program takes to start is no hole.
            if since_ms is not None and at_ms - since_ms > 1000 * max(_SLOW_START_S, 1.5 * self.interval_s):
                return since_ms, "the recorder was slow to start"
            return None
        if at_ms - self._last_ms <= 1500 * self.interval_s:  # half an interval late is still on the grid
            return None
        missed = round((at_ms - self._last_ms) / 1000 / self.interval_s) - 1
        log.warning("the recorder was late and missed %d readings", missed)
        return self._last_ms, f"the recorder was late: {missed} readings missed"


class Sampler:
    """Reads devices by UUID; what gives no reading becomes a gap."""

    def __init__(self, reader: GpuReader, devices: Sequence[Followed], gaps: Gaps) -> None:
        self.reader = reader
        self._devices = devices
        self.gaps = gaps
        self.unreadable: Mapping[int, str] = {}  # the devices that gave no reading at the last instant, and why
        self._no_uuid = "no driver library to read it with"  # of devices in a container without it, say
        if any(device.uuid is None for device in devices):
            try:
                reader.inventory()
            except ReaderUnavailable as error:
                self._no_uuid += f": {error}"

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]:
        """Read all devices; what cannot be read becomes a gap, never an exception and never a zero."""
        readings, unreadable = [], {}
        for device in self._devices:
            device_id = device.device_id
            try:
                if device.uuid is None:
                    raise DeviceUnreadable(self._no_uuid)
                reading = self.reader.read(device.uuid)
            except DeviceUnreadable as error:
                unreadable[device_id] = str(error)
                if self.gaps.missing(device_id, None, at_ms, str(error)):
                    log.warning("%s (%s) cannot be read: %s", device.label, device.uuid, error)
                continue
            self.gaps.good(device_id, None, at_ms)
            for metric, value in zip(_ASKED_FOR, _values_of(reading), strict=True):
                if metric in reading.missing:
                    if self.gaps.missing(device_id, metric, at_ms, reading.missing[metric]):
                        log.info("device %d does not give %s: %s", device_id, metric, reading.missing[metric])
                elif value is not None:  # None: not asked this time
                    self.gaps.good(device_id, metric, at_ms)
            readings.append((device_id, reading))
        self.unreadable = unreadable
        return readings


class Gaps:
    """The gaps that are open now: one row per stretch and reason, stretched while it lasts."""

    def __init__(self, writer: TelemetryWriter, started_at_ms: int) -> None:
        self._writer = writer
        self._started_at_ms = started_at_ms
        self._last_good_ms: dict[_Place, int] = {}
        self._open: dict[_Place, tuple[int, str]] = {}  # row, reason
        self.save()

    def good(self, device_id: int, metric: str | None, at_ms: int) -> None:
        """Take note of a reading: an open gap ends with it."""
        place = (device_id, metric)
        if place in self._open:
            self._writer.stretch_gap(self._open.pop(place)[0], at_ms)
        self._last_good_ms[place] = at_ms

    def missing(self, device_id: int, metric: str | None, at_ms: int, reason: str) -> bool:
        """Take note that nothing was read; return whether this is news."""
        place = (device_id, metric)
        # A metric that never came is missing since its device was first read.
        from_ms = self._last_good_ms.get(place, self._started_at_ms)
        if place in self._open:
            row, known_reason = self._open[place]
            self._writer.stretch_gap(row, at_ms)
            if known_reason == reason:
                return False
            from_ms = at_ms
        self._open[place] = (self._writer.open_gap(device_id, metric, from_ms, at_ms, reason), reason)
        return True

    def save(self) -> None:
        """Keep the state of this moment, for ``restore``."""
        self._saved = (dict(self._last_good_ms), dict(self._open))

    def restore(self) -> None:
        """Go back to the saved state: the writer has rolled back what came after it."""
        self._last_good_ms, self._open = self._saved


# --- writing: samples, gaps and what is noted beside them, one transaction per tick -----------------------------------

_metrics_of = attrgetter(*METRICS)
_SAMPLE = f"""INSERT INTO sample (task_id, device_id, at_ms, {", ".join(METRICS)})
              VALUES (?, ?, ?{", ?" * len(METRICS)})"""


class TelemetryWriter:
    """Writes one task's readings; reopening the file goes on where a dead recorder stopped."""

    def __init__(self, path: Path, task_id: int, *, shared: bool = False) -> None:
        self.task_id = task_id
        self._db = create_live(path, shared=shared)

    def last_sample_ms(self) -> int | None:
        """Return the time of the newest sample; None in a new file."""
        last_ms: int | None = self._db.execute(LAST_READING).fetchone()[0]
        return last_ms

    def batch(self) -> sqlite3.Connection:
        """Hold one transaction open over several calls: ``with writer.batch(): …``."""
        if self._db.in_transaction:  # a commit that a full disk refused, and that was not undone
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN")
        return self._db  # commits on leaving the with block, rolls back on an exception

    def write_tick(self, at_ms: int, readings: Sequence[tuple[int, Reading]], host: HostReading | None) -> None:
        """Write one instant: every device that answered, and the machine around them."""
        self._db.executemany(
            _SAMPLE,
            [(self.task_id, device_id, at_ms, *_metrics_of(reading)) for device_id, reading in readings],
        )
        if host is not None:
            self._db.execute(
                insert_sql("host_sample"),
                (self.task_id, at_ms, host.cpu_percent, host.memory_used_bytes, host.memory_total_bytes),
            )

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        """Write the beginning of a gap and return its row, to be stretched while it lasts."""
        cursor = self._db.execute(insert_sql("gap"), (self.task_id, device_id, metric, from_ms, to_ms, reason))
        return int(cursor.lastrowid or 0)

    def stretch_gap(self, gap: int, to_ms: int) -> None:
        """Move the end of a gap."""
        self._db.execute("UPDATE gap SET to_ms = ? WHERE rowid = ?", (to_ms, gap))

    # --- notes beside the samples ---------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        """Hold a part of the open transaction that is undone alone if it fails."""
        return transaction(self._db)

    def write_alert(self, values: Mapping[str, object]) -> None:
        """Write an alert, or its new state: device, kind, begin and message tell which one it is."""
        changed = self._db.execute(
            """UPDATE alert SET severity = :severity, ended_at_ms = :ended_at_ms, peak = :peak
               WHERE device_id = :device_id AND kind = :kind AND message = :message
                     AND started_at_ms = :started_at_ms""",
            values,
        )
        if changed.rowcount == 0:
            self.put("alert", values)

    def rows_of(self, table: str, which: str) -> list[dict[str, Any]]:
        """Return rows that an earlier recorder has left, without their task."""
        names = ", ".join(name for name in columns_of(table) if name != "task_id")
        return rows_by_name(self._db, f"SELECT {names} FROM {table} {which}")

    def write_process_samples(self, rows: Sequence[tuple[int, int, int, int | None, int | None]]) -> None:
        """Write processes of one instant: device, time, pid, memory, share of the multiprocessors."""
        self._db.executemany(insert_sql("process_sample"), [(self.task_id, *row) for row in rows])

    def put(self, table: str, values: Mapping[str, object]) -> None:
        """Write a row, in place of the one with the same key; the process on a device, the source of a metric, …."""
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        news = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._db.execute(
            f"INSERT INTO {table} (task_id, {columns}) VALUES (:task_id, {marks}) ON CONFLICT DO UPDATE SET {news}",
            {"task_id": self.task_id, **values},
        )

    # --- the file -------------------------------------------------------------------------------------------------

    def snapshot(self, target: Path) -> None:
        """Write a sealed copy of all that was committed; for any thread, while the ticks go on."""
        take_snapshot(self._db, target)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
