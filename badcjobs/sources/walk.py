"""The state of one pass over all sources: cutting, row number, identities seen, mistakes; and reading files ahead."""

from __future__ import annotations

import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import Chunk, Cutting
from badcjobs.sources.audio_files import NoAudio, ReadHeader
from badcjobs.sources.mistakes import Mistakes, Remarks


@dataclass(frozen=True)
class Shard:
    """Shard number ``index`` (from 0) of ``count``.

    Rows are numbered from 0 over all sources, so the shards are disjoint and together complete.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise _refusal(str(self))

    def takes(self, row_number: int) -> bool:
        return row_number % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(0, 1)


def parse_shard(text: str) -> Shard:
    """Parse ``2/8``: the third of eight shards."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise _refusal(text)
    return Shard(int(match[1]), int(match[2]))


def _refusal(text: str) -> BadInput:
    why = "a shard is I/N, where I counts from 0 and is less than N: the last of 8 is 7/8"
    return BadInput(f"no such shard: {text!r}", why=why, fix="--shard 0/8")


# --- looking at many files at a time ----------------------------------------------------------------------------------

# Opening a file on a shared filesystem is slow: a million files, one after another, take hours. A separate thread looks
# at the files, so that signals are handled while a call hangs. More threads start only if looks are slow: on a local
# disk sixteen threads need twice the time of one, because they compete for Python's lock.

_THREADS = 16
_WINDOW = 512  # items that are read ahead
_QUICK_S = 0.0005  # a look on a local disk takes a fifth of this
_SLOW_S = 0.25  # looks are slow if they take this much longer
_WAIT_STEP_S = 0.02

Item = TypeVar("Item")
Question = TypeVar("Question")
Answer = TypeVar("Answer")


def do_nothing() -> None:
    """Do nothing while waiting."""


def look_ahead(
    asked: Iterable[tuple[Item, Question | None]],
    look: Callable[[Question], Answer],
    while_waiting: Callable[[], None] = do_nothing,
) -> Iterator[tuple[Item, Answer | None]]:
    """Yield each item, in order, with the answer to its question; None: it has no question.

    ``asked`` is read ahead by a bounded number of items.
    ``look`` may be called by several threads; an error that it raises is raised at its item. ``while_waiting`` is
    called from time to time while no answer comes; an error that it raises ends everything immediately.
    """
    threads = _LookThreads(look, while_waiting)
    items = iter(asked)
    try:
        while window := list(islice(items, _WINDOW)):
            answers = threads.answer([question for _, question in window if question is not None])
            for item, question in window:
                yield item, None if question is None else next(answers)
    finally:
        threads.dismiss()


class _LookThreads:
    """Threads that answer questions: one, and more as soon as looks are slow.

    Not a ThreadPoolExecutor: at exit Python waits for its threads, even for one that hangs.
    """

    def __init__(self, look: Callable[[Any], Any], while_waiting: Callable[[], None]) -> None:
        self._look = look
        self._while_waiting = while_waiting
        self._threads = 0
        self._todo: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Any, Exception | None]] = SimpleQueue()
        self._dismissed = False

    def answer(self, questions: Sequence[Any]) -> Iterator[Any]:
        """Yield the answers to these questions, after all of them are there."""
        self._while_waiting()  # the questions themselves may also be slow
        for numbered in enumerate(questions):
            self._todo.put(numbered)
        if questions:
            self._start_threads(1)
        answers: dict[int, tuple[Any, Exception | None]] = {}
        began_s = time.monotonic()
        while len(answers) < len(questions):
            try:
                number, answer, error = self._done.get(timeout=_WAIT_STEP_S)
                answers[number] = answer, error
            except Empty:
                self._while_waiting()
            if time.monotonic() - began_s > _SLOW_S + _QUICK_S * len(answers):
                self._start_threads(_THREADS)
        for number in range(len(questions)):
            answer, error = answers[number]
            if error is not None:
                raise error
            yield answer

    def dismiss(self) -> None:
        """End all threads, without waiting for a look that may hang."""
        self._dismissed = True
        for _ in range(self._threads):
            self._todo.put(None)

    def _start_threads(self, wanted: int) -> None:
        while self._threads < wanted:
            thread = Thread(
                target=self._work,
                name="badcjobs-look-ahead",
                daemon=True,
            )  # Ctrl-C does not wait for it
            try:
                thread.start()
            except RuntimeError:  # ulimit -u: continue with the threads that there are
                if not self._threads:
                    raise
                return
            self._threads += 1

    def _work(self) -> None:
        while (numbered := self._todo.get()) is not None and not self._dismissed:
            number, question = numbered
            try:
                self._done.put((number, self._look(question), None))
            except Exception as error:
                self._done.put((number, None, error))


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

    def add_missing(
        self,
        line: int,
        text: str,
        error: NoAudio,
        row: Chunk,
    ) -> Iterator[Chunk]:
        """Report a row without audio; yield it anyway if such rows may fail later, each on its own.

        It is listed as a part of its file, so that an engine gets only this part if the file comes back.
        """
        self.mistakes.add(
            line,
            text,
            fix=error.fix,
            missing=error.missing_at is not None,
        )
        if error.missing_at is not None and self.remarks.keeps_missing:
            yield replace(row, audio_path=error.missing_at, is_cut=True)
