"""``badcjobs record`` refuses a file whose ending says nothing, with a line that records."""

from __future__ import annotations

import pytest
from support.badcjobs_program import Site, assert_refused


@pytest.mark.parametrize(
    ("out", "known"), [("gpu use.txt", "gpu use.sqlite"), ("recording", "recording.sqlite"), (".", "recording.sqlite")]
)
def test_an_unknown_ending_is_answered_with_one_that_is_known(site: Site, out: str, known: str) -> None:
    assert_refused(site.badcjobs("record", "--out", out), 2, "unknown extension", f"\n  try: write to {known}\n")
