"""Reads the world for a task: the only place that asks for the environment, the host and the time."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from badcjobs.cli.output import RowCounter, log_to_file
from badcjobs.clock import SystemClock
from badcjobs.stop import StopRequest
from badcjobs.world import World


def environ() -> Mapping[str, str]:
    """Return this process's environment."""
    return dict(os.environ)


def read_world() -> World:
    """Return the real world, listening for signals from now on."""
    clock = SystemClock()
    stop = StopRequest(clock.monotonic_s)
    stop.install()
    return World(
        environ=environ(),
        clock=clock,
        stop=stop,
        hostname=socket.gethostname().split(".")[0],
        pid=os.getpid(),
        cwd=Path.cwd(),
        cores=len(os.sched_getaffinity(0)),
        log_to=log_to_file,
        progress=RowCounter("chunks listed"),
    )
