"""The nouns and their decisions: arrays and times, progress and silence, cutting, name patterns, devices."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rooms import model
from rooms.model import ArrayOrder, ArrayShape, Chunk, ChunkResult, Cutting, Device, TaskKey
from support.cases import read_blocks


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 30))
def test_an_array_knows_its_indices_and_their_positions(first, step, count):
    shape = ArrayShape(first, step, count)
    order = ArrayOrder(Path("/out"), (), tasks=count, first=first, step=step)
    assert (order.shape, order.indices) == (shape, tuple(first + step * n for n in range(count)))
    known = {index: shape.position_of(index) for index in range(-5, first + step * (count + 2))}
    assert {index: at for index, at in known.items() if at is not None} == {i: n for n, i in enumerate(order.indices)}
    begin, _, rest = str(shape).partition("-")
    last, _, by = rest.partition(":")
    assert (int(begin), int(last), int(by or 1)) == (first, order.indices[-1], step)


def test_an_order_says_what_sbatch_is_given():
    order = ArrayOrder(Path("/out"), (), tasks=4, extra_sbatch={"qos": "high", "partition": "gpu"})
    assert (order.spec, order.partition, str(order.logs)) == ("0-3", "gpu", "/out/logs")
    assert replace(order, parallel=2, step=3).spec == "0-9:3%2"
    again = replace(order, only=(1, 3), parallel=1, extra_sbatch={})
    assert (again.spec, again.indices, again.partition) == ("1,3%1", (1, 3), None)
    assert [model.default_cpus(n) for n in (0, 1, 4)] == [2, 2, 8]
    assert [model.default_mem(n) for n in (0, 1, 4)] == ["7G", "7G", "27G"]
    assert [model.guessed_gb(2, chunk_s) for chunk_s in (30, 300, 1800, None)] == [4, 5, 8, 7]
    assert [model.advised_gb(n * 2**30) for n in (0.1, 1, 8.1)] == [1, 2, 10]
    times = (order.time_min, order.warning_s, order.merge_time_min)
    assert (times, order.requeues, order.merge_mem) == ((720, 180, 60), 10, "4G")
    # A process of a step of several is named by its place.
    alone = model.Allocation(True, "4821", "gpu1", 2, array_index=None, procid=3)
    assert alone.key == TaskKey("4821", 0, 2, "gpu1")
    assert replace(alone, step_tasks=2, array_index=7, started_at_ms=9).key.name == "4821_7.r2.gpu1.p3"


def test_a_large_file_is_published_less_often_and_silence_is_two_intervals_and_a_minute():
    sizes = (0, 1_500_000, 1_500_050, 24_000_000, 24_000_050, 10**12)
    assert [model.publish_interval_s(size, 30.0) for size in sizes] == [30, 30, 30.001, 480, 480, 480]
    assert model.publish_interval_s(10**12, 900.0) == 900
    assert [model.silent_after_s(*one) for one in ((0, None), (0, 5.0), (5_000_000, 5.0))] == [120, 70, 260]
    assert [model.is_silent(1000, 2.0, now) for now in (3000, 3001, None)] == [False, True, False]
    assert not model.is_silent(None, 2.0, 9**9) and not model.is_silent(0, None, 9**9)


@given(st.floats(1, 60), st.floats(0, 59), st.integers(0, 300_000))
def test_cut_recordings_are_covered_by_equal_chunks_and_a_last_one_that_is_worth_it(length_s, overlap_s, audio_ms):
    cutting = Cutting(None, length_s, overlap_s)
    if cutting.problems():
        return
    length_ms, overlap_ms = round(length_s * 1000), round(overlap_s * 1000)
    found = cutting.stretches(audio_ms)
    assert (found[0][0], found[-1][1]) == (0, audio_ms)
    assert all(end - start == length_ms for start, end in found[:-1])
    assert all(start == before + length_ms - overlap_ms for (before, _), (start, _) in pairwise(found))
    if len(found) > 1:
        assert audio_ms - found[-1][0] >= overlap_ms + 3000, "the last chunk has three seconds of its own"
    assert audio_ms - found[-1][0] < length_ms + 3000


def test_chunks_say_their_names_and_lengths():
    cut = Cutting(None, 60.0, 5.0)
    assert [cut.stretches(ms) for ms in (62_999, 63_000)] == [[(0, 62_999)], [(0, 60_000), (55_000, 63_000)]]
    assert (Cutting().stretches(9), Cutting().cuts_recordings, cut.cuts_recordings) == ([(0, 9)], False, True)
    one = Chunk("rec", "c1", "a", "a", 500, 1500)
    assert (one.key, one.name, one.audio_s) == (("rec", "c1"), "rec/c1", 1.0)
    assert (replace(one, chunk_id="rec").name, replace(one, end_ms=None).audio_s) == ("rec", None)
    assert (ChunkResult(one, 0, 1).ok, ChunkResult(one, 0, 1, error_class="x").ok) == (True, False)


PATTERNS = read_blocks("patterns.txt")


def test_patterns_read_what_the_paths_of_recordings_mean(pages):
    said, cases = [], [case.splitlines() for case in PATTERNS]
    for text, *paths in cases:
        pattern = model.parse_pattern(text) if paths else None
        said += [f"{text}{'  (full path)' * pattern.is_full}"] if pattern else []
        for path in paths:
            said.append(f"    {path}  {pattern.read(path, path.removeprefix('/'))} {pattern.read(path, None)}")
    known, wrong = model.parse_patterns([text for text, *_ in cases])
    assert [one.text for one in known] == [text for text, *paths in cases if paths]
    pages({"patterns.txt": "\n".join(said), "wrong.txt": "\n".join(wrong)})


def test_a_device_is_pinned_by_its_uuid_unless_that_does_not_work():
    nvidia, amd = Device("1", "test", 1, "GPU-aaaa"), Device("3", "test", 3, "GPU-00000000000000aa", vendor="amd")
    pins = {
        nvidia: "GPU-aaaa", replace(nvidia, uuid=None): "1", amd: "GPU-00000000000000aa",
        replace(amd, uuid="74ff74a1-0000-1000-80aa-000000000000"): "3",
        replace(amd, uuid="GPU-1", index=None, token="t"): "t",
        replace(nvidia, uuid="MIG-eeee"): "MIG-eeee",
    }  # fmt: skip
    assert [device.pin for device in pins] == list(pins.values())
    assert len(model.METRICS) == 20


def test_a_utilization_has_a_word():
    words = {0: "idle", 0.4: "light", 25: "light", 25.1: "moderate", 75: "moderate", 75.5: "heavy", 100: "heavy"}
    assert {percent: model.load_word(percent) for percent in words} == words and model.load_word(None) is None


def test_every_decision_has_a_sentence_and_a_figure_that_is_not_known_is_left_out_of_it():
    assert set(model.SENTENCES) == set(model.Code)
    decision = model.Decision.of(model.Code.LIMIT_MET, "V100", limit_s=40.0, crowded_s=None, alone_s=40.0)
    assert decision.figures == {"limit_s": 40.0, "alone_s": 40.0}
    assert decision.reason == "a chunk ran out of memory; audio of 40 s or more is cut into pieces"
    found = model.Decision.of(model.Code.SHORT_AUDIO, "r", path="/a{0}[1].wav", end_s=5, found_s=5, audio_s=40)
    assert found.reason.startswith("/a{0}[1].wav ends early, at 5.000 s: 5.000 s of the 40 s of this chunk exist")


def test_the_sizes_of_one_decision_have_one_unit():
    for held_mib, said in (
        (900, "from 0.9 GiB to 1.2 GiB; the job has 2.0"),
        (90, "from 90 MiB to 1,229 MiB; the job has 2,048"),
    ):
        sizes = {"held_bytes": held_mib * 2**20, "expected_bytes": int(1.2 * 2**30), "granted_bytes": 2**31}
        assert said in model.Decision.of(model.Code.NO_MEMORY_FOR_MORE, **sizes).reason
