"""One merge at a time: the second waits or says so, and a merge that was killed is in nobody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rooms.root import Clock, DatabaseProblem, SystemClock
from rooms.store import MergeOrder, merge, merge_lock
from support.hand_clock import HandClock
from support.task_files import TaskFile


def told(*, lock_of: Path, clock: Clock | None = None) -> list[str]:
    said: list[str] = []
    with merge_lock(lock_of, clock or SystemClock(), tell=said.append):
        return said


def test_the_second_merge_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    target, said = tmp_path / "job.sqlite", []
    order: list[str] = []
    with merge_lock(target, SystemClock(), tell=said.append):
        second = threading.Thread(target=lambda: (said.extend(told(lock_of=target)), order.append("second")))
        second.start()
        time.sleep(0.5)
        order.append("first")
    second.join()
    assert order == ["first", "second"]
    assert said == [f"another merge is running on {os.uname().nodename}, process {os.getpid()}; waiting for it"]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_merge_that_was_killed_here_is_taken_over_at_once(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from badcjobs.clock import SystemClock
from badcjobs.store.merge_target import merge_lock
with merge_lock(Path({str(tmp_path / "job.sqlite")!r}), SystemClock(), tell=print):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [path.name for path in tmp_path.iterdir()] == [".job.sqlite.lock"]
    assert told(lock_of=tmp_path / "job.sqlite") == []
    assert list(tmp_path.iterdir()) == []


class TouchingClock(HandClock):
    """While this clock is waited for, another node touches the lock, for a while."""

    def __init__(self, lock: Path, touches: int) -> None:
        super().__init__()
        self._lock = lock
        self._touches = touches
        self.last_touch_s = 0.0

    def sleep(self, seconds: float) -> None:
        super().sleep(10)
        if self._touches:
            self._touches -= 1
            os.utime(self._lock, ns=(0, self.now_ms()))
            self.last_touch_s = self.monotonic_s()


def test_a_lock_from_another_node_is_taken_over_only_when_nobody_touches_it_any_more(tmp_path: Path) -> None:
    lock = tmp_path / ".job.sqlite.lock"
    lock.write_text("another-node 77")
    clock = TouchingClock(lock, touches=20)
    said = told(lock_of=tmp_path / "job.sqlite", clock=clock)
    assert said == ["another merge is running on another-node, process 77; waiting for it"]
    assert clock.last_touch_s > 0
    assert clock.monotonic_s() - clock.last_touch_s >= 60
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_takes_long_keeps_its_lock_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, pauses_s = threading.Event.wait, list[float]()

    def wait_a_hundredth(event: threading.Event, timeout: float | None = None) -> bool:
        pauses_s.append(timeout or 0.0)
        return wait(event, timeout and timeout / 100)

    monkeypatch.setattr(threading.Event, "wait", wait_a_hundredth)
    lock = tmp_path / ".job.sqlite.lock"
    with merge_lock(tmp_path / "job.sqlite", SystemClock(), tell=print):
        for _ in range(2):
            os.utime(lock, (0, 0))
            patience_s = time.monotonic() + 20
            while lock.stat().st_mtime == 0:
                assert time.monotonic() < patience_s, "nobody touches the lock"
                time.sleep(0.01)
    assert max(pauses_s) <= 20, "well within the minute after which another merge takes it over"
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_was_taken_for_dead_replaces_nothing_and_leaves_the_lock_to_the_next(tmp_path: Path) -> None:
    lock, target = tmp_path / ".job.sqlite.lock", tmp_path / "job.sqlite"
    TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    merge(MergeOrder([tmp_path], target), SystemClock())
    before = target.read_bytes()
    for more in (1, 11):  # changed where it lies, and made anew
        for index in range(1, more + 1):
            TaskFile(tmp_path, index=index, states={f"b{index}": "done"}).write()

        def be_taken_over(files: int, of: int, rows: int) -> None:
            lock.write_text("another-node 77")

        with pytest.raises(DatabaseProblem, match="another merge has taken over"):
            merge(MergeOrder([tmp_path], target, progress=be_taken_over), SystemClock())
        assert target.read_bytes() == before
        assert lock.read_text() == "another-node 77"
        lock.unlink()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sqlite", "tasks"]


def test_two_merges_at_once_both_end_well_and_lose_nothing(tmp_path: Path) -> None:
    first = [TaskFile(tmp_path, index=n, states={f"a{n}": "done"}, samples=200).write() for n in range(8)]
    second = [TaskFile(tmp_path, index=n, states={f"b{n}": "done"}, samples=200).write() for n in range(8, 16)]
    target = tmp_path / "job.sqlite"
    threads = [
        threading.Thread(target=merge, args=(MergeOrder(files, target), SystemClock())) for files in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert merge(MergeOrder([tmp_path], target), SystemClock()).read == 0
