"""What a SOURCE argument is, by looking at it."""

from __future__ import annotations

import shlex
import stat
from dataclasses import dataclass
from pathlib import Path

from badcjobs.manifest.audio_files import is_audio, search_folders
from badcjobs.manifest.badc_csv import is_header
from badcjobs.manifest.badc_manifest import Manifest
from badcjobs.manifest.folder import Folder
from badcjobs.manifest.manifest_list import ManifestList, is_manifest, read_manifest_list
from badcjobs.manifest.mistakes import Mistakes, quoted
from badcjobs.manifest.path_list import AudioList, audio_list, read_list
from badcjobs.manifest.text_lines import note_utf16

_LOOK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class AudioFile:
    """A recording named on the command line; all of them become one list."""

    path: Path


Recognised = Folder | Manifest | AudioList | AudioFile | ManifestList


def recognise(path: Path, root: Path | None, mistakes: Mistakes) -> Recognised | None:
    """Return what the path is; None, and the reason noted, when it cannot be a source."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return Folder(path)
        if not stat.S_ISREG(mode):
            mistakes.add(0, "is neither a file nor a folder", why="it is read more than once, so a pipe will not do")
            return None
        return AudioFile(path) if is_audio(path.name) else _recognise_text(path, root, mistakes)
    except FileNotFoundError:
        mistakes.add(0, "does not exist", fix=f"ls -l {shlex.quote(str(path.parent))}")
    except OSError as error:
        mistakes.add(0, "cannot be read", why=error.strerror or str(error), fix=f"ls -ld {shlex.quote(str(path))}")
    return None


def _recognise_text(path: Path, root: Path | None, mistakes: Mistakes) -> Recognised | None:
    with path.open("rb") as file:
        start = file.read(_LOOK_BYTES)
    if not start.strip():
        mistakes.add(0, "is empty")
        return None
    if note_utf16(path, start, mistakes):
        return None
    if is_manifest(path.name) or is_header(start.splitlines()[0].decode(errors="replace")):
        return Manifest(path, search_folders(path, root))
    if b"\0" in start:
        mistakes.add(0, "is neither audio (.wav, .flac) nor text")
        return None
    return _recognise_list(path, root, mistakes)


def _recognise_list(path: Path, root: Path | None, mistakes: Mistakes) -> Recognised | None:
    _, first = next(read_list(path, Mistakes([str(path)])), (0, ""))
    if is_audio(first):
        return audio_list(path, root)
    if is_manifest(first):
        return read_manifest_list(path, mistakes)
    if first:
        why = f"its first line is {quoted(first)}"
        mistakes.add(0, "lists neither audio (.wav, .flac) nor manifests (.csv)", why=why)
    else:
        mistakes.add(0, "lists nothing", why="it has only blank lines and comments")
    return None
