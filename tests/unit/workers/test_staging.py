"""Copies of the audio on the node: the right ones, not too many, never waited for, and none left."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter
from rooms.workers import Copy, RetryPolicy, Stager, Supervisor, make_copy
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
PLAN = WorkerPlan(slot=0, device=None, device_id=None, threads=1)


class Bench:
    """Audio of known content, a stager, and the list of what comes next."""

    def __init__(self, folder: Path, *, ahead: int = 100) -> None:
        self.audio = folder / "far away"
        self.node = folder / "node" / "staged"
        self.coming: list[Chunk] = []
        self.stager = Stager(self.node, ahead=ahead, cutter=AudioCutter(None))

    def chunks(self, count: int, size_bytes: int = 1000) -> list[Chunk]:
        self.audio.mkdir(exist_ok=True)
        made = []
        for number in range(count):
            path = self.audio / f"c{number}.wav"
            path.write_bytes(bytes([number % 256]) * size_bytes)
            made.append(Chunk("r", f"c{number}", path.name, str(path), 0, 1000))
        return made

    def start(self, coming: Sequence[Chunk], *, most_bytes: int = PLENTY, ready: int | None = None) -> None:
        self.coming[:] = coming
        self.stager.start(lambda count: self.coming[:count], most_bytes=most_bytes)
        expected = len(coming) if ready is None else ready
        wait_for(lambda: self.stager.ready >= expected, f"{expected} are ready")

    def take(self, chunk: Chunk) -> Chunk:
        self.coming[:] = [other for other in self.coming if other.key != chunk.key]
        return self.stager.take(chunk)

    @property
    def copies(self) -> list[Path]:
        found = [Path(folder, name) for folder, _, names in os.walk(self.node) for name in names]
        return sorted(found, key=lambda path: path.name)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.stager.stop()
    assert not bench.node.exists(), "copies are left"


# --- what is copied ---------------------------------------------------------------------------------------------------


def test_what_comes_next_lies_on_the_node_under_its_own_name(bench: Bench) -> None:
    chunks = bench.chunks(5)
    bench.start(chunks)
    for chunk in chunks:
        given = bench.take(chunk)
        assert Path(given.audio_path).is_relative_to(bench.node)
        assert Path(given.audio_path).name == Path(chunk.audio_path).name
        assert Path(given.audio_path).read_bytes() == Path(chunk.audio_path).read_bytes()
        assert replace(given, audio_path=chunk.audio_path) == chunk
    assert (bench.stager.staged, bench.stager.staged_bytes, bench.stager.from_source) == (5, 5000, 0)


def test_two_files_of_one_name_do_not_get_in_each_others_way(bench: Bench) -> None:
    first, second = bench.chunks(2)
    other = bench.audio / "july" / "c0.wav"
    other.parent.mkdir()
    other.write_bytes(b"july")
    second = replace(second, audio_path=str(other))
    bench.start([first, second])
    assert Path(bench.take(first).audio_path).read_bytes() == bytes(1000)
    assert Path(bench.take(second).audio_path).read_bytes() == b"july"


def test_a_git_annex_link_is_copied_under_the_name_of_the_link(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    link = bench.audio / "night.wav"
    link.symlink_to(chunk.audio_path)
    bench.start([replace(chunk, audio_path=str(link))])
    [copy] = bench.copies
    assert copy.name == "night.wav" and not copy.is_symlink() and copy.read_bytes() == bytes(1000)


def test_a_copy_goes_when_its_chunk_has_a_result(bench: Bench) -> None:
    chunks = bench.chunks(3)
    bench.start(chunks)
    for left, chunk in zip((2, 1, 0), chunks, strict=True):
        bench.take(chunk)
        assert len(bench.copies) == left + 1, "an engine is at it"
        assert bench.stager.release(chunk)
        assert len(bench.copies) == left
    assert list(bench.node.iterdir()) == []


# --- how much ---------------------------------------------------------------------------------------------------------


def test_only_so_many_chunks_are_copied_ahead_and_more_when_half_of_them_are_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ahead=8)
    chunks = bench.chunks(30)
    bench.start(chunks, ready=8)
    time.sleep(0.3)
    assert [path.name for path in bench.copies] == [f"c{n}.wav" for n in range(8)]
    for chunk in chunks[:4]:
        assert bench.take(chunk) != chunk
    wait_for(lambda: bench.stager.ready == 8, "eight are ready")
    assert len(bench.copies) == 12, "four in work, eight ahead"
    bench.stager.stop()


def test_all_copies_together_stay_below_the_limit_and_go_on_when_there_is_room(bench: Bench) -> None:
    chunks = bench.chunks(10, size_bytes=1000)
    bench.start(chunks, most_bytes=3500, ready=3)
    time.sleep(0.3)
    assert len(bench.copies) == 3
    for chunk in chunks:
        given = bench.take(chunk)
        assert sum(path.stat().st_size for path in bench.copies) <= 3500
        bench.stager.release(given)
        wait_for(lambda: bench.stager.ready >= min(3, len(bench.coming)), "three are ready")
    tally = bench.stager  # nobody waits for a copy: on a busy machine one or another is not ready when it is wanted
    assert tally.staged + tally.from_source == 10
    assert tally.staged >= 7


def test_no_more_than_a_quarter_of_the_free_space_is_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    chunks = bench.chunks(30, size_bytes=100_000)
    with small_disk(tmp_path / "node", "4m") as disk:
        free = disk.free_bytes
        bench.start(chunks, ready=9)
        time.sleep(0.5)
        held = sum(path.stat().st_size for path in bench.copies)
        assert free // 4 - 200_000 <= held <= free // 4
        bench.stager.stop()
        assert disk.free_bytes == free


def test_a_file_that_is_too_large_is_read_where_it_lies_and_holds_nobody_up(bench: Bench) -> None:
    large, *others = bench.chunks(4)
    Path(large.audio_path).write_bytes(bytes(10_000))
    bench.start([large, *others], most_bytes=5000, ready=3)
    assert bench.take(large) == large
    assert all(bench.take(chunk) != chunk for chunk in others)
    assert bench.stager.failed_copies == 0


# --- a favour, not a condition ----------------------------------------------------------------------------------------


def test_a_chunk_that_nobody_announced_is_read_where_it_lies_at_once(bench: Bench) -> None:
    chunks = bench.chunks(2)
    bench.start(chunks[:1])
    assert bench.take(chunks[1]) == chunks[1]
    assert bench.stager.from_source == 1
    assert bench.stager.release(chunks[1]), "there is nothing to remove"


def test_a_stager_that_was_never_started_hands_out_originals(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    assert bench.take(chunk) == chunk


def test_audio_that_cannot_be_copied_is_nobodys_failure(bench: Bench) -> None:
    good, gone, folder = bench.chunks(3)
    Path(gone.audio_path).unlink()
    Path(folder.audio_path).unlink()
    Path(folder.audio_path).mkdir()
    bench.start([gone, folder, good], ready=1)
    wait_for(lambda: bench.stager.failed_copies == 2, "two failures")
    assert [bench.take(chunk) for chunk in (gone, folder)] == [gone, folder]
    assert bench.take(good) != good
    assert str(bench.audio) in str(bench.stager.last_failure)


def test_a_disk_that_takes_nothing_ends_the_copying_with_one_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = bench.chunks(60)
    for chunk in chunks:
        Path(chunk.audio_path).unlink()
    bench.start(chunks, ready=0)
    wait_for(lambda: caplog.records, "a warning")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "staging stops after 20 failed copies in a row: " in caplog.text and "No such file" in caplog.text
    assert bench.take(chunks[50]) == chunks[50]


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    [chunk] = bench.chunks(1)
    (tmp_path / "node").write_text("a file in the way")
    bench.start([chunk], ready=0)
    assert "audio is not staged: " in caplog.text
    assert bench.take(chunk) == chunk
    bench.stager.stop()


def test_a_file_whose_length_is_not_what_was_said_is_no_copy(tmp_path: Path) -> None:
    # What /proc says of its files' sizes is never true: as with a file that is still being written.
    (tmp_path / "a.wav").write_bytes(b"audio")
    for audio, is_copy in (("/proc/self/status", False), (str(tmp_path / "a.wav"), True)):
        copy = Copy(Chunk("r", "c", "a.wav", audio), tmp_path / f"copy-{is_copy}" / "a.wav")
        assert make_copy(copy, AudioCutter(None)) is is_copy


def test_a_copy_that_was_swept_away_is_not_handed_out(bench: Bench) -> None:
    first, second = bench.chunks(2)
    bench.start([first, second])
    for path in bench.copies[:1]:
        path.unlink()
    bench.copies[0].write_bytes(b"cut")
    assert [bench.take(first), bench.take(second)] == [first, second]


def test_a_piece_of_a_chunk_never_gets_the_copy_of_the_whole(bench: Bench) -> None:
    [chunk] = bench.chunks(1)
    bench.start([chunk])
    piece = replace(chunk, audio_path=str(bench.audio / "first half.wav"))
    assert bench.take(piece) == piece


def test_a_failure_with_the_original_is_charged_though_its_copy_was_swept_away(bench: Bench, tmp_path: Path) -> None:
    [chunk] = bench.chunks(1)
    bench.start([chunk])
    bench.copies[0].unlink()
    news = run_session(bench, failed, [chunk], tmp_path)
    assert isinstance(news[-1], ChunkResult) and news[-1].charged


# --- around an engine -------------------------------------------------------------------------------------------------


def run_session(bench: Bench, script: Callable[[Chunk], News], batch: Sequence[Chunk], tmp_path: Path) -> list[News]:
    def play(session: ScriptedSession, given: Sequence[Chunk]) -> Iterator[News]:
        for chunk in given:
            yield ChunkStarted(chunk, 0)
            yield script(chunk)

    session = open_feed(ScriptedEngine(play), PLAN, tmp_path, audio_steps(tmp_path, stager=bench.stager))
    bench.coming.clear()
    return list(session.process(batch))


def test_results_carry_the_original_chunk_and_the_engine_reads_the_copy(bench: Bench, tmp_path: Path) -> None:
    chunks = bench.chunks(3)
    bench.start(chunks)
    seen: list[str] = []

    def look(chunk: Chunk) -> News:
        seen.append(chunk.audio_path)
        return done(chunk)

    news = run_session(bench, look, chunks, tmp_path)
    assert [one.chunk for one in news] == [chunk for chunk in chunks for _ in range(2)]
    assert all(Path(path).is_relative_to(bench.node) for path in seen)
    assert bench.copies == []


def test_an_error_names_the_file_that_people_know(bench: Bench, tmp_path: Path) -> None:
    [chunk] = bench.chunks(1)
    bench.start([chunk])
    news = run_session(
        bench, lambda given: replace(failed(given), error=f"{given.audio_path}: no audio"), [chunk], tmp_path
    )
    assert isinstance(news[-1], ChunkResult)
    assert (news[-1].error, news[-1].charged) == (f"{chunk.audio_path}: no audio", True)


def test_a_failure_with_a_copy_that_was_spoilt_is_not_charged_and_the_next_try_reads_the_original(
    bench: Bench, tmp_path: Path
) -> None:
    [chunk] = bench.chunks(1)
    bench.start([chunk])

    def spoil(given: Chunk) -> News:
        shutil.rmtree(bench.node)
        return failed(given, "bad_audio")

    news = run_session(bench, spoil, [chunk], tmp_path)
    assert isinstance(news[-1], ChunkResult) and not news[-1].charged
    bench.node.mkdir()
    bench.coming[:] = [chunk]
    time.sleep(0.5)
    assert bench.take(chunk) == chunk


def test_a_session_that_breaks_gives_its_copies_back_and_speaks_of_the_original(bench: Bench, tmp_path: Path) -> None:
    chunks = bench.chunks(3)
    bench.start(chunks)

    def crash(given: Chunk) -> News:
        raise SessionBroken("engine_crash", f"died at {given.audio_path}", at_start=False)

    with pytest.raises(SessionBroken, match=f"died at {chunks[0].audio_path}$"):
        run_session(bench, crash, chunks, tmp_path)
    assert bench.copies == []


def test_hundreds_of_chunks_go_through_several_workers_each_with_its_own_audio(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ahead=16)
    chunks = bench.chunks(300)
    notes = Notebook(chunks)
    paths: list[str] = []

    def listen(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in [*batch, *session.more(2, idle=1)]:
            number = int(chunk.chunk_id[1:])
            paths.append(chunk.audio_path)
            right = Path(chunk.audio_path).read_bytes() == bytes([number % 256]) * 1000
            time.sleep(0.001)
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
    bench.stager.start(supervisor.upcoming, most_bytes=PLENTY)
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    assert set(notes.status.values()) == {"done"} and len(notes.attempts) == 300
    assert bench.copies == [], "each was removed with its result"
    bench.stager.stop()
    tally = bench.stager
    assert tally.staged + tally.from_source == 300
    assert tally.staged == sum(Path(path).is_relative_to(bench.node) for path in paths) > 150
