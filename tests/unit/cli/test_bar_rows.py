"""What the bars of ``badcjobs run`` say from the first second to the last, in terminals of every width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len
from rooms.cli import BarRow, bar_rows
from rooms.task import DeviceWorkNow, TaskProgress

HALF_WAY = TaskProgress(480, 960, audio_done_s=14_400.0, elapsed_s=130.0, start_up_s=10.0)
GPU_0 = DeviceWorkNow("GPU 0  Tesla V100-SXM2-32GB", 320, 9600.0, ("site01/site01_c000",))
GPU_1 = DeviceWorkNow("GPU 1  Tesla V100-SXM2-32GB", 160, 4800.0, ("site01/site01_c001",))
WORK = replace(HALF_WAY, devices=(GPU_0, GPU_1))


def table(work: TaskProgress, columns: int = 100, lines: int = 24, *, ascii_only: bool = False) -> list[BarRow]:
    return bar_rows(work, columns=columns, lines=lines, ascii_only=ascii_only)[0]


def words(work: TaskProgress, columns: int = 100) -> list[str]:
    return [row[2] for row in table(work, columns)]


def test_there_is_one_bar_per_device_and_one_for_all() -> None:
    assert [row[0] for row in table(WORK)] == [GPU_0.label, GPU_1.label, "all"]
    assert words(WORK) == [
        "320 chunks  74×  site01/site01_c000",
        "160 chunks  37×  site01/site01_c001",
        "480/960  ETA 0:02:00  111×",
    ]


def test_a_device_that_falls_behind_has_a_shorter_bar_and_one_that_has_done_nothing_an_empty_one() -> None:
    idle = DeviceWorkNow("GPU 2", 0, 0.0)
    shares = [row[1] for row in table(replace(HALF_WAY, devices=(GPU_0, GPU_1, idle)))]
    assert shares == [0.5, 0.25, 0.0, 0.5]


def test_two_devices_of_one_name_are_two_bars() -> None:
    twins = tuple(replace(GPU_0, label=f"GPU MIG-0123456789abcdef-0123456789ab{n}") for n in range(2))
    assert len(table(replace(HALF_WAY, devices=twins))) == 3


def test_at_the_beginning_nothing_is_known_and_the_engine_starts() -> None:
    fresh = TaskProgress(0, 960, 0.0, 5.0, devices=(DeviceWorkNow("GPU 0", 0, 0.0),))
    assert words(fresh) == ["0 chunks  –  starting", "0/960  ETA –  –"]
    assert [row[1] for row in table(fresh)] == [0.0, 0.0]


def test_the_time_that_an_engine_takes_to_start_is_no_part_of_the_pace() -> None:
    first = TaskProgress(1, 961, 30.0, elapsed_s=61.0, start_up_s=60.0)
    assert first.eta_s == 960


def test_when_all_that_is_left_has_failed_before_nobody_promises_an_end() -> None:
    waits = replace(HALF_WAY, chunks_settled=957, failed=2, retrying=3)
    resting = replace(waits, devices=(replace(GPU_0, working_on=()),))
    assert words(resting) == [
        "320 chunks  74×  waiting for a retry",
        "957/960  3 to retry  111×  2 failed",
    ]
    assert replace(waits, retrying=2, devices=resting.devices).eta_s is not None, "one of them is fresh"


def test_when_everything_fails_it_says_so() -> None:
    failing = TaskProgress(4, 6, 0.0, 8.0, failed=4, retrying=1, devices=(replace(GPU_0, done=0, audio_done_s=0.0),))
    assert words(failing)[-1] == "4/6  ETA 0:00:04  –  4 failed  1 to retry"


@pytest.mark.parametrize("columns", [1, 10, 20, 40, 41, 60, 61, 80, 100, 200])
def test_every_line_fits_the_terminal(columns: int) -> None:
    long = replace(GPU_0, working_on=("鳥" * 60, "b" * 90))
    failing = replace(HALF_WAY, failed=12_345, retrying=23_456)
    work = replace(failing, devices=(long, GPU_1))
    rows, (label_width, bar_width) = bar_rows(work, columns=columns, lines=24)
    for label, _, said in rows:
        assert label_width + 1 + bar_width + 1 + cell_len(said) < max(columns, 4)
        assert cell_len(label) <= label_width


def test_forty_columns_still_say_how_many_and_how_long() -> None:
    assert [row[0] for row in table(WORK, 40)] == ["GPU 0", "GPU 1", "all"]
    assert words(WORK, 40) == ["320 chunks  74×", "160 chunks  37×", "480/960  ETA 0:02:00"]
    assert bar_rows(WORK, columns=40, lines=24)[1][1] == 7
    assert words(WORK, 70)[0] == "320 chunks  74×  site01/site01…"


def test_where_there_are_more_devices_than_lines_the_last_line_is_still_that_of_all() -> None:
    many = replace(HALF_WAY, devices=tuple(DeviceWorkNow(f"GPU {n}", 1, 1.0) for n in range(16)))
    rows = table(many, lines=10)
    assert len(rows) == 8
    assert rows[-1][0] == "all"


def test_names_from_files_and_drivers_are_letters_only() -> None:
    evil = DeviceWorkNow("GPU 0  \x1b[2J", 1, 1.0, ("\x1b[31mred", "a\nb", "Ñandú"))
    row = table(replace(HALF_WAY, devices=(evil,)))[0]
    assert (row[0], row[2]) == ("GPU 0  �[2J", "1 chunk  0.0×  �[31mred, a�b, Ñandú")


def test_a_terminal_of_ascii_gets_ascii() -> None:
    strange = replace(HALF_WAY, chunks_settled=0, devices=(replace(GPU_0, working_on=("Ñ" * 90,)),))
    rows = table(strange, ascii_only=True)
    assert all(f"{row[0]}{row[2]}".isascii() for row in rows)
    assert rows[-1][2] == "0/960  ETA -  111x"
