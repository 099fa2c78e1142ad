"""The locks of free devices: one holder, shown to all users, released by the kernel, safe against other users."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms.devices import DeviceLocks, describe_holder, lock_folder
from rooms.root import NotHere
from support.hand_clock import HandClock
from support.powerless import powerless_folder

CARD, OTHER = "GPU-aaaa", "MIG-GPU-bbbb/1/0"
ALICE, BOB = "run of alice, pid 1234, /home/alice", "run of bob, pid 5, /home/bob"
BY_ALICE = f"is locked by {ALICE}"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for locks; no file may stay open."""
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir()))
    yield tmp_path / "locks"
    assert len(list(opened.iterdir())) == before


def locks_of(folder: Path, holder: str | None = ALICE) -> DeviceLocks:
    return DeviceLocks(folder, HandClock(), holder)


def seen(folder: Path, uuid: str = CARD) -> str | None:
    """Return what a run that only looks is told."""
    return locks_of(folder, None).claim(uuid)


def test_a_device_has_one_holder_and_others_learn_who_it_is(folder: Path) -> None:
    assert seen(folder) is None
    with locks_of(folder, None).exclusive():
        assert not folder.exists(), "looking leaves nothing"
    with locks_of(folder) as alice, locks_of(folder, BOB) as bob:
        assert (alice.claim(CARD), bob.claim(CARD), seen(folder)) == (None, BY_ALICE, BY_ALICE)
        assert (seen(folder, OTHER), bob.claim(OTHER), alice.claim(OTHER)) == (None, None, f"is locked by {BOB}")
        assert seen(folder, OTHER.replace("/1/", "/2/")) is None
        assert (len(alice.files), len(bob.files)) == (1, 1)
    assert seen(folder) is seen(folder, OTHER) is None
    assert alice.files == ()
    alice.release()  # once more does no harm
    with locks_of(folder, BOB) as bob:
        assert bob.claim(CARD) is None
        assert seen(folder) == f"is locked by {BOB}"


def test_a_process_with_the_open_file_keeps_the_device_unless_it_was_released(folder: Path) -> None:
    alice = locks_of(folder)
    assert alice.claim(CARD) is None
    (file,) = alice.files
    handed = os.dup(file)
    os.close(file)  # as at the end of a process
    assert seen(folder) == BY_ALICE
    os.close(handed)
    assert seen(folder) is None
    with locks_of(folder) as bob:
        assert bob.claim(CARD) is None
        handed = os.dup(bob.files[0])
        bob.release()
        assert seen(folder) is None
        assert [file.read_text() for file in folder.glob("GPU*")] == [""]
        os.close(handed)


HOLDER = """
import subprocess, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from rooms.devices import DeviceLocks
from rooms.root import SystemClock
locks = DeviceLocks(Path(sys.argv[1]), SystemClock(), "run of carol, pid 9, /tmp")
print(locks.claim("GPU-aaaa"), flush=True)
print(subprocess.Popen(["sleep", "30"], close_fds=False, stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""


def test_the_kernel_releases_the_lock_of_a_killed_run_though_its_child_lives_on(folder: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(folder), str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as carol:
        assert carol.stdout is not None and carol.stdout.readline() == "None\n"
        child = int(carol.stdout.readline())
        assert seen(folder) == "is locked by run of carol, pid 9, /tmp"
        carol.kill()
    try:
        os.kill(child, 0)  # it is there
        assert seen(folder) is None
    finally:
        os.kill(child, 9)


def test_all_users_can_lock_and_none_can_remove_the_locks_of_others(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with locks_of(folder) as alice, alice.exclusive():
            assert alice.claim(CARD) is None
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666}
    folder.chmod(0o750)
    with locks_of(folder) as alice:
        alice.claim(CARD)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750, "a folder that exists keeps its mode"


def test_a_file_of_another_user_can_be_locked_even_if_it_is_read_only() -> None:
    with powerless_folder() as place:
        other = os.geteuid()
        os.seteuid(os.getuid())  # root's files, if we are root; else we are one user, and that must work too
        with locks_of(place / "locks") as root:
            root.claim(CARD), root.claim(OTHER)
        for file in (place / "locks").glob("MIG*"):
            file.chmod(0o444)
        os.seteuid(other)
        with locks_of(place / "locks", BOB) as bob:
            assert (bob.claim(CARD), bob.claim(OTHER)) == (None, None)
            assert seen(place / "locks") == f"is locked by {BOB}"
            assert (seen(place / "locks", OTHER) or "").startswith("is locked by ")


def test_links_pipes_and_texts_of_other_users_do_no_harm(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    (folder / f"{CARD}.lock").symlink_to(victim)
    os.mkfifo(folder / "GPU-pipe.lock")
    with locks_of(folder) as alice:
        assert (alice.claim(CARD) or "").startswith("cannot be locked: ")
        assert (seen(folder) or "").startswith("cannot be checked for a lock: ")
        assert alice.claim("GPU-pipe") == "cannot be locked: not a regular file"
        assert seen(folder, "GPU-pipe") == "cannot be checked for a lock: not a regular file"
        assert alice.files == ()
    assert victim.read_text() == "precious"
    with locks_of(folder, "run of \x1b[31mmallory\n" + "x" * 10_000) as mallory:
        mallory.claim("GPU-m")
        said = seen(folder, "GPU-m") or ""
    assert said.startswith("is locked by run of \N{REPLACEMENT CHARACTER}[31mmallory")
    assert said.isprintable() and len(said) == len("is locked by ") + 500
    with locks_of(folder, "") as nameless:
        nameless.claim("GPU-n")
        assert seen(folder, "GPU-n") == "is locked by another run"


def test_a_folder_that_cannot_be_used_is_refused_with_a_line_to_paste(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "locks", tmp_path / "no" / "parent"):
        with pytest.raises(NotHere, match=r"cannot use .* for device locks") as refused:
            locks_of(place).claim(CARD)
        assert (refused.value.fix or "").startswith("export BADCJOBS_LOCK_DIR=")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert seen(tmp_path / "no" / "parent") is None, "nothing is locked there"


def test_a_lock_whose_file_was_removed_is_taken_anew(folder: Path) -> None:
    with locks_of(folder) as alice, locks_of(folder, BOB) as bob:
        alice.claim(CARD)
        (folder / f"{CARD}.lock").unlink()
        assert bob.claim(CARD) is None
        assert seen(folder) == f"is locked by {BOB}"


def test_runs_choose_one_after_the_other_but_a_run_that_hangs_holds_up_the_next_for_two_seconds_only(
    folder: Path, tmp_path: Path
) -> None:
    for holder in (BOB, None):
        clock = HandClock()
        began_s = clock.monotonic_s()
        with locks_of(folder).exclusive(), DeviceLocks(folder, clock, holder).exclusive():
            assert clock.monotonic_s() - began_s == pytest.approx(2.0)
        with DeviceLocks(folder, clock, holder).exclusive():
            assert clock.monotonic_s() - began_s == pytest.approx(2.0), "the first is gone"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "picking.lock").mkdir()
    with locks_of(tmp_path / "bad").exclusive():
        pass  # the locks of the devices are enough


def test_the_folder_is_the_machines_own_unless_the_environment_names_another(tmp_path: Path) -> None:
    assert lock_folder({"BADCJOBS_LOCK_DIR": str(tmp_path)}) == tmp_path
    system = Path("/run/lock")
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    expected = system / "badcjobs" if is_public else Path("/tmp/badcjobs-locks")
    assert lock_folder({"BADCJOBS_LOCK_DIR": "", "TMPDIR": "/elsewhere"}) == expected
    words = describe_holder(77, tmp_path)
    assert words.startswith("run of ") and words.endswith(f", pid 77, {tmp_path}")
