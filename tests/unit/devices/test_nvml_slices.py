"""MIG slices, as the NVML reader lists and reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rooms.devices import resolve_devices
from rooms.model import ProcessReading, Reading
from rooms.root import DeviceUnreadable
from support.fake_nvml import NvmlBench, fake_slice_uuid, fake_uuid

OpenBench = Callable[..., NvmlBench]
BOARD_WIDE = (
    "temperature_c", "power_w", "energy_j", "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "fan_percent",
    "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s", "ecc_errors",
)  # fmt: skip


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenBench]:
    opened: list[NvmlBench] = []

    def open_it(devices: int = 3, mig: str = "1:2", **settings: object) -> NvmlBench:
        opened.append(NvmlBench(monkeypatch, devices, mig=mig, **settings))
        return opened[-1]

    yield open_it
    for one in opened:
        one.reader.close()


def read_slice(one: NvmlBench, slice_: int = 0) -> Reading:
    return one.reader.read(fake_slice_uuid(1, slice_))


def test_slices_are_listed_right_after_their_card_with_its_index(bench: OpenBench) -> None:
    devices = bench().reader.inventory()
    assert [(device.index, device.uuid, device.parent_uuid, device.slice) for device in devices] == [
        (0, fake_uuid(0), None, None),
        (1, fake_uuid(1), None, None),
        (1, fake_slice_uuid(1, 0), fake_uuid(1), "7/0"),
        (1, fake_slice_uuid(1, 1), fake_uuid(1), "8/0"),
        (2, fake_uuid(2), None, None),
    ]


def test_a_slice_has_a_name_and_memory_of_its_own_and_nothing_that_is_the_boards(bench: OpenBench) -> None:
    slice_ = bench().reader.inventory()[2]
    assert (slice_.name, slice_.memory_total_bytes) == ("Stand-in GPU MIG 1g.4gb", 4 * 2**30)
    assert (slice_.power_limit_w, slice_.slowdown_c) == (None, None)
    assert (slice_.driver, slice_.pci_bus_id, slice_.backend) == ("580.00.00", "00000000:11:00.0", "nvml")


def test_a_card_in_mig_mode_without_slices_is_no_device_and_the_others_keep_their_index(
    bench: OpenBench, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(mig="1:0")
    for _ in range(3):
        assert [(device.index, device.uuid) for device in one.reader.inventory()] == [
            (0, fake_uuid(0)),
            (2, fake_uuid(2)),
        ]
    assert caplog.messages == ["GPU 1 is in MIG mode and has no slices: no program can use it"]


def test_a_list_of_visible_devices_ends_at_a_card_in_mig_mode_without_slices(bench: OpenBench) -> None:
    inventory = bench(mig="1:0").reader.inventory()
    grant = resolve_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, inventory, in_slurm=True)
    assert [device.uuid for device in grant.devices] == [fake_uuid(0)]
    assert "stops at '1'" in grant.why


def test_a_card_whose_slices_do_not_answer_is_still_listed(bench: OpenBench) -> None:
    devices = bench(mig="1:1", failing="uuid:1.0").reader.inventory()
    assert [device.uuid for device in devices] == [fake_uuid(index) for index in range(3)]


def test_a_slice_that_does_not_tell_its_uuid_is_left_out(bench: OpenBench, caplog: pytest.LogCaptureFixture) -> None:
    devices = bench(failing="uuid:1.0").reader.inventory()
    assert [device.uuid for device in devices if device.slice] == [fake_slice_uuid(1, 1)]
    assert "slice 0 of GPU 1 is left out: Unknown Error" in caplog.text


def test_mig_mode_is_asked_once_per_card_and_never_by_a_reading(bench: OpenBench) -> None:
    one = bench()
    for _ in range(3):
        one.reader.inventory()
        one.read_later(5)
        read_slice(one)
    assert [one.stand_in.calls("mig_mode", index) for index in range(3)] == [1, 1, 1]


def test_a_slice_gives_its_own_memory(bench: OpenBench) -> None:
    one = bench()
    assert [read_slice(one, slice_).memory_used_bytes for slice_ in (0, 1)] == [2**28, 2**29]


def test_what_belongs_to_the_whole_board_is_not_given_as_if_it_were_the_slices(bench: OpenBench) -> None:
    one = bench()
    for _ in range(6):
        reading = read_slice(one)
        for metric in BOARD_WIDE:
            assert getattr(reading, metric) is None
            assert reading.missing[metric] == "board-wide under MIG"
        one.move(1)
    assert one.stand_in.calls("power", 1) == 0


def test_an_argument_that_a_slice_calls_invalid_is_not_tried_again(bench: OpenBench) -> None:
    one = bench(answering="encoder:1.0=2,utilization:1.0=2")
    for _ in range(3):
        missing = read_slice(one).missing
        assert (missing["encoder_percent"], missing["utilization_percent"]) == ("Invalid Argument", "Invalid Argument")
        one.move(5)
    assert [one.stand_in.calls(call, 1) for call in ("encoder", "utilization")] == [1, 1]


def test_what_a_slice_refuses_is_none_with_the_reason(bench: OpenBench) -> None:
    reading = read_slice(bench())
    for metric in ("utilization_percent", "memory_utilization_percent", "encoder_percent", "decoder_percent"):
        assert getattr(reading, metric) is None
        assert reading.missing[metric] == "Not Supported"


def test_gpm_tells_how_busy_a_slice_was(bench: OpenBench) -> None:
    one = bench()
    read_slice(one)
    one.move(5, worked_s=2)
    reading = read_slice(one)
    assert reading.busy_percent == pytest.approx(40)
    assert reading.sm_occupancy_percent == pytest.approx(20)
    assert reading.sources["busy_percent"] == "gpm"


def test_without_gpm_an_empty_slice_was_idle_and_a_used_one_does_not_say(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="1.1:88:10:-")
    empty, used = read_slice(one, 0), read_slice(one, 1)
    assert (empty.busy_percent, empty.sources) == (0.0, {"busy_percent": "processes"})
    assert (used.busy_percent, used.missing["busy_percent"]) == (None, "Not Supported")
    assert "no GPM on this device" in used.missing["sm_occupancy_percent"]


def test_a_slice_lists_its_own_processes(bench: OpenBench) -> None:
    one = bench(processes="1.0:77:20:-,1.1:88:10:-")
    assert read_slice(one, 1).processes == (ProcessReading(88, 10 * 2**20),)


def test_the_card_of_slices_still_gives_what_is_board_wide(bench: OpenBench) -> None:
    reading = bench().read(1)
    assert (reading.power_w, reading.temperature_c) == (110.0, 41)
    assert reading.missing["utilization_percent"] == "Not Supported"


def test_slices_go_with_their_card(bench: OpenBench) -> None:
    one = bench()
    read_slice(one)
    one.stand_in.set(lost=1)
    with pytest.raises(DeviceUnreadable, match="GPU is lost"):
        read_slice(one)
    one.stand_in.set(lost=None)
    assert read_slice(one).memory_used_bytes == 2**28


def test_a_slice_that_was_taken_away_is_unreadable(bench: OpenBench) -> None:
    with pytest.raises(DeviceUnreadable, match="Not Found"):
        bench().reader.read(fake_slice_uuid(0, 0))
