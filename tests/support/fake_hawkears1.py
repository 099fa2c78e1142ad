"""A stand-in for HawkEars 1's ``analyze.py``: its options, files, words and lies, and no models.

It is run from its own folder, which ``make_fake_hawkears1`` makes. Files that begin with ``#fake WORD`` and the
variables FAKE_HAWKEARS_S, _CUDA, _ROOM_S and _EARS mean what they mean for ``fake_hawkears``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
import wave
from pathlib import Path

from support.fake_hawkears import AUDIO_ENDINGS, KNOWN_REGIONS, OUT_OF_MEMORY, check_room, hear, hear_loud

NAMES = {"ROPT": "Rock Ptarmigan", "RUGR": "Ruffed Grouse", "SPGR": "Spruce Grouse", "STGR": "Sharp-tailed Grouse"}
HEADER = "filename,start_time,end_time,class_name,class_code,score\n"


def make_fake_hawkears1(folder: Path, *, models: int = 1) -> Path:
    """Make a folder in which ``python analyze.py`` is this stand-in."""
    (folder / "data" / "ckpt").mkdir(parents=True)
    for number in range(models):
        (folder / "data" / "ckpt" / f"model{number}.ckpt").write_bytes(b"")
    tests = str(Path(__file__).parents[1])
    program = f"import sys\nsys.path.insert(0, {tests!r})\nfrom support.fake_hawkears1 import main\nmain()\n"
    (folder / "analyze.py").write_text(program)
    return folder


def log(text: str) -> None:
    print(f"12:00:00.000 {text}", file=sys.stderr, flush=True)


class Lane(threading.Thread):
    """One thread and its labels; an exception ends it, and nobody else notices."""

    def __init__(self, number: int, paths: list[Path], out: Path, both: bool, of: int) -> None:
        super().__init__()
        self.of = of
        self.number, self.paths, self.out, self.both = number, paths, out, both
        self.rows: list[str] = []

    def run(self) -> None:
        for path in self.paths:
            log(f"Thread {self.number}: Analyzing {path}")
            self.analyze(path)

    def analyze(self, path: Path) -> None:
        content = path.read_bytes()
        word = content[6:].split()[0].decode() if content.startswith(b"#fake ") else ""
        time.sleep(float(os.environ.get("FAKE_HAWKEARS_S", "0.01")))
        if word == "oom":
            raise RuntimeError(OUT_OF_MEMORY)
        if word in ("SIGSEGV", "SIGKILL"):
            os.kill(os.getpid(), getattr(signal, word))
            time.sleep(60)  # it may reach another thread first
        if not word:
            try:
                with wave.open(str(path)) as audio:
                    check_room(audio.getnframes() / audio.getframerate(), self.of, os.environ)
            except (wave.Error, EOFError) as error:
                log(f"Caught exception in audio load of {path}: {error}")
                return
        found = hear_loud(path) if os.environ.get("FAKE_HAWKEARS_EARS") == "loud" else hear(content)
        found = [] if word == "silence" else found
        if self.both:
            labels = [f"{start:.2f}\t{end:.2f}\t{code};{score:.3f}\n" for start, end, code, score in found]
            (self.out / f"{path.stem}_HawkEars.txt").write_text("".join(labels))
        for start, end, code, score in found:
            self.rows.append(f"{path.name},{start:.3f},{end:.3f},{NAMES.get(code, code)},{code},{score:.3f}\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="analyze.py")
    parser.add_argument("-i", "--input", default="")
    parser.add_argument("-o", "--output", default="")
    parser.add_argument("-m", "--merge", type=int, default=1)
    parser.add_argument("-p", "--min_score", type=float, default=0.75)
    parser.add_argument("-b", "--band", type=int, default=1)
    parser.add_argument("--rtype", default="audacity")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--region")
    parser.add_argument("--date")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    log("Initializing")
    out = Path(options.output)
    out.mkdir(parents=True, exist_ok=True)
    cuda = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0"
    log("Using CUDA" if cuda else "Using CPU")
    if not any(Path("data/ckpt").glob("*.ckpt")):
        log("Error: no checkpoints found in data/ckpt")
        return
    if options.region and options.region not in KNOWN_REGIONS:
        log("Error: no eBird county found matching given region")
        return
    paths = sorted(path for path in Path(options.input).iterdir() if path.suffix.lower() in AUDIO_ENDINGS)
    lanes = max(1, min(options.threads, len(paths)))
    threads = [Lane(n + 1, paths[n::lanes], out, options.rtype == "both", options.threads) for n in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if options.rtype in ("csv", "both"):
        rows = sorted(row for thread in threads for row in thread.rows)
        (out / "HawkEars_labels.csv").write_text(HEADER + "".join(rows))
    log(f"Elapsed time = 0m 1s of {shlex.quote(str(out))}")
