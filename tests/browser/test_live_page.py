"""The live page in a real Chromium, served by a real ``badcjobs serve``."""

import json
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest
from rooms import root
from rooms.root import folder
from support.live_run import LiveServer, write_live_run
from support.task_files import TaskFile

LIVE = (
    "document.body?.dataset.state === 'live' && document.querySelectorAll('.card').length > 0"
    " && !seen.reading && drawing === null"
)
NASTY = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a run in the middle of its work; one chunk, one alert and one file have names that want to be a script."""
    folder = tmp_path_factory.mktemp("page") / "july"
    files = write_live_run(folder, 52, now_ms=time.time_ns() // 10**6, waiting=8, seconds=30)
    (folder / "tasks" / f"{files[0].stem}.log").write_text(f"a line\n{NASTY}\nthe last line\n")
    (folder / "tasks" / "broken & <b>.sqlite").write_text("no database")
    with closing(sqlite3.connect(files[0])) as db, db:
        db.execute("UPDATE attempt SET chunk_id = ? WHERE ended_at_ms IS NULL", (NASTY,))
    with closing(sqlite3.connect(files[2])) as db, db:
        db.execute("UPDATE alert SET message = ?", (f"{NASTY}\u202e",))
    with LiveServer(folder.parent, folder, interval_s=0.2) as server:
        yield server


@pytest.fixture(scope="module")
def page(browser, server):
    page = browser.open(server.url + "/", ready=LIVE)
    yield page
    assert page.errors == []


def test_the_page_shows_the_run_with_text_from_files_as_text_and_asks_only_its_server(page, server):
    assert page.evaluate("document.title").endswith("july – badcjobs")
    assert [page.texts(one) for one in ("h1", "#link-words", "#tasks-many")] == [["july"], ["live"], ["60"]]
    (words,) = page.texts("#progress-words")
    assert re.search(r"^about \d+ % · .* GPU-hours in .* · hatched: failed · done in about ", words)
    (outcome,) = page.texts("#outcome")
    assert re.search(
        r"^running[\d,]+ of 14,400 chunks done, .* failed, .* \(estimate; 52 of 60 parts listed\)$", outcome
    )
    alerts = page.texts("#alerts .alert")
    assert alerts[0].startswith("problem") and any("chunks failed, with bad audio" in one for one in alerts[:2])
    lines = page.evaluate("[...document.querySelectorAll('.card .line')].map((path) => path.getAttribute('d').length)")
    assert (len(lines), min(lines) > 100) == (4 * page.count(".card"), True)
    assert page.evaluate("document.querySelector('.card svg').ariaLabel").startswith("utilization, last ")
    assert any(rf"{NASTY}\u202e" in text for text in page.texts(".alert"))
    assert any("broken & <b>" in text for text in page.texts("#remarks li"))
    assert page.count("main script, main img") == 0
    spoken = "[...document.querySelectorAll('[aria-live], [role=status], [role=alert]')].map((e) => e.id)"
    assert page.evaluate(spoken) == ["alerts"]
    legend = page.texts("#wall-words > span")
    assert [words.partition(":")[0] for words in legend] == ["idle", "light", "moderate", "heavy", "no reading"]
    assert sum(int(words.split()[-1]) for words in legend) == page.count("#wall i")
    colours = "[...document.querySelectorAll('#wall-words i')].map((i) => getComputedStyle(i).opacity)"
    assert page.evaluate(colours) == ["0.12", "0.35", "0.65", "1", "1"]
    assert {request.split("/")[2] for request in page.requests} == {server.url.split("/")[2]}


def test_tasks_and_devices_can_be_sorted_filtered_and_opened(page):
    states = page.texts("#tasks .state")
    assert (len(states), states[:3]) == (50, ["failed", "failed", "failed"]), "those that need a look come first"
    assert page.evaluate("document.querySelector('[aria-sort]').textContent") == "state"
    assert page.texts("#more-tasks") == ["Show 10 more tasks"]
    page.click("#tasks-head button", 1)
    assert page.texts("#tasks .state")[0] == "done"
    page.fill("#tasks-filter", "waiting")
    assert (set(page.texts("#tasks .state")), page.texts("#tasks-many")) == ({"waiting"}, ["8 of 60"])
    page.fill("#tasks-filter", "")
    page.click("#tasks-head button", 0)
    assert page.texts("#tasks th")[:2] == ["4821_0", "4821_1"]
    assert any(NASTY in text for text in page.texts("#tasks td"))
    page.click("#tasks th button")
    page.wait_for("details.open && document.getElementById('details-log').textContent !== '…'")
    assert page.texts("#details-log") == [f"a line\n{NASTY}\nthe last line"]
    assert page.texts("#details-heading") == ["Task 4821_0"]
    page.click("#details-close")
    assert page.evaluate("document.getElementById('details').open") is False
    assert page.count(".card") == 12
    page.click("#more-devices")
    assert page.count(".card") == 60
    page.fill("#devices-filter", "4821_2 gpu 3")
    assert "GPU 3 on gpu2" in page.texts(".card h3")
    page.click("#devices-ended")
    for state, words in (("silent", "silent"), ("failed", "ended")):
        label = page.evaluate(f"[...seen.tasks.values()].find((task) => task.state === {state!r}).label")
        page.fill("#devices-filter", f"{label} gpu 3")
        assert f"task {label}, {words}" in page.texts(".card .task")
    page.click("#devices-ended")
    page.fill("#devices-filter", "")
    assert "owned" not in page.evaluate("document.title")


def test_pointing_at_a_chart_tells_value_unit_time_and_device_and_a_narrow_window_is_enough(page):
    for number, unit in enumerate((r"utilization \d+ %", r"memory [\d.]+ GiB", r"temperature \d+ °C", r"power \d+ W")):
        page.point_at(*page.center(".card svg", number=number))
        page.wait_for("!document.getElementById('tip').hidden")
        value, when, where = page.texts("#tip > *")
        assert re.fullmatch(unit, value)
        assert re.fullmatch(r"(\d+ \w+ )?\d\d:\d\d:\d\d( to \d\d:\d\d:\d\d)?", when)
        assert where == "GPU 0 on gpu0, task 4821_0"
        assert page.count(".cursor[d]") == 1
    left, right = page.evaluate("(() => { const b = tip.getBoundingClientRect(); return [b.left, b.right]; })()")
    assert 0 <= left < right <= 1280
    for dark, shades in ((True, ["rgb(230, 236, 240)", "rgb(17, 24, 29)", "rgb(17, 24, 29)"]),
                         (False, ["rgb(22, 34, 43)", "rgb(255, 255, 255)", "rgb(255, 255, 255)"])):  # fmt: skip
        page.prefer(dark=dark)
        style = (
            "[getComputedStyle(tip).color, ...[tip, document.body].map((one) => getComputedStyle(one).backgroundColor)]"
        )
        assert page.evaluate(style) == shades
    page.point_at(2, 2)
    page.wait_for("document.getElementById('tip').hidden && !document.querySelector('.cursor[d]')")
    for width in (420, 800):  # no scrolling sideways
        page.resize(width, 900)
        page.wait_for(f"document.documentElement.clientWidth === {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_run_that_has_ended_shows_what_worked_last_and_says_how_to_go_on(browser, tmp_path):
    start_ms = time.time_ns() // 10**6 - 7_200_000
    for index in range(3):
        states = {f"{index}a": "done", f"{index}b": "pending" if index == 2 else "done"}
        verdict, begun_ms = "stopped" if index == 2 else "done", start_ms + 1000 * index
        made = TaskFile(tmp_path / "run", index, states=states, verdict=verdict, samples=9, started_at_ms=begun_ms)
        replace(made, ended_at_ms=begun_ms + 60_000, chunk_ended_at_ms=begun_ms + 5_000).write()
    (tmp_path / "run" / "run.toml").write_text('[run]\nsource = ["/data/m.csv"]\n')
    with LiveServer(tmp_path, tmp_path / "run", interval_s=0.1) as server:
        page = browser.open(server.url + "/", ready=LIVE)
        page.wait_for("document.querySelector('.card .line').getAttribute('d').length > 30")  # it was asked for
        assert page.texts(".card .task") == ["task 4821_2, ended", "task 4821_1, ended", "task 4821_0, ended"]
        assert page.texts(".card .big dd") == ["mean 80 %"] * 3
        sticking_out = "[...document.querySelectorAll('.card')].filter((c) => c.scrollWidth > c.clientWidth).length"
        assert page.evaluate(sticking_out) == 0
        assert page.texts("#link-words") == ["the run has ended"]
        (words,) = page.texts("#progress-words")
        assert ("ended" in words, "so far" in words, "done in about" in words) == (True, False, False)
        assert "now" not in " ".join(page.texts("body")).split()
        assert page.texts("#standstill")[0].startswith(
            "no task is running, but work is left (tasks may still be queued). Resume with"
        )
        assert page.texts("#go-on pre") == [f"badcjobs run /data/m.csv --out={tmp_path / 'run'}"]
        assert page.errors == []


def test_the_page_follows_a_run_that_has_not_begun_and_says_when_the_server_is_gone(browser, tmp_path):
    write_live_run(tmp_path / "run", 0, now_ms=time.time_ns() // 10**6, waiting=3, seconds=5)
    with LiveServer(tmp_path, tmp_path / "run", interval_s=0.1, env={"BADCJOBS_TOKEN": TOKEN}) as server:
        stranger = browser.open(f"{server.url}/?token=wrong")
        assert "the token is wrong" in stranger.evaluate("document.body.textContent")
        page = browser.open(f"{server.url}/?token={TOKEN}")
        page.wait_for("location.search === '' && document.querySelectorAll('#tasks tr').length === 3")
        assert page.evaluate("document.cookie") == ""
        assert page.texts("#tiles dt") == ["audio done", "tasks waiting"]
        assert page.texts("#tasks th") == ["0", "1", "2"]
        assert set(page.texts("#tasks td:nth-child(n + 5)")) == {"–", ""}  # not 0 done, 0 failed: no one knows
        assert "no task has published anything yet" in page.texts("#remarks li")[0]
        task = TaskFile(tmp_path / "run", states={"a": "done", "b": "pending"}, ended_at_ms=None)
        task.write()
        page.wait_for("document.querySelector('#progress b')?.textContent.endsWith('16 %')")
        page.evaluate("document.querySelector('#tasks th button').focus()")
        task.states = {"a": "done", "b": "done"}
        task.write()
        page.wait_for("document.querySelector('#progress b').textContent.endsWith('33 %')")
        assert page.evaluate("document.activeElement.textContent") == "4821_0"  # the row is the same as before
        assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
        assert page.errors == []
        server.end()
        page.wait_for("document.body.dataset.state === 'reconnecting'")


def test_this_machines_devices_are_shown_without_tasks(browser, tmp_path):
    with LiveServer(tmp_path, "--simulate", "2", interval_s=0.2) as server:
        page = browser.open(server.url + "/", ready=LIVE)
        page.wait_for("document.querySelector('.card .line').getAttribute('d').length > 30")
        hidden = page.evaluate("document.getElementById('tasks-section').hidden")
        assert (page.count(".card"), hidden, page.errors) == (2, True, [])


FIGURES = (0, 0.00005, 0.00012, 0.04, 0.05, 0.155, 0.25, 0.5, 1, 2.675, 9.95, 29.5, 59.94, 59.95, 90.5, 99.5,
           999.95, 3599.5, 3600, 9999.5, 10_000, 172_799, 1_234_567.5, 2**20, 2**30 - 1, 2**30, 2**41)  # fmt: skip
FORMS = ("number", "duration", "share_words", "memory", "power", "speed", "temperature")


def test_a_number_reads_the_same_on_the_page_as_in_every_text(browser):
    script = (folder("guide").parent / "live" / "assets" / "words.js").read_text(encoding="utf-8")
    calls = [(name, [value]) for name in FORMS for value in (None, *FIGURES)]
    calls += [("number", [value, digits]) for value in FIGURES for digits in (0, 2)]
    calls += [("audio_time", [value]) for value in FIGURES] + [("count", [many, "chunk"]) for many in (0, 1, 2, 12_345)]
    calls += [("progress", [share]) for share in (0, 1e-9, 0.004, 0.0099, 0.01, 0.29, 0.57, 0.999, 1)]
    names = {name: re.sub("_(.)", lambda letter: letter[1].upper(), name) for name, _ in calls}
    table = ", ".join(f"{name}: {shown}" for name, shown in names.items())
    page = browser.open("about:blank#words")
    said = page.evaluate(f"(() => {{ {script}\n const forms = {{ {table} }};"
                         f" return {json.dumps(calls)}.map(([name, args]) => forms[name](...args)); }})()")  # fmt: skip
    expected = [getattr(root, name)(*args) for name, args in calls]
    assert list(zip(calls, said, strict=True)) == list(zip(calls, expected, strict=True))
