"""The files behind the rows of a manifest: whether a row is its file, or a stretch of it that is cut out before use.

Rows of one recording follow each other, so what was found out about the last file serves for many of them: RowLooks
says which files are to be looked at, RowFiles what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from badcjobs.model import Cutting, Fingerprint, is_beyond, is_longer, is_stretch
from badcjobs.sources.audio_files import Found, NoAudio, ReadHeader, end_ms_of, look_at, with_header

Times = tuple[int, int | None]  # begin and end of a row


class FileQuestion(NamedTuple):
    """A file that is to be looked at."""

    path: str
    measure: bool  # its header, too


class FileLook(NamedTuple):
    """What a look has shown."""

    found: Found | NoAudio
    measured: bool


class RowLooks:
    """Asks for a look at a file only as far as a row needs it, and only once for neighbouring rows."""

    def __init__(self, cutting: Cutting) -> None:
        self._always_measure = cutting.rows is not False
        self._path = ""
        self._first: Times = 0, None
        self._asked = False

    def ask(self, path: str, times: Times, *, ours: bool) -> tuple[Times, FileQuestion | None]:
        """Return the first row of this file, whoever has it, and what is to be asked for the next row of it."""
        if path != self._path:
            self._path, self._first, self._asked = path, times, False
        if not ours or self._asked:
            return self._first, None
        self._asked = True
        return self._first, FileQuestion(path, self._always_measure or times[1] is None)


class RowFiles:
    """The file of one row after another."""

    def __init__(self, folders: Sequence[str], cutting: Cutting, read_header: ReadHeader) -> None:
        self._folders = folders
        self._read_header = read_header
        self._cuts = cutting.rows
        self._path = ""
        self._first: Times = 0, None
        self._found: Found | None = None
        self._problem: NoAudio | None = None
        self._audio_ms: int | None = None
        self._measured = False

    def look(self, question: FileQuestion) -> FileLook:
        """Look at a file; any thread may do that."""
        found = look_at(question.path, self._folders, self._read_header if question.measure else None)
        return FileLook(found, question.measure)

    def turn_to(self, path: str, first: Times, look: FileLook | None) -> None:
        """Turn to the file of the next row; ``look``: None where that of the row before serves."""
        self._path, self._first = path, first
        if look is None:
            return
        self._found = self._problem = self._audio_ms = None
        self._measured = look.measured
        if isinstance(look.found, NoAudio):
            self._problem = look.found
        else:
            self._found = look.found
            self._audio_ms = end_ms_of(look.found[1].header)

    def find(self, sha256: str | None) -> Found:
        """Return where the row's file is, and its fingerprint; raise NoAudio where there is none."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        assert self._found is not None
        audio_path, fingerprint = self._found
        return audio_path, fingerprint if sha256 is None else replace(fingerprint, audio_sha256=sha256)

    def place(self, start_ms: int, end_ms: int | None, *, known_cut: bool = False) -> tuple[int | None, bool]:
        """Return the end of a row, and whether it is to be cut out of its file; raise NoAudio where that cannot be.

        ``known_cut``: somebody who saw the whole source says that it is to be, unless the user says otherwise.
        """
        if end_ms is None:
            end_ms = self._end_after(start_ms)
        return end_ms, (known_cut and self._cuts is None) or self._is_cut(start_ms, end_ms)

    def told(self, fingerprint: Fingerprint, *, is_cut: bool) -> Fingerprint:
        """Return a row's fingerprint with what the header says, if it was read."""
        if self._found is None or not self._measured:
            return fingerprint
        header = self._found[1].header
        # A file that is one chunk of several does not tell how long its recording is.
        return replace(fingerprint, header=header if is_cut else replace(header, duration_s=None))

    def _is_cut(self, start_ms: int, end_ms: int | None) -> bool:
        if self._cuts is False and not self._measured:
            return False
        audio_ms = self._length_ms()
        if audio_ms == 0:
            return True  # of no audio nothing can be cut, and that is how it fails
        if self._is_unfinished(start_ms, end_ms):
            return True  # a cut of it is a sound file
        if self._cuts is False:
            return False
        if audio_ms is None or end_ms is None:
            return self._cuts is True  # nobody can tell; what cannot be cut fails then, alone
        if self._cuts is True:
            return self._must_be_cut(start_ms, end_ms, audio_ms)
        if is_stretch(start_ms, end_ms, audio_ms):
            return True
        # The first rows of this file are stretches of it, so one behind its end is no file either: it is not there.
        first_start_ms, first_end_ms = self._first
        return (
            is_longer(start_ms, end_ms, audio_ms)
            and first_end_ms is not None
            and is_stretch(first_start_ms, first_end_ms, audio_ms)
        )

    def _is_unfinished(self, start_ms: int, end_ms: int | None) -> bool:
        """Say whether a row is a file whole that engines may not be able to read as it is."""
        if self._found is None or self._audio_ms is None:
            return False
        header = self._found[1].header
        if not header.unfinished and header.there_s is None:
            return False
        return start_ms == 0 and (end_ms is None or not is_beyond(end_ms, self._audio_ms))

    def _must_be_cut(self, start_ms: int, end_ms: int, audio_ms: int) -> bool:
        if audio_ms and is_beyond(end_ms, audio_ms):
            what = f"end_ms {end_ms} lies beyond the end of {self._path} at {audio_ms} ms, so it cannot be cut out"
            raise NoAudio(
                what, "the same command without run.cut = true: then such rows fail alone, and the others are done"
            )
        return start_ms > 0 or audio_ms > end_ms or not audio_ms

    def _end_after(self, start_ms: int) -> int | None:
        audio_ms = self._length_ms()
        # From the start, audio of no length is the engine's to judge; a start behind its end is the manifest's mistake.
        if audio_ms is not None and 0 < start_ms >= audio_ms:
            raise NoAudio(f"start_ms {start_ms} is not before the end of the audio at {audio_ms} ms")
        return audio_ms

    def _length_ms(self) -> int | None:
        if not self._measured:
            assert self._found is not None
            self._found = with_header(self._found, self._read_header)
            self._audio_ms, self._measured = end_ms_of(self._found[1].header), True
        return self._audio_ms
