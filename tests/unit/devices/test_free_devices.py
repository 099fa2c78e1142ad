"""Free devices: judged by the worse of two readings, best first; locked for one holder that all users are shown."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import devices as room
from rooms.model import Device, Reading
from rooms.root import BadcjobsError, NotHere
from support.filesystems import powerless_folder
from support.hand_clock import HandClock, ScriptedReader

GIB = 2**30
ALICE, BOB = "run of alice, pid 1234, /home/alice", "run of bob, pid 5, /home/bob"
WISH = {"count": 1, "min_memory_mib": None, "max_utilization_percent": None, "wait_s": 0.0}


class Machine:
    """A few devices, their locks, the time, and what was reported meanwhile.

    A state is (percent busy, GiB used) or why there is no reading; or a function of the seconds that passed.
    """

    def __init__(self, folder, *states):
        self.clock = HandClock()
        self.began_s, self.reads, self.said, self._states = self.clock.monotonic_s(), 0, [], states
        self.locks, self.alice = room.DeviceLocks(folder, self.clock, BOB), room.DeviceLocks(folder, self.clock, ALICE)
        self.totals = [16 * GIB] * len(states)

    def _read(self, uuid, at_s):
        self.reads += 1
        script = self._states[int(uuid.removeprefix("GPU-"))]
        state = script(at_s) if callable(script) else script
        if isinstance(state, str):
            return state
        missing = {"utilization_percent": "Not Supported"} if state[0] is None else {}
        used_bytes = None if state[1] is None else round(state[1] * GIB)
        return Reading(utilization_percent=state[0], memory_used_bytes=used_bytes, missing=missing)

    @property
    def passed_s(self):
        return self.clock.monotonic_s() - self.began_s

    def pick(self, end_s=1e9, **wish):
        """Pick devices; after some seconds a signal comes."""

        def check():
            if self.passed_s >= end_s:
                raise InterruptedError

        devices = [Device(str(i), f"token {i}", i, f"GPU-{i}", "GPU", "x", memory_total_bytes=size)
                   for i, size in enumerate(self.totals)]  # fmt: skip
        grant = room.Grant(tuple(devices), "all of them")
        opened = room.OpenedDevices(ScriptedReader(self.clock, self._read), (), grant, None)
        request = room.DeviceRequest(**{**WISH, **wish})
        picked, self.skipped = room.pick_free(
            request, opened, self.locks, room.Waiting(self.clock, self.said.append, check)
        )
        return picked

    def picked(self, **wish):
        return [device.index for device in self.pick(**wish)]

    def refusal(self, **wish):
        with pytest.raises(BadcjobsError) as refused:
            self.pick(**wish)
        return str(refused.value)


def until(end_s, before, after):
    return lambda at_s: before if at_s < end_s else after


def test_the_freest_devices_are_locked_best_first_and_passed_over_if_another_run_has_them(tmp_path):
    machine = Machine(tmp_path, (90, 1), (0, 9), (0, 1), (40, 1), (0, 1))
    machine.alice.claim("GPU-4")
    two = machine.pick(count=2)
    assert [(d.index, d.score, d.why) for d in two] == [
        (2, 0.9625, "token 2; one of the 2 most free GPUs: score 0.96"),
        (3, 0.8025, "token 3; one of the 2 most free GPUs: score 0.80"),
    ]
    assert (machine.alice.claim("GPU-2") or "").startswith("is locked by run of bob")
    assert machine.alice.claim("GPU-1") is None, "it is not locked"
    assert Machine(tmp_path / "equal", (5, 1), (0, 1), (0, 1)).picked(count=3) == [1, 2, 0]
    assert (machine.said, machine.passed_s) == ([], 0.5), "nothing is reported without a wait"
    assert [(d.index, d.why) for d in machine.skipped] == [(4, f"is locked by {ALICE}")]


def test_a_device_is_judged_by_the_worse_of_two_readings(tmp_path):
    for first, second in (((0, 1), (95, 1)), ((95, 1), (0, 1)), ((0, 1), (0, 15)), ((0, 15), (0, 1)), ("gone", (0, 1))):
        machine = Machine(tmp_path, until(0.3, first, second), (30, 1))
        assert machine.picked() == [1], (first, second)
        machine.locks.release()


# On the edge of a limit quite often.
percents, gibs = st.sampled_from([None, 0, 1, 49, 50, 51, 100]), st.sampled_from([None, 0, 8, 12, 12.0001, 16])
states = st.lists(st.tuples(percents, gibs) | st.just("GPU is lost"), min_size=1, max_size=5)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states, st.integers(1, 3), st.sampled_from([None, 0, 50, 100]), st.sampled_from([None, 1, 4096, 16_384]))
def test_as_many_as_requested_are_picked_and_the_most_free(tmp_path, states, count, most, least_mib):
    machine = Machine(tmp_path, *states)

    def score(state):
        if isinstance(state, str) or None in state:
            return None
        busy, used = state
        if busy > (100 if most is None else most) or (16 - used) * 1024 < (least_mib or 0):
            return None
        return 0.6 * (16 - used) / 16 + 0.4 * (1 - busy / 100)

    scores = sorted((one for one in map(score, states) if one is not None), reverse=True)
    limits = {"count": count, "max_utilization_percent": most, "min_memory_mib": least_mib}
    if len(scores) < count:
        machine.refusal(**limits)
        assert machine.locks.files == (), "nothing stays locked"
    else:
        assert [device.score for device in machine.pick(**limits)] == pytest.approx(scores[:count], abs=1e-4)
        machine.locks.release()


def test_devices_that_become_free_are_waited_for_and_the_wait_is_reported_every_ten_seconds(tmp_path):
    machine = Machine(tmp_path, until(25, (93, 1), (1, 1)), until(5, "GPU is lost", (0, 1)), (0, 1))
    machine.alice.claim("GPU-2")
    assert sorted(machine.picked(count=2, max_utilization_percent=10, wait_s=60)) == [0, 1]
    assert 25 <= machine.passed_s <= 28
    others = f"GPU 2 is locked by {ALICE}"
    left = [f"GPU 1 cannot be read: GPU is lost; {others}; 60 s", f"{others}; 50 s", f"{others}; 40 s"]
    assert machine.said == [f"waiting for 2 free GPUs: GPU 0 is 93 % busy; {one} left" for one in left]
    forever = Machine(tmp_path / "other", (93, 1))
    assert "1 free GPU requested, 0 found" in forever.refusal(max_utilization_percent=50, wait_s=20)
    assert 20 <= forever.passed_s <= 22.5
    for end_s in (0.1, 1.1, 7.1):
        machine = Machine(tmp_path / "other", (93, 1))
        with pytest.raises(InterruptedError):
            machine.pick(end_s=end_s, max_utilization_percent=50, wait_s=600)
        assert machine.passed_s - end_s <= 0.2, "a signal ends the wait within a moment"


def test_what_cannot_be_had_is_refused_with_a_line_to_paste(tmp_path, pages):
    busy = Machine(tmp_path, (93, 15), (0, 1), (5, 1), (None, 1), (0, None))
    busy.alice.claim("GPU-1")
    said = {"too few are free": busy.refusal(count=2, max_utilization_percent=50, min_memory_mib=2000)}
    idle = Machine(tmp_path / "idle", (0, 0), (0, 0))
    said["more than there are"] = idle.refusal(count=3, wait_s=600)
    said["nothing granted"] = Machine(tmp_path).refusal()
    idle.totals = [16 * GIB, 8 * GIB]
    said["one is too small"] = idle.refusal(count=2, min_memory_mib=12_000, wait_s=600)
    assert (idle.reads, idle.passed_s) == (0, 0), "nothing is read"
    idle.totals = [16 * GIB, None]  # it may be large enough, but its free memory is unknown
    said["one does not say"] = idle.refusal(count=2, min_memory_mib=12_000, wait_s=4)
    pages({"refused.txt": "\n\n".join(f"[{name}]\n{text}" for name, text in said.items())})


CARD, OTHER = "GPU-aaaa", "MIG-GPU-bbbb/1/0"
BY_ALICE, BY_BOB = f"is locked by {ALICE}", f"is locked by {BOB}"


@pytest.fixture
def folder(tmp_path):
    """A folder for locks; no file of it may stay open."""
    folder = tmp_path / "locks"
    yield folder
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert [link for link in links if link.startswith(str(folder))] == []


def locks_of(folder, holder=ALICE):
    return room.DeviceLocks(folder, HandClock(), holder)


def seen(folder, uuid=CARD):
    """Return what another run is reported, which gives the lock back at once."""
    with locks_of(folder, "run of carol") as carol:
        return carol.claim(uuid)


def test_a_device_has_one_holder_and_others_learn_who_it_is(folder):
    assert seen(folder) is None
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
        assert (bob.claim(CARD), seen(folder)) == (None, BY_BOB), "a lock whose file was removed is lost"


def test_a_process_that_was_given_the_open_file_keeps_the_device_unless_it_was_released(folder):
    for ends, then in ((lambda one: os.close(one.files[0]), BY_ALICE), (room.DeviceLocks.release, None)):
        alice = locks_of(folder)
        assert alice.claim(CARD) is None
        assert not os.get_inheritable(alice.files[0]), "no child gets it unasked"
        handed = os.dup(alice.files[0])
        ends(alice)  # first as at the end of a process
        assert seen(folder) == then
        os.close(handed)
        assert seen(folder) is None
    assert [file.read_text() for file in folder.glob("GPU*")] == [""]


def test_all_users_can_lock_and_none_can_remove_the_locks_of_others(folder):
    before = os.umask(0o077)
    try:
        with locks_of(folder) as alice, alice.exclusive():
            assert alice.claim(CARD) is None
    finally:
        os.umask(before)
    assert {stat.filemode(path.stat().st_mode) for path in (folder, *folder.iterdir())} == {"drwxrwxrwt", "-rw-rw-rw-"}
    folder.chmod(0o750)
    with locks_of(folder) as alice:
        alice.claim(CARD)
    assert stat.filemode(folder.stat().st_mode) == "drwxr-x---", "a folder that exists keeps its mode"
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


def test_links_pipes_and_texts_of_other_users_do_no_harm(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.mkdir()
    (folder / f"{CARD}.lock").symlink_to(victim)
    os.mkfifo(folder / "GPU-pipe.lock")
    with locks_of(folder) as alice:
        assert (alice.claim(CARD) or "").startswith("cannot be locked: ")
        assert alice.claim("GPU-pipe") == "cannot be locked: not a regular file"
        assert alice.files == ()
    assert victim.read_text() == "precious"
    with locks_of(folder, "run of \x1b[31mmallory\n" + "x" * 10_000) as mallory, locks_of(folder, "") as nameless:
        mallory.claim("GPU-m"), nameless.claim("GPU-n")
        said = seen(folder, "GPU-m") or ""
        assert seen(folder, "GPU-n") == "is locked by another run"
    assert said.startswith("is locked by run of \N{REPLACEMENT CHARACTER}[31mmallory")
    assert said.isprintable() and len(said) == len("is locked by ") + 500


def test_a_folder_that_cannot_be_used_for_locks_is_refused(folder, tmp_path):
    assert room.lock_folder({"BADCJOBS_LOCK_DIR": str(tmp_path)}) == tmp_path
    system = Path("/run/lock")
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    expected = system / "badcjobs" if is_public else Path("/tmp/badcjobs-locks")
    assert room.lock_folder({"BADCJOBS_LOCK_DIR": "", "TMPDIR": "/elsewhere"}) == expected
    words = room.describe_holder(77, tmp_path)
    assert words.startswith("run of ") and words.endswith(f", pid 77, {tmp_path}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    for place in ("link", "file", "file/locks", "no/parent"):
        with pytest.raises(NotHere, match=r"cannot use .* for device locks") as refused:
            locks_of(tmp_path / place).claim(CARD)
        assert (refused.value.fix or "").startswith("export BADCJOBS_LOCK_DIR=")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_runs_choose_in_turn_but_one_that_hangs_holds_up_the_next_for_two_seconds_only(folder):
    clock = HandClock()
    locks, end_s = room.DeviceLocks(folder, clock, BOB), clock.monotonic_s() + 2
    with locks_of(folder).exclusive(), locks.exclusive():
        assert clock.monotonic_s() == pytest.approx(end_s)
    with locks.exclusive():
        assert clock.monotonic_s() == pytest.approx(end_s), "the first is gone"
    (folder / "picking.lock").unlink()
    (folder / "picking.lock").mkdir()
    with locks_of(folder).exclusive():
        pass  # the locks of the devices are enough
