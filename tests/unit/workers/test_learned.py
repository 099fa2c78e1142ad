"""What later runs know: lessons of earlier runs, and results of probes; neither does harm where it is damaged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import TOO_LONG, Device, Probed, ProbeKey, Trial, WorkerPlan
from rooms.planning import evaluate
from rooms.root import BadInput, RunSettings, SubprocessLauncher, SystemClock
from rooms.workers import (
    DemoEngine,
    EngineStart,
    Learned,
    Lesson,
    MemoryLimit,
    ProbeStore,
    describe_readers,
    find_limits,
    known_files,
    parse_probes,
    read_probes,
    to_toml,
)
from support.probes import GIB, KEY, trial

# --- learned by runs --------------------------------------------------------------------------------------------------


def test_a_lesson_is_found_by_the_next_task_and_by_another_run_the_nearer_first(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    here, elsewhere = (known_files("learned.json", tmp_path / name, environ) for name in ("one", "two"))
    assert here == [tmp_path / "one" / "learned.json", tmp_path / "home" / ".cache" / "badcjobs" / "learned.json"]
    Learned("hawkears", here).note("V100", workers=3, cores=6, settled=True)
    Learned("hawkears", here).note("V100", alone_s=900.0)
    lesson = Lesson(workers=3, cores=6, settled=True, limit=MemoryLimit(None, 900.0))
    assert Learned("hawkears", here).about("V100") == Learned("hawkears", elsewhere).about("V100") == lesson
    Learned("hawkears", elsewhere[:1]).note("V100", workers=5, crowded_s=600.0, worker_bytes=7)
    assert Learned("hawkears", elsewhere).about("V100") == Lesson(5, 6, True, MemoryLimit(600.0, 900.0), 7)
    assert Learned("hawkears", elsewhere).about("H200") == Learned("demo", here).about("V100") == Lesson()


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "[]", '{"version": 99, "lessons": {"demo": {"GPU": {"workers": 2}}}}', '{"version": 1}',
        '{"version": 1, "lessons": []}', '{"version": 1, "lessons": {"demo": 3}}',
        '{"version": 1, "lessons": {"demo": {"GPU": 3}}}', '{"version": 1, "lessons": {"demo": {"GPU": {"x": 3}}}}',
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_teaches_nothing_and_stays_usable(tmp_path: Path, text: str) -> None:
    file = tmp_path / "learned.json"
    file.write_text(text)
    assert Learned("demo", [file]).about("GPU") == Lesson()
    Learned("command", [file]).note("GPU", workers=4)
    assert json.loads(file.read_text())["version"] == 1
    assert Learned("command", [file]).about("GPU").workers == 4


def test_a_file_that_cannot_be_written_is_no_harm_and_no_draft_remains(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    learned = Learned("demo", [tmp_path / "file" / "x.json", tmp_path / "folder.json", tmp_path / "good.json"])
    learned.note("GPU", workers=2)
    assert learned.about("GPU").workers == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder.json", "good.json"]


# --- found by probes --------------------------------------------------------------------------------------------------

TRIALS = [
    trial(60, 400, peak_bytes=3 * GIB),
    trial(100, 800),
    Trial(105.0, False, TOO_LONG),
    Trial(200.0, True, TOO_LONG),
    trial(105, 1, lean=True),
]
FOUND = KEY.probed(evaluate(TRIALS, 10.0), TRIALS)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=40)
@given(
    st.builds(ProbeKey, names, st.none() | st.integers(0, 2**40), names, names, names, st.integers(1, 9)),
    st.lists(st.sampled_from(TRIALS), unique=True), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_is_written_is_read_again_whatever_the_names(
    key: ProbeKey, trials: list[Trial], finished: bool, evaluated: bool
) -> None:
    ordered = tuple(sorted(trials, key=lambda one: (one.lean, one.length_s)))
    strange = Probed(key, ordered, FOUND.result if evaluated else None, finished, "2026-07-01" if evaluated else None)
    text = to_toml([strange, FOUND])
    back = parse_probes(text)
    assert {one.key: one for one in back}[key] == (strange if key != KEY.key else back[0])
    assert to_toml(reversed(back)) == text
    assert text.startswith("# The longest chunks that fit: found by badcjobs probe")


def test_a_store_keeps_what_others_have_written_and_is_made_with_its_first_entry(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "cache" / "probe.toml")
    assert store.open() is None
    store.put(Probed(KEY.key))  # nothing to forget
    assert not store.file.exists()
    assert store.find(KEY.key) == Probed(KEY.key)
    other = replace(FOUND, key=replace(KEY.key, gpu="H200"))
    store.put(FOUND)
    ProbeStore(store.file).put(other)
    assert store.open() is None
    assert set(store.find(KEY.key).trials) == set(TRIALS)
    half = replace(FOUND, trials=(trial(70, 1.0),), result=None, finished=False)
    store.put(half)  # what another probe has finished meanwhile is not replaced by half of it
    assert store.find(KEY.key).result == FOUND.result
    store.put(replace(half, trials=(*FOUND.trials, trial(300, 1.0))))  # but by what goes on where it ended
    assert len(store.find(KEY.key).trials) == len(TRIALS) + 1
    store.put(replace(half, finished=True))
    assert store.find(KEY.key).trials == half.trials
    store.put(Probed(KEY.key))
    assert [one.key.gpu for one in read_probes(store.file)] == ["H200"]
    store.put(Probed(other.key))
    assert store.file.exists() and read_probes(store.file) == []
    assert [path.name for path in store.file.parent.glob("[!.]*")] == ["probe.toml"]


def test_probes_that_write_at_the_same_moment_lose_nothing_of_each_other(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "probe.toml")
    children = []
    for n in range(3):
        child = os.fork()
        if not child:
            code = 1
            try:
                for k in range(4):
                    store.put(replace(FOUND, key=replace(KEY.key, gpu=f"{n}-{k}")))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert len(read_probes(store.file)) == 12


GOOD = to_toml([FOUND])
DAMAGED = [
    "nonsense", "version = 2", "version = 1\ngpu = 3", "version = 1\n[[gpu]]\nengine = 'demo'", "\xff", GOOD[:-30],
    GOOD.replace("length_s = 60.0", "length_s = nan"), GOOD.replace("workers = 1", "workers = true"),
    GOOD.replace("workers = 1", "workers = 1.0"), GOOD.replace('gpu = "Tesla V100"\n', ""),
]  # fmt: skip


@pytest.mark.parametrize("text", ["", *DAMAGED], ids=range(len(DAMAGED) + 1))
def test_a_damaged_file_is_set_aside_and_one_that_no_probe_has_written_is_left_alone(tmp_path: Path, text: str) -> None:
    raw = text.encode("latin-1")
    file, mine = tmp_path / "probe.toml", tmp_path / "mine.toml"
    file.write_bytes(raw)
    with pytest.raises(ValueError):
        read_probes(file)
    first = ProbeStore(file).open()
    assert first is not None and first.read_bytes() == raw
    assert read_probes(file) == []
    file.write_text("again")
    assert ProbeStore(file).open() not in (None, first)
    mine.write_bytes(raw)
    if not text or text.startswith(GOOD[:30]):
        assert ProbeStore(mine).open() is not None
        assert read_probes(mine) == []
        return
    with pytest.raises(BadInput):
        ProbeStore(mine).open()
    assert [(one, one.read_bytes()) for one in tmp_path.glob("mine*")] == [(mine, raw)]


def test_later_runs_are_promised_only_for_files_that_they_read(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    (tmp_path / "cache").symlink_to(tmp_path / ".cache")
    said = [
        describe_readers(tmp_path / name, environ)
        for name in (".cache/badcjobs/probe.toml", "cache/badcjobs/probe.toml", "july/probe.toml", "july/ps.toml")
    ]
    assert said == [
        "later runs read it", "later runs read it", f"runs with --out {tmp_path / 'july'} read it",
        "badcjobs plan --from FILE reads it; a run reads OUT/probe.toml, not this file",
    ]  # fmt: skip
    assert describe_readers(tmp_path / "probe.toml", {}).startswith("runs with --out")


def plans(count: int = 2, *, name: str = "Tesla V100", memory_bytes: int | None = 16 * GIB) -> list[WorkerPlan]:
    device = Device("0", "because", name=name, memory_total_bytes=memory_bytes)
    return [WorkerPlan(slot, device, 7, threads=4) for slot in range(count)]


def limits(folder: Path, workers: list[WorkerPlan], *probes: Probed) -> dict[str, MemoryLimit]:
    engine = DemoEngine(EngineStart((), {}, SubprocessLauncher("test"), SystemClock()))
    engine.version = "1.0"
    (folder / "probe.toml").write_text(to_toml(probes))
    files = [folder / "damaged.toml", *known_files("probe.toml", folder, {})]
    files[0].write_text("version =")
    return find_limits(files, workers, engine, RunSettings(folder, engine="demo", engine_args=("--x",)))


ALONE = evaluate([trial(300, 9), Trial(310.0, False, TOO_LONG)], 10)
EASY = evaluate([trial(60, 400), trial(120, 800)], 10)
SAFE = {"Tesla V100": MemoryLimit(crowded_s=90.001, alone_s=94.001)}


def with_key(probed: Probed = FOUND, **facts: Any) -> Probed:
    return replace(probed, key=replace(KEY.key, **facts))


@pytest.mark.parametrize(
    ("workers", "probes", "found"),
    [
        (plans(), [FOUND], SAFE),
        (plans(1), [FOUND], {}),  # one chunk at once; the probe had two
        (plans(3), [FOUND], SAFE),
        (plans(memory_bytes=round(15.8 * GIB)), [FOUND], SAFE),  # drivers keep a little for themselves
        (plans(memory_bytes=round(15.6 * GIB)), [FOUND], {}),
        (plans(memory_bytes=None), [FOUND], {}),
        (plans(memory_bytes=None), [with_key(memory_bytes=None)], SAFE),
        (plans(), [with_key(memory_bytes=None)], {}),
        (plans(), [with_key(engine_version="2.0"), with_key(settings="demo"), with_key(gpu="V100")], {}),
        (plans(), [with_key(engine="command"), replace(FOUND, result=None)], {}),
        (plans(name="V100"), [FOUND], {}),
        ([WorkerPlan(0, None, None, 4)], [with_key(gpu="cpu", memory_bytes=None, chunks_at_once=1)], {}),
        # The most chunks at once that are not more than ours.
        (plans(), [with_key(replace(FOUND, result=ALONE), chunks_at_once=n) for n in (1, 9)] + [FOUND], SAFE),
        (plans(1), [with_key(replace(FOUND, result=ALONE), chunks_at_once=1), FOUND],
         {"Tesla V100": MemoryLimit(crowded_s=270.001)}),
        (plans(), [replace(FOUND, result=EASY)], {}),  # everything fits
    ],
)  # fmt: skip
def test_a_run_keeps_to_what_a_probe_of_the_same_found_safe(
    tmp_path: Path, workers: list[WorkerPlan], probes: list[Probed], found: dict[str, MemoryLimit]
) -> None:
    assert limits(tmp_path, workers, *probes) == found
