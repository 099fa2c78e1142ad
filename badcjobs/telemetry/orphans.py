"""Waits for recorders whose wrapper was killed: in these seconds they publish what it had done."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from badcjobs.seams import Clock
from badcjobs.telemetry.order import MODULE, SidecarOrder

log = logging.getLogger(__name__)

_POLL_S = 0.1


def wait_for_orphans(tasks_folder: Path, clock: Clock, timeout_s: float) -> None:
    """Wait until no orphaned recorder of this machine is about to publish into the folder."""
    deadline_s = clock.monotonic_s() + timeout_s
    announced = False
    while _orphan_in(tasks_folder) and clock.monotonic_s() < deadline_s:
        if not announced:
            log.info("an earlier task was killed; waiting for its recorder to publish what it had done")
            announced = True
        clock.sleep(_POLL_S)


def _orphan_in(tasks_folder: Path) -> bool:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if MODULE not in words:
            continue
        try:
            order = SidecarOrder.read(Path(words[-1]))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # its folder is gone: it has published
        if Path(order.publish_to).parent == tasks_folder and not psutil.pid_exists(order.wrapper_pid):
            return True
    return False
