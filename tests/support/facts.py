"""Jobs from lines of text: ``task(pending=9), device(samples=0), error('bad_audio', 3, 1, 0, 2, ''), job(tries=5)``.

Each task and device has what differs from a usual one; times (``_ms``) are from the start. Of ``alert``, ``error``,
``gap``, ``decision``, ``foreign`` and ``failed`` there may be many; ``seen`` is when the job is looked at, in seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rooms import store
from rooms.model import NameGaps
from rooms.report import Summary, summarize
from rooms.store import DeviceFacts, JobFacts, StateTime, TaskFacts
from support.task_files import START_MS

_LISTS = {
    "alert": ("alerts", store.AlertFacts), "error": ("errors", store.ErrorFacts), "gap": ("gaps", store.GapFacts),
    "decision": ("decisions", store.DecisionFacts), "foreign": ("foreign", store.ForeignProcess),
}  # fmt: skip
_PARTS = {"merged": store.Freshness, "cost": store.CostFacts, "recording_names": NameGaps}


def spent(busy: float, **seconds: float) -> dict[str, StateTime]:
    """Return the times of a device that is busy for this share of its work, and never else."""
    return {name: StateTime(s, s, s * busy if name == "working" else 0.0, None) for name, s in seconds.items()}


def failed(number: int, error_class: str = "bad_audio", error: str = "no header", **more: str) -> list[Any]:
    return [store.FailedChunk(f"r{n}", more.get("chunk", f"r{n}"), more.get("status", "failed"), 3, error_class, error)
            for n in range(number)]  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """What lines of facts are read with: usual tasks, devices and jobs, and makers of larger ones, by name."""

    tasks: Mapping[str, TaskFacts]
    devices: Mapping[str, DeviceFacts]
    usual: Callable[[Sequence[TaskFacts], Sequence[DeviceFacts]], JobFacts]
    proof: store.Completeness
    is_proved: bool = False  # also where a line does not say so
    missing: tuple[int, ...] = ()
    large: Mapping[str, Callable[..., JobFacts]] = field(default_factory=dict)

    def read(self, line: str) -> Summary:
        """Return the job that a line tells."""
        facts, tasks, devices, more = None, list[TaskFacts](), list[DeviceFacts](), dict[str, Any]()
        proof, missing, now_ms = self.proof if self.is_proved else None, self.missing, None
        for call in ast.parse(f"({line},)", mode="eval").body.elts:  # type: ignore[attr-defined]
            name, args = call.func.id, [ast.literal_eval(one) for one in call.args]
            values = moments({one.arg: ast.literal_eval(one.value) for one in call.keywords})
            if name in self.tasks:
                tasks.append(replace(self.tasks[name], **values))
            elif name == "many":
                tasks += self.many(*args, **values)
            elif name in self.devices:
                devices.append(make_device(self.devices[name], values))
            elif name in self.large:
                facts = self.large[name](*args, **values)
            elif name in _LISTS:
                more[_LISTS[name][0]] = (*more.get(_LISTS[name][0], ()), _LISTS[name][1](*args))
            elif name == "failed":
                more["failed"] = (*more.get("failed", ()), *failed(*args, **values))
            elif name in _PARTS:
                more[name] = _PARTS[name](*args, **values)
            elif name == "proof":
                proof = replace(self.proof, **values)
            elif name == "missing":
                missing = tuple(args)
            elif name == "seen":
                now_ms = START_MS + round(1000 * args[0])
            else:
                assert name == "job", line
                more |= values
        if facts is None:
            facts = self.usual(tasks, devices)
        else:
            facts = replace(facts, tasks=tuple(tasks) or facts.tasks, devices=tuple(devices) or facts.devices)
        return summarize(replace(facts, **more), missing, proof, now_ms)

    def many(self, kind: str, number: int, **changes: Any) -> list[TaskFacts]:
        return [replace(self.tasks[kind], name=f"1_{n}", array_index=n, **changes) for n in range(number)]


def moments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of which the times are no longer from the start."""
    return {name: value + START_MS if name.endswith("_ms") and value is not None else value
            for name, value in values.items()}  # fmt: skip


def make_device(device: DeviceFacts, values: Mapping[str, Any]) -> DeviceFacts:
    made = dict(values)
    if "work" in made:
        made["work"] = replace(device.work, **moments(made["work"]))
    if "metrics" in made:
        made["metrics"] = {name: store.MetricFacts(*figures) for name, figures in made["metrics"].items()}
    if "under_way" in made:
        made["under_way"] = store.UnderWay(*made["under_way"])
    if states := made.get("states"):
        made["states"] = spent(**states) if "busy" in states else {n: StateTime(*s) for n, s in states.items()}
    return replace(device, **made)
