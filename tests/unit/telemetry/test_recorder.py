"""The recorder's grid and its gaps, on a clock that only moves when it is told to."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
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
    Unwritten,
    parse_cpu_times,
    parse_exit_reason,
    parse_memory,
    parse_status,
    read_own_use,
)
from support.databases import query
from support.hand_clock import HandClock

import badcjobs.telemetry.recorder_process as recording

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


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "recorder.sqlite")
    with closing(bench.writer):
        yield bench


def steady(second: float) -> Reading:
    return Reading(utilization_percent=50, power_w=100.0)


# --- the grid ---------------------------------------------------------------------------------------------------------


def test_there_is_a_sample_at_every_point_of_the_grid_and_a_last_one_at_the_end(bench: Bench) -> None:
    bench.run(5, last_s=0.4)
    assert bench.seconds() == [0, 1, 2, 3, 4, 5, 5.4]
    assert bench.gaps() == []


@pytest.mark.parametrize("cost_s", [0.001, 0.3, 0.95])
def test_the_grid_does_not_drift_however_much_a_tick_costs(bench: Bench, cost_s: float) -> None:
    bench.cost_s = cost_s
    bench.run(50)
    assert bench.seconds()[:51] == list(range(51))
    assert bench.gaps() == []


@pytest.mark.parametrize("interval_s", [0.1, 0.2, 0.3, 0.7, 1.1, 2.5])
def test_any_interval_gives_its_own_grid_without_doubles_or_holes(bench: Bench, interval_s: float) -> None:
    bench.cost_s = 0.002
    bench.run(100, interval_s=interval_s, last_s=interval_s / 2)
    assert bench.seconds()[:101] == pytest.approx([number * interval_s for number in range(101)], abs=0.0015)
    assert bench.gaps() == []


def test_the_energy_counter_is_read_a_last_time_when_the_recording_ends(bench: Bench) -> None:
    class EveryFiveSeconds(ScriptedReader):
        """Gives the counter every five seconds, and when it is to leave nothing out."""

        is_last = False

        def read(self, uuid: str) -> Reading:
            second = self._clock.monotonic_s() - self._start_s
            return Reading(power_w=100.0, energy_j=100.0 * second if self.is_last or second % 5 == 0 else None)

        def force_full_read(self) -> None:
            self.is_last = True

    bench.run(7, EveryFiveSeconds(bench.clock, {}))
    counted = query(bench.path, "SELECT at_ms - ?, energy_j FROM sample WHERE energy_j IS NOT NULL", bench.start_ms)
    assert counted == [(0, 0.0), (5000, 500.0), (7500, 750.0)]


def test_the_end_at_the_very_moment_of_a_tick_has_an_instant_of_its_own(bench: Bench) -> None:
    bench.run(3, last_s=0)
    assert bench.seconds() == [0, 1, 2, 3, 3.001]


def test_every_device_and_the_machine_are_sampled_at_the_same_instants(bench: Bench) -> None:
    bench.run(3, bench.simulated(count=3), devices=3)
    assert bench.seconds(0) == bench.seconds(1) == bench.seconds(2) == [0, 1, 2, 3, 3.5]
    assert query(bench.path, "SELECT count(*), min(cpu_percent) FROM host_sample") == [(5, 10.0)]
    assert query(bench.path, "SELECT DISTINCT task_id FROM sample") == [(TASK,)]


# --- missed points ----------------------------------------------------------------------------------------------------


def test_points_that_were_missed_become_a_gap_and_the_grid_goes_on(bench: Bench) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(3.5)
    bench.run(6)
    assert bench.seconds() == [0, 1, 2, 6, 7, 8, 9, 9.5]
    assert bench.gaps() == [(None, None, 2.0, 6.0, "the recorder was late: 3 readings missed")]


def test_a_single_point_that_was_missed_is_a_gap(bench: Bench) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(1.2)
    bench.run(4)
    assert bench.seconds() == [0, 1, 2, 4, 5, 5.5]
    assert bench.gaps() == [(None, None, 2.0, 4.0, "the recorder was late: 1 reading missed")]


def test_a_recorder_that_stands_still_between_two_ticks_leaves_a_gap_as_long_as_the_hole(bench: Bench) -> None:
    bench.stands_still = (3.0, 2.2)  # as by SIGSTOP: from the wait after second 3
    bench.run(8)
    assert bench.gaps() == [(None, None, 3.0, 6.2, "the recorder was late: 2 readings missed")]


@pytest.mark.parametrize(
    ("start_s", "gaps"), [(1.4, []), (4, [(None, None, 0.0, 4.0, "the recorder was slow to start")])]
)
def test_the_time_before_the_first_reading_is_a_gap_when_it_is_long(
    bench: Bench, start_s: float, gaps: list[tuple[object, ...]]
) -> None:
    bench.clock.sleep(start_s)
    bench.run(2, since_ms=bench.start_ms)
    assert bench.gaps() == gaps


def test_a_recorder_that_follows_one_that_died_before_its_first_reading_writes_the_hole(bench: Bench) -> None:
    bench.clock.sleep(0.4)
    bench.run(2, since_ms=bench.start_ms, again=True)
    assert bench.gaps() == [(None, None, 0.0, 0.4, "the recorder died and was restarted")]


def test_a_tick_that_is_late_but_misses_no_point_is_no_gap(bench: Bench) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(0.999)
    bench.run(4)
    assert bench.gaps() == []


def test_a_machine_that_sleeps_through_the_night_leaves_one_gap(bench: Bench) -> None:
    bench.at[1.0] = lambda: bench.clock.sleep(8 * 3600)
    bench.run(2)
    [(_, _, from_s, to_s, _)] = bench.gaps()
    assert (from_s, to_s) == (1.0, 28802.0)


# --- a disk that refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["begin", "write"])
def test_an_instant_that_cannot_be_written_becomes_a_gap_when_it_can_again(bench: Bench, what: str) -> None:
    bench.writer.fall_ill(2, 4, what)
    bench.run(6)
    assert bench.seconds() == [0, 1, 4, 5, 6, 6.5]
    assert bench.gaps() == [(None, None, 1.0, 4.0, "could not be written: database or disk is full")]


def test_the_first_instant_of_all_may_be_refused(bench: Bench) -> None:
    bench.writer.fall_ill(0, 1, "write")
    bench.run(2)
    assert bench.seconds() == [1, 2, 2.5]
    assert bench.gaps() == [(None, None, 0.0, 1.0, "could not be written: database or disk is full")]


@pytest.mark.parametrize("what", ["begin", "write", "note gaps", "begin write note gaps"])
def test_a_disk_that_refuses_and_a_tick_that_is_late_do_not_end_the_recorder(bench: Bench, what: str) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(5.5)
    bench.writer.fall_ill(2.5, 9.5, what)
    bench.run(12)
    seconds = bench.seconds()
    assert seconds[:2] == [0, 1]
    assert seconds[-1] > 12
    for before, after in pairwise(seconds):
        told = [(gap[2], gap[3]) for gap in bench.gaps()]
        assert after - before <= 1 or (before, after) in told, f"nobody tells what happened from {before} to {after}"


def test_the_hole_of_an_earlier_recorder_is_told_later_when_it_cannot_be_told_now(bench: Bench) -> None:
    bench.run(1)
    bench.clock.sleep(4)
    bench.writer.fall_ill(0, 6, "note gaps")
    bench.run(2)
    assert bench.gaps() == [(None, None, 1.5, 6.5, "could not be written: database or disk is full")]


@pytest.mark.parametrize("what", ["begin", "write"])
def test_gaps_that_were_open_before_the_refusal_stay_one_gap_each(bench: Bench, what: str) -> None:
    lost = SimulatedDevice(0, lost_at_s=1, back_at_s=8)
    poor = SimulatedDevice(1, unsupported=("power_w",))
    bench.writer.fall_ill(3, 5, what)
    bench.run(10, bench.simulated(lost, poor, count=2), devices=2)
    assert sorted(bench.gaps(), key=str) == [
        (0, None, 0.0, 8.0, "GPU is lost (simulated)"),
        (1, "power_w", 0.0, 10.5, "Not Supported (simulated)"),
        (None, None, 2.0, 5.0, "could not be written: database or disk is full"),
    ]


def test_a_device_that_comes_back_while_the_disk_refuses_has_its_gap_closed_afterwards(bench: Bench) -> None:
    bench.writer.fall_ill(4, 6, "write")
    bench.run(8, bench.simulated(SimulatedDevice(0, lost_at_s=2, back_at_s=4)))
    assert sorted(bench.gaps(), key=str) == [
        (0, None, 1.0, 6.0, "GPU is lost (simulated)"),
        (None, None, 3.0, 6.0, "could not be written: database or disk is full"),
    ]


def test_a_disk_that_never_comes_back_is_told_to_whoever_can_still_write(bench: Bench) -> None:
    bench.writer.fall_ill(3, 1e9, "write")
    bench.run(6)
    assert bench.gaps() == []
    unwritten = bench.recorder.unwritten
    assert unwritten == Unwritten(4.5, "database or disk is full", bench.start_ms + 2000)
    assert unwritten.text == "4.5 s of readings could not be written: database or disk is full"
    end_ms = bench.start_ms + 7000
    assert unwritten.gaps(end_ms) == [(bench.start_ms + 2000, end_ms, "could not be written: database or disk is full")]
    assert bench.refused == ["database or disk is full"], "once per stretch, not once per tick"


def test_what_the_file_tells_already_is_not_told_again_but_counted(bench: Bench) -> None:
    bench.writer.fall_ill(2, 4, "write")
    bench.run(6)
    assert bench.recorder.unwritten == Unwritten(3.0, "database or disk is full", None)
    assert bench.recorder.unwritten.gaps(bench.start_ms + 9000) == []


def test_a_recorder_that_could_write_everything_has_nothing_to_tell(bench: Bench) -> None:
    bench.run(3)
    assert bench.recorder.unwritten == Unwritten()
    assert bench.recorder.unwritten.text is None


# --- devices that do not answer ---------------------------------------------------------------------------------------


def test_a_lost_device_is_a_gap_from_its_last_reading_to_its_next_and_the_others_go_on(bench: Bench) -> None:
    bench.run(8, bench.simulated(SimulatedDevice(1, lost_at_s=2.5, back_at_s=5.5), count=2), devices=2)
    assert bench.seconds(0) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8.5]
    assert bench.seconds(1) == [0, 1, 2, 6, 7, 8, 8.5]
    assert bench.gaps() == [(1, None, 2.0, 6.0, "GPU is lost (simulated)")]


def test_a_device_that_never_comes_back_has_a_gap_until_the_last_moment_known(bench: Bench) -> None:
    bench.run(5, bench.simulated(SimulatedDevice(0, lost_at_s=2)))
    assert bench.seconds() == [0, 1]
    assert bench.gaps() == [(0, None, 1.0, 5.5, "GPU is lost (simulated)")]


def test_the_gap_stands_in_the_file_while_it_lasts(bench: Bench) -> None:
    seen: list[list[tuple[object, ...]]] = []
    bench.at[4.0] = lambda: seen.append(bench.gaps())
    bench.run(5, bench.simulated(SimulatedDevice(0, lost_at_s=2)))
    assert seen == [[(0, None, 1.0, 3.0, "GPU is lost (simulated)")]]


def test_a_device_that_never_answered_is_a_gap_from_the_start(bench: Bench) -> None:
    bench.run(3, bench.scripted(lambda second: "no permission"))
    assert bench.seconds() == []
    assert bench.gaps() == [(0, None, 0.0, 3.5, "no permission")]


def test_a_new_reason_is_a_new_gap_that_begins_where_the_old_one_ends(bench: Bench) -> None:
    def script(second: float) -> Reading | str:
        return steady(second) if second < 2 or second >= 6 else "GPU is lost" if second < 4 else "reset required"

    bench.run(8, bench.scripted(script))
    assert bench.gaps() == [(0, None, 1.0, 4.0, "GPU is lost"), (0, None, 4.0, 6.0, "reset required")]


def test_a_device_lost_twice_has_two_gaps(bench: Bench) -> None:
    bench.run(8, bench.scripted(lambda second: "lost" if second in (2, 5, 6) else steady(second)))
    assert bench.gaps() == [(0, None, 1.0, 3.0, "lost"), (0, None, 4.0, 7.0, "lost")]


def test_a_device_that_nothing_can_read_is_a_gap_with_its_reason(bench: Bench) -> None:
    known = [Followed(8, None), Followed(9, None)]
    sampler = Sampler(NoReader("libnvidia-ml.so.1 was not found"), known, Gaps(bench.writer, bench.start_ms))
    for _ in range(3):
        assert sampler.sample(bench.clock.now_ms()) == []
        bench.clock.sleep(1)
    reason = "no driver library to read it with: libnvidia-ml.so.1 was not found"
    assert bench.gaps() == [(8, None, 0.0, 2.0, reason), (9, None, 0.0, 2.0, reason)]
    assert sampler.unreadable == {8: reason, 9: reason}


# --- metrics that are not given ---------------------------------------------------------------------------------------


def test_a_metric_that_is_never_given_is_one_gap_over_the_whole_time(bench: Bench) -> None:
    device = SimulatedDevice(0, unsupported=("power_w", "energy_j"))
    bench.run(4, bench.simulated(device))
    assert bench.seconds() == [0, 1, 2, 3, 4, 4.5]
    assert sorted(bench.gaps(), key=str) == [
        (0, "energy_j", 0.0, 4.5, "Not Supported (simulated)"),
        (0, "power_w", 0.0, 4.5, "Not Supported (simulated)"),
    ]


def test_a_metric_that_stops_is_a_gap_from_its_last_value_to_its_next(bench: Bench) -> None:
    def script(second: float) -> Reading:
        if 3 <= second < 6:
            return Reading(utilization_percent=50, missing={"power_w": "Unknown Error"})
        return steady(second)

    bench.run(8, bench.scripted(script))
    assert bench.gaps() == [(0, "power_w", 2.0, 6.0, "Unknown Error")]


def test_a_metric_with_a_new_reason_has_a_new_gap_that_begins_where_the_old_one_ends(bench: Bench) -> None:
    def script(second: float) -> Reading:
        if second < 2 or second >= 6:
            return steady(second)
        reason = "Unknown Error" if second < 4 else "No Permission"
        return Reading(utilization_percent=50, missing={"power_w": reason})

    bench.run(8, bench.scripted(script))
    assert bench.gaps() == [(0, "power_w", 1.0, 4.0, "Unknown Error"), (0, "power_w", 4.0, 6.0, "No Permission")]


def test_a_metric_that_fails_when_it_is_first_asked_is_missing_since_the_start(bench: Bench) -> None:
    def script(second: float) -> Reading:
        refused = {"energy_j": "Unknown Error"} if second == 5 else {}
        return Reading(utilization_percent=50, energy_j=1000.0 if second == 10 else None, missing=refused)

    bench.run(12, bench.scripted(script))
    assert bench.gaps() == [(0, "energy_j", 0.0, 10.0, "Unknown Error")]


def test_a_metric_that_is_only_asked_now_and_then_is_not_missing_in_between(bench: Bench) -> None:
    def script(second: float) -> Reading:
        due = second % 5 == 0
        failed = {"energy_j": "Unknown Error"} if second == 5 else {}
        energy_j = 1000.0 + second if due and not failed else None
        return Reading(utilization_percent=50, energy_j=energy_j, missing=failed)

    bench.run(12, bench.scripted(script))
    assert bench.gaps() == [(0, "energy_j", 0.0, 10.0, "Unknown Error")]


def test_a_list_of_processes_that_is_not_given_is_a_gap_too(bench: Bench) -> None:
    def script(second: float) -> Reading:
        refused = {"processes": "No Permission"} if second == 5 else {}
        return Reading(utilization_percent=1, processes=() if second in (0, 10) else None, missing=refused)

    bench.run(12, bench.scripted(script))
    assert bench.gaps() == [(0, "processes", 0.0, 10.0, "No Permission")]


def test_a_device_that_loses_a_metric_and_then_itself_has_both_gaps(bench: Bench) -> None:
    def script(second: float) -> Reading | str:
        if second < 2:
            return steady(second)
        return "lost" if second >= 4 else Reading(utilization_percent=1, missing={"power_w": "Unknown Error"})

    bench.run(6, bench.scripted(script))
    assert bench.gaps() == [(0, "power_w", 1.0, 3.0, "Unknown Error"), (0, None, 3.0, 6.5, "lost")]


def poor_then_lost(second: float) -> Reading | str:
    """Give no power, be lost from second 17 to 20, and give power again from 25 on."""
    if 17 <= second < 20:
        return "lost"
    return steady(second) if second >= 25 else Reading(utilization_percent=1, missing={"power_w": "Unknown Error"})


def test_the_gap_of_a_metric_reaches_the_last_reading_before_its_device_is_lost(bench: Bench) -> None:
    seen: list[list[tuple[object, ...]]] = []
    for second in (18.0, 21.0):
        bench.at[second] = lambda: seen.append([gap for gap in bench.gaps() if gap[1] == "power_w"])
    bench.run(30, bench.scripted(poor_then_lost))
    assert seen == [
        [(0, "power_w", 0.0, 16.0, "Unknown Error")],
        [(0, "power_w", 0.0, 20.0, "Unknown Error")],  # as it is back, its metrics are up to date again
    ]
    assert bench.gaps() == [(0, "power_w", 0.0, 25.0, "Unknown Error"), (0, None, 16.0, 20.0, "lost")]


def test_a_stretch_that_the_disk_refused_is_made_up_for_at_the_next_instant(bench: Bench) -> None:
    seen: list[list[tuple[object, ...]]] = []
    bench.at[14.0] = lambda: seen.append([gap for gap in bench.gaps() if gap[1] == "power_w"])
    bench.writer.fall_ill(11, 13, "write")  # the stretch that is due at second 11, and the next try
    bench.run(15, bench.scripted(lambda second: Reading(missing={"power_w": "Unknown Error"})))
    assert seen == [[(0, "power_w", 0.0, 13.0, "Unknown Error")]]


# --- a second recorder ------------------------------------------------------------------------------------------------


def test_a_second_recorder_on_the_same_file_writes_the_hole_and_goes_on(bench: Bench) -> None:
    bench.run(3)
    bench.clock.sleep(4)
    bench.run(2)
    assert bench.seconds() == [0, 1, 2, 3, 3.5, 7.5, 8.5, 9.5, 10]
    assert bench.gaps() == [(None, None, 3.5, 7.5, "the recorder died and was restarted")]


def test_the_gaps_of_metrics_that_a_killed_recorder_left_open_reach_its_last_sample(bench: Bench) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    def script(second: float) -> Reading:
        missing = {"power_w": "Unknown Error", "processes": "No Permission"}
        if second < 5:
            missing["temperature_c"] = "Unknown Error"
        return Reading(utilization_percent=1, temperature_c=None if second < 5 else 50, missing=missing)

    bench.at[8.0] = die
    with pytest.raises(Killed):
        bench.run(20, bench.scripted(script))
    told = {gap[1]: gap[2:] for gap in bench.gaps()}
    assert told["power_w"] == (0.0, 7.0, "Unknown Error")
    assert told["temperature_c"] == (0.0, 5.0, "Unknown Error"), "this one had ended"


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        (
            {1: "no permission"},
            ["1 device cannot be read: no permission; the work continues, with a gap in the telemetry"],
        ),
        (
            {1: "no permission", 2: "no permission", 3: "GPU is lost"},
            ["2 devices cannot be read: no permission; the work continues, with a gap in the telemetry"],
        ),
    ],
)
def test_devices_without_a_first_reading_are_counted_in_good_english(silent: dict[int, str], said: list[str]) -> None:
    assert recording.describe_unreadable(silent) == said


LOGGED = "2026-11-02 12:00:00,123 recorder {} {}\n"
INFO = LOGGED.format("INFO", "device 7 does not give power_w: Unknown Error")
LATE = LOGGED.format("WARNING", "the recorder was late and missed 3 readings")
OURS = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    main()\n'
    "badcjobs.errors.BadInput: badcjobs: error: tape.sqlite is no recording\n"
    "  why: it has no samples\n  try: badcjobs record --out tape.sqlite\n"
)
RAISED = 'Traceback (most recent call last):\n  File "x.py", line 1\nsqlite3.OperationalError: disk I/O error\nmore\n'
LAST_WORDS = {
    "nothing": ("", "no error message"),
    "news only": (INFO + INFO, "no error message"),
    "a warning, then news": (INFO + LATE + INFO, "the recorder was late and missed 3 readings"),
    "one of our errors": (LATE + OURS + INFO, "badcjobs: error: tape.sqlite is no recording"),
    "any other": (OURS + RAISED + LATE, "sqlite3.OperationalError: disk I/O error"),
    "an error that was logged": (INFO + LOGGED.format("ERROR", "the last one") + LATE, "the last one"),
    "the interpreter's own": ("Fatal Python error: Bus error\n\nCurrent thread 0x1\n", "Fatal Python error: Bus error"),
    "a text": ("no recorder today", "no recorder today"),
}


@pytest.mark.parametrize(("text", "words"), LAST_WORDS.values(), ids=LAST_WORDS)
def test_the_last_words_of_a_recorder_are_those_that_say_why(text: str, words: str) -> None:
    assert parse_exit_reason(text) == words


def test_a_first_recorder_writes_no_hole(bench: Bench) -> None:
    bench.run(1)
    assert bench.gaps() == []


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_lateness_counts_from_the_first_point_that_should_have_been_read(bench: Bench) -> None:
    bench.at[2.0] = lambda: bench.clock.sleep(3.5)
    bench.run(6)
    assert bench.effort.worst_late_s == pytest.approx(3.0), "the point of second 3 was read in second 6"
    assert bench.effort.ticks == 8


@pytest.mark.parametrize("interval_s", [0.1, 0.3, 0.7, 1.0])
def test_a_recorder_in_time_is_not_late_whatever_its_interval(bench: Bench, interval_s: float) -> None:
    bench.run(100, interval_s=interval_s)
    assert bench.effort.worst_late_s == pytest.approx(0, abs=0.0015)


def test_the_recorders_row_is_brought_up_to_date_every_ten_seconds_and_at_the_end(bench: Bench) -> None:
    used = iter(range(1, 100))
    backend = ("nvml", "it works here")
    bench.books = [
        CostBook(
            bench.writer,
            bench.effort,
            interval_s=1.0,
            started_at_ms=bench.start_ms,
            backend=lambda: backend,
            use=lambda: (next(used) / 10, 20 * 2**20),
        )
    ]
    seen: list[list[tuple[object, ...]]] = []
    bench.at[15.0] = lambda: seen.append(query(bench.path, "SELECT ticks, last_at_ms - started_at_ms FROM recorder"))
    bench.run(20, last_s=0.5)
    assert seen == [[(11, 10_000)]]
    assert query(bench.path, "SELECT pid, backend, why, interval_s, ticks, cpu_s, memory_bytes FROM recorder") == [
        (os.getpid(), "nvml", "it works here", 1.0, 22, 0.4, 20 * 2**20)
    ]


def test_time_spent_reading_devices_is_not_the_time_of_the_rest(bench: Bench) -> None:
    def slow(second: float) -> Reading:
        bench.clock.sleep(0.2)
        return steady(second)

    bench.cost_s = 0.1
    bench.run(4, bench.scripted(slow))
    assert bench.effort.reading_s == pytest.approx(6 * 0.2)


def test_the_words_for_the_log_say_what_was_used(bench: Bench) -> None:
    cost = CostBook(
        bench.writer,
        Effort(61, 0.0125, 0.1),
        interval_s=1.0,
        started_at_ms=bench.start_ms,
        backend=lambda: ("simulated", ""),
        use=lambda: (0.3, 24 * 2**20),
    )
    cost.write(bench.start_ms + 60_000, [], {})
    said = "61 samples with simulated in 60 s; 0.30 s of CPU (0.50 % of a core), 24 MiB, at most 0.013 s late"
    assert cost.text in (said, said.replace("0.013", "0.012"))


def test_own_use_is_what_the_system_says() -> None:
    cpu_s, memory_bytes = read_own_use()
    assert cpu_s > 0
    assert memory_bytes is not None
    assert 5 * 2**20 < memory_bytes < 2**33
    assert parse_status("VmPeak:\t 9 kB\nVmHWM:\t  24360 kB\n")["VmHWM"].split() == ["24360", "kB"]


# --- notes beside the samples -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("error", [ValueError("a bug"), sqlite3.IntegrityError("UNIQUE"), KeyError(7), OSError(5)])
def test_notes_that_fail_cost_no_sample_and_are_said_once(bench: Bench, error: Exception) -> None:
    bench.books = [BrokenBook(bench.writer, error), SourceBook(bench.writer)]
    bench.run(4, bench.scripted(lambda second: Reading(utilization_percent=1, sources={"busy_percent": "gpm"})))
    assert bench.seconds() == [0, 1, 2, 3, 4, 4.5]
    assert bench.gaps() == []
    assert len(bench.trouble) == 1
    assert query(bench.path, "SELECT metric FROM metric_source") == [("busy_percent",)], "the others go on"


def test_a_disk_that_refuses_the_notes_refuses_the_instant(bench: Bench) -> None:
    bench.books = [BrokenBook(bench.writer, sqlite3.OperationalError("database or disk is full"))]
    bench.run(2)
    assert bench.seconds() == []
    assert bench.recorder.unwritten.reason == "database or disk is full"


def test_where_a_metric_comes_from_is_written_once_and_when_it_changes(bench: Bench) -> None:
    def script(second: float) -> Reading:
        return Reading(utilization_percent=1, sources={"busy_percent": "gpm" if second < 3 else "processes"})

    bench.books = [SourceBook(bench.writer)]
    bench.run(6, bench.scripted(script))
    rows = query(bench.path, "SELECT metric, source, (from_ms - ?) / 1000.0 FROM metric_source", bench.start_ms)
    assert rows == [("busy_percent", "gpm", 0.0), ("busy_percent", "processes", 3.0)]


def test_a_source_whose_instant_was_refused_is_written_with_the_next(bench: Bench) -> None:
    bench.books = [SourceBook(bench.writer)]
    bench.writer.fall_ill(0, 2, "write")
    bench.run(4, bench.scripted(lambda second: Reading(utilization_percent=1, sources={"busy_percent": "gpm"})))
    rows = query(bench.path, "SELECT source, (from_ms - ?) / 1000.0 FROM metric_source", bench.start_ms)
    assert rows == [("gpm", 2.0)]


# --- the machine around -----------------------------------------------------------------------------------------------

STAT = "cpu  100 0 50 800 50 0 0 0 30 0\ncpu0 1 1 1 1\n"
MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n"


def test_waiting_for_a_disk_is_not_busy_and_guests_are_not_counted_twice() -> None:
    assert parse_cpu_times(STAT) == (150, 1000)


def test_memory_that_could_be_given_back_is_not_used() -> None:
    assert parse_memory(MEMINFO) == (600 * 1024, 1000 * 1024)


def test_a_share_is_known_from_the_second_reading_on(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    reader = HostReader(tmp_path)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024)
    assert reader.read() == HostReading(None, 600 * 1024, 1000 * 1024), "no time has passed"
    (tmp_path / "stat").write_text("cpu  150 0 50 850 50 0 0 0\n")
    assert reader.read() == HostReading(50.0, 600 * 1024, 1000 * 1024)
    (tmp_path / "meminfo").unlink()
    assert reader.read() is None


def test_the_machine_reads_as_the_system_tools_say() -> None:
    reading = HostReader().read()
    assert reading is not None
    memory = psutil.virtual_memory()
    assert reading.memory_total_bytes == memory.total
    assert reading.memory_used_bytes == pytest.approx(memory.total - memory.available, rel=0.2)
