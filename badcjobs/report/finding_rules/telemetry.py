"""Where the measurements themselves are not to be trusted: holes, and counters that disagree."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.model import NOTE, WARNING, DeviceFacts, Finding, JobFacts
from badcjobs.report.cards import cards, rows_words
from badcjobs.report.finding_rules.device_time import gpu_time, label, labels, share
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, number, plain

_GAP, _GAP_S = 0.05, 60.0
_ENERGY, _ENERGY_S = 0.05, 120.0


def judge_telemetry(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield holes in the readings and energy that does not add up."""
    yield from _gaps(facts)
    yield from _energy(facts)


def _gaps(facts: JobFacts) -> Iterator[Finding]:
    tasks = {task.name: task for task in facts.tasks}
    followed = [device for device in facts.devices if tasks[device.task].telemetry]
    gap_s = {device.device_id: min(device.gap_s, tasks[device.task].wall_s) for device in followed}
    total_s, all_s = sum(gap_s.values()), sum(tasks[device.task].wall_s for device in followed)
    if total_s < max(_GAP_S, _GAP * all_s):
        return
    blind = [device for device in followed if not device.samples]
    reasons = [gap for gap in facts.gaps if gap.metric is None][:3]
    worst = sorted(followed, key=lambda device: -gap_s[device.device_id])
    yield Finding(
        "telemetry_gaps", WARNING if blind or total_s > 0.5 * all_s else NOTE,
        f"There are no readings for {share(total_s, all_s)} of the GPU time.",
        (
            f"{gpu_time(total_s)} of {gpu_time(all_s)} without a reading",
            *([f"{len(blind):,} of {rows_words(followed)} without any"] if blind else []),
            *(plain(f"{count(g.gaps, 'gap')}, {number(g.seconds, 0)} s: {g.reason}") for g in reasons),
        ),
        "What is said of these devices rests on the rest of the time. In a container, --nv lets badcjobs read them.",
        ("badcjobs gpus",), labels(d for d in worst if gap_s[d.device_id] > 0),
    )  # fmt: skip


def _energy(facts: JobFacts) -> Iterator[Finding]:
    odd = [(device, off) for device in facts.devices if (off := _off_by(device)) is not None]
    if not odd:
        return
    worst, off = max(odd, key=lambda pair: abs(pair[1]))
    more = "more" if off > 0 else "less"
    counter_j, added_j = worst.energy_counter_j or 0.0, worst.energy_integrated_j or 0.0
    yield Finding(
        "energy_disagrees", NOTE,
        f"On {count(cards(device for device, _ in odd), 'device')} the energy counter and the power readings disagree.",
        (
            f"at worst the counter says {number(abs(off) * 100, 0)} % {more} than the power readings added up",
            plain(f"{label(worst)}: {number(counter_j / 3600, 1)} Wh counted, {number(added_j / 3600, 1)} Wh added up"),
        ),
        "Take the job's energy as rough; on healthy cards both agree within 1 %.",
        (), labels(device for device, _ in odd),
    )  # fmt: skip


def _off_by(device: DeviceFacts) -> float | None:
    """Return by which share the counter exceeds the power added up, watt by watt; None: by no more than is usual."""
    measured_s = sum(time.measured_s for time in device.states.values())
    span_s, counter_j, added_j = device.energy_counter_span_s, device.energy_counter_j, device.energy_integrated_j
    if (device.uuid or "").startswith("MIG-"):  # its card's counter, with everybody else's work
        return None
    if not span_s or not counter_j or not added_j or min(span_s, measured_s) < _ENERGY_S:
        return None
    off = (counter_j / span_s) / (added_j / measured_s) - 1
    unlike = abs(span_s - measured_s) / span_s  # one saw more than the other: who knows what happened there
    return off if abs(off) > _ENERGY + unlike else None
