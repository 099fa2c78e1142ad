"""What the trials of a probe say: the longest chunk, the safe one, and the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from badcjobs.model import FITS, ProbeResult, Trial
from badcjobs.probe.search import bracket

ABOUT_AS_FAST = 0.98  # of the fastest: less of a difference is the machine's mood


def judge(trials: Sequence[Trial], margin_percent: float, *, finished: bool = True) -> ProbeResult:
    """Return what follows from all trials; of the lean way only when it is ``finished``."""
    usual, lean = bracket(trials, lean=False), bracket(trials, lean=True)
    safe_s = _safe(usual.fits_s, usual.too_long_s, margin_percent)
    best = choose_best(trials, safe_s)
    searched = finished and any(trial.lean for trial in trials)
    return ProbeResult(
        longest_s=usual.fits_s,
        too_long_s=usual.too_long_s,
        safe_s=safe_s,
        best_s=None if best is None or safe_s is None else min(best.length_s, safe_s),
        times_real_time=None if best is None else best.times_real_time,
        peak_bytes=None if best is None else best.peak_bytes,
        lean_longest_s=lean.fits_s if searched else None,
        lean_too_long_s=lean.too_long_s if searched else None,
        lean_safe_s=_safe(lean.fits_s, lean.too_long_s, margin_percent) if searched else None,
        margin_percent=margin_percent,
    )


def choose_best(trials: Sequence[Trial], at_most_s: float | None) -> Trial | None:
    """Return the shortest of the trials that were about as fast as the fastest; None: none was measured.

    Shorter chunks are finished sooner, lose less to a kill, and leave memory to spare. What is longer than is safe does
    not count, unless there is nothing else.
    """
    measured = [t for t in trials if t.outcome == FITS and not t.lean and t.times_real_time is not None]
    safe = [t for t in measured if at_most_s is None or t.length_s <= at_most_s]
    candidates = sorted(safe or measured, key=lambda trial: trial.length_s)
    fastest = max((trial.times_real_time or 0.0 for trial in candidates), default=0.0)
    return next((t for t in candidates if (t.times_real_time or 0.0) >= ABOUT_AS_FAST * fastest), None)


def _safe(longest_s: float | None, too_long_s: float | None, margin_percent: float) -> float | None:
    """Return the longest less the margin; where nothing was too long there is no edge to keep away from."""
    if longest_s is None or too_long_s is None:
        return longest_s
    safe_s = longest_s * (1 - margin_percent / 100)
    return float(math.floor(safe_s)) if safe_s >= 10 else round(safe_s, 2)
