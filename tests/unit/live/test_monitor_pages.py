"""The pages of the live view: they fit any terminal, say what is not known, and obey keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rooms.live import (
    DEVICES,
    HELP,
    TASK,
    TASKS,
    Column,
    Page,
    Snapshot,
    Total,
    UiState,
    add_up,
    arrange_devices,
    arrange_tasks,
    as_plain_text,
    bar,
    choose_columns,
    downsample,
    draw,
    in_ascii,
    open_run_view,
    parse_keys,
    press,
    sparkline,
)
from rooms.model import Reading
from rooms.store import DeviceFacts, TaskAlert, TaskFacts
from support.hand_clock import HandClock
from support.live_run import write_live_run
from support.task_files import START_MS

NOW_MS = START_MS + 600_000


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    folder = tmp_path_factory.mktemp("run")
    write_live_run(folder, 20, now_ms=NOW_MS, waiting=4, seconds=30)
    return replace(open_run_view(folder, HandClock(NOW_MS)).look(), title="runs/july")


def task(index: int, state: str = "running", **values: object) -> TaskFacts:
    return TaskFacts(f"4821_{index}.r0.gpu1", "4821", index, state=state, **values)  # type: ignore[arg-type]


def device(index: int, **values: object) -> DeviceFacts:
    made = DeviceFacts("", "gpu1", index, f"GPU-{index}", "", "Tesla V100", "nvml")
    return replace(made, **values)  # type: ignore[arg-type]


def text(page: Page) -> str:
    return "\n".join(line.plain for line in page.lines)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [TASKS, DEVICES, TASK, HELP])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (100, 12), (40, 10), (20, 4)])
def test_a_page_fills_the_terminal_exactly_and_no_line_is_too_long(
    frame: Snapshot, page: str, width: int, height: int
) -> None:
    desk = UiState(page=page, opened=frame.tasks[0].name)
    for ascii_only in (False, True):
        lines = draw(frame, desk, width=width, height=height, ascii_only=ascii_only).lines
        assert len(lines) == height
        assert max(cell_len(line.plain) for line in lines) <= width
        assert all(not line.plain.count("\n") for line in lines)
        if ascii_only:
            assert all(line.plain.isascii() for line in lines)


@settings(deadline=None)
@given(width=st.integers(1, 250), height=st.integers(1, 80), line=st.integers(0, 10**6))
def test_no_size_of_a_terminal_and_no_line_is_too_strange(width: int, height: int, line: int) -> None:
    frame = Snapshot(NOW_MS, "run", True, tasks=tuple(task(n, done=n, pending=2) for n in range(7)))
    page = draw(frame, UiState(line=line), width=width, height=height)
    assert len(page.lines) <= height
    assert max(cell_len(one.plain) for one in page.lines) <= max(20, width)


def test_at_eighty_by_twenty_four_a_task_shows_state_progress_rate_eta_and_its_devices(frame: Snapshot) -> None:
    shown = text(draw(frame, UiState(), width=80, height=24))
    title = next(line for line in shown.splitlines() if line.lstrip().startswith("task "))
    for word in ("node", "state", "progress", "chunks", "rate", "ETA", "GPU", "history"):
        assert word in title
    assert "16 running · 4 waiting · 2 done · 1 failed · 1 silent" in shown
    assert "! warning 4821_2 gpu2: device 2 is at 86 °C" in shown


def test_a_wide_terminal_also_shows_what_each_task_is_working_on(frame: Snapshot) -> None:
    assert "working on" not in text(draw(frame, UiState(), width=80, height=24))
    wide = text(draw(frame, UiState(), width=200, height=50))
    assert "working on" in wide
    assert frame.tasks[0].working_on[0] in wide


def test_plain_text_has_every_task_and_no_keys(frame: Snapshot) -> None:
    shown = as_plain_text(frame)
    assert all(f"{line.label} " in shown for line in frame.tasks)
    assert "quit" not in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_the_chosen_line_is_always_on_the_page(frame: Snapshot) -> None:
    for number in range(len(frame.tasks)):
        shown = text(draw(frame, UiState(line=number), width=80, height=16))
        (chosen,) = [line for line in shown.splitlines() if line.startswith("▸")]
        assert frame.tasks[number].label in chosen


def test_columns_give_way_by_rank_and_take_what_is_left() -> None:
    columns = [Column("a", 10), Column("b", 10, 2), Column("c", 5, 1, max_width=50)]
    assert [column.title for column in choose_columns(columns, 20)] == ["a", "c"]
    assert [column.width for column in choose_columns(columns, 60)] == [10, 10, 36]


# --- what is said -----------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_a_dash_and_never_zero() -> None:
    frame = Snapshot(NOW_MS, "run", True, tasks=(task(0),), devices=(device(0, task="4821_0.r0.gpu1"),))
    row = text(draw(frame, UiState(page=DEVICES), width=120)).splitlines()[-1]
    assert "–/–" in row
    assert "0%" not in row
    assert " 0 W" not in row


def test_names_from_files_cannot_steer_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07x"
    line = replace(task(0, working_on=(evil,), pending=1), node=evil)
    alert = TaskAlert("thermal", "critical", evil, evil, NOW_MS, task=evil)
    frame = Snapshot(
        NOW_MS, evil, True, tasks=(line,), alerts=(alert,), remarks=(evil,), devices=(device(0, chunks=(evil,)),)
    )
    for page in (TASKS, DEVICES, TASK):
        for ascii_only in (False, True):
            shown = text(draw(frame, UiState(page=page, opened=line.name), width=200, ascii_only=ascii_only))
            assert "\x1b" not in shown
            assert "\x07" not in shown


def test_a_bar_is_full_only_when_all_is_done() -> None:
    assert bar(0.9999, 10) != "━" * 10
    assert bar(1.0, 10) == "━" * 10
    assert bar(None, 10) == "─" * 10
    assert in_ascii(bar(0.5, 4)) == "==--"
    frame = Snapshot(NOW_MS, "run", True, total=Total(chunks=100_000, done=99_999))
    assert "99.9%" in text(draw(frame, UiState(), width=80))


def test_a_sparkline_ends_with_the_newest_value_and_leaves_gaps_blank() -> None:
    assert sparkline([0, 50, 100], 5, 100) == "  ▁▅█"
    assert sparkline([0, None, 100], 3, 100) == "▁ █"
    assert in_ascii(sparkline([0, 100], 2, 100)) == "_#"
    assert downsample([0, 10, None, None, 20, 40], 3) == [5, None, 30]


def test_many_alerts_leave_room_for_the_tasks_and_the_worst_come_first(frame: Snapshot) -> None:
    alerts = [TaskAlert("power", "warning", f"warning {n}", "gpu1", NOW_MS - n) for n in range(30)]
    alerts.append(TaskAlert("lost", "critical", "it is lost", "gpu9", NOW_MS))
    lines = text(draw(replace(frame, alerts=tuple(alerts)), UiState(), width=80, height=24)).splitlines()
    told = [line for line in lines if line.startswith("!")]
    assert "it is lost" in told[0]
    assert told[-1] == "! 29 more alerts"
    assert len(told) == 3


def test_an_alert_names_its_device_once(frame: Snapshot) -> None:
    said = ["device 3 is at 91 °C", "warm"]
    alerts = [TaskAlert("power", "warning", message, "gpu1", NOW_MS, device_index=3) for message in said]
    lines = text(draw(replace(frame, alerts=tuple(alerts)), UiState(), width=80, height=30))
    assert "gpu1: device 3 is at 91 °C" in lines
    assert "gpu1 GPU 3: warm" in lines


def test_the_page_of_a_task_shows_four_metrics_of_each_device_and_where_its_log_is(frame: Snapshot) -> None:
    shown = text(draw(frame, UiState(page=TASK, opened=frame.tasks[2].name), width=100))
    for word in ("busy", "memory", "temp", "power"):
        assert sum(line.strip().startswith(word) for line in shown.splitlines()) == 4
    assert f"tail -f runs/july/tasks/{frame.tasks[2].name}.log" in shown
    assert "86 °C" in shown  # its own alert


def test_a_task_that_another_attempt_has_followed_says_so(frame: Snapshot) -> None:
    shown = text(draw(frame, UiState(page=TASK, opened="4821_0.r9.gpu1"), width=100))
    assert "is no longer the newest attempt" in shown


# --- orders and filters -----------------------------------------------------------------------------------------------


def test_tasks_are_ordered_by_what_needs_a_look_and_unknown_comes_last() -> None:
    lines = [
        task(0, "done"),
        task(1, audio_s=5.0, last_sign_ms=1000),
        task(2, "failed"),
        task(3, audio_s=9.0, last_sign_ms=1000),
        task(4, "silent"),
    ]
    by = {
        order: [t.array_index for t in arrange_tasks(lines, {}, UiState(order=order))]
        for order in ("task", "state", "rate")
    }
    assert by == {"task": [0, 1, 2, 3, 4], "state": [2, 4, 1, 3, 0], "rate": [3, 1, 0, 2, 4]}
    turned = [t.array_index for t in arrange_tasks(lines, {}, UiState(order="rate", reverse=True))]
    assert turned == [1, 3, 0, 2, 4]
    assert [t.array_index for t in arrange_tasks(lines, {}, UiState(reverse=True))] == [4, 3, 2, 1, 0]


def test_a_filter_wants_all_its_words_in_any_case() -> None:
    lines = [task(n, node=f"gpu{n % 2}") for n in range(4)]
    assert [t.array_index for t in arrange_tasks(lines, {}, UiState(filter="GPU1 running"))] == [1, 3]
    assert arrange_tasks(lines, {}, UiState(filter="gpu1 done")) == []
    found = arrange_devices([device(0), device(1, chunks=("site/c7",))], UiState(filter="c7"))
    assert [d.index for d in found] == [1]


def test_devices_are_ordered_by_their_readings() -> None:
    hot = device(0, reading=Reading(temperature_c=90, utilization_percent=10))
    cool = device(1, reading=Reading(temperature_c=40, utilization_percent=99))
    silent = device(2)
    assert arrange_devices([silent, cool, hot], UiState(order="temperature")) == [hot, cool, silent]
    ended = replace(hot, alive=False)
    for order in ("task", "temperature"):  # what a device read when its task ended is of no use to anybody now
        assert arrange_devices([ended, cool], UiState(order=order)) == [cool, ended]
    assert arrange_devices([silent, cool, hot], UiState(order="GPU")) == [
        hot,
        cool,
        silent,
    ]  # the idle one needs a look


# --- keys -------------------------------------------------------------------------------------------------------------


def pressed(desk: UiState, *keys: str, names: tuple[str | None, ...] = ("a", "b", "c")) -> UiState:
    for key in keys:
        desk = press(desk, key, rows=2, names=list(names))
    return desk


def test_bytes_of_a_terminal_become_names_of_keys() -> None:
    assert parse_keys("q\x1b[A\x1bOB\r\x7f/") == ["q", "up", "down", "enter", "backspace", "/"]
    assert parse_keys("\x1b") == ["escape"]
    assert parse_keys("\x1b[1;5Cj\x00é") == ["j", "é"]


def test_the_line_moves_and_stays_on_the_page() -> None:
    assert pressed(UiState(), "down", "j").line == 2
    assert pressed(UiState(), "end", "down").line == 2
    assert pressed(UiState(line=2), "page-up", "up", "k").line == 0
    assert pressed(UiState(line=50), "up").line == 1  # there were more lines before
    assert pressed(UiState(), "down", "enter", names=()).line == 0


def test_enter_opens_the_task_of_the_line_and_escape_goes_back() -> None:
    desk = pressed(UiState(), "down", "enter")
    assert (desk.page, desk.opened) == (TASK, "b")
    assert pressed(desk, "escape").page == TASKS
    assert pressed(UiState(page=DEVICES), "enter", "escape").page == DEVICES


def test_sorting_goes_round_and_turns() -> None:
    desk = UiState()
    seen = []
    for _ in desk.orders:
        desk = pressed(desk, "s")
        seen.append(desk.order)
    assert sorted(seen) == sorted(desk.orders)
    assert desk.order == "task"
    assert pressed(desk, "r").reverse


def test_a_filter_is_typed_letter_by_letter_and_q_is_a_letter_then() -> None:
    desk = pressed(UiState(), "/", "q", "x", "backspace", "7", "enter")
    assert (desk.filter, desk.typing, desk.quitting) == ("q7", False, False)
    assert pressed(desk, "escape").filter == ""
    assert pressed(UiState(filter="a"), "/", "escape").filter == ""


def test_a_machine_has_no_page_of_tasks() -> None:
    desk = UiState.at_start(of_run=False)
    assert desk.page == DEVICES
    assert pressed(desk, "d").page == DEVICES
    assert pressed(desk, "enter", names=(None,)).page == DEVICES


def test_help_comes_and_goes_and_q_leaves_from_everywhere() -> None:
    assert pressed(UiState(), "?").page == HELP
    assert pressed(UiState(page=DEVICES), "?", "x").page == DEVICES
    for page in (TASKS, DEVICES, TASK, HELP):
        assert pressed(UiState(page=page), "q").quitting


# --- totals -----------------------------------------------------------------------------------------------------------


def test_nothing_is_added_up_to_nothing() -> None:
    total = add_up([], [])
    assert (total.chunks, total.done, total.rate, total.ends_at_ms, total.power_w) == (0, 0, None, None, None)
    assert "no chunks yet" in as_plain_text(Snapshot(NOW_MS, "run", True, total=total))


def test_devices_of_tasks_that_have_ended_are_not_at_work() -> None:
    reading = Reading(utilization_percent=50, power_w=100.0)
    total = add_up([task(0)], [device(0, reading=reading), device(1, reading=reading, alive=False), device(2)])
    assert (total.devices, total.utilization_percent, total.power_w) == (2, 50, 100.0)


def test_a_run_folder_that_is_no_text_can_be_shown(tmp_path: Path) -> None:
    frame = Snapshot(NOW_MS, str(tmp_path / "jul\udcff"), True)
    as_plain_text(frame).encode("utf-8", "replace")
