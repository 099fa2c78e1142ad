"""Which GPUs are mine: the variables of real Slurm jobs, and lists of tokens read as CUDA and ROCm read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

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


DEVICES: dict[str, Inventory] = {
    "four cards": NODE, "one is lost": (NODE[0], *NODE[2:]), "none": (), "no reader": None, "slices": MIG_NODE,
    "two cards of a cgroup": (card(0, C), card(1, D)), "cards only, by nvidia-smi": BY_SMI,
    "slices of two cards": (card(0, A), cut(0, A, S, "1/0"), cut(0, A, T, "2/0"), card(1, B), cut(1, B, U, "1/0")),
    "a slice without its card": (card(4, S),),
    "an old driver": (NODE[1], cut(1, B, S, "1/0", driver="460.32.03")),  # takes no UUIDs of slices
    "four AMD cards": AMD_NODE, "one fell off the bus": AMD_NODE[1:],
    "a UUID that is not ROCm's": (InventoryDevice(1, "74ff74a1-0000-1000-80aa-0000", "MI250X", "amd", vendor="amd"),),
}  # fmt: skip
NAMES = {"CUDA": CUDA, "ROCR": ROCR, "HIP": HIP, "NVIDIA": "NVIDIA_VISIBLE_DEVICES"}
CASES = (Path(__file__).parents[2] / "data" / "visible_devices.txt").read_text()


def test_lists_are_read_the_way_cuda_and_rocm_read_them_and_every_grant_says_why(pages: Pages) -> None:
    """Each letter is a device; a line per device says what its workers are shown, and why."""
    said: dict[str, list[str]] = {}
    for part in CASES.split("\n\n[")[1:]:
        head, *cases = part.strip().splitlines()
        page, name, where = re.fullmatch(r"(\S+): (.*), (\w+)\]", head).groups()  # type: ignore[union-attr]
        lines = said.setdefault(page, [])
        lines.append(f"## {name}, {where} Slurm")
        for case in cases:
            pairs = [word.split("=", 1) for word in shlex.split(case) if word != "nothing"]
            environ = {
                NAMES.get(name, f"SLURM_{name}"): value.format(A=A, B=B, C=C, D=D, s=S, t=T, u=U)
                for name, value in pairs
            }
            grant = resolve(environ, DEVICES[name], in_slurm=where == "inside")
            letters = "".join(LETTERS.get(device.uuid or "", "?") for device in grant.devices)
            lines += [f"{case} → {letters or '–'}", f"  {grant.why}"]
            lines += [f"    {device.vendor} {device.pin}: {device.why}" for device in grant.devices]
    pages({page: shortened("\n".join(lines)) for page, lines in said.items()})
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
