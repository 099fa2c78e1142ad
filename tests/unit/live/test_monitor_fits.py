"""The live view on terminals of many sizes: every line is whole, and what matters most is there."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rooms.live import (
    DEVICES,
    HELP,
    TASK,
    TASKS,
    Page,
    Part,
    Snapshot,
    UiState,
    draw,
    fit,
    flow,
    help_lines,
    open_run_view,
    press,
    wrap,
    wrap_command,
)
from rooms.model import Reading
from rooms.store import DeviceFacts
from support.hand_clock import HandClock
from support.live_run import write_live_run
from support.task_files import START_MS

NOW_MS = START_MS + 600_000
SIZES = [(width, height) for width in (40, 60, 80, 100, 200) for height in (10, 16, 24, 40, 60)]


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Look at a run in the middle of its work whose names, which are not ours to keep short, are short."""
    folder = tmp_path_factory.mktemp("run")
    write_live_run(folder, 20, now_ms=NOW_MS, waiting=4, seconds=30)
    seen = open_run_view(folder, HandClock(NOW_MS)).look()
    alerts = tuple(replace(alert, message="hot") for alert in seen.alerts)
    return replace(
        seen,
        title="july",
        alerts=alerts,
        tasks=tuple(replace(task, working_on=("a/b",) if task.working_on else ()) for task in seen.tasks),
        devices=tuple(replace(device, chunks=("a/b",) if device.chunks else ()) for device in seen.devices),
    )


def text(page: Page) -> str:
    return "\n".join(line.plain for line in page.lines)


@pytest.mark.parametrize("page", [TASKS, DEVICES, TASK, HELP])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_line_is_cut_at_any_size(frame: Snapshot, page: str, width: int, height: int) -> None:
    desk = UiState(page=page, opened=frame.tasks[2].name)
    lines = [line.plain for line in draw(frame, desk, width=width, height=height).lines]
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width
    assert "…" not in "".join(lines)  # what does not fit would end with it


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_share_eta_states_and_some_tasks_are_on_every_screen(frame: Snapshot, width: int, height: int) -> None:
    shown = text(draw(frame, UiState(), width=width, height=height))
    assert re.search(r"\d%.* ETA ~0:\d\d:\d\d$", shown, re.MULTILINE)
    for state in ("16 running", "4 waiting", "2 done", "1 failed", "1 silent"):
        assert state in shown
    assert len(re.findall(r"4821_\d+ +.*(?:running|done)", shown)) >= 2
    assert "q quit" in shown
    assert "? help" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_all_of_the_help_can_be_read_by_scrolling(frame: Snapshot, width: int) -> None:
    wanted = ["".join(part.text for part in line).rstrip() for line in help_lines(width)]
    desk, read = UiState(page=HELP), list[str]()
    for _ in wanted:
        page = draw(frame, desk, width=width, height=10)
        shown = [line.plain.rstrip() for line in page.lines[:-1]]
        read += shown[-1:] if read else shown
        moved = press(desk, "down", rows=page.rows, names=list(page.names))
        if moved.scroll == desk.scroll:
            break
        desk = moved
    assert read == wanted
    assert max(map(cell_len, wanted)) <= width


def test_at_eighty_by_twenty_four_the_help_is_on_one_page(frame: Snapshot) -> None:
    shown = draw(frame, UiState(page=HELP), width=80, height=24)
    assert "any key goes back" in shown.lines[-1].plain
    assert len(shown.names) == 1


def test_who_comes_back_from_a_task_or_the_help_is_at_the_same_line(frame: Snapshot) -> None:
    desk = UiState(line=7)
    names = [task.name for task in frame.tasks]
    for key, back in (("enter", "escape"), ("?", "x")):
        away = press(desk, key, rows=5, names=list(names))
        page = draw(frame, away, width=80, height=24)
        moved = press(away, "down", rows=page.rows, names=list(page.names)) if key == "enter" else away
        again = press(moved, back, rows=page.rows, names=list(page.names))
        assert (again.page, again.line) == (TASKS, 7)


def test_large_devices_have_room_for_their_numbers() -> None:
    reading = Reading(utilization_percent=100, memory_used_bytes=140 * 2**30, temperature_c=100, power_w=1000.0)
    device = DeviceFacts("4821_0.r0.gpu1", "gpu1", 0, "GPU-0", "", "B200", "nvml", memory_total_bytes=180 * 2**30)
    device = replace(device, power_limit_w=1200.0, reading=reading, rate=123_456.0)
    row = draw(Snapshot(NOW_MS, "july", True, devices=(device,)), UiState(page=DEVICES), width=120).lines[-1].plain
    for whole in ("140.0/180.0", "1000/1200 W", "100 °C", "100%", "123k×"):
        assert whole in row


@pytest.mark.parametrize("width", [40, 41, 60, 80, 81, 100, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_wide_letters_take_the_room_they_need(frame: Snapshot, width: int, ascii_only: bool) -> None:
    birds = "鳥の声" * 9
    task = replace(frame.tasks[0], job_id=birds, node="鳥の声")
    device = replace(frame.devices[0], task=f"{birds}_0.r0.gpu1", node="鳥の声", name="鳥の声")
    wide = replace(frame, title=birds, tasks=(task,), devices=(device,), alerts=())
    clock = time.strftime("%H:%M:%S", time.localtime(NOW_MS / 1000))
    for page in (TASKS, DEVICES):
        lines = [line.plain for line in draw(wide, UiState(page=page), width=width, ascii_only=ascii_only).lines]
        assert max(map(cell_len, lines)) <= width
        assert lines[0].endswith(f"  {clock}")
        assert cell_len(lines[0]) == width
        assert "_0  " in lines[-1]
        if width == 200 and not ascii_only:
            assert "  鳥の声  " in lines[-1]
    shown = text(draw(wide, UiState(), width=width, ascii_only=ascii_only))
    for state in ("16 running", "4 waiting", "2 done", "1 failed", "1 silent"):
        assert state in shown


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_are_whole_or_not_there() -> None:
    parts = [Part("aaa"), Part("bbb", rank=2), Part("ccc", rank=1), Part("ddd", rank=2)]
    assert [part.text for part in fit(parts, 18, "  ")] == ["aaa", "bbb", "ccc", "ddd"]
    assert [part.text for part in fit(parts, 17, "  ")] == ["aaa", "bbb", "ccc"]
    assert [part.text for part in fit(parts, 8, "  ")] == ["aaa", "ccc"]
    assert [part.text for part in fit(parts, 2, "  ", keep=1)] == ["aaa", "ccc"]
    assert [[part.text for part in line] for line in flow(parts, 8, "  ")] == [["aaa", "bbb"], ["ccc", "ddd"]]


def test_lines_break_between_words_and_commands_can_be_pasted_together() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("", 7) == []
    assert wrap_command("cp 'a b' c", 12) == ["cp 'a b' c"]
    assert wrap_command("cp 'a b' c d e f g", 17) == ["cp 'a b' c \\", "    d e f g"]
    assert wrap_command("cp a-very-long-word", 12) is None
