"""The program between the command engine and HawkEars 1.

``analyze.py`` takes a folder, not a list, and writes one CSV for all recordings. This program fills the folder and
splits the CSV. Coordinates and dates go into a file list; a region is valid for a complete call of ``analyze.py``. The
exit code of ``analyze.py`` is 0 even for a missing model, a damaged file and a thread that died: a recording is done
when both its label file and the common CSV exist, which ``analyze.py`` writes at its end.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from badcjobs.processes import die_with_parent
from badcjobs.workers.error_patterns import state_class
from badcjobs.workers.policy import RAN_ON_CPU

Place = dict[str, Any]  # as in HawkEars' occurrence_metadata
Recordings = dict[str, Place]  # by path
PLACES_FILE = "places.json"  # beside INPUTS: the place of each path
RARITIES = ".rarities"  # the ending of a table beside that of the detections
_DEVICE = re.compile(r"Using (CUDA|CPU|MPS)")


def main(args: Sequence[str]) -> None:
    """Run ``INPUTS OUTPUTS cuda|any ROOT PYTHON analyze.py …``: write a CSV to OUTPUTS for each path in INPUTS."""
    listed, outputs, device, root, *program = args
    paths = Path(listed).read_text(errors="surrogateescape").split("\n")[:-1]
    places: list[Place] = [{}] * len(paths)
    places_file = Path(listed).with_name(PLACES_FILE)
    if places_file.exists():
        places = json.loads(places_file.read_text())
    calls: dict[tuple[str, ...], Recordings] = {}  # options for a region → its recordings
    for path, place in zip(paths, places, strict=True):
        calls.setdefault(region_options(place), {})[path] = place

    missing = []
    for options, recordings in calls.items():
        missing += analyze(
            [*program, *options],
            recordings,
            outputs=Path(outputs),
            root=Path(root),
            device=device,
        )
    if missing:
        raise RuntimeError(f"HawkEars wrote no labels for {len(missing)} of {len(paths)} recordings: {missing[0]}")


def region_options(place: Place) -> tuple[str, ...]:
    """Return the options for a place given by its region."""
    if "region_code" not in place:
        return ()
    date = ("--date", place["recorded_at"][:10]) if "recorded_at" in place else ()
    return ("--region", place["region_code"], *date)


def analyze(
    program: Sequence[str],
    recordings: Recordings,
    *,
    outputs: Path,
    root: Path,
    device: str,
) -> list[str]:
    """Call analyze.py once; write the tables of the recordings, and return the paths of those without labels."""
    work = outputs.with_name("hawkears1")
    inputs = work / "in"
    labels = work / "out"
    inputs.mkdir(parents=True)
    for path in recordings:
        link_audio(Path(path), inputs)
    options = ["-i", str(inputs), "-o", str(labels), "--rtype", "both"]
    if any("latitude" in place and "region_code" not in place for place in recordings.values()):
        options += ["--filelist", str(write_list(work / "places.csv", recordings))]

    lines = run_analyze([*program, *options], root, device)
    header, rows = read_labels(labels / "HawkEars_labels.csv")
    rare_header, rare_rows = read_labels(labels / "HawkEars_rarities.csv")
    missing = []
    for path in recordings:
        audio = Path(path)
        copy = str(inputs / audio.name)
        complaints = [line for line in lines if copy in line and ": Analyzing " not in line]
        if header and (labels / f"{audio.stem}_HawkEars.txt").exists():
            table = outputs / f"{audio.stem}.csv"
            write_table(table, [header, *rows[audio.name]])
            if audio.name in rare_rows:
                write_table(table.with_suffix(RARITIES), [rare_header, *rare_rows[audio.name]])
        elif complaints:
            print(complaints[-1].replace(copy, path), file=sys.stderr, flush=True)
        else:
            missing.append(path)
    shutil.rmtree(work, ignore_errors=True)
    return missing


def write_list(target: Path, recordings: Recordings) -> Path:
    """Write a file list: exactly these columns; without coordinates the filter is off for a recording."""
    rows = [["filename", "latitude", "longitude", "recording_date"]]
    for path, place in recordings.items():
        date = place.get("recorded_at", "")[:10]
        rows.append([Path(path).name, place.get("latitude", ""), place.get("longitude", ""), date])
    write_table(target, rows)
    return target


def write_table(target: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV file."""
    with target.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)


def link_audio(audio: Path, folder: Path) -> None:
    """Link or copy audio into the folder; no two recordings of a call have the same name."""
    target = folder / audio.name
    try:
        os.link(audio.resolve(), target)
    except FileNotFoundError:
        target.touch()  # HawkEars will report that it cannot be read
    except OSError:  # another filesystem, or another user's file: common on a cluster
        shutil.copyfile(audio, target)


def run_analyze(argv: Sequence[str], root: Path, device: str) -> list[str]:
    """Run analyze.py in its folder; return its output lines. Raise RuntimeError if it uses the CPU, not the GPU."""
    lines = []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(
        argv,
        cwd=root,
        preexec_fn=die_with_parent,
        **pipes,
    ) as run:
        for line in run.stdout or ():
            lines.append(line.rstrip("\n"))
            print(lines[-1], file=sys.stderr, flush=True)
            used = _DEVICE.search(line)
            if used is None or device == "any" or used[1] == "CUDA":
                continue
            run.kill()
            print(state_class(RAN_ON_CPU), file=sys.stderr, flush=True)
            raise RuntimeError(f"HawkEars uses the {used[1]} although this worker has a GPU")
    if run.returncode < 0:
        os.kill(os.getpid(), -run.returncode)  # end by the same signal, so that the caller sees it
    return lines


def read_labels(table: Path) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Return the header of HawkEars_labels.csv and its rows by file name; both empty if the file does not exist."""
    rows_of_file: dict[str, list[list[str]]] = defaultdict(list)
    if not table.exists():
        return [], rows_of_file
    with table.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    column = header.index("filename")
    for row in rows:
        rows_of_file[row[column]].append(row)
    return header, rows_of_file


if __name__ == "__main__":
    main(sys.argv[1:])
