"""Rules of ``check`` and ``plan`` about the source: files without audio, files that are not here, names left out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from badcjobs.model import BROKEN_AUDIO, EMPTY_FILE, NOT_AUDIO, UNREADABLE_FILE
from badcjobs.paths import shell_line
from badcjobs.planning.findings import Advice, Cases, note_if, problem_if, rules, warning_if
from badcjobs.planning.plan_survey import Survey
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.sources.mistakes import PERHAPS_AUDIO, SHOWN, left_out_words, with_more
from badcjobs.sources.places import place_words
from badcjobs.words import count

_GO_ON = "ls -l {path}   (a run does the others; restore the files, then run the same command again)"
# fault → how bad it is, what happens, a line to paste about the first file
_FAULTS = {
    EMPTY_FILE: (WARNING, "without any audio; counted as 0 hours, and would fail", _GO_ON),
    NOT_AUDIO: (PROBLEM, "of no audio format, named like audio; counted as 0 hours, and would fail", "file {path}"),
    BROKEN_AUDIO: (WARNING, "truncated, or with a wrong header; only what is there is counted{failing}", _GO_ON),
    UNREADABLE_FILE: (PROBLEM, "that cannot be read from here; counted as 0 hours, and would fail", "ls -l {path}"),
}


def to_facts(survey: Survey) -> dict[str, Any]:
    """Return files, bytes, and every file that gives no audio, for JSON documents."""
    walk, size = survey.walk, survey.walk.size
    return {
        "files": size.files,
        "bytes": size.total_bytes,
        "files_of_unknown_size": size.unsized,
        "not_fetched": size.not_here,
        "not_fetched_bytes": size.not_here_total_bytes,
        "left_out_files": dict(walk.remarks.left_out),
        "places": survey.places and asdict(survey.places),
        "faults": {fault: names for fault, names in walk.remarks.faults.items() if names},
    }


def _left_out(facts: Any) -> Cases:
    left_out = facts.survey.mistakes
    if many := left_out.rows + left_out.folders + len(left_out.whole):
        details = with_more(left_out.examples(SHOWN)[0], left_out.count)
        yield {"left_out": left_out, "many": many, "details": details, "fix": left_out.fix or "badcjobs check --help"}


def _faults(facts: Any) -> Cases:
    survey = facts.survey
    nothing = survey.nothing_there
    failing = f"; {count(nothing, 'chunk')} without any of it would fail" if nothing else ""
    for fault, (severity, what, fix) in _FAULTS.items():
        if names := survey.walk.remarks.faults[fault]:
            path = shell_line(Path(survey.walk.remarks.first_fault[fault]))
            yield {
                "severity": severity, "fault": fault.replace("_", " "), "many": len(names), "details": names,
                "what": what.format(failing=failing), "fix": fix.format(path=path),
            }  # fmt: skip


def _unknown(facts: Any) -> Cases:
    lengths, elsewhere = facts.survey.lengths, facts.survey.walk.size.not_here_unknown
    names = facts.survey.unknown_names
    yield {"many": lengths.unknown - elsewhere, "guess_s": lengths.guess_ms / 1000, "details": names}


def _not_here(facts: Any) -> Cases:
    size = facts.survey.walk.size
    if size.not_here and not facts.survey.walk.needs_audio:  # then each of them is a mistake
        how = "planned by the times of their rows"
        if size.not_here_unknown:
            is_known = size.guessed_s() is not None
            how = "their lengths are estimated by their size" if is_known else "planned with the mean of the others"
        yield {"size": size, "how": how, "fix": size.not_here_fix or ""}


def _rates(facts: Any) -> Cases:
    rates = sorted(facts.survey.walk.rates_hz.items())
    yield {"rates": [f"{count(many, 'file')} with {hz:,} Hz" for hz, many in rates]}


def _left_out_files(facts: Any) -> Cases:
    if counts := facts.survey.walk.remarks.left_out:
        alarms = any(one in PERHAPS_AUDIO for one in counts)
        yield {"words": left_out_words(counts), "severity": WARNING if alarms else facts.quiet}


def _places(facts: Any) -> Cases:
    places = facts.survey.places
    if places is None:
        return
    case = {"severity": facts.quiet, "text": place_words(places), "fix": ""}
    if places.left_out:
        case["severity"] = WARNING
        case["fix"] = "add them to the list, or give all others a place: --config recordings.region=CA-NT"
    yield case


PLACE_RULE = rules("places", _places)(Advice("{severity}", "{text}", "{fix}"))
SOURCE_RULES = (
    PLACE_RULE,
    rules("left out", _left_out)(
        problem_if(
            "{left_out.words} cannot be used: badcjobs run would fail {many:it|them}, for the audio cannot be used",
            "{fix}",
            lambda f: f.many == f.left_out.missing,
        ),
        problem_if(
            "{left_out.words} cannot be used: badcjobs run would refuse {many:it|them}, or fail those whose audio"
            " cannot be used",
            "{fix}",
        ),
    ),
    rules("{fault}", _faults)(Advice("{severity}", "{many:count file} {what}", "{fix}")),
    rules("unknown length", _unknown)(
        note_if(
            "{many:count file} without a length in the header; counted with {guess_s:,.1f} s each",
            when="many",
        )
    ),
    rules("ffmpeg", lambda facts: [{"details": facts.survey.walk.for_ffmpeg[:SHOWN]}])(
        warning_if(
            "ffmpeg is not on PATH: files in M4A, AAC, WMA or the like have no known length and are not cut",
            "module load ffmpeg   (or: apt install ffmpeg)",
            when="details",
        )
    ),
    rules("not here", _not_here)(
        warning_if(
            "git-annex has not fetched {size.not_here:count file} ({size.not_here_total_bytes:size}); {how};"
            " badcjobs run would fail them",
            "{fix}",
        )
    ),
    rules("sample rates", _rates)(
        note_if("they differ: {rates:list}; resampling may make an engine slower", when=lambda f: len(f.rates) > 1)
    ),
    rules("audio", lambda facts: [{"many": len(gone := facts.survey.walk.not_there), "details": gone[:3]}])(
        note_if(
            "{many:count file} {many:is|are} missing or cannot be used, of those that were looked at; rows with an"
            " end are planned by their times",
            "badcjobs check SOURCE   (looks at every file; --root DIR: where relative source_paths start from)",
            when="many",
        )
    ),
    rules("audio", lambda facts: [{"text": one} for one in facts.survey.walk.remarks.twice_lines()])(
        warning_if("{text}", "badcjobs check FOLDER   (one source that contains the others)")
    ),
    rules("left out", _left_out_files)(Advice("{severity}", "{words}", "badcjobs guide audio   (formats)")),
    rules("passed over", lambda facts: [{"text": one} for one in facts.survey.walk.remarks.notes()])(note_if("{text}")),
)
