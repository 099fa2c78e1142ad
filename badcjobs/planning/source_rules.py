"""Rules of ``check`` and ``plan`` about the source: files without audio, files that are not here, names left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from badcjobs.model import BROKEN_AUDIO, EMPTY_FILE, NOT_AUDIO, UNREADABLE_FILE, PlaceCounts
from badcjobs.paths import shell_line
from badcjobs.planning.findings import Remark, note, problem, warning
from badcjobs.planning.plan_survey import Survey
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.sources.mistakes import PERHAPS_AUDIO, SHOWN, left_out_words, with_more
from badcjobs.sources.places import place_words
from badcjobs.words import count, data_size

_GO_ON = "ls -l {path}   (a run does the others; restore the files, then run the same command again)"
# fault → how bad it is, what happens, a line to paste about the first file
_FAULTS = {
    EMPTY_FILE: (WARNING, "without any audio; counted as 0 hours, and would fail", _GO_ON),
    NOT_AUDIO: (PROBLEM, "of no audio format, named like audio; counted as 0 hours, and would fail", "file {path}"),
    BROKEN_AUDIO: (WARNING, "truncated, or with a wrong header; only what is there is counted", _GO_ON),
    UNREADABLE_FILE: (PROBLEM, "that cannot be read from here; counted as 0 hours, and would fail", "ls -l {path}"),
}


def to_facts(survey: Survey) -> dict[str, Any]:
    """Return the chunks and files of a source, and every file that gives no audio, for JSON documents."""
    walk = survey.walk
    size = walk.size
    return {
        "chunks": survey.lengths.rows,
        "longest_s": survey.lengths.longest_ms / 1000,
        "of_unknown_length": survey.lengths.unknown,
        "files": size.files,
        "bytes": size.total_bytes,
        "files_of_unknown_size": size.unsized,
        "not_fetched": size.not_here,
        "not_fetched_bytes": size.not_here_total_bytes,
        "left_out_files": dict(walk.remarks.left_out),
        "places": survey.places and asdict(survey.places),
        "faults": {fault: names for fault, names in walk.remarks.faults.items() if names},
    }


def check_survey(survey: Survey, quiet: str) -> Iterator[Remark]:
    """Return what is odd about a source; ``quiet`` is the severity of what must not alarm."""
    remarks = survey.walk.remarks
    yield from check_places(survey.places, quiet)
    yield from _check_left_out(survey)
    yield from _check_faults(survey)
    yield from _check_lengths(survey)
    yield from _check_not_here(survey)
    if remarks.left_out:
        may_be_audio = any(ending in PERHAPS_AUDIO for ending in remarks.left_out)
        severity = WARNING if may_be_audio else quiet
        yield Remark(
            severity,
            "left out",
            left_out_words(remarks.left_out),
            "badcjobs guide audio   (formats)",
        )
    for text in remarks.notes():
        yield note("passed over", text)


def check_places(places: PlaceCounts | None, quiet: str) -> Iterator[Remark]:
    """Say how many recordings have a place; those without one would be analysed differently."""
    if places is None:
        return
    if places.left_out:
        fix = "add them to the list, or give all others a place: --config recordings.region=CA-NT"
        yield warning("places", place_words(places), fix)
    else:
        yield Remark(quiet, "places", place_words(places))


def _check_left_out(survey: Survey) -> Iterator[Remark]:
    mistakes = survey.mistakes
    if mistakes.count:
        text = (
            f"{mistakes.words}, which are left out: badcjobs run would refuse them, or fail those without usable audio"
        )
        details = with_more(mistakes.examples(SHOWN)[0], mistakes.count)
        yield problem(
            "left out",
            text,
            mistakes.fix or "badcjobs check --help",
            tuple(details),
        )


def _check_faults(survey: Survey) -> Iterator[Remark]:
    """Name every file that gives no audio, or less than its header says."""
    remarks = survey.walk.remarks
    for fault, (severity, effect, fix) in _FAULTS.items():
        names = remarks.faults[fault]
        if not names:
            continue
        text = f"{count(len(names), 'file')} {effect}"
        if fault == BROKEN_AUDIO and survey.nothing_there:
            text += f"; {count(survey.nothing_there, 'chunk')} without any of it would fail"
        path = shell_line(Path(remarks.first_fault[fault]))
        yield Remark(
            severity,
            fault.replace("_", " "),
            text,
            fix.format(path=path),
            tuple(names),
        )


def _check_lengths(survey: Survey) -> Iterator[Remark]:
    """Report lengths that are not known."""
    walk = survey.walk
    lengths = survey.lengths
    unknown = lengths.unknown - walk.size.not_here_unknown
    if unknown:
        counted = f"counted with {lengths.guess_ms / 1000:,.1f} s each"
        text = f"{count(unknown, 'file')} without a length in the header; {counted}"
        yield note("unknown length", text, details=tuple(survey.unknown_names))
    if walk.for_ffmpeg:
        text = "ffmpeg is not on PATH: files in M4A, AAC, WMA or the like have no known length and are not cut"
        fix = "module load ffmpeg   (or: apt install ffmpeg)"
        yield warning("ffmpeg", text, fix, tuple(walk.for_ffmpeg[:SHOWN]))


def _check_not_here(survey: Survey) -> Iterator[Remark]:
    """Report files that git-annex has not fetched, and those that are missing."""
    walk = survey.walk
    size = walk.size
    if size.not_here and not walk.needs_audio:  # then each of them is a mistake
        amount = f"{count(size.not_here, 'file')} ({data_size(size.not_here_total_bytes)})"
        how = "planned by the times of their rows"
        if size.not_here_unknown:
            how += ", or with a length that is estimated by the others"
        text = f"git-annex has not fetched {amount}; {how}; badcjobs run would fail them"
        yield warning("not here", text, size.not_here_fix)
    if walk.not_there:
        missing = count(len(walk.not_there), "file")
        text = f"{missing} missing or unusable, of those looked at; rows with an end are planned by their times"
        fix = "badcjobs check SOURCE   (looks at every file; --root DIR: where relative source_paths start from)"
        yield note("audio", text, fix, tuple(walk.not_there[:3]))
