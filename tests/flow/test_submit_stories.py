"""``badcjobs submit`` at a login node: what it checks, hands to sbatch, finds again and says in the end; nothing twice.

Each story is a few commands on a run folder of its own, and one page. sbatch, squeue and sacct are stand-ins that do
what a step says; what a real Slurm makes of it is in tests/slurm.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.badcjobs_program import ON_CPU, array_task
from support.behaviour import FixedSite, pretty
from support.login_node import (
    FORGOTTEN,
    HAS_BOTH,
    HAS_IT,
    HAS_OTHERS,
    LOST,
    REFUSES,
    SILENT,
    TAKES,
    LoginNode,
    hit,
    states,
)  # fmt: skip
from support.pages import Pages
from support.waiting import wait_for

RUN = ("--gpus-per-task", "0", "--", *ON_CPU, "--interval", "0.1")
MERGED = "4822 COMPLETED 0"
LATE = f"kill -KILL $PPID; sleep 1; touch $0.late; {TAKES}"
HAS_LATE = f"[ ! -e $(dirname $0)/sbatch.late ] || {HAS_IT}"
INSIDE = {**array_task(2, [0, 1, 2]), "CUDA_VISIBLE_DEVICES": "1", "SLURM_CONF": "/somewhere/slurm.conf"}
AT_FIRST = states("4821_0 TIMEOUT 0", "4821_1 RUNNING 0")
SEEN_ONCE = f"echo x >> $0.seen; case $(wc -l < $0.seen) in 1) {AT_FIRST} ;; *) echo '{MERGED}' ;; esac"
Step = tuple[str, dict[str, Any]]


def do(words: str, **does: Any) -> Step:
    """Return a command: submit with the usual source and run options, unless ``plain``; and what Slurm does then."""
    return words, does


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / "submitted.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def drop(*keys: str) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda record: {key: record[key] for key in record if key not in keys})


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


STORIES: dict[str, list[Step | Callable[[Path], None]]] = {
    # --- interrupted, killed, left without an answer ---
    "INT": [
        do("--sbatch=--array=1-5:2 --wait", SBATCH=f"{TAKES}; {hit('INT')}"), do("--sbatch=--array=1-5:2"),
    ],
    "TERM": [do("--sbatch=--array=1-5:2 --wait", SBATCH=f"{TAKES}; {hit('TERM')}"), do("--sbatch=--array=1-5:2")],
    "killed": [
        do("--tasks 2", SBATCH=f"{TAKES}; {hit('KILL')}", SCRIPTS=HAS_IT), do("--tasks 2 --dry-run", SCRIPTS=HAS_IT),
        do("--tasks 2"), do("--tasks 2 --again", SCRIPTS=HAS_IT), do("--tasks 3", SCRIPTS=HAS_IT),
        do("--tasks 2", SCRIPTS=HAS_IT),
    ],
    "for-nothing": [do("", SBATCH=hit("KILL")), do("", SCRIPTS=HAS_OTHERS)],
    "lost": [do("", SBATCH=LOST, SCRIPTS=HAS_OTHERS), do("", SCRIPTS=HAS_IT)],
    "lost-and-found": [do("", SBATCH=LOST, SCRIPTS=HAS_IT)],
    "late": [do("", SBATCH=LATE, SCRIPTS=HAS_LATE), do("", SCRIPTS=HAS_LATE)],
    "looked-at": [
        do("--tasks 3 --time 9", SBATCH=LOST), do("monitor --json --once OUT", plain=True),
        do("check --json --out OUT -- --engine demo", plain=True), do("--tasks 3 --time 9", SCRIPTS=HAS_IT, MERGE=LOST),
        do("monitor --json --once OUT", plain=True), do("--tasks 3 --time 9", SCRIPTS=HAS_BOTH),
        do("monitor --json --once OUT", plain=True), do("check --json --out OUT -- --engine demo", plain=True),
    ],
    "other-wish": [
        do("--time 5", SBATCH=LOST), do("--time 9 --dry-run", SCRIPTS=HAS_IT), do("--time 9 --dry-run"),
        do("--time 9", SCRIPTS=HAS_IT), do("--time 5", SCRIPTS=HAS_IT), do("--time 5"),
    ],
    "merge-killed": [do("", MERGE=f"echo 4822; {hit('KILL')}"), do("", SCRIPTS=HAS_BOTH)],
    "merge-lost-and-found": [do("", SCRIPTS=HAS_BOTH, MERGE=LOST)],
    "merge-lost": [do("", MERGE=LOST), do("--json"), do("", SCRIPTS=HAS_BOTH)],
    "merge-refused": [do("--json", MERGE=REFUSES), do("")],
    "emulated": [
        do("", SBATCH=LOST), do("--cluster local", SCRIPTS=HAS_IT), do("--cluster local"),
        do("--cluster local --dry-run", SCRIPTS=HAS_IT), do("--cluster local --dry-run", SCRIPTS=HAS_OTHERS),
        do("--cluster local --again --dry-run"),
    ],
    # --- found again ---
    "found": [
        do("--tasks 2 --json"), do("--tasks 2"), do("--tasks 2 --again"), do("--tasks 2 --config run.backoff_s=3"),
        do("--tasks 2", STATES=SILENT), do("--tasks 2 --again", STATES=SILENT),
        do("--tasks 2 --wait", STATES=FORGOTTEN), do("--tasks 2 --again", STATES=FORGOTTEN),
    ],
    "other-options": [
        do("--time 12:00:00 --mem 16GB --account st-pi-1 --sbatch=--array=0-1%1"),
        do("--time 720 --mem 16G --account=st-pi-1 --tasks=2 --parallel=1"),
        do("--time 1-0 --mem 32G --sbatch=--array=0-3 --sbatch=--qos=high"),
        do("--mem 32G --account st-pi-1 --sbatch=--array=0-1%1 --again", STATES=FORGOTTEN),
    ],
    "shown": [
        do("--time 5"), do("--time 5 --dry-run --json"), do("--time 9 --dry-run"), do("--time 5 --again --dry-run"),
    ],
    "idle": [do("--tasks 9 --dry-run --json"), do("--tasks 9"), do("--tasks 9"), do("--tasks 9 --json")],
    "earlier-version": [do(""), drop("asked", "listed"), do("--mem 9G --json")],
    "damaged-record": [do(""), write("submitted.json", '{"job": 1}'), do("")],
    "list": [do("LIST --tasks 3", plain=True), do("LIST --json", plain=True), do("LIST", plain=True)],
    # --- what is handed over, what is refused ---
    "inside-a-job": [do("", env=INSIDE)],
    "own-variables": [do("", env={"SBATCH_ACCOUNT": "st-pi-1", "CUDA_VISIBLE_DEVICES": "0"})],
    "arguments": [do("--root audio --config badc.toml", more=("--engine-arg=--burn-s=0.1", "--no-resume"))],
    "elsewhere": [
        do("--share-gpus"), do("--kill-wait 30"), do("--engine demo"), do("", more=("--shard", "0/2")), do("a.sbatch"),
        do("--sbatch=--nodes=2"), do("--sbatch=-N2"), do("--cluster pbs"), do("submit m.csv", plain=True),
        do("submit m.csv --out=", plain=True), do("submit --out OUT", plain=True), do("",
        env={"BADCJOBS_POLL_S": "soon"}),
        do("", env={"BADCJOBS_POLL_S": "0"}), do("", env={"BADCJOBS_POLL_S": "nan"}),
        do("--time soon --mem much --sbatch=--array=1,2,5", more=("--engine", "crow", "--retries", "-1")),
    ],
    "bad-source": [do("GONE", plain=True), do("TWICE", plain=True)],
    "no-slurm": [do("--account=st-pi-1", env={"PATH": "/nowhere"})],
    "sbatch-refuses": [do("--sbatch=--partition=none", SBATCH=REFUSES)],
    "project-file": [
        do("PROJECT --dry-run --config submit.requeues=3 --mem 9G", plain=True), do("PROJECT --json", plain=True),
        do("PROJECT", plain=True), do("PROJECT --tasks 3", plain=True),
    ],
    "large": [do("LARGE", plain=True)],
    # --- the verdict: what its own tasks have done, not what an older job has left in the same folder ---
    "old-fails-at-once": [
        do("--wait", STATES=states("4821_0 FAILED 0", "4821_1 FAILED 0", MERGED)),
        do("--wait --json", STATES=states("4821_0 FAILED 0", "4821_1 FAILED 0", MERGED)),
    ],
    "old-nobody-knows": [
        lambda folder: (folder / "logs").mkdir(), write("logs/4821_1_0_log.out", "slurmstepd: error\n"),
        do("--wait", STATES=FORGOTTEN),
    ],
    "old-accounting": [
        do("--wait", STATES=states("4821_1 COMPLETED 0", MERGED), SACCT=states("4821_0|CANCELLED by 1000",
        "4821_1|FAILED")),
    ],
    "old-seen-to-end": [do("--wait", STATES=SEEN_ONCE)],
    "old-own-tasks": [
        do("", STATES=states("4821_0 RUNNING 0")), lambda folder: as_job(folder, "4821"),
        do("--wait", STATES=FORGOTTEN), do("--wait", STATES=states("4821_0 FAILED 0", "4821_1 NODE_FAIL 0", MERGED)),
    ],
    "old-again": [do("--again"), do("--again --json", more=("--no-resume",)), do("--again", more=("--no-resume",))],
    "old-of-another-run": [do("", more=("--retries", "9")), do("--tasks 4"), do("--sbatch=--array=1")],
    "begin-nobody": [
        do("--tasks 2"), write("logs/4821_0_0_log.out", "module: command not found\n"),
        do("--tasks 2 --wait", STATES=states("4821_0 FAILED 256 NonZeroExitCode", "4821_1 FAILED 256",
        "4822 FAILED 256")),
    ],
    "half-again": [
        do("--again --dry-run --json"), do("--again"), do("--json", STATES=states("4821_1 RUNNING 0")),
    ],
}  # fmt: skip


def as_job(folder: Path, job_id: str) -> None:
    """Let the tasks of the older job be those of this one."""
    for path in [*(folder / "tasks").iterdir()]:
        shutil.copy(Path(str(folder) + "-4821") / "tasks" / path.name.replace("4000", job_id), folder / "tasks")


@pytest.fixture(scope="module")
def site() -> Iterator[FixedSite]:
    """One site with sources, and runs that were done before: all of one of two tasks, two of three tasks of another."""
    site = FixedSite()
    site.manifest(9, name="nine.csv")
    site.manifest(4, name="four.csv")
    site.manifest(6)
    programs = []
    for name, job_id, source, indices, of in (
        ("old", 4000, "four", (0, 1), 2), ("old-4821", 4821, "four", (0, 1), 2), ("half", 4000, "nine", (0, 2), 3),
    ):  # fmt: skip
        site.out = site.folder / name
        programs += [
            site.start_run(site.folder / f"{source}.csv", *ON_CPU, env=array_task(index, range(of), job_id=job_id))
            for index in indices
        ]
    assert [program.wait().exit_code for program in programs] == [0] * 6
    lines = (site.folder / "manifest.csv").read_text().splitlines()
    (site.folder / "gone.csv").write_text("\n".join([*lines, lines[1].replace("c000", "c00x")]) + "\n")
    (site.folder / "twice.csv").write_text("\n".join([*lines, lines[3]]) + "\n")
    many = [row.replace(f",c00{i % 3},", f",c{i},") for i, row in enumerate(lines[1:4] * 2000)]
    (site.folder / "large.csv").write_text("\n".join([lines[0], *many]) + "\n")
    (site.folder / "list.txt").write_text("manifest.csv\nother.csv\n")
    site.manifest(3, name="other.csv", prefix="d")
    (site.folder / "badc.toml").write_text("[run]\nretries = 5\n")
    engine = 'engine = "demo"\ncpu_workers = 1\nemit_gpu_telemetry = false\n'
    (site.folder / "project.toml").write_text(
        f'site = "sockeye"\n[run]\nsource = ["manifest.csv"]\nout = "project-file"\n{engine}'
        '[submit]\ntasks = 2\ngpus_per_task = 0\naccount = "st-lab-1-gpu"\nsetup = ["module load gcc"]\n'
    )
    yield site
    site.close()


SOURCES = {"LIST": "list.txt", "GONE": "gone.csv", "TWICE": "twice.csv", "LARGE": "large.csv", "OTHER": "other.csv"}


def command(words: str, name: str, does: dict[str, Any]) -> list[str]:
    first, *rest = words.split() or [""]
    own = [word.replace("OUT", name) for word in words.split()]
    if first == "PROJECT":
        return ["submit", "--config", "project.toml", *rest]
    if first in SOURCES:
        return ["submit", SOURCES[first], "--out", name, *rest, *RUN]
    if does.get("plain"):
        return own
    source = "four.csv" if name.startswith("old") else "nine.csv" if name.startswith("half") else "manifest.csv"
    given = own if first.endswith(".sbatch") else [source, *own]
    return ["submit", *given, "--out", name, *RUN, *does.get("more", ())]


@pytest.mark.parametrize("name", STORIES)
def test_a_story_at_the_login_node(site: FixedSite, pages: Pages, name: str) -> None:
    node, out = LoginNode(site), site.folder / name
    shutil.rmtree(out, ignore_errors=True)  # of a first try
    if name.startswith(("old", "half")):
        shutil.copytree(site.folder / name.partition("-")[0], out)
        if name == "old-own-tasks":
            shutil.copytree(site.folder / "old-4821", f"{out}-4821", dirs_exist_ok=True)
    said = []
    for step in STORIES[name]:
        if callable(step):
            step(out)
            continue
        words, does = step
        env = {**node.env(**does), **does.get("env", {})}
        done = site.badcjobs(*(argv := command(words, name, does)), env=env)
        if does.get("SBATCH") != LATE:
            wait_for(lambda: not site.processes("sbatch"), "the stand-in of sbatch has ended")
        said.append(
            f"$ badcjobs {' '.join(argv)}\nexit code {done.exit_code}\n{told(done.stdout)}--- stderr\n{done.stderr}"
        )
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) if out.is_dir() else []
    record = out / "submitted.json"
    run = json.loads(record.read_text()).get("run_arguments", []) if record.exists() and "damaged" not in name else []
    said += ["sbatch was called with\n" + node.calls, "run as\n" + " ".join(run), "left\n" + "\n".join(left)]
    pages({"story.txt": re.sub(r"file_[0-9a-f]{32}", "file_UNIQUE", site.plain("\n\n".join(said)))})


def told(stdout: str) -> str:
    """Return what a command says, without what other tests are about and what differs from run to run."""
    if not stdout.startswith("{"):
        return re.sub(r"hours analysed in .* s;|  speed .*", "…", stdout)
    document = json.loads(stdout)
    if "remarks" in document:
        document = {"remarks": document["remarks"], **{key: document["total"][key] for key in ("standstill", "go_on")}}
    if "findings" in document:
        document = {"findings": [one for one in document["findings"] if one["subject"] == "submit"]}
    if "summary" in document:
        document["summary"] = {key: document["summary"][key] for key in ("verdict", "done", "failed", "left")}
    return pretty(document)
