"""Stretches of longer files on the node: cut before they are wanted or there and then, never missing, none left."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Fingerprint, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut, NoDecoder, NotThere
from rooms.workers import RetryPolicy, SessionFeed, Stager, Supervisor, choose_staging
from support.audio import make_wav
from support.scripted_engine import (
    CLOCK,
    News,
    Notebook,
    ScriptedEngine,
    ScriptedSession,
    audio_steps,
    done,
    failed,
    open_feed,
)
from support.small_disk import small_disk
from support.waiting import wait_for

PLENTY = 10**9
RATE = 1000
PLAN = WorkerPlan(slot=0, device=None, device_id=None, threads=1)


class SlowCutter(AudioCutter):
    """A cutter that takes its time, as one does on a filesystem far away, counts what it cuts, and may refuse."""

    def __init__(self) -> None:
        super().__init__(None)
        self.go_on = threading.Event()
        self.go_on.set()
        self.cuts: list[float] = []
        self.refusals: dict[float, Exception] = {}  # by the begin of a stretch

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        self.cuts.append(start_s)
        self.go_on.wait(5)
        if start_s in self.refusals:
            raise self.refusals[start_s]
        super().cut(source, start_s, end_s, target)


class Bench:
    """A recording of 60 s whose n-th second is n loud, a stager, and the list of what comes next."""

    def __init__(self, folder: Path, *, ahead: int = 100) -> None:
        self.node = folder / "node" / "staged"
        self.recording = folder / "far away" / "night.wav"
        self.recording.parent.mkdir()
        with wave.open(str(self.recording), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(b"".join(second.to_bytes(2, "little") * RATE for second in range(60)))
        self.coming: list[Chunk] = []
        self.cutter = SlowCutter()
        self.stager = Stager(self.node, ahead=ahead, cutter=self.cutter)

    def chunks(self, count: int, length_s: int = 5) -> list[Chunk]:
        ends = [(n * 1000, (n + length_s) * 1000) for n in range(count)]
        return [
            Chunk("r", f"c{start}", "night.wav", str(self.recording), start, end, is_cut=True) for start, end in ends
        ]

    def start(self, coming: Sequence[Chunk], *, most_bytes: int = PLENTY, ready: int | None = None) -> None:
        self.coming[:] = coming
        self.stager.start(lambda count: self.coming[:count], most_bytes=most_bytes)
        expected = len(coming) if ready is None else ready
        wait_for(lambda: self.stager.ready >= expected, f"{expected} are ready")

    @property
    def files(self) -> list[Path]:
        return [Path(folder, name) for folder, _, names in os.walk(self.node) for name in names]

    def session(self, script: Callable[[Chunk], News], folder: Path) -> SessionFeed:
        def play(session: ScriptedSession, given: Sequence[Chunk]) -> Iterator[News]:
            for chunk in [*given, *session.more(2, idle=1)]:
                yield ChunkStarted(chunk, 0)
                yield script(chunk)

        return open_feed(ScriptedEngine(play), PLAN, folder, audio_steps(folder, stager=self.stager))


def seconds_in(path: str) -> list[int]:
    """Return which seconds of the recording are in a file, by what is to be heard in them."""
    with wave.open(path) as audio:
        raw = audio.readframes(audio.getnframes())
    assert len(raw) % (2 * RATE) == 0
    return [int.from_bytes(raw[at : at + 2], "little") for at in range(0, len(raw), 2 * RATE)]


def expected(chunk: Chunk) -> list[int]:
    assert chunk.end_ms is not None
    return list(range(chunk.start_ms // 1000, chunk.end_ms // 1000))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.cutter.go_on.set()
    bench.stager.stop()
    assert not bench.node.exists(), "cuts are left"


# --- the stager -------------------------------------------------------------------------------------------------------


def test_a_cut_that_is_ready_is_handed_out_and_goes_with_its_chunk(bench: Bench) -> None:
    chunks = bench.chunks(4)
    bench.start(chunks)
    bench.coming.clear()
    for chunk in chunks:
        given = bench.stager.take(chunk)
        assert seconds_in(given.audio_path) == expected(chunk)
        assert replace(given, audio_path=chunk.audio_path, is_cut=True) == chunk, "its place stays what it was"
        assert Path(given.audio_path).name == f"night~{chunk.start_ms}-{chunk.end_ms}.wav"
        assert bench.stager.release(chunk)
    assert bench.files == []
    assert (bench.stager.staged, bench.stager.cut_late) == (4, 0)


def test_a_cut_that_nobody_has_made_is_made_when_it_is_wanted_also_without_any_reader(bench: Bench) -> None:
    for chunk in bench.chunks(3):
        given = bench.stager.take(chunk)
        assert seconds_in(given.audio_path) == expected(chunk)
        assert len(bench.files) == 1
        bench.stager.release(chunk)
    assert bench.files == []
    assert bench.stager.cut_late == 3


def test_a_cut_that_is_just_being_made_is_waited_for_and_not_made_twice(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    bench.cutter.go_on.clear()
    bench.start([chunk], ready=0)
    wait_for(lambda: bench.cutter.cuts, "a cut")
    bench.coming.clear()
    threading.Timer(0.2, bench.cutter.go_on.set).start()
    given = bench.stager.take(chunk)
    assert seconds_in(given.audio_path) == expected(chunk)
    assert len(bench.cutter.cuts) == 1
    bench.stager.release(chunk)


def test_a_cut_that_waits_for_room_is_made_at_once_when_it_is_wanted(bench: Bench) -> None:
    first, second, third = bench.chunks(3, length_s=5)
    bench.start([first, second, third], most_bytes=11_000, ready=1)  # one of them is 10,044 bytes
    bench.coming.clear()
    given = bench.stager.take(second)
    assert seconds_in(given.audio_path) == expected(second)
    bench.stager.release(second)
    assert seconds_in(bench.stager.take(first).audio_path) == expected(first)
    bench.stager.release(first)


def test_cuts_ahead_take_no_more_than_the_limit(bench: Bench) -> None:
    bench.start(bench.chunks(20), most_bytes=35_000, ready=3)
    time.sleep(0.3)
    assert sum(path.stat().st_size for path in bench.files) <= 35_000


def test_only_cuts_leaves_whole_files_where_they_are(bench: Bench) -> None:
    whole = Chunk("r", "all", "night.wav", str(bench.recording), 0, 60_000)
    [cut] = bench.chunks(1)
    bench.coming[:] = [whole, cut]
    bench.stager.start(lambda count: bench.coming[:count], most_bytes=PLENTY, only_cuts=True)
    wait_for(lambda: bench.stager.ready, "one is ready")
    time.sleep(0.3)
    assert [path.name for path in bench.files] == ["night~0-5000.wav"]
    assert bench.stager.take(whole) == whole


def test_a_cut_that_was_swept_away_is_made_again(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    bench.start([chunk])
    shutil.rmtree(bench.node)
    bench.coming.clear()
    assert seconds_in(bench.stager.take(chunk).audio_path) == expected(chunk)
    bench.stager.release(chunk)


def test_what_is_not_all_there_cannot_be_cut_and_leaves_nothing(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    beyond, behind = replace(chunk, start_ms=57_000, end_ms=62_000), replace(chunk, start_ms=70_000, end_ms=75_000)
    with pytest.raises(
        CannotCut, match=r"night\.wav ends at 60\.000 s, before the end of the chunk from 57\.000 s to 62\.000 s"
    ):
        bench.stager.take(beyond)
    with pytest.raises(CannotCut, match=r"has 60\.000 s of audio and nothing after 70\.000 s"):
        bench.stager.take(behind)
    assert bench.files == []
    almost = replace(chunk, start_ms=55_000, end_ms=60_900)
    assert seconds_in(bench.stager.take(almost).audio_path) == [55, 56, 57, 58, 59]
    bench.stager.release(almost)


@pytest.mark.parametrize("ahead", [False, True])
def test_of_a_chunk_in_which_its_recording_breaks_off_the_engine_gets_what_is_there(bench: Bench, ahead: bool) -> None:
    [chunk] = bench.chunks(1)
    with Path(chunk.audio_path).open("r+b") as file:
        file.truncate(44 + 2 * RATE * 58)
    broken = replace(chunk, start_ms=55_000, end_ms=60_000)
    if ahead:
        bench.start([broken])
    given = bench.stager.take(broken)
    assert seconds_in(given.audio_path) == [55, 56, 57]
    assert (given.start_ms, given.end_ms, given.audio_s) == (55_000, 58_000, 3.0)
    bench.coming.clear()
    bench.stager.release(broken)
    with pytest.raises(NotThere, match=r"is truncated: its header says 60 s, the file has 58 s and nothing after 58 s"):
        bench.stager.take(replace(broken, start_ms=58_000))
    with pytest.raises(CannotCut, match=r"ends at 58\.000 s, before the end of the chunk from 55\.000 s to 65\.000 s"):
        bench.stager.take(replace(broken, end_ms=65_000))  # its header does not promise that either
    assert bench.files == []


def test_twenty_recordings_that_cannot_be_cut_do_not_end_the_cutting(bench: Bench, tmp_path: Path) -> None:
    [good] = bench.chunks(1)
    broken = make_wav(tmp_path / "zero.wav", 0)
    bad = [replace(good, chunk_id=f"bad{n}", audio_path=str(broken)) for n in range(25)]
    bench.start([*bad, good], ready=1)
    assert seconds_in(bench.stager.take(good).audio_path) == expected(good)
    assert bench.stager.failed_copies == 0
    bench.stager.release(good)


def test_on_a_full_disk_what_is_ready_for_others_makes_room_and_then_it_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    chunks = bench.chunks(50, length_s=10)  # 20 kB each
    with small_disk(tmp_path / "node", "256k") as disk:
        bench.start(chunks[:3], ready=2)
        bench.coming.clear()
        disk.fill()
        assert seconds_in(bench.stager.take(chunks[40]).audio_path) == expected(chunks[40])
        disk.fill()
        with pytest.raises(OSError) as refusal:
            bench.stager.take(chunks[41])
        assert refusal.value.errno == errno.ENOSPC
        disk.make_room()
        assert seconds_in(bench.stager.take(chunks[41]).audio_path) == expected(chunks[41])
        bench.stager.stop()


# --- around an engine -------------------------------------------------------------------------------------------------


def test_results_carry_the_chunk_as_it_was_and_no_cut_outlives_them(bench: Bench, tmp_path: Path) -> None:
    chunks = bench.chunks(3)
    heard: list[list[int]] = []

    def listen(given: Chunk) -> News:
        assert not given.is_cut
        heard.append(seconds_in(given.audio_path))
        return done(given)

    news = list(bench.session(listen, tmp_path).process(chunks))
    assert [one.chunk for one in news] == [chunk for chunk in chunks for _ in range(2)]
    assert heard == [expected(chunk) for chunk in chunks]
    assert bench.files == []


@pytest.mark.parametrize(
    ("problem", "error_class", "words"),
    [
        (CannotCut("night.wav has no audio in it"), "bad_audio", "night.wav has no audio in it"),
        (NoDecoder("no\npip install 'badcjobs[audio]'"), "no_program", "no\npip install 'badcjobs[audio]'"),
        (OSError(errno.ENOSPC, "No space left on device"), "no_space", "0 s to 5 s cannot be cut out: No space left"),
        (OSError(errno.EACCES, "Permission denied"), "bad_audio", "0 s to 5 s cannot be cut out: Permission denied"),
    ],
)
def test_a_chunk_that_cannot_be_cut_fails_alone_and_says_why(
    bench: Bench, tmp_path: Path, problem: Exception, error_class: str, words: str
) -> None:
    bad, *good = bench.chunks(3)
    bench.cutter.refusals = {0.0: problem}
    news = [one for one in bench.session(done, tmp_path).process([bad, *good]) if isinstance(one, ChunkResult)]
    assert {one.chunk.chunk_id: one.error_class for one in news} == {"c0": error_class, "c1000": None, "c2000": None}
    assert words in str(news[0].error) and news[0].charged
    assert bench.files == []


def test_what_an_engine_asks_for_later_is_cut_too_and_its_failure_told(bench: Bench, tmp_path: Path) -> None:
    first, second = bench.chunks(2)
    gone = replace(second, chunk_id="gone", audio_path=str(tmp_path / "gone.wav"))
    later = [second, gone]
    news = list(bench.session(done, tmp_path).process([first], lambda wanted, idle=0: later))
    assert {one.chunk.chunk_id: one.error_class for one in news if isinstance(one, ChunkResult)} == {
        "c0": None, "c1000": None, "gone": "missing_audio",
    }  # fmt: skip


def listed(chunk: Chunk) -> Chunk:
    status = Path(chunk.audio_path).stat()
    return replace(chunk, fingerprint=Fingerprint(status.st_size, status.st_mtime_ns))


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_recording_that_was_replaced_after_it_was_listed_is_not_mixed_with_the_old_one(
    bench: Bench, tmp_path: Path, is_cut: bool
) -> None:
    before, after = (replace(listed(chunk), is_cut=is_cut) for chunk in bench.chunks(2))
    session = bench.session(done, tmp_path)
    assert [one.error for one in session.process([before]) if isinstance(one, ChunkResult)] == [None]
    os.utime(bench.recording, ns=(1, 1))
    (result,) = session.process([after])
    assert isinstance(result, ChunkResult) and result.error_class == "bad_audio"
    assert result.error == f"{bench.recording} has changed since the work was listed; run the same command again"
    assert bench.files == []


def test_audio_that_is_missing_is_told_with_the_line_that_fetches_it(bench: Bench, tmp_path: Path) -> None:
    link = tmp_path / "night 2.wav"
    link.symlink_to(".git/annex/objects/x/y")
    chunk = replace(bench.chunks(1)[0], audio_path=str(link))
    (result,) = bench.session(done, tmp_path).process([chunk])
    assert isinstance(result, ChunkResult) and result.error_class == "missing_audio"
    assert result.error is not None and result.error.endswith(f"git -C {tmp_path} annex get 'night 2.wav'")


def test_an_error_names_the_recording_and_the_place_in_it(bench: Bench, tmp_path: Path) -> None:
    [_, chunk] = bench.chunks(2)
    session = bench.session(lambda given: replace(failed(given), error=f"cannot read {given.audio_path}!"), tmp_path)
    *_, last = session.process([chunk])
    assert isinstance(last, ChunkResult)
    assert last.error == f"cannot read {bench.recording} from 1 s to 6 s!"


def test_a_session_that_breaks_or_is_stopped_leaves_no_cut(bench: Bench, tmp_path: Path) -> None:
    def crash(given: Chunk) -> News:
        raise SessionBroken("engine_crash", f"died at {given.audio_path}")

    with pytest.raises(SessionBroken, match=r"night\.wav from 0 s to 5 s"):
        list(bench.session(crash, tmp_path).process(bench.chunks(2)))
    stopped = bench.session(done, tmp_path)
    stopped.interrupt()
    assert list(stopped.process(bench.chunks(2))) == [], "nothing new is cut for one that is to stop"
    assert bench.files == []


def test_hundreds_of_stretches_go_through_several_workers_each_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ahead=8)
    chunks = [replace(chunk, chunk_id=f"{n}.{chunk.chunk_id}") for n in range(5) for chunk in bench.chunks(50)]
    places = {chunk.chunk_id: expected(chunk) for chunk in chunks}
    notes = Notebook(chunks)

    def listen(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in [*batch, *session.more(2, idle=1)]:
            right = seconds_in(chunk.audio_path) == places[chunk.chunk_id]
            yield done(chunk) if right else failed(chunk)

    plans = [replace(PLAN, slot=slot) for slot in range(3)]
    supervisor = Supervisor(
        ScriptedEngine(listen, wants=2),
        plans,
        notes,
        clock=CLOCK,
        policy=RetryPolicy(),
        scratch=tmp_path / "scratch",
        audio=audio_steps(tmp_path, stager=bench.stager),
    )
    supervisor.start()
    bench.stager.start(supervisor.upcoming, most_bytes=60_000)
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    assert set(notes.status.values()) == {"done"} and len(notes.attempts) == 250
    assert bench.files == []
    bench.stager.stop()
    assert bench.stager.staged + bench.stager.cut_late == 250


# --- whether to cut ahead ---------------------------------------------------------------------------------------------


def test_local_recordings_are_cut_ahead_and_nothing_else_is_copied(bench: Bench) -> None:
    chunks = bench.chunks(2)
    local = choose_staging("auto", chunks, bench.recording.parent)
    assert (local.staged, local.only_cuts) == (True, True)
    never = choose_staging("never", chunks, bench.recording.parent)
    assert (never.staged, never.only_cuts) == (False, False)
    always = choose_staging("always", chunks, bench.recording.parent)
    assert (always.staged, always.only_cuts) == (True, False)
