"""A stand-in for HawkEars 1's ``analyze.py``: its options, files, words and lies, and no models.

It is run from its own folder, which ``make_fake_hawkears1`` makes; ``fake_hawkears`` says how it misbehaves.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import wave
from pathlib import Path

from support.fake_hawkears import KNOWN_REGIONS, NAMES, listen

HEADER = "filename,start_time,end_time,class_name,class_code,score\n"


def make_fake_hawkears1(folder: Path) -> Path:
    """Make a folder in which ``python analyze.py`` is this stand-in."""
    (folder / "data" / "ckpt").mkdir(parents=True)
    (folder / "data" / "ckpt" / "model0.ckpt").touch()
    tests = str(Path(__file__).parents[1])
    program = f"import sys\nsys.path.insert(0, {tests!r})\nfrom support.fake_hawkears1 import main\nmain()\n"
    (folder / "analyze.py").write_text(program)
    return folder


def log(text: str) -> None:
    print(f"12:00:00.000 {text}", file=sys.stderr, flush=True)


def analyze(number: int, path: Path, out: Path, threads: int, rows: list[str]) -> None:
    """Write the labels of a recording; an exception ends its thread, and nobody else notices."""
    log(f"Thread {number}: Analyzing {path}")
    audio_s = 0.0
    if not path.read_bytes().startswith(b"#fake "):
        try:
            with wave.open(str(path)) as audio:
                audio_s = audio.getnframes() / audio.getframerate()
        except (wave.Error, EOFError) as error:
            log(f"Caught exception in audio load of {path}: {error}")
            return
    found = listen(path, audio_s, threads)
    labels = [f"{start:.2f}\t{end:.2f}\t{code};{score:.3f}\n" for start, end, code, score in found]
    (out / f"{path.stem}_HawkEars.txt").write_text("".join(labels))
    for start, end, code, score in found:
        rows.append(f"{path.name},{start:.3f},{end:.3f},{NAMES.get(code, code)},{code},{score:.3f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="analyze.py")
    for name in ("-i", "-o", "--merge", "--min_score", "--rtype", "--region", "--date"):
        parser.add_argument(name)
    parser.add_argument("--threads", type=int, default=3)
    options = parser.parse_args()
    log("Initializing")
    out = Path(options.o)
    out.mkdir(parents=True, exist_ok=True)
    cuda = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0"
    log("Using CUDA" if cuda else "Using CPU")
    if options.region and options.region not in KNOWN_REGIONS:
        log("Error: no eBird county found matching given region")
        return
    paths, rows = sorted(Path(options.i).iterdir()), list[str]()
    lanes = max(1, min(options.threads, len(paths)))

    def work(number: int) -> None:
        for path in paths[number::lanes]:
            analyze(number + 1, path, out, options.threads, rows)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (out / "HawkEars_labels.csv").write_text(HEADER + "".join(sorted(rows)))
    log("Elapsed time = 0m 1s")
