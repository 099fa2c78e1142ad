"""Engine programs as processes: deaf to Slurm's signals, gone with their wrapper, one device in sight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rooms.model import Device, WorkerPlan
from rooms.root import TASK_MARK, Process, SubprocessLauncher, end_leftovers, last_lines, worker_environment
from support.waiting import wait_for

SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
ENVIRON = {"PATH": os.environ["PATH"]}


def is_running(pid: int) -> bool:
    """Say whether a process is there; in a container nobody may come to bury the dead."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launcher() -> SubprocessLauncher:
    return SubprocessLauncher(f"4821_7.r0.test-{os.getpid()}")


@pytest.fixture
def start(launcher: SubprocessLauncher, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start_one(argv: list[str] = SLEEP, **options: bool) -> Process:
        log = tmp_path / f"{len(started)}.log"
        process = launcher.start(argv, env=ENVIRON, cwd=None, stderr=log, **options)
        started.append(process)
        if argv is SLEEP:
            wait_for(lambda: "ready" in log.read_text(), "it is ready")
        return process

    yield start_one
    for process in started:
        launcher.kill(process)
        process.wait()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_worker_is_deaf_to_the_signals_that_slurm_sends_to_everybody(
    start: Callable[..., Process], signum: int
) -> None:
    worker = start()
    os.kill(worker.pid, signum)
    time.sleep(0.1)
    assert worker.poll() is None


def test_a_program_we_do_not_know_hears_term_but_no_warning(start: Callable[..., Process]) -> None:
    program = start(receives_term=True)
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(program.pid, signum)
    time.sleep(0.1)
    assert program.poll() is None
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM


def test_the_launcher_ends_the_whole_group(start: Callable[..., Process], launcher: SubprocessLauncher) -> None:
    shell = start(["sh", "-c", "sleep 60 & sleep 60"])
    wait_for(lambda: len(psutil.Process(shell.pid).children()) == 2, "two children")
    children = [child.pid for child in psutil.Process(shell.pid).children()]
    launcher.kill(shell)
    assert shell.wait(60) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, children)), "they are gone")


def test_signalling_a_program_that_has_ended_does_no_harm(
    start: Callable[..., Process], launcher: SubprocessLauncher
) -> None:
    ended = start(["true"])
    assert ended.wait(60) == 0
    launcher.kill(ended)


def test_a_ctrl_c_in_our_own_group_does_not_reach_a_worker(start: Callable[..., Process]) -> None:
    assert os.getpgid(start().pid) != os.getpgid(0)


@pytest.mark.parametrize("receives_term", [False, True])
def test_a_worker_dies_with_its_wrapper_even_by_sigkill(tmp_path: Path, receives_term: bool) -> None:
    wrapper_code = f"""
import sys, time
from pathlib import Path
from badcjobs.processes import SubprocessLauncher
launcher = SubprocessLauncher("doomed")
worker = launcher.start(["sleep", "60"], env={{"PATH": {ENVIRON["PATH"]!r}}}, cwd=None,
                        stderr=Path({str(tmp_path / "log")!r}), receives_term={receives_term})
print(worker.pid, flush=True)
time.sleep(60)
"""
    wrapper = subprocess.Popen([sys.executable, "-c", wrapper_code], stdout=subprocess.PIPE)
    assert wrapper.stdout is not None
    worker_pid = int(wrapper.stdout.readline())
    assert is_running(worker_pid)
    wrapper.kill()
    wrapper.wait()
    wrapper.stdout.close()
    wait_for(lambda: not is_running(worker_pid), "it is gone")


# --- what is left -----------------------------------------------------------------------------------------------------


def test_leftovers_are_found_even_when_they_left_their_group_and_lost_their_parent(
    start: Callable[..., Process], launcher: SubprocessLauncher, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    daemon = f"(setsid sh -c 'echo $$ > {pid_file}.new && mv {pid_file}.new {pid_file} && exec sleep 60' &)"
    start(["sh", "-c", daemon]).wait(60)
    wait_for(pid_file.exists, "its number")
    orphan = int(pid_file.read_text())
    mark = wait_for(lambda: psutil.Process(orphan).environ(), "its environment")[TASK_MARK]
    assert end_leftovers(mark + "x") == 0
    assert is_running(orphan)
    assert end_leftovers(mark) == 1
    wait_for(lambda: not is_running(orphan), "it is gone")
    assert end_leftovers(mark) == 0


def test_a_leftover_that_becomes_another_program_at_this_moment_is_found_too(tmp_path: Path) -> None:
    again = tmp_path / "again.sh"
    again.write_text(f"#!/bin/sh\nexec {again}\n")
    again.chmod(0o755)
    for number in range(20):
        launcher = SubprocessLauncher(f"restless-{number}")
        restless = launcher.start([str(again)], env=ENVIRON, cwd=None, stderr=tmp_path / "log")
        assert end_leftovers(f"restless-{number}") == 1
        assert restless.wait(30) == -signal.SIGKILL


def test_the_leftovers_of_other_tasks_are_left_alone(start: Callable[..., Process], tmp_path: Path) -> None:
    other = start()
    mine = SubprocessLauncher("mine").start(["sleep", "60"], env=ENVIRON, cwd=None, stderr=tmp_path / "mine.log")
    assert end_leftovers("mine") == 1
    assert mine.wait(60) == -signal.SIGKILL
    assert other.poll() is None


# --- pipes, folders, logs ---------------------------------------------------------------------------------------------


def test_without_pipes_both_outputs_go_to_the_log_and_there_is_no_input(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    program = start(["sh", "-c", "echo out; echo err >&2; cat; echo end"])
    assert program.wait(60) == 0
    assert (tmp_path / "0.log").read_text() == "out\nerr\nend\n"


def test_with_pipes_only_errors_go_to_the_log(start: Callable[..., Process], tmp_path: Path) -> None:
    program = start(["sh", "-c", "echo err >&2; cat"], pipes=True)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(b"question\n")
    program.stdin.close()
    assert program.stdout.read() == b"question\n"
    assert program.wait(60) == 0
    assert (tmp_path / "0.log").read_text() == "err\n"
    program.stdout.close()


def test_a_program_that_cannot_be_started_is_an_os_error(launcher: SubprocessLauncher, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        launcher.start(["/no/such/program"], env=ENVIRON, cwd=None, stderr=tmp_path / "log")


def test_the_last_lines_of_a_log_are_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_bytes(b"x" * 5000 + "\nfür\n".encode() + b"\xff\n")
    assert last_lines(log, limit=10) == "xx\nfür\n\ufffd"


# --- the environment --------------------------------------------------------------------------------------------------

DEVICE = Device("1", "test", index=1, uuid="GPU-aaaa", name="Tesla V100", backend="nvml")
AMD_DEVICE = Device("3", "test", index=3, uuid="GPU-00000000000000aa", backend="amdsmi", vendor="amd")


def test_a_worker_sees_only_its_own_device_and_the_rest_as_it_was() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "SLURM_JOB_ID": "4821",
        "SLURM_JOB_GPUS": "0,1,2,3",
        "ROCR_VISIBLE_DEVICES": "0,1,2,3",
        "HOME": "/home/b",
    }
    env = worker_environment(given, WorkerPlan(0, DEVICE, 7, 3))
    assert env == {
        "CUDA_VISIBLE_DEVICES": "GPU-aaaa",
        "APPTAINERENV_CUDA_VISIBLE_DEVICES": "GPU-aaaa",
        "SINGULARITYENV_CUDA_VISIBLE_DEVICES": "GPU-aaaa",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "APPTAINERENV_CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SINGULARITYENV_CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "BADCJOBS_DEVICE_UUID": "GPU-aaaa",
        "OMP_NUM_THREADS": "3",
        "SLURM_JOB_ID": "4821",
        "SLURM_JOB_GPUS": "0,1,2,3",
        "ROCR_VISIBLE_DEVICES": "0,1,2,3",
        "HOME": "/home/b",
    }
    assert given["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_a_list_meant_for_a_container_gives_way_to_the_workers_own() -> None:
    given = {"APPTAINERENV_CUDA_VISIBLE_DEVICES": "0,1", "SINGULARITYENV_CUDA_VISIBLE_DEVICES": "all"}
    env = worker_environment(given, WorkerPlan(0, DEVICE, 7, 3))
    assert {env[name] for name in given} == {"GPU-aaaa"}


def test_a_worker_on_an_amd_device_sees_it_through_rocr_alone() -> None:
    misleading = {
        prefix + name: "3"
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
        for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")
    }
    given = {**misleading, "ROCR_VISIBLE_DEVICES": "2,3", "APPTAINERENV_ROCR_VISIBLE_DEVICES": "2,3", "HOME": "/home/b"}
    assert worker_environment(given, WorkerPlan(0, AMD_DEVICE, 7, 3)) == {
        "ROCR_VISIBLE_DEVICES": "GPU-00000000000000aa",
        "APPTAINERENV_ROCR_VISIBLE_DEVICES": "GPU-00000000000000aa",
        "SINGULARITYENV_ROCR_VISIBLE_DEVICES": "GPU-00000000000000aa",
        "BADCJOBS_DEVICE_UUID": "GPU-00000000000000aa",
        "OMP_NUM_THREADS": "3",
        "HOME": "/home/b",
    }


def test_an_amd_device_whose_uuid_rocr_does_not_take_is_shown_by_its_index() -> None:
    device = replace(AMD_DEVICE, uuid="74ff74a1-0000-1000-80aa-000000000000")
    env = worker_environment({}, WorkerPlan(0, device, 7, 1))
    assert env["ROCR_VISIBLE_DEVICES"] == "3"
    assert env["BADCJOBS_DEVICE_UUID"] == device.uuid


@pytest.mark.parametrize(
    ("driver", "shown"), [("580.65.06", "MIG-eeee"), ("470.57", "MIG-eeee"), ("460.32.03", "0"), (None, "MIG-eeee")]
)
def test_a_slice_is_shown_by_its_uuid_unless_the_driver_is_too_old_for_that(driver: str | None, shown: str) -> None:
    device = Device("0", "test", index=0, uuid="MIG-eeee", parent_uuid="GPU-aaaa", backend="nvml", driver=driver)
    env = worker_environment({}, WorkerPlan(0, device, 7, 1))
    assert (env["CUDA_VISIBLE_DEVICES"], env["BADCJOBS_DEVICE_UUID"]) == (shown, "MIG-eeee")


def test_a_device_without_a_uuid_is_shown_by_its_token() -> None:
    env = worker_environment({}, WorkerPlan(0, Device("2", "no driver library"), 7, 1))
    assert (env["CUDA_VISIBLE_DEVICES"], env["BADCJOBS_DEVICE_UUID"]) == ("2", "")
    assert env["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "2"


def test_a_worker_on_the_cpu_sees_no_device_at_all() -> None:
    env = worker_environment({"CUDA_VISIBLE_DEVICES": "0"}, WorkerPlan(0, None, None, 2))
    assert (env["CUDA_VISIBLE_DEVICES"], env["BADCJOBS_DEVICE_UUID"]) == ("", "")
    assert (env["ROCR_VISIBLE_DEVICES"], env["APPTAINERENV_CUDA_VISIBLE_DEVICES"]) == ("", "")


def test_threads_that_the_user_chose_stay() -> None:
    assert worker_environment({"OMP_NUM_THREADS": "9"}, WorkerPlan(0, None, None, 2))["OMP_NUM_THREADS"] == "9"


def test_every_program_carries_the_name_of_its_task(launcher: SubprocessLauncher, tmp_path: Path) -> None:
    program = launcher.start(["env"], env={**ENVIRON, "A": "b"}, cwd=tmp_path, stderr=tmp_path / "log")
    assert program.wait(60) == 0
    told = dict(line.split("=", 1) for line in (tmp_path / "log").read_text().splitlines())
    assert told[TASK_MARK] == f"4821_7.r0.test-{os.getpid()}"
    assert told["A"] == "b"
    assert told.get("PWD", str(tmp_path)) == str(tmp_path)
