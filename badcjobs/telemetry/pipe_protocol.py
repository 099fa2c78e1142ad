"""What the wrapper and its recorder tell each other: the order that starts the recorder, and words over pipes.

The recorder says
    ready           the first sample is taken
    refused WHY     the disk takes no readings
    alert JSON      an alert has begun or ended
    trouble TEXT    a line for the task's log
    cost TEXT       what it has used; then
    stopped JSON    the last sample is taken, and this is missing. It stays, ready to publish if the wrapper dies.
The wrapper says
    work waits      an idle device is worth an alert
    work none       it is not
    snapshot FILE   copy what is written so far, since nothing else may open your file
    stop [FILE]     take a last sample (and a last snapshot)
    published       everything is published: exit
A pipe that closes without a word means that the wrapper is dead.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from badcjobs.model import AlertLimits, StandIn
from badcjobs.telemetry.recorder import Followed

MODULE, AGAIN = "badcjobs.telemetry.recorder_process", "--again"
READY, STOP, STOPPED, PUBLISHED = "ready", "stop", "stopped", "published"
REFUSED, SNAPSHOT = "refused", "snapshot"
ALERT, TROUBLE, COST = "alert", "trouble", "cost"
WORK_WAITS, WORK_NONE = "work waits", "work none"


@dataclass(frozen=True, slots=True)
class SidecarOrder:
    """Everything the recorder's process needs to know; travels as JSON."""

    mark: str
    task_id: int
    wrapper_pid: int
    devices: list[Followed]
    interval_s: float
    stand_in: StandIn
    search_path: str | None
    started_at_ms: int
    asked_at_ms: int
    recorder_file: str
    wrapper_file: str
    publish_to: str
    local_folder: str
    shared: bool = False  # the files lie on a shared filesystem: the safe mode
    limits: AlertLimits = field(default_factory=AlertLimits)
    own_marks: list[str] = field(default_factory=list)  # NAME=VALUE in the environment of the task's own processes

    def to_json(self) -> str:
        """Return what ``read`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> SidecarOrder:
        """Read the order that the wrapper wrote."""
        order = json.loads(path.read_text())
        parts = {
            "devices": [Followed(*device) for device in order["devices"]],
            "stand_in": StandIn(**order["stand_in"]),
            "limits": AlertLimits(**order["limits"]),
        }
        return cls(**{**order, **parts})
