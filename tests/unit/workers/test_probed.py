"""What probes have found: kept in a file that survives damage, and read by runs that it fits."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import TOO_LONG, Device, Probed, Trial, WorkerPlan
from rooms.planning import evaluate
from rooms.root import BadInput, RunSettings, SubprocessLauncher, SystemClock
from rooms.workers import (
    DemoEngine,
    EngineStart,
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

TRIALS = [
    trial(60, 400, peak_bytes=3 * GIB),
    trial(100, 800),
    Trial(105.0, False, TOO_LONG),
    Trial(200.0, True, TOO_LONG),
]
FOUND = KEY.probed(evaluate([*TRIALS, trial(105, 1, lean=True)], 10.0), [*TRIALS, trial(105, 1, lean=True)])


def test_what_is_written_is_read_again_whatever_the_names() -> None:
    strange = replace(FOUND, key=replace(KEY.key, gpu='A "card"\\\x7f\n[é]', memory_bytes=None), result=None)
    bare = Probed(replace(KEY.key, engine="command"), (trial(60, None),))
    text = to_toml([FOUND, strange, bare])
    back = {probed.key: probed for probed in parse_probes(text)}
    assert {key: replace(one, trials=()) for key, one in back.items()} == {
        one.key: replace(one, trials=()) for one in (FOUND, strange, bare)
    }
    assert set(back[KEY.key].trials) == set(FOUND.trials)
    assert to_toml(back.values()) == text


def test_a_store_keeps_what_others_have_written(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "cache" / "probe.toml")
    assert store.open() is None
    other = replace(FOUND, key=replace(KEY.key, gpu="H200"))
    store.put(FOUND)
    ProbeStore(store.file).put(other)
    store.put(replace(FOUND, trials=FOUND.trials[:1], result=None))
    assert len(store.find(KEY.key).trials) == 1
    assert store.find(other.key).result == FOUND.result
    store.put(Probed(KEY.key))
    assert [probed.key.gpu for probed in read_probes(store.file)] == ["H200"]
    assert [path.name for path in store.file.parent.glob("[!.]*")] == ["probe.toml"]


def test_a_store_without_an_entry_leaves_no_file_where_there_was_none(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "a100.toml")
    assert store.open() is None
    store.put(Probed(KEY.key))  # what was to be forgotten
    assert list(tmp_path.glob("[!.]*")) == []
    store.put(FOUND)
    store.put(Probed(KEY.key))
    assert read_probes(store.file) == [] and store.file.exists()


def test_probes_that_write_at_the_same_moment_lose_nothing_of_each_other(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "probe.toml")
    store.open()
    children = [_put_in_a_child(store, [replace(FOUND, key=replace(KEY.key, gpu=f"{n}-{k}")) for k in range(4)])
                for n in range(4)]  # fmt: skip
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert len(read_probes(store.file)) == 16
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["probe.toml"]


def _put_in_a_child(store: ProbeStore, probes: list[Probed]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            for probed in probes:
                store.put(probed)
            code = 0
        finally:
            os._exit(code)
    return child


def test_what_another_probe_has_finished_meanwhile_is_not_replaced_by_half_of_it(tmp_path: Path) -> None:
    store = ProbeStore(tmp_path / "probe.toml")
    store.put(FOUND)
    half = replace(FOUND, trials=(trial(70, 1.0),), result=None, finished=False)
    store.put(half)
    assert store.find(KEY.key).result == FOUND.result
    longer = replace(half, trials=(*FOUND.trials, trial(300, 1.0)))
    store.put(longer)  # goes on where that ended
    assert len(store.find(KEY.key).trials) == len(longer.trials)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense", "", "version = 2", "version = 1\ngpu = 3", "version = 1\n[[gpu]]\nengine = 'demo'", "\xff",
        to_toml([FOUND]).replace("length_s = 60.0", "length_s = nan"),
        to_toml([FOUND]).replace("workers = 1", "workers = true"),
        to_toml([FOUND])[:-30],
    ],
    ids=range(9),
)  # fmt: skip
def test_a_damaged_file_is_set_aside_and_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "probe.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        read_probes(file)
    first = ProbeStore(file).open()
    assert first is not None and first.read_bytes() == text.encode("latin-1")
    assert read_probes(file) == []
    file.write_text("again")
    second = ProbeStore(file).open()
    assert second is not None and second != first


@pytest.mark.parametrize("text", ["recording_id,chunk_id,source_path\n", "[run]\nengine = 'demo'\n", "\xff\xfe"])
def test_a_file_that_no_probe_has_written_is_never_replaced_nor_renamed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput):
        ProbeStore(file).open()
    assert [(one, one.read_bytes()) for one in tmp_path.glob("[!.]*")] == [(file, text.encode("latin-1"))]


def test_a_store_of_another_name_that_is_empty_or_was_ours_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "a100.toml"
    for text in ("", to_toml([FOUND])[:-30]):
        file.write_text(text)
        assert ProbeStore(file).open() is not None
        assert read_probes(file) == []


def test_later_runs_are_promised_only_for_files_that_they_read(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert describe_readers(tmp_path / ".cache" / "badcjobs" / "probe.toml", environ) == "later runs read it"
    assert describe_readers(tmp_path / "july" / "probe.toml", environ) == f"runs with --out {tmp_path / 'july'} read it"
    other = describe_readers(tmp_path / "july" / "ps.toml", environ)
    assert "plan --from" in other and "a run reads OUT/probe.toml, not this file" in other


def plan(slot: int = 0, *, name: str = "Tesla V100", memory_bytes: int | None = 16 * GIB) -> WorkerPlan:
    return WorkerPlan(slot, Device("0", "because", name=name, memory_total_bytes=memory_bytes), 7, threads=4)


def engine() -> DemoEngine:
    made = DemoEngine(EngineStart((), {}, SubprocessLauncher("test"), SystemClock()))
    made.version = "1.0"
    return made


def limits(tmp_path: Path, *plans: WorkerPlan, probes: list[Probed] | None = None) -> dict[str, MemoryLimit]:
    (tmp_path / "probe.toml").write_text(to_toml([FOUND] if probes is None else probes))
    settings = RunSettings(tmp_path, engine="demo", engine_args=("--x",))
    return find_limits(known_files("probe.toml", tmp_path, {}), plans, engine(), settings)


def test_a_run_keeps_to_what_is_safe(tmp_path: Path) -> None:
    found = limits(tmp_path, plan(0), plan(1))
    assert found == {"Tesla V100": MemoryLimit(crowded_s=90.001, alone_s=94.001)}


def test_a_probe_of_something_else_says_nothing(tmp_path: Path) -> None:
    assert limits(tmp_path, plan()) == {}  # one chunk at once; the probe had two
    for other in (
        replace(KEY.key, engine_version="2.0"),
        replace(KEY.key, settings="demo"),
        replace(KEY.key, memory_bytes=32 * GIB),
        replace(KEY.key, gpu="V100"),
    ):
        assert limits(tmp_path, plan(0), plan(1), probes=[replace(FOUND, key=other)]) == {}
    assert limits(tmp_path, plan(0), plan(1), probes=[replace(FOUND, result=None)]) == {}
    assert limits(tmp_path, WorkerPlan(0, None, None, 4)) == {}


def test_drivers_that_keep_a_little_more_for_themselves_make_no_other_model(tmp_path: Path) -> None:
    smaller = round(15.8 * GIB)
    assert limits(tmp_path, plan(0, memory_bytes=smaller), plan(1, memory_bytes=smaller)) != {}


def test_of_several_probes_the_one_with_the_most_chunks_at_once_that_is_not_more_counts(tmp_path: Path) -> None:
    alone = replace(
        FOUND,
        key=replace(KEY.key, chunks_at_once=1),
        result=evaluate([trial(300, 9), Trial(310.0, False, TOO_LONG)], 10),
    )
    crowd = replace(alone, key=replace(KEY.key, chunks_at_once=9))
    found = limits(tmp_path, plan(0), plan(1), probes=[alone, FOUND, crowd])
    assert found["Tesla V100"].crowded_s == 90.001
    assert limits(tmp_path, plan(), probes=[alone, FOUND, crowd])["Tesla V100"].crowded_s == 270.001


def test_where_everything_fits_nothing_is_limited_and_a_damaged_file_is_no_harm(tmp_path: Path) -> None:
    easy = replace(FOUND, result=evaluate([trial(60, 400), trial(120, 800)], 10))
    assert limits(tmp_path, plan(0), plan(1), probes=[easy]) == {}
    (tmp_path / "probe.toml").write_text("version =")
    assert find_limits([tmp_path / "probe.toml"], [plan()], engine(), RunSettings(tmp_path)) == {}
