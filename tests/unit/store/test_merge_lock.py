"""One merge at a time: the second waits and says so, and a merge that was killed is in nobody's way."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import merge_lock
from support.databases import names_in
from support.hand_clock import HandClock
from support.small_disk import largest_file
from support.task_files import TaskFile, merge_run
from support.waiting import wait_for

HERE, PID = os.uname().nodename, os.getpid()


class TouchingClock(HandClock):
    """While this clock is waited for, another node touches the lock, for a while."""

    def __init__(self, lock: Path, touches: int) -> None:
        super().__init__()
        self._lock, self._touches, self.waited_s = lock, touches, 0  # since the last touch

    def sleep(self, seconds: float) -> None:
        assert seconds == pytest.approx(0.2)
        super().sleep(1)
        self._touches, self.waited_s = self._touches - 1, self.waited_s + 1
        if self._touches >= 0:
            os.utime(self._lock, ns=(0, self.now_ms()))
            self.waited_s = 0


def test_a_lock_is_taken_over_from_a_process_that_is_gone_or_silent_for_a_minute(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    lock, target = tmp_path / ".job.sqlite.lock", tmp_path / "job.sqlite"
    waiting = "another merge is running on {}, process {}; waiting for it"
    for content, touches, said in (
        (f"{HERE} {gone.pid}", 0, None), ("another-node 77", 90, ("another-node", 77)),
        (f"another-node {gone.pid}", 0, ("another-node", gone.pid)), (f"{HERE} {PID}", 0, (HERE, PID)),
        ("", 0, ("an unknown node", "unknown")), (f"{HERE} x", 0, (HERE, "x")),
        (None, 0, ("an unknown node", "unknown")),
    ):  # fmt: skip
        lock.mkdir() if content is None else lock.write_text(content)
        clock = TouchingClock(lock, touches)
        told: list[str] = []
        with merge_lock(target, clock, tell=told.append):
            assert lock.read_text() == f"{HERE} {PID}"
        assert names_in(tmp_path) == [], "nothing is left"
        assert told == ([] if said is None else [waiting.format(*said)]), content
        assert clock.waited_s == (0 if said is None else 61), content


def test_a_long_merge_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, pauses_s = threading.Event.wait, list[float]()

    def wait_a_hundredth(event: threading.Event, timeout: float | None = None) -> bool:
        pauses_s.append(timeout or 0.0)
        return wait(event, timeout and timeout / 100)

    monkeypatch.setattr(threading.Event, "wait", wait_a_hundredth)
    lock = tmp_path / ".job.sqlite.lock"
    with merge_lock(tmp_path / "job.sqlite", SystemClock(), tell=print):
        for _ in range(2):
            os.utime(lock, (0, 0))
            wait_for(lambda: lock.stat().st_mtime, "the lock is touched")
    assert 0 < max(pauses_s) <= 20


@pytest.mark.parametrize("more", [1, 11], ids=["changed in place", "made anew"])
def test_a_merge_that_was_taken_for_dead_replaces_nothing(tmp_path: Path, more: int) -> None:
    lock, target = tmp_path / ".job.sqlite.lock", tmp_path / "job.sqlite"
    TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    merge_run(tmp_path)
    before = target.read_bytes()
    for index in range(1, more + 1):
        TaskFile(tmp_path, index=index, states={f"b{index}": "done"}).write()

    def be_taken_over(files: int, of: int, rows: int) -> None:
        lock.write_text("another-node 77")

    with pytest.raises(DatabaseProblem, match="another merge has taken over") as refused:
        merge_run(tmp_path, progress=be_taken_over)
    assert refused.value.why == "this merge has replaced nothing"
    assert (target.read_bytes(), lock.read_text()) == (before, "another-node 77")
    assert names_in(tmp_path) == [lock.name, target.name, "tasks"]


def test_a_lock_for_which_there_is_no_room_is_not_left_empty(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(OSError), merge_lock(tmp_path / "job.sqlite", HandClock(), tell=print):
        pass
    assert names_in(tmp_path) == []
