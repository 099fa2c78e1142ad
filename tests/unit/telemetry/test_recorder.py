"""The recorder on a clock that only moves when a test moves it: its grid, its gaps, its books.

Each story is one recording; the page gaps.txt shows what stood in its file afterwards.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import NoReader, SimulatedDevice, SimulatedReader, simulated_uuid
from rooms.model import HostReading, InventoryDevice, Reading
from rooms.root import DeviceUnreadable, GpuReader
from rooms.telemetry import (
    Book,
    CostBook,
    Effort,
    Followed,
    Gaps,
    HostReader,
    Recorder,
    Sampler,
    SourceBook,
    TelemetryWriter,
    parse_exit_reason,
    read_own_use,
)
from support.databases import query
from support.hand_clock import HandClock
from support.pages import Pages

TASK = 77


class ScriptedReader:
    """Answers for every device what its script says at this second; a text is a reason for not answering."""

    backend = "scripted"
    why = "a test wrote it"

    def __init__(self, clock: HandClock, scripts: Mapping[str, Callable[[float], Reading | str]]) -> None:
        self._clock = clock
        self._scripts = scripts
        self._start_s = clock.monotonic_s()

    def inventory(self) -> Sequence[InventoryDevice]:
        return []

    def read(self, uuid: str) -> Reading:
        answer = self._scripts[uuid](self._clock.monotonic_s() - self._start_s)
        if isinstance(answer, str):
            raise DeviceUnreadable(answer)
        return answer

    def force_full_read(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        pass


class SickWriter(TelemetryWriter):
    """A file on a disk that refuses some things for some time."""

    def __init__(self, path: Path, clock: HandClock) -> None:
        super().__init__(path, TASK)
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._illness = (0.0, 0.0, "")

    def fall_ill(self, from_s: float, until_s: float, what: str) -> None:
        self._illness = (from_s, until_s, what)

    def batch(self) -> AbstractContextManager[object]:  # type: ignore[override]
        self._refuse("begin")
        return super().batch()

    def write_tick(self, at_ms: int, readings: Sequence[tuple[int, Reading]], host: HostReading | None) -> None:
        super().write_tick(at_ms, readings, host)
        self._refuse("write")

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        self._refuse("note gaps")
        return super().open_gap(device_id, metric, from_ms, to_ms, reason)

    def _refuse(self, deed: str) -> None:
        from_s, until_s, what = self._illness
        if deed in what and from_s <= self._clock.monotonic_s() - self._start_s < until_s:
            raise sqlite3.OperationalError("database or disk is full")


class Bench:
    """A recorder over a real file; ``at`` holds what happens during the tick of that second."""

    def __init__(self, path: Path) -> None:
        self.clock = HandClock()
        self.start_ms = self.clock.now_ms()
        self.path = path
        self.writer = SickWriter(path, self.clock)
        self.at: dict[float, Callable[[], object]] = {}
        self.cost_s = 0.0
        self.refused: list[str] = []
        self.stands_still = (-1.0, 0.0)  # in the wait after which second, for how long
        self.books: list[Book] = []
        self.effort = Effort()
        self.trouble: list[str] = []
        self.seen: list[str] = []

    def run(
        self,
        ticks: int,
        reader: GpuReader | None = None,
        devices: int = 1,
        *,
        interval_s: float = 1.0,
        last_s: float = 0.5,
        since_ms: int | None = None,
        again: bool = False,
    ) -> Bench:
        """Record for so many intervals, then ``last_s`` more until the word to stop comes."""
        reader = reader or self.simulated()
        known = [Followed(number, simulated_uuid(number)) for number in range(devices)]
        sampler = Sampler(reader, known, Gaps(self.writer, self.clock.now_ms()))
        left = iter(range(ticks))

        def wait(seconds: float) -> bool:
            if next(left, None) is None:
                self.clock.sleep(last_s)
                return True
            second, still_s = self.stands_still
            if (self.clock.now_ms() - self.start_ms) / 1000 == second:
                self.clock.sleep(still_s)
            self.clock.sleep(seconds)
            return False

        self.recorder = Recorder(
            sampler,
            self.read_host,
            self.writer,
            clock=self.clock,
            interval_s=interval_s,
            since_ms=since_ms,
            again=again,
            refused=self.refused.append,
            books=self.books,
            trouble=self.trouble.append,
            effort=self.effort,
        )
        self.recorder.run(wait)
        return self

    def read_host(self) -> HostReading:
        """Let the tick cost its time and the scripted moment happen."""
        second = (self.clock.now_ms() - self.start_ms) / 1000
        self.clock.sleep(self.cost_s)
        self.at.get(second, lambda: None)()
        return HostReading(10.0, 2**30, 2**34)

    def simulated(self, *devices: SimulatedDevice, count: int = 1) -> SimulatedReader:
        return SimulatedReader(count, devices, clock=self.clock, started_at_ms=self.clock.now_ms())

    def scripted(self, *scripts: Callable[[float], Reading | str]) -> ScriptedReader:
        return ScriptedReader(self.clock, {simulated_uuid(number): script for number, script in enumerate(scripts)})

    def seconds(self, device: int = 0) -> list[float]:
        """Return when there are samples of a device, from the start."""
        found = query(
            self.path, "SELECT at_ms - ? FROM sample WHERE device_id = ? ORDER BY rowid", self.start_ms, device
        )
        return [int(str(at_ms)) / 1000 for (at_ms,) in found]

    def gaps(self) -> list[tuple[object, ...]]:
        """Return (device, metric, from, to, reason), in seconds from the start."""
        sql = """SELECT device_id, metric, (from_ms - ?1) / 1000.0, (to_ms - ?1) / 1000.0, reason
                   FROM gap ORDER BY rowid"""
        return query(self.path, sql, self.start_ms)

    def look(self) -> None:
        """Remember what stands in the file at this moment."""
        self.seen.append(f"meanwhile: {self.gap_lines()}")

    def gap_lines(self) -> list[str]:
        return [f"{'machine' if d is None else d} {m or '*'} {a:g}-{b:g} s: {why}" for d, m, a, b, why in self.gaps()]

    def page(self) -> list[str]:
        """Return the samples of each device, the gaps, and what could not be written."""
        devices = query(self.path, "SELECT DISTINCT device_id FROM sample ORDER BY device_id")
        lines = [f"samples of {n}: {' '.join(f'{s:g}' for s in self.seconds(n))}" for (n,) in devices]
        lines += [*self.seen, *(f"gap {line}" for line in sorted(self.gap_lines()))]
        return lines + ([f"unwritten: {self.recorder.unwritten.text}"] if self.recorder.unwritten.text else [])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "recorder.sqlite")
    with closing(bench.writer):
        yield bench


def steady(second: float) -> Reading:
    return Reading(utilization_percent=50, power_w=100.0)


def without_power(why: str = "Unknown Error", **values: int) -> Reading:
    return Reading(utilization_percent=50, missing={"power_w": why}, **values)  # type: ignore[arg-type]


# --- stories ----------------------------------------------------------------------------------------------------------

Story = Callable[[Bench], object]


def late(second: float, by_s: float, ticks: int) -> Story:
    def story(bench: Bench) -> None:
        bench.at[second] = lambda: bench.clock.sleep(by_s)
        bench.run(ticks)

    return story


def refused(from_s: float, until_s: float, what: str, ticks: int) -> Story:
    def story(bench: Bench) -> None:
        bench.writer.fall_ill(from_s, until_s, what)
        bench.run(ticks)

    return story


def started_late(by_s: float, *, again: bool = False) -> Story:
    def story(bench: Bench) -> None:
        bench.clock.sleep(by_s)
        bench.run(2, since_ms=bench.start_ms, again=again)

    return story


def scripted(ticks: int, script: Callable[[float], Reading | str]) -> Story:
    return lambda bench: bench.run(ticks, bench.scripted(script))


def simulated(ticks: int, *devices: SimulatedDevice, count: int = 1) -> Story:
    return lambda bench: bench.run(ticks, bench.simulated(*devices, count=count), devices=count)


def stopped_by_a_signal(bench: Bench) -> None:
    bench.stands_still = (3.0, 2.2)  # in the wait after second 3
    bench.run(8)


def refused_while_gaps_are_open(what: str) -> Story:
    def story(bench: Bench) -> None:
        lost, poor = SimulatedDevice(0, lost_at_s=1, back_at_s=8), SimulatedDevice(1, unsupported=("power_w",))
        bench.writer.fall_ill(3, 5, what)
        bench.run(10, bench.simulated(lost, poor, count=2), devices=2)

    return story


def back_while_the_disk_refuses(bench: Bench) -> None:
    bench.writer.fall_ill(4, 6, "write")
    bench.run(8, bench.simulated(SimulatedDevice(0, lost_at_s=2, back_at_s=4)))


def a_stretch_refused(bench: Bench) -> None:
    bench.at[14.0] = bench.look
    bench.writer.fall_ill(11, 13, "write")  # the stretch that is due at second 11, and the next try
    bench.run(15, bench.scripted(lambda second: without_power()))


def lost_and_looked_at(bench: Bench) -> None:
    bench.at[4.0] = bench.look
    bench.run(5, bench.simulated(SimulatedDevice(0, lost_at_s=2)))


def poor_then_lost(bench: Bench) -> None:
    def script(second: float) -> Reading | str:
        return "lost" if 17 <= second < 20 else steady(second) if second >= 25 else without_power()

    bench.at[18.0] = bench.at[21.0] = bench.look
    bench.run(30, bench.scripted(script))


def a_second_recorder(bench: Bench) -> None:
    bench.run(3)
    bench.clock.sleep(4)
    bench.run(2)


def a_second_recorder_that_cannot_write_gaps(bench: Bench) -> None:
    bench.run(1)
    bench.clock.sleep(4)
    bench.writer.fall_ill(0, 6, "note gaps")
    bench.run(2)


def killed_with_open_gaps(bench: Bench) -> None:
    def script(second: float) -> Reading:
        missing = {"power_w": "Unknown Error", "processes": "No Permission"}
        missing |= {"temperature_c": "Unknown Error"} if second < 5 else {}
        return Reading(utilization_percent=1, temperature_c=None if second < 5 else 50, missing=missing)

    def die() -> None:
        raise KeyboardInterrupt

    bench.at[8.0] = die
    with pytest.raises(KeyboardInterrupt):
        bench.run(20, bench.scripted(script))


def asked_every_five_seconds(second: float) -> Reading:
    failed = {"energy_j": "Unknown Error"} if second == 5 else {}
    return Reading(utilization_percent=50, energy_j=1e3 if second % 5 == 0 and not failed else None, missing=failed)


def first_asked_at_five(second: float) -> Reading:
    missing = {"energy_j": "Unknown Error", "processes": "No Permission"} if second == 5 else {}
    return Reading(energy_j=1e3 if second == 10 else None, processes=() if second == 10 else None, missing=missing)


STORIES: dict[str, Story] = {
    "a sample at every point of the grid and a last one at the end": lambda bench: bench.run(5, last_s=0.4),
    "an end at the very moment of a tick has an instant of its own": lambda bench: bench.run(3, last_s=0),
    "all devices are sampled at the same instants": simulated(3, count=3),
    "points that were missed are a gap and the grid goes on": late(2, 3.5, 6),
    "a single point that was missed is a gap": late(2, 1.2, 4),
    "a tick that is late but misses no point is no gap": late(2, 0.999, 4),
    "a machine that sleeps through the night leaves one gap": late(1, 8 * 3600, 2),
    "a recorder that stands still leaves a gap as long as the hole": stopped_by_a_signal,
    "a start that is not slow is no gap": started_late(1.4),
    "a slow start is a gap": started_late(4),
    "a recorder after one that died before its first reading": started_late(0.4, again=True),
    "instants whose transaction the disk refused": refused(2, 4, "begin", 6),
    "instants whose rows the disk refused": refused(2, 4, "write", 6),
    "the first instant of all refused": refused(0, 1, "write", 2),
    "a disk that never comes back": refused(3, 1e9, "write", 6),
    "open gaps stay one gap each when a transaction is refused": refused_while_gaps_are_open("begin"),
    "open gaps stay one gap each when rows are refused": refused_while_gaps_are_open("write"),
    "a device that comes back while the disk refuses": back_while_the_disk_refuses,
    "a stretch that the disk refused is written at the next instant": a_stretch_refused,
    "a lost device: the others go on": simulated(8, SimulatedDevice(1, lost_at_s=2.5, back_at_s=5.5), count=2),
    "a lost device that never comes back, also while it lasts": lost_and_looked_at,
    "a device that never answered": scripted(3, lambda second: "no permission"),
    "a new reason is a new gap": scripted(
        8, lambda s: steady(s) if s < 2 or s >= 6 else "GPU is lost" if s < 4 else "reset required"
    ),
    "a device lost twice": scripted(8, lambda s: "lost" if s in (2, 5, 6) else steady(s)),
    "metrics that are never given": simulated(4, SimulatedDevice(0, unsupported=("power_w", "energy_j"))),
    "a metric that stops and comes back": scripted(8, lambda s: without_power() if 3 <= s < 6 else steady(s)),
    "a metric with a new reason": scripted(
        8, lambda s: steady(s) if s < 2 or s >= 6 else without_power("Unknown Error" if s < 4 else "No Permission")
    ),
    "metrics that fail when first asked are missing since the start": scripted(12, first_asked_at_five),
    "a metric that is asked now and then is not missing in between": scripted(12, asked_every_five_seconds),
    "a device that loses a metric and then itself": scripted(
        6, lambda s: steady(s) if s < 2 else "lost" if s >= 4 else without_power()
    ),
    "the gap of a metric reaches the last reading before its device is lost": poor_then_lost,
    "a second recorder on the same file writes the hole and goes on": a_second_recorder,
    "a second recorder that cannot write the hole at first": a_second_recorder_that_cannot_write_gaps,
    "the gaps that a killed recorder left open reach its last sample": killed_with_open_gaps,
}


def test_what_is_missing_is_written_as_a_gap(tmp_path: Path, pages: Pages) -> None:
    said = []
    for number, (name, story) in enumerate(STORIES.items()):
        bench = Bench(tmp_path / f"{number}.sqlite")
        with closing(bench.writer):
            story(bench)
            said += [f"## {name}", *bench.page(), ""]
    pages({"gaps.txt": "\n".join(said)})


# --- the grid ---------------------------------------------------------------------------------------------------------


@given(
    interval_ms=st.integers(100, 3000), cost=st.floats(0, 0.95), ticks=st.integers(1, 40), stand_still_s=st.floats(0, 9)
)
@settings(max_examples=30)
def test_every_point_of_the_grid_is_a_sample_or_in_a_gap(
    interval_ms: int, cost: float, ticks: int, stand_still_s: float
) -> None:
    interval_s = interval_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "recorder.sqlite")
        bench.cost_s = cost * interval_s
        bench.at[interval_s] = lambda: bench.clock.sleep(stand_still_s)
        with closing(bench.writer):
            bench.run(ticks, interval_s=interval_s, last_s=interval_s / 2)
        *seconds, _last = bench.seconds()
        gaps = [(gap[2], gap[3]) for gap in bench.gaps()]
    assert len(seconds) == ticks + 1
    for second in seconds:
        assert second / interval_s == pytest.approx(round(second / interval_s), abs=0.0015 / interval_s)
    for before, after in pairwise(seconds):
        assert after - before < 1.02 * interval_s + 0.002 or (before, after) in gaps


@pytest.mark.parametrize("what", ["begin", "write", "note gaps", "begin write note gaps"])
def test_a_disk_that_refuses_and_a_late_tick_do_not_end_the_recorder(bench: Bench, what: str) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(5.5)
    bench.writer.fall_ill(2.5, 9.5, what)
    bench.run(12)
    seconds, gaps = bench.seconds(), [(gap[2], gap[3]) for gap in bench.gaps()]
    assert (seconds[:2], seconds[-1] > 12) == ([0, 1], True)
    assert all(after - before <= 1 or (before, after) in gaps for before, after in pairwise(seconds))


def test_the_energy_counter_is_read_a_last_time_when_the_recording_ends(bench: Bench) -> None:
    class EveryFiveSeconds(ScriptedReader):
        """Gives the counter every five seconds, and when a full reading is asked for."""

        is_last = False

        def read(self, uuid: str) -> Reading:
            second = self._clock.monotonic_s() - self._start_s
            return Reading(power_w=100.0, energy_j=100.0 * second if self.is_last or second % 5 == 0 else None)

        def force_full_read(self) -> None:
            self.is_last = True

    bench.run(7, EveryFiveSeconds(bench.clock, {}))
    counted = query(bench.path, "SELECT at_ms - ?, energy_j FROM sample WHERE energy_j IS NOT NULL", bench.start_ms)
    assert counted == [(0, 0.0), (5000, 500.0), (7500, 750.0)]
    assert query(bench.path, "SELECT count(*), min(cpu_percent) FROM host_sample") == [(9, 10.0)]
    assert query(bench.path, "SELECT DISTINCT task_id FROM sample") == [(TASK,)]


def test_a_device_that_nothing_can_read_is_a_gap_with_its_reason(bench: Bench) -> None:
    known = [Followed(8, None), Followed(9, None)]
    sampler = Sampler(NoReader("libnvidia-ml.so.1 was not found"), known, Gaps(bench.writer, bench.start_ms))
    for _ in range(3):
        assert sampler.sample(bench.clock.now_ms()) == []
        bench.clock.sleep(1)
    reason = "no driver library to read it with: libnvidia-ml.so.1 was not found"
    assert bench.gaps() == [(8, None, 0.0, 2.0, reason), (9, None, 0.0, 2.0, reason)]
    assert sampler.unreadable == {8: reason, 9: reason}


# --- what it costs, and its books -------------------------------------------------------------------------------------


def test_the_recorders_row_says_what_it_cost_every_ten_seconds_and_at_the_end(bench: Bench) -> None:
    def slow(second: float) -> Reading:
        bench.clock.sleep(0.2)
        return steady(second)

    used = iter(range(1, 100))
    cost = CostBook(
        bench.writer,
        bench.effort,
        interval_s=1.0,
        started_at_ms=bench.start_ms,
        backend=lambda: ("nvml", "it works here"),
        use=lambda: (next(used) / 10, 20 * 2**20),
    )
    bench.books, bench.cost_s = [cost], 0.1
    seen: list[list[tuple[object, ...]]] = []
    bench.at[15.2] = lambda: seen.append(query(bench.path, "SELECT ticks, last_at_ms - started_at_ms FROM recorder"))
    bench.at[17.2] = lambda: bench.clock.sleep(3.5)  # after the 0.2 s of the reading
    bench.run(20, bench.scripted(slow))
    assert seen == [[(11, 10_000)]]
    sql = "SELECT pid, backend, why, interval_s, ticks, cpu_s, memory_bytes, worst_late_s, reading_s FROM recorder"
    ((*known, late_s, reading_s),) = query(bench.path, sql)
    assert known == [os.getpid(), "nvml", "it works here", 1.0, 22, 0.4, 20 * 2**20]
    assert late_s == pytest.approx(3.0), "the point of second 18 was read in second 21"
    assert reading_s == pytest.approx(22 * 0.2), "without the rest of the tick"
    assert cost.text == "22 samples with nvml in 24 s; 0.50 s of CPU (2.10 % of a core), 20 MiB, at most 3.000 s late"


class BrokenBook(Book):
    """Writes something, then fails, at every instant."""

    def __init__(self, writer: TelemetryWriter, error: Exception) -> None:
        self._writer = writer
        self._error = error

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        self._writer.put("metric_source", {"device_id": 0, "metric": "half written", "source": "x", "from_ms": at_ms})
        raise self._error

    def finish(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [ValueError("a bug"), sqlite3.IntegrityError("UNIQUE"), OSError(5)])
def test_a_book_that_fails_costs_no_sample_and_is_reported_once(bench: Bench, error: Exception) -> None:
    bench.books = [BrokenBook(bench.writer, error), SourceBook(bench.writer)]
    bench.run(4, bench.scripted(lambda second: Reading(utilization_percent=1, sources={"busy_percent": "gpm"})))
    assert bench.seconds() == [0, 1, 2, 3, 4, 4.5]
    assert bench.gaps() == []
    assert len(bench.trouble) == 1
    assert query(bench.path, "SELECT metric FROM metric_source") == [("busy_percent",)], "the others go on"


def test_a_disk_that_refuses_a_book_refuses_the_instant(bench: Bench) -> None:
    bench.books = [BrokenBook(bench.writer, sqlite3.OperationalError("database or disk is full"))]
    bench.run(2)
    assert bench.seconds() == []
    assert bench.recorder.unwritten.reason == "database or disk is full"


def test_where_a_metric_comes_from_is_written_once_and_when_it_changes(bench: Bench) -> None:
    def script(second: float) -> Reading:
        return Reading(utilization_percent=1, sources={"busy_percent": "gpm" if second < 4 else "processes"})

    bench.books = [SourceBook(bench.writer)]
    bench.writer.fall_ill(0, 2, "write")  # an instant that was refused is made up for
    bench.run(6, bench.scripted(script))
    rows = query(bench.path, "SELECT metric, source, (from_ms - ?) / 1000.0 FROM metric_source", bench.start_ms)
    assert rows == [("busy_percent", "gpm", 2.0), ("busy_percent", "processes", 4.0)]


# --- the recorder's process -------------------------------------------------------------------------------------------

LOGGED = "2026-11-02 12:00:00,123 recorder {} {}\n"
INFO = LOGGED.format("INFO", "device 7 does not give power_w: Unknown Error")
LATE = LOGGED.format("WARNING", "the recorder was late and missed 3 readings")
OURS = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'
    "badcjobs.errors.BadInput: badcjobs: error: tape.sqlite is no recording\n"
    "  why: it has no samples\n  try: badcjobs record --out tape.sqlite\n"
)
RAISED = 'Traceback (most recent call last):\n  File "x.py", line 1\nsqlite3.OperationalError: disk I/O error\nmore\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no error message"),
        (INFO + INFO, "no error message"),
        (INFO + LATE + INFO, "the recorder was late and missed 3 readings"),
        (LATE + OURS + INFO, "badcjobs: error: tape.sqlite is no recording"),
        (OURS + RAISED + LATE, "sqlite3.OperationalError: disk I/O error"),
        (INFO + LOGGED.format("ERROR", "the last one") + LATE, "the last one"),
        ("Fatal Python error: Bus error\n\nCurrent thread 0x1\n", "Fatal Python error: Bus error"),
        ("no recorder today", "no recorder today"),
    ],
)
def test_the_reason_why_a_recorder_ended_is_found_in_its_log(text: str, words: str) -> None:
    assert parse_exit_reason(text) == words


# --- the machine ------------------------------------------------------------------------------------------------------

STAT = "cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 1 1 1\n"
MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n"


def test_the_share_of_the_processor_is_known_from_the_second_reading_on(tmp_path: Path) -> None:
    """Waiting for a disk is not busy, guests are not counted twice; memory that can be given back is not used."""
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    reader = HostReader(tmp_path)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024), "no time has passed"
    (tmp_path / "stat").write_text("cpu  150 0 50 850 60 0 0 0 90\n")
    assert reader.read() == HostReading(45.5, 600 * 1024, 1000 * 1024)
    (tmp_path / "meminfo").unlink()
    assert reader.read() is None


def test_the_machine_reads_as_the_system_tools_say() -> None:
    reading, memory = HostReader().read(), psutil.virtual_memory()
    assert reading is not None
    assert reading.memory_total_bytes == memory.total
    assert reading.memory_used_bytes == pytest.approx(memory.total - memory.available, rel=0.2)
    cpu_s, own_bytes = read_own_use()
    assert cpu_s > 0
    assert own_bytes is not None
    assert 5 * 2**20 < own_bytes < 2**33
