"""What a job's numbers mean: what went wrong, or cost more than it had to, and what to do. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from badcjobs.report import rules_devices, rules_requests, rules_tasks, rules_waiting
from badcjobs.report.rules import EXCLUDE, PROBLEM, SEVERITIES
from badcjobs.report.summary import Finding, Summary

_TOPICS = (*rules_tasks.TOPICS, *rules_devices.TOPICS, *rules_waiting.TOPICS, *rules_requests.TOPICS)
# The stable names; each has a line in the guide.
KINDS = tuple(dict.fromkeys(rule.kind for topic in _TOPICS for rule in topic.rules))


def find(summary: Summary) -> tuple[Finding, ...]:
    """Return what is worth saying about a job, worst first; nothing when all is well."""
    found = [finding for topic in _TOPICS for finding in topic.judge(summary)]
    if all(task.job_id.startswith("local") for task in summary.facts.tasks):  # without Slurm its lines mean nothing
        found = [replace(f, lines=tuple(line for line in f.lines if not line.startswith("#SBATCH"))) for f in found]
    found.sort(key=_rank)
    # All nodes to leave out go into the first such line: of several, sbatch takes the last alone.
    nodes = [line.removeprefix(EXCLUDE) for finding in found for line in finding.lines if line.startswith(EXCLUDE)]
    lines = [EXCLUDE + ",".join(sorted({node for some in nodes for node in some.split(",")}))]
    for place, finding in enumerate(found):
        others = tuple(line for line in finding.lines if not line.startswith(EXCLUDE))
        if len(others) < len(finding.lines):
            advice = finding.advice if lines else f"{finding.advice} The --exclude line above has it, too."
            found[place] = replace(finding, lines=(*others, *lines), advice=advice)
            lines = []
    return tuple(found)


def _rank(finding: Finding) -> tuple[int, float]:
    """Return what findings are sorted by: missing science first, then what cost most GPU time."""
    hours = finding.gpu_hours
    unknown = -math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), unknown if hours is None else -hours
