"""The web application in this process: what it answers, whom it refuses, what it pushes, and when a disk hangs."""

import asyncio
import json
import os
import re
import socket
import threading
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import live
from rooms.model import Reading
from rooms.root import BadInput, DatabaseProblem, folder
from rooms.store import DeviceFacts, TaskAlert, TaskFacts, Trail
from support.cases import read_data
from support.databases import change
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

from badcjobs import __version__

NOW_MS = START_MS + 10_000
TOKEN = "a-long-secret-token"
OPEN, GUARDED = live.Guard(None, True, 8765), live.Guard(TOKEN, False, 8765)


class World:
    """A run, its clock, and the application that shows it."""

    def __init__(self, source, clock, guard=OPEN):
        self.clock = clock
        self.hub = live.Hub(source.look, clock, patience_s=60.0)
        self._app = live.make_app(self.hub, source, guard)

    async def get(self, path, method="GET", **headers):
        transport = httpx.ASGITransport(app=self._app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={k: v.encode("latin-1") for k, v in headers.items()})

    def ask(self, *paths, method="GET", **headers):
        async def all_of_them():
            return [await self.get(path, method, **headers) for path in paths]

        return asyncio.run(all_of_them())

    def statuses(self, *paths, **headers):
        return [one.status_code for one in self.ask(*paths, **headers)]


@pytest.fixture
def world(tmp_path):
    """A run with a task that is over, one that runs, and one that waits; with logs, alerts, processes and links."""
    run = tmp_path / "july"
    states = {"c": "done", "d": "pending"}
    hot = Reading(80, memory_used_bytes=2**33, temperature_c=86, power_w=250.0)
    over = TaskFile(run, 0, states={"a": "done", "b": "failed"}, verdict="failed").write()
    goes_on = TaskFile(run, 1, states=states, ended_at_ms=None, samples=11, devices=2, reading=hot)
    seen = "INSERT INTO process SELECT task_id, device_id, 7, 'python', 'b', 1, ?, ?, NULL FROM device"
    change(goes_on.write(), f"{seen} WHERE device_index = 1", START_MS, NOW_MS)
    alert = "INSERT INTO alert SELECT task_id, device_id, 'thermal', 'warning', ?, NULL, 86, 83, 'hot' FROM device"
    change(goes_on.path, f"{alert} WHERE device_index = 0", START_MS)
    for path in (over, goes_on.path):
        os.utime(path, (NOW_MS / 1000,) * 2)
    (run / "run.toml").write_text('[run]\nsource = ["/data/m.csv"]\n[array]\nfirst = 0\nstep = 1\ncount = 3\n')
    (run / "tasks" / "4821_0.r0.gpu1.log").write_text("".join(f"line {n}\n" for n in range(300)))
    (run / "tasks" / "4821_1.r0.gpu1.log").write_bytes(b"x" * 600_000 + "\nfür\n".encode() + b"\xff\n")
    (tmp_path / "secret.log").write_text("none of your business")
    (run / "tasks" / "4821_2.log").symlink_to(tmp_path / "secret.log")
    clock = HandClock(NOW_MS)
    return World(live.open_run(run, clock), clock)


def lines_of(value):
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\n    {json.dumps(one, ensure_ascii=False)}" for one in value) if isinstance(value, list) else text


def answers(found, folder):
    """Return questions and answers: an element of a list on a line."""
    said = []
    for one in found:
        body = one.text.replace(str(folder), "FOLDER").replace(__version__, "VERSION")
        if one.headers["content-type"] == "application/json":
            body = "\n".join(f"  {key}: {lines_of(value)}" for key, value in json.loads(body).items())
        said.append(f"{one.request.method} {one.request.url.raw_path.decode()[:90]}  →  {one.status_code}\n{body}")
    return "\n\n".join(said)


def test_every_question_and_its_answer(world, tmp_path, pages):
    before = world.ask("/api/health")
    tasks = ("", "?state=running", "?limit=1&offset=1", "?state=killed", "?offset=9", "/4821_1.r0.gpu1", "/4821_2")
    logs = ("4821_0.r0.gpu1/log", "4821_0.r0.gpu1/log?lines=2", "4821_1.r0.gpu1/log?lines=1", "4821_2/log", "9/log")
    devices = ("", "?trail=false", "?alive=true&trail=0", "?alive=0&trail=0", "?device=1&trail=0",
               "?device=GPU-0&trail=0", "?task=4821_0.r0.gpu1&trail=0", "?device=7", "?task=9")  # fmt: skip
    others = ("/api/gpu/summary", "/api/alerts", "/api/tasks/9")
    said = {
        "tasks.txt": world.ask(*(f"/api/tasks{one}" for one in tasks)),
        "logs.txt": world.ask(*(f"/api/tasks/{one}" for one in logs)),
        "devices.txt": world.ask(*(f"/api/gpu/metrics{one}" for one in devices), *others),
        "health.txt": before + world.ask("/api/health"),
        "metrics.txt": world.ask("/metrics"),
    }
    pages({name: answers(found, tmp_path) for name, found in said.items()})


# {9} is a number of 5,000 digits, {x} a word of 200 letters
WRONG = read_data("wrong_questions.txt").replace("{9}", "9" * 5000)


def test_a_wrong_question_is_answered_with_what_would_be_right(world, pages):
    found = world.ask(*WRONG.replace("{x}", "x" * 200).splitlines()) + world.ask("/api/tasks", method="POST")
    assert found[-1].headers["allow"] == "GET, HEAD"
    found += world.ask("/api/tasks", "/", method="HEAD")
    headers = [f"{name}: {value}" for name, value in found[-1].headers.items() if name != "content-length"]
    found += world.ask(*(one.path for one in live.ENDPOINTS if "{" not in one.path))
    said = []
    for one in found:
        what = one.json()["error"] if one.status_code >= 400 else one.headers["content-type"]
        path = one.request.url.raw_path.decode()[:50]
        said.append(f"{one.request.method} {path} → {one.status_code} {len(one.content) > 0} {what}")
    pages({"answers.txt": "\n".join(said), "headers.txt": "\n".join(headers)})


COOKIE = GUARDED.cookie.partition(";")[0]
WORDS = (f"Bearer {TOKEN}", f"bearer  {TOKEN} ", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer ", "Bearer ÿ")
OTHERS = [live.Guard("another", False, 8765), live.Guard(TOKEN, False, 1)]
COOKIES = [f"a=b; {COOKIE}", f"badcjobs_8765={TOKEN}", "[]=\";'", *(one.cookie.partition(";")[0] for one in OTHERS)]
HOSTS = ["localhost", "localhost:8765", "LOCALHOST:1", "127.0.0.1:80", "127.0.0.2", "[::1]:9", "[::1]", "evil.example",
         "evil.example:8765", "localhost.evil.example", "", "127.0.0.1.evil.example", "10.0.0.1", "[",
         "a" * 300]  # fmt: skip


def test_only_the_token_or_its_cookie_opens_the_door_and_on_loopback_only_names_of_this_machine(world, tmp_path):
    guarded = World(live.open_run(tmp_path / "july", world.clock), world.clock, GUARDED)
    opened = [one for one in WORDS if guarded.statuses("/api/tasks", authorization=one) == [200]]
    opened += [one for one in COOKIES if guarded.statuses("/api/tasks", cookie=one) == [200]]
    assert opened == [*WORDS[:2], COOKIES[0]] and guarded.statuses("/api/tasks") == [401]
    assert [world.statuses("/api/alerts", host=one) for one in HOSTS] == [[200]] * 7 + [[403]] * 8
    assert guarded.statuses("/api/alerts", host="gpu1.cluster.example", authorization=f"Bearer {TOKEN}") == [200]
    assert guarded.statuses("/?token=x", f"/api/tasks?token={TOKEN}", "/?token=") == [401] * 3
    refused, opened = guarded.ask("/live.js", f"/?token={TOKEN}")
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="badcjobs"')
    assert (opened.status_code, opened.headers["set-cookie"]) == (200, GUARDED.cookie)
    assert TOKEN not in opened.text + GUARDED.cookie and "live.js" in guarded.ask("/", cookie=COOKIE)[0].text
    assert GUARDED.cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")


def test_no_link_and_no_name_leads_out_of_a_run_that_others_may_see(world, tmp_path):
    run, stopped = tmp_path / "july", tmp_path / "stopped"
    secret = TaskFile(tmp_path / "june", index=7, job_id="666", states={"z": "done"}).write()
    TaskFile(run / "kept", index=9, states={"k": "done"}).write().rename(run / "4821_9.r0.gpu1.sqlite")
    (run / "tasks" / "4821_9.r0.gpu1.sqlite").symlink_to(run / "4821_9.r0.gpu1.sqlite")  # inside the run
    for name in (f"tasks/{secret.name}", "submitted.json", "job.sqlite"):
        (run / name).symlink_to(secret)
    source = live.open_run(run, world.clock)
    seen = source.look()
    assert {item.document["label"] for item in seen.tasks.values()} == {"4821_0", "4821_1", "4821_9"}
    assert "666_7" not in source.prometheus(seen)
    outside = "is a link to a place outside the run folder: not followed"
    assert seen.snapshot.remarks == tuple(f"{name} {outside}" for name in (secret.name, "job.sqlite", "submitted.json"))
    assert [source.log_end(name, 9) for name in ("../secret", "../../secret", "/etc/passwd", "4821_2")] == [None] * 4
    TaskFile(stopped, states={"a": "pending"}, verdict="stopped", job_id="local1").write()
    (stopped / "run.toml").symlink_to(run / "run.toml")
    assert live.open_run(stopped, world.clock).look().snapshot.total.go_on == (), "nor does it show what is in there"
    (tmp_path / "may").symlink_to(run)  # the run itself may be named by a link
    assert live.open_run(tmp_path / "may", world.clock).log_end("4821_0.r0.gpu1", 1) == (["line 299"], False)
    assert live.open_run(run / "tasks", world.clock).log_end("4821_0.r0.gpu1", 300) is not None
    (run / "tasks").rename(tmp_path / "elsewhere")
    (run / "tasks").symlink_to(tmp_path / "elsewhere")
    moved = live.open_run(run, world.clock)
    assert (moved.look().snapshot.remarks[0], moved.log_end("4821_0.r0.gpu1", 9)) == (f"tasks {outside}", None)


def test_metrics_have_what_was_read_in_a_short_time_and_soon_everything(tmp_path):
    class SlowDisk(HandClock):
        def monotonic_s(self):
            self.sleep(1)  # each file takes this long
            return super().monotonic_s()

    paths = [TaskFile(tmp_path, index, states={"a": "done"}).write() for index in range(5)]
    clock = SlowDisk(NOW_MS)
    source = live.open_run(tmp_path, clock)
    while (seen := source.look()).snapshot.unread:
        pass

    def reported():
        text = source.prometheus(seen)
        tasks = {int(index) for index in re.findall(r'badcjobs_task_chunks.*task="4821_(\d)', text)}
        assert ("badcjobs_chunks{" in text) == (len(tasks) == 5), "a part of the tasks is no total of the run"
        return tasks

    first, then, last = reported(), reported(), reported()
    assert 0 < len(first) < len(then) < len(last) == 5 and first < then
    for number, path in enumerate(paths):
        change(path, "UPDATE task SET exit_code = ?", number)
    clock.sleep(60)
    while (seen := source.look()).snapshot.unread:
        pass
    for path in paths:
        path.write_bytes(b"damaged since it was looked at")
    assert reported() == reported() == last, "what is known stays"


TRAIL = Trail(0, 1000, (50, None, 70), (1, None, 2), (60, None, 61), (200, None, 210))
ONE = TaskFacts("4821_0.r0.gpu1", "4821", 0, state="running", done=3, pending=7)
DEVICE = DeviceFacts(ONE.name, "gpu1", 0, "GPU-a", "0", "Tesla V100", "nvml", reading=Reading(70), trail=TRAIL)
FRAME = live.Snapshot(1000, "july", True, (ONE,), (DEVICE,), (), live.Total({"running": 1}, 1, 10, 10, done=3))
ALERT = TaskAlert("thermal", "warning", "86 °C", "gpu1", 500, ONE.name, 0, "GPU-a", 86.0, 83.0)


def heard(frames):
    """Return name and data of the messages for a listener that sees these snapshots, one after the other."""
    shown = iter(frames)
    source = live.LiveSource(SimpleNamespace(look=lambda patience_s: next(shown)))
    documents = [None, *(source.look() for _ in frames)]
    messages = [live.message_of_change(*both) for both in pairwise(documents)]
    return [(one["event"], one["data"]) for one in map(json.loads, filter(None, messages))]


class Client:
    """A listener of a hub: what it was sent; it reads at once, or never."""

    def __init__(self, hub, reads=True):
        self.sent, self.cut, self._reads = [], asyncio.Event(), reads
        self._connect = iter([{"type": "websocket.connect"}])
        scope = {"type": "websocket", "state": {"abort": self.cut.set}}
        self.serving = asyncio.ensure_future(hub.follow(scope, self._receive, self._send))

    async def _receive(self):
        for message in self._connect:
            return message
        return await asyncio.Event().wait()

    async def _send(self, message):
        if message["type"] == "websocket.send":
            self.sent.append(json.loads(message["text"]))
            await (asyncio.sleep(0) if self._reads else asyncio.Event().wait())

    async def until(self, event, **data):
        """Wait for a message with this name and these values."""
        while not any(one["event"] == event and data.items() <= one["data"].items() for one in self.sent):
            await asyncio.sleep(0.01)


def test_a_listener_hears_all_first_then_only_what_has_changed(pages):
    other = replace(ONE, name="4821_1.r0.gpu2", array_index=1)
    full = replace(FRAME, tasks=(ONE, other))
    course = [
        FRAME, replace(FRAME, at_ms=3000), full, replace(full, tasks=(replace(ONE, done=4, pending=6), other)),
        replace(full, alerts=(ALERT,)), replace(full, remarks=("a file is broken",)),
        replace(full, devices=(DEVICE, replace(DEVICE, uuid="GPU-b"))),
        replace(full, devices=(replace(DEVICE, alive=False),)),
        replace(full, tasks=(), devices=()),
    ]  # fmt: skip

    pages({"events.txt": "\n".join(f"{name} {json.dumps(data)}" for name, data in heard(course))})


def test_no_request_waits_while_a_run_is_read_for_the_first_time_and_the_rest_is_read_without_one():
    frames = [replace(FRAME, unread=2), replace(FRAME, unread=1), FRAME]
    hub = live.Hub(live.LiveSource(SimpleNamespace(look=lambda patience_s: frames.pop(0))).look, HandClock(0))

    async def story():
        assert [(await hub.latest()).snapshot.unread for _ in range(2)] == [2, 2]
        while hub.looks < 3:
            await asyncio.sleep(0.01)
        assert not hub.last.snapshot.unread

    asyncio.run(story())


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=6), min_size=1, max_size=8))
def test_a_snapshot_and_all_changes_after_it_are_the_newest_snapshot(histories):
    known, frames = dict[str, Any](), []
    for number, history in enumerate(histories):
        tasks = tuple(replace(ONE, name=f"t{n}", array_index=n, done=done) for n, done in history.items())
        frames.append(replace(FRAME, at_ms=number, tasks=tasks))
    for _, event in heard(frames):
        known = {k: v for k, v in known.items() if k not in event.get("gone_tasks", ())}
        known.update({task["name"]: task["done"] for task in event.get("tasks", ())})
    assert known == {f"t{n}": done for n, done in histories[-1].items()}


def test_a_listener_that_reads_too_slowly_is_cut_off_and_the_others_hear_of_trouble():
    clock, frames = HandClock(0), [FRAME]

    def look(patience_s):
        if not frames:
            raise DatabaseProblem("the folder is gone")
        return frames[0]

    hub = live.Hub(live.LiveSource(SimpleNamespace(look=look)).look, clock, interval_s=0.01, sending_s=0.5)

    async def story():
        slow, quick = Client(hub, reads=False), Client(hub)
        await quick.until("snapshot")
        frames.clear()
        clock.sleep(2)
        await quick.until("beat", trouble="the folder is gone", at_ms=1000)
        frames.append(replace(FRAME, at_ms=2000))
        await quick.until("beat", trouble=None, at_ms=2000)
        clock.sleep(2)
        frames[0] = replace(FRAME, tasks=())
        await quick.until("change", gone_tasks=[ONE.name])
        assert len(quick.sent) == 4
        clock.sleep(10)
        await quick.until("beat", trouble=None, at_ms=1000)
        await slow.serving
        assert (slow.cut.is_set(), quick.cut.is_set(), hub.listeners, len(slow.sent)) == (True, False, 1, 1)

    asyncio.run(story())
    hub.listeners = 256
    with pytest.raises(Exception, match=r"too many listeners \(256\)"):
        live._listener(hub, "/ws")


def test_a_disk_that_hangs_or_fails_stops_answers_but_not_the_server(world, pages):
    go_on, right = threading.Event(), world.hub.read_documents

    def look(error):
        if error is None:
            go_on.wait(60)
            return right()
        raise error

    errors = {"hanging": None, "failing": DatabaseProblem("the folder is gone"), "wrong": ZeroDivisionError("a secret")}

    async def story():
        said, reported = list[str](), ("status", "error", "trouble", "at_ms", "looks", "matched")

        async def tell(step, *paths):
            for path in paths:
                one = await world.get(path)
                words = {key: value for key, value in one.json().items() if key in reported}
                said.append(f"{step}: {path} → {one.status_code} {one.headers.get('retry-after')} {words}")

        await tell("at first", "/api/tasks")
        for step, error in errors.items():
            world.hub.read_documents, world.hub.patience_s = partial(look, error), 0.05
            world.clock.sleep(2)
            await tell(step, "/api/tasks", "/api/gpu/summary", "/api/health")
            world.hub.read_documents, world.hub.patience_s = right, 60
            go_on.set()
            while world.hub.trouble:
                await world.get("/api/tasks")
            world.clock.sleep(2)
            await tell(f"after {step}", "/api/tasks", "/api/health")
        return said

    pages({"answers.txt": "\n".join(asyncio.run(story()))})


def test_a_server_is_bound_where_it_is_safe_and_says_an_address_that_others_can_open(pages):
    everywhere, place = live.bind("0.0.0.0", 0, TOKEN)
    with everywhere:
        address = urlsplit(place.url)
        assert (address.port, place.loopback, "0.0.0.0" in place.url) == (place.port, False, False)
        socket.create_connection((address.hostname, place.port), timeout=60).close()
        wrong = [("127.0.0.1", place.port, None), ("0.0.0.0", 0, None), ("0.0.0.0", 0, TOKEN[:15]),
                 ("192.0.2.1", 0, TOKEN), ("no host", 0, TOKEN)]  # fmt: skip
        said = []
        for host, port, token in wrong:
            with pytest.raises(BadInput) as refused:
                live.bind(host, port, token, "badcjobs serve july")
            text = re.sub(r"TOKEN=[0-9a-f]{32} ", "TOKEN=32-HEX-DIGITS ", str(refused.value))
            said.append(re.sub(r"\[Errno.*", "what the resolver says", text.replace(str(place.port), "PORT")))
    pages({"refusals.txt": "\n\n".join(said)})
    here, place = live.bind("localhost", 0)
    with here:
        assert (place.urls, place.loopback) == ((f"http://localhost:{place.port}/",), True)


def test_the_guide_the_page_the_api_and_the_monitor_know_the_same_paths_parameters_and_states():
    guide = (folder("guide") / "live.md").read_text(encoding="utf-8")
    for one in live.ENDPOINTS:
        assert one.name == one.path[1:] or f"    {one.path} " in guide, one.path  # or it is a file of the page
        assert [name for name in (each.name for each in one.parameters) if f"{name}=" not in guide] == []
    script = (folder("guide").parent / "live" / "assets" / "words.js").read_text(encoding="utf-8")
    [listed] = re.findall(r"^const STATES = (\[.*\]);$", script, re.MULTILINE)
    assert tuple(json.loads(listed)) == live.STATES
    assert set(live.STYLES) == set(live.STATES)
