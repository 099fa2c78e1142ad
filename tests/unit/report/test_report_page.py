"""The page of a report as text: what it holds, that it is made without Bokeh as well, and the numbers of its charts."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.cli import files_text
from rooms.model import CHARTED, ChartData, Envelope, Stretches
from rooms.report import (
    FOLD,
    STATES,
    Cell,
    Table,
    choose,
    columns,
    draw,
    find_runs,
    finish_job,
    make_histogram,
    over_all,
    over_time,
    page,
    shortened,
    summarize_database,
    table_html,
    write_page,
)
from rooms.root import BadInput, SystemClock
from rooms.store import MergeOrder, merge, read_chart_data
from support.synthetic_job import write_job
from support.task_files import START_MS as T0_MS
from support.task_files import TaskFile
from support.trace_files import TraceWriter
from support.trace_task import Story


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("june")
    write_job(folder, 10, chunks=12)
    merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    return folder / "job.sqlite"


@pytest.fixture(scope="module")
def html(job: Path) -> str:
    return page(summarize_database(job), "june", read_chart_data(job))


# --- what it holds ----------------------------------------------------------------------------------------------------


def test_every_part_of_a_report_has_a_section_and_a_way_to_it(html: str) -> None:
    wanted = {
        "numbers", "findings", "timeline", "load", "durations", "stragglers", "failed", "heard", "tasks", "devices",
        "alerts", "gaps", "files", "settings",
    }  # fmt: skip
    assert set(re.findall(r'<section id="(\w+)"', html)) == wanted
    assert set(re.findall(r'<li><a href="#(\w+)"', html)) == wanted


def test_nothing_in_it_is_fetched_from_elsewhere(html: str) -> None:
    ours = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # Bokeh's own licence names addresses
    assert not re.search(r'(?:src|href)="(?!#|data:)', ours)
    assert "default-src 'none'" in html


def test_only_scripts_whose_checksum_the_head_names_may_run(html: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert policy[1].count("'sha256-") == len(re.findall(r"<script>", html))
    assert "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].split("style-src")[0]


def test_the_tags_are_in_order(html: str) -> None:
    class Reader(HTMLParser):
        optional = frozenset({"tr", "th", "td", "li", "dt", "dd", "p", "option"})
        empty = frozenset({"meta", "link", "input", "img", "br"})

        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in self.optional | self.empty:
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in self.optional:
                assert self.open.pop() == tag

    reader = Reader()
    reader.feed(html)
    assert reader.open == []


def test_it_is_small_and_of_its_size_the_library_is_the_greater_part(html: str) -> None:
    assert len(html.encode()) < 1_268_000 + 400_000


def test_without_chart_data_it_is_made_all_the_same(job: Path) -> None:
    plain = page(summarize_database(job), "june")
    assert 'id="chart-data"' not in plain
    assert 'id="device-table"' in plain
    assert len(plain.encode()) < 200_000


def test_without_bokeh_it_is_made_without_charts_and_says_how_to_get_them(job: Path, tmp_path: Path) -> None:
    (tmp_path / "bokeh").mkdir()
    (tmp_path / "bokeh" / "__init__.py").write_text("raise ImportError('not here')\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from badcjobs.report.job import summarize_database, write_page\n"
        "job = Path(sys.argv[2]); write_page(summarize_database(job), Path(sys.argv[3]), job)\n"
    )
    made = tmp_path / "report.html"
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(job), str(made)], check=True)
    text = made.read_text(encoding="utf-8")
    assert "pip install 'badcjobs[report]'" in text
    assert 'id="chart-data"' not in text
    assert 'id="device-table"' in text


def test_a_page_for_which_there_is_no_room_leaves_the_one_before_as_it_was(job: Path, tmp_path: Path) -> None:
    summary, made = summarize_database(job), tmp_path / "report.html"
    made.write_text("the page of yesterday")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # no file may grow beyond this, as on a full disk
    try:
        with pytest.raises(BadInput, match="cannot be written"):
            write_page(summary, made, job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert made.read_text() == "the page of yesterday"


def test_a_page_that_is_a_link_stays_one(job: Path, tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "june.html").touch()
    (tmp_path / "report.html").symlink_to("web/june.html")
    write_page(summarize_database(job), tmp_path / "report.html", job)
    assert (tmp_path / "report.html").is_symlink()
    assert "<html" in (tmp_path / "web" / "june.html").read_text()[:200]


def test_merge_says_where_the_page_is_or_why_there_is_none(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    order = MergeOrder([tmp_path], tmp_path / "job.sqlite")
    (tmp_path / "report.html").mkdir()
    assert files_text(finish_job(order, SystemClock())).endswith("\n  report      not written: Is a directory")
    (tmp_path / "report.html").rmdir()
    done = finish_job(order, SystemClock())
    assert files_text(done).endswith(f"\n  report      {tmp_path}/report.html")
    said = files_text(replace(done, why_no_report="No space left on device"))
    assert said.endswith(f"not written: No space left on device; {tmp_path}/report.html is from an earlier merge")


def test_a_job_without_devices_has_a_page_without_charts_of_devices(job: Path) -> None:
    summary = replace(summarize_database(job), devices=(), states={}, chunk_s=None)
    text = page(summary, "june", ChartData())
    assert "No device was used." in text
    assert "pip install" not in text


def test_a_name_that_is_no_text_does_not_stop_the_page(job: Path) -> None:
    text = page(summarize_database(job), "june\udcff", read_chart_data(job))
    assert "<title>june?" in text
    text.encode("utf-8")


def test_text_from_files_cannot_end_the_data_of_the_charts(html: str) -> None:
    data = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    assert len(json.loads(data[1])["rows"]) == 40


def test_cells_headings_and_captions_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    text = table_html(Table("t", evil, columns("<" + evil, "n" + evil), [[evil, Cell(evil, 1.0)]]))
    assert "<script>" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_a_long_table_hides_what_is_beyond_the_fold_and_numbers_are_sorted_by_their_value() -> None:
    text = table_html(Table("t", "c", columns("<name", "n"), [[f"r{n}", Cell(f"{n:,}", n)] for n in range(FOLD + 3)]))
    assert text.count("<tr hidden>") == 3
    assert "data-v=4>4" in text
    assert table_html(Table("t", "c", columns("<name", "n"), [["r", Cell("–", None)]])).count("<td data-v>–") == 1


def test_a_very_long_message_keeps_its_beginning_and_its_end() -> None:
    assert shortened("short") == "short"
    text = shortened("begin " + "x" * 5000 + " end")
    assert text.startswith("begin ")
    assert text.endswith(" end")
    assert "4,010 characters left out" in text
    assert len(text) < 1100


def test_the_page_of_a_job_is_the_same_whenever_it_is_made(job: Path, html: str) -> None:
    assert page(summarize_database(job), "june", read_chart_data(job)) == html


# --- the numbers of the charts ----------------------------------------------------------------------------------------


def stretches(states: str, figures: list[float] | None = None, *, from_ms: int = 0, width_ms: int = 1000) -> Stretches:
    """Return stretches with one state each, by its first letter (s: start-up), and figures for all metrics."""
    letters = {"w": "working", "f": "failed", "l": "lost", "s": "start_up", "a": "waiting", "i": "idle"}
    many = len(states)
    figures = figures or [1.0] * many
    envelope = Envelope([f - 1 for f in figures], figures, [f + 1 for f in figures])
    return Stretches(
        [from_ms + n * width_ms for n in range(many)],
        [from_ms + (n + 1) * width_ms for n in range(many)],
        [letters[letter] for letter in states],
        dict.fromkeys(CHARTED, envelope),
    )


def test_neighbouring_stretches_of_one_state_are_one_run() -> None:
    runs = find_runs([stretches("sswwwfa"), None, stretches("ii", from_ms=5000)])
    found = [
        (row, left, right, STATES[state])
        for row, left, right, state in zip(runs.row, runs.left_ms, runs.right_ms, runs.state, strict=True)
    ]
    assert found == [
        (0, 0, 2000, "start_up"), (0, 2000, 5000, "working"), (0, 5000, 6000, "failed"), (0, 6000, 7000, "waiting"),
        (2, 5000, 7000, "idle"),
    ]  # fmt: skip
    assert runs.joined == 1


def runs_of(device: Stretches) -> list[tuple[int, int, str]]:
    runs = find_runs([device])
    return [(int(a), int(b), STATES[s]) for a, b, s in zip(runs.left_ms, runs.right_ms, runs.state, strict=True)]


def test_a_short_stretch_shows_each_of_its_states_next_to_neighbours_that_do_the_same() -> None:
    device = replace(
        stretches("wwwi"),
        mixed={
            0: {"working": 0.6, "start_up": 0.4},
            1: {"working": 0.7, "waiting": 0.3},
            2: {"working": 0.5, "idle": 0.25, "waiting": 0.25},
        },
    )
    assert runs_of(device) == [
        (0, 400, "start_up"), (400, 1700, "working"), (1700, 2000, "waiting"), (2000, 2500, "working"),
        (2500, 2750, "waiting"), (2750, 4000, "idle"),
    ]  # fmt: skip


def test_short_stretches_are_joined_where_their_parts_would_be_too_many() -> None:
    device = replace(stretches("w" * 120), mixed={n: {"working": 0.6, "waiting": 0.4} for n in range(120)})
    runs = find_runs([device] * 400)
    assert (runs.joined, len(runs.row)) == (2, 400)


def test_a_task_of_a_few_seconds_shows_its_start_up(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}, chunk_ended_at_ms=T0_MS + 1400, ended_at_ms=T0_MS + 1600).write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    data = read_chart_data(tmp_path / "job.sqlite")
    (device,) = data.stretches.values()
    assert tuple(device.states) == ("working", "working")  # what lasted longest in each of its two stretches
    assert [(a - T0_MS, b - T0_MS, state) for a, b, state in runs_of(device)] == [
        (0, 400, "start_up"), (400, 1400, "working"), (1400, 1600, "waiting"),
    ]  # fmt: skip
    text = page(summarize_database(tmp_path / "job.sqlite"), "short", data)
    assert "an interval of one second or less shows all its states" in text


@pytest.mark.parametrize("under_way_s", [90.0, 200.0])  # stretches of a second, and longer ones
def test_what_a_silent_task_had_under_way_is_drawn_lost_as_far_as_the_figures_say(
    tmp_path: Path, under_way_s: float
) -> None:
    chunks = (900.0,) * 3 + (9000.0,) * 4 + (90_000.0,) * 12
    story, heard_s = Story(devices=1, workers=2, cores=4, chunks=chunks, under_way_s=under_way_s), T0_MS / 1000 + 1000
    os.utime(TraceWriter(tmp_path, story).write(), (heard_s, heard_s))
    job = tmp_path / "job.sqlite"
    merge(MergeOrder([tmp_path], job), SystemClock())
    data = read_chart_data(job)
    runs, silent = (summarize_database(job, now_ms=round(1000 * (heard_s + late_s))) for late_s in (9, 86_400))
    assert over_time(data, runs.facts.tasks, runs.tasks_silent) == data.stretches
    assert "lost" not in runs.states
    (device,), (found,) = silent.devices, over_time(data, silent.facts.tasks, silent.tasks_silent).values()
    drawn, rough_s = runs_of(found), (found.to_ms[0] - found.from_ms[0]) / 1000
    assert drawn[-1][2] == "lost" and min(device.state_s["lost"], device.state_s["working"]) > 5
    for state in ("working", "lost"):  # a longer stretch has one colour, and there are few changes
        spent_s = sum(end_ms - begin_ms for begin_ms, end_ms, its in drawn if its == state) / 1000
        assert spent_s == pytest.approx(device.state_s[state], abs=0.1 if rough_s <= 1 else 3 * rough_s)
    charts, of_one_that_runs = draw(silent, data), draw(silent, replace(data, given_up={}))
    assert charts is not None and of_one_that_runs is not None and charts.script != of_one_that_runs.script


def test_too_many_runs_are_drawn_coarser_and_still_cover_the_whole_time() -> None:
    devices = [stretches("wa" * 60)] * 400
    runs = find_runs(devices)
    assert runs.joined > 1
    assert len(runs.row) <= 40_000
    assert (runs.right_ms - runs.left_ms).sum() == 400 * 120_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5000),
            st.integers(1, 700),
            st.lists(st.floats(0, 100) | st.just(math.nan), min_size=1, max_size=30),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_no_peak_is_lost_and_the_mean_lies_within_the_envelope(devices: list[tuple[int, int, list[float]]]) -> None:
    made = [stretches("w" * len(values), values, from_ms=begin, width_ms=width) for begin, width, values in devices]
    found = over_all(made)[0].metrics["power_w"]
    known = [value for _, _, values in devices for value in values if not math.isnan(value)]
    highs = [value for value in found.high if not math.isnan(value)]
    lows = [value for value in found.low if not math.isnan(value)]
    assert bool(highs) == bool(known)
    if known:
        assert max(highs) == max(known) + 1
        assert min(lows) == min(known) - 1
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert math.isnan(mean) or low <= mean + 1e-9 <= high + 2e-9


def test_the_inner_band_holds_four_in_five_devices() -> None:
    _, inner = over_all([stretches("w" * 10, [float(n)] * 10) for n in range(101)])
    low, high = inner["temperature_c"]
    assert (low[200], high[200]) == (10.0, 90.0)


def test_where_no_device_was_read_the_envelope_has_a_hole() -> None:
    series, inner = over_all([stretches("ww", [5.0, 5.0]), stretches("ww", [7.0, 7.0], from_ms=8000)])
    assert math.isnan(series.metrics["power_w"].mean[200])
    assert math.isnan(inner["power_w"][0][200])


def test_few_devices_are_all_pictured_and_of_many_the_worst_of_each_kind_and_a_spread() -> None:
    assert list(choose({"slowest": [3]}, 5, 10)) == [0, 1, 2, 3, 4]
    chosen = choose({"slowest": [999, 998], "hottest": [500, 999]}, 1000, 20)
    assert len(chosen) <= 20
    assert (chosen[999], chosen[500], chosen[998]) == ("slowest", "hottest", "slowest")
    assert max(b - a for a, b in zip(list(chosen), list(chosen)[1:], strict=False)) < 100


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 4_000_000), st.integers(1, 500), min_size=1, max_size=40))
def test_the_histogram_leaves_no_chunk_out(durations: dict[int, int]) -> None:
    found = make_histogram(durations)
    assert found is not None
    assert sum(found.counts) == sum(durations.values())
    assert list(found.edges_s) == sorted(found.edges_s)
    assert len(found.counts) <= 125


def test_a_long_tail_makes_the_histogram_logarithmic() -> None:
    steady, tail = make_histogram({1000: 50, 1200: 50}), make_histogram({1000: 99, 60_000: 1})
    assert steady is not None
    assert tail is not None
    assert (steady.logarithmic, tail.logarithmic) == (False, True)
    assert make_histogram({}) is None


# --- reading ----------------------------------------------------------------------------------------------------------


def test_the_stretches_of_every_device_are_read_by_task_and_token(job: Path) -> None:
    data = read_chart_data(job)
    summary = summarize_database(job)
    assert set(data.stretches) == {(device.task, device.token) for device in summary.devices}
    for device in summary.devices:
        found = data.stretches[device.task, device.token]
        assert (found.to_ms[-1] - found.from_ms[0]) / 1000 == pytest.approx(sum(device.state_s.values()), abs=0.01)
        assert set(found.states) <= set(STATES)
        highest = max(value for value in found.metrics["temperature_c"].high if not math.isnan(value))
        assert highest == device.temperature_max_c
    assert sum(data.durations.values()) == sum(device.work.done for device in summary.devices)
    assert (data.sets_of_settings, data.versions) == (1, ("0.7.0",))
