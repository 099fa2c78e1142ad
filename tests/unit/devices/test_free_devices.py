"""Which devices are free: judged by the worse of two readings, best first, locked, waited for, or refused in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.devices import DeviceLocks, DeviceNow, DeviceRequest, Grant, OpenedDevices, Waiting, pick_free
from rooms.model import Device, Reading
from rooms.root import BadcjobsError, BadInput, DeviceUnreadable, GpuReader
from support.hand_clock import HandClock
from support.pages import Pages

GIB = 2**30
State = tuple[int | None, float | None] | str  # percent busy and GiB used, or why there is no reading
Script = State | Callable[[float], State]  # the same always, or by the seconds since the start


class ScriptedReader(GpuReader):
    """Devices of 16 GiB with these states."""

    backend, why = "scripted", "a test asked for it"

    def __init__(self, clock: HandClock, states: Sequence[Script]) -> None:
        self._clock, self._start_s, self._states = clock, clock.monotonic_s(), states
        self.reads = 0

    def read(self, uuid: str) -> Reading:
        self.reads += 1
        script = self._states[int(uuid.removeprefix("GPU-"))]
        state = script(self._clock.monotonic_s() - self._start_s) if callable(script) else script
        if isinstance(state, str):
            raise DeviceUnreadable(state)
        busy, used = state
        missing = {} if busy is not None else {"utilization_percent": "Not Supported"}
        used_bytes = None if used is None else round(used * GIB)
        return Reading(utilization_percent=busy, memory_used_bytes=used_bytes, missing=missing)


class Machine:
    """A few devices, their locks, the time, and what was reported meanwhile."""

    def __init__(self, folder: Path, *states: Script) -> None:
        self.clock = HandClock()
        self.began_s = self.clock.monotonic_s()
        self.reader = ScriptedReader(self.clock, states)
        self.said: list[str] = []
        self.locks = DeviceLocks(folder, self.clock, "run of bob, pid 5, /home/bob")
        self.alice = DeviceLocks(folder, self.clock, "run of alice, pid 1234, /home/alice")
        self.totals: Sequence[int | None] = [16 * GIB] * len(states)

    @property
    def passed_s(self) -> float:
        return self.clock.monotonic_s() - self.began_s

    def pick(self, check: Callable[[], None] = lambda: None, **wish: float) -> list[DeviceNow]:
        devices = [Device(str(i), f"token {i}", i, f"GPU-{i}", "GPU", "x", size) for i, size in enumerate(self.totals)]
        opened = OpenedDevices(self.reader, (), Grant(tuple(devices), "all of them"), None)
        request = DeviceRequest(**{"count": 1, **wish})
        return pick_free(request, opened, self.locks, Waiting(self.clock, self.said.append, check))

    def picked(self, **wish: float) -> list[int | None]:
        return [device.index for device in self.pick(**wish)]

    def refusal(self, **wish: float) -> str:
        with pytest.raises(BadcjobsError) as refused:
            self.pick(**wish)
        return str(refused.value)


def until(end_s: float, before: State, after: State) -> Callable[[float], State]:
    return lambda at_s: before if at_s < end_s else after


def test_the_freest_devices_are_locked_best_first_and_passed_over_if_another_run_has_them(tmp_path: Path) -> None:
    machine = Machine(tmp_path, (90, 1), (0, 9), (0, 1), (40, 1), (0, 1))
    machine.alice.claim("GPU-4")
    two = machine.pick(count=2)
    assert [(d.index, d.score, d.why) for d in two] == [
        (2, 0.9625, "token 2; one of the 2 most free GPUs: score 0.96"),
        (3, 0.8025, "token 3; one of the 2 most free GPUs: score 0.80"),
    ]
    assert (machine.alice.claim("GPU-2") or "").startswith("is locked by run of bob")
    assert machine.alice.claim("GPU-1") is None, "it is not locked"
    equal = Machine(tmp_path / "equal", (5, 1), (0, 1), (0, 1))
    assert equal.picked(count=3) == [1, 2, 0]
    assert (machine.said, machine.passed_s) == ([], 0.5), "nothing is reported without a wait"


def test_a_device_is_judged_by_the_worse_of_two_readings(tmp_path: Path) -> None:
    for first, second in (((0, 1), (95, 1)), ((95, 1), (0, 1)), ((0, 1), (0, 15)), ((0, 15), (0, 1)), ("gone", (0, 1))):
        machine = Machine(tmp_path, until(0.3, first, second), (30, 1))
        assert machine.picked() == [1], (first, second)
        machine.locks.release()


# On the edge of a limit quite often.
percents, gibs = (
    st.none() | st.sampled_from([0, 1, 49, 50, 51, 100]),
    st.none() | st.sampled_from([0, 8, 12, 12.0001, 16]),
)
states = st.lists(st.tuples(percents, gibs) | st.just("GPU is lost"), min_size=1, max_size=5)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states, st.integers(1, 3), st.sampled_from([None, 0, 50, 100]), st.sampled_from([None, 1, 4096, 16_384]))
def test_exactly_as_many_as_requested_are_picked_and_none_that_is_less_free_than_another(
    tmp_path: Path, states: list[State], count: int, most: int | None, least_mib: int | None
) -> None:
    machine = Machine(tmp_path, *states)

    def score(state: State) -> float | None:
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


def test_devices_that_become_free_are_waited_for_and_the_wait_is_reported_every_ten_seconds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, until(25, (93, 1), (1, 1)), until(5, "GPU is lost", (0, 1)), (0, 1))
    machine.alice.claim("GPU-2")
    assert sorted(machine.picked(count=2, max_utilization_percent=10, wait_s=60)) == [0, 1]
    assert 25 <= machine.passed_s <= 28
    waiting = "waiting for 2 free GPUs: GPU 0 is 93 % busy; "
    alice = "GPU 2 is locked by run of alice, pid 1234, /home/alice"
    assert machine.said == [
        f"{waiting}GPU 1 cannot be read: GPU is lost; {alice}; 60 s left",
        f"{waiting}{alice}; 50 s left",
        f"{waiting}{alice}; 40 s left",
    ]
    forever = Machine(tmp_path / "other", (93, 1), (50, 8))
    assert forever.picked(max_utilization_percent=50, min_memory_mib=8192) == [1], "at both limits"
    forever.locks.release()
    assert "not found" in forever.refusal(max_utilization_percent=49)
    assert "not found" in forever.refusal(min_memory_mib=8193, max_utilization_percent=50)
    forever = Machine(tmp_path / "other", (93, 1))
    assert "not found in 20 s" in forever.refusal(max_utilization_percent=50, wait_s=20)
    assert 20 <= forever.passed_s <= 22.5
    for end_s in (0.1, 1.1, 7.1):
        machine = Machine(tmp_path / "other", (93, 1))

        def check(machine: Machine = machine, end_s: float = end_s) -> None:
            if machine.passed_s >= end_s:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            machine.pick(check, max_utilization_percent=50, wait_s=600)
        assert machine.passed_s - end_s <= 0.2, "a signal ends the wait within a moment"


def test_what_cannot_be_had_is_refused_at_once_and_with_a_line_to_paste(tmp_path: Path, pages: Pages) -> None:
    busy = Machine(tmp_path, (93, 15), (0, 1), (5, 1), (None, 1), (0, None))
    busy.alice.claim("GPU-1")
    said = {"too few are free": busy.refusal(count=2, max_utilization_percent=50, min_memory_mib=2000)}
    idle = Machine(tmp_path / "idle", (0, 0), (0, 0))
    hopeless: dict[str, dict[str, float]] = {
        "more than there are": {"count": 3}, "no memory": {"min_memory_mib": 16_385},
        "no memory, two": {"count": 2, "min_memory_mib": 99_999},
    }  # fmt: skip
    said |= {name: idle.refusal(**wish, wait_s=600) for name, wish in hopeless.items()}
    said["nothing granted"] = Machine(tmp_path).refusal()
    idle.totals = [16 * GIB, 8 * GIB]
    said["one is too small"] = idle.refusal(count=2, min_memory_mib=12_000, wait_s=600)
    nan = float("nan")
    senseless = {"count": [0], "wait_s": [float("inf"), nan, -1], "max_utilization_percent": [101, nan, -1]}
    for name, numbers in senseless.items():
        for number in numbers:
            with pytest.raises(BadInput):
                idle.pick(**{name: number})
            said[f"{name} = {number}"] = idle.refusal(**{name: number})
    assert (idle.reader.reads, idle.passed_s) == (0, 0), "nothing is read"
    pages({"refused.txt": "\n\n".join(f"[{name}]\n{text}" for name, text in said.items())})
    idle.totals = [16 * GIB, None]  # it may be large enough, but its free memory is unknown
    assert "not found in 4 s" in idle.refusal(count=2, min_memory_mib=12_000, wait_s=4)
