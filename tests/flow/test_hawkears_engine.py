"""The real HawkEars on a CPU, fed by our worker; what does not need it is held on stand-ins, in tests/contract.

``tests/hawkears/install`` brings it. A start costs 8 s of a core, so that few runs answer many questions.
"""

import csv
import inspect
import json
import os
import signal
import subprocess
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest
from rooms import workers
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import BadInput, Launcher, SessionBroken, SystemClock
from rooms.sources import read_regions
from rooms.workers import EngineStart, HawkEarsEngine, parse_detections, python_of
from support.audio import make_wav
from support.by_hand import cut
from support.needs import find_hawkears

pytestmark = pytest.mark.timeout(400)
CPU = WorkerPlan(slot=0, device=None, device_id=None, threads=2)
GPU = replace(CPU, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1)
RATE = 28_000  # what the models want: resampling would compile for half a minute first
OPTIONS = ("--region", "CA-NT", "--date", "file", "--low-band", "--models", "2", "--start", "1", "--min_score", "0.5")


class Installation:
    """The real one, and a folder for audio."""

    def __init__(self, folder):
        self.program, self.root = find_hawkears()
        self.folder = folder
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def engine(self, *args, root=None, forks=False):
        start = EngineStart(args, self.environ, Launcher("test"), SystemClock())
        return HawkEarsEngine(start, python_of(self.program), root or self.root, forks=forks)

    def analyze_alone(self, audio, *runs):
        """Run ``hawkears analyze`` itself on a folder, for each set of options; return (recording, table) → rows."""
        outs = [self.folder / "own" / str(number) for number in range(len(runs))]
        common = ("--rtype", "csv", "--threads", "1")
        commands = [
            ["analyze", *map(str, (audio, "-o", out)), *common, *run] for out, run in zip(outs, runs, strict=True)
        ]
        env = {**self.environ, "CUDA_VISIBLE_DEVICES": ""}
        words = [python_of(self.program), "-c", ALONE, json.dumps(commands)]
        subprocess.run(words, cwd=self.root, env=env, check=True, capture_output=True, timeout=170)
        return [tables_in(out) for out in outs]

    def broken(self, name, engine, plan):
        """Feed a recording to a session that cannot work; return why."""
        one = sound(self.folder / name / "a.wav", 3)
        session = engine.open(plan, self.folder / name)
        with pytest.raises(SessionBroken) as broken:
            results_of(session, [one])
        session.kill()
        session.close()
        return broken.value.error_class, str(broken.value)


ALONE = """
import json, sys
from hawkears.cli import cli
for command in json.loads(sys.argv[1]):
    cli.main(command, standalone_mode=False)
"""


def tables_in(folder):
    tables = {}
    for table in ("scores", "rarities"):
        if not (path := folder / f"{table}.csv").exists():
            continue
        names = [row["recording"] for row in csv.DictReader(path.read_text().splitlines())]
        for name, detection in zip(names, parse_detections(path.read_text()), strict=True):
            tables.setdefault((name, table), set()).add(detection)
    return tables


def tables_of(results):
    tables = {}
    for name, result in results.items():
        assert result.ok, result.error
        for table, found in (("scores", result.detections), ("rarities", result.rarities)):
            if found:
                tables[name, table] = {replace(detection, label_name=None) for detection in found}
    return tables


@pytest.fixture
def hawkears(tmp_path):
    return Installation(tmp_path)


def sound(path, seconds, tone_hz=2000):
    make_wav(path, seconds, RATE, loud=[(0.2, seconds / 2)], tone_hz=tone_hz)
    return Chunk(path.stem, path.stem, path.name, str(path), 0, round(seconds * 1000))


def noise(path, seconds, seed=0):
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(Random(seed).randbytes(2 * RATE * seconds))
    return Chunk(path.stem, path.stem, path.name, str(path), 0, seconds * 1000)


def results_of(session, batch, *, interrupt=False):
    results = {}
    for event in session.process(batch):
        if isinstance(event, ChunkResult):
            results[event.chunk.chunk_id] = event
            if interrupt:
                session.interrupt()
    return results


def test_fed_it_finds_what_it_finds_alone_survives_bad_files_and_stops_in_order(hawkears, caplog):
    """One process: bad files among good ones cost only themselves, and the next batch needs no new models.

    It is forked from one that has imported everything, as is the one that replaces it after a crash.
    """
    caplog.set_level("INFO", logger="badcjobs")
    audio, other = hawkears.folder / "audio", hawkears.folder / "other"
    good = [sound(audio / f"site{n}_2023061{n}_040000.wav", 3 + n, 1500 + 700 * n) for n in range(4)]
    crumb, long = sound(other / "crumb.wav", 0.3), sound(other / "long.wav", 6)
    broken = [Chunk(name, name, name, str(other / name)) for name in ("bad.wav", "empty.wav")]
    (other / "bad.wav").write_bytes(b"this is not audio" * 50)
    (other / "empty.wav").write_bytes(b"")
    engine = hawkears.engine("--threads", "2", *OPTIONS, forks=True)
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(hawkears.analyze_alone, audio, OPTIONS)
        engine.check()
        session = engine.open(CPU, hawkears.folder)
        fed = results_of(session, [good[0], *broken, *good[1:], crumb])
        mapped = Path(f"/proc/{session.pid}/maps").read_text()
        stopped = results_of(session, [replace(long, chunk_id=str(n)) for n in range(60)], interrupt=True)
        exit_code = session.close()
        alone.result()
    crashed = engine.open(CPU, hawkears.folder)
    started = next(crashed.process(good))
    parent = psutil.Process(crashed.pid).ppid()
    os.kill(crashed.pid, signal.SIGKILL)
    with pytest.raises(SessionBroken, match="SIGKILL"):
        results_of(crashed, good)
    again = engine.open(CPU, hawkears.folder)
    assert isinstance(next(again.process([started.chunk])), ChunkStarted)
    assert psutil.Process(again.pid).ppid() == parent != os.getpid()
    again.kill()
    assert (crashed.close(), again.close()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert "/scipy/" in mapped and "/scipy/signal/" not in mapped, "it takes a second to import, and is not used"
    assert "not forked" not in caplog.text and "which has imported HawkEars" in caplog.text
    found = {one.chunk_id: fed[one.chunk_id].detections for one in good}
    assert [tables_of({name: fed[name] for name in found})] == alone.result()
    named = {d for each in found.values() for d in each if d.label_name}
    assert len(named) > 10 and {len(d.label) for d in named} == {4}
    assert fed["site1_20230611_040000"].audio_s == 4 and fed["crumb"].detections == ()
    reported = {"bad.wav": "bad_audio", "empty.wav": "bad_audio", "crumb": None}
    assert {name: fed[name].error_class for name in reported} == reported
    # What two threads have begun, and a few more on a busy machine: until the word comes.
    assert exit_code == 0 and 1 <= len(stopped) < 10 and all(result.ok for result in stopped.values())


def test_what_cannot_work_is_told_by_its_cause(hawkears):
    (hawkears.folder / "nothing").mkdir()
    cases = {
        "cpu": (hawkears.engine(), GPU, "ran_on_cpu", "uses the CPU although this worker has a GPU"),
        "region": (hawkears.engine("--region", "XX-YY"), CPU, "configuration", "location XX-YY not found"),
        "place": (hawkears.engine("--lat", "0", "--lon", "0"), CPU, "configuration", "No eBird county found"),
        "models": (hawkears.engine(root=hawkears.folder / "nothing"), CPU, "configuration", "files not found"),
    }
    with ThreadPoolExecutor(2) as pool:
        reported = {
            name: pool.submit(hawkears.broken, name, engine, plan) for name, (engine, plan, *_) in cases.items()
        }
        checked = pool.submit(hawkears.engine("--threads", "2", *OPTIONS).check)
        with pytest.raises(BadInput, match="No such option: --loudly"):
            hawkears.engine("--loudly").check()
    for name, (_, _, error_class, words) in cases.items():
        assert (reported[name].result()[0], words in reported[name].result()[1]) == (error_class, True), reported[
            name
        ].result()
    assert checked.result() is None


READ = """
import json, sys, types, wave
sys.path.insert(0, sys.argv[1])
import numpy as np, hawkears_worker as worker
sys.modules["email.mime"] = worker.Postponed("email.mime")
import email.mime.text
from britekit.core import audio
files, asked, decode = sys.argv[2:], [], audio._decode_audio
audio._decode_audio = lambda path: (asked.append(path), decode(path))[1]
expected = {path: decode(path) for path in files}
worker.read_wav_at_once()
for path in files:
    (found, rate), (samples, own_rate) = audio._decode_audio(path), expected[path]
    same = rate == own_rate and found.dtype == samples.dtype and found.flags.c_contiguous
    print(json.dumps([path, bool(same and np.array_equal(found, samples)), found.shape, path in asked]))
class Predictor:
    def __init__(self):
        self.audio = types.SimpleNamespace(signal=None, cached=None, seconds=lambda: 1.0)
    def get_overlapping_scores(self):
        held = [self.audio.signal, self.audio.cached]
        self.audio.signal = self.audio.cached = self.normalized_specs = self.unnormalized_specs = 1
        return [*held, self.normalized_specs, self.unnormalized_specs]
module = types.SimpleNamespace(Predictor=Predictor)
worker.reuse_predictors(module, types.SimpleNamespace())
print([module.Predictor().get_overlapping_scores() for _ in range(2)])
"""


def test_simple_wav_files_are_read_as_hawkears_decodes_them_but_at_once_and_nothing_old_is_kept(hawkears):
    folder = hawkears.folder
    mono = make_wav(folder / "mono.wav", 3, RATE).read_bytes()
    frames = mono[44:]
    shapes = {"stereo": (2, 2), "byte": (1, 1), "wide": (1, 3)}  # channels, bytes per sample
    for name, (channels, width) in shapes.items():
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((channels, width, RATE, 0, "NONE", ""))
            file.writeframes(frames[: len(frames) // 12 * 12 - 12 + width * channels])
    commented = b"WAVE" + b"LIST\x04\0\0\0INFO" + mono[12:] + b"guan\x02\0\0\0{}"
    (folder / "comment.wav").write_bytes(b"RIFF" + len(commented).to_bytes(4, "little") + commented)
    (folder / "truncated.wav").write_bytes(mono[: len(mono) // 2 - 1])
    (folder / "endless.wav").write_bytes(mono[:40] + b"\xff" * 4 + mono[44:])  # its recorder lost power
    files = {path.stem: path for path in folder.glob("*.wav")}
    words = [python_of(hawkears.program), "-c", READ, Path(inspect.getfile(HawkEarsEngine)).parent, *files.values()]
    said = subprocess.run(list(map(str, words)), cwd=hawkears.root, capture_output=True, text=True, timeout=100)
    assert said.returncode == 0, said.stderr
    *read, held = map(json.loads, said.stdout.replace("None", "null").splitlines())
    assert {Path(path).stem: (same, by_hawkears) for path, same, _, by_hawkears in read} == {
        "mono": (True, False), "stereo": (True, False), "comment": (True, False),
        "byte": (True, True), "wide": (True, True), "truncated": (True, True), "endless": (True, True),
    }  # fmt: skip
    assert {Path(path).stem: shape[0] for path, _, shape, _ in read}["stereo"] == 2
    assert held == [[None] * 4] * 2


COUNTIES = """
import json
from britekit import OccurrencePickleProvider
counties = OccurrencePickleProvider("data/occurrence.pkl").counties
print(json.dumps([[one.code, one.min_y, one.max_y, one.min_x, one.max_x] for one in counties]))
"""


def test_the_regions_that_we_read_are_those_of_its_occurrence_data(hawkears):
    words = [python_of(hawkears.program), "-c", COUNTIES]
    output = subprocess.run(words, cwd=hawkears.root, check=True, capture_output=True, text=True).stdout
    theirs = sorted(map(tuple, json.loads(output)))
    assert len(theirs) > 1000 and sorted(read_regions(hawkears.root).counties) == theirs


SPECIES = ["American Avocet", "Bohemian Waxwing", "Lark Bunting", "Least Flycatcher", "Osprey", "Western Kingbird"]
IN_ALBERTA, IN_VANCOUVER = ("--region", "CA-AB"), ("--lat", "49.25", "--lon", "-123.1")
OPTION_SETS = [
    ("--include", "few.txt", "--label", "alt_names", "--seg", "1.5", "-m", "0.2", *IN_ALBERTA, "--date", "0105"),
    ("--exclude=few.txt", "--label", "alt_codes", "--max-label-length", "1", "--min-label-length", "0.5",
     "--start", "0:01", "--min_score=0.3", *IN_VANCOUVER, "--date", "20240610"),
    ("-m", "0", "--label", "names", "--low-band", *IN_ALBERTA, "--date", "file", "--debug", "--recurse"),
    ("--cfg", "quiet.yaml", "--label", "codes", "--no-low-band", "--models", "2", *IN_VANCOUVER),
]  # fmt: skip


def test_with_each_of_its_options_it_finds_what_it_finds_alone(hawkears):
    """Files of options are named from the user's folder: it runs in another."""
    folder, audio = hawkears.folder, hawkears.folder / "audio"
    (folder / "few.txt").write_text("\n".join(SPECIES))
    (folder / "quiet.yaml").write_text("hawkears:\n  save_rarities: false\ninfer:\n  min_score: 0.3\n")
    batch = [noise(audio / f"{name}.wav", 5) for name in ("a_20240105", "b_20240610")]
    runs = [
        ("--models", "1", *workers.with_absolute_paths(workers.split_options(options), folder))
        for options in OPTION_SETS
    ]
    engine = hawkears.engine(forks=True)
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(hawkears.analyze_alone, audio, *runs)
        engine.check()
        for run, options in enumerate(runs):
            engine.start = replace(engine.start, args=options)
            session = engine.open(CPU, folder)
            fed = tables_of(results_of(session, batch))
            session.close()
            assert fed == alone.result()[run], options
            kinds = {table for _, table in fed}
            assert kinds == ({"scores"} if "--cfg" in options else {"scores", "rarities"}), options


HEADER = "filename,recording_date,region,latitude,longitude\n"
# By region or coordinates: five provinces, a territory, the Pacific, and no place; the last two are not filtered.
PLACES = ("CA-AB,,", ",49.25,-123.1", "CA-ON-OT,,", ",62.45,-114.37", "CA-QC,,", ",44.65,-63.57", ",40,-160", ",,")
DAYS = ("2024-01-10", "2024-06-03", "2024-09-25", "", "20240603")


def test_forty_recordings_of_five_provinces_and_three_seasons_are_judged_as_by_hawkears_with_its_list(hawkears, site):
    """Whole recordings, and cut ones as HawkEars judges the same stretches in files of their own."""
    lines, own_lines = [HEADER], [HEADER]
    (site.folder / "own").mkdir()
    for number in range(40):
        place, day = number % 8, DAYS[number // 8]
        path = site.folder / "audio" / f"r{number:02d}.wav"
        noise(path, 8 if place < 2 else 3, seed=place // 2)
        lines.append(f"{path.name},{day},{PLACES[place]}\n")
        for start_s, end_s in [(0, 4), (4, 8)] if place < 2 else [(0, 3)]:
            start_ms, end_ms = start_s * 1000, end_s * 1000
            name = f"{path.stem}_{start_ms}_{end_ms}.wav"
            cut(path, start_ms, end_ms, site.folder / "own" / name)
            own_lines.append(f"{name},{day},{PLACES[place]}\n")
    (site.folder / "list.csv").write_text("".join(lines))
    (site.folder / "own.csv").write_text("".join(own_lines))
    (site.folder / "all.yaml").write_text("hawkears: {date: '20240115', region: CA-BC}\n")  # without effect on a list
    options = ("--models", "1", "-m", "0.3")
    hawkears_options = ("--hawkears-python", python_of(hawkears.program), "--hawkears-root", hawkears.root)
    with ThreadPoolExecutor() as pool:
        run = ("--filelist", str(site.folder / "own.csv"), *options)
        alone = pool.submit(hawkears.analyze_alone, site.folder / "own", run)
        ended = site.run(
            "audio", "--filelist", "list.csv", "--chunk-length", 4, *hawkears_options, "--cpu-workers", 1,
            "--no-emit-gpu-telemetry", *(f"--engine-arg={word}" for word in (*options, "--cfg=all.yaml")),
            env={"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    found = {}
    for table, kind in (("detection", "scores"), ("rarity", "rarities")):
        for chunk_id, *row in site.rows(f"SELECT chunk_id, start_ms, end_ms, label, score FROM {table}"):
            found.setdefault((chunk_id, kind), set()).add(Detection(*row))
    assert [found] == alone.result()
    scores = {name: rows for (name, kind), rows in found.items() if kind == "scores"}
    assert len(scores) == 50
    assert scores["r02_0_3000"] not in (scores["r03_0_3000"], scores["r10_0_3000"]), "another place, another season"
    assert scores["r06_0_3000"] == scores["r07_0_3000"] and ("r06_0_3000", "rarities") not in found
