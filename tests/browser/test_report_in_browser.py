"""report.html in a real Chromium: it says nothing on the console, makes no request, and can be used by everyone."""

import json
import re
import shutil
import sqlite3
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rooms.report import ASSETS, ReportedJob, summarize_database
from rooms.report import page as make_page
from support.browser import BrowserError
from support.synthetic_job import write_job
from support.task_files import TaskFile, merge_run

DEVICES = 4 * 26
CHARTS = ("timeline", "utilization_percent", "memory_used_bytes", "temperature_c", "power_w", "histogram")
READY = "document.documentElement.dataset.ready === 'yes'"
LOOK = Path(__file__).with_name("look.js").read_text()
TIMES = "span('time')"
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def write_report(database, path):
    """Write the page of a job and return its address."""
    path.write_text(ReportedJob(database, database.parent.name, summarize_database(database)).to_html())
    return path.as_uri()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The database of a job of 26 tasks on 104 devices: one node is slow, chunks fail, a recorder dies."""
    folder = tmp_path_factory.mktemp("june")
    write_job(folder, 26, chunks=24)
    merge_run(folder)
    return folder / "job.sqlite"


@pytest.fixture(scope="module")
def report(job):
    return write_report(job, job.with_name("report.html"))


def open_report(browser, url, **size):
    page = browser.open(url, ready=READY, **size)
    page.evaluate(LOOK)
    return page


@pytest.fixture(scope="module")
def tab(browser, report):
    return open_report(browser, report)


@pytest.fixture
def page(tab):
    """The page as it was opened; it must not have said anything when the test is over."""
    tab.call("Page.bringToFront")
    tab.prefer()
    tab.evaluate("asOpened()")
    yield tab
    assert tab.errors == []


def tooltip(page, chart, across=0.5, down=0.4):
    """Point at a chart and return what it says there; the first time it may still be painting."""
    for _ in range(20):
        page.point_at(*page.center(f"#chart-{chart}", across, down))
        time.sleep(0.1)
        if said := page.evaluate("tooltip()"):
            return str(said)
    return ""


def test_nothing_could_leave_the_page_and_a_script_that_fails_would_be_noticed(browser, report):
    page = open_report(browser, report)
    page.evaluate("misbehave()")
    refused = page.wait_for("window.thrown && refused.length >= 3 && refused.map((one) => one.split('-')[0])")
    assert set(refused) == {"connect", "img", "script"}
    assert page.evaluate("window.hacked") is None
    assert any("on purpose" in one for one in page.errors)
    with pytest.raises(BrowserError, match="never true"):
        page.wait_for("false", timeout_s=0.2)
    page.close()


def test_text_from_files_stays_text_wherever_it_is_shown(browser, job, tmp_path):
    """In this job every text that comes from a file would like to be a script."""
    folder = tmp_path / "<script>window.hacked = 1"
    folder.mkdir()
    database = Path(shutil.copy(job, folder))
    with closing(sqlite3.connect(database)) as db, db:
        for change in (
            "task SET name = name || ?, node = node || ?", "device SET name = ?, uuid = uuid || ?",
            "chunk SET error = ? || error, error_class = ? WHERE status = 'poison'",
            "detection SET label = label || ?, label_name = ?", "gap SET reason = ?, metric = ?",
            "task_meta SET value = json_object('source', ?, 'engine_arg', ?) WHERE key = 'settings'",
            "source_file SET status = 'skipped', reason = ?, path = path || ?",
        ):  # fmt: skip
            db.execute(f"UPDATE {change}", (HOSTILE, HOSTILE))
    hostile = write_report(database, folder / "<img src=x>.html")
    page = open_report(browser, hostile)
    tooltip(page, "power_w", across=0.3)
    assert "<script>window.hacked" in tooltip(page, "timeline", across=0.3)
    page.evaluate("asOpened()")
    assert page.evaluate("document.body.innerText").count("<script>window.hacked = 1</script>") > 20
    assert (page.count("main img"), page.evaluate("window.hacked")) == (0, None)
    assert (page.errors, page.requests) == ([], [hostile])
    page.close()


def test_every_chart_is_drawn_asks_nobody_and_says_what_is_under_the_pointer(page, report):
    for chart in CHARTS:
        assert page.wait_for(f"painted('{chart}') > 2000"), chart
    for chart, words in {"timeline": "4821_ device working", "power_w": "largest mean smallest W"}.items():
        assert all(word in tooltip(page, chart, across=0.3) for word in words.split())
    assert any("chunks" in tooltip(page, "histogram", across, down=0.75) for across in (0.25, 0.35, 0.45, 0.55))
    assert page.requests == [report]


def test_all_charts_are_zoomed_by_dragging_across_one_or_with_keys_and_a_button_goes_back(page):
    start, end = page.evaluate(TIMES)
    assert tooltip(page, "temperature_c"), "it is painted when it comes into sight, and may move then"
    page.drag(*page.center("#chart-temperature_c", 0.4), 80)
    page.wait_for(f"{TIMES}[1] - {TIMES}[0] < {(end - start) / 2}")
    page.click("[data-move=all]")
    page.wait_for(f"{TIMES}[0] === {start} && {TIMES}[1] === {end}")
    page.evaluate("document.querySelector('#chart-power_w').focus()")
    page.press("+")
    page.wait_for(f"Math.abs({TIMES}[1] - {TIMES}[0] - {(end - start) / 2}) < 1000")
    page.press("ArrowRight")
    page.wait_for(f"{TIMES}[0] > {start + (end - start) / 4 + 1000}")
    page.press("0")
    page.wait_for(f"{TIMES}[0] === {start} && {TIMES}[1] === {end}")


def test_a_device_can_be_picked_a_task_be_found_and_the_rows_be_tasks_or_devices(page):
    mean = "model('power_w-mean').data"
    before = page.evaluate(f"JSON.stringify({mean}.y)")
    names = page.texts("#pick option")
    assert (names[0], len(names)) == (f"All {DEVICES} devices together", DEVICES + 1)
    number = next(n for n, name in enumerate(names) if name.startswith("4821_23."))  # no readings for a while
    page.fill("#pick", page.evaluate(f"pick.options[{number}].value"), "change")
    assert page.evaluate(f"JSON.stringify({mean}.y)") != before
    assert page.evaluate(f"{mean}.x.length") <= 240
    assert page.evaluate(f"{mean}.y.filter(Number.isNaN).length") >= 20, "it breaks the line"
    page.fill("#find", "4821_20.", "change")
    last, first = page.evaluate("span('rows')")
    assert first < 80 and last > 83 and last - first < 20, "the rows of task 20 of four devices each"
    assert page.evaluate("document.querySelector('#by').parentElement.hidden") is True  # each device had one task
    page.fill("#by", "cards", "change")
    labels = page.evaluate("[...model('device-names').major_label_overrides.values()]")
    assert labels[:5] == ["gpu01 · 0", "gpu01 · 1", "gpu01 · 2", "gpu01 · 3", "gpu02 · 0"]
    assert page.evaluate("model('rows').start") == len(labels) - 0.5
    page.fill("#by", "rows", "change")


def test_a_long_table_is_folded_filtered_and_sorted_by_its_numbers(page):
    shown = "#{}-table tbody tr:not([hidden]) > :first-child"
    assert page.count(shown.format("device")) == 15
    assert f"15 of {DEVICES} rows" in page.texts("#devices .bar")[0]
    page.click("#devices .bar button")
    assert page.count(shown.format("device")) == DEVICES
    page.click("#devices .bar button")
    said = "document.querySelector('#devices [role=status]').textContent.includes('that match')"
    page.fill("#devices input", "GPU05")
    page.wait_for(said)
    assert {name.split(".")[2] for name in page.texts(shown.format("device"))} == {"gpu05"}, "in folded rows, too"
    page.fill("#devices input", "")
    page.wait_for(f"!{said}")
    column = page.texts("#task-table thead th").index("wall time")
    for order in ("descending", "ascending"):
        page.click("#task-table thead th button", column)
        assert page.evaluate(f"document.querySelectorAll('#task-table thead th')[{column}].ariaSort") == order
        first = page.texts(shown.format("task"))[0]
        assert (first == "4821_12.r0.gpu17") == (order == "descending"), "of the slow node"
    page.evaluate("document.querySelector('#label-table thead button').focus()")
    page.press("Enter")
    assert page.texts(shown.format("label"))[0] == "YRWA", "the last of the alphabet"


def lightness(color):
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_all_text_can_be_read_in_light_and_in_dark_and_the_charts_follow(page):
    for shade in ("light", "dark"):
        page.prefer(dark=shade == "dark")
        page.wait_for(f"document.documentElement.dataset.charts === '{shade}'")
        assert {name: ratio for name, ratio in page.evaluate("contrasts()").items() if ratio < 4.5} == {}
        letters, paper = map(lightness, page.evaluate("axisColours()"))
        assert abs(letters - paper) > 0.45 and (paper < 0.5) == (letters > 0.5) == (shade == "dark")


def test_keyboard_and_screen_reader_reach_everything_by_a_name_and_the_focus_can_be_seen(page):
    page.evaluate("document.querySelector('.skip').focus()")
    for _ in range(page.evaluate("reachable().length")):
        page.evaluate("noteFocus()")
        page.press("Tab")
    left = "reachable().filter((one) => !reached.has(one)).map((one) => one.outerHTML.slice(0, 99))"
    assert page.evaluate(f"[{left}, unseen]") == [[], []]
    page.call("Accessibility.enable")
    names = defaultdict(list)
    for one in page.call("Accessibility.getFullAXTree")["nodes"]:
        if not one.get("ignored"):
            names[one.get("role", {}).get("value")].append(one.get("name", {}).get("value"))
    assert [len(names[landmark]) for landmark in ("banner", "navigation", "main", "contentinfo")] == [1] * 4
    for role in ("button", "link", "table", "combobox", "searchbox", "region", "columnheader"):
        assert names[role] and all(names[role]), role
    assert "working" in next(name for name in names["group"] if f"Timeline of {DEVICES} devices" in name)
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1 and all(after <= before + 1 for before, after in pairwise(levels))
    assert page.count("tbody tr:not(:has(th, td))") == 0


def test_on_a_telephone_nothing_sticks_out_and_without_script_every_row_can_be_read(browser, page, report):
    small = open_report(browser, report, width=420, height=800)
    assert small.evaluate("document.documentElement.scrollWidth") <= 420
    assert small.evaluate("document.querySelector('[aria-label=Next] pre').getBoundingClientRect().bottom") < 600
    for one in (small, page):
        wide, ticks = one.evaluate("timesOfTimeline()")
        assert 2 <= ticks <= (wide - 60) / 50  # a time is about 40 pixels wide
    assert small.errors == []
    small.close()
    bare = browser.open("about:blank#1")
    bare.call("Emulation.setScriptExecutionDisabled", value=True)
    bare.call("Page.navigate", url=report)
    bare.wait_for(f"document.readyState === 'complete' && window['device-table']?.rows.length === {DEVICES + 1}")
    assert bare.evaluate("document.documentElement.dataset.ready") is None  # no script has run
    bare.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert bare.evaluate("[...document.querySelectorAll('#device-table tbody tr')].at(-1).offsetHeight") > 10
    bare.close()


def test_printed_it_is_dark_on_white_and_whole_without_what_only_a_screen_needs(browser, page, tmp_path):
    page.prefer(dark=True)
    page.wait_for("document.documentElement.dataset.charts === 'dark'")
    page.prefer(dark=True, media="print")
    letters, paper = page.evaluate("['color', 'backgroundColor'].map((one) => getComputedStyle(document.body)[one])")
    assert lightness(letters) < 0.2 and lightness(paper) > 0.9
    assert "invert" in page.evaluate("getComputedStyle(document.querySelector('.chart')).filter")
    for gone in ("nav", ".controls", ".bar label"):
        assert page.evaluate(f"getComputedStyle(document.querySelector('{gone}')).display") == "none"
    on_screen = page.evaluate("rowsShown()")
    assert "device-table" in [name for name, there, shown in on_screen if shown < there]
    page.evaluate("addEventListener('beforeprint', () => { window.printed = rowsShown(); }, { once: true })")
    pdf = page.print_pdf()
    assert all(shown == there for _, there, shown in page.evaluate("printed")), "no one unfolds a table on paper"
    page.wait_for(f"JSON.stringify(rowsShown()) === JSON.stringify({json.dumps(on_screen)})")
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type ?/Page[\n/ ]", pdf)) >= 3
    assert page.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")
    head = '<!doctype html><div><table id={} data-fold="15"><thead><tr><th>n</thead><tbody>{}</table></div>'
    tables = [head.format(*table) for table in (("short", "<tr><td>1" * 1000), ("long", "<tr><td>1" * 1001))]
    (tmp_path / "long.html").write_text(f"{''.join(tables)}<script>{ASSETS.joinpath('page.js').read_text()}</script>")
    book = open_report(browser, (tmp_path / "long.html").as_uri())
    book.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert book.evaluate("rowsShown()") == [["short", 1000, 1000], ["long", 1001, 15]]
    book.close()


def test_a_job_without_telemetry_has_its_timeline_and_says_that_nothing_was_read(browser, tmp_path):
    TaskFile(tmp_path, states={"a": "done", "b": "failed"}, samples=0).write()
    merge_run(tmp_path)
    bare = open_report(browser, write_report(tmp_path / "job.sqlite", tmp_path / "report.html"))
    bare.wait_for("painted('timeline') > 500")
    assert "There are no readings" in bare.texts("#load")[0]
    assert bare.evaluate("by.parentElement.getBoundingClientRect().height") == 0, "there is nothing to choose from"
    assert bare.errors == []


def test_when_a_silent_task_was_last_heard_of_leaves_room_for_its_other_columns(browser, job, tmp_path):
    summary = summarize_database(job)
    first, *others = summary.facts.tasks
    silent = replace(first, state="silent", heard_at_ms=first.last_sign_ms)
    summary = replace(summary, facts=replace(summary.facts, tasks=(silent, *others)))
    (tmp_path / "silent.html").write_text(make_page(summary, "june"))
    page = open_report(browser, (tmp_path / "silent.html").as_uri(), width=1280)
    page.evaluate("location.hash = '#tasks'")  # a link opens a folded part
    page.wait_for("document.querySelector('#tasks > details').open")
    assert "silent, last update 20" in page.texts("#task-table")[0]
    wide, room, lines = page.evaluate("taskTable()")
    assert wide <= room and lines < 2
    page.close()
