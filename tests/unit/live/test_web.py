"""The parts of the live page that need no server: what changes, who may ask, what may be asked, what is documented."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.live import (
    ENDPOINTS,
    STATES,
    STYLES,
    DocumentCache,
    Guard,
    Journal,
    Parameter,
    Snapshot,
    Total,
    change_text,
    parse_query,
    snapshot_text,
)
from rooms.model import Reading
from rooms.store import DeviceFacts, TaskAlert, TaskFacts, Trail
from starlette.exceptions import HTTPException

from badcjobs import paths as resources

TRAIL = Trail(0, 1000, (50, None, 70), (1, None, 2), (60, None, 61), (200, None, 210))
DEVICE = DeviceFacts("4821_0.r0.gpu1", "gpu1", 0, "GPU-a", "0", "Tesla V100", "nvml", reading=Reading(70), trail=TRAIL)
TASK = TaskFacts("4821_0.r0.gpu1", "4821", 0, state="running", done=3, pending=7)
FRAME = Snapshot(1000, "july", True, (TASK,), (DEVICE,), (), Total({"running": 1}, 1, 10, True, 3))


def looks(*frames: Snapshot) -> list[Any]:
    documents = DocumentCache()
    return [documents.convert(frame) for frame in frames]


# --- what listeners are told ------------------------------------------------------------------------------------------


def test_a_look_at_the_same_lines_is_no_news() -> None:
    before, after = looks(FRAME, replace(FRAME, at_ms=3000))
    assert change_text(before, after) is None


def test_only_what_has_changed_is_told_again() -> None:
    other = replace(TASK, name="4821_1.r0.gpu2", array_index=1)
    full = replace(FRAME, tasks=(TASK, other))
    before, after = looks(full, replace(full, at_ms=3000, tasks=(replace(TASK, done=4, pending=6), other)))
    change = json.loads(change_text(before, after) or "")
    assert [task["done"] for task in change["tasks"]] == [4]
    assert change["devices"] == []
    assert change["at_ms"] == 3000


def test_what_is_gone_is_named() -> None:
    before, after = looks(FRAME, replace(FRAME, tasks=(), devices=()))
    change = json.loads(change_text(before, after) or "")
    assert (change["gone_tasks"], change["gone_devices"]) == ([TASK.name], [f"{TASK.name}/GPU-a"])


def test_an_alert_that_ends_is_news() -> None:
    alert = TaskAlert("thermal", "warning", "86 °C", "gpu1", 500, TASK.name, 0, "GPU-a", 86.0, 83.0)
    before, after = looks(replace(FRAME, alerts=(alert,)), FRAME)
    assert json.loads(change_text(before, after) or "")["alerts"] == []


def test_of_a_task_that_has_ended_listeners_get_the_device_without_its_chart_and_who_asks_gets_it() -> None:
    (look,) = looks(replace(FRAME, devices=(replace(DEVICE, alive=False),)))
    assert json.loads(snapshot_text(look))["devices"][0]["trail"] is None
    (item,) = look.devices.values()
    assert item.document["trail"]["utilization_percent"] == (50, None, 70)


def test_two_devices_that_nobody_can_tell_apart_both_stay() -> None:
    (look,) = looks(replace(FRAME, devices=(DEVICE, DEVICE)))
    assert list(look.devices) == [f"{TASK.name}/GPU-a", f"{TASK.name}/GPU-a#2"]


def frames(count: int) -> list[Snapshot]:
    return [replace(FRAME, at_ms=n, tasks=(replace(TASK, done=n),)) for n in range(count)]


def events(texts: list[bytes]) -> list[tuple[str, str, Any]]:
    """Return id, name and data of each event."""
    found = []
    for text in texts:
        lines = dict(line.split(": ", 1) for line in text.decode().strip().splitlines())
        found.append((lines.get("id", ""), lines["event"], json.loads(lines["data"])))
    return found


def test_who_comes_first_gets_all_and_who_comes_back_gets_what_was_missed() -> None:
    journal = Journal("life")
    three = looks(*frames(3))
    journal.take(three[0])
    ((first_id, name, data),) = events(journal.catch_up(None))
    assert (first_id, name, data["tasks"][0]["done"]) == ("life-0", "snapshot", 0)
    for look in three[1:]:
        journal.take(look)
    missed = events(journal.catch_up("life-1"))
    assert [(i, n, d["tasks"][0]["done"]) for i, n, d in missed] == [("life-2", "change", 2)]
    assert journal.catch_up("life-2") == []


@pytest.mark.parametrize(
    "last_id", ["", "other-1", "life-99", "life--1", "life-x", "life-²", "life-" + "9" * 5000, "🐦"]
)
def test_who_names_an_event_that_never_was_gets_all(last_id: str) -> None:
    journal = Journal("life")
    for look in looks(*frames(2)):
        journal.take(look)
    assert [name for _, name, _ in events(journal.catch_up(last_id))] == ["snapshot"]


def test_who_was_away_for_too_long_gets_all() -> None:
    journal = Journal("life")
    for look in looks(*frames(100)):
        journal.take(look)
    assert [name for _, name, _ in events(journal.catch_up("life-2"))] == ["snapshot"]
    assert len(journal.catch_up("life-90")) == 9


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8), st.data())
def test_a_snapshot_and_all_changes_after_it_are_the_newest_snapshot(histories: list[list[int]], data: Any) -> None:
    def frame(at_ms: int, indices: list[int]) -> Snapshot:
        lines = {n: replace(TASK, name=f"t{n}", array_index=n, done=data.draw(st.integers(0, 2))) for n in indices}
        return replace(FRAME, at_ms=at_ms, tasks=tuple(lines.values()))

    journal, told, last_id = Journal("life"), dict[str, Any](), None
    for look in looks(*(frame(n, indices) for n, indices in enumerate(histories))):
        journal.take(look)
        for _, name, event in events(journal.catch_up(last_id)):
            told = {} if name == "snapshot" else told
            told = {k: v for k, v in told.items() if k not in event.get("gone_tasks", ())}
            told.update({task["name"]: task for task in event["tasks"]})
        last_id = events(journal.catch_up(None))[0][0]
    assert told == {task["name"]: task for task in json.loads(snapshot_text(look))["tasks"]}


# --- who may ask ------------------------------------------------------------------------------------------------------

LOOPBACK = Guard(None, True, 8765)
SECRET = Guard("a-long-secret-token", False, 8765)


@pytest.mark.parametrize(
    "header", ["localhost", "localhost:8765", "LOCALHOST:1", "127.0.0.1:80", "127.0.0.2", "[::1]:9", "[::1]"]
)
def test_on_loopback_the_names_of_this_machine_are_known(header: str) -> None:
    assert LOOPBACK.is_allowed_host(header)


@pytest.mark.parametrize(
    "header",
    ["evil.example", "evil.example:8765", "localhost.evil.example", "", None, "127.0.0.1.evil.example", "10.0.0.1"],
)
def test_on_loopback_another_name_is_somebody_who_made_it_point_here(header: str | None) -> None:
    assert not LOOPBACK.is_allowed_host(header)


def test_elsewhere_the_token_decides_and_not_the_name() -> None:
    assert SECRET.is_allowed_host("gpu1.cluster.example")


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({}, False),
        ({"authorization": "Bearer a-long-secret-token"}, True),
        ({"authorization": "bearer  a-long-secret-token "}, True),
        ({"authorization": "Bearer a-long-secret-toke"}, False),
        ({"authorization": "Basic a-long-secret-token"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer \udcff"}, False),
        ({"cookie": "badcjobs_8765=a-long-secret-token"}, False),
        ({"cookie": "a=b; " + SECRET.cookie.partition(";")[0]}, True),
        ({"cookie": Guard("another", False, 8765).cookie.partition(";")[0]}, False),
        ({"cookie": Guard("a-long-secret-token", False, 1).cookie.partition(";")[0]}, False),
        ({"cookie": "[]=\";'"}, False),
    ],
)
def test_only_the_token_or_its_cookie_opens_the_door(headers: dict[str, str], let_in: bool) -> None:
    assert SECRET.is_authorized(headers) is let_in


def test_the_cookie_is_not_the_token_and_no_script_or_other_site_gets_it() -> None:
    assert "a-long-secret-token" not in SECRET.cookie
    assert SECRET.cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")


@given(st.text())
def test_any_host_header_is_answered(text: str) -> None:
    assert LOOPBACK.is_allowed_host(text) in (True, False)


# --- what may be asked ------------------------------------------------------------------------------------------------

LIMIT = Parameter("limit", int, (1, 10))
ALIVE = Parameter("alive", bool)
STATE = Parameter("state", str, ("done", "failed"), "done")


def test_what_is_not_given_is_the_default() -> None:
    assert parse_query([], [LIMIT, ALIVE, STATE]) == {"limit": None, "alive": None, "state": "done"}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("limit", "0"), "from 1 to 10"),
        (("limit", "11"), "from 1 to 10"),
        (("limit", ""), "a whole number"),
        (("limit", "1.5"), "a whole number"),
        (("limit", "٣"), "a whole number"),
        (("limit", "9" * 5000), "a whole number"),
        (("alive", "yes"), "true or false"),
        (("state", "asleep"), "one of done, failed"),
        (("lmit", "1"), r"unknown parameter 'lmit' \(known: limit, alive, state\)"),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_would_be_right(pair: tuple[str, str], words: str) -> None:
    with pytest.raises(HTTPException, match=words) as refused:
        parse_query([pair], [LIMIT, ALIVE, STATE])
    assert refused.value.status_code == 400
    assert len(refused.value.detail) < 200


def test_a_parameter_given_twice_is_refused() -> None:
    with pytest.raises(HTTPException, match="limit is given twice"):
        parse_query([("limit", "1"), ("limit", "2")], [LIMIT])


# --- what is documented -----------------------------------------------------------------------------------------------


def test_the_guide_names_every_address_and_every_parameter() -> None:
    guide = (resources.folder("guide") / "live.md").read_text(encoding="utf-8")
    for question in ENDPOINTS:
        if question.name != question.path[1:]:  # not a file of the page
            assert f"    {question.path} " in guide, question.path
        for parameter in question.parameters:
            assert f"{parameter.name}=" in guide, f"{question.path}: {parameter.name}"


def test_the_page_the_api_and_the_monitor_know_the_same_states_in_the_same_order() -> None:
    script = (resources.folder("guide").parent / "live" / "assets" / "words.js").read_text(encoding="utf-8")
    [listed] = re.findall(r"^const STATES = (\[.*\]);$", script, re.MULTILINE)
    assert tuple(json.loads(listed)) == STATES
    assert set(STYLES) == set(STATES)
