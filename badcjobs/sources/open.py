"""Open SOURCE arguments and read their chunks: the file of this folder to read first."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import NO_CUTTING, Chunk, ChunkKey, Cutting, PlaceCounts, names_place
from badcjobs.paths import shell_line
from badcjobs.settings import RunSettings, absolute
from badcjobs.sources.audio_files import AUDIO_FORMATS, ReadHeader, is_audio, read_header, search_folders
from badcjobs.sources.badc_manifest import REQUIRED, Manifest
from badcjobs.sources.folder import AudioList, audio_folder, audio_list, given_audio
from badcjobs.sources.mistakes import Mistakes, Remarks, quoted
from badcjobs.sources.tables import column_names, copy_command, read_list
from badcjobs.sources.walk import WHOLE, Shard, Walk, do_nothing
from badcjobs.words import count

log = logging.getLogger(__name__)

NoteKey = Callable[[ChunkKey], None]
# Each kind has a name as the user wrote it, a description for logs, and a message ``without_rows`` for an empty source.
# ``chunks`` yields the rows of this shard, and notes the mistakes of all rows and of the audio of this shard.
# ``identities`` yields line number (0: none) and identity of every row; a recording that is cut is one row.
# Both read the source from its start, in the same order, every time.
AudioSource = Manifest | AudioList
_NO_LENGTHS: Mapping[str, float] = {}
Row = TypeVar("Row")


@dataclass(frozen=True)
class Sources:
    """The sources of a run, recognised but not yet read.

    ``picked_by_position``: this task's manifest was picked by its position in the array, so it is not divided into
    shards again. ``manifests_listed``: the length of a list of manifests, which is the number of array tasks it needs;
    None: no such list was given.
    """

    parts: tuple[AudioSource, ...]
    picked_by_position: bool = False
    manifests_listed: int | None = None
    cutting: Cutting = NO_CUTTING
    read_header: ReadHeader = read_header
    left_out: frozenset[str] = frozenset()  # ids of recordings that are left out, because they have no place
    places: PlaceCounts | None = None  # None: not looked up, or no place is given

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Return a description of each source, for logs."""
        return tuple(part.description for part in self.parts)

    def chunks(
        self, shard: Shard, remarks: Remarks | None = None, while_waiting: Callable[[], None] = do_nothing
    ) -> Iterator[Chunk]:
        """Yield this shard's chunks in source order; read every row, but look only at this shard's audio.

        Mistakes are collected and raised as one BadInput at the end, so the chunks are valid only after the iteration
        has ended without an error. ``remarks`` collects warnings, and decides whether missing audio is a mistake; it
        always is if all audio is missing. ``while_waiting`` is called from time to time while files are slow; an error
        that it raises ends the reading.
        """
        mistakes = Mistakes([part.name for part in self.parts])
        walk = Walk(
            shard,
            mistakes,
            self.cutting,
            remarks or Remarks(),
            self.read_header,
            while_waiting,
        )
        walk.left_out = self.left_out
        listed = 0
        for listed, chunk in enumerate(self.read_parts(walk, lambda part: part.chunks(walk)), 1):  # noqa: B007
            walk.remarks.note(chunk)
            yield chunk
        note_repeats(self.parts, walk)
        if walk.remarks.keeps_missing and mistakes.count == mistakes.missing < listed:
            walk.remarks.missing = mistakes
            return
        mistakes.raise_any()

    def read_identities(self, note: NoteKey, lengths: Mapping[str, float] = _NO_LENGTHS) -> Remarks:
        """Call ``note`` for every chunk that ``chunks`` would yield for any shard, without looking at the audio.

        Recordings that are cut are an exception: their chunks depend on their length, which is read from the header
        unless it is in ``lengths`` (seconds, by recording_id). Mistakes in the rows are raised as by ``chunks``;
        repeated identities are not checked. The remarks are only about names, because hardly any file was looked at.
        """
        mistakes = Mistakes([part.name for part in self.parts])
        remarks = Remarks(keeps_missing=True)
        walk = _IdentityWalk(
            WHOLE,
            mistakes,
            self.cutting,
            remarks,
            self.read_header,
            lengths=lengths,
        )
        walk.note = note
        walk.left_out = self.left_out
        for chunk in self.read_parts(walk, lambda part: part.chunks(walk)):
            note(chunk.key)
        if mistakes.count > mistakes.missing:
            mistakes.raise_any()
        return remarks

    def read_parts(self, walk: Walk, rows_of: Callable[[AudioSource], Iterator[Row]]) -> Iterator[Row]:
        """Yield the rows of one source after the other; report a source that cannot be read or is empty."""
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

    note: NoteKey

    def takes(self, recording_id: str, chunk_id: str, *, to_cut: bool = False) -> bool:
        wanted = recording_id not in self.left_out
        if wanted and not to_cut:
            self.note((recording_id, chunk_id))
        self.rows += 1
        return wanted and to_cut


def open_sources_of(settings: RunSettings, cwd: Path, position: int | None = None) -> Sources:
    """Open the sources that the settings of a run name; see ``open_sources``."""
    root = None if settings.root is None else cwd / settings.root
    paths = [Path(absolute(cwd, path)) for path in settings.source]
    return open_sources(paths, root=root, position=position, cutting=settings.cutting)


def open_sources(
    paths: Sequence[Path], *, root: Path | None, position: int | None = None, cutting: Cutting = NO_CUTTING
) -> Sources:
    """Recognise each SOURCE; raise one BadInput that names all sources that cannot be used.

    ``root`` is the folder that relative paths inside sources are relative to. Without it, a path is searched in the
    working directory, then in the folder of the source file.

    ``position`` (from 0) is this task's position in its array: it picks one manifest of a list of manifests;
    None means all of them. Other sources do not depend on it.

    ``cutting`` defines how recordings are cut into chunks.
    """
    if root is not None and not os.path.isdir(root):  # noqa: PTH112  (Path.is_dir raises without permission)
        why = "--root is the folder that source_paths are relative to"
        raise BadInput(f"no such folder: {root}", why=why, fix=shell_line("ls", root.parent))
    if problems := cutting.problems():
        raise BadInput("\n".join(problems), fix="--chunk-length 294 --overlap 6")
    mistakes = Mistakes([str(path) for path in paths])
    parts = []
    audio_files = []
    real = {path: Path(os.path.realpath(path)) for path in paths}
    for mistakes.source, path in enumerate(paths):
        source = recognise(path, root, mistakes)
        if isinstance(source, Path) and is_audio(path.name):
            audio_files.append(path)
        elif isinstance(source, Path):
            if len(paths) == 1:
                return _with_cutting(_open_listed(path, root, position), cutting)
            mistakes.add(0, "is a list of manifests, which must be the only SOURCE")
        elif isinstance(source, AudioList) and source.is_folder and {*real.values()} & {*real[path].parents}:
            mistakes.add(0, "is inside another SOURCE: its recordings would be processed twice")
        elif source is not None:
            parts.append(source)
    mistakes.raise_any()
    if audio_files:
        parts.append(given_audio(audio_files, root))
    return _with_cutting(Sources(tuple(parts)), cutting)


def _with_cutting(sources: Sources, cutting: Cutting) -> Sources:
    """Return the sources with this cutting; refuse, or name, a setting that has no effect."""
    kinds = {isinstance(part, Manifest) for part in sources.parts}
    if cutting.cuts_recordings and kinds == {True}:
        name = sources.parts[0].name
        log.info("--chunk-length has no effect: %s is a manifest, which defines where each chunk starts and ends", name)
    if cutting.rows is not None and kinds == {False}:
        raise BadInput(
            f"run.cut = {str(cutting.rows).lower()} needs a manifest",
            why=f"{sources.parts[0].name} is not a manifest: it has no rows with start and end",
            fix="the same command without it; --chunk-length 294 --overlap 6 cuts complete recordings",
        )
    return replace(sources, cutting=cutting)


def _open_listed(path: Path, root: Path | None, position: int | None) -> Sources:
    """Open the manifest at this position of a list, counted from 0; None: all of them."""
    line_of = _read_manifest_list(path)
    picked = list(line_of)
    if position is not None:
        last = len(line_of) - 1
        if not 0 <= position <= last:
            raise BadInput(
                f"{path} has no manifest for position {position}: it lists {count(len(line_of), 'manifest')}",
                why=f"an array task takes the manifest at its position, counted from 0; the last one is {last}",
                fix=f"#SBATCH --array=0-{last}",
            )
        picked = [picked[position]]

    # Relative to the working directory, otherwise to the folder of the list; not to --root, which is for audio.
    manifests = [Path(text) if os.path.exists(text) else path.parent / text for text in picked]  # noqa: PTH110  (it may raise)
    mistakes = Mistakes([str(manifest) for manifest in manifests])
    parts = []
    for mistakes.source, manifest in enumerate(manifests):
        source = recognise(manifest, root, mistakes)
        if isinstance(source, Manifest):
            line = line_of[picked[mistakes.source]]
            parts.append(replace(source, named_by=f" (line {line} of {path})"))
    mistakes.raise_any()
    return Sources(
        tuple(parts),
        picked_by_position=position is not None,
        manifests_listed=len(line_of),
    )


def _read_manifest_list(path: Path) -> dict[str, int]:
    """Return the manifests that a list names, each with its line; a list is about as long as an array has tasks."""
    mistakes = Mistakes([str(path)])
    line_of: dict[str, int] = {}
    for line, text in read_list(path, mistakes):
        if not is_manifest(text):
            mistakes.add(line, f"{quoted(text)} is not a manifest (.csv), unlike the first line")
        elif text in line_of:
            mistakes.add(line, f"{quoted(text)} is already on line {line_of[text]}")
        else:
            line_of[text] = line
    mistakes.raise_any()
    return line_of


# --- recognise a path -------------------------------------------------------------------------------------------------


_LOOK_BYTES = 65536
Recognised = AudioSource | Path  # a Path: a recording (all of them become one list), or a list of manifests


def is_manifest(name: str) -> bool:
    """Return whether a name has the extension of a manifest."""
    return name.lower().endswith(".csv")


def recognise(path: Path, root: Path | None, mistakes: Mistakes) -> Recognised | None:
    """Return the kind of source; None, with the mistake added, if the path cannot be a source."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return audio_folder(path)
        if not stat.S_ISREG(mode):
            mistakes.add(
                0, "is neither a file nor a folder", why="sources are read more than once, so a pipe cannot be used"
            )
            return None
        if is_audio(path.name):
            return path
        return _recognise_text(path, root, mistakes)
    except FileNotFoundError:
        mistakes.add(0, "does not exist", fix=shell_line("ls", "-l", path.parent))
    except OSError as error:
        mistakes.add(
            0,
            "cannot be read",
            why=error.strerror or str(error),
            fix=shell_line("ls", "-ld", path),
        )
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
    first_line = start.splitlines()[0].decode("utf-8-sig", errors="replace")
    columns = column_names(first_line.split(","))
    if is_manifest(path.name) or {*REQUIRED[:2]} <= {*columns}:
        return Manifest(path, search_folders(path, root), has_places=names_place(columns))
    if b"\0" in start:
        mistakes.add(0, f"is neither audio ({AUDIO_FORMATS}) nor text")
        return None
    _, first = next(read_list(path, Mistakes([str(path)])), (0, ""))
    if is_audio(first):
        return audio_list(path, root)
    if is_manifest(first):
        return path
    if first:
        why = f"its first line is {quoted(first)}"
        mistakes.add(0, f"lists neither audio ({AUDIO_FORMATS}) nor manifests (.csv)", why=why)
    else:
        mistakes.add(0, "lists nothing", why="it has only blank lines and comments")
    return None


# --- repeated identities ----------------------------------------------------------------------------------------------

# Identities; the rest is only counted, by hash, so that a manifest pasted twice does not fill the memory.
_EXAMINED = 1000


def note_repeats(sources: Sequence[AudioSource], walk: Walk) -> bool:
    """Report every row whose identity an earlier row of any source has; return whether there are any."""
    repeated = walk.seen.repeated()
    if not repeated:
        return False
    examined = set(islice(repeated, _EXAMINED))
    fix = None
    if all(isinstance(source, AudioList) and source.is_folder for source in sources):
        folders = shell_line(*(folder.name for folder in sources))
        # In a list, equal names keep their folders.
        fix = f"find {folders} -iname '*.wav' -o -iname '*.flac' > recordings.txt"
    first: dict[ChunkKey, str] = {}
    for walk.mistakes.source, source in enumerate(sources):
        for line, key in source.identities():
            if hash(key) not in examined:
                continue
            if key in first:
                walk.mistakes.add(
                    line, f"has the chunk {quoted(Chunk(*key, '', '').name)} again, after {first[key]}", fix=fix
                )
            else:
                first[key] = f"{source.name} line {line}" if line else source.name
    walk.mistakes.count += sum(times for number, times in repeated.items() if number not in examined)
    return True
