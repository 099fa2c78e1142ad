"""The locks of free devices: one holder, shown to all users, released by the kernel, safe against other users."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms.devices import DeviceLocks, describe_holder, lock_folder
from rooms.root import NotHere
from support.hand_clock import HandClock
from support.powerless import powerless_folder

CARD, OTHER = "GPU-aaaa", "MIG-GPU-bbbb/1/0"
ALICE, BOB = "run of alice, pid 1234, /home/alice", "run of bob, pid 5, /home/bob"
BY_ALICE, BY_BOB = f"is locked by {ALICE}", f"is locked by {BOB}"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for locks; no file of it may stay open."""
    folder = tmp_path / "locks"
    yield folder
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert [link for link in links if link.startswith(str(folder))] == []


def locks_of(folder: Path, holder: str | None = ALICE) -> DeviceLocks:
    return DeviceLocks(folder, HandClock(), holder)


def seen(folder: Path, uuid: str = CARD) -> str | None:
    """Return what a run that only looks is told."""
    return locks_of(folder, None).claim(uuid)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_device_has_one_holder_and_others_learn_who_it_is(folder: Path) -> None:
    assert seen(folder) is None
    with locks_of(folder, None).exclusive():
        assert not folder.exists(), "looking leaves nothing"
    with locks_of(folder) as alice, locks_of(folder, BOB) as bob:
        assert (alice.claim(CARD), bob.claim(CARD), seen(folder)) == (None, BY_ALICE, BY_ALICE)
        assert (seen(folder, OTHER), bob.claim(OTHER), alice.claim(OTHER)) == (None, None, BY_BOB)
        assert seen(folder, OTHER.replace("/1/", "/2/")) is None
        assert (len(alice.files), len(bob.files)) == (1, 1)
    assert seen(folder) is seen(folder, OTHER) is None
    assert alice.files == ()
    alice.release()  # once more does no harm
    with locks_of(folder) as alice, locks_of(folder, BOB) as bob:
        assert alice.claim(CARD) is None
        (folder / f"{CARD}.lock").unlink()
        assert bob.claim(CARD) is None, "a lock whose file was removed is taken anew"
        assert seen(folder) == BY_BOB


def test_a_process_that_was_given_the_open_file_keeps_the_device_unless_it_was_released(folder: Path) -> None:
    alice = locks_of(folder)
    assert alice.claim(CARD) is None
    (file,) = alice.files
    assert not os.get_inheritable(file), "no child gets it unasked"
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


def test_all_users_can_lock_and_none_can_remove_the_locks_of_others(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with locks_of(folder) as alice, alice.exclusive():
            assert alice.claim(CARD) is None
    finally:
        os.umask(before)
    assert (mode(folder), {mode(path) for path in folder.iterdir()}) == (0o1777, {0o666})
    folder.chmod(0o750)
    with locks_of(folder) as alice:
        alice.claim(CARD)
    assert mode(folder) == 0o750, "a folder that exists keeps its mode"
    with powerless_folder() as place:
        other = os.geteuid()
        os.seteuid(os.getuid())  # root's files, if we are root; else we are one user, and that must work too
        with locks_of(place / "locks") as root:
            root.claim(CARD), root.claim(OTHER)
        for file in (place / "locks").glob("MIG*"):
            file.chmod(0o444)
        os.seteuid(other)
        with locks_of(place / "locks", BOB) as bob:
            assert (bob.claim(CARD), bob.claim(OTHER)) == (None, None), "even if it is read-only"
            assert seen(place / "locks") == BY_BOB
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
    with locks_of(folder, "run of \x1b[31mmallory\n" + "x" * 10_000) as mallory, locks_of(folder, "") as nameless:
        mallory.claim("GPU-m"), nameless.claim("GPU-n")
        said = seen(folder, "GPU-m") or ""
        assert seen(folder, "GPU-n") == "is locked by another run"
    assert said.startswith("is locked by run of \N{REPLACEMENT CHARACTER}[31mmallory")
    assert said.isprintable() and len(said) == len("is locked by ") + 500


def test_the_folder_is_the_machines_own_or_the_environments_and_one_that_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    assert lock_folder({"BADCJOBS_LOCK_DIR": str(tmp_path)}) == tmp_path
    system = Path("/run/lock")
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    expected = system / "badcjobs" if is_public else Path("/tmp/badcjobs-locks")
    assert lock_folder({"BADCJOBS_LOCK_DIR": "", "TMPDIR": "/elsewhere"}) == expected
    words = describe_holder(77, tmp_path)
    assert words.startswith("run of ") and words.endswith(f", pid 77, {tmp_path}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "locks", tmp_path / "no" / "parent"):
        with pytest.raises(NotHere, match=r"cannot use .* for device locks") as refused:
            locks_of(place).claim(CARD)
        assert (refused.value.fix or "").startswith("export BADCJOBS_LOCK_DIR=")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert seen(tmp_path / "no" / "parent") is None, "nothing is locked there"


def test_runs_choose_one_after_the_other_but_a_run_that_hangs_holds_up_the_next_for_two_seconds_only(
    folder: Path,
) -> None:
    for holder in (BOB, None):
        clock = HandClock()
        began_s = clock.monotonic_s()
        with locks_of(folder).exclusive(), DeviceLocks(folder, clock, holder).exclusive():
            assert clock.monotonic_s() - began_s == pytest.approx(2.0)
        with DeviceLocks(folder, clock, holder).exclusive():
            assert clock.monotonic_s() - began_s == pytest.approx(2.0), "the first is gone"
    (folder / "picking.lock").unlink()
    (folder / "picking.lock").mkdir()
    with locks_of(folder).exclusive():
        pass  # the locks of the devices are enough
