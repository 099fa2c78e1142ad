"""What Slurm gave this process: its GPUs, its shard, its memory, its time, and what may still be started in it."""

import re
import shlex
from dataclasses import asdict, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import devices as room
from rooms.model import Allocation, ArrayShape, Device, InventoryDevice, parse_stop_after
from rooms.root import BadInput, SystemClock
from rooms.task import Rates, TimeBudget, find_end
from rooms.workers import Autoscaler, Learned, Meter
from support.cases import read_data
from support.hand_clock import HandClock
from support.stand_ins import install
from support.task_files import make_chunk

NOW_MS = 1_800_000_000_000  # 2027-01-15T08:00:00Z


def parse(**environ):
    return room.parse_allocation(environ, hostname="login1", pid=42, started_at_ms=NOW_MS)


def array_task(index, indices, **others):
    shape = zip(("ID", "MIN", "MAX", "STEP", "COUNT"), map(str, (index, *indices)), strict=False)
    variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in shape}
    return parse(SLURM_JOB_ID=str(4821 + index), SLURM_ARRAY_JOB_ID="4821", **variables, **others)


_HEAD, *PARTS = read_data("slurm_variables.txt").split("\n\n[")
CASES = {part.partition("]")[0]: part.splitlines()[1:] for part in PARTS}


def environ_of(line):
    pairs = [word.split("=") for word in line.split()]
    return {name[1:] if name[0] == "." else f"SLURM_{name}": value for name, value in pairs}


def test_an_allocation_is_what_slurm_gave_and_outside_slurm_the_machine(pages):
    said = []
    for line in CASES["allocations"]:
        try:
            found = parse(**environ_of(line))
        except BadInput as refused:
            said += [line, f"  {refused.what}"]
        else:
            known = [f"{field.name}={getattr(found, field.name)}" for field in fields(found) if field.name != "facts"]
            facts = [f"    {name}={value}" for name, value in found.facts.items()]
            said += [line, f"  {found.key.name}: {', '.join(known)}", *facts]
    memory = []
    for line in CASES["memory"]:
        sizes = [size(environ_of(line)) for size in (room.requested_memory_bytes, room.own_memory_bytes)]
        whole, own = (one and one // 2**20 for one in sizes)
        memory.append(f"{line}: {whole} MiB, of which {own} are for this task of the step")
    pages({"allocations.txt": "\n".join(said), "memory.txt": "\n".join(memory)})


def test_two_runs_inside_one_job_have_one_name_and_two_ids():
    for environ, same_name in (({"SLURM_JOB_ID": "77"}, True), ({"SLURM_ARRAY_JOB_ID": "77"}, True), ({}, False)):
        one, other = (room.parse_allocation(environ, hostname="n", pid=42, started_at_ms=ms) for ms in (1, 2))
        assert one.key.task_id != other.key.task_id
        assert (one.key == other.key) is same_name is room.is_in_slurm(environ)


@settings(max_examples=60)
@given(first=st.integers(0, 50), step=st.integers(1, 9), count=st.integers(1, 12), tasks=st.integers(1, 5))
def test_all_tasks_of_all_steps_share_the_source_exactly(first, step, count, tasks):
    last = first + (count - 1) * step
    places = []
    for position, index in enumerate(range(first, last + 1, step)):
        for procid in range(tasks):
            more = {"SLURM_PROCID": str(procid), "SLURM_STEP_NUM_TASKS": str(tasks)}
            allocation = array_task(index, (first, last, step, count), **more)
            shape = allocation.array
            assert shape == ArrayShape(first, step, count)
            place = room.find_place(allocation, shape)
            assert place == room.ShardPlace(position, count, procid, tasks) and place.count == count * tasks
            again = array_task(index, (index, index, 1, 1), **more)  # submitted again, alone
            assert room.find_place(again, shape) == place
            places.append(place.index)
    assert places == list(range(count * tasks))


def test_without_an_array_the_tasks_of_the_step_are_the_shards_and_an_array_task_without_one_is_refused(pages):
    for frozen in (None, ArrayShape(0, 1, 8)):
        for allocation in (parse(), parse(SLURM_JOB_ID="77")):
            assert room.find_place(allocation, frozen) == room.ShardPlace()
    third = room.find_place(parse(SLURM_JOB_ID="7", SLURM_STEP_NUM_TASKS="3", SLURM_PROCID="2"), None)
    assert (third.index, third.count, third.position) == (2, 3, None)
    said = []
    for line in CASES["refused"]:
        name, numbers = line.rsplit(": ", 1)
        (index, *indices), (*frozen,) = (map(int, part.split()) for part in f"{numbers} | ".split(" | ")[:2])
        with pytest.raises(BadInput) as refused:
            room.find_place(array_task(index, indices), ArrayShape(*frozen) if frozen else None)
        said += [f"[{name}]", str(refused.value), ""]
    pages({"refused.txt": "\n".join(said)})
    assert array_task(3, (3, 7, 1, 2)).array is None
    assert array_task(5, (5, 5, 0, 1)).array == ArrayShape(5, 1, 1)


def test_the_end_of_the_time_is_read_as_slurm_writes_it(pages):
    said = [f"--stop-after {text!r}: {parse_stop_after(text)} s" for text in ["", *CASES["stop after"]]]
    found = {text: room.parse_end(text.replace("\\n", "\n"), "squeue", NOW_MS) for text in ["", *CASES["ends"]]}
    for text, end in found.items():
        said.append(f"end {text!r}: {end and f'{end.source}, in {(end.at_ms - NOW_MS) / 1000} s'}")
    pages({"times.txt": "\n".join(said)})


def test_the_user_says_when_the_time_ends_else_slurms_variable_else_squeue_once(tmp_path):
    program, calls = tmp_path / "squeue", tmp_path / "calls"

    def ask(answer, stop_after=None, index=0, **facts):
        """Return the end that was found, and how squeue was called."""
        install(program, f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {calls}\n{answer}\n')
        calls.write_text("")
        allocation = Allocation("outside" not in facts, "4821", "gpu3", array_index=index, facts=facts)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_TIME_FORMAT": "relative"}
        return find_end(stop_after, allocation, environ, NOW_MS), calls.read_text().splitlines()

    called, hour, in_two_hours = ["%s -h -j 4821_0 -o %e"], "echo 1800003600", {"SLURM_JOB_END_TIME": "1800007200"}
    by_squeue = room.EndTime(NOW_MS + 3_600_000, "squeue")
    assert ask(hour, "1:00", **in_two_hours) == (room.EndTime(NOW_MS + 60_000, "run.stop_after"), [])
    assert ask(hour, **in_two_hours) == (room.EndTime(NOW_MS + 7_200_000, "SLURM_JOB_END_TIME"), [])
    assert ask(hour) == ask(hour, SLURM_JOB_END_TIME="1799999000") == (by_squeue, called)
    assert ask(hour, index=None) == (by_squeue, ["%s -h -j 4821 -o %e"])
    assert ask(hour, outside="Slurm") == (None, [])
    for answer in ("echo NONE", "echo slurmctld is down >&2; exit 1", "kill -9 $$"):
        assert ask(answer) == (None, called), answer
    program.write_bytes(b"\x7fELF, or nearly")
    for path in (f"{tmp_path}", "/nowhere"):
        assert find_end(None, Allocation(True, "4821", "gpu3"), {"PATH": path}, NOW_MS) is None


def budget_of(seconds, *work, gone=0):
    """Return a budget, some seconds of which are gone, that has learned from this work; 20 s are for publishing."""
    clock = HandClock()
    budget = TimeBudget(room.EndTime(clock.now_ms() + round(seconds * 1000), "run.stop_after"), clock)
    budget.learn(lambda limit: work)
    clock.sleep(gone)
    return budget, clock


def test_work_may_start_if_it_fits_with_a_margin_before_publishing():
    for whole_s, gone_s, takes_s, may in (
        (3600, 0, 0.1, True), (3600, 0, 3254, True), (3600, 0, 3255, False),  # a margin of a tenth
        (3600, 3574, 1.0, True), (3600, 3575, 1.0, False), (3600, 3579, None, True), (3600, 3580, None, False),  # 5 s
        (5, 3, 0.3, True), (5, 4, 0.3, False), (0, 0, None, False), (-5, 0, 0.0, False),  # less of a short time
    ):  # fmt: skip
        budget, _ = budget_of(whole_s, gone=gone_s)
        assert budget.may_start(takes_s, takes_s or 0.0) is may, (whole_s, gone_s, takes_s)
    budget, clock = budget_of(3600)
    seen = []
    for pause_s in (0, 3579, 1):
        clock.sleep(pause_s)
        seen.append((budget.left_s, budget.over, budget.out_of_time, budget.is_news, budget.is_news))
    assert seen == [(3580, False, False, False, False), (1, False, False, False, False), (0, True, True, True, False)]


def test_the_rate_of_a_device_is_the_slowest_but_one_in_twenty_of_its_own_chunks():
    assert Rates().expected_s(1, 30.0) is None
    rates = Rates([(1, 30.0, 3.0), (1, 60.0, 6.0), (2, 30.0, 30.0)])
    assert [rates.expected_s(device, 600.0) for device in (1, 2, 3)] == pytest.approx([60, 600, 600])
    work = [(1, 10.0, 1.0)] * 95 + [(1, 10.0, 100.0)] * 5
    assert Rates(work).expected_s(1, 10.0) == pytest.approx(1.0)
    assert Rates([*work, (1, 10.0, 100.0)]).expected_s(1, 10.0) == pytest.approx(100.0)
    assert Rates([(1, None, 4.0), (1, None, 2.0)]).expected_s(1, 30.0) == 4.0, "the length is not known"
    assert Rates([(1, 30.0, 3.0), (1, 300.0, 30.0)]).expected_s(1, None) == 30.0
    looks = []
    budget, clock = budget_of(3600)
    for _ in range(30):
        clock.sleep(0.1)
        budget.learn(lambda limit: looks.append(limit) or [])
    assert looks == [200] * 3, "no more than once a second"


def accepted(budget, in_hand, lanes, *offered):
    """Return which chunks are accepted, one after the other, by a worker with some in hand: seconds → begun at."""
    hand = [(make_chunk("h", seconds=seconds), at_ms) for seconds, at_ms in in_hand.items()]
    fits = budget.fit_test(1, hand, lanes)
    return [fits(make_chunk("c", seconds=seconds)) for seconds in offered]


def test_a_worker_gets_only_what_it_finishes_after_what_it_has():
    realtime = (1, 1.0, 1.0)
    unlimited = TimeBudget(None, HandClock())
    unlimited.learn(lambda limit: pytest.fail("no one needs to know"))
    assert accepted(unlimited, {}, 1, 1e9) == [True] and not unlimited.over
    budget, _ = budget_of(3600, realtime)
    assert accepted(budget, {}, 1, 1700, 1700) == [True, True] and not budget.out_of_time
    assert accepted(budget, {}, 1, 36_000, 300) == [False, True] and budget.out_of_time
    assert accepted(budget, {1200: None}, 1, 1201, 1202) == [True, False]
    assert accepted(budget, {}, 2, *[1700] * 5) == [True] * 4 + [False]
    assert accepted(budget, {}, 0, 1700, 1700, 1700) == [True, True, False], "a worker has one lane at least"
    unknown, clock = budget_of(3600, gone=3570)
    assert accepted(unknown, {30: None}, 1, 30, 30) == [True, True]
    clock.sleep(20)
    assert accepted(unknown, {}, 1, 30) == [False]
    begun_ms = HandClock().now_ms()  # of a chunk that was begun only the rest counts, and it keeps its lane
    budget, clock = budget_of(3600, (1, 1.0, 1.0), gone=1000)
    assert accepted(budget, {1500: None}, 1, 1500) == [False]
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(800)  # it is late, and may end at any time
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(200)
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [False], "1580 s are left"
    budget, _ = budget_of(3600, (1, 1.0, 1.0), gone=500)  # 3080 s left; those begun take 100 s and 1500 s more
    in_hand = {1000: None, 600: begun_ms, 2000: begun_ms}
    assert accepted(budget, in_hand, 2, 1750) == [True], "it begins in 1100 s"
    assert accepted(budget, in_hand, 2, 1850) == [False], "in 1000 s no lane is free"


# Lists of tokens are read as CUDA and ROCm read them.
CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
# The cards A to D; s and t are slices of B, u is one of C.
A, B, C, D = (f"GPU-{name}-0000-4000-8000-000000000000" for name in ("aaaa1111", "aaaa2222", "bbbb3333", "cccc4444"))
S, T, U = (f"MIG-{name}-0000-5000-8000-000000000000" for name in ("eeee6666", "eeee7777", "ffff8888"))
AMD = [f"GPU-{number:016x}" for number in (0xAA11, 0xAA22, 0xBB33, 0xCC44)]
UUIDS = dict(zip("ABCDstu", (A, B, C, D, S, T, U), strict=True))
LETTERS = {uuid: letter for letter, uuid in (*UUIDS.items(), *zip("ABCD", AMD, strict=True))}


def card(index, uuid):
    return InventoryDevice(index, uuid, "V100", "nvml", memory_total_bytes=16 * 2**30)


def cut(index, parent, uuid, instance, driver="580.65"):
    memory_bytes, name = 18 * 2**30, "MIG 1g"
    facts = {"parent_uuid": parent, "slice": instance, "driver": driver, "memory_total_bytes": memory_bytes}
    return InventoryDevice(index, uuid, name, "nvml", **facts)


NODE = tuple(card(index, uuid) for index, uuid in enumerate((A, B, C, D)))
MIG_NODE = (*NODE[:2], cut(1, B, S, "1/0"), cut(1, B, T, "2/0"), NODE[2], cut(2, C, U, "1/0"), NODE[3])
AMD_NODE = tuple(InventoryDevice(i, uuid, "MI250X", "amd", vendor="amd") for i, uuid in enumerate(AMD))


def resolve(environ, node=NODE, *, in_slurm=True):
    return room.resolve_devices(environ, node, in_slurm=in_slurm)


DEVICES = {
    "four cards": NODE, "one is lost": (NODE[0], *NODE[2:]), "none": (), "no reader": None, "slices": MIG_NODE,
    "two cards of a cgroup": (card(0, C), card(1, D)),
    "slices of two cards": (card(0, A), cut(0, A, S, "1/0"), cut(0, A, T, "2/0"), card(1, B), cut(1, B, U, "1/0")),
    "a slice without its card": (card(4, S),),
    "an old driver": (NODE[1], cut(1, B, S, "1/0", driver="460.32.03")),  # takes no UUIDs of slices
    "four AMD cards": AMD_NODE, "one fell off the bus": AMD_NODE[1:],
    "a UUID that is not ROCm's": (InventoryDevice(1, "74ff74a1-0000-1000-80aa-0000", "MI250X", "amd", vendor="amd"),),
}  # fmt: skip
NAMES = {"CUDA": CUDA, "ROCR": ROCR, "HIP": HIP, "NVIDIA": "NVIDIA_VISIBLE_DEVICES"}


def test_lists_are_read_the_way_cuda_and_rocm_read_them_and_every_grant_says_why(pages):
    """Each letter is a device; a line per device says what its workers are shown, and why."""
    said = {}
    for part in read_data("visible_devices.txt").split("\n\n[")[1:]:
        head, *cases = part.strip().splitlines()
        page, name, where = re.fullmatch(r"(\S+): (.*), (\w+)\]", head).groups()
        lines = said.setdefault(page, [])
        lines.append(f"## {name}, {where} Slurm")
        for case in cases:
            pairs = [word.split("=", 1) for word in shlex.split(case) if word != "nothing"]
            environ = {NAMES.get(key, f"SLURM_{key}"): value.format(**UUIDS) for key, value in pairs}
            grant = resolve(environ, DEVICES[name], in_slurm=where == "inside")
            letters = "".join(LETTERS.get(device.uuid or "", "?") for device in grant.devices)
            lines += [f"{case} → {letters or '–'}", f"  {grant.why}"]
            lines += [f"    {device.vendor} {device.pin}: {device.why}" for device in grant.devices]
    pages({page: re.sub("-0000-[45]000-8000-0{12}", "-…", "\n".join(lines)) for page, lines in said.items()})
    tokens = [device.token for device in resolve({}, MIG_NODE, in_slurm=False).devices]
    again = resolve({CUDA: ",".join(tokens[1:4])}, MIG_NODE).devices
    assert [LETTERS[device.uuid or ""] for device in again] == ["s", "t", "u"], "a token finds its slice"


def test_a_granted_device_carries_all_that_a_reader_found():
    found = InventoryDevice(
        0, A, "H200", "nvml", "1/0", memory_total_bytes=9, power_limit_w=700.0, pci_bus_id="00000000:18:00.0",
        driver="580.65", slowdown_c=90, memory_reserved_bytes=2, parent_uuid=B, exclusive=True,
    )  # fmt: skip
    [device] = resolve({CUDA: "0"}, (found,)).devices
    known = asdict(found)
    del known["slice"]
    assert device == Device("0", f"token 0 → index 0 → {A}, from {CUDA}", **known)
    [unread] = resolve({CUDA: "1"}, None).devices
    assert (unread.uuid, unread.index, unread.backend) == (None, None, "none")


ODD = "GPU-aaaa,GPU-b,x,, ,MIG-eeee7,MIG-eeee,NoDevFiles"
full = [A, B, C, D, S, T, U, f"MIG-{B}/1/0", f"MIG-{C}/1/0"]
tokens = st.integers(-1, 5).map(str) | st.sampled_from(full) | st.sampled_from(ODD.split(","))
inventories = st.sampled_from([NODE, MIG_NODE, AMD_NODE, (NODE[0], NODE[3]), (), None])
lists = st.lists(tokens, max_size=8).map(",".join)
environments = st.dictionaries(st.sampled_from([CUDA, ROCR, HIP]), lists)
other_names = ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES"]
others = lists | st.sampled_from(["all", "none", "void", "a100:1", "v100:1,a100:1"])
explaining = st.dictionaries(st.sampled_from(other_names), others)


@settings(max_examples=150)
@given(environments, explaining, inventories, st.booleans(), st.integers(1, 3), st.integers(1, 5) | st.none())
def test_no_list_grants_a_device_twice_or_one_that_is_not_here(environ, others, node, in_slurm, per_gpu, most):
    grant = resolve(environ, node, in_slurm=in_slurm)
    devices = grant.devices
    assert resolve({**environ, **others}, node, in_slurm=in_slurm).devices == devices, "Slurm's lists only explain"
    assert grant.why and all(device.why for device in devices)
    if node is not None:
        assert {device.uuid for device in devices} <= {device.uuid for device in node}
    given = list(enumerate(devices))[:most]
    meter = Meter(None, SystemClock(), {}.get, lambda: None)
    usual = {"chunk_s": None, "exclusive": False, "cores_each": None, "memory_per_worker": None}
    plans = Autoscaler(given, meter, Learned("", ()), print, cpus=8, per_gpu=per_gpu, cpu_workers=0, **usual).plans
    shown = [plan.device.pin for plan in plans if plan.device is not None]
    simplest = [str(int(pin)) if pin.isdecimal() else pin.lower() for pin in shown]
    assert len(shown) == len(plans)
    assert {simplest.count(pin) for pin in simplest} <= {per_gpu}
    assert len(set(simplest)) == min(len(devices), most or len(devices))
    if set(environ) == {CUDA} and node != AMD_NODE:
        assert [device.token for device in devices] == list(map(str.strip, environ[CUDA].split(",")))[: len(devices)]
