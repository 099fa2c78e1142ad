"""``badcjobs.Recorder``: the recorder around anyone's own code, in a script, a training loop or a notebook."""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from badcjobs.api.arguments import check_interval, check_limits, check_on_alert, check_simulate
from badcjobs.api.here import read_here
from badcjobs.api.session import Session
from badcjobs.api.stats import Stats, read_stats
from badcjobs.errors import DatabaseProblem
from badcjobs.model import AlertLimits, StandIn
from badcjobs.records import Recording
from badcjobs.telemetry.alerts import Alert
from badcjobs.watch import check_target

log = logging.getLogger(__name__)


class Recorder:
    """Record this process's devices, and the machine around them, from a process beside it.

        >>> from badcjobs import Recorder
        >>> with Recorder("run.sqlite", interval_s=1) as recorder:      # doctest: +SKIP
        ...     for epoch in range(10):
        ...         with recorder.mark(f"epoch {epoch}"):
        ...             train()
        >>> recorder.stats()["gpu_stats"]["0"]["utilization"]["mean"]   # doctest: +SKIP

    In a notebook: ``recorder.start()`` in one cell, ``recorder.stop()`` in a later one. The file is a task database, as
    ``badcjobs record`` writes it (or CSV or JSON lines, by its ending): `badcjobs guide tables`. On a machine without
    a GPU the machine alone is recorded, with one warning.

    Parameters
    ----------
    path
        Where to; .sqlite, .db, .csv or .jsonl. A file that is there already is refused.
    simulate
        Pretend that the machine has so many devices.
    on_alert
        Called with an ``Alert`` when one begins and when it ends (``alert.over``), from a thread of its own. What it
        raises is logged, and disturbs neither your work nor the recording.
    limits
        Where alerts begin; default: ``AlertLimits()``. Without work to wait for there are no alerts of idle devices.
    overwrite
        Replace the file that is there; for cells that run again.

    Nothing of the recording raises into your code, except that arguments which cannot be used are refused at once
    (a ``ValueError``), and a path by ``start`` (or ``with``); both are ``badcjobs.errors.BadInput``.
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
        check_simulate(simulate)
        check_on_alert(on_alert)
        self.path = Path(path)
        self._overwrite = overwrite
        self._on_alert = on_alert
        self._how = Recording(check_interval(interval_s), StandIn(simulate), check_limits(limits))
        self._session: Session | None = None

    def start(self) -> Recorder:
        """Begin; returns when the first sample is taken, and does nothing while it is recording already."""
        if self._session is None or self._session.over:
            self._check()
            self._session = self._open()
            atexit.register(self.stop)  # a notebook's kernel that ends without stop(), a script that forgot it
        return self

    def stop(self) -> None:
        """Take the last sample and write the file; does nothing when it is over already."""
        self._close(failed=False)

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """Name a stretch of time: a row in the table ``mark``, from entering the ``with`` block to leaving it."""
        session = self._session
        if session is None:
            log.warning("mark %r is lost: the recorder is not running", name)
        number = None if session is None else session.begin_mark(str(name))
        try:
            yield
        finally:
            if session is not None:
                session.end_mark(number)

    def stats(self) -> Stats:
        """Return the figures so far, while it records and afterwards; None stands for what is not known.

            {"monitoring_duration_seconds": 45.2, "sample_count": 46,
             "gpu_stats": {"0": {"name": "NVIDIA A100", "utilization": {"min": 0, "mean": 87.3, "p50": 91, "p95": 95,
                                 "max": 97, "samples": 46}, "memory_used_mb": {…}, "memory_usage_percent": {…},
                                 "temperature_c": {…}, "power_draw_w": {…}}}}

        Devices are named by their index. Percentiles are by nearest rank; a megabyte is 2**20 bytes, as nvidia-smi's.
        """
        return read_stats(None, [], 0.0) if self._session is None else self._session.stats()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def _check(self) -> None:
        stem = self.path.stem or "recording"
        check_target(
            self.path,
            overwrite=self._overwrite,
            as_sqlite=f'Recorder("{self.path.parent / stem}.sqlite")',
            to_overwrite=f'Recorder("{self.path}", overwrite=True), or choose another name',
        )

    def _open(self) -> Session | None:
        try:
            return Session(self.path, read_here(), self._how, self._on_alert)
        except (OSError, sqlite3.Error, DatabaseProblem) as error:
            log.warning("nothing is recorded: %s", error)  # a full disk, say; the work is worth more
            return None

    def _close(self, *, failed: bool) -> None:
        atexit.unregister(self.stop)
        if self._session is not None:
            self._session.close(failed=failed)
