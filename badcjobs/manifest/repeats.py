"""Rows with the same identity: suspected from hashes while the sources are read, found by reading them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice

from badcjobs.manifest.folder import Folder
from badcjobs.manifest.mistakes import quoted
from badcjobs.manifest.walk import Source, Walk

_EXAMINED = 1000  # identities; the rest is counted by hash, so that a manifest pasted twice fits into memory too


def note_repeats(sources: Sequence[Source], walk: Walk) -> None:
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
                where = _where(earlier_line, there)
                text = f"{_say(key)} is already {where}" if line else f"has {_say(key)}, which is already {where}"
                walk.mistakes.add(line, text, fix=_as_one_list(sources))
            else:
                first[key] = number, line
    walk.mistakes.add_unseen(sum(times for number, times in repeated.items() if number not in examined))


def _say(key: tuple[str, str]) -> str:
    recording_id, chunk_id = key
    recording = f"recording {quoted(recording_id)}"
    return recording if chunk_id == recording_id else f"chunk id {quoted(chunk_id)} of {recording}"


def _where(line: int, there: str) -> str:
    if not line:
        return f"in {there}"
    return f"on line {line} of {there}" if there else f"on line {line}"


def _as_one_list(sources: Sequence[Source]) -> str | None:
    """Return how to tell equal names in several folders apart: in a list they keep their folders."""
    if not all(isinstance(source, Folder) for source in sources):
        return None
    folders = " ".join(shlex.quote(source.name) for source in sources)
    return f"find {folders} -iname '*.wav' -o -iname '*.flac' | sort > recordings.txt"
