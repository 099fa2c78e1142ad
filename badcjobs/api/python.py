"""The Python API: ``list_devices``, ``pick_devices``, ``open_job``, and ``Recorder`` for your own code."""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from badcjobs.clock import SystemClock
from badcjobs.devices.free import (
    DeviceLocks,
    DeviceRequest,
    NotFree,
    Waiting,
    describe_holder,
    list_free,
    lock_folder,
)
from badcjobs.devices.listing import DeviceNow, list_granted
from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import AlertLimits, Device, StandIn
from badcjobs.report.document import document_of
from badcjobs.report.job import find_job_database, summarize_database
from badcjobs.settings import Setting, check_values, convert, find_problem
from badcjobs.store.connect import as_sqlite_utils, open_sealed, read_only_uri, rows_by_name
from badcjobs.store.figures import distribution
from badcjobs.store.publish import TEXT_FORMS
from badcjobs.store.task_writer import TaskWriter
from badcjobs.task.records import RecordingOptions, check_target, start_recording
from badcjobs.task.startup import StopRequest, World
from badcjobs.telemetry.alert_command import AlertCalls
from badcjobs.telemetry.alerts import Alert

if TYPE_CHECKING:
    from sqlite_utils import Database

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_MIB = 2**20


class BadArgument(BadInput, ValueError):
    """An invalid argument; also a ``ValueError``, as Python programs expect."""


def list_devices(all: bool = False, simulate: int | None = None) -> list[DeviceNow]:
    """Return the devices that this process may use, each with its current state.

    These are the devices of ``badcjobs gpus``: in a job those that Slurm granted, outside a job all devices; always
    limited by ``CUDA_VISIBLE_DEVICES``. The list is empty without a GPU. Unknown values are None.

        >>> from badcjobs import list_devices
        >>> for device in list_devices(simulate=2):
        ...     print(device.index, device.name, device.memory_total_bytes)
        0 Simulated GPU 17179869184
        1 Simulated GPU 17179869184

    Parameters
    ----------
    all
        Every GPU of the machine, granted or not (see ``device.granted``).
    simulate
        Simulate this many devices; a number below 1 is a ``ValueError``.
    """
    return list(list_granted(dict(os.environ), SystemClock(), _simulated(simulate), everything=all).devices)


class PickedDevices(list[DeviceNow]):
    """Devices locked for this process, until ``release`` or the end of the process; ``with`` releases them too."""

    def __init__(self, devices: Sequence[DeviceNow], locks: DeviceLocks) -> None:
        super().__init__(devices)
        self.release = locks.release

    def __enter__(self) -> PickedDevices:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def pick_devices(
    count: int = 1,
    *,
    min_memory_mib: int | None = None,
    max_utilization: float | None = None,
    wait_s: float = 0.0,
    check_every_s: float = 2.0,
    simulate: int | None = None,
) -> PickedDevices:
    """Return the ``count`` devices that ``badcjobs gpus --free`` picks, best first, locked for this process.

    No other ``pick_devices`` and no ``badcjobs run --max-gpus`` takes them until this process ends, or ``release()``.

        >>> from badcjobs import pick_devices
        >>> with pick_devices(2, min_memory_mib=8000, simulate=4) as devices:         # doctest: +SKIP
        ...     os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.pin for device in devices)

    Parameters
    ----------
    min_memory_mib, max_utilization
        The free memory and the utilization in percent that each device must have.
    wait_s, check_every_s
        How long to wait until enough devices are free, and how often to look.
    simulate
        Simulate this many devices.

    Raises ``badcjobs.errors.NotHere`` with the reason for each device if too few are free when the time is over.
    """
    stand_in = _simulated(simulate)
    _check_number("count", count, least=1, whole=True)
    _check_number("min_memory_mib", min_memory_mib, least=1, whole=True, optional=True)
    _check_number("max_utilization", max_utilization, least=0, most=100, optional=True)
    _check_number("wait_s", wait_s, least=0)
    _check_number("check_every_s", check_every_s, least=0.01)
    return _pick(DeviceRequest(count, min_memory_mib, max_utilization, wait_s, check_every_s), stand_in)


def _pick(request: DeviceRequest, stand_in: StandIn) -> PickedDevices:
    environ = dict(os.environ)
    clock = SystemClock()
    locks = DeviceLocks(lock_folder(environ), clock, describe_holder(os.getpid(), Path.cwd()))
    try:
        listing = list_free(environ, stand_in, request, locks, Waiting(clock, log.info))
    except NotFree as error:
        error.fix = "fewer devices, weaker limits, or wait_s=600; badcjobs.list_devices() shows what is here"
        raise
    return PickedDevices(listing.devices, locks)


def _check_number(
    name: str,
    value: object,
    *,
    least: float,
    most: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    if value is None and optional:
        return
    setting = Setting("count" if whole else "number", "", least=least, most=most)
    problem = find_problem(setting, convert(setting, value))
    if problem is not None:
        raise BadArgument(f"{name}={value!r} is not valid", why=f"it {problem}")


def _simulated(simulate: int | None) -> StandIn:
    _check_number("simulate", simulate, least=1, whole=True, optional=True)
    return StandIn(simulate)


def open_job(path: str | os.PathLike[str]) -> Job:
    """Return a merged job: ``path`` is its job.sqlite, or the run folder that holds it.

        >>> from badcjobs import open_job
        >>> job = open_job("runs/july")                                               # doctest: +SKIP
        >>> job.summary()["audio_hours_per_gpu_hour"]                                 # doctest: +SKIP
        >>> job.query("select label, count(*) as many from detection group by 1")     # doctest: +SKIP

    Raises ``badcjobs.errors.DatabaseProblem`` if the path does not exist or the job is not merged yet.
    """
    return Job(find_job_database(Path(path)))


class Job:
    """A job database, opened read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Job({str(self.path)!r})"

    def summary(self) -> dict[str, Any]:
        """Return what ``badcjobs report --json`` prints; raises DatabaseProblem if the file cannot be read."""
        return document_of(summarize_database(self.path, now_ms=SystemClock().now_ms()))

    @cached_property
    def db(self) -> Database:
        """The sqlite-utils database: ``job.db["chunk"].rows_where("status = ?", ["failed"])``."""
        return as_sqlite_utils(open_sealed(self.path))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables and views; `badcjobs guide tables` explains them."""
        rows = self.query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
        return tuple(str(row["name"]) for row in rows)

    def query(self, sql: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows of a query as dictionaries; raises BadInput if SQLite rejects the query."""
        try:
            with closing(open_sealed(self.path)) as db:
                return list(rows_by_name(db, sql, values))
        except sqlite3.Error as error:
            raise BadInput(f"{self.path.name}: {sql}", why=str(error), fix="badcjobs guide tables") from error


# --- the recorder -----------------------------------------------------------------------------------------------------


class Recorder:
    """Record the devices of this process, and its machine, in a separate process.

        >>> from badcjobs import Recorder
        >>> with Recorder("run.sqlite", interval_s=1) as recorder:      # doctest: +SKIP
        ...     for epoch in range(10):
        ...         with recorder.mark(f"epoch {epoch}"):
        ...             train()
        >>> recorder.stats()["gpu_stats"]["0"]["utilization"]["mean"]   # doctest: +SKIP

    In a notebook: ``recorder.start()`` in one cell, ``recorder.stop()`` in a later one. The file is a task database, as
    written by ``badcjobs record`` (see `badcjobs guide tables`), or CSV or JSON lines, depending on its suffix. Without
    a GPU, only the machine is recorded, with one warning.

    Parameters
    ----------
    path
        The file to write: .sqlite, .db, .csv or .jsonl. It must not exist yet.
    simulate
        Simulate this many devices.
    on_alert
        Called with an ``Alert`` when it starts and when it ends (``alert.over``), in a separate thread. Its exceptions
        are logged and affect neither your code nor the recording.
    limits
        The thresholds of alerts; default: ``AlertLimits()``. There are no alerts about idle devices.
    overwrite
        Replace an existing file; useful for notebook cells that run again.

    The recording never raises an exception into your code. Only invalid arguments are refused immediately (a
    ``ValueError``), and an unusable path by ``start`` (or ``with``); both are ``badcjobs.errors.BadInput``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        interval_s: float = 1.0,
        *,
        simulate: int | None = None,
        on_alert: Callable[[Alert], object] | None = None,
        limits: AlertLimits | None = None,
        overwrite: bool = False,
    ) -> None:
        if on_alert is not None and not callable(on_alert):
            raise BadArgument(f"on_alert={on_alert!r} is not valid", why="it must be a function of one argument")
        self.path = Path(path)
        self._overwrite = overwrite
        self._on_alert = on_alert
        _check_number("interval_s", interval_s, least=0.01, most=86_400)
        limits = limits or AlertLimits()
        if not isinstance(limits, AlertLimits):
            raise BadArgument(f"limits={limits!r} is not valid", fix="limits=AlertLimits(temperature_c=80)")
        mistakes: list[str] = []
        defaults = asdict(AlertLimits())
        changed = {key: value for key, value in asdict(limits).items() if value != defaults[key]}
        check_values("alerts", changed, str, mistakes)
        if mistakes:
            raise BadArgument("the limits are not valid", why="\n".join(mistakes), fix="badcjobs guide telemetry")
        self._options = RecordingOptions(float(interval_s), _simulated(simulate), limits)
        self._session: RecordingSession | None = None

    def start(self) -> Recorder:
        """Start recording; returns after the first sample. Does nothing while it is recording already."""
        if self._session is not None and not self._session.over:
            return self
        check_target(self.path, overwrite=self._overwrite)
        try:
            self._session = RecordingSession(self.path, self._options, self._on_alert)
        except (OSError, sqlite3.Error, DatabaseProblem) as error:
            log.warning("nothing is recorded: %s", error)  # for example a full disk; the user's code matters more
            self._session = None
        atexit.register(self.stop)  # if stop() is never called
        return self

    def stop(self) -> None:
        """Take the last sample and write the file; does nothing if it has stopped already."""
        self.__exit__(None, None, None)

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Name a period: the ``with`` block becomes a row in the table ``mark``."""
        session = self._session
        if session is None:
            log.warning("mark %r is not recorded: the recorder is not running", name)
            yield
            return
        mark = session.write_mark(lambda writer, now_ms: writer.begin_mark(str(name), now_ms))
        try:
            yield
        finally:
            if mark is not None:
                session.write_mark(lambda writer, now_ms: writer.end_mark(mark, now_ms))

    def stats(self) -> Stats:
        """Return the statistics so far, during and after the recording; unknown values are None.

            {"monitoring_duration_seconds": 45.2, "sample_count": 46,
             "gpu_stats": {"0": {"name": "NVIDIA A100", "utilization": {"min": 0, "mean": 87.3, "p50": 91, "p95": 95,
                                 "max": 97, "samples": 46}, "memory_used_mb": {…}, "memory_usage_percent": {…},
                                 "temperature_c": {…}, "power_draw_w": {…}}}}

        Devices are identified by their index; ``sample_count`` counts points in time, not devices × points in time.
        Percentiles use the nearest rank; a megabyte is 2**20 bytes, as in nvidia-smi.
        """
        if self._session is None:
            return read_stats(None, [], 0.0)
        return self._session.stats()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        atexit.unregister(self.stop)
        if self._session is not None:
            self._session.close(failed=error is not None)


# --- one recording ----------------------------------------------------------------------------------------------------


class RecordingSession:
    """One recording, from the first sample to the published file; forked child processes do not write to it."""

    def __init__(
        self,
        path: Path,
        options: RecordingOptions,
        on_alert: Callable[[Alert], object] | None,
    ) -> None:
        clock = SystemClock()
        world = World.here(dict(os.environ), clock, StopRequest(clock.monotonic_s))  # the program handles its signals
        self._path = path.absolute()
        self._clock = clock
        self._pid = os.getpid()
        self._ended_at_ms: int | None = None
        self._last_stats: Stats | None = None
        self._lock = threading.Lock()  # marks may be written by any thread
        self._over = threading.Event()
        self._calls = on_alert and AlertCalls(on_alert)
        if self._calls is not None:
            options = replace(options, on_alert=self._calls.add)
        self._records, devices = start_recording(self._path, world, options)
        self._devices = [(self._records.writer.device_id(device), device) for device in devices]
        self._thread = threading.Thread(target=self._look_after, name="badcjobs recorder", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to write; always true in a forked child process."""
        return self._ended_at_ms is not None or os.getpid() != self._pid

    def write_mark(self, write: Callable[[TaskWriter, int], int | None]) -> int | None:
        """Write the start or the end of a mark; None: it could not be written, or this is a forked child process."""
        with self._lock:
            if self.over:
                return None
            try:
                return write(self._records.writer, self._clock.now_ms())
            except sqlite3.Error as error:
                log.warning("a mark cannot be written: %s", error)
                return None

    def stats(self) -> Stats:
        """Return the statistics so far."""
        if self._last_stats is not None:
            return self._last_stats
        ended_at_ms = self._ended_at_ms or self._clock.now_ms()
        if self._ended_at_ms is not None and self._path.exists():
            uri: str | None = read_only_uri(self._path)
        else:
            uri = self._records.readings_at_hand()
        return read_stats(uri, self._devices, (ended_at_ms - self._records.started_at_ms) / 1000)

    def close(self, *, failed: bool) -> None:
        """Take the last sample and publish the file; problems are logged as warnings."""
        if self.over:
            return
        self._over.set()
        self._thread.join()
        if self._path.suffix in TEXT_FORMS:
            self._last_stats = self.stats()  # a text file cannot be queried afterwards
        with self._lock:
            published = self._records.close(exit_code=int(failed), verdict="failed" if failed else "done")
            self._ended_at_ms = self._records.ended_at_ms
            self._records.writer.close()
        if self._calls is not None:
            self._calls.finish()
        if self._records.telemetry_failure is not None:
            log.warning("the recording is incomplete: %s", self._records.telemetry_failure)
        if not published:
            log.warning("%s could not be written; the recorded files are in %s", self._path, self._records.local.path)

    def _look_after(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._records.check_recorder()


# --- figures ----------------------------------------------------------------------------------------------------------


Stats = dict[str, Any]  # see ``Recorder.stats``


def read_stats(
    uri: str | None,
    devices: Sequence[tuple[int, Device]],
    duration_s: float,
) -> Stats:
    """Return the statistics of a recorder's file or a task database; all values are None if it cannot be read."""
    stats: Stats = {}
    for device_id, device in devices:
        name = device.token if device.index is None else str(device.index)
        if name in stats:  # MIG slices of one GPU share its index
            name = device.pin
        stats[name] = _device_stats(uri, device_id, device)
    instants = _rows(uri, "SELECT count(*) FROM (SELECT at_ms FROM host_sample UNION SELECT at_ms FROM sample)")
    count = instants[0][0] if instants else 0
    return {"monitoring_duration_seconds": duration_s, "sample_count": count, "gpu_stats": stats}


def _device_stats(uri: str | None, device_id: int, device: Device) -> Stats:
    used_bytes = _counts(uri, device_id, "memory_used_bytes")
    total_bytes = device.memory_total_bytes
    used_percent = {}
    if total_bytes:
        used_percent = {100 * used / total_bytes: count for used, count in used_bytes.items()}
    return {
        "name": device.name,
        "utilization": _figures(_counts(uri, device_id, "utilization_percent")),
        "memory_used_mb": _figures({used / _MIB: count for used, count in used_bytes.items()}),
        "memory_usage_percent": _figures(used_percent),
        "temperature_c": _figures(_counts(uri, device_id, "temperature_c")),
        "power_draw_w": _figures(_counts(uri, device_id, "power_w")),
    }


def _counts(uri: str | None, device_id: int, metric: str) -> dict[float, int]:
    sql = f"SELECT {metric}, count(*) FROM sample WHERE device_id = ? AND {metric} IS NOT NULL GROUP BY 1"
    return dict(_rows(uri, sql, device_id))


def _rows(uri: str | None, sql: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        with closing(sqlite3.connect(uri or ":memory:", uri=True)) as db:
            return db.execute(sql, values).fetchall()
    except sqlite3.Error:
        return []  # no samples yet, or the file cannot be read


_FIGURES = ("samples", "min", "mean", "p50", "p95", "max")


def _figures(counts: Mapping[float, int]) -> dict[str, float | None]:
    if not counts:
        return {**dict.fromkeys(_FIGURES), "samples": 0}
    return dict(zip(_FIGURES, distribution(counts), strict=True))
