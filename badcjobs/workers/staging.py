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
from enum import Enum
from pathlib import Path

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


def choose_staging(setting: str, chunks: Sequence[Chunk], local: Path) -> Decision:
    """Decide by the filesystems of some chunks and of the node-local folder; ``setting`` is auto, always or never."""
    if setting != "auto":
        return Decision.of(Code.STAGE_ALL if setting == "always" else Code.STAGE_NOTHING, setting=setting)
    if not chunks:
        return Decision.of(Code.STAGE_NOTHING_WAITS)

    here = read_filesystem(local)
    # Resolve links: a git-annex link may lead to another filesystem.
    folders = dict.fromkeys(Path(os.path.realpath(chunk.audio_path)).parent for chunk in chunks)
    disks = {str(folder): read_filesystem(folder) for folder in folders}
    far = next((folder for folder, disk in disks.items() if disk.shared), None)
    if far is None:
        is_cut = any(chunk.is_cut for chunk in chunks) and not here.shared
        return Decision.of(Code.STAGE_CUTS if is_cut else Code.STAGE_NOTHING, source=next(iter(disks)))
    figures = {"local": str(local), "local_disk": here.description}
    if here.shared:
        return Decision.of(Code.STAGE_NOTHING, **figures)
    return Decision.of(Code.STAGE_ALL, source=far, source_disk=disks[far].description, **figures)


def find_most_bytes(local: Path) -> int:
    """Return how many bytes of audio may be staged in a folder at the same time."""
    return _MOST_BYTES_IN_MEMORY if read_filesystem(local).kind in _IN_MEMORY else MOST_STAGED_BYTES


# --- one copy ---------------------------------------------------------------------------------------------------------


class State(Enum):
    """What has become of a copy."""

    PLANNED = "it waits for disk space"
    IN_PROGRESS = "it is being written"
    READY = "it waits for an engine"
    TAKEN = "an engine reads it"


@dataclass(eq=False)
class Copy:
    """The copy of one chunk's audio, in its own folder because it keeps the name of the original."""

    chunk: Chunk
    path: Path
    end_ms: int | None  # in a truncated recording, the end of the file
    state: State = State.PLANNED
    size_bytes: int = 0  # 0: not known yet, and nothing written

    @property
    def is_complete(self) -> bool:
        """Whether it still exists in full size: many sites delete old files in /tmp."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:
            return False

    def write(self, cutter: AudioCutter) -> None:
        """Copy the chunk's audio, or cut it out of a longer file.

        Raise CannotCut if the file is missing or has changed since it was listed, OSError if the disk fails.
        """
        check_audio(self.chunk)
        self.path.parent.mkdir()
        if self.chunk.is_cut:
            self.end_ms = cut_chunk(self.chunk, self.path, cutter)
        else:
            shutil.copyfile(self.chunk.audio_path, self.path)
        check_audio(self.chunk)  # the file may have changed in the meantime
        self.size_bytes = self.path.stat().st_size

    def remove(self) -> None:
        """Remove what is written of it."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def size_of(chunk: Chunk, cutter: AudioCutter) -> int:
    """Return the approximate size of a copy in bytes; raise OSError if the file cannot be read."""
    if chunk.is_cut:
        return cutter.size_bytes(Path(chunk.audio_path), *stretch_of(chunk))
    return os.stat(chunk.audio_path).st_size  # noqa: PTH116 - the path as given


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
    from_source: int = 0
    cut_late: int = 0
    _failures: int = 0  # in a row
    _number: int = 0
    _stopped: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: dict[ChunkKey, Copy] = {}  # those that are wanted
        self._not_copied: set[ChunkKey] = set()  # chunks without a usable copy: the engine reads the original
        self._readers = [threading.Thread(target=self._run, name=f"reader-{n}", daemon=True) for n in range(_READERS)]

    # --- for the task ---------------------------------------------------------------------------------------------

    def start(
        self,
        upcoming: Upcoming,
        *,
        only_cuts: bool,
        most_bytes: int,
    ) -> None:
        """Start to copy the next chunks, or only those that must be cut out of longer files.

        All copies use at most ``most_bytes`` and a quarter of the free space.
        """
        self._upcoming = upcoming
        self._only_cuts = only_cuts
        self._most_bytes = most_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("audio is not staged: %s", error)
            return
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Stop the readers and remove all copies."""
        self.drop()
        for reader in self._readers:
            if reader.ident is not None:
                reader.join(_JOIN_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def drop(self) -> None:
        """Make no more copies, and remove those that no engine uses yet: the disk is full, or fails."""
        with self._changed:
            self._stopped = True
            for copy in list(self._copies.values()):
                if copy.state is State.READY:
                    del self._copies[copy.chunk.key]
                    copy.remove()
            self._changed.notify_all()

    # --- for the engines ------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> Chunk:
        """Return the chunk with the path of its copy, or unchanged if there is no copy yet.

        Wait for a chunk that is being cut, or cut it now; in a truncated recording it ends at the end of the file.
        Raise CannotCut if that fails, or if the file is missing or has changed; OSError if the disk cannot be written.
        """
        copy = self._take_ready(chunk)
        if copy is None:
            check_audio(chunk)
            if not chunk.is_cut:
                self.from_source += 1
                return chunk
            copy = self._cut_now(chunk)
        return replace(
            chunk,
            audio_path=str(copy.path),
            is_cut=False,
            end_ms=copy.end_ms,
        )

    def _take_ready(self, chunk: Chunk) -> Copy | None:
        """Return the copy of a chunk, if it is ready; otherwise it is not wanted any more."""
        with self._changed:
            copy = self._copies.get(chunk.key)
            while copy is not None and copy.state is State.IN_PROGRESS and chunk.is_cut:
                self._changed.wait(_POLL_S)
                copy = self._copies.get(chunk.key)
            if copy is None or copy.state is not State.READY or not copy.is_complete:
                self._copies.pop(chunk.key, None)
                return None
            copy.state = State.TAKEN
            self.staged += 1
            self._changed.notify_all()
            return copy

    def _cut_now(self, chunk: Chunk) -> Copy:
        """Cut a chunk in this thread."""
        with self._changed:
            self.cut_late += 1
            copy = self._new_copy(chunk)
            copy.state = State.TAKEN
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            copy.write(self.cutter)
        except BaseException:
            self.release(chunk)
            raise
        return copy

    def release(self, chunk: Chunk, *, failed: bool = False) -> bool:
        """Remove a chunk's copy; return whether it was still complete. A failed chunk is not copied again."""
        with self._changed:
            copy = self._copies.pop(chunk.key, None)
            if failed:
                self._not_copied.add(chunk.key)
            self._changed.notify_all()
        if copy is None or copy.state is not State.TAKEN:
            return True
        is_complete = copy.is_complete
        copy.remove()
        return is_complete

    # --- in a reader thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (copy := self._next()) is not None:
            is_offered = False
            try:
                if self._wait_for_room(copy):
                    copy.write(self.cutter)
                    self._failures = 0
                    is_offered = self._offer(copy)
            except CannotCut:
                pass  # the engine will meet the same error and report it
            except OSError as error:
                self._note_failure(f"{copy.chunk.audio_path}: {error.strerror or error}")
            if not is_offered:
                self._discard(copy)

    def _next(self) -> Copy | None:
        """Wait for a chunk to copy; None: staging has stopped."""
        with self._changed:
            while not self._stopped:
                waiting = sum(copy.state is not State.TAKEN for copy in self._copies.values())
                if waiting < self.ahead:
                    for chunk in self._upcoming(self.ahead):
                        if self._is_worth_a_copy(chunk):
                            return self._new_copy(chunk)
                self._changed.wait(_POLL_S)
            return None

    def _wait_for_room(self, copy: Copy) -> bool:
        """Wait until the disk has space for the copy; return False if it is too large or no longer wanted."""
        size_bytes = size_of(copy.chunk, self.cutter)
        with self._changed:
            while self._is_wanted(copy):
                held = sum(held_copy.size_bytes for held_copy in self._copies.values())
                limit = min(self._most_bytes, int(_SHARE * (shutil.disk_usage(self.folder).free + held)))
                if size_bytes > limit:
                    return False
                if held + size_bytes <= limit:
                    copy.size_bytes = size_bytes
                    copy.state = State.IN_PROGRESS
                    return True
                self._changed.wait(_POLL_S)
            return False

    def _offer(self, copy: Copy) -> bool:
        with self._changed:
            is_wanted = self._is_wanted(copy)
            if is_wanted:
                copy.state = State.READY
            self._changed.notify_all()
        return is_wanted

    def _note_failure(self, why: str) -> None:
        """Count a failed copy; stop after too many in a row: the disk is full, or fails."""
        with self._changed:
            self._failures += 1
            if self._failures >= _MOST_FAILURES and not self._stopped:
                self._stopped = True
                log.warning("staging stops after %d failed copies in a row: %s", self._failures, why)

    def _discard(self, copy: Copy) -> None:
        """Remove a copy that cannot be used, and plan it no more."""
        with self._changed:
            if self._copies.get(copy.chunk.key) is copy:
                del self._copies[copy.chunk.key]
                self._not_copied.add(copy.chunk.key)
            self._changed.notify_all()
        copy.remove()

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _is_wanted(self, copy: Copy) -> bool:
        return self._copies.get(copy.chunk.key) is copy and not self._stopped

    def _is_worth_a_copy(self, chunk: Chunk) -> bool:
        if chunk.key in self._copies or chunk.key in self._not_copied:
            return False
        return chunk.is_cut or not self._only_cuts

    def _new_copy(self, chunk: Chunk) -> Copy:
        self._number += 1
        name = cut_name(chunk) if chunk.is_cut else Path(chunk.audio_path).name
        copy = Copy(chunk, self.folder / str(self._number) / name, chunk.end_ms)
        self._copies[chunk.key] = copy
        return copy
