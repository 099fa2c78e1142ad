"""The numbers of emulated jobs: new each time, whoever asks and however fast."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.hand_clock import HandClock

from badcjobs.job_numbers import claim_numbers

NOW_S = 1_800_000_000
MANY = """
import sys
from itertools import pairwise
from pathlib import Path
from badcjobs.clock import SystemClock
from badcjobs.job_numbers import claim_numbers
print(*[claim_numbers(Path(sys.argv[1]), 3, SystemClock()) for _ in range(50)])
"""


def test_a_job_has_the_second_as_its_number_and_the_next_one_begins_behind_its_tasks(tmp_path: Path) -> None:
    clock = HandClock(NOW_S * 1000)
    assert [claim_numbers(tmp_path / "locks", count, clock) for count in (1, 5, 1)] == [NOW_S, NOW_S + 1, NOW_S + 6]
    clock.sleep(3)
    assert claim_numbers(tmp_path / "locks", 1, clock) == NOW_S + 7, "a later job is not within an earlier one's tasks"
    clock.sleep(100)
    assert claim_numbers(tmp_path / "locks", 1, clock) == NOW_S + 103


def test_processes_that_count_at_the_same_time_never_get_the_same_number(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MANY, str(tmp_path / "locks")]
    counting = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    claimed = [list(map(int, process.communicate()[0].split())) for process in counting]
    assert all(numbers == sorted(numbers) and len(numbers) == 50 for numbers in claimed)
    everything = sorted(number for numbers in claimed for number in numbers)
    assert all(later - former >= 3 for former, later in pairwise(everything))
    assert everything[-1] < 2**32


@pytest.mark.parametrize("text", ["", "x", "-5", "99999999999999999999", "4294967295", "12 13"])
def test_what_cannot_be_a_number_of_a_job_is_written_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "next-job-number").write_text(text)
    assert claim_numbers(tmp_path, 2, HandClock(NOW_S * 1000)) == NOW_S
    assert (tmp_path / "next-job-number").read_text() == str(NOW_S + 2)


def test_where_no_file_can_be_kept_the_clock_has_to_do(tmp_path: Path) -> None:
    assert claim_numbers(tmp_path / "not" / "there", 1, HandClock(NOW_S * 1000)) == NOW_S
