"""What a probe has found, as text: the curve from chunk length to memory and speed, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from badcjobs.model import FITS, NO_START, TOO_LONG, Probed, ProbeResult, Trial
from badcjobs.report.text_lines import table, wrap
from badcjobs.report.words import UNKNOWN, count, memory, number, percent

_OUTCOMES = {FITS: "", TOO_LONG: "out of memory", NO_START: "no room for the models"}


def probe_text(probes: Sequence[Probed], kept: str, notes: Sequence[str] = ()) -> str:
    """Return the tables and the sentences below them; ``kept``: where, and who reads it there."""
    lines = [line for probed in probes for line in (*_one(probed), "")]
    if any(probed.result is not None for probed in probes):
        lines += wrap(f"  kept in {kept}", indent=4)
    lines += [line for note in notes for line in wrap(f"  note: {note}", indent=4)]
    return "\n".join(lines).rstrip()


def _one(probed: Probed) -> Iterator[str]:
    key = probed.key
    yield from wrap(f"{heading(probed)}; {about(probed)}", indent=2)
    head = ("chunk length", "peak memory", "of the device", "× real time", "")
    rows = [
        (f"{t.length_s:g} s", memory(t.peak_bytes), share(t, key.memory_bytes), speed(t), remark(t, probed.result))
        for t in curve_of(probed)
    ]
    widest = max(len(row[4]) for row in rows)
    yield from table([head, *((*row[:4], row[4].ljust(widest)) for row in rows)], left=0)
    yield ""
    for sentence in sentences(probed):
        yield from wrap(f"  {sentence}", indent=4)


def heading(probed: Probed) -> str:
    """Return what was probed."""
    key = probed.key
    return key.gpu if key.memory_bytes is None else f"{key.gpu}, {memory(key.memory_bytes)}"


def about(probed: Probed) -> str:
    """Return for what the result holds."""
    key = probed.key
    beside = f" in {count(key.workers, 'worker')}" if key.workers > 1 else ""
    return f"{key.engine} ({key.engine_version}), {count(key.chunks_at_once, 'chunk')} at once{beside}"


def curve_of(probed: Probed) -> list[Trial]:
    """Return the trials in the order in which they are shown: as usual first, the shortest first."""
    return sorted(probed.trials, key=lambda trial: (trial.lean, trial.length_s))


def share(trial: Trial, memory_bytes: int | None) -> str:
    """Return how full the device was."""
    if trial.peak_bytes is None or not memory_bytes:
        return UNKNOWN
    return percent(100 * trial.peak_bytes / memory_bytes)


def speed(trial: Trial) -> str:
    """Return how fast it was."""
    rate = trial.times_real_time
    return UNKNOWN if rate is None else number(rate, 0 if rate >= 100 else 1)


def remark(trial: Trial, result: ProbeResult | None) -> str:
    """Return what is to be said of a trial."""
    said = [_OUTCOMES[trial.outcome], "with one thread" if trial.lean else ""]
    if result is not None and not trial.lean and trial.outcome == FITS and trial.length_s == result.best_s:
        said.append("← best")
    return ", ".join(filter(None, said))


def sentences(probed: Probed) -> Iterator[str]:
    """Yield what the curve means."""
    result = probed.result
    if not probed.finished:
        yield "not finished: the same command goes on"
    if result is None:
        return
    yield _longest(result)
    if result.lean_longest_s is not None or result.lean_too_long_s is not None:
        yield _lean(result)
    if result.best_s is not None:
        rate = "" if result.times_real_time is None else f" ({number(result.times_real_time, 0)} × real time)"
        yield f"best: {result.best_s:g} s{rate}, the shortest within 2 % of the fastest that is safe"
    if all(trial.peak_bytes is None for trial in probed.trials):
        yield "peak memory is not known: nothing here could read the device's memory; what fits was found all the same"


def _longest(result: ProbeResult) -> str:
    if result.longest_s is None:
        shortest = "" if result.too_long_s is None else f", not even {result.too_long_s:g} s"
        return f"longest: nothing fits with the usual threads{shortest}"
    if result.too_long_s is None:
        return f"longest: all that was tried fits, up to {result.longest_s:g} s"
    return (
        f"longest: {result.longest_s:g} s fits, {result.too_long_s:g} s does not;"
        f" safe, with a margin of {result.margin_percent:g} %: {result.safe_s:g} s"
    )


def _lean(result: ProbeResult) -> str:
    if result.lean_longest_s is None:
        return f"with one thread: nothing fits, not even {result.lean_too_long_s:g} s"
    if result.lean_too_long_s is None:
        return f"with one thread: up to {result.lean_longest_s:g} s, the longest that was tried"
    return (
        f"with one thread: {result.lean_longest_s:g} s fits, {result.lean_too_long_s:g} s does not;"
        f" safe: {result.lean_safe_s:g} s. Runs cut what is longer"
    )
