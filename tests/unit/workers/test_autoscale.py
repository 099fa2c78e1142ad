"""How many workers a device gets when no one says, and what later runs know: lessons of earlier ones, and probes."""

import json
import multiprocessing
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import workers
from rooms.model import (
    TOO_LONG,
    USUAL_MEMORY,
    ChunkStarted,
    Decision,
    Device,
    MemoryHeld,
    Probed,
    ProbeKey,
    Trial,
    WorkerPlan,
)  # fmt: skip
from rooms.planning import evaluate
from rooms.root import BadInput, Launcher, Project, RunSettings, SessionBroken, SystemClock
from rooms.workers import Learned, Lesson, MemoryLimit, ProbeStore, read_probes, to_json
from support.brief import line, literal
from support.cases import read_data, read_lines
from support.hand_clock import HandClock
from support.probes import GIB, KEY, trial
from support.supervised import Bench
from support.waiting import wait_for

STEP_S = 0.5
LIMITS = {"devices": 1, "cores": 8, "cores_each": 1, "device_bytes": None, "granted_bytes": None, "exclusive": False}
IDLE = {"rate": 0.0, "left_s": 0.0, "device_peak_bytes": 0, "peak_bytes": None}


class Task:
    """A task whose workers stand still while the test says how much they have done; time passes by half seconds."""

    def __init__(
        self, folder, *, cpus=8, devices=1, gib=16, granted=None, per_gpu=None, cpu_workers=0, lost=(), chunk=30,
        each=1, exclusive=False,
    ):  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.clock, self.go_on, self.lost = HandClock(), threading.Event(), lost
        self.learned = Learned("demo", [folder / "learned.json"])
        self.lines = []
        memory, granted_bytes = (one and round(one * GIB) for one in (gib, granted))
        places = [(100 + n, Device(str(n), "test", name="V100", memory_total_bytes=memory)) for n in range(devices)]
        counts = {"cpus": cpus, "per_gpu": per_gpu, "cpu_workers": cpu_workers}
        counts |= {"chunk_s": chunk, "cores_each": each, "exclusive": exclusive, "memory_per_worker": USUAL_MEMORY}
        self.peaks, self.held = {}, None  # what is read of the memory
        meter = workers.Meter(granted_bytes, self.clock, {30.0: self.peaks}.get, lambda: self.held)
        self.subject = f"V100, {max(1, cpus // max(1, devices))} cores, chunks of {chunk} s"
        self.scaler = workers.Autoscaler(places, meter, self.learned, self.note, **counts)
        self.bench = Bench(folder, self.script, chunks=200, workers=self.scaler.plans)
        self.supervisor = self.bench.supervisor

    def note(self, decision):
        assert decision.subject == "V100"
        at_s, workers = self.clock.monotonic_s() % 10_000, decision.figures["workers"]
        self.lines.append(f"{at_s:6.1f} s: {workers}; {decision.reason} ({decision.code})")

    def script(self, session, batch):
        if session.plan.slot in self.lost:
            raise SessionBroken("gpu_lost", "GPU is lost")
        yield ChunkStarted(batch[0], 0)
        while not self.go_on.wait(0.01) and session.plan.slot in self.supervisor.slots_at_work:
            pass

    @property
    def opened(self):
        return {session.plan.slot for session in self.bench.engine.sessions}

    @property
    def workers(self):
        """The most workers on a device."""
        places = list(self.supervisor.slots_at_work.values())
        return max(map(places.count, places), default=0)

    def live(self, rates=range(10, 999, 10), seconds=100, left=10**6, used_gib=None, warm=True, audio=True, held=None):
        """Let time pass; ``rates``: chunks per second of 1, 2, … workers on each device. Return the decisions."""
        self.bench.start()
        if self.lost:
            self.bench.run(until=lambda: len(self.bench.tally.retired) == len(self.lost))
            wait_for(lambda: not {*self.lost} & {*self.supervisor.slots_at_work}, "the lost workers have ended")
        done, supervisor = 0.0, self.supervisor
        for _ in range(int(seconds / STEP_S)):
            self.clock.sleep(STEP_S)
            workers, now_s = self.workers, self.clock.monotonic_s()
            done += STEP_S * (rates[workers - 1] if workers else 0)
            supervisor.tally.done = int(done)
            supervisor.audio_done_s = 30.0 * int(done) if audio else 0.0
            supervisor.productive = set(supervisor.slots_at_work) if warm else set()
            if used_gib is not None:
                self.peaks.update({100: round(used_gib * GIB * workers), 101: GIB})
            self.held = memory_held(held, now_s, workers)
            self.scaler.update(supervisor, left - int(done))
            if not supervisor.draining:
                wait_for(lambda: {*supervisor.slots_at_work} <= self.opened, "every worker has its engine")
                wait_for(lambda: not supervisor.is_retiring, "every retired worker has ended")
        threads = sorted({thread.plan.threads for thread in self.bench.engine.sessions})
        at_work = sorted(supervisor.slots_at_work.values(), key=str)
        supervisor.drain()
        self.go_on.set()
        self.bench.run()
        learned = self.learned.about(self.subject)
        facts = f"{learned.workers}, settled={learned.settled}, each {learned.worker_bytes} and {learned.device_bytes}"
        facts += f" of {learned.memory_bytes}"
        return "\n".join([*self.lines, f"  at work on {at_work}, threads {threads}", f"  learned: {facts}", ""])


def memory_held(how, now_s, workers):
    """Return what was read of the main memory: so many GiB of each worker, suddenly more, or long ago."""
    if how == "swelling":  # late, when the number of workers stands
        return MemoryHeld(round(GIB * workers * (1 if now_s % 1000 < 50 else 2)), now_s)
    if how == "read before":
        return MemoryHeld(GIB, 0.0)
    return how and MemoryHeld(round(how * GIB * workers), now_s // 4 * 4)  # as a watch reads it, every 4 s


def test_workers_are_added_and_retired_while_that_pays_and_there_is_room(tmp_path, pages):
    """A lost device says nothing about the others, and a lost worker is not replaced."""
    said = []
    for story in read_lines("autoscale_stories.txt"):
        name, folder, granted, course = story.split(" | ")
        said.append(f"# {name}\n{Task(tmp_path / folder, **json.loads(granted)).live(**json.loads(course))}")
    pages({"decisions.txt": "\n".join(said)})
    drained = Task(tmp_path / "drained")
    drained.bench.start()
    drained.supervisor.drain()
    drained.live()
    assert len(drained.lines) == 1, "once a task drains nothing is decided"


class Lingering(Task):
    """Retired workers stay until they may leave."""

    leave = threading.Event()

    def script(self, session, batch):
        yield from super().script(session, batch)
        self.leave.wait(60)


def test_a_memory_reading_from_before_the_last_retirement_retires_no_other_worker(tmp_path):
    task = Lingering(tmp_path / "tight", cpus=4, granted=64)
    task.bench.start()
    wait_for(lambda: len(task.opened) == 4, "every worker has its engine")

    def look(read_s=None):
        task.clock.sleep(1)
        task.held = MemoryHeld(63 * GIB, read_s or task.clock.monotonic_s())
        task.scaler.update(task.supervisor, left=1000)
        return len(task.lines) - 1, task.held.at_s

    assert look()[0] == 1
    still_there, before_s = look()
    task.leave.set()
    wait_for(lambda: not task.supervisor.is_retiring, "it has ended")
    assert (still_there, look(before_s)[0], look()[0]) == (1, 1, 2)
    task.supervisor.drain()
    task.go_on.set()
    task.bench.run()


def test_the_next_number_follows_from_what_was_measured_and_tried(pages):
    lines = []
    for case in read_lines("autoscale_steps.txt"):
        name, limits, trials, reading, performance = case.split("|")
        limits = workers.Limits(**(LIMITS | json.loads(limits)))
        tried = json.loads(trials)
        rates = {int(number): rate for number, rate in tried.pop("rates", {}).items()}
        trials = workers.Trials(**{"before": tried["workers"], "settled": False, **tried}, rates=rates)
        measured = workers.Performance(**(IDLE | json.loads(performance))) if performance.strip() else None
        step = workers.next_step(workers.Reading(**json.loads(reading), performance=measured), trials, limits)
        decision = step and Decision.of(step.code, workers=step.workers, **step.figures)
        how = step and "trial" * step.is_trial + "best" * step.is_best
        lines.append(f"{name}→ {step and f'{step.workers} {how}; {decision.reason} ({step.code})'}")
    pages({"steps.txt": "\n".join(lines)})


def test_the_beginning_follows_from_cores_memory_and_experience(tmp_path, pages, caplog):
    lines = []
    for number, start in enumerate(read_lines("autoscale_starts.txt")):
        how, known = map(json.loads, start.split("|"))
        folder = tmp_path / str(number)
        facts = {name: value for name, value in known.items() if name != "about"}
        Learned("demo", [folder / "learned.json"]).note(known.get("about", "V100, 16 cores, chunks of 30 s"), **facts)
        task = Task(folder, **how)
        plans = [(plan.slot, plan.device_id, plan.threads) for plan in task.scaler.plans]
        warned = [f"  {one.levelname}: {one.getMessage()}" for one in caplog.records if one.levelname == "WARNING"]
        lines += [f"{how} {known or ''}", *task.lines, *warned, f"  {len(plans)} workers, the last: {plans[-1:]}"]
        caplog.clear()
    pages({"starts.txt": "\n".join(lines).replace(f"{tmp_path}/", "")})


def test_a_lesson_is_found_by_the_next_task_and_by_another_run_the_nearer_first(tmp_path):
    environ = {"HOME": str(tmp_path / "home")}
    here, elsewhere = (workers.known_files("learned.json", tmp_path / name, environ) for name in ("one", "two"))
    assert here == [tmp_path / "one" / "learned.json", tmp_path / "home" / ".cache" / "badcjobs" / "learned.json"]
    Learned("hawkears", here).note("V100", workers=3, settled=True)
    Learned("hawkears", here).note("V100", alone_s=900.0)
    lesson = Lesson(workers=3, settled=True, limit=MemoryLimit(None, 900.0))
    assert Learned("hawkears", here).about("V100") == Learned("hawkears", elsewhere).about("V100") == lesson
    Learned("hawkears", elsewhere[:1]).note("V100", workers=5, crowded_s=600.0, worker_bytes=7)
    assert Learned("hawkears", elsewhere).about("V100") == Lesson(5, True, MemoryLimit(600.0, 900.0), 7)
    assert Learned("hawkears", elsewhere).about("H200") == Learned("demo", here).about("V100") == Lesson()


def test_a_file_of_lessons_that_makes_no_sense_or_cannot_be_written_does_no_harm(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    good = tmp_path / "good.json"
    for text in read_data("no_lessons.txt").splitlines():
        good.write_text(text)
        assert Learned("demo", [good]).about("GPU") == Lesson()
        learned = Learned("command", [tmp_path / "file" / "x.json", tmp_path / "folder.json", good])
        learned.note("GPU", workers=4)
        learned.note("GPU", worker_bytes=2)
        assert caplog.text.count(f"cannot be kept in {tmp_path / 'folder.json'}: Is a directory; try: export") == 1
        caplog.clear()
        assert (learned.about("GPU").workers, json.loads(good.read_text())["version"]) == (4, 1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder.json", "good.json"], "and no draft"


def test_programs_options_and_models_each_have_lessons_of_their_own():
    for flags, subject in (
        ({"command": "a {input} {output}"}, "command a {input} {output}"), ({"engine": "demo"}, "demo"),
        ({"engine": "demo", "engine_arg": ["--burn-s=20"]}, "demo --burn-s=20"),
        ({"hawkears_root": "/models/old"}, "hawkears /models/old"), ({"mps": "off"}, "hawkears --mps off"),
    ):  # fmt: skip
        assert workers.subject_of(Project().make(RunSettings, {"source": ["s.csv"], **flags}, "run")) == subject


TRIALS = [
    trial(60, 400, peak_bytes=3 * GIB), trial(100, 800), Trial(105.0, False, TOO_LONG), Trial(200.0, True, TOO_LONG),
    trial(105, 1, lean=True),
]  # fmt: skip
FOUND = Probed(KEY.key, tuple(TRIALS), evaluate(TRIALS, 10.0), True, "2026-07-01T12:00:00Z")
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=40)
@given(
    st.builds(ProbeKey, names, st.none() | st.integers(0, 2**40), names, names, names, st.integers(1, 9)),
    st.lists(st.sampled_from(TRIALS), unique=True), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_is_written_is_read_again_whatever_the_names(tmp_path_factory, key, trials, finished, evaluated):
    ordered = tuple(sorted(trials, key=lambda one: (one.lean, one.length_s)))
    strange = Probed(key, ordered, FOUND.result if evaluated else None, finished, "2026-07-01" if evaluated else None)
    text = to_json([strange, FOUND])
    file = tmp_path_factory.getbasetemp() / "probe.json"
    file.write_text(text)
    back = read_probes(file)
    assert {one.key: one for one in back}[key] == (strange if key != KEY.key else back[0])
    assert to_json(reversed(back)) == text


def test_a_store_keeps_what_others_have_written_and_is_made_with_its_first_entry(tmp_path):
    store = ProbeStore(tmp_path / "cache" / "probe.json")
    store.open()
    assert store.find(KEY.key) == Probed(KEY.key)
    other = replace(FOUND, key=replace(KEY.key, gpu="H200"))
    half = replace(FOUND, trials=(trial(70, 1.0),), result=None, finished=False)
    forget, found = Probed(KEY.key), []
    for new in (forget, FOUND, other, half, forget, Probed(other.key)):
        ProbeStore(store.file).put(new)
        probes = read_probes(store.file) if store.file.exists() else ()
        found.append(" ".join(f"{one.key.gpu[-4:]}:{len(one.trials)}" for one in probes) or store.file.exists())
    assert found == [False, "V100:5", "H200:5 V100:5", "H200:5 V100:1", "H200:5", True]
    store.open()
    assert [path.name for path in store.file.parent.glob("[!.]*")] == ["probe.json"]


def test_probes_that_write_at_the_same_moment_lose_nothing_of_each_other(tmp_path):
    def write(number):
        for k in range(4):
            ProbeStore(tmp_path / "probe.json").put(replace(FOUND, key=replace(KEY.key, gpu=f"{number}-{k}")))

    children = [multiprocessing.get_context("fork").Process(target=write, args=(number,)) for number in range(3)]
    for deed in ("start", "join"):
        for child in children:
            getattr(child, deed)()
    assert len(read_probes(tmp_path / "probe.json")) == 12


GOOD = to_json([FOUND])
DAMAGED = [
    "", "nonsense", "3", '{"version": 2}', '{"version": 1, "probes": 3}', '{"version": 1, "probes": [{"key": {}}]}',
    "\xff", GOOD[:-30], GOOD.replace('"length_s": 60.0', '"length_s": NaN'),
    GOOD.replace('"workers": 1', '"workers": true'), GOOD.replace('"workers": 1', '"workers": 1.0'),
    GOOD.replace('"gpu": "Tesla V100",', ""),
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_and_one_that_no_probe_has_written_are_left_alone(tmp_path, text):
    raw, file = text.encode("latin-1"), tmp_path / "probe.json"
    file.write_bytes(raw)
    with pytest.raises(ValueError):
        read_probes(file)
    with pytest.raises(BadInput, match="is damaged, or not from badcjobs probe"):
        ProbeStore(file).open()
    assert [(one, one.read_bytes()) for one in tmp_path.glob("[!.]*")] == [(file, raw)]


def test_later_runs_are_promised_only_for_files_that_they_read(tmp_path, pages):
    (tmp_path / "cache").symlink_to(tmp_path / ".cache")
    names = (".cache/badcjobs/probe.json", "cache/badcjobs/probe.json", "july/probe.json", "july/ps.json")
    said = [f"{name}: {workers.describe_readers(tmp_path / name, {'HOME': str(tmp_path)})}" for name in names]
    said.append(f"without a home, probe.json: {workers.describe_readers(tmp_path / 'probe.json', {})}")
    pages({"readers.txt": "\n".join(said).replace(str(tmp_path), "/…")})


PROBES = {
    "found": FOUND, "unfinished": replace(FOUND, result=None),
    "alone": replace(FOUND, result=evaluate([trial(300, 9), Trial(310.0, False, TOO_LONG)], 10)),
    "easy": replace(FOUND, result=evaluate([trial(60, 400), trial(120, 800)], 10)),
}  # fmt: skip


def options(words):
    return {name: literal(value) for name, _, value in (word.partition("=") for word in words)}


def plans(workers=2, gpu="Tesla V100", gib=16):
    device = gpu and Device("0", "because", name=gpu, memory_total_bytes=gib and round(gib * GIB))
    return [WorkerPlan(slot, device, 7, threads=4) for slot in range(workers)]


def test_a_run_keeps_to_what_a_probe_of_the_same_found_safe(tmp_path, pages):
    start, said = workers.EngineStart((), {}, Launcher("test"), SystemClock()), []
    engine = workers.DemoEngine(start, workers.HangTimeout())
    engine.version = "1.0"
    (tmp_path / "damaged.toml").write_text("version =")
    files = [tmp_path / "damaged.toml", *workers.known_files("probe.json", tmp_path, {})]
    settings = RunSettings(tmp_path, engine="demo", engine_args=("--x",))
    for case in read_lines("probe_limits.txt"):
        granted, *probes = (part.split() for part in case.partition("  #")[0].split(" | "))
        known = [replace(PROBES[one], key=replace(KEY.key, **options(words))) for one, *words in probes]
        files[1].write_text(to_json(known))
        said.append(f"{case} → {line(workers.find_limits(files, plans(**options(granted)), engine, settings))}")
    pages({"limits.txt": "\n".join(said)})


def test_the_speed_of_each_number_that_was_tried_is_kept_for_plans(tmp_path):
    rates = [10, 19, 20, 20, 20, 20, 20, 20]
    for audio in (True, False):
        task = Task(tmp_path / str(audio), cpus=8, devices=2)
        task.live(rates=rates, seconds=400, audio=audio)
        (lesson,) = task.learned.every().values()
        assert lesson.workers is not None and (len(lesson.rates) > 1) == audio, "chunks without a length are no speed"
        assert all(rate == pytest.approx(15 * rates[int(n) - 1], rel=0.1) for n, rate in lesson.rates.items())
