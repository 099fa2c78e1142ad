"""What is behind the answers of the live page: a view, and the files of the run folder that it looks at."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.live_documents import Documents
from badcjobs.live_files import Mark, leads_out, mark_of
from badcjobs.live_ledgers import Ledgers
from badcjobs.live_metrics import frame_samples
from badcjobs.live_view import View, open_run_view
from badcjobs.monitor.frame import Frame
from badcjobs.report.metrics import prometheus_text
from badcjobs.seams import Clock
from badcjobs.store.process_reader import DeviceProcess, read_processes
from badcjobs.web.look import Look

_LOG_BYTES = 512 * 1024  # of the end of a log; nobody reads more in a browser


def open_run(target: Path, clock: Clock) -> LiveSource:
    """Look at a run folder or one of its databases; raise DatabaseProblem for others."""
    named = target if target.name not in ("", "..") else target.resolve()  # serve . in a run folder
    view = open_run_view(named, clock, confined=True)
    folder = view.files.folder.path.absolute()
    run = folder.parent if folder.name == "tasks" else folder
    return LiveSource(view, run.name, (run / "tasks", folder), Ledgers(view.files), home=run)


@dataclass(slots=True)
class LiveSource:
    """What is behind the answers: the view, and the files of the run folder that it looks at."""

    view: View
    run: str = ""
    folders: Sequence[Path] = ()  # where the databases and logs of tasks lie; none: a machine
    ledgers: Ledgers | None = None  # None: a machine
    home: Path | None = None  # the run folder, out of which no link is followed; None: a machine
    _documents: Documents = field(default_factory=Documents)
    _processes: dict[str, tuple[Mark, tuple[DeviceProcess, ...]]] = field(default_factory=dict)

    def look(self) -> Look:
        """Look once."""
        return self._documents.look(self.view.look())

    def prometheus(self, look: Look) -> str:
        """Return a look, and for a run its accounts, in Prometheus' words."""
        frame = look.origin
        assert isinstance(frame, Frame)
        summary = None if self.ledgers is None else self.ledgers.summarize(frame)
        return prometheus_text(frame_samples(frame, self.run, summary))

    def processes(self, look: Look) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the processes of the devices of running tasks, by device key; a file is read once."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        devices = [item.document for item in look.devices.values() if item.document["alive"] and item.document["task"]]
        for name in {str(device["task"]) for device in devices}:
            for process in self._processes_of(name):
                keys = [d["key"] for d in devices if (d["task"], d["uuid"], d["token"]) == _place(process)]
                for key in keys:
                    found[key].append(_process_document(process))
        return found

    def _processes_of(self, task: str) -> tuple[DeviceProcess, ...]:
        path = self._file(f"{task}.sqlite")
        if path is None:
            return ()
        try:
            mark = mark_of(path.stat())
        except OSError:  # gone since
            return ()
        known = self._processes.get(task)
        if known is None or known[0] != mark:
            known = self._processes[task] = (mark, read_processes(path))
        return known[1]

    def log_end(self, task: str, lines: int) -> tuple[Sequence[str], bool] | None:
        """Return the end of a task's log."""
        path = self._file(f"{task}.log")
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LOG_BYTES))
                said = file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:  # gone since, or not for us to read
            return None
        if size > _LOG_BYTES:
            del said[:1]  # its beginning is missing
        return said[-lines:], size <= _LOG_BYTES and len(said) <= lines

    def _file(self, name: str) -> Path | None:
        """Return a file of a task: right in one of the folders, and no link that leads elsewhere."""
        for folder in self.folders:
            if self.home is None or leads_out(folder, self.home):
                continue
            path = folder / name
            try:
                if path.parent == folder and path.is_file() and path.resolve().parent == folder.resolve():
                    return path
            except OSError:  # not for us to look at
                continue
        return None


def _place(process: DeviceProcess) -> tuple[str, str | None, str]:
    return process.task, process.uuid, process.token


def _process_document(process: DeviceProcess) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "program": process.program,
        "user": process.user,
        "memory_used_bytes": process.memory_used_bytes,
    }
