"""Which devices are free: judged by the worse of two readings, best first, claimed, waited for, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.devices import (
    DeviceNow,
    DeviceRequest,
    Grant,
    NotFree,
    OpenedDevices,
    Waiting,
    lock_best,
    pick_free,
    score_of,
    why_not_free,
    worse_of,
)
from rooms.model import Device, InventoryDevice, Reading
from rooms.root import BadInput, DeviceUnreadable, NotHere
from support.hand_clock import HandClock

GIB = 2**30
State = tuple[int | None, int | None] | str  # percent busy and bytes used, or why there is no reading


class ScriptedReader:
    """Devices whose states are functions of the seconds since the start."""

    backend = "scripted"
    why = "a test asked for it"

    def __init__(self, clock: HandClock, states: Sequence[Callable[[float], State]]) -> None:
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._states = {f"GPU-{i}": state for i, state in enumerate(states)}
        self.reads = 0

    def inventory(self) -> Sequence[InventoryDevice]:
        return [InventoryDevice(i, uuid, "GPU", self.backend, 16 * GIB) for i, uuid in enumerate(self._states)]

    def read(self, uuid: str) -> Reading:
        self.reads += 1
        state = self._states[uuid](self._clock.monotonic_s() - self._start_s)
        if isinstance(state, str):
            raise DeviceUnreadable(state)
        return Reading(utilization_percent=state[0], memory_used_bytes=state[1])

    def close(self) -> None: ...


class Claimed:
    """Locks in memory: some are somebody else's."""

    def __init__(self, **others: str) -> None:
        self.others = {uuid.replace("_", "-"): who for uuid, who in others.items()}
        self.mine: list[str] = []
        self.inside = 0

    def claim(self, uuid: str) -> str | None:
        assert self.inside == 1, "claimed outside the gate"
        if uuid not in self.others:
            self.mine.append(uuid)
        return self.others.get(uuid)

    def release(self) -> None:
        self.mine.clear()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1


class Machine:
    """A few devices, the time, and what was told meanwhile."""

    def __init__(self, *states: Callable[[float], State]) -> None:
        self.clock = HandClock()
        self.reader = ScriptedReader(self.clock, states)
        self.told: list[str] = []

    def pick(
        self, wish: DeviceRequest, claims: Claimed | None = None, go_on: Callable[[], None] = lambda: None
    ) -> list[str]:
        devices = tuple(
            Device(str(d.index), "why", d.index, d.uuid, d.name, d.backend, d.memory_total_bytes)
            for d in self.reader.inventory()
        )
        sight = OpenedDevices(self.reader, tuple(self.reader.inventory()), Grant(devices, "all of them"), None)
        how = Waiting(self.clock, self.told.append, go_on)
        return [device.uuid or "" for device in pick_free(wish, sight, claims or Claimed(), how)]


def always(percent: int | None, used: int | None = GIB) -> Callable[[float], State]:
    return lambda at_s: (percent, used)


def until(end_s: float, before: State, after: State) -> Callable[[float], State]:
    return lambda at_s: before if at_s < end_s else after


def device(percent: int | None = 0, free: int | None = 16 * GIB, index: int = 0, **more: object) -> DeviceNow:
    values: dict[str, object] = dict.fromkeys(("token", "name", "temperature_c", "power_w"))
    values.update(
        index=index, uuid=f"GPU-{index}", memory_total_bytes=16 * GIB, memory_free_bytes=free, backend="scripted",
        utilization_percent=percent, score=score_of(free, 16 * GIB, percent), granted=True, why="why",
    )  # fmt: skip
    return DeviceNow(**{**values, **more})  # type: ignore[arg-type]


# --- judging ----------------------------------------------------------------------------------------------------------

JUDGED = {
    "no limit": (device(100, 0), DeviceRequest(1), None),
    "at the limit of utilization": (device(50), DeviceRequest(1, max_utilization_percent=50), None),
    "above it": (device(51), DeviceRequest(1, max_utilization_percent=50), "is 51 % busy"),
    "at the limit of memory": (device(0, 4 * GIB), DeviceRequest(1, min_memory_mib=4096), None),
    "below it": (device(0, 4 * GIB - 1), DeviceRequest(1, min_memory_mib=4096), "has 4,095 MiB free"),
    "both": (device(93, GIB), DeviceRequest(1, 4096, 50), "is 93 % busy and has 1,024 MiB free"),
    "utilization unknown": (device(None), DeviceRequest(1), "has unknown utilization"),
    "memory unknown": (device(0, None), DeviceRequest(1), "has unknown free memory"),
    "unknown, with the reason": (
        device(None, missing={"utilization_percent": "Not Supported"}), DeviceRequest(1),
        "has unknown utilization: Not Supported",
    ),
    "no reading at all": (device(None, None, trouble="GPU is lost"), DeviceRequest(1), "cannot be read: GPU is lost"),
}  # fmt: skip


@pytest.mark.parametrize(("now", "wish", "reason"), JUDGED.values(), ids=JUDGED)
def test_a_device_is_free_within_the_limits_and_never_when_it_does_not_say(
    now: DeviceNow, wish: DeviceRequest, reason: str | None
) -> None:
    assert why_not_free(now, wish) == reason


def test_the_best_score_comes_first_and_equal_ones_by_index() -> None:
    devices = [device(50, index=0), device(0, 8 * GIB, index=1), device(0, index=2), device(0, index=3)]
    picked, _ = lock_best(devices, DeviceRequest(4), Claimed())
    assert [d.index for d in picked] == [2, 3, 0, 1]


percents, bytes_free = st.none() | st.integers(0, 100), st.none() | st.integers(0, 16 * GIB)


@given(st.tuples(percents, bytes_free), st.tuples(percents, bytes_free))
def test_of_two_readings_the_worse_one_counts(one: tuple[int, int], other: tuple[int, int]) -> None:
    a, b = device(*one), device(*other)
    worse = worse_of(a, b)
    if a.score is None or b.score is None:
        assert worse.score is None
    else:
        assert worse.score is not None and worse.score <= min(a.score, b.score)
    assert (worse.utilization_percent, worse.memory_free_bytes) == (
        worse_of(b, a).utilization_percent, worse_of(b, a).memory_free_bytes,
    )  # fmt: skip


# --- picking ----------------------------------------------------------------------------------------------------------


def test_the_freest_devices_are_picked_and_claimed() -> None:
    claims = Claimed()
    machine = Machine(always(90), always(10), always(0), always(40))
    assert machine.pick(DeviceRequest(2), claims) == ["GPU-2", "GPU-1"]
    assert claims.mine == ["GPU-2", "GPU-1"]


def test_a_moment_without_work_is_no_free_device() -> None:
    machine = Machine(until(0.3, (0, GIB), (95, GIB)), always(30))
    assert machine.pick(DeviceRequest(1)) == ["GPU-1"]
    machine = Machine(until(0.3, (95, GIB), (0, GIB)), always(30))
    assert machine.pick(DeviceRequest(1)) == ["GPU-1"]


def test_a_device_of_another_run_is_passed_over() -> None:
    claims = Claimed(GPU_0="is locked by run of alice, pid 1234, /home/alice")
    assert Machine(always(0), always(50), always(60)).pick(DeviceRequest(2), claims) == ["GPU-1", "GPU-2"]


def test_a_picked_device_says_how_it_was_picked() -> None:
    machine = Machine(always(0, 0))
    sight = OpenedDevices(
        machine.reader, (), Grant((Device("0", "token 0", 0, "GPU-0", None, "scripted", 16 * GIB),), "one"), None
    )
    [picked] = pick_free(DeviceRequest(1), sight, Claimed(), Waiting(machine.clock, machine.told.append))
    assert picked.why == "token 0; one of the 1 most free GPUs: score 1.00"


def test_too_few_free_ones_leave_nothing_claimed_and_the_reason_for_each() -> None:
    claims = Claimed(GPU_1="is locked by run of alice, pid 1234, /home/alice")
    with pytest.raises(NotHere) as refused:
        Machine(always(93), always(0), always(5), always(None)).pick(
            DeviceRequest(2, max_utilization_percent=50), claims
        )
    assert claims.mine == []
    assert refused.value.exit_code == 3
    assert (refused.value.why or "").splitlines() == [
        "GPU 0 is 93 % busy",
        "GPU 1 is locked by run of alice, pid 1234, /home/alice",
        "GPU 3 has unknown utilization",
    ]
    assert "--wait" in (refused.value.fix or "")


def test_more_devices_than_there_are_cannot_be_waited_for() -> None:
    machine = Machine(always(0), always(0))
    with pytest.raises(NotHere, match="3 free GPUs requested, but this process may use 2"):
        machine.pick(DeviceRequest(3, wait_s=600))
    assert machine.reader.reads == 0


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (
            DeviceRequest(1, 16_385, wait_s=600),
            "1 free GPU with 16,385 MiB requested, but 0 of 2 GPUs are large enough",
        ),
        (
            DeviceRequest(2, 99_999, wait_s=600),
            "2 free GPUs with 99,999 MiB each requested, but 0 of 2 GPUs are large enough",
        ),
    ],
)
def test_more_memory_than_any_card_has_cannot_be_waited_for(wish: DeviceRequest, words: str) -> None:
    machine = Machine(always(0), always(0))
    with pytest.raises(NotFree) as refused:
        machine.pick(wish)
    assert refused.value.what == words
    assert refused.value.why == "a GPU here has 16,384 MiB in total"
    assert "--min-memory-mib 16384 or less" in (refused.value.fix or "")
    assert machine.reader.reads == 0
    assert (refused.value.backend, refused.value.backend_why) == ("scripted", "a test asked for it")


def test_too_few_cards_that_are_big_enough_cannot_be_waited_for_but_one_that_does_not_say_may_be() -> None:
    machine = Machine(always(0), always(0))

    def pick(total: int | None) -> None:
        devices = (
            Device("0", "", 0, "GPU-0", None, "scripted", 16 * GIB),
            Device("1", "", 1, "GPU-1", None, "scripted", total),
        )
        sight = OpenedDevices(machine.reader, (), Grant(devices, "two"), None)
        pick_free(DeviceRequest(2, 12_000, wait_s=4), sight, Claimed(), Waiting(machine.clock, machine.told.append))

    with pytest.raises(NotFree, match="2 free GPUs with 12,000 MiB each requested, but 1 of 2 GPUs are large enough"):
        pick(8 * GIB)
    with pytest.raises(NotFree, match="not found in 4 s"):
        pick(None)


UNUSABLE = {
    "no device": (DeviceRequest(0), "--free 0 requests no device"),
    "for ever": (DeviceRequest(1, wait_s=float("inf")), "--wait inf"),
    "no number": (DeviceRequest(1, wait_s=float("nan")), "--wait nan"),
    "the past": (DeviceRequest(1, wait_s=-1), "--wait -1"),
    "more than all": (DeviceRequest(1, max_utilization_percent=101), "--max-utilization 101"),
    "no share": (DeviceRequest(1, max_utilization_percent=float("nan")), "--max-utilization nan"),
}


@pytest.mark.parametrize(("wish", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_numbers_with_which_nobody_can_judge_or_wait_are_refused(wish: DeviceRequest, words: str) -> None:
    machine = Machine(always(0))
    with pytest.raises(BadInput) as refused:
        machine.pick(wish)
    assert words in refused.value.what
    assert refused.value.why
    assert refused.value.fix
    assert machine.reader.reads == 0


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_devices_that_become_free_are_waited_for() -> None:
    machine = Machine(until(30, (93, GIB), (1, GIB)), always(2))
    began_s = machine.clock.monotonic_s()
    assert set(machine.pick(DeviceRequest(2, max_utilization_percent=10, wait_s=60))) == {"GPU-0", "GPU-1"}
    assert 30 <= machine.clock.monotonic_s() - began_s <= 33.5


def test_a_device_that_comes_back_is_waited_for() -> None:
    assert Machine(until(5, "GPU is lost", (0, GIB))).pick(DeviceRequest(1, wait_s=60)) == ["GPU-0"]


def test_waiting_ends_when_the_time_is_over_and_says_how_long_it_was() -> None:
    machine = Machine(always(93))
    began_s = machine.clock.monotonic_s()
    with pytest.raises(NotHere, match="1 free GPU requested, not found in 20 s"):
        machine.pick(DeviceRequest(1, max_utilization_percent=50, wait_s=20))
    assert 20 <= machine.clock.monotonic_s() - began_s <= 23


def test_progress_is_told_at_once_and_then_every_ten_seconds() -> None:
    machine = Machine(always(93), always(0))
    claims = Claimed(GPU_1="is locked by run of alice, pid 1234, /home/alice")
    with pytest.raises(NotHere):
        machine.pick(DeviceRequest(2, max_utilization_percent=50, wait_s=60), claims)
    assert machine.told[0] == (
        "waiting for 2 free GPUs: GPU 0 is 93 % busy; GPU 1 is locked by run of alice, pid 1234, /home/alice; 60 s left"
    )
    assert 5 <= len(machine.told) <= 7


def test_nothing_is_told_when_nobody_waits() -> None:
    machine = Machine(always(0))
    machine.pick(DeviceRequest(1, wait_s=600))
    assert machine.told == []


def test_a_signal_ends_the_waiting_within_a_moment() -> None:
    class Signal(Exception):
        pass

    machine = Machine(always(93))
    end_s = machine.clock.monotonic_s() + 7.1

    def go_on() -> None:
        if machine.clock.monotonic_s() >= end_s:
            raise Signal

    with pytest.raises(Signal):
        machine.pick(DeviceRequest(1, max_utilization_percent=50, wait_s=600), go_on=go_on)
    assert machine.clock.monotonic_s() - end_s <= 0.25
