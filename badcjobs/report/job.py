"""What happens to a job after its array has ended, from top to bottom.

Each array task has left a database, ``tasks/NAME.sqlite``: its chunks, every try of them, detections, GPU readings.
``badcjobs merge`` (``finish_job``) makes one job of them:

    merge           all task databases → one job database, job.sqlite                     store/merge.py
    read_job        job database → JobFacts: tasks, devices, counts, times                store/read_job.py
    prove_complete  facts and source: rows that are missing, commands to do them          completeness.py
    summarize       facts → Summary: all numbers of the job                               summary.py
    find            Summary → findings: what went wrong, and what to do about it          rules_*.py

and writes the Summary as a page, report.html (page.py). ``badcjobs report`` (``report_job``) does all but the merge,
for one job or for two side by side (compare.py), and has other forms: text and Markdown (text.py), prometheus.py, JSON
(document.py). A single task database, or a file of ``badcjobs record``, is merged into a temporary job database first.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any, NamedTuple

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import AskQueue, Billing, CutShort, NameGaps, PlaceCounts, TaskKey, not_asked, not_none, stable_id
from badcjobs.paths import RunFolder, is_there, run_of, shell_line
from badcjobs.report import rules_devices, rules_requests, rules_tasks, rules_waiting
from badcjobs.report.compare import Comparison, Figure, compare
from badcjobs.report.completeness import Progress, merge_again, prove_complete
from badcjobs.report.document import DEVICE_KEYS, KEYS, TASK_KEYS, document_of
from badcjobs.report.page import page
from badcjobs.report.progress import RUNNING, Outlook
from badcjobs.report.prometheus import job_samples, prometheus_lines
from badcjobs.report.rules import PROBLEM, SEVERITIES, general_words, known_texts, say, share
from badcjobs.report.summary import Bill, Finding, StateSummary, Summary, summarize
from badcjobs.report.tables import WIDTH
from badcjobs.report.text import comparison_markdown, comparison_text, markdown, next_lines, summary_text
from badcjobs.report.verdict import verdict_of
from badcjobs.run_toml import FrozenRun
from badcjobs.seams import Clock
from badcjobs.store import read_model
from badcjobs.store.atomic_write import fresh_file
from badcjobs.store.connect import grouped, is_job_database, reading, with_logs
from badcjobs.store.merge import MergeOrder, MergeOutcome, Removal, merge, remove_merged_files
from badcjobs.store.publish import TEXT_FORMS, load_readings
from badcjobs.store.read_job import read_job
from badcjobs.store.read_model import JobFacts
from badcjobs.store.read_tasks import read_chart_data
from badcjobs.store.source_files import NoTaskDatabases
from badcjobs.store.submission_record import find_cut_short, find_unbegun, rows_in
from badcjobs.version import __version__
from badcjobs.words import plain

log = logging.getLogger(__name__)


class SummaryOptions(NamedTuple):
    """How a job database is summarised."""

    progress: Progress = lambda rows: None  # while the source is read
    ask_queue: AskQueue = not_asked
    billing: Billing | None = None  # None: that of the run


_USUAL = SummaryOptions()


def finish_job(
    order: MergeOrder, clock: Clock, options: SummaryOptions = _USUAL, *, remove_merged: bool = False
) -> FinishedJob:
    """Merge task databases into a job database, summarise it, write its page.

    The page is made again only if it would differ. A page that cannot be written is not an error: the numbers are safe
    in the job database.
    """
    try:
        merged = merge(order, clock)
    except NoTaskDatabases as error:
        raise _why_none(order.inputs, error) from None
    summary = summarize_database(order.target, clock.now_ms(), options)
    report = order.target.with_name("report.html")
    why_no_report = None
    mark = _page_mark(order.target, summary)
    try:
        if not _ends_with(report, mark):
            write_whole(report, [ReportedJob(order.target, job_title(order.target), summary).to_html(), mark])
    except BadInput as error:
        why_no_report = error.why or error.what
        log.warning("%s could not be written: %s", report, why_no_report)
    removed = remove_merged_files(order.target, merged.given) if remove_merged else None
    return FinishedJob(order.target, report, summary, merged, removed, why_no_report)


def _page_mark(database: Path, summary: Summary) -> str:
    """Return the last line of a page; it differs if anything differs that the page shows."""
    status = database.stat()
    states = [task.state for task in summary.facts.tasks]
    shown = (
        __version__,
        find_spec("bokeh") is None,
        status.st_size,
        status.st_mtime_ns,
        states,
        {**vars(summary), "facts": None},
    )
    return f"<!-- {stable_id(repr(shown))} -->\n"


def _ends_with(path: Path, text: str) -> bool:
    with suppress(OSError):  # there is none, or it cannot be read
        return path.read_bytes().endswith(text.encode())
    return False


def _why_none(inputs: Sequence[Path], error: NoTaskDatabases) -> DatabaseProblem:
    """Return the error with the reason, if a submit or an emulation has left a record of it."""
    above = [path.absolute().parent for path in inputs if path.absolute().name == "tasks"]
    for run in (*inputs, *above):
        unbegun = find_unbegun(run)
        if unbegun is not None:
            return DatabaseProblem(error.what, why=unbegun.what, fix=unbegun.command)
    return error


def summarize_database(database: Path, now_ms: int | None = None, options: SummaryOptions = _USUAL) -> Summary:
    """Return all numbers of a job database, and the findings; ``now_ms``: see ``summarize``."""
    facts = read_job(database)
    proof = prove_complete(database, facts, options.progress)
    summary = summarize(facts, proof, now_ms)
    if summary.verdict != "done" or summary.tasks_by_verdict.get(RUNNING):
        queue = options.ask_queue(database.parent.absolute(), {task.job_id for task in facts.tasks})
        summary = replace(summary, queue=queue)
    runs = [(database.parent / folder).parent for folder in facts.file_folders if Path(folder).name == "tasks"]
    return replace(
        summary,
        findings=find(summary),
        merged=replace(facts.merged, command=merge_again(database, facts)),
        cut_short=next(iter(not_none(map(find_cut_short, runs))), None),  # its array may be in the queue
        place=_place(database),
        bill=_bill(facts, [database.parent, *runs], options.billing),
    )


def _place(database: Path) -> str:
    """Return the run folder or, for a job database elsewhere, the file: for commands."""
    place = database.parent if database.name == "job.sqlite" else database
    return str(place.absolute())


def _bill(facts: JobFacts, runs: Sequence[Path], billing: Billing | None) -> Bill | None:
    """Return the bill of the tasks that ran under Slurm, by default with the weights that their run has recorded."""
    for run in runs:
        with suppress(BadInput):
            frozen = FrozenRun.read(RunFolder(run).run_toml)
            if billing is None and frozen is not None:
                billing = frozen.billing
    jobs = {task.job_id for task in facts.tasks if not task.is_local}
    emulated = {job for job in jobs if any(rows_in(run, job).exists() for run in runs)}
    tasks = tuple(task for task in facts.tasks if task.job_id in jobs - emulated)
    return rules_requests.make_bill(replace(facts, tasks=tasks), billing)


@contextmanager
def report_job(
    job: Path, clock: Clock, beside: Path | None = None, options: SummaryOptions = _USUAL
) -> Iterator[ReportedJob]:
    """Summarise a job, a task database or a recording, and compare it with another."""
    with ExitStack() as opened:
        jobs = [opened.enter_context(_open_job(path, clock)) for path in (job, beside) if path is not None]
        summaries = []
        for opened_job in jobs:
            summary = summarize_database(opened_job.database, clock.now_ms(), options)
            summaries.append(replace(summary, place=opened_job.place))
        comparison = None
        if beside is not None:
            titles = [opened_job.title for opened_job in jobs]
            if titles[0] == titles[1]:
                titles = [str(job), str(beside)]
            comparison = compare(summaries[0], titles[0], summaries[1], titles[1])
        lossy_files = sum(summary.facts.lossy_files for summary in summaries)
        yield ReportedJob(jobs[0].database, jobs[0].title, summaries[0], comparison, lossy_files)


class _OpenedJob(NamedTuple):
    """A job database; for a task database or a recording, a temporary one."""

    database: Path
    title: str
    place: str  # for commands


@contextmanager
def _open_job(path: Path, clock: Clock) -> Iterator[_OpenedJob]:
    database = find_job_database(path)
    if _holds_job(database):
        yield _OpenedJob(database, job_title(database), _place(database))
        return
    with TemporaryDirectory(prefix="badcjobs-report-") as folder:
        alone = Path(folder, database.name)  # a link: the other tasks of its run are not part of this report
        if database.suffix in TEXT_FORMS:
            alone = alone.with_suffix(".sqlite")
            load_readings(database, alone)
        else:
            for file in with_logs(database):
                alone.with_name(file.name).symlink_to(file.absolute())
        target = alone.with_name(f"{alone.name}.job")
        merge(MergeOrder([alone], target), clock)
        yield _OpenedJob(target, database.name, str(database.absolute()))


def _holds_job(database: Path) -> bool:
    try:
        with reading(database) as db:
            return is_job_database(db)
    except DatabaseProblem:
        # A damaged task database is salvaged; of others read_job says what is wrong, and suggests a command.
        return database.suffix not in TEXT_FORMS and TaskKey.parse(database.stem) is None


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its parts, to a hidden file and rename it; raises BadInput when it cannot be written.

    A symbolic link stays: the file that it points to is replaced.
    """
    if path.is_symlink() and path.is_file():
        path = path.resolve()
    if isinstance(text, str):
        text = [text]
    with fresh_file(path) as file:
        for part in text:
            file.write(part.encode("utf-8", errors="replace"))  # a file name may not be valid text


# --- what the numbers mean --------------------------------------------------------------------------------------------

_TOPICS = (*rules_tasks.TOPICS, *rules_devices.TOPICS, *rules_waiting.TOPICS, *rules_requests.TOPICS)
_OF_USE = {"unused_gpus", "cpus_request", *(rule.kind for _, rules in rules_waiting.TOPICS for rule in rules)}


def list_findings() -> str:
    """Return all kinds of findings with what they say, for the guide."""
    sentences = grouped((rule.kind, general_words(rule.says)) for _, rules in _TOPICS for rule in rules)
    lines = []
    for kind, says in sentences.items():
        name = kind
        for sentence in dict.fromkeys(says):
            lines.append(f"    {name:<18} {sentence}")
            name = ""
    return "\n".join(lines)


def list_keys() -> str:
    """Return the keys of the JSON documents, for the guide: the document, then what its lists and tables hold."""
    classes = {
        "completeness": read_model.Completeness,
        "states": StateSummary,
        "chunk_s, metrics": read_model.MetricFacts,
        "chunk_cost": read_model.CostFacts,
        "outlook": Outlook,
        "findings": Finding,
        "alerts": read_model.AlertFacts,
        "errors": read_model.ErrorFacts,
        "gaps": read_model.GapFacts,
        "failed_chunks": read_model.FailedChunk,
        "recording_names": NameGaps,
        "merged": read_model.Freshness,
        "cut_short": CutShort,
        "--compare": Comparison,
        "places": PlaceCounts,
        "figures": Figure,
        "bill": Bill,
    }
    parts = {"(top level)": KEYS, "task_list": TASK_KEYS, "devices": DEVICE_KEYS}
    parts |= {name: tuple(field.name for field in fields(kind)) for name, kind in classes.items()}
    parts["completeness"] += ("complete",)
    return "\n".join(
        fill(", ".join(keys), 100, initial_indent=f"    {name:<17} ", subsequent_indent=" " * 22)
        for name, keys in parts.items()
    )


class _Candidate(NamedTuple):
    """A finding, before it is compared with the others."""

    finding: Finding
    wants: tuple[str, ...]
    exclude: frozenset[str]  # nodes


def find(summary: Summary) -> tuple[Finding, ...]:
    """Return the findings about a job, worst first; none contradicts another."""
    candidates = sorted(_candidates(summary), key=lambda candidate: _rank(candidate.finding))
    chosen = _one_per_cause(candidates, summary)
    nodes = sorted(frozenset[str]().union(*(candidate.exclude for candidate in chosen)))
    findings = []
    for candidate in chosen:
        finding = candidate.finding
        if candidate.exclude and nodes:  # all in one line: sbatch uses only the last of several
            finding = replace(finding, lines=(*finding.lines, f"#SBATCH --exclude={','.join(nodes)}"))
            nodes = []
        findings.append(finding)
    return tuple(findings)


def _candidates(summary: Summary) -> Iterator[_Candidate]:
    """Yield a finding for each case to which a rule applies."""
    local = all(task.is_local for task in summary.facts.tasks)  # no Slurm: no #SBATCH lines, no node to exclude
    for cases, rules in _TOPICS:
        for case in cases(summary.facts, summary):
            rule = next((rule for rule in rules if all(map(case.get, rule.when.split()))), None)
            if rule is None:
                continue
            subjects = case.get("subjects", ())
            cost_s = case.get("cost_s")
            of_time = share(cost_s or 0.0, 3600 * summary.gpu_hours)
            figures = {"s": summary, "many": len(subjects), "of_time": of_time, **case}
            lines = [line for line in known_texts(rule.lines, figures) if not local or "#SBATCH" not in line]
            finding = Finding(
                kind=rule.kind,
                severity=say(rule.severity, figures),
                sentence=say(rule.says, figures),
                evidence=tuple(known_texts(rule.evidence, figures)),
                advice=say(rule.fix, figures),
                lines=tuple(lines),
                subjects=tuple(dict.fromkeys(map(plain, subjects))),
                gpu_hours=cost_s and cost_s / 3600,
            )
            exclude = frozenset() if local else case.get("exclude", frozenset())
            yield _Candidate(finding, rule.wants, exclude)


def _one_per_cause(ranked: Sequence[_Candidate], summary: Summary) -> list[_Candidate]:
    """Return the findings without those that contradict a worse one.

    Where no chunk was done, how busy the GPUs were says nothing. An option is suggested once.
    """
    nothing_done = summary.chunks > 0 and not summary.done
    chosen = list[_Candidate]()
    wanted = set[str]()
    options = set[str]()
    for candidate in ranked:
        finding = candidate.finding
        opposed = any(want.translate(_OPPOSITE) in wanted for want in candidate.wants)
        if opposed or (nothing_done and finding.kind in _OF_USE):
            continue
        wanted.update(candidate.wants)
        lines = tuple(line for line in finding.lines if _option(line) not in options)
        options.update(_option(line) for line in lines if line.startswith("#SBATCH"))
        chosen.append(candidate._replace(finding=replace(finding, lines=lines)))
    return chosen


def _option(line: str) -> str:
    return line.partition("=")[0]


_OPPOSITE = str.maketrans("+-", "-+")


def _rank(finding: Finding) -> tuple[int, float]:
    """Return the sort key of a finding: missing results first, then what cost most GPU time."""
    lost_hours = finding.gpu_hours
    if lost_hours is None:
        lost_hours = math.inf if finding.severity == PROBLEM else 0.0
    return SEVERITIES.index(finding.severity), -lost_hours


# --- results ----------------------------------------------------------------------------------------------------------


class FinishedJob(NamedTuple):
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
        removed = self.removed and self.removed._asdict()
        return {**document_of(self.summary, streamed=streamed), "files": files, "removed": removed}


class ReportedJob(NamedTuple):
    """The result of ``badcjobs report`` in every form; with a comparison, of both jobs."""

    database: Path
    title: str
    summary: Summary
    comparison: Comparison | None = None
    lossy_files: int = 0  # of both

    def to_text(self, *, colour: bool = False, width: int = WIDTH) -> str:
        """Return the report for a terminal or a log."""
        if self.comparison is not None:
            following = next_lines(verdict_of(self.summary), width)
            return "\n".join([comparison_text(self.comparison, width), "", *following]).rstrip()
        return summary_text(self.summary, self.title, colour=colour, width=width)

    def to_dict(self, *, streamed: bool = False) -> dict[str, Any]:
        """Return the report for scripts."""
        if self.comparison is not None:
            return self.comparison.to_dict()
        return document_of(self.summary, streamed=streamed)

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
    folder = inputs[0].absolute()
    if not (is_there(folder) and folder.is_dir()):
        folder = folder.parent
    return run_of(folder) / "job.sqlite"


def find_job_database(path: Path) -> Path:
    """Return the job database of a run folder, of its tasks/, or the file itself.

    Raises DatabaseProblem when there is none.
    """
    if path.absolute().name == "tasks" and any(path.glob("*.sqlite")) and not is_there(path / "job.sqlite"):
        path = path.absolute().parent
    is_folder = is_there(path) and path.is_dir()
    database = RunFolder(path).job_database if is_folder else path
    if is_there(database):
        return database
    if is_folder:
        raise _why_not_in(path)
    above = next(folder for folder in path.absolute().parents if folder.is_dir())
    raise _no_job(path, "does not exist", above)


def _why_not_in(folder: Path) -> DatabaseProblem:
    """Return why a folder has no job database."""
    run = RunFolder(folder)
    missing = f"{run.job_database} does not exist"
    started = any(run.tasks.glob("*.sqlite"))
    unbegun = None if started else find_unbegun(folder)
    if unbegun is not None:
        return DatabaseProblem(missing, why=unbegun.what, fix=unbegun.command)
    if run.tasks.is_dir():
        line = shell_line("badcjobs", "merge", folder)
        return DatabaseProblem(missing, why="the run has not been merged yet", fix=line)
    return _no_job(folder, "is not a run folder: it contains neither job.sqlite nor tasks/", folder)


def _no_job(path: Path, problem: str, above: Path) -> DatabaseProblem:
    return DatabaseProblem(
        f"{path} {problem}",
        why="expected: a run folder (--out of badcjobs run or submit), or its job.sqlite",
        fix=shell_line("ls", above),
    )
