"""Tests on the one Slurm cluster as stories: all begin at once, because most of their time is Slurm's own patience.

A story is written as one function that acts and asserts. The test of its name waits for its end; a second try of that
test tells the story again.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rooms.root import folder as folder_of
from support.badcjobs_program import MANIFEST_HEADER, Outcome, Program, forked
from support.databases import query
from support.slurm_cluster import JobEnd, SlurmCluster
from support.stand_ins import install
from support.waiting import processes, wait_for

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
SPANK_HEADER = Path("/usr/include/slurm/spank.h")


def build_spank(folder: Path) -> list[str]:
    """Build the plugin as its Makefile does; return the lines of slurm.conf that load it."""
    shutil.copytree(SCRIPTS / "spank", folder)
    subprocess.run(["make", "-C", folder, "CFLAGS=-Wall -Wextra -Werror"], check=True, capture_output=True)
    (folder / "plugstack.conf").write_text(f"optional {folder}/badc_telemetry.so\n")
    return [f"PlugStackConfig={folder}/plugstack.conf"]


class Hooks:
    """Our scripts for administrators, installed as slurm/README.md says, and the shared folder that they write to."""

    def __init__(self, folder: Path) -> None:
        self.scripts, self.spool = folder / "slurm", folder / "spool"
        self.epilog = self.scripts / "epilog.d" / "50-badcjobs.sh"
        shutil.copytree(SCRIPTS, self.scripts)
        for name in ("wanted", "ends"):
            (self.spool / name).mkdir(parents=True)
        (self.spool / "wanted").chmod(0o1777)
        spool, hooks = ("SPOOL=\n", f"SPOOL={self.spool}\n"), ("=/usr/local/lib/badcjobs/slurm\n", f"={self.scripts}\n")
        scripts = {"task_prolog.sh": spool, "jobcomp.sh": spool, "epilog.d/50-badcjobs.sh": hooks}
        for script, (old, new) in scripts.items():
            text = (self.scripts / script).read_text()
            assert text.count(old) == 1, f"{script} has no line {old}"
            (self.scripts / script).write_text(text.replace(old, new))

    @property
    def conf(self) -> list[str]:
        """The lines of slurm.conf."""
        tasks = [f"Task{name.title()}={self.scripts}/task_{name}.sh" for name in ("prolog", "epilog")]
        return [*tasks, f"Epilog={self.epilog}", "JobCompType=jobcomp/script", f"JobCompLoc={self.scripts}/jobcomp.sh"]

    def ends(self, job_id: int) -> list[dict[str, Any]]:
        """What the jobcomp hook has written of a job."""
        file = self.spool / "ends" / f"{job_id}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # a last one may be half written
        return [json.loads(line) for line in lines]

    def know(self, job_id: int, ends: Mapping[str, JobEnd]) -> bool:
        """Say whether the jobcomp hook, which runs a moment after a job, has written these ends; not all jobs ask."""
        written = {(one["array_index"], one["state"]) for one in self.ends(job_id)}
        tasks = {(int(task.partition("_")[2]) if "_" in task else None, end.state) for task, end in ends.items()}
        return tasks <= written or not (self.spool / "wanted" / str(job_id)).exists()


# Quick chunks end at once; the others wait for a file, but not in a task that Slurm has started a second time.
HANGS = """if [ ${BADCJOBS_CHUNK_ID#c} -ge QUICK ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    : >> hangs-${SLURM_ARRAY_TASK_ID:-0}-$BADCJOBS_CHUNK_ID
    while [ ! -e go ] && [ ! -e go-$BADCJOBS_CHUNK_ID ]; do sleep 0.1; done
fi"""
HEARD = "printf 'start_time,end_time,label,score\\n0,1,%s,0.5\\n' $BADCJOBS_CHUNK_ID > \"$2\""
TWICE = "SELECT 1 FROM attempt WHERE outcome = 'done' GROUP BY recording_id, chunk_id HAVING count(*) > 1"


class SlurmJob:
    """A folder with a manifest, an engine that can be made to hang, and a badcjobs for login and compute nodes.

    ``devices`` are simulated; 0: the work is done on a CPU. ``engine`` are its lines of shell.
    """

    def __init__(
        self, desk: Desk, name: str, chunks: int = 12, quick: int = 99, devices: int = 4, engine: str = ""
    ) -> None:
        self.cluster, self.hooks, self.chunks, self.quick = desk.cluster, desk.hooks, chunks, min(quick, chunks)
        self.folder, self._numbers = desk.folder / name, itertools.count()
        folder, self.out = self.folder, self.folder / "out"
        self.arguments = f"--config {folder}/run.toml"
        self.run_words = f"{folder}/badcjobs run manifest.csv --out out {self.arguments}"  # what a job script runs
        gpus = () if devices else ("--gpus-per-task", "0")
        self.submit_words = ("submit", "manifest.csv", "--out", "out", "--config", "run.toml", *gpus)
        (folder / "local").mkdir(parents=True)
        (folder / "said").mkdir()
        rows = [MANIFEST_HEADER]
        for number in range(chunks):
            (folder / f"{number}.wav").write_bytes(b"OggS: any audio")
            rows.append(f"rec,c{number},{number}.wav,{number * 1000},{number * 1000 + 1000},0,,")
        (folder / "manifest.csv").write_text("\n".join(rows) + "\n")
        self.program("engine.sh", engine or f"{HANGS.replace('QUICK', str(self.quick))}\n{HEARD}")
        self.program("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
        self.program("sacct", f": > {folder}/sacct-was-asked; exit 1")  # as where there is no accounting
        where = f"simulate = {devices}" if devices else "cpu_workers = 1\nemit_gpu_telemetry = false"
        (folder / "run.toml").write_text(
            f"[run]\ncommand = '{folder}/engine.sh {{input}} {{output}}'\n{where}\ninterval = 0.5\n"
            f"publish_every_s = 0.3\nbackoff_s = 0.05\nretries = 0\ngrace_s = 1\n"
        )

    def program(self, name: str, text: str) -> None:
        install(self.folder / name, f"#!/bin/sh\n{text}\n")

    def open(self, name: str = "go") -> None:
        """Let chunks that hang go on."""
        (self.folder / name).touch()

    @property
    def env(self) -> dict[str, str]:
        """Our own programs before all others, as a user's venv would be."""
        env = self.cluster.env
        return {**env, "PATH": f"{self.folder}{os.pathsep}{env['PATH']}", "BADCJOBS_POLL_S": "0.5"}

    def start(self, *args: object) -> Program:
        return Program(args, self.env, self.folder, self.folder / "said" / str(next(self._numbers)))

    def badcjobs(self, *args: object) -> Outcome:
        return forked(args, self.env, self.folder, self.folder / "said" / str(next(self._numbers)), 170)

    def submit(self, *options: object, expect: int = 0) -> Outcome:
        done = self.badcjobs(*self.submit_words, *options)
        assert done.exit_code == expect, done.stdout + done.stderr + self.log
        return done

    def sbatch(self, script: Path, *options: str) -> int:
        return self.cluster.sbatch(script, *options, cwd=self.folder, env=self.env)

    def sbatch_template(self, *options: str, name: str = "array", edit: tuple[str, str] = ("", "")) -> int:
        """Submit a template of ours as a scientist does, perhaps with a line edited."""
        text, script = (folder_of("templates") / f"{name}.sbatch").read_text(), self.folder / f"{name}.sbatch"
        assert edit[0] in text
        script.write_text(text.replace(*edit) if edit[0] else text)
        export = f"TMPDIR={self.folder}/local,SOURCE=manifest.csv,OUT=out,BADCJOBS_ARGS={self.arguments}"
        return self.sbatch(script, *options, f"--export=ALL,{export}")

    def sbatch_lines(self, *lines: str, options: tuple[str, ...]) -> int:
        script = self.folder / "job.sh"
        script.write_text("\n".join(["#!/bin/bash", "export TMPDIR=$PWD/local", *lines, ""]))
        return self.sbatch(script, "--output=%j.log", *options)

    def wait(self, job_id: int) -> set[JobEnd]:
        ends = self.cluster.wait(job_id)
        wait_for(lambda: self.hooks.know(job_id, ends), f"Slurm has written how job {job_id} ended: {ends}")
        return set(ends.values())

    def merge(self) -> dict[str, Any]:
        """Merge, also while the job is still there, as anybody may; return the summary."""
        done = self.badcjobs("merge", "out", "--json")
        assert done.exit_code == 0, done.stderr
        return dict(done.json)

    def hangs(self, many: int) -> None:
        """Wait until so many chunks hang, and what was done before is published."""
        wait_for(lambda: len(list(self.folder.glob("hangs-*"))) >= many, f"{many} chunks hang: {self.log}", 150)
        done = "SELECT count(*) FROM chunk WHERE status = 'done'"
        wait_for(lambda: sum(query(path, done)[0][0] for path in self.databases) >= self.quick, "it is published", 150)

    @property
    def databases(self) -> list[Path]:
        return sorted(self.out.glob("tasks/*.sqlite"))

    @property
    def log(self) -> str:
        logs = sorted([*self.folder.glob("*.log"), *self.out.glob("logs/*.out")])
        return "\n".join(path.read_text(errors="replace") for path in logs)

    @property
    def processes(self) -> list[psutil.Process]:
        """Whatever runs in the folder."""
        return processes(lambda process: process.cwd() == str(self.folder))

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return query(self.out / "job.sqlite", sql)

    def all_done(self) -> None:
        """Find each row of the manifest once in the job database: done, with the one thing heard in it."""
        summary = self.merge()
        names = sorted(f"c{number}" for number in range(self.chunks))
        assert (summary["verdict"], summary["done"], summary["left"]) == ("done", self.chunks, 0), self.log
        assert self.ask("SELECT chunk_id, status FROM chunk ORDER BY 1") == [(name, "done") for name in names]
        assert self.ask("SELECT chunk_id, label FROM detection ORDER BY 1") == [(name, name) for name in names]
        assert self.ask(f"SELECT count(*) FROM ({TWICE})") == [(0,)], "done twice"
        assert not (self.folder / "sacct-was-asked").exists()

    def left(self) -> int:
        """Merge, and find every row of the manifest once: what is not done is named as left."""
        summary = self.merge()
        assert (summary["verdict"], summary["chunks"]) == ("stopped", self.chunks), self.log
        pending = self.ask("SELECT count(*) FROM chunk WHERE status = 'pending'")
        assert pending == [(summary["left"],)] and summary["left"] == self.chunks - summary["done"] > 0
        return int(summary["left"])


class Desk(NamedTuple):
    """The place of one story at the login node."""

    cluster: SlurmCluster
    hooks: Hooks
    folder: Path

    def job(self, name: str = "job", **more: Any) -> SlurmJob:
        return SlurmJob(self, name, **more)


Body = Callable[[Desk], None]


def story(body: Body) -> Callable[[Stories], None]:
    """Make a test of a story."""

    def test(stories: Stories) -> None:
        stories.end_of(body)

    test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body  # type: ignore[attr-defined]
    return test


class Stories:
    """The stories of one session."""

    def __init__(self, cluster: SlurmCluster, hooks: Hooks, folder: Path, bodies: Iterable[Body]) -> None:
        self._cluster, self._hooks, self._folder, self._told = cluster, hooks, folder, 0
        self.pool = ThreadPoolExecutor(max_workers=12)
        self._ends: dict[Body, Future[None]] = {body: self._begin(body) for body in bodies}

    def _begin(self, body: Body) -> Future[None]:
        self._told += 1
        folder = self._folder / f"{self._told}-{body.__name__[5:45]}"
        folder.mkdir()
        return self.pool.submit(body, Desk(self._cluster, self._hooks, folder))

    def end_of(self, body: Body) -> None:
        (self._ends.pop(body, None) or self._begin(body)).result()
