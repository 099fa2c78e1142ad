"""Small files in whose place anything may be: no command hangs or breaks, and what cannot be used is named."""

import os
import shutil
import subprocess

import pytest
from support.badcjobs_program import ON_CPU
from support.cases import read_lines

SHELL = dict(line.split(": ", 1) for line in read_lines("hostile_files.txt"))
SMALL = (
    "submitted.json .submitting.json learned.json probe.json logs/emulation.lock logs/{job}.json "
    "tasks/{task}.slurm.json tasks/{claim}"
)


@pytest.fixture(scope="module")
def ran(shared_site):
    """Give the site of a run, a copy of its folder, its command, and its small files that may be missing."""
    site = shared_site
    look = f'ls -a {site.out}/tasks > {site.folder}/names; echo start_time,end_time,label,score > "$2"'
    options = ("--command", f"{site.script('look.sh', look)} {{input}} {{output}}", *ON_CPU[2:])
    run = ("run", site.manifest(2), "--out", site.out, *options, "--config", "run.heartbeat_every_s=0.1")
    assert site.badcjobs(*run).exit_code == 0
    site.merged()
    task = site.task_database().stem
    (claim,) = (name for name in (site.folder / "names").read_text().split() if name.startswith(".claim"))
    small = SMALL.format(task=task, job=task.partition("_")[0], claim=claim).split()
    return site, site.out.rename(site.folder / "kept"), run, [site.out / name for name in small]


@pytest.mark.parametrize("case", SHELL)
def test_what_cannot_be_used_is_named_and_stops_nothing_unless_it_is_needed(ran, case):
    site, kept, run, (*small, claim) = ran

    def exit_codes(commands, *hostile):
        shutil.rmtree(site.out, ignore_errors=True)
        shutil.copytree(kept, site.out)
        for path in hostile:
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            subprocess.run(SHELL[case], shell=True, cwd=path.parent, env={**os.environ, "F": path.name}, check=True)
        ends = site.badcjobs_each(commands)
        said = "\n".join(end.stdout + end.stderr for end in ends)
        assert [path.name for path in hostile if path.name not in said] == [], said
        return [end.exit_code for end in ends]

    merge, check = ("merge", site.out), ("check", run[1], "--out", site.out)
    look = [("report", site.out, "--json"), ("monitor", site.out, "--once", "--json")]
    if case == "a folder with a file":  # no lease is ever one: it is not removed
        assert exit_codes([run], claim) == [2]
    else:
        small.append(claim)
    assert exit_codes([run, merge, check, *look], *small) == [0, 0, 1, 0, 0]
    assert exit_codes([run, merge, check], site.out / "run.toml") == [2, 0, 1]
    assert exit_codes([(*run, "--config", site.out / "other.toml")], site.out / "other.toml") == [2]
