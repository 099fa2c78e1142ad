"""What the task's own processes use: nobody is lost, nobody is counted twice, and what is hidden is not zero."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.databases import query
from support.hand_clock import HandClock
from support.waiting import wait_for

from badcjobs.clock import SystemClock
from badcjobs.model import TaskKey, UsageReading
from badcjobs.store.task_writer import TaskWriter
from badcjobs.telemetry.usage import ProcessUse, UsageReader, UsageWatch, family, growth, parse_process, pause_s

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ME = 100


def process(pid: int, parent: int, cpu_ticks: int = 0, started_ticks: int = 1) -> ProcessUse:
    return ProcessUse(pid, parent, started_ticks, cpu_ticks, rss_pages=10, has_ended=False)


def grown(before: Sequence[ProcessUse], now: Sequence[ProcessUse]) -> int:
    by_pid = ({one.pid: one for one in some} for some in (before, now))
    return growth(*by_pid, lambda one: one.cpu_ticks)


# --- adding up --------------------------------------------------------------------------------------------------------


def test_a_family_is_a_process_and_all_below_it() -> None:
    everybody = [process(1, 0), process(ME, 1), process(7, ME), process(8, 7), process(9, 1), process(10, 9)]
    assert set(family(everybody, ME)) == {ME, 7, 8}
    assert family(everybody, 555) == {}


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
    used: int = 0

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
            self._add(ended.parent, ended.cpu_ticks)

    def _add(self, pid: int, ticks: int) -> None:
        one = self.living[pid]
        self.living[pid] = process(pid, one.parent, one.cpu_ticks + ticks, one.started_ticks)


EVENTS = st.tuples(st.sampled_from(["start", "work", "end", "read"]), st.integers(0, 20), st.integers(1, 50))


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_between_readings_everything_is_counted_exactly_once(
    events: list[tuple[str, int, int]],
) -> None:
    house, counted = Household(), 0
    before = dict(house.living)
    for what, which, ticks in [*events, ("read", 0, 1)]:
        if what == "read":
            counted += growth(before, house.living, lambda one: one.cpu_ticks)
            before = dict(house.living)
        else:
            house.happen(what, which, ticks)
    assert counted == house.used


# --- files of /proc ---------------------------------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> Callable[..., Path]:
    """Write the files of a process, as far as they are to be seen."""

    def write(
        pid: int, parent: int = 1, *, ticks: int = 0, state: str = "S", pss_kib: int | None = 100, read: int | None = 0
    ) -> Path:
        folder = tmp_path / str(pid)
        folder.mkdir(exist_ok=True)
        times = f"{ticks} 0 0 0"
        (folder / "stat").write_text(
            f"{pid} (a) b (c) {state} {parent} 1 1 0 -1 0 0 0 0 0 {times} 20 0 1 0 55 999 64 0"
        )
        if pss_kib is not None:
            (folder / "smaps_rollup").write_text(
                f"0-1 ---p [rollup]\nRss: 9999 kB\nPss:  {pss_kib} kB\nPss_Dirty: 1 kB\n"
            )
        if read is not None:
            (folder / "io").write_text(f"rchar: {read}\nwchar: 1\nread_bytes: 7\n")
        return folder

    return write


def test_the_name_of_a_program_may_hold_anything() -> None:
    stat = b"42 (a) S 9 (b c) R 7 1 1 0 -1 0 0 0 0 0 10 20 300 4000 20 0 1 0 55 999 64 0"
    assert parse_process(42, stat) == ProcessUse(42, 7, 55, 4330, 64, has_ended=False)


def test_a_reading_is_of_the_whole_family_and_of_nobody_else(proc: Callable[..., Path], tmp_path: Path) -> None:
    proc(ME, ticks=1000, read=500)
    proc(7, ME, ticks=0, pss_kib=300, read=0)
    proc(8, 1, ticks=0, pss_kib=10_000)
    reader = UsageReader(ME, tmp_path, cores=64)
    assert reader.read(50.0) == UsageReading(None, 400 * 1024, None, 2, "pss"), "a first reading has no time behind it"
    proc(ME, ticks=1050, read=1500)
    proc(7, ME, ticks=950, pss_kib=300, read=9000)
    assert reader.read(60.0) == UsageReading(pytest.approx(1000 * TICK_S / 10), 400 * 1024, 1000.0, 2, "pss")


def test_one_who_hides_its_memory_makes_us_count_all_in_the_coarse_way(
    proc: Callable[..., Path], tmp_path: Path
) -> None:
    proc(ME)
    proc(7, ME, pss_kib=None)
    reading = UsageReader(ME, tmp_path).read(1.0)
    assert reading == UsageReading(None, 2 * 64 * PAGE, None, 2, "rss")


def test_one_who_hides_its_reading_leaves_it_unknown_and_not_too_small(
    proc: Callable[..., Path], tmp_path: Path
) -> None:
    proc(ME, ticks=0)
    proc(7, ME, read=None)
    reader = UsageReader(ME, tmp_path)
    reader.read(1.0)
    reading = reader.read(2.0)
    assert reading is not None
    assert (reading.cpu_cores, reading.read_bytes_per_s) == (0.0, None)


def test_one_who_has_ended_holds_no_memory_but_its_time_counts(proc: Callable[..., Path], tmp_path: Path) -> None:
    proc(ME)
    reader = UsageReader(ME, tmp_path)
    reader.read(1.0)
    proc(7, ME, state="Z", ticks=100, pss_kib=None)
    assert reader.read(11.0) == UsageReading(pytest.approx(100 * TICK_S / 10), 100 * 1024, 0.0, 1, "pss")


def test_where_not_even_we_are_to_be_seen_there_is_no_reading(proc: Callable[..., Path], tmp_path: Path) -> None:
    proc(7, ME)
    assert UsageReader(ME, tmp_path).read(1.0) is None


def test_more_than_all_cores_cannot_be_true(proc: Callable[..., Path], tmp_path: Path) -> None:
    proc(ME, ticks=0)
    reader = UsageReader(ME, tmp_path, cores=2)
    reader.read(0.0)
    proc(ME, ticks=round(30 / TICK_S))
    reading = reader.read(10.0)
    assert reading is not None
    assert reading.cpu_cores is None


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
    first = wait_for(lambda: list(watch.news()), "the first reading")
    time.sleep(0.05)
    watch.finish()
    last = list(watch.news())
    assert [reading.cpu_cores for reading, _ in first] == [None]
    assert [reading.cpu_cores is None for reading, _ in last] == [False]
    assert first[0][1] < last[0][1]
    assert watch.memory_held is not None and watch.memory_held.memory_bytes == last[0][0].memory_bytes
    assert list(watch.news()) == []


def test_a_proc_that_cannot_be_read_ends_the_watch_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = UsageWatch(UsageReader(ME, tmp_path / "nothing"), HandClock())
    watch.finish()
    assert list(watch.news()) == []
    assert watch.memory_held is None
    assert [record.message for record in caplog.records if "cannot be read" in record.message]
    assert len(caplog.records) == 1


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
