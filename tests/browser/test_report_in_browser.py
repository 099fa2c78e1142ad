"""report.html in a real Chromium: it says nothing on the console, asks nobody, and can be used by everybody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rooms.report import ASSETS, summarize_database, write_page
from rooms.report import page as make_page
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge
from support.browser import Browser, BrowserError, Page
from support.task_files import TaskFile

DEVICES = 4 * 26
CHARTS = ("timeline", "utilization_percent", "memory_used_bytes", "temperature_c", "power_w", "histogram")
READY = "document.documentElement.dataset.ready === 'yes'"

# How many pixels of a chart are painted; Bokeh's canvases lie in shadow trees.
_PAINTED = """(() => {
  let many = 0;
  const walk = (node) => {
    for (const one of node.querySelectorAll('*')) {
      if (one.tagName === 'CANVAS' && one.width && one.height) {
        const data = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
        for (let n = 3; n < data.length; n += 4) if (data[n]) many++;
      }
      if (one.shadowRoot) walk(one.shadowRoot);
    }
  };
  walk(document.getElementById('chart-%s'));
  return many;
})()"""
_TOOLTIP = """(() => {
  const tip = [...document.querySelectorAll('.bk-Tooltip')].find((one) => getComputedStyle(one).display !== 'none');
  return tip ? tip.shadowRoot.textContent : '';
})()"""
_TIMES = "(() => { const r = Bokeh.documents[0].get_model_by_name('time'); return [r.start, r.end]; })()"


@pytest.fixture(scope="module")
def tab(browser: Browser, report: Path) -> Page:
    return browser.open(report.as_uri(), ready=READY)


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """The page as it was opened; it must not have said anything when the test is over."""
    tab.call("Page.bringToFront")
    tab.prefer()
    tab.evaluate(_AS_OPENED)
    yield tab
    assert tab.errors == []


_AS_OPENED = """(() => {
  pick.value = '0';
  pick.dispatchEvent(new Event('change'));
  document.querySelector('[data-move=all]').click();
  document.querySelectorAll('details').forEach((one) => { one.open = false; });
  window.scrollTo(0, 0);
})()"""


def center(page: Page, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
    """Bring an element into sight and return a place in it."""
    page.evaluate(f"document.querySelector('{selector}').scrollIntoView({{behavior: 'instant', block: 'center'}})")
    box = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] * across, box["y"] + box["height"] * down


def tooltip(page: Page, chart: str, across: float = 0.5, down: float = 0.4) -> str:
    """Point at a chart and return what it says there; the first time it may still be painting."""
    for _ in range(20):
        page.point_at(*center(page, f"#chart-{chart}", across, down))
        time.sleep(0.1)
        if said := page.evaluate(_TOOLTIP):
            return str(said)
    return ""


# --- loading ----------------------------------------------------------------------------------------------------------


def test_it_loads_without_a_word_on_the_console_asks_for_nothing_but_itself_and_draws_every_chart(
    page: Page, report: Path
) -> None:
    for chart in CHARTS:
        assert page.wait_for(f"{_PAINTED % chart} > 2000"), chart
    assert page.errors == []
    assert page.requests == [report.as_uri()]


def test_nothing_could_leave_the_page_even_if_it_wanted_to(browser: Browser, report: Path) -> None:
    page = browser.open(report.as_uri(), ready=READY)
    page.evaluate(
        """(() => { window.refused = [];
        document.addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective));
        fetch('http://127.0.0.1:9/').catch(() => 0);
        new Image().src = 'http://127.0.0.1:9/picture.png';
        const script = document.createElement('script'); script.textContent = 'window.hacked = 1';
        document.body.append(script); })()"""
    )
    refused = page.wait_for("refused.length >= 3 && refused.map((one) => one.split('-')[0])")
    assert set(refused) == {"connect", "img", "script"}
    assert page.evaluate("window.hacked") is None
    page.close()


def test_text_from_files_stays_text_wherever_it_is_shown(browser: Browser, hostile_report: Path) -> None:
    page = browser.open(hostile_report.as_uri(), ready=READY)
    for chart in ("timeline", "power_w"):
        tooltip(page, chart, across=0.3)
    assert "<script>window.hacked" in tooltip(page, "timeline", across=0.3)
    page.evaluate("document.querySelector('#pick').selectedIndex = 3")
    text = page.evaluate("document.body.innerText")
    assert text.count("<script>window.hacked = 1</script>") > 20
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    assert page.evaluate("window.hacked") is None
    assert page.errors == []
    assert page.requests == [hostile_report.as_uri()]
    page.close()


# --- charts -----------------------------------------------------------------------------------------------------------


def test_pointing_at_a_chart_says_what_is_there(page: Page) -> None:
    said = tooltip(page, "timeline", across=0.3)
    assert all(word in said for word in ("4821_", "device", "working"))
    said = tooltip(page, "power_w")
    assert all(word in said for word in ("largest", "mean", "smallest", " W"))
    bars = ""
    for across in (0.25, 0.35, 0.45, 0.55):
        bars = bars or tooltip(page, "histogram", across=across, down=0.75)
    assert "chunks" in bars


def test_dragging_across_one_chart_zooms_all_of_them_and_a_button_goes_back(page: Page) -> None:
    start, end = page.evaluate(_TIMES)
    x, y = center(page, "#chart-temperature_c", 0.4)
    page.drag(x, y, x + 80, y)
    page.wait_for(f"{_TIMES}[1] - {_TIMES}[0] < {(end - start) / 2}")
    page.evaluate("document.querySelector('[data-move=all]').click()")
    page.wait_for(f"{_TIMES}[0] === {start} && {_TIMES}[1] === {end}")


def test_a_single_device_can_be_picked_and_a_stretch_without_readings_breaks_its_line(page: Page) -> None:
    mean = "Bokeh.documents[0].get_model_by_name('power_w-mean').data"
    before = page.evaluate(f"JSON.stringify({mean}.y)")
    names = page.evaluate("[...document.querySelectorAll('#pick option')].map((one) => one.textContent)")
    assert (names[0], len(names)) == (f"All {DEVICES} devices together", DEVICES + 1)
    page.evaluate(  # this task has no readings for ten minutes
        """(() => { pick.value = [...pick.options].find((one) => one.text.startsWith('4821_23.')).value;
        pick.dispatchEvent(new Event('change')); })()"""
    )
    assert page.evaluate(f"JSON.stringify({mean}.y)") != before
    assert page.evaluate(f"{mean}.x.length") <= 240
    assert page.evaluate(f"{mean}.y.filter(Number.isNaN).length") >= 20


def test_finding_a_task_brings_its_rows_into_sight(page: Page) -> None:
    rows = "(() => { const r = Bokeh.documents[0].get_model_by_name('rows'); return [r.end, r.start]; })()"
    page.evaluate(
        """(() => { const find = document.querySelector('#find'); find.value = '4821_20.';
        find.dispatchEvent(new Event('change')); })()"""
    )
    first, last = page.evaluate(rows)
    assert first < 80 and last > 83  # the rows of task 20 of four devices each
    assert last - first < 20


def test_the_rows_can_be_tasks_or_devices(page: Page) -> None:
    shape = "Bokeh.documents[0].get_model_by_name('rows').start"
    assert page.evaluate("document.querySelector('#by').parentElement.hidden") is True  # each device had one task
    turn = "(() => { by.value = '%s'; by.dispatchEvent(new Event('change')); })()"
    page.evaluate(turn % "cards")
    labels = page.evaluate("[...Bokeh.documents[0].get_model_by_name('device-names').major_label_overrides.values()]")
    assert labels[:5] == ["gpu01 · 0", "gpu01 · 1", "gpu01 · 2", "gpu01 · 3", "gpu02 · 0"]
    assert page.evaluate(shape) == len(labels) - 0.5
    page.evaluate(turn % "rows")


# --- tables -----------------------------------------------------------------------------------------------------------


def shown(page: Page, table: str) -> list[str]:
    return list(
        page.evaluate(
            f"[...document.querySelectorAll('#{table} tbody tr:not([hidden])')].map((row) => row.cells[0].textContent)"
        )
    )


def test_a_long_table_is_folded_filtered_and_sorted_by_its_numbers(page: Page) -> None:
    assert len(shown(page, "device-table")) == 15
    bar = "document.querySelector('#devices .bar')"
    assert f"15 of {DEVICES} rows" in page.evaluate(f"{bar}.textContent")
    page.evaluate(f"{bar}.querySelector('button').click()")
    assert len(shown(page, "device-table")) == DEVICES
    page.evaluate(f"{bar}.querySelector('button').click()")
    fill = """(() => { const input = document.querySelector('#devices input'); input.value = '%s';
        input.dispatchEvent(new Event('input')); })()"""
    said = "document.querySelector('#devices [role=status]').textContent.includes('that match')"
    page.evaluate(fill % "GPU05")
    page.wait_for(said)
    assert {name.split(".")[2] for name in shown(page, "device-table")} == {"gpu05"}, "in folded rows, too"
    page.evaluate(fill % "")
    page.wait_for(f"!{said}")
    column = "[...document.querySelectorAll('#task-table thead th')].find((one) => one.textContent === 'wall time')"
    page.evaluate(f"{column}.querySelector('button').click()")
    assert page.evaluate(f"{column}.getAttribute('aria-sort')") == "descending"
    assert shown(page, "task-table")[0] in ("4821_12.r0.gpu17", "4821_19.r0.gpu05")  # the slow one, or the hungry one
    page.evaluate(f"{column}.querySelector('button').click()")
    assert page.evaluate(f"{column}.getAttribute('aria-sort')") == "ascending"


# --- for everybody ----------------------------------------------------------------------------------------------------

_CONTRASTS = """(() => {
  const light = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    const line = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return { value: 0.2126 * line(r) + 0.7152 * line(g) + 0.0722 * line(b), solid: a === 1 };
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = light(getComputedStyle(one).backgroundColor);
      if (found.solid && getComputedStyle(one).backgroundColor !== 'rgba(0, 0, 0, 0)') return found.value;
    }
    return 1;
  };
  const worst = {};
  for (const one of document.querySelectorAll('main *, header *, nav *, footer')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.getClientRects().length) continue;
    const [a, b] = [light(getComputedStyle(one).color).value, behind(one)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = one.tagName + '.' + one.className;
    worst[name] = Math.min(worst[name] ?? 99, ratio);
  }
  return worst;
})()"""
_AXIS = """(() => {
  const axis = Bokeh.documents[0].get_model_by_name('device-names');
  const probe = document.body.appendChild(document.createElement('p'));
  probe.style.color = axis.major_label_text_color;
  const color = getComputedStyle(probe).color; probe.remove();
  return [color, getComputedStyle(document.body).backgroundColor];
})()"""


def lightness(color: str) -> float:
    red, green, blue = (int(part) for part in color.removeprefix("rgb(").rstrip(")").split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_all_text_can_be_read_in_light_and_in_dark_and_the_charts_follow(page: Page) -> None:
    seen = set()
    for dark in (False, True):
        page.prefer(dark=dark)
        page.wait_for(f"document.documentElement.dataset.charts === '{'dark' if dark else 'light'}'")
        pale = {name: ratio for name, ratio in page.evaluate(_CONTRASTS).items() if ratio < 4.5}
        assert pale == {}
        letters, paper = map(lightness, page.evaluate(_AXIS))
        assert abs(letters - paper) > 0.45
        assert (paper < 0.5) == dark
        seen.add(letters)
    assert len(seen) == 2


def test_the_keyboard_reaches_everything_and_the_focus_can_be_seen(page: Page) -> None:
    wanted = page.evaluate(
        """[...document.querySelectorAll('a, button, select, input, summary, [tabindex="0"]')]
        .filter((one) => one.checkVisibility()).length"""
    )
    page.evaluate("window.reached = new Set(); window.unseen = []")
    look = """(() => {
      const one = document.activeElement;
      reached.add(one);
      const unseen = one !== document.body && getComputedStyle(one).outlineStyle === 'none';
      if (unseen) window.unseen.push(one.outerHTML.slice(0, 99));
    })()"""
    page.evaluate("document.querySelector('.skip').focus(); reached.add(document.activeElement)")
    for _ in range(wanted - 1):
        page.press("Tab")
        page.evaluate(look)
    left = page.evaluate(
        """[...document.querySelectorAll('a, button, select, input, summary, [tabindex="0"]')]
        .filter((one) => one.checkVisibility() && !reached.has(one))
        .map((one) => one.outerHTML.slice(0, 99))"""
    )
    assert left == []
    assert page.evaluate("unseen") == []


def test_a_chart_is_zoomed_and_a_table_is_sorted_with_keys_alone(page: Page) -> None:
    start, end = page.evaluate(_TIMES)
    page.evaluate("document.querySelector('#chart-power_w').focus()")
    page.press("+", "+")
    page.wait_for(f"Math.abs({_TIMES}[1] - {_TIMES}[0] - {(end - start) / 2}) < 1000")
    page.press("ArrowRight")
    page.wait_for(f"{_TIMES}[0] > {start + (end - start) / 4 + 1000}")
    page.press("0", "0")
    page.wait_for(f"{_TIMES}[0] === {start} && {_TIMES}[1] === {end}")
    page.evaluate("document.querySelector('#label-table thead button').focus()")
    page.press("Enter")
    assert shown(page, "label-table")[0] == "YRWA"  # the last of the alphabet


def names_of(tree: list[dict[str, Any]], role: str) -> list[str]:
    """Return what a screen reader calls the elements of one role."""
    found = (one for one in tree if one.get("role", {}).get("value") == role and not one.get("ignored"))
    return [one.get("name", {}).get("value", "") for one in found]


def test_a_screen_reader_finds_landmarks_headings_and_a_name_for_everything(page: Page) -> None:
    page.call("Accessibility.enable")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert len(names_of(tree, landmark)) == 1, landmark
    for role in ("button", "link", "table", "combobox", "searchbox", "region", "columnheader"):
        names = names_of(tree, role)
        assert names, role
        assert all(names), role
    charts = [name for name in names_of(tree, "group") if f"Timeline of {DEVICES} devices" in name]
    assert "working" in charts[0]
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    lonely = page.evaluate(
        "[...document.querySelectorAll('tbody tr')].filter((row) => !row.querySelector('th, td')).length"
    )
    assert lonely == 0


def test_on_a_telephone_nothing_sticks_out_and_times_do_not_run_into_each_other(
    browser: Browser, page: Page, report: Path
) -> None:
    small = browser.open(report.as_uri(), width=420, height=800, ready=READY)
    assert small.evaluate("document.documentElement.scrollWidth") <= 420
    for one in (small, page):
        wide, ticks = one.evaluate(
            "(() => { const named = (name) => Bokeh.documents[0].get_model_by_name(name), times = named('time');"
            " const found = named('timeline').below[0].ticker.get_ticks(times.start, times.end, times, 0).major.length;"
            " return [document.getElementById('chart-timeline').getBoundingClientRect().width, found]; })()"
        )
        assert 2 <= ticks <= (wide - 60) / 50  # a time is about 40 pixels wide
    assert small.errors == []
    small.close()


def test_without_script_every_row_is_there_to_be_read(browser: Browser, report: Path) -> None:
    page = browser.open("about:blank#1")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=report.as_uri())
    page.wait_for(
        "document.readyState === 'complete' && document.querySelector('#device-table')?.rows.length === "
        + f"{DEVICES + 1}"
    )
    assert page.evaluate("document.documentElement.dataset.ready") is None  # no script has run
    assert page.evaluate("[...document.querySelectorAll('#device-table tbody tr')].at(-1).offsetHeight") > 10
    page.close()


# --- on paper ---------------------------------------------------------------------------------------------------------


# Of each table: its name, its rows, and how many of them are shown.
_ROWS = """[...document.querySelectorAll('table[data-fold]')].map((table) => [table.id, table.tBodies[0].rows.length,
  [...table.tBodies[0].rows].filter((row) => !row.hidden).length])"""


def test_printed_it_is_dark_on_white_without_what_only_a_screen_needs(page: Page) -> None:
    page.prefer(dark=True)
    page.wait_for("document.documentElement.dataset.charts === 'dark'")
    page.prefer(dark=True, media="print")
    letters, paper = page.evaluate("['color', 'backgroundColor'].map((one) => getComputedStyle(document.body)[one])")
    assert lightness(letters) < 0.2
    assert lightness(paper) > 0.9
    assert "invert" in page.evaluate("getComputedStyle(document.querySelector('.chart')).filter")
    for gone in ("nav", ".controls", ".bar label"):
        assert page.evaluate(f"getComputedStyle(document.querySelector('{gone}')).display") == "none"
    on_screen = page.evaluate(_ROWS)
    assert "device-table" in [name for name, there, shown in on_screen if shown < there]
    page.evaluate(f"addEventListener('beforeprint', () => {{ window.printed = {_ROWS}; }}, {{ once: true }})")
    pdf = page.print_pdf()
    assert all(shown == there for _, there, shown in page.evaluate("printed")), "nobody unfolds a table on paper"
    page.wait_for(f"JSON.stringify({_ROWS}) === JSON.stringify({json.dumps(on_screen)})")
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type/Page/") + pdf.count(b"/Type /Page ") >= 3
    assert page.evaluate("[...document.querySelectorAll('details')].every((one) => one.open)")


def test_a_table_as_long_as_a_book_is_printed_as_it_is_shown(browser: Browser, tmp_path: Path) -> None:
    rows = {"short": 1000, "long": 1001}
    body = "".join(
        f'<div><table id="{name}" data-fold="15"><thead><tr><th>n</thead><tbody>{"<tr><td>1" * many}</table></div>'
        for name, many in rows.items()
    )
    (tmp_path / "long.html").write_text(
        f"<!doctype html>{body}<script>{ASSETS.joinpath('page.js').read_text()}</script>"
    )
    page = browser.open((tmp_path / "long.html").as_uri(), ready=READY)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(_ROWS) == [["short", 1000, 1000], ["long", 1001, 15]]
    page.close()


def test_a_job_without_telemetry_has_its_timeline_and_says_that_nothing_was_read(
    browser: Browser, tmp_path: Path
) -> None:
    TaskFile(tmp_path, states={"a": "done", "b": "failed"}, samples=0).write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    write_page(summarize_database(tmp_path / "job.sqlite"), tmp_path / "report.html", tmp_path / "job.sqlite")
    bare = browser.open((tmp_path / "report.html").as_uri(), ready=READY)
    bare.wait_for(f"({_PAINTED % 'timeline'}) > 500")
    assert "There are no readings" in bare.evaluate("document.getElementById('load').textContent")
    # One device in one task: there is nothing to choose from.
    assert bare.evaluate("document.getElementById('by').parentElement.getBoundingClientRect().height") == 0
    assert bare.errors == []


def test_when_a_silent_task_was_last_heard_of_leaves_room_for_its_other_columns(
    browser: Browser, job: Path, tmp_path: Path
) -> None:
    summary = summarize_database(job / "job.sqlite")
    first, *others = summary.facts.tasks
    silent = replace(first, verdict=None, slurm_state=None, heard_at_ms=first.last_sign_ms)
    summary = replace(summary, facts=replace(summary.facts, tasks=(silent, *others)), tasks_silent=(silent.name,))
    (tmp_path / "silent.html").write_text(make_page(summary, "june"))
    page = browser.open((tmp_path / "silent.html").as_uri(), width=1280, ready=READY)
    assert "silent, last update 20" in page.evaluate("document.getElementById('task-table').textContent")
    wide, room, lines = page.evaluate(
        "(() => { const table = document.getElementById('task-table'), box = table.parentElement;"
        " const [silent, other] = [...table.tBodies[0].rows].map((row) => row.getBoundingClientRect().height);"
        " return [box.scrollWidth, box.clientWidth, silent / other]; })()"
    )
    assert wide <= room
    assert lines < 2
    page.close()


def test_a_script_that_fails_in_the_page_would_be_noticed(page: Page) -> None:
    """The other tests rest on this one."""
    page.evaluate("setTimeout(() => { throw new Error('on purpose'); })")
    page.wait_for("true")
    time.sleep(0.1)
    page.evaluate("1")
    assert any("on purpose" in one for one in page.errors)
    page.errors.clear()
    with pytest.raises(BrowserError, match="never true"):
        page.wait_for("false", timeout_s=0.2)
