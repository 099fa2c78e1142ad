"""Read Slurm's variables (place in the array, memory, cores, end time), and lists of devices as CUDA and ROCm do."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime

from badcjobs.errors import BadInput
from badcjobs.model import Allocation, ArrayShape, Device, InventoryDevice

log = logging.getLogger(__name__)

CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
Variables = Mapping[str, str]  # of the environment
ALLOCATED = ("SLURM_", CUDA, "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", ROCR, HIP)  # the start of their names


def is_in_slurm(environ: Variables) -> bool:
    """Return whether this process runs inside a Slurm job."""
    return bool(environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID"))


def parse_allocation(environ: Variables, *, hostname: str, pid: int, started_at_ms: int) -> Allocation:
    """Return the allocation of this process, from its environment variables."""
    # SLURM_JOB_ID differs between the tasks of an array; SLURM_ARRAY_JOB_ID is the number that sbatch printed.
    job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    base = Allocation(
        in_slurm=bool(job_id),
        job_id=job_id or f"local{started_at_ms}-{pid}",
        node=hostname,
        local_dir=environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or None,
        facts={name: value for name, value in sorted(environ.items()) if name.startswith(ALLOCATED)},
        started_at_ms=started_at_ms,
    )
    if not job_id:
        return base
    array_index = _number(environ, "SLURM_ARRAY_TASK_ID")
    first, last, count = (_number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT"))
    array_indices = None
    if array_index is not None and first is not None and last is not None and count is not None:
        array_indices = first, last, _number(environ, "SLURM_ARRAY_TASK_STEP") or 1, count
    return replace(
        base,
        node=environ.get("SLURMD_NODENAME") or hostname,
        restart=_number(environ, "SLURM_RESTART_COUNT") or 0,
        array_index=array_index,
        array_indices=array_indices,
        # Only steps have it. SLURM_NTASKS is set in the batch script too, which is one process.
        step_tasks=_number(environ, "SLURM_STEP_NUM_TASKS") or 1,
        procid=_number(environ, "SLURM_PROCID") or 0,
        cpus=_number(environ, "SLURM_CPUS_PER_TASK") or _number(environ, "SLURM_CPUS_ON_NODE"),
    )


def _number(environ: Variables, name: str) -> int | None:
    text = environ.get(name, "").strip()
    number = _whole_number(text)
    if text and number is None:
        raise BadInput(f"{name}={text} is not a whole number from 0", why="Slurm always sets a number here")
    return number


# --- this task's shard ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Shard ``index`` of ``count``.

    A list of manifests has one line per array task: line ``position`` of ``positions``. Only the tasks of one step
    (``step_index`` of ``step_count``) share a line.
    """

    index: int
    count: int
    position: int | None = None
    positions: int | None = None
    step_index: int = 0
    step_count: int = 1


def array_shape(allocation: Allocation) -> ArrayShape | None:
    """Return the shape of this task's array; None without an array, or if its indices are irregular."""
    if allocation.array_indices is None:
        return None
    first, last, step, count = allocation.array_indices
    shape = ArrayShape(first, max(step, 1), count)
    return shape if shape.position_of(last) == count - 1 else None  # a list such as 1,2,5 has step 1


def find_place(allocation: Allocation, frozen: ArrayShape | None) -> ShardPlace:
    """Return the shard of this task; ``frozen`` is the array's shape in run.toml (None: the run has no array)."""
    tasks, procid = allocation.step_tasks, allocation.procid
    if allocation.array_index is None:
        return ShardPlace(procid, tasks)
    if frozen is None and allocation.array_indices is None:
        raise BadInput(
            f"the shape of the array of task {allocation.job_id}_{allocation.array_index} is unknown",
            why="SLURM_ARRAY_TASK_MIN, _MAX and _COUNT are not set",
            fix="badcjobs run … --shard I/N   (I from 0)",
        )
    if frozen is None and allocation.array_indices is not None and array_shape(allocation) is None:
        first, last, step, count = allocation.array_indices
        # It may be evenly spaced, but a task cannot tell: Slurm sets the same variables for 1,3,5,7 and 1,2,6,7.
        apart, rest = divmod(last - first, max(count - 1, 1))
        same = "" if rest else f"if evenly spaced: --array={ArrayShape(first, apart, count)}; "
        raise BadInput(
            "the indices of this array are a list, and Slurm does not report the indices of a list to its tasks",
            why="the first task of a run computes the shards from the first index, the step and the count; here Slurm"
            f" reports only indices from {first} to {last}, {count} tasks and a step of {step}",
            fix=f"sbatch --array=0-{count - 1} …   ({same}later, you can submit any of these indices again)",
        )
    if frozen is None:
        raise BadInput(
            f"array task {allocation.job_id}_{allocation.array_index} cannot join a run that started without an array",
            why="the first task of a run defines the shards; according to run.toml it took all sources",
            fix="badcjobs run … --shard I/N   (I from 0), or another --out for a new run",
        )
    position = frozen.position_of(allocation.array_index)
    if position is None:
        raise BadInput(
            f"array index {allocation.array_index} is not part of this run's array {frozen}",
            why="the first task saved the array's shape in run.toml, so that the shards stay the same",
            fix=f"sbatch --array={frozen} …   (or a part of it), or use another --out for a new run",
        )
    return ShardPlace(position * tasks + procid, frozen.count * tasks, position, frozen.count, procid, tasks)


# --- memory -----------------------------------------------------------------------------------------------------------

# The variable of each kind of request, in MiB, and the variable with the number of such units on this node.
_REQUESTS = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 2(x3),1: two tasks on each of three nodes, one on the fourth


def requested_memory_bytes(facts: Variables) -> int | None:
    """Return the memory that the job requested; None: not known, or all of the node (--mem=0)."""
    for size_name, count_name in _REQUESTS:
        size_mib = _whole_number(facts.get(size_name, ""))
        if size_mib is not None:
            many = 1 if count_name is None else _whole_number(facts.get(count_name, ""))
            return size_mib * 2**20 * many if size_mib and many else None
    return None


def own_memory_bytes(facts: Variables) -> int | None:
    """Return this task's part of the requested memory: the tasks of a step share it on each node."""
    requested_bytes = requested_memory_bytes(facts)
    for name, _ in _REQUESTS:
        if (text := facts.get(name, "").strip()) and _whole_number(text) is None:
            log.warning("%s=%s is not a whole number from 0: this request for memory is not known", name, text)
    if requested_bytes is None:
        return None
    groups = _TASKS.findall(facts.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    node = _whole_number(facts.get("SLURM_NODEID", "")) or 0
    # Outside steps, or if the number of tasks is not known, this is the only task.
    return requested_bytes // (max(1, by_node[node]) if node < len(by_node) else 1)


def _whole_number(text: str) -> int | None:
    """Return the number; None for any other text, which must not end a job."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None


# --- the end time -----------------------------------------------------------------------------------------------------

END_VARIABLE = "SLURM_JOB_END_TIME"  # only newer versions of Slurm set it
_LONGEST_S = 100 * 366 * 86_400  # a later date is a number that means "no limit"


@dataclass(frozen=True, slots=True)
class EndTime:
    """The time at which the job must end, and its source."""

    at_ms: int
    source: str


def parse_end(text: str, source: str, now_ms: int) -> EndTime | None:
    """Parse SLURM_JOB_END_TIME, or the output of ``squeue -h -o %e``; None if it has no end time in the future.

    The text has epoch seconds or a local date; NONE, Unknown and N/A mean no end. Slurm sets the variable once, at the
    start of the job, so it can be in the past after ``scontrol update TimeLimit=…``. With several lines (a
    heterogeneous job, a banner) the earliest end counts.
    """
    found = []
    for line in map(str.strip, text.splitlines()):
        at_s: float | None = _whole_number(line)
        with suppress(ValueError, OverflowError, OSError):
            at_s = datetime.fromisoformat(line).timestamp() if at_s is None and "T" in line else at_s
        if at_s is not None and now_ms < at_s * 1000 <= now_ms + _LONGEST_S * 1000:
            found.append(round(at_s * 1000))
    return EndTime(min(found), source) if found else None


def end_time_command(allocation: Allocation) -> list[str]:
    """Return the squeue command for the end time of this task only, not of its whole array."""
    index = "" if allocation.array_index is None else f"_{allocation.array_index}"
    return ["squeue", "-h", "-j", f"{allocation.job_id}{index}", "-o", "%e"]


# --- the devices granted to this task -------------------------------------------------------------------------------

VISIBLE = {"nvidia": CUDA, "amd": ROCR}  # vendor → the variable that selects its devices
_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the step's list first
_NONE = ("", "-1", "NoDevFiles")  # values that mean: no device


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices of this task, in the order of their tokens, and the reason."""

    devices: tuple[Device, ...]
    why: str

    def for_work(self) -> Grant:
        """Return the devices that a detector can use; those of other vendors can only be recorded."""
        usable = tuple(device for device in self.devices if device.vendor in VISIBLE)
        others = [f"; {device.name} can be recorded, but detectors use only NVIDIA and AMD GPUs"
                  for device in self.devices if device not in usable]  # fmt: skip
        return Grant(usable, self.why + "".join(others))


def as_device(token: str, found: InventoryDevice, why: str) -> Device:
    """Return a device of the inventory as a granted one, or (with an empty token) as one that is not granted."""
    facts = asdict(found)
    del facts["slice"]
    return Device(token, why, **facts)


def resolve_devices(environ: Variables, inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool) -> Grant:
    """Map the visible tokens to devices; ``inventory`` is None if no reader works."""
    # If Slurm does not know the vendor of its GPUs, it sets the lists of all vendors: CUDA is the most likely one.
    only_rocm = CUDA not in environ and (ROCR in environ or HIP in environ)
    amd = inventory[0].vendor == "amd" if inventory else only_rocm
    variable = ROCR if amd else CUDA
    grant: Grant | None = None
    if not amd and CUDA in environ:
        # Devices of other vendors have no number in CUDA's list.
        grant = _read_cuda_list(environ[CUDA], inventory if not inventory or inventory[0].vendor in VISIBLE else None)
    if amd:
        hip = HIP if HIP in environ else CUDA
        pool = None if inventory is None else [as_device(str(d.index), d, "") for d in inventory]
        if ROCR in environ:
            grant = _narrow(ROCR, environ[ROCR], pool)
            pool = list(grant.devices)
        if hip in environ:
            before = "" if grant is None else f"{grant.why}; "
            inner = _narrow(hip, environ[hip], pool, by_position=grant is not None)
            grant = Grant(inner.devices, before + inner.why)
    grant = grant or _without_list(variable, inventory, in_slurm=in_slurm)
    many, why = len(grant.devices), [grant.why]
    name = next((name for name in _SLURM_LISTS if environ.get(name)), None)
    if name is not None and not many:
        why.append(f"{name} is {environ[name]}, but this step has no GPU")
    elif name is not None and environ[name] != environ.get(variable):
        why.append(f"{name}={environ[name]} has the physical numbers of the node")
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node and on_node != str(many):  # not always a number: typed GPUs are counted as a100:1
        why.append(f"SLURM_GPUS_ON_NODE={on_node} counts all tasks of the step on this node")
    shown = environ.get("NVIDIA_VISIBLE_DEVICES")
    if shown is not None and not (many and shown == "all"):  # CUDA's container images set it to all
        why.append(f"NVIDIA_VISIBLE_DEVICES={shown} is for container runtimes and is ignored")
    return Grant(grant.devices, "; ".join(why))


def _without_list(variable: str, inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool) -> Grant:
    if in_slurm:
        return Grant((), f"inside a Slurm job and {variable} is not set: Slurm granted no GPU")
    if not inventory:
        return Grant((), "no GPU was found on this machine")
    in_mig_mode = {device.parent_uuid for device in inventory}
    found = []
    for device in inventory:
        if device.uuid in in_mig_mode:
            continue  # programs use the slices of a card in MIG mode
        token, where = str(device.index), f"index {device.index} → {device.uuid}"
        if device.parent_uuid is not None:
            token = device.uuid if device.slice is None else f"MIG-{device.parent_uuid}/{device.slice}"
            where = f"index {device.index} → {device.parent_uuid}, in MIG mode: slice {device.slice} → {device.uuid}"
        found.append(as_device(token, device, f"{where}; {variable} is not set, outside Slurm: all devices"))
    return Grant(tuple(found), f"{variable} is not set and this is not a Slurm job: all devices of the machine")


# --- CUDA's list ------------------------------------------------------------------------------------------------------

# Measured with driver 580: 00, +0 and 0abc are index 0; GPU-D9CE matches GPU-d9ce…, but gpu-d9ce and GPU- do not.
_INDEX = re.compile(r"\+?[0-9]+")
_UUID = re.compile(r"(GPU|MIG)-.")
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)")  # the only names of slices before driver 470

_WITHOUT_SLICES = "nvidia-smi"  # this backend lists only cards


def _read_cuda_list(value: str, inventory: Sequence[InventoryDevice] | None) -> Grant:
    if value.strip() in _NONE:
        return Grant((), f"{CUDA}={value!r} grants no device")
    tokens = [token.strip() for token in value.split(",")]
    found: list[Device] = []
    for token in tokens:
        device = None
        if any(kind.match(token) and kind.match(tokens[0]) for kind in (_INDEX, _UUID)):  # as the first token
            unread = f"token {token}, from {CUDA}={value}; not looked up: no driver library"
            device = Device(token, unread) if inventory is None else _look_up(token, inventory)
        if device is None and inventory is not None:
            rest = f"stops at {token!r}, which is not a device here (CUDA stops there too)"
            return Grant(tuple(found), f"{CUDA}={value} {rest}")
        if device is None:
            break
        if any(_identity(device) == _identity(other) for other in found):
            return Grant((), f"{CUDA}={value} contains {token} twice: CUDA then shows no device")
        found.append(device)
    unread = "; the devices cannot be read here, so the tokens are used unchanged" if inventory is None else ""
    return Grant(tuple(found), f"{CUDA}={value}{unread}")


def _look_up(token: str, inventory: Sequence[InventoryDevice]) -> Device | None:
    found = _find(token, inventory)
    if found is None:
        # The reader does not list slices: grant the slice anyway, and select it by its token.
        no_slices = bool(inventory) and all(device.backend == _WITHOUT_SLICES for device in inventory)
        why = f"token {token}, from {CUDA}; {_WITHOUT_SLICES} lists cards, not their slices"
        return Device(token, why) if no_slices and token.startswith("MIG-") else None
    way = f"token {token} → index {found.index} → {found.uuid}"
    first_slice = next((device for device in inventory if device.parent_uuid == found.uuid), None)
    if first_slice is None:
        return as_device(token, found, f"{way}, from {CUDA}")
    return as_device(token, first_slice, f"{way}, in MIG mode: its first slice → {first_slice.uuid}, from {CUDA}")


def _find(token: str, inventory: Sequence[InventoryDevice]) -> InventoryDevice | None:
    if number := _INDEX.match(token):
        # A card comes before its slices, which have the same index.
        return next((device for device in inventory if device.index == int(number[0])), None)
    if old := _OLD_SLICE.fullmatch(token):
        cards, cut = old[1].lower(), f"{old[2]}/{old[3]}"
        by_name = [d for d in inventory if d.slice == cut and (d.parent_uuid or "").lower().startswith(cards)]
        return by_name[0] if len(by_name) == 1 else None
    kind, rest = token[:4], token[4:].lower()
    matches = [d for d in inventory if d.uuid.startswith(kind) and d.uuid[4:].lower().startswith(rest)]
    return matches[0] if len(matches) == 1 else None


def _identity(device: Device) -> str:
    """Return the identity of a device: its UUID, else the normalized token, 1 for +01."""
    number = _INDEX.match(device.token)
    return device.uuid or (str(int(number[0])) if number else device.token.lower())


# --- ROCm's lists -----------------------------------------------------------------------------------------------------


def _narrow(variable: str, value: str, pool: Sequence[Device] | None, *, by_position: bool = False) -> Grant:
    """Return the devices of the pool in a list; ``by_position``: its numbers are positions in the pool."""
    if value.strip() in _NONE:
        return Grant((), f"{variable}={value!r} grants no device")
    found: dict[str, Device] = {}
    for token in (token.strip() for token in value.split(",")):
        device = _find_in_pool(token, variable, pool, by_position=by_position)
        name = "" if device is None else (device.uuid or device.token).upper()
        if name in found and variable != ROCR:
            continue
        if device is None or name in found:
            what = "is not a device here" if device is None else "is in the list twice"
            return Grant(tuple(found.values()), f"{variable}={value} stops at {token!r}, which {what}")
        found[name] = device
    return Grant(tuple(found.values()), f"{variable}={value}")


def _find_in_pool(token: str, variable: str, pool: Sequence[Device] | None, *, by_position: bool) -> Device | None:
    number = _whole_number(token)
    is_uuid = len(token) > 4 and token.upper().startswith("GPU-")
    if pool is None:
        way = f"token {token}, from {variable}; not looked up: no reader works"
        return Device(token, way, vendor="amd") if number is not None or is_uuid else None
    if number is not None and by_position:
        chosen = list(pool[number : number + 1])
    elif number is not None:
        chosen = [device for device in pool if device.index == number]
    else:
        chosen = [d for d in pool if is_uuid and (d.uuid or d.token).upper().startswith(token.upper())]
    if len(chosen) != 1:
        return None
    device = chosen[0]
    if device.why:  # set by the list of ROCR
        return replace(device, why=f"token {token} of {variable} → {device.why}")
    return replace(device, token=token, why=f"token {token} → index {device.index} → {device.uuid}, from {variable}")
