"""What a job's numbers mean: what went wrong, or cost more than it had to, and what to do. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from badcjobs.report import rules_devices, rules_requests, rules_tasks, rules_unused, rules_waiting
from badcjobs.report.rules import EXCLUDE, PROBLEM, SEVERITIES, Finding
from badcjobs.report.summary import Summary

_TOPICS = (
    rules_tasks.MISSING,
    rules_tasks.SILENT,
    rules_tasks.KILLED,
    rules_tasks.LOST,
    rules_tasks.AGAIN,
    rules_tasks.POISON,
    rules_tasks.OUT_OF_MEMORY,
    rules_tasks.FAILED,
    rules_devices.BROKEN,
    rules_unused.ON_CPU,
    rules_unused.UNUSED,
    rules_devices.HOT,
    rules_devices.HUNGRY,
    rules_devices.FOREIGN,
    rules_waiting.WAITING,
    rules_devices.SLOW,
    rules_requests.MEMORY,
    rules_requests.TIME,
    rules_requests.CORES,
    rules_devices.GAPS,
    rules_devices.ENERGY,
)
# The stable names; each has a line in the guide.
KINDS = tuple(dict.fromkeys(rule.kind for topic in _TOPICS for rule in topic.rules))


def find(summary: Summary) -> tuple[Finding, ...]:
    """Return what is worth saying about a job, worst first; nothing when all is well."""
    facts = summary.facts
    found = [finding for topic in _TOPICS for finding in topic.judge(facts, summary)]
    if all(task.job_id.startswith("local") for task in facts.tasks):  # without Slurm its lines mean nothing
        found = [replace(f, lines=tuple(line for line in f.lines if not line.startswith("#SBATCH"))) for f in found]
    return tuple(_one_exclude_line(sorted(found, key=_rank)))


def _rank(finding: Finding) -> tuple[int, float]:
    """Return what findings are sorted by: missing science first, then what cost most GPU time."""
    hours = finding.gpu_hours
    unknown = -math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), unknown if hours is None else -hours


def _one_exclude_line(found: Sequence[Finding]) -> list[Finding]:
    """Put all nodes to leave out into the first such line: of several, sbatch takes the last alone."""
    names = [line.removeprefix(EXCLUDE).split(",") for f in found for line in f.lines if line.startswith(EXCLUDE)]
    lines = [EXCLUDE + host_list(name for some in names for name in some)] if names else []
    told = list[Finding]()
    for finding in found:
        others = tuple(line for line in finding.lines if not line.startswith(EXCLUDE))
        if len(others) < len(finding.lines):
            advice = finding.advice if lines else f"{finding.advice} The --exclude line above has it, too."
            finding = replace(finding, lines=(*others, *lines), advice=advice)
            lines = []
        told.append(finding)
    return told


def host_list(nodes: Iterable[str]) -> str:
    """Return names as Slurm's host lists, gpu[01-04,07]; only numbers with as many digits are put together."""
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
