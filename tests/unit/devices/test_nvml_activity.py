"""How hard a device worked, as the NVML reader finds out: GPM, processes, counters, plain utilization."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pynvml
import pytest
from rooms.model import METRICS, ProcessReading, Reading
from rooms.root import DeviceUnreadable
from support.fake_nvml import NvmlBench, fake_uuid

OpenBench = Callable[..., NvmlBench]
GPM_METRICS = ("sm_activity_percent", "sm_occupancy_percent", "tensor_percent", "dram_percent")
SECOND_US = 1_000_000


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenBench]:
    opened: list[NvmlBench] = []

    def open_it(**settings: object) -> NvmlBench:
        opened.append(NvmlBench(monkeypatch, **settings))
        return opened[-1]

    yield open_it
    for one in opened:
        one.reader.close()


# --- GPM --------------------------------------------------------------------------------------------------------------


def test_gpm_tells_what_happened_in_the_window_and_says_so(bench: OpenBench) -> None:
    one = bench()
    one.read()
    reading = one.read_later(5, worked_s=2)
    assert reading.busy_percent == pytest.approx(40)
    assert reading.sm_activity_percent == pytest.approx(36)
    assert reading.sm_occupancy_percent == pytest.approx(20)
    assert reading.tensor_percent == pytest.approx(10)
    assert reading.dram_percent == pytest.approx(8)
    assert (reading.pcie_tx_bytes_per_s, reading.pcie_rx_bytes_per_s) == (40 * 2**20, 80 * 2**20)
    from_gpm = ("busy_percent", *GPM_METRICS, "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")
    assert reading.sources == dict.fromkeys(from_gpm, "gpm")
    assert reading.missing == {}


def test_the_first_window_only_begins_with_the_first_reading(bench: OpenBench) -> None:
    reading = bench().read()
    assert reading.busy_percent is None
    assert all(getattr(reading, metric) is None for metric in GPM_METRICS)
    assert reading.missing == {}


def test_windows_are_back_to_back_so_that_every_moment_is_covered(bench: OpenBench) -> None:
    one = bench()
    one.read()
    worked = seconds = counted = 0.0
    for window_s, worked_s in [(5, 5), (5, 0.25), (7, 3.5), (5, 0), (60, 6)]:  # late ticks too
        reading = one.read_later(window_s, worked_s)
        worked, seconds = worked + worked_s, seconds + window_s
        assert reading.busy_percent is not None
        counted += reading.busy_percent / 100 * window_s
    assert counted == pytest.approx(worked)
    assert seconds == 82


def test_a_light_load_is_seen_where_the_plain_utilization_is_blind(bench: OpenBench) -> None:
    one = bench()
    one.read()
    assert one.read_later(5, worked_s=0.25).busy_percent == pytest.approx(5)


def test_gpm_is_asked_every_five_seconds_and_not_called_missing_in_between(bench: OpenBench) -> None:
    one = bench()
    given = []
    for _ in range(11):
        reading = one.read()
        assert reading.missing == {}
        given.append(reading.busy_percent is not None)
        one.move(1, worked_s=0.5)
    assert given == [second in (5, 10) for second in range(11)]
    assert one.stand_in.calls("gpm", 0) == 1
    assert one.stand_in.calls("gpm_sample", 0) == 3


def test_a_tick_that_comes_a_little_early_does_not_put_the_window_off(bench: OpenBench) -> None:
    one = bench()
    one.read()
    assert one.read_later(4.95, worked_s=1).busy_percent is not None


@pytest.mark.parametrize("call", ["gpm_sample", "gpm_metrics"])
def test_a_window_that_fails_is_covered_by_the_next_one(bench: OpenBench, call: str) -> None:
    one = bench()
    one.read()
    one.stand_in.set(failing=call)
    failed = one.read_later(5, worked_s=5)
    assert failed.sm_occupancy_percent is None
    assert failed.missing["sm_occupancy_percent"] == "Unknown Error"
    one.stand_in.set(failing=None)
    reading = one.read_later(5, worked_s=0)
    assert reading.busy_percent == pytest.approx(50)
    assert reading.missing == {}


def test_while_gpm_fails_the_next_best_source_tells_how_busy_the_device_is(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.stand_in.set(failing="gpm_metrics")
    reading = one.read_later(5, worked_s=5)
    assert (reading.busy_percent, reading.sources["busy_percent"]) == (50.0, "utilization")
    assert "busy_percent" not in reading.missing


def test_one_gpm_metric_that_a_device_lacks_leaves_the_others(bench: OpenBench) -> None:
    one = bench(unsupported="gpm_occupancy")
    one.read()
    reading = one.read_later(5, worked_s=5)
    assert reading.missing == {"sm_occupancy_percent": "Not Supported"}
    assert reading.busy_percent == pytest.approx(100)


def test_a_gpm_value_that_is_not_a_number_is_none(bench: OpenBench) -> None:
    one = bench(blank="gpm_metrics")
    one.read()
    reading = one.read_later(5, worked_s=5)
    assert {reading.missing[metric] for metric in GPM_METRICS} == {"Not Available"}
    assert all(getattr(reading, metric) is None for metric in GPM_METRICS)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("unsupported", "not supported by the driver"),
        ("absent", "Function Not Found"),
        ("forbidden", "Insufficient Permissions"),
    ],
)
def test_a_device_without_gpm_says_so_once_and_for_all(bench: OpenBench, trouble: str, reason: str) -> None:
    one = bench(**{trouble: "gpm:0"})
    for _ in range(12):
        reading = one.read()
        assert reading.missing == dict.fromkeys(GPM_METRICS, f"no GPM on this device: {reason}")
        one.move(1)
    assert one.stand_in.calls("gpm", 0) == 1
    assert one.read(1).missing == {}


def test_gpm_that_is_taken_away_in_mid_run_leaves_the_other_sources(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.stand_in.set(forbidden="gpm_sample")
    reading = one.read_later(5, worked_s=5)
    assert reading.missing["sm_occupancy_percent"] == "no GPM on this device: Insufficient Permissions"
    assert reading.sources["busy_percent"] == "utilization"
    assert one.stand_in.live_samples() == 0
    one.read_later(5)
    assert one.stand_in.calls("gpm_sample", 0) == 2


def test_a_gpm_question_that_fails_at_first_is_put_again(bench: OpenBench) -> None:
    one = bench(failing="gpm")
    assert one.read().missing["sm_occupancy_percent"] == "Unknown Error"
    one.stand_in.set(failing=None)
    one.read_later(5)
    assert one.read_later(5, worked_s=1).busy_percent == pytest.approx(20)


def test_gpm_samples_are_given_back(bench: OpenBench) -> None:
    one = bench()
    one.read(0)
    one.read(1)
    assert one.stand_in.live_samples() == 4
    one.reader.close()
    assert one.stand_in.live_samples() == 0


def test_the_window_of_a_device_that_was_lost_begins_anew(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.stand_in.set(lost=0)
    with pytest.raises(DeviceUnreadable, match="GPU is lost"):
        one.read_later(5, worked_s=5)
    assert one.stand_in.live_samples() == 0
    one.stand_in.set(lost=None)
    assert one.read_later(1).busy_percent is None
    assert one.read_later(5, worked_s=1).busy_percent == pytest.approx(20)


# --- processes --------------------------------------------------------------------------------------------------------


def test_processes_are_listed_with_their_memory_and_their_share(bench: OpenBench) -> None:
    one = bench(processes="0:4711:512:30,0:4712:-:-,1:99:10:5")
    assert one.read().processes == (ProcessReading(4711, 512 * 2**20), ProcessReading(4712))
    assert one.read_later().processes == (ProcessReading(4711, 512 * 2**20, 30), ProcessReading(4712))
    assert one.read(1).processes == (ProcessReading(99, 10 * 2**20),)


def test_processes_are_listed_every_five_seconds(bench: OpenBench) -> None:
    one = bench(processes="0:4711:512:30")
    given = []
    for _ in range(11):
        given.append(one.read().processes is not None)
        one.move(1)
    assert given == [second % 5 == 0 for second in range(11)]


def test_a_device_without_processes_has_an_empty_list(bench: OpenBench) -> None:
    assert bench().read().processes == ()


def test_a_process_that_computes_and_draws_is_listed_once(bench: OpenBench) -> None:
    one = bench(processes="0:1:100:-:cg,0:2:50:-:g")
    assert one.read().processes == (ProcessReading(1, 100 * 2**20), ProcessReading(2, 50 * 2**20))


@pytest.mark.parametrize("trouble", ["unsupported", "failing"])
def test_a_card_that_knows_no_graphics_processes_still_lists_the_others(bench: OpenBench, trouble: str) -> None:
    one = bench(processes="0:1:100:-", **{trouble: "graphics,graphics_v2"})
    assert one.read().processes == (ProcessReading(1, 100 * 2**20),)


def test_an_old_driver_lists_its_processes_in_the_old_way(bench: OpenBench) -> None:
    one = bench(processes="0:1:100:-", absent="processes,graphics")
    knows_the_old_way = hasattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v2")
    for _ in range(3):
        reading = one.read()
        assert reading.processes == ((ProcessReading(1, 100 * 2**20),) if knows_the_old_way else None)
        assert ("processes" in reading.missing) != knows_the_old_way
        one.move(5)
    assert one.stand_in.calls("processes", 0) == 1


def test_processes_that_cannot_be_listed_are_none_with_the_reason(bench: OpenBench) -> None:
    one = bench(forbidden="processes,processes_v2")
    reading = one.read()
    assert reading.processes is None
    assert reading.missing["processes"] == "Insufficient Permissions"


def test_shares_are_asked_since_the_last_sample_that_was_seen(bench: OpenBench) -> None:
    one = bench(processes="0:4711:512:30")
    one.read()
    one.read_later(5)
    assert one.stand_in.last_seen_us(0) == 1000 * SECOND_US
    one.read_later(5)
    assert one.stand_in.last_seen_us(0) == 1005 * SECOND_US


def test_a_process_that_has_ended_is_still_named_for_what_it_used(bench: OpenBench) -> None:
    one = bench(processes="0:4711:512:30")
    one.read()
    one.stand_in.set(processes="0:4711:-:30:x")  # of neither kind: in no list
    assert one.read_later().processes == (ProcessReading(4711, None, 30),)


def test_memory_of_a_process_that_cannot_be_is_none(bench: OpenBench) -> None:
    one = bench(processes="0:4711:-5:30")  # an unsigned number near 2**64
    assert one.read().processes == (ProcessReading(4711, None),)


@pytest.mark.parametrize(("worked_s", "busy"), [(5.02, 100.0), (5.0, 100.0), (7.0, None)])
def test_a_window_that_overshoots_a_little_is_full_and_one_that_cannot_be_is_none(
    bench: OpenBench, worked_s: float, busy: float | None
) -> None:
    one = bench(blank="utilization", unsupported="process_utilization", processes="0:4711:512:-")
    one.read()
    reading = one.read_later(5, worked_s=worked_s)
    assert reading.busy_percent == pytest.approx(busy)
    assert ("busy_percent" in reading.missing) == (busy is None)
    if busy is None:
        assert reading.missing["busy_percent"] == "implausible value: 140.0"


# --- how busy, without GPM --------------------------------------------------------------------------------------------


def test_without_gpm_the_shares_of_all_processes_say_how_busy_the_device_was(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="0:1:100:4,0:2:100:30+50")
    one.read()
    reading = one.read_later()
    assert (reading.busy_percent, reading.sources["busy_percent"]) == (44.0, "processes")


def test_a_device_is_never_more_than_wholly_busy(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="0:1:100:70,0:2:100:60")
    one.read()
    assert one.read_later().busy_percent == 100.0


def test_what_the_driver_remembers_from_before_the_first_reading_is_not_counted(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="0:1:100:99")
    reading = one.read()
    assert (reading.busy_percent, reading.sources["busy_percent"]) == (50.0, "utilization")


def test_a_share_that_no_device_can_have_is_left_out(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="0:1:100:4,0:2:100:4294967295")
    one.read()
    reading = one.read_later()
    assert reading.busy_percent == 4.0
    assert reading.processes == (ProcessReading(1, 100 * 2**20, 4), ProcessReading(2, 100 * 2**20, None))


def test_nothing_ran_is_no_failure_and_an_empty_device_was_idle(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", blank="utilization")
    one.read()
    reading = one.read_later()
    assert (reading.busy_percent, reading.sources["busy_percent"]) == (0.0, "processes")
    assert "busy_percent" not in reading.missing


def test_nothing_ran_is_no_zero_while_processes_sit_on_the_device(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", processes="0:1:100:-")
    one.read()
    reading = one.read_later()
    assert (reading.busy_percent, reading.sources["busy_percent"]) == (50.0, "utilization")


def test_an_empty_list_does_not_make_a_busy_device_idle(bench: OpenBench) -> None:
    # As in a container that shows no process of the host.
    one = bench(unsupported="gpm")
    one.read()
    assert one.read_later().busy_percent == 50.0


def test_where_nothing_else_tells_the_plain_utilization_is_given_with_every_reading(bench: OpenBench) -> None:
    one = bench(unsupported="gpm,process_utilization", processes="0:1:100:30")
    for _ in range(7):
        reading = one.read()
        assert (reading.busy_percent, reading.sources["busy_percent"]) == (50.0, "utilization")
        one.move(1)
    assert one.stand_in.calls("process_utilization", 0) == 1


def test_a_device_that_tells_in_no_way_how_busy_it_is_gives_the_reason(bench: OpenBench) -> None:
    one = bench(unsupported="gpm,process_utilization,utilization,processes,processes_v2")
    reading = one.read()
    assert reading.busy_percent is None
    assert reading.missing["busy_percent"] == "Not Supported"


# --- PCIe -------------------------------------------------------------------------------------------------------------


def test_without_gpm_pcie_is_the_rate_between_two_readings_of_the_counters(bench: OpenBench) -> None:
    one = bench(unsupported="gpm")
    first = one.read(1)
    assert (first.pcie_rx_bytes_per_s, first.pcie_tx_bytes_per_s) == (None, None)
    assert "pcie_rx_bytes_per_s" not in first.missing
    one.move(8)
    reading = one.read(1)
    assert (reading.pcie_rx_bytes_per_s, reading.pcie_tx_bytes_per_s) == (3_000_000, 2_000_000)
    assert reading.sources["pcie_rx_bytes_per_s"] == reading.sources["pcie_tx_bytes_per_s"] == "counters"


def test_with_gpm_the_counters_are_left_alone(bench: OpenBench) -> None:
    one = bench()
    one.read()
    one.read_later()
    assert one.stand_in.calls("fields", 0) == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"unsupported": "gpm,fields"}, "Not Supported"),
        ({"unsupported": "gpm,pcie"}, "Not Supported"),
        ({"unsupported": "gpm", "most_fields": 196}, "Not Supported"),
        ({"unsupported": "gpm", "forbidden": "fields"}, "Insufficient Permissions"),
    ],
    ids=str,
)
def test_counters_that_a_device_refuses_are_not_asked_again(
    bench: OpenBench, settings: dict[str, object], reason: str
) -> None:
    one = bench(**settings)
    for _ in range(3):
        missing = one.read().missing
        assert missing["pcie_rx_bytes_per_s"] == missing["pcie_tx_bytes_per_s"] == reason
        one.move(5)
    assert one.stand_in.calls("fields", 0) == 1


def test_a_counter_that_began_anew_gives_no_rate_and_the_next_window_does(bench: OpenBench) -> None:
    one = bench(unsupported="gpm")
    one.read()
    one.clock.sleep(5)
    one.stand_in.set(now_s=1)
    reading = one.read()
    assert reading.missing["pcie_rx_bytes_per_s"] == "the byte counter was reset"
    one.clock.sleep(5)
    one.stand_in.set(now_s=6)
    assert one.read().pcie_rx_bytes_per_s == 2_000_000


# --- all of it --------------------------------------------------------------------------------------------------------


def test_the_warm_tier_is_asked_every_five_seconds(bench: OpenBench) -> None:
    one = bench(unsupported="gpm", ecc=3)
    reading = one.read(1)
    assert (reading.fan_percent, reading.encoder_percent, reading.decoder_percent) == (31, 5, 7)
    assert reading.ecc_errors == 3
    for _ in range(4):
        one.move(1)
        reading = one.read(1)
        assert reading.fan_percent is None
        assert "fan_percent" not in reading.missing
    for call in ("energy", "fan", "encoder", "decoder", "ecc", "fields", "processes", "graphics"):
        assert one.stand_in.calls(call, 1) == 1, call


def test_every_warm_question_stands_alone(bench: OpenBench) -> None:
    one = bench(unsupported="fan", forbidden="ecc", failing="encoder", blank="decoder", absent="energy")
    reading = one.read()
    assert reading.missing == {
        "fan_percent": "Not Supported",
        "ecc_errors": "Insufficient Permissions",
        "encoder_percent": "Unknown Error",
        "decoder_percent": "Not Available",
        "energy_j": "Function Not Found",
    }
    one.stand_in.set(unsupported=None, forbidden=None, failing=None, blank=None, absent=None)
    reading = one.read_later()
    assert (reading.encoder_percent, reading.decoder_percent) == (5, 7)
    assert sorted(reading.missing) == ["ecc_errors", "energy_j", "fan_percent"]
    assert one.stand_in.calls("fan", 0) == 1


def test_a_reading_keeps_its_reasons_whatever_is_learned_later(bench: OpenBench) -> None:
    one = bench(unsupported="fan")
    first = one.read()
    one.stand_in.set(unsupported="fan,power")
    assert sorted(one.read_later(1).missing) == ["fan_percent", "power_w"]
    assert list(first.missing) == ["fan_percent"]


def test_slow_calls_of_the_warm_tier_do_not_slow_the_hot_one(bench: OpenBench) -> None:
    one = bench(slow="energy=30,fan=30")
    one.read()
    one.stand_in.set(slow="energy=2000,fan=2000,gpm_sample=2000,processes=2000")
    one.read_later(1)
    assert [one.stand_in.calls(call, 0) for call in ("energy", "fan", "power")] == [1, 1, 2]


def test_a_reader_finds_its_devices_again_after_somebody_ended_nvml(bench: OpenBench) -> None:
    one = bench()
    one.read()
    pynvml.nvmlShutdown()  # as another library in the same process might
    with pytest.raises(DeviceUnreadable, match="Uninitialized"):
        one.read_later(1)
    assert one.read_later(1).power_w == 100.0
    assert one.reader.read(fake_uuid(1)).power_w == 110.0


CALLS = (
    "uuid", "name", "utilization", "memory", "memory_v2", "temperature", "temperature_v", "power", "energy",
    "clock", "throttle", "throttle_old", "fan", "encoder", "decoder", "ecc", "processes", "processes_v2",
    "graphics", "graphics_v2", "process_utilization", "fields", "pcie", "gpm", "gpm_sample", "gpm_metrics",
    "gpm_occupancy", "events", "wait",
)  # fmt: skip


def two_warm_readings(one: NvmlBench, **trouble: object) -> list[Reading]:
    readings = [one.read()]
    one.stand_in.set(**trouble)
    return [*readings, one.read_later(5, worked_s=1), one.read_later(5, worked_s=1)]


@pytest.mark.parametrize("without", ["", "gpm"])
@pytest.mark.parametrize("trouble", ["unsupported", "forbidden", "absent", "failing", "blank"])
def test_whatever_one_call_answers_the_other_metrics_are_given_and_none_is_invented(
    bench: OpenBench, trouble: str, without: str
) -> None:
    always = {"processes": "0:7:100:20", "unsupported": without}
    healthy = two_warm_readings(bench(**always))[-1]
    for call in CALLS:
        both = ",".join(filter(None, [call, without if trouble == "unsupported" else ""]))
        reading = two_warm_readings(bench(**always), **{trouble: both})[-1]
        for metric in METRICS:
            value = getattr(reading, metric)
            if metric in reading.sources and reading.sources.get(metric) != healthy.sources.get(metric):
                continue  # the next best source has stepped in
            if value is None:
                assert reading.missing[metric], (call, metric)
            elif metric not in ("memory_used_bytes", "energy_j"):
                assert value == getattr(healthy, metric), (call, metric)


def test_the_last_reading_leaves_nothing_out(bench: OpenBench) -> None:
    one = bench()
    one.read()
    assert one.read_later(1).energy_j is None
    one.reader.force_full_read()
    last = one.read_later(1, worked_s=1)
    assert last.energy_j is not None
    assert last.busy_percent == pytest.approx(50)


def test_a_last_reading_that_follows_a_whole_one_at_once_does_not_cut_a_window_too_short(bench: OpenBench) -> None:
    one = bench()
    one.read()
    assert one.read_later(5, worked_s=5).busy_percent == 100
    one.reader.force_full_read()
    assert one.read_later(0.05).busy_percent is None


def test_a_dear_question_is_asked_less_often_than_a_cheap_one(bench: OpenBench) -> None:
    one = bench(slow="energy=3.5")
    readings = [one.read_later(5) for _ in range(12)]
    assert 3 <= sum(reading.energy_j is not None for reading in readings) <= 5
    assert sum(reading.encoder_percent is not None for reading in readings) == 12


def test_the_last_reading_has_the_energy_counter_however_long_that_takes(bench: OpenBench) -> None:
    one = bench(slow="energy=3.5")
    for _ in range(3):
        last = one.read_later(5)
    assert last.energy_j is None, "it is left out for some turns"
    one.move(1)
    one.reader.force_full_read()
    assert one.read().energy_j is not None


def test_where_windows_are_dear_they_are_longer_and_still_leave_no_moment_out(bench: OpenBench) -> None:
    """A load of half a window is seen whole, whichever window it falls into."""
    one = bench(slow="gpm_metrics=2")
    one.read()
    shares = [one.read_later(5, worked_s=2.5).busy_percent for _ in range(12)]
    known = [share for share in shares if share is not None]
    assert 5 <= len(known) <= 8
    assert known == pytest.approx([50.0] * len(known))
    one.read_later(2)
    one.reader.force_full_read()
    assert one.read_later(1).busy_percent is not None
