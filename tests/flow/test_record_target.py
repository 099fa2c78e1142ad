"""``badcjobs record`` refuses a file whose ending says nothing, with a line that records."""

from __future__ import annotations

import pytest
from support.badcjobs_program import Site, assert_refused


@pytest.mark.parametrize(
    ("out", "command", "line"),
    [
        ("gpu use.txt", (), "badcjobs record --out 'gpu use.sqlite'"),
        ("recording", ("--", "echo", "a b"), "badcjobs record --out recording.sqlite -- echo 'a b'"),
        (".", (), "badcjobs record --out recording.sqlite"),
    ],
)
def test_an_unknown_ending_is_answered_with_one_that_is_known(
    site: Site, out: str, command: tuple[str, ...], line: str
) -> None:
    assert_refused(site.badcjobs("record", "--out", out, *command), 2, "unknown ending", f"\n  try: {line}\n")
