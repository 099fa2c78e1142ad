"""Which GPUs are mine: the variables of real Slurm jobs, and what CUDA does with stranger ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import resolve_devices
from rooms.model import Device, InventoryDevice
from rooms.workers import plan_workers

UUIDS = (
    "GPU-aaaa1111-0000-4000-8000-000000000000",
    "GPU-aaaa2222-0000-4000-8000-000000000001",
    "GPU-bbbb3333-0000-4000-8000-000000000002",
    "GPU-cccc4444-0000-4000-8000-000000000003",
)
MIG = "MIG-dddd5555-0000-5000-8000-000000000004"
SLICES = (
    "MIG-eeee6666-0000-5000-8000-000000000005",
    "MIG-eeee7777-0000-5000-8000-000000000006",
    "MIG-ffff8888-0000-5000-8000-000000000007",
)


def card(index: int, uuid: str) -> InventoryDevice:
    return InventoryDevice(index, uuid, "Tesla V100", "nvml", 16 * 2**30)


def cut(index: int, parent: str, uuid: str, instance: str, driver: str = "580.65") -> InventoryDevice:
    """A slice of a card in MIG mode, as a reader lists it just after its card."""
    return InventoryDevice(
        index, uuid, "H200 MIG 1g.18gb", "nvml", 18 * 2**30, parent_uuid=parent, slice=instance, driver=driver
    )


NODE = tuple(card(index, uuid) for index, uuid in enumerate(UUIDS))
# Card 1 is in MIG mode, with two slices; card 2 too, with one; 0 and 3 are whole.
MIG_NODE = (
    NODE[0],
    NODE[1],
    cut(1, UUIDS[1], SLICES[0], "1/0"),
    cut(1, UUIDS[1], SLICES[1], "2/0"),
    NODE[2],
    cut(2, UUIDS[2], SLICES[2], "1/0"),
    NODE[3],
)


def variables(visible: str | None, **others: str) -> dict[str, str]:
    return {**({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}), **others}


# Seen on a real Slurm 22.05, GPU 0 held by another job: the environment, and the indices granted.
SLURM_CASES = {
    "no GPU asked": (variables(None), []),
    "sbatch with two": (variables("1,2", SLURM_JOB_GPUS="1,2", SLURM_GPUS_ON_NODE="2"), [1, 2]),
    "srun inside it": (variables("1,2", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="1,2", SLURM_GPUS_ON_NODE="2"), [1, 2]),
    "srun with one": (variables("1", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="1", SLURM_GPUS_ON_NODE="1"), [1]),
    "srun with none, stale list": (variables(None, SLURM_JOB_GPUS="1,2"), []),
    "bare srun": (variables("2,3", SLURM_STEP_GPUS="2,3", SLURM_GPUS_ON_NODE="2"), [2, 3]),
    "a GPU per task, first": (variables("1", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="1", SLURM_GPUS_ON_NODE="2"), [1]),
    "a GPU per task, second": (variables("2", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="2", SLURM_GPUS_ON_NODE="2"), [2]),
    "two nodes, first": (variables("1,2", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="1,2"), [1, 2]),
    "two nodes, second, wrong list": (variables("0,1", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="0,1"), [0, 1]),
    "exclusive, in the batch script": (variables("0,1,2,3", SLURM_JOB_GPUS="0,1,2,3"), [0, 1, 2, 3]),
    "exclusive, in srun": (variables(None, SLURM_JOB_GPUS="0,1,2,3", SLURM_GPUS_ON_NODE="4"), []),
    "typed": (variables("1", SLURM_JOB_GPUS="1", SLURM_GPUS_PER_NODE="a100:1"), [1]),
    "two types": (variables("0,3", SLURM_JOB_GPUS="0,3", SLURM_GPUS_PER_NODE="v100:1,a100:1"), [0, 3]),
    "shard": (variables("0", SLURM_JOB_GPUS="0", SLURM_SHARDS_ON_NODE="1", SLURM_GPUS_ON_NODE="1"), [0]),
    "MIG with several files": (variables("0", SLURM_JOB_GPUS="0", SLURM_GPUS_ON_NODE="1"), [0]),
}


@pytest.mark.parametrize(("environ", "indices"), SLURM_CASES.values(), ids=SLURM_CASES)
def test_inside_slurm_the_visible_tokens_alone_grant(environ: dict[str, str], indices: list[int]) -> None:
    grant = resolve_devices(environ, NODE, in_slurm=True)
    assert [device.index for device in grant.devices] == indices
    assert [device.uuid for device in grant.devices] == [UUIDS[index] for index in indices]
    assert grant.why


def test_where_cgroups_renumber_the_devices_the_numbers_of_the_renumbered_count() -> None:
    physical_two_and_three = (card(0, UUIDS[2]), card(1, UUIDS[3]))
    grant = resolve_devices(variables("0,1", SLURM_JOB_GPUS="2,3"), physical_two_and_three, in_slurm=True)
    assert [(device.index, device.uuid) for device in grant.devices] == [(0, UUIDS[2]), (1, UUIDS[3])]


# The value of CUDA_VISIBLE_DEVICES, and the indices it grants wherever it is set.
TOKEN_CASES = {
    "empty": ("", []),
    "blank": ("  ", []),
    "minus one": ("-1", []),
    "Slurm's word for none": ("NoDevFiles", []),
    "that word among others": ("NoDevFiles,0", []),
    "blanks around tokens": (" 2 ,\t0 ", [2, 0]),
    "reordered": ("3,1,0", [3, 1, 0]),
    "all in reverse": ("3,2,1,0", [3, 2, 1, 0]),
    "out of range": ("4", []),
    "out of range at the end": ("0,1,4", [0, 1]),
    "out of range in the middle": ("0,9,1", [0]),
    "minus one in the middle": ("2,-1,0", [2]),
    "minus one first": ("-1,0", []),
    "a word in the middle": ("1,banana,2", [1]),
    "a word first": ("all", []),
    "nothing between two commas": ("0,,1", [0]),
    "a comma at the end": ("0,", [0]),
    "a comma first": (",0", []),
    "a UUID": (UUIDS[2], [2]),
    "UUIDs, reordered": (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
    "a UUID in other letters": (UUIDS[1].replace("aaaa", "AAAA"), [1]),
    "a prefix of one UUID": ("GPU-bbbb", [2]),
    "a prefix that tells two apart": ("GPU-aaaa2", [1]),
    "a prefix of two UUIDs": ("GPU-aaaa", []),
    "an ambiguous prefix after a good token": ("3,GPU-aaaa,2", [3]),
    "a UUID of another node": ("GPU-eeee", []),
    "a UUID without its beginning": (UUIDS[0].removeprefix("GPU-"), []),
    "a UUID among indices ends the list": (f"0,{UUIDS[3]},1", [0]),
    "an index among UUIDs ends the list": (f"{UUIDS[3]},0,{UUIDS[1]}", [3]),
    "UUIDs and prefixes": (f"{UUIDS[3]},GPU-b,{UUIDS[0]}", [3, 2, 0]),
    "an index twice": ("1,1", []),
    "an index twice, others between": ("0,1,2,0", []),
    "a device by its UUID and by a prefix": (f"{UUIDS[2]},GPU-bbbb", []),
    "an index twice, written differently": ("1,01", []),
    "a repeat after the end of the list": ("1,9,1", [1]),
    "a digit that is not ASCII": ("٢", []),
    "zeros in front": ("00,003", [0, 3]),
    "a plus sign": ("+1,+2", [1, 2]),
    "letters after a number": ("2abc,1.5", [2, 1]),
    "letters before a number": ("a2", []),
    "nothing after the beginning of a UUID": ("GPU-", []),
    "a UUID whose beginning is in small letters": (UUIDS[0].lower(), []),
    "a very large number": ("9" * 30, []),
}


@pytest.mark.parametrize("in_slurm", [True, False], ids=["in Slurm", "outside"])
@pytest.mark.parametrize(("value", "indices"), TOKEN_CASES.values(), ids=TOKEN_CASES)
def test_tokens_are_read_the_way_cuda_reads_them(value: str, indices: list[int], in_slurm: bool) -> None:
    grant = resolve_devices(variables(value), NODE, in_slurm=in_slurm)
    assert [device.index for device in grant.devices] == indices
    assert value.strip() in grant.why or repr(value) in grant.why


# --- slices of cards in MIG mode --------------------------------------------------------------------------------------

# The value of CUDA_VISIBLE_DEVICES on the node with MIG, and the UUIDs it grants.
MIG_CASES = {
    "a slice": (SLICES[1], [SLICES[1]]),
    "a prefix of one slice": ("MIG-eeee7", [SLICES[1]]),
    "a prefix in other letters": ("MIG-EEEE7", [SLICES[1]]),
    "a prefix of two slices": ("MIG-eeee", []),
    "slices, reordered": (f"{SLICES[2]},{SLICES[0]}", [SLICES[2], SLICES[0]]),
    "an old name": (f"MIG-{UUIDS[1]}/2/0", [SLICES[1]]),
    "an old name, the card in other letters": (f"MIG-GPU-{UUIDS[1][4:].upper()}/1/0", [SLICES[0]]),
    "an old name of a slice that is not there": (f"MIG-{UUIDS[1]}/9/0", []),
    "an old name of a card that is not in MIG mode": (f"MIG-{UUIDS[0]}/1/0", []),
    "an old name with the beginning of one card's UUID": (f"MIG-{UUIDS[2][:12]}/1/0", [SLICES[2]]),
    "old names of two cards": (f"MIG-{UUIDS[2]}/1/0,MIG-{UUIDS[1]}/1/0", [SLICES[2], SLICES[0]]),
    "a slice by both its names": (f"{SLICES[0]},MIG-{UUIDS[1]}/1/0", []),
    "a slice twice": (f"{SLICES[0]},{SLICES[0]}", []),
    "a slice and a whole card": (f"{SLICES[0]},{UUIDS[3]}", [SLICES[0], UUIDS[3]]),
    "the index of a card in MIG mode: its first slice": ("1", [SLICES[0]]),
    "the UUID of a card in MIG mode: its first slice": (UUIDS[1], [SLICES[0]]),
    "indices of whole and cut cards": ("3,2,1,0", [UUIDS[3], SLICES[2], SLICES[0], UUIDS[0]]),
    "a slice and its card: the same slice twice": (f"{SLICES[0]},{UUIDS[1]}", []),
    "an index after a slice ends the list": (f"{SLICES[0]},0", [SLICES[0]]),
    "a slice after an index ends the list": (f"0,{SLICES[0]}", [UUIDS[0]]),
    "nothing after the beginning": ("MIG-", []),
    "a slice of another node": ("MIG-0000,0", []),
}


@pytest.mark.parametrize(("value", "uuids"), MIG_CASES.values(), ids=MIG_CASES)
def test_slices_are_devices_and_a_card_in_mig_mode_stands_for_its_first_one(value: str, uuids: list[str]) -> None:
    grant = resolve_devices(variables(value), MIG_NODE, in_slurm=True)
    assert [device.uuid for device in grant.devices] == uuids


def test_an_old_name_that_two_cards_answer_to_grants_nothing_and_ends_the_list() -> None:
    two = (card(0, UUIDS[0]), cut(0, UUIDS[0], SLICES[0], "1/0"), cut(0, UUIDS[0], SLICES[1], "2/0"),
           card(1, UUIDS[1]), cut(1, UUIDS[1], SLICES[2], "1/0"))  # fmt: skip

    def granted(value: str) -> list[str | None]:
        return [device.uuid for device in resolve_devices(variables(value), two, in_slurm=True).devices]

    assert granted(f"MIG-{UUIDS[0]}/1/0") == [SLICES[0]]
    assert granted("MIG-GPU-aaaa1/1/0") == [SLICES[0]]
    assert granted("MIG-GPU-aaaa/1/0") == []
    assert granted("MIG-GPU-aaaa/2/0") == [SLICES[1]]  # one of the two cards alone has this slice
    assert granted(f"{SLICES[2]},MIG-GPU-aaaa/1/0,{SLICES[0]}") == [SLICES[2]]


def test_a_slice_knows_its_card_and_its_own_memory() -> None:
    [device] = resolve_devices(variables("MIG-eeee7"), MIG_NODE, in_slurm=True).devices
    assert (device.parent_uuid, device.index, device.memory_total_bytes) == (UUIDS[1], 1, 18 * 2**30)


def test_a_card_that_stands_for_its_first_slice_says_so() -> None:
    [device] = resolve_devices(variables("1"), MIG_NODE, in_slurm=True).devices
    assert device.why == (
        f"token 1 → index 1 → {UUIDS[1]}, in MIG mode: its first slice → {SLICES[0]}, from CUDA_VISIBLE_DEVICES"
    )


def test_a_slice_that_is_listed_without_its_card_is_found_too() -> None:
    for token in (MIG, "MIG-dddd", "MIG-DDDD5555"):
        [device] = resolve_devices(variables(token), (*NODE, card(4, MIG)), in_slurm=True).devices
        assert (device.uuid, device.token, device.pin) == (MIG, token, MIG)


def test_outside_slurm_without_the_variable_the_slices_are_ours_instead_of_their_cards() -> None:
    grant = resolve_devices({}, MIG_NODE, in_slurm=False)
    assert [device.uuid for device in grant.devices] == [UUIDS[0], *SLICES, UUIDS[3]]
    again = resolve_devices(
        variables(",".join(d.token for d in grant.devices if d.token.startswith("MIG"))), MIG_NODE, in_slurm=False
    )
    assert [device.uuid for device in again.devices] == list(SLICES), "a token finds the slice that it belongs to"


def test_a_driver_that_takes_no_uuids_of_slices_is_shown_the_token() -> None:
    old = (NODE[1], cut(1, UUIDS[1], SLICES[0], "1/0", driver="460.32.03"))
    [named] = resolve_devices(variables(f"MIG-{UUIDS[1]}/1/0"), old, in_slurm=True).devices
    assert (named.uuid, named.pin) == (SLICES[0], f"MIG-{UUIDS[1]}/1/0")
    [unnamed] = resolve_devices({}, old, in_slurm=False).devices
    assert unnamed.pin == f"MIG-{UUIDS[1]}/1/0"


def test_a_reader_that_knows_no_slices_does_not_take_away_a_granted_one() -> None:
    by_smi = tuple(InventoryDevice(i, uuid, "H200", "nvidia-smi") for i, uuid in enumerate(UUIDS))
    grant = resolve_devices(variables(f"{SLICES[0]},{SLICES[1]}"), by_smi, in_slurm=True)
    assert [(device.pin, device.uuid) for device in grant.devices] == [(SLICES[0], None), (SLICES[1], None)]
    assert "lists cards, not their slices" in grant.devices[0].why
    assert resolve_devices(variables(f"{SLICES[0]},{SLICES[0]}"), by_smi, in_slurm=True).devices == ()


# --- AMD --------------------------------------------------------------------------------------------------------------

AMD_UUIDS = tuple(f"GPU-{number:016x}" for number in (0xAA11, 0xAA22, 0xBB33, 0xCC44))
AMD_NODE = tuple(InventoryDevice(i, uuid, "MI250X", "amdsmi", vendor="amd") for i, uuid in enumerate(AMD_UUIDS))

# The variables, and the indices they grant inside a job.
AMD_CASES = {
    "ROCR alone": ({"ROCR_VISIBLE_DEVICES": "3,1"}, [3, 1]),
    "HIP alone": ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
    "CUDA as another name of HIP": ({"CUDA_VISIBLE_DEVICES": "2"}, [2]),
    "HIP goes before CUDA": ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, [1]),
    "HIP counts within ROCR": ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
    "CUDA counts within ROCR": ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1,0"}, [3, 2]),
    "HIP's number is past what ROCR left": ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, []),
    "both set by a Slurm that knows no better": ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, []),
    "ROCR mixes indices and UUIDs": ({"ROCR_VISIBLE_DEVICES": f"0,{AMD_UUIDS[3]}"}, [0, 3]),
    "ROCR takes small letters": ({"ROCR_VISIBLE_DEVICES": AMD_UUIDS[2].lower()}, [2]),
    "ROCR takes a prefix": ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000bb"}, [2]),
    "an ambiguous prefix ends the list": ({"ROCR_VISIBLE_DEVICES": "3,GPU-000000000000aa,0"}, [3]),
    "a UUID in HIP's list": ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": AMD_UUIDS[2]}, [2]),
    "ROCR ends at a repeat": ({"ROCR_VISIBLE_DEVICES": "1,2,1,3"}, [1, 2]),
    "HIP passes over a repeat": ({"HIP_VISIBLE_DEVICES": "1,1,3"}, [1, 3]),
    "an unknown number ends the list": ({"ROCR_VISIBLE_DEVICES": "0,9,1"}, [0]),
    "a word ends the list": ({"HIP_VISIBLE_DEVICES": "0,banana,1"}, [0]),
    "blanks": ({"ROCR_VISIBLE_DEVICES": " 1 , 2"}, [1, 2]),
    "ROCR empty": ({"ROCR_VISIBLE_DEVICES": ""}, []),
    "HIP empty": ({"HIP_VISIBLE_DEVICES": ""}, []),
    "minus one": ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    "Slurm's lists grant nothing": ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"}, []),
}


@pytest.mark.parametrize(("environ", "indices"), AMD_CASES.values(), ids=AMD_CASES)
def test_amd_lists_are_read_the_way_their_runtimes_read_them(environ: dict[str, str], indices: list[int]) -> None:
    grant = resolve_devices(environ, AMD_NODE, in_slurm=True)
    assert [device.index for device in grant.devices] == indices
    assert [device.pin for device in grant.devices] == [AMD_UUIDS[index] for index in indices]
    assert all(device.vendor == "amd" for device in grant.devices)


def test_outside_slurm_without_a_list_every_amd_device_is_ours() -> None:
    grant = resolve_devices({}, AMD_NODE, in_slurm=False)
    assert [device.index for device in grant.devices] == [0, 1, 2, 3]
    assert "ROCR_VISIBLE_DEVICES is not set" in grant.why


def test_the_way_through_both_amd_lists_is_told() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    grant = resolve_devices(environ, AMD_NODE, in_slurm=True)
    assert grant.devices[0].why == (
        f"token 1 of HIP_VISIBLE_DEVICES → token 3 → index 3 → {AMD_UUIDS[3]}, from ROCR_VISIBLE_DEVICES"
    )
    assert grant.why == "ROCR_VISIBLE_DEVICES=2,3; HIP_VISIBLE_DEVICES=1"


def test_an_amd_device_whose_uuid_the_runtime_does_not_take_is_pinned_by_its_index() -> None:
    node = (InventoryDevice(1, "74ff74a1-0000-1000-80aa-000000000000", "MI250X", "amdsmi", vendor="amd"),)
    [device] = resolve_devices({"HIP_VISIBLE_DEVICES": "1"}, node, in_slurm=True).devices
    assert device.pin == "1"


@pytest.mark.parametrize(
    ("environ", "pins"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["3"]),
        ({"HIP_VISIBLE_DEVICES": "1,GPU-00000000000000aa"}, ["1", "GPU-00000000000000aa"]),
        ({"ROCR_VISIBLE_DEVICES": "0,banana,1"}, ["0"]),
    ],
)
def test_without_a_reader_amd_tokens_are_granted_as_they_are(environ: dict[str, str], pins: list[str]) -> None:
    devices = resolve_devices(environ, None, in_slurm=True).devices
    assert [(device.pin, device.vendor, device.uuid) for device in devices] == [(pin, "amd", None) for pin in pins]


def test_without_a_reader_cudas_list_goes_before_those_of_amd() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}
    [device] = resolve_devices(environ, None, in_slurm=True).devices
    assert (device.vendor, device.pin) == ("nvidia", "1")


def test_lists_of_amd_do_not_matter_to_nvidia_devices() -> None:
    environ = variables("2", ROCR_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="-1")
    assert [device.index for device in resolve_devices(environ, NODE, in_slurm=True).devices] == [2]


# --- devices that come and go -----------------------------------------------------------------------------------------


def test_a_card_that_fell_off_the_bus_does_not_move_the_numbers_of_the_others() -> None:
    without_one = (NODE[0], NODE[2], NODE[3])
    assert [d.uuid for d in resolve_devices(variables("2"), without_one, in_slurm=True).devices] == [UUIDS[2]]
    assert resolve_devices(variables("1"), without_one, in_slurm=True).devices == ()


def test_outside_slurm_without_the_variable_every_device_is_ours() -> None:
    grant = resolve_devices({}, NODE, in_slurm=False)
    assert [(device.index, device.token) for device in grant.devices] == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]


@pytest.mark.parametrize("inventory", [None, ()], ids=["no reader", "no card"])
def test_outside_slurm_without_the_variable_and_without_devices_there_is_none(
    inventory: tuple[InventoryDevice, ...] | None,
) -> None:
    assert resolve_devices({}, inventory, in_slurm=False).devices == ()


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        ("1,2", ["1", "2"]),
        (" GPU-x , GPU-y", ["GPU-x", "GPU-y"]),
        ("GPU-x,0", ["GPU-x"]),
        ("0,GPU-x", ["0"]),
        ("0,-1,1", ["0"]),
        ("0,,1", ["0"]),
        ("banana,0", []),
        ("-1", []),
        ("1,1", []),
        ("1,2,+01", []),
        ("GPU-x,GPU-X", []),
    ],
)
def test_without_a_reader_tokens_are_granted_as_they_are(value: str, tokens: list[str]) -> None:
    grant = resolve_devices(variables(value), None, in_slurm=True)
    assert [device.token for device in grant.devices] == tokens
    assert all(device.uuid is None and device.index is None for device in grant.devices)
    assert [device.pin for device in grant.devices] == tokens
    assert all(device.backend == "none" for device in grant.devices)


def test_a_granted_device_knows_what_the_reader_knows_and_why_it_is_ours() -> None:
    [device] = resolve_devices(variables("GPU-bbbb"), NODE, in_slurm=True).devices
    assert (device.name, device.backend, device.memory_total_bytes) == ("Tesla V100", "nvml", 16 * 2**30)
    assert "GPU-bbbb → index 2" in device.why


def test_a_granted_device_carries_all_that_a_reader_found() -> None:
    found = InventoryDevice(0, UUIDS[0], "H200", "nvml", 9, 700.0, "00000000:18:00.0", "580.65", 90, 2, "nvidia")
    [device] = resolve_devices(variables("0"), [found], in_slurm=True).devices
    assert device == Device(
        "0", f"token 0 → index 0 → {UUIDS[0]}, from CUDA_VISIBLE_DEVICES", 0, UUIDS[0], "H200", "nvml", 9, 700.0,
        "00000000:18:00.0", "580.65", 90, 2, "nvidia", None,
    )  # fmt: skip


def test_every_refusal_says_what_was_wrong() -> None:
    def why(value: str | None) -> str:
        return resolve_devices(variables(value), NODE, in_slurm=True).why

    assert "stops at '9'" in why("0,9")
    assert "contains 1 twice" in why("1,1")
    assert "Slurm granted no GPU" in why(None)


# What explains and never grants: the environment, and what the reason adds.
EXPLAINED = {
    "cgroups renumber": (variables("0,1", SLURM_JOB_GPUS="2,3"), "SLURM_JOB_GPUS=2,3 has the physical numbers"),
    "a step without any": (
        variables(None, SLURM_JOB_GPUS="1,2"), "SLURM_JOB_GPUS is 1,2, but this step has no GPU",
    ),
    "an empty list": (variables("", SLURM_STEP_GPUS="3"), "SLURM_STEP_GPUS is 3, but this step has no GPU"),
    "the step's list goes before the job's": (
        variables("0,1", SLURM_JOB_GPUS="1,2", SLURM_STEP_GPUS="2,3"), "SLURM_STEP_GPUS=2,3 has the physical numbers",
    ),
    "one GPU per task": (variables("1", SLURM_GPUS_ON_NODE="2"), "SLURM_GPUS_ON_NODE=2 counts all tasks of the step"),
    "typed counts": (variables("1", SLURM_GPUS_ON_NODE="a100:1"), "SLURM_GPUS_ON_NODE=a100:1"),
    "a container without devices": (variables(None, NVIDIA_VISIBLE_DEVICES="none"), "NVIDIA_VISIBLE_DEVICES=none"),
    "a container with some": (variables("0", NVIDIA_VISIBLE_DEVICES="0,1"), "NVIDIA_VISIBLE_DEVICES=0,1"),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "words"), EXPLAINED.values(), ids=EXPLAINED)
def test_other_variables_explain_a_grant(environ: dict[str, str], words: str) -> None:
    assert words in resolve_devices(environ, NODE, in_slurm=True).why


def test_nothing_is_explained_where_all_agree() -> None:
    agreeing = variables("1,2", SLURM_JOB_GPUS="1,2", SLURM_GPUS_ON_NODE="2", NVIDIA_VISIBLE_DEVICES="all")
    assert resolve_devices(agreeing, NODE, in_slurm=True).why == "CUDA_VISIBLE_DEVICES=1,2"


# --- for every list ---------------------------------------------------------------------------------------------------

tokens = st.one_of(
    st.integers(-1, 5).map(str),
    st.sampled_from([*UUIDS, *(uuid.lower().replace("gpu-", "GPU-") for uuid in UUIDS), "GPU-aaaa", "GPU-b", "GPU-"]),
    st.sampled_from([*SLICES, "MIG-eeee7", f"MIG-{UUIDS[1]}/1/0", f"MIG-{UUIDS[2]}/1/0", "MIG-eeee"]),
    st.sampled_from(["", " ", "x", "MIG-", "00", " 0", "+1", "0abc", "NoDevFiles"]),
)
inventories = st.sampled_from([NODE, MIG_NODE, AMD_NODE, (NODE[0], NODE[3]), (), None])
lists = st.lists(tokens, max_size=8).map(",".join)
environments = st.dictionaries(
    st.sampled_from(["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]), lists
)
explaining = st.dictionaries(
    st.sampled_from(
        ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "NVIDIA_VISIBLE_DEVICES"]
    ),
    st.one_of(lists, st.sampled_from(["all", "none", "void", "a100:1", "v100:1,a100:1"])),
)
Inventory = tuple[InventoryDevice, ...] | None


@settings(deadline=None)
@given(environments, inventories, st.booleans(), st.integers(1, 3), st.integers(1, 5) | st.none())
def test_no_device_is_ever_given_to_two_workers_unless_they_shall_share_it(
    environ: dict[str, str], inventory: Inventory, in_slurm: bool, per_gpu: int, max_gpus: int | None
) -> None:
    devices = resolve_devices(environ, inventory, in_slurm=in_slurm).devices
    plans = plan_workers(list(enumerate(devices))[:max_gpus], per_gpu=per_gpu, cpu_workers=0, cpus=8)
    shown = [plan.device.pin for plan in plans if plan.device is not None]
    simplest = [str(int(pin)) if pin.isdecimal() else pin.lower() for pin in shown]
    assert len(shown) == len(plans)
    assert {simplest.count(pin) for pin in simplest} <= {per_gpu}
    assert len(set(simplest)) == min(len(devices), max_gpus or len(devices))


@settings(deadline=None)
@given(environments, inventories, st.booleans())
def test_no_device_outside_the_inventory_is_granted_and_none_without_a_reason(
    environ: dict[str, str], inventory: Inventory, in_slurm: bool
) -> None:
    grant = resolve_devices(environ, inventory, in_slurm=in_slurm)
    known = {device.uuid for device in inventory or ()}
    assert all(device.uuid in known for device in grant.devices) or inventory is None
    assert grant.why and all(device.why for device in grant.devices)


@settings(deadline=None)
@given(lists, st.sampled_from([NODE, MIG_NODE, None]), st.booleans())
def test_devices_come_in_the_order_of_their_tokens_and_never_more_of_them(
    value: str, inventory: Inventory, in_slurm: bool
) -> None:
    devices = resolve_devices(variables(value), inventory, in_slurm=in_slurm).devices
    assert [device.token for device in devices] == [part.strip() for part in value.split(",")][: len(devices)]


@settings(deadline=None)
@given(environments, explaining, inventories, st.booleans())
def test_slurms_lists_and_the_containers_never_change_what_is_granted(
    environ: dict[str, str], others: dict[str, str], inventory: Inventory, in_slurm: bool
) -> None:
    without = resolve_devices(environ, inventory, in_slurm=in_slurm)
    assert resolve_devices({**environ, **others}, inventory, in_slurm=in_slurm).devices == without.devices
