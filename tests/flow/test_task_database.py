"""One array task from its allocation to its exit code: all that it writes and says, as pages."""

import re
import time
from contextlib import closing

from support.badcjobs_program import QUICK, array_task
from support.behaviour import FixedSite, pretty, some_rows

LOADS = "".join(f"[[device]]\nindex = {n}\nload = [[0, {load}]]\n" for n, load in enumerate((90, 5, 42.5)))
GRANTED = {
    **array_task(0, (0,)), "CUDA_VISIBLE_DEVICES": "1,2", "SLURM_CPUS_PER_TASK": "3", "SLURM_MEM_PER_NODE": "8192",
    "SLURM_RESTART_COUNT": "2",
}  # fmt: skip
TABLES = ("task", "device", "worker", "chunk", "attempt", "detection", "recording", "decision", "gap", "meta")
TABLES += ("metric_source", "recorder", "sample", "host_sample", "usage_sample")
# Depends on the moment: not reported at all, or only whether it is known.
LEFT_OUT = {"attempt_id", "processes", "gpu_state", "ticks", "time_limit_s", "cpu_cores", "cpu_percent"}
LEFT_OUT |= {"read_bytes_per_s"}
KNOWN = re.compile(r".*_(at_)?(ms|ns)|.*pid|at_ms|energy_j|cpu_s|reading_s|worst_late_s|memory_(used_|total_)?bytes")
OWN = "('live_filesystem', 'rows', 'environment')"  # of the machine


def reported(site):
    """Return the tables that a task writes, with their columns; a recorder on a busy machine is no gap."""
    ids = {row[0]: row[1] for row in site.rows("SELECT device_id, 'GPU ' || device_index FROM device")}
    ids |= {row[0]: "ours" for row in site.rows("SELECT task_id FROM task UNION SELECT worker_id FROM worker")}
    parts = []
    for table in TABLES:
        names = [
            name for (name,) in site.rows(f"SELECT name FROM pragma_table_info('{table}')") if name not in LEFT_OUT
        ]
        places = ("start_ms", "end_ms") if table in ("chunk", "detection") else ()  # in the audio
        shown = [f"{one} NOTNULL" if KNOWN.fullmatch(one) and one not in places else one for one in names]
        where = {"meta": f"WHERE key NOT IN {OWN}", "gap": "WHERE reason NOT LIKE 'the recorder was %'"}.get(table, "")
        found = site.rows(f"SELECT DISTINCT {', '.join(shown)} FROM {table} {where}")
        named = [tuple(ids.get(value, value) for value in row) for row in found]
        parts.append(f"## {table}\n{some_rows(names, named)}")
    return re.sub(r'-\w{8}"', '-RANDOM"', "\n".join(parts))


def shown_log(text):
    text = re.sub(r"(?m)^\S+ ", "", text)
    text = re.sub(r"WARNING an earlier task was killed: ending its MPS daemons .*\n", "", text)  # of a test beside this
    text = re.sub(r"-\w{8} \(\w+, local\)", "-RANDOM (FILESYSTEM, local)", text)
    return re.sub(r"until \S+ \S+ UTC, .*(?= from now)|(?<=recorder: ).*", "…", text)


def test_all_that_one_task_writes_and_says_and_one_after_it_that_has_nothing_to_do(pages):
    """The second of two devices is not used; one file is missing, one is broken."""
    with closing(FixedSite(after_s=None)) as site:
        manifest = site.manifest(5)
        (site.folder / "audio" / "c001.wav").unlink()
        (site.folder / "audio" / "c003.wav").write_bytes(b"no audio")
        (site.folder / "loads.toml").write_text(LOADS)
        options = ("--simulate", "loads.toml", "--max-gpus", 1, "--retries", 1, "--config", "run.keep_raw=true")
        options += ("--engine-arg=--burn-s=0.2",)  # so that there are readings of every kind
        words = ("run", manifest.name, "--out", "run", "--engine", "demo", *QUICK, *options, "--json", "--config")
        env = {**GRANTED, "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
        done = site.badcjobs(*words, "run.stage=never", env=env)
        assert (list(site.local.iterdir()), site.processes()) == ([], [])
        said = {"database.txt": reported(site), "end.json": pretty({**done.json, "wall_s": done.json["wall_s"] > 0.5})}
        ((limit_s,),) = site.rows("SELECT time_limit_s FROM task")
        assert 3500 < limit_s <= 3600
        again = site.badcjobs(*words, "run.retry_failed=false", env=env)
        said["again.json"] = pretty({**again.json, "wall_s": again.json["wall_s"] > 0})
        logs = [shown_log(path.with_suffix(".log").read_text()) for path in site.task_databases()]
        assert shown_log(done.stderr).splitlines()[-3:] == logs[0].splitlines()[-3:], "stderr says the same"
        said |= {"log.txt": logs[0], "again-log.txt": logs[1]}
        pages({name: site.plain(text) for name, text in said.items()})
