"""Xid errors, as the NVML reader hears of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
from rooms.root import DeviceUnreadable
from support.fake_nvml import NvmlBench, fake_slice_uuid

OpenBench = Callable[..., NvmlBench]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenBench]:
    opened: list[NvmlBench] = []

    def open_it(devices: int = 3, **settings: object) -> NvmlBench:
        opened.append(NvmlBench(monkeypatch, devices, **settings))
        return opened[-1]

    yield open_it
    for one in opened:
        one.reader.close()


def test_a_fault_is_told_once_and_on_the_device_concerned(bench: OpenBench) -> None:
    one = bench()
    assert [one.read(index).faults for index in range(3)] == [(), (), ()]
    one.stand_in.set(xid="1:31")
    one.move(5)
    assert [one.read(index).faults for index in range(3)] == [(), ("Xid 31",), ()]
    one.move(5)
    assert [one.read(index).faults for index in range(3)] == [(), (), ()]


def test_several_faults_between_two_readings_are_all_told(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.stand_in.set(xid="0:13,0:31,0:43")
    assert one.read_later(5).faults == ("Xid 13", "Xid 31", "Xid 43")


def test_events_are_fetched_every_five_seconds_for_all_devices(bench: OpenBench) -> None:
    one = bench()
    for _ in range(25):
        for index in range(3):
            one.read(index)
        one.move(1)
    assert one.stand_in.calls("wait", 0) == 5
    assert one.stand_in.live_event_sets() == 1


def test_the_last_words_of_a_device_that_is_lost_are_in_the_reason(bench: OpenBench) -> None:
    one = bench()
    one.read(0)
    one.read(1)
    one.stand_in.set(xid="1:79", lost=1)
    for _ in range(2):
        with pytest.raises(DeviceUnreadable, match=r"^GPU is lost \(Xid 79\)$"):
            one.read(1)
        one.move(1)
    one.stand_in.set(lost=None)
    assert one.read(1).faults == ("Xid 79",)


def test_a_slice_hears_of_its_own_faults_and_of_its_cards(bench: OpenBench) -> None:
    one = bench(mig="1:2")
    slices = [fake_slice_uuid(1, 0), fake_slice_uuid(1, 1)]
    for uuid in slices:
        one.reader.read(uuid)
    one.stand_in.set(xid="1.1:31,1:48")
    one.move(5)
    assert [one.reader.read(uuid).faults for uuid in slices] == [("Xid 48",), ("Xid 31", "Xid 48")]


@pytest.mark.parametrize("trouble", ["unsupported", "forbidden", "absent", "failing"])
def test_where_nobody_may_listen_there_are_no_faults_and_no_noise(
    bench: OpenBench, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    one = bench(xid="0:79", **{trouble: "events"})
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            reading = one.read_later(1)
            assert (reading.faults, reading.missing) == ((), {})
    assert caplog.text.count("no fault events of") == 1
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert one.stand_in.calls("wait", 0) == 0


def test_events_that_cannot_be_fetched_do_not_hinder_the_reading(bench: OpenBench) -> None:
    one = bench(failing="wait")
    one.read()
    assert one.read_later(1).power_w == 100.0
    one.stand_in.set(failing=None, xid="0:31")
    assert one.read_later(5).faults == ("Xid 31",)


def test_the_event_set_is_given_back_and_a_reader_that_is_used_again_listens_again(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.reader.close()
    assert one.stand_in.live_event_sets() == 0
    one.read_later(1)
    one.stand_in.set(xid="0:31")
    assert one.read_later(5).faults == ("Xid 31",)


def test_the_last_reading_hears_of_a_fault_of_its_own_second(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.read_later(1)
    one.stand_in.set(xid="0:31")
    assert one.read_later(1).faults == ()
    one.reader.force_full_read()
    assert one.read_later(1).faults == ("Xid 31",)
