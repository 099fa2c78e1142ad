"""One job on a throw-away cluster, from its manifest to its merged database, and what must be true of every one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.badcjobs_program import MANIFEST_HEADER, without_charts
from support.databases import query
from support.slurm_cluster import SlurmCluster
from support.waiting import wait_for

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"

# Quick chunks end at once; the others wait for a file, but not in a task that Slurm has started a second time.
ENGINE = r"""#!/bin/sh
if [ ${BADCJOBS_CHUNK_ID#c} -ge QUICK ] && [ -z "$SLURM_RESTART_COUNT" ]; then
    : >> hangs-${SLURM_ARRAY_TASK_ID:-0}-$BADCJOBS_CHUNK_ID
    while [ ! -e go-$SLURMD_NODENAME ] && [ ! -e go-$BADCJOBS_CHUNK_ID ]; do sleep 0.1; done
fi
printf 'start_time,end_time,label,score\n0,1,%s,0.5\n' $BADCJOBS_CHUNK_ID > "$2"
"""


@dataclass(frozen=True)
class SlurmJob:
    """A folder with a manifest, an engine that can be made to hang, and a badcjobs for compute nodes."""

    cluster: SlurmCluster
    folder: Path
    chunks: int = 12
    quick: int = 12
    simulate: int = 4

    def __post_init__(self) -> None:
        (self.folder / "local").mkdir(parents=True)
        rows = [MANIFEST_HEADER]
        for number in range(self.chunks):
            (self.folder / f"{number}.wav").write_bytes(b"any audio")
            rows.append(f"rec,c{number},{number}.wav,{number * 1000},{number * 1000 + 1000},0,,")
        (self.folder / "manifest.csv").write_text("\n".join(rows) + "\n")
        self.write_program("engine.sh", ENGINE.replace("QUICK", str(self.quick)))
        self.write_program("badcjobs", f'#!/bin/sh\nexec {sys.executable} -m badcjobs "$@"\n')

    def write_program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    @property
    def run_words(self) -> str:
        """What a job script runs."""
        return f"{self.folder}/badcjobs run manifest.csv --out out {self._arguments()}"

    def _arguments(self) -> str:
        (self.folder / "run.toml").write_text(
            f"[run]\ncommand = '{self.folder}/engine.sh {{input}} {{output}}'\nsimulate = {self.simulate}\n"
            "interval = 0.5\npublish_every_s = 0.3\nbackoff_s = 0.05\ngrace_s = 1\n"  # less than the cluster's KillWait
        )
        return f"--config {self.folder}/run.toml"

    def submit_template(self, *options: str, name: str = "array", edit: tuple[str, str] = ("", "")) -> int:
        """Submit a template of ours as a scientist does, perhaps with a line edited."""
        text = (TEMPLATES / f"{name}.sbatch").read_text()
        assert edit[0] in text
        script = self.write_program(f"{name}.sbatch", text.replace(*edit) if edit[0] else text)
        export = f"TMPDIR={self.folder}/local,SOURCE=manifest.csv,OUT=out,BADCJOBS={self.folder}/badcjobs"
        export += f",BADCJOBS_ARGS={self._arguments()}"
        return self.cluster.sbatch(script, *options, f"--export=ALL,{export}", cwd=self.folder)

    def submit_script(self, *lines: str, options: tuple[str, ...]) -> int:
        """Submit a script of these lines."""
        script = self.write_program("job.sh", "\n".join(["#!/bin/bash", "export TMPDIR=$PWD/local", *lines, ""]))
        return self.cluster.sbatch(script, "--output=%j.log", *options, cwd=self.folder)

    def submit_merge(self, job_id: int) -> int:
        """Submit the merge that waits for a job to end, however it ends."""
        program = self.write_program("merge.sh", '#!/bin/bash\nexec ./badcjobs "$@" --json > merge.json\n')
        options = (f"--dependency=afterany:{job_id}", f"--export=ALL,OUT=out,BADCJOBS={program}")
        return self.cluster.sbatch(TEMPLATES / "merge.sbatch", *options, cwd=self.folder)

    @property
    def merged(self) -> dict[str, Any]:
        """What the merge job has said."""
        return dict(json.loads((self.folder / "merge.json").read_text()))

    def hangs(self, many: int) -> None:
        """Wait until so many chunks hang, and what was done before is published."""
        wait_for(lambda: len(list(self.folder.glob("hangs-*"))) >= many, f"{many} chunks hang: {self.log}", 60)
        wait_for(lambda: self.published("done") >= self.quick, f"what is done is published: {self.log}", 60)

    def published(self, status: str) -> int:
        counts = [query(path, "SELECT count(*) FROM chunk WHERE status = ?", status)[0][0] for path in self.databases]
        return sum(counts)

    @property
    def databases(self) -> list[Path]:
        return sorted((self.folder / "out" / "tasks").glob("*.sqlite"))

    @property
    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    @property
    def processes(self) -> list[int]:
        """Whatever runs in the folder."""
        return [process.pid for process in psutil.process_iter() if _runs_in(process, self.folder)]

    def merge(self) -> dict[str, Any]:
        """Merge while the job is still there, as anybody may; return the summary."""
        command = [sys.executable, "-m", "badcjobs", "merge", str(self.folder / "out"), "--json"]
        environ = {**os.environ, "PYTHONPATH": without_charts(os.environ.get("PYTHONPATH"))}
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the job database."""
        return query(self.folder / "out" / "job.sqlite", sql)

    def check_that_every_chunk_is_done_once(self, summary: dict[str, Any] | None = None) -> None:
        """Find each row of the manifest once in what the merge job made: done, with the one thing heard in it."""
        summary = summary or self.merged
        names = sorted(f"c{number}" for number in range(self.chunks))
        assert (summary["verdict"], summary["done"], summary["left"]) == ("done", self.chunks, 0), self.log
        assert self.ask("SELECT chunk_id, status FROM chunk ORDER BY 1") == [(name, "done") for name in names]
        assert self.ask("SELECT chunk_id, label FROM detection ORDER BY 1") == [(name, name) for name in names]

    def check_what_is_left(self) -> int:
        """Merge, and find every row of the manifest once: what is not done is named as left."""
        summary = self.merge()
        assert (summary["verdict"], summary["chunks"]) == ("stopped", self.chunks), self.log
        pending = self.ask("SELECT count(*) FROM chunk WHERE status = 'pending'")
        assert pending == [(summary["left"],)] and summary["left"] == self.chunks - summary["done"] > 0
        return int(summary["left"])


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder)
    except psutil.Error:
        return False  # gone meanwhile, or somebody else's
