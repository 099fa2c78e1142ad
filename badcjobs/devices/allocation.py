"""Read Slurm's variables (place in the array, memory, cores, end time), and lists of devices as CUDA and ROCm do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from badcjobs.errors import BadInput
from badcjobs.model import Allocation, ArrayShape, Device, InventoryDevice
from badcjobs.seams import Environ

CUDA = "CUDA_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
Inventory = Sequence[InventoryDevice]
ALLOCATED = ("SLURM_", CUDA, "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", ROCR, HIP)  # the start of their names


# Variables of a job, which are wrong in another one.
_OF_A_JOB = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC)_|(CUDA|ROCR|HIP)_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$")
_CONFIGURATION = "SLURM_CONF"  # of Slurm itself, not of a job
# Options that sbatch reads from its environment; they override the lines of a script.
_SBATCH_OPTIONS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_PARTITION": "partition",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}


def is_in_slurm(environ: Environ) -> bool:
    """Return whether this process runs inside a Slurm job."""
    return bool(environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID"))


def own_job_id(environ: Environ) -> str | None:
    """Return the job number of this array task, which is not that of the array; None: outside Slurm."""
    return environ.get("SLURM_JOB_ID")


def node_name(environ: Environ, hostname: str) -> str:
    """Return the name of this node in Slurm, else that of the machine."""
    return environ.get("SLURMD_NODENAME") or hostname


def local_folder(environ: Environ) -> str | None:
    """Return the folder for temporary files on this node; None: no variable names one."""
    return environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or None


def without_job(environ: Environ) -> dict[str, str]:
    """Return the variables that another job may inherit."""
    return {name: value for name, value in environ.items() if name == _CONFIGURATION or not _OF_A_JOB.match(name)}


def sbatch_options(environ: Environ) -> dict[str, str]:
    """Return the options that sbatch would read from these variables, by their long names."""
    return {option: environ[name] for name, option in _SBATCH_OPTIONS.items() if environ.get(name)}


def parse_allocation(environ: Environ, *, hostname: str, pid: int, started_at_ms: int) -> Allocation:
    """Return the allocation of this process, from its environment variables."""
    # SLURM_JOB_ID differs between the tasks of an array; SLURM_ARRAY_JOB_ID is the number that sbatch printed.
    job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    base = Allocation(
        in_slurm=bool(job_id),
        job_id=job_id or f"local{started_at_ms}-{pid}",
        node=hostname,
        local_dir=local_folder(environ),
        facts={name: value for name, value in sorted(environ.items()) if name.startswith(ALLOCATED)},
        started_at_ms=started_at_ms,
    )
    if not job_id:
        return base
    return replace(
        base,
        node=node_name(environ, hostname),
        restart=_number(environ, "SLURM_RESTART_COUNT") or 0,
        array_index=_number(environ, "SLURM_ARRAY_TASK_ID"),
        array=_read_array(environ),
        # Only steps have it. SLURM_NTASKS is set in the batch script too, which is one process.
        step_tasks=_number(environ, "SLURM_STEP_NUM_TASKS") or 1,
        procid=_number(environ, "SLURM_PROCID") or 0,
        cpus=_number(environ, "SLURM_CPUS_PER_TASK") or _number(environ, "SLURM_CPUS_ON_NODE"),
    )


def _read_array(environ: Environ) -> ArrayShape | None:
    """Return the shape of this task's array; None without an array, or if its indices are irregular."""
    first, last, count = (_number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT"))
    if first is None or last is None or count is None:
        return None
    shape = ArrayShape(first, _number(environ, "SLURM_ARRAY_TASK_STEP") or 1, count)
    if shape.position_of(last) != count - 1:  # a list such as 1,2,5 has step 1
        return None
    return shape


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name, "").strip()
    number = _whole_number(text)
    if text and number is None:
        raise BadInput(f"{name}={text} is not a whole number from 0", why="Slurm always sets a number here")
    return number


# --- this task's shard ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPlace:
    """The place of this task: ``position`` of ``positions`` in its array, and its number among the tasks of its step.

    A list of manifests has one line per position; only the tasks of one step share a line.
    """

    position: int | None = None  # None: without an array
    positions: int | None = None
    step_index: int = 0
    step_count: int = 1

    @property
    def index(self) -> int:
        """The number of its shard."""
        return (self.position or 0) * self.step_count + self.step_index

    @property
    def count(self) -> int:
        """The number of shards."""
        return (self.positions or 1) * self.step_count


def find_place(allocation: Allocation, frozen: ArrayShape | None) -> ShardPlace:
    """Return the shard of this task; ``frozen`` is the array's shape in run.toml (None: the run has no array)."""
    place = ShardPlace(step_index=allocation.procid, step_count=allocation.step_tasks)
    if allocation.array_index is None:
        return place
    if frozen is None:
        raise _no_shape(allocation)
    position = frozen.position_of(allocation.array_index)
    if position is None:
        raise BadInput(
            f"array index {allocation.array_index} is not part of this run's array {frozen}",
            why="the first task saved the array's shape in run.toml, so that the shards stay the same",
            fix=f"sbatch --array={frozen} …   (or a part of it), or use another --out for a new run",
        )
    return replace(place, position=position, positions=frozen.count)


def _no_shape(allocation: Allocation) -> BadInput:
    """Return why an array task does not know its shard without the shape in run.toml."""
    if allocation.array is None:
        tasks = _number(allocation.facts, "SLURM_ARRAY_TASK_COUNT")
        last = "N" if tasks is None else tasks - 1
        return BadInput(
            "the first index, the step and the count of this array are not known",
            why="the first task of a run computes the shards from them; Slurm does not report those of a list: 1,2,5",
            fix=f"sbatch --array=0-{last} …   (later, you can submit any of these indices again)",
        )
    return BadInput(
        f"array task {allocation.job_id}_{allocation.array_index} cannot join a run that started without an array",
        why="the first task of a run defines the shards; according to run.toml it took all sources",
        fix="badcjobs run … --shard I/N   (I from 0), or another --out for a new run",
    )


# --- memory -----------------------------------------------------------------------------------------------------------

# The variable of each kind of request, in MiB, and the variable with the number of such units on this node.
_REQUESTS = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 2(x3),1: two tasks on each of three nodes, one on the fourth


def requested_memory_bytes(facts: Environ) -> int | None:
    """Return the memory that the job requested; None: not known, or all of the node (--mem=0)."""
    for size_name, count_name in _REQUESTS:
        size_mib = _whole_number(facts.get(size_name, ""))
        if size_mib is None:
            continue
        units: int | None = 1
        if count_name is not None:
            units = _whole_number(facts.get(count_name, ""))
        return size_mib * 2**20 * (units or 0) or None
    return None


def own_memory_bytes(facts: Environ) -> int | None:
    """Return this task's part of the requested memory: the tasks of a step share it on each node."""
    requested_bytes = requested_memory_bytes(facts)
    if requested_bytes is None:
        return None
    return requested_bytes // _tasks_on_this_node(facts)


def _tasks_on_this_node(facts: Environ) -> int:
    """Return how many tasks of the step share this node; 1 outside steps, or if the number is not known."""
    node = _whole_number(facts.get("SLURM_NODEID", "")) or 0
    for tasks, nodes in _TASKS.findall(facts.get("SLURM_STEP_TASKS_PER_NODE", "")):
        node -= int(nodes or 1)
        if node < 0:
            return max(1, int(tasks))
    return 1


def _whole_number(text: str) -> int | None:
    """Return the number; None for any other text, which must not end a job."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        return int(text)
    return None


# --- the end time -----------------------------------------------------------------------------------------------------

END_VARIABLE = "SLURM_JOB_END_TIME"  # only newer versions of Slurm set it
_LONGEST_S = 100 * 366 * 86_400  # a later date is a number that means "no limit"


class EndTime(NamedTuple):
    """The time at which the job must end, and its source."""

    at_ms: int
    source: str


def parse_end(text: str, source: str, now_ms: int) -> EndTime | None:
    """Parse SLURM_JOB_END_TIME, or the output of ``squeue -h -o %e``; None if it has no end time in the future.

    The text has seconds since 1970; NONE, Unknown and N/A mean no end. Slurm sets the variable once, at the start of
    the job, so it can be in the past after ``scontrol update TimeLimit=…``. With several lines (a heterogeneous job, a
    banner) the earliest end counts.
    """
    ends_ms = []
    for line in text.splitlines():
        at_s = _whole_number(line)
        if at_s is not None and now_ms < at_s * 1000 <= now_ms + _LONGEST_S * 1000:
            ends_ms.append(at_s * 1000)
    if not ends_ms:
        return None
    return EndTime(min(ends_ms), source)


# --- the devices granted to this task -------------------------------------------------------------------------------

VISIBLE = {"nvidia": CUDA, "amd": ROCR}  # vendor → the variable that selects its devices
_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the step's list first
_NONE = ("", "-1", "NoDevFiles")  # values that mean: no device


class Grant(NamedTuple):
    """The devices of this task, in the order of their tokens, and the reason."""

    devices: tuple[Device, ...]
    why: str

    def for_work(self) -> Grant:
        """Return the devices that a detector can use; those of other vendors can only be recorded."""
        usable = tuple(device for device in self.devices if device.vendor in VISIBLE)
        why = self.why
        for device in self.devices:
            if device not in usable:
                why += f"; {device.name} can be recorded, but detectors use only NVIDIA and AMD GPUs"
        return Grant(usable, why)


def as_device(token: str, listed: InventoryDevice, why: str) -> Device:
    """Return a device of the inventory as a granted one, or (with an empty token) as one that is not granted."""
    facts = asdict(listed)
    del facts["slice"]
    return Device(token, why, **facts)


def resolve_devices(environ: Environ, inventory: Inventory | None, *, in_slurm: bool) -> Grant:
    """Map the visible tokens to devices; ``inventory`` is None if no reader works."""
    # If Slurm does not know the vendor of its GPUs, it sets the lists of all vendors: CUDA is the most likely one.
    is_amd = CUDA not in environ and (ROCR in environ or HIP in environ)
    numbered = inventory
    if inventory:  # devices of other vendors have no number in these lists
        numbered = [device for device in inventory if device.vendor in VISIBLE] or None
    if numbered:
        is_amd = numbered[0].vendor == "amd"
    grant = None
    if is_amd:
        grant = _read_rocm_lists(environ, numbered)
    elif CUDA in environ:
        grant = _read_list(CUDA, environ[CUDA], numbered)
    variable = ROCR if is_amd else CUDA
    if grant is None:
        grant = _without_list(variable, inventory, in_slurm=in_slurm)
    why = grant.why
    for name in _SLURM_LISTS:
        if environ.get(name) and environ[name] != environ.get(variable):
            why += f"; {name}={environ[name]} is not used: it has the physical numbers of the node"
    return Grant(grant.devices, why)


def _without_list(variable: str, inventory: Inventory | None, *, in_slurm: bool) -> Grant:
    if in_slurm:
        return Grant((), f"inside a Slurm job and {variable} is not set: Slurm granted no GPU")
    if not inventory:
        return Grant((), "no GPU was found on this machine")
    in_mig_mode = {device.parent_uuid for device in inventory}
    devices = []
    for device in inventory:
        if device.uuid in in_mig_mode:
            continue  # programs use the slices of a card in MIG mode
        token = str(device.index)
        if device.parent_uuid is not None:
            token = device.uuid
        why = f"index {device.index} → {device.uuid}; {variable} is not set, outside Slurm: all devices"
        devices.append(as_device(token, device, why))
    return Grant(tuple(devices), f"{variable} is not set and this is not a Slurm job: all devices of the machine")


# --- lists of devices -------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"[0-9]+|(GPU|MIG)-.+")
_SLICE = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+/[0-9]+)")  # the name of a slice that Slurm may use


def _read_rocm_lists(environ: Environ, inventory: Inventory | None) -> Grant | None:
    """Return the devices that both lists leave; None: there is no list."""
    hip = HIP if HIP in environ else CUDA
    if ROCR not in environ:
        return _read_list(hip, environ[hip], inventory) if hip in environ else None
    outer = _read_list(ROCR, environ[ROCR], inventory)
    if hip not in environ:
        return outer

    def look_up(token: str) -> Device | None:
        """Return a device of the outer list; a number is a position in it."""
        for position, device in enumerate(outer.devices):
            if token in (str(position), device.uuid):
                return replace(device, why=f"token {token} of {hip} → {device.why}")
        return None

    inner = _follow_list(hip, environ[hip], look_up)
    return Grant(inner.devices, f"{outer.why}; {inner.why}")


def _read_list(variable: str, value: str, inventory: Inventory | None) -> Grant:
    return _follow_list(variable, value, lambda token: _look_up(token, variable, inventory))


def _follow_list(variable: str, value: str, look_up: Callable[[str], Device | None]) -> Grant:
    """Return the devices up to the first token that is not a device, as CUDA and ROCm do."""
    if value.strip() in _NONE:
        return Grant((), f"{variable}={value!r} grants no device")
    devices: list[Device] = []
    why = f"{variable}={value}"
    for token in map(str.strip, value.split(",")):
        device = look_up(token)
        if device is None:
            why += f" stops at {token!r}, which is not a device here"
            break
        if any(device.pin == earlier.pin for earlier in devices):
            return Grant((), f"{variable}={value} contains {token} twice: programs then see no device")
        devices.append(device)
    return Grant(tuple(devices), why)


def _look_up(token: str, variable: str, inventory: Inventory | None) -> Device | None:
    if not _TOKEN.fullmatch(token):
        return None
    if inventory is None:
        vendor = "nvidia" if variable == CUDA else "amd"
        return Device(token, f"token {token}, from {variable}; not looked up: no driver library", vendor=vendor)
    device = _find(token, inventory)
    if device is None:
        return None
    way = f"token {token} → index {device.index} → {device.uuid}"
    for listed in inventory:
        if listed.parent_uuid == device.uuid:
            return as_device(token, listed, f"{way}, in MIG mode: its first slice → {listed.uuid}, from {variable}")
    return as_device(token, device, f"{way}, from {variable}")


def _find(token: str, inventory: Inventory) -> InventoryDevice | None:
    if token.isdecimal():
        # A card comes before its slices, which have the same index.
        return next((device for device in inventory if device.index == int(token)), None)
    matches = [device for device in inventory if device.uuid.startswith(token)]
    if slice_name := _SLICE.fullmatch(token):
        slices = [device for device in inventory if device.slice == slice_name[2]]
        matches = [device for device in slices if device.parent_uuid == slice_name[1]]
    return matches[0] if len(matches) == 1 else None
