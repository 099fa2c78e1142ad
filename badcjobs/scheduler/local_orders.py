"""Orders for one task of an emulated array, each a file made beside its log: cancel it, requeue it, preempt it.

What becomes of a task that is sent back is the array's business; here the files are found, and removed.
"""

from __future__ import annotations

from pathlib import Path

from badcjobs.scheduler.emulated_task import CANCELLED, PREEMPTED, REQUEUED

_ENDS = {"cancel": CANCELLED, "requeue": REQUEUED, "preempt": PREEMPTED}  # by what follows the log's name


def take_orders(log: Path) -> list[str]:
    """Return how somebody wants a task to end, the strongest first; a file is obeyed once, and then gone."""
    return [end for word, end in _ENDS.items() if _take(log.with_name(f"{log.name}.{word}"))]


def _take(path: Path) -> bool:
    """Say whether the file is there, and remove it."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
