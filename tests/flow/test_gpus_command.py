"""``badcjobs gpus``: the devices this task really has, for people and for scripts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rooms.model import InventoryDevice, Reading
from support.badcjobs_program import Outcome, Site, array_task, assert_refused
from support.fake_nvml import fake_nvml_environ, fake_nvml_folder, fake_slice_uuid, fake_uuid
from support.recorded_tape import write_recording

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
KEYS = {
    "index", "uuid", "token", "name", "memory_total_bytes", "memory_free_bytes", "utilization_percent", "score",
    "backend", "why",
}  # fmt: skip


def no_driver() -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(fake_nvml_folder())}  # the stand-in, told of no device: no driver is loaded


def tokens(value: str) -> Callable[[], dict[str, str]]:
    return lambda: {"CUDA_VISIBLE_DEVICES": value}


# name → arguments, environment
ASKED: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {
    "one of four": ("--simulate 4 --json", tokens("2")),
    "all of three": ("--simulate 3 --json", dict),
    "indices in another order": ("--simulate 4 --json", tokens("3,0")),
    "uuids in another order": ("--simulate 4 --json", tokens(f"{SIMULATED.format(3)},{SIMULATED.format(0)}")),
    "the others too": ("--simulate 3 --all --json", tokens("1")),
    "none granted": ("--simulate 2 --json", tokens("")),
    "none from Slurm": ("--simulate 2 --json", lambda: array_task(0, (0, 1))),
    "no driver": ("--json", no_driver),
    "no driver, for people": ("", no_driver),
    "a token nobody can read": ("--json", lambda: {**no_driver(), **tokens("5")(), **array_task(0, (0, 1))}),
    "nvml": ("--json", lambda: {**fake_nvml_environ(3), **tokens("2")()}),
    "for people": ("--simulate 2", dict),
    "processes": ("--simulate busy.toml --all --json", tokens("0")),
    "processes, for people": ("--simulate busy.toml --all", tokens("0")),
    "a recording": ("--simulate tape.sqlite --json", tokens("1")),
    "slices": ("--json", lambda: {**fake_nvml_environ(2, mig="1:2"), **tokens(fake_slice_uuid(1, 1))()}),
    "a card in MIG mode": ("--json", lambda: {**fake_nvml_environ(2, mig="1:2"), **tokens("1")()}),
    "every card, whole or cut": ("--all --json", lambda: fake_nvml_environ(2, mig="1:2")),
    "more than there are": ("--simulate 2 --free 9 --wait 600 --json", dict),
    "bigger than there are": ("--simulate 2 --free 1 --min-memory-mib 999999 --wait 600 --json", dict),
    "free 0": ("--simulate 2 --free 0", dict),
    "all and free": ("--simulate 2 --free 1 --all", dict),
    "wait for ever": ("--simulate 2 --free 1 --wait inf", dict),
    "wait for no number": ("--simulate 2 --free 1 --wait nan --json", dict),
    "busier than busy": ("--simulate 2 --free 1 --max-utilization 101", dict),
    "a silent card": ("--json", lambda: fake_nvml_environ(2, failing="utilization,memory,memory_v2")),
}


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """What the program answers, asked for together because that takes half the time."""
    (shared_site.folder / "busy.toml").write_text(
        "devices = 3\n"
        f"[[device]]\nindex = 0\nprocesses = [[{os.getpid()}, 900], [4194999, 10]]\n"  # no pid is that high
        "[[device]]\nindex = 1\nprocesses = []\n"
    )
    record(shared_site.folder / "tape.sqlite")
    commands = [("gpus", *args.split()) for args, _ in ASKED.values()]
    found = shared_site.badcjobs_each(commands, [environment() for _, environment in ASKED.values()])
    return dict(zip(ASKED, found, strict=True))


def record(path: Path) -> None:
    """Write a recording of two devices that are always half busy."""
    devices = [InventoryDevice(i, f"GPU-tape{i}", "Tesla V100", "nvml", 16 * 2**30) for i in range(2)]
    said = Reading(utilization_percent=50, memory_used_bytes=4 * 2**30)
    write_recording(path, devices, lambda index, at_s: said, range(60))


def test_a_token_picks_one_of_the_simulated_devices(answers: dict[str, Outcome]) -> None:
    found = answers["one of four"]
    assert found.exit_code == 0, found.stderr
    (device,) = found.json["devices"]
    assert set(device) >= KEYS
    assert (device["index"], device["uuid"], device["token"]) == (2, SIMULATED.format(2), "2")
    assert device["backend"] == "simulated"
    assert "CUDA_VISIBLE_DEVICES" in device["why"]


def test_outside_slurm_every_device_is_ours_and_its_score_can_be_recomputed(answers: dict[str, Outcome]) -> None:
    devices = answers["all of three"].json["devices"]
    assert [device["index"] for device in devices] == [0, 1, 2]
    for device in devices:
        free, idle = device["memory_free_bytes"] / device["memory_total_bytes"], 1 - device["utilization_percent"] / 100
        assert device["score"] == pytest.approx(0.6 * free + 0.4 * idle, abs=1e-3)


@pytest.mark.parametrize("kind", ["indices", "uuids"])
def test_the_order_of_the_tokens_is_the_order_of_the_devices(answers: dict[str, Outcome], kind: str) -> None:
    assert [device["index"] for device in answers[f"{kind} in another order"].json["devices"]] == [3, 0]


def test_all_lists_the_others_too_and_says_that_they_are_not_ours(answers: dict[str, Outcome]) -> None:
    devices = answers["the others too"].json["devices"]
    assert {device["index"]: device["granted"] for device in devices} == {0: False, 1: True, 2: False}


@pytest.mark.parametrize("case", ["none granted", "none from Slurm"])
def test_without_a_device_the_document_says_why_and_the_exit_code_is_3(answers: dict[str, Outcome], case: str) -> None:
    assert answers[case].exit_code == 3
    assert answers[case].json["devices"] == []
    assert "CUDA_VISIBLE_DEVICES" in answers[case].json["why"]


def test_without_a_driver_it_says_so(answers: dict[str, Outcome]) -> None:
    found = answers["no driver"]
    assert (found.exit_code, found.json["devices"]) == (3, [])
    assert "driver" in found.json["why"]
    assert_refused(answers["no driver, for people"], 3, "no GPU here", "driver", "badcjobs gpus --simulate 2")


def test_granted_tokens_are_listed_where_nothing_can_read_them(answers: dict[str, Outcome]) -> None:
    found = answers["a token nobody can read"]
    assert found.exit_code == 0, found.stderr
    (device,) = found.json["devices"]
    assert (device["token"], device["uuid"], device["memory_free_bytes"], device["score"]) == ("5", None, None, None)


def test_nvml_devices_are_listed_with_what_they_say(answers: dict[str, Outcome]) -> None:
    (device,) = answers["nvml"].json["devices"]
    assert (device["uuid"], device["name"], device["backend"]) == (fake_uuid(2), "Stand-in GPU", "nvml")
    assert (device["utilization_percent"], device["memory_free_bytes"]) == (52, 25 * 2**29)


def test_people_get_a_table_with_the_reasons(answers: dict[str, Outcome]) -> None:
    found = answers["for people"]
    assert found.exit_code == 0
    for index in (0, 1):
        assert SIMULATED.format(index) in found.stdout
    assert "outside Slurm: all devices" in found.stdout
    assert "16.0 GiB" in found.stdout
    assert "read through simulated: 2 simulated devices requested" in found.stdout


def test_all_shows_the_processes_of_every_card_and_names_those_it_can_see(answers: dict[str, Outcome]) -> None:
    devices = answers["processes"].json["devices"]
    me = psutil.Process()
    assert devices[0]["processes"] == [
        {"pid": me.pid, "user": me.username(), "program": me.name(), "memory_used_bytes": 900 * 2**20},
        {"pid": 4194999, "user": None, "program": None, "memory_used_bytes": 10 * 2**20},
    ]
    assert [device["processes"] for device in devices[1:]] == [[], None]
    shown = answers["processes, for people"].stdout
    assert f"GPU 0   {me.pid}" in shown
    assert "900 MiB" in shown
    assert "GPU 2: process list not available" in shown


def test_which_reader_is_used_and_why_is_part_of_the_answer(answers: dict[str, Outcome]) -> None:
    simulated, nvml = answers["all of three"].json, answers["nvml"].json
    assert (simulated["backend"], nvml["backend"]) == ("simulated", "nvml")
    assert "3 simulated devices" in simulated["backend_why"]
    assert nvml["backend_why"]
    nothing = answers["a token nobody can read"].json
    assert nothing["backend"] == "none"
    assert "driver" in nothing["backend_why"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("more than there are", "9 free GPUs requested, but this process may use 2"),
        ("bigger than there are", "1 free GPU with 999,999 MiB requested, but 0 of 2 GPUs are large enough"),
    ],
)
def test_a_wish_that_no_card_can_meet_is_answered_at_once_and_with_the_reader(
    answers: dict[str, Outcome], case: str, why: str
) -> None:
    found = answers[case]
    assert (found.exit_code, found.json["devices"], found.json["backend"]) == (3, [], "simulated")
    assert why in found.json["why"]
    assert "2 simulated devices" in found.json["backend_why"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("free 0", "--free 0 requests no device"),
        ("all and free", "--all and --free together"),
        ("wait for ever", "--wait inf is not a number of seconds"),
        ("wait for no number", "--wait nan is not a number of seconds"),
        ("busier than busy", "--max-utilization 101 is not a percentage"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_with_why_and_a_line_to_paste(
    answers: dict[str, Outcome], case: str, words: str
) -> None:
    assert_refused(answers[case], 2, words, "\n  why: ", "\n  try: ")


def test_the_devices_of_a_recording_are_devices_like_any_other(answers: dict[str, Outcome]) -> None:
    found = answers["a recording"]
    assert found.exit_code == 0, found.stderr
    (device,) = found.json["devices"]
    assert (device["uuid"], device["backend"], device["utilization_percent"]) == ("GPU-tape1", "replay", 50)
    assert device["score"] == pytest.approx(0.6 * 0.75 + 0.4 * 0.5)


def test_a_slice_is_a_device_with_a_card(answers: dict[str, Outcome]) -> None:
    (device,) = answers["slices"].json["devices"]
    assert (device["uuid"], device["parent_uuid"], device["index"]) == (fake_slice_uuid(1, 1), fake_uuid(1), 1)
    assert device["memory_total_bytes"] == 4 * 2**30
    assert device["pin"] == fake_slice_uuid(1, 1)


def test_the_index_of_a_card_in_mig_mode_means_its_first_slice(answers: dict[str, Outcome]) -> None:
    (device,) = answers["a card in MIG mode"].json["devices"]
    assert device["uuid"] == fake_slice_uuid(1, 0)
    assert "in MIG mode: its first slice" in device["why"]


def test_all_shows_slices_and_their_cards(answers: dict[str, Outcome]) -> None:
    devices = answers["every card, whole or cut"].json["devices"]
    granted = [device["uuid"] for device in devices if device["granted"]]
    assert granted == [fake_uuid(0), fake_slice_uuid(1, 0), fake_slice_uuid(1, 1)]
    (whole,) = [device for device in devices if not device["granted"]]
    assert (whole["uuid"], whole["why"]) == (fake_uuid(1), "in MIG mode: its slices are the devices")


def test_what_a_device_does_not_say_is_unknown_and_not_zero(answers: dict[str, Outcome]) -> None:
    for device in answers["a silent card"].json["devices"]:
        assert (device["utilization_percent"], device["memory_free_bytes"], device["score"]) == (None, None, None)
        assert device["missing"]["utilization_percent"]
