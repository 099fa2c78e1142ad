"""Runs the badcjobs program as a shell would, and looks at what it leaves: files, databases, processes.

A ``Site`` is the world of one test: audio, a run folder, a node-local folder, and an environment of its own.
"""

import itertools
import json
import os
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.audio import make_wav
from support.forked_commands import can_be_forked, run_forked
from support.stand_ins import install
from support.waiting import processes, wait_for

# Every process of a test carries this variable, so that none can hide, no matter which parent it has.
MARK = "BADCJOBS_TEST_SITE"
MANIFEST_HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
CHUNK_S = 0.6
QUICK = (
    "--interval", "0.1", "--config", "run.publish_every_s=0.1", "--config", "run.backoff_s=0.05", "--workers-per-gpu=1",
)  # fmt: skip
ON_CPU = ("--engine", "demo", "--cpu-workers", "1", "--no-emit-gpu-telemetry")  # the quickest way through a task
# As a recorder is on a machine too busy for ten readings a second.
NOT_LATE = "reason NOT LIKE 'the recorder was late%' AND reason <> 'the recorder was slow to start'"
_NO_CHARTS = Path(__file__).parent / "no_charts"
KEPT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH")


def without_charts(python_path: str | None) -> str:
    """Return a PYTHONPATH for programs that need not draw, which takes long; tests/browser is about charts."""
    return os.pathsep.join(filter(None, [str(_NO_CHARTS), python_path]))


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout; a second one, or a stray line, is an error."""
        return json.loads(self.stdout)


class Program:
    """A badcjobs that runs; what it says goes to files, which never block it and can be read meanwhile."""

    def __init__(self, args: Sequence[object], env: dict[str, str], cwd: Path, said: Path) -> None:
        argv = [sys.executable, "-m", "badcjobs", *map(str, args)]
        self._stdout, self._stderr = said.with_suffix(".stdout"), said.with_suffix(".stderr")
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            self._process = subprocess.Popen(argv, env=env, cwd=cwd, **pipes)
        self.pid, self.send = self._process.pid, self._process.send_signal

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 120) -> Outcome:
        """Wait for the end; a program that does not come to one is killed, and that is a failure."""
        try:
            exit_code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s; it said:\n{self.stderr}") from None
        return Outcome(exit_code, self.stdout, self.stderr)


def forked(args: Sequence[object], env: dict[str, str], cwd: Path, said: Path, timeout_s: float) -> Outcome:
    """Run a short command to its end."""
    stdout, stderr = said.with_suffix(".stdout"), said.with_suffix(".stderr")
    try:
        exit_code = run_forked([*map(str, args)], env, cwd, stdout, stderr, timeout_s)
    except TimeoutError:
        raise AssertionError(f"still running after {timeout_s} s; it said:\n{stderr.read_text()}") from None
    return Outcome(exit_code, stdout.read_text(), stderr.read_text(errors="replace"))


class Site:
    """A place for one test: nothing in it comes from outside, and nothing may stay when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.local, self._said = folder, folder / "run", folder / "node-local", folder / "said"
        self.local.mkdir(parents=True)
        self._said.mkdir()
        self._mark, self._numbers = uuid.uuid4().hex, itertools.count(1)

    def environ(self, changes: dict[str, str] | None = None) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        # What runs learn from each other, and the GPUs that they lock, stay within a test.
        places = {"XDG_CACHE_HOME": str(self.folder / "cache"), "BADCJOBS_LOCK_DIR": str(self.folder / "locks")}
        places |= {"TMPDIR": str(self.local), MARK: self._mark}
        places["SYSFS_PATH"] = "/nowhere"  # a GPU of this machine changes nothing
        python_path = without_charts(kept.get("PYTHONPATH"))
        return {**kept, "PYTHONPATH": python_path, "LANG": "C.UTF-8", **places, **(changes or {})}

    def start(self, *args: object, env: dict[str, str] | None = None) -> Program:
        return Program(args, self.environ(env), self.folder, self._said / str(next(self._numbers)))

    def badcjobs(self, *args: object, env: dict[str, str] | None = None, timeout_s: float = 120) -> Outcome:
        if not can_be_forked(env or {}):
            return self.start(*args, env=env).wait(timeout_s)
        return forked(args, self.environ(env), self.folder, self._said / str(next(self._numbers)), timeout_s)

    def badcjobs_each(self, commands: Sequence[Sequence[object]], envs: Sequence[dict[str, str]] = ()) -> list[Outcome]:
        """Run many short commands, two at a time."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            environments = envs or [{}] * len(commands)
            return list(pool.map(lambda args, env: self.badcjobs(*args, env=env), commands, environments))

    def start_run(self, source: Path, *args: object, env: dict[str, str] | None = None) -> Program:
        return self.start("run", source, "--out", self.out, *QUICK, *args, env=env)

    def run(self, source: Path, *args: object, env: dict[str, str] | None = None, timeout_s: float = 120) -> Outcome:
        return self.badcjobs("run", source, "--out", self.out, *QUICK, *args, env=env, timeout_s=timeout_s)

    def run_tasks(self, source: Path, *args: object, envs: Sequence[dict[str, str]]) -> None:
        """Run the tasks of an array side by side, as Slurm does, and see them all end well."""
        programs = [self.start_run(source, *args, env=env) for env in envs]
        ends = [program.wait() for program in programs]
        assert [end.exit_code for end in ends] == [0] * len(envs), "\n".join(end.stderr for end in ends)

    def manifest(self, chunks: int = 6, *, name: str = "manifest.csv", prefix: str = "c") -> Path:
        """Write a manifest and its audio: three chunks to a recording, chunk i with i % 3 loud stretches."""
        sounds = [make_wav(self.folder / "sounds" / f"{n}.wav", CHUNK_S, 1000, loud=loud(n), tone_hz=100)
                  for n in range(3)]  # fmt: skip
        lines = [MANIFEST_HEADER]
        (self.folder / "audio").mkdir(exist_ok=True)
        for i in range(chunks):
            audio, start_ms = self.folder / "audio" / f"{prefix}{i:03d}.wav", i % 3 * 600
            audio.write_bytes(sounds[i % 3].read_bytes())
            lines.append(f"rec{i // 3},{prefix}{i:03d},{audio},{start_ms},{start_ms + 600},0,,")
        path = self.folder / name
        path.write_text("\n".join(lines) + "\n")
        return path

    def script(self, name: str, text: str) -> Path:
        """Write a shell script; commands of a shell are the quickest programs there are."""
        return install(self.folder / name, f"#!/bin/sh\n{text}\n")

    def task_databases(self) -> list[Path]:
        return sorted(self.out.glob("tasks/*.sqlite"))

    def task_database(self) -> Path:
        (database,) = self.task_databases()
        return database

    def rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask every task database; a folder without any has no rows."""
        return [row for database in self.task_databases() for row in rows(database, sql, *values)]

    def count(self, table: str, where: str = "1") -> int:
        return sum(many for (many,) in self.rows(f"SELECT count(*) FROM {table} WHERE {where}"))

    def gaps(self) -> list[str]:
        """Return the reasons of all gaps but those of a machine too busy for ten readings a second."""
        return [reason for (reason,) in self.rows(f"SELECT reason FROM gap WHERE {NOT_LATE} ORDER BY from_ms")]

    def now(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Ask the node-local files of a task that runs; what is published is always a little older."""
        found = []
        for live in sorted(self.local.glob("*/*.sqlite")):
            try:
                found += rows(live, sql, *values)
            except sqlite3.OperationalError:
                continue  # it has no tables yet, or is gone already
        return found

    def count_now(self, table: str, where: str = "1") -> int:
        return sum(many for (many,) in self.now(f"SELECT count(*) FROM {table} WHERE {where}"))

    def merged(self) -> Path:
        """Merge the run and return its job database."""
        done = self.badcjobs("merge", self.out)
        assert done.exit_code == 0, done.stderr
        return self.out / "job.sqlite"

    def processes(self, doing: str = "") -> list[psutil.Process]:
        """Return the processes of this test, or those with a word in their command line."""
        return processes(lambda one: one.environ().get(MARK) == self._mark and doing in " ".join(one.cmdline()))

    def recorders(self) -> list[psutil.Process]:
        return self.processes("badcjobs.telemetry.recorder_process")

    def workers(self) -> list[psutil.Process]:
        return self.processes("badcjobs.workers.demo_worker")

    def close(self) -> None:
        """See everybody off; each process that is still there after a while is ended, and the test has failed."""
        try:
            wait_for(lambda: not self.processes(), "every process has ended", timeout_s=40)
        finally:
            for process in self.processes():
                process.kill()


def loud(stretches: int) -> list[tuple[float, float]]:
    """Return where a chunk with so many loud stretches has them, in seconds."""
    return [(0.1, 0.2), (0.3, 0.5)][:stretches]


def rows(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Ask one database."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(sql, values).fetchall()


def array_task(index: int, indices: Sequence[int], *, step: int = 1, job_id: int = 4821) -> dict[str, str]:
    """Return the variables that Slurm sets for one task of an array; a list of indices has step 1."""
    array = {"JOB_ID": job_id, "TASK_ID": index, "TASK_MIN": min(indices), "TASK_MAX": max(indices), "TASK_STEP": step,
             "TASK_COUNT": len(indices)}  # fmt: skip
    named = {f"SLURM_ARRAY_{name}": str(value) for name, value in array.items()}
    return {"SLURM_JOB_ID": str(job_id + 1 + index), **named, "SLURMD_NODENAME": "gpu-01"}


def assert_refused(outcome: Outcome, exit_code: int, *words: str) -> None:
    """Check that a command said no in our way: what, why or a line to paste, no traceback, nothing on stdout."""
    assert outcome.exit_code == exit_code, outcome.stderr
    assert "badcjobs: error: " in outcome.stderr
    assert "\n  try: " in outcome.stderr or "\n  why: " in outcome.stderr, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    for word in words:
        assert word in outcome.stderr
