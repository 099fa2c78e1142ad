"""Alerts: when they begin, when they end, and that a value which dances on its limit is one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import AlertLimits, ProcessReading, Reading
from rooms.telemetry import Alert, AlertBook, Followed, SidecarOrder, TelemetryWriter
from support.databases import query

GIB = 2**30
START_MS = 1_800_000_000_000
CARD = Followed(7, "GPU-7", 1, 16 * GIB, 300.0, None)


class Book:
    """An alert book over a real file, fed second by second; a text in place of a reading is a device that is silent."""

    def __init__(self, path: Path, limits: AlertLimits, device: Followed = CARD) -> None:
        self.path = path
        self.device = device
        self.writer = TelemetryWriter(path, 77)
        self.told: list[Alert] = []
        self.book = AlertBook(self.writer, [device], limits, self.told.append)

    def feed(self, answers: Iterable[Reading | str], *, from_s: float = 0.0, every_s: float = 1.0) -> None:
        for number, answer in enumerate(answers):
            at_ms = START_MS + round(1000 * (from_s + number * every_s))
            silent = {self.device.device_id: answer} if isinstance(answer, str) else {}
            readings = [] if isinstance(answer, str) else [(self.device.device_id, answer)]
            with self.writer.batch():
                self.book.write(at_ms, readings, silent)
            self.book.written()

    def finish(self) -> None:
        with self.writer.batch():
            self.book.finish()

    @property
    def rows(self) -> list[tuple[object, ...]]:
        """Return (kind, begin, end, peak), in seconds."""
        sql = """SELECT kind, (started_at_ms - ?1) / 1000.0, (ended_at_ms - ?1) / 1000.0, peak FROM alert
                 ORDER BY started_at_ms, kind"""
        return query(self.path, sql, START_MS)

    def column(self, name: str) -> list[object]:
        return [value for (value,) in query(self.path, f"SELECT {name} FROM alert ORDER BY rowid")]


@pytest.fixture
def make(tmp_path: Path) -> Iterable[Callable[..., Book]]:
    books: list[Book] = []

    def make_book(limits: AlertLimits | None = None, device: Followed = CARD) -> Book:
        books.append(Book(tmp_path / "recorder.sqlite", limits or AlertLimits(), device))
        return books[-1]

    yield make_book
    for book in books:
        book.writer.close()


def hot(*degrees: int) -> list[Reading]:
    return [Reading(temperature_c=value) for value in degrees]


def throttled(*masks: int) -> list[Reading]:
    return [Reading(throttle_reasons=mask) for mask in masks]


# --- the course of an alert -------------------------------------------------------------------------------------------


def test_an_alert_has_begin_end_and_peak(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(70, 84, 91, 88, 79, 70))
    assert book.rows == [("thermal", 1.0, 4.0, 91.0)]
    assert query(book.path, "SELECT task_id, device_id, severity, threshold, message FROM alert") == [
        (77, 7, "warning", 83.0, "device 1 is at 84 °C; the limit is 83 °C")
    ]


def test_it_is_told_once_when_it_begins_and_once_when_it_ends(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(70, 84, *range(85, 95), 79, 70, 70))
    assert [alert.over for alert in book.told] == [False, True]
    assert [alert.peak for alert in book.told] == [84, 94]
    begun, ended = book.told
    assert begun.text == "alert (thermal): device 1 is at 84 °C; the limit is 83 °C"
    assert ended.text == "alert ended after 11 s (thermal; worst value 94): device 1 is at 84 °C; the limit is 83 °C"


def test_a_value_that_dances_on_its_limit_is_one_alert(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(83, 82, 83, 81, 84, 80, 83, 82))
    assert book.rows == [("thermal", 0.0, None, 84.0)]
    assert len(book.told) == 1


def test_two_stretches_are_two_alerts(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(85, 60, 60, 86, 60))
    assert book.rows == [("thermal", 0.0, 1.0, 85.0), ("thermal", 3.0, 4.0, 86.0)]


def test_an_alert_is_in_the_file_from_its_first_instant(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(90))
    assert book.rows == [("thermal", 0.0, None, 90.0)]


def test_an_alert_that_has_not_ended_when_the_recorder_stops_has_no_end(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(hot(70, 90, 91))
    book.finish()
    assert book.rows == [("thermal", 1.0, None, 91.0)]


def test_an_instant_that_the_disk_refused_leaves_its_alert_for_the_next(make: Callable[..., Book]) -> None:
    book = make()
    with pytest.raises(OSError, match="refused"), book.writer.batch():
        book.book.write(START_MS, [(7, Reading(temperature_c=90))], {})
        raise OSError("refused")
    assert book.rows == []
    book.feed(hot(91), from_s=1)
    assert book.rows == [("thermal", 0.0, None, 91.0)]
    assert len(book.told) == 1


def test_a_device_that_does_not_say_neither_begins_nor_ends_an_alert(make: Callable[..., Book]) -> None:
    book = make()
    book.feed([Reading(), *hot(90), Reading(), Reading(), *hot(60)])
    assert book.rows == [("thermal", 1.0, 4.0, 90.0)]


def test_a_second_recorder_goes_on_with_the_alert_of_the_first(make: Callable[..., Book]) -> None:
    first = make()
    first.feed([replace(reading, faults=("Xid 13",)) for reading in hot(90)])
    first.writer.close()
    second = make()
    second.book.resume()
    second.feed(hot(95, 60), from_s=5)
    assert second.rows == [("fault", 0.0, 0.0, 1.0), ("thermal", 0.0, 6.0, 95.0)]
    assert [alert.kind for alert in second.told if not alert.over] == [], "it has been told already"


def test_limits_and_devices_travel_in_the_recorders_order(tmp_path: Path) -> None:
    order = {
        "mark": "m", "task_id": 1, "wrapper_pid": 2, "devices": [[7, "GPU-7"], [8, None, 1, GIB, 300.0, 90]],
        "interval_s": 1.0, "stand_in": {"simulate": 2}, "search_path": None, "started_at_ms": 1, "asked_at_ms": 1,
        "recorder_file": "r", "wrapper_file": "w", "publish_to": "p", "local_folder": "l",
        "limits": {"temperature_c": 70.0},
    }  # fmt: skip
    path = tmp_path / "order.json"
    path.write_text(json.dumps(order))
    read = SidecarOrder.read(path)
    assert read.devices == [Followed(7, "GPU-7"), Followed(8, None, 1, GIB, 300.0, 90)]
    assert read.limits == AlertLimits(temperature_c=70.0)
    read.write(path)
    assert SidecarOrder.read(path) == read


@pytest.mark.parametrize(
    ("limits", "problems"),
    [
        (AlertLimits(), []),
        (AlertLimits(70, 100, 100.0, 1e6, 100), []),
        (AlertLimits(memory_percent=100.5), ["memory_percent = 100.5 must be at most 100"]),
        (AlertLimits(power_percent=None), ["power_percent = None must be a number above 0"]),  # type: ignore[arg-type]
        (AlertLimits(idle_s=True), ["idle_s = True must be a number above 0"]),
        (
            AlertLimits(float("nan"), -1, 95, float("inf"), 0),
            [
                "temperature_c = nan must be a number above 0",
                "memory_percent = -1 must be a number above 0",
                "idle_s = inf must be a number above 0",
                "energy_percent = 0 must be a number above 0",
            ],
        ),
    ],
)
def test_limits_know_everything_that_is_wrong_with_them(limits: AlertLimits, problems: list[str]) -> None:
    assert limits.problems() == problems


# --- heat, memory, power ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "slowdown_c", "threshold"), [(None, None, 83.0), (None, 90, 90.0), (70.0, 90, 70.0), (95.0, None, 95.0)]
)
def test_the_limit_of_heat_is_the_settings_else_the_devices_else_83(
    make: Callable[..., Book], own: float | None, slowdown_c: int | None, threshold: float
) -> None:
    book = make(AlertLimits(temperature_c=own), CARD._replace(slowdown_c=slowdown_c))
    book.feed(hot(round(threshold) - 1, round(threshold)))
    assert book.rows == [("thermal", 1.0, None, threshold)]
    assert book.column("threshold") == [threshold]


def test_memory_from_90_percent_on_is_an_alert(make: Callable[..., Book]) -> None:
    book = make()
    book.feed([Reading(memory_used_bytes=round(share * 16 * GIB)) for share in (0.89, 0.9, 0.95, 0.89, 0.87)])
    assert book.rows == [("memory", 1.0, 4.0, 95.0)]
    assert book.column("message") == ["device 1 uses 90.0 % of its memory; above 90 % it may run out of memory"]


def test_power_from_95_percent_of_its_limit_on_is_an_alert_that_short_breaks_do_not_end(
    make: Callable[..., Book],
) -> None:
    book = make()
    watts = [280, 285, 100, 100, 299, 100, *[100] * 11]
    book.feed([Reading(power_w=float(value)) for value in watts])
    assert book.rows == [("power", 1.0, 5.0, 99.7)]


def test_what_a_device_may_use_is_not_known_so_there_is_no_share_of_it(make: Callable[..., Book]) -> None:
    book = make(device=Followed(7, "GPU-7", 1))
    book.feed([Reading(memory_used_bytes=10**15, power_w=1e6)])
    assert book.rows == []


# --- lowered clocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "kind", "severity", "words"),
    [
        (0x40, "throttle_thermal", "critical", "too hot, the hardware slows down"),
        (0x48, "throttle_thermal", "critical", "too hot, the hardware slows down"),
        (0x20, "throttle_thermal", "warning", "too hot, the driver slows down"),
        (0x80, "throttle_power", "critical", "the power supply asks to slow down"),
        (0x8, "throttle_power", "critical", "the hardware slows down"),
    ],
)
def test_a_clock_lowered_by_heat_or_power_is_an_alert_at_once(
    make: Callable[..., Book], mask: int, kind: str, severity: str, words: str
) -> None:
    book = make()
    book.feed(throttled(0, mask))
    assert book.rows == [(kind, 1.0, None, float(mask & ~0x8 or 0x8))]
    assert book.column("severity") == [severity]
    assert book.column("message") == [f"device 1 has lowered its clock: {words}"]


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x10, 0x100])
def test_an_idle_device_or_a_clock_that_somebody_set_is_no_alert(make: Callable[..., Book], mask: int) -> None:
    book = make()
    book.feed(throttled(*[mask] * 30))
    assert book.rows == []


def test_touching_the_power_limit_is_an_alert_only_when_it_lasts(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(throttled(*[0x4] * 9, 0, 0x4, 0x4, 0))
    assert book.rows == []
    book.feed(throttled(*[0x4] * 11), from_s=100)
    assert book.rows == [("throttle_power", 100.0, None, 4.0)]
    assert book.column("severity") == ["warning"]


def test_throttling_that_flickers_is_one_alert_and_may_get_worse(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(throttled(0x20, 0, 0x20, 0, 0x40, *[0] * 11))
    assert book.rows == [("throttle_thermal", 0.0, 5.0, 64.0)]
    assert book.column("severity") == ["critical"]


def test_an_alert_that_was_fading_when_the_recorder_stops_has_ended(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(throttled(0x40, 0, 0))
    book.finish()
    assert book.rows == [("throttle_thermal", 0.0, 1.0, 64.0)]


# --- nothing to do ----------------------------------------------------------------------------------------------------


def idle(seconds: int, **values: float) -> Sequence[Reading]:
    return [Reading(utilization_percent=0, **values)] * seconds  # type: ignore[arg-type]


def test_idle_while_work_waits_is_an_alert_after_its_time_and_begins_where_idleness_began(
    make: Callable[..., Book],
) -> None:
    book = make(AlertLimits(idle_s=10))
    book.book.work_waits = True
    book.feed([Reading(utilization_percent=50), *idle(10)])
    assert book.rows == []
    book.feed([*idle(3), Reading(utilization_percent=50)], from_s=11)
    assert book.rows == [("idle", 1.0, 14.0, 12.0)]
    assert len(book.told) == 2


def test_idle_without_work_is_no_alert_and_work_that_ends_ends_it(make: Callable[..., Book]) -> None:
    book = make(AlertLimits(idle_s=10))
    book.feed(idle(60))
    assert book.rows == []
    book.book.work_waits = True
    book.feed(idle(12), from_s=60)
    book.book.work_waits = False
    book.feed(idle(1), from_s=72)
    assert book.rows == [("idle", 60.0, 72.0, 11.0)]


@pytest.mark.parametrize(
    "light", [{"busy_percent": 5.0}, {"sm_activity_percent": 4.5}, {"processes": (ProcessReading(1, None, 4),)}]
)
def test_light_load_that_the_plain_counter_does_not_see_is_not_idle(
    make: Callable[..., Book], light: dict[str, float]
) -> None:
    book = make(AlertLimits(idle_s=10))
    book.book.work_waits = True
    book.feed([*idle(8), *idle(1, **light), *idle(8)])
    assert book.rows == []


def test_a_device_that_does_not_say_how_busy_it_is_is_never_called_idle(make: Callable[..., Book]) -> None:
    book = make(AlertLimits(idle_s=10))
    book.book.work_waits = True
    book.feed([Reading(temperature_c=40)] * 60)
    assert book.rows == []


def test_seconds_without_an_answer_do_not_count_as_idle(make: Callable[..., Book]) -> None:
    book = make(AlertLimits(idle_s=10))
    book.book.work_waits = True
    book.feed([*idle(8), *["GPU is lost"] * 8, *idle(8)])
    assert [kind for kind, *_ in book.rows] == ["lost"]


# --- lost devices, faults, memory errors ------------------------------------------------------------------------------


def test_a_device_that_stops_answering_is_a_critical_alert_until_it_answers(make: Callable[..., Book]) -> None:
    book = make()
    book.feed([*hot(50), "GPU is lost", "GPU is lost", *hot(50)])
    assert book.rows == [("lost", 1.0, 3.0, None)]
    assert book.column("severity") == ["critical"]
    assert book.column("message") == ["device 1 can no longer be read: GPU is lost"]


@pytest.mark.parametrize(("reason", "alerts"), [("no driver library", 0), ("GPU is lost", 1)])
def test_a_device_that_never_answered_is_a_gap_unless_it_is_lost(
    make: Callable[..., Book], reason: str, alerts: int
) -> None:
    book = make()
    book.feed([reason] * 5)
    assert len(book.rows) == alerts


def test_each_fault_is_an_alert_with_its_count_and_a_storm_of_one_is_one(make: Callable[..., Book]) -> None:
    book = make()
    quiet = [Reading()] * 30
    book.feed([Reading(faults=("Xid 13",)), *quiet, Reading(faults=("Xid 13", "Xid 79")), *[Reading()] * 61])
    assert book.rows == [("fault", 0.0, 32.0, 2.0), ("fault", 31.0, 32.0, 1.0)]
    assert book.column("message") == ["device 1 reports Xid 13", "device 1 reports Xid 79"]
    assert book.column("severity") == ["critical", "critical"]


def test_faults_with_ever_new_texts_do_not_fill_the_log(make: Callable[..., Book]) -> None:
    book = make()
    book.feed([Reading(faults=(f"Xid 13 at {number}",)) for number in range(200)])
    assert len(book.rows) == 50


def test_memory_errors_of_former_times_are_no_alert_but_new_ones_are(make: Callable[..., Book]) -> None:
    book = make()
    counts = [12, 12, None, 13, 13, 15, *[15] * 61]
    book.feed([Reading(ecc_errors=value) for value in counts])
    assert book.rows == [("ecc", 3.0, 6.0, 3.0)]


# --- energy -----------------------------------------------------------------------------------------------------------


def energies(seconds: int, counted_w: float, *, every: int = 5, power_w: float | None = 200.0) -> list[Reading]:
    return [Reading(power_w=power_w, energy_j=1e6 + counted_w * s if s % every == 0 else None) for s in range(seconds)]


@pytest.mark.parametrize(
    ("counted_w", "peak"), [(200.0, None), (208.0, None), (212.0, 5.7), (180.0, 11.1), (0.0, 100.0)]
)
def test_counter_and_power_that_differ_by_more_than_5_percent_over_a_minute_are_an_alert(
    make: Callable[..., Book], counted_w: float, peak: float | None
) -> None:
    book = make()
    book.feed(energies(120, counted_w))
    assert book.rows == ([] if peak is None else [("energy", 60.0, None, peak)])
    words = f"device 1: energy counter and integrated power differ by {peak} % of the counter; up to 5 % is normal"
    assert book.column("message") == ([] if peak is None else [words])


def test_less_than_a_minute_of_both_is_not_compared(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(energies(60, 400.0))
    book.feed(energies(60, 400.0), from_s=80)  # after a hole nothing is known about, it starts anew
    book.feed(energies(120, 400.0, power_w=None), from_s=200)
    assert book.rows == []


def test_a_counter_that_starts_again_from_nothing_is_no_disagreement(make: Callable[..., Book]) -> None:
    book = make()
    book.feed(energies(50, 200.0))
    book.feed([replace(r, energy_j=None if r.energy_j is None else r.energy_j - 1e6) for r in energies(100, 200.0)],
              from_s=50)  # fmt: skip
    assert book.rows == []


def test_a_wave_of_load_read_once_a_second_is_no_disagreement(make: Callable[..., Book]) -> None:
    book = make()
    joules, readings = 1e6, []
    for second in range(300):
        power_w = 300.0 if second % 10 < 5 else 60.0
        readings.append(Reading(power_w=power_w, energy_j=joules if second % 5 == 0 else None))
        joules += power_w
    book.feed(readings)
    assert [row for row in book.rows if row[0] == "energy"] == []


# --- several devices --------------------------------------------------------------------------------------------------


def test_devices_have_their_own_alerts(tmp_path: Path) -> None:
    writer = TelemetryWriter(tmp_path / "r.sqlite", 77)
    book = AlertBook(writer, [CARD, Followed(8, "GPU-8", 2)], AlertLimits())
    with closing(writer), writer.batch():
        book.write(START_MS, [(7, Reading(temperature_c=90)), (8, Reading(temperature_c=95))], {})
        book.write(START_MS + 1000, [(7, Reading(temperature_c=50))], {8: "GPU is lost"})
    found = query(tmp_path / "r.sqlite", "SELECT device_id, kind, ended_at_ms IS NULL FROM alert ORDER BY rowid")
    assert found == [(7, "thermal", 0), (8, "thermal", 1), (8, "lost", 1)]
