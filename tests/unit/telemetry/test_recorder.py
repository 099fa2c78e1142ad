"""The recorder on a clock that only moves when a test moves it: its grid, its gaps, its books.

Each line of data/recordings.txt is one recording; the page gaps.txt shows what stood in its file afterwards.
"""

import os
import re
import sqlite3
import tempfile
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import telemetry as room
from rooms.devices import NoReader, SimulatedDevice, SimulatedReader, simulated_devices, simulated_uuid
from rooms.model import HostReading, Reading
from support.cases import read_data
from support.databases import query
from support.hand_clock import HandClock, ScriptedReader

TASK = 77


class SickWriter(room.TelemetryWriter):
    """A file on a disk that refuses some things for some time."""

    illness = (0.0, 0.0, "")

    def __init__(self, path, clock):
        super().__init__(path, TASK)
        self._clock, self._start_s = clock, clock.monotonic_s()

    def batch(self):
        self._refuse("begin")
        return super().batch()

    def write_tick(self, at_ms, readings, host):
        super().write_tick(at_ms, readings, host)
        self._refuse("write")

    def open_gap(self, device_id, metric, from_ms, to_ms, reason):
        self._refuse("note-gaps")
        return super().open_gap(device_id, metric, from_ms, to_ms, reason)

    def _refuse(self, deed):
        from_s, until_s, what = self.illness
        if deed in what and from_s <= self._clock.monotonic_s() - self._start_s < until_s:
            raise sqlite3.OperationalError("database or disk is full")


class Bench:
    """A recorder over a real file; ``at`` holds what happens during the tick of that second."""

    def __init__(self, path):
        self.clock = HandClock()
        self.start_ms = self.clock.now_ms()
        self.path = path
        self.writer = SickWriter(path, self.clock)
        self.at, self.cost_s, self.effort = {}, 0.0, room.Effort()
        self.stands_still = (-1.0, 0.0)  # in the wait after which second, for how long
        self.books, self.trouble, self.seen = [], [], []

    def run(self, ticks, reader, devices=1, last_s=0.5, **options):
        """Record for so many intervals, then ``last_s`` more until the word to stop comes."""
        without_reader = isinstance(reader, NoReader)
        known = [room.Followed(number, None if without_reader else simulated_uuid(number)) for number in range(devices)]
        sampler = room.Sampler(reader, known, room.Gaps(self.writer, self.clock.now_ms()))
        left = iter(range(ticks))

        def wait(seconds):
            if next(left, None) is None:
                self.clock.sleep(last_s)
                return True
            second, still_s = self.stands_still
            if self.second == second:
                self.clock.sleep(still_s)
            self.clock.sleep(seconds)
            return False

        more = {"books": self.books, "trouble": self.trouble.append, "effort": self.effort, "interval_s": 1.0}
        more |= {"since_ms": None, "again": False}
        self.recorder = room.Recorder(sampler, self.read_host, self.writer, self.clock, **{**more, **options})
        self.recorder.run(wait)

    @property
    def second(self):
        return (self.clock.now_ms() - self.start_ms) / 1000

    def read_host(self):
        """Let the tick cost its time and the scripted moment happen."""
        second = self.second
        self.clock.sleep(self.cost_s)
        self.at.get(second, lambda: None)()
        return HostReading(10.0, 2**30, 2**34)

    def simulated(self, *devices, count=1):
        return SimulatedReader(simulated_devices(count, devices), clock=self.clock, started_at_ms=self.clock.now_ms())

    def scripted(self, script):
        return ScriptedReader(self.clock, lambda uuid, second: script(second))

    def seconds(self, device=0):
        """Return when there are samples of a device, from the start."""
        sql = "SELECT (at_ms - ?) / 1000.0 FROM sample WHERE device_id = ? ORDER BY rowid"
        return [float(str(at_s)) for (at_s,) in query(self.path, sql, self.start_ms, device)]

    def gaps(self):
        sql = """SELECT device_id, metric, (from_ms - ?1) / 1000.0, (to_ms - ?1) / 1000.0, reason
                   FROM gap ORDER BY rowid"""
        return query(self.path, sql, self.start_ms)

    def gap_lines(self):
        return [f"{'machine' if d is None else d} {m or '*'} {a:g}-{b:g} s: {why}" for d, m, a, b, why in self.gaps()]

    def page(self):
        """Return the samples of each device, the gaps, and what could not be written."""
        devices = query(self.path, "SELECT DISTINCT device_id FROM sample ORDER BY device_id")
        lines = [f"samples of {n}: {' '.join(f'{s:g}' for s in self.seconds(n))}" for (n,) in devices]
        lines += [*self.seen, *(f"gap {line}" for line in sorted(self.gap_lines()))]
        return lines + ([f"unwritten: {self.recorder.unwritten.text}"] if self.recorder.unwritten.text else [])


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path / "recorder.sqlite")
    with closing(bench.writer):
        yield bench


def poor(second):
    missing = {"power_w": "Unknown Error", "processes": "No Permission"}
    missing |= {"temperature_c": "Unknown Error"} if second < 5 else {}
    return Reading(utilization_percent=1, temperature_c=None if second < 5 else 50, missing=missing)


def asked_every_five_seconds(second):
    failed = {"energy_j": "Unknown Error"} if second == 5 else {}
    return Reading(utilization_percent=50, energy_j=1e3 if second % 5 == 0 and not failed else None, missing=failed)


def first_asked_at_five(second):
    missing = {"energy_j": "Unknown Error", "processes": "No Permission"} if second == 5 else {}
    return Reading(energy_j=1e3 if second == 10 else None, processes=() if second == 10 else None, missing=missing)


SCRIPTS = {one.__name__: one for one in (poor, asked_every_five_seconds, first_asked_at_five)}


def answers(says):
    """Return the script of a device: in each stretch, why it does not answer or does not give a metric."""
    parts = re.findall(r"([\d.]+)-([\d.]+):(\w*)[=!](\w+)", says)

    def script(second):
        for from_s, to_s, metric, reason in parts:
            if float(from_s) <= second < float(to_s):
                why = reason.replace("_", " ")
                return Reading(utilization_percent=50, missing={metric: why}) if metric else why
        return Reading(utilization_percent=50, power_w=100.0)

    return script


def record(bench, text):
    """Record as a line of the file says, whose head explains it."""
    ticks, *words = text.split()
    reported = dict(word.split("=", 1) for word in words)
    bench.clock.sleep(float(reported.get("begin", 0)))
    for second in filter(None, reported.get("looks", "").split(",")):
        bench.at[float(second)] = lambda: bench.seen.append(f"meanwhile: {bench.gap_lines()}")
    late, late_s = reported.get("late", "-1/0").split("/")
    bench.at[float(late)] = lambda: bench.clock.sleep(float(late_s))
    bench.at[float(reported.get("die", -1))] = lambda: pytest.fail("killed") if "die" in reported else None
    still, still_s = reported.get("still", "-1/0").split("/")
    bench.stands_still = float(still), float(still_s)
    from_s, until_s, what = re.split("[-:]", reported.get("ill", "0-0:"), maxsplit=2)
    bench.writer.illness = float(from_s), float(until_s), what
    count, devices = int(reported.get("devices", 1)), []
    if "lost" in reported:
        index, from_s, to_s = re.split("[:-]", reported["lost"])
        devices.append(SimulatedDevice(int(index), lost_at_s=float(from_s), back_at_s=float(to_s)))
    if "lacks" in reported:
        index, metrics = reported["lacks"].split(":")
        devices.append(SimulatedDevice(int(index), unsupported=tuple(metrics.split("+"))))
    reader = bench.simulated(*devices, count=count)
    if "says" in reported or "script" in reported:
        script = answers(reported["says"]) if "says" in reported else SCRIPTS.get(reported["script"])
        reader = bench.scripted(script) if script else NoReader("libnvidia-ml.so.1 was not found")
    since = {"since_ms": bench.start_ms} if "begin" in reported and not bench.seconds() else {}
    with suppress(pytest.fail.Exception):
        bench.run(int(ticks), reader, count, float(reported.get("last", 0.5)), again="again" in reported, **since)


def test_what_is_missing_is_written_as_a_gap(tmp_path, pages):
    said = []
    _, _, cases = read_data("recordings.txt").split("\n\n")
    for number, line in enumerate(cases.splitlines()):
        name, recordings = line.rsplit(": ", 1)
        bench = Bench(tmp_path / f"{number}.sqlite")
        with closing(bench.writer):
            for text in recordings.split(";"):
                record(bench, text)
            said += [f"## {name}", *bench.page(), ""]
    pages({"gaps.txt": "\n".join(said)})


@given(st.integers(100, 3000), st.floats(0, 0.95), st.integers(1, 40), st.floats(0, 9))
@settings(max_examples=30)
def test_every_point_of_the_grid_is_a_sample_or_in_a_gap(interval_ms, cost, ticks, stand_still_s):
    interval_s = interval_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "recorder.sqlite")
        bench.cost_s = cost * interval_s
        bench.at[interval_s] = lambda: bench.clock.sleep(stand_still_s)
        with closing(bench.writer):
            bench.run(ticks, bench.simulated(), last_s=interval_s / 2, interval_s=interval_s)
        *seconds, _last = bench.seconds()
        gaps = [(gap[2], gap[3]) for gap in bench.gaps()]
    assert len(seconds) == ticks + 1
    for second in seconds:
        assert second / interval_s == pytest.approx(round(second / interval_s), abs=0.0015 / interval_s)
    for before, after in pairwise(seconds):
        assert after - before < 1.02 * interval_s + 0.002 or (before, after) in gaps


def test_the_energy_counter_is_read_a_last_time_when_the_recording_ends(bench):
    def script(second):
        return Reading(power_w=100.0, energy_j=100.0 * second if reader.is_last or second % 5 == 0 else None)

    reader = bench.scripted(script)
    bench.run(7, reader)
    counted = query(bench.path, "SELECT at_ms - ?, energy_j FROM sample WHERE energy_j IS NOT NULL", bench.start_ms)
    assert counted == [(0, 0.0), (5000, 500.0), (7500, 750.0)]
    assert query(bench.path, "SELECT count(*), min(cpu_percent) FROM host_sample") == [(9, 10.0)]
    assert query(bench.path, "SELECT DISTINCT task_id FROM sample") == [(TASK,)]


def test_the_recorders_row_says_what_it_cost_every_ten_seconds_and_at_the_end(bench):
    def slow(second):
        bench.clock.sleep(0.2)
        return Reading(utilization_percent=50, power_w=100.0)

    used = iter(range(1, 100))
    backend, use = lambda: ("nvml", "it works here"), lambda: (next(used) / 10, 20 * 2**20)
    cost = room.CostBook(bench.writer, 1.0, bench.start_ms, backend, use, bench.effort)
    bench.books, bench.cost_s = [cost], 0.1
    seen = []
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


class BrokenBook(room.Book):
    """Writes something, then fails, at every instant."""

    def __init__(self, writer, error):
        self._writer, self._error = writer, error

    def write(self, at_ms, readings, unreadable):
        self._writer.put("metric_source", {"device_id": 0, "metric": "half written", "source": "x", "from_ms": at_ms})
        raise self._error

    def finish(self):
        raise self._error


def from_gpm(second):
    return Reading(utilization_percent=1, sources={"busy_percent": "gpm" if second < 4 else "processes"})


DISK = sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("error", [ValueError("a bug"), sqlite3.IntegrityError("UNIQUE"), OSError(5), DISK])
def test_a_book_that_fails_is_reported_once_and_costs_no_sample(bench, error):
    bench.books = [BrokenBook(bench.writer, error), room.SourceBook(bench.writer)]
    bench.run(3, bench.scripted(from_gpm))
    metrics = query(bench.path, "SELECT metric FROM metric_source")
    if error is DISK:
        trouble = ["readings cannot be written: database or disk is full; the telemetry has a gap"]
        assert (bench.seconds(), bench.trouble, metrics) == ([], trouble, [])
        assert bench.recorder.unwritten.reason == "database or disk is full"
    else:
        assert (bench.seconds(), bench.gaps(), len(bench.trouble)) == ([0, 1, 2, 3, 3.5], [], 1)
        assert metrics == [("busy_percent",)], "the others go on"


def test_a_second_loss_is_a_second_gap(bench):
    bench.writer.illness = (1, 3, "write")
    bench.at[4.0] = lambda: setattr(bench.writer, "illness", (5, 8, "write"))
    bench.run(10, bench.simulated())
    assert [(gap[2], gap[3]) for gap in bench.gaps()] == [(0, 3), (4, 8)]
    assert bench.recorder.unwritten == room.Unwritten("database or disk is full"), "it can be written again"


def test_where_a_metric_comes_from_is_written_once_and_when_it_changes(bench):
    bench.books = [room.SourceBook(bench.writer)]
    bench.writer.illness = (0, 2, "write")  # an instant that was refused is made up for
    bench.run(6, bench.scripted(from_gpm))
    rows = query(bench.path, "SELECT metric, source, (from_ms - ?) / 1000.0 FROM metric_source", bench.start_ms)
    assert rows == [("busy_percent", "gpm", 2.0), ("busy_percent", "processes", 4.0)]


def test_the_share_of_the_processor_is_known_from_the_second_reading_on(tmp_path):
    """Waiting for a disk is not busy, guests are not counted twice; memory that can be given back is not used."""
    (tmp_path / "stat").write_text("cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 1 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n")
    reader = room.HostReader(tmp_path)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024), "no time has passed"
    (tmp_path / "stat").write_text("cpu  150 0 50 850 60 0 0 0 90\n")
    assert reader.read() == HostReading(45.5, 600 * 1024, 1000 * 1024)
    (tmp_path / "meminfo").unlink()
    assert reader.read() is None
    real, memory = room.HostReader().read(), psutil.virtual_memory()
    assert real.memory_total_bytes == memory.total
    assert real.memory_used_bytes == pytest.approx(memory.total - memory.available, rel=0.2)
    cpu_s, own_bytes = room.read_own_use()
    assert cpu_s > 0 and 5 * 2**20 < own_bytes < 2**33
