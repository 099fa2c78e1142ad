"""A job in all forms of its report: one job whole, then what is different in each form where one fact is different.

Then two jobs side by side; and what the guide says of all this.
"""

import difflib
import json
import math
import re
import shutil
import subprocess
import unicodedata
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rooms import report, root, store
from rooms.cli import read_topic
from rooms.model import CutShort, NameGaps, PlaceCounts, Reading
from rooms.report import (
    Summary,
    document_of,
    job_samples,
    markdown,
    page,
    prometheus_text,
    summarize,
    summary_text,
    verdict_of,
)
from rooms.store import AlertFacts, FailedChunk, Freshness, GapFacts, JobFacts, StateTime
from support import needs
from support.behaviour import page_text, pretty
from support.cases import read_data, read_parts
from support.facts import FINDINGS, HOUR_MS, JOB, NASTY, PROOF, START_MS, TASK, Lines, calls, device

END_MS = START_MS + HOUR_MS
DONE = replace(TASK, verdict="done", exit_code=0, pending=0, failed=0)
WELL = replace(JOB, tasks=(DONE,), chunks={"done": 100}, failed=(), alerts=())
HEARD = replace(TASK, heard_at_ms=END_MS, silent_after_s=120.0)
HOT = AlertFacts("thermal", "warning", 2, 1, 100.0, 87.0, 83.0, "GPU 0 is at 84 °C")
WITHOUT = replace(PROOF, missing_indices=())
EMPTY = JobFacts((), (), {}, 0.0, 0, 0, (), (), (), ())


def whole(job=JOB, **proof):
    return replace(summarize(job, replace(PROOF, **proof)), findings=FINDINGS, place="july")


def flat(document, place=""):
    """Yield a JSON document as lines: where, and what."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from flat(value, f"{place}.{key}" if place else key)
    elif isinstance(document, (list, tuple)) and document and isinstance(document[0], (dict, list, tuple)):
        for n, value in enumerate(document):
            yield from flat(value, f"{place}[{n}]")
    else:
        yield f"{place}: {float(f'{document:.9g}') if isinstance(document, float) else document!r}"


def columns_of(line):
    """Return how wide a terminal shows a line."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


FORMS = {
    "report.txt": lambda summary: summary_text(summary, "july"),
    "report.md": lambda summary: markdown(summary, "july"),
    "page.txt": lambda summary: re.sub(r"badcjobs \d\S*", "badcjobs VERSION", page_text(page(summary, "july"))),
    "report.prom": lambda summary: re.sub(r".*badcjobs_info.*\n", "", prometheus_text(job_samples(summary, "july"))),
    "report.json": lambda summary: "\n".join(flat(document_of(summary))),
}


def differences(before, variants, *names):
    """Return for each form what is different in each variant."""
    found = {}
    for name in names:
        usual, said = FORMS[name](before).splitlines(), list[str]()
        for variant, summary in variants.items():
            reported = FORMS[name](summary).splitlines()
            if name == "report.txt":
                assert all(line.isprintable() for line in reported)
                assert max(map(columns_of, reported)) <= 100 or "long" in variant
            lines = list(difflib.unified_diff(usual, reported, n=0, lineterm=""))[2:]
            said += [f"## {variant}", *(line for line in lines if not line.startswith("@@"))]
        found[name] = "\n".join(said)
    return found


def test_every_form_of_a_job(pages):
    pages({name: write(whole()) for name, write in FORMS.items()})


def test_an_empty_job_and_one_of_everything_that_is_not_known(pages):
    dark = replace(
        device(), index=None, uuid=None, name=None, memory_total_bytes=None, memory_peak_bytes=None, samples=0,
        temperature_max_c=None, power_mean_w=None, energy_counter_j=None, energy_integrated_j=None, gap_s=0.0,
        busy_mean_percent=None, power_limit_w=None, metrics={}, throttled={}, spark=(),
        states={"working": StateTime(10.0, 0.0, None, None)}, read_at_ms=None, reading=Reading(),
    )  # fmt: skip
    odd = replace(dark, power_mean_w=math.nan, spark=(math.inf, 1.0), reading=Reading(power_w=-math.inf))
    task = replace(TASK, verdict="done", done=0, failed=0, pending=0, audio_s=0.0, last_sign_ms=START_MS, engine=None)
    unknown = replace(EMPTY, tasks=(task,), devices=(dark, replace(dark, token="1")))
    jobs = {"empty": summarize(EMPTY), "unknown": summarize(unknown)}
    pages({f"{name}/{form}": write(job) for name, job in jobs.items() for form, write in FORMS.items()})
    (found,) = document_of(summarize(replace(unknown, devices=(odd,))))["devices"]
    assert (found["power_mean_w"], found["spark"], found["last"]) == (None, (None, 1.0), {"power_w": None})


def long_lists(many):
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


# Where one fact is different; after ``===`` what it is compared with.
TOPICS = read_parts("report_facts.txt")


def like(usual):
    """Return what makes a job that has other tasks or devices than the usual one."""
    return lambda tasks, devices: replace(
        usual, tasks=tuple(tasks or usual.tasks), devices=tuple(devices or usual.devices))  # fmt: skip


def of_lines(topic, usual=JOB, findings=(), **proof):
    tasks, devices = {"task": TASK, "ended": DONE, "heard": HEARD}, {"first": device(), "second": device(1)}
    facts = Lines(tasks, devices, like(usual), PROOF, **proof)
    named = (line.partition(": ") for line in TOPICS[topic].splitlines())
    return {name: replace(facts.read(line), findings=findings, place="july") for name, _, line in named}


def of_texts():
    """What headlines, tables and commands say."""
    lines = ("#SBATCH --mem=9G", "#SBATCH --mem=8G", "#SBATCH --time=1:00:00", "badcjobs check")
    interrupted = CutShort("a submit was cut short here", "badcjobs submit m.csv --array=0-2")

    def found(summary, **changes):
        return replace(summary, findings=(replace(FINDINGS[0], **changes),))

    return {
        **of_lines("texts", JOB, FINDINGS, is_proved=True, missing=(3,)),
        "a silent task": summarize(replace(JOB, tasks=(HEARD,)), WITHOUT, END_MS + 200_000),
        "cut short": replace(whole(), verdict="stopped", cut_short=interrupted),
        "lines for next time": replace(whole(), findings=(replace(FINDINGS[0], lines=lines), *FINDINGS)),
        "long lists": whole(long_lists(16)),
        "a long command": found(whole(finish=("badcjobs run " + "folder/" * 30,), finish_by="run"),
                                subjects=("chunk " * 30,) * 6, lines=("#SBATCH --comment=" + "x" * 120,)),
        "backticks": found(whole(), lines=("echo ````",), advice=""),
    }  # fmt: skip


def of_numbers():
    """What is computed: totals, energy, what is left, states of tasks."""
    alert = store.TaskAlert("thermal", "warning", "hot", "gpu1", START_MS)
    alerting = replace(HEARD, alerts=(alert, replace(alert, is_open=False), replace(alert, kind="memory")))
    alerts = (replace(HOT, still_open=3), replace(HOT, kind="memory", still_open=1))
    opened = replace(JOB, tasks=(alerting,), alerts=alerts)
    return {
        **of_lines("numbers", is_proved=True), "open alerts": summarize(opened, WITHOUT, END_MS),
        "open alerts of a silent task": summarize(opened, WITHOUT, END_MS + 200_000),
    }  # fmt: skip


def test_what_the_texts_say_where_one_fact_is_different(pages):
    pages(differences(whole(), of_texts(), "report.txt", "page.txt"))


def test_what_is_said_where_nothing_was_found(pages):
    """Work left comes before failures, and both before done."""
    pages(differences(summarize(WELL), of_lines("well", WELL), "report.txt"))


def test_what_is_computed_where_one_fact_is_different(pages):
    pages(differences(summarize(JOB, WITHOUT), of_numbers(), "report.json"))


def test_what_prometheus_hears_where_one_fact_is_different(pages):
    of_them = ("changed files", "a new file", "a closed folder", "a file that is gone", "not proved", "complete",
               "open alerts", "open alerts of a silent task", "nothing left", "no length at all", "on the CPU",
               "an end that has passed", "energy of one device")  # fmt: skip
    known = {**of_texts(), **of_numbers()}
    pages(differences(whole(), {name: replace(known[name], findings=FINDINGS) for name in of_them}, "report.prom"))


def test_how_numbers_and_changes_are_written(pages):
    """A change has its direction; percentages differ by the points that are shown."""

    def write(name, *args, **more):
        room = root if hasattr(root, name) else report
        return str(getattr(room, name)(*args, **more))

    said = [f"{name}({', '.join(map(repr, args))}{', points' * len(more)}) → {write(name, *args, **more)}"
            for line in read_data("report_numbers.txt").splitlines()
            for name, args, more in calls(line)]  # fmt: skip
    pages({"numbers.txt": "\n".join(said)})


@given(st.lists(st.lists(st.text('ab鳥声|<&"', max_size=30), min_size=3, max_size=3), min_size=1, max_size=5))
def test_a_table_is_aligned_whatever_its_letters(rows):
    kinds = (("a", "text"), ("b", "text"), ("c", ""))
    lines = report.table_text(report.Table("t", "T", kinds, rows))
    assert len({columns_of(line) for line, row in zip(lines[1:], rows, strict=True) if row[2].strip()}) <= 1


@given(st.text("aé鳥|`\\*<$ \n\t\x1b\u2028"))
def test_escaped_text_is_one_line_and_backslashes_give_the_text_back(text):
    line = report.escaped(text)
    assert len(line.splitlines()) <= 1
    said = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    assert re.sub(r"\\(.)", r"\1", line) == said


def test_a_table_of_a_page_is_escaped_sorted_by_numbers_and_folded(pages):
    rows = [(NASTY, report.Cell(f"<{n}>", 1 / (n + 1) if n else None), "x & y") for n in range(17)]
    kinds = (("<name>", "text"), ("many", ""), ("why", "long"))
    pages({"table.html": report.table_html(report.Table("a<b", '"T"', kinds, rows))})


def test_colours_change_no_word_and_a_long_name_leaves_room_for_the_verdict():
    ended = replace(JOB, tasks=(DONE,))
    chunks = {36: {"done": 1}, 33: {"done": 1, "pending": 1}, 32: {"done": 1}, 31: {"failed": 8}}
    for code, states in chunks.items():
        job = summarize(replace(JOB if code == 36 else ended, chunks=states))
        plain, coloured = (summary_text(replace(job, findings=FINDINGS), "july", colour=c) for c in (False, True))
        assert coloured.startswith(f"july: \x1b[{code}m") and "  \x1b[1;31mproblem\x1b[0m  One of" in coloured
        assert "\n  \x1b[33mwarning\x1b[0m  Starting" in coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    first = summary_text(whole(), "july" * 60).splitlines()[0]
    assert len(first) == 100 and first.endswith("j…: running – 100 of 201 chunks done, 1 failed, 100 left")


def test_the_last_lines_of_merge_and_run(pages):
    named = [{"recording_id": f"r{n}", "chunk_id": "c", "error_class": "bad_audio", "error": "a\nno"} for n in range(2)]
    end = {"exit_code": 1, "verdict": "failed", "task": "t", "out": "my run", "database": "my run/t.sqlite",
           "chunks": {"failed": 1, "done": 1000, "poison": 1}, "audio_s": 7200.0, "wall_s": 3600.0, "devices": 1,
           "telemetry": "on", "failed": named, "left_out": 0, "note": "stopped\x1b", "overlap": 0.0}  # fmt: skip
    more = {**end, "overlap": 6.0, "chunks": {"failed": 2, "poison": 1}, "left_out": 1, "note": None, "audio_s": 0.0}
    left_files = [(f"/scratch/st-somebody-1/a-folder/of-some-length/tasks/4821_{n}.r0.gpu1.sqlite", "not ended")
                  for n in range(21)]  # fmt: skip
    pages({
        "run.txt": report.task_end_text(end), "run-more.txt": report.task_end_text(more),
        "run-nothing.txt": report.task_end_text({**end, "chunks": {}, "failed": [], "wall_s": 0.0}),
        "removed.txt": report.removal_text(["a"], left_files[:20]),
        "removed-more.txt": report.removal_text(["a", "b"], left_files),
    })  # fmt: skip


HALF = {state: replace(time, total_s=time.total_s / 2) for state, time in device().states.items()}
FOUR = replace(
    JOB, tasks=(replace(TASK, devices=4, last_sign_ms=START_MS + HOUR_MS // 2),),
    devices=tuple(replace(device(n), states=HALF) for n in range(4)),
    last_settings={**JOB.last_settings, "workers_per_gpu": "auto", "out": "june", "alerts": {"idle_s": 600.0}},
)  # fmt: skip


def measured(share):
    """Return the job with twice the energy, measured for a share of the time."""
    devices = []
    for one in JOB.devices:
        states = {name: replace(time, measured_s=share * time.total_s) for name, time in one.states.items()}
        devices.append(replace(one, energy_counter_j=None, energy_integrated_j=2 * 734_400.0, states=states))
    return replace(JOB, devices=tuple(devices))


def idle(percent):
    """Return the job with so much idle time."""
    times = {"working": StateTime(36 * (100 - percent), 0.0), "idle": StateTime(36 * percent, 0.0)}
    return replace(JOB, devices=tuple(replace(one, states=times) for one in JOB.devices))


def slower():
    cost = replace(JOB.cost, gpu_s_mean=162.0, energy_j_mean=37_800.0)
    return replace(JOB, durations={3 * ms: many for ms, many in JOB.durations.items()}, cost=cost)


PAIRED = Lines({"task": TASK}, {"first": device(), "second": device(1)}, like(JOB), PROOF, large={
    "measured": measured, "idle": idle, "slower": slower, "empty": lambda: EMPTY})  # fmt: skip


def pair(this, other=JOB, *titles):
    ours, theirs = (one if isinstance(one, Summary) else summarize(one) for one in (this, other))
    return report.compare(ours, *(titles[:1] or ("a",)), theirs, *(titles[1:] or ("b",)))


def pairs():
    """Of a line in data/compare_facts.txt the first job is compared with the usual one, or with that after ``//``."""
    found = {}
    for line in read_data("compare_facts.txt").splitlines():
        name, _, facts = line.partition(": ")
        this, _, other = facts.partition(" // ")
        found[name] = pair(PAIRED.read(this), PAIRED.read(other or "job()"))
    command = f"badcjobs merge {'/scratch' * 20}/june"
    return {
        **found,
        "out of date": pair(JOB, replace(summarize(JOB), merged=Freshness(START_MS, changed=2, command=command))),
        "nasty names": pair(JOB, JOB, "/scratch/lab/" + "long/" * 30, NASTY),
    }  # fmt: skip


def test_two_jobs_side_by_side(pages):
    two = pair(FOUR, JOB, "four", "two")
    pages({"compare.txt": report.comparison_text(two), "compare.md": report.comparison_markdown(two),
           "compare.json": pretty(two.to_dict())})  # fmt: skip


def test_what_is_said_of_other_pairs(pages):
    said, notebook = [], []
    usual = report.comparison_text(pair(JOB)).splitlines()
    for name, comparison in pairs().items():
        text = report.comparison_text(comparison).splitlines()
        assert max(map(len, text[3:])) <= 100 or name == "out of date", name
        assert all(line.isprintable() for line in text)
        lines = list(difflib.unified_diff(usual, text, n=0, lineterm=""))[2:]
        said += [f"## {name}", *(line for line in lines if line.startswith("+"))]
        if name in ("out of date", "no settings", "nasty names"):
            notebook += [f"## {name}", *report.comparison_markdown(comparison).splitlines()[:6], "…"]
    pages({"compare.txt": "\n".join(said), "compare.md": "\n".join(notebook)})


SUMMARY = replace(whole(replace(JOB, recording_names=NameGaps(9, 1, "a", 0, None, 0, None),
                                places=PlaceCounts(9, 1, 0, 0, ("a",)))),
                  cut_short=CutShort("a", "b"), bill=report.Bill(2.0, 40.0, 30.0, 1, 6, 9))  # fmt: skip


def words_of(page, heading):
    """Return the words that a section explains: before the first two spaces of its indented lines."""
    section = re.split(r"^#+ ", page.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return [line[4:].split("  ")[0] for line in section.splitlines() if re.match(r" {4}\S", line)]


def test_the_guide_lists_every_key_headline_and_state():
    listed, part = dict[str, set[str]](), ""
    for line in report.list_keys().splitlines():
        part = line[4:21].strip() or part
        listed.setdefault(part, set()).update(line[22:].replace(",", " ").split())
    document = document_of(SUMMARY)
    parts = {
        "(top level)": [document], "states": list(document["states"].values()),
        "chunk_s, metrics": [document["chunk_s"]],
        "--compare": [report.compare(SUMMARY, "a", SUMMARY, "b").to_dict()],
        "figures": report.compare(SUMMARY, "a", SUMMARY, "b").to_dict()["figures"],
        **{name: value if isinstance(value, (list, tuple)) else [value]
           for name, value in document.items() if name in listed and name != "states"},
    }  # fmt: skip
    assert parts.keys() == listed.keys()
    for name, rows in parts.items():
        assert rows and all(set(row) == listed[name] for row in rows), name
    guide = read_topic("report")
    assert report.list_keys() in guide and f"`version` is {report.SUMMARY_VERSION}" in guide
    assert words_of(guide, "The summary, line by line") == [*report.HEADLINES]
    assert words_of(guide, "What the GPUs did") == list(report.STATE_WORDS.values())


def promtool(text):
    """Ask promtool; what it says of style is an exit code of 3."""
    if shutil.which("promtool") is None:
        needs.missing("promtool", "promtool (Debian package prometheus) is not installed")
    return subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)


def test_promtool_is_content_with_every_metric_and_each_is_in_the_guide_and_said_once():
    samples = [(metric.name, 1.5, dict.fromkeys(metric.labels, "x")) for metric in report.METRICS]
    for text in (prometheus_text(samples), prometheus_text(job_samples(SUMMARY, NASTY))):
        done = promtool(text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert promtool('badcjobs_chunks{run="a"b"} 1\n').returncode != 0
    guide = read_topic("live")
    for metric in report.METRICS:
        assert re.fullmatch(r"badcjobs_[a-z]+(_[a-z]+)*", metric.name)
        row = rf"^    {metric.name} +{re.escape(metric.help)} \({re.escape(metric.unit)}[,)]"
        assert re.search(row, guide, re.MULTILINE), metric.name
    names = {name for name, _, _ in job_samples(SUMMARY, "july")}
    assert names == {metric.name for metric in report.METRICS if metric.where != report.SERVED}
    slices = [replace(device(), uuid=f"MIG-{n}", token=f"MIG-{n}") for n in range(3)]
    unread = [replace(device(), uuid=None, index=None, token=str(n)) for n in range(3)]
    text = prometheus_text(job_samples(summarize(replace(JOB, devices=(*slices, *unread))), "july"))
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) > 100
    assert all('run="july"' in one for one in series), "files of two runs can lie in one folder of node_exporter"


def test_energy_never_falls_when_the_better_of_two_measurements_changes():
    reported = list[float]()
    for counted_j, counted_s, integrated_j in (
        (0.5, 0.1, None),
        (None, None, 500.0),
        (470.0, 19.0, 510.0),
        (980.0, 19.9, 970.0),
    ):
        energy = {
            "energy_counter_j": counted_j,
            "energy_counter_span_s": counted_s,
            "energy_integrated_j": integrated_j,
        }
        job = summarize(replace(JOB, devices=(replace(device(), span_s=20.0, **energy),)))
        reported += [value for name, value, _ in job_samples(job, "july") if name.endswith("energy_joules_total")]
    assert reported == [0.5, 0.5, 500, 500, 510, 510, 980, 980]


def test_a_page_shows_the_first_rows_of_a_large_job_and_how_to_get_all():
    large = whole(long_lists(201))
    large = replace(large, findings=(replace(FINDINGS[0], subjects=tuple(f"task {n}" for n in range(201))),))
    html = page(large, "june")
    for name, table in (("task", "task_summary"), ("device", "device_summary"), ("file", "source_file")):
        shown = html.partition(f'<table id="{name}-table"')[2].partition("</table>")[0]
        assert shown.partition("<tbody>")[2].count("<tr") == 200
        assert (
            f": the first 200 of 201, trouble first; all of them: badcjobs export job.sqlite --table {table}" in shown
        )
    assert "task 199 and 1 more (--json lists all)" in html and "task 200" not in html
    assert "the first" not in page(whole(long_lists(200)), "june").partition('<table id="task-table"')[2]


def test_a_document_that_is_written_in_parts_is_the_same():
    for summary in (whole(), whole(long_lists(3)), summarize(EMPTY)):
        parts = json.JSONEncoder(indent=2).iterencode(document_of(summary, streamed=True))
        assert "".join(parts) == json.dumps(document_of(summary), indent=2)


def test_a_value_that_is_not_known_is_left_out_with_its_head():
    for value, said in (
        (2, 2),
        (2.0, 2),
        (2.5, 2.5),
        (0.1 + 0.2, 0.3),
        (2**53 - 1.0, 9007199254740991),
        (2.0**53, 9007199254740992),
    ):
        text = prometheus_text([("badcjobs_chunks", value, {"run": 'a"b\\c\nd', "state": ""})])
        assert text.splitlines()[2:] == [f'badcjobs_chunks{{run="a\\"b\\\\c\\nd"}} {said}']
    assert {prometheus_text([("badcjobs_chunks", value, {})]) for value in (None, math.nan, math.inf)} == {""}


@given(st.integers(50, 160), st.booleans())
def test_a_text_fits_its_terminal_and_lines_to_paste_are_whole(width, colour):
    text = re.sub("\x1b\\[[0-9;]*m", "", summary_text(whole(), "july", width=width, colour=colour))
    to_paste = [line for finding in FINDINGS for line in finding.lines] + [line for _, line in verdict_of(whole()).next]
    lines = text.splitlines()
    assert all(any(line.endswith(command) for line in lines) for command in to_paste)
    assert max(columns_of(line) for line in lines if not line.endswith(tuple(to_paste))) <= width
    assert len(root.to_ascii(text)) == len(text)
