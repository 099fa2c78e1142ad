"""Whether the chunks of a plan are those that its speed was measured with: do they fit, and is it the same engine?"""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.plan.remarks import NOTE, Remark
from badcjobs.plan.speed import Speed
from badcjobs.plan.survey import Survey

_LAST_IS_LONGER_S = 3.0  # than the others, at most, where a recording is cut on the fly


def remark_unsafe_chunks(survey: Survey, speed: Speed) -> Iterator[Remark]:
    """Say how many chunks are longer than a probe has found to be safe: a run gets them done, but more slowly."""
    safe_s, lean_safe_s = speed.safe_s, speed.lean_safe_s
    if safe_s is None or not (many := survey.lengths.longer_than(safe_s * 1000)):
        return
    way = "with one thread" + ("" if lean_safe_s is None else f", and what is longer than {lean_safe_s:g} s in pieces")
    if lean_safe_s is not None and lean_safe_s <= safe_s:
        way = "in pieces"
    text = (
        f"{many:,} of {survey.lengths.rows:,} chunks {'is' if many == 1 else 'are'} longer than the {safe_s:g} s that"
        f" are safe on {', '.join(speed.devices)}: a run does such chunks {way}, which may be slower"
    )
    shorter = f"--chunk-length {_shorter(safe_s, speed.best_s):g}"
    fix = f"{shorter}   (whole recordings are cut on the fly; their last chunks may be {_LAST_IS_LONGER_S:g} s longer)"
    if survey.rows_alone:
        fix = f"plan the whole recordings instead of this manifest, with {shorter}"
    names = tuple(f"{name} ({ms / 1000:,.3g} s)" for ms, name in survey.longest if ms > safe_s * 1000)
    yield Remark(NOTE, "chunk length", text, fix, names)


def _shorter(safe_s: float, best_s: float | None) -> float:
    """Return the best length with which even last chunks are safe; of very short ones only the others."""
    longest_s = safe_s - _LAST_IS_LONGER_S if safe_s > 3 * _LAST_IS_LONGER_S else safe_s
    return round(min(best_s or longest_s, longest_s), 2)


def remark_doubts(speed: Speed) -> Iterator[Remark]:
    """Say why the speed that was measured may not be that of the tasks."""
    for doubt in speed.doubts:
        yield Remark(NOTE, "speed", doubt, speed.remedy)
