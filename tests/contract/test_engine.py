"""What every engine promises; then what can go wrong inside each, how it is recognised, and who is blamed.

HawkEars is a stand-in here, as a package and as version 1; ``tests/flow/test_hawkears_engine.py`` has the real one.
"""

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rooms import model, root, workers
from rooms.model import Chunk, ChunkResult, ChunkStarted, Device, WorkerPlan
from rooms.root import BadcjobsError, Launcher, SessionBroken, nothing_more
from rooms.sources import AudioCutter
from rooms.workers import CommandEngine, EngineStart, HangTimeout, HawkEarsEngine
from support.audio import make_wav
from support.cases import DATA, read_data, read_parts
from support.fake_hawkears import NAMES, fake_package_environ, hear, make_fake_hawkears1, make_fake_root
from support.fake_prefix import install_fake_prefix
from support.hand_clock import HandClock
from support.stand_ins import install
from support.waiting import is_running, wait_for

CLOCK = root.SystemClock()
GPU = WorkerPlan(0, Device("0", "test", index=3, uuid="GPU-1", backend="nvml"), 1, 8)
SIMULATED = replace(GPU, device=Device("0", "test", uuid="GPU-sim", backend="simulated", memory_total_bytes=40 * 2**20))
LEAN = replace(SIMULATED, lean=True)
CPU = WorkerPlan(0, None, None, 2)
ONE, MANY = "{input} {output}", "{inputs} {outputs} many"
# The class of a chunk that it cannot hear, for each engine; one of them behind another program.
ENGINES = {
    "demo": "bad_audio", ONE: "exit_code", MANY: "no_output", "hawkears": "bad_audio", "hawkears1": "no_output",
    "demo behind": "bad_audio", "hawkears forked": "bad_audio",
}  # fmt: skip
ON_CUDA = {"device": "cuda", "name": "Tesla V100"}


class Place:
    """Stand-in installations, audio, sessions, and a look at the processes that carry this test's mark."""

    def __init__(self, folder):
        self.folder = folder
        self.mark = f"contract-{os.getpid()}-{folder.name}"
        self.root, self.root1 = make_fake_root(folder / "root"), make_fake_hawkears1(folder / "HawkEars")
        self.loads, self.runs = folder / "loads", folder / "runs"
        self.environ = {
            "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_ID": "4821",
            "FAKE_HAWKEARS_LOADS": str(self.loads), "FAKE_HAWKEARS_S": "0", "RUNS": str(self.runs),
            **fake_package_environ(),
        }  # fmt: skip
        prefix = (str(install_fake_prefix(folder / "bin")), f"{folder}/{{worker}}")
        self.launchers = {"": Launcher(self.mark), " behind": Launcher(self.mark, prefix)}
        self.sessions, self.parents = [], {}
        # Threads that outlive what they feed: a process dies with the thread that has started it.
        self.pool = ThreadPoolExecutor(4)
        self.scratch = folder / "scratch" / "worker-0"
        self.scratch.mkdir(parents=True)

    def engine(self, kind, *args, slow_s=0, limit=None, cpu=False, places=False, **env):
        """Make an engine by its name, or by the template of a command; behind a program that is put before it."""
        kind, behind, _ = kind.partition(" behind")
        args = {"demo": (*args, f"--burn-s={slow_s}"), MANY: ("--batch=4",)}.get(kind, args)
        env = {**self.environ, **({"FAKE_HAWKEARS_S": str(slow_s)} if slow_s else {}), **env}
        start = EngineStart(args, env, self.launchers[behind], CLOCK, places=places, allow_cpu=cpu)
        if kind == "demo":
            return workers.DemoEngine(start, HangTimeout())
        if kind.startswith("hawkears") and kind != "hawkears1":
            how = {"hang_timeout": limit or HangTimeout(), "forks": kind.endswith(" forked")}
            return HawkEarsEngine(start, sys.executable, self.root, **how)
        if kind == "hawkears1":
            engine = workers.HawkEars1Engine(start, sys.executable, self.root1)
            engine.wants = 4
            return engine
        engine = CommandEngine(start, kind if kind[0] == "/" else f"sh {DATA}/listen.sh {kind}")
        engine.hang_timeout = limit or engine.hang_timeout
        return engine

    def open(self, engine, plan=GPU):
        self.sessions.append(engine.open(plan, self.scratch))
        return self.sessions[-1]

    def process(self, engine, batch, plan=GPU):
        session = self.open(engine, plan)
        try:
            return feed(session, batch)
        finally:
            session.close()

    def broken(self, engine, batch):
        with pytest.raises(SessionBroken) as broken:
            self.process(engine, batch)
        return broken.value.error_class, broken.value.at_start, str(broken.value)

    def good(self, name, seconds=3, end_ms=None):
        path, loud = self.folder / "audio" / f"{name}.wav", [(0.3, 0.6)][: seconds > 0.6]
        return chunk(make_wav(path, seconds, loud=loud, tone_hz=900 + sum(name.encode()) % 3000), end_ms)

    def file(self, name, content):
        path = self.folder / "audio" / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return chunk(path)

    def fake(self, name, word):
        """Make a recording at which a stand-in misbehaves."""
        return self.file(name, f"#fake {word} {name}\n".encode())

    def environs(self):
        """Return the environments of the workers; one that becomes another program shows none.

        A parent that forks them is not among them, and a forked worker shows the environment of its parent.
        """
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # gone meanwhile, or someone else's
                environ = process.environ()
                is_parent = process.ppid() == os.getpid() and "--parent" in process.cmdline()
                if environ.get(root.TASK_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    (self.parents if is_parent else found)[process] = environ
        return found


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    for session in place.sessions:
        session.kill()
        session.close()
    place.pool.shutdown()
    assert place.environs() == {}, "something is still running"
    root.end_leftovers(place.mark)  # a task ends its parents like this


def chunk(path, end_ms=None):
    return Chunk(path.stem, path.stem, str(path), str(path), 0, end_ms)


def feed(session, batch, more=nothing_more):
    results = [news for news in session.process(batch, more) if isinstance(news, ChunkResult)]
    found = {one.chunk.chunk_id: one for one in results}
    assert len(found) == len(results), "a chunk has two results"
    return found


def classes(results):
    return {name: result.error_class for name, result in sorted(results.items())}


class Feeding:
    """Feeds a batch to a session as a worker's thread does, and keeps what comes."""

    def __init__(self, place, session, batch):
        self.started, self.results, self.broken = [], [], None
        self._done = place.pool.submit(self._feed, session, batch)

    def _feed(self, session, batch):
        try:
            for news in session.process(batch):
                (self.started if isinstance(news, ChunkStarted) else self.results).append(news)
        except SessionBroken as error:
            self.broken = error

    def end(self):
        self._done.result(30)
        return self


@pytest.mark.parametrize("kind", ENGINES)
def test_every_chunk_gets_one_answer_and_bad_audio_costs_only_itself(place, kind):
    engine, before_ms = place.engine(kind, cpu=True), CLOCK.now_ms()
    engine.check()
    session = place.open(engine)
    good = [place.good(name, 1, 1000) for name in ("a", "two words", "it's {braces} $HOME", "été ☃", "-dash", "100%")]
    moved = replace(good[0], start_ms=60_000, end_ms=61_000)
    contents = {"text": b"this is not audio" * 20, "empty": b"", "half a header": b"RIFF\x24\0\0\0WAVEfm"}
    broken = [*(place.file(*one) for one in contents.items()), chunk(place.folder / "gone.wav")]
    results = feed(session, [moved, *broken[:2], *good[1:], *broken[2:]])
    # Some may have been lost in bad company, but no chunk is blamed, and alone they are fine.
    lost = [one for one in good if not results[one.chunk_id].ok]
    assert not any(results[one.chunk_id].charged for one in lost)
    results |= feed(session, lost)
    assert set(results) == {one.chunk_id for one in [*good, *broken]}
    for one in good:
        result = results[one.chunk_id]
        assert (result.ok, result.error, result.audio_s) == (True, None, 1.0)
        assert before_ms <= result.started_at_ms <= result.ended_at_ms <= CLOCK.now_ms()
        heard = hear(Path(one.audio_path).read_bytes()) if "hawkears" in kind else [(0.3, 0.6)]
        assert {(d.start_ms, d.end_ms) for d in result.detections} == {
            (round(found[0] * 1000), round(found[1] * 1000)) for found in heard
        }, "from the start of the chunk, not of the recording"
        assert all(d.label and 0 <= (d.score or 0) <= 1 for d in result.detections)
    for one in broken:
        result = results[one.chunk_id]
        assert (result.error_class, result.charged, result.detections) == (ENGINES[kind], True, ())
        assert Path(one.audio_path).name in (result.error or "")
    waiting, asked = [place.good(name, 1) for name in "cdefgh"], list[tuple[int, int]]()

    def more(wanted, *, idle=0):
        asked.append((wanted, idle))
        return [waiting.pop(0) for _ in range(min(len(waiting), max(wanted, idle)))]

    again = feed(session, [place.good("a", 1), place.good("b", 1)], more)
    # It holds two, and has so many threads; a command does what it was given.
    asks = {"hawkears": [(3, 1)], "hawkears forked": [(3, 1)], "demo": [(0, 0)], "demo behind": [(0, 0)]}.get(kind, [])
    assert (asked[:1], classes(again)) == (asks, dict.fromkeys("abcdefgh" if asks else "ab"))
    assert session.close() == session.close() in (None, 0)
    assert place.environs() == {}


WHERE = {
    "a": model.Place(region="CA-BC"), "b": model.Place(50, -120, recorded_on="2024-01-05"), "c": model.NOWHERE,
    "d": model.Place(region="CA-NT", recorded_on="2024-01-05T06:30"), "e": model.Place(65, -120), "f": model.NOWHERE,
}  # fmt: skip
RARE = {"a": {"RUGR", "STGR"}, "b": {"RUGR", "STGR", "SPGR"}, "d": {"SPGR"}}


@pytest.mark.parametrize("kind", ["hawkears", "hawkears forked", "hawkears1"])
def test_each_recording_is_judged_at_its_own_place_and_rarities_are_kept_apart(place, kind):
    batch = [replace(place.good(name), place=where) for name, where in WHERE.items()]
    engine = place.engine(kind, "--threads", "2", places=True, OMP_NUM_THREADS="1")  # else no worker is forked
    engine.check()
    results = place.process(engine, batch)
    for name, result in results.items():
        heard = {row[2] for row in hear(Path(result.chunk.audio_path).read_bytes())}
        rare = heard & RARE.get(name, set())
        assert {d.label for d in result.rarities} == rare, name
        assert {d.label for d in result.detections} == heard - rare, name
    assert sum(bool(result.rarities) for result in results.values()) == 3, "the recordings have been chosen for it"
    pieces = workers.PieceRun(
        place.open(engine),
        replace(place.good("long", 40), place=WHERE["a"]),
        40,
        2,
        AudioCutter(None),
        place.folder,
    )
    *_, result = pieces.process()
    assert [d.label for d in result.rarities] == ["RUGR", "RUGR"], "one of each piece"
    place.environs()
    assert bool(place.parents) == (kind == "hawkears forked")
    assert "place" in place.broken(place.engine("hawkears", places=True, FAKE_HAWKEARS_SHAPE="unplaced"), batch)[2]
    unknown = replace(batch[0], place=model.Place(region="XX-YY"))
    assert place.broken(place.engine(kind, places=True), [unknown])[0] == "configuration"


def test_a_command_gets_the_place_of_its_recording(place):
    batch = [replace(place.good(name), place=where) for name, where in WHERE.items()]
    place.process(place.engine(ONE + " {latitude}|{longitude}|{date}|{region}"), batch)
    values = [line.split()[-1] for line in place.runs.read_text().splitlines()]
    assert values == ["|||CA-BC", "50|-120|2024-01-05|", "|||", "||2024-01-05|CA-NT", "65|-120||", "|||"]


@pytest.mark.parametrize("kind", ENGINES)
def test_an_interrupt_finishes_what_runs_and_a_worker_sees_only_its_device(place, kind):
    session, few = place.open(place.engine(kind, slow_s=0.1)), [place.good("a", 1), place.good("b", 1)]
    feeding = Feeding(place, session, [*few, *(place.good(name, 1) for name in "cdefghijkl")])
    environ = next(iter(wait_for(place.environs, "a worker").values()))
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["BADCJOBS_DEVICE_UUID"]) == ("GPU-1", "GPU-1")
    assert (environ["CUDA_DEVICE_ORDER"], environ["SLURM_JOB_ID"]) == ("PCI_BUS_ID", "4821")
    wait_for(lambda: feeding.results, "a first result")
    session.interrupt()
    session.interrupt()
    results = feeding.end().results
    assert feeding.broken is None and len({result.chunk.chunk_id for result in results}) == len(results) < 12
    assert all(result.ok for result in results), [result.error for result in results]
    early = place.open(place.engine(kind))
    early.interrupt()
    assert feed(early, few) == {}


@pytest.mark.parametrize("kind", ENGINES)
def test_killed_from_inside_or_outside_nothing_counts_as_done_and_the_next_session_works(place, kind):
    batch = [place.good(name, 1) for name in "abc"]
    for outside in (False, True):
        session = place.open(place.engine(kind, slow_s=60), CPU)
        feeding = Feeding(place, session, batch)
        wait_for(lambda feeding=feeding: feeding.started and place.environs(), "a chunk in progress")
        if outside:
            for process in place.environs():
                process.kill()
            wait_for(lambda feeding=feeding: feeding.results or feeding.broken, "it is noticed")
        else:
            assert next(iter(wait_for(place.environs, "a worker").values()))["CUDA_VISIBLE_DEVICES"] == ""
        session.kill()
        feeding.end()
        session.close()
        assert not any(result.ok for result in feeding.results)
        assert outside or not feeding.results, "what we have killed has no result"
        reported = {result.error_class for result in feeding.results} | {feeding.broken and feeding.broken.error_class}
        expected = {"worker_died", "engine_crash"} if outside else {"worker_died", "terminated"}
        assert reported - {None} <= expected and (reported - {None} or not outside)
        assert place.environs() == {}
    early = place.open(place.engine(kind, slow_s=60))
    early.kill()
    assert not any(result.ok for result in Feeding(place, early, batch).end().results)
    assert place.process(place.engine(kind), batch[:1])["a"].ok


def test_what_every_line_of_a_worker_means(place, caplog, pages):
    batch = [Chunk("r", "a", "a.wav", "/a.wav", 0, 30_000), Chunk("r", "b", "b.wav", "/b.wav")]
    said = list[str]()

    def more(wanted, *, idle=0):
        clock.sleep(1)
        said.append(f"    asks for {wanted}, idle {idle}")
        return ()

    caplog.set_level("INFO", logger="badcjobs")
    words, *scripts = read_data("worker_lines.txt").split("=== ")
    for one in scripts:
        (name, _, script), limit, clock = one.partition("\n"), HangTimeout(least_s=1), HandClock(9000)
        start = EngineStart((), place.environ, place.launchers[""], clock)
        session = workers.StreamSession(
            start, ["sh", "-c", words + script], env=place.environ, cwd=None, log_file=place.scratch / f"{name}.log",
            hang_timeout=limit, error_patterns=workers.HAWKEARS_PATTERNS, must_use_cuda=name.startswith("cuda"),
            pin="GPU-1",
        )  # fmt: skip
        place.sessions.append(session)
        said.append(name)
        caplog.clear()
        try:
            for news in session.process(batch, more):
                if isinstance(news, ChunkStarted):
                    said.append(f"    {news.chunk.chunk_id} started at {news.at_ms}")
                    if name.startswith("interrupted"):
                        session.interrupt()
                else:
                    facts = (news.error_class, news.error, news.audio_s, news.started_at_ms, news.ended_at_ms)
                    said.append(f"    {news.chunk.chunk_id} {facts} {[d.label for d in news.detections]}")
        except SessionBroken as broken:
            said.append(f"    {broken.error_class}{' at the start' * broken.at_start}: {broken}".replace("\n", " | "))
        said.append(f"    may be silent for {limit.limit_s(30):g} s, or {limit.limit_s(None):g}")
        said += [f"    {one.levelname} {one.getMessage()}".replace(str(session.pid), "PID") for one in caplog.records]
    pages({"workers.txt": "\n".join(said)})


def test_the_worker_says_where_it_computes_finishes_what_it_began_and_ignores_signals(place):
    """The lines between us and the worker program: its own docstring promises them."""
    batch = [place.good(name) for name in "abcdefgh"]
    orders = [json.dumps({"id": number, "audio": one.audio_path}) for number, one in enumerate(batch)]
    cpu = {"device": "cpu", "name": platform.processor() or platform.machine()}
    for visible, where in {"": cpu, "MIG-5": ON_CUDA}.items():
        with subprocess.Popen(
            [sys.executable, str(workers.WORKER), str(place.folder), "--threads", "2", "--models", "2"], cwd=place.root,
            env={**place.environ, "CUDA_VISIBLE_DEVICES": visible, "FAKE_HAWKEARS_S": "0.3"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as worker:  # fmt: skip
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write("\n".join(orders) + "\n")
            worker.stdin.flush()
            ready, *begun = [json.loads(worker.stdout.readline()) for _ in range(3)]
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                worker.send_signal(signum)
            # It is asked to stop, or its input ends.
            out, said = worker.communicate('{"stop": true}\n' if visible else None, timeout=60)
        known = {"hawkears": "2.3.0", "torch": "2.9.0+stand.in", "python": platform.python_version()}
        assert ready == {"event": "ready", "threads": 2, "holds": 4, **where, "versions": known}
        assert sorted(map(str, begun)) == ["{'event': 'started', 'id': 0}", "{'event': 'started', 'id': 1}"]
        *done, bye = map(json.loads, out.splitlines())
        assert (worker.returncode, bye, sorted(event["id"] for event in done)) == (0, {"event": "bye"}, [0, 1])
        for event in done:
            heard = hear(Path(batch[event["id"]].audio_path).read_bytes())
            assert event["detections"] == [
                [round(start_s * 1000), round(end_s * 1000), code, round(score, 3), NAMES.get(code)]
                for start_s, end_s, code, score in heard
            ]
            assert (event["audio_s"], event["analysed"]) == (3.0, True) and event["took_s"] >= event["predict_s"] >= 0.3
        assert "HawkEars prints what it likes" in said, "not between our lines"


FORKED = replace(GPU, threads=1)


def test_workers_are_forked_from_one_process_that_has_imported_everything(place, caplog):
    """Each sees its own device and has a life of its own; with the parent they all end, and the next have none."""
    caplog.set_level("INFO", logger="badcjobs")
    imports = place.folder / "imports"
    engine = place.engine("hawkears forked", slow_s=0.05, HOME=str(place.folder), FAKE_HAWKEARS_IMPORTS=str(imports))
    engine.check()
    assert (engine.version or "").startswith("2.3.0, 3 models ")
    plans = [replace(FORKED, device=replace(GPU.device, uuid=f"GPU-{n}", token=str(n))) for n in range(2)]
    one, two = (place.open(engine, plan) for plan in plans)
    assert all(feed(session, [place.good(name, 1)])[name].ok for session, name in ((one, "a"), (two, "b")))
    assert re.findall("on CUDA (GPU-.) Tesla", caplog.text) == ["GPU-0", "GPU-1"]
    place.environs()
    (parent,) = place.parents
    assert imports.read_text().split() == [str(parent.pid)], "and no worker has imported it again"
    assert [psutil.Process(session.pid).ppid() for session in (one, two)] == [parent.pid] * 2
    os.kill(two.pid, signal.SIGKILL)
    with pytest.raises(SessionBroken, match="ended by SIGKILL"):
        feed(two, [place.good("b", 1)])
    assert (feed(one, [place.good("c", 1)])["c"].ok, one.close(), two.close()) == (True, 0, -signal.SIGKILL)
    three, four = (place.open(engine, plan) for plan in plans)
    feed(three, [place.good("a", 1)])
    parent.kill()
    for session in (three, four):
        with pytest.raises(SessionBroken, match="ended by SIGKILL"):
            feed(session, [place.good("a", 1)])
        wait_for(lambda session=session: not is_running(session.pid), "it has ended with its parent")
    assert place.process(engine, [place.good("d", 1)], plans[0])["d"].ok
    assert len(set(imports.read_text().split())) == 2
    assert caplog.text.count("which has imported HawkEars") == 1


def test_where_a_fork_is_not_safe_workers_are_started_and_the_log_says_why(place, caplog):
    cases = {
        "the import of HawkEars has initialised CUDA": place.engine("hawkears forked", FAKE_HAWKEARS_UNFIT="cuda"),
        "the import of HawkEars has started threads (2 run)": place.engine(
            "hawkears forked", FAKE_HAWKEARS_UNFIT="threads"
        ),
        "OMP_NUM_THREADS is 2": place.engine("hawkears forked", OMP_NUM_THREADS="2"),
        "--engine-prefix is set": place.engine("hawkears forked behind"),
    }
    caplog.set_level("INFO", logger="badcjobs")
    for why, engine in cases.items():
        caplog.clear()
        engine.check()
        session = place.open(engine, FORKED)
        assert feed(session, [place.good("a", 1)])["a"].ok
        assert caplog.text.count(f"workers are started one by one, not forked: {why}\n") == 1
        assert why.startswith("--engine") or psutil.Process(session.pid).ppid() == os.getpid()
        session.close()


def test_the_check_asks_hawkears_itself_also_behind_a_prefix(place, pages):
    fine = place.engine("hawkears", "--threads", "2", "--region", "CA-NT")
    fine.check()
    assert (fine.version or "").startswith("2.3.0, 3 models ")
    words = ["bash", "-c", f'{install_fake_prefix(place.folder / "bin")} "$0" "{sys.executable}" "${{@:2}}"',
             f"{place.folder}/{{worker}}"]  # fmt: skip
    inside = EngineStart([], place.environ, Launcher("task", words), CLOCK)
    HawkEarsEngine(inside, "/only/in/the/container/python", place.root).check()
    assert (place.folder / "task-check.report").exists()
    late = str(install(place.folder / "slow" / "bin" / "python", "#!/bin/sh\nexec sleep 60\n"))
    slow = {"hang_timeout": HangTimeout(start_s=0.3)}
    engines = {
        "slow to start": HawkEarsEngine(fine.start, late, place.root, **slow),
        "slow to start, forked": HawkEarsEngine(fine.start, late, place.root, **slow, forks=True),
        "wrong option": place.engine("hawkears", "--loudly"),
        "another API": place.engine("hawkears", FAKE_HAWKEARS_SHAPE="none"),
        "no HawkEars": place.engine("hawkears", PYTHONPATH=""),
        "no models": fine,
    }
    said = []
    for name, engine in engines.items():
        for path in (place.root / "data" / "ckpt").iterdir() if engine is fine else ():
            path.unlink()
        with pytest.raises(BadcjobsError) as refused:
            engine.check()
        error = refused.value
        said.append(f"## {name}\n{error.exit_code}: {error.what}\nwhy: {error.why}\nfix: {error.fix}\n")
    text = "\n".join(said).replace(str(place.folder), "/…")
    pages({"refused.txt": text.replace(shlex.quote(sys.executable), "PYTHON").replace(sys.executable, "PYTHON")})


TEMPLATES = {"one": ONE, "many": MANY, "place": ONE + " [{device}] {device_index} {chunk_id}",
             "gone": f"/no/such/program {ONE}", "gone-many": f"/no/such/program {MANY}"}  # fmt: skip
PLANS = {"GPU": GPU, "CPU": CPU, "LEAN": LEAN, "SIMULATED": SIMULATED}
STORIES = read_parts("engine_stories.txt")


def recording(place, word):
    name, _, length = word.lstrip("!?/").partition("=")
    if word[0] in "!?":
        return place.fake(name, name) if word[0] == "!" else place.file(name, b"no" * (name == "bad"))
    if word[0] == "/":
        return chunk(place.folder / name)
    seconds, _, end_ms = length.partition("/")
    return place.good(name, float(seconds or 3), int(end_ms or 0) or None)


def shown(error):
    lines = [line if len(line) < 999 else f"{len(line)} characters" for line in error.splitlines()]
    return " … ".join(dict.fromkeys((lines[0], lines[-1])))


def play(place, story):
    """Return what becomes of the recordings of a story."""
    kind, options, facts, words = (part.split() for part in story.split("|"))
    facts = dict(fact.split("=") for fact in facts)
    plan, cpu = PLANS[facts.pop("plan", "GPU")], "cpu" in facts and facts.pop("cpu")
    env = {f"FAKE_HAWKEARS_{name}": facts.pop(name) for name in [*facts] if name.isupper()}
    limit = HangTimeout(**{name: float(value) for name, value in facts.items()}) if facts else None
    session = place.open(place.engine(TEMPLATES.get(*kind, *kind), *options, limit=limit, cpu=cpu, **env), plan)
    said, begun = [], set()
    try:
        for news in session.process([recording(place, word) for word in words]):
            name = news.chunk.chunk_id
            if isinstance(news, ChunkStarted):
                begun.add(name)
                continue
            assert name in begun
            heard = [(d.start_ms, d.end_ms, d.label, d.score, d.label_name) for d in news.detections]
            heard = heard if f"!{name}" in words else bool(heard)  # in a tone, rounding decides what is heard
            reported = f"{news.audio_s} s, heard {heard}" if news.ok else f"{news.error_class} {shown(news.error)}"
            said.append(f"{name}: {'' if news.charged else 'not charged, '}{reported}")
    except SessionBroken as broken:
        said.append(f"{broken.error_class}{' at the start' * broken.at_start}: {str(broken).splitlines()[-1]}")
    session.close()
    return said if options[:2] == ["--threads", "1"] else sorted(said)


@pytest.mark.parametrize("topic", STORIES)
def test_what_becomes_of_recordings(place, pages, caplog, topic):
    """Those of one thread in the order of the batch; with the loads of models or files, and the runs of a program."""
    said, traces = [], (place.loads, place.runs, place.scratch / "hawkears.log", Path(f"{place.runs}.left"))
    for story in STORIES[topic].splitlines():
        caplog.clear()
        said += [f"$ {story}", *play(place, story)]
        loads, runs, log, left = (path.read_text() if path.exists() else "" for path in traces)
        alone = "--threads 1 " in story or (".wav" in loads and "--" not in story)  # else threads race for the files
        loads = re.sub(r"(?m)^\d+$", "models loaded", loads * alone)
        said += sorted(f"    {line}" for line in (loads + runs).splitlines())
        said += [f"    {one.getMessage()}" for one in caplog.records]
        said += ["    memory freed"] * log.count("memory freed")
        if left:
            wait_for(lambda left=left: not is_running(int(left)), "its child is gone")
        for path in traces:
            path.unlink(missing_ok=True)
    text = "\n".join(said).replace(str(place.folder), "/…")
    pages({"said.txt": re.sub(r"for \d+ s$", "for N s", text, flags=re.MULTILINE)})


BIRDNET = f"/bin/sh {DATA}/birdnet-analyze.sh {{input}} --output {{output}} --rtype "


@pytest.mark.parametrize("kind", ["csv", "table", "audacity", "kaleidoscope"])
def test_what_birdnet_writes_is_found_in_its_folder_and_understood(place, kind):
    engine, found, names = place.engine(BIRDNET + kind), {}, ("a, b", "quiet", "bad", "other")
    for name in names:
        found |= place.process(engine, [place.good(name)])
    code = "rufgro" if kind == "table" else "Bonasa umbellus"
    heard = [[(one.start_ms, one.end_ms, one.label, one.label_name, one.score) for one in found[name].detections]
             for name in names[:2]]  # fmt: skip
    assert heard == [[(0, 3000, code, "Ruffed Grouse", 0.8141)], []]
    assert [found[name].error_class for name in names] == [None, None, "no_output", "bad_output"]
    assert "(detections.csv) was not written, only BirdNET_analysis_params.csv\nError: Cannot" in found["bad"].error
    error_class, _, why = place.broken(place.engine(BIRDNET + kind), [place.good("other")])
    said = "{output} cannot be read: line 1: no column for start, end, label, score; found: when, what; understood: "
    assert (error_class, why[: len(said)]) == ("configuration", said)


def test_a_table_belongs_to_the_longest_name_it_starts_with(place):
    """A program that adds to the name of the audio, for three recordings with alike names."""
    program = """while read -r audio; do name=$(basename "${audio%.*}")
        printf 'start_time,end_time,label,score\\n0,1,%s,1\\n' "$name" > "$2/$name.out.csv"; done < "$1" """
    (place.folder / "program.sh").write_text(program)
    names = ("r", "r.001", "r.0")
    engine = place.engine(f"/bin/sh {place.folder}/program.sh {{inputs}} {{outputs}}")
    found = place.process(engine, [place.good(name) for name in names])
    assert {name: found[name].detections[0].label for name in names} == {name: name for name in names}
