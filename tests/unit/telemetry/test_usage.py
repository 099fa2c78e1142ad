"""What the task's own processes use: nobody is lost, nobody is counted twice, and what is hidden is not zero."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import TaskKey, UsageReading
from rooms.root import SystemClock
from rooms.store import TaskWriter
from rooms.telemetry import ProcessUse, UsageReader, UsageWatch, add_up, growth, pause_s
from support.databases import query
from support.waiting import wait_for

ME = 100


def process(pid: int, parent: int, cpu_ticks: float = 0, started_ticks: float = 1) -> ProcessUse:
    return ProcessUse(pid, parent, started_ticks, cpu_ticks)


def grown(before: Sequence[ProcessUse], now: Sequence[ProcessUse]) -> float:
    by_pid = ({one.pid: one for one in some} for some in (before, now))
    return growth(*by_pid, lambda one: one.cpu_s)


# --- adding up --------------------------------------------------------------------------------------------------------


def test_a_program_that_comes_and_goes_between_two_readings_counts_through_its_parent() -> None:
    assert grown([process(ME, 1, 5)], [process(ME, 1, 45)]) == 40


def test_a_program_that_ends_is_not_counted_a_second_time_when_its_parent_has_waited_for_it() -> None:
    before = [process(ME, 1, 5), process(7, ME, 30), process(8, 7, 100)]
    # 8 ended after 20 more ticks and is part of 7, which ended after 3 more; the wrapper used 1 itself.
    assert grown(before, [process(ME, 1, 5 + 1 + 30 + 3 + 100 + 20)]) == 24


def test_a_number_that_is_used_again_belongs_to_another_process() -> None:
    before = [process(ME, 1, 0), process(7, ME, 500)]
    now = [process(ME, 1, 500), process(7, ME, 2, started_ticks=99)]
    assert grown(before, now) == 2


def test_a_child_that_nobody_waited_for_takes_nothing_from_others() -> None:
    before = [process(ME, 1, 10), process(7, ME, 1000), process(8, ME, 20)]
    assert grown(before, [process(ME, 1, 12), process(8, ME, 25)]) == 5


@dataclass
class Household:
    """Processes as the kernel keeps them: what a child has used is its parent's as soon as that has waited for it."""

    living: dict[int, ProcessUse] = field(default_factory=lambda: {ME: process(ME, 1, 7)})
    numbers: Iterator[int] = field(default_factory=count)
    used: float = 0

    def happen(self, what: str, which: int, ticks: int) -> None:
        pid = sorted(self.living)[which % len(self.living)]
        if what == "start":
            child = 1000 + next(self.numbers)
            self.living[child] = process(child, pid, started_ticks=ticks)
        elif what == "work":
            self._add(pid, ticks)
            self.used += ticks
        elif pid != ME and all(one.parent != pid for one in self.living.values()):
            ended = self.living.pop(pid)
            self._add(ended.parent, ended.cpu_s)

    def _add(self, pid: int, ticks: int) -> None:
        one = self.living[pid]
        self.living[pid] = process(pid, one.parent, one.cpu_s + ticks, one.started_s)


EVENTS = st.tuples(st.sampled_from(["start", "work", "end", "read"]), st.integers(0, 20), st.integers(1, 50))


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_between_readings_everything_is_counted_exactly_once(
    events: list[tuple[str, int, int]],
) -> None:
    house, counted = Household(), 0
    before = dict(house.living)
    for what, which, ticks in [*events, ("read", 0, 1)]:
        if what == "read":
            counted += growth(before, house.living, lambda one: one.cpu_s)
            before = dict(house.living)
        else:
            house.happen(what, which, ticks)
    assert counted == house.used


# --- a reading --------------------------------------------------------------------------------------------------------


def used(*processes: ProcessUse) -> dict[int, ProcessUse]:
    return {one.pid: one for one in processes}


def test_a_reading_is_of_the_whole_family() -> None:
    before = used(ProcessUse(ME, 1, 1, 10.0, 0, 100, 500), ProcessUse(7, ME, 1, 0.0, 0, 300, 0))
    now = used(ProcessUse(ME, 1, 1, 10.5, 0, 100, 1500), ProcessUse(7, ME, 1, 9.5, 0, 300, 9000))
    assert add_up(before) == UsageReading(None, 400, None, 2, "pss"), "a first reading has no time behind it"
    assert add_up(now, before, 10.0, cores=64) == UsageReading(1.0, 400, 1000.0, 2, "pss")


def test_one_who_hides_its_memory_makes_us_count_all_in_the_coarse_way() -> None:
    family = used(ProcessUse(ME, 1, 1, 0.0, 70, 50, 0), ProcessUse(7, ME, 1, 0.0, 60, None, 0))
    assert add_up(family) == UsageReading(None, 130, None, 2, "rss")


def test_one_who_hides_its_reading_leaves_it_unknown_and_not_too_small() -> None:
    family = used(ProcessUse(ME, 1, 1, 0.0, 0, 0, 5), ProcessUse(7, ME, 1, 0.0, 0, 0, None))
    reading = add_up(family, family, 1.0)
    assert (reading.cpu_cores, reading.read_bytes_per_s) == (0.0, None)


def test_one_who_has_ended_holds_no_memory_but_its_time_counts() -> None:
    before = used(ProcessUse(ME, 1, 1, 0.0, 0, 100, 0))
    ended = ProcessUse(7, ME, 1, 1.0, 0, None, 0, has_ended=True)
    assert add_up({**before, 7: ended}, before, 10.0) == UsageReading(0.1, 100, 0.0, 1, "pss")


def test_where_not_even_we_are_to_be_seen_there_is_no_reading() -> None:
    assert UsageReader(2**30).read(1.0) is None


def test_more_than_all_cores_cannot_be_true() -> None:
    before, now = used(process(ME, 1, 0)), used(process(ME, 1, 30))
    assert add_up(now, before, 10.0, cores=2).cpu_cores is None
    assert add_up(now, before, 10.0, cores=4).cpu_cores == 3.0


# --- real processes ---------------------------------------------------------------------------------------------------

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nopen('/dev/zero', 'rb', 0).read(40_000_000)"
HOLDS = "import time\nheld = bytearray(b'x') * 50_000_000\nprint(flush=True)\ntime.sleep(60)"


def test_real_programs_that_come_and_go_are_counted_with_their_time_and_bytes() -> None:
    reader, clock = UsageReader(os.getpid()), SystemClock()
    before_s, times = clock.monotonic_s(), os.times()
    reader.read(before_s)
    for _ in range(2):
        subprocess.run([sys.executable, "-c", BUSY], check=True)
    now_s = clock.monotonic_s()
    reading = reader.read(now_s)
    used_s = sum(os.times()[:4]) - sum(times[:4])
    assert reading is not None and reading.cpu_cores is not None and reading.read_bytes_per_s is not None
    assert used_s > 0.55
    assert reading.cpu_cores * (now_s - before_s) == pytest.approx(used_s, abs=0.1)
    assert 80e6 <= reading.read_bytes_per_s * (now_s - before_s) < 100e6


def test_the_memory_of_a_real_child_is_part_of_it() -> None:
    reader = UsageReader(os.getpid())
    alone = reader.read(0.0)
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = reader.read(1.0)
        child.kill()
    assert alone is not None and both is not None
    assert both.processes == alone.processes + 1
    assert 50e6 < both.memory_bytes - alone.memory_bytes < 70e6
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]  # other tests may have left us some
    assert alone.memory_bytes <= sum(process.memory_info().rss for process in family) + 1e6


# --- the watch --------------------------------------------------------------------------------------------------------


def test_readings_are_close_together_at_first_and_rare_in_long_tasks_and_where_they_are_dear() -> None:
    ages_s = [0, 0.5, 2, 5, 100, 3599, 3600, 100_000]
    assert [pause_s(age_s, 0.01) for age_s in ages_s] == [2, 2, 2, 5, 10, 10, 30, 30]
    assert pause_s(0, 0.001) == 1
    assert pause_s(100, 0.2) == pytest.approx(40), "half a percent of the time"


def test_a_watch_reads_at_once_and_again_at_its_end_however_short_it_was() -> None:
    watch = UsageWatch(UsageReader(os.getpid()), SystemClock())
    first = wait_for(lambda: list(watch.take_readings()), "the first reading")
    time.sleep(0.05)
    watch.finish()
    last = list(watch.take_readings())
    assert [reading.cpu_cores for reading, _ in first] == [None]
    assert [reading.cpu_cores is None for reading, _ in last] == [False]
    assert first[0][1] < last[0][1]
    assert watch.memory_held is not None and watch.memory_held.memory_bytes == last[0][0].memory_bytes
    assert list(watch.take_readings()) == []


def test_a_reading_is_written_with_what_is_unknown_as_null(tmp_path: Path) -> None:
    writer = TaskWriter(tmp_path / "wrapper.sqlite", TaskKey("4821", 7, 1, "gpu3"))
    writer.add_usage(UsageReading(None, 5 * 2**30, None, 9, "pss"), 1000)
    writer.add_usage(UsageReading(3.25, 6 * 2**30, 1e6, 8, "rss"), 11_000)
    writer.close()
    sql = "SELECT task_id, at_ms, cpu_cores, memory_bytes, read_bytes_per_s, processes, source FROM usage_sample"
    assert query(tmp_path / "wrapper.sqlite", sql) == [
        (writer.task_id, 1000, None, 5 * 2**30, None, 9, "pss"),
        (writer.task_id, 11_000, 3.25, 6 * 2**30, 1e6, 8, "rss"),
    ]
