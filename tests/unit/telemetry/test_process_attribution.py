"""Which processes are on a device, whose they are, and that each is looked up once."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
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
SLEEP = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


# --- who a process is -------------------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[object]:
    """Start programs that wait until the test is over."""
    running: list[subprocess.Popen[str]] = []

    def start_one(**environ: str) -> int:
        program = subprocess.Popen(
            SLEEP, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )
        assert program.stdout is not None
        program.stdout.readline()
        running.append(program)
        return program.pid

    yield start_one
    for program in running:
        program.communicate()


def lookup(wrapper_pid: int = 2**22 + 1, **more: Path) -> ProcessLookup:
    return ProcessLookup(wrapper_pid=wrapper_pid, marks=[OTHER_MARK, MARK], **more)


def test_a_process_that_carries_the_tasks_mark_is_ours(start: object) -> None:
    for mark in (MARK, OTHER_MARK):
        name, _, value = mark.partition("=")
        pid = start(**{name: value})  # type: ignore[operator]
        assert lookup().look_up(pid) == ProcessOwner(name_of(pid), getpass.getuser(), True)


def test_a_process_below_the_wrapper_is_ours_without_a_mark(start: object) -> None:
    pid = start()  # type: ignore[operator]
    assert lookup(os.getpid()).look_up(pid).ours is True
    assert lookup(os.getppid()).look_up(pid).ours is True, "a grandchild too"
    assert lookup(os.getpid()).look_up(os.getpid()).ours is True, "and the wrapper itself"


def test_a_process_with_another_mark_or_none_is_somebody_elses(start: object) -> None:
    name, _, value = MARK.partition("=")
    for pid in (start(**{name: value + "9"}), start()):  # type: ignore[operator]
        who = lookup().look_up(pid)
        assert who.ours in (False, None), "None where this test itself runs in a PID namespace of its own"
        if who.ours is not None:
            assert who == ProcessOwner(name_of(pid), getpass.getuser(), False)


def test_a_process_that_does_not_exist_here_is_unknown_and_nobodys() -> None:
    assert lookup().look_up(2**22 + 1) == ProcessOwner(None, None, None)


def test_in_a_container_a_number_may_mean_another_process_so_nobody_is_accused(tmp_path: Path) -> None:
    """A folder like /proc, in which process 42 exists, seen from the machine itself and from a namespace of its own."""
    for name, namespace in (("host", 4026531836), ("container", 4026532811)):
        folder = tmp_path / name
        (folder / "42").mkdir(parents=True)
        (folder / "42/status").write_text("Name:\tpython\nPPid:\t1\nUid:\t5\t5\t5\t5\n")
        (folder / "42/environ").write_bytes(b"PATH=/bin\0")
        (folder / "self/ns").mkdir(parents=True)
        (folder / "self/ns/pid").symlink_to(f"pid:[{namespace}]")
    assert lookup(proc=tmp_path / "host").look_up(42).ours is False
    assert lookup(proc=tmp_path / "container").look_up(42) == ProcessOwner(None, None, None)
    (tmp_path / "container/42/environ").write_bytes(f"PATH=/bin\0{MARK}\0".encode())
    assert lookup(proc=tmp_path / "container").look_up(42).ours is True, "our own mark is proof enough"


@pytest.mark.parametrize(("uid", "ours"), [(os.getuid(), None), (os.getuid() + 1, False)])
@pytest.mark.parametrize("environ", ["closed", "empty"])
def test_where_the_environment_does_not_say_only_another_users_process_is_surely_not_ours(
    tmp_path: Path, uid: int, ours: bool | None, environ: str
) -> None:
    """A folder like /proc; the environment of process 42 cannot be read, because it is a folder here."""
    (tmp_path / "42").mkdir()
    (tmp_path / "42/status").write_text(f"Name:\tpython\nPPid:\t1\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    if environ == "closed":
        (tmp_path / "42/environ").mkdir()
    else:
        (tmp_path / "42/environ").touch()
    assert lookup(proc=tmp_path).look_up(42).ours is ours
    assert lookup(wrapper_pid=42, proc=tmp_path).look_up(42).ours is True


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


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


def test_every_process_has_one_row_per_device_and_one_sample_per_reading(bench: Bench) -> None:
    bench.feed(0, d1=(on(10, 100, 40),), d2=(on(20, 50),))
    bench.feed(1, d1=None)
    bench.feed(5, d1=(on(10, 900, 50), on(20, 1), on(30)), d2=())
    bench.feed(10, d1=(on(10, 300),), d2=())
    assert bench.rows == [
        (1, 10, "python", "ada", 1, 0.0, 10.0, 900),
        (2, 20, "train", "bob", 0, 0.0, 0.0, 50),
        (1, 20, "train", "bob", 0, 5.0, 5.0, 1),
        (1, 30, None, None, None, 5.0, 5.0, None),
    ]
    samples = """SELECT task_id, device_id, (at_ms - ?) / 1000, pid, memory_used_bytes / 1048576, sm_percent
                 FROM process_sample ORDER BY rowid"""
    assert query(bench.path, samples, START_MS) == [
        (77, 1, 0, 10, 100, 40), (77, 2, 0, 20, 50, None), (77, 1, 5, 10, 900, 50), (77, 1, 5, 20, 1, None),
        (77, 1, 5, 30, None, None), (77, 1, 10, 10, 300, None),
    ]  # fmt: skip
    assert bench.asked == [10, 20, 30], "each is looked up once"


def test_a_number_that_comes_back_after_a_minute_is_another_process(bench: Bench) -> None:
    bench.feed(0, d1=(on(10, 5),))
    bench.feed(60, d1=(on(10, 7),))
    bench.feed(120.001, d1=(on(10, 1),))
    assert [row[5:] for row in bench.rows] == [(0.0, 60.0, 7), (120.001, 120.001, 1)]
    assert bench.asked == [10, 10]


def test_a_second_recorder_goes_on_with_the_rows_of_the_first(bench: Bench) -> None:
    bench.feed(0, d1=(on(10, 5), on(30, 1)))
    second = Bench(bench.path, {})
    with closing(second.writer):
        second.book.resume()
        second.feed(10, d1=(on(10, 4), on(30, 2)))
    assert bench.rows == [(1, 10, "python", "ada", 1, 0.0, 10.0, 5), (1, 30, None, None, None, 0.0, 10.0, 2)]
    assert second.asked == []
