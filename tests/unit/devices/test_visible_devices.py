"""Which GPUs are mine: the variables of real Slurm jobs, and lists of tokens read as CUDA and ROCm read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import Grant, resolve_devices
from rooms.model import Device, InventoryDevice
from rooms.workers import plan_workers
from support.pages import Pages

CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# The cards A to D; s and t are slices of B, u is one of C.
A, B, C, D = (f"GPU-{name}-0000-4000-8000-000000000000" for name in ("aaaa1111", "aaaa2222", "bbbb3333", "cccc4444"))
S, T, U = (f"MIG-{name}-0000-5000-8000-000000000000" for name in ("eeee6666", "eeee7777", "ffff8888"))
AMD = [f"GPU-{number:016x}" for number in (0xAA11, 0xAA22, 0xBB33, 0xCC44)]
LETTERS = dict(zip([A, B, C, D, S, T, U, *AMD], "ABCDstuABCD", strict=True))


def card(index: int, uuid: str, **more: str) -> InventoryDevice:
    return InventoryDevice(index, uuid, "V100", "nvml", 16 * 2**30, **more)


def cut(index: int, parent: str, uuid: str, instance: str, driver: str = "580.65") -> InventoryDevice:
    return InventoryDevice(index, uuid, "MIG 1g", "nvml", 18 * 2**30, parent_uuid=parent, slice=instance, driver=driver)


NODE = tuple(card(index, uuid) for index, uuid in enumerate((A, B, C, D)))
MIG_NODE = (*NODE[:2], cut(1, B, S, "1/0"), cut(1, B, T, "2/0"), NODE[2], cut(2, C, U, "1/0"), NODE[3])
AMD_NODE = tuple(InventoryDevice(i, uuid, "MI250X", "amd", vendor="amd") for i, uuid in enumerate(AMD))
BY_SMI = tuple(InventoryDevice(i, uuid, "H200", "nvidia-smi") for i, uuid in enumerate((A, B)))
Inventory = tuple[InventoryDevice, ...] | None


def resolve(environ: Mapping[str, str] | str, node: Inventory = NODE, *, in_slurm: bool = True) -> Grant:
    return resolve_devices({CUDA: environ} if isinstance(environ, str) else environ, node, in_slurm=in_slurm)


def granted(environ: Mapping[str, str] | str, node: Inventory = NODE, *, in_slurm: bool = True) -> str:
    """Return the letters of the granted devices, in order; without a reader their tokens."""
    devices = resolve(environ, node, in_slurm=in_slurm).devices
    return "".join(LETTERS[d.uuid] for d in devices) if node else " ".join(d.token for d in devices)


# Seen on a real Slurm 22.05, GPU 0 held by another job: CUDA_VISIBLE_DEVICES, Slurm's variables, the grant.
SLURM = [
    (None, {}, ""),
    ("1,2", {"JOB_GPUS": "1,2", "GPUS_ON_NODE": "2"}, "BC"),
    ("1", {"JOB_GPUS": "1,2", "STEP_GPUS": "1", "GPUS_ON_NODE": "1"}, "B"),
    (None, {"JOB_GPUS": "1,2"}, ""),  # a step without GPUs, and the list of the job
    ("2,3", {"STEP_GPUS": "2,3", "GPUS_ON_NODE": "2"}, "CD"),
    ("2", {"JOB_GPUS": "1,2", "STEP_GPUS": "2", "GPUS_ON_NODE": "2"}, "C"),  # a GPU per task, the second
    ("0,1", {"JOB_GPUS": "1,2", "STEP_GPUS": "0,1"}, "AB"),  # the second of two nodes
    (None, {"JOB_GPUS": "0,1,2,3", "GPUS_ON_NODE": "4"}, ""),  # exclusive, in srun
    ("0,3", {"JOB_GPUS": "0,3", "GPUS_PER_NODE": "v100:1,a100:1"}, "AD"),
    ("0", {"JOB_GPUS": "0", "SHARDS_ON_NODE": "1", "GPUS_ON_NODE": "1"}, "A"),
]


def test_inside_slurm_the_visible_tokens_alone_grant() -> None:
    for visible, others, expected in SLURM:
        environ = {f"SLURM_{name}": value for name, value in others.items()}
        assert granted({**environ, **({} if visible is None else {CUDA: visible})}) == expected, (visible, others)
    renumbered = (card(0, C), card(1, D))  # by cgroups
    assert granted({CUDA: "0,1", "SLURM_JOB_GPUS": "2,3"}, renumbered) == "CD"
    lost_one = (NODE[0], NODE[2], NODE[3])
    assert (granted("2", lost_one), granted("1", lost_one)) == ("C", "")


# CUDA_VISIBLE_DEVICES → what it grants; measured with driver 580.
TOKENS = {
    "": "", "  ": "", "-1": "", "NoDevFiles": "", "NoDevFiles,0": "", "all": "",
    " 2 ,\t0 ": "CA", "3,2,1,0": "DCBA", "00,003": "AD", "+1,+2": "BC", "2abc,1.5": "CB", "a2": "", "٢": "",
    "4": "", "0,1,4": "AB", "0,9,1": "A", "2,-1,0": "C", "-1,0": "", "1,banana,2": "B", "9" * 30: "",
    "0,,1": "A", "0,": "A", ",0": "",
    C: "C", f"{D},{A}": "DA", B.replace("aaaa", "AAAA"): "B", "GPU-bbbb": "C", "GPU-aaaa2": "B", f"{D},GPU-b": "DC",
    "GPU-aaaa": "", "3,GPU-aaaa,2": "D", f"{C},GPU-aaaa,{D}": "C", "GPU-eeee": "", "GPU-": "",
    A.removeprefix("GPU-"): "", A.lower(): "", f"0,{D},1": "A", f"{D},0,{B}": "D",
    # CUDA shows no device if one is listed twice
    "1,1": "", "0,1,2,0": "", "1,01": "", "1,+1": "", f"{C},GPU-bbbb": "", "1,9,1": "B",
}  # fmt: skip


def test_tokens_are_read_the_way_cuda_reads_them() -> None:
    for in_slurm in (True, False):
        assert {value: granted(value, in_slurm=in_slurm) for value in TOKENS} == TOKENS


SLICE_TOKENS = {
    T: "t", "MIG-eeee7": "t", "MIG-EEEE7": "t", "MIG-eeee": "", f"{U},{S}": "us", "MIG-": "", "MIG-0000,0": "",
    f"MIG-{B}/2/0": "t", f"MIG-GPU-{B[4:].upper()}/1/0": "s", f"MIG-{B}/9/0": "", f"MIG-{A}/1/0": "",
    f"MIG-{C[:12]}/1/0": "u", f"MIG-{C}/1/0,MIG-{B}/1/0": "us", f"MIG-{B}/1/0x": "",
    f"{S},{D}": "sD", f"{S},0": "s", f"0,{S}": "A", f"{S},MIG-{B}/1/0": "", f"{S},{S}": "", f"{S},{B}": "",
    "1": "s", B: "s", "3,2,1,0": "DusA",  # a card in MIG mode stands for its first slice
}  # fmt: skip


def test_slices_are_devices_and_a_card_in_mig_mode_stands_for_its_first_one() -> None:
    assert {value: granted(value, MIG_NODE) for value in SLICE_TOKENS} == SLICE_TOKENS
    assert granted({}, MIG_NODE, in_slurm=False) == "AstuD"
    tokens = [device.token for device in resolve({}, MIG_NODE, in_slurm=False).devices]
    assert granted(",".join(tokens[1:4]), MIG_NODE) == "stu", "a token finds its slice"
    assert granted("MIG-eeee6", (card(4, S),)) == "s", "a slice that is listed without its card"


def test_an_old_name_that_two_cards_answer_to_grants_nothing_and_ends_the_list() -> None:
    two = (card(0, A), cut(0, A, S, "1/0"), cut(0, A, T, "2/0"), card(1, B), cut(1, B, U, "1/0"))
    assert granted(f"MIG-{A}/1/0", two) == granted("MIG-GPU-aaaa1/1/0", two) == "s"
    assert granted("MIG-GPU-aaaa/1/0", two) == ""
    assert granted("MIG-GPU-aaaa/2/0", two) == "t", "only one of the two cards has this slice"
    assert granted(f"{U},MIG-GPU-aaaa/1/0,{S}", two) == "u"


AMD_LISTS = [
    ({ROCR: "3,1"}, "DB"), ({HIP: "2,0"}, "CA"), ({CUDA: "2"}, "C"), ({HIP: "1", CUDA: "2,3"}, "B"),
    ({ROCR: "2,3", HIP: "1"}, "D"), ({ROCR: "2,3", CUDA: "1,0"}, "DC"), ({ROCR: "2,3", HIP: "2"}, ""),
    ({ROCR: "2,3", CUDA: "2,3"}, ""), ({ROCR: f"0,{AMD[3]}"}, "AD"), ({ROCR: AMD[2].upper()}, "C"),
    ({ROCR: "GPU-000000000000bb"}, "C"), ({ROCR: "3,GPU-000000000000aa,0"}, "D"), ({ROCR: "GPU-,0"}, ""),
    ({ROCR: "1,2", HIP: AMD[2]}, "C"), ({ROCR: "1,2", HIP: AMD[3]}, ""), ({ROCR: "1,2,1,3"}, "BC"),
    ({HIP: "1,1,3"}, "BD"), ({ROCR: "0,9,1"}, "A"), ({HIP: "0,banana,1"}, "A"), ({ROCR: " 1 , 2"}, "BC"),
    ({ROCR: ""}, ""), ({ROCR: "", HIP: "0"}, ""), ({HIP: "-1"}, ""), ({HIP: "0,٢"}, "A"),
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"}, ""),
]  # fmt: skip


def test_lists_of_amd_are_read_the_way_their_runtimes_read_them() -> None:
    for environ, expected in AMD_LISTS:
        assert granted(environ, AMD_NODE) == expected, environ
        devices = resolve(environ, AMD_NODE).devices
        assert [device.pin for device in devices] == [device.uuid for device in devices]
    assert granted({}, AMD_NODE, in_slurm=False) == "ABCD"
    assert granted({ROCR: "2,3"}, AMD_NODE[1:]) == granted({HIP: "2,3"}, AMD_NODE[1:]) == "CD", "one fell off the bus"
    assert granted({CUDA: "2", ROCR: "0", HIP: "-1"}) == "C", "they do not matter to NVIDIA devices"
    unusual = (InventoryDevice(1, "74ff74a1-0000-1000-80aa-000000000000", "MI250X", "amd", vendor="amd"),)
    assert [device.pin for device in resolve({HIP: "1"}, unusual).devices] == ["1"], "its UUID is not ROCm's"


UNREAD = [
    ({CUDA: "1,2"}, "1 2"), ({CUDA: " GPU-x , GPU-y"}, "GPU-x GPU-y"), ({CUDA: "GPU-x,0"}, "GPU-x"),
    ({CUDA: "0,GPU-x"}, "0"), ({CUDA: "0,-1,1"}, "0"), ({CUDA: "0,,1"}, "0"), ({CUDA: "banana,0"}, ""),
    ({CUDA: "-1"}, ""), ({CUDA: "1,1"}, ""), ({CUDA: "1,2,+01"}, ""), ({CUDA: "GPU-x,GPU-X"}, ""),
    ({ROCR: "2,3"}, "2 3"), ({ROCR: "2,3", HIP: "1"}, "3"), ({HIP: "1,GPU-a"}, "1 GPU-a"), ({HIP: "GPU-,1"}, ""),
    ({ROCR: "0,banana,1"}, "0"), ({CUDA: "1", ROCR: "2", HIP: "0"}, "1"), ({}, ""),
]  # fmt: skip


def test_without_a_reader_tokens_are_granted_as_they_are() -> None:
    for environ, tokens in UNREAD:
        devices = resolve(environ, None).devices
        assert " ".join(device.pin for device in devices) == tokens == granted(environ, None), environ
        assert {(d.uuid, d.index, d.backend) for d in devices} <= {(None, None, "none")}
        assert {d.vendor for d in devices} <= {"nvidia" if CUDA in environ else "amd"}
    for nothing in (None, ()):
        assert resolve({}, nothing, in_slurm=False).devices == ()
    slices = resolve(f"{S},{T}", BY_SMI).devices  # this reader knows no slices, and takes none away
    assert [(device.pin, device.uuid) for device in slices] == [(S, None), (T, None)]
    assert resolve(f"{S},{S}", BY_SMI).devices == resolve("GPU-x", BY_SMI).devices == resolve(S, ()).devices == ()


def test_a_granted_device_carries_all_that_a_reader_found_and_the_name_that_its_driver_takes() -> None:
    found = InventoryDevice(0, A, "H200", "nvml", 9, 700.0, "00000000:18:00.0", "580.65", 90, 2, "nvidia", B, "1/0")
    [device] = resolve("0", (found,)).devices
    known = asdict(found)
    del known["slice"]
    assert device == Device("0", f"token 0 → index 0 → {A}, from {CUDA}", **known)
    old = (NODE[1], cut(1, B, S, "1/0", driver="460.32.03"))  # takes no UUIDs of slices
    for environ, in_slurm in (({CUDA: f"MIG-{B}/1/0"}, True), ({}, False)):
        assert [d.pin for d in resolve(environ, old, in_slurm=in_slurm).devices] == [f"MIG-{B}/1/0"]


# Environment, devices, inside Slurm → the reasons, as a page.
EXPLAINED: list[tuple[dict[str, str], Inventory, bool]] = [
    ({CUDA: "0"}, NODE, True), ({CUDA: "1"}, MIG_NODE, True), ({}, MIG_NODE, False), ({}, NODE, True),
    ({CUDA: "0,9"}, NODE, True), ({CUDA: "1,1"}, NODE, True), ({CUDA: ""}, NODE, False), ({}, (), False),
    ({CUDA: "1,x"}, None, True), ({CUDA: S}, BY_SMI, True), ({CUDA: "0,1", "SLURM_JOB_GPUS": "2,3"}, NODE, True),
    ({"SLURM_JOB_GPUS": "1,2"}, NODE, True), ({CUDA: "", "SLURM_STEP_GPUS": "3"}, NODE, True),
    ({CUDA: "0", "SLURM_JOB_GPUS": "1", "SLURM_STEP_GPUS": "2"}, NODE, True),
    ({CUDA: "0", "SLURM_JOB_GPUS": "1", "SLURM_STEP_GPUS": ""}, NODE, True),
    ({CUDA: "1", "SLURM_GPUS_ON_NODE": "2"}, NODE, True), ({CUDA: "1", "SLURM_GPUS_ON_NODE": "a100:1"}, NODE, True),
    ({"NVIDIA_VISIBLE_DEVICES": "none"}, NODE, True), ({"NVIDIA_VISIBLE_DEVICES": "all"}, NODE, True),
    ({CUDA: "0", "NVIDIA_VISIBLE_DEVICES": "0,1"}, NODE, True),
    ({CUDA: "1", "SLURM_JOB_GPUS": "1", "SLURM_GPUS_ON_NODE": "1", "NVIDIA_VISIBLE_DEVICES": "all"}, NODE, True),
    ({ROCR: "2,3", HIP: "1"}, AMD_NODE, True), ({ROCR: "1,9"}, AMD_NODE, True), ({ROCR: "1,1"}, AMD_NODE, True),
    ({HIP: "-1"}, AMD_NODE, True), ({}, AMD_NODE, False), ({}, AMD_NODE, True), ({HIP: "1"}, None, True),
]  # fmt: skip


def test_every_grant_says_why(pages: Pages) -> None:
    lines = []
    for environ, node, in_slurm in EXPLAINED:
        grant = resolve(environ, node, in_slurm=in_slurm)
        variables = " ".join(f"{name}={value}" for name, value in environ.items())
        lines += [f"{'inside' if in_slurm else 'outside'} Slurm: {variables}".rstrip(), f"  {grant.why}"]
        lines += [f"    {device.pin}: {device.why}" for device in grant.devices]
    pages({"why.txt": "\n".join(lines)})


# --- for every list ---------------------------------------------------------------------------------------------------

tokens = st.one_of(
    st.integers(-1, 5).map(str),
    st.sampled_from([A, B, C, D, A.replace("a", "A"), "GPU-aaaa", "GPU-b", "GPU-", "x", "", " ", "00", "+1", "0abc"]),
    st.sampled_from([S, T, U, "MIG-eeee7", f"MIG-{B}/1/0", f"MIG-{C}/1/0", "MIG-eeee", "MIG-", "NoDevFiles"]),
)
inventories = st.sampled_from([NODE, MIG_NODE, AMD_NODE, (NODE[0], NODE[3]), (), None])
lists = st.lists(tokens, max_size=8).map(",".join)
environments = st.dictionaries(st.sampled_from([CUDA, ROCR, HIP]), lists)
explaining = st.dictionaries(
    st.sampled_from(["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES"]),
    lists | st.sampled_from(["all", "none", "void", "a100:1", "v100:1,a100:1"]),
)


@settings(max_examples=150)
@given(environments, explaining, inventories, st.booleans(), st.integers(1, 3), st.integers(1, 5) | st.none())
def test_no_list_grants_a_device_twice_or_one_that_is_not_here_and_slurms_lists_only_explain(
    environ: dict[str, str], others: dict[str, str], node: Inventory, in_slurm: bool, per_gpu: int, most: int | None
) -> None:
    grant = resolve(environ, node, in_slurm=in_slurm)
    devices = grant.devices
    assert resolve({**environ, **others}, node, in_slurm=in_slurm).devices == devices
    assert grant.why and all(device.why for device in devices)
    if node is not None:
        assert {device.uuid for device in devices} <= {device.uuid for device in node}
    plans = plan_workers(list(enumerate(devices))[:most], per_gpu=per_gpu, cpu_workers=0, cpus=8)
    shown = [plan.device.pin for plan in plans if plan.device is not None]
    simplest = [str(int(pin)) if pin.isdecimal() else pin.lower() for pin in shown]
    assert len(shown) == len(plans)
    assert {simplest.count(pin) for pin in simplest} <= {per_gpu}
    assert len(set(simplest)) == min(len(devices), most or len(devices))


@settings(max_examples=100)
@given(lists, st.sampled_from([NODE, MIG_NODE, None]), st.booleans())
def test_devices_come_in_the_order_of_their_tokens(value: str, node: Inventory, in_slurm: bool) -> None:
    devices = resolve(value, node, in_slurm=in_slurm).devices
    assert [device.token for device in devices] == [part.strip() for part in value.split(",")][: len(devices)]
