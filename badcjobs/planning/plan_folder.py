"""Writes a plan: a folder with the rows of each task, and one job script for each wave, ready for sbatch.

    DIR/plan.json             what badcjobs plan --json says
    DIR/wave-1.sbatch         the job script of the first wave; its results go to OUT/wave-1
    DIR/wave-1/tasks.txt      the manifests of its tasks: each array task takes one line
    DIR/wave-1/task-0000.csv  the rows of one task
    DIR/left-out.txt          rows that cannot be planned, each with its reason; only where there are any

It is written beside its place and moved there in the end, so that a folder with this name is always a whole one."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from badcjobs.cluster.templates import fill_template
from badcjobs.errors import BadInput
from badcjobs.planning.make_plan import CampaignPlan, to_dict
from badcjobs.planning.plan_tasks import Asking, Sizing, clock
from badcjobs.sources.badc_manifest import HEADER
from badcjobs.sources.survey import PlannedRow


class RowFile:
    """Rows in a file, written once and then read in turn."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._write = csv.writer(file).writerow
        self._bases: set[str] = set()  # that relative paths start from
        self._further: list[str] = []  # names of the columns behind those of BADC
        self._places: dict[tuple[str, ...], list[int]] = {}  # names of a manifest → which of them they are

    def add(self, row: PlannedRow) -> None:
        """Keep a row."""
        recording_id, chunk_id, path, base, start_ms, end_ms, sha256, _, overlap_ms, notes, further, names, *_ = row
        # A row that ends where it begins is refused; without an end its header is asked, and says the same.
        end = "" if end_ms is None or end_ms <= start_ms else end_ms
        self._bases.add(base)
        more = self._placed(further, names) if further else ()
        self._write((base, recording_id, chunk_id, path, start_ms, end, overlap_ms, sha256, notes, *more))

    def clear(self) -> None:
        """Forget all rows."""
        self._file.seek(0)
        self._file.truncate()
        for known in (self._bases, self._further, self._places):
            known.clear()

    @property
    def root(self) -> str | None:
        """The folder that all relative paths start from; None: there are none, or they start from several."""
        bases = self._bases - {""}
        return bases.pop() if len(bases) == 1 else None

    @property
    def header(self) -> list[str]:
        """The columns of every shard."""
        return [*HEADER.split(","), *self._further]

    def rows(self) -> Iterator[list[str]]:
        """Yield all rows from the first, with as many fields as the header has."""
        self._file.seek(0)
        width, keep = len(self.header), self.root is not None
        for base, *row in csv.reader(self._file):
            if base and not keep:
                row[2] = base + row[2].removeprefix("./")
            yield row if len(row) == width else row + [""] * (width - len(row))

    def _placed(self, further: Sequence[str], names: tuple[str, ...]) -> list[str]:
        """Return the fields of further columns, each in the place that its name has in all shards."""
        places = self._places.get(names)
        if places is None:
            places = self._places[names] = []
            for name in names:
                known = [place for place, one in enumerate(self._further) if one == name and place not in places]
                if not known:
                    self._further.append(name)
                places.append(known[0] if known else len(self._further) - 1)
        fields = [""] * (max(places) + 1 if places else 0)
        for place, text in zip(places, further, strict=True):
            fields[place] = text
        return fields


# --- plan folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scripts:
    """How the job scripts are to be filled in, besides what the plan itself says."""

    template: str
    out: Path  # the folder of all results; each wave has its own below it
    settings: tuple[str, ...] = ()  # KEY=VALUE of the template
    run_arguments: tuple[str, ...] = ()  # of badcjobs run

    def fill(self, array: str, sizing: Sizing, asking: Asking, tasks: Path, out: Path, root: str | None = None) -> str:
        """Return the script of a wave; raise BadInput where the template does not take what is given."""
        values = {
            "array": array, "time": clock(sizing.time_s), "gpus-per-node": sizing.gpus, "cpus-per-task": asking.cpus,
            "mem": f"{asking.mem_gb}G", "source": tasks, "out": out,
        }  # fmt: skip
        words = [*self.run_arguments, *([] if root is None else [f"--root={root}"])]
        given = [*(f"{key}={value}" for key, value in values.items()), *self.settings]
        return fill_template(
            self.template, [*given, *(f"args={shlex.quote(word)}" for word in words)], complete=True
        ).text


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


def write_plan(
    plan: CampaignPlan, rows: RowFile, draft: Path, target: Path, scripts: Scripts
) -> list[tuple[Path, Path]]:
    """Write shards and scripts into a draft of the folder; return where each script will be, and its results."""
    lines, written = rows.rows(), []
    width = len(str(len(plan.waves.waves)))
    for wave in plan.waves.waves:
        name = f"wave-{wave.number:0{width}}"
        (draft / name).mkdir()
        digits = max(4, len(str(wave.tasks - 1)))
        shards = [f"task-{number:0{digits}}.csv" for number in range(wave.tasks)]
        for shard, share in zip(shards, plan.sizing.shares[wave.first :], strict=False):
            with (draft / name / shard).open("w", encoding="utf-8", newline="") as file:
                shard_rows = csv.writer(file, lineterminator="\n")
                shard_rows.writerow(rows.header)
                shard_rows.writerows(islice(lines, share.rows))
        tasks, out = target / name / "tasks.txt", scripts.out / name
        (draft / name / "tasks.txt").write_text("".join(f"{target / name / shard}\n" for shard in shards), "utf-8")
        array = f"0-{wave.tasks - 1}" + (f"%{plan.waves.parallel}" if plan.waves.parallel else "")
        text = scripts.fill(array, plan.sizing, plan.asking, tasks, out, rows.root)
        (draft / f"{name}.sbatch").write_text(text, encoding="utf-8")
        written.append((target / f"{name}.sbatch", out))
    text = json.dumps(to_dict(plan), indent=2, ensure_ascii=False)
    (draft / "plan.json").write_text(f"{text}\n", encoding="utf-8")
    return written
