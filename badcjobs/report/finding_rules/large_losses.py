"""GPU time that was lost in a busy job: a small share of a large job is more than all of a small one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from badcjobs.model import NOTE, WARNING, Finding, JobFacts
from badcjobs.report.finding_rules.causes import EVEN_CHUNKS, READ_AHEAD, READ_AHEAD_OPTIONS
from badcjobs.report.finding_rules.device_time import each_once, gpu_time, share
from badcjobs.report.words import count

_WORTH_S, _WORTH = 10 * 3600.0, 0.02  # both
_FEW = 10  # tasks that can be named as the place of it
_MUCH_S, _MUCH = 100 * 3600.0, 0.05  # either


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a loss of one cause is told."""

    words: str
    advice: str
    lines: tuple[str, ...] = ()


_KINDS: Mapping[str, _Kind] = {
    "waiting_for_audio": _Kind("Workers without a chunk, waiting for the next,", READ_AHEAD, (READ_AHEAD_OPTIONS,)),
    "start_up": _Kind(
        "Engines starting up",
        "Each task starts its engines once: with half as many tasks for the same work it is half of that.",
    ),
    "tail": _Kind("GPUs waiting for the last chunks of others", EVEN_CHUNKS),
}


def large_losses(by_task: Mapping[str, Mapping[str, float]], gpu_s: float, facts: JobFacts) -> Iterator[Finding]:
    """Yield what took 10 GPU-hours or more; ``by_task``: cause → task → seconds."""
    for cause, kind in _KINDS.items():
        lost = by_task.get(cause, {})
        lost_s = sum(lost.values())
        if lost_s < max(_WORTH_S, _WORTH * gpu_s):
            continue
        worst = _holding_half(lost)
        yield Finding(
            cause, WARNING if lost_s >= min(_MUCH_S, _MUCH * gpu_s) else NOTE,
            f"{kind.words} took {share(lost_s, gpu_s)} of the GPU time.",
            (
                f"{gpu_time(lost_s)} of {gpu_time(gpu_s)}",
                f"half of it in {len(worst):,} of {count(len(facts.tasks), 'task')}",
            ),
            kind.advice, kind.lines, each_once(worst) if len(worst) <= _FEW else (), lost_s / 3600,
        )  # fmt: skip


def _holding_half(lost: Mapping[str, float]) -> list[str]:
    """Return the fewest tasks that have half of it, the worst first."""
    found, rest_s = list[str](), sum(lost.values()) / 2
    for task in sorted(lost, key=lambda name: -lost[name]):
        if rest_s <= 0:
            break
        found.append(task)
        rest_s -= lost[task]
    return found
