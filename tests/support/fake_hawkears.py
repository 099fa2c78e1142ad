"""A stand-in for HawkEars 2.3's ``hawkears analyze``: its options, files, words and lies, and no models.

Modelled on the real program as observed; ``tests/flow/test_hawkears_engine.py`` runs the same core tests on both.
A file that begins with ``#fake WORD`` makes it misbehave at that recording; the environment sets its pace:
FAKE_HAWKEARS_START_S (before the device line), FAKE_HAWKEARS_S (per recording), FAKE_HAWKEARS_CUDA=0 (a GPU that
PyTorch cannot use), FAKE_HAWKEARS_OOM=load, FAKE_HAWKEARS_NO_TORCH=1. FAKE_HAWKEARS_ROOM_S is how many seconds of
audio times threads fit into its memory; with FAKE_HAWKEARS_EARS=loud it hears what is loud, when it is loud.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import wave
import zlib
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AUDIO_ENDINGS = {".wav", ".flac", ".mp3", ".ogg"}
KNOWN_REGIONS = {"CA-NT", "CA-AB", "CA-BC"}
CODES = ("ROPT", "RUGR", "SPGR", "STGR", "WIPT")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.79 GiB."


def install_fake_hawkears(folder: Path) -> Path:
    """Write an executable ``hawkears`` into the folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "hawkears"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    return program


def make_fake_root(folder: Path, *, models: int = 3) -> Path:
    """Make what ``hawkears init`` leaves, as far as anyone looks at it."""
    (folder / "data" / "ckpt").mkdir(parents=True)
    for number in range(models):
        (folder / "data" / "ckpt" / f"model{number + 1:02d}.ckpt").write_bytes(b"")
    return folder


class InferenceError(Exception):
    """Logged in one line; then the program ends, with exit code 0."""


class OutOfMemoryError(Exception):
    """What torch raises; nobody catches it."""


OutOfMemoryError.__module__ = "torch"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def hear(content: bytes) -> list[tuple[float, float, str, float]]:
    """Make detections (start, end, code, score) that depend on the content alone."""
    found = []
    for number, code in enumerate(CODES):
        chance = zlib.crc32(content + code.encode())
        if number == 0 or chance % 3:
            start_s = (chance % 80) / 4
            found.append((start_s, start_s + 0.75, code, 0.7 + (chance % 300) / 1000))
    return found


def hear_loud(path: str | Path, window_s: float = 0.25) -> list[tuple[float, float, str, float]]:
    """Make a detection of each loud stretch of a 16-bit WAV file."""
    with wave.open(str(path)) as audio:
        samples = array("h", audio.readframes(audio.getnframes()))
        window = round(window_s * audio.getframerate()) * audio.getnchannels()
    is_loud = [max(samples[start : start + window]) > 8000 for start in range(0, len(samples), window)]
    found, since = [], None
    for number, loud in enumerate([*is_loud, False]):
        if loud and since is None:
            since = number
        elif not loud and since is not None:
            found.append((since * window_s, number * window_s, "ROPT", 0.9))
            since = None
    return found


def check_room(audio_s: float, threads: int, environ: Mapping[str, str]) -> None:
    """Raise what torch raises when audio of this length is too much for so many threads."""
    room_s = float(environ.get("FAKE_HAWKEARS_ROOM_S", "inf"))
    if audio_s * threads > room_s:
        raise OutOfMemoryError(OUT_OF_MEMORY)


class FakeHawkEars:
    """One run of ``hawkears analyze``."""

    def __init__(self, options: argparse.Namespace, environ: dict[str, str]) -> None:
        self.options = options
        self.out = Path(options.output)
        self.environ = environ
        self.cuda = bool(environ.get("CUDA_VISIBLE_DEVICES")) and environ.get("FAKE_HAWKEARS_CUDA") != "0"
        self.cancelled = threading.Event()
        self.location_error_said = False
        self.rows: list[str] = []
        self.paths: list[Path] = []
        self.names: dict[Path, str] = {}

    def analyze(self) -> None:
        time.sleep(float(self.environ.get("FAKE_HAWKEARS_START_S", "0")))
        if self.environ.get("FAKE_HAWKEARS_NO_TORCH"):
            raise ModuleNotFoundError("No module named 'torch'")
        if not self.cuda:
            log("*** Install OpenVINO for better performance with CPU-based inference ***")
        if not Path("data/ckpt").exists():
            log("Model checkpoint files not found. Run 'hawkears init' to initialize environment.")
            return
        self.out.mkdir(parents=True, exist_ok=True)
        self.introduce()
        models = sorted(Path("data/ckpt").glob("*.ckpt"))
        if not models:
            raise Exception(f"Error. No checkpoints found in {Path('data/ckpt').absolute()}")
        began_s = time.time()
        try:
            self.find_recordings()
            self.run_threads(models[0])
        except (InferenceError, ValueError) as error:
            log(str(error))
            return
        if self.rows:
            table = "".join(sorted(self.rows))
            (self.out / "scores.csv").write_text("recording,name,start_time,end_time,score\n" + table)
        log(f"\nElapsed time = 00:{int(time.time() - began_s):02d}")

    def introduce(self) -> None:
        models = len(list(Path("data/ckpt").glob("*.ckpt"))) or 3
        log(f"Using {'CUDA' if self.cuda else 'CPU'} with {models}-model ensemble and {self.options.threads} threads.")
        log(f"Low-band classifier for Ruffed/Spruce Grouse detection is {'enabled' if self.cuda else 'disabled'}.")
        log("")

    def find_recordings(self) -> None:
        given = Path(self.options.input)
        listed = [given] if given.is_file() else list(given.iterdir())
        self.paths = sorted((path.resolve() for path in listed if path.suffix.lower() in AUDIO_ENDINGS), key=str)
        if not self.paths:
            log(f'No audio recordings found in "{given}"')
        stems = [path.stem.casefold() for path in self.paths]
        unique = len(stems) == len(set(stems))
        root = Path(os.path.commonpath([given.resolve(), *(path.parent for path in self.paths)]))
        self.names = {path: path.stem if unique else str(path.relative_to(root)) for path in self.paths}

    def run_threads(self, model: Path) -> None:
        if self.environ.get("FAKE_HAWKEARS_OOM") == "load":
            raise InferenceError(f"Failed to load model from {model.absolute()}: {OUT_OF_MEMORY}")
        lanes = min(self.options.threads, len(self.paths))
        try:
            if lanes == 1:
                self.run_lane(self.paths, first=True)
            elif lanes > 1:
                with ThreadPoolExecutor(lanes) as pool:
                    jobs = [pool.submit(self.run_lane, self.paths[n::lanes], first=n == 0) for n in range(lanes)]
                for job in jobs:
                    job.result()
        finally:
            print(f"Analyzing {len(self.paths)} recording(s)... ━━━━━━━━━━━━ 100% 0:00:01 0:00:00", flush=True)

    def run_lane(self, paths: list[Path], *, first: bool) -> None:
        for path in paths:
            if self.cancelled.is_set():
                break
            self.listen(path)
        if first:
            (self.out / "manifest.yaml").write_text("models: []\n")

    def listen(self, path: Path) -> None:
        content = path.read_bytes()
        word = content[6:].split()[0].decode() if content.startswith(b"#fake ") else ""
        time.sleep(float(self.environ.get("FAKE_HAWKEARS_S", "0.01")))
        if word == "oom":
            raise OutOfMemoryError(OUT_OF_MEMORY)
        if word == "traceback":
            raise RuntimeError("Given groups=1, weight of size [32, 1, 3, 3], expected input to have 1 channels")
        if word in ("SIGSEGV", "SIGKILL"):
            os.kill(os.getpid(), getattr(signal, word))
            time.sleep(60)  # it may reach another thread first
        if not word and not self.can_be_heard(path):
            return
        if self.options.region and self.options.region not in KNOWN_REGIONS and not self.location_error_said:
            self.location_error_said = True
            log(f"Error: location {self.options.region} not found")
        found = hear_loud(path) if self.environ.get("FAKE_HAWKEARS_EARS") == "loud" else hear(content)
        labels = self.label(self.names[path], [] if word == "silence" else found)
        self.write_labels(self.out / f"{self.names[path]}_scores.txt", labels, word)

    def can_be_heard(self, path: Path) -> bool:
        """Read the length as the real one does: raise on a broken file, pass over one that is too short."""
        try:
            with wave.open(str(path)) as audio:
                length_s = audio.getnframes() / audio.getframerate()
                check_room(length_s, self.options.threads, self.environ)
                problem = None if length_s else f"No audio samples found in {path}"
        except (wave.Error, EOFError):
            length_s, problem = 0.0, f"[Errno 1094995529] Invalid data found when processing input: '{path}'"
        if problem:
            log(f"Caught exception in audio load of {path}: {problem}")
            log(f"Invalid audio duration: {length_s} seconds")
        if problem or length_s < 0.5:
            log(f"No predictions generated for {path} (length={length_s:.2f} seconds, audio_error={problem})")
        if problem:
            raise InferenceError(f'Could not load recording "{path}": {problem}')
        return length_s >= 0.5

    def label(self, name: str, found: list[tuple[float, float, str, float]]) -> list[str]:
        labels = []
        for start_s, end_s, code, score in found:
            labels.append(f"{start_s:.2f}\t{end_s:.2f}\t{code};{score:.3f}\n")
            self.rows.append(f"{name},{code},{start_s:.3f},{end_s:.3f},{score:.3f}\n")
        return labels

    def write_labels(self, path: Path, labels: list[str], word: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            if word == "opened":  # a thread that is stopped between open and write: 0 bytes, and yet not silent
                time.sleep(4)
            if word == "torn":  # and one that is stopped with a part of it on disk
                file.write(labels[0][:7])
                file.flush()
                time.sleep(4)
                file.write(labels[0][7:])
                labels = labels[1:]
            if word == "full":
                raise Exception(f"Failed to write Audacity labels to {path}: [Errno 28] No space left on device")
            file.writelines(labels)


def parse_options(words: list[str]) -> argparse.Namespace:
    """Read the command line as click does; end with its usage text and exit code 2."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("input")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("-r", "--rtype", default="audacity")
    parser.add_argument("--threads", type=int, default=3)
    for name in ("--region", "--date", "--models", "--cfg", "--label"):
        parser.add_argument(name)
    parser.add_argument("-m", "--min_score", type=float)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        log("Usage: hawkears analyze [OPTIONS] [INPUT_PATH]\nTry 'hawkears analyze --help' for help.\n")
        log(f"Error: No such option: {unknown[0]}")
        sys.exit(2)
    return options


def main() -> None:
    if sys.argv[1:2] != ["analyze"]:
        sys.exit(2)
    run = FakeHawkEars(parse_options(sys.argv[2:]), dict(os.environ))

    def request_cancel(signum: int, frame: object) -> None:
        if run.cancelled.is_set():
            raise KeyboardInterrupt
        run.cancelled.set()
        log("\nCancellation requested; finishing active recordings. Press Ctrl-C again to stop immediately.")

    signal.signal(signal.SIGINT, request_cancel)
    try:
        run.analyze()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    if run.cancelled.is_set():
        log("Aborted!")
        sys.exit(1)


if __name__ == "__main__":
    main()
