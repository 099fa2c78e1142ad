"""The forms of the report: text for logs and terminals, Markdown for notebooks, two jobs side by side."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import CutShort
from rooms.report import (
    FAST,
    LONG,
    MUCH,
    Comparison,
    Summary,
    at_least,
    change_words,
    compare,
    comparison_markdown,
    comparison_text,
    duration,
    durations,
    energies,
    energy,
    escaped,
    markdown,
    moment,
    no_findings_words,
    number,
    page,
    period,
    share_words,
    spark,
    summarize,
    summary_text,
    task_end_text,
    three,
    work_table,
)
from rooms.store import AlertFacts, Freshness, JobFacts, StateTime
from support.summaries import FINDINGS, HOUR_MS, JOB, NASTY, PROOF, START_MS, TASK, device


def whole(job: JobFacts = JOB) -> Summary:
    return replace(summarize(job, (3,), PROOF), findings=FINDINGS)


def many_devices(many: int) -> Summary:
    devices = [replace(device(n), busy_mean_percent=float(n % 90)) for n in range(many - 1)]
    unknown = replace(device(), busy_mean_percent=None, utilization_counts={})
    return summarize(replace(JOB, devices=(*devices, unknown)))


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_text_fits_100_columns_and_holds_no_character_that_steers_a_terminal() -> None:
    text = summary_text(whole(), "july")
    assert max(map(len, text.splitlines())) <= 100
    assert all(line.isprintable() for line in text.splitlines())


def columns(line: str) -> int:
    """Return how wide a terminal shows a line."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_letters_that_take_two_columns_are_counted_as_two() -> None:
    birds = "鳥の声" * 30
    job = replace(
        JOB,
        devices=tuple(replace(one, name="図形処理装置", task=f"4821_{n}.{birds}") for n, one in enumerate(JOB.devices)),
        failed=(replace(JOB.failed[0], recording_id=birds, chunk_id=f"{birds}1"),),
        labels=(("鳥" * 9, None, 3), ("声" * 9, None, 2), *JOB.labels),
    )
    found = replace(FINDINGS[0], subjects=(birds, f"x{birds}"), evidence=(f"1 of {birds}",))
    summary = replace(whole(job), findings=(found,))
    text = summary_text(summary, birds)
    assert max(map(columns, text.splitlines())) <= 100
    tables = [block.splitlines() for block in text.split("\n\n") if "図形処理装置" in block]
    assert len(tables) == 2
    for head, *rows in tables:
        assert {columns(row) for row in rows} == {columns(head)}
    beside = comparison_text(compare(summary, birds, summarize(JOB), "b" * 40))
    assert max(map(columns, beside.splitlines()[3:])) <= 100
    tall = [line for line in beside.splitlines() if line.startswith(("  devices  ", "  engine  "))]
    assert len({columns(line) for line in tall}) == 1


def test_a_long_name_of_a_run_leaves_room_for_its_verdict() -> None:
    first = summary_text(whole(), "july" * 60).splitlines()[0]
    assert len(first) == 100
    assert first.endswith("…: not finished: there is work left")


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --comment=" + "x" * 120,
        "mv a b && badcjobs merge " + "folder " * 20,
        "echo 'unbalanced " + "x" * 100,
        "badcjobs run 'a b.csv' --out july",
    ],
)
def test_lines_to_paste_are_whole_however_long_they_are(line: str) -> None:
    text = summary_text(replace(whole(), findings=(replace(FINDINGS[0], lines=(line,)),)), "july")
    assert f"             {line}" in text.splitlines()


def test_long_names_of_chunks_fit_and_the_count_of_the_others_is_right() -> None:
    names = tuple(f"{'recording-' * 15}{n}" for n in range(1234))
    text = summary_text(replace(whole(), findings=(replace(FINDINGS[0], subjects=names, evidence=names[:1]),)), "july")
    assert max(map(len, text.splitlines())) <= 100
    assert " and 1,229 more" in " ".join(text.split())


def test_a_finding_has_its_severity_its_figures_where_and_what_to_do() -> None:
    lines = summary_text(whole(), "july").splitlines()
    place = lines.index("  problem  One of the GPUs was never used.")
    assert lines[place + 1 : place + 6] == [
        "           - 0 of 51 tries ran on GPU 1",
        "           - where: task 0, task 1, task 2, task 3, task 4 and 4 more",
        "           → Ask for one GPU per task.",
        "             #SBATCH --gpus-per-task=1",
        "",
    ]
    assert lines[place + 6] == "  warning  Starting up took long."


def test_without_findings_all_is_well_only_where_all_is_done() -> None:
    done = summarize(replace(JOB, chunks={"done": 100}))
    assert "No problems found" in summary_text(done, "july")
    assert "No problems found" not in summary_text(summarize(JOB), "july")
    assert "No problems found" not in summary_text(replace(done, findings=FINDINGS), "july")


def test_colours_are_only_there_where_they_are_wanted_and_change_no_word() -> None:
    plain, coloured = summary_text(whole(), "july"), summary_text(whole(), "july", colour=True)
    assert "\x1b" not in plain
    assert coloured.splitlines()[0] == "july: \x1b[33mnot finished: there is work left\x1b[0m"
    assert "  \x1b[1;31mproblem\x1b[0m  One of" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_the_tables_say_what_the_gpus_did_together_and_each() -> None:
    text = summary_text(whole(), "july")
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert ["working", "1 h 30 min", "75%", "357.0 Wh", "88%"] in rows
    assert ["total", "2 h 00 min", "100%", "408.0 Wh", "100%"] in rows
    assert ["0 Tesla V100-SXM", TASK.name, "▁▃·██", "55%", "75%", "50", "204.0 Wh", "12.0 s"] in rows
    ranks = ["60/72/90", "6.0/7.2/9.0", "54/65/81", "200/240/300", "50.0/60.0/80.0"]
    assert ["1 Tesla V100-SXM", TASK.name, *ranks] in rows


def test_of_too_many_devices_those_that_were_busy_least_are_shown() -> None:
    text = summary_text(many_devices(500), "july")
    assert "the 16 least busy of 500 devices (counted once per task); report.html and --json list all" in text
    table = text.partition("utilization over time")[2].partition("(the 16")[0]
    busy = [int(found) for found in re.findall(r"(\d+)% +75%", table)]
    assert sorted(busy) == sorted(sorted(n % 90 for n in range(499))[:16])


def test_a_long_task_name_gives_way_at_its_beginning() -> None:
    name = "123456789_1234.r0." + "a-very-long-node-name" * 4
    text = summary_text(summarize(replace(JOB, devices=(device(task=name),))), "july")
    assert max(map(len, text.splitlines())) <= 100
    assert "-node-name  ▁▃·██" in text


def test_without_telemetry_nobody_knows_of_gaps() -> None:
    def gaps_of(samples: int, gap_s: float) -> str:
        silent = replace(device(), samples=samples, gap_s=gap_s)
        return work_table(summarize(replace(JOB, devices=(silent,))).devices).cells()[1][-1]

    assert [gaps_of(0, 0.0), gaps_of(9, 0.0), gaps_of(0, 9.0)] == ["–", "none", "9.0 s"]


# --- energy of a part of the time -----------------------------------------------------------------------------------


def test_where_energy_was_measured_for_a_part_of_the_time_every_form_says_so() -> None:
    states = {"working": StateTime(2700.0, 1350.0, 900.0, 300_000.0), "start_up": StateTime(900.0, 0.0, None, None)}
    partly = replace(device(), states=states, energy_counter_j=None, energy_integrated_j=300_000.0)
    done = replace(JOB, tasks=(replace(TASK, devices=1, verdict="done"),), devices=(partly,), chunks={"done": 100})
    summary = summarize(done)
    assert summary.energy_measured_percent == pytest.approx(37.5)
    said = "83.3 Wh, measured for 38 % of the GPU time; at least 0.83 kWh per 1,000 audio-hours"
    rows = [
        ["working", "0 h 45 min", "75%", "83.3 Wh", "100%", "50%"],
        ["starting up", "0 h 15 min", "25%", "–", "–", "0%"],
        ["total", "1 h 00 min", "100%", "83.3 Wh", "100%", "38%"],
    ]
    text, notebook, html = summary_text(summary, "july"), markdown(summary, "july"), page(summary, "july")
    assert all(said in form for form in (text, notebook, html))
    assert all(row in [re.split(r"  +", line.strip()) for line in text.splitlines()] for row in rows)
    assert all(f"| {' | '.join(row)} |" in notebook for row in rows)
    table = html.partition('id="state-table"')[2].partition("</table>")[0]
    assert re.findall(r"<th [^>]*>([^<]*)", table)[:7] == [
        "what the GPUs did", "GPU time", "of the time", "of it busy", "energy", "of the energy", "measured",
    ]  # fmt: skip
    assert re.findall(r">([^<>\n]*)", table.partition("<tfoot>")[2])[1:8] == [
        "total", "1.00 h", "100 %", "0.25 h", "83.3 Wh", "100 %", "38 %",
    ]  # fmt: skip
    assert "energy, measured for 38 % of the GPU time" in html
    assert "measured" not in summary_text(summarize(JOB), "july").partition("what the GPUs did")[2].partition("\n")[0]


# --- alerts -----------------------------------------------------------------------------------------------------------

HOT = AlertFacts("thermal", "warning", 2, 1, 100.0, 87.0, 83.0, "GPU 0 is at 84 °C")
LOST = AlertFacts("lost", "critical", 1, 1, 0.0, None, None, "GPU 1 can no longer be read", still_open=1)


def well(*alerts: AlertFacts) -> Summary:
    task = replace(TASK, verdict="done", pending=0, failed=0)
    return summarize(replace(JOB, tasks=(task,), chunks={"done": 100}, failed=(), alerts=alerts))


def test_each_kind_of_alert_has_a_line_in_the_text_and_in_the_notebook() -> None:
    lines = (
        "lost (critical): 1 alert on 1 device; 1 still open; for example: GPU 1 can no longer be read",
        "thermal (warning): 2 alerts on 1 device; worst value 87 °C, limit 83 °C; longest 1 min 40 s",
    )
    text, notebook = summary_text(well(HOT, LOST), "july"), markdown(well(HOT, LOST), "july")
    assert f"alert: {lines[0]} alert: {lines[1]} " in " ".join(text.split())
    assert all(f"- alert: {line}" in notebook for line in lines)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("write", [summary_text, markdown])
def test_nothing_is_called_well_beside_a_critical_alert(write: Callable[[Summary, str], str]) -> None:
    assert "No problems found.\n" in write(well(), "july")
    assert "No problems found; 2 alerts, see below.\n" in write(well(HOT), "july")
    critical = write(well(HOT, LOST), "july")
    assert "No problems found" not in critical
    assert "No findings; 1 critical alert and 2 other alerts, see below." in critical


def test_a_short_job_with_alerts_does_not_say_only_that_nothing_went_wrong() -> None:
    short = replace(well(HOT), gpu_hours=0.005)
    assert "No problems found; 18 s of GPU time" in no_findings_words(short)
    assert no_findings_words(short).endswith("; 2 alerts, see below.")
    assert "No problems found" not in no_findings_words(replace(well(LOST), gpu_hours=0.005))


# --- words ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=30))
def test_a_spark_has_one_character_for_each_value(values: list[float | None]) -> None:
    drawn = spark(values)
    assert len(drawn) == len(values)
    assert set(drawn) <= set("·▁▂▃▄▅▆▇█")


def test_words_of_numbers() -> None:
    assert spark((0, 12.4, 12.5, 99.9, 100, None)) == "▁▁▂██·"
    assert (three(1.25, 2, 3, 1), three(None, 1, 2)) == ("1.3/2.0/3.0", "–")
    assert [number(0.155, 2), number(2.675, 2), number(1234567.5, 0)] == ["0.16", "2.68", "1,234,568"]
    assert [share_words(value) for value in (None, 0, 0.2, 0.5, 99.6)] == ["–", "0 %", "<1 %", "1 %", "100 %"]
    assert [duration(s) for s in (86_400 * 3, 76_379)] == ["72 h 00 min", "21 h 13 min"]
    assert [duration(s) for s in (9.94, 59.97, 100, 3599.4, 3599.6)] == [
        "9.9 s", "1 min 00 s", "1 min 40 s", "59 min 59 s", "1 h 00 min",
    ]  # fmt: skip
    assert [energy(wh) for wh in (None, 0, 5.7e-05, 0.8, 357, 2500)] == [
        "–", "0.00 Wh", "under 0.01 Wh", "0.80 Wh", "357.0 Wh", "2.50 kWh",
    ]  # fmt: skip
    assert "e-" not in number(5.7e-05)


def test_a_column_has_one_unit() -> None:
    assert durations([0.2, 14.1]) == ["0.2 s", "14.1 s"]
    assert durations([0.2, 100]) == ["0 min 00 s", "1 min 40 s"]
    assert durations([0, 5, 100, 7200]) == ["0 h 00 min", "<1 min", "0 h 02 min", "2 h 00 min"]
    assert energies([0.001, None, 90, 2500]) == ["under 0.01 kWh", "–", "0.09 kWh", "2.50 kWh"]


# --- side by side -----------------------------------------------------------------------------------------------------

FOUR = replace(
    JOB,
    tasks=(replace(TASK, devices=4, last_sign_ms=START_MS + HOUR_MS // 2),),
    devices=tuple(
        replace(device(n), states={s: replace(t, total_s=t.total_s / 2) for s, t in device().states.items()})
        for n in range(4)
    ),
    last_settings={**JOB.last_settings, "workers_per_gpu": "auto", "out": "june", "alerts": {"idle_s": 600.0}},
)


def four_against_two() -> Comparison:
    return compare(summarize(FOUR), "four", summarize(JOB), "two")


def test_twice_the_gpus_are_twice_as_fast_and_give_the_same_per_gpu_hour() -> None:
    found = {figure.key: figure for figure in four_against_two().figures}
    assert (found["times_real_time"].ratio, found["times_real_time"].change) == (2.0, "2.0 × as fast (better)")
    assert found["wall_s"].change == "50 % shorter"
    assert found["audio_hours_per_gpu_hour"].change == "the same"
    assert (found["devices_at_once"].this, found["devices_at_once"].other) == (4.0, 2.0)
    assert found["kwh_per_1000_audio_hours"].change == "2.0 × as much (worse)"
    assert four_against_two().conclusion == (
        "four is 2.00 × as fast as two, with 4.0 GPUs against 2.0 GPUs in use on average; each GPU-hour analyses 1.00 ×"
        " as much audio."
    )


def changes(this: JobFacts, other: JobFacts) -> dict[str, str]:
    return {figure.key: figure.change for figure in compare(summarize(this), "a", summarize(other), "b").figures}


PER_CHUNK = ("chunk_p50_s", "chunk_p95_s", "gpu_s_per_chunk", "energy_j_per_chunk")


def test_what_a_chunk_takes_is_better_or_worse_only_where_chunks_are_as_long() -> None:
    cost = replace(JOB.cost, gpu_s_mean=162.0, energy_j_mean=37_800.0)
    slower = replace(JOB, durations={3 * ms: many for ms, many in JOB.durations.items()}, cost=cost)
    assert {changes(slower, JOB)[key].partition(" (")[2] for key in PER_CHUNK} == {"worse)"}
    longer = changes(replace(slower, audio_done_s=3 * JOB.audio_done_s), JOB)
    assert longer["audio_s_per_chunk"] == "3.0 × as long"
    assert {longer[key] for key in PER_CHUNK} == {"3.0 × as long", "3.0 × as much"}


def test_failed_chunks_are_better_or_worse_only_among_as_many() -> None:
    few, many = replace(JOB, chunks={"done": 90, "failed": 10}), replace(JOB, chunks={"done": 70, "failed": 30})
    assert changes(many, few)["chunks_failed"] == "3.0 × as many (worse)"
    larger = replace(JOB, chunks={"done": 970, "failed": 30})
    assert changes(larger, few)["chunks_failed"] == "3.0 × as many"


def measured_for(share: float) -> JobFacts:
    """Return the job with twice the energy, measured for a share of the time."""

    def measure(one: StateTime) -> StateTime:
        return replace(one, measured_s=share * one.total_s)

    devices = tuple(
        replace(
            d,
            energy_counter_j=None,
            energy_integrated_j=2 * 734_400.0,
            states=dict(zip(d.states, map(measure, d.states.values()), strict=True)),
        )
        for d in JOB.devices
    )
    return replace(JOB, devices=devices)


@pytest.mark.parametrize(
    ("measured", "said", "change"),
    [
        (1.0, "", "2.0 × as much (worse)"),
        (0.95, "at least ", "2.0 × as much"),
        (0.004, "at least ", "cannot be compared"),
    ],
)
def test_energy_is_judged_only_where_it_was_measured(measured: float, said: str, change: str) -> None:
    this = summarize(measured_for(measured))
    found = {figure.key: figure for figure in compare(this, "a", summarize(JOB), "b").figures}
    rate = found["kwh_per_1000_audio_hours"]
    assert (rate.change, rate.ratio) == (change, None if change.startswith("cannot") else pytest.approx(2))
    assert rate.this_words.startswith(said)
    assert not rate.other_words.startswith("at least")
    assert found["energy_wh"].this_words.startswith(said)
    assert found["energy_measured_percent"].this_words == ("<1 %" if measured < 0.01 else f"{100 * measured:.0f} %")


def test_what_looks_the_same_is_the_same() -> None:
    devices = tuple(replace(one, busy_mean_percent=80.4) for one in JOB.devices)
    less = tuple(replace(one, busy_mean_percent=79.6) for one in JOB.devices)
    assert changes(replace(JOB, devices=less), replace(JOB, devices=devices))["busy_mean_percent"] == "the same"


def test_percentages_differ_by_points() -> None:
    busier = tuple(replace(one, busy_mean_percent=87.0) for one in JOB.devices)
    idler = tuple(replace(one, busy_mean_percent=80.0) for one in JOB.devices)
    more, less = replace(JOB, devices=busier), replace(JOB, devices=idler)
    assert changes(more, less)["busy_mean_percent"] == "7 points more (better)"
    assert changes(less, more)["busy_mean_percent"] == "7 points less (worse)"
    assert changes(measured_for(0.67), JOB)["energy_measured_percent"] == "33 points less"


def test_at_least_is_not_said_of_a_value_below_what_is_shown() -> None:
    assert at_least("under 0.01 Wh") == "measured: under 0.01 Wh"


def test_one_point_is_one_point() -> None:
    working = replace(device().states["working"], total_s=2760.0)  # of 3660 s: 75.4 %, against 75 % of 3600 s
    more = replace(device().states["working"], total_s=2850.0)  # of 3750 s: 76 %
    for state, words in ((working, "the same"), (more, "1 point more")):
        changed = tuple(replace(device(n), states={**device().states, "working": state}) for n in range(2))
        found = compare(summarize(replace(JOB, devices=changed)), "a", summarize(JOB), "b")
        assert {figure.key: figure.change for figure in found.states}["working"] == words


def test_only_settings_that_differ_are_told_and_not_those_of_one_run() -> None:
    assert four_against_two().settings == {
        "workers_per_gpu": {"this": "auto", "other": "1"},
        "alerts.idle_s": {"this": 600.0, "other": 300.0},
    }
    older = replace(JOB, last_settings={"engine": "hawkears"})
    assert compare(summarize(JOB), "a", summarize(older), "b").settings == {}
    silent = compare(summarize(JOB), "a", summarize(replace(JOB, last_settings={})), "b")
    assert not silent.settings_known
    assert "the settings of one of them are not known" in comparison_text(silent)


def test_states_are_compared_by_their_share_of_the_time() -> None:
    lazy = replace(JOB, devices=tuple(replace(d, states={"idle": d.states["idle"]}) for d in JOB.devices))
    shares = {f.key: f for f in compare(summarize(JOB), "a", summarize(lazy), "b").states}
    assert (shares["working"].this, shares["working"].other, shares["working"].ratio) == (75.0, 0.0, None)
    assert shares["working"].change == "75 points more"
    assert shares["unknown"].this_words == "0 %"


@pytest.mark.parametrize(
    ("this", "other", "words", "better", "said"),
    [
        (None, 1.0, MUCH, 0, "–"),
        (1.0, None, MUCH, 1, "–"),
        (0.0, 0.0, MUCH, 1, "the same"),
        (100.0, 100.4, FAST, 1, "the same"),
        (3.0, 0.0, MUCH, -1, "more (worse)"),
        (0.0, 3.0, MUCH, -1, "100 % less (better)"),
        (0.8, 366.75, MUCH, 0, "1/458 as much"),
        (0.16, 115.24, LONG, -1, "1/720 as long (better)"),
        (1.0, 100.0, MUCH, 0, "99 % less"),
        (110.0, 100.0, FAST, 1, "10 % faster (better)"),
        (90.0, 100.0, FAST, 1, "10 % slower (worse)"),
        (250.0, 100.0, MUCH, 0, "2.5 × as much"),
    ],
)
def test_a_change_is_said_with_its_direction(
    this: float | None, other: float | None, words: tuple[str, str, str], better: int, said: str
) -> None:
    assert change_words(this, other, words, better) == said


def test_jobs_that_have_done_nothing_can_be_compared_too() -> None:
    nothing = summarize(JobFacts((), (), {}, 0.0, 0, 0, (), (), (), ()))
    found = compare(nothing, "a", nothing, "b")
    assert "cannot be compared" in found.conclusion
    assert comparison_text(found)
    assert json.dumps(found.to_dict(), allow_nan=False)
    assert compare(nothing, "a", summarize(JOB), "b").to_dict()["figures"][0]["this"] is None


def test_a_job_that_has_analysed_nothing_is_as_fast_as_nobody() -> None:
    failed = summarize(replace(JOB, chunks={"failed": 5}, audio_done_s=0.0))
    for this, other in ((failed, summarize(JOB)), (summarize(JOB), failed)):
        said = compare(this, "fail" if this is failed else "d1", other, "d1" if this is failed else "fail").conclusion
        assert said.endswith("cannot be compared: fail has analysed nothing.")
        found = changes(replace(JOB, chunks={"failed": 5}, audio_done_s=0.0), JOB)
        assert {found[key] for key in ("times_real_time", "audio_hours_per_gpu_hour")} == {"cannot be compared"}
    assert compare(failed, "a", failed, "b").conclusion.endswith("both have analysed nothing.")


def test_a_job_that_has_analysed_nothing_is_not_judged_by_how_busy_it_was() -> None:
    busier = tuple(replace(one, busy_mean_percent=87.0) for one in JOB.devices)
    failed = replace(JOB, chunks={"failed": 5}, audio_done_s=0.0, devices=busier)
    assert changes(failed, JOB)["busy_mean_percent"].endswith(" more")
    assert changes(JOB, failed)["busy_mean_percent"].endswith(" less")


def test_states_that_look_the_same_are_the_same_and_others_differ_by_what_is_shown() -> None:
    def said(this: float, other: float) -> tuple[str, str, str]:
        def of(percent: float) -> Summary:
            shares = {"working": 100 - percent, "idle": percent}  # of an hour
            times = {state: StateTime(36 * share, 0.0, None, None) for state, share in shares.items()}
            return summarize(replace(JOB, devices=tuple(replace(one, states=times) for one in JOB.devices)))

        found = {figure.key: figure for figure in compare(of(this), "a", of(other), "b").states}["idle"]
        return found.this_words, found.other_words, found.change

    assert said(6.4, 5.6) == ("6 %", "6 %", "the same")
    assert said(7.4, 2.6) == ("7 %", "3 %", "4 points more")
    assert said(0.3, 3.0) == ("<1 %", "3 %", "3 points less")


def test_a_comparison_says_which_merge_is_out_of_date_and_what_helps() -> None:
    command = f"badcjobs merge {'/scratch' * 20}/june"
    old = replace(summarize(JOB), merged=Freshness(START_MS, changed=2, command=command))
    found = compare(summarize(JOB), "july", old, "june")
    for text in (comparison_text(found), comparison_markdown(found)):
        words = " ".join(text.split())
        assert f"The merge of june: as of {moment(START_MS)}; 2 task databases have changed since" in words
        assert command in words.replace(" \\ ", " "), "whole, however long it is"
        assert "The merge of july" not in words
    [row] = [line.split() for line in comparison_text(found).splitlines() if line.startswith("  merged ")]
    assert row == ["merged", "up", "to", "date", *moment(START_MS).split()]
    assert found.to_dict()["other"]["merged"]["command"] == command
    assert "  merged " not in comparison_text(four_against_two())


def test_a_submit_that_was_cut_short_is_told_in_every_form_with_the_one_command_that_finds_its_job() -> None:
    submit = "badcjobs submit /data/m.csv --out=/runs/july --cluster=slurm --array=0-2"
    proof = replace(PROOF, finish=(f"{submit} --again", "badcjobs run /data/m.csv"))
    stopped = replace(summarize(JOB, (), proof), verdict="stopped")
    told = replace(stopped, cut_short=CutShort("a submit was cut short here", submit))
    compared = compare(told, "july", summarize(JOB), "june")
    forms = (summary_text(told, "july"), markdown(told, "july"), page(told, "july"), comparison_text(compared))
    for text in (*forms, comparison_markdown(compared)):
        words = " ".join(text.split()).replace(" \\ ", " ")
        assert "a submit was cut short here" in words
        assert submit in words
        assert "--again" not in words and "badcjobs run /data" not in words, "Slurm may have the array"
    assert "to finish it, repeat the submit that was cut short:" in forms[0]
    assert "to clean up, repeat the submit" in summary_text(replace(told, verdict="done"), "july")
    assert "repeat the submit" not in summary_text(stopped, "july")
    assert told.to_dict()["cut_short"] == compared.to_dict()["this"]["cut_short"] == asdict(told.cut_short)
    assert "  merged " not in comparison_text(compared)


def test_a_job_without_a_gpu_is_compared_by_its_number_of_gpus() -> None:
    on_cpu = summarize(replace(JOB, tasks=(replace(TASK, devices=0),), devices=()))
    against = compare(on_cpu, "a", summarize(JOB), "b").conclusion
    assert against == "a is as fast as b, with no GPU against 2.0 GPUs in use on average."
    assert compare(on_cpu, "a", on_cpu, "b").conclusion == "a is as fast as b."
    against = compare(summarize(JOB), "b", on_cpu, "a").conclusion
    assert against == "b is as fast as a, with 2.0 GPUs against no GPU in use on average."


@pytest.mark.parametrize("letters", [10, 22, 31, 60])
def test_what_became_of_a_figure_is_whole_whatever_the_jobs_are_called(letters: int) -> None:
    found = compare(summarize(FOUR), "a" * letters, summarize(JOB), "b" * letters)
    lines = comparison_text(found).splitlines()
    for figure in (*found.figures, *found.states):
        [line] = [line for line in lines if line.startswith(f"  {figure.name}  ")]
        assert line.endswith(f"{figure.other_words}  {figure.change}")
    below = lines[lines.index("") :]  # the conclusion
    head = next(line for line in below if line.strip().startswith(("a", "…a")))
    assert all(len(name) >= min(letters, 20) for name in head.split())


def test_jobs_whose_long_names_end_alike_are_this_and_the_other() -> None:
    july, june = (f"{month}-2027-with-four-gpus-on-the-cluster" for month in ("july", "june"))
    text = comparison_text(compare(summarize(FOUR), july, summarize(JOB), june))
    assert f"  this is {july}, other is {june}\n" in text
    assert text.count("this  other") == 2
    assert "…" not in text


def test_the_comparison_fits_100_columns_whatever_the_jobs_are_called() -> None:
    found = compare(summarize(FOUR), "/scratch/lab/" + "long/" * 30, summarize(JOB), NASTY)
    text = comparison_text(found)
    assert max(map(len, text.splitlines()[3:])) <= 100
    assert all(line.isprintable() for line in text.splitlines())


# --- Markdown ---------------------------------------------------------------------------------------------------------


def cells(line: str) -> int:
    return len(re.split(r"(?<!\\)\|", line)) - 2


def test_every_row_of_a_markdown_table_has_the_cells_of_its_head() -> None:
    for text in (markdown(whole(), NASTY), comparison_markdown(four_against_two())):
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({cells(line) for line in block.splitlines()}) == 1


def test_text_from_files_is_shown_and_not_obeyed() -> None:
    text = markdown(whole(), NASTY)
    outside_of_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)[<`]", outside_of_code)
    assert "\x1b" not in outside_of_code
    assert "rec\\<script\\>\\|\\`x\\`" in text


def test_a_notebook_has_the_numbers_the_findings_and_the_lines_to_paste() -> None:
    text = markdown(whole(), "july")
    assert text.startswith("# july: not finished: there is work left\n\nFrom 2027-01-15 08:00 UTC to 2027-01-15 09:00")
    assert "**problem**: One of the GPUs was never used.\n\n- 0 of 51 tries" in text
    assert "```sh\n#SBATCH --gpus-per-task=1\n```" in text
    assert "| OVEN | Ovenbird | 900 |" in text
    assert "(bad\\_audio): the \\|last\\| one\n" in text
    assert "```sh\nsbatch --array=0,3 …\n```" in text
    assert text.endswith("```\n")


@given(st.text())
def test_escaped_text_is_one_line_and_backslashes_give_the_text_back(text: str) -> None:
    line = escaped(text)
    assert len(line.splitlines()) <= 1
    assert re.sub(r"\\(.)", r"\1", line) == "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def test_a_period_says_once_what_its_ends_have_in_common_and_seconds_where_it_is_short() -> None:
    minute = 60_000
    assert period(START_MS, START_MS + 9000) == "2027-01-15 08:00:00 to 08:00:09 UTC"
    assert period(START_MS, START_MS + 90 * minute) == "2027-01-15 08:00 to 09:30 UTC"
    assert period(START_MS, START_MS + 1440 * minute) == "2027-01-15 08:00 to 2027-01-16 08:00 UTC"


@pytest.mark.parametrize(("failed", "more"), [(20, ""), (23, "… and 3 more: sqlite3 r/t.sqlite")])
def test_a_task_that_names_some_of_its_failures_says_where_the_others_are(failed: int, more: str) -> None:
    named = [{"recording_id": f"r{n}", "chunk_id": "c", "error_class": "bad_audio", "error": "no"} for n in range(20)]
    chunks = {"done": 1, "failed": failed - 1, "poison": 1}
    end = {"exit_code": 1, "verdict": "failed", "task": "t", "out": "r", "database": "r/t.sqlite", "chunks": chunks,
           "audio_s": 1.0, "wall_s": 1.0, "devices": 1, "telemetry": "on", "failed": named, "note": None}  # fmt: skip
    lines = [line for line in task_end_text(end).splitlines() if line.startswith("  failed")]
    assert len(lines) == 20 + bool(more)
    assert more in lines[-1]
