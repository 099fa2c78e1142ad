"""Reads the world for a task: the only place that asks for the environment, the host and the time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from badcjobs.cli.output import RowCounter, log_to_file
from badcjobs.clock import SystemClock
from badcjobs.task.startup import StopRequest, World


def environ() -> Mapping[str, str]:
    """Return this process's environment."""
    return dict(os.environ)


def read_world() -> World:
    """Return the real world, listening for signals from now on."""
    clock = SystemClock()
    stop = StopRequest(clock.monotonic_s)
    stop.install()
    return replace(World.here(environ(), clock, stop), log_to=log_to_file, progress=RowCounter("chunks listed"))
