"""The recorder's side of the talk with its wrapper, a word per line; which words there are stands in sidecar.py."""

from __future__ import annotations

import os
import select

WRAPPER_GONE = ""
_LISTEN_S = 5.0


class Words:
    """Hears and answers; an empty word means that the wrapper is gone."""

    def __init__(self, descriptor: int, answers: int) -> None:
        self._descriptor = descriptor
        self._answers = answers
        self._heard = b""
        self._parent = os.getppid()
        self.ready_said = False

    def say(self, word: str) -> None:
        """Answer the wrapper; one that is gone is noticed when we listen."""
        try:
            os.write(self._answers, word.encode() + b"\n")
        except OSError:
            pass

    def mention(self, word: str) -> None:
        """Say something unless the wrapper has not listened for so long that it would make us wait."""
        try:
            heard = select.select([], [self._answers], [], 0)[1]
        except (OSError, ValueError):
            return
        if heard:
            self.say(word)

    def next(self, timeout_s: float | None) -> str | None:
        """Return the next word; None when none came in time."""
        if b"\n" not in self._heard:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return WRAPPER_GONE if self._is_orphan else None
            part = os.read(self._descriptor, 4096)
            if not part:
                return WRAPPER_GONE
            self._heard += part
        word, _, self._heard = self._heard.partition(b"\n")
        return word.decode()

    def wait(self) -> str:
        """Return the next word, whenever it comes."""
        word = None
        while word is None:
            word = self.next(_LISTEN_S)
        return word

    @property
    def _is_orphan(self) -> bool:
        """Whether the wrapper has died while a process that it forked still holds our pipe open."""
        return os.getppid() != self._parent
