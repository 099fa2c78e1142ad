"""How often a task should be heard of, and from when on one that is not counts as silent: the same for everybody.

A task that runs publishes its database again and again. One that does not is on a dead node, or its filesystem hangs,
or it was killed together with its recorder; nobody is left to say so.
"""

from __future__ import annotations

_PUBLISH_EVERY_S = 30.0  # where the file does not say
_SLOW_BYTES_PER_S = 50_000  # keeps the traffic of a day of readings at about 4 GB
_LONGEST_S = 480.0  # what a dead node may cost, however many chunks there are
_SLACK_S = 60.0  # a shared filesystem may show a new file so much later


def publish_interval_s(size_bytes: int, base_s: float) -> float:
    """Return how long to wait between publications of a file of this size."""
    return max(base_s, min(_LONGEST_S, size_bytes / _SLOW_BYTES_PER_S))


def silent_after_s(size_bytes: int, publish_every_s: float | None) -> float:
    """Return how long a task that runs may be without a word: two publications of its file, and a minute."""
    return 2 * publish_interval_s(size_bytes, publish_every_s or _PUBLISH_EVERY_S) + _SLACK_S


def is_silent(heard_at_ms: int | None, after_s: float | None, now_ms: int | None) -> bool:
    """Say whether a task that has not ended should have been heard of by now; what nobody knows accuses nobody."""
    if heard_at_ms is None or after_s is None or now_ms is None:
        return False
    return now_ms - heard_at_ms > 1000 * after_s
