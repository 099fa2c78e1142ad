"""Paths: the run folder, the folder of one task's live files, the files of this installation."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.masking import mask_words, write_new_text
from badcjobs.model import TaskKey

LIVE_PREFIX = ".live-"  # hidden folders of live files; only their owners may open these


def is_there(path: Path) -> bool:
    """Return whether a path exists; raise BadInput if a parent folder cannot be read."""
    try:
        return path.exists()
    except OSError as error:
        line = shell_line("ls", "-ld", path.absolute().parent)
        raise BadInput(f"{path} cannot be read", why=error.strerror, fix=line) from error


def shell_line(*words: str | Path) -> str:
    """Return a command to paste into a shell, whatever is in its words; secrets are hidden.

    A Path is never read as an option.
    """
    texts = [f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in words]
    return " ".join(map(_quote, mask_words(texts)))


def _quote(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escaped = os.fsencode(word).decode("latin-1").encode("unicode_escape").decode()
    return "$'" + escaped.replace("'", "\\'") + "'"


def run_of(folder: Path) -> Path:
    """Return the run folder of its folder ``tasks``; any other folder itself."""
    return folder.parent if folder.name == "tasks" else folder


class RunFolder:
    """The folder given as --out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_toml = path / "run.toml"
        self.tasks = path / "tasks"
        self.waiting = self.tasks / ".waiting"  # why tasks wait for devices, for ``monitor``
        self.raw = path / "raw"  # output files of the engine, with run.keep_raw
        self.job_database = path / "job.sqlite"
        self.report = path / "report.html"

    def task_database(self, key: TaskKey) -> Path:
        """Return the published database of a task."""
        return self.tasks / f"{key.name}.sqlite"

    def task_log(self, key: TaskKey) -> Path:
        """Return the log of a task."""
        return self.tasks / f"{key.name}.log"

    def create(self) -> None:
        """Create the folder; raise BadInput if that is not possible."""
        try:
            self.tasks.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            elsewhere = "use a folder that compute nodes can write to, on Sockeye: --out /scratch/<alloc>/…"
            raise self.unusable(error, elsewhere) from error

    def unusable(self, error: OSError, fix: str | None = None) -> BadInput:
        """Return the error for a folder in which files cannot be created."""
        fix = fix or f"{shell_line('ls', '-ld', self.tasks)}   (or another --out)"
        return BadInput(f"--out {self.path} cannot be used", why=f"{error.strerror}: {error.filename}", fix=fix)

    def claim(self, key: TaskKey) -> TaskKey:
        """Claim a name that is not used yet: a second run inside the same job counts as a restart."""
        candidate = key
        while True:
            try:
                if candidate is key:
                    os.scandir(self.tasks).close()  # without read permission, work already done would be done again
                if not self.task_database(candidate).exists():
                    self.task_log(candidate).open("x").close()
                    return candidate
            except FileExistsError:
                pass
            except OSError as error:
                raise self.unusable(error) from error
            candidate = replace(candidate, restart=candidate.restart + 1)

    def give_back(self, key: TaskKey) -> None:
        """Undo ``claim`` and ``create`` for a task that could not start."""
        if self.task_database(key).exists():
            return
        self.task_log(key).unlink(missing_ok=True)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        with suppress(OSError):  # not empty: other tasks use it
            self.tasks.rmdir()
            self.path.rmdir()

    def tell_waiting(self, why: str) -> None:
        """Write that tasks wait for devices, even before the first one has started."""
        with suppress(OSError):
            self.tasks.mkdir(parents=True, exist_ok=True)
            self.waiting.unlink(missing_ok=True)  # it may be a link, to any file
            write_new_text(self.waiting, why)

    def stop_waiting(self) -> None:
        """Undo ``tell_waiting``."""
        with suppress(OSError):  # there was no need to wait
            self.waiting.unlink()
            self._remove_if_empty()

    def earlier_databases(self, key: TaskKey, merged: set[str]) -> list[Path]:
        """Return the task databases that may contain work already done.

        Databases that are merged into job.sqlite are left out, and those of other indices of our array: their shards
        are disjoint from ours. The folder is listed once, for an array of any size.
        """
        databases = []
        for path in sorted(self.tasks.glob("*.sqlite")):
            if path.name.startswith(".") or path.name in merged:
                continue
            its_key = TaskKey.parse(path.stem)
            is_sibling = its_key is not None and its_key.is_sibling_of(key)
            if not is_sibling and path.is_file():
                databases.append(path)
        return databases


class LocalFolder:
    """The folder of one task, on the node if possible: its live databases, and scratch space for its workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wrapper_file = path / "wrapper.sqlite"
        self.recorder_file = path / "recorder.sqlite"
        self.recorder_snapshot = path / "recorder.snapshot.sqlite"
        self.owner_file = path / "owner.json"  # locked by the task
        self.publisher_file = path / "publisher.lock"  # locked by a process that publishes for a killed task
        self.latest_file = path / "latest.json"  # the last reading of each device
        self.watched_file = path / "watched"  # touched by each reader of that file
        self.scratch = path / "scratch"
        self.mps = path / "mps"  # a link to the folder of the MPS daemons, whose path must be short

    @classmethod
    def create(cls, parent: Path, prefix: str) -> LocalFolder:
        """Create a new folder in ``parent``."""
        try:
            return cls(Path(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        except OSError as error:
            raise BadInput(
                f"no folder can be created in {parent}",
                why=error.strerror,
                fix="export TMPDIR=/a/local/folder   (in the job script, before badcjobs)",
            ) from error

    def remove(self) -> None:
        """Remove the folder and everything in it; if we are killed meanwhile, the next task removes the rest.

        It finds the owner file, which is removed last, and nothing to publish without the wrapper's file.
        """
        shutil.rmtree(self.mps.resolve(), ignore_errors=True)
        for path in sorted(self.path.glob("*"), key=lambda path: path != self.wrapper_file):
            if path != self.owner_file:
                shutil.rmtree(path, ignore_errors=True)
                with suppress(OSError):  # it was a folder
                    path.unlink()
        if not {*self.path.glob("*")} - {self.owner_file}:
            shutil.rmtree(self.path, ignore_errors=True)


# --- has a file changed? ----------------------------------------------------------------------------------------------

FileVersion = tuple[int, int, int]


def version_of(status: os.stat_result) -> FileVersion:
    """Return a value that changes when a file is replaced."""
    return status.st_mtime_ns, status.st_size, status.st_ino


def file_version(path: Path) -> FileVersion | None:
    """Return the version of a file; None: it does not exist."""
    try:
        return version_of(path.stat())
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Return the name of a user; a container may have no names, only numbers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- resources --------------------------------------------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder ``templates``, ``slurm`` or ``guide``.

    A wheel has the first two inside the package; a repository has them next to it, where users look for them.
    """
    for candidate in (_PACKAGE / "_shipped" / name, _PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise NotHere(
        f"the folder {name}/ is missing from this installation",
        why=f"it is neither in {_PACKAGE} nor next to it",
        fix="pip install --force-reinstall badcjobs",
    )


ANOTHER_CACHE = "try: export XDG_CACHE_HOME=/a/folder/that/jobs/can/write"


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache; None: no home folder is known."""
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "badcjobs"
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".cache/badcjobs"
    return None
