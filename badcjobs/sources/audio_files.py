"""Where audio lies on disk, and what a recording without an id of its own is called."""

from __future__ import annotations

import os
import posixpath
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from badcjobs.model import AudioHeader, Fingerprint
from badcjobs.sources.audio_formats import CONSTANT_FRAMES, NotWav, WavHeader, read_flac_info, read_wav_header
from badcjobs.sources.mistakes import shown

_HEAD_BYTES = 4096  # are read at once; left to itself, Python takes a block, which Lustre says has 4 MiB
_SLACK_S = 1.0  # so much less than the header says is no loss: recorders write whole blocks


def read_header(path: Path | str) -> AudioHeader:
    """Return what the header of a WAV or FLAC file says, or why it cannot be read."""
    try:
        with open(path, "rb", _HEAD_BYTES) as file:  # noqa: PTH123  (a Path per file is slow for a million files)
            try:
                return _of_wav(read_wav_header(file, compressed=True))
            except NotWav:
                flac = read_flac_info(file)
    except OSError as error:
        return AudioHeader(unreadable=error.strerror or str(error))
    if flac is None:
        return AudioHeader()
    length_s = flac.frames / flac.rate_hz if flac.frames else None
    return AudioHeader(length_s, flac.rate_hz, flac.channels, unfinished=bool(flac.frames) and not flac.is_told)


def _of_wav(wav: WavHeader) -> AudioHeader:
    rate_hz, channels, there_s, promised_s = wav.rate_hz or None, wav.channels or None, None, None
    if wav.kind in CONSTANT_FRAMES and wav.rate_hz and wav.frame_bytes:
        there_s, promised_s = wav.length_s, wav.promised_s
    elif wav.bytes_per_s:
        there_s = wav.data_bytes / wav.bytes_per_s
        promised_s = there_s + wav.missing_bytes / wav.bytes_per_s
    if promised_s is None or there_s is None or promised_s - there_s <= _SLACK_S:
        return AudioHeader(there_s, rate_hz, channels, unfinished=wav.unfinished and wav.data_bytes > 0)
    return AudioHeader(promised_s, rate_hz, channels, there_s)


# --- where it lies ----------------------------------------------------------------------------------------------------

AUDIO_ENDINGS = (".wav", ".flac")
AUDIO_WORDS = "WAV, FLAC"

Found = tuple[str, Fingerprint]  # the absolute path of a file that is there
ReadHeader = Callable[[str], AudioHeader]


class NoAudio(Exception):
    """There is no audio file where one should be; the text says why, ``fix`` may hold a line to paste."""

    def __init__(
        self, text: str, fix: str | None = None, *, nowhere: bool = False, missing_at: str | None = None
    ) -> None:
        super().__init__(text)
        self.fix = fix
        self.nowhere = nowhere  # perhaps we looked in the wrong folder
        self.missing_at = missing_at  # where the file is, or should be: its rows fail alone; None: the source is wrong


def is_audio(name: str) -> bool:
    """Say whether a name ends like audio that we take."""
    return name.lower().endswith(AUDIO_ENDINGS)


def search_folders(source: Path, root: Path | None) -> tuple[str, ...]:
    """Return the folders where relative paths may lie, each with its slash, in the order they are tried.

    ``root`` alone when it is given; otherwise the working directory, then the folder of the source file.
    """
    folders = (Path.cwd(), source.absolute().parent) if root is None else (root.absolute(),)
    return tuple(dict.fromkeys(with_slash(folder) for folder in folders))


def with_slash(folder: Path | str) -> str:
    """Return a folder as the beginning of a path: with one slash at its end."""
    return f"{str(folder).rstrip('/')}/"


def look_at(path: str, folders: Sequence[str], read: ReadHeader | None) -> Found | NoAudio:
    """Return the absolute path and the fingerprint of the file at a path, with its header if ``read`` is given.

    Whatever is wrong is an answer, too.
    """
    for folder in folders:
        place = path if path.startswith("/") else folder + path.removeprefix("./")
        try:
            status = os.stat(place)  # noqa: PTH116  (a Path per row doubles the time of a million rows)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            text = f"cannot look at {shown(path)}: {error.strerror}"
            return NoAudio(text, f"ls -ld {shlex.quote(place)}", missing_at=place)
        if not stat.S_ISREG(status.st_mode):  # to open a pipe takes until somebody writes to it
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
            text = f"{what}, not an audio file: {shown(path)}"
            return NoAudio(text, f"ls -ld {shlex.quote(place)}", missing_at=place)
        found = place, Fingerprint(status.st_size, status.st_mtime_ns)
        return found if read is None else with_header(found, read)
    links = [link for folder in folders if (link := Path(folder, path)).is_symlink()]
    if not links:
        return NoAudio(f"no such file: {shown(path)}", nowhere=True, missing_at=str(Path(folders[0], path)))
    what, fetch = explain_link(links[0])
    return NoAudio(f"{what} {shown(path)}", fetch and f"{fetch} .", missing_at=str(links[0]))


def with_header(found: Found, read: ReadHeader = read_header) -> Found:
    """Return what look_at has found together with what its header says."""
    audio_path, known = found
    # Not dataclasses.replace, which takes as long as a look at a local disk.
    return audio_path, Fingerprint(known.audio_bytes, known.audio_mtime_ns, known.audio_sha256, read(audio_path))


def end_ms_of(header: AudioHeader) -> int | None:
    """Return where the audio ends."""
    return None if header.duration_s is None else round(header.duration_s * 1000)


def covering_end_ms(header: AudioHeader) -> int | None:
    """Return the first whole millisecond that is not before the end of the audio, so that no sample lies behind it."""
    return None if header.duration_s is None else -(-round(header.duration_s * 1_000_000) // 1000)


def explain_link(place: Path) -> tuple[str, str | None]:
    """Return what is wrong with a link whose file is not there, and for one of git-annex the line that fetches it."""
    if ".git/annex" in str(place.readlink()):
        return "git-annex has not fetched the content of", f"git -C {shlex.quote(str(place.parent))} annex get"
    return "a link to a file that does not exist:", None


def path_below(root: str, path: str) -> str:
    """Return the path as seen from the root, in a form that does not depend on how it was written.

    A path elsewhere keeps all its folders, without the leading slash.
    """
    path = posixpath.normpath(path)
    if path.startswith("../"):
        path = posixpath.normpath(f"{root}/{path}")
    return path.removeprefix(with_slash(root)).lstrip("/")


def without_ending(path: str) -> str:
    """Return the path without its audio ending.

    ``a.wav.wav`` stays as it is: ``a.wav`` is the name that ``a.wav`` gets when there is an ``a.flac``.
    So does ``.wav``, which has no other name.
    """
    stem = path[: path.rindex(".")]
    return path if is_audio(stem) or not stem or stem[-1] == "/" else stem
