"""The real HawkEars on a CPU, fed by our worker; what does not need it is held on stand-ins, in tests/contract.

``tests/hawkears/install`` brings it. A start costs 8 s of a core, so that few runs answer many questions.
"""

import csv
import inspect
import json
import os
import signal
import subprocess
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import BadInput, Launcher, SessionBroken, SystemClock
from rooms.workers import EngineStart, HawkEarsEngine, parse_detections, python_of
from support.audio import make_wav
from support.needs import missing

pytestmark = pytest.mark.timeout(400)
CPU = WorkerPlan(slot=0, device=None, device_id=None, threads=2)
GPU = replace(CPU, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1)
RATE = 28_000  # what the models want: resampling would compile for half a minute first
OPTIONS = ("--region", "CA-NT", "--date", "file", "--low-band", "--models", "2", "--start", "1", "--min_score", "0.5")


class Installation:
    """The real one, and a folder for audio."""

    def __init__(self, folder):
        program, root = (os.environ.get(f"BADCJOBS_TEST_HAWKEARS{end}") for end in ("", "_ROOT"))
        if not (program and root):
            missing("hawkears", "no real HawkEars: BADCJOBS_TEST_HAWKEARS and BADCJOBS_TEST_HAWKEARS_ROOT are not set")
        self.program, self.root, self.folder = Path(program), Path(root), folder
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def engine(self, *args, root=None, forks=False):
        start = EngineStart(args, self.environ, Launcher("test"), SystemClock())
        return HawkEarsEngine(start, python_of(self.program), root or self.root, allow_cpu=False, forks=forks)

    def analyze_alone(self, audio, *options):
        """Run ``hawkears analyze`` itself on a folder and return its table."""
        words = [self.program, "analyze", audio, "-o", self.folder / "own", "--rtype", "csv", *options]
        env = {**self.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(list(map(str, words)), cwd=self.root, env=env, check=True, capture_output=True, timeout=170)
        text, found = (self.folder / "own" / "scores.csv").read_text(), dict[str, set[Detection]]()
        names = [row["recording"] for row in csv.DictReader(text.splitlines())]
        for name, detection in zip(names, parse_detections(text), strict=True):
            found.setdefault(name, set()).add(detection)
        return found

    def broken(self, name, engine, plan):
        """Feed a recording to a session that cannot work; return why."""
        one = sound(self.folder / name / "a.wav", 3)
        session = engine.open(plan, self.folder / name)
        with pytest.raises(SessionBroken) as broken:
            results_of(session, [one])
        session.kill()
        session.close()
        return broken.value.error_class, str(broken.value)


@pytest.fixture
def hawkears(tmp_path):
    return Installation(tmp_path)


def sound(path, seconds, tone_hz=2000):
    make_wav(path, seconds, RATE, loud=[(0.2, seconds / 2)], tone_hz=tone_hz)
    return Chunk(path.stem, path.stem, path.name, str(path), 0, round(seconds * 1000))


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

    It is forked from one that has imported everything, as is the one that replaces it after a crash, within seconds.
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
        alone = pool.submit(hawkears.analyze_alone, audio, "--threads", "1", *OPTIONS)
        engine.check()
        session = engine.open(CPU, hawkears.folder)
        fed = results_of(session, [good[0], *broken, *good[1:], crumb])
        mapped = Path(f"/proc/{session.pid}/maps").read_text()
        stopped = results_of(session, [replace(long, chunk_id=str(n)) for n in range(60)], interrupt=True)
        exit_code = session.close()
        alone.result()
    crashed = engine.open(CPU, hawkears.folder)
    started = next(crashed.process(good))
    os.kill(crashed.pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(SessionBroken, match="SIGKILL"):
        results_of(crashed, good)
    again = engine.open(CPU, hawkears.folder)
    assert isinstance(next(again.process([started.chunk])), ChunkStarted)
    assert time.monotonic() - began_s < 3
    again.kill()
    assert (crashed.close(), again.close()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert "/scipy/" in mapped and "/scipy/signal/" not in mapped, "it takes a second to import, and is not used"
    assert "not forked" not in caplog.text and "which has imported HawkEars" in caplog.text
    found = {one.chunk_id: fed[one.chunk_id].detections for one in good}
    assert {name: {replace(d, label_name=None) for d in each} for name, each in found.items()} == alone.result()
    named = {d for each in found.values() for d in each if d.label_name}
    assert len(named) > 10 and {len(d.label) for d in named} == {4}
    assert fed["site1_20230611_040000"].audio_s == 4 and fed["crumb"].detections == ()
    told = {"bad.wav": "bad_audio", "empty.wav": "bad_audio", "crumb": None}
    assert {name: fed[name].error_class for name in told} == told
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
        told = {name: pool.submit(hawkears.broken, name, engine, plan) for name, (engine, plan, *_) in cases.items()}
        checked = pool.submit(hawkears.engine("--threads", "2", *OPTIONS).check)
        with pytest.raises(BadInput, match="No such option: --loudly"):
            hawkears.engine("--loudly").check()
    for name, (_, _, error_class, words) in cases.items():
        assert (told[name].result()[0], words in told[name].result()[1]) == (error_class, True), told[name].result()
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
