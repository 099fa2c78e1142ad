"""Reads a job script as sbatch does: its ``#SBATCH`` lines, then the options of the command line, which go before them.

What only a cluster has (accounts, partitions, memory) is known and left alone; what sbatch would refuse is refused
here too, so that a script that works in the emulation works under Slurm.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from badcjobs.errors import BadInput
from badcjobs.scheduler.array_spec import ArraySpec, parse_array
from badcjobs.scheduler.local_echo import echoed_variables
from badcjobs.scheduler.local_getopt import read_options
from badcjobs.scheduler.local_gpus import count_cores, count_gpus, count_tasks, needs_other_nodes, whole
from badcjobs.scheduler.local_values import EarlySignal, parse_limit, parse_signal

__all__ = [
    "EarlySignal", "JobRequest", "count_gpus", "parse_limit", "parse_signal", "read_options", "read_request",
    "sbatch_words",
]  # fmt: skip

T = TypeVar("T")

_ONE_MACHINE = "the emulation is one machine"


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
    exclusive: bool = False  # the whole machine, with all its devices
    cpus: int | None = None  # --cpus-per-task
    ntasks: int | None = None
    cores: int = 1  # altogether
    told: Mapping[str, str] = field(default_factory=dict)  # the variables that only repeat an option
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
    in_script, beside = read_options(words, mistakes), read_options(options, mistakes)
    mistakes += [*_contradictions(in_script), *_contradictions(beside)]
    given = in_script | beside
    request = _understand(given, mistakes)
    if mistakes:
        raise BadInput(
            mistakes[0] if len(mistakes) == 1 else "the options of this job are wrong",
            why="\n".join(mistakes) if len(mistakes) > 1 else _why(mistakes[0]),
            fix="badcjobs guide local   (which options count here)",
        )
    return request


def _why(mistake: str) -> str:
    return "only a cluster can do it" if mistake.endswith(_ONE_MACHINE) else "Slurm would not take it either"


def sbatch_words(script: str) -> list[str]:
    """Return the words of all ``#SBATCH`` lines before the first line that is no comment."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def _understand(given: Mapping[str, str], mistakes: list[str]) -> JobRequest:
    def tried(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except ValueError as error:
            mistakes.extend([str(error)] if str(error) not in mistakes else [])
        except BadInput as error:
            mistakes.append(f"{error.what}: {error.why}")
        return None

    request = JobRequest(
        name=given.get("job-name"),
        array=tried(lambda: parse_array(given["array"])) if given.get("array") else None,
        time_s=tried(lambda: parse_limit(given["time"])) if "time" in given else None,
        warning=tried(lambda: parse_signal(given["signal"])) if "signal" in given else None,
        output=given.get("output"),
        error=given.get("error"),
        append=given.get("open-mode", "truncate").startswith("a"),
        gpus=tried(lambda: count_gpus(given)) or 0,
        exclusive=given.get("exclusive") == "",
        cpus=tried(lambda: whole(given, "cpus-per-task")),
        ntasks=tried(lambda: count_tasks(given)),
        cores=tried(lambda: count_cores(given)) or 1,
        told=tried(lambda: echoed_variables(given)) or {},
        chdir=given.get("chdir"),
        export=given.get("export", "ALL"),
        requeue="no-requeue" not in given,
        ignored=tuple(sorted(name for name in given if name not in _UNDERSTOOD)),
    )
    mistakes += _wrong_words(given)
    mistakes += filter(None, [tried(lambda: _beyond_one_machine(given))])
    return request


_UNDERSTOOD = {
    "array", "time", "signal", "output", "error", "open-mode", "job-name", "gpus-per-node", "gres", "gpus",
    "gpus-per-task", "cpus-per-task", "ntasks", "chdir", "export", "nodes", "requeue", "no-requeue", "parsable",
    "ntasks-per-node", "quiet", "verbose", "wait", "exclusive", "gpus-per-socket", "sockets-per-node",
}  # fmt: skip

_NOT_TOGETHER = (("mem", "mem-per-cpu", "mem-per-gpu"), ("cpus-per-gpu", "cpus-per-task"))


def _contradictions(given: Mapping[str, str]) -> list[str]:
    """Name options that exclude each other; one of the command line may take the place of another in the script."""
    found = ([f"--{name}" for name in names if name in given] for names in _NOT_TOGETHER)
    return [f"{' and '.join(names)} exclude each other" for names in found if len(names) > 1]


def _wrong_words(given: Mapping[str, str]) -> list[str]:
    found = []
    if given.get("open-mode", "a")[:1] not in ("a", "t"):
        found.append(f"--open-mode={given['open-mode']} is neither append nor truncate")
    if given.get("exclusive", "") not in ("", "user", "mcs", "topo"):
        found.append(f"--exclusive={given['exclusive']} is neither user nor mcs")
    if not given.get("nodes", "1").partition("-")[0].isdecimal():
        found.append(f"--nodes={given['nodes']} is no number")
    return found


def _beyond_one_machine(given: Mapping[str, str]) -> str | None:
    nodes = given.get("nodes", "1").partition("-")[0]
    several = f"--nodes={given['nodes']}" if nodes.isdecimal() and int(nodes) > 1 else needs_other_nodes(given)
    return None if several is None else f"{several}: {_ONE_MACHINE}"
