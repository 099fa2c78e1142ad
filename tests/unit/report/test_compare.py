"""Two jobs side by side: one pair whole, then what is said of other pairs."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooms import report
from rooms.model import CutShort
from rooms.report import Comparison, Summary, compare, comparison_markdown, comparison_text, summarize
from rooms.store import Freshness, JobFacts, StateTime
from support.behaviour import pretty
from support.facts import Lines
from support.pages import Pages
from support.summaries import HOUR_MS, JOB, NASTY, PROOF, START_MS, TASK, device

FILE = Path(__file__).parents[2] / "data" / "compare_facts.txt"

FOUR = replace(
    JOB,
    tasks=(replace(TASK, devices=4, last_sign_ms=START_MS + HOUR_MS // 2),),
    devices=tuple(
        replace(device(n), states={s: replace(t, total_s=t.total_s / 2) for s, t in device().states.items()})
        for n in range(4)
    ),
    last_settings={**JOB.last_settings, "workers_per_gpu": "auto", "out": "june", "alerts": {"idle_s": 600.0}},
)


def measured(share: float) -> JobFacts:
    """Return the job with twice the energy, measured for a share of the time."""
    devices = []
    for one in JOB.devices:
        states = {name: replace(time, measured_s=share * time.total_s) for name, time in one.states.items()}
        devices.append(replace(one, energy_counter_j=None, energy_integrated_j=2 * 734_400.0, states=states))
    return replace(JOB, devices=tuple(devices))


def idle(percent: float) -> JobFacts:
    """Return the job with so much idle time."""
    times = {"working": StateTime(36 * (100 - percent), 0.0), "idle": StateTime(36 * percent, 0.0)}
    return replace(JOB, devices=tuple(replace(one, states=times) for one in JOB.devices))


def slower() -> JobFacts:
    cost = replace(JOB.cost, gpu_s_mean=162.0, energy_j_mean=37_800.0)
    return replace(JOB, durations={3 * ms: many for ms, many in JOB.durations.items()}, cost=cost)


def empty() -> JobFacts:
    return JobFacts((), (), {}, 0.0, 0, 0, (), (), (), ())


def usual(tasks: Any, devices: Any) -> JobFacts:
    return replace(JOB, tasks=tuple(tasks or JOB.tasks), devices=tuple(devices or JOB.devices))


FACTS = Lines({"task": TASK}, {"first": device(), "second": device(1)}, usual, PROOF,
              large={made.__name__: made for made in (measured, idle, slower, empty)})  # fmt: skip


def pair(this: JobFacts | Summary, other: JobFacts | Summary = JOB, *titles: str) -> Comparison:
    ours, theirs = (one if isinstance(one, Summary) else summarize(one) for one in (this, other))
    return compare(ours, *(titles[:1] or ("a",)), theirs, *(titles[1:] or ("b",)))


def pairs() -> dict[str, Comparison]:
    """Of a line in data/compare_facts.txt the first job is compared with the usual one, or with that after ``//``."""
    found = {}
    for line in FILE.read_text().splitlines():
        name, _, facts = line.partition(": ")
        this, _, other = facts.partition(" // ")
        found[name] = pair(FACTS.read(this), FACTS.read(other or "job()"))
    command = f"badcjobs merge {'/scratch' * 20}/june"
    cut = replace(summarize(JOB), cut_short=CutShort("a submit was cut short here", "badcjobs submit m.csv"))
    return {
        **found, "cut short": pair(cut),
        "out of date": pair(JOB, replace(summarize(JOB), merged=Freshness(START_MS, changed=2, command=command))),
        "names of 20 letters": pair(JOB, JOB, "a" * 20, "b" * 20), "names of 21": pair(JOB, JOB, "a" * 21, "b" * 21),
        "names that end alike": pair(JOB, JOB, "july-2027-with-four-gpus", "june-2027-with-four-gpus"),
        "nasty names": pair(JOB, JOB, "/scratch/lab/" + "long/" * 30, NASTY),
    }  # fmt: skip


def test_two_jobs_side_by_side(pages: Pages) -> None:
    two = pair(FOUR, JOB, "four", "two")
    pages({"compare.txt": comparison_text(two), "compare.md": comparison_markdown(two),
           "compare.json": pretty(two.to_dict())})  # fmt: skip


def test_what_is_said_of_other_pairs(pages: Pages) -> None:
    usual, said, notebook = comparison_text(pair(JOB)).splitlines(), [], []
    for name, comparison in pairs().items():
        text = comparison_text(comparison).splitlines()
        assert max(map(len, text[3:])) <= 100 or name == "out of date", name
        assert all(line.isprintable() for line in text)
        lines = list(difflib.unified_diff(usual, text, n=0, lineterm=""))[2:]
        said += [f"## {name}", *(line for line in lines if line.startswith("+"))]
        if name in ("out of date", "cut short", "no settings", "nasty names"):
            notebook += [f"## {name}", *comparison_markdown(comparison).splitlines()[:6], "…"]
    pages({"compare.txt": "\n".join(said), "compare.md": "\n".join(notebook)})


def test_a_change_is_said_with_its_direction_and_percentages_differ_by_the_points_that_are_shown(pages: Pages) -> None:
    changes = {
        "much": [(None, 1.0, 0), (1.0, None, 1), (0.0, 0.0, 1), (3.0, 0.0, -1), (0.0, 3.0, -1), (0.8, 366.75, 0),
                 (1.0, 100.0, 0), (0.999, 100.0, 0), (199.0, 100.0, 0), (200.0, 100.0, 0), (-1.0, 100.0, 0)],
        "fast": [(100.0, 100.4, 1), (100.0, 100.6, 1), (110.0, 100.0, 1), (90.0, 100.0, 1)],
        "long": [(0.16, 115.24, -1)], "points": [(2.5, 2.01, 1), (2.5, 2.0, 1), (7.4, 2.6, 1), (2.4, 2.9, 1)],
    }  # fmt: skip
    words = {"much": report.MUCH, "fast": report.FAST, "long": report.LONG, "points": report.MUCH}
    said = [f"{kind}: {this} after {other}: "
            + report.change_words(this, other, words[kind], better, points=kind == "points")
            for kind, those in changes.items() for this, other, better in those]  # fmt: skip
    pages({"changes.txt": "\n".join(said)})
    assert (report.at_least("under 0.01 Wh"), report.at_least("3 Wh")) == ("measured: under 0.01 Wh", "at least 3 Wh")
