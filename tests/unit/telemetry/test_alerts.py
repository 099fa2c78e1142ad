"""Alerts: when they begin and end, and the command they run, for which nothing waits."""

import json
import os
import signal
from dataclasses import replace

import pytest
from rooms import telemetry as room
from rooms.cli import read_topic
from rooms.model import AlertHooks, AlertLimits, ProcessReading, Reading
from rooms.root import BadInput, Project
from support.cases import read_data
from support.databases import query
from support.hand_clock import HandClock
from support.waiting import is_running, wait_for

START_MS = 1_800_000_000_000
CARD = room.Followed(7, "GPU-7", 1, 16 * 2**30, 300.0, None)
UNKNOWN = room.Followed(7, "GPU-7", 1)


class Book:
    """An alert book over a real file, fed second by second as the head of data/alert_courses.txt explains."""

    def __init__(self, path, options=""):
        words = options.split()
        numbers = {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}
        self._device = UNKNOWN if "unknown" in words else CARD._replace(slowdown_c=numbers.pop("slowdown_c", None))
        if "no_reader" in words:
            self._device = CARD._replace(uuid=None)
        self._limits, self.path, self.at_s = AlertLimits(**numbers), path, 0
        self.reported = []
        self._open()
        self.book.work_waits = "waits" in words

    def _open(self):
        self.writer = room.TelemetryWriter(self.path, 77)
        self.book = room.AlertBook(self.writer, [self._device], self._limits, self.reported.append)

    def feed(self, course):
        metric = ""
        for word in course.split():
            many, _, said = word.rpartition("*")
            if said == "done":
                self.book.work_waits = False
            elif said == "again":
                self.writer.close()
                self._open()
                self.writer.end_open_alerts()
            elif said[0].isalpha():
                metric = said
            else:
                self._write(answers(metric, said) * int(many or 1))

    def _write(self, answers):
        for answer in answers:
            silent = {7: answer} if isinstance(answer, str) else {}
            with self.writer.batch():
                readings = [] if isinstance(answer, str) else [(7, answer)]
                self.book.write(START_MS + 1000 * self.at_s, readings, silent)
            self.book.written()
            self.at_s += 1

    def page(self):
        """Return the rows of the file, in seconds, and what was logged."""
        sql = """SELECT kind, severity, (started_at_ms - ?1) / 1000.0, (ended_at_ms - ?1) / 1000.0, peak, threshold
                 FROM alert ORDER BY rowid"""
        rows = [f"{kind} {severity} {begin:g} s to {'?' if end is None else f'{end:g}'} s, peak {peak}, limit {limit}"
                for kind, severity, begin, end, peak, limit in query(self.path, sql, START_MS)]  # fmt: skip
        return (rows + [f"  {alert.text}" for alert in self.reported]) or ["none"]


def answers(metric, said):
    """Return the readings of a word, or why there is none."""
    if metric == "wave":
        return wave(int(said))
    if "/" in said:
        return energies(*(float(part) if part else None for part in said.split("/")))
    if said.startswith("!"):
        return [said[1:].replace("_", " ")]
    if metric == "process":
        return [Reading(utilization_percent=0, processes=(ProcessReading(1, None, int(said)),))]
    if metric == "faults" and said != "-":
        return [Reading(faults=tuple(f"Xid {xid}" for xid in said.split(",")))]
    return [Reading(**({} if said == "-" else {metric: float(said) if "." in said else int(said, 0)}))]


def energies(seconds, counted_w, offset_j, power_w):
    """Return readings with a counter every five seconds."""
    counted = (offset_j + counted_w * s if s % 5 == 0 else None for s in range(int(seconds)))
    return [Reading(power_w=power_w, energy_j=energy_j) for energy_j in counted]


def wave(seconds):
    powers = [300.0 if second % 10 < 5 else 60.0 for second in range(seconds)]
    return [Reading(power_w=w, energy_j=1e6 + sum(powers[:n]) if n % 5 == 0 else None) for n, w in enumerate(powers)]


def test_what_is_an_alert_and_what_is_not(tmp_path, pages):
    said = []
    courses = read_data("alert_courses.txt").split("\n\n")[2]
    for number, line in enumerate(courses.splitlines()):
        course, _, options = line.partition(" | ")
        name, course = course.rsplit(": ", 1)
        book = Book(tmp_path / f"{number}.sqlite", options)
        book.feed(course)
        with book.writer.batch():
            book.book.finish()
        said += [f"## {name}", *book.page(), ""]
        book.writer.close()
    pages({"alerts.txt": "\n".join(said)})


def test_an_instant_that_the_disk_refused_leaves_its_alert_for_the_next(tmp_path):
    book = Book(tmp_path / "recorder.sqlite")
    with pytest.raises(OSError, match="refused"), book.writer.batch():
        book.book.write(START_MS, [(7, Reading(temperature_c=90))], {})
        raise OSError("refused")
    assert query(book.path, "SELECT count(*) FROM alert") == [(0,)]
    book.at_s = 1
    book.feed("temperature_c 91")
    assert book.page()[0] == "thermal warning 0 s to ? s, peak 91.0, limit 83.0", "it is in the file at once"
    assert [alert.kind for alert in book.reported] == ["thermal"]
    both = room.AlertBook(book.writer, [CARD, room.Followed(8, "GPU-8", 2)], AlertLimits(), book.reported.append)
    with book.writer.batch():
        both.write(START_MS + 5000, [(7, Reading(temperature_c=90)), (8, Reading(temperature_c=95))], {})
        both.write(START_MS + 6000, [(7, Reading(temperature_c=50))], {8: "GPU is lost"})
    found = query(book.path, "SELECT device_id, kind, ended_at_ms IS NULL, message FROM alert ORDER BY rowid")
    assert found[1:] == [
        (7, "thermal", 0, "device 1 is at 90 °C; the limit is 83 °C"),
        (8, "thermal", 1, "device 2 is at 95 °C; the limit is 83 °C"),
        (8, "lost", 1, "device 2 cannot be read: GPU is lost"),
    ]
    book.writer.close()


def test_ever_new_faults_with_long_texts_do_not_fill_the_log(tmp_path):
    book = Book(tmp_path / "recorder.sqlite")
    book.feed("faults " + " ".join([f"{number}{'!' * 600}" for number in range(200)]))
    faults = "SELECT count(*), count(DISTINCT message), max(length(message)) FROM alert WHERE kind = 'fault'"
    assert (query(book.path, faults), len(book.reported)) == ([(50, 50, 500)], 100)
    book.writer.close()


NAN = float("nan")
SECRET = "curl -d @- https://chat/services/T0123/xyzzy"
SETTINGS: list[dict[str, object]] = [
    {}, {"temperature_c": 70, "idle_s": 1e6, "utilization_percent": 100}, {"memory_percent": 100.5}, {"idle_s": True},
    {"temperature_c": NAN, "memory_percent": -1, "power_percent": 95, "idle_s": float("inf"), "energy_percent": 0},
    {"command": SECRET}, {"command": ""}, {"command": "''"}, {"command": f"say '{SECRET}"}, {"command": 3},
    {"min_interval_s": -1}, {"min_interval_s": NAN}, {"min_interval_s": "1"},
]  # fmt: skip


def test_settings_name_all_their_mistakes_and_show_no_secret(pages):
    lines = []
    for table in SETTINGS:
        try:
            project = Project.parse({"alerts": table})
            lines.append(f"{project.alerts} {project.hooks}")
        except BadInput as error:
            lines.append(f"{error.why or error.what}".replace("None: ", ""))
    shown = [str(hooks.without_secrets()) for hooks in (AlertHooks(), AlertHooks(SECRET, 60))]
    text = "\n".join([*lines, "", "shown:", *shown])
    assert "xyzzy" not in text
    pages({"settings.txt": text})


SAID = "device 0 is at 91.5 °C; the limit is 83 °C"
HOT = room.Alert("thermal", "warning", 7, 0, "GPU-7", START_MS, None, 91.5, 83.0, SAID)
OVER = replace(HOT, ended_at_ms=START_MS + 60_000)
TASK = "4821_7.r0.gpu-01"


def later(alert, seconds):
    return replace(alert, started_at_ms=alert.started_at_ms + round(1000 * seconds))


@pytest.fixture
def caller(tmp_path):
    made = []

    def make(command, clock=None, min_interval_s=600):
        environ, hooks = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, AlertHooks(command, min_interval_s)
        made.append(room.AlertCommand(hooks, TASK, clock or HandClock(), environ, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.finish()


def program(folder, text):
    """Write a script and return the command for it; its name has a space."""
    path = folder / "tell me.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"'{path}'"


def test_a_begin_and_its_end_are_called_and_the_same_trouble_again_only_after_a_while():
    calls = room.CallBudget(600)
    course = [
        (HOT, 0, True), (OVER, 1, True), (OVER, 2, False),  # each once, however soon
        (later(HOT, 599), 599, False), (later(OVER, 599), 599.5, False),  # no end without its begin
        (later(HOT, 600), 600, True), (later(OVER, 600), 660, True),
        (replace(HOT, kind="memory"), 660, True), (replace(HOT, device_id=8), 660, True),  # others do not wait
    ]  # fmt: skip
    assert [calls.allows(alert, at_s) for alert, at_s, _ in course] == [allowed for _, _, allowed in course]
    calls = room.CallBudget(0)
    made = [minute for minute in range(240) if calls.allows(later(HOT, 60 * minute), 60 * minute)]
    assert made == [*range(20), *range(60, 80), *range(120, 140), *range(180, 200)], "twenty in any hour"
    calls = room.CallBudget(0)
    assert all(calls.allows(replace(HOT, device_id=second), second) for second in range(20, 40))
    assert not calls.allows(HOT, 40), "no room"
    assert not calls.allows(OVER, 4000), "so its end is not reported, either"
    assert calls.allows(replace(OVER, device_id=23), 4000)


def test_the_document_and_the_variables_say_everything_that_the_log_says(pages):
    """Unknown is empty in a variable and null in JSON; a message cannot call the whole channel of a chat."""
    unknown = replace(HOT, peak=None, threshold=None, device_index=None, message="a\0b")
    alerts = [(HOT, 3), (OVER, 0), (unknown, 0), (replace(HOT, kind="fault", message="Xid <!channel> & more"), 0)]
    documents = [room.alert_document(alert, TASK, held_back) for alert, held_back in alerts]
    pages({
        "documents.json": json.dumps(documents, indent=1, ensure_ascii=False),
        "variables.json": json.dumps([room.alert_variables(one) for one in documents], indent=1, ensure_ascii=False),
    })  # fmt: skip


def test_a_command_gets_the_alert_on_its_input_and_in_its_variables(caller, tmp_path):
    script = 'echo "$1 $BADCJOBS_ALERT_STATE $BADCJOBS_ALERT_PEAK" >> said; cat >> said; echo >> said; sleep 77 &'
    calls = caller(f"{program(tmp_path, script)} '$HOME;'")
    calls.add(HOT)
    calls.add(OVER)
    calls.finish()
    begin, begin_json, end, end_json = (tmp_path / "said").read_text().splitlines()
    assert (begin, end) == ("$HOME; begin 91.5", "$HOME; end 91.5"), "no shell has touched it"
    assert json.loads(begin_json) == room.alert_document(HOT, TASK, 0)
    assert json.loads(end_json) == room.alert_document(OVER, TASK, 0)


def test_five_hundred_alerts_at_once_are_twenty_calls(caller, tmp_path):
    clock, said = HandClock(), tmp_path / "said"
    said.touch()
    calls = caller(program(tmp_path, "cat >> said; echo >> said"), clock, min_interval_s=0)
    for number in range(500):
        calls.add(replace(HOT, device_id=number))
    wait_for(lambda: len(said.read_text().splitlines()) == 20, "twenty calls")
    clock.sleep(3600)
    calls.add(replace(HOT, kind="memory"))
    calls.finish()
    made = [json.loads(line) for line in said.read_text().splitlines()]
    assert (len(made), made[-1]["held_back"]) == (21, 480)


FAILURES = (
    "echo first >&2; echo no such channel >&2; exit 3", "kill -9 $$", "exec <&-; exit 0", "no-such-program --token xyz",
)  # fmt: skip


def test_a_command_that_fails_is_logged_once_without_its_arguments(caller, tmp_path, caplog, pages):
    """To leave the input unread is no failure."""
    said = []
    for text in FAILURES:
        caplog.clear()
        calls = caller(text if "--token" in text else program(tmp_path, text))
        calls.add(HOT)
        calls.add(OVER)
        calls.finish()
        said += [f"$ {text}", *caplog.messages]
    pages({"failures.txt": "\n".join(said)})


def test_the_example_of_the_guide_works_as_it_is_pasted(caller, tmp_path):
    section = read_topic("telemetry").partition("## Alerts that run a command")[2]
    config = tmp_path / "lab.toml"
    config.write_text(section.split("\n\n")[2])
    hooks = Project.read([str(config)], config.parent).hooks
    assert hooks.command is not None
    calls = caller(hooks.command, min_interval_s=hooks.min_interval_s)
    calls.add(HOT)
    calls.finish()
    assert (tmp_path / "alerts.txt").read_text() == f"begin {TASK}: {HOT.message}\n"


def test_a_command_that_never_ends_is_killed_with_all_that_it_started(caller, tmp_path):
    command = program(tmp_path, "sleep 77 & echo $! $$ > pids; exec yes loud >&2")

    def pids():
        said = tmp_path / "pids"
        return wait_for(lambda: [int(word) for word in said.read_text().split()] if said.exists() else [], "it runs")

    calls = caller(command)
    calls.add(HOT)
    both = pids()
    calls.finish()
    wait_for(lambda: not any(is_running(pid) for pid in both), "both are gone")
    (tmp_path / "pids").unlink()
    wrapper = os.fork()
    if wrapper == 0:
        caller(command).add(HOT)
        signal.pause()
    child, leader = pids()
    os.kill(wrapper, signal.SIGKILL)
    os.waitpid(wrapper, 0)
    wait_for(lambda: not is_running(leader), "it is gone", timeout_s=40)
    os.kill(child, signal.SIGKILL)
