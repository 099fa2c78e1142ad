"""A snapshot as JSON documents, and the files of a run that clients may read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.live.run_files import resolves_outside
from badcjobs.live.snapshot import Document, Snapshot, device_document, task_document
from badcjobs.live.views import RunView, View, open_run_view, summarize_run
from badcjobs.model import AskQueue, ProcessFacts, not_asked
from badcjobs.paths import FileVersion, file_version, run_of
from badcjobs.report import prometheus as metrics
from badcjobs.seams import Clock
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.store.read_tasks import read_processes

_ProcessesOfTask = Mapping[tuple[str, str | None, str], Sequence[ProcessFacts]]  # by task, UUID and token
_LOOK_S = 1.0  # the first screen of a large run does not wait for all of its files
_LOG_BYTES = 512 * 1024  # read from the end of a log, enough for a browser


def json_text(document: object) -> str:
    """Return compact JSON; NaN raises ValueError, because it is not valid JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=list)


class Item(NamedTuple):
    """A task or device, its JSON document, and the text of it that all listeners receive."""

    facts: TaskFacts | DeviceFacts
    document: Document
    text: str


Items = Mapping[str, Item]


class Documents(NamedTuple):
    """A snapshot as JSON documents; unchanged tasks and devices keep the Item of the previous snapshot."""

    snapshot: Snapshot
    state: Document  # without tasks and devices
    tasks: Items  # by name
    devices: Items  # by key


def _task_item(_name: str, task: TaskFacts) -> Item:
    document = task_document(task)
    return Item(task, document, json_text(document))


def _device_item(key: str, device: DeviceFacts) -> Item:
    document = {"key": key, **device_document(device)}
    sent = document
    if not device.alive:
        sent = {**document, "trail": None}  # listeners request the chart of an ended task only when they show it
    return Item(device, document, json_text(sent))


def _updated(before: Items, facts: Mapping[str, Any], make: Callable[[str, Any], Item]) -> Items:
    """Return an item for each task or device; an unchanged one keeps its item."""
    items = {}
    for key, value in facts.items():
        item = before.get(key)
        if item is None or item.facts != value:
            item = make(key, value)
        items[key] = item
    return items


def _key_of(device: DeviceFacts) -> str:
    """Return a key that is unique and stable."""
    return f"{device.task or device.node}/{device.uuid or device.token or device.index}"


def open_run(target: Path, clock: Clock, ask_queue: AskQueue = not_asked) -> LiveSource:
    """Open a run folder or one of its databases; raise DatabaseProblem for anything else."""
    if target.name in ("", ".."):  # "badcjobs serve ." in a run folder
        target = target.resolve()
    view = open_run_view(target, clock, confined=True, ask_queue=ask_queue)
    return LiveSource(view, run_of(view.files.folder.path.absolute()))


@lru_cache(maxsize=4096)
def _processes_in(path: Path, _version: FileVersion | None) -> _ProcessesOfTask:
    """Return the processes in a task database; an unchanged file is not read again."""
    return read_processes(path)


@dataclass
class LiveSource:
    """The view of a run or a machine, and the files of the run folder."""

    view: View
    home: Path | None = None  # the run folder; links that leave it are not followed; None: a machine
    _tasks: Items = field(default_factory=dict)
    _devices: Items = field(default_factory=dict)

    def look(self) -> Documents:
        """Read what has changed, as far as a short time allows."""
        snapshot = self.view.look(_LOOK_S)
        self._tasks = _updated(self._tasks, {task.name: task for task in snapshot.tasks}, _task_item)
        self._devices = _updated(self._devices, {_key_of(device): device for device in snapshot.devices}, _device_item)
        return Documents(snapshot, snapshot.state(), self._tasks, self._devices)

    def prometheus(self, documents: Documents) -> str:
        """Return the metrics for Prometheus; those of a whole run only when all of its tasks have been read."""
        snapshot = documents.snapshot
        subjects: dict[str, Sequence[Any]] = {
            metrics.INFO: (None,),
            # The last reading of an ended or silent task is not current.
            metrics.READING: [device for device in snapshot.devices if device.alive],
            metrics.HOST: [task for task in snapshot.tasks if task.state == "running"],
            metrics.ALERTS: (self.view,),
        }
        if not isinstance(self.view, RunView):
            return metrics.prometheus_text(metrics.samples_of(subjects, ""))

        files = self.view.files
        summary = summarize_run(files, snapshot)
        complete = not snapshot.unread and not files.unaccounted
        subjects |= metrics.accounts_of(summary)
        subjects[metrics.RUN] = subjects[metrics.ALERTS] = (summary,) if complete else ()
        run = str((files.only or files.folder.path).resolve())
        return metrics.prometheus_text(metrics.samples_of(subjects, run))

    def processes(self, devices: Sequence[Document]) -> Mapping[str, Sequence[Document]]:
        """Return the processes on those of these devices whose tasks run, by device key."""
        by_key = {}
        for device in devices:
            task = device["task"]
            path = self._file(f"{task}.sqlite")
            if path is None or not device["alive"]:
                continue
            processes = _processes_in(path, file_version(path)).get((task, device["uuid"], device["token"]))
            if processes:
                by_key[device["key"]] = [asdict(process) for process in processes]
        return by_key

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
        if self.home is None:
            return None
        for folder in (self.home / "tasks", self.home):
            path = folder / name
            if path.parent != folder or resolves_outside(folder, self.home):
                continue
            with suppress(OSError):  # not readable
                if path.is_file() and path.resolve().parent == folder.resolve():
                    return path
        return None
