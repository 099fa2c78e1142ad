"""However a wrapper dies, nobody below it goes on: neither a worker nor what a worker has started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "site")
    yield site
    site.close()


def start(site: Site, **env: str) -> Program:
    """Start a run on two devices, and wait until both have a chunk's program, its child and its daemon."""
    script = site.script("program.sh", PROGRAM.format(folder=site.folder))
    options = ("--command", f"{script} {{input}} {{output}}", "--simulate", 2, "--config", "run.grace_s=0")
    program = site.start_run(site.manifest(4), *options, env=env)
    wait_for(lambda: len(list(site.folder.glob("up-*"))) == 2 and site.count_now("sample"), "all are up")
    wait_for(lambda: len(site.processes("sleep 300")) == 4, "children and daemons are there")
    return program


def assert_nobody_is_left(site: Site) -> None:
    wait_for(lambda: not site.processes(), f"everybody is gone: {site.processes()}", timeout_s=40)
    assert rows(site.task_databases()[0], "PRAGMA integrity_check") == [("ok",)]
    assert rows(site.task_databases()[0], "SELECT status, count(*) FROM chunk GROUP BY 1") == [("pending", 4)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nobody_outlives_a_wrapper_that_is_told_to_end(site: Site, signum: signal.Signals) -> None:
    program = start(site)
    program.send(signum)
    assert program.wait().exit_code == (130 if signum is signal.SIGINT else 75)
    assert_nobody_is_left(site)


def test_nobody_outlives_a_wrapper_that_is_killed(site: Site) -> None:
    start(site).kill()
    assert_nobody_is_left(site)


def test_nobody_outlives_a_wrapper_with_a_bug(site: Site) -> None:
    bug = site.folder / "bug"
    (site.folder / "edge").mkdir()
    (site.folder / "edge" / "sitecustomize.py").write_text(BUG.format(bug=str(bug)))
    paths = filter(None, [str(site.folder / "edge"), os.environ.get("PYTHONPATH")])
    program = start(site, PYTHONPATH=os.pathsep.join(paths))
    bug.touch()
    ended = program.wait()
    assert ended.exit_code == 70, ended.stderr
    assert "RuntimeError" in ended.stderr
    assert_nobody_is_left(site)
    assert site.rows("SELECT verdict FROM task") == [("killed",)]


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
    first, _ = site.task_databases()
    assert rows(first, "SELECT verdict FROM task") == [("killed",)]
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
    assert version == "2.3.0", problem
    assert killed.exists()
