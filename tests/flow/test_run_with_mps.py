"""MPS in whole runs: a stand-in daemon on PATH, and a HawkEars that uses it as a program with CUDA does."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.badcjobs_program import array_task, assert_refused
from support.fake_hawkears import fake_package_environ, hawkears_options
from support.fake_mps import PIPE, install_fake_mps
from support.fake_nvml import fake_nvml_environ, fake_uuid
from support.waiting import processes, wait_for

DECISIONS = "SELECT code, reason FROM decision WHERE code LIKE 'mps.%' ORDER BY at_ms, rowid"
STATES = "SELECT status, count(*) FROM chunk GROUP BY status ORDER BY 1"


class Machine:
    """A node with cards and the programs of MPS; ``said`` is what the task database says about it."""

    def __init__(self, site, **nvml):
        self.site, self.listed, self.folders = site, site.folder / "listed", []  # those of daemons that were seen
        self.listed.write_text("")
        package = os.pathsep.join([fake_package_environ()["PYTHONPATH"], site.environ()["PYTHONPATH"]])
        cards = fake_nvml_environ(nvml.pop("cards", 1), processes=self.listed, **nvml)
        self.env = {**install_fake_mps(site.folder / "bin"), **cards, "PYTHONPATH": package, "FAKE_HAWKEARS_S": "0.1"}

    def options(self, workers=3, *more):
        return (*hawkears_options(self.site.folder, "--threads=1"), "--workers-per-gpu", workers, *more)

    def start(self, chunks=30, workers=3, *more, **env):
        manifest = self.site.manifest(chunks)
        return self.site.start_run(manifest, *self.options(workers, *more), env={**self.env, **env})

    def run(self, *args, **env):
        return self.start(*args, **env).wait()

    def daemons(self):
        return self.site.processes("nvidia-cuda-mps-control -d")

    def servers(self):
        return self.site.processes("nvidia-cuda-mps-server")

    def workers(self):
        """Return those that work: neither a probe nor the parent that forks them."""
        ours = {one.pid for one in self.site.processes("hawkears_worker.py")}

        def works(one):
            is_forked = "--parent" in one.cmdline() and one.ppid() in ours
            return is_forked or not {"--parent", "--probe"} & {*one.cmdline()}

        return processes(lambda one: one.pid in ours and works(one))

    def wait_for_clients(self):
        wait_for(lambda: self.servers() and len(self.workers()) == 3, "all are at work")
        connected = "SELECT 1 FROM decision WHERE code = 'mps.connected'"
        wait_for(lambda: self.site.now(connected), "a client was found")
        self.folders.append(Path(self.daemons()[0].environ()[PIPE]).parents[1])

    def said(self):
        return self.site.rows(DECISIONS)


@pytest.fixture
def machine(site):
    machine = Machine(site)
    yield machine
    wait_for(lambda: not site.processes(), "no process of ours survives", timeout_s=40)
    left = [folder for folder in (*site.local.iterdir(), *machine.folders) if folder.exists()]
    assert [path for folder in left for path in (folder, *folder.rglob("*"))] == []


def test_workers_of_one_card_are_clients_of_a_daemon_that_ends_with_the_task(site, machine):
    program = machine.start(2000, OMP_NUM_THREADS="2")  # each has an environment of its own to look at
    machine.wait_for_clients()
    (daemon,), (server,), workers = machine.daemons(), machine.servers(), machine.workers()
    pipe = daemon.environ()[PIPE]
    assert [one.environ().get(PIPE) for one in (*workers, server)] == [pipe] * 4
    assert [one.environ()["CUDA_VISIBLE_DEVICES"] for one in (daemon, server)] == [fake_uuid(0)] * 2
    assert [PIPE in one.environ() for one in (*site.recorders(), psutil.Process(program.pid))] == [False] * 2
    machine.listed.write_text(",".join([f"0:{server.pid}:66:-", *(f"0:{one.pid}:500:-:m" for one in workers)]))
    wait_for(lambda: site.count_now("process") == 4, "the recorder has listed them")
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75, program.stderr
    shared, connected = machine.said()
    assert shared == ("mps.shared", "up to 3 workers share the device through a daemon of ours")
    assert connected in [("mps.connected", f"worker {one.pid} is connected to its server") for one in workers]
    found = site.rows("SELECT pid, ours, memory_peak_bytes / 1048576 FROM process")
    assert sorted(found) == sorted([(server.pid, 1, 66), *((one.pid, 1, 500) for one in workers)])
    assert site.rows("SELECT name FROM process WHERE pid = ?", server.pid) == [("nvidia-cuda-mps",)]
    assert "other process" not in site.badcjobs("merge", site.out).stdout


def test_where_mps_cannot_be_used_auto_goes_on_without_it_and_on_does_not_begin(site, machine):
    refused = machine.run(6, 3, "--mps", "on", FAKE_MPS="refuses")
    assert_refused(refused, 3, "--mps on: MPS cannot be used on Stand-in GPU", "permission", "--mps auto")
    assert [path.name for path in site.out.rglob("*") if path.is_file()] == ["run.toml"]
    on_cpu = machine.options(3, "--cpu-workers", 1, "--mps", "on"), {**machine.env, **fake_nvml_environ(0)}
    refused = site.run(site.manifest(6), *on_cpu[0], env=on_cpu[1])
    assert_refused(refused, 3, "--mps on: the task has no device", "--mps auto")
    done = machine.run(6, 3, FAKE_MPS="refuses")
    assert (done.exit_code, site.rows(STATES)) == (0, [("done", 6)]), done.stderr
    ((code, why),) = machine.said()
    assert (code, "does not start: The user does not have the permission" in why) == ("mps.not_used", True)
    again = site.run(site.folder / "manifest.csv", *on_cpu[0], env=on_cpu[1])
    assert again.exit_code == 0, f"nothing is left to do: {again.stderr}"


def test_a_server_that_lets_nobody_in_is_done_without_and_the_decision_says_so(site, machine):
    refused = machine.run(30, 2, "--mps", "on", FAKE_MPS="busy")
    assert (refused.exit_code, "--mps auto allows that" in refused.stderr) == (3, True), refused.stderr
    done = machine.run(30, 2, FAKE_MPS="busy")
    assert (done.exit_code, ("done", 30) in site.rows(STATES)) == (0, True), done.stderr
    assert any(code == "mps.given_up" and "3 starts gave no result" in why for code, why in machine.said())


def test_workers_that_do_not_reach_the_daemon_are_recorded_and_with_mps_on_they_end_the_task(site, machine):
    refused = machine.run(60, 2, "--mps", "on", FAKE_MPS="deaf")
    assert (refused.exit_code, "--mps auto" in refused.stderr) == (3, True), refused.stderr
    assert 1 <= site.count("chunk", "status = 'done'") < 60
    said = site.badcjobs("merge", site.out).stdout
    assert "1 task gave up with chunks left." in said and "--mps auto allows that" in said
    done = machine.run(60, 2, FAKE_MPS="deaf")
    assert done.exit_code == 0, done.stderr
    *_, (code, why) = machine.said()
    assert (code, "is not connected, and runs without it" in why) == ("mps.not_connected", True)


@pytest.fixture(params=["ours", "of the site"])
def daemon(request, machine, short_path):
    """Give the machine a daemon of its site, with the variable in every job; or nothing."""
    if request.param == "ours":
        yield
        return
    folders = {name: str(short_path / name.lower()) for name in (PIPE, PIPE.replace("PIPE", "LOG"))}
    for folder in folders.values():
        Path(folder).mkdir()
    control, env = ["nvidia-cuda-mps-control"], {**os.environ, **machine.env, **folders}
    machine.env |= folders
    subprocess.run([*control, "-d"], env=env, check=True)
    yield
    subprocess.run(control, input="quit\n", env=env, text=True, check=False)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("wanted", ["auto", 3])
def test_an_exclusive_card_has_one_worker_unless_a_daemon_of_the_site_shares_it(site, machine, wanted):
    cores = {**array_task(0, (0,)), "SLURM_CPUS_PER_TASK": "3", "CUDA_VISIBLE_DEVICES": "0"}
    done = machine.run(12, wanted, FAKE_NVML_COMPUTE_MODE="3", **cores)
    assert done.exit_code == 0, done.stderr
    is_shared = PIPE in machine.env
    assert site.rows("SELECT workers FROM task") == [(3 if is_shared else 1,)]
    why = "SELECT count(*) FROM decision WHERE code LIKE 'workers.%' AND reason LIKE '%only one process may use%'"
    assert site.rows(why) == [(0 if is_shared else 1,)]
    assert machine.said()[0][0] == ("mps.of_site" if is_shared else "mps.not_used")


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("daemon", ["of the site"], indirect=True)
def test_a_fault_on_an_exclusive_card_leaves_one_worker_that_finds_the_chunk(site, machine):
    manifest = site.manifest(24)
    (site.folder / "audio" / "c007.wav").write_bytes(b"OggS#fake fault")
    done = site.run(
        manifest, *machine.options(3), env={**machine.env, "FAKE_NVML_COMPUTE_MODE": "3", "FAKE_MPS": "held"}
    )
    assert (done.exit_code, site.rows(STATES)) == (1, [("done", 23), ("poison", 1)]), done.stderr
    assert site.rows("SELECT chunk_id FROM chunk WHERE status = 'poison'") == [("c007",)]
    assert "their chunks are tried one by one" in done.stderr


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("daemon", ["of the site"], indirect=True)
@pytest.mark.parametrize("mode, expected", [("listed", "mps.connected"), ("deaf", "mps.not_listed")])
def test_whether_a_worker_is_a_client_of_the_sites_daemon_is_asked_of_nvml(machine, mode, expected):
    assert machine.run(6, 2, FAKE_MPS=mode).exit_code == 0
    assert [code for code, _ in machine.said()] == ["mps.of_site", expected]


@pytest.mark.usefixtures("daemon")
def test_a_fault_of_one_chunk_ends_all_workers_and_only_that_chunk_is_poison(site, machine):
    manifest = site.manifest(24)
    (site.folder / "audio" / "c007.wav").write_bytes(b"OggS#fake fault")
    done = site.run(manifest, *machine.options(3), env=machine.env)
    assert done.exit_code == 1, done.stderr
    assert site.rows("SELECT chunk_id FROM chunk WHERE status <> 'done'") == [("c007",)]
    assert site.rows(STATES) == [("done", 23), ("poison", 1)]
    tries = site.rows("SELECT error_class, outcome FROM attempt WHERE chunk_id = 'c007' ORDER BY attempt_id")
    assert tries == [("gpu_error", "lost"), ("gpu_error", "failed"), ("gpu_error", "failed")]
    charged = "SELECT count(*) FROM attempt WHERE outcome = 'failed' AND chunk_id <> 'c007'"
    assert site.rows(charged) == [(0,)], "the others were not its fault"
    assert 1 <= site.count("attempt", "outcome = 'lost'") <= 3, "what was in progress in three workers"
    assert [code for code, _ in machine.said()].count("mps.fault") == 1


@pytest.mark.parametrize("victim", ["daemon", "server", "worker", "daemon and server"])
def test_whoever_of_them_is_killed_the_work_is_done_and_nobody_is_blamed(site, machine, victim):
    program = machine.start(180)
    machine.wait_for_clients()
    for kind in victim.split(" and "):
        {"daemon": machine.daemons, "server": machine.servers, "worker": machine.workers}[kind]()[0].kill()
    ended = program.wait()
    assert ended.exit_code == 0, ended.stderr
    assert site.rows(STATES) == [("done", 180)]
    assert site.rows("SELECT count(*) FROM attempt WHERE outcome = 'failed'") == [(0,)]
    assert site.rows(
        "SELECT max(n) FROM (SELECT count(*) AS n FROM attempt WHERE outcome = 'done' GROUP BY chunk_id)"
    ) == [(1,)]
    reasons = [why for _, why in machine.said()]
    assert ("the daemon has ended: new workers run without it" in reasons) == ("daemon" in victim)
    ended = ("its server has ended; its workers start again", "a fault on the device ended its workers under MPS")
    assert any(why.startswith(ended) for why in reasons) == ("server" in victim), "its clients may notice it first"


@pytest.mark.parametrize("also", ["", "recorder", "recorder daemon", "recorder server"])
def test_nothing_of_it_outlives_a_killed_wrapper_or_the_next_task_ends_it(site, machine, also):
    program = machine.start(300)
    machine.wait_for_clients()
    kinds = {"recorder": site.recorders, "daemon": machine.daemons, "server": machine.servers}
    for victim in [one for kind in also.split() for one in kinds[kind]()]:
        victim.kill()
    program.kill()
    if not also:
        wait_for(lambda: not site.processes(), "the recorder ends them", timeout_s=40)
        return
    wait_for(lambda: not machine.workers(), "workers die with their wrapper")
    more = ("--out", site.folder / "other", *machine.options(2))
    elsewhere = site.badcjobs("run", site.folder / "manifest.csv", *more, env={**machine.env, "FAKE_HAWKEARS_S": "0"})
    assert elsewhere.exit_code == 0, elsewhere.stderr
    assert (machine.daemons(), machine.servers(), machine.folders[0].exists()) == ([], [], False)
    again = machine.run(300, 2, FAKE_HAWKEARS_S="0")
    assert (again.exit_code, "stay there" in again.stderr) == (0, False), again.stderr


def test_a_warning_of_slurm_ends_the_daemon_after_the_chunks_in_progress(site, machine):
    program = machine.start(900, 3, **array_task(0, (0,)), CUDA_VISIBLE_DEVICES="0")
    machine.wait_for_clients()
    for process in site.processes():  # Slurm sends TERM to all processes of the job
        if process.pid != program.pid:
            with suppress(psutil.NoSuchProcess):  # a question to the daemon ends with its answer
                process.terminate()
    time.sleep(0.3)
    assert len(machine.daemons()) == len(machine.servers()) == 1
    program.send(signal.SIGTERM)
    assert program.wait().exit_code == 75
    assert site.rows("SELECT count(*) FROM attempt WHERE outcome IS NULL OR outcome = 'lost'") == [(0,)]
