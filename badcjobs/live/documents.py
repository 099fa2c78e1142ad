"""The data behind the server's answers: snapshots as JSON documents, and the files of the run."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs import __version__
from badcjobs.live.run_files import resolves_outside
from badcjobs.live.snapshot import Snapshot, alert_document, device_document, task_document
from badcjobs.live.views import RunView, View, open_run_view, summarize_run
from badcjobs.model import ProcessFacts
from badcjobs.paths import FileVersion, file_version
from badcjobs.report.prometheus import HOST, READING, Sample, device_samples, prometheus_text, run_samples, samples_of
from badcjobs.seams import Clock
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.store.read_tasks import read_processes

Document = Mapping[str, Any]
_OnDevices = Mapping[tuple[str, str | None, str], Sequence[ProcessFacts]]  # by task, UUID and token
_LOG_BYTES = 512 * 1024  # read from the end of a log, enough for a browser


def json_text(document: object) -> str:
    """Return compact JSON; NaN raises ValueError, because it is not valid JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Item(NamedTuple):
    """The JSON document of a task or device, and its text as sent to all listeners."""

    document: Document
    text: str


@dataclass(frozen=True, slots=True)
class Documents:
    """A snapshot as JSON documents; unchanged tasks and devices keep the Item of the previous snapshot."""

    snapshot: Snapshot
    total: Document = field(default_factory=dict)
    tasks: Mapping[str, Item] = field(default_factory=dict)  # by name
    devices: Mapping[str, Item] = field(default_factory=dict)  # by key
    alerts: tuple[Document, ...] = ()


class DocumentCache:
    """Convert snapshots to documents, and reuse those of unchanged tasks and devices."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[TaskFacts | DeviceFacts, Item]] = {}  # by name or key

    def convert(self, snapshot: Snapshot) -> Documents:
        """Return a snapshot as JSON documents."""
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
        )


def _item(key: str, facts: TaskFacts | DeviceFacts) -> Item:
    if isinstance(facts, TaskFacts):
        document = task_document(facts)
        return Item(document, json_text(document))
    document = {"key": key, **device_document(facts)}
    # Listeners receive every device; they request the chart of an ended task only when they show it.
    return Item(document, json_text(document if facts.alive else {**document, "trail": None}))


# --- the view and the files behind it ---------------------------------------------------------------------------------


def open_run(target: Path, clock: Clock) -> LiveSource:
    """Open a run folder or one of its databases; raise DatabaseProblem for anything else."""
    named = target if target.name not in ("", "..") else target.resolve()  # "badcjobs serve ." in a run folder
    view = open_run_view(named, clock, confined=True)
    folder = view.files.folder.path.absolute()
    run = folder.parent if folder.name == "tasks" else folder
    return LiveSource(view, run)


@dataclass(slots=True)
class LiveSource:
    """The view of a run or a machine, and the files of the run folder."""

    view: View
    home: Path | None = None  # the run folder; links that leave it are not followed; None: a machine
    _cache: DocumentCache = field(default_factory=DocumentCache)
    _processes: dict[str, tuple[FileVersion | None, _OnDevices]] = field(default_factory=dict)

    def look(self) -> Documents:
        """Read what has changed and return it as JSON documents."""
        return self._cache.convert(self.view.look())

    def prometheus(self, documents: Documents) -> str:
        """Return the metrics for Prometheus; for a run, its totals too."""
        samples: list[Sample] = [("badcjobs_info", 1, {"version": __version__})]
        for device in documents.snapshot.devices:
            if device.alive:  # the last reading of an ended task is not current
                samples += device_samples(READING, device)
        for task in documents.snapshot.tasks:
            if task.state == "running":  # the same for a silent task
                samples += samples_of(HOST, task, task.name)
        if isinstance(self.view, RunView) and self.home is not None:
            samples += run_samples(summarize_run(self.view.files, documents.snapshot), self.home.name)
        return prometheus_text(samples)

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
