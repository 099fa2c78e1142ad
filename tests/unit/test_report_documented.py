"""What the guide says of the report: every key of the JSON document, every headline, every Prometheus metric."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from support.summaries import JOB

import badcjobs
from badcjobs.handbook import read_topic
from badcjobs.model import (
    AlertFacts,
    Completeness,
    CostFacts,
    CutShort,
    ErrorFacts,
    FailedChunk,
    Finding,
    Freshness,
    GapFacts,
    MetricFacts,
    NameGaps,
    TaskFacts,
)
from badcjobs.report import page_tables as tables
from badcjobs.report.compare import Comparison, Figure
from badcjobs.report.device_summary import DeviceSummary
from badcjobs.report.device_tables import MEASURED_HEAD, rank_rows, state_rows, work_rows
from badcjobs.report.factors import Bill, Factors
from badcjobs.report.metrics import METRICS
from badcjobs.report.outlook import Outlook
from badcjobs.report.states import STATE_WORDS, StateSummary
from badcjobs.report.summarize import SUMMARY_VERSION, Summary, summarize

SECTIONS = {
    "The document": Summary,
    "completeness": Completeness,
    "task_list": TaskFacts,
    "devices": DeviceSummary,
    "A metric": MetricFacts,
    "A state": StateSummary,
    "chunk_cost": CostFacts,
    "merged": Freshness,
    "cut_short": CutShort,
    "outlook": Outlook,
    "bill": Bill,
    "findings": Finding,
    "alerts": AlertFacts,
    "errors": ErrorFacts,
    "gaps": GapFacts,
    "recording_names": NameGaps,
    "failed_chunks": FailedChunk,
    "The document of --compare": Comparison,
    "figures": Figure,
}
COMPUTED = {"completeness": {"complete"}}


def words_of(page: str, heading: str) -> list[str]:
    """Return the words that a section explains: before the first two spaces of its indented lines, at commas."""
    section = re.split(r"^#+ ", page.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    starts = [line[4:].split("  ")[0] for line in section.splitlines() if re.match(r" {4}\S", line)]
    return [word.strip() for start in starts for word in start.split(",")]


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_of_the_json_document_is_explained_once_and_no_other(heading: str) -> None:
    expected = {field.name for field in fields(SECTIONS[heading])} | COMPUTED.get(heading, set())
    explained = words_of(read_topic("report"), heading)
    assert sorted(explained) == sorted(expected)


def test_the_page_names_the_version_of_the_document() -> None:
    assert f"`version` is {SUMMARY_VERSION}" in read_topic("report")


def test_every_headline_is_explained() -> None:
    source = (Path(badcjobs.__file__).parent / "report" / "headlines.py").read_text(encoding="utf-8")
    names = re.findall(r'^ +\*?\(?\[?\("([a-zA-Z ]+)", ', source.partition("def well_words")[0], re.MULTILINE)
    assert len(names) >= 12
    assert words_of(read_topic("report"), "The headlines") == names


def test_every_column_and_every_state_of_the_tables_is_explained() -> None:
    page = read_topic("report")
    assert {*STATE_WORDS.values(), "together"} <= set(words_of(page, "What the GPUs did"))
    columns = {
        *state_rows({})[0][1:],
        MEASURED_HEAD,
        *(h.lstrip("<") for h in tables.states(summarize(JOB)).headings[1:]),
    }
    assert columns <= set(words_of(page, "What the GPUs did"))
    columns = {*work_rows([])[0], *rank_rows([])[0]} - {"p50 / p95 / max"}
    assert columns == set(words_of(page, "The devices"))


def test_every_factor_is_explained() -> None:
    page = read_topic("report")
    assert all(f"\n    {field.name} = " in page for field in fields(Factors))


def test_every_metric_has_its_unit_meaning_kind_place_and_source_in_the_guide() -> None:
    rows = [re.split(r" {2,}", line.strip()) for line in read_topic("metrics").splitlines() if line.startswith("    ")]
    for metric in METRICS:
        at = rows.index([metric.name, metric.unit, metric.help])
        assert rows[at + 1] == [metric.kind, metric.where, f"from {metric.source}"]


def test_the_guide_names_no_metric_that_does_not_exist() -> None:
    found = set(re.findall(r"\bbadcjobs_[a-z_]+", read_topic("metrics")))
    assert found == {metric.name for metric in METRICS}
