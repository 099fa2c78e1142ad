"""What the guide says of the report and of its metrics, and that Prometheus understands them."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

from rooms import report
from rooms.cli import read_topic
from rooms.model import CutShort, NameGaps
from rooms.report import METRICS, compare, job_samples, list_keys, prometheus_text, summarize
from support import needs
from support.summaries import FINDINGS, JOB, NASTY, PROOF, device

NAMES = NameGaps(9, 1, "a", 0, None, 0, None)
SUMMARY = replace(
    summarize(replace(JOB, recording_names=NAMES), (3,), PROOF), findings=FINDINGS, cut_short=CutShort("a", "b")
)


def words_of(page: str, heading: str) -> list[str]:
    """Return the words that a section explains: before the first two spaces of its indented lines."""
    section = re.split(r"^#+ ", page.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [line[4:].split("  ")[0] for line in section.splitlines() if re.match(r" {4}\S", line)]


def test_the_guide_lists_every_key_headline_and_state() -> None:
    listed: dict[str, set[str]] = {}
    part = ""
    for line in list_keys().splitlines():
        part = line[4:21].strip() or part
        listed.setdefault(part, set()).update(line[22:].replace(",", " ").split())
    document: dict[str, Any] = SUMMARY.to_dict()
    parts = {
        "(top level)": [document], "states": list(document["states"].values()),
        "chunk_s, metrics": [document["chunk_s"]],
        "--compare": [compare(SUMMARY, "a", SUMMARY, "b").to_dict()],
        "figures": compare(SUMMARY, "a", SUMMARY, "b").to_dict()["figures"],
        **{name: value if isinstance(value, (list, tuple)) else [value]
           for name, value in document.items() if name in listed and name != "states"},
    }  # fmt: skip
    assert parts.keys() == listed.keys()
    for name, rows in parts.items():
        assert rows and all(set(row) == listed[name] for row in rows), name
    guide = read_topic("report")
    assert list_keys() in guide and f"`version` is {report.SUMMARY_VERSION}" in guide
    assert words_of(guide, "The summary, line by line") == [name for name, _ in report.HEADLINES]
    assert words_of(guide, "What the GPUs did") == list(report.STATE_WORDS.values())


def check(text: str) -> subprocess.CompletedProcess[str]:
    """Ask promtool; what it says of style is an exit code of 3."""
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)


def test_promtool_is_content_with_every_metric_and_with_a_job_whatever_it_is_called() -> None:
    samples = [(metric.name, 1.5, dict.fromkeys(metric.labels, "x")) for metric in METRICS]
    for text in (prometheus_text(samples), prometheus_text(job_samples(SUMMARY, NASTY))):
        done = check(text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert check('badcjobs_chunks{run="a"b"} 1\n').returncode != 0
    assert check("# HELP badcjobs_x_total x\n# TYPE badcjobs_x_total gauge\nbadcjobs_x_total 1\n").returncode != 0


def test_every_metric_is_named_after_the_rules_in_the_guide_and_said_once() -> None:
    guide = read_topic("live")
    for metric in METRICS:
        assert re.fullmatch(r"badcjobs_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == report.COUNTER), metric.name
        row = rf"^    {metric.name} +{re.escape(metric.help)} \({re.escape(metric.unit)}[,)]"
        assert re.search(row, guide, re.MULTILINE), metric.name
    names = {name for name, _, _ in job_samples(SUMMARY, "july")}
    assert names == {metric.name for metric in METRICS if metric.where != report.SERVED}
    slices = [replace(device(), uuid=f"MIG-{n}", token=f"MIG-{n}") for n in range(3)]
    unread = [replace(device(), uuid=None, index=None, token=str(n)) for n in range(3)]
    text = prometheus_text(job_samples(summarize(replace(JOB, devices=(*slices, *unread))), "july"))
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 100


def test_a_value_that_is_not_known_is_left_out_with_its_head() -> None:
    named = {"run": 'a"b\\c\nd', "state": ""}
    for value, labels, said in (
        (2, named, ['badcjobs_chunks{run="a\\"b\\\\c\\nd"} 2']), (2.0, {}, ["badcjobs_chunks 2"]),
        (2.5, {}, ["badcjobs_chunks 2.5"]), (2**53 - 1.0, {}, ["badcjobs_chunks 9007199254740991"]),
        (2.0**53, {}, ["badcjobs_chunks 9007199254740992.0"]), (None, {}, []), (math.nan, {}, []), (math.inf, {}, []),
    ):  # fmt: skip
        text = prometheus_text([("badcjobs_chunks", value, labels)])
        assert text.splitlines()[2:] == said and bool(text) == bool(said)
