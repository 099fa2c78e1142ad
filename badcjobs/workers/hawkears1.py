"""The program between the command engine and HawkEars 1.

``analyze.py`` takes a folder, not a list, and writes one CSV for all recordings. This program fills the folder and
splits the CSV. The exit code of ``analyze.py`` is 0 even for a missing model, a damaged file and a thread that died: a
recording is done when both its label file and the common CSV exist, which ``analyze.py`` writes at its end.
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

from badcjobs.processes import die_with_parent
from badcjobs.workers.chunk_audio import LONGEST_KEPT_STEM

_DEVICE = re.compile(r"Using (CUDA|CPU|MPS)")


def main(args: Sequence[str]) -> None:
    """Run ``INPUTS OUTPUTS cuda|any ROOT PYTHON analyze.py …``: write a CSV to OUTPUTS for each path in INPUTS."""
    listed, outputs, device, root, *program = args
    work = Path(outputs).with_name("hawkears1")
    inputs, labels = work / "in", work / "out"
    inputs.mkdir(parents=True)
    paths = Path(listed).read_text(errors="surrogateescape").split("\n")[:-1]
    staged = {link_audio(Path(path), inputs, number): path for number, path in enumerate(paths)}
    lines = run_analyze([*program, "-i", str(inputs), "-o", str(labels), "--rtype", "both"], Path(root), device)
    header, rows = read_labels(labels / "HawkEars_labels.csv")
    missing = []
    for copy, path in staged.items():
        complaints = [line for line in lines if str(copy) in line and ": Analyzing " not in line]
        if header and (labels / f"{copy.stem}_HawkEars.txt").exists():
            with (Path(outputs) / f"{Path(path).stem}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([header, *rows.get(copy.name, [])])
        elif complaints:
            print(complaints[-1][:2000].replace(str(copy), path), file=sys.stderr, flush=True)
        else:
            missing.append(path)
    shutil.rmtree(work, ignore_errors=True)
    if missing:
        raise RuntimeError(f"HawkEars wrote no labels for {len(missing)} of {len(paths)} recordings: {missing[0]}")


def link_audio(audio: Path, folder: Path, number: int) -> Path:
    """Link or copy audio into the folder under a unique name.

    The new name contains the old one, because ``--date file`` looks for a date in it.
    """
    readable = re.sub(r"[^\w.+-]", "_", audio.stem)[:LONGEST_KEPT_STEM]
    target = folder / f"c{number:06d}~{readable}{audio.suffix}"
    try:
        os.link(audio.resolve(), target)
    except OSError:  # another filesystem, or another user's file: common on a cluster
        try:
            shutil.copyfile(audio, target)
        except FileNotFoundError as error:
            target.write_bytes(b"")  # HawkEars will report that it cannot be read
            print(f"{audio}: {error.strerror}", file=sys.stderr, flush=True)
    return target


def run_analyze(argv: Sequence[str], root: Path, device: str) -> list[str]:
    """Run analyze.py in its folder; return its output lines. Raise RuntimeError if it uses the CPU, not the GPU."""
    lines: list[str] = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(argv, cwd=root, preexec_fn=die_with_parent, **pipes) as run:
        for line in run.stdout or ():
            lines.append(line.rstrip("\n"))
            print(lines[-1], file=sys.stderr, flush=True)
            used = _DEVICE.search(line)
            if device == "cuda" and used and used[1] != "CUDA":
                run.kill()
                raise RuntimeError(f"HawkEars uses the {used[1]} although this worker has a GPU")
    if run.returncode < 0:
        os.kill(os.getpid(), -run.returncode)  # end by the same signal, so that the caller sees it
    return lines


def read_labels(table: Path) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Return the header of HawkEars_labels.csv and its rows by file name; both empty if the file does not exist."""
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
