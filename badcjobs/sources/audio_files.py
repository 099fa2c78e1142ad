"""Find audio files on disk, read their headers, and name recordings without an id."""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from badcjobs.model import BROKEN_AUDIO, EMPTY_FILE, NOT_AUDIO, UNREADABLE_FILE, AudioHeader, Fingerprint
from badcjobs.paths import shell_line
from badcjobs.settings import absolute
from badcjobs.sources import audio_formats as formats
from badcjobs.sources.cutter import measure_with_ffprobe, measure_with_libsndfile
from badcjobs.sources.mistakes import shown

_HEAD_BYTES = 4096  # per read; by default Python reads one block of the filesystem, which is 4 MiB on Lustre
_NO_FRAMES = "it has a header and no audio"
_SLACK_S = 1.0  # a smaller difference from the header is not a loss: recorders write complete blocks


def read_header(path: Path | str) -> AudioHeader:
    """Return what the header of an audio file says, or why it gives no audio; a length that is not there is unknown."""
    try:
        with open(path, "rb", _HEAD_BYTES) as file:  # noqa: PTH123  (a Path per file is slow for a million files)
            try:
                return _of_wav(formats.read_wav_header(file))
            except formats.NotWav as problem:
                not_wav = problem
            flac = formats.read_flac_info(file)
            file.seek(0)
            start = file.read(_HEAD_BYTES)
    except OSError as error:
        return AudioHeader(fault=UNREADABLE_FILE, why=error.strerror or str(error))

    if flac is not None:
        return _of_flac(Path(path), flac)
    if not start:
        return AudioHeader(fault=EMPTY_FILE, why="it has 0 bytes")
    if start.startswith((b"RIFF", b"RF64", b"BW64")) and not isinstance(not_wav, formats.CompressedWav):
        return AudioHeader(fault=BROKEN_AUDIO, why=f"WAV, but {not_wav}")
    if start.startswith(b"fLaC"):
        return AudioHeader(fault=BROKEN_AUDIO, why="FLAC, but its header cannot be read")
    if not formats.begins_like_audio(start):
        return AudioHeader(fault=NOT_AUDIO, why="it does not begin like any audio format")
    if formats.is_for_ffmpeg(start):
        return AudioHeader(measure_with_ffprobe(Path(path)))
    return AudioHeader(*measure_with_libsndfile(Path(path)))


def _of_flac(path: Path, flac: formats.FlacInfo) -> AudioHeader:
    length_s = flac.frames / flac.rate_hz or None
    if not flac.has_audio:
        return AudioHeader(length_s, flac.rate_hz, flac.channels, fault=EMPTY_FILE, why=_NO_FRAMES)
    if length_s is not None:
        return AudioHeader(length_s, flac.rate_hz, flac.channels)
    length_s, *_ = measure_with_libsndfile(path)
    return AudioHeader(length_s, flac.rate_hz, flac.channels, unfinished=length_s is not None)


def _of_wav(wav: formats.WavHeader) -> AudioHeader:
    there_s = wav.length_s
    promised_s = wav.promised_s
    if promised_s - there_s > _SLACK_S:
        fault = "" if there_s else BROKEN_AUDIO
        why = f"its header says {promised_s:g} s, the file has {there_s:g} s"
        return AudioHeader(promised_s, wav.rate_hz, wav.channels, there_s, fault=fault, why=why)
    if there_s == 0:
        return AudioHeader(0.0, wav.rate_hz, wav.channels, fault=EMPTY_FILE, why=_NO_FRAMES)
    return AudioHeader(there_s, wav.rate_hz, wav.channels, unfinished=wav.unfinished)


# --- find files -------------------------------------------------------------------------------------------------------

# What HawkEars takes from a folder, without names that are seldom audio (.raw, .org) and formats that audio_formats
# does not recognize (.gsm, .ra). Other engines get them too.
AUDIO_ENDINGS = (
    ".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".aif", ".aiff", ".aifc", ".3gp", ".amr",
    ".ape", ".au", ".caf", ".m4b", ".mpga", ".mogg", ".rf64", ".tta", ".voc", ".w64", ".webm", ".wv", ".3gpp", ".aax",
    ".alac", ".awb", ".m4p", ".x-m4a",
)  # fmt: skip
AUDIO_FORMATS = "WAV, FLAC, MP3, OGG, M4A and others"

Found = tuple[str, Fingerprint]  # the absolute path of a file that exists
ReadHeader = Callable[[str], AudioHeader]


class NoAudio(Exception):
    """An audio file is missing or cannot be used; the text says why, ``fix`` may be a line to paste."""

    key_bytes: int | None = None  # the size of a file that git-annex has not fetched, from its key; None: not known

    def __init__(
        self, text: str, fix: str | None = None, *, not_found: bool = False, missing_at: str | None = None
    ) -> None:
        super().__init__(text)
        self.fix = fix
        self.not_found = not_found  # perhaps we looked in the wrong folder
        self.missing_at = missing_at  # where the file should be: only its rows fail; None: the source itself is wrong


def is_audio(name: str) -> bool:
    """Return whether a file name has an audio extension that badcjobs reads."""
    return name.lower().endswith(AUDIO_ENDINGS)


def search_folders(source: Path, root: Path | None) -> tuple[str, ...]:
    """Return the folders in which relative paths are searched, in this order, each with a slash at its end.

    This is only ``root`` if it is given; otherwise the working directory, then the folder of the source file.
    """
    folders = (Path.cwd(), source.absolute().parent) if root is None else (root.absolute(),)
    return tuple(dict.fromkeys(with_slash(folder) for folder in folders))


def with_slash(folder: Path | str) -> str:
    """Return a folder with one slash at its end."""
    return f"{str(folder).rstrip('/')}/"


def locate(path: str, folders: Sequence[str]) -> str:
    """Return the absolute path of a file, without opening it: in the first folder that has it, else in the last."""
    places = _possible_places(path, folders)
    return next((place for place in places[:-1] if os.path.lexists(place)), places[-1])


def _possible_places(path: str, folders: Sequence[str]) -> list[str]:
    if path.startswith("/"):
        return [path]
    return [folder + path.removeprefix("./") for folder in folders]


def look_at(path: str, folders: Sequence[str], read: ReadHeader | None) -> Found | NoAudio:
    """Return the absolute path and the fingerprint of a file, with its header if ``read`` is given.

    A problem is returned as NoAudio, not raised.
    """
    places = _possible_places(path, folders)
    for place in places:
        try:
            status = os.stat(place)  # noqa: PTH116  (a Path per row doubles the time for a million rows)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            text = f"cannot access {shown(path)}: {error.strerror}"
            return NoAudio(text, shell_line("ls", "-ld", place), missing_at=place)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe blocks until a program writes to it
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
            text = f"{kind}, not an audio file: {shown(path)}"
            return NoAudio(text, shell_line("ls", "-ld", place), missing_at=place)
        if 0 < status.st_size <= LONGEST_POINTER and (key := read_pointer(place)):
            return _not_fetched(path, Path(place), key)
        file = place, Fingerprint(status.st_size, status.st_mtime_ns)
        if read is None:
            return file
        return with_header(file, read)

    for place in filter(os.path.islink, places):
        target = str(Path(place).readlink())
        if _ANNEX in target:
            return _not_fetched(path, Path(place), target)
        return NoAudio(f"a link to a file that does not exist: {shown(path)}", missing_at=place)
    if ESCAPED.search(path):
        return NoAudio(f"a name that is not UTF-8: {shown(path)}", _rename(places[0]), missing_at=places[0])
    return NoAudio(f"no such file: {shown(path)}", not_found=True, missing_at=places[0])


def with_header(found: Found, read: ReadHeader) -> Found:
    """Return the result of look_at with the file's header added."""
    audio_path, file = found
    # Not dataclasses.replace, which takes as long as reading from a local disk.
    return audio_path, Fingerprint(
        file.audio_bytes,
        file.audio_mtime_ns,
        file.audio_sha256,
        read(audio_path),
    )


def end_ms_of(header: AudioHeader) -> int | None:
    """Return the end of the audio in milliseconds; None: not known."""
    if header.duration_s is None:
        return None
    return round(header.duration_s * 1000)


# --- names that are not UTF-8 -----------------------------------------------------------------------------------------

ESCAPED = re.compile(r"\\x([89a-f][0-9a-f])")  # a byte, see ``escape_bytes``


def _rename(place: str) -> str:
    """Return the line that renames a file or its folder, or repairs the list that has the name."""
    part = re.sub(r"(\\x[89a-f][^/]*)/.*", r"\1", place)
    real = ESCAPED.sub(lambda byte: os.fsdecode(bytes.fromhex(byte[1])), part)
    if os.path.lexists(real):
        return shell_line("mv", "-n", real, ESCAPED.sub("_", part))
    return "iconv -f latin1 -t utf-8 LIST   (the list or manifest that has it)"


# --- git-annex --------------------------------------------------------------------------------------------------------

_ANNEX = "/annex/objects/"
LONGEST_POINTER = 1024  # bytes; no audio file is as short, apart from empty ones
_KEY_SIZE = re.compile(r"-s(\d{1,18})(?:-[^/]*)?--[^/]*$")  # SHA256E-s5292044--0123….wav


def read_pointer(place: str) -> str:
    """Return the key of an unlocked git-annex file without content, which is its text; "": it is another file."""
    try:
        with Path(place).open("rb", _HEAD_BYTES) as file:
            start = file.read(LONGEST_POINTER)
    except OSError:
        return ""
    if start.startswith(_ANNEX.encode()):
        return start.decode(errors="replace").splitlines()[0]
    return ""


def _not_fetched(path: str, place: Path, key: str) -> NoAudio:
    fix = f"git -C {shell_line(place.parent)} annex get ."
    problem = NoAudio(
        f"git-annex has not fetched the content of {shown(path)}",
        fix,
        missing_at=str(place),
    )
    if size := _KEY_SIZE.search(key):
        problem.key_bytes = int(size[1])
    return problem


def explain_missing(place: Path) -> str:
    """Describe why a file is not there; for git-annex with the command that fetches it."""
    problem = look_at(str(place), (), None)
    if not isinstance(problem, NoAudio):
        return f"no such file: {place}"
    # The command is last: tables show only the end of an error.
    if problem.fix:
        return f"{problem}: {problem.fix}"
    return str(problem)


class SourceRoot:
    """The folder that recording ids are relative to, whichever path leads to it."""

    def __init__(self, folder: Path) -> None:
        self._real = os.path.realpath(folder)
        self._start = cache(self._find_start)

    def path_below(self, path: str) -> str:
        """Return the path of a recording relative to the root, without "..".

        A path outside the root keeps all its folders, without the leading slash.
        """
        if ".." not in path and not path.startswith("/"):
            return posixpath.normpath(path)
        path = absolute(Path(self._real), path)
        return path[self._start(posixpath.dirname(path)) :].lstrip("/")

    def _find_start(self, folder: str) -> int:
        """Return how many characters of a folder's path lead to the root; 0: it is not below the root."""
        start = self._start(posixpath.dirname(folder)) if folder != "/" else 0
        return start or len(folder) * (os.path.realpath(folder) == self._real)


def without_ending(path: str) -> str:
    """Return the path without its audio extension.

    ``a.wav.wav`` stays unchanged: ``a.wav`` is the id of ``a.wav`` if there is also an ``a.flac``.
    ``.wav`` stays unchanged because nothing would be left.
    """
    stem = path[: path.rindex(".")]
    if is_audio(stem) or not stem or stem[-1] == "/":
        return path
    return stem
