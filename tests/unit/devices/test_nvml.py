"""The NVML reader, with the real binding on a stand-in library: stories of devices, their readings as pages."""

import logging
from functools import partial

import pynvml
import pytest
from rooms.devices import resolve_devices
from rooms.model import METRICS, ProcessReading
from rooms.root import DeviceUnreadable, ReaderUnavailable
from support.device_stories import FACTS, facts_of, story_file, tell
from support.fake_nvml import NvmlBench, fake_slice_uuid, fake_uuid


@pytest.fixture
def bench(monkeypatch):
    opened = []

    def open_it(devices=2, **settings):
        opened.append(NvmlBench(monkeypatch, devices, **settings))
        return opened[-1]

    yield open_it
    for one in opened:
        one.reader.close()


STORIES = {topic: reported for topic, reported in story_file("device_stories.txt").items() if topic != "amd"}


def uuid_of(device):
    card, _, slice_ = device.partition(".")
    return fake_slice_uuid(int(card), int(slice_)) if slice_ else fake_uuid(int(card))


def read(one, now):
    one.move(now.seconds, now.worked_s)
    one.stand_in.set(**now.changes)
    if now.last:
        one.reader.force_full_read()
    one.reader.watched = now.watched
    return one.reader.read(uuid_of(now.device))


@pytest.mark.parametrize("topic", STORIES)
def test_a_device_is_read_as_its_story_says(bench, pages, topic):
    lines, usual = [], {}
    for story in STORIES[topic]:
        one = bench(**story.settings)
        lines += [*tell(story, partial(read, one), one.stand_in.calls, usual), ""]
        one.reader.close()
        assert one.stand_in.unreleased() == 0
    pages({"readings.txt": "\n".join(lines)})


CALLS = """uuid name utilization memory memory_v2 temperature temperature_v power energy clock throttle throttle_old fan
encoder decoder ecc processes processes_v2 graphics graphics_v2 process_utilization fields pcie gpm gpm_sample
gpm_metrics gpm_occupancy events wait"""


@pytest.mark.parametrize("without", ["", "gpm"])
def test_whatever_one_call_answers_no_other_metric_suffers(bench, without):
    def third_reading(**trouble):
        one = bench(processes="0:7:100:20", unsupported=without)
        one.read()
        one.stand_in.set(**trouble)
        one.read_later(5, worked_s=1)
        reading = one.read_later(15, worked_s=1)
        one.reader.close()
        return reading

    healthy = third_reading()
    for trouble in ("unsupported", "forbidden", "absent", "failing", "blank"):
        for call in CALLS.split():
            both = ",".join(filter(None, [call, without if trouble == "unsupported" else ""]))
            reading = third_reading(**{trouble: both})
            for metric in METRICS:
                value = getattr(reading, metric)
                if reading.sources.get(metric) != healthy.sources.get(metric) and metric in reading.sources:
                    continue  # the next best source has stepped in
                if value is None:
                    assert reading.missing[metric], (call, metric)
                elif metric not in ("memory_used_bytes", "energy_j"):
                    assert value == getattr(healthy, metric), (call, metric)


def test_old_drivers_and_bindings_are_asked_in_their_way(bench, monkeypatch):
    one = bench(processes="0:1:100:-", absent="processes,graphics,temperature")
    lists, heats = (hasattr(pynvml, f"nvmlDeviceGet{name}") for name in ("ComputeRunningProcesses_v2", "TemperatureV"))
    for _ in range(3):
        reading = one.read_later(20)
        assert reading.processes == ((ProcessReading(1, 100 * 2**20),) if lists else None)
        assert reading.temperature_c == (40 if heats else None)
    assert [one.stand_in.calls(call, 0) for call in ("processes", "temperature")] == [1, 1]
    monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage")
    reading = bench().read()
    assert reading.missing == {"power_w": "module 'pynvml' has no attribute 'nvmlDeviceGetPowerUsage'"}


def test_readings_share_no_reasons_and_no_faults_and_ask_since_the_last_sample(bench):
    one = bench(3, unsupported="fan", processes="0:4711:512:30")
    first, *_ = [one.read(index) for index in range(3)]
    one.stand_in.set(unsupported="fan,power", xid="1:31")
    one.move(20)
    assert [one.read(index).faults for index in range(3)] == [(), ("Xid 31",), ()]
    assert sorted(one.read().missing) == ["fan_percent", "power_w"]
    assert list(first.missing) == ["fan_percent"]
    since = []
    for _ in range(40):
        since.append(one.stand_in.last_seen_us(0) - 10**9)
        one.read_later(1), one.read(1)
    assert one.stand_in.calls("wait", 0) == 1 + 9 + 1, "fetched every 5 s for all devices: until Timeout"
    assert since == [n * 20_000_000 for n in (0, 1) for _ in range(20)]
    one.stand_in.set(processes="")
    asked = [one.read_later(20) and one.stand_in.last_seen_us(0) for _ in range(2)]
    assert asked[0] == asked[1] > 10**9, "an empty answer has no newer sample"


def test_cards_are_listed_with_their_slices_and_what_cannot_be_used_is_left_out(bench, pages, caplog):
    said = []
    for story in story_file("device_lists.txt")["nvml"]:
        one = bench(**story.settings)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            lists = [one.reader.inventory() for _ in range(3)]
        assert lists[0] == lists[1] == lists[2]
        said += [f"[{story.name}]", *facts_of(lists[0]), *caplog.messages, ""]
        one.reader.close()
    pages({"inventory.txt": "\n".join([FACTS, "", *said])})
    without_slices = bench(3, mig="1:0").reader.inventory()
    grant = resolve_devices({"CUDA_VISIBLE_DEVICES": "0,1,2"}, without_slices, in_slurm=True)
    assert [device.uuid for device in grant.devices] == [fake_uuid(0)], "a list ends at a card without slices"


def test_nvml_that_does_not_start_is_unavailable_with_the_reason_until_it_starts(bench):
    one = bench()
    assert one.reader.why == "NVML is tried first"
    for code, text in ((9, "driver is not loaded"), (18, "different versions"), (999, "not start: Unknown Error")):
        one.stand_in.set(init_error=code)
        with pytest.raises(ReaderUnavailable, match=text):
            one.reader.inventory()
        with pytest.raises(DeviceUnreadable, match=text):
            one.read()
    one.stand_in.set(init_error=None)
    assert (len(one.reader.inventory()), one.reader.why) == (2, "NVML works: driver 580.00.00")


def test_a_reader_goes_on_after_it_was_closed(bench):
    one = bench()
    one.read(0)
    one.stand_in.set(xid="0:31")
    assert one.read_later(5).faults == ("Xid 31",)
    one.reader.close()
    assert one.stand_in.unreleased() == 0
    assert one.read().power_w == 100.0
    one.reader.close()
    with pytest.raises(pynvml.NVMLError, match="Uninitialized"):
        pynvml.nvmlShutdown()  # as often stopped as started
    slices = bench(1, mig="0:2")
    for index in (0, 1):
        slices.reader.read(fake_slice_uuid(0, index))
    slices.reader.close()
    slices.reader.read(fake_slice_uuid(0, 0))
    slices.stand_in.set(xid="0.0:31")
    slices.move(5)
    assert slices.reader.read(fake_slice_uuid(0, 0)).faults == ("Xid 31",), "it listens again"
