"""Which GPUs are mine: the variables of real Slurm jobs, and lists of tokens read as CUDA and ROCm read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def resolve(environ: Mapping[str, str], node: Inventory = NODE, *, in_slurm: bool = True) -> Grant:
    return resolve_devices(environ, node, in_slurm=in_slurm)


# Values of CUDA_VISIBLE_DEVICES; what they grant was measured with driver 580.
TOKENS = [
    "", "  ", "-1", "NoDevFiles", "NoDevFiles,0", "all", " 2 ,\t0 ", "3,2,1,0", "00,003", "+1,+2", "2abc,1.5", "a2",
    "٢", "4", "0,1,4", "0,9,1", "2,-1,0", "-1,0", "1,banana,2", "9" * 30, "0,,1", "0,", ",0", C, f"{D},{A}",
    B.replace("aaaa", "AAAA"), "GPU-bbbb", "GPU-aaaa2", f"{D},GPU-b", "GPU-aaaa", "3,GPU-aaaa,2", f"{C},GPU-aaaa,{D}",
    "GPU-eeee", "GPU-", A.removeprefix("GPU-"), A.lower(), f"0,{D},1", f"{D},0,{B}", "1,1", "0,1,2,0", "1,01", "1,+1",
    f"{C},GPU-bbbb", "1,9,1",
]  # fmt: skip
# With slices; a card in MIG mode stands for its first slice.
SLICE_TOKENS = [
    T, "MIG-eeee7", "MIG-EEEE7", "MIG-eeee", f"{U},{S}", "MIG-", "MIG-0000,0", f"MIG-{B}/2/0",
    f"MIG-GPU-{B[4:].upper()}/1/0", f"MIG-{B}/9/0", f"MIG-{A}/1/0", f"MIG-{C[:12]}/1/0", f"MIG-{C}/1/0,MIG-{B}/1/0",
    f"MIG-{B}/1/0x", f"{S},{D}", f"{S},0", f"0,{S}", f"{S},MIG-{B}/1/0", f"{S},{S}", f"{S},{B}", "1", B, "3,2,1,0",
]  # fmt: skip
# An old name that two cards answer to grants nothing and ends the list.
OLD_NAMES = [
    f"MIG-{A}/1/0", "MIG-GPU-aaaa1/1/0", "MIG-GPU-aaaa/1/0", "MIG-GPU-aaaa/2/0", f"{U},MIG-GPU-aaaa/1/0,{S}",
]  # fmt: skip
# Seen on a real Slurm 22.05, GPU 0 held by another job; without SLURM_.
SLURM = """
JOB_GPUS=1,2 GPUS_ON_NODE=2 CUDA=1,2; JOB_GPUS=1,2 STEP_GPUS=1 GPUS_ON_NODE=1 CUDA=1; JOB_GPUS=1,2;
STEP_GPUS=2,3 GPUS_ON_NODE=2 CUDA=2,3; JOB_GPUS=1,2 STEP_GPUS=2 GPUS_ON_NODE=2 CUDA=2;
JOB_GPUS=1,2 STEP_GPUS=0,1 CUDA=0,1; JOB_GPUS=0,1,2,3 GPUS_ON_NODE=4;
JOB_GPUS=0,3 GPUS_PER_NODE=v100:1,a100:1 CUDA=0,3; JOB_GPUS=0 SHARDS_ON_NODE=1 GPUS_ON_NODE=1 CUDA=0;
JOB_GPUS=1 STEP_GPUS= CUDA=0; STEP_GPUS=3 CUDA=; GPUS_ON_NODE=a100:1 CUDA=1; NVIDIA=none; NVIDIA=all;
NVIDIA=0,1 CUDA=0; JOB_GPUS=1 GPUS_ON_NODE=1 NVIDIA=all CUDA=1; ROCR=0 HIP=-1 CUDA=2
"""
AMD_LISTS = f"""
ROCR=3,1; HIP=2,0; CUDA=2; HIP=1 CUDA=2,3; ROCR=2,3 HIP=1; ROCR=2,3 CUDA=1,0; ROCR=2,3 HIP=2; ROCR=2,3 CUDA=2,3;
ROCR=0,{AMD[3]}; ROCR={AMD[2].upper()}; ROCR=GPU-000000000000bb; ROCR=3,GPU-000000000000aa,0; ROCR=GPU-,0;
ROCR=1,2 HIP={AMD[2]}; ROCR=1,2 HIP={AMD[3]}; ROCR=1,2,1,3; HIP=1,1,3; ROCR=0,9,1; HIP=0,banana,1; ROCR=; ROCR= HIP=0;
HIP=-1; HIP=0,٢; JOB_GPUS=0,1 GPUS_ON_NODE=2
"""
# Without a reader; the tokens are granted as they are.
UNREAD = """
CUDA=1,2; CUDA=GPU-x,GPU-y; CUDA=GPU-x,0; CUDA=0,GPU-x; CUDA=0,-1,1; CUDA=0,,1; CUDA=banana,0; CUDA=-1; CUDA=1,1;
CUDA=1,2,+01; CUDA=GPU-x,GPU-X; ROCR=2,3; ROCR=2,3 HIP=1; HIP=1,GPU-a; HIP=GPU-,1; ROCR=0,banana,1;
CUDA=1 ROCR=2 HIP=0
"""
NAMES = {"CUDA": CUDA, "ROCR": ROCR, "HIP": HIP, "NVIDIA": "NVIDIA_VISIBLE_DEVICES"}


def parsed(text: str) -> list[dict[str, str]]:
    """Return the environments of a list with semicolons."""
    pairs = [[word.split("=", 1) for word in one.split()] for one in text.split(";")]
    return [{NAMES.get(name, f"SLURM_{name}"): value for name, value in one} for one in pairs]


def listed(values: Sequence[str]) -> list[dict[str, str]]:
    return [{CUDA: value} for value in values]


TWO_CARDS = (card(0, A), cut(0, A, S, "1/0"), cut(0, A, T, "2/0"), card(1, B), cut(1, B, U, "1/0"))
OLD_DRIVER = (NODE[1], cut(1, B, S, "1/0", driver="460.32.03"))  # takes no UUIDs of slices
UNUSUAL = (InventoryDevice(1, "74ff74a1-0000-1000-80aa-000000000000", "MI250X", "amd", vendor="amd"),)
# page: devices, inside Slurm, environments
PAGES: dict[str, list[tuple[str, Inventory, bool, list[dict[str, str]]]]] = {
    "cuda.txt": [
        ("four cards", NODE, True, listed(TOKENS)), ("four cards", NODE, False, [{}, {CUDA: "1"}, {CUDA: ""}]),
        ("one is lost", (NODE[0], *NODE[2:]), True, listed(["1", "2"])), ("none", (), False, [{}, {CUDA: S}]),
        ("two cards of a cgroup", (card(0, C), card(1, D)), True, parsed("JOB_GPUS=2,3 CUDA=0,1")),
    ],
    "slices.txt": [
        ("slices", MIG_NODE, True, listed(SLICE_TOKENS)), ("slices", MIG_NODE, False, [{}]),
        ("slices of two cards", TWO_CARDS, True, listed(OLD_NAMES)),
        ("a slice without its card", (card(4, S),), True, listed(["MIG-eeee6"])),
        ("an old driver", OLD_DRIVER, True, listed([f"MIG-{B}/1/0"])), ("an old driver", OLD_DRIVER, False, [{}]),
        ("cards only, by nvidia-smi", BY_SMI, True, listed([S, f"{S},{T}", f"{S},{S}", "GPU-x"])),
    ],
    "slurm.txt": [("four cards", NODE, True, [{}, *parsed(SLURM)])],
    "amd.txt": [
        ("four cards", AMD_NODE, False, [{}]),
        ("four cards", AMD_NODE, True, [{}, {ROCR: " 1 , 2"}, *parsed(AMD_LISTS)]),
        ("one fell off the bus", AMD_NODE[1:], True, parsed("ROCR=2,3; HIP=2,3")),
        ("a UUID that is not ROCm's", UNUSUAL, True, parsed("HIP=1")),
    ],
    "unread.txt": [
        ("no reader", None, True, [{}, {CUDA: " GPU-x , 0"}, *parsed(UNREAD)]), ("no reader", None, False, [{}]),
    ],
}  # fmt: skip


def test_lists_are_read_the_way_cuda_and_rocm_read_them_and_every_grant_says_why(pages: Pages) -> None:
    """Each letter is a device; a line per device says what its workers are shown, and why."""
    said: dict[str, str] = {}
    for page, parts in PAGES.items():
        lines = []
        for name, node, in_slurm, environments in parts:
            lines.append(f"## {name}, {'inside' if in_slurm else 'outside'} Slurm")
            for environ in environments:
                grant = resolve(environ, node, in_slurm=in_slurm)
                letters = "".join(LETTERS.get(device.uuid or "", "?") for device in grant.devices)
                variables = " ".join(f"{name.removesuffix('_VISIBLE_DEVICES')}={v!r}" for name, v in environ.items())
                lines += [f"{variables or 'nothing is set'} → {letters or '–'}", f"  {grant.why}"]
                lines += [f"    {device.vendor} {device.pin}: {device.why}" for device in grant.devices]
        said[page] = shortened("\n".join(lines))
    pages(said)
    tokens = [device.token for device in resolve({}, MIG_NODE, in_slurm=False).devices]
    again = resolve({CUDA: ",".join(tokens[1:4])}, MIG_NODE).devices
    assert [LETTERS[device.uuid or ""] for device in again] == ["s", "t", "u"], "a token finds its slice"


def shortened(text: str) -> str:
    for ending in ("-0000-4000-8000-000000000000", "-0000-5000-8000-000000000000"):
        text = text.replace(ending, "-…")
    return text


def test_a_granted_device_carries_all_that_a_reader_found() -> None:
    found = InventoryDevice(0, A, "H200", "nvml", 9, 700.0, "00000000:18:00.0", "580.65", 90, 2, "nvidia", B, "1/0")
    [device] = resolve({CUDA: "0"}, (found,)).devices
    known = asdict(found)
    del known["slice"]
    assert device == Device("0", f"token 0 → index 0 → {A}, from {CUDA}", **known)
    [unread] = resolve({CUDA: "1"}, None).devices
    assert (unread.uuid, unread.index, unread.backend) == (None, None, "none")


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
    devices = resolve({CUDA: value}, node, in_slurm=in_slurm).devices
    assert [device.token for device in devices] == [part.strip() for part in value.split(",")][: len(devices)]
