"""What happens to a job after its array has ended, from top to bottom.

Each array task has left a database, ``tasks/NAME.sqlite``: its chunks, every try of them, detections, GPU readings.
``badcjobs merge`` (``finish_job``) makes one job of them:

    merge           all task databases → one job database, job.sqlite                     store/merge.py
    read_job        job database → JobFacts: tasks, devices, counts, times                store/read_job.py
    prove_complete  facts and source: rows that are missing, commands to do them          completeness.py
    summarize       facts → Summary: all numbers of the job                               summary.py
    find            Summary → findings: what went wrong, and what to do about it          rules_*.py

and writes the Summary as a page, report.html (page.py). ``badcjobs report`` (``report_job``) does all but the merge,
for one job or for two side by side (compare.py), and has other forms: text and Markdown (text.py), prometheus.py, JSON.
A single task database, or a file of ``badcjobs record``, is merged into a temporary job database first.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import AskQueue, Billing, CutShort, NameGaps, TaskKey, not_asked
from badcjobs.paths import RunFolder, is_there, shell_line
from badcjobs.report import rules_devices, rules_requests, rules_tasks, rules_waiting
from badcjobs.report.compare import Comparison, Figure, compare
from badcjobs.report.completeness import Progress, merge_again, prove_complete
from badcjobs.report.page import page
from badcjobs.report.progress import RUNNING, Outlook
from badcjobs.report.prometheus import job_samples, prometheus_lines
from badcjobs.report.rules import EXCLUDE, NOTE, PROBLEM, SEVERITIES, general_words, known_texts, say
from badcjobs.report.summary import DEVICE_KEYS, KEYS, TASK_KEYS, Bill, Finding, StateSummary, Summary, summarize
from badcjobs.report.text import comparison_markdown, comparison_text, markdown, next_lines, summary_text
from badcjobs.report.verdict import verdict_of
from badcjobs.report.words import plain
from badcjobs.run_toml import FrozenRun
from badcjobs.seams import Clock
from badcjobs.store import read_model
from badcjobs.store.atomic_write import fresh_file
from badcjobs.store.connect import is_job_database, reading
from badcjobs.store.merge import MergeOrder, MergeOutcome, Removal, merge, remove_merged_files
from badcjobs.store.publish import TEXT_FORMS, load_readings
from badcjobs.store.read_job import read_job
from badcjobs.store.read_tasks import read_chart_data
from badcjobs.store.source_files import LEFTOVERS, NoTaskDatabases
from badcjobs.store.submission_record import find_cut_short, find_unbegun, rows_in

log = logging.getLogger(__name__)


def finish_job(
    order: MergeOrder, clock: Clock, *, remove_merged: bool = False, ask_queue: AskQueue = not_asked,
    reading_source: Progress = lambda rows: None, **how: Any,
) -> FinishedJob:  # fmt: skip
    """Merge task databases into a job database, summarise it (how: see ``summarize_database``), write its page.

    A page that cannot be written is not an error: the numbers are safe in the job database.
    """
    try:
        merged = merge(order, clock)
    except NoTaskDatabases as error:  # a submit or an emulation may have left a record of why
        above = [place.absolute().parent for place in order.inputs if place.absolute().name == "tasks"]
        found = next((one for one in map(find_unbegun, [*order.inputs, *above]) if one is not None), None)
        raise (error if found is None else DatabaseProblem(error.what, why=found.what, fix=found.command)) from None
    summary = summarize_database(order.target, reading_source, clock.now_ms(), ask_queue, **how)
    # A database that was published during the merge is no reason to merge again.
    news = summary.merged
    summary = replace(summary, merged=replace(news, changed=0, command=news.command if news.new else None))
    report, why_no_report = order.target.with_name("report.html"), None
    try:
        write_whole(report, ReportedJob(order.target, job_title(order.target), summary).to_html())
    except BadInput as error:
        why_no_report = error.why or error.what
        log.warning("%s could not be written: %s", report, why_no_report)
    removed = remove_merged_files(order.target, merged.given) if remove_merged else None
    return FinishedJob(order.target, report, summary, merged, removed, why_no_report)


def summarize_database(
    database: Path, progress: Progress = lambda rows: None, now_ms: int | None = None,
    ask_queue: AskQueue = not_asked, *, readings: bool = True, billing: Billing | None = None,
) -> Summary:  # fmt: skip
    """Return all numbers of a job database, and the findings; ``now_ms``: see ``summarize``.

    ``readings``: also the last of each device, which only JSON and metrics show. ``billing``: None: that of the run.
    """
    facts = read_job(database, readings=readings)
    proof = prove_complete(database, facts, progress)
    summary = summarize(facts, proof.missing_indices, proof, now_ms)
    place = database.parent if database.name == "job.sqlite" else database
    if summary.verdict != "done" or summary.tasks_by_verdict.get(RUNNING):
        queue = ask_queue(database.parent.absolute(), {task.job_id for task in facts.tasks})
        summary = replace(summary, queue=queue)
    # An interrupted submit of this run: its array may be in the queue.
    runs = [(database.parent / folder).parent for folder in facts.file_folders if Path(folder).name == "tasks"]
    for run in (database.parent, *runs):
        with suppress(BadInput):
            billing = billing or getattr(FrozenRun.read(RunFolder(run).run_toml), "billing", None)
    jobs = {task.job_id for task in facts.tasks if billing and not task.is_local}
    jobs -= {job for job in jobs if any(rows_in(run, job).exists() for run in runs)}  # a local array
    billed = replace(facts, tasks=tuple(task for task in facts.tasks if task.job_id in jobs))  # only Slurm bills
    return replace(
        summary,
        findings=find(summary),
        merged=replace(facts.merged, command=merge_again(database, facts.file_folders, facts.merged)),
        cut_short=next((submit for submit in map(find_cut_short, runs) if submit is not None), None),
        place=str(place.absolute()),
        bill=rules_requests.make_bill(billed, billing),
    )


@contextmanager
def report_job(
    job: Path, clock: Clock, beside: Path | None = None, progress: Progress = lambda rows: None,
    ask_queue: AskQueue = not_asked, **how: Any,
) -> Iterator[ReportedJob]:  # fmt: skip
    """Summarise a job, a task database or a recording, and compare it with another; how: see ``summarize_database``."""
    with ExitStack() as opened:
        jobs = [opened.enter_context(_open_job(path, clock)) for path in (job, beside) if path is not None]
        summaries = [
            replace(summarize_database(one, progress, clock.now_ms(), ask_queue, **how), place=str(place))
            for one, _, place in jobs
        ]
        (database, title, _), comparison = jobs[0], None
        if beside is not None:
            titles = (title, jobs[1][1]) if title != jobs[1][1] else (str(job), str(beside))
            comparison = compare(summaries[0], titles[0], summaries[1], titles[1])
        lossy_files = sum(summary.facts.lossy_files for summary in summaries)
        yield ReportedJob(database, title, summaries[0], comparison, lossy_files)


@contextmanager
def _open_job(given: Path, clock: Clock) -> Iterator[tuple[Path, str, Path]]:
    """Yield a job database, its title, and its place for commands.

    For a task database or a recording, a temporary database, the name of the file, and the file.
    """
    database = find_job_database(given)
    try:
        with reading(database) as db:
            is_job = is_job_database(db)
    except DatabaseProblem:
        # A damaged task database is salvaged; of others read_job says what is wrong, and suggests a command.
        is_job = database.suffix not in TEXT_FORMS and TaskKey.parse(database.stem) is None
    if is_job:
        place = database.parent if database.name == "job.sqlite" else database
        yield database, job_title(database), place.absolute()
        return
    with TemporaryDirectory(prefix="badcjobs-report-") as folder:
        alone = Path(folder, database.name)  # a link: the other tasks of its run are not part of this report
        if database.suffix in TEXT_FORMS:
            alone = alone.with_suffix(".sqlite")
            load_readings(database, alone)
        for ending in ("", *LEFTOVERS) if database.suffix not in TEXT_FORMS else ():
            alone.with_name(alone.name + ending).symlink_to(f"{database.absolute()}{ending}")
        target = alone.with_name(f"{alone.name}.job")
        merge(MergeOrder([alone], target), clock)
        yield target, database.name, database.absolute()


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its parts, to a hidden file and rename it; raises BadInput when it cannot be written.

    A symbolic link stays: the file that it points to is replaced.
    """
    with fresh_file(path.resolve() if path.is_symlink() and path.is_file() else path) as file:
        for part in [text] if isinstance(text, str) else text:
            file.write(part.encode("utf-8", errors="replace"))  # a file name may not be valid text


# --- what the numbers mean --------------------------------------------------------------------------------------------

_TOPICS = (*rules_tasks.TOPICS, *rules_devices.TOPICS, *rules_waiting.TOPICS, *rules_requests.TOPICS)
# Stable names; the guide lists each of them.
KINDS = tuple(dict.fromkeys(rule.kind for _, rules in _TOPICS for rule in rules))
_OF_USE = {"unused_gpus", "cpus_request", *(rule.kind for _, rules in rules_waiting.TOPICS for rule in rules)}


def list_findings() -> str:
    """Return all kinds of findings with what they say, for the guide."""
    lines = []
    for kind in KINDS:
        said = dict.fromkeys(general_words(rule.says) for _, rules in _TOPICS for rule in rules if rule.kind == kind)
        lines += [f"    {name:<18} {words}" for name, words in zip_longest([kind], said, fillvalue="")]
    return "\n".join(lines)


def list_keys() -> str:
    """Return the keys of the JSON documents, for the guide: the document, then what its lists and tables hold."""
    classes = {
        "completeness": read_model.Completeness, "states": StateSummary, "chunk_s, metrics": read_model.MetricFacts,
        "chunk_cost": read_model.CostFacts, "outlook": Outlook, "findings": Finding, "alerts": read_model.AlertFacts,
        "errors": read_model.ErrorFacts, "gaps": read_model.GapFacts, "failed_chunks": read_model.FailedChunk,
        "recording_names": NameGaps, "merged": read_model.Freshness, "cut_short": CutShort, "--compare": Comparison,
        "figures": Figure, "bill": Bill,
    }  # fmt: skip
    parts = {"(top level)": KEYS, "task_list": TASK_KEYS, "devices": DEVICE_KEYS}
    parts |= {name: tuple(field.name for field in fields(kind)) for name, kind in classes.items()}
    parts["completeness"] += ("complete",)
    return "\n".join(
        fill(", ".join(keys), 100, initial_indent=f"    {name:<17} ", subsequent_indent=" " * 22)
        for name, keys in parts.items()
    )


def find(summary: Summary) -> tuple[Finding, ...]:
    """Return the findings about a job, worst first: one for each cause, and none against another."""
    local = all(task.is_local for task in summary.facts.tasks)  # no Slurm: no #SBATCH lines
    every: list[tuple[Finding, tuple[str, ...]]] = []
    for cases, rules in _TOPICS:
        for case in cases(summary.facts, summary):
            rule = next((rule for rule in rules if all(map(case.get, rule.when.split()))), None)
            if rule is None:
                continue
            figures, cost_s = {"s": summary, **case}, case.get("cost_s")
            finding = Finding(
                kind=rule.kind,
                severity=say(rule.severity, figures),
                sentence=say(rule.says, figures),
                evidence=tuple(known_texts(rule.evidence, figures)),
                advice=say(rule.fix, figures),
                lines=tuple(line for line in known_texts(rule.lines, figures) if not local or "#SBATCH" not in line),
                subjects=tuple(dict.fromkeys(map(plain, case.get("subjects", ())))),
                gpu_hours=None if cost_s is None else cost_s / 3600,
            )
            every.append((finding, rule.wants))
    found = _one_per_cause(sorted(every, key=lambda pair: _rank(pair[0])), summary)
    # All nodes to exclude go into the first such line: sbatch uses only the last of several.
    nodes = [line.removeprefix(EXCLUDE) for finding in found for line in finding.lines if line.startswith(EXCLUDE)]
    lines = [EXCLUDE + ",".join(sorted({node for some in nodes for node in some.split(",")}))]
    for place, finding in enumerate(found):
        others = tuple(line for line in finding.lines if not line.startswith(EXCLUDE))
        if len(others) < len(finding.lines):
            advice = finding.advice if lines else f"{finding.advice} The --exclude line above includes it."
            found[place] = replace(finding, lines=(*others, *lines), advice=advice)
            lines = []
    return tuple(found)


def _one_per_cause(ranked: Sequence[tuple[Finding, tuple[str, ...]]], summary: Summary) -> list[Finding]:
    """Return the findings without those that a worse one explains or contradicts.

    A slow device whose clock was reduced has one cause. Where no chunk was done, how busy the GPUs were says nothing.
    An option is suggested once.
    """
    failed = summary.chunks > 0 and not summary.done
    slowed = {word for one, _ in ranked if one.kind.startswith("throttled") for word in one.subjects}
    slowed |= {label.split(" device ")[0] for label in slowed}
    found, wanted, options = list[Finding](), set[str](), set[str]()
    for finding, wants in ranked:
        opposed = any(("-" if want[0] == "+" else "+") + want[1:] in wanted for want in wants)
        explained = finding.kind.startswith("straggler") and slowed.issuperset(finding.subjects)
        if opposed or explained or (failed and finding.kind in _OF_USE):
            continue
        new = [line for line in finding.lines if "=" not in line or line.partition("=")[0] not in options]
        if finding.severity == NOTE and finding.lines and not new:
            continue
        wanted.update(wants)
        options.update(line.partition("=")[0] for line in new if line.startswith("#SBATCH") and EXCLUDE not in line)
        found.append(replace(finding, lines=tuple(new)))
    return found


def _rank(finding: Finding) -> tuple[int, float]:
    """Return the sort key of a finding: missing results first, then what cost most GPU time."""
    hours = finding.gpu_hours
    unknown = -math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), unknown if hours is None else -hours


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The result of merging a job."""

    database: Path
    report: Path
    summary: Summary
    merged: MergeOutcome
    removed: Removal | None = None
    why_no_report: str | None = None  # the page could not be written; an existing page is from an earlier merge

    def to_dict(self, *, streamed: bool = False) -> dict[str, object]:
        """Return the document of ``badcjobs merge --json``: the summary, and the state of the files."""
        statuses = Counter(file.status for file in self.merged.files)
        files = {"read_now": self.merged.read, "by_status": dict(sorted(statuses.items()))}
        removed = None if self.removed is None else asdict(self.removed)
        return {**self.summary.to_dict(streamed=streamed), "files": files, "removed": removed}


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """The result of ``badcjobs report`` in every form; with a comparison, of both jobs."""

    database: Path
    title: str
    summary: Summary
    comparison: Comparison | None = None
    lossy_files: int = 0  # of both

    def to_text(self, *, colour: bool = False) -> str:
        """Return the report for a terminal or a log."""
        if self.comparison is not None:
            return "\n".join([comparison_text(self.comparison), "", *next_lines(verdict_of(self.summary))]).rstrip()
        return summary_text(self.summary, self.title, colour=colour)

    def to_dict(self, *, streamed: bool = False) -> dict[str, Any]:
        """Return the report for scripts."""
        return self.summary.to_dict(streamed=streamed) if self.comparison is None else self.comparison.to_dict()

    def to_html(self) -> str:
        """Return the page of the job; without the comparison."""
        with read_chart_data(self.database) as charts:
            return page(self.summary, self.title, charts)

    def to_markdown(self) -> str:
        """Return the report for a lab notebook."""
        if self.comparison is not None:
            return comparison_markdown(self.comparison)
        return markdown(self.summary, self.title)

    def to_prometheus(self) -> Iterator[str]:
        """Yield the metrics of the job, line by line."""
        return prometheus_lines(job_samples(self.summary, str(Path(self.summary.place).resolve())))


# --- paths ------------------------------------------------------------------------------------------------------------


def job_title(database: Path) -> str:
    """Return the title of a job: the name of its run folder."""
    return database.parent.absolute().name


def default_target(inputs: Sequence[Path]) -> Path:
    """Return the default path of the job database: in the run folder."""
    first = inputs[0].absolute()
    folder = first if is_there(first) and first.is_dir() else first.parent
    return (folder.parent if folder.name == "tasks" else folder) / "job.sqlite"


def find_job_database(given: Path) -> Path:
    """Return the job database of a run folder, of its tasks/, or the file itself.

    Raises DatabaseProblem when there is none.
    """
    if given.absolute().name == "tasks" and any(given.glob("*.sqlite")) and not is_there(given / "job.sqlite"):
        given = given.absolute().parent
    is_folder = is_there(given) and given.is_dir()
    path = RunFolder(given).job_database if is_folder else given
    if is_there(path):
        return path
    started = is_folder and any(RunFolder(given).tasks.glob("*.sqlite"))
    if is_folder and not started and (found := find_unbegun(given)) is not None:
        raise DatabaseProblem(f"{path} does not exist", why=found.what, fix=found.command)
    if is_folder and RunFolder(given).tasks.is_dir():
        line = shell_line("badcjobs", "merge", given)
        raise DatabaseProblem(f"{path} does not exist", why="the run has not been merged yet", fix=line)
    what = "is not a run folder: it contains neither job.sqlite nor tasks/" if is_folder else "does not exist"
    above = given if is_folder else next(folder for folder in given.absolute().parents if folder.is_dir())
    raise DatabaseProblem(
        f"{given} {what}",
        why="expected: a run folder (--out of badcjobs run or submit), or its job.sqlite",
        fix=shell_line("ls", above),
    )
