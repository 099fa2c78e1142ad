"""``badcjobs gpus``: the devices this task really has, for people and for scripts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.badcjobs_program import Outcome, Site, array_task, assert_refused
from support.fake_nvml import fake_nvml_environ, fake_nvml_folder, fake_uuid

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
}


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """What the program answers, asked for together because that takes half the time."""
    commands = [("gpus", *args.split()) for args, _ in ASKED.values()]
    found = shared_site.badcjobs_each(commands, [environment() for _, environment in ASKED.values()])
    return dict(zip(ASKED, found, strict=True))


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
    assert (device["utilization_percent"], device["memory_free_bytes"]) == (52, 13 * 2**30)


def test_people_get_a_table_with_the_reasons(answers: dict[str, Outcome]) -> None:
    found = answers["for people"]
    assert found.exit_code == 0
    for index in (0, 1):
        assert SIMULATED.format(index) in found.stdout
    assert "outside Slurm: all devices" in found.stdout
    assert "16.0 GiB" in found.stdout
