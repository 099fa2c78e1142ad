"""The pool of devices: nobody shares unless that is wished for, and other runs of the machine are respected."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.cluster import DevicePool, open_pool, visible_lists
from rooms.devices import DeviceLocks
from rooms.model import Device, StandIn
from rooms.root import NotHere, SystemClock
from rooms.task import StopRequest, World


def devices(count: int) -> list[Device]:
    return [Device(str(i), "", index=i, uuid=f"GPU-{i:04d}") for i in range(count)]


def make_pool(folder: Path, count: int, *, share: bool = False, who: str = "one") -> DevicePool:
    return DevicePool(devices(count), lambda: DeviceLocks(folder, SystemClock(), who), share=share)


def world(folder: Path, **environ: str) -> World:
    clock = SystemClock()
    return World(environ, clock, StopRequest(clock.monotonic_s), "here", 1, folder, 8)


def tokens(lent: tuple[Device, ...] | None) -> str | None:
    return None if lent is None else ",".join(device.token for device in lent)


def test_a_device_is_lent_once_and_again_after_it_came_back(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "locks", 4)
    first = pool.take(2)
    assert [tokens(first), tokens(pool.take(2)), pool.take(1)] == ["0,1", "2,3", None]
    assert first is not None
    pool.give_back(first)
    assert tokens(pool.take(1)) == "0"


def test_another_pool_of_the_machine_gets_what_is_left_and_hears_who_has_the_rest(tmp_path: Path) -> None:
    one, other = make_pool(tmp_path / "locks", 3), make_pool(tmp_path / "locks", 3, who="two")
    held = one.take(2)
    assert other.take(2) is None
    assert [refusal.partition(" is locked by ") for refusal in other.refusals] == [
        ("GPU 0", " is locked by ", "one"),
        ("GPU 1", " is locked by ", "one"),
    ]
    assert tokens(other.take(1)) == "2"
    assert held is not None
    one.give_back(held)
    assert tokens(other.take(2)) == "0,1"


def test_who_gets_too_few_keeps_none(tmp_path: Path) -> None:
    one, other = make_pool(tmp_path / "locks", 2), make_pool(tmp_path / "locks", 2, who="two")
    assert one.take(1) is not None
    assert other.take(2) is None
    assert tokens(one.take(1)) == "1"


def test_sharing_spreads_tasks_over_the_least_used_devices_and_keeps_other_runs_off(tmp_path: Path) -> None:
    pool, other = make_pool(tmp_path / "locks", 2, share=True), make_pool(tmp_path / "locks", 2, who="two")
    lent = [pool.take(1) for _ in range(5)]
    assert [tokens(one) for one in lent] == ["0", "1", "0", "1", "0"]
    pool.give_back([one[0] for one in lent[:4] if one])
    assert tokens(other.take(1)) == "1"
    assert other.take(1) is None


def test_a_task_that_asks_for_none_gets_none_and_takes_no_lock(tmp_path: Path) -> None:
    assert make_pool(tmp_path / "locks", 2).take(0) == ()
    assert not (tmp_path / "locks").exists()


def test_more_than_the_machine_has_is_refused_with_a_smaller_number_to_paste(tmp_path: Path) -> None:
    with pytest.raises(NotHere) as refused:
        open_pool(4, StandIn(simulate=2), world(tmp_path), tmp_path, share=False, lock=True)
    assert "4 GPUs" in refused.value.what and "has 2" in refused.value.what
    assert "--gpus-per-task 2" in str(refused.value.fix)
    with pytest.raises(NotHere, match="has none") as none:
        open_pool(1, StandIn(), world(tmp_path, CUDA_VISIBLE_DEVICES=""), tmp_path, share=False, lock=True)
    assert "--gpus-per-task 0 -- --cpu-workers 2" in str(none.value.fix)


def test_a_device_that_nobody_can_identify_is_lent_without_a_lock(tmp_path: Path) -> None:
    pool = DevicePool([Device("0", "")], lambda: DeviceLocks(tmp_path / "locks", SystemClock(), ""))
    assert tokens(pool.take(1)) == "0"
    assert pool.take(1) is None


SLICE = Device("MIG-GPU-7/1/0", "", index=0, uuid="MIG-0007", parent_uuid="GPU-7", driver="535.1")
AMD = Device("1", "", index=1, uuid="GPU-0123456789abcdef", vendor="amd")


@pytest.mark.parametrize(
    ("lent", "expected"),
    [
        (devices(2), {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([SLICE, *devices(1)], {"CUDA_VISIBLE_DEVICES": "MIG-0007,GPU-0000", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ([AMD], {"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}),
        ([], {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}),
    ],
    ids=["cards", "a slice and a card", "AMD", "none"],
)
def test_a_task_sees_its_devices_in_its_vendors_list(lent: list[Device], expected: dict[str, str]) -> None:
    assert visible_lists(lent) == expected
