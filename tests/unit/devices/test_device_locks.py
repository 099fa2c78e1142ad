"""The locks of free devices: one holder, seen by everybody, given back by the kernel, and not to be tricked."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rooms.devices import DeviceLocks, describe_holder, lock_folder
from rooms.root import NotHere, SystemClock
from support.hand_clock import HandClock
from support.powerless import powerless_folder

CARD, OTHER = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


def locks_of(folder: Path, holder: str = "run of alice, pid 1234, /home/alice/runs/july") -> DeviceLocks:
    return DeviceLocks(folder, SystemClock(), holder)


def view_of(folder: Path) -> DeviceLocks:
    return DeviceLocks(folder, SystemClock(), None)


# --- one holder -------------------------------------------------------------------------------------------------------


def test_a_device_has_one_holder_and_others_learn_who_it_is(folder: Path) -> None:
    with locks_of(folder) as alice, locks_of(folder, "run of bob, pid 5, /home/bob") as bob:
        assert alice.claim(CARD) is None
        assert bob.claim(CARD) == "is locked by run of alice, pid 1234, /home/alice/runs/july"
        assert bob.claim(OTHER) is None
        assert alice.claim(OTHER) == "is locked by run of bob, pid 5, /home/bob"


def test_looking_takes_nothing_and_leaves_nothing(folder: Path) -> None:
    assert view_of(folder).claim(CARD) is None
    with view_of(folder).exclusive():
        assert not folder.exists()
    with locks_of(folder) as alice:
        assert alice.claim(CARD) is None
        assert view_of(folder).claim(CARD) == "is locked by run of alice, pid 1234, /home/alice/runs/july"
        assert view_of(folder).claim(OTHER) is None
        assert alice.claim(OTHER) is None, "a look holds nobody off"


def test_a_device_that_was_given_back_is_anybodys(folder: Path) -> None:
    alice = locks_of(folder)
    assert alice.claim(CARD) is None
    alice.release()
    assert view_of(folder).claim(CARD) is None
    with locks_of(folder) as bob:
        assert bob.claim(CARD) is None
    alice.release()  # once more does no harm


def test_whoever_was_handed_the_open_file_keeps_the_device_when_its_holder_is_gone(folder: Path) -> None:
    alice = locks_of(folder)
    assert alice.claim(CARD) is None
    (file,) = alice.files
    handed = os.dup(file)
    os.close(file)  # what the end of a process does
    assert (view_of(folder).claim(CARD) or "").startswith("is locked by run of alice")
    os.close(handed)
    assert view_of(folder).claim(CARD) is None


def test_a_device_that_was_given_back_is_free_at_once_though_another_has_the_open_file(folder: Path) -> None:
    alice = locks_of(folder)
    assert alice.claim(CARD) is None
    handed = os.dup(alice.files[0])
    alice.release()
    assert view_of(folder).claim(CARD) is None
    assert alice.files == ()
    os.close(handed)


def test_a_slice_with_a_slash_in_its_name_has_a_lock_like_any_other(folder: Path) -> None:
    with locks_of(folder) as alice:
        assert alice.claim("MIG-GPU-aaaa/1/0") is None
        assert (view_of(folder).claim("MIG-GPU-aaaa/1/0") or "").startswith("is locked by run of alice")
        assert view_of(folder).claim("MIG-GPU-aaaa/2/0") is None


# --- other processes --------------------------------------------------------------------------------------------------

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from badcjobs.clock import SystemClock
from badcjobs.devices.locks import DeviceLocks
locks = DeviceLocks(Path(sys.argv[1]), SystemClock(), "run of carol, pid 9, /tmp")
print(locks.claim("GPU-aaaa"), flush=True)
child = subprocess.Popen(["sleep", "30"], close_fds=False)
print(child.pid, flush=True)
time.sleep(30)
"""


@contextmanager
def another_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the lock of the card and has a child, which is started as carelessly as possible."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "None\n"
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_kernel_gives_back_the_lock_of_a_killed_run_though_its_child_lives_on(folder: Path) -> None:
    with another_process(folder) as (process, child):
        assert view_of(folder).claim(CARD) == "is locked by run of carol, pid 9, /tmp"
        process.kill()
        process.wait()
        try:
            os.kill(child, 0)  # it is there
            with locks_of(folder) as alice:
                assert alice.claim(CARD) is None
        finally:
            os.kill(child, 9)


# --- a folder for everybody -------------------------------------------------------------------------------------------


def test_everybody_may_lock_and_nobody_may_remove_the_locks_of_others(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with locks_of(folder) as alice, alice.exclusive():
            assert alice.claim(CARD) is None
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666}


def test_what_one_user_has_locked_before_another_may_lock_now() -> None:
    with powerless_folder() as place:
        other = os.geteuid()
        os.seteuid(os.getuid())  # root's files, if we are root; else we are one user, and that must work too
        with locks_of(place / "locks") as root:
            assert root.claim(CARD) is None
        os.seteuid(other)
        with locks_of(place / "locks", "run of nobody") as nobody:
            assert nobody.claim(CARD) is None
            assert view_of(place / "locks").claim(CARD) == "is locked by run of nobody"


def test_a_folder_that_was_there_keeps_its_mode(folder: Path) -> None:
    folder.mkdir(mode=0o750)
    with locks_of(folder) as alice:
        assert alice.claim(CARD) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_a_link_in_the_place_of_a_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    (folder / f"{CARD}.lock").symlink_to(victim)
    with locks_of(folder) as alice:
        assert (alice.claim(CARD) or "").startswith("cannot be locked")
        assert (view_of(folder).claim(CARD) or "").startswith("cannot be checked for a lock")
    assert victim.read_text() == "precious"


def test_a_link_in_the_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotHere, match=r"cannot use .* for device locks") as refused:
        locks_of(folder).claim(CARD)
    assert "BADCJOBS_LOCK_DIR" in (refused.value.fix or "")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_pipe_in_the_place_of_a_lock_does_not_hang_anybody(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / f"{CARD}.lock")
    with locks_of(folder) as alice:
        assert alice.claim(CARD) == "cannot be locked: not a regular file"
        assert view_of(folder).claim(CARD) == "cannot be checked for a lock: not a regular file"


def test_a_folder_that_cannot_be_made_is_an_answer_with_a_line_to_paste(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "locks", tmp_path / "no" / "such" / "parent"):
        with pytest.raises(NotHere) as refused:
            locks_of(place).claim(CARD)
        assert (refused.value.fix or "").startswith("export BADCJOBS_LOCK_DIR=")


def test_what_a_holder_wrote_cannot_steer_a_terminal(folder: Path) -> None:
    with locks_of(folder, "run of \x1b[31mmallory\n" + "x" * 10_000) as mallory:
        assert mallory.claim(CARD) is None
        said = view_of(folder).claim(CARD) or ""
    assert said.isprintable()
    assert len(said) < 600


def test_a_lock_whose_file_was_cleaned_away_is_taken_anew(folder: Path) -> None:
    with locks_of(folder) as alice:
        assert alice.claim(CARD) is None
        (folder / f"{CARD}.lock").unlink()
        with locks_of(folder) as bob:
            assert bob.claim(CARD) is None  # nothing can be done about that
            assert (view_of(folder).claim(CARD) or "").startswith("is locked by")


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_one_who_stands_still_at_the_gate_does_not_stop_the_others(folder: Path) -> None:
    clock = HandClock()
    with locks_of(folder).exclusive():
        began_s = clock.monotonic_s()
        with DeviceLocks(folder, clock, "bob").exclusive():
            assert clock.monotonic_s() - began_s == pytest.approx(2.0, abs=0.1)


def test_the_gate_lets_one_in_after_the_other(folder: Path) -> None:
    with locks_of(folder).exclusive():
        gate = os.open(folder / "picking.lock", os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(gate)
    clock = HandClock()
    began_s = clock.monotonic_s()
    with DeviceLocks(folder, clock, None).exclusive():
        assert clock.monotonic_s() == began_s


# --- words and places -------------------------------------------------------------------------------------------------


def test_the_folder_is_the_machines_own_unless_the_environment_names_another(tmp_path: Path) -> None:
    assert lock_folder({"BADCJOBS_LOCK_DIR": str(tmp_path)}) == tmp_path
    assert lock_folder({"BADCJOBS_LOCK_DIR": "", "TMPDIR": "/elsewhere"}) in (
        Path("/run/lock/badcjobs"),
        Path("/tmp/badcjobs-locks"),
    )


def test_a_holder_says_who_and_where(tmp_path: Path) -> None:
    words = describe_holder(77, tmp_path)
    assert words.startswith("run of ") and words.endswith(f", pid 77, {tmp_path}")
