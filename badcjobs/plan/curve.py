"""The speed at the length of the chunks that are planned: every chunk costs something besides its audio.

Between two trials of a probe it is read off a line over the logarithm of the length. Shorter chunks than any trial cost
what the two shortest say: so much for each chunk, and so much for each second. Longer ones gain nothing more. What is
longer than is safe is done with one thread, by the trials of that, and in pieces where even that is too long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from badcjobs.plan.speed import Curve, Speed


def at_length(speed: Speed, chunk_s: float) -> Speed:
    """Return the speed for chunks of a length, where trials of several are known; else the speed as it is."""
    if not speed.curve or chunk_s <= 0:
        return speed
    if speed.safe_s is not None and chunk_s > speed.safe_s and speed.lean_curve:
        piece_s = min(chunk_s, speed.lean_safe_s or chunk_s)
        rate, how = _read_off(speed.lean_curve, piece_s)
        pieces = f" in pieces of {piece_s:g} s" if piece_s < chunk_s else ""
        how = f"longer than is safe, so with one thread{pieces}: {how}"
    else:
        rate, how = _read_off(speed.curve, chunk_s)
    words = f"{speed.origin}, for chunks of {chunk_s:,.3g} s ({how})"
    return replace(speed, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=chunk_s)


def is_below(curve: Curve, chunk_s: float) -> bool:
    """Say whether no trial had chunks as short as that."""
    return bool(curve) and chunk_s < curve[0][0]


def _read_off(curve: Curve, chunk_s: float) -> tuple[float, str]:
    if is_below(curve, chunk_s):
        return _extrapolated(curve, chunk_s)
    for (short_s, slow), (long_s, fast) in pairwise(curve):
        if short_s < chunk_s < long_s:
            part = math.log(chunk_s / short_s) / math.log(long_s / short_s)
            return slow + part * (fast - slow), f"between trials of {short_s:g} and {long_s:g} s"
    length_s, rate = next(trial for trial in reversed(curve) if trial[0] <= chunk_s)
    return rate, "tried" if length_s == chunk_s else f"no faster than the longest trial, of {length_s:g} s"


def _extrapolated(curve: Curve, chunk_s: float) -> tuple[float, str]:
    """Reckon with a fixed cost of each chunk; one trial alone cannot tell it apart, so all its time counts as that."""
    first_s, first_rate = curve[0]
    took_s, per_second = first_s / first_rate, 0.0
    if len(curve) > 1:
        next_s, next_rate = curve[1]
        per_second = max(0.0, (next_s / next_rate - took_s) / (next_s - first_s))
    per_chunk = max(0.0, took_s - per_second * first_s)
    rate = chunk_s / (per_chunk + per_second * chunk_s) if per_chunk else first_rate
    return rate, f"shorter than any trial: reckoned with {per_chunk:.2g} s for each chunk besides its audio"
