"""Reads the surroundings of a Python program that uses badcjobs: what the command line does for its own commands."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.stop import StopRequest
from badcjobs.world import World


def read_here() -> World:
    """Return the real world; signals stay the program's own business."""
    clock = SystemClock()
    return World(
        environ=dict(os.environ),
        clock=clock,
        stop=StopRequest(clock.monotonic_s),
        hostname=socket.gethostname().split(".")[0],
        pid=os.getpid(),
        cwd=Path.cwd(),
        cores=len(os.sched_getaffinity(0)),
    )
