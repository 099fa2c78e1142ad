"""The state of the terminal interface: page, sort order, filter, selected line; and how keys change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from badcjobs.live.snapshot import STATES, mean_utilization
from badcjobs.store.read_model import DeviceFacts, TaskFacts

Line = TypeVar("Line", TaskFacts, DeviceFacts)
_Value = float | tuple[float, ...] | None
DevicesOf = Mapping[str, Sequence[DeviceFacts]]  # by task name


# Every order but "task", which is that of the snapshot, puts the most urgent or the largest first.
TASK_ORDERS: dict[str, Callable[[TaskFacts, DevicesOf], _Value]] = {
    "state": lambda task, devices: (float(STATES.index(task.state)), float(-task.failed_for_good)),
    "task": lambda task, devices: 0.0,
    "progress": lambda task, devices: task.settled / task.chunks if task.chunks else None,
    "rate": lambda task, devices: _negative(task.rate),
    "ETA": lambda task, devices: _negative(task.ends_at_ms),
    "GPU": lambda task, devices: mean_utilization(devices.get(task.name, ())) if task.alive else None,
}
DEVICE_ORDERS: dict[str, Callable[[DeviceFacts], _Value]] = {
    "task": lambda device: 0.0,
    "GPU": lambda device: device.shown.utilization_percent,
    "memory": lambda device: _negative(device.memory_percent),
    "temperature": lambda device: _negative(device.shown.temperature_c),
    "power": lambda device: _negative(device.shown.power_w),
    "rate": lambda device: _negative(device.rate),
}


def arrange_tasks(tasks: Sequence[TaskFacts], devices: DevicesOf, ui: UiState) -> list[TaskFacts]:
    """Return the tasks that match the filter, in the chosen order."""
    kept = [t for t in tasks if _matches(ui.filter, t.label, t.node, t.state, t.engine, *t.working_on)]
    return _sort([(TASK_ORDERS[ui.order](task, devices), task) for task in kept], ui.reverse)


def arrange_devices(devices: Sequence[DeviceFacts], ui: UiState) -> list[DeviceFacts]:
    """Return the devices that match the filter, in the chosen order.

    Devices that cannot be read come first, then those of running tasks, then those of tasks that have ended.
    """
    kept: dict[str, list[tuple[_Value, DeviceFacts]]] = {"trouble": [], "running": [], "ended": []}
    for d in devices:
        state = "running" if d.alive else "ended"
        if _matches(ui.filter, d.task, d.node, d.name, d.uuid, *d.chunks, f"gpu{d.index}", state):
            kept["trouble" if d.trouble else state].append((DEVICE_ORDERS[ui.order](d), d))
    return [device for ranked in kept.values() for device in _sort(ranked, ui.reverse)]


def _sort(ranked: Sequence[tuple[_Value, Line]], reverse: bool) -> list[Line]:
    known = [pair for pair in ranked if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=reverse)  # type: ignore[arg-type, return-value]
    if reverse and known and known[0][0] == known[-1][0]:
        known.reverse()  # all values are equal: reverse the original order
    return [line for _, line in known] + [line for value, line in ranked if value is None]


def _matches(wanted: str, *words: str | None) -> bool:
    known = " ".join(word for word in words if word).lower()
    return all(word in known for word in wanted.lower().split())


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


# --- ui -------------------------------------------------------------------------------------------------------------

TASKS, DEVICES, TASK, HELP = "tasks", "devices", "task", "help"
_FAR = 1_000_000_000
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR}
_MAX_FILTER = 60


@dataclass(frozen=True, slots=True)
class UiState:
    """What the user has chosen so far."""

    page: str = TASKS
    of_run: bool = True  # False: this machine, which has devices and no tasks
    line: int = 0  # number of the selected line
    scroll: int = 0  # on the pages TASK and HELP: lines above the top of the screen
    opened: str | None = None  # name of the task on the page TASK
    order: str = "task"
    reverse: bool = False
    filter: str = ""  # show only lines with all these words
    typing: bool = False  # the filter is being typed
    quitting: bool = False
    back_to: str = TASKS

    @classmethod
    def at_start(cls, *, of_run: bool) -> UiState:
        """Return the state at the start."""
        page, order = (TASKS, "state") if of_run else (DEVICES, "task")
        return cls(page=page, of_run=of_run, back_to=page, order=order)

    @property
    def orders(self) -> list[str]:
        """The sort orders of this page."""
        return list(DEVICE_ORDERS if self.page == DEVICES else TASK_ORDERS)


def press(ui: UiState, key: str, *, rows: int, names: list[str | None]) -> UiState:
    """Return the state after a key; ``names`` are the tasks of the lines, ``rows`` the number of lines on a page."""
    if ui.typing:
        return _type(ui, key)
    if key in ("q", "ctrl-c"):
        return replace(ui, quitting=True)
    last = max(0, len(names) - 1)
    step = _MOVES.get(key) or {"page-down": rows, "page-up": -rows}.get(key)
    if ui.page in (TASK, HELP):  # these pages scroll, or return to the selected line
        if step is not None and (last or ui.page == TASK):
            return replace(ui, scroll=min(last, max(0, ui.scroll + step)))
        if ui.page == TASK and key not in ("escape", "backspace", "enter", "left"):
            return ui
        return replace(ui, page=ui.back_to, opened=None, scroll=0)
    ui = replace(ui, line=min(ui.line, last))
    if step is not None:
        return replace(ui, line=min(last, max(0, ui.line + step)))
    if key == "?":
        return replace(ui, page=HELP, back_to=ui.page, scroll=0)
    if key in ("enter", "right") and names and names[ui.line] is not None:
        return replace(ui, page=TASK, opened=names[ui.line], back_to=ui.page, scroll=0)
    following = ui.orders[(ui.orders.index(ui.order) + 1) % len(ui.orders)]
    changes: dict[str, dict[str, Any]] = {
        "/": {"typing": True},
        "escape": {"filter": "", "line": 0},
        "s": {"order": following, "line": 0},
        "r": {"reverse": not ui.reverse, "line": 0},
    }
    if ui.of_run:
        page, order = (TASKS, "state") if ui.page == DEVICES else (DEVICES, "task")
        changes["d"] = changes["tab"] = {"page": page, "order": order, "line": 0}
    return replace(ui, **changes.get(key, {}))


def _type(ui: UiState, key: str) -> UiState:
    if key in ("enter", "ctrl-c"):
        return replace(ui, typing=False)
    if key == "escape":
        return replace(ui, typing=False, filter="", line=0)
    if key == "backspace":
        return replace(ui, filter=ui.filter[:-1], line=0)
    if len(key) == 1 and key.isprintable():
        return replace(ui, filter=(ui.filter + key)[:_MAX_FILTER], line=0)
    return ui


# --- keys -------------------------------------------------------------------------------------------------------------

_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1b[7~": "home", "\x1b[8~": "end", "\x1b[5~": "page-up", "\x1b[6~": "page-down", "\x1b": "escape",
    "\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "backspace", "\x08": "backspace", "\x03": "ctrl-c",
    "\x04": "ctrl-c", " ": " ", "\x06": "page-down", "\x02": "page-up",
}  # fmt: skip
_ONE_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|\x1b|.", re.DOTALL)


def parse_keys(text: str) -> list[str]:
    """Return the names of the pressed keys; a letter is its own name, unknown keys are left out."""
    keys = (_NAMES.get(found, found) for found in _ONE_KEY.findall(text))
    return [key for key in keys if key.isprintable()]
