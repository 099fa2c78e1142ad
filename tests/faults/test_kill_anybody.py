"""A fault campaign over one run: kill -9 of any process, at any moment, until the run says that it is done.

By hand: pytest tests/faults --count 100 -s
"""

import os
import random
import time
from collections import Counter
from contextlib import contextmanager, suppress

import psutil
import pytest
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER, rows
from support.fake_hawkears import fake_package_environ, hawkears_options
from support.fake_mps import install_fake_mps
from support.fake_nvml import fake_nvml_environ
from support.live_files import committed, halves, live_folders
from support.waiting import wait_for

DEVICES = 2
CHUNKS_PER_KILL = 9
CHUNK_S, WINDOWS = 1.2, 12
LONGEST_PAUSE_S = 1.0  # between two kills
OF_MPS = {"mps-control -d": "MPS daemon", "mps-control": "question to it", "mps-server": "MPS server"}
ALONE_SHARE = 0.05  # of the moments at which a wrapper has no one beside it
# What must not be lost once it is committed.
PRECIOUS = {
    "chunk": "SELECT recording_id, chunk_id, ended_at_ms FROM chunk WHERE status = 'done'",
    "attempt": "SELECT chunk_id, started_at_ms, ended_at_ms, outcome FROM attempt WHERE outcome IS NOT NULL",
    "detection": "SELECT chunk_id, start_ms, end_ms, label FROM detection",
    "sample": "SELECT at_ms, device_id, utilization_percent, power_w FROM sample",
}
SCIENCE = (
    "SELECT recording_id, chunk_id, status, detections, audio_s FROM chunk ORDER BY 1, 2",
    "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1, 2, 3",
)


# Engines → chunks that a worker has begun at the same time, its fellows on a device and itself, mode of the live files,
# seconds per chunk, share of --count
VARIANTS = {
    "demo": (1, 1, "local", 0.08, 1.0),
    "hawkears": (2, 2, "local", 0.3, 0.4),  # the stand-in package, fed by our workers, which a parent forks
    "mps": (1, 2, "local", 0.15, 0.5),  # the same, on cards that they share through a daemon
    "command": (1, 1, "shared", 0.1, 0.2),  # a program per chunk with a child of its own: it fails when that dies
}


def engine(site, name, chunk_s):
    if name == "demo":
        return "--engine", "demo", f"--engine-arg=--burn-s={chunk_s}"
    if name == "hawkears":
        return hawkears_options(site.folder, "--threads=2")
    if name == "mps":
        return hawkears_options(site.folder, "--threads=1")
    heard = 'label=$(cksum < "$1" | cut -d" " -f1)\nprintf "start_time,end_time,label,score\\n0,1,$label,0.5\\n" > "$2"'
    script = site.script("slow.sh", f"set -e\nsleep $3\n{heard}")
    return "--command", f"{script} {{input}} {{output}} {chunk_s}"


def make_manifest(site, chunks):
    """Audio differs from chunk to chunk: which tenths of a second are loud tells its number."""
    lines = [MANIFEST_HEADER]
    for number in range(chunks):
        loud = [(n / 10, (n + 1) / 10) for n in range(WINDOWS) if number * 37 >> n & 1]
        path = make_wav(site.folder / "audio" / f"c{number:04d}.wav", CHUNK_S, 1000, loud=loud, tone_hz=100)
        start_ms = number % 5 * 1200
        lines.append(f"rec{number // 5},c{number:04d},{path},{start_ms},{start_ms + 1200},0,,")
    (site.folder / "manifest.csv").write_text("\n".join(lines) + "\n")


def result(site, out):
    """Merge, and return the science in it, no matter which task did it and when."""
    merged = site.badcjobs("merge", out)
    assert merged.exit_code == 0, merged.stderr
    assert rows(out / "job.sqlite", "PRAGMA integrity_check") == [("ok",)]
    return [rows(out / "job.sqlite", sql) for sql in SCIENCE]


class Campaign:
    """One command that is run again and again, no matter which process is killed in it, and the account of that."""

    def __init__(self, site, name, kills, seed):
        self.site, self.name, self.wanted, self.chance = site, name, kills, random.Random(seed)
        self.lanes, self.per_gpu, self.mode, self.chunk_s, _ = VARIANTS[name]
        self.chunks = 30 + kills * CHUNKS_PER_KILL
        self.kills, self.wrappers = Counter(), []
        self.seen = {table: set() for table in PRECIOUS}  # at the kills
        self.at_most_in_flight = 0  # begun, and in the hands of those who were killed
        make_manifest(site, self.chunks)

    def start(self, out, chunk_s):
        paths = [fake_package_environ()["PYTHONPATH"], os.environ.get("PYTHONPATH")]
        stand_in = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FAKE_HAWKEARS_S": str(chunk_s)}
        config = ("publish_every_s=0.5", "backoff_s=0.05", f"live_mode={self.mode}")
        quick = ("--interval", 0.1, *(f"--config=run.{one}" for one in config), f"--workers-per-gpu={self.per_gpu}")
        if self.name == "mps":
            stand_in |= {**fake_nvml_environ(DEVICES), **install_fake_mps(self.site.folder / "bin")}
        else:
            quick += ("--simulate", DEVICES)
        options = (*quick, *engine(self.site, self.name, chunk_s))
        self.program = self.site.start("run", "manifest.csv", "--out", out, *options,
                                       env={**stand_in, "HOME": "/nonexistent"})  # fmt: skip
        self.wrappers.append(self.program.pid)
        return self.program

    def is_over(self):
        """Start the same command again if its wrapper was killed; whatever else ends it, but success, is a failure."""
        if self.program.running:
            return False
        ended = self.program.wait()
        assert ended.exit_code in (0, -9), ended.stderr
        if ended.exit_code != 0:
            self.start(self.site.out, self.chunk_s)
        return ended.exit_code == 0

    def strike(self):
        """Kill one of those who are there, each kind as likely as any other."""
        while True:
            left_s = (self.chunks - len(self.seen["chunk"])) * self.chunk_s / DEVICES / self.per_gpu
            share_s = left_s / self.lanes / (self.wanted - self.kills.total() + 1)  # of this kill
            time.sleep(self.chance.uniform(0, min(LONGEST_PAUSE_S, 1.5 * share_s)))  # the moment is what is tried here
            assert not self.is_over(), f"the work is over after {self.kills.total()} kills: it needs more chunks"
            with everybody_standing_still(self.site) as everybody:
                kinds = {}
                for process in everybody:
                    with suppress(psutil.Error):
                        kinds.setdefault(self._kind(process), []).append(process)
                # A wrapper that has started no one yet is let live most of the time, or there would never be others.
                is_up = len(kinds) > 1 if self.name != "mps" else "worker" in kinds  # the daemons come before workers
                if is_up or (kinds and self.chance.random() < ALONE_SHARE):
                    kind = self.chance.choice(sorted(kinds))
                    self._kill(kind, self.chance.choice(sorted(kinds[kind], key=lambda process: process.pid)))
                    return

    def _kind(self, process):
        for words, kind in OF_MPS.items():
            if words in " ".join(process.cmdline()):
                return kind
        if process.pid in self.wrappers:
            return "wrapper"
        if any("recorder_process" in word for word in process.cmdline()):
            return "recorder" if process.ppid() in self.wrappers else "recorder of a dead wrapper"
        is_child = process.ppid() in self.wrappers
        if "--parent" in process.cmdline():  # a forked worker has the command line of its parent
            return "parent of workers" if is_child else "worker"
        return "worker" if is_child else "child of a worker"

    def _kill(self, kind, victim):
        self.kills[kind] += 1
        for live in (half for folder in live_folders(self.site) for half in halves(folder) if half.exists()):
            for table, sql in PRECIOUS.items():
                self.seen[table] |= set(committed(live, sql))
        victim.kill()
        if "recorder" not in kind:
            devices = DEVICES if kind in ("wrapper", "parent of workers") else int(kind in OF_MPS.values())
            self.at_most_in_flight += self.lanes * (devices * self.per_gpu or 1)

    def check_account(self, job):
        """Compare what was finished and begun with what is in the job database."""
        done = Counter(rows(job, "SELECT recording_id, chunk_id FROM attempt WHERE outcome = 'done'"))
        lost = {table: self.seen[table] - set(self.site.rows(sql)) for table, sql in PRECIOUS.items()}
        again = len(rows(job, "SELECT 1 FROM attempt")) - self.chunks
        seen = {table: len(found) for table, found in self.seen.items()}
        print(f"{dict(self.kills)}; {again} begun again, at most {self.at_most_in_flight} in flight; seen: {seen}")
        assert not any(lost.values()), f"lost: { ({table: sorted(some)[:5] for table, some in lost.items()}) }"
        assert max(done.values()) == 1, f"done twice: {done.most_common(5)}"
        assert again <= self.at_most_in_flight


@contextmanager
def everybody_standing_still(site):
    """Stop the time for all processes of a site, so that what is committed at this moment can be seen."""
    stopped = []
    for process in site.processes():
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            stopped.append(process)
    yield stopped
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_whose_processes_are_killed_at_random_ends_as_if_nothing_had_happened(site, name, seed, pytestconfig):
    kills = max(1, round(VARIANTS[name][4] * pytestconfig.getoption("--count")))
    print(f"\n{name}: {kills} kills")
    campaign, calm = Campaign(site, name, kills, seed), site.folder / "undisturbed"
    assert campaign.start(calm, 0).wait().exit_code == 0
    campaign.start(site.out, campaign.chunk_s)
    for _ in range(kills):
        campaign.strike()
    wait_for(campaign.is_over, "it is done", timeout_s=120)
    wait_for(lambda: not site.processes(), "no process of ours survives", timeout_s=40)
    assert result(site, site.out) == result(site, calm), "differs from the undisturbed run"
    campaign.check_account(site.out / "job.sqlite")
