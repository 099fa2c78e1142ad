"""What the person in front of the screen has chosen: pages, order, filter, the line they are at. Keys change it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from badcjobs.monitor.order import DEVICE_ORDERS, TASK_ORDERS

TASKS, DEVICES, TASK, HELP = "tasks", "devices", "task", "help"
_FAR = 1_000_000_000
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR}
_LONGEST_FILTER = 60


@dataclass(frozen=True, slots=True)
class Desk:
    """The choices so far."""

    page: str = TASKS
    of_run: bool = True  # a machine has devices and no tasks
    line: int = 0  # of those that are shown
    scroll: int = 0  # on the pages TASK and HELP: lines above the first that is shown
    opened: str | None = None  # the name of the task on the page TASK
    order: str = "task"
    backwards: bool = False
    wanted: str = ""  # the filter
    typing: bool = False  # the filter is being typed
    left: bool = False  # they want to go
    back_to: str = TASKS

    @classmethod
    def at_start(cls, *, of_run: bool) -> Desk:
        """Return what is shown first."""
        page = TASKS if of_run else DEVICES
        return cls(page=page, of_run=of_run, back_to=page)

    @property
    def orders(self) -> list[str]:
        """The orders that this page knows."""
        return list(DEVICE_ORDERS if self.page == DEVICES else TASK_ORDERS)


def press(desk: Desk, key: str, *, rows: int, names: list[str | None]) -> Desk:
    """Return the desk after a key; ``names`` are the tasks of the lines that are shown, ``rows`` fit on a page."""
    if desk.typing:
        return _type(desk, key)
    if key in ("q", "ctrl-c"):
        return replace(desk, left=True)
    last = max(0, len(names) - 1)
    step = _MOVES.get(key) or {"page-down": rows, "page-up": -rows}.get(key)
    if desk.page in (TASK, HELP):
        return _read(desk, key, step, last)
    desk = replace(desk, line=min(desk.line, last))
    if step is not None:
        return replace(desk, line=min(last, max(0, desk.line + step)))
    return _choose(desk, key, names)


def _read(desk: Desk, key: str, step: int | None, last: int) -> Desk:
    """Return the desk after a key on a page that is read: it moves, or goes back to the same line as before."""
    if step is not None and (last or desk.page == TASK):
        return replace(desk, scroll=min(last, max(0, desk.scroll + step)))
    if desk.page == TASK and key not in ("escape", "backspace", "enter", "left"):
        return desk
    return replace(desk, page=desk.back_to, opened=None, scroll=0)


def _choose(desk: Desk, key: str, names: list[str | None]) -> Desk:
    if key == "?":
        return replace(desk, page=HELP, back_to=desk.page, scroll=0)
    if key == "/":
        return replace(desk, typing=True)
    if key == "escape":
        return replace(desk, wanted="", line=0)
    if key == "s":
        following = desk.orders[(desk.orders.index(desk.order) + 1) % len(desk.orders)]
        return replace(desk, order=following, line=0)
    if key == "r":
        return replace(desk, backwards=not desk.backwards, line=0)
    if key in ("d", "tab") and desk.of_run:
        return replace(desk, page=TASKS if desk.page == DEVICES else DEVICES, order="task", line=0)
    if key in ("enter", "right") and names and names[desk.line] is not None:
        return replace(desk, page=TASK, opened=names[desk.line], back_to=desk.page, scroll=0)
    return desk


def _type(desk: Desk, key: str) -> Desk:
    if key in ("enter", "ctrl-c"):
        return replace(desk, typing=False)
    if key == "escape":
        return replace(desk, typing=False, wanted="", line=0)
    if key == "backspace":
        return replace(desk, wanted=desk.wanted[:-1], line=0)
    if len(key) == 1 and key.isprintable():
        return replace(desk, wanted=(desk.wanted + key)[:_LONGEST_FILTER], line=0)
    return desk
