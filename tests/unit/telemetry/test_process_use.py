"""Processes: whose they are that use a device, and what the task's own use; what is hidden is not zero."""

import getpass
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import telemetry as room
from rooms.model import ProcessReading, Reading, UsageReading
from rooms.root import SystemClock
from rooms.telemetry import ProcessLookup, ProcessOwner, ProcessUse, TelemetryWriter, UsageReader, add_up, growth
from support.cases import read_lines
from support.databases import query
from support.waiting import wait_for

START_MS = 1_800_000_000_000
MARK = "BADCJOBS_TASK=4821_7.r0.gpu3-99"
OTHER_MARK = "BADCJOBS_RECORDING=4821_7.r0.gpu3-99"


def lookup(wrapper_pid=2**22 + 1, **more):
    return ProcessLookup(wrapper_pid=wrapper_pid, marks=[OTHER_MARK, MARK], **more)


NAMESPACES = {"host": 4026531836, "container": 4026532811}


def test_a_process_is_accused_only_if_it_is_surely_not_ours(tmp_path):
    """In a container a number may mean another process; an environment that does not say may be our own."""
    for number, owner in enumerate(read_lines("process_owners.txt")):
        proc, (where, whose, environ, wrapper, _, ours) = tmp_path / str(number), owner.split()
        uid = os.getuid() + (whose == "other")
        said = environ.replace("empty", "").replace("RECORDING", OTHER_MARK).replace("MARK", MARK).replace("\\0", "\0")
        for pid, parent in ((42, 7), (7, 1)):
            (proc / str(pid)).mkdir(parents=True)
            (proc / f"{pid}/status").write_text(f"Name:\tpython\nPPid:\t{parent}\nUid:\t{uid}\t5\t5\t5\n")
        (proc / "42/environ").mkdir() if environ == "closed" else (proc / "42/environ").write_text(said)
        (proc / "self/ns").mkdir(parents=True)
        if where in NAMESPACES:
            (proc / "self/ns/pid").symlink_to(f"pid:[{NAMESPACES[where]}]")
        who = lookup(int(wrapper), proc=proc).look_up(42)
        assert str(who.ours) == ours, owner
        is_hidden = where == "container" and not who.ours
        assert (who.name, who.user is None) == (None if is_hidden else "python", is_hidden)
    (proc / "7/environ").write_text(MARK)
    (proc / "42/environ").write_text("A=1")
    assert lookup(9, proc=proc).look_up(42).ours is True, "the child of a process of ours, with another environment"
    me = lookup(os.getppid()).look_up(os.getpid())
    assert me == ProcessOwner(Path("/proc/self/comm").read_text().strip(), getpass.getuser(), True)
    assert lookup().look_up(2**22 + 1) == ProcessOwner(None, None, None), "it does not exist here"


# Second → device → what it lists, each a pid, perhaps bytes and percent
FEEDS = {
    0: {1: [(10, 100, 40)], 2: [(20, 50)]}, 1: {1: None}, 5: {1: [(10, 900, 50), (20, 1), (30,)], 2: []},
    10: {1: [(10, 300)], 2: []}, 20: {1: [(10, 4), (30, 2)]}, 80: {1: [(10, 7)]}, 140.001: {1: [(10, 1)]},
}  # fmt: skip


def test_a_process_has_one_row_per_device_and_one_sample_per_reading(tmp_path, pages):
    """A number that comes back after more than a minute is another process."""
    path, asked = tmp_path / "r.sqlite", []
    people = {10: ProcessOwner("python", "ada", True), 20: ProcessOwner("train", "bob", False)}

    def look_up(pid):
        asked.append(pid)
        return people.get(pid, ProcessOwner())

    with closing(TelemetryWriter(path, 77)) as writer:
        book = room.ProcessBook(writer, look_up)
        for second, devices in FEEDS.items():
            lists = {n: said and [ProcessReading(*one) for one in said] for n, said in devices.items()}
            with writer.batch():
                readings = [(device, Reading(processes=listed)) for device, listed in lists.items()]
                book.write(START_MS + round(1000 * second), readings, {})
            book.written()
    assert asked == [10, 20, 20, 30, 10], "each is looked up once per device"
    found = """SELECT device_id, pid, name, user, ours, (first_at_ms - ?1) / 1000.0, (last_at_ms - ?1) / 1000.0,
                      memory_peak_bytes FROM process ORDER BY first_at_ms, device_id, pid"""
    samples = """SELECT task_id, device_id, (at_ms - ?) / 1000, pid, memory_used_bytes, sm_percent
                 FROM process_sample ORDER BY rowid"""
    rows = [*query(path, found, START_MS), "samples:", *query(path, samples, START_MS)]
    pages({"rows.txt": "\n".join(map(str, rows))})


TOP = 100


EVENTS = st.tuples(st.sampled_from(["start", "work", "end", "read"]), st.integers(0, 20), st.integers(1, 50))


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=60)
def test_everything_is_counted_exactly_once(events):
    """What a child has used is its parent's as soon as that has waited for it."""
    living, parents, counted, expected = {TOP: ProcessUse(7)}, dict[int, int](), 0, 0
    before = {**living}

    def add(pid, ticks):
        living[pid] = replace(living[pid], cpu_s=living[pid].cpu_s + ticks)

    for number, (what, which, ticks) in enumerate([*events, ("read", 0, 1)], 1000):
        pid = sorted(living)[which % len(living)]
        if what == "start":
            living[number], parents[number] = ProcessUse(0), pid
        elif what == "work":
            add(pid, ticks)
            expected += ticks
        elif what == "read":
            counted += growth(before, living, lambda one: one.cpu_s)
            before = {**living}
        elif pid != TOP and all(parents.get(one) != pid for one in living):
            add(parents[pid], living.pop(pid).cpu_s)
    assert counted == expected


def test_nothing_is_counted_twice_when_a_number_is_used_again_or_a_child_is_left_alone():
    for before, now, wanted in (
        ({TOP: 1, 7: 500}, {TOP: 501, 7: 2}, 2),
        ({TOP: 10, 7: 500, 8: 20}, {TOP: 12, 8: 25}, 0),
    ):
        assert growth(before, now, lambda cpu_s: cpu_s) == wanted


def test_a_reading_is_of_the_whole_family_and_what_one_hides_is_unknown_and_not_too_small(monkeypatch):
    before = {TOP: ProcessUse(10.0, 0, 100, 500), 7: ProcessUse(0.0, 0, 300, 0)}
    now = {TOP: ProcessUse(10.5, 0, 100, 1500), 7: ProcessUse(9.5, 0, 300, 9000)}
    assert add_up(before, None, 0.0) == UsageReading(None, 400, None, 2, "pss"), "a first reading has no time behind it"
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert add_up(now, before, 10.0) == UsageReading(1.0, 400, 1000.0, 2, "pss")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert add_up(now, before, 2.0).cpu_cores == 5.0
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert add_up(now, before, 2.0).cpu_cores is None, "more than all cores cannot be true"
    hidden = {TOP: ProcessUse(0.0, 70, 50, 5), 7: ProcessUse(0.0, 60, None, None)}
    assert add_up(hidden, hidden, 1.0) == UsageReading(0.0, 130, None, 2, "rss"), "all in the coarse way"
    ended = ProcessUse(1.0, 0, None, 0, has_ended=True)
    first = {TOP: ProcessUse(0.0, 0, 100, 0)}
    assert add_up({**first, 7: ended}, first, 10.0) == UsageReading(0.1, 100, 0.0, 1, "pss"), "it holds no memory"
    assert UsageReader(2**30).read(1.0) is None


BUSY = "import time\nwhile time.process_time() < 0.3: pass\nopen('/dev/zero', 'rb', 0).read(40_000_000)"
HOLDS = "import sys\nheld = bytearray(b'x') * 50_000_000\nprint(flush=True)\nsys.stdin.read()"


def test_real_programs_are_counted_with_their_time_bytes_and_memory():
    reader, clock = UsageReader(os.getpid()), SystemClock()
    before_s, times = clock.monotonic_s(), os.times()
    alone = reader.read(before_s)
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    now_s = clock.monotonic_s()
    reading = reader.read(now_s)
    used_s = sum(os.times()[:4]) - sum(times[:4])
    assert reading.cpu_cores * (now_s - before_s) == pytest.approx(used_s, abs=0.1)
    assert 40e6 <= reading.read_bytes_per_s * (now_s - before_s) < 60e6
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        both = reader.read(now_s + 1)
        child.stdin.close()
    assert both.processes == alone.processes + 1
    assert 50e6 < both.memory_bytes - reading.memory_bytes < 70e6


def test_a_watch_reads_at_once_and_at_its_end_and_rarely_in_long_tasks_or_at_a_price():
    ages_s = {0: 1, 0.5: 1, 2: 2, 5: 4, 119: 4, 120: 10, 3599: 10, 3600: 30, 100_000: 30}
    assert {age_s: room.pause_s(age_s, 0.01) for age_s in ages_s} == ages_s
    expensive = [room.pause_s(age_s, 0.4) for age_s in (0, 120)]
    assert expensive == pytest.approx([8, 80]), "half a percent of the time, and more in the first minutes"
    watch = room.UsageWatch(UsageReader(os.getpid()), SystemClock())
    ((first, first_ms),) = wait_for(lambda: list(watch.take_readings()), "the first reading")
    wait_for(lambda: SystemClock().now_ms() > first_ms, "the next millisecond")
    watch.finish()
    *_, (last, last_ms) = watch.take_readings()
    assert first.cpu_cores is None and last.cpu_cores is not None and first_ms < last_ms
    assert watch.memory_held.memory_bytes == last.memory_bytes
    assert list(watch.take_readings()) == []
