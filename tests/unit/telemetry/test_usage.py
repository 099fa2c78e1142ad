"""What the task's own processes use: nothing is lost or counted twice, and what is hidden is not zero."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import UsageReading
from rooms.root import SystemClock
from rooms.telemetry import ProcessUse, UsageReader, UsageWatch, add_up, growth, pause_s
from support.waiting import wait_for

ME = 100


def process(pid: int, parent: int, cpu_ticks: float = 0, started_ticks: float = 1) -> ProcessUse:
    return ProcessUse(pid, parent, started_ticks, cpu_ticks)


def used(*processes: ProcessUse) -> dict[int, ProcessUse]:
    return {one.pid: one for one in processes}


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

    def _add(self, pid: int, ticks: float) -> None:
        one = self.living[pid]
        self.living[pid] = process(pid, one.parent, one.cpu_s + ticks, one.started_s)


EVENTS = st.tuples(st.sampled_from(["start", "work", "end", "read"]), st.integers(0, 20), st.integers(1, 50))


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=60)
def test_whatever_happens_between_readings_everything_is_counted_exactly_once(
    events: list[tuple[str, int, int]],
) -> None:
    house, counted = Household(), 0.0
    before = dict(house.living)
    for what, which, ticks in [*events, ("read", 0, 1)]:
        if what == "read":
            counted += growth(before, house.living, lambda one: one.cpu_s)
            before = dict(house.living)
        else:
            house.happen(what, which, ticks)
    assert counted == house.used


def test_nothing_is_counted_twice_when_a_number_is_used_again_or_a_child_is_left_alone() -> None:
    for before, now, wanted in (
        ([process(ME, 1), process(7, ME, 500)], [process(ME, 1, 500), process(7, ME, 2, started_ticks=99)], 2),
        ([process(ME, 1, 10), process(7, ME, 1000), process(8, ME, 20)], [process(ME, 1, 12), process(8, ME, 25)], 5),
    ):
        assert growth(used(*before), used(*now), lambda one: one.cpu_s) == wanted


def test_a_reading_is_of_the_whole_family_and_what_one_hides_is_unknown_and_not_too_small() -> None:
    before = used(ProcessUse(ME, 1, 1, 10.0, 0, 100, 500), ProcessUse(7, ME, 1, 0.0, 0, 300, 0))
    now = used(ProcessUse(ME, 1, 1, 10.5, 0, 100, 1500), ProcessUse(7, ME, 1, 9.5, 0, 300, 9000))
    assert add_up(before) == UsageReading(None, 400, None, 2, "pss"), "a first reading has no time behind it"
    assert add_up(now, before, 10.0, cores=64) == UsageReading(1.0, 400, 1000.0, 2, "pss")
    assert add_up(now, before, 2.0, cores=5).cpu_cores == 5.0
    assert add_up(now, before, 2.0, cores=4).cpu_cores is None, "more than all cores cannot be true"
    hidden = used(ProcessUse(ME, 1, 1, 0.0, 70, 50, 5), ProcessUse(7, ME, 1, 0.0, 60, None, None))
    assert add_up(hidden, hidden, 1.0) == UsageReading(0.0, 130, None, 2, "rss"), "all in the coarse way"
    ended = ProcessUse(7, ME, 1, 1.0, 0, None, 0, has_ended=True)
    first = used(ProcessUse(ME, 1, 1, 0.0, 0, 100, 0))
    assert add_up({**first, 7: ended}, first, 10.0) == UsageReading(0.1, 100, 0.0, 1, "pss"), "it holds no memory"
    assert UsageReader(2**30).read(1.0) is None


BUSY = "import time\nwhile time.process_time() < 0.3: pass\nopen('/dev/zero', 'rb', 0).read(40_000_000)"
HOLDS = "import sys\nheld = bytearray(b'x') * 50_000_000\nprint(flush=True)\nsys.stdin.read()"


def test_real_programs_are_counted_with_their_time_bytes_and_memory() -> None:
    reader, clock = UsageReader(os.getpid()), SystemClock()
    before_s, times = clock.monotonic_s(), os.times()
    alone = reader.read(before_s)
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    now_s = clock.monotonic_s()
    reading = reader.read(now_s)
    used_s = sum(os.times()[:4]) - sum(times[:4])
    assert alone is not None and reading is not None
    assert reading.cpu_cores is not None and reading.read_bytes_per_s is not None
    assert reading.cpu_cores * (now_s - before_s) == pytest.approx(used_s, abs=0.1)
    assert 40e6 <= reading.read_bytes_per_s * (now_s - before_s) < 60e6
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        both = reader.read(now_s + 1)
        child.stdin.close()
    assert both is not None and both.processes == alone.processes + 1
    assert 50e6 < both.memory_bytes - reading.memory_bytes < 70e6


def test_a_watch_reads_at_once_and_at_its_end_and_rarely_in_long_tasks_or_where_a_reading_is_expensive() -> None:
    ages_s = {0: 2, 0.5: 2, 2: 2, 5: 5, 100: 10, 3599: 10, 3600: 30, 100_000: 30}
    assert {age_s: pause_s(age_s, 0.01) for age_s in ages_s} == ages_s
    assert (pause_s(0, 0.001), pause_s(100, 0.2)) == (1, pytest.approx(40)), "half a percent of the time"
    watch = UsageWatch(UsageReader(os.getpid()), SystemClock())
    ((first, first_ms),) = wait_for(lambda: list(watch.take_readings()), "the first reading")
    wait_for(lambda: SystemClock().now_ms() > first_ms, "the next millisecond")
    watch.finish()
    *_, (last, last_ms) = watch.take_readings()
    assert first.cpu_cores is None and last.cpu_cores is not None and first_ms < last_ms
    assert watch.memory_held is not None and watch.memory_held.memory_bytes == last.memory_bytes
    assert list(watch.take_readings()) == []
