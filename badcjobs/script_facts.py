"""Reads a job script for the preflight: what it asks of Slurm, and how it starts badcjobs.

Its commands are ``script_story.py``'s business, what its options amount to is ``script_request.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from badcjobs.own_line import Grammar
from badcjobs.preflight.facts import Asked, Mistake, ScriptFacts, Start, WarningSignal
from badcjobs.scheduler.job_script import parse_signal, read_options, sbatch_words
from badcjobs.script_mistakes import file_mistakes, late_options, near_options, option_mistake, unread_lines
from badcjobs.script_request import INPUT_VARIABLES, read_asked
from badcjobs.script_story import Story
from badcjobs.shell_commands import Command, blank_here_documents, read_commands

_NAMED = re.compile(r"^[^#\n]*badcjobs", re.IGNORECASE | re.MULTILINE)
_SHELL = re.compile(r"(?:#!.*\b(?:ba|da|k|z)?sh\b|(?!#!))")
_NEXT_JOB = re.compile(r"^#SBATCH\s+(?:hetjob|packjob)\s*$.*", re.MULTILINE | re.DOTALL)
_FUNCTION = re.compile(r"^[ \t]*(?:function[ \t]+)?([\w-]+)[ \t]*\(\)", re.MULTILINE)
_AFTEROK = re.compile(r"\bafterok:")


@dataclass(frozen=True, slots=True)
class ReadScript:
    """A script, and what it asks for."""

    facts: ScriptFacts
    asked: Asked


def read_script(
    text: str, name: str, environ: Mapping[str, str], cwd: str = "", grammar: Grammar | None = None
) -> ReadScript:
    """Read a script as sbatch and its shell would; whatever sbatch would refuse is among its mistakes.

    ``grammar`` is what badcjobs takes; without it, nobody judges how the script calls it, or knows its sources.
    """
    said: list[str] = []
    given = _options(text, environ, said)
    signal, asked = _signal(given, said), read_asked(given, said)
    commands = read_commands(text) if _SHELL.match(text) else []
    story = Story(_exported(environ, given.get("export", "ALL")), given.get("chdir", ""), cwd, grammar)
    story.functions = frozenset(_FUNCTION.findall(text))
    for command in commands:
        story.take(command)
    facts = ScriptFacts(
        name=name,
        start=story.starts[-1] if story.starts else None,
        signal=signal,
        append=given.get("open-mode", "").startswith("a"),
        modules=tuple(story.modules),
        output=given.get("output"),
        error=given.get("error"),
        chdir=given.get("chdir"),
        mistakes=tuple(_mistakes(text, name, said)),
        near_options=tuple(near_options(text)),
        afterok=_afterok(given.get("dependency", ""), commands, story),
        other_commands=tuple(story.other_commands),
        wrong_calls=tuple(story.wrong_calls),
        starts=tuple(story.starts),
        traps=frozenset(story.traps),
        pipefail=story.pipefail,
        venvs=tuple(story.venvs),
        unfollowed=tuple(story.unfollowed),
        temporary=story.temporary,
    )
    if facts.start is None and _NAMED.search(text) and not facts.other_commands:
        facts = replace(facts, other_commands=("run",))  # started in a way that nobody here can follow
    if asked.gpus_per_task == 0 and not _wants_gpus(facts.start):
        asked = replace(asked, gpus_per_task=None)
    return ReadScript(facts, asked)


def _mistakes(text: str, name: str, said: Sequence[str]) -> Iterator[Mistake]:
    """Yield what sbatch would refuse, or not see; ``said`` is what is wrong with its options."""
    yield from file_mistakes(text, name)
    yield from unread_lines(text)
    yield from (option_mistake(one, text, name) for one in said)
    yield from late_options(blank_here_documents(text), name)


def _options(text: str, environ: Mapping[str, str], mistakes: list[str]) -> dict[str, str]:
    """Return sbatch's options under their long names; its own variables go before what the script says."""
    try:
        words = sbatch_words(_NEXT_JOB.sub("", text))  # the first part of a heterogeneous job runs the script
    except ValueError:  # a quotation mark too many
        return {}
    outside = {option: environ[name] for name, option in INPUT_VARIABLES.items() if environ.get(name)}
    return read_options(words, mistakes) | outside


def _afterok(dependency: str, commands: Sequence[Command], story: Story) -> Mistake | None:
    """Find a merge that is to wait for the success of an array: an analysis may well wait for another job's."""
    why = "is never met once a task of the array has failed, and the merge waits for ever"
    more = "   (merge says itself what is missing)"
    if _AFTEROK.search(dependency) and "merge" in story.other_commands and not story.starts:
        right = _AFTEROK.sub("afterany:", dependency)
        return Mistake(f": --dependency={dependency} {why}", f"#SBATCH --dependency={right}{more}")
    for one in commands:
        if _AFTEROK.search(one.text) and "sbatch" in one.text and "merge" in one.text:
            return Mistake(f" line {one.line}: afterok {why}", _AFTEROK.sub("afterany:", one.text) + more)
    return None


def _exported(environ: Mapping[str, str], export: str) -> dict[str, str]:
    """Return the variables that sbatch hands on to the job."""
    words = export.split(",")
    always = ("HOME", "USER", "LOGNAME", "SHELL", "PATH")
    kept = {name: value for name, value in environ.items() if "ALL" in words or name in always or name in words}
    return kept | {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def _wants_gpus(start: Start | None) -> bool:
    """Say whether a script would surely miss GPUs: one that only merges would not, nor one that works without.

    Simulated devices stand in for those that Slurm grants, so --simulate is no way to work without.
    """
    return start is not None and not start.hidden and not {"--cpu-workers", "--config"} & start.named


def _signal(given: Mapping[str, str], mistakes: list[str]) -> WarningSignal | None:
    if "signal" not in given:
        return None
    try:
        found = parse_signal(given["signal"])
    except ValueError as error:
        mistakes.append(str(error))
        return None
    return WarningSignal(found.signum.name.removeprefix("SIG"), found.lead_s, found.to_script)
