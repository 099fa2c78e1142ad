"""Copies the audio of the next chunks to the node's local disk, in a few reader threads.

A copy is optional: if it is not ready when an engine needs it, the engine reads the original. A chunk that is part of a
longer file must be cut out of it; if that is not ready, it is cut when the engine needs it. ``feed`` gives the copies
to the engines; ``choose_staging`` decides whether copies are made in advance.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import Chunk, ChunkKey
from badcjobs.model.decisions import Code, Decision
from badcjobs.sources.cutter import AudioCutter, CannotCut
from badcjobs.store.connect import read_filesystem
from badcjobs.workers.chunk_audio import check_audio, cut_chunk, cut_name, stretch_of

log = logging.getLogger(__name__)

Upcoming = Callable[[int], list[Chunk]]  # the next N chunks of the queue, without taking them

_READERS = 3
_SHARE = 0.25  # of the free space: workers, databases and other users' jobs need the disk too
_POLL_S = 0.2  # new chunks in the queue and free disk space cause no notification
_JOIN_S = 1.0  # do not wait longer for a reader that hangs in a dead filesystem
_MOST_FAILURES = 20  # in a row
MOST_STAGED_BYTES = 20 * 2**30
_MOST_BYTES_IN_MEMORY = 2**30  # a tmpfs uses the memory of the job
_IN_MEMORY = ("tmpfs", "ramfs")


# --- the decision -----------------------------------------------------------------------------------------------------


class StagingChoice(NamedTuple):
    """Whether audio is staged, and how many bytes at the same time."""

    decision: Decision
    most_bytes: int = 0

    @property
    def staged(self) -> bool:
        return self.decision.code in (Code.STAGE_ALL, Code.STAGE_CUTS)

    @property
    def only_cuts(self) -> bool:
        """Whether to copy only chunks that must be cut out of longer files."""
        return self.decision.code == Code.STAGE_CUTS


def choose_staging(setting: str, chunks: Sequence[Chunk], local: Path) -> StagingChoice:
    """Decide by the filesystems of some chunks and of the node-local folder; ``setting`` is auto, always or never."""
    here = read_filesystem(local)
    most_bytes = _MOST_BYTES_IN_MEMORY if here.kind in _IN_MEMORY else MOST_STAGED_BYTES
    if setting != "auto":
        code = Code.STAGE_ALL if setting == "always" else Code.STAGE_NOTHING
        return StagingChoice(Decision.of(code, setting=setting), most_bytes)
    if not chunks:
        return StagingChoice(Decision.of(Code.STAGE_NOTHING_WAITS))

    # Resolve links: a git-annex link may lead to another filesystem.
    folders = list(dict.fromkeys(Path(os.path.realpath(chunk.audio_path)).parent for chunk in chunks))
    far = next((folder for folder in folders if read_filesystem(folder).shared), None)
    if far is not None and here.shared:
        return StagingChoice(Decision.of(Code.STAGE_NOTHING, local=str(local), local_disk=here.description))
    if far is not None:
        disks = {"source_disk": read_filesystem(far).description, "local_disk": here.description}
        return StagingChoice(Decision.of(Code.STAGE_ALL, source=str(far), local=str(local), **disks), most_bytes)
    if any(chunk.is_cut for chunk in chunks) and not here.shared:
        return StagingChoice(Decision.of(Code.STAGE_CUTS, source=str(folders[0])), most_bytes)
    return StagingChoice(Decision.of(Code.STAGE_NOTHING, source=str(folders[0])))


# --- one copy ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Copy:
    """The copy of one chunk's audio, in its own folder because it keeps the name of the original."""

    chunk: Chunk
    path: Path
    size_bytes: int = 0  # 0: not known yet, and nothing written
    end_ms: int | None = None  # of a cut: the real end of its audio
    waits: bool = False  # for disk space
    ready: bool = False
    taken: bool = False
    unwanted: bool = False  # an engine already reads the original

    @property
    def is_complete(self) -> bool:
        """Whether it still exists in full size: many sites delete old files in /tmp."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:
            return False


def size_of(chunk: Chunk, cutter: AudioCutter) -> int:
    """Return the approximate size of a copy in bytes; raise OSError if the file cannot be read."""
    if chunk.is_cut:
        return cutter.size_bytes(Path(chunk.audio_path), *stretch_of(chunk))
    return os.stat(chunk.audio_path).st_size  # noqa: PTH116 - the path as given


def make_copy(copy: Copy, cutter: AudioCutter) -> bool:
    """Copy a chunk's audio, or cut it out of a longer file; return False if the file changed while it was copied.

    Raise CannotCut if the file is missing or has changed since it was listed.
    """
    check_audio(copy.chunk)
    copy.path.parent.mkdir()
    if copy.chunk.is_cut:
        copy.end_ms = cut_chunk(copy.chunk, copy.path, cutter)
        check_audio(copy.chunk)  # the file may have changed in the meantime
        copy.size_bytes = copy.path.stat().st_size
        return True
    source = Path(copy.chunk.audio_path)
    before = source.stat()
    shutil.copyfile(source, copy.path)
    after = source.stat()
    is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return is_same and copy.path.stat().st_size == before.st_size


# --- all copies -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stager:
    """Keeps copies of the next chunks ready; ``take`` hands one out, ``release`` removes it.

    Without ``start`` it makes no copies in advance; it only cuts chunks when they are needed.
    """

    folder: Path  # created on demand, removed by ``stop``; for copies only
    _: KW_ONLY
    ahead: int  # the most copies that wait for a worker
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
        self._planned: dict[ChunkKey, Chunk] = {}
        self._copies: dict[ChunkKey, Copy] = {}
        self._not_copied: set[ChunkKey] = set()  # chunks without a usable copy: the engine reads the original
        self._readers = [threading.Thread(target=self._run, name=f"reader-{n}", daemon=True) for n in range(_READERS)]

    # --- for the task ---------------------------------------------------------------------------------------------

    def start(self, upcoming: Upcoming, choice: StagingChoice) -> None:
        """Start to copy the next chunks; all copies use at most ``most_bytes`` and a quarter of the free space."""
        self._upcoming = upcoming
        self._choice = choice
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("audio is not staged: %s", error)
            return
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Stop the readers and remove all copies."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for reader in self._readers:
            if reader.ident is not None:
                reader.join(_JOIN_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def drop(self) -> None:
        """Make no more copies, and remove those that no engine uses yet: the disk is full, or fails."""
        with self._changed:
            self._stopped = True
            self._drop_ready()
            self._changed.notify_all()

    def _drop_ready(self) -> None:
        for copy in self._waiting():
            if copy.ready:
                del self._copies[copy.chunk.key]
                shutil.rmtree(copy.path.parent, ignore_errors=True)

    @property
    def ready(self) -> int:
        """How many copies wait for an engine."""
        with self._changed:
            return sum(copy.ready for copy in self._waiting())

    # --- for the engines ------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the path of its copy, or unchanged if there is no copy yet.

        Wait for a chunk that is being cut, or cut it now; in a truncated recording it ends at the end of the file.
        Raise CannotCut if that fails, or if the file is missing or has changed; OSError if the disk cannot be written.
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
            self._changed.wait(_POLL_S)  # a reader is writing it
        is_same = copy is not None and chunk.audio_path == copy.chunk.audio_path  # not a piece of the chunk
        if copy is not None and copy.ready and not copy.taken and is_same and copy.is_complete:
            copy.taken = True
            self.staged += 1
            self.staged_bytes += copy.size_bytes
            return copy
        if copy is not None:
            copy.unwanted = True
        return None

    def _cut_now(self, chunk: Chunk) -> Copy:
        """Cut a chunk in this thread; remove waiting copies if the disk is full."""
        size_bytes = size_of(chunk, self.cutter)
        with self._changed:
            self.cut_late += 1
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < size_bytes:
                self._drop_ready()
            copy = self._new_copy(chunk)
            copy.taken = True
            copy.size_bytes = size_bytes
        try:
            make_copy(copy, self.cutter)
        except BaseException:
            self.release(chunk)
            raise
        return copy

    def release(self, chunk: Chunk, *, failed: bool = False) -> bool:
        """Remove a chunk's copy; return whether it was still complete. A failed chunk is not copied again."""
        with self._changed:
            copy = self._copies.get(chunk.key)
            if copy is None or not (copy.taken or copy.ready):
                return True
            del self._copies[chunk.key]
            if failed:
                self._not_copied.add(chunk.key)
            self._changed.notify_all()
        complete = copy.is_complete or not copy.taken
        shutil.rmtree(copy.path.parent, ignore_errors=True)
        return complete

    # --- in a reader thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            ready = False
            why = None
            try:
                ready = self._wait_for_room(copy) and make_copy(copy, self.cutter)
            except CannotCut:
                pass  # the engine will meet the same error and report it
            except OSError as error:
                why = f"{copy.chunk.audio_path}: {error.strerror or error}"
            self._settle(copy, ready=ready, why=why)

    def _next(self) -> Copy | None:
        """Wait for a chunk to copy; None: staging has stopped."""
        with self._changed:
            while not self._stopped:
                self._plan()
                if self._planned:
                    return self._new_copy(self._planned.pop(next(iter(self._planned))))
                self._changed.wait(_POLL_S)
            return None

    def _plan(self) -> None:
        """Get the next chunks from the queue when less than half of the copies are left."""
        waiting = len(self._waiting())
        if self._planned or waiting > self.ahead // 2:
            return
        for chunk in self._upcoming(self.ahead):
            if len(self._planned) >= self.ahead - waiting:
                break
            if self._is_worth_a_copy(chunk):
                self._planned[chunk.key] = chunk

    def _is_worth_a_copy(self, chunk: Chunk) -> bool:
        if chunk.key in self._copies or chunk.key in self._not_copied:
            return False
        return chunk.is_cut or not self._choice.only_cuts

    def _waiting(self) -> list[Copy]:
        return [copy for copy in self._copies.values() if not (copy.taken or copy.unwanted)]

    def _new_copy(self, chunk: Chunk) -> Copy:
        self._number += 1
        name = cut_name(chunk) if chunk.is_cut else Path(chunk.audio_path).name
        copy = Copy(chunk, self.folder / str(self._number) / name)
        self._copies[chunk.key] = copy
        return copy

    def _wait_for_room(self, copy: Copy) -> bool:
        """Wait until the disk has space for the copy; return False if it is too large or no longer needed."""
        size_bytes = size_of(copy.chunk, self.cutter)
        with self._changed:
            copy.waits = True
            try:
                while not (self._stopped or copy.unwanted):
                    held = sum(other.size_bytes for other in self._copies.values())
                    limit = min(self._choice.most_bytes, int(_SHARE * (shutil.disk_usage(self.folder).free + held)))
                    if size_bytes > limit:
                        return False
                    first = next(other for other in self._copies.values() if other.waits)  # its chunk is needed earlier
                    if held + size_bytes <= limit and first is copy:
                        copy.size_bytes = size_bytes
                        return True
                    self._changed.wait(_POLL_S)
                return False
            finally:
                copy.waits = False
                self._changed.notify_all()

    def _settle(self, copy: Copy, *, ready: bool, why: str | None) -> None:
        with self._changed:
            copy.ready = ready and not (copy.unwanted or self._stopped)
            if not copy.ready:
                if self._copies.get(copy.chunk.key) is copy:  # otherwise an engine has cut its own copy
                    del self._copies[copy.chunk.key]
                if not copy.unwanted:
                    self._not_copied.add(copy.chunk.key)
            self._failures = self._failures + 1 if why else 0
            if why is not None:
                self.failed_copies += 1
                self.last_failure = why
            if self._failures >= _MOST_FAILURES and not self._stopped:
                self._stopped = True
                log.warning("staging stops after %d failed copies in a row: %s", self._failures, why)
            self._changed.notify_all()
        if not copy.ready:
            shutil.rmtree(copy.path.parent, ignore_errors=True)
