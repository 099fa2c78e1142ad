"""Writes a plan: a folder with the rows of each task, and one job script for each wave, ready for sbatch.

    DIR/plan.json             what badcjobs plan --json says
    DIR/wave-1.sbatch         the job script of the first wave; its results go to OUT/wave-1
    DIR/wave-1/tasks.txt      the manifests of its tasks: each array task takes one line
    DIR/wave-1/task-0000.csv  the rows of one task
    DIR/left-out.txt          rows that cannot be planned, each with its reason; only where there are any

It is written beside its place and moved there in the end, so that a folder with this name is always a whole one.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs import resources
from badcjobs.errors import BadInput
from badcjobs.plan.document import to_dict
from badcjobs.plan.make import Plan
from badcjobs.plan.margin import clock
from badcjobs.plan.shares import Share
from badcjobs.plan_rows import RowFile, write_manifest
from badcjobs.template_shelf import fill_template

_OWN_KEYS = ("array", "time", "gpus-per-node", "cpus-per-task", "mem", "source", "out")


@dataclass(frozen=True, slots=True)
class Scripts:
    """How the job scripts are to be filled in, besides what the plan itself says."""

    template: str
    out: Path  # the folder of all results; each wave has its own below it
    settings: tuple[str, ...] = ()  # KEY=VALUE of the template
    run_arguments: tuple[str, ...] = ()  # of badcjobs run


@dataclass(frozen=True, slots=True)
class Written:
    """A plan that was written."""

    folder: Path
    scripts: tuple[Path, ...]
    outs: tuple[Path, ...] = field(default=())
    left_out: Path | None = None


def template_for(site: str | None) -> str:
    """Return the template of a site, or the one for all."""
    own = f"{site}-array"
    there = site is not None and (resources.folder("templates") / f"{own}.sbatch").exists()
    return own if there else "array"


def try_scripts(scripts: Scripts) -> None:
    """Fill in a script with values that will do, so that a mistake is found before a long reading."""
    mine = [word.partition("=")[0].strip().replace("_", "-") for word in scripts.settings]
    taken = [key for key in _OWN_KEYS if key in mine]
    if taken:
        raise BadInput(
            f"--set {taken[0]}: the plan itself says that",
            fix="badcjobs plan --help   (--time, --gpus-per-task, --cpus, --mem, --out say it)",
        )
    fill_template(scripts.template, [*_settings("0-0", 3600, 1, 1, 1, Path("/s"), Path("/o")), *_given(scripts, None)],
                  complete=True)  # fmt: skip


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside the target that takes its place when all went well; else nothing is left of it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"{target} is there already",
            why="its shards may be in use by jobs that run or wait",
            fix=f"--write {shlex.quote(str(target.with_name(target.name + '-2')))}",
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(target)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"{target} cannot be written", why=why, fix="--write DIR in a folder of yours") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_plan(plan: Plan, rows: RowFile, draft: Path, target: Path, scripts: Scripts) -> Written:
    """Write shards and scripts into a draft of the folder; what they name is where it will be."""
    lines, names, outs = rows.rows(), [], []
    width = len(str(len(plan.waves.waves)))
    for wave in plan.waves.waves:
        name = f"wave-{wave.number:0{width}}"
        shares = plan.sizing.shares[wave.first : wave.first + wave.tasks]
        _write_shards(shares, rows.header, lines, draft / name, target / name)
        out = scripts.out / name
        array = f"0-{wave.tasks - 1}" + (f"%{plan.waves.parallel}" if plan.waves.parallel else "")
        size = plan.sizing
        settings = _settings(
            array, size.time_s, size.gpus, plan.asking.cpus, plan.asking.mem_gb, target / name / "tasks.txt", out
        )
        filled = fill_template(scripts.template, [*settings, *_given(scripts, rows.root)], complete=True)
        (draft / f"{name}.sbatch").write_text(filled.text, encoding="utf-8")
        names.append(target / f"{name}.sbatch")
        outs.append(out)
    text = json.dumps(to_dict(plan), indent=2, ensure_ascii=False)
    (draft / "plan.json").write_text(f"{text}\n", encoding="utf-8")
    left_out = target / "left-out.txt" if (draft / "left-out.txt").exists() else None
    return Written(target, tuple(names), tuple(outs), left_out)


def _write_shards(shares: Sequence[Share], header: str, lines: Iterator[str], draft: Path, place: Path) -> None:
    draft.mkdir()
    width = max(4, len(str(len(shares) - 1)))
    names = [f"task-{number:0{width}}.csv" for number in range(len(shares))]
    for name, share in zip(names, shares, strict=True):
        write_manifest(draft / name, header, lines, share.rows)
    (draft / "tasks.txt").write_text("".join(f"{place / name}\n" for name in names), encoding="utf-8")


def _settings(array: str, time_s: float, gpus: int, cpus: int, mem_gb: int, source: Path, out: Path) -> list[str]:
    values = (array, clock(time_s), gpus, cpus, f"{mem_gb}G", source, out)
    return [f"{key}={value}" for key, value in zip(_OWN_KEYS, values, strict=True)]


def _given(scripts: Scripts, root: str | None) -> list[str]:
    words = [*scripts.run_arguments, *([] if root is None else [f"--root={root}"])]
    return [*scripts.settings, *(f"args={shlex.quote(word)}" for word in words)]
