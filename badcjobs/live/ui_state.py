"""The state of the terminal interface: page, sort order, filter, selected line; and how keys change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from badcjobs.live.snapshot import STATES, mean_utilization
from badcjobs.store.read_model import DeviceFacts, TaskFacts

Row = TypeVar("Row", TaskFacts, DeviceFacts)
_Value = float | tuple[float, ...] | None

# The largest value comes first; in the order "task", that of the snapshot, all are equal.
TASK_ORDERS: dict[str, Callable[[TaskFacts], _Value]] = {
    "state": lambda task: (-STATES.index(task.state), task.failed_for_good),
    "task": lambda task: 0,
    "progress": lambda task: -task.settled / task.chunks if task.chunks else None,
    "rate": lambda task: task.rate,
    "ETA": lambda task: task.ends_at_ms,
    "GPU": lambda task: mean_utilization(task.its_devices) if task.alive else None,
}
DEVICE_ORDERS: dict[str, Callable[[DeviceFacts], _Value]] = {
    "task": lambda device: 0,
    "GPU": lambda device: device.shown.utilization_percent,
    "memory": lambda device: device.memory_percent,
    "temperature": lambda device: device.shown.temperature_c,
    "power": lambda device: device.shown.power_w,
    "rate": lambda device: device.rate,
}


def arrange_tasks(tasks: Sequence[TaskFacts], ui: UiState) -> list[TaskFacts]:
    """Return the tasks that match the filter, in the chosen order."""
    kept = [t for t in tasks if _matches(ui.filter, t.label, t.node, t.state, t.engine, *t.working_on)]
    return _sort(kept, TASK_ORDERS[ui.order])


def arrange_devices(devices: Sequence[DeviceFacts], ui: UiState) -> list[DeviceFacts]:
    """Return the devices that match the filter, in the chosen order; those of running tasks come first."""
    kept = []
    for device in devices:
        state = "running" if device.alive else "ended"
        names = (device.task, device.node, device.name, device.uuid, *device.chunks, f"gpu{device.index}", state)
        if _matches(ui.filter, *names):
            kept.append(device)
    return sorted(_sort(kept, DEVICE_ORDERS[ui.order]), key=lambda device: not device.alive)


def _sort(rows: Sequence[Row], order: Callable[[Row], _Value]) -> list[Row]:
    """Return the rows in an order; those without a value come last."""
    ranked = [row for row in rows if order(row) is not None]
    ranked.sort(key=order, reverse=True)  # type: ignore[arg-type]
    return ranked + [row for row in rows if order(row) is None]


def _matches(wanted: str, *names: str | None) -> bool:
    text = " ".join(name for name in names if name).lower()
    return all(word in text for word in wanted.lower().split())


# --- ui -------------------------------------------------------------------------------------------------------------

TASKS, DEVICES = "tasks", "devices"  # the lists
HELP = "help"
_FIRST_ORDER = {TASKS: "state", DEVICES: "task"}
_FAR = 1_000_000_000
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "end": _FAR}
_MAX_FILTER = 60


@dataclass(frozen=True)
class UiState:
    """What the user has chosen so far."""

    page: str = TASKS
    of_run: bool = True  # False: this machine, which has devices and no tasks
    line: int = 0  # number of the selected line
    opened: str | None = None  # what is shown instead of the list: the task with this name, or HELP
    scroll: int = 0  # its lines above the top of the screen
    order: str = "task"
    filter: str = ""  # show only lines with all these words
    typing: bool = False  # the filter is being typed
    quitting: bool = False

    @classmethod
    def at_start(cls, *, of_run: bool) -> UiState:
        """Return the state at the start."""
        page = TASKS if of_run else DEVICES
        return cls(page, of_run, order=_FIRST_ORDER[page])

    @property
    def orders(self) -> list[str]:
        """The sort orders of this page."""
        if self.page == DEVICES:
            return list(DEVICE_ORDERS)
        return list(TASK_ORDERS)


def press(ui: UiState, key: str, *, rows: int, names: Sequence[str | None]) -> UiState:
    """Return the state after a key; ``names`` are the tasks of the lines, ``rows`` the number of lines on a page."""
    if ui.typing:
        return _type(ui, key)
    if key in ("q", "ctrl-c"):
        return replace(ui, quitting=True)
    last = max(0, len(names) - 1)
    step = {**_MOVES, "page-down": rows, "page-up": -rows}.get(key)
    if ui.opened is None:
        return _press_in_list(ui, key, step, last, names)
    if step is not None:
        return replace(ui, scroll=min(last, max(0, ui.scroll + step)))
    if key in ("escape", "enter", "?"):
        return replace(ui, opened=None)
    return ui


def _press_in_list(ui: UiState, key: str, step: int | None, last: int, names: Sequence[str | None]) -> UiState:
    ui = replace(ui, line=min(ui.line, last))
    if step is not None:
        return replace(ui, line=min(last, max(0, ui.line + step)))
    if key == "?":
        return replace(ui, opened=HELP, scroll=0)
    if key == "/":
        return replace(ui, typing=True)
    if key == "escape":
        return replace(ui, filter="", line=0)
    if key == "s":
        following = ui.orders.index(ui.order) + 1
        return replace(ui, order=ui.orders[following % len(ui.orders)], line=0)
    if key == "enter" and names and names[ui.line] is not None:
        return replace(ui, opened=names[ui.line], scroll=0)
    if key == "d" and ui.of_run:
        page = TASKS if ui.page == DEVICES else DEVICES
        return replace(ui, page=page, order=_FIRST_ORDER[page], line=0)
    return ui


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

# What terminals send after "\x1b[" or "\x1bO".
_ESCAPED = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page-up",
    "6~": "page-down",
}
_NAMES = {
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl-c",
}
_ONE_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|\x1b|.", re.DOTALL)


def parse_keys(text: str) -> list[str]:
    """Return the names of the pressed keys; a letter is its own name, unknown keys are left out."""
    names = []
    for key in _ONE_KEY.findall(text):
        name = _NAMES.get(key, key)
        if len(key) > 1:
            name = _ESCAPED.get(key[2:], key)
        if name.isprintable():
            names.append(name)
    return names
