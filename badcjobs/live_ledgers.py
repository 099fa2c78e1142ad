"""The accounts of a run while it goes on: those of every attempt together, summarised as a report would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from badcjobs.errors import BadcjobsError
from badcjobs.live_files import Mark, RunFiles, mark_of
from badcjobs.model import AlertFacts, Completeness, JobFacts
from badcjobs.monitor.frame import Frame, TaskLine, Total
from badcjobs.report.summarize import Summary, summarize
from badcjobs.store.ledger_reader import Ledger, read_ledgers


@dataclass(slots=True)
class Ledgers:
    """The accounts in the files of a run; a file is read again only when it has changed."""

    files: RunFiles
    _known: dict[str, tuple[Mark, tuple[Ledger, ...]]] = field(default_factory=dict)

    def summarize(self, frame: Frame) -> Summary:
        """Return the summary of the run at this moment; it has no findings, which need the merged job."""
        heard = {told.line.name: told.line for told in self.files.tasks}
        facts = _facts([_with_word(ledger, heard) for ledger in self._read()], frame)
        missing = [task.array_index for task in frame.tasks if task.started_at_ms is None]
        return summarize(facts, missing, _completeness(frame.total, facts), now_ms=frame.at_ms)

    def _read(self) -> list[Ledger]:
        found = dict(self.files.find())
        self._known = {name: known for name, known in self._known.items() if name in found}
        for name, path in found.items():
            try:
                self.files.check_inside(path)
                mark, known = mark_of(path.stat()), self._known.get(name)
                if known is None or known[0] != mark:
                    self._known[name] = mark, read_ledgers(path, self.files.names_known(path, found))
            except (OSError, BadcjobsError):
                continue  # the look has a remark on it; what it said before still counts
        return [ledger for _, ledgers in self._known.values() for ledger in ledgers]


def _with_word(ledger: Ledger, heard: Mapping[str, TaskLine]) -> Ledger:
    """Return the accounts with when their task was last heard of, as the frame knows it."""
    line = heard.get(ledger.task.name)
    if line is None or ledger.task.verdict is not None:
        return ledger
    if line.state == "killed":
        return replace(ledger, task=replace(ledger.task, verdict=line.state))  # as the record beside its database says
    return replace(ledger, task=replace(ledger.task, heard_at_ms=line.heard_at_ms, silent_after_s=line.silent_after_s))


def _open_alerts(ledgers: Sequence[Ledger]) -> dict[str, tuple[str, ...]]:
    """Return the task of each alert that goes on, by kind."""
    found: dict[str, list[str]] = defaultdict(list)
    for ledger in ledgers:
        for kind in (kind for kind, _, goes_on in ledger.alerts if goes_on):
            found[kind].append(ledger.task.name)
    return {kind: tuple(tasks) for kind, tasks in found.items()}


def _facts(ledgers: Sequence[Ledger], frame: Frame) -> JobFacts:
    total, newest = frame.total, {task.name for task in frame.tasks}
    latest = [ledger for ledger in ledgers if ledger.task.name in newest]
    left = min(_left(total), sum(ledger.task.pending for ledger in latest))  # the others are in no task yet
    about_left = left if total.chunks_known else max(left, (total.source_chunks or 0) - total.settled)
    said = sum(ledger.task.pending - ledger.left_of_unknown_length for ledger in latest)
    return JobFacts(
        tasks=tuple(ledger.task for ledger in ledgers),
        devices=tuple(device for ledger in ledgers for device in ledger.devices),
        chunks={"done": total.done, "failed": total.failed, "pending": left},
        audio_done_s=total.audio_done_s,
        done_of_unknown_length=sum(ledger.done_of_unknown_length for ledger in ledgers),
        tries=sum(ledger.tries for ledger in ledgers),
        failed=(),
        labels=(("", None, sum(ledger.detections for ledger in ledgers)),),
        gaps=(),
        file_remarks=(),
        audio_left_s=sum(ledger.audio_left_s for ledger in latest),
        # Also those that nobody has listed yet, while nobody knows how many these are.
        left_of_unknown_length=max(0, about_left - said),
        alerts=tuple(_alerts(ledger.alerts for ledger in ledgers)),
        open_alerts=_open_alerts(ledgers),
    )


def _left(total: Total) -> int:
    return max(0, (total.chunks or 0) - total.settled)


def _alerts(alerts: Iterable[Iterable[tuple[str, str, bool]]]) -> Iterator[AlertFacts]:
    """Yield the alerts kind by kind, each kind as severe as its worst, as in a merged job."""
    every = [alert for of_task in alerts for alert in of_task]
    for kind in sorted({kind for kind, _, _ in every}):
        these = [(severity, goes_on) for other, severity, goes_on in every if other == kind]
        worst = "critical" if any(severity == "critical" for severity, _ in these) else max(these)[0]
        open_now = sum(goes_on for _, goes_on in these)
        yield AlertFacts(kind, worst, len(these), 0, 0.0, None, None, "", open_now)


def _completeness(total: Total, facts: JobFacts) -> Completeness:
    known = total.chunks_known and total.chunks is not None
    return Completeness(
        expected=total.chunks if known else None,
        why_unknown=None if known else "not every task has listed its chunks yet",
        listed=sum(facts.chunks.values()),
        done=total.done,
        failed=total.failed,
        poison=0,
        pending=facts.chunks["pending"],
        elsewhere=0,
        not_listed=_left(total) - facts.chunks["pending"] if known else None,
    )
