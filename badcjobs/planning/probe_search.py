"""Choose the next chunk length: doubled until it does not fit, then between the two; evaluate the trials. Pure.

The search assumes that less audio needs no more memory, and one thread no more than several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from badcjobs.model import FITS, NO_START, TOO_LONG, ProbeKey, ProbeResult, Trial
from badcjobs.words import count, memory, three_digits

Trials = Sequence[Trial]
_SHORTEST_S = 3.0  # HawkEars uses windows of 3 s
_TOLERANCE = 0.05  # relative distance between what fits and what does not


class Bounds(NamedTuple):
    """Where a search begins and ends."""

    start_s: float
    longest_s: float


class ProbeStep(NamedTuple):
    """What to try next."""

    lean: bool
    length_s: float


def bracket(trials: Trials, *, lean: bool) -> tuple[float | None, float | None]:
    """Return the longest that fits, and the shortest that does not; None: not known.

    If trials contradict each other, a failure counts.
    """
    failed = [trial.length_s for trial in trials if trial.outcome == TOO_LONG and trial.lean >= lean]
    fitting = [trial.length_s for trial in trials if trial.outcome == FITS and trial.lean <= lean]
    if not failed:
        return max(fitting, default=None), None
    too_long_s = min(failed)
    return max((length_s for length_s in fitting if length_s < too_long_s), default=None), too_long_s


def cannot_start(trials: Trials, *, lean: bool) -> bool:
    """Return whether the engine does not even start: then no length fits."""
    return any(trial.outcome == NO_START and trial.lean >= lean for trial in trials)


def next_step(trials: Trials, bounds: Bounds) -> ProbeStep | None:
    """Return what to try next; None: the search is over.

    The lean way is searched only where a length does not fit as usual.
    """
    for lean in (False, True):
        length_s = _next_length(trials, bounds, lean=lean)
        if length_s is not None:
            return ProbeStep(lean, length_s)
        _, too_long_s = bracket(trials, lean=False)
        if too_long_s is None and not cannot_start(trials, lean=False):
            break
    return None


def usual_is_over(trials: Trials, bounds: Bounds) -> bool:
    """Return whether all trials with the usual threads are done."""
    return _next_length(trials, bounds, lean=False) is None


def _next_length(trials: Trials, bounds: Bounds, *, lean: bool) -> float | None:
    if cannot_start(trials, lean=lean):
        return None
    fits_s, too_long_s = bracket(trials, lean=lean)
    if too_long_s is None:
        top_s = fits_s or 0.0
        if top_s >= bounds.longest_s:
            return None
        longer_s = 2 * top_s or bounds.start_s
        _, usual_limit_s = bracket(trials, lean=False)
        if lean and usual_limit_s is not None and top_s < usual_limit_s:  # whether one thread helps at all
            longer_s = usual_limit_s
        return min(longer_s, bounds.longest_s)
    if fits_s is None:
        shorter_s = three_digits(too_long_s / 2)
        if shorter_s < _SHORTEST_S:
            return None
        return shorter_s
    middle_s = three_digits(math.sqrt(fits_s * too_long_s))  # on a scale of ratios
    if too_long_s <= fits_s * (1 + _TOLERANCE) or not fits_s < middle_s < too_long_s:
        return None
    return middle_s


# --- result -----------------------------------------------------------------------------------------------------------

_ABOUT_AS_FAST = 0.98  # of the fastest; a smaller difference is noise


def evaluate(trials: Trials, margin_percent: float, *, finished: bool = True) -> ProbeResult:
    """Return the result of all trials; that of the lean trials only if ``finished``."""
    longest_s, too_long_s = bracket(trials, lean=False)
    safe_s = _safe(longest_s, too_long_s, margin_percent)
    best = choose_best(trials, safe_s) or Trial(0.0, False, TOO_LONG)
    lean_longest_s = lean_too_long_s = None
    if finished and any(trial.lean for trial in trials):
        lean_longest_s, lean_too_long_s = bracket(trials, lean=True)
    return ProbeResult(
        longest_s,
        too_long_s,
        safe_s,
        best_s=min(best.length_s, safe_s or 0.0) or None,
        times_real_time=best.times_real_time,
        peak_bytes=best.peak_bytes,
        lean_longest_s=lean_longest_s,
        lean_too_long_s=lean_too_long_s,
        lean_safe_s=_safe(lean_longest_s, lean_too_long_s, margin_percent),
        margin_percent=margin_percent,
    )


def usual_trials(trials: Trials) -> list[Trial]:
    """Return the trials that fit with the usual threads, the shortest first."""
    return sorted((t for t in trials if t.outcome == FITS and not t.lean), key=lambda trial: trial.length_s)


def choose_best(trials: Trials, at_most_s: float | None) -> Trial | None:
    """Return the shortest of the trials that were about as fast as the fastest; None: none was measured.

    Shorter chunks are finished sooner, lose less to a kill, and leave memory to spare. What is longer than is safe does
    not count, unless there is nothing else.
    """
    measured = [trial for trial in usual_trials(trials) if trial.times_real_time]
    safe = [trial for trial in measured if at_most_s is None or trial.length_s <= at_most_s]
    fastest = max((trial.times_real_time or 0.0 for trial in safe or measured), default=0.0)
    fast = [trial for trial in safe or measured if (trial.times_real_time or 0.0) >= _ABOUT_AS_FAST * fastest]
    if fast:
        return fast[0]
    return None


def _safe(
    longest_s: float | None,
    too_long_s: float | None,
    margin_percent: float,
) -> float | None:
    """Return the longest less the margin; where nothing was too long there is no edge to keep away from."""
    if longest_s is None or too_long_s is None:
        return longest_s
    safe_s = longest_s * (1 - margin_percent / 100)
    if safe_s >= 10:
        return float(math.floor(safe_s))
    return round(safe_s, 2)


def device_words(key: ProbeKey) -> str:
    """Return the model of a device with its memory."""
    if key.memory_bytes is None:
        return key.gpu
    return f"{key.gpu}, {memory(key.memory_bytes)}"


def setup_words(key: ProbeKey) -> str:
    """Return what was tried there."""
    workers = f"{count(key.workers, 'worker')} per GPU"
    return f"{key.engine} ({key.engine_version}), {workers}, {count(key.chunks_at_once, 'chunk')} at once"
