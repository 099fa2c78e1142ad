"""MPS: on which devices it is used, whether workers are its clients, who is blamed under it, and that nothing stays."""

import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.devices import find_mps_obstacle
from rooms.model import ChunkStarted, Code, Decision, Device, WorkerPlan
from rooms.root import LocalFolder, NotHere, SessionBroken, worker_environment
from rooms.workers import MpsDaemons, end_left_behind, find_obstacle
from support.fake_mps import ILLEGAL_ADDRESS, install_fake_mps
from support.fake_nvml import FakeNvml, fake_slice_uuid, fake_uuid
from support.supervised import OK, Bench, acting, done
from support.waiting import processes, wait_for

GPU = Device("0", "test", index=0, uuid=fake_uuid(0), name="Stand-in GPU", backend="nvml")
DEVICE_ID = 100


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two cards, and the daemon's program on PATH; return what steers the cards."""
    monkeypatch.setenv("PATH", install_fake_mps(tmp_path / "bin")["PATH"])
    return FakeNvml(monkeypatch, 2)


class Task:
    """A task that was given some devices; its marked processes are its daemons alone."""

    def __init__(self, folder):
        self.folder, self.mark, self.mps = folder, f"test-{folder.name}-{os.getpid()}", MpsDaemons()

    def start(self, wanted="auto", devices=((DEVICE_ID, GPU),), most=2, **environ):
        local = LocalFolder(self.folder)
        self.mps.start(wanted, devices, most=most, environ={**os.environ, **environ}, mark=self.mark, local=local,
                       hostname="here")  # fmt: skip
        return [(one.code, one.reason) for one in self.decided()]

    def decided(self):
        """Return the decisions since the last call."""
        return [self.mps.decisions.get() for _ in range(self.mps.decisions.qsize())]

    def processes(self):
        return processes(lambda one: one.environ().get("BADCJOBS_TASK") == self.mark)


@pytest.fixture
def task(tmp_path):
    (tmp_path / "live").mkdir()
    task = Task(tmp_path / "live")
    yield task
    task.mps.close()
    assert task.processes() == []
    assert not task.folder.joinpath("mps").exists(), "the folder of the daemons is gone"


def worker_of(pipe, code="use_device()"):
    """Start a process that uses CUDA, then waits for its stdin to close."""
    tests = Path(__file__).parents[2]
    program = f"import sys; sys.path.insert(0, {str(tests)!r}); from support.fake_mps import use_device; {code};"
    program += " print('up', flush=True); sys.stdin.read()"
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe} if pipe else dict(os.environ)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    worker = subprocess.Popen(["python3", "-c", program], env=env, **pipes)
    assert worker.stdout.readline() == b"up\n"
    return worker


REASONS = {
    "one worker per device": ({"most": 1}, {}),
    "is not read through NVML (amd, amdsmi)": ({"vendor": "amd", "backend": "amdsmi"}, {}),
    "is not read through NVML (nvidia, simulated)": ({"backend": "simulated"}, {}),
    "is not read through NVML (nvidia, none)": ({"uuid": None}, {}),
    "is a MIG slice": ({"uuid": fake_slice_uuid(0, 1)}, {}),
    "49 workers per device; the most is 48": ({"most": 49}, {}),
    "older than Volta (compute capability 6.1)": ({}, {"capability": "6.1"}),
    "only one process may use the device, by its compute mode": ({"exclusive": True}, {}),
    "NVML does not find the device": ({"uuid": fake_uuid(7)}, {}),
    "nvidia-cuda-mps-control is not on PATH": ({"PATH": "/nowhere"}, {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_mps_is_not_used_where_it_cannot_be_and_the_reason_is_recorded(machine, task, reason):
    facts, settings = REASONS[reason]
    machine.set(**settings)
    environ, most = {name: facts[name] for name in facts if name.isupper()}, facts.get("most", 2)
    known = {"token": "0", "why": "test", "uuid": GPU.uuid, "name": GPU.name, "backend": "nvml"}
    device = Device(**known | {name: facts[name] for name in facts if name not in (*environ, "most")})
    device = device if device.uuid else Device("0", "test")
    ((code, why),) = task.start(devices=[(DEVICE_ID, device)], most=most, **environ)
    expected = Code.MPS_NOT_NEEDED if most == 1 else Code.MPS_NOT_USED
    assert (code, reason in why, task.processes()) == (expected, True, []), why
    with pytest.raises(NotHere) as refused:
        task.start("on", [(DEVICE_ID, device)], most, **environ)
    assert (refused.value.why, "--mps auto" in refused.value.fix) == (why, True)
    assert task.start("off", [(DEVICE_ID, device)], most, **environ) == [(Code.MPS_NOT_USED, "--mps off")]


@contextmanager
def daemon_of_the_site(folder):
    """Let a program of that name run, whose number is in the folder."""
    folder.mkdir(exist_ok=True)
    with subprocess.Popen([shutil.copy("/bin/sleep", folder / "nvidia-cuda-mps-control"), "60"]) as daemon:
        (folder / "nvidia-cuda-mps-control.pid").write_text(str(daemon.pid))
        yield
        daemon.kill()


def test_workers_use_a_daemon_that_the_site_has_started_unless_mps_is_off(machine, task, tmp_path):
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "site")}
    process_id = tmp_path / "site" / "nvidia-cuda-mps-control.pid"
    process_id.parent.mkdir()
    process_id.write_text("4194305")  # no process has so large a number
    why = "up to 48 workers share the device through a daemon of ours"
    assert task.start(most=48, **environ) == [(Code.MPS_SHARED, why)]
    task.mps.close()
    task.folder.joinpath("mps").unlink()
    with daemon_of_the_site(tmp_path / "site"):
        for wanted in ("auto", "on"):
            used = [(Code.MPS_OF_SITE, f"the workers use the daemon of this site, in {tmp_path}/site")]
            assert task.start(wanted, **environ) == used
            assert (task.mps.pipe_of(DEVICE_ID), task.processes()) == (f"{tmp_path}/site", [])
    ((code, why),) = task.start(devices=[(DEVICE_ID, replace(GPU, backend="simulated"))], **environ)
    assert (code, "not read through NVML" in why) == (Code.MPS_NOT_USED, True)
    assert task.start("off", **environ) == [(Code.MPS_NOT_USED, "--mps off")]
    assert task.mps.pipe_of(DEVICE_ID) is None
    reported = worker_environment(environ, WorkerPlan(0, GPU, DEVICE_ID, 1))
    assert reported["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent", "else CUDA would use it"


def test_mps_on_without_any_device_is_refused(machine, task):
    assert task.start(devices=[]) == task.start("off", devices=[]) == []
    with pytest.raises(NotHere, match="--mps on: the task has no device") as refused:
        task.start("on", devices=[])
    assert (refused.value.why, refused.value.exit_code) == ("MPS is for GPUs", 3)


def test_a_card_with_the_server_of_another_daemon_is_left_to_it(machine, tmp_path):
    server = subprocess.Popen(["nvidia-cuda-mps-server"])
    other = subprocess.Popen(["sleep", "60"])
    try:
        machine.set(processes=f"0:{other.pid}:99:-,0:{server.pid}:66:-")
        wait_for(lambda: find_mps_obstacle(fake_uuid(0)), "it has its name")
        assert f"process {server.pid}" in find_obstacle(GPU, 2, os.environ)
        assert find_mps_obstacle(fake_uuid(1)) is None
    finally:
        for process in (server, other):
            process.kill()
            process.wait()


def test_a_daemon_that_does_not_start_is_done_without_and_says_why(machine, task):
    assert task.start(FAKE_MPS="refuses") == [
        (Code.MPS_NOT_USED, "nvidia-cuda-mps-control does not start: The user does not have the permission to start it")
    ]
    assert task.mps.pipe_of(DEVICE_ID) is None
    with pytest.raises(NotHere, match="--mps on"):
        task.start("on", FAKE_MPS="refuses")


def test_each_device_has_a_daemon_of_its_own_and_workers_are_looked_up_among_its_clients(machine, task):
    second = Device("1", "test", index=1, uuid=fake_uuid(1), name="Other GPU", backend="nvml")
    assert [code for code, _ in task.start(devices=[(100, GPU), (101, second)], most=6)] == [Code.MPS_SHARED] * 2
    pipes = [task.mps.pipe_of(device_id) for device_id in (100, 101)]
    assert len({*pipes}) == 2 and all(len(f"{pipe}/control_privileged") < 100 for pipe in pipes)
    environs = [one.environ() for one in task.processes()]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in environs) == [GPU.pin] * 2 + [second.pin] * 2
    ignored = [int(Path(f"/proc/{one.pid}/status").read_text().split("SigIgn:")[1].split()[0], 16)
               for one in task.processes()]  # fmt: skip
    assert all(mask >> 14 & 1 for mask in ignored), "a TERM of Slurm does not end it while workers finish their chunks"
    client, stranger = worker_of(pipes[0]), worker_of(None)
    try:
        task.mps.look_for(100, client.pid)
        task.mps.look_for(101, client.pid)
        task.mps.look_for(100, client.pid)  # no news
        task.mps.look_for(100, stranger.pid)
        task.mps.look_for(None, client.pid)
    finally:
        for worker in (client, stranger):
            worker.communicate()
    task.mps.look_for(100, client.pid)  # it has ended, but the log knows it
    assert task.decided() == [
        Decision(Code.MPS_CONNECTED, "Stand-in GPU", {"pid": client.pid}),
        Decision(Code.MPS_NOT_CONNECTED, "Other GPU", {"pid": client.pid}),
        Decision(Code.MPS_NOT_CONNECTED, "Stand-in GPU", {"pid": stranger.pid}),
        Decision(Code.MPS_CONNECTED, "Stand-in GPU", {"pid": client.pid}),
    ]


def test_with_mps_on_a_first_worker_that_is_not_connected_ends_the_work_and_a_later_one_does_not(machine, task):
    task.start("on", [(100, GPU), (101, replace(GPU, uuid=fake_uuid(1)))])
    client, stranger, given_up = worker_of(task.mps.pipe_of(100)), 1 << 30, []
    task.mps.look_for(100, client.pid)
    task.mps.look_for(100, stranger)
    task.mps.check(pytest.fail, given_up.append)
    client.communicate()
    assert given_up == [], "MPS works there, whatever has happened to its server"
    task.mps.look_for(101, stranger)
    task.mps.check(pytest.fail, given_up.append)
    (why,) = given_up
    assert why.startswith(f"--mps on, but worker {stranger} is not connected") and "--mps auto" in why


def test_a_prefix_is_a_client_if_its_child_is_and_a_program_for_each_chunk_is_known_by_the_log(machine, task):
    task.start()
    pipe = task.mps.pipe_of(DEVICE_ID)
    task.mps.look_for(DEVICE_ID, None)
    child = "use_device(), os.write(ends[1], b'x'), sys.stdin.read(), os._exit(0)"
    parent = worker_of(pipe, f"import os; ends = os.pipe(); os.fork() or ({child}); os.read(ends[0], 1)")
    try:
        task.mps.look_for(DEVICE_ID, parent.pid)
    finally:
        parent.communicate()
    task.mps.look_for(DEVICE_ID, 1 << 30)
    task.mps.look_for(DEVICE_ID, None)
    codes = [one.code for one in task.decided()]
    assert codes == [Code.MPS_NOT_CONNECTED, Code.MPS_CONNECTED] * 2


def test_a_server_that_does_not_end_with_its_daemon_is_killed_even_if_it_does_not_look_like_ours(machine, task):
    task.start(FAKE_MPS="stubborn")
    worker = worker_of(task.mps.pipe_of(DEVICE_ID))
    task.mps.look_for(DEVICE_ID, worker.pid)
    (control,) = task.processes()
    (server,) = control.children()
    worker.communicate()
    task.mps.close()
    assert processes(lambda one: one.pid == server.pid) == []


@pytest.mark.parametrize("victim", ["control", "server"])
def test_a_daemon_or_a_server_that_is_killed_is_noted_and_ends_the_workers_of_that_device_only(machine, task, victim):
    task.start()
    pipe, ended = task.mps.pipe_of(DEVICE_ID), []
    worker = worker_of(pipe)
    task.mps.look_for(DEVICE_ID, worker.pid)
    task.mps.check(ended.append, pytest.fail)
    assert ended == []
    control, server = sorted(task.processes(), key=lambda one: one.create_time())
    {"control": control, "server": server}[victim].kill()
    wait_for(lambda: len(task.processes()) == 1, "it is dead")
    task.mps.check(ended.append, pytest.fail)
    task.mps.check(ended.append, pytest.fail)  # once is enough
    worker.communicate()
    *_, last = task.decided()
    if victim == "control":
        assert (ended, task.mps.pipe_of(DEVICE_ID), last.code) == ([], None, Code.MPS_DAEMON_ENDED)
    else:
        assert (ended, task.mps.pipe_of(DEVICE_ID), last.code) == ([DEVICE_ID], pipe, Code.MPS_SERVER_ENDED)
        again = worker_of(pipe)
        task.mps.look_for(DEVICE_ID, again.pid)
        again.communicate()
        assert [one.code for one in task.decided()] == [Code.MPS_CONNECTED], "the daemon has started another one"


def test_what_a_killed_task_left_is_ended_by_the_next_one_and_what_lives_is_not(machine, task, tmp_path):
    """The owner is a process of its own: its lock ends with it."""
    (tmp_path / "other").mkdir()
    other, (reported, tell) = Task(tmp_path / "other"), os.pipe()
    if (owner := os.fork()) == 0:
        try:
            other.start()
            os.write(tell, b"up")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(reported, 2) == b"up"
    folder = (tmp_path / "other" / "mps").resolve()
    end_left_behind("here")
    assert (len(other.processes()), folder.is_dir()) == (2, True), "its owner lives"
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    task.start()  # or a run of another test that comes first
    assert (other.processes(), folder.exists()) == ([], False)
    assert len(task.processes()) == 2


# --- who is blamed ----------------------------------------------------------------------------------------------------


def on_one_device(many):
    return [WorkerPlan(slot, GPU, DEVICE_ID, 1) for slot in range(many)]


def test_a_fault_ends_all_workers_of_the_device_blames_nobody_and_the_guilty_one_alone_is_poison(
    machine, task, tmp_path
):
    """All three have a chunk in progress when one faults; one of the others does not notice by itself."""
    task.start(most=3)
    together, act, begun = threading.Barrier(3), acting({"c1": ["!gpu_error"] * 9}), []

    def script(session, batch):
        shared = session.plan.pipe is not None
        if batch[0].chunk_id not in begun and len(begun) < 3:
            begun.append(batch[0].chunk_id)
            yield ChunkStarted(batch[0], 0)
            together.wait(60)
            if batch[0].chunk_id == "c2":
                assert session.killed.wait(60), "it would work on, and keep the server from its recovery"
                raise SessionBroken("worker_died", "killed")
            raise SessionBroken("gpu_error", ILLEGAL_ADDRESS)
        assert not (shared and batch[0].chunk_id in ("c0", "c1", "c2")), "a suspect never runs under MPS"
        yield from act(session, batch)

    bench = Bench(tmp_path, script, chunks=40, workers=on_one_device(3), mps=task.mps).run()
    assert bench.statuses == {"done": 39, "poison": 1}
    tries = bench.tries
    assert [tries["c0"], tries["c2"]] == [[("gpu_error", "lost"), OK], [("worker_died", "lost"), OK]]
    assert tries["c1"] == [("gpu_error", "lost"), ("gpu_error", "failed"), ("gpu_error", "failed")]
    assert all(tries[f"c{n}"] == [OK] for n in range(3, 40))
    shared = [session.plan.pipe is not None for session in bench.engine.sessions]
    assert shared[:3] == [True] * 3 and True in shared[6:], "afterwards MPS is used again"
    events = bench.rows("SELECT code FROM decision WHERE code LIKE 'mps.fault%'")
    assert (events, bench.tally.retired) == ([("mps.fault",)], []), "one event, and no one retires"


# What happens at each try → its tries; the first one is under MPS.
DEATHS = {
    "!hang": (["!hang"], [("hang", "lost"), OK]),
    "!engine_crash": (["!engine_crash"] * 9, [("engine_crash", "lost"), *[("engine_crash", "failed")] * 2]),
    "!worker_died": (["!worker_died"], [("worker_died", "lost"), OK]),
    "a program for each chunk": (["gpu_error"] * 9, [("gpu_error", "lost"), *[("gpu_error", "failed")] * 2]),
    "no death": (["bad_audio"], [("bad_audio", "failed"), OK]),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_under_mps_is_tried_again_without_it_before_a_chunk_is_blamed(machine, task, tmp_path, name):
    task.start()
    (acts, tries), shared = DEATHS[name], []
    act = acting({"c0": acts})

    def script(session, batch):
        shared.append((batch[0].chunk_id, session.plan.pipe is not None))
        yield from act(session, batch)

    bench = Bench(tmp_path, script, chunks=60, workers=on_one_device(1), mps=task.mps).run()
    assert bench.tries == {"c0": tries, **{f"c{n}": [OK] for n in range(1, 60)}}
    without = [False] * (len(tries) - 1) if name != "no death" else [True]
    assert [is_shared for chunk_id, is_shared in shared if chunk_id == "c0"] == [True, *without]
    assert shared[-1][1] is True, "then MPS is used again"


@pytest.mark.parametrize("why", ["it never starts under MPS", "faults in a row under MPS"])
def test_a_worker_for_which_mps_does_not_work_works_without_it(machine, task, tmp_path, why):
    task.start()

    def refuse(plan):
        if plan.pipe and "starts" in why:
            raise SessionBroken("ran_on_cpu", "CUDA does not work", at_start=True)

    def script(session, batch):
        if session.plan.pipe:
            yield ChunkStarted(batch[0], 0)
            raise SessionBroken("gpu_error", ILLEGAL_ADDRESS)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, chunks=30, workers=on_one_device(1), retries=0, on_open=refuse, mps=task.mps).run()
    assert (bench.statuses, bench.tally.retired) == ({"done": 30}, [])
    shared = sum(session.plan.pipe is not None for session in bench.engine.sessions)
    assert shared == (0 if "starts" in why else 3)


def test_a_device_that_is_really_broken_is_given_up_under_mps_too(machine, task, tmp_path):
    task.start()
    bench = Bench(tmp_path, acting({}, "!gpu_error"), chunks=60, workers=on_one_device(1), mps=task.mps).run()
    assert "errors in a row on this device" in bench.tally.retired[0]
    assert bench.statuses["pending"] > 40


@pytest.fixture
def on_exclusive_card(machine, task, tmp_path):
    """Return what runs a script on a card that only clients of the site's daemon may use."""
    card = replace(GPU, exclusive=True)

    def run_on(script, workers=1, **more):
        plans = [WorkerPlan(slot, card, DEVICE_ID, 1) for slot in range(workers)]
        return Bench(tmp_path, script, workers=plans, mps=task.mps, **more)

    with daemon_of_the_site(tmp_path / "site"):
        task.start(devices=[(DEVICE_ID, card)], CUDA_MPS_PIPE_DIRECTORY=str(tmp_path / "site"))
        yield run_on


@pytest.mark.parametrize("kind", ["ran_on_cpu", "exit_code"])
def test_an_engine_that_cannot_start_on_an_exclusive_card_is_given_up(on_exclusive_card, kind):
    def refuse(plan):
        raise SessionBroken(kind, "it does not work", at_start=True)

    bench = on_exclusive_card(acting({}), chunks=4, on_open=refuse).run()
    assert (len(bench.tally.retired), bench.statuses) == (1, {"pending": 4})


@pytest.mark.parametrize("late_s", [0.0, 6.0])
def test_after_a_fault_on_an_exclusive_card_one_worker_goes_on_also_if_one_that_was_retired_reports_it(
    on_exclusive_card, late_s
):
    broken, gone = [], threading.Event()

    def script(session, batch):
        yield ChunkStarted(batch[0], 0)
        if session.plan.slot not in broken and session.plan.slot < 2:
            broken.append(session.plan.slot)
            assert gone.wait(20)
            time.sleep(late_s * session.plan.slot)
            raise SessionBroken("gpu_error", ILLEGAL_ADDRESS)
        time.sleep(0.2)
        yield done(batch[0])

    bench = on_exclusive_card(script, workers=3 if late_s == 0 else 2, chunks=45)
    bench.run(until=lambda: len(broken) == 2)
    if late_s == 0:
        bench.supervisor.retire(0)
    gone.set()
    assert bench.run().statuses == {"done": 45}
