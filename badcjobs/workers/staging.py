"""Copies the audio of the chunks that come next to the node's own disk, by a few reader threads.

A copy is a favour, never a condition: what is not ready when an engine wants it is read where it lies. The copy of a
chunk that is a stretch of a longer file is cut out of it; that is a condition: one that is not ready is made there and
then. ``feed`` hands the copies to the engines; ``choose_staging`` decides whether copies are made ahead.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from badcjobs.model import Chunk
from badcjobs.sources.cutter import AudioCutter, CannotCut
from badcjobs.store.connect import read_filesystem
from badcjobs.workers.chunk_audio import check_audio, cut_chunk, cut_name, stretch_of

log = logging.getLogger(__name__)

Upcoming = Callable[[int], list[Chunk]]  # so many of the chunks that are handed out next, and none of them taken

_READERS = 3
_SHARE = 0.25  # of what is free: workers, databases and other people's jobs need the disk too
_LOOK_AGAIN_S = 0.2  # fresh chunks come to the queue, and room to the disk, without a word to us
_GOODBYE_S = 1.0  # a reader that hangs in a dead filesystem is not waited for
_MOST_FAILURES = 20  # in a row
_MOST_BYTES = 20 * 2**30
_MOST_BYTES_IN_MEMORY = 2**30  # a tmpfs is the job's own memory
_IN_MEMORY = ("tmpfs", "ramfs")


# --- whether ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StagingChoice:
    """Whether audio is staged, why, and how much of it at once; or only what has to be cut out of longer files."""

    staged: bool
    why: str
    most_bytes: int = 0
    only_cuts: bool = False


def choose_staging(wanted: str, chunks: Sequence[Chunk], local: Path) -> StagingChoice:
    """Look at the filesystems of some chunks and of the node's own folder; ``wanted`` is auto, always or never."""
    here = read_filesystem(local)
    most_bytes = _MOST_BYTES_IN_MEMORY if here.kind in _IN_MEMORY else _MOST_BYTES
    if wanted != "auto":
        return StagingChoice(wanted == "always", f"run.stage = {wanted}", most_bytes)
    if not chunks:
        return StagingChoice(False, "nothing waits")
    # Where the audio really lies: a git-annex link may lead to another filesystem.
    folders = list(dict.fromkeys(Path(os.path.realpath(chunk.audio_path)).parent for chunk in chunks))
    far = next((folder for folder in folders if read_filesystem(folder).shared), None)
    if far is not None and here.shared:
        return StagingChoice(False, f"{local} is no node-local disk ({here.words})")
    if far is not None:
        return StagingChoice(True, f"{far} is on {read_filesystem(far).words}, {local} on {here.words}", most_bytes)
    only_cuts = any(chunk.is_cut for chunk in chunks) and not here.shared
    return StagingChoice(only_cuts, f"{folders[0]} is local", most_bytes if only_cuts else 0, only_cuts)


# --- one copy ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Copy:
    """One chunk's audio on the node; one folder each, because engines use the file's name."""

    chunk: Chunk
    path: Path
    size_bytes: int = 0  # 0: not known yet, and nothing written
    end_ms: int | None = None  # of a cut: where its audio really ends
    waits: bool = False  # for room
    ready: bool = False
    taken: bool = False
    unwanted: bool = False  # an engine has begun with the original

    @property
    def is_sound(self) -> bool:
        """Whether it is still as it was written: many sites sweep their /tmp."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:
            return False

    def remove(self) -> None:
        """Give the space back."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def size_of(chunk: Chunk, cutter: AudioCutter) -> int:
    """Return how many bytes a copy of a chunk's audio takes, about; raise OSError where it cannot be looked at."""
    if chunk.is_cut:
        return cutter.size_bytes(Path(chunk.audio_path), *stretch_of(chunk))
    return os.stat(chunk.audio_path).st_size  # noqa: PTH116 - a path as it came, in a shared place


def make_copy(copy: Copy, cutter: AudioCutter) -> bool:
    """Copy a chunk's audio, or cut it out of a longer file; return False when a copy is not what it should be.

    Raise CannotCut where the file is missing, or another one than was listed.
    """
    check_audio(copy.chunk)
    copy.path.parent.mkdir()
    if copy.chunk.is_cut:
        copy.end_ms = cut_chunk(copy.chunk, copy.path, cutter)
        check_audio(copy.chunk)  # it may have been replaced while it was read
        copy.size_bytes = copy.path.stat().st_size
        return True
    source = Path(copy.chunk.audio_path)
    before = source.stat()
    shutil.copyfile(source, copy.path)
    after = source.stat()
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return same and copy.path.stat().st_size == before.st_size


# --- all copies -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stager:
    """Keeps copies of the next chunks ready; ``take`` hands one out, ``release`` removes it.

    Without ``start`` nothing is made before it is wanted, and only what has to be cut.
    """

    folder: Path  # made when it is needed, gone after ``stop``; nothing else may be in it
    _: KW_ONLY
    ahead: int  # at most so many chunks that no worker has taken yet have a copy
    cutter: AudioCutter
    staged: int = 0
    staged_bytes: int = 0
    from_source: int = 0
    cut_late: int = 0
    failed_copies: int = 0
    last_failure: str | None = None
    _failures: int = 0  # in a row
    _number: int = 0
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._planned: dict[tuple[str, str], Chunk] = {}
        self._copies: dict[tuple[str, str], Copy] = {}
        self._hopeless: set[tuple[str, str]] = set()  # no copy, or one that did not serve: read where they lie
        self._readers = [threading.Thread(target=self._run, name=f"reader-{n}", daemon=True) for n in range(_READERS)]

    # --- for the task ---------------------------------------------------------------------------------------------

    def start(self, upcoming: Upcoming, *, most_bytes: int, only_cuts: bool = False) -> None:
        """Begin to copy what comes next; all copies together take ``most_bytes`` or a quarter of what is free.

        ``only_cuts``: make no copies of whole files.
        """
        self._upcoming = upcoming
        self._most_bytes = most_bytes
        self._only_cuts = only_cuts
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("audio is not staged: %s", error)
            return
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Leave nothing behind."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for reader in self._readers:
            if reader.ident is not None:
                reader.join(_GOODBYE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def ready(self) -> int:
        """How many copies wait for an engine."""
        with self._changed:
            return sum(copy.ready for copy in self._waiting())

    # --- for the engines ------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the path of its copy, or as it is when there is none yet.

        One in which its recording breaks off ends there.
        What has to be cut is waited for, or cut now: raise CannotCut, or OSError where the disk will not have it.
        CannotCut also where the file is missing, or another one than was listed.
        """
        with self._changed:
            copy = self._ready_copy(chunk)
        if copy is None:
            check_audio(chunk)
            if not chunk.is_cut:
                with self._changed:
                    self.from_source += 1
                return chunk
            copy = self._cut_now(chunk)
        end_ms = copy.end_ms if chunk.is_cut else chunk.end_ms
        return replace(chunk, audio_path=str(copy.path), is_cut=False, end_ms=end_ms)

    def _ready_copy(self, chunk: Chunk) -> Copy | None:
        self._planned.pop(chunk.key, None)
        self._changed.notify_all()
        while (copy := self._copies.get(chunk.key)) is not None:
            if not chunk.is_cut or copy.ready or copy.taken or copy.waits or copy.unwanted:
                break
            self._changed.wait(_LOOK_AGAIN_S)  # it is in the making, and will be ready before long
        is_same = copy is not None and chunk.audio_path == copy.chunk.audio_path  # a piece of a chunk is not the whole
        if copy is not None and copy.ready and not copy.taken and is_same and copy.is_sound:
            copy.taken = True
            self.staged += 1
            self.staged_bytes += copy.size_bytes
            return copy
        if copy is not None:
            copy.unwanted = True
        return None

    def _cut_now(self, chunk: Chunk) -> Copy:
        """Cut in the caller's thread; what waits on the disk for others makes room."""
        size_bytes = size_of(chunk, self.cutter)
        with self._changed:
            self.cut_late += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < size_bytes:
                for other in [copy for copy in self._waiting() if copy.ready]:
                    del self._copies[other.chunk.key]
                    other.remove()
            copy = self._begin(chunk)
            copy.taken, copy.size_bytes = True, size_bytes
        try:
            make_copy(copy, self.cutter)
        except BaseException:
            self.release(chunk)
            raise
        return copy

    def release(self, chunk: Chunk, *, failed: bool = False) -> bool:
        """Remove a chunk's copy; return whether it was sound to the end. What has failed is not copied again."""
        with self._changed:
            copy = self._copies.get(chunk.key)
            if copy is None or not (copy.taken or copy.ready):
                return True
            del self._copies[chunk.key]
            if failed:
                self._hopeless.add(chunk.key)
            self._changed.notify_all()
        sound = copy.is_sound or not copy.taken
        copy.remove()
        return sound

    # --- in a reader's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            ready, why = False, None
            try:
                ready = self._wait_for_room(copy) and make_copy(copy, self.cutter)
            except CannotCut:
                pass  # the engine that wants it will find out, and say so
            except OSError as error:
                why = f"{copy.chunk.audio_path}: {error.strerror or error}"
            self._settle(copy, ready=ready, why=why)

    def _next(self) -> Copy | None:
        """Wait for something to copy; None: the end."""
        with self._changed:
            while not self._stopped:
                self._plan()
                if self._planned:
                    return self._begin(self._planned.pop(next(iter(self._planned))))
                self._changed.wait(_LOOK_AGAIN_S)
            return None

    def _plan(self) -> None:
        """Ask what comes next when half of what was ready is gone."""
        waiting = len(self._waiting())
        if self._planned or waiting > self.ahead // 2:
            return
        fresh = [
            (chunk.key, chunk)
            for chunk in self._upcoming(self.ahead)
            if chunk.key not in self._copies
            and chunk.key not in self._hopeless
            and (chunk.is_cut or not self._only_cuts)
        ]
        self._planned.update(fresh[: self.ahead - waiting])

    def _waiting(self) -> list[Copy]:
        return [copy for copy in self._copies.values() if not (copy.taken or copy.unwanted)]

    def _begin(self, chunk: Chunk) -> Copy:
        self._number += 1
        name = cut_name(chunk) if chunk.is_cut else Path(chunk.audio_path).name
        copy = self._copies[chunk.key] = Copy(chunk, self.folder / str(self._number) / name)
        return copy

    def _wait_for_room(self, copy: Copy) -> bool:
        """Wait until the copy has its place on the disk; return False when it is too large or no longer wanted."""
        size_bytes = size_of(copy.chunk, self.cutter)
        with self._changed:
            copy.waits = True
            try:
                while not (self._stopped or copy.unwanted):
                    held = sum(other.size_bytes for other in self._copies.values())
                    limit = min(self._most_bytes, int(_SHARE * (shutil.disk_usage(self.folder).free + held)))
                    if size_bytes > limit:
                        return False
                    first = next(other for other in self._copies.values() if other.waits)  # its chunk is needed before
                    if held + size_bytes <= limit and first is copy:
                        copy.size_bytes = size_bytes
                        return True
                    self._changed.wait(_LOOK_AGAIN_S)
                return False
            finally:
                copy.waits = False
                self._changed.notify_all()

    def _settle(self, copy: Copy, *, ready: bool, why: str | None) -> None:
        with self._changed:
            copy.ready = ready and not (copy.unwanted or self._stopped)
            if not copy.ready:
                if self._copies.get(copy.chunk.key) is copy:  # else an engine did not wait, and has cut its own
                    del self._copies[copy.chunk.key]
                if not copy.unwanted:
                    self._hopeless.add(copy.chunk.key)
            self._failures = self._failures + 1 if why else 0
            if why is not None:
                self.failed_copies += 1
                self.last_failure = why
            if self._failures >= _MOST_FAILURES and not self._stopped:
                self._stopped = True
                log.warning("staging ends, %d copies in a row failed: %s", self._failures, why)
            self._changed.notify_all()
        if not copy.ready:
            copy.remove()
