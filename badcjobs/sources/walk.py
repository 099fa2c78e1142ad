"""The state of one pass over all sources: cutting, row number, identities seen, mistakes; and reading files ahead."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import Chunk, Cutting
from badcjobs.sources.audio_files import NoAudio, ReadHeader
from badcjobs.sources.mistakes import Mistakes, Remarks


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard number ``index`` (from 0) of ``count``.

    Rows are numbered from 0 over all sources, so the shards are disjoint and together complete.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise _refusal(f"{self.index}/{self.count}", self.count)

    def takes(self, row_number: int) -> bool:
        return row_number % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(0, 1)


def parse_shard(text: str) -> Shard:
    """Parse ``2/8``: the third of eight shards."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise _refusal(text, 8)
    return Shard(int(match[1]), int(match[2]))


def _refusal(text: str, count: int) -> BadInput:
    last = f"; the last of {count} is {count - 1}/{count}" if count else ""
    why = f"a shard is I/N, where I counts from 0 and is less than N{last}"
    return BadInput(f"no such shard: {text!r}", why=why, fix=f"--shard 0/{count or 1}")


# --- looking at many files at a time ----------------------------------------------------------------------------------

# Opening a file on a shared filesystem is slow: a million files, one after another, take hours.
# A separate thread looks at the files, so that signals are handled while a call hangs. More threads start only if
# calls are slow: on a local disk sixteen threads need twice the time of one, because they compete for Python's lock.

THREADS = 16
_WINDOW = 512  # items in progress; while looks are quick, this many are handed over together
_QUICK_S = 0.0005  # a look on a local disk takes a fifth of this
_LONGEST_S = 0.005  # a longer look counts as this much: a single slow look is an exception
_SLOW_S = 0.02
_FAR_TOO_LONG_S = 0.5  # even for a single look: more threads start meanwhile
_WAIT_STEP_S = 0.2
_QUICK_WAIT_STEP_S = 0.02  # while one thread looks: has it become slow?

Thing = TypeVar("Thing")
Item = TypeVar("Item")
Question = TypeVar("Question")
Answer = TypeVar("Answer")


def do_nothing() -> None:
    """Do nothing while waiting."""


def look_ahead(
    asked: Iterable[tuple[Item, Question | None]],
    look: Callable[[Question], Answer],
    threads: int = THREADS,
    monotonic_s: Callable[[], float] = time.perf_counter,
    while_waiting: Callable[[], None] = do_nothing,
) -> Iterator[tuple[Item, Answer | None]]:
    """Yield each item, in order, with the answer to its question; None: it has no question.

    ``asked`` is read ahead by a bounded number of items. If it fails, the items before the failure are yielded first.
    ``look`` may be called by several threads; an error that it raises is raised at its item. ``while_waiting`` is
    called from time to time while no answer comes; an error that it raises ends everything immediately.
    """
    window: deque[tuple[Item, _Look | None]] = deque()
    pool = _LookThreads(look, threads, monotonic_s, while_waiting)
    failed: list[Exception] = []
    try:
        for item, question in _until_failure(asked, failed):
            if question is None and not window:
                yield item, None
                continue
            window.append((item, None if question is None else pool.ask(question)))
            if len(window) == _WINDOW:
                yield from pool.results(window)
        while window:
            yield from pool.results(window)
        pool.dismiss(wait=True)
    finally:
        pool.dismiss()
    if failed:
        raise failed[0]


def _until_failure(things: Iterable[Thing], failed: list[Exception]) -> Iterator[Thing]:
    try:
        yield from things
    except Exception as error:
        failed.append(error)


@dataclass(slots=True)
class _Look:
    """A question, and its answer or its error; locked until there is one. A Future takes ten times as long to make."""

    question: Any
    answer: Any = None
    error: Exception | None = None
    lock: Lock = field(default_factory=Lock)


@dataclass
class _LookThreads:
    """Threads that answer questions: one, for which the caller waits, and more if looks are slow.

    Not a ThreadPoolExecutor: at exit Python waits for its threads, even for one that hangs.
    """

    _look: Callable[[Any], Any]
    _most: int
    _monotonic_s: Callable[[], float]
    _while_waiting: Callable[[], None]
    _is_slow: bool = False
    _waited_s: float = 0.0  # lately, for looks that were not quick
    _began_s: float = math.inf  # the last look; there is none yet
    _threads: list[Thread] = field(default_factory=list)
    _held: list[_Look] = field(default_factory=list)  # while looks are quick, for the whole window
    _todo: SimpleQueue[_Look | None] = field(default_factory=SimpleQueue)
    _dismissed: bool = False

    def ask(self, question: object) -> _Look:
        """Take a question; it is handed over now if looks are slow, otherwise together with others."""
        look = _Look(question)
        look.lock.acquire()
        self._held.append(look)
        if self._is_slow:
            self._hand_over()
        return look

    def results(self, window: deque[tuple[Item, _Look | None]]) -> Iterator[tuple[Item, Any]]:
        """Yield the first items of a window with their answers, at least one; all of them while looks are quick."""
        self._while_waiting()  # the items themselves may also be slow
        if self._held:
            last = self._held[-1]
            self._hand_over()
            self._start_threads(1)
            self._wait_for(last, _QUICK_WAIT_STEP_S, until_slow=True)
        first = window[0][1]
        if first is not None and first.lock.locked():
            self._start_threads(min(self._most, len(window)))
            self._wait_for(first, _WAIT_STEP_S)
        while window and ((look := window[0][1]) is None or not look.lock.locked()):
            item, _ = window.popleft()
            if look is not None and look.error is not None:
                raise look.error
            yield item, None if look is None else look.answer

    def dismiss(self, *, wait: bool = False) -> None:
        """End all threads; ``wait`` for them only if no look is in progress, because it may hang."""
        self._dismissed = True
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _hand_over(self) -> None:
        for look in self._held:
            self._todo.put(look)
        self._held.clear()

    def _wait_for(self, look: _Look, step_s: float, *, until_slow: bool = False) -> None:
        """Wait for an answer; ``until_slow``: or until looks have become slow, so that more threads help."""
        while not (until_slow and self._is_slow):
            if look.lock.acquire(timeout=step_s):
                look.lock.release()
                return
            self._while_waiting()
            if self._monotonic_s() - self._began_s > _FAR_TOO_LONG_S:
                self._is_slow = True

    def _start_threads(self, most: int) -> None:
        while len(self._threads) < most:
            thread = Thread(target=self._work, name="badcjobs-look-ahead", daemon=True)  # Ctrl-C does not wait for it
            try:
                thread.start()
            except RuntimeError:  # ulimit -u: continue with the threads that there are
                if not self._threads:
                    raise
                self._most = len(self._threads)
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (look := self._todo.get()) is not None and not self._dismissed:
            began_s = self._began_s = self._monotonic_s()
            try:
                look.answer = self._look(look.question)
            except Exception as error:
                look.error = error
            took_s = min(self._monotonic_s() - began_s, _LONGEST_S)
            self._waited_s = max(0.0, self._waited_s + took_s - _QUICK_S)
            self._is_slow = self._is_slow or self._waited_s > _SLOW_S
            look.lock.release()


# --- walk -------------------------------------------------------------------------------------------------------------

_BUCKETS = 64  # the search for repeats needs memory for one bucket at a time


class SeenKeys:
    """Finds repeated keys, with eight bytes per key.

    It keeps hashes, so a repeat is only probable (for a million keys it is wrong once in thirty million times).
    """

    def __init__(self, keys: Iterable[Hashable] = ()) -> None:
        self._buckets = [array("q") for _ in range(_BUCKETS)]
        for key in keys:
            self.add(key)

    def add(self, key: Hashable) -> None:
        number = hash(key)
        self._buckets[number % _BUCKETS].append(number)

    def repeated(self) -> Counter[int]:
        """Map each hash that was added more than once to its number of repeats; twice is 1 repeat."""
        found: Counter[int] = Counter()
        for bucket in self._buckets:
            if len(set(bucket)) < len(bucket):
                found.update({number: times - 1 for number, times in Counter(bucket).items() if times > 1})
        return found


@dataclass
class Walk:
    """One pass over all sources, for the chunks of one shard."""

    shard: Shard
    mistakes: Mistakes
    cutting: Cutting
    remarks: Remarks
    read_header: ReadHeader  # may be called by several threads
    while_waiting: Callable[[], None] = do_nothing  # from time to time while files are slow; may raise to end the walk
    for_plan: bool = False  # then all headers are read
    rows: int = 0  # counted so far; the rows that are yielded may lag behind
    row: int = 0  # the number of the recording whose chunks are being yielded; not set for manifests
    # Seconds, by recording_id, for recordings whose header need not be read.
    lengths: Mapping[str, float] = field(default_factory=dict)
    left_out: Collection[str] = ()  # ids of recordings that have no place
    seen: SeenKeys = field(default_factory=SeenKeys)

    def takes(self, recording_id: str, chunk_id: str, *, to_cut: bool = False) -> bool:
        """Count one more row and return whether this shard takes it; ``to_cut``: a recording with all its chunks."""
        row_number = self.rows
        self.rows += 1
        if recording_id and chunk_id:
            self.seen.add((recording_id, chunk_id))
        return self.shard.takes(row_number) and recording_id not in self.left_out

    def may_look(self) -> bool:
        """Return whether to look at the next file of a manifest, even if its row has an end."""
        return True

    def add_missing(self, line: int, text: str, error: NoAudio, row: Chunk, fix: str | None = None) -> Iterator[Chunk]:
        """Report a row without audio; yield it anyway if such rows may fail later, each on its own.

        It is listed as a part of its file, so that an engine gets only this part if the file comes back.
        """
        self.mistakes.add(line, text, fix=fix or error.fix, missing=error.missing_at is not None)
        if error.missing_at is not None and self.remarks.keeps_missing:
            yield replace(row, audio_path=error.missing_at, is_cut=True)
