"""HawkEars 1 (``analyze.py``) as a preset of the command engine, and the program that stands between the two.

``analyze.py`` takes a folder, not a list, and writes one table of all recordings; started as a program of its own, this
file lays out the folder and divides the table. The exit code of ``analyze.py`` says nothing: it is 0 for a missing
model, a broken file and a thread that died. A recording is done when its own label file is there *and* the common
table, which is written at the very end.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from badcjobs.errors import NotHere
from badcjobs.model import WorkerPlan
from badcjobs.processes import die_with_parent, fingerprint_of
from badcjobs.workers.chunk_audio import LONGEST_KEPT_STEM
from badcjobs.workers.command import CommandEngine
from badcjobs.workers.hawkears import (
    find_python,
    has_real_device,
    hawkears_environment,
    refuse_arguments,
    sized_arguments,
)
from badcjobs.workers.stream_session import Patience

_BATCH = 256  # nothing of a batch is seen before its end, so it must not be long
_OURS = ("-i", "--input", "-o", "--output", "--rtype", "-d", "--debug", "--filelist", "--recurse")
_DEVICE = re.compile(r"Using (CUDA|CPU|MPS)")


class HawkEars1Engine(CommandEngine):
    """Runs the user's own HawkEars 1: a folder with ``analyze.py``, and a Python that can run it."""

    name = "hawkears1"
    knows_hawkears = True

    def __init__(
        self, python: str, *, root: Path | None, allow_cpu: bool, batch: int = _BATCH, args: Sequence[str], **start: Any
    ) -> None:
        super().__init__("{inputs} {outputs}", args=args, **start)
        self._python = python
        self._root = (root or Path()).absolute()
        self._allow_cpu = allow_cpu
        self._batch = batch
        # It may print one line per recording, and compile at its start: only minutes are silence.
        self.patience = Patience(least_s=600.0)

    @property
    def wants(self) -> int:
        """A batch."""
        return self._batch

    @property
    def version(self) -> str | None:
        """Its program and its models, which have no other name."""
        mark = fingerprint_of([self._root / "analyze.py", *(self._root / "data" / "ckpt").glob("*")], content=False)
        return mark and f"analyze.py {mark}"

    def check(self) -> None:
        """Look for Python, for analyze.py, and for options that badcjobs chooses itself."""
        refuse_arguments(self.args, _OURS)
        find_python(self._python, self.environ, self.launcher)
        script = self._root / "analyze.py"
        if not script.is_file():
            raise NotHere(
                f"there is no {script}",
                why="HawkEars 1 is a folder with analyze.py, its data and its models, and works there",
                fix="badcjobs run … --engine hawkears1 --hawkears-root /path/to/HawkEars",
            )

    def words(self, plan: WorkerPlan) -> list[str]:
        """Return the words of the program between, then those of analyze.py."""
        merge = [] if {"-m", "--merge"} & {arg.split("=")[0] for arg in self.args} else ["--merge", "0"]
        device = "cuda" if has_real_device(plan) and not self._allow_cpu else "any"
        python = find_python(self._python, self.environ, self.launcher)
        analyze = [str(self._root), python, "analyze.py", *merge, *sized_arguments(self.args, plan)]
        quoted = [word.replace("{", "{{").replace("}", "}}") for word in (sys.executable, *analyze)]
        return [quoted[0], "-m", "badcjobs.workers.hawkears1", "{inputs}", "{outputs}", device, *quoted[1:]]

    def environment(self, plan: WorkerPlan, scratch: Path) -> dict[str, str]:
        """Return an environment whose cores are shared out among HawkEars' threads."""
        return hawkears_environment(self.environ, plan, sized_arguments(self.args, plan), scratch)


# --- the program between ----------------------------------------------------------------------------------------------


def main(args: Sequence[str]) -> None:
    """Run ``INPUTS OUTPUTS cuda|any ROOT PYTHON analyze.py …``: a table in OUTPUTS for each path listed in INPUTS."""
    listed, outputs, device, root, *program = args
    work = Path(outputs).with_name("hawkears1")
    inputs, labels = work / "in", work / "out"
    inputs.mkdir(parents=True)
    paths = Path(listed).read_text(errors="surrogateescape").split("\n")[:-1]
    staged = {place(Path(path), inputs, number): path for number, path in enumerate(paths)}
    said = run_analyze([*program, "-i", str(inputs), "-o", str(labels), "--rtype", "both"], Path(root), device)
    header, rows = read_labels(labels / "HawkEars_labels.csv")
    silent = []
    for copy, path in staged.items():
        complaints = [line for line in said if str(copy) in line and ": Analyzing " not in line]
        if header and (labels / f"{copy.stem}_HawkEars.txt").exists():
            with (Path(outputs) / f"{Path(path).stem}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([header, *rows.get(copy.name, [])])
        elif complaints:
            print(complaints[-1][:2000].replace(str(copy), path), file=sys.stderr, flush=True)
        else:
            silent.append(path)
    shutil.rmtree(work, ignore_errors=True)
    if silent:
        raise RuntimeError(f"HawkEars left no labels of {len(silent)} recordings: {silent[0]}")


def place(audio: Path, folder: Path, number: int) -> Path:
    """Bring audio into the folder, by a hard link or a copy, under a name of its own.

    The old name stays in it because ``--date file`` looks for a date there.
    """
    readable = re.sub(r"[^\w.+-]", "_", audio.stem)[:LONGEST_KEPT_STEM]
    target = folder / f"c{number:06d}~{readable}{audio.suffix}"
    try:
        os.link(audio.resolve(), target)
    except OSError:  # another file system, or a file that is not ours: the usual case on a cluster
        try:
            shutil.copyfile(audio, target)
        except FileNotFoundError as error:
            target.write_bytes(b"")  # HawkEars will say that it cannot be read
            print(f"{audio}: {error.strerror}", file=sys.stderr, flush=True)
    return target


def run_analyze(argv: Sequence[str], root: Path, device: str) -> list[str]:
    """Run analyze.py in its folder; return its lines. Raise RuntimeError where it took the CPU instead of a GPU."""
    said: list[str] = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(argv, cwd=root, preexec_fn=die_with_parent, **pipes) as run:
        for line in run.stdout or ():
            said.append(line.rstrip("\n"))
            print(said[-1], file=sys.stderr, flush=True)
            taken = _DEVICE.search(line)
            if device == "cuda" and taken and taken[1] != "CUDA":
                run.kill()
                raise RuntimeError(f"HawkEars took the {taken[1]} although this worker has a GPU")
    if run.returncode < 0:
        os.kill(os.getpid(), -run.returncode)  # end as it did: the signal tells what happened
    return said


def read_labels(table: Path) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Return the header of HawkEars_labels.csv, and its rows by the file's name; nothing where there is no table."""
    if not table.exists():
        return [], {}
    with table.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    name = header.index("filename")
    found: dict[str, list[list[str]]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return header, found


if __name__ == "__main__":
    main(sys.argv[1:])
