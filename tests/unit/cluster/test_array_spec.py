"""What ``sbatch --array=`` takes, as a real Slurm reads it."""

from __future__ import annotations

import pytest
from rooms.cluster import ArraySpec, parse_array


@pytest.mark.parametrize(
    ("text", "indices", "step", "parallel"),
    [
        ("7", (7,), 1, None),
        ("0-3", (0, 1, 2, 3), 1, None),
        ("3-9:3%2", (3, 6, 9), 3, 2),
        ("1-20:2", tuple(range(1, 21, 2)), 2, None),
        ("0,2,4", (0, 2, 4), 1, None),  # Slurm 22.05 says step 1 of a list, however even it is
        ("0-4:2,9", (0, 2, 4, 9), 2, None),
        ("5,1,1-2", (1, 2, 5), 1, None),
        ("1-5%0", (1, 2, 3, 4, 5), 1, None),
        (" 1-2", (1, 2), 1, None),
    ],
)
def test_an_array_is_read_as_slurm_reads_it(
    text: str, indices: tuple[int, ...], step: int, parallel: int | None
) -> None:
    assert parse_array(text) == ArraySpec(indices, step, parallel)


@pytest.mark.parametrize(
    "text", ["", "a", "5-2", "1-3:0", "1-", "-3", "1,,2", "0-9%x", "0-9%", "1.5", "٣", "0-99999999"]
)
def test_what_slurm_refuses_is_refused_with_the_text_and_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not an array: ") as refused:
        parse_array(text)
    assert f"--array={text}" in str(refused.value)
