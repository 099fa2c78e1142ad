"""Which GPUs are mine: the variables of real Slurm jobs, and what CUDA does with stranger ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from badcjobs.allocation.visible_devices import resolve_devices
from badcjobs.model import InventoryDevice

UUIDS = (
    "GPU-aaaa1111-0000-4000-8000-000000000000",
    "GPU-aaaa2222-0000-4000-8000-000000000001",
    "GPU-bbbb3333-0000-4000-8000-000000000002",
    "GPU-cccc4444-0000-4000-8000-000000000003",
)
MIG = "MIG-dddd5555-0000-5000-8000-000000000004"


def card(index: int, uuid: str) -> InventoryDevice:
    return InventoryDevice(index, uuid, "Tesla V100", "nvml", 16 * 2**30)


NODE = tuple(card(index, uuid) for index, uuid in enumerate(UUIDS))


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
    "shard": (variables("0", SLURM_JOB_GPUS="0", SLURM_SHARDS_ON_NODE="1"), [0]),
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


def test_a_slice_is_found_by_its_uuid_or_a_prefix_of_it() -> None:
    for token in (MIG, "MIG-dddd", "MIG-DDDD5555"):
        [device] = resolve_devices(variables(token), (*NODE, card(4, MIG)), in_slurm=True).devices
        assert (device.uuid, device.token, device.pin) == (MIG, token, MIG)


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


def test_every_refusal_says_what_was_wrong() -> None:
    def why(value: str | None) -> str:
        return resolve_devices(variables(value), NODE, in_slurm=True).why

    assert "stops at '9'" in why("0,9")
    assert "names 1 twice" in why("1,1")
    assert "Slurm granted no GPU" in why(None)


tokens = st.one_of(
    st.integers(-1, 5).map(str),
    st.sampled_from([*UUIDS, *(uuid.lower().replace("gpu-", "GPU-") for uuid in UUIDS), "GPU-aaaa", "GPU-b", "GPU-"]),
    st.sampled_from(["", " ", "x", "MIG-", "00", " 0"]),
)


@settings(deadline=None)
@given(st.lists(tokens, max_size=8), st.booleans(), st.booleans())
def test_no_device_is_ever_granted_twice(parts: list[str], in_slurm: bool, readable: bool) -> None:
    devices = resolve_devices(variables(",".join(parts)), NODE if readable else None, in_slurm=in_slurm).devices
    pins = [device.pin for device in devices]
    plain = [str(int(pin)) if pin.isdecimal() else pin.lower() for pin in pins]
    assert len(set(plain)) == len(plain)
    assert [device.token for device in devices] == [part.strip() for part in parts][: len(devices)]
    if readable:
        assert set(pins) <= set(UUIDS)
