"""What a job's numbers mean: what went wrong, or cost more than it had to, and what to do. Pure.

Each family of rules is a module of finding_rules/; the reasoning behind them is in ``badcjobs guide findings``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from badcjobs.model import PROBLEM, SEVERITIES, Finding, JobFacts
from badcjobs.report.cut_short import give_up
from badcjobs.report.finding_rules.devices import judge_devices
from badcjobs.report.finding_rules.failures import judge_failures
from badcjobs.report.finding_rules.low_busy import judge_low_busy
from badcjobs.report.finding_rules.nodes import one_exclude_line
from badcjobs.report.finding_rules.requests import judge_requests
from badcjobs.report.finding_rules.stragglers import judge_stragglers
from badcjobs.report.finding_rules.tasks import judge_done_again, judge_tasks
from badcjobs.report.finding_rules.telemetry import judge_telemetry
from badcjobs.report.summarize import Summary

_FAMILIES = (
    judge_tasks,
    judge_done_again,
    judge_failures,
    judge_devices,
    judge_low_busy,
    judge_stragglers,
    judge_requests,
    judge_telemetry,
)

# The stable names; each has a line in the guide.
KINDS = (
    "tasks_missing",
    "tasks_silent",
    "tasks_killed",
    "lost_work",
    "done_again",
    "failed_chunks",
    "poison_chunks",
    "out_of_memory",
    "device_lost",
    "device_fault",
    "ecc_errors",
    "ran_on_cpu",
    "unused_gpus",
    "start_up",
    "waiting_for_audio",
    "cpu_bound",
    "too_few_workers",
    "tail",
    "low_busy",
    "throttled_thermal",
    "throttled_power",
    "straggler_device",
    "straggler_node",
    "foreign_process",
    "memory_request",
    "time_request",
    "cpus_request",
    "telemetry_gaps",
    "energy_disagrees",
)


def find(facts: JobFacts, summary: Summary) -> tuple[Finding, ...]:
    """Return what is worth saying about a job, worst first; nothing when all is well."""
    facts = give_up(facts, summary.tasks_silent)
    found = [finding for judge in _FAMILIES for finding in judge(facts, summary)]
    if all(task.job_id.startswith("local") for task in facts.tasks):
        found = [replace(finding, lines=_outside_slurm(finding.lines)) for finding in found]
    return tuple(one_exclude_line(sorted(found, key=_rank)))


def _rank(finding: Finding) -> tuple[int, float]:
    """Return what findings are sorted by: missing science first, then what cost most GPU time."""
    hours = finding.gpu_hours
    unknown = -math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), unknown if hours is None else -hours


def _outside_slurm(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the lines that mean something to somebody who did not submit anything."""
    return tuple(line for line in lines if not line.startswith("#SBATCH"))
