"""Everything that is written beside the samples: alerts, processes, sources, the recorder's cost.

None of it is worth a sample: what fails here is said once and tried again at the next instant.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from badcjobs.model import Reading

log = logging.getLogger(__name__)


class Book(Protocol):
    """One kind of notes; ``written`` is called when the disk has taken what was written."""

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None: ...

    def finish(self) -> None: ...

    def written(self) -> None: ...


class AsideWriter(Protocol):
    """A part of the open transaction that can be undone without the rest."""

    def aside(self) -> AbstractContextManager[None]: ...


class Notes:
    """All books of one recorder."""

    def __init__(
        self, writer: AsideWriter, books: Sequence[Book], trouble: Callable[[str], None] = lambda words: None
    ) -> None:
        self._writer = writer
        self._books = books
        self._trouble = trouble
        self._failed: set[str] = set()

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write the notes of one instant, inside its transaction."""
        for book in self._books:
            self._guard(book, lambda book=book: book.write(at_ms, readings, unreadable))  # type: ignore[misc]

    def finish(self) -> None:
        """Write the last notes, inside the last transaction."""
        for book in self._books:
            self._guard(book, book.finish)

    def written(self) -> None:
        """Tell every book that the disk has taken the instant."""
        for book in self._books:
            book.written()

    def _guard(self, book: Book, write: Callable[[], None]) -> None:
        try:
            with self._writer.aside():
                write()
        except sqlite3.OperationalError:
            raise  # the disk: the whole instant is refused, and will be a gap
        except Exception as error:  # broad: whatever goes wrong in here, the samples are worth more
            name = type(book).__name__
            if name not in self._failed:
                self._failed.add(name)
                log.exception("%s cannot write", name)
                self._trouble(f"the recorder's {name} has failed and may be incomplete: {error!r}")
