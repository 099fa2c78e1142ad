"""Writes a plan: a folder with the rows of each task, and one job script for each wave, ready for sbatch.

    DIR/plan.json             what badcjobs plan --json says
    DIR/wave-1.sbatch         the job script of the first wave; its results go to OUT/wave-1
    DIR/wave-1/tasks.txt      the manifests of its tasks: each array task takes one line
    DIR/wave-1/task-0000.csv  the rows of one task
    DIR/left-out.txt          rows that cannot be planned, each with its reason; only where there are any

It is written beside its place and moved there in the end, so that a folder with this name is always a whole one."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType

from badcjobs import paths as resources
from badcjobs.cluster.templates import fill_template
from badcjobs.errors import BadInput
from badcjobs.planning.make_plan import CampaignPlan, to_dict
from badcjobs.planning.plan_tasks import Share, clock
from badcjobs.sources.badc_manifest import HEADER
from badcjobs.sources.survey import PlannedRow

_LINE_END = "\0"  # in no path; so that a row with a line end in a name is one line here


class RowFile:
    """A file of rows, written once and then read in turn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+", encoding="utf-8", newline="\n")
        self._kinds: dict[tuple[str, int], int] = {}  # base of the path, columns behind those of BADC
        self._further: list[str] = []  # their names
        self._places: dict[tuple[str, ...], list[int]] = {}  # names of a manifest → which of them they are

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, row: PlannedRow) -> None:
        """Keep a row."""
        recording_id, chunk_id, path, base, start_ms, end_ms, sha256, _, overlap_ms, notes, further, names, *_ = row
        # A row that ends where it begins is refused; without an end its header is asked, and says the same.
        end = "" if end_ms is None or end_ms <= start_ms else end_ms
        text = f"{recording_id},{chunk_id},{path},{start_ms},{end},{overlap_ms},{sha256},{notes}"
        if further:
            further = self._placed(further, names)
            text = f"{text},{','.join(further)}"
        if text.count(",") == 7 + len(further) and '"' not in text and "\n" not in text and "\r" not in text:
            text += "\n"
        else:
            text = _quoted([recording_id, chunk_id, path, start_ms, end, overlap_ms, sha256, notes, *further])
        kind = self._kinds.setdefault((base, len(further)), len(self._kinds))
        self._file.write(f"{kind}\t{text}")

    def clear(self) -> None:
        """Forget all rows."""
        self._file.seek(0)
        self._file.truncate()
        for known in (self._kinds, self._further, self._places):
            known.clear()

    @property
    def root(self) -> str | None:
        """The folder that all relative paths start from; None: there are none, or they start from several."""
        bases = {base for base, _ in self._kinds if base}
        return bases.pop() if len(bases) == 1 else None

    @property
    def header(self) -> str:
        """The columns of every shard, as the first line of a manifest."""
        return _quoted([*HEADER.split(","), *self._further]).replace(_LINE_END, "\n")

    def rows(self) -> Iterator[str]:
        """Yield all rows from the first, as lines of a manifest."""
        self._file.seek(0)
        kinds, width = list(self._kinds), len(self._further)
        keep = self.root is not None or not any(base for base, _ in kinds)
        for line in self._file:
            number, _, text = line.partition("\t")
            base, columns = kinds[int(number)]
            if columns < width:
                text = f"{text[:-1]}{',' * (width - columns)}\n"
            if _LINE_END in text:
                text = text.replace(_LINE_END, "\n")
            yield text if keep or not base else _absolute(text, base)

    def _placed(self, further: Sequence[str], names: tuple[str, ...]) -> list[str]:
        """Return the fields of further columns, each in the place that its name has in all shards."""
        if names not in self._places:
            self._places[names] = self._find_places(names)
        places = self._places[names]
        fields = [""] * (max(places) + 1 if places else 0)
        for place, text in zip(places, further, strict=True):
            fields[place] = text
        return fields

    def _find_places(self, names: tuple[str, ...]) -> list[int]:
        places: list[int] = []
        for name in names:
            known = [place for place, one in enumerate(self._further) if one == name and place not in places]
            if not known:
                self._further.append(name)
            places.append(known[0] if known else len(self._further) - 1)
        return places


def write_manifest(path: Path, header: str, rows: Iterator[str], many: int) -> None:
    """Write the next rows as a manifest."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(header)
        file.writelines(islice(rows, many))


def _absolute(text: str, base: str) -> str:
    (row,) = csv.reader([text])
    row[2] = base + row[2].removeprefix("./")
    return _quoted(row).replace(_LINE_END, "\n")


def _quoted(row: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    return text.getvalue().removesuffix("\r\n").replace("\n", _LINE_END) + "\n"


# --- plan folder ------------------------------------------------------------------------------------------------------

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


def template_for(site: str) -> str:
    """Return the template of a site, or the one for all."""
    own = f"{site}-array"
    return own if (resources.folder("templates") / f"{own}.sbatch").exists() else "array"


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


def write_plan(plan: CampaignPlan, rows: RowFile, draft: Path, target: Path, scripts: Scripts) -> Written:
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
