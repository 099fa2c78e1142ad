"""The array template as a scientist uses it: submitted untouched, or with its two lines edited."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.slurm_cluster import JobEnd, SlurmCluster

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "array.sbatch"
AUTO = ("--workers-per-gpu", "auto")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A stand-in for badcjobs that writes down how it was called."""
    path = tmp_path / "badcjobs"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "index = os.environ['SLURM_ARRAY_TASK_ID']\n"
        "json.dump(sys.argv[1:], open(f'called-{index}', 'w'))\n"
        "sys.exit(75)\n"
    )
    path.chmod(0o755)
    return path


def test_the_template_works_untouched_with_everything_in_export(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    export = f"ALL,SOURCE=a b.csv,OUT=out,BADCJOBS={program},BADCJOBS_ARGS=--simulate 4 --engine demo"
    job_id = slurm_cluster.sbatch(TEMPLATE, "--gpus-per-node=2", f"--export={export}", cwd=tmp_path)
    assert set(slurm_cluster.wait(job_id).values()) == {JobEnd("FAILED", 75)}
    for index in range(4):
        called = json.loads((tmp_path / f"called-{index}").read_text())
        assert called == ["run", "a b.csv", "--out", "out", *AUTO, "--simulate", "4", "--engine", "demo"]
        assert "a b.csv -> out" in (tmp_path / f"badcjobs-{job_id}_{index}.log").read_text()


def test_the_template_works_with_its_two_lines_edited(
    slurm_cluster: SlurmCluster, tmp_path: Path, program: Path
) -> None:
    text = TEMPLATE.read_text().replace("${SOURCE:=}", "${SOURCE:=my audio}").replace("${OUT:=}", "${OUT:=out}")
    (tmp_path / "mine.sbatch").write_text(text.replace("${BADCJOBS:=badcjobs}", f"${{BADCJOBS:={program}}}"))
    slurm_cluster.wait(slurm_cluster.sbatch(tmp_path / "mine.sbatch", "--array=7", cwd=tmp_path))
    assert json.loads((tmp_path / "called-7").read_text()) == ["run", "my audio", "--out", "out", *AUTO]


@pytest.mark.parametrize(
    ("export", "code", "message"),
    [
        ("ALL,OUT=out", 2, "SOURCE is not set"),
        ("ALL,SOURCE=in.csv", 2, "OUT is not set"),
        ("ALL,SOURCE=in.csv,OUT=out,BADCJOBS=/no/such/badcjobs", 3, "program '/no/such/badcjobs' not found on gpu"),
    ],
)
def test_the_template_refuses_what_cannot_work_and_says_what_to_try(
    slurm_cluster: SlurmCluster, tmp_path: Path, export: str, code: int, message: str
) -> None:
    job_id = slurm_cluster.sbatch(TEMPLATE, "--array=0", f"--export={export}", cwd=tmp_path)
    assert slurm_cluster.wait(job_id) == {f"{job_id}_0": JobEnd("FAILED", code)}
    log = (tmp_path / f"badcjobs-{job_id}_0.log").read_text()
    assert message in log
    assert "try: sbatch --export=ALL," in log
