"""What a job's numbers mean: what went wrong, or cost more than it had to, and what to do. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from badcjobs.report import rules_devices, rules_requests, rules_tasks, rules_waiting
from badcjobs.report.rules import EXCLUDE, PROBLEM, SEVERITIES, Figures, Rule, known_texts, say
from badcjobs.report.summary import Finding, Summary
from badcjobs.report.words import plain

_TOPICS = (*rules_tasks.TOPICS, *rules_devices.TOPICS, *rules_waiting.TOPICS, *rules_requests.TOPICS)
# The stable names; each has a line in the guide.
KINDS = tuple(dict.fromkeys(rule.kind for _, rules in _TOPICS for rule in rules))


def find(summary: Summary) -> tuple[Finding, ...]:
    """Return what is worth saying about a job, worst first; nothing when all is well."""
    found = []
    for cases, rules in _TOPICS:
        for case in cases(summary.facts, summary):
            rule = next((rule for rule in rules if rule.when(case)), None)
            found += [] if rule is None else [_say(rule, case, summary)]
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


def _say(rule: Rule, case: Figures, summary: Summary) -> Finding:
    figures, cost_s = {"s": summary, **case}, case.get("cost_s")
    return Finding(
        kind=rule.kind,
        severity=say(rule.severity, figures),
        sentence=say(rule.says, figures),
        evidence=tuple(known_texts(rule.evidence, figures)),
        advice=say(rule.fix, figures),
        lines=tuple(known_texts(rule.lines, figures)),
        subjects=tuple(dict.fromkeys(map(plain, case.get("subjects", ())))),
        gpu_hours=None if cost_s is None else cost_s / 3600,
    )


def _rank(finding: Finding) -> tuple[int, float]:
    """Return what findings are sorted by: missing science first, then what cost most GPU time."""
    hours = finding.gpu_hours
    unknown = -math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), unknown if hours is None else -hours
