"""The headline numbers of a job in words, shared by the text, the page and the notebook."""

from __future__ import annotations

from badcjobs.model import Completeness, Freshness, NameGaps
from badcjobs.report.alert_words import alerts_in_short, any_critical
from badcjobs.report.cards import rows_words
from badcjobs.report.compared_figures import at_least, cost_measured
from badcjobs.report.factors import Bill
from badcjobs.report.finding_rules.low_busy import LEAST_S
from badcjobs.report.outlook import Outlook
from badcjobs.report.states import NEARLY_ALL
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import RUNNING
from badcjobs.report.words import UNKNOWN, count, duration, energy, indices, mass, moment, money, number, share_words

_FEW_S = 600.0  # of GPU time: in hours it would be hard to read
VERDICTS = {
    "done": "all done",
    "failed": "finished; some chunks failed for good",
    "stopped": "not finished: there is work left",
}


def verdict_words(summary: Summary) -> str:
    """Return the verdict; of what is left or has failed only as of the merge, where there is news since."""
    if summary.verdict != "done" and (summary.merged.new or summary.merged.changed):
        return (
            "not finished when it was merged" if summary.verdict == "stopped" else "some had failed when it was merged"
        )
    return VERDICTS[summary.verdict]


def headlines(summary: Summary) -> list[tuple[str, str]]:
    """Return (name, words) in the order they are shown."""
    return [
        ("tasks", _tasks(summary)),
        *([("merged", news)] if (news := news_words(summary.merged)) else []),
        *([("submit", summary.cut_short.what)] if summary.cut_short else []),
        ("chunks", f"{_chunks(summary)} ({count(summary.tries, 'try', 'tries')})"),
        *([("complete", complete_words(summary.completeness))] if summary.completeness else []),
        ("audio", _audio(summary)),
        *([("recordings", names)] if (names := name_words(summary.recording_names)) else []),
        ("speed", f"{number(summary.times_real_time)} × real time"),
        ("GPU time", _gpu_time(summary)),
        *([("left", left_words(summary.outlook))] if summary.outlook else []),
        ("energy", _energy(summary)),
        *([("per chunk", _per_chunk(summary))] if summary.chunk_cost.tries else []),
        *([("cost", bill_words(summary.bill, summary.energy_measured_percent))] if summary.bill else []),
        ("detections", f"{summary.detections:,}"),
        ("telemetry", _telemetry(summary)),
    ]


def well_words(summary: Summary) -> str:
    """Return what to say where there is no finding."""
    gpu_s, alerts = summary.gpu_hours * 3600, alerts_in_short(summary.alerts)
    see = f"; {alerts}, see below." if alerts else "."
    if any_critical(summary.alerts):
        return f"No check found anything to change, but not all is well: {alerts}, see below."
    if summary.verdict == "done" and 0 < gpu_s < LEAST_S:
        return f"Nothing went wrong; {gpu_s:.0f} s of GPU time are too few to judge how busy the GPUs were kept{see}"
    if summary.verdict == "done":
        return f"All is well: no check found anything to change{see}"
    return f"No check found anything to change, besides the chunks that are left or have failed{see}"


def _tasks(summary: Summary) -> str:
    verdicts = ", ".join(f"{many:,} {verdict}" for verdict, many in sorted(summary.tasks_by_verdict.items()))
    logs = summary.completeness.missing_logs if summary.completeness else ()
    see = f" (see {logs[0]})" if logs else ""
    silent, missing = _last_heard(summary), indices(summary.tasks_missing) if summary.tasks_missing else ""
    if missing and summary.tasks_by_verdict.get(RUNNING):
        missing = f"; array index {missing} not begun, perhaps still in the queue"
    elif missing:
        missing = f"; no word from array index {missing}{see}"
    return f"{summary.tasks:,} ({verdicts}){silent}{missing}"


def _last_heard(summary: Summary) -> str:
    silent = frozenset(summary.tasks_silent)
    heard_ms = [task.heard_at_ms for task in summary.task_list if task.name in silent and task.heard_at_ms is not None]
    return f"; last word of a silent one: {moment(max(heard_ms))}" if heard_ms else ""


def news_words(merged: Freshness) -> str:
    """Return how old this is, where there is news since the merge or nobody can look; else nothing."""
    said = []
    if merged.changed:
        said.append(f"{count(merged.changed, 'task database has', 'task databases have')} changed since")
    if merged.new:
        said.append(f"{count(merged.new, 'task database is', 'task databases are')} not merged yet")
    if merged.closed:
        said.append(f"what is new since is not known: {merged.closed}")
    elif merged.gone:
        them = "its database is" if merged.gone == 1 else "their databases are"
        said.append(f"what became of {count(merged.gone, 'task')} that ran then is not known: {them} not here")
    as_of = [] if merged.as_of_ms is None else [f"as of {moment(merged.as_of_ms)}"]
    return "; ".join([*as_of, *said]) if said else ""


def _chunks(summary: Summary) -> str:
    words = f"{summary.done:,} done, {summary.failed:,} failed, {summary.left:,} left of {summary.chunks:,}"
    words += f", {summary.skipped:,} done elsewhere" if summary.skipped else ""
    return words + (f"; {summary.conflicts:,} done more than once, the last one counts" if summary.conflicts else "")


def complete_words(proof: Completeness) -> str:
    """Return how far the job has got with its source."""
    if proof.expected is None:
        return f"not known: {proof.why_unknown}"
    strangers = f"; {count(proof.strangers, 'row')} more that the source does not have" if proof.strangers else ""
    if proof.complete:
        return f"{proof.done:,} of {count(proof.expected, 'row')} of the source are done{strangers}"
    states = {
        "failed": proof.failed, "poison": proof.poison, "pending": proof.pending, "done elsewhere": proof.elsewhere,
    }  # fmt: skip
    others = "".join(f", {many:,} {state}" for state, many in states.items() if many)
    return f"no: {proof.done:,} of {count(proof.expected, 'row')} done{others}{_not_begun(proof)}{strangers}"


def _not_begun(proof: Completeness) -> str:
    if not proof.not_listed:
        return ""
    rows = count(proof.not_listed, "row")
    missing, unmerged = proof.missing_indices, proof.unmerged_indices
    if (missing or unmerged) and not proof.not_listed_examples:
        state = (
            "not begun, or not merged yet" if missing and unmerged else "not merged yet" if unmerged else "not begun"
        )
        return f"; {rows} of array index {indices(sorted((*missing, *unmerged)))} {state}"
    return f"; {rows} in no task"


def finish_words(summary: Summary) -> list[tuple[str, str]]:
    """Return what to say above each command that finishes the job, or brings its report up to date; and the command."""
    proof, news = summary.completeness, summary.merged.command
    merge = [] if news is None else [("to take in what is new since the merge:", news)]
    if summary.cut_short is not None:  # Slurm may have its array: any other command might do the same work twice
        what_for = "be done with it" if summary.verdict == "done" else "finish it"
        return [*merge, (f"to {what_for}, repeat the submit that was cut short:", summary.cut_short.command)]
    if proof is None or not proof.finish:
        return merge
    again = " (a run tries its failed and poison rows again)" if proof.failed or proof.poison else ""
    waiting = ""
    if summary.tasks_by_verdict.get(RUNNING):
        waiting = f", once no task of it is running{' or waits in the queue' if summary.tasks_missing else ''}"
    elif summary.tasks_silent:
        waiting = ", unless its silent tasks still run"
    elif merge:
        waiting = ", if work is left after that and no task of it is running"
    *in_slurm, here = proof.finish
    how = {True: "submit the same script again for these indices:", False: "submit what is left:"}
    words = [(f"to finish it{waiting}, {how[line.startswith('sbatch ')]}", line) for line in in_slurm]
    last = f"or do all that is left in one run{again}:" if words else f"to finish it{waiting}{again}:"
    return [*merge, *words, (last, here)]


def _audio(summary: Summary) -> str:
    unknown = summary.chunks_of_unknown_length
    words = f"{number(summary.audio_hours, 2)} hours analysed in {duration(summary.wall_s)}"
    if summary.tries_on_cpu:
        words += f"; {count(summary.tries_on_cpu, 'chunk')} on the CPU ({number(summary.audio_hours_on_cpu, 2)} hours)"
    return words + (f"; the length of {count(unknown, 'more chunk')} is not known" if unknown else "")


def name_words(gaps: NameGaps | None) -> str:
    """Return how many paths do not tell what those of other recordings tell; nothing to say where none or all do."""
    if gaps is None:
        return ""
    undated, untimed, nowhere = gaps.undated, gaps.untimed, gaps.no_study_area
    kinds = [
        (undated, gaps.recordings, "no date in the name", gaps.undated_example),
        (untimed, gaps.recordings - undated, "a date but no time in the name", gaps.untimed_example),
        (nowhere, gaps.recordings, "no study area in the path", gaps.no_study_area_example),
    ]
    said = [
        f"{many:,} of {gaps.recordings:,} {'has' if many == 1 else 'have'} {what} (the first: {example})"
        for many, most, what, example in kinds
        if 0 < many < most
    ]
    return "; ".join(said)


def _gpu_time(summary: Summary) -> str:
    if not summary.gpu_hours:
        return "none: no GPU was used"
    rate, few_s = summary.audio_hours_per_gpu_hour, summary.gpu_hours * 3600
    spent = f"{duration(few_s)}, {number(summary.gpu_hours, 2)} GPU-hours" if few_s < _FEW_S else (
        f"{number(summary.gpu_hours, 2)} GPU-hours"
    )  # fmt: skip
    return f"{spent}; {number(rate)} audio-hours per GPU-hour"


def left_words(left: Outlook) -> str:
    """Return what is left and when it will be done, as far as anybody can say."""
    chunks = count(left.chunks, "chunk") + ("" if left.whole_source else " that tasks have listed")
    if left.audio_hours is None:
        return f"{chunks}; how long they will take is not known yet"
    words = f"{chunks}, about {number(left.audio_hours)} audio-hours"
    if left.gpu_hours is not None:
        words += f" and {number(left.gpu_hours)} GPU-hours"
    if left.end_at_ms is not None:
        return f"{words}; done at about {moment(left.end_at_ms)} if the tasks that run go on like this"
    return words + ("" if left.wall_s is None else f"; about {duration(left.wall_s)} at the speed so far")


def _energy(summary: Summary) -> str:
    if summary.energy_wh is None:
        return f"{UNKNOWN} (no device said)"
    known, rate = summary.energy_devices, summary.kwh_per_1000_audio_hours
    partly = "" if known == len(summary.devices) else f" (known for {known:,} of {rows_words(summary.devices)})"
    measured = measured_words(summary)
    least = "at least " if _some_is_missing(summary) else ""
    per_hours = "" if rate is None else f"; {least}{number(rate, 2)} kWh per 1,000 audio-hours"
    return energy(summary.energy_wh) + partly + (f", {measured}" if measured else "") + per_hours


def measured_words(summary: Summary) -> str:
    """Return for how much of the GPU time the energy was measured; nothing to say where that is all of it."""
    percent = summary.energy_measured_percent
    return "" if percent is None or percent >= NEARLY_ALL else f"measured for {share_words(percent)} of the GPU time"


def _some_is_missing(summary: Summary) -> bool:
    """Say whether devices that told their energy used more than they told: before and after their readings."""
    known = [device for device in summary.devices if device.energy_j is not None]
    had_s = sum(sum(device.state_s.values()) for device in known)
    return sum(device.energy_measured_s for device in known) < NEARLY_ALL / 100 * had_s


def _per_chunk(summary: Summary) -> str:
    cost = summary.chunk_cost
    ranks = [number(value, 2) for value in (cost.gpu_s_p50, cost.gpu_s_p95, cost.gpu_s_max)]
    words = f"{number(cost.gpu_s_mean, 2)} GPU-seconds (p50 {ranks[0]}, p95 {ranks[1]}, max {ranks[2]})"
    if cost.energy_j_mean is None:
        return words
    ranks = [number(value) for value in (cost.energy_j_p50, cost.energy_j_p95, cost.energy_j_max)]
    # A short try may fall between two readings of power.
    some = f" where it was measured, in {cost.energy_tries:,} of {count(cost.tries, 'try', 'tries')}"
    some = some if cost.energy_tries < cost.tries else ""
    return f"{words}; {number(cost.energy_j_mean)} J{some} (p50 {ranks[0]}, p95 {ranks[1]}, max {ranks[2]})"


def bill_words(bill: Bill, measured_percent: float | None = 100.0) -> str:
    """Return what the job cost by the user's factors; of energy that was measured in part it is at least that."""
    unit = f" {bill.currency}" if bill.currency else ""
    parts = [
        f"{name} {money(part)}"
        for name, part in (("energy", bill.energy), ("GPU time", bill.gpu_time))
        if part is not None
    ]
    words = []
    if bill.total is not None:
        partly = cost_measured(bill, measured_percent) < NEARLY_ALL
        total = at_least(money(bill.total)) if partly else money(bill.total)
        words.append(f"{total}{unit} ({', '.join(parts)})")
    if bill.co2_kg is not None:
        partly = (measured_percent or 0.0) < NEARLY_ALL
        words.append(f"{at_least(mass(bill.co2_kg)) if partly else mass(bill.co2_kg)} of CO₂")
    return "; ".join(words)


def _telemetry(summary: Summary) -> str:
    samples = sum(device.samples for device in summary.devices)
    gaps = [gap for gap in summary.gaps if gap.metric is None]
    words = f"{count(samples, 'sample')}, " + (
        f"{count(sum(gap.gaps for gap in gaps), 'gap')} of {duration(sum(gap.seconds for gap in gaps))} in all"
        if gaps
        else "no gaps"
        if samples
        else "so no gaps are known"
    )
    off = summary.tasks_without_telemetry
    return words + (f"; off in {count(off, 'task')} (--no-emit-gpu-telemetry)" if off else "")
