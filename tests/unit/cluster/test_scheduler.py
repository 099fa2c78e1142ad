"""The emulation with small shell scripts: variables, order, limits, signals, requeues, what is left; and the scripts
of an order, under Slurm and here.
"""

import json
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
from rooms import cluster
from rooms.devices import DeviceLocks
from rooms.model import ArrayOrder, Device, StandIn, Submitted
from rooms.root import BadInput, SystemClock
from rooms.task import StopRequest, World
from support.brief import page
from support.cases import read_lines
from support.task_files import TaskFile
from support.waiting import wait_for


class QuickClock(SystemClock):
    """A clock of which a minute takes two seconds: no time limit of Slurm is shorter than a minute."""

    def monotonic_s(self):
        return super().monotonic_s() * 30


class Place:
    """A machine of four devices and eight cores for one test."""

    def __init__(self, folder, clock=None):
        self.folder, self.tmp, self.clock = folder, folder / "tmp", clock or SystemClock()
        self.tmp.mkdir(parents=True)
        self.said, self.job_id, self.stop = list[str](), "", StopRequest(self.clock.monotonic_s)
        locks = {"BADCJOBS_LOCK_DIR": str(folder.parent / "locks")}
        self.environ = {"PATH": os.environ["PATH"], "TMPDIR": str(self.tmp), "MINE": "yes", **locks}

    def here(self, devices=4, **settings):
        known = cluster.LocalSettings(**{"stand_in": StandIn(simulate=devices), "kill_wait_s": 10.0, **settings})
        world = World(self.environ, self.clock, self.stop, "here", os.getpid(), self.folder, 8)
        return known, world, self.said.append

    def machine(self, **settings):
        return cluster.LocalMachine(*self.here(**settings), lambda out: None)

    def run(self, *lines, options=(), **settings):
        self.said.clear()
        script = "\n".join(["#!/bin/sh", *lines, ""])
        machine = self.machine(**settings)
        self.job_id = machine.run_script(script, "job.sh", options, self.folder / "run").job_id
        rows = machine.rows
        assert list(self.tmp.iterdir()) == [], "nothing stays in the machine's folder"
        assert not [process for process in psutil.process_iter() if self._is_ours(process)], "no one is left"
        return rows

    def _is_ours(self, process):
        with suppress(psutil.Error):
            return process.environ().get("TMPDIR") == self.environ["TMPDIR"] and process.status() != "zombie"
        return False

    def plain(self, text):
        """Return a text without what differs from run to run."""
        text = re.sub(r"after \d+ s", "after SECONDS", re.sub(r"_TIME=\d+", "_TIME=SECONDS", text))
        for number in (2, 1, 0):
            text = text.replace(str(int(self.job_id) + number), f"JOB+{number}" if number else "JOB")
        text = re.sub(rf"([=-]){psutil.Process().username()}\b", r"\1USER", text.replace(str(self.folder), "FOLDER"))
        return re.sub(r"-\d+/", "-PID/", re.sub(r"(slurm-emulation-JOB)-\w+", r"\1", text))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "machine")


def test_a_task_has_slurms_own_variables_and_nothing_of_an_outer_job(place, pages):
    foreign = ("SLURM_STEP_NUM_TASKS", "SBATCH_ACCOUNT", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "SRUN_X")
    place.environ |= dict.fromkeys(foreign, "9")
    dump = "env | grep -vE '^(PATH|_|SHLVL|OLDPWD|BADCJOBS_LOCK_DIR)=' | sort"
    dump += "; ls $SLURM_TMPDIR && touch $SLURM_TMPDIR/x"
    array = place.run(
        "#SBATCH --array=3-9:3 --gpus-per-node=2 -c2 -n2 -J probe --time=60 --mem=4G",
        f"{dump}; echo $((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME))",
        devices=6,
    )  # fmt: skip
    texts = {row.index: row.log.read_text() for row in array}
    said = {f"task-{i}.txt": place.plain(texts[i]) for i in (3, 9)}
    assert len({re.findall(r"CUDA_VISIBLE_DEVICES=.*", text)[0] for text in texts.values()}) == 3
    options = ("-o", "%x-%j-%%-%N-%a-%A.log")
    (one,) = place.run(dump, "pwd; echo no >&2", options=options)
    pages({**said, "log-name.txt": place.plain(str(one.log)), "no-array.txt": place.plain(one.log.read_text())})


def test_a_task_sees_its_devices_in_its_vendors_list():
    cards = [Device(str(i), "", index=i, uuid=f"GPU-{i:04d}") for i in range(2)]
    piece = Device("MIG-GPU-7/1/0", "", index=0, uuid="MIG-0007", parent_uuid="GPU-7", driver="535.1")
    amd = Device("1", "", index=1, uuid="GPU-0123456789abcdef", vendor="amd")
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cluster.visible_lists(cards) == {"CUDA_VISIBLE_DEVICES": "0,1", **order}
    assert cluster.visible_lists([piece, cards[0]]) == {"CUDA_VISIBLE_DEVICES": "MIG-0007,GPU-0000", **order}
    assert cluster.visible_lists([amd]) == {"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}
    assert cluster.visible_lists([]) == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "", **order}


def test_devices_array_and_cores_limit_how_many_run_and_it_is_said_where_cores_do(tmp_path, pages):
    said = []
    for number, head in enumerate(read_lines("array_heads.txt")):
        place, (options, line, most, settings) = Place(tmp_path / f"{number}"), head.split(" | ")
        meet = f"touch up-$SLURM_ARRAY_TASK_ID; until [ $(ls up-* | wc -l) -ge {most} ]; do sleep 0.01; done"
        rows = place.run(f"#SBATCH {options}", line.replace("MEET", f"{{ {meet}; }}"), **json.loads(settings))
        assert {row.state for row in rows} == {"COMPLETED"}, place.said
        running = max(int(many) for one in place.said for many in re.findall(r"(\d+) running", one))
        assert running == int(most) or line == "true", head
        said += [f"{options} → at most {most}", *(place.plain(one) for one in place.said if " ended" not in one)]
    pages({"said.txt": "\n".join(said)})


def make_pool(folder, count, who, *, share=False):
    devices = [Device(str(i), "", index=i, uuid=f"GPU-{i:04d}") for i in range(count)]
    return cluster.DevicePool(devices, lambda: DeviceLocks(folder, SystemClock(), who), share=share)


def tokens(lent):
    return None if lent is None else ",".join(device.token for device in lent)


def test_a_device_is_lent_once_and_other_runs_of_the_machine_get_what_is_left_whole_or_nothing(tmp_path):
    one, other = (make_pool(tmp_path / "locks", 4, who) for who in ("one", "two"))
    assert one.take(0) == () and not (tmp_path / "locks").exists()
    first = one.take(2)
    assert [tokens(first), other.take(3), tokens(one.take(1)), one.take(2)] == ["0,1", None, "2", None]
    assert one.refusals == [], "no one else has them"
    assert other.take(2) is None
    assert other.refusals == [f"GPU {n} is locked by one" for n in (0, 1, 2)]
    last = other.take(1)
    assert tokens(last) == "3" and len(other.lock_files(last or ())) == 1
    one.give_back(first or ())
    assert [tokens(other.take(2)), one.take(1)] == ["0,1", None]
    shared, third = make_pool(tmp_path / "more", 2, "one", share=True), make_pool(tmp_path / "more", 2, "three")
    lent = [shared.take(1) for _ in range(5)]
    assert [tokens(one) for one in lent] == ["0", "1", "0", "1", "0"], "the least used"
    shared.give_back([one[0] for one in lent[:4] if one])
    assert [tokens(third.take(1)), third.take(1)] == ["1", None]
    known, world, _ = Place(tmp_path / "machine").here(devices=2)
    pools = [cluster.open_pool(2, known.stand_in, world, tmp_path, share=False) for _ in range(2)]
    assert [tokens(pool.take(2)) for pool in pools] == ["0,1", "0,1"], "simulated devices are not locked"
    unknown = cluster.DevicePool([Device("0", "")], lambda: DeviceLocks(tmp_path / "x", SystemClock(), ""))
    assert [tokens(unknown.take(1)), unknown.take(1)] == ["0", None], "without a lock"


# What each task of one array does, by its index.
WAYS = """
r=${SLURM_RESTART_COUNT:-0}
echo restart $r $(ls $SLURM_TMPDIR | wc -l); touch $SLURM_TMPDIR/x
case $SLURM_ARRAY_TASK_ID in
1) exit 1 ;;
2) kill -9 $$ ;;
3) [ $r -ge 2 ] || exit 75 ;;
4) exit 75 ;;
5) mv FOLDER/db-$r RUN/${SLURM_ARRAY_JOB_ID}_5.r$r.here.sqlite; exit 75 ;;
7) echo twin > $BADCJOBS_NO_RESTART; exit 75 ;;
6) setsid sleep 300 & env -i setsid sleep 300 & sleep 0.2; env -i sleep 300 & exit 0 ;;
esac
"""


def end_of(row):
    return f"{row.index}: {row.state} {row.exit_code} after {row.restarts} restarts: {row.note}"


def test_every_task_ends_in_its_own_way_and_is_started_again_only_where_that_helps(place, pages):
    tasks = place.folder / "run" / "tasks"
    for restart, status in enumerate(("done", "pending")):
        TaskFile(place.folder / f"{restart}", states={"c0": status}).write().rename(place.folder / f"db-{restart}")
    tasks.mkdir(parents=True)
    way = WAYS.replace("FOLDER", str(place.folder)).replace("RUN", str(tasks))
    rows = place.run("#SBATCH --array=0-7 --open-mode=append", way, max_requeues=3)
    attempts = [f"  {row.index}: {[(end['state'], end['slurm_exit_code']) for end in row.ends]}" for row in rows]
    logs = [f"  {row.index}: {row.log.read_text().split(chr(10))}" for row in rows]
    said = [place.plain("\n".join([*map(end_of, rows), *attempts, *logs]))]
    assert place.said[-1].endswith("; 8 of 8 ended, 0 running, 0 waiting")
    for name, line, settings in (("as Slurm", "", {}), ("not wanted", "#SBATCH --no-requeue", {"max_requeues": 3})):
        (row,) = place.run(line, "echo ${SLURM_RESTART_COUNT:-0}; exit 75", **settings)
        said.append(f"{name}: {place.plain(end_of(row))}")
    (over,) = place.run("echo ${SLURM_RESTART_COUNT:-0}; [ ${SLURM_RESTART_COUNT:-0} = 1 ] || exit 75", max_requeues=1)
    assert over.log.read_text() == "1\n", "without append the second attempt writes over the first log"
    pages({"ends.txt": "\n".join(said)})


def test_a_time_limit_warns_the_script_then_terminates_everybody_then_kills(tmp_path):
    place = Place(tmp_path / "machine", QuickClock())
    (row,) = place.run(
        "#SBATCH --time=0:02 --signal=B:USR1@30",
        "trap 'echo warned' USR1; trap 'echo reported' TERM",
        "(trap 'echo child reported; exit' TERM; while :; do sleep 0.1; done) &",
        "setsid sh -c \"trap '' TERM; echo deaf > deaf; while :; do sleep 0.1; done\" &",
        "while :; do sleep 0.1; done",
        kill_wait_s=30.0,
    )  # fmt: skip
    assert (row.state, row.exit_code, row.ends[0]["slurm_exit_code"]) == ("TIMEOUT", 137, "0:9")
    first, *others = row.log.read_text().splitlines()
    assert (first, {"reported", "child reported"} <= {*others}, (place.folder / "deaf").exists()) == (
        "warned",
        True,
        True,
    )


def test_one_signal_ends_every_task_in_order_a_second_one_at_once(tmp_path, pages):
    said, wait = {}, "touch up; while :; do sleep 0.05; done"
    for name, script, steps in (
        ("INT", f"trap 'exit 75' TERM; {wait}", {"up": signal.SIGINT}),
        ("INT twice", f"trap 'touch stopping' TERM; {wait}", {"up": signal.SIGINT, "stopping": signal.SIGINT}),
        ("USR1", f"trap 'exit 75' USR1; {wait}", {"up": signal.SIGUSR1}),
    ):  # fmt: skip
        place = Place(tmp_path / name)

        def send(place=place, steps=steps):
            for mark, number in steps.items():
                wait_for((place.folder / mark).exists, mark)
                place.stop.receive(number)

        thread = threading.Thread(target=send)
        thread.start()
        rows = place.run("#SBATCH --array=0-2%1 --open-mode=append", script)
        thread.join()
        assert [row.log.exists() for row in rows] == [True, False, False]
        heard = [line for line in place.said if line.startswith("SIG")]
        said[name] = [place.plain(text) for text in (*map(end_of, rows), *heard)]
    pages({"ends.txt": page(said)})


def test_what_cannot_be_run_is_refused_or_fails_with_its_reason(place):
    with pytest.raises(BadInput) as refused:
        place.run("#SBATCH --output=logs/%A_%a.out", "true")
    assert refused.value.fix == f"mkdir -p {place.folder / 'logs'}"
    place.environ["TMPDIR"] = "/nowhere"
    with pytest.raises(BadInput, match="cannot create a folder for the emulation in /nowhere"):
        place.run("true")
    place.environ["TMPDIR"] = str(place.tmp)
    assert list(place.tmp.iterdir()) == []
    place.environ["PATH"] = "/no/such"
    (row,) = place.run()
    assert (row.state, "No such file or directory: 'bash'" in row.note) == ("FAILED", True)
    first = place.job_id
    place.run("#SBATCH --mem=4G")
    assert place.job_id > first, "two jobs of the same second have different numbers"


def test_their_scripts_ask_for_what_was_ordered(place, pages):
    out, schedulers = place.folder / "my run", {"slurm": cluster.array_script, "local": cluster.script_of}
    order = ArrayOrder(
        out=out, run_arguments=("run", "/data/manifest.csv", "--out", str(out), "--engine", "demo"), tasks=5, first=1,
        step=2, parallel=4, gpus_per_task=2, cpus=6, mem="12G", time_min=90, warning_s=60, account="st-x-1-gpu",
        constraint="v100", merge_account="st-x-1", extra_sbatch={"qos": "high", "exclusive": True, "partition": "gpu"},
        setup=("module load gcc cuda",),
    )  # fmt: skip
    less = {"gpus_per_task": 0, "cpus": None, "account": None, "constraint": None, "extra_sbatch": {}}
    said = {}
    for name, script_of in schedulers.items():
        said[f"{name}.txt"] = script = script_of(order)
        assert script == script_of(order)
        said[f"{name}-part.txt"] = script_of(replace(order, only=(3, 9), **less))
        request = cluster.read_script_request(script.replace("#SBATCH --exclusive\n", ""))
        assert request.array is not None
        assert (request.array.indices, request.array.parallel) == (order.indices, 4)
        asked = request.asked
        assert (asked.gpus_per_task, asked.cpus, asked.time_s, asked.memory_gb_per_node) == (2, 6, 5400, 12)
    said["merge.txt"] = cluster.merge_script(order)
    said["merge-plain.txt"] = cluster.merge_script(replace(order, merge_account=None, extra_sbatch={}))
    job = Submitted("4821", "4822", order.indices)
    said["lines.txt"] = cluster.Slurm().cancel_line(job)
    assert [*place.folder.iterdir()] == [place.tmp], "nothing is written"
    for name in ("100%", "a\nb"):
        with pytest.raises(BadInput, match="has a % or a line break in its name"):
            cluster.array_script(replace(order, out=place.folder / name))
    plain = {name: text.replace(str(place.folder), "FOLDER") for name, text in said.items()}
    pages({name: text.replace(sys.executable, "PYTHON").replace("PYTHON -P", "PYTHON") for name, text in plain.items()})


def test_the_emulation_runs_an_order_in_any_folder_and_writes_the_states_of_its_tasks(place):
    out, setup = place.folder / "a run 100%", ("export X='a b'", 'echo "$X"; exit')
    order = ArrayOrder(out, ("run", "july.csv", f"--out={out}"), 3, first=1, step=2, cpus=1, setup=setup)
    done = cluster.emulate_order(order, *place.here())
    assert (done.exit_code, done.verdict, done.job) == (0, "done", None)
    states = json.loads((out / "logs" / f"{done.job_id}.json").read_text())["tasks"]
    assert {one["index"]: one["state"] for one in states} == {1: "COMPLETED", 3: "COMPLETED", 5: "COMPLETED"}
    assert (out / "logs" / f"{done.job_id}_5.out").read_text() == "a b\n"


def test_the_chunks_of_tasks_that_have_not_begun_count_as_work_too(place):
    """Two tasks, one at a time; what is published counts."""
    said = []
    for chunks in (8, 0):  # known from the source; not known: a job script
        out = place.folder / str(chunks)
        TaskFile(out, states={"c0": "done", "c1": "done", "c2": "failed"}).write()
        place.said.clear()
        order = ArrayOrder(out, ("run",), 2, parallel=1, cpus=1, setup=("sleep 1; exit",))
        cluster.emulate_order(order, *place.here(chunks=chunks))
        said.append([line.split(": ")[1] for line in place.said if "chunks done" in line])
    assert said == [["2 of 8 chunks done; 1 running, 1 waiting"], ["2 chunks done; 1 running, 1 waiting"]]
