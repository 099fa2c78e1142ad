"""The answers of the API as JSON Schema: every field, its meaning and its unit. null is what nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from badcjobs.model import METRICS

_STATE_WORDS = "silent: it should have been heard of; waiting: nothing was heard yet; unbegun: its emulation is over"
TASK_STATES = ("killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done")
Schema = dict[str, Any]


def _value(kind: str, text: str, *, unknown: bool = False, **more: Any) -> Schema:
    return {"type": [kind, "null"] if unknown else kind, "description": text, **more}


def _integer(text: str, **more: Any) -> Schema:
    return _value("integer", text, **more)


def _number(text: str, **more: Any) -> Schema:
    return _value("number", text, **more)


def _string(text: str, **more: Any) -> Schema:
    return _value("string", text, **more)


def _boolean(text: str, **more: Any) -> Schema:
    return _value("boolean", text, **more)


def _list(text: str, items: Schema, *, unknown: bool = False) -> Schema:
    return _value("array", text, unknown=unknown, items=items)


def _link(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(text: str, properties: Mapping[str, Schema]) -> Schema:
    """Return an object that has exactly these fields."""
    return {
        "type": "object",
        "description": text,
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


_AT = _integer("when this was looked at, in ms since 1970 (UTC)")
_TITLE = _string("the run folder, the file, or the name of the machine, as it was given")
_OF_RUN = _boolean("true: a run; false: the devices of this machine")

_PROBLEM = _object("What was wrong with a question.", {
    "status": _integer("the HTTP status again"),
    "error": _string("what is wrong, and what would be right"),
})  # fmt: skip

_HEALTH = _object("How the server itself fares.", {
    "status": _string("ok; starting: no look yet; stale: looking fails or takes too long",
                      enum=["ok", "starting", "stale"]),
    "version": _string("of badcjobs"),
    "title": _string("what is looked at; null before the first look", unknown=True),
    "of_run": _boolean("as above", unknown=True),
    "at_ms": _integer("when it was last looked at, ms since 1970; null: never", unknown=True),
    "age_s": _number("how long ago that was", unknown=True),
    "look_ms": _number("how long that look took", unknown=True),
    "looks": _integer("looks so far, however many clients asked"),
    "listeners": _integer("open connections to /api/events"),
    "interval_s": _number("the least time between two looks"),
    "uptime_s": _number("since the server was started"),
    "trouble": _string("why looking fails; null: it does not", unknown=True),
})  # fmt: skip

_TRAIL = _object("What a device did, in steps of equal length, oldest first; null: no reading in that step.", {
    "from_ms": _integer("when the first step begins"),
    "step_ms": _integer("length of a step"),
    **{name: _list(text, _number("one step", unknown=True)) for name, text in {
        "utilization_percent": "mean utilization", "memory_used_bytes": "mean memory in use",
        "temperature_c": "mean temperature", "power_w": "mean power",
    }.items()},
})  # fmt: skip

_PROCESS = _object("A process on a device.", {
    "pid": _integer("process id on its machine"),
    "program": _string("name of the program; null: not to be seen from here", unknown=True),
    "user": _string("whose it is; null: not to be seen from here", unknown=True),
    "memory_used_bytes": _integer("device memory it holds", unknown=True),
})  # fmt: skip

_READING = _object(
    "The last reading of a device (badcjobs guide telemetry).",
    {name: _number("null: the device did not say", unknown=True) for name in METRICS},
)

_MEANS = _object("The means of a device over the time of its task, which has ended; null: it goes on.", {
    "utilization_percent": _number("mean utilization", unknown=True),
    "memory_used_bytes": _number("mean memory in use", unknown=True),
    "temperature_c": _number("mean temperature", unknown=True),
    "power_w": _number("mean power", unknown=True),
})  # fmt: skip

_DEVICE = _object("One device of one task, or of this machine.", {
    "key": _string("what tells it from all others here"),
    "node": _string("its machine"),
    "index": _integer("its number on that machine", unknown=True),
    "uuid": _string("of the device", unknown=True),
    "token": _string("what stood in CUDA_VISIBLE_DEVICES", unknown=True),
    "name": _string("model", unknown=True),
    "backend": _string("who read it: nvml, nvidia-smi, amd, simulated, …"),
    "task": _string("the task that has it; null: a device of this machine", unknown=True),
    "alive": _boolean("its task goes on; false: these are the last readings of a task that has ended"),
    "memory_total_bytes": _integer("memory of the device", unknown=True),
    "power_limit_w": _number("power limit", unknown=True),
    "read_at_ms": _integer("when it was last read, ms since 1970", unknown=True),
    "reading": _link("Reading"),
    "means": {"anyOf": [_link("Means"), {"type": "null"}]},
    "memory_percent": _number("how full its memory is; of a task that has ended, was on average", unknown=True),
    "trail": {"anyOf": [_link("Trail"), {"type": "null"}]},
    "chunks": _list("chunks that it has begun and not ended", _string("recording/chunk")),
    "chunks_done": _integer("chunks done on it", unknown=True),
    "audio_done_s": _number("seconds of audio in them", unknown=True),
    "rate": _number("seconds of audio per second since its task began", unknown=True),
    "processes": _list("processes on it when they were last told; null: nobody tells", _link("Process"), unknown=True),
    "trouble": _string("why it gives no reading now", unknown=True),
})  # fmt: skip

_TASK = _object("The newest attempt of one array task.", {
    "name": _string("its name in the run folder"),
    "label": _string("what people call it: 4821_7"),
    "job_id": _string("Slurm's number of the job"),
    "array_index": _integer("its index in the array"),
    "state": _string(_STATE_WORDS, enum=list(TASK_STATES)),
    "procid": _integer("its number in a step of several", unknown=True),
    "restart": _integer("attempts before this one"),
    "node": _string("its machine", unknown=True),
    "engine": _string("what analyses the audio", unknown=True),
    "devices": _integer("devices it was granted", unknown=True),
    "workers": _integer("worker processes", unknown=True),
    "shard_index": _integer("which part of its source it has, from 0", unknown=True),
    "shard_count": _integer("parts that its source was cut into", unknown=True),
    "exit_code": _integer("how it ended", unknown=True),
    "started_at_ms": _integer("ms since 1970", unknown=True),
    "ended_at_ms": _integer("ms since 1970", unknown=True),
    "heard_at_ms": _integer("when it was last heard of, ms since 1970", unknown=True),
    "silent_after_s": _number("without a word for longer than this it counts as silent", unknown=True),
    "chunks": _integer("chunks in its part of the source"),
    "settled": _integer("those that need nothing more: done + failed + before"),
    "done": _integer("done in this attempt"),
    "failed": _integer("failed for good"),
    "before": _integer("done before this attempt"),
    "pending": _integer("left"),
    "audio_done_s": _number("seconds of audio done in this attempt"),
    "rate": _number("seconds of audio per second", unknown=True),
    "chunks_per_s": _number("pace so far", unknown=True),
    "ends_at_ms": _integer("when its last chunk will be done at that pace, ms since 1970", unknown=True),
    "working_on": _list("chunks begun and not ended", _string("recording/chunk")),
    "cpu_percent": _number("of its machine, 100 = all cores busy", unknown=True),
    "memory_used_bytes": _integer("of its machine", unknown=True),
    "memory_percent": _number("of its machine", unknown=True),
})  # fmt: skip

_ALERT = _object("Trouble that goes on now.", {
    "kind": _string("which alert (badcjobs guide telemetry)"),
    "severity": _string("how bad it is"),
    "message": _string("in words"),
    "node": _string("where"),
    "started_at_ms": _integer("since when, ms since 1970"),
    "task": _string("whose; null: of this machine", unknown=True),
    "device_index": _integer("which device; null: not of one device", unknown=True),
    "device_uuid": _string("which device", unknown=True),
    "peak": _number("the worst value so far", unknown=True),
    "threshold": _number("the limit it passed", unknown=True),
})  # fmt: skip

_TOTAL = _object("All of it together.", {
    "states": {"type": "object", "description": "array tasks by state",
               "propertyNames": {"enum": list(TASK_STATES)}, "additionalProperties": {"type": "integer"}},
    "devices": _integer("devices of tasks that go on, or of this machine"),
    "chunks": _integer("chunks of the source, or those listed so far; null: no work here", unknown=True),
    "chunks_known": _boolean("whether that is the whole source"),
    "parts": _integer("parts that tasks cut the source into; null: not known, or all are listed", unknown=True),
    "parts_listed": _integer("those that some task has listed"),
    "source_chunks": _integer("chunks of the whole source; about, while parts are not listed", unknown=True),
    "share": _number("settled of the whole source, 0 to 1; about, while parts are not listed", unknown=True),
    "done": _integer("chunks done"),
    "failed": _integer("chunks failed for good"),
    "settled": _integer("done + failed"),
    "audio_done_s": _number("seconds of audio done"),
    "rate": _number("seconds of audio per second, of the tasks that run", unknown=True),
    "ends_at_ms": _integer("when the whole source is done at this pace, ms since 1970", unknown=True),
    "ended_at_ms": _integer("when the last task ended, ms since 1970; null: some go on or have not begun",
                            unknown=True),
    "ran_s": _number("for how long at least one task was running"),
    "speed": _number("audio done over that time: × real time", unknown=True),
    "standstill": _string("work is left and no task is running, in words; null: that is not so", unknown=True),
    "go_on": _list("commands, each of which goes on with what is left", _string("a line to paste")),
    "utilization_percent": _number("mean over the devices that say it", unknown=True),
    "power_w": _number("sum over the devices that say it", unknown=True),
})  # fmt: skip

_TOGETHER = {
    "devices": _integer("how many"),
    "readable": _integer("how many of them give readings"),
    "utilization_percent": _number("mean over those that say it", unknown=True),
    "memory_used_bytes": _number("sum", unknown=True),
    "memory_total_bytes": _number("sum", unknown=True),
    "temperature_max_c": _number("the hottest", unknown=True),
    "power_w": _number("sum", unknown=True),
}
_SUMMARY = _object("All devices at work together.", {
    "at_ms": _AT, "title": _TITLE, "of_run": _OF_RUN, **_TOGETHER,
    "ended": _integer("devices of tasks that have ended; not counted above"),
    "alerts": _integer("alerts that go on"),
    "models": _list("the same by model", _link("Model")),
})  # fmt: skip
_MODEL = _object("The devices of one model.", {"name": _string("model", unknown=True), **_TOGETHER})

_DEVICES = _list("the devices", _link("Device"))
_REMARKS = _list("what could not be read, and why", _string("a sentence"))
_METRICS_ANSWER = _object("Devices, one by one.", {"at_ms": _AT, "devices": _DEVICES})
_TASKS_ANSWER = _object("Tasks, some at a time.", {
    "at_ms": _AT, "title": _TITLE, "total": _link("Total"),
    "matched": _integer("tasks that match, before offset and limit"),
    "tasks": _list("in the order of the array", _link("Task")), "remarks": _REMARKS,
})  # fmt: skip
_TASK_ANSWER = _object("One task.", {
    "at_ms": _AT, "task": _link("Task"), "devices": _DEVICES, "alerts": _list("of this task", _link("Alert")),
})  # fmt: skip
_LOG = _object("The end of a task's log.", {
    "task": _string("its name"),
    "lines": _list("the last lines, oldest first", _string("a line")),
    "whole": _boolean("whether that is all of it"),
})  # fmt: skip
_ALERTS_ANSWER = _object("Trouble.", {"at_ms": _AT, "alerts": _list("that goes on now", _link("Alert"))})

_STREAM = {"at_ms": _AT, "total": _link("Total"), "alerts": _list("all that go on", _link("Alert")),
           "remarks": _REMARKS, "tasks": _list("new or changed", _link("Task")),
           "devices": _list("new or changed; the trail only while alive", _link("Device"))}  # fmt: skip
_SNAPSHOT = _object("Event snapshot: all there is.", {"title": _TITLE, "of_run": _OF_RUN, **_STREAM})
_CHANGE = _object("Event change: what is new since the event before.", {
    "gone_tasks": _list("names", _string("task.name")), "gone_devices": _list("keys", _string("device.key")), **_STREAM,
})  # fmt: skip
_BEAT = _object("Event beat: a sign of life.", {
    "at_ms": _integer("when it was last looked at; null: never", unknown=True),
    "trouble": _string("why there is nothing newer", unknown=True),
})  # fmt: skip

SCHEMAS: dict[str, Schema] = {
    "Problem": _PROBLEM, "Health": _HEALTH, "Summary": _SUMMARY, "Model": _MODEL, "Metrics": _METRICS_ANSWER,
    "Device": _DEVICE, "Reading": _READING, "Means": _MEANS, "Trail": _TRAIL, "Process": _PROCESS, "Task": _TASK,
    "Tasks": _TASKS_ANSWER, "OneTask": _TASK_ANSWER, "Log": _LOG, "Total": _TOTAL, "Alert": _ALERT,
    "Alerts": _ALERTS_ANSWER, "Snapshot": _SNAPSHOT, "Change": _CHANGE, "Beat": _BEAT,
}  # fmt: skip
