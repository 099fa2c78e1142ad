"""``badcjobs.list_devices`` and ``badcjobs.open_job``: devices and merged jobs, for people who go on in Python."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from badcjobs.clock import SystemClock
from badcjobs.devices.listing import DeviceNow, list_granted
from badcjobs.errors import BadInput
from badcjobs.model import StandIn
from badcjobs.report.job import find_job_database, summarize_database
from badcjobs.store.connect import open_job_database, with_tool

if TYPE_CHECKING:
    from sqlite_utils import Database


class BadArgument(BadInput, ValueError):
    """An argument that cannot be used; also a ``ValueError``, as Python programs expect."""


def list_devices(all: bool = False, simulate: int | None = None) -> list[DeviceNow]:
    """Return the devices that this process may use, each with its state now.

    The same devices as ``badcjobs gpus``: inside a job those that Slurm granted, outside all of them, and always only
    what ``CUDA_VISIBLE_DEVICES`` shows. An empty list where there is none; what is not known of one is None.

        >>> from badcjobs import list_devices
        >>> for device in list_devices(simulate=2):
        ...     print(device.index, device.name, device.memory_total_bytes)
        0 Simulated GPU 17179869184
        1 Simulated GPU 17179869184

    Parameters
    ----------
    all
        Every card of the machine, granted or not (``device.granted`` tells).
    simulate
        Pretend that the machine has so many devices; a number below 1 is a ``ValueError``.
    """
    check_simulate(simulate)
    found = list_granted(dict(os.environ), SystemClock(), stand_in=StandIn(simulate), everything=all)
    return list(found.devices)


def check_simulate(simulate: object) -> None:
    """Refuse what is no number of devices."""
    if simulate is not None and (type(simulate) is not int or simulate < 1):
        raise BadArgument(
            f"simulate={simulate!r} cannot be used", why="it must be a whole number from 1 on, or None: the real ones"
        )


def open_job(path: str | os.PathLike[str]) -> Job:
    """Return a merged job: ``path`` is its job.sqlite, or the run folder that holds it.

        >>> from badcjobs import open_job
        >>> job = open_job("runs/july")                                               # doctest: +SKIP
        >>> job.summary()["audio_hours_per_gpu_hour"]                                 # doctest: +SKIP
        >>> job.query("select label, count(*) as many from detection group by 1")     # doctest: +SKIP

    Raises ``badcjobs.errors.DatabaseProblem`` when there is no such place, or it is not merged yet.
    """
    return Job(find_job_database(Path(path)))


class Job:
    """A job database; nothing here changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Job({str(self.path)!r})"

    def summary(self) -> dict[str, Any]:
        """Return what ``badcjobs report --json`` prints; raises DatabaseProblem when the file cannot be read."""
        return summarize_database(self.path, now_ms=SystemClock().now_ms()).to_dict()

    @cached_property
    def db(self) -> Database:
        """The database as sqlite-utils gives it: ``job.db["chunk"].rows_where("status = ?", ["failed"])``."""
        return with_tool(open_job_database(self.path))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its tables and views; `badcjobs guide tables` explains them."""
        found = self.query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
        return tuple(str(row["name"]) for row in found)

    def query(self, sql: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows of a query, each as a dictionary; raises BadInput when SQLite does not understand it."""
        try:
            with closing(open_job_database(self.path)) as db:
                cursor = db.execute(sql, values)
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor]
        except sqlite3.Error as error:
            raise BadInput(f"{self.path.name}: {sql}", why=str(error), fix="badcjobs guide tables") from error
