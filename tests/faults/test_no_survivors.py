"""However a wrapper dies, nobody below it goes on: neither a worker nor what a worker has started."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from rooms.workers import query_hawkears
from support.badcjobs_program import Program, Site, rows
from support.fake_hawkears import make_fake_root
from support.fake_hawkears_package import fake_package_environ
from support.waiting import wait_for

# A chunk's program with a child, and with a daemon that has left its session; none of them hears TERM.
PROGRAM = """trap '' TERM
setsid sh -c 'touch {folder}/up-$BADCJOBS_CHUNK_ID; exec sleep 300' &
sleep 300 &
while [ ! -e {folder}/finish ]; do sleep 0.05; done
kill %1 %2 2> /dev/null
echo start_time,end_time,label,score > "$2"
"""
# What no test can make happen from outside: an error that nobody has thought of, in the middle of the wrapper's work.
BUG = """
import ctypes, os, sys, threading, time
def strike(main):
    while not os.path.exists({bug!r}):
        time.sleep(0.02)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(RuntimeError))
if "run" in sys.orig_argv:
    threading.Thread(target=strike, args=(threading.main_thread().ident,), daemon=True).start()
"""
ENDS = {"SIGTERM": (75, "stopped"), "SIGINT": (130, "stopped"), "SIGHUP": (75, "stopped"), "SIGKILL": (-9, "killed")}


def start(site: Site, **env: str) -> Program:
    """Start a run on two devices, and wait until both have a chunk's program, its child and its daemon."""
    script = site.script("program.sh", PROGRAM.format(folder=site.folder))
    options = ("--command", f"{script} {{input}} {{output}}", "--simulate", 2, "--config", "run.grace_s=0")
    program = site.start_run(site.manifest(4), *options, env=env)
    wait_for(lambda: len(list(site.folder.glob("up-*"))) == 2 and site.count_now("sample"), "all are up")
    wait_for(lambda: len(site.processes("sleep 300")) == 4, "children and daemons are there")
    return program


@pytest.mark.parametrize("end", [*ENDS, "a bug"])
def test_nobody_outlives_a_wrapper(site: Site, end: str) -> None:
    bug = site.folder / "bug"
    (site.folder / "edge").mkdir()
    (site.folder / "edge" / "sitecustomize.py").write_text(BUG.format(bug=str(bug)))
    paths = filter(None, [str(site.folder / "edge"), os.environ.get("PYTHONPATH")])
    program = start(site, PYTHONPATH=os.pathsep.join(paths))
    if end == "a bug":
        bug.touch()
    else:
        program.send(signal.Signals[end])
    ended = program.wait()
    exit_code, verdict = ENDS.get(end, (70, "killed"))
    assert (ended.exit_code, "RuntimeError" in ended.stderr) == (exit_code, end == "a bug"), ended.stderr
    wait_for(lambda: not site.processes(), "everybody is gone", timeout_s=40)
    assert site.rows("PRAGMA integrity_check") == [("ok",)]
    assert site.rows("SELECT verdict FROM task") == [(verdict,)]
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY 1") == [("pending", 4)]


def test_no_worker_outlives_wrapper_and_recorder_killed_at_once_and_the_next_run_ends_the_rest(site: Site) -> None:
    program = start(site)
    (recorder,) = site.recorders()
    programs = [process for process in site.processes("program.sh") if process.name() == "program.sh"]
    recorder.kill()
    program.kill()
    wait_for(lambda: not any(map(is_alive, programs)), "the workers died with their wrapper", timeout_s=40)
    assert not site.recorders()
    (site.folder / "finish").touch()
    again = site.run(site.folder / "manifest.csv", "--command", f"{site.folder}/program.sh {{input}} {{output}}",
                     "--simulate", 2, "--config", "run.grace_s=0")  # fmt: skip
    assert again.exit_code == 0, again.stderr
    wait_for(lambda: not site.processes(), "what they had started is ended, too", timeout_s=40)
    assert rows(site.task_databases()[0], "SELECT verdict FROM task") == [("killed",)]
    assert list(site.local.iterdir()) == [], "and nothing of theirs stays on the node"


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_hawkears_that_is_killed_while_it_is_asked_for_its_abilities_is_asked_again(tmp_path: Path) -> None:
    python, killed = tmp_path / "python", tmp_path / "killed"
    python.write_text(f'#!/bin/sh\n[ -e {killed} ] || {{ touch {killed}; kill -9 $$; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], **fake_package_environ()}
    version, problem = query_hawkears([str(python)], [], environ=environ, cwd=make_fake_root(tmp_path / "root"))
    assert (version, killed.exists()) == ("2.3.0", True), problem
