"""Share one snapshot, as JSON documents, between all clients: at most one is read at a time, and one per interval.

A client of /api/events or /ws gets a snapshot first, then changes; after a reconnect, the changes that it missed."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from badcjobs.errors import BadcjobsError
from badcjobs.live.run_files import resolves_outside
from badcjobs.live.snapshot import Document, Snapshot, alert_document, device_document, task_document
from badcjobs.live.views import RunView, View, open_run_view, summarize_run
from badcjobs.model import AskQueue, ProcessFacts, not_asked
from badcjobs.paths import FileVersion, file_version
from badcjobs.report import prometheus as metrics
from badcjobs.seams import Clock
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.store.read_tasks import read_processes

_OnDevices = Mapping[tuple[str, str | None, str], Sequence[ProcessFacts]]  # by task, UUID and token
_LOOK_S = 1.0  # the first screen of a large run does not wait for all of its files
_LOG_BYTES = 512 * 1024  # read from the end of a log, enough for a browser


def json_text(document: object) -> str:
    """Return compact JSON; NaN raises ValueError, because it is not valid JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=list)


class Item(NamedTuple):
    """The JSON document of a task or device, and its text as sent to all listeners."""

    document: Document
    text: str


@dataclass(frozen=True, slots=True)
class Documents:
    """A snapshot as JSON documents; unchanged tasks and devices keep the Item of the previous snapshot."""

    snapshot: Snapshot
    total: Document
    tasks: Mapping[str, Item]  # by name
    devices: Mapping[str, Item]  # by key
    alerts: tuple[Document, ...]
    verdict: Document | None


def _item(key: str, facts: TaskFacts | DeviceFacts) -> Item:
    if isinstance(facts, TaskFacts):
        document = task_document(facts)
        return Item(document, json_text(document))
    document = {"key": key, **device_document(facts)}
    # Listeners receive every device; they request the chart of an ended task only when they show it.
    return Item(document, json_text(document if facts.alive else {**document, "trail": None}))


# --- the view and the files behind it ---------------------------------------------------------------------------------


def open_run(target: Path, clock: Clock, ask_queue: AskQueue = not_asked) -> LiveSource:
    """Open a run folder or one of its databases; raise DatabaseProblem for anything else."""
    named = target if target.name not in ("", "..") else target.resolve()  # "badcjobs serve ." in a run folder
    view = open_run_view(named, clock, confined=True, ask_queue=ask_queue)
    folder = view.files.folder.path.absolute()
    run = folder.parent if folder.name == "tasks" else folder
    return LiveSource(view, run)


@dataclass(slots=True)
class LiveSource:
    """The view of a run or a machine, and the files of the run folder."""

    view: View
    home: Path | None = None  # the run folder; links that leave it are not followed; None: a machine
    _known: dict[str, tuple[TaskFacts | DeviceFacts, Item]] = field(default_factory=dict)  # by name or key
    _processes: dict[str, tuple[FileVersion | None, _OnDevices]] = field(default_factory=dict)

    def look(self) -> Documents:
        """Read what has changed, as far as a short time allows; unchanged tasks and devices keep their documents."""
        snapshot = self.view.look(_LOOK_S)
        now: dict[str, TaskFacts | DeviceFacts] = {task.name: task for task in snapshot.tasks}
        seen: Counter[str] = Counter()
        for device in snapshot.devices:
            key = f"{device.task or device.node}/{device.uuid or device.token or device.index}"
            seen[key] += 1
            now[key if seen[key] == 1 else f"{key}#{seen[key]}"] = device
        same = {key: known for key, known in self._known.items() if now.get(key) == known[0]}
        self._known = {key: same.get(key) or (facts, _item(key, facts)) for key, facts in now.items()}
        return Documents(
            snapshot,
            total=snapshot.total.to_dict(),
            tasks={key: item for key, (facts, item) in self._known.items() if isinstance(facts, TaskFacts)},
            devices={key: item for key, (facts, item) in self._known.items() if isinstance(facts, DeviceFacts)},
            alerts=tuple(map(alert_document, snapshot.alerts)),
            verdict=snapshot.verdict_document,
        )

    def prometheus(self, documents: Documents) -> str:
        """Return the metrics for Prometheus; those of a whole run only when all of its tasks have been read."""
        snapshot = documents.snapshot
        things: dict[str, Sequence[Any]] = {
            metrics.INFO: (None,),
            # The last reading of an ended or silent task is not current.
            metrics.READING: [device for device in snapshot.devices if device.alive],
            metrics.HOST: [task for task in snapshot.tasks if task.state == "running"],
            metrics.ALERTS: (self.view,),
        }
        run = ""
        if isinstance(self.view, RunView):
            files = self.view.files
            run = str((files.only or files.folder.path).resolve())
            summary = summarize_run(files, snapshot)
            whole = () if snapshot.unread or files.unaccounted else (summary,)
            things |= {**metrics.accounts_of(summary), metrics.RUN: whole, metrics.ALERTS: whole}
        return metrics.prometheus_text(metrics.samples_of(things, run))

    def processes(self, documents: Documents) -> Mapping[str, Sequence[Document]]:
        """Return the processes on the devices of running tasks, by device key; an unchanged file is not read again."""
        found: dict[str, list[Document]] = defaultdict(list)
        for device in (item.document for item in documents.devices.values()):
            task = device["task"]
            path = self._file(f"{task}.sqlite") if task and device["alive"] else None
            if path is None:
                continue
            mark, known = file_version(path), self._processes.get(task)
            if known is None or known[0] != mark:
                known = self._processes[task] = (mark, read_processes(path))
            found[device["key"]] += map(asdict, known[1].get((task, device["uuid"], device["token"]), ()))
        return {key: processes for key, processes in found.items() if processes}

    def log_end(self, task: str, lines: int) -> tuple[Sequence[str], bool] | None:
        """Return the last lines of a task's log, and whether that is the complete log; None: no readable log."""
        path = self._file(f"{task}.log")
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LOG_BYTES))
                tail = file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:  # removed since, or not readable
            return None
        if size > _LOG_BYTES:
            del tail[:1]  # an incomplete line
        return tail[-lines:], size <= _LOG_BYTES and len(tail) <= lines

    def _file(self, name: str) -> Path | None:
        """Return a task's file in the run folder or its tasks folder; links to other places are not followed."""
        for folder in (self.home / "tasks", self.home) if self.home else ():
            path = folder / name
            with suppress(OSError):  # not readable
                inside = path.parent == folder and not resolves_outside(folder, self.home or folder)
                if inside and path.is_file() and path.resolve().parent == folder.resolve():
                    return path
        return None


# --- one snapshot for all clients -------------------------------------------------------------------------------------

Result = TypeVar("Result")
EVENTS = "text/event-stream"
# The page loads its scripts and styles from this server only, and connects to no other server.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_OPENING = b"retry: 2000\n\n"  # ms until a client reconnects
_END = b""
_HEARTBEAT_EVERY_S = 10.0
_PAUSE_S = 0.05  # between the parts of a large run
_MAX_LISTENERS = 256
_MAX_WAITING = 32  # events for one listener
_KEPT = 64  # events, for clients that reconnect


def unavailable(why: str) -> HTTPException:
    """Return a 503 response: there is no data now."""
    return HTTPException(503, why, {"retry-after": "5"})


def error_line(error: BadcjobsError | OSError) -> str:
    """Return an error as one line."""
    return error.what if isinstance(error, BadcjobsError) else str(error)


class Background:
    """Run functions one after another in a thread, outside the event loop."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A daemon thread: Python would wait for the threads of an executor at exit.
        threading.Thread(target=self._work, name="badcjobs reader", daemon=True).start()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function, or raise its exception."""
        future: Future[Result] = Future()
        self._jobs.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, function = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # raised in the caller
                    future.set_exception(error)


@dataclass(slots=True)
class Hub:
    """The newest documents, and the listeners that receive the next ones."""

    read_documents: Callable[[], Documents]
    clock: Clock
    interval_s: float = 2.0
    always: bool = False  # read also without listeners, so that there is a history to show
    patience_s: float = 10.0  # how long a request waits for data
    listeners: set[EventStream] = field(default_factory=set)
    last: Documents | None = None  # the newest, however old
    looks: int = 0
    look_ms: float | None = None
    trouble: str | None = None
    _background: Background = field(default_factory=Background)
    _pending: asyncio.Task[Documents] | None = None
    _read_at_s: float | None = None
    _closed: bool = False
    _changes: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT))  # (previous id, event)
    _number: int = 0  # of changes
    started_at_s: float = field(init=False)
    _started_at_ms: int = field(init=False)
    _sent_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_at_ms = self.clock.now_ms()
        self.started_at_s = self._sent_at_s = self.clock.monotonic_s()

    @property
    def age_s(self) -> float | None:
        """The age of the newest documents."""
        return None if self._read_at_s is None else self.clock.monotonic_s() - self._read_at_s

    async def latest(self) -> Documents:
        """Return documents not older than the interval, or what is read so far; raise a 503 if not ready in time."""
        is_new = self.age_s is not None and self.age_s < self.interval_s
        if self.last is not None and (is_new or self.last.snapshot.unread) and not self.trouble:
            return self.last  # a large run is being read for the first time, in parts
        if self._pending is not None and self.trouble:
            raise unavailable(self.trouble)  # reading hangs: only one request waits for it
        try:
            return await asyncio.wait_for(asyncio.shield(self._start_reading()), self.patience_s)
        except asyncio.TimeoutError:
            many = "" if self.last else "many files to read, or "
            trouble = f"no answer within {self.patience_s:g} s: {many}a file system or a driver hangs"
            self._set_trouble(trouble)
            raise unavailable(trouble) from None

    async def read(self, function: Callable[[], Result]) -> Result:
        """Read something else in the background; raise a 503 if that fails or takes too long."""
        try:
            return await asyncio.wait_for(self._background.call(function), self.patience_s)
        except asyncio.TimeoutError:
            raise unavailable(f"no answer within {self.patience_s:g} s: many tasks, or a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since
            raise unavailable(error_line(error)) from error

    def refresh(self) -> None:
        """Start reading if the newest documents are too old; do not wait."""
        if self.age_s is None or self.age_s >= self.interval_s:
            self._start_reading()

    def _start_reading(self) -> asyncio.Task[Documents]:
        """Start reading, unless that is in progress already."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
            # Retrieve the exception even if no request waits for it any more.
            self._pending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._pending

    async def _read(self) -> Documents:
        began_s = self.clock.monotonic_s()
        try:
            documents = await self._background.call(self.read_documents)
        except (BadcjobsError, OSError) as error:
            self._set_trouble(error_line(error))
            raise unavailable(error_line(error)) from error
        finally:
            self._pending = None
        self._read_at_s = self.clock.monotonic_s()
        self.look_ms = 1000 * (self._read_at_s - began_s)
        self.looks += 1
        before, self.last = self.last, documents
        event = self._full_event() if before is None else self._change_event(before, documents)
        if event is not None:
            self._send(event)
        self._set_trouble(None)
        return documents

    @property
    def _id(self) -> str:
        return f"{self._started_at_ms:x}-{self._number}"  # another one after a restart of the server

    def _full_event(self) -> bytes | None:
        """Return everything as an event; None: nothing has been read yet."""
        if self.last is None:
            return None
        head = {"title": self.last.snapshot.title, "of_run": self.last.snapshot.of_run}
        return event_text("snapshot", _text(head, self.last, self.last.tasks, self.last.devices), self._id)

    def _change_event(self, before: Documents, now: Documents) -> bytes | None:
        """Return what has changed as an event, which is kept for clients that reconnect; None: nothing."""
        tasks = {key: item for key, item in now.tasks.items() if before.tasks.get(key) is not item}
        devices = {key: item for key, item in now.devices.items() if before.devices.get(key) is not item}
        gone = {
            "gone_tasks": [name for name in before.tasks if name not in now.tasks],
            "gone_devices": [key for key in before.devices if key not in now.devices],
        }
        rest = [(one.total, one.alerts, one.snapshot.remarks, one.snapshot.reading) for one in (before, now)]
        if not (tasks or devices or any(gone.values()) or rest[0] != rest[1]):
            return None
        last_id = self._id
        self._number += 1
        event = event_text("change", _text(gone, now, tasks, devices), self._id)
        self._changes.append((last_id, event))
        return event

    def _catch_up(self, last_id: str | None) -> list[bytes]:
        """Return the events that a client needs after ``last_id``; None: it is new."""
        known = [before for before, _ in self._changes]
        if last_id in known:
            return [event for _, event in self._changes][known.index(last_id) :]
        full = None if last_id == self._id else self._full_event()
        return [] if full is None else [full]

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        """Send a heartbeat: the time of the newest documents, and why there are no newer ones."""
        at_ms = None if self.last is None else self.last.snapshot.at_ms
        self._send(event_text("beat", json_text({"at_ms": at_ms, "trouble": self.trouble})))

    def _send(self, event: bytes) -> None:
        self._sent_at_s = self.clock.monotonic_s()
        for listener in self.listeners:
            listener.put(event)

    async def run(self) -> None:
        """Read repeatedly while there are listeners, until closed."""
        while not self._closed:
            while self.last is not None and self.last.snapshot.unread and not self._closed:
                with suppress(HTTPException):
                    await self._start_reading()
                await asyncio.sleep(_PAUSE_S)
            if self.listeners or self.always:
                with suppress(HTTPException):
                    await self.latest()
            if self.clock.monotonic_s() - self._sent_at_s >= _HEARTBEAT_EVERY_S:
                self._send_heartbeat()
            await asyncio.sleep(self.interval_s)

    def join(self, last_id: str | None) -> EventStream:
        """Add a listener for the current state and all changes; raise a 503 if there are too many."""
        if self._closed or len(self.listeners) >= _MAX_LISTENERS:
            raise unavailable(f"too many listeners ({len(self.listeners)})")
        listener = EventStream([_OPENING, *self._catch_up(last_id)], self.listeners.discard)
        self.listeners.add(listener)
        self.refresh()
        return listener

    def close(self) -> None:
        """Disconnect every listener and stop reading."""
        self._closed = True
        for listener in self.listeners:
            listener.put(_END)


class EventStream(StreamingResponse):
    """One connection to /api/events or /ws, and the events still to be sent."""

    def __init__(self, first: list[bytes], on_close: Callable[[EventStream], None]) -> None:
        super().__init__(self._events(), headers={**HEADERS, "content-type": EVENTS, "x-accel-buffering": "no"})
        self._on_close = on_close
        self._abort: Callable[[], None] = lambda: None
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        for event in first:
            self._waiting.put_nowait(event)

    def put(self, event: bytes) -> None:
        """Add an event, or the end; a listener that reads too slowly is disconnected."""
        self._waiting.put_nowait(event)
        if self._waiting.qsize() > _MAX_WAITING:
            self._abort()  # a normal close would wait forever for the unread buffer

    async def _events(self) -> AsyncIterator[bytes]:
        while event := await self._waiting.get():
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the listener disconnects, is too slow, or the server ends."""
        self._abort = scope.get("state", {}).get("abort", self._abort)
        try:
            await (
                self._push(receive, send) if scope["type"] == "websocket" else super().__call__(scope, receive, send)
            )
        finally:
            self._on_close(self)

    async def _push(self, receive: Receive, send: Send) -> None:
        """Send the events over a WebSocket; what the client sends is ignored."""

        async def send_all() -> None:
            async for event in self._events():
                if event != _OPENING:
                    await send({"type": "websocket.send", "text": message_text(event)})
            await send({"type": "websocket.close", "code": 1001})  # the server ends

        async def wait_for_end() -> None:
            while (await receive())["type"] != "websocket.disconnect":
                pass

        await receive()  # the request for a connection
        await send({"type": "websocket.accept"})
        work = [asyncio.ensure_future(one()) for one in (send_all, wait_for_end)]
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)


# --- events -----------------------------------------------------------------------------------------------------------


def event_text(name: str, data: str, event_id: str | None = None) -> bytes:
    """Return one server-sent event; ``data`` is JSON without line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def message_text(event: bytes) -> str:
    """Return a server-sent event as one JSON text, for a WebSocket."""
    lines = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
    return f'{{"event":"{lines["event"]}","id":{json_text(lines.get("id"))},"data":{lines["data"]}}}'


def _text(head: Mapping[str, Any], documents: Documents, tasks: Mapping[str, Item], devices: Mapping[str, Item]) -> str:
    snapshot = documents.snapshot
    rest = {
        "at_ms": snapshot.at_ms,
        "verdict": documents.verdict,
        "reading": snapshot.reading,
        "total": documents.total,
        "alerts": documents.alerts,
        "findings": list(map(alert_document, snapshot.findings)),
        "remarks": snapshot.remarks,
    }
    of_tasks, of_devices = (",".join(item.text for item in items.values()) for items in (tasks, devices))
    return f'{json_text({**head, **rest})[:-1]},"tasks":[{of_tasks}],"devices":[{of_devices}]}}'
