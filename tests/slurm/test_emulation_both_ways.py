"""The same template both ways: through sbatch on a real Slurm, and through the emulation; then row by row."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER
from support.databases import query
from support.slurm_cluster import JobEnd, SlurmCluster

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "array.sbatch"
CHUNKS, BROKEN = 12, 5
ARRAY, GPUS = "1-7:2", 2
INDICES = (1, 3, 5, 7)
ARGUMENTS = "--simulate=4 --engine=demo --interval=0.2 --retries=0"
# Like badcjobs, but it also writes down which variables it was given.
PROGRAM = """#!/bin/sh
env | grep -E '^(SLURM|CUDA|SOURCE|OUT)' > env-$SLURM_ARRAY_TASK_ID
exec {python} -m badcjobs "$@"
"""
# Of newer versions of Slurm, of sites, and of the emulation.
OF_THE_EMULATION = {
    "CUDA_DEVICE_ORDER", "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", "SLURM_TMPDIR",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A run of the template in a folder of its own."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "out" / "job.sqlite"

    def variables(self, index: int) -> dict[str, str]:
        lines = (self.folder / f"env-{index}").read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}


def prepare(folder: Path) -> str:
    """Write the audio and the program; return the export of both ways."""
    folder.mkdir()
    lines = [MANIFEST_HEADER]
    for number in range(CHUNKS):
        audio = make_wav(folder / f"{number}.wav", seconds=1, loud=((number / 20, number / 20 + 0.3),))
        if number == BROKEN:
            audio.write_bytes(b"not a wav file")
        lines.append(f"rec{number % 3},c{number:03d},{audio.name},{number * 1000},{number * 1000 + 1000},0,,")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    program = folder / "badcjobs"
    program.write_text(PROGRAM.replace("{python}", sys.executable))
    program.chmod(0o755)
    return f"ALL,SOURCE=manifest.csv,OUT=out,BADCJOBS={program},BADCJOBS_ARGS={ARGUMENTS}"


@pytest.fixture(scope="module")
def ways(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Way]:
    """Both, at the same time, and over."""
    parent = tmp_path_factory.mktemp("both-ways")
    found = {name: Way(parent / name) for name in ("slurm", "local")}
    export = {name: prepare(way.folder) for name, way in found.items()}
    options = [f"--array={ARRAY}", f"--gpus-per-node={GPUS}"]
    job_id = slurm_cluster.sbatch(TEMPLATE, *options, f"--export={export['slurm']}", cwd=found["slurm"].folder)
    here = subprocess.Popen(
        [sys.executable, "-m", "badcjobs", "submit", "--cluster", "local", TEMPLATE]
        + [f"--sbatch={option}" for option in options]
        + [f'--sbatch="--export={export["local"]}"', "--", "--simulate", "4"],
        cwd=found["local"].folder,
        env={**slurm_cluster.env, "BADCJOBS_LOCK_DIR": str(parent / "locks")},
    )
    ends = slurm_cluster.wait(job_id, timeout_s=120)
    assert ends == {f"{job_id}_{i}": JobEnd("FAILED", 1) if i == 3 else JobEnd("COMPLETED", 0) for i in INDICES}
    subprocess.run([sys.executable, "-m", "badcjobs", "merge", found["slurm"].folder / "out"], check=True)
    assert here.wait(60) == 1  # the verdict of the merge: a chunk has failed for good
    return found


@pytest.mark.parametrize(
    "what",
    [
        "recording_id, chunk_id, source_path, start_ms, end_ms, status, attempts, audio_s, detections, error_class"
        " FROM chunk",
        "recording_id, chunk_id, start_ms, end_ms, label, label_name, score FROM detection",
        "recording_id, chunk_id, try_number, outcome, error_class FROM attempt",
        "array_index, restart, exit_code, verdict FROM task",
        "t.array_index, c.recording_id, c.chunk_id FROM chunk c JOIN task t USING (task_id)",
        "t.array_index, count(d.uuid), count(DISTINCT d.uuid), min(d.backend) FROM device d JOIN task t USING (task_id)"
        " GROUP BY 1",
        "name, sql FROM sqlite_master",
    ],
    ids=["chunks", "detections", "attempts", "tasks", "shards", "devices", "tables"],
)
def test_both_ways_leave_the_same_rows(ways: dict[str, Way], what: str) -> None:
    slurm, local = (sorted(query(way.job, f"SELECT {what}"), key=repr) for way in ways.values())
    assert slurm
    assert local == slurm


def test_both_ways_freeze_the_same_run(ways: dict[str, Way]) -> None:
    slurm, local = ((way.folder / "out" / "run.toml").read_text().replace(str(way.folder), "") for way in ways.values())
    assert local == slurm
    assert "[array]" in slurm


def test_both_ways_name_their_logs_alike(ways: dict[str, Way]) -> None:
    slurm, local = (sorted(path.name for path in way.folder.glob("*.log")) for way in ways.values())
    assert [name.partition("_")[2] for name in local] == [name.partition("_")[2] for name in slurm]
    assert len(slurm) == len(INDICES)


@pytest.mark.parametrize("index", INDICES)
def test_the_emulation_sets_only_what_slurm_sets_and_to_the_same(ways: dict[str, Way], index: int) -> None:
    slurm, local = (way.variables(index) for way in ways.values())
    assert set(local) - set(slurm) <= OF_THE_EMULATION
    same = ["SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_STEP"]
    same += ["SLURM_ARRAY_TASK_COUNT", "SLURM_JOB_NAME", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_GPUS_ON_NODE"]
    same += ["SLURM_MEM_PER_NODE", "SLURM_JOB_NUM_NODES"]
    assert {name: local[name] for name in same} == {name: slurm[name] for name in same}
    assert len(local["CUDA_VISIBLE_DEVICES"].split(",")) == len(slurm["CUDA_VISIBLE_DEVICES"].split(",")) == GPUS
    assert (local["SLURM_JOB_ID"] == local["SLURM_ARRAY_JOB_ID"]) == (
        slurm["SLURM_JOB_ID"] == slurm["SLURM_ARRAY_JOB_ID"]
    )
