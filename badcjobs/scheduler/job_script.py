"""Reads a job script as sbatch does: its ``#SBATCH`` lines, then the options of the command line, which go before them.

What only a cluster has (accounts, partitions, memory) is known and left alone; what sbatch would refuse is refused
here too, so that a script that works in the emulation works under Slurm.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from badcjobs.errors import BadInput
from badcjobs.scheduler.array_spec import ArraySpec, parse_array
from badcjobs.scheduler.local_options import FLAGS, OPTIONAL, SHORT, VALUES
from badcjobs.scheduler.local_values import EarlySignal, count_gpus, parse_limit, parse_memory, parse_signal

__all__ = ["EarlySignal", "JobRequest", "count_gpus", "parse_limit", "parse_signal", "read_request", "sbatch_words"]


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job asks for, as far as one machine can give it."""

    name: str | None = None
    array: ArraySpec | None = None
    time_s: int | None = None  # None: no limit
    warning: EarlySignal | None = None
    output: str | None = None
    error: str | None = None
    append: bool = False
    gpus: int = 0
    cpus: int | None = None
    ntasks: int | None = None
    mem_mib: int | None = None  # told to the job, and not enforced
    chdir: str | None = None
    export: str = "ALL"
    requeue: bool = True
    ignored: tuple[str, ...] = ()  # options that mean something on a cluster only


def read_request(script: str, options: Sequence[str] = ()) -> JobRequest:
    """Return what a script and the options beside it ask for; all mistakes are named at once."""
    if not script.startswith("#!"):
        raise BadInput(
            "this does not look like a batch script",
            why="sbatch wants #! and an interpreter in its first line",
            fix="begin the script with #!/bin/bash",
        )
    if "\r\n" in script:
        raise BadInput(
            "the batch script has line ends of DOS (CRLF)",
            why="sbatch does not take it, and the shell would not understand it",
            fix="sed -i 's/\\r$//' SCRIPT",
        )
    mistakes: list[str] = []
    try:
        words = sbatch_words(script)
    except ValueError as error:
        raise BadInput(f"a quote in the #SBATCH lines is not closed: {error}", fix="badcjobs guide local") from error
    given = dict(_split([*words, *options], mistakes))
    request = _understand(given, mistakes)
    if mistakes:
        raise BadInput(
            mistakes[0] if len(mistakes) == 1 else "sbatch would not take this script",
            why="\n".join(mistakes) if len(mistakes) > 1 else "sbatch would not take it either",
            fix="badcjobs guide local   (which options of sbatch count here)",
        )
    return request


def sbatch_words(script: str) -> list[str]:
    """Return the words of all ``#SBATCH`` lines before the first line that is no comment."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return words


def _split(words: Sequence[str], mistakes: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value) of every option; flags have an empty value."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and word[1:2] in SHORT:
            name, value = SHORT[word[1]], word[2:]
            equals = "=" if value else ""
        else:
            name, equals, value = "", "", ""
        if name not in VALUES | FLAGS | OPTIONAL:
            mistakes.append(f"sbatch knows no option {word}")
            continue
        if name in VALUES and not equals:
            if not left:
                mistakes.append(f"{word} needs a value")
                continue
            value = left.pop(0)
        yield name, value


def _understand(given: Mapping[str, str], mistakes: list[str]) -> JobRequest:
    def number(name: str) -> int | None:
        text = given.get(name)
        if text is None or (text.isascii() and text.isdecimal() and int(text) > 0):
            return None if text is None else int(text)
        mistakes.append(f"--{name}={text} is no number above 0")
        return None

    request = JobRequest(
        name=given.get("job-name"),
        output=given.get("output"),
        error=given.get("error"),
        append=given.get("open-mode", "truncate").startswith("a"),
        cpus=number("cpus-per-task"),
        ntasks=number("ntasks"),
        chdir=given.get("chdir"),
        export=given.get("export", "ALL"),
        requeue="no-requeue" not in given,
        ignored=tuple(sorted(name for name in given if name not in _UNDERSTOOD)),
    )
    try:
        array = parse_array(given["array"]) if given.get("array") else None
        request = replace(request, array=array)
    except BadInput as error:
        mistakes.append(f"{error.what}: {error.why}")
    try:
        time_s = parse_limit(given["time"]) if "time" in given else None
        warning = parse_signal(given["signal"]) if "signal" in given else None
        mem_mib = parse_memory(given["mem"]) if given.get("mem", "0") != "0" else None
        request = replace(request, time_s=time_s, warning=warning, mem_mib=mem_mib, gpus=count_gpus(given))
    except ValueError as error:
        mistakes.append(str(error))
    mistakes += _beyond_one_machine(given)
    return request


_UNDERSTOOD = {
    "array", "time", "signal", "output", "error", "open-mode", "job-name", "gpus-per-node", "gres", "gpus",
    "gpus-per-task", "cpus-per-task", "ntasks", "chdir", "export", "nodes", "requeue", "no-requeue", "parsable",
    "ntasks-per-node", "quiet", "verbose", "wait",
}  # fmt: skip


def _beyond_one_machine(given: Mapping[str, str]) -> list[str]:
    found = []
    if given.get("open-mode", "a")[:1] not in ("a", "t"):
        found.append(f"--open-mode={given['open-mode']} is neither append nor truncate")
    nodes = given.get("nodes", "1").partition("-")[0]
    if not nodes.isdecimal():
        found.append(f"--nodes={given['nodes']} is no number")
    elif int(nodes) > 1:
        found.append(f"--nodes={given['nodes']}: the emulation is one machine")
    return found
