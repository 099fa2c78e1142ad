"""A job in all forms of its report: one job whole, then what is different in each form where one fact is different."""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rooms import report, store
from rooms.model import CutShort, NameGaps, Reading
from rooms.report import Summary, find, job_samples, markdown, page, prometheus_text, summarize, summary_text
from rooms.store import AlertFacts, Completeness, CostFacts, FailedChunk, Freshness, GapFacts, JobFacts, StateTime
from support.behaviour import page_text
from support.pages import Pages
from support.summaries import FINDINGS, HOUR_MS, JOB, NASTY, PROOF, START_MS, TASK, device

END_MS = START_MS + HOUR_MS
DONE = replace(TASK, verdict="done", exit_code=0, pending=0, failed=0)
WELL = replace(JOB, tasks=(DONE,), chunks={"done": 100}, failed=(), alerts=())
HEARD = replace(TASK, heard_at_ms=END_MS, silent_after_s=120.0)
HOT = AlertFacts("thermal", "warning", 2, 1, 100.0, 87.0, 83.0, "GPU 0 is at 84 °C")
LOST = AlertFacts("lost", "critical", 1, 1, 0.0, None, None, "GPU 1 can no longer be read", still_open=1)


def whole(job: JobFacts = JOB, missing: tuple[int, ...] = (3,), **proof: Any) -> Summary:
    return replace(summarize(job, missing, replace(PROOF, **proof)), findings=FINDINGS)


def flat(document: Any, place: str = "") -> Iterator[str]:
    """Yield a JSON document as lines: where, and what."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from flat(value, f"{place}.{key}" if place else key)
    elif isinstance(document, (list, tuple)) and document and isinstance(document[0], (dict, list, tuple)):
        for n, value in enumerate(document):
            yield from flat(value, f"{place}[{n}]")
    else:
        yield f"{place}: {float(f'{document:.9g}') if isinstance(document, float) else document!r}"


def columns_of(line: str) -> int:
    """Return how wide a terminal shows a line."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


FORMS: dict[str, Callable[[Summary], str]] = {
    "report.txt": lambda summary: summary_text(summary, "july"),
    "report.md": lambda summary: markdown(summary, "july"),
    "page.txt": lambda summary: re.sub(r"badcjobs \d\S*", "badcjobs VERSION", page_text(page(summary, "july"))),
    "report.prom": lambda summary: re.sub(r".*badcjobs_info.*\n", "", prometheus_text(job_samples(summary, "july"))),
    "report.json": lambda summary: "\n".join(flat(summary.to_dict())),
}


def differences(before: Summary, variants: dict[str, Summary], *names: str) -> dict[str, str]:
    """Return for each form what is different in each variant."""
    found = {}
    for name in names:
        usual, said = FORMS[name](before).splitlines(), list[str]()
        for variant, summary in variants.items():
            told = FORMS[name](summary).splitlines()
            if name == "report.txt":
                assert all(line.isprintable() for line in told)
                assert max(map(columns_of, told)) <= 100 or "long" in variant
            lines = list(difflib.unified_diff(usual, told, n=0, lineterm=""))[2:]
            said += [f"## {variant}", *(line for line in lines if not line.startswith("@@"))]
        found[name] = "\n".join(said)
    return found


def test_every_form_of_a_job(pages: Pages) -> None:
    pages({name: write(whole()) for name, write in FORMS.items()})


def test_an_empty_job_and_one_of_everything_that_is_not_known(pages: Pages) -> None:
    empty = JobFacts((), (), {}, 0.0, 0, 0, (), (), (), ())
    dark = replace(
        device(), index=None, uuid=None, name=None, memory_total_bytes=None, memory_peak_bytes=None, samples=0,
        temperature_max_c=None, power_mean_w=None, energy_counter_j=None, energy_integrated_j=None, gap_s=0.0,
        busy_mean_percent=None, utilization_counts={}, power_limit_w=None, metrics={}, throttled={}, spark=(),
        states={"working": StateTime(10.0, 0.0, None, None)}, read_at_ms=None, reading=Reading(),
    )  # fmt: skip
    odd = replace(dark, power_mean_w=math.nan, spark=(math.inf, 1.0), reading=Reading(power_w=-math.inf))
    task = replace(TASK, verdict="done", done=0, failed=0, pending=0, audio_s=0.0, last_sign_ms=START_MS, engine=None)
    unknown = replace(empty, tasks=(task,), devices=(dark, replace(dark, token="1")))
    jobs = {"empty": summarize(empty), "unknown": summarize(unknown)}
    pages({f"{name}/{form}": write(job) for name, job in jobs.items() for form, write in FORMS.items()})
    (found,) = summarize(replace(unknown, devices=(odd,))).to_dict()["devices"]
    assert (found["power_mean_w"], found["spark"], found["last"]) == (None, (None, 1.0), {"power_w": None})


def news(**merged: Any) -> Summary:
    return replace(whole(), merged=Freshness(**merged))


def cut_short(verdict: str) -> Summary:
    told = CutShort("a submit was cut short here", "badcjobs submit m.csv --array=0-2")
    return replace(whole(), verdict=verdict, cut_short=told)


def of_states(**states: StateTime) -> JobFacts:
    return replace(JOB, devices=(replace(device(), states=states), device(1)))


def long_lists(many: int) -> JobFacts:
    """A job with so many of everything that is listed."""
    return replace(
        JOB,
        tasks=tuple(replace(TASK, name=f"4821_{n}", verdict="stopped") for n in range(many)),
        devices=tuple(replace(device(n), task=f"4821_{n}", busy_mean_percent=50.0 - n) for n in range(many)),
        failed=tuple(FailedChunk("r", f"c{n}", "failed", 1, "x", "y" * 250) for n in range(many)),
        labels=tuple((f"L{n}", None, 1) for n in range(many)), chunks={"done": 1, "failed": many},
        file_remarks=tuple((f"/scratch/{'long-' * 18}{n}", "skipped: 0 bytes" * 6) for n in range(many)),
        gaps=(GapFacts("late", None, 1, 9.0, 1), GapFacts("no", "power_w", 1, 9.0, 1), GapFacts("no", "a", 1, 9.0, 1)),
    )  # fmt: skip


def of_texts() -> dict[str, Summary]:
    """What headlines, tables and commands say."""
    some = NameGaps(120, 3, "a/x.wav", 1, "y.wav", 120, "a/x.wav", 2, "a/z_20230501.wav")
    none = replace(JOB, tasks=(replace(TASK, devices=0),), devices=())
    two = (replace(TASK, name="4821_1", telemetry=0), TASK)
    models = replace(JOB, devices=(device(), replace(device(1), name="A100", node="gpu2")))
    partly = {"working": StateTime(2700.0, 1350.0, 900.0, 300_000.0), "start_up": StateTime(900.0, 0.0, None, None)}
    dim = replace(device(), states=partly, energy_counter_j=None, energy_integrated_j=300_000.0)
    lines = ("#SBATCH --mem=9G", "#SBATCH --mem=8G", "#SBATCH --time=1:00:00", "badcjobs check")
    strays = {"not_listed_examples": ("a", "b", "c"), "strangers": 7, "strangers_examples": ("x", "y")}
    wide = "鳥の声" * 30
    return {
        "no database, and a log": whole(replace(JOB, tasks=(DONE,)), missing_logs=("logs/3.out",)),
        "nothing missing": whole(missing=()),
        "a silent task": summarize(replace(JOB, tasks=(HEARD,)), (), PROOF, END_MS + 200_000),
        "two silent tasks": summarize(replace(JOB, tasks=(HEARD, replace(HEARD, heard_at_ms=None))), (3,), PROOF,
                                      END_MS + 200_000),
        "changed files": news(as_of_ms=START_MS, changed=2, command="badcjobs merge july"),
        "a changed file, and new ones": news(as_of_ms=START_MS, changed=1, new=2, command="badcjobs merge july"),
        "a new file": news(new=1),
        "a closed folder": news(as_of_ms=START_MS, gone=2, closed="tasks cannot be read"),
        "a file that is gone": news(as_of_ms=START_MS, gone=1), "files that are gone": news(as_of_ms=START_MS, gone=2),
        "cut short": cut_short("stopped"), "cut short, and done": cut_short("done"),
        "done elsewhere, and again": whole(replace(JOB, chunks={"done": 9, "skipped": 2}, conflicts=3, tries=1)),
        "not proved": whole(expected=None, why_unknown="m.csv does not exist", not_listed=None),
        "complete": whole(WELL, (), expected=100, not_listed=0, pending=0, failed=0, missing_indices=(), finish=()),
        "all states": whole(failed=2, poison=3, pending=4, elsewhere=5, not_listed=1, strangers=1),
        "not merged yet": whole(unmerged_indices=(4,)), "only that": whole(missing_indices=(), unmerged_indices=(4,)),
        "strays": whole(**strays), "strays, and nothing missing": whole(missing_indices=(), **strays),
        "one on the CPU": whole(replace(JOB, cpu_tries=1, done_of_unknown_length=1)),
        "none on the CPU": whole(replace(JOB, cpu_tries=0, done_of_unknown_length=2)),
        "names that tell less": whole(replace(JOB, recording_names=some)),
        "one name": whole(replace(JOB, recording_names=NameGaps(9, 1, "a", 9, "b", 0, None, 0, None))),
        "no GPU": whole(none),
        "ten minutes": whole(replace(JOB, tasks=(replace(TASK, last_sign_ms=START_MS + 300_000),))),
        "less than ten minutes": whole(replace(JOB, tasks=(replace(TASK, last_sign_ms=START_MS + 299_000),))),
        "less than a second": whole(replace(JOB, tasks=(replace(TASK, last_sign_ms=START_MS + 400),))),
        "a state of half a percent": whole(of_states(working=StateTime(7164.0, 0.0), idle=StateTime(36.0, 0.0))),
        "a state of less": whole(of_states(working=StateTime(7171.0, 0.0), idle=StateTime(29.0, 0.0))),
        "not known how long the rest is": whole(
            replace(JOB, chunks={"pending": 40}, audio_done_s=0.0, audio_left_s=0.0, left_of_unknown_length=40)),
        "no task is running": whole(replace(JOB, tasks=(replace(TASK, verdict="stopped"),))),
        "energy of one device": whole(replace(JOB, devices=(device(), replace(
            device(1), energy_counter_j=None, energy_integrated_j=None)))),
        "energy of no device": whole(replace(JOB, devices=(replace(
            device(), energy_counter_j=None, energy_integrated_j=None),))),
        "energy of a part of the time": whole(replace(JOB, tasks=(replace(TASK, devices=1),), devices=(dim,))),
        "energy of all but a state": whole(of_states(**{**partly, "working": StateTime(7000.0, 6950.0, 9.0, 9.0)})),
        "much energy": whole(replace(JOB, devices=tuple(replace(device(n), energy_counter_j=4e6) for n in (0, 1)))),
        "joules of some tries": whole(replace(JOB, cost=replace(JOB.cost, energy_tries=90))),
        "joules of none": whole(replace(JOB, cost=CostFacts(3, 2.0))),
        "no tries": whole(replace(JOB, cost=CostFacts())),
        "without telemetry": whole(replace(JOB, tasks=two, gaps=())),
        "no readings": whole(replace(JOB, devices=(replace(device(), samples=0, gap_s=0.0),), gaps=())),
        "lines for next time": replace(whole(), findings=(replace(FINDINGS[0], lines=lines), *FINDINGS)),
        "running, nothing in the queue": whole(missing=(), finish=("badcjobs submit m.csv", "badcjobs run m.csv")),
        "ended": whole(replace(JOB, tasks=(replace(TASK, verdict="stopped"),)), failed=0),
        "one command": whole(replace(JOB, tasks=(replace(TASK, verdict="stopped"),)), finish=("badcjobs run m.csv",)),
        "two models": whole(models),
        "one model, of two tasks": whole(replace(JOB, tasks=two, devices=(device(), device(0, "4821_1")))),
        "a chunk of less than ten seconds": whole(replace(JOB, durations={4_000: 3, 9_000: 1}, devices=(replace(
            device(), work=replace(device().work, chunk_p50_s=1.0, chunk_max_s=9.99)),))),
        "no durations": whole(replace(JOB, durations={})),
        "settings": whole(replace(JOB, last_settings={"a": True, "b": False, "c": [], "d": ["x", 2], "e": None})),
        "long lists": whole(long_lists(16)), "longer lists": whole(long_lists(17)),
        "ten labels": whole(replace(JOB, labels=JOB.labels * 5)),
        "eleven": whole(replace(JOB, labels=(*JOB.labels * 5, *JOB.labels[:1]))),
        "wide letters": replace(whole(replace(
            JOB, devices=(replace(device(0, f"4821_0.{wide}"), name="図形処理装置"), device(1, "4821_1")),
            labels=(("鳥" * 9, None, 3), ("声" * 9, None, 2)),
            tasks=(replace(TASK, name=f"4821_0.{wide}"), replace(TASK, name="4821_1")),
        )), findings=(replace(FINDINGS[0], subjects=(wide, f"x{wide}"), evidence=(f"1 of {wide}",)),)),
        "a long command": replace(whole(finish=("badcjobs run " + "folder/" * 30,)), findings=(
            replace(FINDINGS[0], lines=("#SBATCH --comment=" + "x" * 120,), subjects=("chunk " * 30,) * 6),)),
        "backticks": replace(whole(), findings=(replace(FINDINGS[0], lines=("echo ````",), advice=""),)),
    }  # fmt: skip


def test_what_the_texts_say_where_one_fact_is_different(pages: Pages) -> None:
    pages(differences(whole(), of_texts(), "report.txt", "page.txt"))


def test_what_is_said_where_nothing_was_found(pages: Pages) -> None:
    short, long = (replace(WELL, tasks=(replace(DONE, last_sign_ms=START_MS + ms),)) for ms in (59_999, 60_000))
    tasks = [replace(DONE, verdict=verdict, engine=None, done=0) for verdict in ("failed", "failed", "stopped")]
    no_chunks = {f"no chunks, {n} tasks failed": summarize(replace(WELL, tasks=(DONE, *tasks[:n]), chunks={}))
                 for n in (1, 2)}  # fmt: skip
    undone = {state: summarize(replace(WELL, chunks={"done": 1, state: 1})) for state in ("failed", "pending")}
    pages(differences(summarize(WELL), {
        "alerts": summarize(replace(WELL, alerts=(HOT, LOST, replace(HOT, kind="x", longest_s=0.0)))),
        "one alert": summarize(replace(WELL, alerts=(replace(HOT, alerts=1),))),
        **undone, "failed, and out of date": replace(undone["failed"], merged=Freshness(new=1)),
        "stopped, and out of date": replace(undone["pending"], merged=Freshness(changed=1)),
        "less than two minutes": summarize(short), "two minutes": summarize(long), **no_chunks,
        "no chunks, a task stopped": summarize(replace(WELL, tasks=(DONE, tasks[2]), chunks={})),
        "no chunks, out of date": replace(no_chunks["no chunks, 1 tasks failed"], merged=Freshness(new=1)),
    }, "report.txt"))  # fmt: skip


def left(job: JobFacts, now_ms: int | None = None, **proof: Any) -> Summary:
    return summarize(job, (), replace(PROOF, **proof), now_ms)


def with_first(**changes: Any) -> JobFacts:
    return replace(JOB, devices=(replace(device(), **changes), device(1)))


def of_numbers() -> dict[str, Summary]:
    """What is computed: totals, energy, what is left, states of tasks."""
    later = replace(TASK, name="b", started_at_ms=START_MS + 1_800_000, last_sign_ms=START_MS + 5_400_000, devices=1)
    after_ms = 7 * 24 * HOUR_MS
    again = replace(TASK, name="b", started_at_ms=START_MS + after_ms, last_sign_ms=START_MS + after_ms + 600_000)
    slow = (replace(TASK, done=99, pending=0), replace(TASK, name="1_1.r0.gpu2", done=10, pending=30))
    partly = replace(JOB, audio_left_s=30 * 7200.0, left_of_unknown_length=10)
    silent = replace(device(1), energy_counter_j=None, energy_integrated_j=None)
    idle = replace(device(), work=replace(device().work, audio_s=0.0))
    dark = replace(device(), states={"working": StateTime(3600.0, 0.0, None, None)})
    going = replace(device(), under_way=store.UnderWay(2, 900.0, 600.0, 1200.0, 800.0))
    alert = store.TaskAlert("thermal", "warning", "hot", "gpu1", START_MS)
    alerting = replace(HEARD, alerts=(alert, replace(alert, is_open=False), replace(alert, kind="memory")))
    alerts = (replace(HOT, still_open=3), replace(HOT, kind="memory", still_open=1))
    nothing = {"chunks": {"pending": 40}, "audio_done_s": 0.0}
    ending = replace(JOB, tasks=(replace(HEARD, heard_at_ms=END_MS + HOUR_MS),))

    def tasks(*those: Any, **more: Any) -> JobFacts:
        return replace(JOB, tasks=those, **more)

    return {
        "two tasks": left(tasks(TASK, later)), "a week between them": left(tasks(again, TASK)),
        "one inside the other": left(tasks(TASK, replace(later, last_sign_ms=START_MS + 2_000_000))),
        "no time": left(tasks(replace(TASK, last_sign_ms=START_MS))),
        "counter for nine tenths": left(with_first(energy_counter_span_s=3240.0)),
        "counter for less": left(with_first(energy_counter_span_s=3239.0)),
        "energy of one device": left(replace(JOB, devices=(device(), silent))),
        "energy of one that analysed nothing": left(replace(JOB, devices=(idle, silent))),
        "energy that no reading explains": left(replace(JOB, devices=(dark,), tasks=(replace(TASK, devices=1),))),
        "a second that is missing": left(tasks(replace(TASK, last_sign_ms=END_MS + 500))),
        "more than a second": left(tasks(replace(TASK, last_sign_ms=END_MS + 501))),
        "measured for longer than it was there": left(tasks(replace(TASK, last_sign_ms=END_MS - 20_000))),
        "under way": left(replace(tasks(HEARD), devices=(going, device(1)))),
        "under way, and silent": left(replace(tasks(HEARD), devices=(going, device(1))), END_MS + 200_000),
        "under way to the last": left(replace(tasks(HEARD), devices=(
            replace(going, under_way=store.UnderWay(1, 2700.0, None, None, 2699.9995)), device(1))), END_MS + 200_000),
        "killed": left(tasks(replace(TASK, slurm_state="NODE_FAIL"))),
        "outdated": left(tasks(replace(HEARD, changed=True)), END_MS + 200_000),
        "changed, and running": left(tasks(replace(HEARD, changed=True)), END_MS),
        "open alerts": left(tasks(alerting, alerts=alerts), END_MS),
        "open alerts of a silent task": left(tasks(alerting, alerts=alerts), END_MS + 200_000),
        "the slowest task": left(tasks(*slow)),
        "the slowest has ended": left(tasks(slow[0], replace(slow[1], verdict="stopped"))),
        "no task is running": left(tasks(replace(TASK, verdict="stopped"))),
        "a minute later": left(tasks(HEARD), END_MS + 60_000), "an end that has passed": left(ending, END_MS + HOUR_MS),
        "an end that has not": left(ending, END_MS + HOUR_MS - 1),
        "lengths that are not known": left(replace(JOB, audio_left_s=0.0, left_of_unknown_length=40), not_listed=0),
        "some lengths": left(partly), "some lengths, nothing done": left(replace(partly, **nothing)),
        "no length at all": left(replace(JOB, done_of_unknown_length=100, audio_left_s=0.0, left_of_unknown_length=40)),
        "the source is not known": left(JOB, expected=None, why_unknown="gone", not_listed=None, strangers=None),
        "nothing left": left(replace(JOB, chunks={"done": 100}), not_listed=0),
        "on the CPU": left(tasks(replace(TASK, devices=0), devices=())),
        "not begun": left(tasks(replace(TASK, done=0, heard_at_ms=END_MS + 60_000), **nothing)),
        "many states": left(replace(JOB, chunks={"done": 1, "failed": 2, "poison": 3, "pending": 4, "skipped": 5})),
        "not finished": left(JOB, unmerged_indices=(1,)),
    }  # fmt: skip


def test_what_is_computed_where_one_fact_is_different(pages: Pages) -> None:
    pages(differences(summarize(JOB, (), PROOF), of_numbers(), "report.json"))


def test_what_prometheus_hears_where_one_fact_is_different(pages: Pages) -> None:
    of_them = ("changed files", "a new file", "a closed folder", "a file that is gone", "not proved", "complete",
               "open alerts", "open alerts of a silent task", "nothing left", "no length at all", "on the CPU",
               "an end that has passed", "energy of one device")  # fmt: skip
    known = {**of_texts(), **of_numbers()}
    pages(differences(whole(), {name: replace(known[name], findings=FINDINGS) for name in of_them}, "report.prom"))


def test_work_left_comes_before_failures_and_both_before_done() -> None:
    proof = Completeness(3, None, 3, 3, 0, 0, 0, 0, 0, 0)
    stopped, failed = {"done": 3, "pending": 1, "failed": 1}, {"done": 3, "failed": 1}
    for chunks, missing, proved, verdict in (
        ({"done": 3}, (), None, "done"), (failed, (), None, "failed"), ({"done": 3, "poison": 1}, (), None, "failed"),
        ({"done": 3, "skipped": 2}, (), None, "stopped"),  # their results are in a file that was not given
        (stopped, (), None, "stopped"), (failed, (2,), None, "stopped"),
        ({"done": 3}, (), replace(proof, strangers=1), "done"),
        ({"done": 3}, (), replace(proof, expected=None, not_listed=None), "done"),
        ({"done": 3}, (), replace(proof, expected=4, not_listed=1), "stopped"),
        (failed, (), replace(proof, unmerged_indices=(1,)), "stopped"),
    ):  # fmt: skip
        assert summarize(replace(JOB, chunks=chunks), missing, proved).verdict == verdict, (chunks, missing, proved)


def test_the_stragglers_of_the_page_are_those_of_the_findings(pages: Pages) -> None:
    def on_nodes(*speeds: float, **changes: Any) -> Summary:
        works = [replace(device().work, audio_s=3600 * x, chunk_p50_s=500 / x) for x in speeds]
        devices = [replace(device(n), node=f"gpu{n}", work=work) for n, work in enumerate(works)]
        devices[0] = replace(devices[0], **changes)
        return summarize(replace(WELL, tasks=(replace(DONE, devices=len(speeds)),), devices=tuple(devices)))

    other = {"name": "Tesla T4"}
    cases = {
        "one is slow": on_nodes(20, 50, 50, 50, 50), "none is slow": on_nodes(50, 50, 50, 50),
        "too few": on_nodes(50, 50, 50), "one other": on_nodes(50, 50, 50, 50, 50, **other),
        "one slow, and hot": on_nodes(20, 50, 50, 50, 50, temperature_max_c=None, throttled={"hw_slowdown": 3}),
    }  # fmt: skip
    said = []
    for name, summary in cases.items():
        text = page_text(page(summary, "july")).partition("\nStragglers\n")[2].partition("\nFailed chunks\n")[0]
        found = [one for finding in find(summary) if finding.kind == "straggler_device" for one in finding.subjects]
        assert all(one in text for one in found)
        said.append(f"## {name}\n{text}")
    pages({"stragglers.txt": "\n".join(said)})


# --- words and tables -------------------------------------------------------------------------------------------------


def test_how_numbers_are_written(pages: Pages) -> None:
    minute, hour = 60_000, 3600
    inputs: dict[str, list[tuple[Any, ...]]] = {
        "spark": [((0, 12.4, 12.5, 99.9, 100, None, -5),)],
        "share_words": [(None,), (0,), (0.49,), (0.5,), (99.6,)],
        "memory": [(None,), (2**30 - 1,), (2**30,), (5 << 20,)],
        "durations": [([9.94, 59.94],), ([59.95],), ([0.2, 100],), ([3599.4],), ([3599.6],), ([72 * hour],), ([],),
                      ([0, 29, 30, 90, 2 * hour, 1000 * hour],)],
        "energies": [([None],), ([0],), ([5.7e-05],), ([0.01],), ([9.99],), ([10.0],), ([999.9],),
                     ([0.001, None, 90, 1000],)],
        "natural": [("gpu10.9",)],
        "index_ranges": [([],), ([3],), ([7, 3],), ([3, 4],), ([0, 1, 2, 5, 7, 8, 9],), ([1, 3, 5, 9], 2),
                         ([1, 3, 5], 1)],
        "indices": [(range(1000),), (range(0, 20, 2),), (range(0, 22, 2),)],
        "number": [(None,), (0.155, 2), (2.675, 2), (1234567.5, 0), (0.0994, 1), (0.1, 1), (0, 1), (0.0001, 1),
                   (0.00009, 1), (-0.00009, 1), (math.inf, 1)],
        "three": [(1.25, 2, 3, 1), (None, 1, 2), (1, 2, None)],
        "period": [(START_MS, START_MS + ms) for ms in (10 * minute - 1, 10 * minute, 1440 * minute)],
    }  # fmt: skip
    said = [f"{name}{given_} → {getattr(report, name)(*given_)}" for name, those in inputs.items() for given_ in those]
    pages({"numbers.txt": "\n".join(said)})


@given(st.lists(st.lists(st.text('ab鳥声|<&"', max_size=70), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_table_is_aligned_in_100_columns_and_keeps_the_ends_of_what_may_be_shortened(rows: list[list[str]]) -> None:
    kinds = (("a", "text"), ("b", "text"), ("c", ""))
    table = report.Table("t", "T", kinds, [[row[0][:20], row[1], row[2][:9]] for row in rows])
    lines = report.table_text(table, shorten="b")
    shown = [f"{line}|" if line.endswith(" ") else line for line in lines]
    assert max(map(columns_of, shown)) <= 100
    assert len({columns_of(line) for line, row in zip(lines[1:], rows, strict=True) if row[2].strip()}) <= 1
    for row, line in zip(rows, lines[1:], strict=True):
        assert row[1][-8:].split("…")[-1].strip() in line


@given(st.text("aé鳥|`\\*<$ \n\t\x1b\u2028"))
def test_escaped_text_is_one_line_and_backslashes_give_the_text_back(text: str) -> None:
    line = report.escaped(text)
    assert len(line.splitlines()) <= 1
    assert re.sub(r"\\(.)", r"\1", line) == "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def test_a_table_of_a_page_is_escaped_sorted_by_numbers_and_folded(pages: Pages) -> None:
    rows = [(NASTY, report.Cell(f"<{n}>", 1 / (n + 1) if n else None), "x & y") for n in range(17)]
    kinds = (("<name>", "text"), ("many", ""), ("why", "long"))
    pages({"table.html": report.table_html(report.Table("a<b", '"T"', kinds, rows, foot=rows[0]))})


def test_colours_change_no_word_and_a_long_name_leaves_room_for_the_verdict() -> None:
    for verdict, code in (("stopped", 33), ("done", 32), ("failed", 31)):
        plain, coloured = (summary_text(replace(whole(), verdict=verdict), "july", colour=c) for c in (False, True))
        assert coloured.startswith(f"july: \x1b[{code}m") and "  \x1b[1;31mproblem\x1b[0m  One of" in coloured
        assert "\n  \x1b[33mwarning\x1b[0m  Starting" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    first = summary_text(whole(), "july" * 60).splitlines()[0]
    assert len(first) == 100 and first.endswith("j…: not finished: there is work left")


def test_the_last_lines_of_merge_and_run(pages: Pages) -> None:
    named = [{"recording_id": f"r{n}", "chunk_id": "c", "error_class": "bad_audio", "error": "a\nno"} for n in range(2)]
    end = {"exit_code": 1, "verdict": "failed", "task": "t", "out": "my run", "database": "my run/t.sqlite",
           "chunks": {"failed": 1, "done": 1000, "poison": 1}, "audio_s": 7200.0, "wall_s": 3600.0, "devices": 1,
           "telemetry": "on", "failed": named, "note": "stopped\x1b"}  # fmt: skip
    more = {**end, "chunks": {"failed": 2, "poison": 1}, "note": None, "audio_s": 0.0}
    left_files = [(f"/scratch/st-somebody-1/a-folder/of-some-length/tasks/4821_{n}.r0.gpu1.sqlite", "not ended")
                  for n in range(21)]  # fmt: skip
    pages({
        "run.txt": report.task_end_text(end), "run-more.txt": report.task_end_text(more),
        "run-nothing.txt": report.task_end_text({**end, "chunks": {}, "failed": [], "wall_s": 0.0}),
        "removed.txt": report.removal_text(["a"], left_files[:20]),
        "removed-more.txt": report.removal_text(["a", "b"], left_files),
    })  # fmt: skip
