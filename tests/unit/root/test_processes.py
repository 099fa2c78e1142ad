"""Engine programs as processes: deaf to Slurm's signals, gone with their wrapper, one device in sight."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from rooms import root
from rooms.model import Device, WorkerPlan
from rooms.root import TASK_MARK, BadcjobsError, Launcher, end_leftovers, fingerprint_of, last_lines
from support.stand_ins import install
from support.waiting import is_running, wait_for

ENVIRON = {"PATH": os.environ["PATH"]}
MARK = f"4821_7.r0.test-{os.getpid()}"
LAUNCHER = Launcher(MARK)
NVIDIA = Device("1", "test", index=1, uuid="GPU-aaaa", name="Tesla V100", backend="nvml")
AMD = Device("3", "test", index=3, uuid="GPU-00000000000000aa", backend="amdsmi", vendor="amd")
GIVEN = {
    prefix + name: "0,1"
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")
} | {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "SLURM_JOB_GPUS": "0,1", "HOME": "/home/b"}
WARNINGS = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}


@pytest.fixture
def start(tmp_path):
    started = []

    def start_one(*argv, **options):
        place = {"env": {**ENVIRON, "A": "b"}, "cwd": tmp_path, "stderr": tmp_path / "log"}
        started.append(LAUNCHER.start(argv, **place, **options))
        return started[-1]

    yield start_one
    for process in started:
        LAUNCHER.kill(process)
        process.wait(60)


def test_a_worker_ignores_the_signals_that_slurm_sends_and_is_ended_with_its_whole_group(start):
    known = [start("sleep", "60"), start("sleep", "60", receives_term=True)]
    for process, ignored in zip(known, (WARNINGS | {signal.SIGTERM}, WARNINGS), strict=True):
        mask = int(re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[0], 16)
        assert {one for one in (*WARNINGS, signal.SIGTERM, signal.SIGINT) if mask >> (one - 1) & 1} == ignored
        assert os.getpgid(process.pid) == process.pid, "Ctrl-C in our own group does not reach it"
    shell = start("sh", "-c", "sleep 60 & sleep 60")
    children = wait_for(lambda: (c := psutil.Process(shell.pid).children()) and len(c) == 2 and c, "two children")
    LAUNCHER.kill(shell)
    assert shell.wait(60) == -signal.SIGKILL
    wait_for(lambda: not any(is_running(child.pid) for child in children), "they are gone")
    LAUNCHER.kill(shell)  # one that has ended


def test_leftovers_are_found_without_their_group_and_parent_and_those_of_others_stay(start, tmp_path):
    pid_file = tmp_path / "pid"
    daemon = f"(setsid sh -c 'echo $$ > {pid_file}.new && mv {pid_file}.new {pid_file} && exec sleep 60' &)"
    start("sh", "-c", daemon).wait(60)
    orphan = int(wait_for(lambda: pid_file.exists() and pid_file.read_text(), "its number"))
    wait_for(lambda: psutil.Process(orphan).environ().get(TASK_MARK) == MARK, "its environment")
    restless = install(tmp_path / "again.sh", f"#!/bin/sh\nexec {tmp_path}/again.sh\n")  # another one all the time
    other = Launcher("other").start([str(restless)], env=ENVIRON, cwd=None, stderr=tmp_path / "other.log")
    assert (end_leftovers(MARK + "x"), is_running(orphan)) == (0, True)
    assert end_leftovers(MARK) == 1
    wait_for(lambda: not is_running(orphan), "it is gone")
    assert (end_leftovers(MARK), other.poll()) == (0, None)
    found = wait_for(lambda: end_leftovers("other"), "it is found, unless it is in the middle of an exec")
    assert found == 1
    assert other.wait(60) == -signal.SIGKILL


def test_output_goes_to_the_log_and_with_pipes_only_errors_do(start, tmp_path):
    assert start("sh", "-c", f"echo out; echo err >&2; cat; echo $A ${TASK_MARK}; pwd").wait(60) == 0
    assert (tmp_path / "log").read_text() == f"out\nerr\nb {MARK}\n{tmp_path}\n"
    program = start("sh", "-c", "echo more >&2; cat", pipes=True)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(b"question\n")
    program.stdin.close()
    assert (program.stdout.read(), program.wait(60)) == (b"question\n", 0)
    assert (tmp_path / "log").read_text().endswith(f"{tmp_path}\nmore\n")
    program.stdout.close()
    with pytest.raises(OSError):
        start("/no/such/program")


def test_a_prefix_is_bypassed_by_the_pipes_and_killed_with_all_that_it_started(tmp_path):
    """A prefix may print, and start the engine in a session of its own."""
    text = 'echo prefix $1; shift\nsleep 60 </dev/null >/dev/null 2>&1 &\nsetsid -w "$@"\necho report'
    prefix = install(tmp_path / "prefix", f"#!/bin/sh\n{text}\n")
    launcher = Launcher(MARK, (str(prefix), "{worker}"))
    assert launcher.prefix_for("3") == [str(prefix), f"{MARK}-3"]
    log = tmp_path / "log"
    for number in (1, 2):
        program = launcher.start(["cat"], env=ENVIRON, cwd=None, stderr=log, pipes=True)
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(b"question\n")
        program.stdin.flush()
        assert (program.stdout.readline(), program.returncode) == (b"question\n", None)
        behind = [one.pid for one in psutil.Process(program.pid).children(recursive=True)]
        if number == 1:
            program.stdin.close()
            assert (program.stdout.read(), program.wait(0.001)) == (b"", 0)
            assert log.read_text() == f"prefix {MARK}-1\nreport\n"
        launcher.kill(program)
        assert (program.wait(60), program.returncode) == ((0, 0) if number == 1 else (-9, -9))
        wait_for(lambda them=behind: not any(map(is_running, them)), "all are gone")
        program.stdout.close()
    plain = launcher.start(["true"], env=ENVIRON, cwd=None, stderr=log)
    launcher.kill(plain)
    plain.wait(60)


def test_a_wrong_prefix_is_refused_and_a_worker_sees_only_its_own_device(tmp_path, pages):
    """Also in a container; the rest of the environment is as it was."""
    said = []
    for text in ("nsys 'x", "", "no-such-program -o x"):
        with pytest.raises(BadcjobsError) as refused:
            root.parse_prefix(text, str(tmp_path))
        said.append(f"{refused.value}\n  exit code {refused.value.exit_code}")
    reported = {"refusals.txt": "\n\n".join(said)}
    assert root.parse_prefix("sh -c 'a b'", os.environ["PATH"]) == ["sh", "-c", "a b"]
    for name, device in {"nvidia": NVIDIA, "amd": AMD, "token": Device("2", "no library"), "cpu": None}.items():
        env = root.worker_environment(GIVEN, WorkerPlan(0, device, 7, 3))
        reported[f"{name}.txt"] = "\n".join(f"{key}={value}" for key, value in sorted(env.items()))
    pages(reported)
    assert root.worker_environment({"OMP_NUM_THREADS": "9"}, WorkerPlan(0, None, None, 2))["OMP_NUM_THREADS"] == "9"


def test_the_end_of_a_log_and_the_fingerprint_of_a_program(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_bytes(b"x" * 5000 + "\nfür\n".encode() + b"\xff\n")
    assert last_lines(log, limit=10) == "xx\nfür\n\ufffd"
    assert len(last_lines(log)) == 1998
    one, other = tmp_path / "one", tmp_path / "another"
    assert fingerprint_of([one, other]) is None
    one.write_text("a")
    first = fingerprint_of([one])
    assert first == fingerprint_of([other, one]) == "4b384a5e"
    other.write_text("b")
    both = fingerprint_of([other, one])
    assert both == fingerprint_of([one, other]) != first
    sizes = fingerprint_of([one, other], content=False)
    other.write_text("c")
    assert (fingerprint_of([one, other]) == both, fingerprint_of([one, other], content=False) == sizes) == (False, True)
    size = 20 << 20  # only the ends are read: the first and the last 8 MiB
    seen = set()
    for at in (0, (8 << 20) - 1, (12 << 20), size - 1, 8 << 20, (12 << 20) - 1):
        with one.open("wb") as file:
            file.truncate(size)
            file.seek(at)
            file.write(b"x")
        seen.add(fingerprint_of([one]))
    assert len(seen) == 5, "changes in the middle are not seen"
