"""Nodes to leave out, as Slurm writes lists of them: gpu[01-04,07]."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from badcjobs.model import Finding, JobFacts
from badcjobs.report.words import plain

_MOST, _MOST_SHARE = 4, 0.1  # who leaves out more than that has another problem; one node may always go
_EXCLUDE = "#SBATCH --exclude="
_ABOVE = " The --exclude line above has it, too."


def exclude_lines(nodes: Iterable[str], facts: JobFacts) -> tuple[str, ...]:
    """Return the line that leaves all these nodes out; none where they are too many, see ``too_many``."""
    names = sorted(set(nodes))
    return (plain(_EXCLUDE + ",".join(names)),) if names and not _too_many(names, facts) else ()


def too_many(nodes: Iterable[str], facts: JobFacts) -> tuple[str, ...]:
    """Return the figure that stands for the line where there is none."""
    names = set(nodes)
    if not _too_many(names, facts):
        return ()
    where = f"{len(names):,} of {_nodes(facts):,} nodes"
    return (f"{where}: so wide a spread points to a common cause, not to these nodes",)


def _too_many(names: Collection[str], facts: JobFacts) -> bool:
    return len(names) > max(1, min(_MOST, _MOST_SHARE * _nodes(facts)))


def _nodes(facts: JobFacts) -> int:
    return len({task.node for task in facts.tasks} | {device.node for device in facts.devices})


def one_exclude_line(found: Sequence[Finding]) -> list[Finding]:
    """Put all nodes to leave out into the first such line: of several, sbatch takes the last alone."""
    names = [line.removeprefix(_EXCLUDE).split(",") for f in found for line in f.lines if line.startswith(_EXCLUDE)]
    lines = [_EXCLUDE + host_list(name for some in names for name in some)] if names else []
    told = list[Finding]()
    for finding in found:
        others = tuple(line for line in finding.lines if not line.startswith(_EXCLUDE))
        if len(others) < len(finding.lines):
            advice = finding.advice if lines else finding.advice + _ABOVE
            finding = replace(finding, lines=(*others, *lines), advice=advice)
            lines = []
        told.append(finding)
    return told


def host_list(nodes: Iterable[str]) -> str:
    """Return names as Slurm's host lists; numbers are put together only where they have as many digits."""
    numbers: dict[tuple[str, int], set[str]] = defaultdict(set)
    others = []
    for name in sorted(set(nodes)):
        # A number in the middle of a name is left alone: not every Slurm takes a word behind the bracket.
        if match := re.fullmatch(r"([A-Za-z][\w.-]*?)(\d+)", name, re.ASCII):
            numbers[match[1], len(match[2])].add(match[2])
        else:
            others.append(name)
    together = [_bracketed(prefix, sorted(found)) for (prefix, _), found in sorted(numbers.items())]
    return ",".join([*together, *others])


def _bracketed(prefix: str, numbers: list[str]) -> str:
    if len(numbers) == 1:
        return prefix + numbers[0]
    runs: list[list[str]] = []
    for number in numbers:
        if runs and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    inside = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{prefix}[{inside}]"
