"""Runs many badcjobs commands, each in a process of its own that inherits what Python has already imported.

A command then takes a tenth of a second instead of one; everything else is as if a shell had started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from support.badcjobs_program import Outcome, Site

_FORKER = """
import contextlib, importlib, io, json, os, sys
import badcjobs.checking, badcjobs.cli.program, badcjobs.cli.world, badcjobs.template_shelf
import badcjobs.gpu.amd, badcjobs.gpu.dcgm, badcjobs.gpu.nvml, badcjobs.workers.demo_worker

def become(argv, env, said):
    for number in (1, 2):
        os.dup2(os.open(f"{said}.{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["badcjobs", *argv]
    badcjobs.cli.main()

with contextlib.redirect_stdout(io.StringIO()):  # what the parser imports with its first option, it has then
    badcjobs.cli.program.app(["template", "--json"], standalone_mode=False)

for name in sys.argv[1:]:
    importlib.import_module(name)
codes = []
for argv, env, said in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        become(argv, env, said)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


def run_each(
    site: Site, commands: Sequence[Sequence[str]], envs: Sequence[dict[str, str]] = (), modules: Sequence[str] = ()
) -> list[Outcome]:
    """Run commands one after the other, in the site's folder; return how each ended.

    ``modules`` are those that all of them would import, besides the usual.
    """
    folder = site.folder / "said"
    said = [str(folder / f"forked{number}") for number in range(len(commands))]
    environments = [site.environ(env) for env in (envs or [{}] * len(commands))]
    orders = json.dumps(list(zip(commands, environments, said, strict=True)))
    done = subprocess.run(
        [sys.executable, "-c", _FORKER, *modules], input=orders, text=True, capture_output=True, check=True,
        cwd=site.folder, env=site.environ(), timeout=120,
    )  # fmt: skip
    texts = [[(folder / f"{name}.{number}").read_text() for number in (1, 2)] for name in said]
    return [Outcome(code, *text) for code, text in zip(json.loads(done.stdout), texts, strict=True)]
