"""The recorder on a clock that only moves when a test moves it: its grid, its gaps, its books.

Each story is one recording; the page gaps.txt shows what stood in its file afterwards.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import NoReader, SimulatedDevice, SimulatedReader, simulated_uuid
from rooms.model import HostReading, Reading
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
Readings = Sequence[tuple[int, Reading]]
Script = Callable[[float], Reading | str]


class ScriptedReader(GpuReader):
    """Answers for every device what the script says at this second; a text is a reason for not answering."""

    backend, why, is_last = "scripted", "a test wrote it", False

    def __init__(self, clock: HandClock, script: Script) -> None:
        self._clock, self._start_s, self._script = clock, clock.monotonic_s(), script

    def read(self, uuid: str) -> Reading:
        answer = self._script(self._clock.monotonic_s() - self._start_s)
        if isinstance(answer, str):
            raise DeviceUnreadable(answer)
        return answer

    def force_full_read(self) -> None:
        self.is_last = True


class SickWriter(TelemetryWriter):
    """A file on a disk that refuses some things for some time."""

    illness = (0.0, 0.0, "")

    def __init__(self, path: Path, clock: HandClock) -> None:
        super().__init__(path, TASK)
        self._clock, self._start_s = clock, clock.monotonic_s()

    def batch(self) -> sqlite3.Connection:
        self._refuse("begin")
        return super().batch()

    def write_tick(self, at_ms: int, readings: Readings, host: HostReading | None) -> None:
        super().write_tick(at_ms, readings, host)
        self._refuse("write")

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        self._refuse("note gaps")
        return super().open_gap(device_id, metric, from_ms, to_ms, reason)

    def _refuse(self, deed: str) -> None:
        from_s, until_s, what = self.illness
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
        self.stands_still = (-1.0, 0.0)  # in the wait after which second, for how long
        self.books: list[Book] = []
        self.effort = Effort()
        self.trouble: list[str] = []
        self.seen: list[str] = []

    def run(self, ticks: int, reader: GpuReader, devices: int = 1, last_s: float = 0.5, **options: Any) -> None:
        """Record for so many intervals, then ``last_s`` more until the word to stop comes."""
        nobody = isinstance(reader, NoReader)
        known = [Followed(number, None if nobody else simulated_uuid(number)) for number in range(devices)]
        sampler = Sampler(reader, known, Gaps(self.writer, self.clock.now_ms()))
        left = iter(range(ticks))

        def wait(seconds: float) -> bool:
            if next(left, None) is None:
                self.clock.sleep(last_s)
                return True
            second, still_s = self.stands_still
            if self.second == second:
                self.clock.sleep(still_s)
            self.clock.sleep(seconds)
            return False

        more = {"books": self.books, "trouble": self.trouble.append, "effort": self.effort, "interval_s": 1.0}
        self.recorder = Recorder(sampler, self.read_host, self.writer, self.clock, **{**more, **options})
        self.recorder.run(wait)

    @property
    def second(self) -> float:
        return (self.clock.now_ms() - self.start_ms) / 1000

    def read_host(self) -> HostReading:
        """Let the tick cost its time and the scripted moment happen."""
        second = self.second
        self.clock.sleep(self.cost_s)
        self.at.get(second, lambda: None)()
        return HostReading(10.0, 2**30, 2**34)

    def simulated(self, *devices: SimulatedDevice, count: int = 1) -> SimulatedReader:
        return SimulatedReader(count, devices, clock=self.clock, started_at_ms=self.clock.now_ms())

    def scripted(self, script: Script) -> ScriptedReader:
        return ScriptedReader(self.clock, script)

    def seconds(self, device: int = 0) -> list[float]:
        """Return when there are samples of a device, from the start."""
        sql = "SELECT (at_ms - ?) / 1000.0 FROM sample WHERE device_id = ? ORDER BY rowid"
        return [float(str(at_s)) for (at_s,) in query(self.path, sql, self.start_ms, device)]

    def gaps(self) -> list[tuple[Any, ...]]:
        """Return (device, metric, from, to, reason), in seconds from the start."""
        sql = """SELECT device_id, metric, (from_ms - ?1) / 1000.0, (to_ms - ?1) / 1000.0, reason
                   FROM gap ORDER BY rowid"""
        return query(self.path, sql, self.start_ms)

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


def without_power(why: str = "Unknown Error") -> Reading:
    return Reading(utilization_percent=50, missing={"power_w": why})


# --- stories ----------------------------------------------------------------------------------------------------------

Story = Callable[[Bench], object]


def told(
    ticks: int, *who: SimulatedDevice | Script | NoReader, devices: int = 1, begin_s: float = 0,
    late: tuple[float, float] = (-1, 0), still: tuple[float, float] = (-1, 0), looks: Sequence[float] = (),
    ill: tuple[float, float, str] = (0, 0, ""), **options: object,
) -> Story:  # fmt: skip
    """Return a recording of simulated devices, of a script or of nothing, that begins some seconds after the order.

    ``late`` and ``still``: in the tick of which second, or the wait after it, how long nothing happens; ``looks``: at
    which seconds the gaps in the file are noted; ``ill``: from when until when the disk refuses what.
    """

    def story(bench: Bench) -> None:
        bench.clock.sleep(begin_s)
        bench.at |= dict.fromkeys(looks, lambda: bench.seen.append(f"meanwhile: {bench.gap_lines()}"))
        bench.at[late[0]] = lambda: bench.clock.sleep(late[1])
        bench.stands_still, bench.writer.illness = still, ill
        (first,) = who[:1] or (None,)
        if not isinstance(first, NoReader):
            first = bench.scripted(first) if callable(first) else bench.simulated(*who, count=devices)
        since = {"since_ms": bench.start_ms} if begin_s and not bench.seconds() else {}
        bench.run(ticks, first, devices, **since, **options)

    return story


def two(first: Story, second: Story) -> Story:
    return lambda bench: (first(bench), second(bench))


def poor_then_lost(second: float) -> Reading | str:
    return "lost" if 17 <= second < 20 else steady(second) if second >= 25 else without_power()


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


LOST, POOR = SimulatedDevice(0, lost_at_s=1, back_at_s=8), SimulatedDevice(1, unsupported=("power_w",))
STORIES: dict[str, Story] = {
    "a sample at every point of the grid and a last one at the end": told(5, last_s=0.4),
    "an end at the very moment of a tick has an instant of its own": told(3, last_s=0),
    "all devices are sampled at the same instants": told(3, devices=3),
    "points that were missed are a gap and the grid goes on": told(6, late=(2, 3.5)),
    "a single point that was missed is a gap": told(4, late=(2, 1.2)),
    "a tick that is late but misses no point is no gap": told(4, late=(2, 0.999)),
    "a machine that sleeps through the night leaves one gap": told(2, late=(1, 8 * 3600)),
    "a recorder that stands still leaves a gap as long as the hole": told(8, still=(3, 2.2)),
    "a start that is not slow is no gap": told(2, begin_s=1.4),
    "a slow start is a gap": told(2, begin_s=4),
    "a recorder after one that died before its first reading": told(2, begin_s=0.4, again=True),
    "instants whose transaction the disk refused": told(6, ill=(2, 4, "begin")),
    "instants whose rows the disk refused": told(6, ill=(2, 4, "write")),
    "the first instant of all refused": told(2, ill=(0, 1, "write")),
    "a disk that never comes back": told(6, ill=(3, 1e9, "write")),
    "open gaps stay one gap each when a transaction is refused": told(10, LOST, POOR, devices=2, ill=(3, 5, "begin")),
    "open gaps stay one gap each when rows are refused": told(10, LOST, POOR, devices=2, ill=(3, 5, "write")),
    "a device that comes back while the disk refuses": told(
        8, SimulatedDevice(0, lost_at_s=2, back_at_s=4), ill=(4, 6, "write")
    ),
    "a stretch that the disk refused is written at the next instant": told(
        15, lambda second: without_power(), ill=(11, 13, "write"), looks=[14]
    ),
    "a lost device: the others go on": told(8, SimulatedDevice(1, lost_at_s=2.5, back_at_s=5.5), devices=2),
    "a lost device that never comes back, also while it lasts": told(5, SimulatedDevice(0, lost_at_s=2), looks=[4]),
    "a device that never answered": told(3, lambda second: "no permission"),
    "a new reason is a new gap": told(
        8, lambda s: steady(s) if s < 2 or s >= 6 else "GPU is lost" if s < 4 else "reset required"
    ),
    "a device lost twice": told(8, lambda s: "lost" if s in (2, 5, 6) else steady(s)),
    "metrics that are never given": told(4, SimulatedDevice(0, unsupported=("power_w", "energy_j"))),
    "a metric that stops and comes back": told(8, lambda s: without_power() if 3 <= s < 6 else steady(s)),
    "a metric with a new reason": told(
        8, lambda s: steady(s) if s < 2 or s >= 6 else without_power("Unknown Error" if s < 4 else "No Permission")
    ),
    "metrics that fail when first asked are missing since the start": told(12, first_asked_at_five),
    "a metric that is asked now and then is not missing in between": told(12, asked_every_five_seconds),
    "a device that loses a metric and then itself": told(
        6, lambda s: steady(s) if s < 2 else "lost" if s >= 4 else without_power()
    ),
    "the gap of a metric reaches the last reading before its device is lost": told(30, poor_then_lost, looks=[18, 21]),
    "a second recorder on the same file writes the hole and goes on": two(told(3), told(2, begin_s=4)),
    "a second recorder that cannot write the hole at first": two(told(1), told(2, begin_s=4, ill=(0, 6, "note gaps"))),
    "the gaps that a killed recorder left open reach its last sample": killed_with_open_gaps,
    "devices that nothing can read": told(3, NoReader("libnvidia-ml.so.1 was not found"), devices=2),
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


@given(st.integers(100, 3000), st.floats(0, 0.95), st.integers(1, 40), st.floats(0, 9))
@settings(max_examples=30)
def test_every_point_of_the_grid_is_a_sample_or_in_a_gap(
    interval_ms: int, cost: float, ticks: int, stand_still_s: float
) -> None:
    interval_s = interval_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "recorder.sqlite")
        bench.cost_s = cost * interval_s
        with closing(bench.writer):
            told(ticks, late=(interval_s, stand_still_s), interval_s=interval_s, last_s=interval_s / 2)(bench)
        *seconds, _last = bench.seconds()
        gaps = [(gap[2], gap[3]) for gap in bench.gaps()]
    assert len(seconds) == ticks + 1
    for second in seconds:
        assert second / interval_s == pytest.approx(round(second / interval_s), abs=0.0015 / interval_s)
    for before, after in pairwise(seconds):
        assert after - before < 1.02 * interval_s + 0.002 or (before, after) in gaps


@pytest.mark.parametrize("what", ["begin", "write", "note gaps", "begin write note gaps"])
def test_a_disk_that_refuses_and_a_late_tick_do_not_end_the_recorder(bench: Bench, what: str) -> None:
    told(12, late=(2, 5.5), ill=(2.5, 9.5, what))(bench)
    seconds, gaps = bench.seconds(), [(gap[2], gap[3]) for gap in bench.gaps()]
    assert (seconds[:2], seconds[-1] > 12) == ([0, 1], True)
    assert all(after - before <= 1 or (before, after) in gaps for before, after in pairwise(seconds))


def test_the_energy_counter_is_read_a_last_time_when_the_recording_ends(bench: Bench) -> None:
    def script(second: float) -> Reading:
        return Reading(power_w=100.0, energy_j=100.0 * second if reader.is_last or second % 5 == 0 else None)

    reader = bench.scripted(script)
    bench.run(7, reader)
    counted = query(bench.path, "SELECT at_ms - ?, energy_j FROM sample WHERE energy_j IS NOT NULL", bench.start_ms)
    assert counted == [(0, 0.0), (5000, 500.0), (7500, 750.0)]
    assert query(bench.path, "SELECT count(*), min(cpu_percent) FROM host_sample") == [(9, 10.0)]
    assert query(bench.path, "SELECT DISTINCT task_id FROM sample") == [(TASK,)]


# --- what it costs, and its books -------------------------------------------------------------------------------------


def test_the_recorders_row_says_what_it_cost_every_ten_seconds_and_at_the_end(bench: Bench) -> None:
    def slow(second: float) -> Reading:
        bench.clock.sleep(0.2)
        return steady(second)

    used = iter(range(1, 100))
    cost = CostBook(
        bench.writer, bench.effort, 1.0, bench.start_ms, lambda: ("nvml", "it works here"),
        lambda: (next(used) / 10, 20 * 2**20),
    )  # fmt: skip
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
        self._writer, self._error = writer, error

    def write(self, at_ms: int, readings: Readings, unreadable: Mapping[int, str]) -> None:
        self._writer.put("metric_source", {"device_id": 0, "metric": "half written", "source": "x", "from_ms": at_ms})
        raise self._error

    def finish(self) -> None:
        raise self._error


def from_gpm(second: float) -> Reading:
    return Reading(utilization_percent=1, sources={"busy_percent": "gpm" if second < 4 else "processes"})


DISK = sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("error", [ValueError("a bug"), sqlite3.IntegrityError("UNIQUE"), OSError(5), DISK])
def test_a_book_that_fails_costs_no_sample_and_is_reported_once_unless_the_disk_refuses_the_instant(
    bench: Bench, error: Exception
) -> None:
    bench.books = [BrokenBook(bench.writer, error), SourceBook(bench.writer)]
    bench.run(3, bench.scripted(from_gpm))
    metrics = query(bench.path, "SELECT metric FROM metric_source")
    if error is DISK:
        assert (bench.seconds(), bench.trouble, metrics) == ([], [], [])
        assert bench.recorder.unwritten.reason == "database or disk is full"
    else:
        assert (bench.seconds(), bench.gaps(), len(bench.trouble)) == ([0, 1, 2, 3, 3.5], [], 1)
        assert metrics == [("busy_percent",)], "the others go on"


def test_where_a_metric_comes_from_is_written_once_and_when_it_changes(bench: Bench) -> None:
    bench.books = [SourceBook(bench.writer)]
    told(6, from_gpm, ill=(0, 2, "write"))(bench)  # an instant that was refused is made up for
    rows = query(bench.path, "SELECT metric, source, (from_ms - ?) / 1000.0 FROM metric_source", bench.start_ms)
    assert rows == [("busy_percent", "gpm", 2.0), ("busy_percent", "processes", 4.0)]


# --- the recorder's process, and the machine --------------------------------------------------------------------------

LOGGED = "2026-11-02 12:00:00,123 recorder {} {}\n"
INFO = LOGGED.format("INFO", "device 7 does not give power_w: Unknown Error")
LATE = LOGGED.format("WARNING", "the recorder was late and missed 3 readings")
OURS = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'
    "badcjobs.errors.BadInput: badcjobs: error: tape.sqlite is no recording\n"
    "  why: it has no samples\n  try: badcjobs record --out tape.sqlite\n"
)
RAISED = 'Traceback (most recent call last):\n  File "x.py", line 1\nsqlite3.OperationalError: disk I/O error\nmore\n'
REASONS = {
    "": "no error message",
    INFO + INFO: "no error message",
    INFO + LATE + INFO: "the recorder was late and missed 3 readings",
    LATE + OURS + INFO: "badcjobs: error: tape.sqlite is no recording",
    OURS + RAISED + LATE: "sqlite3.OperationalError: disk I/O error",
    INFO + LOGGED.format("ERROR", "the last one") + LATE: "the last one",
    "Fatal Python error: Bus error\n\nCurrent thread 0x1\n": "Fatal Python error: Bus error",
    "no recorder today": "no recorder today",
}


def test_the_reason_why_a_recorder_ended_is_found_in_its_log() -> None:
    assert {text: parse_exit_reason(text) for text in REASONS} == REASONS


def test_the_share_of_the_processor_is_known_from_the_second_reading_on(tmp_path: Path) -> None:
    """Waiting for a disk is not busy, guests are not counted twice; memory that can be given back is not used."""
    (tmp_path / "stat").write_text("cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 1 1 1\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n"
    )
    reader = HostReader(tmp_path)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024), "no time has passed"
    (tmp_path / "stat").write_text("cpu  150 0 50 850 60 0 0 0 90\n")
    assert reader.read() == HostReading(45.5, 600 * 1024, 1000 * 1024)
    (tmp_path / "meminfo").unlink()
    assert reader.read() is None
    real, memory = HostReader().read(), psutil.virtual_memory()
    assert real is not None and real.memory_total_bytes == memory.total
    assert real.memory_used_bytes == pytest.approx(memory.total - memory.available, rel=0.2)
    cpu_s, own_bytes = read_own_use()
    assert cpu_s > 0 and own_bytes is not None and 5 * 2**20 < own_bytes < 2**33
