"""SOURCE arguments → one stream of chunks: the front of this stage, and the file to read first."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import NO_CUTTING, Chunk, Cutting
from badcjobs.sources.audio_files import ReadHeader, is_audio, read_header, search_folders
from badcjobs.sources.badc_manifest import Manifest, is_header
from badcjobs.sources.folder import AudioList, audio_folder, audio_list, given_audio, read_list
from badcjobs.sources.mistakes import Mistakes, Remarks, copy_command, quoted, shown
from badcjobs.sources.walk import WHOLE, Shard, Walk, do_nothing

# The number of what shards are made of, over all sources (a row; of recordings that we cut, the recording with all its
# chunks) and of the part it is in, both from 0, and (recording_id, chunk_id).
RowNote = Callable[[int, int, tuple[str, str]], None]
# Each kind has a name as the user wrote it, a description for logs and, in ``without_rows``, what to say without a row.
# ``chunks`` yields our rows, and notes the mistakes of all rows and of our rows' audio; ``identities`` yields the line
# (0: it has none) and identity of every row, where a recording that we cut ourselves is one row. Both read the source
# from its beginning, in the same order, every time.
AudioSource = Manifest | AudioList
_NO_LENGTHS: Mapping[str, float] = {}
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Sources:
    """What was given, recognised but not yet read.

    ``picked_by_position``: a position has already picked this task's manifest, so that is not to be cut into
    shards for the array's tasks again. ``manifests_listed``: how many manifests a list of manifests has, which is
    how many array tasks it wants; None when no such list was given.
    """

    parts: tuple[AudioSource, ...]
    picked_by_position: bool = False
    manifests_listed: int | None = None
    cutting: Cutting = NO_CUTTING
    read_header: ReadHeader = read_header

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Return what each source is, for logs."""
        return tuple(part.description for part in self.parts)

    def chunks(
        self, shard: Shard, remarks: Remarks | None = None, while_waiting: Callable[[], None] = do_nothing
    ) -> Iterator[Chunk]:
        """Yield this shard's chunks in source order, reading every row but looking only at this shard's audio.

        Mistakes are gathered on the way and raised as one BadInput at the end, so what came before
        counts only once the iteration has ended well. ``remarks`` gather what is odd, and say whether missing audio
        is a mistake: where none at all is there, it always is. ``while_waiting`` is called now and then while files
        are slow to answer; an error that it raises ends the reading.
        """
        mistakes = Mistakes([part.name for part in self.parts])
        walk = Walk(shard, mistakes, self.cutting, remarks, self.read_header, while_waiting)
        listed, several = 0, len(self.parts) > 1
        for listed, chunk in enumerate(self.read_parts(walk, lambda part: part.chunks(walk)), 1):  # noqa: B007
            walk.remarks.note(chunk, several_sources=several)
            yield chunk
        note_repeats(self.parts, walk)
        if walk.remarks.keeps_missing and mistakes.count == mistakes.missing < listed:
            walk.remarks.forgive(mistakes)
            return
        mistakes.raise_any()

    def read_identities(self, note: RowNote, lengths: Mapping[str, float] = _NO_LENGTHS) -> Remarks:
        """Tell ``note`` every chunk that ``chunks`` would yield for some shard, without looking at any audio.

        But for recordings that are cut: which chunks they have, only their headers tell, unless ``lengths`` (seconds,
        by recording_id) does. Mistakes of the rows are raised as ``chunks`` would; whether identities repeat is left
        to the caller. The remarks are about names, for hardly any file was looked at.
        """
        mistakes, remarks = Mistakes([part.name for part in self.parts]), Remarks(keeps_missing=True)
        walk = _IdentityWalk(WHOLE, mistakes, self.cutting, remarks, self.read_header)
        walk.note, walk.lengths = note, lengths
        for chunk in self.read_parts(walk, lambda part: part.chunks(walk)):
            note(walk.row, mistakes.source, chunk.key)
        if mistakes.count > mistakes.missing:
            mistakes.raise_any()
        return remarks

    def read_parts(self, walk: Walk, rows_of: Callable[[AudioSource], Iterator[Row]]) -> Iterator[Row]:
        """Yield the rows of one source after the other; note a source that cannot be read, or has none."""
        mistakes = walk.mistakes
        for mistakes.source, part in enumerate(self.parts):
            before = walk.rows, mistakes.count
            try:
                yield from rows_of(part)
            except OSError as error:
                mistakes.add(0, "cannot be read", why=error.strerror or str(error))
            if (walk.rows, mistakes.count) == before:
                mistakes.add(0, part.without_rows)


class _IdentityWalk(Walk):
    """A walk that takes no row, so that no audio is looked at, except recordings that are cut."""

    note: RowNote

    def takes(self, recording_id: str, chunk_id: str, *, to_cut: bool = False) -> bool:
        if not to_cut:
            self.note(self.rows, self.mistakes.source, (recording_id, chunk_id))
        self.rows += 1
        return to_cut


def open_sources(
    paths: Sequence[Path], *, root: Path | None, position: int | None = None, cutting: Cutting = NO_CUTTING
) -> Sources:
    """Recognise each SOURCE by looking at it; raise one BadInput that names all that cannot be used.

    ``root`` is where relative paths inside sources start from. Without it, a path is taken from the working
    directory if it exists there, otherwise from the folder of the file that names it.

    ``position`` (from 0) is this task's place in its array: of a list of manifests it picks the one line;
    None means all of them in turn. Other sources do not depend on it.

    ``cutting`` says how recordings become chunks.
    """
    if not paths:
        raise BadInput("no SOURCE given", why="a source is a manifest, a folder of audio, or a list of either")
    if root is not None and not os.path.isdir(root):  # noqa: PTH112  (Path.is_dir raises where we may not look)
        raise BadInput(f"no such folder: {root}", why="--root is the folder that relative source_paths start from")
    if problems := cutting.problems():
        raise BadInput("\n".join(problems), fix="--chunk-length 294 --overlap 6")
    mistakes = Mistakes([str(path) for path in paths])
    parts: list[AudioSource] = []
    audio_files: list[Path] = []
    for mistakes.source, path in enumerate(paths):
        source = recognise(path, root, mistakes)
        if isinstance(source, ManifestList):
            if len(paths) == 1 and not mistakes.count:
                return _with_cutting(_open_listed(source.path, root, position), cutting)
            if len(paths) > 1:
                mistakes.add(0, "is a list of manifests, which has to be the only SOURCE")
        elif isinstance(source, Path):
            audio_files.append(source)
        elif source is not None:
            parts.append(source)
    mistakes.raise_any()
    if audio_files:
        parts.append(given_audio(audio_files, root))
    return _with_cutting(Sources(tuple(parts)), cutting)


def _with_cutting(sources: Sources, cutting: Cutting) -> Sources:
    """Return sources that cut; refuse what would change nothing for any of them."""
    kinds = {isinstance(part, Manifest) for part in sources.parts}
    if cutting.cuts_recordings and kinds == {True}:
        raise BadInput(
            "--chunk-length goes with whole recordings: a folder, a list of audio, or audio files",
            why=f"{sources.parts[0].name} is a manifest, which says itself where each chunk begins and ends",
            fix="the same command without --chunk-length and --overlap",
        )
    if cutting.rows is not None and kinds == {False}:
        raise BadInput(
            f"run.cut = {'true' if cutting.rows else 'false'} goes with manifests",
            why=f"{sources.parts[0].name} is no manifest: it has no rows with a begin and an end",
            fix="the same command without it; --chunk-length 294 --overlap 6 cuts whole recordings",
        )
    return replace(sources, cutting=cutting)


def _open_listed(path: Path, root: Path | None, position: int | None) -> Sources:
    """Open the manifest at this position of a list, counted from 0; all of them when it is None."""
    mistakes = Mistakes([str(path)])
    line_of: dict[str, int] = {}
    for line, text in read_list(path, mistakes):  # about as long as an array has tasks
        if not is_manifest(text):
            mistakes.add(line, f"{quoted(text)} is not a manifest (.csv) like the first line")
        elif text in line_of:
            mistakes.add(line, f"{quoted(text)} is already on line {line_of[text]}")
        else:
            line_of[text] = line
    mistakes.raise_any()
    count = len(line_of)
    if position is not None and not 0 <= position < count:
        raise BadInput(
            f"{path} has no manifest for position {position}: it lists {count}",
            why=f"an array task takes the manifest at its position, counted from 0; the last is {count - 1}",
            fix=f"#SBATCH --array=0-{count - 1}",
        )
    picked = []
    for text in list(line_of) if position is None else [list(line_of)[position]]:
        # Seen from the working directory, otherwise from the folder of the list; not from --root, which is where
        # the recordings are.
        places = [Path(text), path.parent / text]
        there = [place for place in places if os.path.exists(place)]  # noqa: PTH110  (Path.exists may raise)
        if there:
            picked.append((line_of[text], there[0]))
        else:
            mistakes.add(line_of[text], f"no such manifest: {shown(text)}")
    mistakes.raise_any()
    mistakes = Mistakes([str(manifest) for _, manifest in picked])
    parts: list[AudioSource] = []
    for mistakes.source, (line, manifest) in enumerate(picked):
        source = recognise(manifest, root, mistakes)
        if isinstance(source, Manifest):
            parts.append(replace(source, named_by=f" (line {line} of {path})"))
    mistakes.raise_any()
    return Sources(tuple(parts), picked_by_position=position is not None, manifests_listed=count)


# --- what a path is ---------------------------------------------------------------------------------------------------


class ManifestList(NamedTuple):
    """A file that lists manifests."""

    path: Path


def is_manifest(name: str) -> bool:
    """Say whether a name ends like a manifest."""
    return name.lower().endswith(".csv")


_LOOK_BYTES = 65536


Recognised = AudioSource | ManifestList | Path  # a Path: a recording; all of them become one list


def recognise(path: Path, root: Path | None, mistakes: Mistakes) -> Recognised | None:
    """Return what the path is; None, and the reason noted, when it cannot be a source."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return audio_folder(path)
        if not stat.S_ISREG(mode):
            mistakes.add(0, "is neither a file nor a folder", why="it is read more than once, so a pipe will not do")
            return None
        return path if is_audio(path.name) else _recognise_text(path, root, mistakes)
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
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):  # a spreadsheet's "Unicode text"
        mistakes.add(0, "is UTF-16, not UTF-8", fix=copy_command(path, "iconv -f utf-16 -t utf-8"))
        return None
    if is_manifest(path.name) or is_header(start.splitlines()[0].decode(errors="replace")):
        return Manifest(path, search_folders(path, root))
    if b"\0" in start:
        mistakes.add(0, "is neither audio (.wav, .flac) nor text")
        return None
    _, first = next(read_list(path, Mistakes([str(path)])), (0, ""))
    if is_audio(first):
        return audio_list(path, root)
    if is_manifest(first):
        return ManifestList(path)
    if first:
        why = f"its first line is {quoted(first)}"
        mistakes.add(0, "lists neither audio (.wav, .flac) nor manifests (.csv)", why=why)
    else:
        mistakes.add(0, "lists nothing", why="it has only blank lines and comments")
    return None


# --- identities that come twice ---------------------------------------------------------------------------------------

_EXAMINED = 1000  # identities; the rest is counted by hash, so that a manifest pasted twice fits into memory too


def note_repeats(sources: Sequence[AudioSource], walk: Walk) -> None:
    """Note every row whose identity an earlier row has, in whatever source."""
    repeated = walk.seen.repeated()
    if not repeated:
        return
    examined = set(islice(repeated, _EXAMINED))
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for number, source in enumerate(sources):
        walk.mistakes.source = number
        for line, key in source.identities():
            if hash(key) not in examined:
                continue
            if key in first:
                earlier, earlier_line = first[key]
                there = sources[earlier].name if earlier != number or not line else ""
                where = f"in {there}" if not earlier_line else f"on line {earlier_line}" + (there and f" of {there}")
                recording_id, chunk_id = key
                what = f"recording {quoted(recording_id)}"
                what = what if chunk_id == recording_id else f"chunk id {quoted(chunk_id)} of {what}"
                text = f"{what} is already {where}" if line else f"has {what}, which is already {where}"
                walk.mistakes.add(line, text, fix=_as_one_list(sources))
            else:
                first[key] = number, line
    walk.mistakes.add_unseen(sum(times for number, times in repeated.items() if number not in examined))


def _as_one_list(sources: Sequence[AudioSource]) -> str | None:
    """Return how to tell equal names in several folders apart: in a list they keep their folders."""
    if not all(isinstance(source, AudioList) and source.is_folder for source in sources):
        return None
    folders = " ".join(shlex.quote(source.name) for source in sources)
    return f"find {folders} -iname '*.wav' -o -iname '*.flac' | sort > recordings.txt"
