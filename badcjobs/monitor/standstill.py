"""Says when a run stands still: work is left, and no task is running; and when nothing is left."""

from __future__ import annotations

from badcjobs.monitor.frame import Total


def standstill(total: Total) -> str | None:
    """Return it in words; None: a task is running, nothing has begun yet, or nothing is left."""
    states = total.states
    begun = sum(many for state, many in states.items() if state != "waiting")  # or was to be, by one who is gone
    unbegun, silent = states.get("unbegun", 0), states.get("silent", 0)
    waiting = states.get("waiting", 0) + unbegun
    left = (total.chunks or 0) - total.settled
    absent = max(0, (total.parts or 0) - total.parts_listed - waiting)
    if states.get("running") or not begun or not (left or waiting or absent):
        return None
    unlisted = total.chunks_in(max(0, (total.parts or 0) - total.parts_listed - absent))  # of tasks not begun
    left += unlisted
    said = f"{_chunks(left, about=unlisted > 0)} {'is' if left == 1 else 'are'} left" if left else "work is left"
    if absent:
        many = total.chunks_in(absent)
        size = f" ({_chunks(many, about=True)})" if many else ""
        some = f"{absent:,} of {total.parts:,} parts of the source{size} {'is' if absent == 1 else 'are'} in no task"
        said = f"{said}, {some}," if left else some
    over = f", and nobody is starting {'it' if unbegun == 1 else 'them'}: the emulation is over" if unbegun else ""
    others = [f"{waiting:,} not begun{over}"] if waiting else []
    others += [f"{silent:,} silent"] if silent else []
    more = f" ({', '.join(others)})" if others else ""
    return f"{said} and no task is running{more}"


def is_done(total: Total) -> bool:
    """Say whether all of a run is done: no chunk is left or has failed, and no task is to come."""
    if not total.chunks or any(total.states.get(state) for state in ("running", "waiting", "unbegun")):
        return False
    return total.done >= total.chunks and total.parts_listed >= (total.parts or 0)


def _chunks(many: int, *, about: bool) -> str:
    return f"{'~' if about else ''}{many:,} chunk{'' if many == 1 else 's'}"
