"""The charts of the page: what is drawn, the data that page.js gets, and that no peak and no chunk is left out."""

import base64
import gzip
import json
import math
import re
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import store
from rooms.model import CHARTED, ChartData, Envelope, Stretches
from rooms.report import as_parts, choose, curve, draw, find_runs, make_histogram, page, summarize
from support.behaviour import page_text, pretty
from support.facts import HOUR_MS, JOB, NASTY, START_MS, TASK, device

NAN = math.nan
LETTERS = {"w": "working", "f": "failed", "l": "lost", "s": "start_up", "a": "waiting", "i": "idle"}
TYPES = {"uint16": "<u2", "int32": "<i4", "float64": "<f8"}


def stretches(states, figures=None, *, from_ms=0, width_ms=1000):
    """Return stretches with one state each, by its first letter (s: start-up), and figures for all metrics."""
    figures = figures or [1.0] * len(states)
    envelope = Envelope([f - 1 for f in figures], figures, [f + 1 for f in figures])
    begins = [from_ms + n * width_ms for n in range(len(states))]
    return Stretches(begins, [at_ms + width_ms for at_ms in begins], [LETTERS[s] for s in states],
                     dict.fromkeys(CHARTED, envelope))  # fmt: skip


def together(devices):
    """Return what a merge makes of the stretches of these devices."""
    rows = []
    for number, one in enumerate(devices):
        for place, span in enumerate(zip(one.from_ms, one.to_ms, one.states, strict=True)):
            figures = [part[place] for metric in CHARTED for part in one.metrics[metric]]
            known = [None if math.isnan(figure) else figure for figure in figures]
            rows.append((0, number, *span, 1, *known, *[0.0] * len(LETTERS)))
    with closing(sqlite3.connect(":memory:")) as db:
        for table in store.JOB_TABLES:
            if table.name in ("device_stretch", "job_stretch"):
                db.execute(table.ddl())
        db.executemany(store.insert_sql("device_stretch"), rows)
        store.settle_stretches(db)
        return store.read_together(db)


def drawn(script):
    """Return the figures of a script as text: each model that we set up, with what we set."""
    found = re.search(r"docs_json = '(.*?)';", script, re.DOTALL)
    (document,) = json.loads(found[1].replace("\\\\", "\\").replace("\\'", "'")).values()
    return "\n".join(line for root in document["roots"] for line in models(root, ""))


def models(value, place):
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict) and one.get("type") == "object":
            given = {k: v for k, v in sorted(one.get("attributes", {}).items()) if not re.match("nonsel|muted|sel", k)}
            said = ", ".join(f"{key}={plain(one)}" for key, one in given.items() if plain(one) is not None)
            yield from [f"{place}{one['name']}: {said}"] if said else []
            for inner in given.values():
                yield from models(inner, f"{place}  ")


def plain(value):
    """Return a number, a text, or the columns of a table; None: a model, which is reported by itself."""
    if not isinstance(value, dict):
        return None if isinstance(value, list) and value and isinstance(value[0], dict) else value
    if value.get("type") == "map":
        return {key: plain(one) for key, one in value["entries"]}
    if value.get("type") == "ndarray":
        data = gzip.decompress(base64.b64decode(value["array"]["data"]))
        return np.frombuffer(data, TYPES[value["dtype"]]).round(6).tolist()
    return value.get("value", value.get("field")) if set(value) <= {"type", "value", "field"} else None


def unpacked(data):
    """Return the data of page.js with its numbers."""
    series = [{**one, "edges": numbers(one["edges"], "<u4"),
               "figures": {name: numbers(text, "<u2") for name, text in one["figures"].items()}}
              for one in data["series"]]  # fmt: skip
    return {**data, "series": series}


def numbers(text, kind):
    """Return packed numbers, of very many those that differ from the one before, with their places."""
    values = np.frombuffer(base64.b64decode(text), kind).tolist()
    if len(values) < 40:
        return str(values)
    places = [n for n in range(len(values)) if n == 0 or values[n] != values[n - 1]]
    some = places if len(places) < 40 else [*places[:3], *places[-3:]]
    return f"{len(values)}: {', '.join(f'{n}→{values[n]}' for n in some)}"


def data_of(known=None, given_up=None, sets_of_settings=0, versions=()):
    """Return readings of two devices, or of other ones by their device_id."""
    first = stretches("sswwwfla", [10.0, 20.0, NAN, 40.0, 50.0, 60.0, 70.0, 80.0], from_ms=START_MS)
    second = stretches("iww", [5e9, 7e9, 9e9], from_ms=START_MS + 2000, width_ms=1500)
    usual = {1: first, 2: second} if known is None else known
    over = {**usual, **(given_up or {})}
    return ChartData(
        together(usual.values()),
        lambda device_id, is_over: (over if is_over else usual).get(device_id),
        sets_of_settings,
        versions,
    )


def test_what_is_drawn_and_sent_to_the_page(pages):
    third = replace(device(2), node="gpu10", power_limit_w=250.0, states={})
    charts = draw(summarize(replace(JOB, devices=(device(), device(1), third))), data_of())
    speed = curve("speed", "× real time", "0.0", [(30.0, 5.0), (600.0, 9.0)], 8.0, (60.0, 900.0))
    probed, places = as_parts({"speed": speed})
    assert list(places) == ["speed"] and list(charts.places) == ["timeline", *CHARTED, "histogram"]
    pages({
        "figures.txt": drawn(charts.script), "curve.txt": drawn(probed), "data.json": pretty(unpacked(charts.data)),
        "notes.txt": "\n".join(charts.notes),
    })  # fmt: skip


def test_charts_of_other_jobs(pages):
    silent = replace(TASK, heard_at_ms=START_MS, silent_after_s=60.0)
    lost = {1: stretches("sswwllll", from_ms=START_MS)}
    late = summarize(replace(JOB, tasks=(silent,)), now_ms=START_MS + HOUR_MS)
    dark = Stretches([0, 10_000], [10_000, 20_000], ["idle", "idle"],
                     {name: Envelope([NAN] * 2, [NAN] * 2, [NAN] * 2) for name in CHARTED})  # fmt: skip
    one = summarize(replace(JOB, devices=(device(),)))
    none = summarize(replace(JOB, devices=(device(),), durations={}))
    other = summarize(replace(JOB, devices=(device(0, "a"), device(0, "b")), durations={}))
    work = replace(device().work, chunk_p50_s=None)
    many = [replace(device(n), token=str(n), busy_mean_percent=50 + n / 10, work=work) for n in range(401)]
    each = {n + 1: stretches("w", [50.0]) for n in range(401)}
    cases = {
        "a silent task": (late, data_of(given_up=lost)),
        "a device in two tasks": (other, data_of({1: dark})),
        "more devices than can be shown": (summarize(replace(JOB, devices=tuple(many))), data_of(each)),
        "nothing": (none, data_of({})), "tries alone": (one, data_of({})),
    }  # fmt: skip
    said = []
    for name, (summary, data) in cases.items():
        charts = draw(summary, data)
        timeless = [line for line in page_text(page(summary, "june", data)).splitlines() if "There are no" in line]
        sent = unpacked(charts.data) if charts.data else {"series": []}
        shown = drawn(charts.script).splitlines() if charts.script else []
        timeline = [line for line in shown if "Range1d" in line or "'left'" in line]
        said += [f"## {name}: {', '.join(charts.places)}", *(line.strip()[:300] for line in timeline)]
        said += [*charts.notes[1:], *timeless,
                 f"{sent.get('cards')}"[:200], f"{sent.get('rows')}"[:200],
                 *(f"{one['name']}: {one['begin']}, {one['edges']}" for one in sent["series"][:6])]  # fmt: skip
    pages({"charts.txt": "\n".join(said)})


def test_the_page_with_charts(pages):
    """As text; then what a browser needs of it: scripts that may run, nothing to fetch, text that stays text."""
    named = replace(JOB, devices=(device(), replace(device(1), node=NASTY, name="</script>")))
    html = page(summarize(named), "june", data_of(sets_of_settings=2, versions=("0.7.0", "0.8.0")))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy[1].count("'sha256-") == len(re.findall(r"<script>", html)) == 4
    assert "unsafe-eval" not in policy[1] and "'unsafe-inline'" not in policy[1].split("style-src")[0]
    ours = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)  # Bokeh's own licence names addresses
    assert not re.search(r'(?:src|href)="(?!#|data:)', ours)
    data = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', html, re.DOTALL)
    assert "<" not in data[1] and len(json.loads(data[1])["rows"]) == 2
    sections = re.findall(r'<section id="(\w+)"', html)
    assert sections == re.findall(r'<li><a href="#(\w+)"', html) and len(sections) == 12
    assert len(html.encode()) < 1_668_000
    frame = re.sub(r"<table.*?</table>", "<table>", ours[ours.index("<body>") :], flags=re.DOTALL)
    frame = re.sub(r'<script type="app.*', "", frame, flags=re.DOTALL).replace("><", ">\n<")
    said = {"page.txt": page_text(html), "frame.html": frame}
    pages({name: re.sub(r"badcjobs \d\S* from", "badcjobs VERSION from", text) for name, text in said.items()})


def test_runs_of_states_readings_of_all_devices_choices_and_bars(pages):
    runs = find_runs([stretches("sswwwfa"), stretches("ii", from_ms=5000)])
    said = [f"row {row}, {a} to {b}: {state}" for state, joined in runs.items() for row, a, b in joined]
    for name, devices in {
        "apart": [stretches("ww", [5.0, 5.0]), stretches("ww", [7.0, 7.0], from_ms=8000)],
        "of other lengths": [stretches("w", [10.0], width_ms=400), stretches("ww", [20.0, 40.0], width_ms=200)],
        "weighted by time": [stretches("ww", [0.0, 30.0], width_ms=1), stretches("w", [0.0], width_ms=800)],
    }.items():
        whole = together(devices)
        mean = whole.metrics["power_w"].mean
        said.append(f"## readings: {name}; {len(whole.from_ms)} from {whole.from_ms[0]} to {whole.to_ms[-1]} ms")
        said += [f"{n}: mean {round(float(value), 6)}" for n, value in enumerate(mean)]
    work = device().work
    many = [replace(device(n), busy_mean_percent=50.0 + n, work=replace(work, failed=int(n == 7))) for n in range(10)]
    for most in (4, 6, 10):
        said.append(f"## {most} of 10 devices: {[one.index for one in choose(many, most)]}")
    for durations in ({1000: 3, 1400: 2, 2500: 1}, {1000: 50, 8000: 50}, {5: 1}, {0: 1, 100_000: 4000}):  # fmt: skip
        bars = make_histogram(durations)
        edges = [round(edge, 6) for edge in bars.edges_s]
        said.append(f"## bars of {durations}: {edges[:3]} … {edges[-1]}, {list(bars.counts)[:8]}")
    pages({"computed.txt": "\n".join(said)})


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700),
                          st.lists(st.floats(0, 100) | st.just(NAN), min_size=1, max_size=30)),
                min_size=1, max_size=6))  # fmt: skip
def test_no_peak_is_lost_and_the_mean_lies_within_the_envelope(devices):
    made = [stretches("w" * len(values), values, from_ms=begin, width_ms=width) for begin, width, values in devices]
    found = together(made).metrics["power_w"]
    known = [value for _, _, values in devices for value in values if not math.isnan(value)]
    highs, lows = ([value for value in values if not math.isnan(value)] for values in (found.high, found.low))
    assert bool(highs) == bool(known)
    if known:
        assert (max(highs), min(lows)) == (max(known) + 1, min(known) - 1)
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert math.isnan(mean) or low <= mean + 1e-9 <= high + 2e-9


@settings(max_examples=40)
@given(st.dictionaries(st.integers(0, 4_000_000), st.integers(1, 500), min_size=1, max_size=40))
def test_the_histogram_leaves_no_chunk_out(durations):
    found = make_histogram(durations)
    assert sum(found.counts) == sum(durations.values())
    assert list(found.edges_s) == sorted(found.edges_s) and len(found.counts) <= 125
