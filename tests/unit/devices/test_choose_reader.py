"""Which reader is used, and why; AMD's GPUs through amdsmi, and dcgmi beside an NVML without GPM."""

import re
import sys
from functools import partial
from pathlib import Path

import pynvml
import pytest
from rooms.devices import AmdReader, open_devices, open_reader, resolve_devices
from rooms.model import METRICS, StandIn
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.device_stories import FACTS, facts_of, story_file, tell
from support.fake_amdsmi import FakeAmdsmi
from support.fake_dcgmi import FakeDcgmi
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.fake_nvml import FakeNvml, fake_uuid
from support.fake_sysfs import amd_card, make_card
from support.hand_clock import HandClock
from support.stand_ins import install
from support.waiting import wait_for

NO_DRIVER = "the NVIDIA driver is not loaded on this machine"
NO_GPU = "the kernel lists no GPU"


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Open a reader on a machine whose programs are in ``tmp_path``, without an AMD GPU."""
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    return lambda path=str(tmp_path): open_reader(StandIn(), HandClock(), 0, path, str(tmp_path))


def test_the_first_reader_that_works_is_used_and_why(monkeypatch, tmp_path, opened):
    library, smi = FakeNvml(monkeypatch, devices=2), FakeNvidiaSmi(tmp_path)
    package = FakeAmdsmi(monkeypatch, devices=2)
    nvml = opened()
    seen = (nvml.backend, nvml.why, len(nvml.inventory()), smi.starts())
    assert seen == ("nvml", "NVML works: driver 580.00.00", 2, [])
    nvml.close()
    library.set(init_error=9)
    by_smi = opened()
    assert (by_smi.backend, by_smi.why) == ("nvidia-smi", NO_DRIVER)
    smi.set(fails="NVIDIA-SMI has failed")
    amd = opened()
    no_smi = "nvidia-smi cannot list the devices: NVIDIA-SMI has failed"
    assert (amd.backend, amd.why, package.running) == ("amd", f"{NO_DRIVER}; {no_smi}", True)
    uuid = amd.inventory()[0].uuid
    for _ in range(2):
        amd.close()
        assert not package.running
    assert amd.read(uuid).temperature_c == 40, "it starts again"
    amd.close()
    for devices, words in ((None, r"amdsmi does not start: .*driver not loaded"), (0, "amdsmi lists no device")):
        package.set(devices=devices)
        with pytest.raises(DeviceUnreadable, match=words):
            AmdReader(HandClock()).read(uuid)
        none = opened()
        assert re.match(f"{NO_DRIVER}; {no_smi}; {words}", none.why) and not package.running
    package.set(devices=2)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    smi.set(fails=None)
    assert opened(None).backend == "amd", "no search path, no program"


def test_where_nothing_works_all_reasons_are_given(monkeypatch, tmp_path, opened):
    FakeNvml(monkeypatch, devices=2, init_error=9)
    starts, start = [], pynvml.nvmlInit
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: (starts.append(1), start()))
    reader = opened()
    assert (reader.backend, reader.why) == ("none", f"{NO_DRIVER}; no nvidia-smi on PATH; no AMD GPU; {NO_GPU}")
    with pytest.raises(ReaderUnavailable, match=reader.why):
        reader.inventory()
    with pytest.raises(DeviceUnreadable, match=reader.why):
        reader.read("GPU-x")
    reader.close()
    assert starts == [1]
    install(tmp_path / "nvidia-smi", "#!/bin/sh\necho No devices were found\n")
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with open_devices(environ, HandClock(), StandIn()) as found:
        assert [(device.token, device.pin) for device in found.grant.devices] == [("0", "0"), ("1", "1")]
        assert "nvidia-smi lists no device" in str(found.trouble)
        assert (found.reader.backend, found.reader.why, found.inventory) == ("none", found.trouble, ())
    for number, vendor, is_amd in ((0, b"\xff", False), (1, b"0x10de\n", False), (2, b"0x1002\n", True)):
        card = tmp_path / f"class/drm/card{number}/device"
        card.mkdir(parents=True)
        (card / "vendor").write_bytes(vendor)
        assert ("amdsmi is not installed (pip install 'badcjobs[amd]')" in opened().why) is is_amd
        assert ("; no AMD GPU; " in opened().why) is not is_amd
        assert opened().backend == "none", "the kernel does not know NVIDIA's state, nor a card without a driver"
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: int("libnvidia-ml.so.1: file too short"))
    assert "nvml does not work: ValueError" in opened().why


INTEL = {"/gt_act_freq_mhz": "1150", "hwmon/hwmon2/temp1_input": "N/A", "hwmon/hwmon2/energy1_input": "5000000"}


def test_without_a_library_the_kernel_is_asked_and_what_it_does_not_say_is_unknown(monkeypatch, tmp_path, opened):
    FakeNvml(monkeypatch, devices=2, init_error=9)
    make_card(tmp_path, 0, "virtio-pci", "0x1af4", {})
    assert opened().backend == "none", "the display of a virtual machine"
    make_card(tmp_path, 1, "xe", "0x8086", INTEL)
    (tmp_path / "class/drm/card1-DP-1").mkdir()
    reader = opened()
    (device,) = reader.inventory()
    assert (device.index, device.uuid, device.name) == (0, "PCI-0000:01:00.0", "Intel GPU 744a")
    assert (reader.backend, device.memory_total_bytes, device.power_limit_w) == ("sysfs", None, None)
    reading = reader.read(device.uuid)
    given = {metric: value for metric in METRICS if (value := getattr(reading, metric)) is not None}
    assert given == {"sm_clock_mhz": 1150, "energy_j": 5.0}
    assert reading.missing["temperature_c"] == "temp1_input: not a number"
    assert reading.missing.keys() == set(METRICS) - given.keys()
    for environ, tokens in (({}, ["0"]), ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"])):
        grant = resolve_devices(environ, [device], in_slurm=False)
        assert [one.token for one in grant.devices] == tokens, "CUDA's numbers do not mean this device"
    usable = resolve_devices({}, [device], in_slurm=False).for_work()
    assert usable.devices == () and "Intel GPU 744a can be recorded, but" in usable.why
    amd_card(tmp_path, 2)
    both = opened().inventory()
    assert [(one.index, one.vendor) for one in both] == [(0, "amd"), (1, "intel")], "in front of it for the kernel"
    for number, granted in (("0", [both[0].uuid]), ("1", [])):
        grant = resolve_devices({"ROCR_VISIBLE_DEVICES": number}, both, in_slurm=True)
        assert [one.uuid for one in grant.devices] == granted, "ROCm's numbers mean only cards of AMD"
    (tmp_path / "module/nvidia").mkdir(parents=True)
    assert opened().why.endswith("the kernel does not report the state of NVIDIA GPUs")


def read(package, clock, reader, now):
    clock.sleep(now.seconds)
    package.set(**now.changes)
    return reader.read(reader.inventory()[int(now.device)].uuid)


def test_amd_devices_are_read_as_their_stories_say_and_listed_in_the_order_of_hip(monkeypatch, pages):
    lines, listed, usual = [], [FACTS, ""], {}
    for story in story_file("device_stories.txt")["amd"]:
        with monkeypatch.context() as patch:
            package = FakeAmdsmi(patch, devices=2, **{"ticks": 2_000_000, **story.settings})
            clock = HandClock()
            reader = AmdReader(clock)
            lines += [*tell(story, partial(read, package, clock, reader), package.calls, usual), ""]
            reader.close()
    for story in story_file("device_lists.txt")["amd"]:
        with monkeypatch.context() as patch:
            FakeAmdsmi(patch, devices=2, **story.settings)
            listed += [f"[{story.name}]", *facts_of(AmdReader(HandClock()).inventory()), ""]
    pages({"readings.txt": "\n".join(lines), "inventory.txt": "\n".join(listed)})


SHARES = ("sm_activity_percent", "sm_occupancy_percent")
NO_GPM = "no GPM on this device: not supported by the driver"
LISTED = {"0": "GPU-of-others", "1": fake_uuid(0), "12": fake_uuid(1)}  # it counts a card that we cannot see
ROWS = "GPU 0  0.999  0.999\nGPU-I 1   0.5    0.5\nGPU 1     0.52345       1.000\nGPU 12  0.000  N/A\n"


class Cards:
    """Two cards without GPM, whose SM activity and occupancy come from dcgmi, and one with it."""

    def __init__(self, patch, folder):
        FakeNvml(patch, devices=3, unsupported="gpm:0,gpm:1")
        self.clock = HandClock()
        self.reader = open_reader(StandIn(), self.clock, 0, str(folder))

    def shares(self, index=0):
        """Return activity and occupancy, or why they are missing."""
        reading = self.reader.read(fake_uuid(index))
        return [reading.missing.get(metric, getattr(reading, metric)) for metric in SHARES]

    def wait_until(self, *shares, index=0):
        wait_for(lambda: self.shares(index) == [*shares], f"{shares}")


def test_one_dcgmi_gives_each_card_its_latest_shares(monkeypatch, tmp_path):
    dcgmi, cards = FakeDcgmi(tmp_path, LISTED, rows=ROWS), Cards(monkeypatch, tmp_path)
    cards.shares(2)
    cards.clock.sleep(5)
    assert [type(share) for share in cards.shares(2)] == [float, float]
    assert dcgmi.starts() == [], "a card with its own values needs none"
    unknown = f"{NO_GPM}; dcgmi: no data for this device"
    assert cards.shares() == [unknown] * 2, "before its first word"
    cards.wait_until(52.345, 100.0)
    assert [cards.reader.read(fake_uuid(0)).sources[metric] for metric in SHARES] == ["dcgmi"] * 2
    wait_for(lambda: cards.shares(1)[0] == 0.0, "zero is zero")
    assert isinstance(cards.shares(1)[1], str), "and unknown is not"
    (_, *listing), (pid, *watching) = dcgmi.starts()
    assert (listing, watching) == (["discovery", "-l"], ["dmon", "-e", "1002,1003", "-d", "1000"])
    dcgmi.write(rows="GPU 1  73.5  -0.25\n")
    wait_for(lambda: isinstance(cards.shares()[0], str), "neither can be")
    dcgmi.write(rows="GPU 1  0.5  nan\n")
    wait_for(lambda: cards.shares()[0] == 50.0, "it is heard again")
    assert isinstance(cards.shares()[1], str)
    dcgmi.write(rows="")
    rounds = dcgmi.rounds()
    wait_for(lambda: dcgmi.rounds() > rounds + 1, "it is silent")
    cards.clock.sleep(5)
    assert cards.shares()[0] == 50.0
    cards.clock.sleep(0.1)
    assert cards.shares() == [f"{NO_GPM}; dcgmi: GPU-I 1 0.5 0.5"] * 2, "with the last line that is no reading"
    cards.reader.close()
    assert not Path(f"/proc/{pid}").exists()
    assert cards.shares() == [unknown] * 2, "what it said before is forgotten"
    cards.reader.close()


REFUSAL = "Error setting watches. Result: -29: requires the host engine to be running as root."
TROUBLE = {
    REFUSAL: {"refusal": REFUSAL}, "Error: unable to connect": {"discovery": "Error: unable to connect", "code": "1"},
    "discovery lists no GPU": {"discovery": ""}, "ended with exit code 1": {"rows": None},
}  # fmt: skip


def test_a_dcgmi_that_refuses_is_not_started_again(monkeypatch, tmp_path):
    for number, (words, trouble) in enumerate(TROUBLE.items()):
        dcgmi = FakeDcgmi(tmp_path / str(number), {"1": fake_uuid(0)}, **trouble)
        cards, reasons = Cards(monkeypatch, tmp_path / str(number)), [f"{NO_GPM}; dcgmi: {words}"] * 2
        cards.wait_until(*reasons)
        starts = len(dcgmi.starts())
        cards.clock.sleep(60)
        assert (cards.shares(), len(dcgmi.starts())) == (reasons, starts)
        cards.reader.close()
    cards = Cards(monkeypatch, tmp_path)
    assert cards.shares() == [f"{NO_GPM}; dcgmi is not on PATH"] * 2
    cards.reader.close()
    FakeDcgmi(tmp_path, {"0": "GPU-of-others"})
    cards = Cards(monkeypatch, tmp_path)
    assert cards.shares() == [f"{NO_GPM}; dcgmi: no data for this device"] * 2
    cards.reader.close()
