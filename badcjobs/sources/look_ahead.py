"""Looks at files, many at a time: on a shared filesystem each look waits, and a million of them in turn wait for hours.

One thread looks, and we wait for it, so that a signal is heard also while a look hangs. More are hired once looks have
taken long. Where they do not, on a local disk, sixteen threads would need twice the time of one: Python lets only one
of them work at a time, and they get into each other's way. For the same reason that one gets hundreds of files at once
there: on a busy machine each hand-over takes longer than some looks.

What is asked comes back in its order, with the answer, and only so much is under way that the memory stays small. Which
files are looked at, and what an answer means, is the callers' business."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

THREADS = 16
_MOST_QUESTIONS = 16  # of an errand: a thread that is woken for each file costs more than a look at a local disk
_MOST_ITEMS = 256  # of an errand: those with a question, and those between them that have none
_ERRANDS_EACH = 2  # under way: one that is done by a thread, and its next one
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

    ``asked`` is read ahead by a number of items that depends on nothing but itself. Where it fails, what came before
    is yielded first. ``look`` may be called by several threads; an error that it raises is raised at its item.
    ``while_waiting`` is called now and then while no answer comes; an error that it raises ends everything at once.
    """
    waiting: deque[_Errand[Item, Question, Answer]] = deque()
    crew: _Crew[Item, Question, Answer] = _Crew(look, threads, monotonic_s, while_waiting)
    failed: list[Exception] = []
    errands = 0
    try:
        for item, question in _until_it_fails(asked, failed):
            if not waiting and question is None:
                yield item, None
                continue
            if not waiting or waiting[-1].is_full:
                if len(waiting) == threads * _ERRANDS_EACH:
                    yield from crew.results(waiting.popleft())
                # The first are small, so that a folder of a few hundred files keeps all threads busy, too.
                waiting.append(_Errand(min(_MOST_QUESTIONS, 1 << min(errands // threads, 8))))
                errands += 1
            waiting[-1].add(item, question)
            if waiting[-1].is_full:
                crew.send(waiting[-1])
                while_waiting()  # what is asked may be slow to come, too
        if waiting and not waiting[-1].is_full:
            crew.send(waiting[-1])
        while waiting:
            yield from crew.results(waiting.popleft())
        crew.finish()
    finally:
        crew.dismiss()
    if failed:
        raise failed[0]


def _until_it_fails(things: Iterable[Thing], failed: list[Exception]) -> Iterator[Thing]:
    try:
        yield from things
    except Exception as error:
        failed.append(error)


class _Errand(Generic[Item, Question, Answer]):
    """Neighbouring items, whose questions one thread answers in turn."""

    def __init__(self, most_questions: int) -> None:
        self.questions: list[Question] = []
        self.answers: list[Answer] = []
        self.error: Exception | None = None  # at the question behind the last answer
        self._done = Lock()
        self._done.acquire()
        self._items: list[tuple[Item, bool]] = []
        self._most_questions = most_questions

    @property
    def is_full(self) -> bool:
        return len(self.questions) >= self._most_questions or len(self._items) >= _MOST_ITEMS

    def add(self, item: Item, question: Question | None) -> None:
        self._items.append((item, question is not None))
        if question is not None:
            self.questions.append(question)

    def answer(self, look: Callable[[Question], Answer]) -> None:
        try:
            for question in self.questions:
                self.answers.append(look(question))
        except Exception as error:
            self.error = error
        finally:
            self._done.release()

    def is_done(self, within_s: float) -> bool:
        """Wait for the answers, for so long at most; a KeyboardInterrupt ends it, too."""
        if not self._done.acquire(timeout=within_s):
            return False
        self._done.release()
        return True

    def results(self) -> Iterator[tuple[Item, Answer | None]]:
        given = 0
        for item, has_question in self._items:
            if not has_question:
                yield item, None
                continue
            if given == len(self.answers):
                assert self.error is not None
                raise self.error
            yield item, self.answers[given]
            given += 1


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
        self._threads: list[Thread] = []
        self._kept: list[_Errand[Item, Question, Answer]] = []  # for one hand-over, as long as looks are quick
        self._began_s = monotonic_s()  # the errand that the one thread does
        self._errands: SimpleQueue[_Errand[Item, Question, Answer] | None] = SimpleQueue()
        self._dismissed = False

    def send(self, errand: _Errand[Item, Question, Answer]) -> None:
        if not errand.questions:
            return
        self._kept.append(errand)
        if self._is_slow:
            self._hand_over()

    def results(self, errand: _Errand[Item, Question, Answer]) -> Iterator[tuple[Item, Answer | None]]:
        """Yield what has come of an errand, once it is done."""
        if errand.questions and not errand.is_done(0):
            self._hand_over()
            while not errand.is_done(_HEED_EVERY_S):
                self._while_waiting()
        yield from errand.results()

    def _hand_over(self) -> None:
        kept, self._kept = self._kept, []
        if not kept:
            return
        self._began_s = self._monotonic_s()
        self._hire(self._most if self._is_slow else 1, len(kept))
        for errand in kept:
            if self._threads:
                self._errands.put(errand)
            else:  # then we have to do
                errand.answer(self._look)
                self._while_waiting()
        if not self._is_slow:
            self._wait_for(kept[-1])
            if self._is_slow:
                self._hire(self._most, len(kept))

    def _wait_for(self, last: _Errand[Item, Question, Answer]) -> None:
        """Wait until all is done, or has become slow: going on, we would get in the way of the one that looks."""
        while not self._is_slow and not last.is_done(_GLANCE_EVERY_S):
            self._while_waiting()
            if self._monotonic_s() - self._began_s > _FAR_TOO_LONG_S:
                self._is_slow = True

    def finish(self) -> None:
        """Wait until all threads have gone; they have nothing to do any more."""
        self.dismiss()
        for thread in self._threads:
            thread.join()

    def dismiss(self) -> None:
        """Let all threads go, without waiting for a look that may hang."""
        self._dismissed = True
        for _ in self._threads:
            self._errands.put(None)

    def _look_and_note(self, question: Question) -> Answer:
        began_s = self._monotonic_s()
        try:
            return self._look(question)
        finally:
            took_s = min(self._monotonic_s() - began_s, _LONGEST_S)
            self._waited_s = max(0.0, self._waited_s + took_s - _QUICK_S)
            if self._waited_s > _PATIENCE_S:
                self._is_slow = True

    def _hire(self, most: int, errands: int) -> None:
        """Hire a thread for each errand, until there are so many as there may be."""
        for _ in range(min(errands, min(most, self._most) - len(self._threads))):
            thread = Thread(target=self._work, name="badcjobs-look-ahead", daemon=True)  # Ctrl-C does not wait for it
            try:
                thread.start()
            except RuntimeError:  # ulimit -u: those that there are have to do
                self._most = len(self._threads)
                return
            self._threads.append(thread)

    def _work(self) -> None:
        while (errand := self._errands.get()) is not None and not self._dismissed:
            self._began_s = self._monotonic_s()
            errand.answer(self._look if self._is_slow else self._look_and_note)
