"""Which processes are on a device, whose they are, and that each is looked up once."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import ProcessReading, Reading
from rooms.telemetry import ProcessBook, ProcessLookup, ProcessOwner, TelemetryWriter
from support.databases import query

START_MS = 1_800_000_000_000
MARK = "BADCJOBS_TASK=4821_7.r0.gpu3-99"
OTHER_MARK = "BADCJOBS_RECORDING=4821_7.r0.gpu3-99"


# --- who a process is -------------------------------------------------------------------------------------------------


def lookup(wrapper_pid: int = 2**22 + 1, **more: Path) -> ProcessLookup:
    return ProcessLookup(wrapper_pid=wrapper_pid, marks=[OTHER_MARK, MARK], **more)


HOST, CONTAINER = 4026531836, 4026532811
ME, OTHER = os.getuid(), os.getuid() + 1
# Namespace, user of process 42, its environment (None: closed to us), the wrapper → whether it is ours
OWNERS = [
    (HOST, OTHER, f"A=1\0{MARK}\0".encode(), 9, True), (HOST, OTHER, f"{OTHER_MARK}\0A=1".encode(), 9, True),
    (HOST, OTHER, f"{MARK}9\0".encode(), 9, False), (HOST, OTHER, b"A=1\0", 7, True),
    (HOST, OTHER, b"PATH=/bin\0", 9, False), (HOST, ME, b"PATH=/bin\0", 9, False), (None, ME, b"PATH=/bin\0", 9, False),
    (CONTAINER, ME, b"PATH=/bin\0", 9, None), (CONTAINER, ME, f"PATH=/bin\0{MARK}\0".encode(), 9, True),
    (HOST, ME, None, 9, None), (HOST, OTHER, None, 9, False), (HOST, ME, b"", 9, None), (HOST, OTHER, b"", 9, False),
    (HOST, OTHER, None, 42, True), (HOST, OTHER, b"", 7, True),
]  # fmt: skip


def test_a_process_is_accused_only_if_it_is_surely_not_ours(tmp_path: Path) -> None:
    """In a container a number may mean another process; an environment that does not say may be our own."""
    for number, (namespace, uid, environ, wrapper, ours) in enumerate(OWNERS):
        proc = tmp_path / str(number)
        for pid, parent in ((42, 7), (7, 1)):
            (proc / str(pid)).mkdir(parents=True)
            (proc / f"{pid}/status").write_text(f"Name:\tpython\nPPid:\t{parent}\nUid:\t{uid}\t5\t5\t5\n")
        (proc / "42/environ").mkdir() if environ is None else (proc / "42/environ").write_bytes(environ)
        (proc / "self/ns").mkdir(parents=True)
        if namespace is not None:
            (proc / "self/ns/pid").symlink_to(f"pid:[{namespace}]")
        who = lookup(wrapper, proc=proc).look_up(42)
        assert who.ours is ours, OWNERS[number]
        is_hidden = namespace == CONTAINER and not ours
        assert (who.name, who.user is None) == (None if is_hidden else "python", is_hidden)
    me = lookup(os.getppid()).look_up(os.getpid())
    assert me == ProcessOwner(Path("/proc/self/comm").read_text().strip(), getpass.getuser(), True)
    assert lookup().look_up(2**22 + 1) == ProcessOwner(None, None, None), "it does not exist here"


# --- what is written about it -----------------------------------------------------------------------------------------


class Bench:
    """A process book over a real file, with a list of who is asked for."""

    def __init__(self, path: Path, people: Mapping[int, ProcessOwner]) -> None:
        self.path = path
        self.writer = TelemetryWriter(path, 77)
        self.asked: list[int] = []
        self._people = people
        self.book = ProcessBook(self.writer, self._look_up)

    def _look_up(self, pid: int) -> ProcessOwner:
        self.asked.append(pid)
        return self._people.get(pid, ProcessOwner())

    def feed(self, second: float, **devices: tuple[ProcessReading, ...] | None) -> None:
        readings = [(int(name[1:]), Reading(processes=processes)) for name, processes in devices.items()]
        with self.writer.batch():
            self.book.write(START_MS + round(1000 * second), readings, {})
        self.book.written()

    @property
    def rows(self) -> list[tuple[object, ...]]:
        """Return (device, pid, name, user, ours, first, last, peak in MiB)."""
        sql = """SELECT device_id, pid, name, user, ours, (first_at_ms - ?1) / 1000.0, (last_at_ms - ?1) / 1000.0,
                        memory_peak_bytes / 1048576 FROM process ORDER BY first_at_ms, device_id, pid"""
        return query(self.path, sql, START_MS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    people = {10: ProcessOwner("python", "ada", True), 20: ProcessOwner("train", "bob", False)}
    bench = Bench(tmp_path / "r.sqlite", people)
    with closing(bench.writer):
        yield bench


def on(pid: int, mib: int | None = None, sm: int | None = None) -> ProcessReading:
    return ProcessReading(pid, None if mib is None else mib * 2**20, sm)


def test_every_process_has_one_row_per_device_and_one_sample_per_reading_and_a_second_recorder_goes_on(
    bench: Bench,
) -> None:
    bench.feed(0, d1=(on(10, 100, 40),), d2=(on(20, 50),))
    bench.feed(1, d1=None)
    bench.feed(5, d1=(on(10, 900, 50), on(20, 1), on(30)), d2=())
    bench.feed(10, d1=(on(10, 300),), d2=())
    assert bench.asked == [10, 20, 30], "each is looked up once"
    second = Bench(bench.path, {})
    with closing(second.writer):
        second.book.resume()
        second.feed(20, d1=(on(10, 4), on(30, 2)))
    assert second.asked == []
    assert bench.rows == [
        (1, 10, "python", "ada", 1, 0.0, 20.0, 900),
        (2, 20, "train", "bob", 0, 0.0, 0.0, 50),
        (1, 20, "train", "bob", 0, 5.0, 5.0, 1),
        (1, 30, None, None, None, 5.0, 20.0, 2),
    ]
    samples = """SELECT task_id, device_id, (at_ms - ?) / 1000, pid, memory_used_bytes / 1048576, sm_percent
                 FROM process_sample ORDER BY rowid"""
    assert query(bench.path, samples, START_MS) == [
        (77, 1, 0, 10, 100, 40), (77, 2, 0, 20, 50, None), (77, 1, 5, 10, 900, 50), (77, 1, 5, 20, 1, None),
        (77, 1, 5, 30, None, None), (77, 1, 10, 10, 300, None), (77, 1, 20, 10, 4, None), (77, 1, 20, 30, 2, None),
    ]  # fmt: skip


def test_a_number_that_comes_back_after_a_minute_is_another_process(bench: Bench) -> None:
    bench.feed(0, d1=(on(10, 5),))
    bench.feed(60, d1=(on(10, 7),))
    bench.feed(120.001, d1=(on(10, 1),))
    assert [row[5:] for row in bench.rows] == [(0.0, 60.0, 7), (120.001, 120.001, 1)]
    assert bench.asked == [10, 10]
