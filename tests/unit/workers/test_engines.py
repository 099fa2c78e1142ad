"""Engines: their options before anything starts, the tables that programs write, how they end; and the demo's ears."""

import re
import shlex
import struct
import sys
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import workers
from rooms.devices import simulated_memory_bytes
from rooms.model import Chunk, Device, WorkerPlan
from rooms.root import BadcjobsError, Launcher, RunSettings, SystemClock
from rooms.workers import CommandEngine, EngineStart, HangTimeout, HawkEarsEngine, classify, hawkears_environment
from support.cases import read_data
from support.fake_hawkears import install_fake_hawkears, make_fake_hawkears1, make_fake_root
from support.stand_ins import install

GPU = WorkerPlan(slot=0, device=Device("0", "test", uuid="GPU-1", backend="nvml"), device_id=1, threads=6)


def start(*args, raw=None):
    return EngineStart(args, {"PATH": "/usr/bin:/bin"}, Launcher("test"), SystemClock(), raw)


def refusals(tries):
    """Return what is said to each wrong use, with the words to paste."""
    lines = []
    for name, refused in tries.items():
        with pytest.raises(BadcjobsError) as caught:
            refused()
        error = caught.value
        fix = " ".join((error.fix or "").split())
        lines.append(f"## {name}\n{error.exit_code}: {error.what}\nwhy: {error.why}\nfix: {fix}\n")
    return "\n".join(lines)


def test_a_command_is_split_as_a_shell_splits_it_and_every_fault_is_named(pages):
    right, wrong = (part.splitlines() for part in read_data("commands.txt").split("\n\nWRONG\n"))
    sizes = ("--batch=0", "--batch=many", "--batch", "--threads=3")
    tries = {one: lambda one=one: workers.parse_command(one) for one in wrong}
    tries |= {one: lambda one=one: workers.parse_batch_size([one]) for one in sizes}
    tries["no such program"] = CommandEngine(start(), "no-such-program {input} {output}").check
    words = [f"{one}\n  {workers.parse_command(one)}" for one in right]
    wants = [CommandEngine(start("--batch=1"), f"p {{input{s}}} {{output{s}}}").wants for s in ("", "s")]
    wants += [workers.parse_batch_size([]), workers.parse_batch_size(["--batch=5", "--batch=7"])]
    assert [*wants, CommandEngine(start(), "p {inputs} {outputs}").wants] == [1, 1, 64, 7, 64]
    pages({"refused.txt": refusals(tries), "words.txt": "\n".join(words)})


def test_another_program_or_another_model_is_another_version(tmp_path):
    program, nothing = tmp_path / "listen.sh", tmp_path / "nothing"
    program.write_text("one")
    root, root1 = make_fake_root(tmp_path / "root"), make_fake_hawkears1(tmp_path / "HawkEars")
    engines = [
        CommandEngine(start(), f"sh {program} {{input}} {{output}}"),
        HawkEarsEngine(start(), sys.executable, root),
        workers.HawkEars1Engine(start(), sys.executable, root1),
        HawkEarsEngine(start(), None, nothing),
        workers.HawkEars1Engine(start(), "python3", nothing),
        CommandEngine(start(), "no-such-program {input} {output}"),
    ]
    before = [engine.version for engine in engines]
    marks = ["sh listen.sh #", "3 models #", "analyze.py #"]
    assert [re.sub(r"\b[0-9a-f]{6,}\b", "#", mark or "") for mark in before[:3]] == marks
    program.write_text("two")
    for models in (root, root1):
        (models / "data" / "ckpt" / "another.ckpt").write_text("weights")
    assert not {engine.version for engine in engines[:3]} & {*before}
    assert before[3:] == [None] * 3


@given(st.lists(st.sampled_from(["/x/a.wav", "/y/A.flac", "/x/b.wav", "/z/a.mp3", "/x/c.wav"])), st.integers(1, 4))
@settings(max_examples=40)
def test_no_part_of_a_batch_is_too_long_or_has_two_files_of_one_name(paths, most):
    """Their tables would have one name, too."""
    parts = workers.split_batch([Chunk("r", str(number), path, path) for number, path in enumerate(paths)], most)
    assert sorted(int(chunk.chunk_id) for part in parts for chunk in part) == list(range(len(paths)))
    for part in parts:
        names = [Path(chunk.audio_path).stem.lower() for chunk in part]
        assert 1 <= len(set(names)) == len(names) <= most
    if len({Path(path).stem.lower() for path in paths}) == len(paths):
        assert len(parts) == -(-len(paths) // most), "no chunk is shorter than it must be"


def test_raw_files_are_kept_byte_for_byte_inside_their_folder(tmp_path):
    engine = CommandEngine(start(raw=tmp_path / "raw"), "program {input} {output}")
    kept = [("Area/rec 1", "c0", b"\xff first"), ("Area/rec 1", "c0", b"second\r\n"), ("../..", "../../c", b"1")]
    for recording_id, chunk_id, content in kept:
        engine.keep_raw(Chunk(recording_id, chunk_id, "a.wav", "a.wav"), content, ".csv")
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"raw/Area/rec 1/c0.csv": b"second\r\n", "raw/%2E%2E/%2E%2E/..%2F..%2Fc.csv": b"1"}


def test_every_known_table_is_read_and_one_that_is_not_whole_is_refused(pages):
    lines = []
    for line in read_data("detection_tables.txt").splitlines():
        text = line.encode().decode("unicode_escape")
        try:
            found = [f"{one.start_ms} to {one.end_ms} ms: {one.label}, {one.label_name}, {one.score}"
                     for one in workers.parse_detections(text)] or ["nothing"]  # fmt: skip
        except ValueError as error:
            found = [f"refused: {error}"]
        lines += [ascii(text), *(f"  {one}" for one in found)]
    pages({"tables.txt": "\n".join(lines)})


def test_a_worker_has_as_many_threads_as_its_cores_can_feed_unless_told_and_a_lean_one_has_one(tmp_path, pages):
    lines = []
    for cores, *options in map(str.split, read_data("thread_options.txt").splitlines()):
        lines.append(f"{cores} cores, {' '.join(options) or 'no options'}")
        words = workers.split_options(options)
        for kind, plan in {"usual": GPU, "lean": replace(GPU, lean=True), "CPU": replace(GPU, device=None)}.items():
            plan = replace(plan, threads=int(cores))
            args = workers.sized_arguments(words, plan)
            env = hawkears_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, plan, args, tmp_path)
            at_once = [engine(start(*words), None, Path()).chunks_at_once(plan)
                       for engine in (HawkEarsEngine, workers.HawkEars1Engine)]  # fmt: skip
            at_once.append(workers.DemoEngine(start(), HangTimeout()).chunks_at_once(plan))
            said = f"OMP {env['OMP_NUM_THREADS']}, sees '{env['CUDA_VISIBLE_DEVICES']}'; at once {at_once}"
            lines.append(f"  {kind}: {' '.join(args)}; {said}")
    assert hawkears_environment({"OMP_NUM_THREADS": "7"}, GPU, (), tmp_path)["OMP_NUM_THREADS"] == "7"
    wants = [HawkEarsEngine(start(*args), None, Path()).wants for args in ((), ("--threads", "5"))]
    assert [*wants, workers.DemoEngine(start(), HangTimeout()).wants] == [5, 7, 2], "those in progress, and what waits"
    pages({"threads.txt": "\n".join(lines)})


def test_caches_stay_warm_from_one_task_to_the_next_where_the_user_can_write(tmp_path):
    (tmp_path / "file").write_text("a home that cannot be written")
    scratch = tmp_path / "node" / "worker-0"
    for environ, where in [
        ({}, "node"),
        ({"HOME": str(tmp_path / "home")}, "home/.cache/badcjobs"),
        ({"HOME": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "xdg")}, "xdg/badcjobs"),
        ({"HOME": str(tmp_path / "file")}, "node"),
    ]:
        env = hawkears_environment(environ, GPU, (), scratch)
        names = {name: value.removeprefix(f"{tmp_path / where}/") for name, value in env.items() if "-cache" in value}
        assert names == {
            "NUMBA_CACHE_DIR": "numba-cache", "MPLCONFIGDIR": "matplotlib-cache", "CUDA_CACHE_PATH": "nv-cache",
            "TORCHINDUCTOR_CACHE_DIR": "torchinductor-cache", "PYTORCH_KERNEL_CACHE_PATH": "torch-kernels-cache",
        }  # fmt: skip
    assert hawkears_environment({"NUMBA_CACHE_DIR": "/warm"}, GPU, (), scratch)["NUMBA_CACHE_DIR"] == "/warm"


def test_an_engine_is_chosen_by_name_and_refuses_what_badcjobs_sets_itself(tmp_path, pages):
    """What the check of HawkEars 2 says needs its Python: tests/contract."""
    install_fake_hawkears(tmp_path / "bin")
    root = make_fake_hawkears1(tmp_path / "HawkEars")
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}

    def choose(engine, *args, **more):
        wanted, launcher = RunSettings(Path("run"), engine=engine, engine_args=args, **more), Launcher("test")
        start = EngineStart(wanted.engine_args, environ, launcher, SystemClock(), cwd=tmp_path)
        return workers.choose_engine(wanted, start)

    for name in ("demo", "command", "hawkears", "hawkears1"):
        assert choose(name, command="p {input} {output}").name == name
    found = choose("hawkears", hawkears_root="root")
    assert (found.python, found.root) == (str(tmp_path / "bin" / "python-of-hawkears"), tmp_path / "root")
    assert choose("hawkears", hawkears_python="/my/python").python == "/my/python"
    assert [choose("demo", keep_raw=kept).start.raw for kept in (True, False)] == [tmp_path / "run" / "raw", None]
    choose("hawkears1", hawkears_root=root).check()
    files = ("--include", "a.txt", "--cfg=b.yaml", "--exclude=/c.txt", "-c", "d", "-m", "0")
    absolute = ["--include", f"{tmp_path}/a.txt", "--cfg", f"{tmp_path}/b.yaml", "--exclude", "/c.txt"]
    absolute += ["-c", f"{tmp_path}/d"]
    assert choose("hawkears", *files).start.args == [*absolute, "-m", "0"], "it runs in its own folder"
    one = {"hawkears_root": str(root)}
    tries = {
        "demo --loudly": choose("demo", "--loudly").check,
        "demo --burn-s=much": choose("demo", "--burn-s=much").check,
        "hawkears1 --rtype=csv --region XX": choose("hawkears1", "--rtype=csv", "--region", "XX", **one).check,
        "hawkears1 elsewhere": choose("hawkears1", hawkears_root="elsewhere").check,
        "hawkears1 without Python": choose("hawkears1", hawkears_python="no-python", **one).check,
        "hawkears --filelist=a.csv": choose("hawkears", "--filelist=a.csv").check,
        "hawkears -rcsv -m0.3": choose("hawkears", "-rcsv", "-m0.3").check,
        "hawkears -o out --quiet": choose("hawkears", "-o", "out", "--quiet").check,
    }
    script = tmp_path / "bin" / "hawkears"
    for head, python in (one.split(" → ") for one in read_data("script_heads.txt").split("\n")[:-1]):
        script.write_text(head.replace("⏎", "\n"))
        assert str(workers.python_of(script)) == python, head
    (tmp_path / "bin" / "python").touch()
    assert workers.python_of(script) == str(tmp_path / "bin" / "python"), "as in a virtual environment"
    (tmp_path / "bin" / "python").unlink()
    assert workers.python_of(tmp_path / "nowhere") is None
    script.write_text('#!/bin/sh\nexec apptainer exec --nv hawkears.sif hawkears "$@"\n')
    tries["hawkears in a container"] = choose("hawkears").check
    pages({"refused.txt": refusals(tries).replace(str(tmp_path), "/…")})


def test_the_detector_of_the_contributors_page_works_as_it_is_pasted(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    module = ModuleType("badcjobs.workers.engine_owlnet")
    exec(page.partition("```python\n")[2].partition("```")[0], vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    owlnet = "#!/bin/sh\nread -r sound <$1\n[ $sound = bad ] && { echo cannot decode; exit 1; }\n"
    install(tmp_path / "bin" / "owlnet", f"{owlnet}printf 'start_time,end_time,label,score\\n0,1,STOW,0.9\\n' >$2\n")
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    wanted = RunSettings(Path("run"), engine="owlnet")
    begin = EngineStart(wanted.engine_args, environ, Launcher("test"), SystemClock(), cwd=tmp_path)
    engine = workers.choose_engine(wanted, begin)
    engine.check()
    ends = {}
    for sound in ("good", "bad"):
        audio = tmp_path / f"{sound}.wav"
        audio.write_text(f"{sound}\n")
        *_, result = engine.open(GPU, tmp_path).process([Chunk("r", sound, audio.name, str(audio))])
        ends[sound] = result.error_class or [one.label for one in result.detections]
    assert ends == {"good": ["STOW"], "bad": "bad_audio"}
    assert (engine.name, engine.traits.cores_per_chunk, workers.traits_of("an older one").cores_per_chunk) == (
        "owlnet", 1, None,
    )  # fmt: skip


CODES = (-9, 137, -15, 143, -11, -6, 139, 129, 163, 128 + 64, 128, 128 + 65, 1, 255, 0, None)  # also of a shell between
SAID = (
    "", "Elapsed time = 00:12", "std::bad_alloc", "CUDA out of memory", "Could not load recording /a.wav",
    "Error: No such option: -x", "Could not load recording /a.wav: [Errno 28] No space left on device",
)  # fmt: skip


def test_what_a_program_said_is_recognised_and_an_end_without_words_speaks_for_itself(pages):
    """The machine explains more than audio and settings do; a signal has other reasons than these."""
    for part in read_data("engine_words.txt").split("\n\n")[1:]:
        kind, *said = part.splitlines()
        found = {text: classify(text.replace("⏎", "\n"), patterns=workers.HAWKEARS_PATTERNS) for text in said}
        assert found == dict.fromkeys(said, kind.strip("[]"))
    ends = {code: [classify(one, code, workers.HAWKEARS_PATTERNS) for one in SAID] for code in CODES}
    lines = [f"{workers.describe_exit(code)}: {' | '.join(classes)}" for code, classes in ends.items()]
    pages({"ends.txt": "\n".join([" | ".join(SAID), *lines])})


def test_kills_for_memory_are_counted_by_the_jobs_own_control_group(tmp_path):
    v1 = "10:cpu,cpuacct:/x\n9:memory:/slurm/job_4821\n1:name=systemd:/x\n"
    for cgroup, file, kills in (
        ("0::/system.slice/job_4821/step_batch\n", "system.slice/job_4821/step_batch/memory.events", 2),
        (v1, "memory/slurm/job_4821/memory.oom_control", 2),
        ("0::/hidden\n", "elsewhere/memory.events", None),
    ):
        path = tmp_path / "fs" / file
        path.parent.mkdir(parents=True)
        path.write_text("low 0\nunder_oom 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
        (tmp_path / "cgroup").write_text(cgroup)
        assert workers.read_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == kills
    assert workers.read_oom_kills(tmp_path / "no cgroup", tmp_path / "fs") is None


def test_a_detector_that_the_kernel_killed_for_memory_does_not_blame_the_audio(tmp_path):
    events, given = tmp_path / "fs" / "job" / "memory.events", Chunk("r", "c", "a.wav", "a.wav")
    events.parent.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/job\n")
    oom_kills = partial(workers.read_oom_kills, tmp_path / "cgroup", tmp_path / "fs")
    for ends, usual in {
        "kill -9 $$": "worker_died",
        "exit 137": "worker_died",
        "exit 1": "exit_code",
        "": "no_output",
    }.items():
        for killed, expected in ((2, usual), (3, "host_memory")):
            events.write_text("oom_kill 2\n")
            words = shlex.join(["sh", "-c", f"echo oom_kill {killed} > {events}; {ends}", "{input}", "{output}"])
            session = CommandEngine(replace(start(), oom_kills=oom_kills), words).open(GPU, tmp_path)
            assert [*session.process([given])][-1].error_class == expected, (ends, killed)


def test_how_long_a_worker_may_be_silent_follows_from_its_slowest_chunk_and_the_length_of_the_audio():
    limit = HangTimeout(start_s=100, least_s=10, slowest=2)
    said = []
    for took_s, audio_s in [(None, None), (0.1, None), (3, 30), (1, 30), (60, 30)]:
        if took_s is not None:
            limit.learn(took_s, audio_s)
        said.append([limit.limit_s(length_s) for length_s in (30, 300, None)])
    assert said == [[160, 700, 7300], [10, 10, 10], [60, 600, 60], [60, 600, 60], [1200, 12_000, 1200]]
    assert HangTimeout(least_s=10, _slowest_s=0.1).limit_s(30, is_first=True) == 30
    assert (HangTimeout().limit_s(None), HangTimeout().start_s, HangTimeout().least_s) == (8100, 1800, 120)


RATE = 8000
LEVELS = [(0.5, 0.01), (0.3, 0.8), (0.7, 0.2), (0.5, 0.4)]  # seconds, loudness
LONGER = [*LEVELS, (9.25, 0.2501), (0.5, 0.4)]  # than a block of FLAC
WAV_KINDS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
KINDS = [(form, kind) for form in ("WAV", "WAVEX", "RF64") for kind in WAV_KINDS]
KINDS += [("FLAC", "PCM_16"), ("FLAC", "PCM_24")]


def sound(path, *levels, form="WAV", kind="PCM_16", channels=1):
    """Write audio whose last channel alone is loud."""
    values, quiet = array("d"), [0.0] * (channels - 1)
    for seconds, loudness in levels:
        values += array("d", [*quiet, -loudness, *quiet, loudness]) * round(seconds * RATE / 2)
    with soundfile.SoundFile(path, "w", RATE, channels, kind, format=form) as file:
        file.buffer_write(values.tobytes(), dtype="float64")
    return path.read_bytes()


def heard(path, content=None, threshold=0.25, digits=2):
    if content is not None:
        path.write_bytes(content)
    answer = workers.analyse(str(path), threshold)
    return answer["audio_s"], [[*row[:3], round(row[3], digits), row[4]] for row in answer["detections"]]


def test_loud_stretches_are_found_at_their_times_in_every_kind_of_audio(tmp_path):
    path = tmp_path / "audio"
    for form, kind in KINDS:
        levels, found = (LONGER, (11.75, 11_800)) if form == "FLAC" else (LEVELS, (2.0, 2000))
        expected = found[0], [[500, 800, "LOUD", 0.8, "Loud sound"], [1500, found[1], "LOUD", 0.4, "Loud sound"]]
        for channels in (1, 2):
            content = sound(path, *levels, form=form, kind=kind, channels=channels)
            assert heard(path, digits=1 if kind == "PCM_U8" else 2) == expected, (form, kind, channels)
        sound(path, (1, 0.0), form=form, kind=kind)
        assert heard(path) == (1.0, []), (form, kind)
        sound(path, (0.5, 1.0), form=form, kind=kind)
        ((start_ms, end_ms, _, score, _),) = heard(path)[1]
        assert (start_ms, end_ms) == (0, 500) and 0.98 <= score <= 1.0, (form, kind)
    assert heard(path, b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + content) == expected, "tags before the audio"
    with pytest.raises(ValueError):
        heard(path, content[: len(content) // 2])


def test_the_threshold_decides_and_odd_headers_are_read_as_far_as_they_make_sense(tmp_path):
    path = tmp_path / "a.wav"
    steps = sound(path, (0.5, 0.3), (0.5, 0.6))
    found = [[row[:2] for row in heard(path, threshold=limit)[1]] for limit in (0.7, 0.5, 0.2)]
    assert found == [[], [[500, 1000]], [[0, 1000]]]
    stream = steps.replace(b"data" + struct.pack("<I", 2 * RATE), b"data\xff\xff\xff\xff")
    assert heard(path, stream)[0] == 1.0, "a header of a stream that did not know its end"
    slow = steps[:24] + struct.pack("<I", 4) + steps[28:]
    assert heard(path, slow)[0] == 2000.0, "windows of at least a sample"
    sound(path, (0.2, 0.5), kind="FLOAT")
    assert heard(path, threshold=0.5)[1][0][:2] == [0, 200], "as loud as the threshold"
    sound(path)
    assert heard(path) == (0.0, [])


def test_bad_audio_is_refused_with_the_reason(tmp_path, pages, monkeypatch):
    path = tmp_path / "a.wav"
    good = sound(path, (1, 0.5))

    bad = {
        "zero bytes": b"", "text": b"this is not audio at all" * 9, "AVI": b"RIFF\x24\0\0\0AVI LIST" * 9,
        "cut in the header": good[:30], "cut in the audio": good[:-RATE], "cut in a sample": good[:-3],
        "no rate": good[:24] + bytes(4) + good[28:], "FLAC without a header": b"fLaC",
    }  # fmt: skip
    lines = []
    for name, content in bad.items():
        with pytest.raises(ValueError) as refused:
            heard(path, content)
        lines.append(f"{name}: {refused.value}".replace(str(path), "PATH"))
    pages({"refused.txt": "\n".join(lines)})


def test_simulated_memory_is_shared_by_the_processes_of_a_device(tmp_path):
    (tmp_path / "GPU-1.1").write_text(str(300 * 2**20))  # process 1 runs on every machine
    (tmp_path / "GPU-2.1").write_text(str(900 * 2**20))
    device = [f"--device-bytes={1000 * 2**20}", "--device=GPU-1", "--memory-per-s=10"]
    usual = [*device, f"--ledger={tmp_path}"]
    assert workers.take_memory(workers.parse_arguments(usual), 36) == "CUDA out of memory: 1020 MiB of 1000 MiB"
    for words, fits_s, too_long_s in (
        (usual, 35, 35.1), ([*usual, "--lean"], 70, 70.1), (device, 50, 50.1),
    ):  # fmt: skip
        assert workers.take_memory(workers.parse_arguments(words), fits_s) is None
        assert workers.take_memory(workers.parse_arguments(words), too_long_s) is not None
    assert simulated_memory_bytes(tmp_path, "GPU-1") == 1000 * 2**20, "what it took stays noted"
    for no_limit in (["--memory-per-s=10"], device[:2]):
        assert workers.take_memory(workers.parse_arguments(no_limit), 1e9) is None
