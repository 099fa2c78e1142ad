"""Looks at files, many at a time: on a shared filesystem each look waits, and a million of them in turn wait for hours.

One thread looks, and we wait for it, so that a signal is heard also while a look hangs. More threads are started once
looks have taken long. Where they do not, on a local disk, sixteen threads would need twice the time of one: Python lets
only one of them work at a time, and they get into each other's way.

What is asked comes back in its order, with the answer, and only so much is under way that the memory stays small. Which
files are looked at, and what an answer means, is the callers' business."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread
from typing import Generic, TypeVar

THREADS = 16
_WINDOW = 512  # items under way; as long as looks are quick, so many are handed over at once
_QUICK_S = 0.0005  # a look on a local disk takes a fifth of it
_LONGEST_S = 0.005  # so much of a look counts: one that took long is an accident
_PATIENCE_S = 0.02
_FAR_TOO_LONG_S = 0.5  # even for an accident: others are to look meanwhile
_HEED_EVERY_S = 0.2
_GLANCE_EVERY_S = 0.02  # while one thread looks: has it become slow?

Thing = TypeVar("Thing")
Item = TypeVar("Item")
Question = TypeVar("Question")
Answer = TypeVar("Answer")


def stay() -> None:
    """Do nothing but wait."""


def look_ahead(
    asked: Iterable[tuple[Item, Question | None]],
    look: Callable[[Question], Answer],
    threads: int = THREADS,
    monotonic_s: Callable[[], float] = time.perf_counter,
    while_waiting: Callable[[], None] = stay,
) -> Iterator[tuple[Item, Answer | None]]:
    """Yield each item with the answer to its question; None: it has none.

    ``asked`` is read ahead by a bounded number of items. Where it fails, what came before is yielded first. ``look``
    may be called by several threads; an error that it raises is raised at its item. ``while_waiting`` is called now
    and then while no answer comes; an error that it raises ends everything at once.
    """
    window: deque[_Slot[Item, Question, Answer]] = deque()
    crew: _Crew[Item, Question, Answer] = _Crew(look, threads, monotonic_s, while_waiting)
    failed: list[Exception] = []
    try:
        for item, question in _until_it_fails(asked, failed):
            if question is None and not window:
                yield item, None
                continue
            window.append(_Slot(item, question))
            if question is not None:
                crew.add(window[-1])
            if len(window) == _WINDOW:
                yield from crew.results(window)
        while window:
            yield from crew.results(window)
        crew.dismiss(wait=True)
    finally:
        crew.dismiss()
    if failed:
        raise failed[0]


def _until_it_fails(things: Iterable[Thing], failed: list[Exception]) -> Iterator[Thing]:
    try:
        yield from things
    except Exception as error:
        failed.append(error)


class _Slot(Generic[Item, Question, Answer]):
    """An item, its question, and what has come of it."""

    __slots__ = ("answer", "done", "error", "item", "question")

    def __init__(self, item: Item, question: Question | None) -> None:
        self.item = item
        self.question = question
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self.done = question is None


class _Crew(Generic[Item, Question, Answer]):
    """Threads that answer: one, for which we wait, and more once looks have taken long."""

    def __init__(
        self,
        look: Callable[[Question], Answer],
        most: int,
        monotonic_s: Callable[[], float],
        while_waiting: Callable[[], None],
    ) -> None:
        self._look = look
        self._most = most
        self._monotonic_s = monotonic_s
        self._while_waiting = while_waiting
        self._is_slow = False
        self._waited_s = 0.0  # lately, for looks that were not quick
        self._began_s = monotonic_s()  # the last look
        self._threads: list[Thread] = []
        self._changed = Condition()
        self._todo: deque[_Slot[Item, Question, Answer]] = deque()
        self._awaited: _Slot[Item, Question, Answer] | None = None
        self._dismissed = False

    def add(self, slot: _Slot[Item, Question, Answer]) -> None:
        """Take a question; it is looked at now where looks are slow, else together with others."""
        with self._changed:
            self._todo.append(slot)
            if self._is_slow:
                self._changed.notify()

    def results(self, window: deque[_Slot[Item, Question, Answer]]) -> Iterator[tuple[Item, Answer | None]]:
        """Yield what has come of the first questions of a window, at least one; of all, as long as looks are quick."""
        self._while_waiting()  # what is asked may be slow to come, too
        if self._todo and not self._is_slow:
            last = self._todo[-1]
            self._hire(1)
            self._wait_for(last, _GLANCE_EVERY_S, until_slow=True)
        if not window[0].done:
            self._hire(min(self._most, len(window)))
            self._wait_for(window[0], _HEED_EVERY_S)
        while window and window[0].done:
            slot = window.popleft()
            if slot.error is not None:
                raise slot.error
            yield slot.item, slot.answer

    def dismiss(self, *, wait: bool = False) -> None:
        """Let all threads go; ``wait`` for them only where no look is under way, for one may hang."""
        with self._changed:
            self._dismissed = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    def _wait_for(self, slot: _Slot[Item, Question, Answer], every_s: float, *, until_slow: bool = False) -> None:
        """Wait for an answer; ``until_slow``: or until looks have become slow, so that others help."""
        while not (until_slow and self._is_slow):
            with self._changed:
                self._awaited = slot
                if self._changed.wait_for(lambda: slot.done, every_s):
                    return
            self._while_waiting()
            if self._monotonic_s() - self._began_s > _FAR_TOO_LONG_S:
                self._is_slow = True

    def _hire(self, most: int) -> None:
        """Have so many threads, and let them all begin."""
        while len(self._threads) < most:
            thread = Thread(target=self._work, name="badcjobs-look-ahead", daemon=True)  # Ctrl-C does not wait for it
            try:
                thread.start()
            except RuntimeError:  # ulimit -u: those that there are have to do
                if not self._threads:
                    raise
                self._most = most = len(self._threads)
                break
            self._threads.append(thread)
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        slot: _Slot[Item, Question, Answer] | None = None
        while True:
            with self._changed:
                if slot is not None:
                    slot.done = True
                    if slot is self._awaited:
                        self._changed.notify_all()
                while not self._todo and not self._dismissed:
                    self._changed.wait()
                if self._dismissed:
                    return
                slot = self._todo.popleft()
            assert slot.question is not None
            began_s = self._began_s = self._monotonic_s()
            try:
                slot.answer = self._look(slot.question)
            except Exception as error:
                slot.error = error
            took_s = min(self._monotonic_s() - began_s, _LONGEST_S)
            self._waited_s = max(0.0, self._waited_s + took_s - _QUICK_S)
            self._is_slow = self._is_slow or self._waited_s > _PATIENCE_S
