"""AMD's GPUs through amdsmi, whose answers changed from one ROCm to the next: stories of devices, as pages."""

from __future__ import annotations

from functools import partial

import pytest
from rooms.devices import AmdReader
from rooms.model import Reading
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.device_stories import FACTS, Step, facts_of, story_file, tell
from support.fake_amdsmi import FakeAmdsmi
from support.hand_clock import HandClock
from support.pages import Pages


def read(package: FakeAmdsmi, clock: HandClock, reader: AmdReader, now: Step) -> Reading:
    clock.sleep(now.seconds)
    package.set(**now.changes)
    return reader.read(reader.inventory()[int(now.device)].uuid)


def test_a_device_is_read_as_its_story_says(monkeypatch: pytest.MonkeyPatch, pages: Pages) -> None:
    lines: list[str] = []
    usual: dict[str, str] = {}
    for story in story_file("device_stories.txt")["amd"]:
        with monkeypatch.context() as patch:
            package = FakeAmdsmi(patch, devices=2, **{"ticks": 2_000_000, **story.settings})
            clock = HandClock()
            reader = AmdReader(clock)
            lines += [*tell(story, partial(read, package, clock, reader), package.calls, usual), ""]
            reader.close()
    pages({"readings.txt": "\n".join(lines)})


INVENTORIES: dict[str, dict[str, object]] = {
    "ROCm 7": {}, "ROCm 6": {"rocm": 6}, "ROCm 5": {"rocm": 5}, "only the edge is measured": {"no_hotspot": 1},
    "the order of HIP, and facts that cannot be": {"reversed": 1, "says": "cap:N/A", "unsupported": "temp:0"},
    "a limit in watts": {"says": "cap:9999"}, "the highest": {"says": "cap:10000"},
    "a limit in microwatts": {"says": "cap:10000000000"}, "one that cannot be": {"says": "cap:10001000000"},
    "no numbers of HIP": {"hip_id": "N/A"}, "numbers of HIP that cannot be": {"hip_id": 65537},
    "a short serial": {"serial": "0x1F", "rocm": 6}, "no names": {"nameless": 1, "rocm": 6},
}  # fmt: skip


def test_devices_are_listed_in_the_order_of_hip_and_facts_that_cannot_be_are_none(
    monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    said = [FACTS, ""]
    for name, settings in INVENTORIES.items():
        with monkeypatch.context() as patch:
            FakeAmdsmi(patch, devices=2, **settings)
            said += [f"[{name}]", *facts_of(AmdReader(HandClock()).inventory()), ""]
    pages({"inventory.txt": "\n".join(said)})


def test_a_closed_reader_has_shut_the_library_down_and_one_that_does_not_work_is_unavailable_in_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = FakeAmdsmi(monkeypatch, devices=2)
    reader = AmdReader(HandClock())
    uuid = reader.inventory()[0].uuid
    assert package.running
    for _ in range(2):
        reader.close()
        assert not package.running
    assert reader.read(uuid).temperature_c == 40, "it starts again"
    reader.close()
    for devices, words in ((None, r"amdsmi does not start: .*driver not loaded"), (0, "lists no device")):
        package.set(devices=devices)
        with pytest.raises(ReaderUnavailable, match=words):
            AmdReader(HandClock()).inventory()
        with pytest.raises(DeviceUnreadable, match=words):
            AmdReader(HandClock()).read(uuid)
