"""``badcjobs submit`` at a login node: what it checks, hands to sbatch, finds again and says in the end; nothing twice.

Each story is a few commands on a run folder of its own, and one page; they stand in tests/data/login_stories.txt.
sbatch, squeue and sacct are stand-ins that do what a line says; what a real Slurm makes of it is in tests/slurm.
"""

import getpass
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from support.badcjobs_program import ON_CPU, array_task
from support.behaviour import FixedSite, pretty
from support.cases import read_data
from support.login_node import LoginNode
from support.waiting import wait_for

RUN = ("--gpus-per-task", "0", "--", *ON_CPU, "--interval", "0.1")
TEXT = read_data("login_stories.txt")
STORIES = {name: lines.split("\n\n")[0] for name, lines in re.findall(r"=== (.*)\n((?:(?!===).*\n)*)", TEXT)}
SOURCES = {"old": "four.csv", "half": "nine.csv"}


@pytest.fixture(scope="module")
def site():
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


def command(words, name):
    if words[:1] == ["$"]:
        return shlex.split(re.sub(r"\bRUN\b", shlex.join(RUN), re.sub(r"\bOUT\b", name, " ".join(words[1:]))))
    dashes = words.index("--") if "--" in words else len(words)
    source = SOURCES.get(name.partition("-")[0], "manifest.csv")
    return ["submit", source, *words[:dashes], "--out", name, *RUN, *words[dashes + 1 :]]


def environment(node, changes):
    given = dict(change.strip().split("=", 1) for change in changes if change.strip())
    inside = array_task(2, [0, 1, 2]) if given.pop("INSIDE", None) else {}
    does = {
        key: given.pop(key)
        for key in ("SBATCH", "MERGE", "SCRIPTS", "STATES", "SACCT", "SINFO", "QUEUE")
        if key in given
    }
    return {**node.env(**does), **inside, **given}


@pytest.mark.parametrize("name", STORIES)
def test_a_story_at_the_login_node(site, pages, name):
    if name == "modules-of-others" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no option -P")
    node, out = LoginNode(site), site.folder / name
    shutil.rmtree(out, ignore_errors=True)  # of a first try
    (site.folder / "badcjobs.toml").unlink(missing_ok=True)  # of another story
    if name.startswith(("old", "half")):
        shutil.copytree(site.folder / name.partition("-")[0], out)
    said = []
    for line in STORIES[name].splitlines():
        if line.startswith("!"):
            words, where = ["bash", "-c", line[1:]], out if out.exists() else site.folder
            env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
            shown = subprocess.run(words, cwd=where, env=env, check=True, capture_output=True, text=True).stdout
            said += [shown] if shown else []
            continue
        words, *changes = f" {line} ".split(" | ")
        argv = command(words.split(), name)
        done = site.badcjobs(*argv, env=environment(node, changes))
        if "hit" in line:
            wait_for(lambda: not site.processes("sbatch"), "the stand-in of sbatch has ended")
        said.append(
            f"$ badcjobs {' '.join(argv)}\nexit code {done.exit_code}\n{reported(done.stdout)}--- stderr\n{done.stderr}"
        )
    left = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) if out.is_dir() else []
    record = out / "submitted.json"
    run = json.loads(record.read_text()).get("run_arguments", []) if record.exists() and "damaged" not in name else []
    said += ["sbatch was called with\n" + node.calls, "run as\n" + " ".join(run), "left\n" + "\n".join(left)]
    text = re.sub(r"file_[0-9a-f]{32}", "file_UNIQUE", site.plain("\n\n".join(said)))
    text = text.replace(f"belongs to {getpass.getuser()}", "belongs to ME")
    text = text.replace(f".{socket.gethostname().split('.')[0]}.", ".HERE.")
    text = re.sub(r"\n *no NVIDIA driver on this machine.*|badcjobs: job \d+: \d+ of .* done.* waiting\n", "", text)
    pages({"story.txt": re.sub(r"\b18\d{8}(?!\d)", "JOB", re.sub(r"after \d+ s", "after SECONDS", text))})


def reported(stdout):
    """Return what a command says, without what other tests are about and what differs from run to run."""
    if not stdout.startswith("{"):
        return re.sub(r"(?<=no GPU in ).* s\b|[\d.,]+(?= × real time|.s of running time)", "…", stdout)
    document = json.loads(stdout)
    if "remarks" in document:
        document = {"remarks": document["remarks"], **{key: document["total"][key] for key in ("standstill", "go_on")}}
    if "findings" in document:
        document = {"findings": [one for one in document["findings"] if one["subject"] == "submit"]}
    if "summary" in document:
        document["summary"] = {key: document["summary"][key] for key in ("verdict", "done", "failed", "left")}
    return pretty(document)
