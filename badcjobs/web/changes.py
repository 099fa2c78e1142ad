"""What listeners of /api/events are told: all of it at first, then only what has changed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from badcjobs.web.look import Item, Look, json_text

_KEPT = 64  # events, for those who lost their connection for a moment
RETRY_MS = 2000


def event_text(name: str, data: str, event_id: str | None = None) -> bytes:
    """Return one server-sent event; JSON text has no line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def opening_text() -> bytes:
    """Return what a stream begins with: how long to wait before coming back."""
    return f"retry: {RETRY_MS}\n\n".encode()


def snapshot_text(look: Look) -> str:
    """Return all of a look."""
    head = {"title": look.title, "of_run": look.of_run}
    return _joined(look, look.tasks, look.devices, json_text(head)[1:-1])


def change_text(before: Look, after: Look) -> str | None:
    """Return what is new since another look; None: nothing."""
    tasks, devices = _new(before.tasks, after.tasks), _new(before.devices, after.devices)
    gone_tasks, gone_devices = _gone(before.tasks, after.tasks), _gone(before.devices, after.devices)
    rest = (before.total, before.alerts, before.remarks) != (after.total, after.alerts, after.remarks)
    if not (tasks or devices or gone_tasks or gone_devices or rest):
        return None
    gone = json_text({"gone_tasks": gone_tasks, "gone_devices": gone_devices})[1:-1]
    return _joined(after, tasks, devices, gone)


def beat_text(at_ms: int | None, trouble: str | None) -> bytes:
    """Return a sign of life: when the last look was, and why there is no newer one."""
    return event_text("beat", json_text({"at_ms": at_ms, "trouble": trouble}))


def _joined(look: Look, tasks: Mapping[str, Item], devices: Mapping[str, Item], more: str) -> str:
    rest = {"at_ms": look.at_ms, "total": look.total, "alerts": look.alerts, "remarks": look.remarks}
    return (
        f'{{{more},{json_text(rest)[1:-1]},"tasks":[{_texts(tasks.values())}],"devices":[{_texts(devices.values())}]}}'
    )


def _texts(items: Iterable[Item]) -> str:
    return ",".join(item.text for item in items)


def _new(before: Mapping[str, Item], after: Mapping[str, Item]) -> dict[str, Item]:
    return {key: item for key, item in after.items() if before.get(key) is not item}


def _gone(before: Mapping[str, Item], after: Mapping[str, Item]) -> list[str]:
    return [key for key in before if key not in after]


class Journal:
    """The newest look, and the events that led to it. ``life`` tells this server's events from those of another."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._number = 0
        self._events: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self.look: Look | None = None

    def take(self, look: Look) -> bytes | None:
        """Take note of a look; return the event for those who know the one before, None if there is nothing to say."""
        before, self.look = self.look, look
        text = None if before is None else change_text(before, look)
        if text is None:
            return None
        self._number += 1
        event = event_text("change", text, self._id)
        self._events.append((self._number, event))
        return event

    def catch_up(self, last_id: str | None) -> list[bytes]:
        """Return what somebody needs who knows all up to an event, or who knows nothing."""
        missed = self._since(last_id)
        if missed is not None:
            return missed
        return [] if self.look is None else [event_text("snapshot", snapshot_text(self.look), self._id)]

    @property
    def _id(self) -> str:
        return f"{self._life}-{self._number}"

    def _since(self, last_id: str | None) -> list[bytes] | None:
        life, _, number = (last_id or "").rpartition("-")
        if life != self._life or not (number.isascii() and number.isdecimal() and len(number) < 16):
            return None
        wanted = range(int(number) + 1, self._number + 1)
        found = [event for event_number, event in self._events if event_number in wanted]
        return found if len(found) == len(wanted) and int(number) <= self._number else None
