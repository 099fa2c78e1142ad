"""What the guide says of the report: every key of the JSON document, every headline, every Prometheus metric."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import read_topic
from rooms.report import HEADLINES, METRICS, STATE_WORDS, SUMMARY_VERSION, list_keys

REPORTS = Path(__file__).parents[2] / "pages" / "behaviour_pack" / "reports"


def words_of(page: str, heading: str) -> list[str]:
    """Return the words that a section explains: before the first two spaces of its indented lines."""
    section = re.split(r"^#+ ", page.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [line[4:].split("  ")[0] for line in section.splitlines() if re.match(r" {4}\S", line)]


def read_keys() -> dict[str, set[str]]:
    """Return the keys that the page lists: part of the document → its keys."""
    found: dict[str, set[str]] = {}
    part = ""
    for line in list_keys().splitlines():
        part = line[4:21].strip() or part
        found.setdefault(part, set()).update(key for key in line[22:].replace(",", " ").split())
    return found


def read_document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").partition("\n")[2])  # after the exit code
    return document


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*/report.json")), ids=lambda path: path.parent.name)
def test_the_page_lists_every_key_of_a_document(path: Path) -> None:
    listed, document = read_keys(), read_document(path)
    assert listed["(top level)"] == set(document)
    for part, value in document.items():
        rows = value if isinstance(value, list) else [value]
        if part in listed and part != "states":
            assert all(set(row) == listed[part] for row in rows if row is not None), part
    assert all(set(state) == listed["states"] for state in document["states"].values())
    metrics = [metric for device in document["devices"] for metric in device["metrics"].values()]
    assert all(set(metric) == listed["chunk_s, metrics"] for metric in metrics)
    assert list_keys() in read_topic("report")


def test_the_page_lists_every_key_of_a_comparison() -> None:
    listed, document = read_keys(), read_document(REPORTS / "array" / "compare.json")
    assert listed["--compare"] == set(document)
    assert all(set(figure) == listed["figures"] for figure in document["figures"])


def test_the_page_names_the_version_of_the_document() -> None:
    assert f"`version` is {SUMMARY_VERSION}" in read_topic("report")


def test_every_headline_is_explained() -> None:
    assert words_of(read_topic("report"), "The summary, line by line") == [name for name, _ in HEADLINES]


def test_every_state_is_explained() -> None:
    assert words_of(read_topic("report"), "What the GPUs did") == list(STATE_WORDS.values())


def test_every_metric_is_in_the_guide_with_its_meaning_and_unit() -> None:
    page = read_topic("live")
    for metric in METRICS:
        row = rf"^    {metric.name} +{re.escape(metric.help)} \({re.escape(metric.unit)}[,)]"
        assert re.search(row, page, re.MULTILINE), metric.name
