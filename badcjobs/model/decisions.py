"""What the program decides by itself: a code and figures. The sentence for people is made from them, never read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from badcjobs.model.devices import known_values
from badcjobs.words import count, memory


class Code(str, Enum):
    """What was decided. Codes with the same topic (before the dot) follow each other: the last one counts."""

    # How many workers each device has
    START_WORKERS = "workers.start"
    START_ONE_PER_CORE = "workers.start_one_per_core"
    START_AS_MEMORY_HOLDS = "workers.start_as_memory_holds"
    TRY_MORE_WORKERS = "workers.try_more"
    TRY_FEWER_WORKERS = "workers.try_fewer"
    MORE_WORKERS_NOT_FASTER = "workers.more_not_faster"
    FEWER_WORKERS_AS_FAST = "workers.fewer_as_fast"
    FEWER_WORKERS_SLOWER = "workers.fewer_slower"
    NO_CORES_FOR_MORE = "workers.no_cores"
    NO_DEVICE_MEMORY_FOR_MORE = "workers.no_device_memory"
    NO_MEMORY_FOR_MORE = "workers.no_memory"
    MEMORY_IN_USE_UNKNOWN = "workers.memory_unknown"
    LITTLE_WORK_LEFT = "workers.little_work_left"
    MEMORY_TIGHT = "workers.memory_tight"
    MEMORY_ERRORS = "workers.memory_errors"

    # Whether the workers of a device share it through CUDA MPS
    MPS_SHARED = "mps.shared"
    MPS_OF_SITE = "mps.of_site"
    MPS_NOT_NEEDED = "mps.not_needed"
    MPS_NOT_USED = "mps.not_used"
    MPS_CONNECTED = "mps.connected"
    MPS_NOT_LISTED = "mps.not_listed"
    MPS_NOT_CONNECTED = "mps.not_connected"
    MPS_GIVEN_UP = "mps.given_up"
    MPS_FAULT = "mps.fault"
    MPS_SERVER_ENDED = "mps.server_ended"
    MPS_DAEMON_ENDED = "mps.daemon_ended"

    # How audio that does not fit into the memory of a device is analysed
    LIMIT_LEARNED = "memory_limit.learned"
    LIMIT_PROBED = "memory_limit.probed"
    LIMIT_MET = "memory_limit.met"

    # Whether audio is copied to the node in advance
    STAGE_ALL = "staging.all"
    STAGE_CUTS = "staging.cuts"
    STAGE_NOTHING = "staging.nothing"
    STAGE_NOTHING_WAITS = "staging.nothing_waits"

    # What happens after a failure: to a chunk, to a worker, to all of the work
    RETRY = "retry.later"
    RETRY_SMALLER = "retry.less_memory"
    IN_PIECES = "retry.in_pieces"
    STOP_WORKER = "stop_worker"
    PAUSE_ON_NODE = "node.pause"
    STOP_ON_NODE = "node.stop"

    SHORT_AUDIO = "short_audio"
    LEFT_OUT = "left_out"
    GAVE_UP = "gave_up"

    def __str__(self) -> str:
        return self.value


_START = (
    "[an earlier run found {earlier} to be best; ]{cores}[ and {device_bytes} of GPU memory] per device[; {note}]"
    "[; {devices_hold} instead of {before_devices}: a device has {device_bytes},"
    " and a worker may need {device_worker_bytes} (a tenth stays free)]"
    "[; {memory_holds} instead of {before_memory}: the job has {granted_bytes} of main memory for {devices},"
    " and a worker may need {worker_bytes} (a tenth stays free)]"
)
_CHANGE = "{tried} per device changed the rate by {rate_change:+.0%} against {before}"
_LIMITS = (
    "[: audio of {crowded_s:g} s or more is analysed with one thread]"
    "[; audio of {alone_s:g} s or more is cut into pieces]"
)

# A part in brackets is left out if a figure in it is not given.
SENTENCES: Mapping[Code, str] = {
    Code.START_WORKERS: f"start: {_START}",
    Code.START_ONE_PER_CORE: f"start: one per core, {_START}",
    Code.START_AS_MEMORY_HOLDS: f"start: {_START}",
    Code.TRY_MORE_WORKERS: f"[{_CHANGE}; ]trying {{more}} more",
    Code.TRY_FEWER_WORKERS: f"[{_CHANGE}; ]trying {{trying}}",
    Code.MORE_WORKERS_NOT_FASTER: _CHANGE,
    Code.FEWER_WORKERS_AS_FAST: f"{_CHANGE}[; trying {{trying}}]",
    Code.FEWER_WORKERS_SLOWER: _CHANGE,
    Code.NO_CORES_FOR_MORE: f"[{_CHANGE}; ]there are no cores for more",
    Code.NO_DEVICE_MEMORY_FOR_MORE: f"[{_CHANGE}; ]one more might fill {{memory_share:.0%}} of a device's memory",
    Code.NO_MEMORY_FOR_MORE: (
        f"[{_CHANGE}; ]one more might raise the main memory in use from {{held_bytes}} to {{expected_bytes}};"
        " the job has {granted_bytes}"
    ),
    Code.MEMORY_IN_USE_UNKNOWN: f"[{_CHANGE}; ]the main memory in use is not known; the job has {{granted_bytes}}",
    Code.LITTLE_WORK_LEFT: f"[{_CHANGE}; ]only {{left_s:.0f}} s of work left",
    Code.MEMORY_TIGHT: (
        "{workers} instead of {before}: main memory gets tight: {held_bytes} in use; the job has {granted_bytes}"
    ),
    Code.MEMORY_ERRORS: "{workers} instead of {before}: chunks ran out of memory",
    Code.MPS_SHARED: "up to {most_workers} workers share the device through a daemon of ours",
    Code.MPS_OF_SITE: "the workers use the daemon of this site, in {pipe}",
    Code.MPS_NOT_NEEDED: "one worker per device",
    Code.MPS_NOT_USED: "{why}",
    Code.MPS_CONNECTED: "worker[ {pid}] is connected to its server",
    Code.MPS_NOT_LISTED: "worker {pid} may run without it: NVML does not list it as a client",
    Code.MPS_NOT_CONNECTED: "worker[ {pid}] is not connected, and runs without it: its server does not list it",
    Code.MPS_GIVEN_UP: "a worker runs without it: {why}",
    Code.MPS_FAULT: "a fault on the device ended its workers under MPS; their chunks are tried one by one",
    Code.MPS_SERVER_ENDED: "its server has ended; its workers start again",
    Code.MPS_DAEMON_ENDED: "the daemon has ended: new workers run without it",
    Code.LIMIT_LEARNED: f"learned by an earlier task{_LIMITS}",
    Code.LIMIT_PROBED: f"found by badcjobs probe{_LIMITS}",
    Code.LIMIT_MET: f"a chunk ran out of memory{_LIMITS}",
    Code.STAGE_ALL: "[run.stage = {setting}][{source} is on {source_disk}, {local} on {local_disk}]",
    Code.STAGE_CUTS: "{source} is local",
    Code.STAGE_NOTHING: "[run.stage = {setting}][{source} is local][{local} is not a node-local disk ({local_disk})]",
    Code.STAGE_NOTHING_WAITS: "all chunks are in progress",
    Code.RETRY: "try {try_number} failed ({error_class}); the next in {delay_s:.1f} s",
    Code.RETRY_SMALLER: "try {try_number} failed ({error_class}); the next with less memory",
    Code.IN_PIECES: "its {audio_s:.0f} s are analysed in {pieces} pieces",
    Code.STOP_WORKER: "it stops ({error_class}): {error}",
    Code.PAUSE_ON_NODE: "a fault of this node, not of a chunk ({why}): no work for {pause_s:.1f} s",
    Code.STOP_ON_NODE: "this node cannot work now ({why}): stopping with chunks left, which are not charged with it",
    Code.SHORT_AUDIO: (
        "{path} ends early, at {end_s:.3f} s: {found_s:.3f} s of the {audio_s:g} s of this chunk exist and were"
        " analysed"
    ),
    Code.LEFT_OUT: "files in the source that are not audio by their ending",
    Code.GAVE_UP: "{why}",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the program has decided by itself."""

    code: Code
    subject: str | None = None  # the model of the device, the chunk, or an ending; None: the task
    figures: Mapping[str, Any] = field(default_factory=dict)  # numbers and names; what is not known is left out

    @classmethod
    def of(cls, code: Code, subject: str | None = None, /, **figures: Any) -> Decision:
        """Return a decision; figures that are None are not known, and left out."""
        return cls(code, subject, known_values(figures))

    @property
    def reason(self) -> str:
        """The sentence for people: why, with the figures behind it."""
        sizes = [value for name, value in self.figures.items() if name.endswith("_bytes")]
        values = {name: _written(name, value, sizes) for name, value in self.figures.items()}
        parts = re.split(r"[\[\]]", SENTENCES[self.code])
        sentence = ""
        for required, optional in zip(parts[::2], [*parts[1::2], ""], strict=True):
            sentence += required.format_map(values)
            with suppress(KeyError):
                sentence += optional.format_map(values)
        return sentence


def _written(name: str, value: Any, sizes: Sequence[int]) -> Any:
    if name.endswith("_bytes"):
        return memory(value, sizes)
    return count(value, name.removesuffix("s")) if name in ("cores", "devices") else value
