"""Stand-ins for HawkEars 2, the package in fake_hawkears_package, and for HawkEars 1's analyze.py: no models, all lies.

Written from the outside of the real ones: the same names, shapes, options and files. A file that begins with ``#fake
WORD`` makes it misbehave at that recording. The environment sets the rest, each with FAKE_HAWKEARS_ before it: START_S
(before the device line) and S (per recording) its pace; CUDA=0 (a GPU that PyTorch cannot use), NO_TORCH=1;
SHAPE=other|unplaced|none|deaf (an inner shape that we do not know, no API, no interest in recordings); LOADS, a file
that gets a line for each time that models are loaded, or of version 1 each file; ROOM, how many such lines fit into its
memory; ROOM_S, how many seconds of audio times threads do; CROWD=3:WORD, an error while three are forked; EARS=loud: it
hears what is loud. IMPORTS, a file that gets a line for each import of a slow library, which takes IMPORT_S;
UNFIT=cuda|threads: after its import a fork is not safe.
"""

import argparse
import csv
import os
import shlex
import signal
import sys
import threading
import time
import wave
import zlib
from array import array
from pathlib import Path

from support.fake_mps import use_device

KNOWN_REGIONS = {"CA-NT", "CA-AB", "CA-BC"}
NAMES = {"ROPT": "Rock Ptarmigan", "RUGR": "Ruffed Grouse", "SPGR": "Spruce Grouse", "STGR": "Sharp-tailed Grouse"}
CODES = (*NAMES, "WIPT")  # one has a code alone
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.79 GiB."
ERRORS = {
    "oom": RuntimeError(OUT_OF_MEMORY),
    "traceback": RuntimeError("Given groups=1, weight of size [32, 1, 3, 3], expected input to have 1 channels"),
    "long": RuntimeError("no " * 9000),
    "stuck": RuntimeError("the audio cannot be reset"),
    "host": MemoryError("std::bad_alloc"),
    "full": OSError(28, "No space left on device"),
}


def fake_package_environ() -> dict[str, str]:
    """Return the variables with which any Python has this HawkEars, and the ears below."""
    package = Path(__file__).with_name("fake_hawkears_package")
    return {"PYTHONPATH": os.pathsep.join([str(package), str(package.parents[1])])}


def install_fake_hawkears(folder: Path) -> Path:
    """Write a ``hawkears`` as pip does, and the Python that its first line names; return its path."""
    from support.stand_ins import install

    paths = shlex.quote(fake_package_environ()["PYTHONPATH"])
    python = f'#!/bin/sh\nPYTHONPATH={paths} exec {shlex.quote(sys.executable)} "$@"\n'
    return install(folder / "hawkears", f"#!{install(folder / 'python-of-hawkears', python)}\n")


def make_fake_root(folder: Path) -> Path:
    """Make what ``hawkears init`` leaves, as far as anyone looks at it: three models."""
    (folder / "data" / "ckpt").mkdir(parents=True)
    for number in (1, 2, 3):
        (folder / "data" / "ckpt" / f"model{number:02d}.ckpt").touch()
    return folder


def hawkears_options(folder: Path, *args: str) -> tuple[object, ...]:
    """Return the options that run the stand-in package, with the models in the folder ``root`` of this one."""
    if not (root := folder / "root").exists():
        make_fake_root(root)
    engine = ("--engine", "hawkears", "--hawkears-python", sys.executable, "--hawkears-root", root)
    return (*engine, *(f"--engine-arg={arg}" for arg in args))


def make_fake_hawkears1(folder: Path) -> Path:
    """Make a folder in which ``python analyze.py`` is the stand-in of version 1."""
    make_fake_root(folder)
    tests = str(Path(__file__).parents[1])
    program = f"import sys\nsys.path.insert(0, {tests!r})\nfrom support.fake_hawkears import main\nmain()\n"
    (folder / "analyze.py").write_text(program)
    return folder


def length_s(path: Path) -> float:
    if b"#fake " in path.read_bytes()[:10]:  # also after OggS, which begins like audio
        return 3.0
    with wave.open(str(path)) as audio:
        return audio.getnframes() / audio.getframerate()


def listen(path: Path, audio_s: float, threads: int) -> list[tuple[float, float, str, float]] | None:
    """Take the time that a recording takes, do what it asks for, and return detections (start, end, code, score)."""
    content = path.read_bytes().removeprefix(b"OggS")
    word = content[6:].split()[0].decode() if content.startswith(b"#fake ") else ""
    use_device(faulty=word == "fault")
    time.sleep(float(os.environ.get("FAKE_HAWKEARS_S", "0.01")))
    use_device()
    if word in ERRORS:
        raise ERRORS[word]
    if crowd := os.environ.get("FAKE_HAWKEARS_CROWD"):
        many, _, error = crowd.partition(":")
        if len(Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()) >= int(many):
            raise ERRORS[error]
    if word == "hang":
        time.sleep(3600)
    if word in ("SIGSEGV", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, word))
        time.sleep(60)  # it may reach another thread first
    if word == "skip":
        return None
    if audio_s * threads > float(os.environ.get("FAKE_HAWKEARS_ROOM_S", "inf")):
        raise ERRORS["oom"]
    if os.environ.get("FAKE_HAWKEARS_EARS") == "loud":
        return hear_loud(path)
    return [] if word == "silence" else hear(content)


def hear(content: bytes) -> list[tuple[float, float, str, float]]:
    """Make detections that depend on the content alone."""
    chances = [(code, zlib.crc32(content + code.encode())) for code in CODES]
    heard = [(code, chance) for code, chance in chances if code == CODES[0] or chance % 3]
    return [(chance % 80 / 4, chance % 80 / 4 + 0.75, code, 0.7 + chance % 300 / 1000) for code, chance in heard]


def hear_loud(path: Path, window_s: float = 0.25) -> list[tuple[float, float, str, float]]:
    """Make a detection of each loud stretch of a 16-bit WAV file."""
    with wave.open(str(path)) as audio:
        samples = array("h", audio.readframes(audio.getnframes()))
        window = round(window_s * audio.getframerate()) * audio.getnchannels()
    is_loud = [False, *(max(samples[at : at + window]) > 8000 for at in range(0, len(samples), window)), False]
    edges = [n * window_s for n in range(len(is_loud) - 1) if is_loud[n] != is_loud[n + 1]]
    return [(start_s, end_s, "ROPT", 0.9) for start_s, end_s in zip(edges[::2], edges[1::2], strict=True)]


def occurs(code: str, region: str | None, date: str | None) -> bool:
    """Decide at will: a place and a date must make a difference."""
    if region == "CA-BC" and code in ("RUGR", "STGR"):
        return False
    return region is None or code != "SPGR" or "-01-" not in (date or "")


def region_at(latitude: float | None) -> str | None:
    return None if latitude is None else "CA-BC" if latitude < 60 else "CA-NT"


HEADER = "filename,start_time,end_time,class_name,class_code,score\n"


def log(text: str) -> None:
    print(f"12:00:00.000 {text}", file=sys.stderr, flush=True)


def read_list(path: str) -> dict[str, tuple[str | None, str | None]]:
    """Return region and date by the name of a file; the real one wants these columns and no others."""
    header, *rows = csv.reader(Path(path).read_text().splitlines())
    if header != ["filename", "latitude", "longitude", "recording_date"]:
        log(f"Error: file {path} has {len(header)} columns but 4 were expected.")
        sys.exit(0)
    return {name: (region_at(float(latitude) if latitude else None), date) for name, latitude, _, date in rows}


def analyze(number: int, path: Path, out: Path, threads: int, place: tuple, rows: list[str], rare: list[str]) -> None:
    """Write the labels of a recording; an exception ends its thread, and no one else notices."""
    log(f"Thread {number}: Analyzing {path}")
    if loads := os.environ.get("FAKE_HAWKEARS_LOADS"):
        with Path(loads).open("a") as file:
            file.write(f"{path.name}\n")
    try:
        audio_s = length_s(path)
    except (wave.Error, EOFError) as error:
        log(f"Caught exception in audio load of {path}: {error}")
        return
    found = listen(path, audio_s, threads) or []
    labels = [f"{start:.2f}\t{end:.2f}\t{code};{score:.3f}\n" for start, end, code, score in found]
    (out / f"{path.stem}_HawkEars.txt").write_text("".join(labels))
    for start, end, code, score in found:
        row = f"{path.name},{start:.3f},{end:.3f},{NAMES.get(code, code)},{code},{score:.3f}\n"
        (rows if occurs(code, *place) else rare).append(row)


def main() -> None:
    parser = argparse.ArgumentParser(prog="analyze.py")
    for name in ("-i", "-o", "--merge", "--min_score", "--rtype", "--region", "--date", "--filelist"):
        parser.add_argument(name)
    parser.add_argument("--threads", type=int, default=3)
    options = parser.parse_args()
    log("Initializing")
    out = Path(options.o)
    out.mkdir(parents=True, exist_ok=True)
    cuda = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0"
    log("Using CUDA" if cuda else "Using CPU")
    if not cuda and os.environ.get("CUDA_VISIBLE_DEVICES"):
        time.sleep(60)  # it loads its models: time to end it before the first recording
    if options.region and options.region not in KNOWN_REGIONS:
        log("Error: no eBird county found matching given region")
        return
    paths, rows, rare = sorted(Path(options.i).iterdir()), list[str](), list[str]()
    places = dict.fromkeys((path.name for path in paths), (options.region, options.date))
    if options.filelist:
        places = read_list(options.filelist)
        paths = [path for path in paths if path.name in places]
    lanes = max(1, min(options.threads, len(paths)))

    def work(number: int) -> None:
        for path in paths[number::lanes]:
            analyze(number + 1, path, out, options.threads, places[path.name], rows, rare)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (out / "HawkEars_labels.csv").write_text(HEADER + "".join(sorted(rows)))
    if rare:
        (out / "HawkEars_rarities.csv").write_text(HEADER + "".join(sorted(rare)))
    log("Elapsed time = 0m 1s")
