"""What the guide says of the report: every key of the JSON document, every headline, every Prometheus metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

import pytest

from badcjobs.cli.start import read_topic
from badcjobs.model import CutShort, NameGaps
from badcjobs.report.compare import Comparison, Figure
from badcjobs.report.headlines import HEADLINES
from badcjobs.report.job_tables import rank_table, state_table, work_table
from badcjobs.report.progress import Outlook
from badcjobs.report.prometheus import METRICS
from badcjobs.report.summary import DEVICE_KEYS, KEYS, STATE_WORDS, SUMMARY_VERSION, TASK_KEYS, Finding, StateSummary
from badcjobs.store.read_model import (
    AlertFacts,
    Completeness,
    CostFacts,
    ErrorFacts,
    FailedChunk,
    Freshness,
    GapFacts,
    MetricFacts,
)

SECTIONS = {
    "completeness": Completeness,
    "A metric": MetricFacts,
    "A state": StateSummary,
    "chunk_cost": CostFacts,
    "merged": Freshness,
    "cut_short": CutShort,
    "outlook": Outlook,
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


@pytest.mark.parametrize(
    ("heading", "keys"), [("The document", KEYS), ("task_list", TASK_KEYS), ("devices", DEVICE_KEYS)]
)
def test_every_key_of_a_list_of_keys_is_explained_once_and_no_other(heading: str, keys: Sequence[str]) -> None:
    assert sorted(words_of(read_topic("report"), heading)) == sorted(keys)


def test_the_page_names_the_version_of_the_document() -> None:
    assert f"`version` is {SUMMARY_VERSION}" in read_topic("report")


def test_every_headline_is_explained() -> None:
    names = [name for name, _ in HEADLINES]
    assert len(names) >= 12
    assert words_of(read_topic("report"), "The headlines") == names


def test_every_column_and_every_state_of_the_tables_is_explained() -> None:
    page = read_topic("report")
    assert {*STATE_WORDS.values(), "total"} <= set(words_of(page, "What the GPUs did"))
    assert {"measured", *state_table({}).cells()[0][1:]} <= set(words_of(page, "What the GPUs did"))
    columns = {*work_table([]).cells()[0], *rank_table([]).cells()[0]} - {"p50 / p95 / max"}
    assert columns == set(words_of(page, "The devices"))


def test_every_metric_is_in_the_guide_with_its_meaning_and_unit() -> None:
    page = read_topic("live")
    for metric in METRICS:
        row = rf"^    {metric.name} +{re.escape(metric.help)} \({re.escape(metric.unit)}[,)]"
        assert re.search(row, page, re.MULTILINE), metric.name
