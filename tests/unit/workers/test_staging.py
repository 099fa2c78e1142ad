"""Audio on the node: copied or cut before it is wanted, not too much of it, never waited for, and none left."""

import errno
import os
import shutil
import threading
import wave
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Code, Fingerprint, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut, NoDecoder
from rooms.workers import Stager, State, choose_staging, find_most_bytes
from support.audio import make_wav
from support.cases import read_lines
from support.filesystems import small_disk
from support.supervised import ScriptedEngine, audio_steps, done, failed, open_feed
from support.waiting import wait_for

PLENTY, RATE = 10**9, 1000
PLAN = WorkerPlan(slot=0, device=None, device_id=None, threads=1)


class Cutter(AudioCutter):
    """A cutter that may be made to wait, as on a filesystem far away, counts what it cuts, and may refuse."""

    def __init__(self):
        super().__init__(None)
        self.go_on = threading.Event()
        self.go_on.set()
        self.cuts = []
        self.refusals = {}  # by the begin of a stretch

    def cut(self, source, start_s, end_s, target):
        self.cuts.append(start_s)
        self.go_on.wait(5)
        if start_s in self.refusals:
            raise self.refusals[start_s]
        super().cut(source, start_s, end_s, target)


class Bench:
    """Files of known content, a recording whose n-th second is n loud, a stager, and the list of what comes next."""

    def __init__(self, folder, *, ahead=100):
        self.folder, self.node, self.audio = folder, folder / "node" / "staged", folder / "far away"
        self.audio.mkdir()
        self.recording = self.audio / "night.wav"
        with wave.open(str(self.recording), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(b"".join(second.to_bytes(2, "little") * RATE for second in range(60)))
        self.coming, self.cutter = [], Cutter()
        self.stager = Stager(self.node, ahead=ahead, cutter=self.cutter)

    def files(self, count, size_bytes=1000):
        paths = [self.audio / f"c{number}.wav" for number in range(count)]
        for number, path in enumerate(paths):
            path.write_bytes(bytes([number % 256]) * size_bytes)
        return [Chunk("r", path.stem, path.name, str(path), 0, 1000) for path in paths]

    def cuts(self, count, length_s=5):
        path, spans = str(self.recording), [(n * 1000, (n + length_s) * 1000) for n in range(count)]
        return [Chunk("r", f"s{start}", "night.wav", path, start, end, is_cut=True) for start, end in spans]

    def start(self, coming, *, most_bytes=PLENTY, ready=None, only_cuts=False):
        self.coming[:] = coming
        self.stager.start(lambda count: self.coming[:count], only_cuts=only_cuts, most_bytes=most_bytes)
        self.wait(len(coming) if ready is None else ready)

    def wait(self, ready):
        copies = self.stager._copies
        wait_for(lambda: [one.state for one in [*copies.values()]].count(State.READY) >= ready, f"{ready} are ready")

    def take(self, chunk):
        self.coming[:] = [other for other in self.coming if other.key != chunk.key]
        return self.stager.take(chunk)

    @property
    def copies(self):
        found = [Path(folder, name) for folder, _, names in os.walk(self.node) for name in names]
        return sorted(found, key=lambda path: path.name)

    @property
    def held(self):
        return sum(path.stat().st_size for path in self.copies)

    def session(self, script):
        def play(session, given):
            for chunk in [*given, *session.more(2, idle=1)]:
                yield ChunkStarted(chunk, 0)
                yield script(chunk)

        return open_feed(ScriptedEngine(play), PLAN, self.folder, audio_steps(self.folder, stager=self.stager))

    def results(self, script, batch):
        self.coming.clear()
        return [one for one in self.session(script).process(batch) if isinstance(one, ChunkResult)]


def content_of(chunk):
    """Return the bytes of a file, or which seconds of the recording are in it."""
    data = Path(chunk.audio_path).read_bytes()
    if not data.startswith(b"RIFF"):
        return data
    assert len(data[44:]) % (2 * RATE) == 0
    return [data[at] for at in range(44, len(data), 2 * RATE)]


def expected(chunk):
    stretch = list(range(chunk.start_ms // 1000, chunk.end_ms // 1000))
    return stretch if chunk.is_cut else Path(chunk.audio_path).read_bytes()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.cutter.go_on.set()
    bench.stager.stop()
    assert not bench.node.exists(), "copies are left"


FAR = Chunk("r", "far", "status", "/proc/self/status")  # proc: not known to be local, so treated as shared


def test_audio_is_copied_from_a_shared_filesystem_to_a_disk_of_the_node(short_path, pages):
    audio, lines, places = short_path / "audio", [], {"node": short_path / "node", "proc": Path("/proc")}
    with small_disk(places["node"]), small_disk(audio):
        chunks = {name: Chunk("r", name, name, str(audio / name)) for name in ("near", "link", "loop")}
        chunks |= {"far": FAR, "cut": replace(chunks["near"], chunk_id="cut", is_cut=True)}
        (audio / "link").symlink_to("/proc/self/status")
        (audio / "loop").symlink_to("loop")
        for case in read_lines("staging_choices.txt"):
            wanted, names, local = case.split(" | ")
            decision = choose_staging(wanted, [chunks[name] for name in names.split()], places[local])
            what = {Code.STAGE_CUTS: "only cuts", Code.STAGE_ALL: "all"}.get(decision.code, "nothing")
            most_bytes = find_most_bytes(places[local])
            lines.append(f"{wanted}: {names} to {local}: {what}, at most {most_bytes} bytes: {decision.reason}")
    said = "\n".join(lines).replace(str(short_path), "/…").replace(str(os.getpid()), "self")
    pages({"choices.txt": said})


def test_what_comes_next_lies_on_the_node_under_its_own_name_and_goes_with_its_chunk(bench):
    first, second, third = bench.files(3)
    other, link = bench.audio / "july" / "c0.wav", bench.audio / "link.wav"
    other.parent.mkdir()
    other.write_bytes(b"july")
    link.symlink_to(third.audio_path)
    chunks = [first, replace(second, audio_path=str(other)), replace(third, audio_path=str(link)), *bench.cuts(3)]
    bench.start(chunks)
    names = []
    for number, chunk in enumerate(chunks, 1):
        given = bench.take(chunk)
        path = Path(given.audio_path)
        names.append(path.name)
        assert path.is_relative_to(bench.node) and not path.is_symlink() and content_of(given) == expected(chunk)
        assert not given.is_cut
        assert replace(given, audio_path=chunk.audio_path, is_cut=chunk.is_cut) == chunk, "its place stays what it was"
        assert bench.stager.release(chunk) and len(bench.copies) == 6 - number
    cuts = ("night~0-5000.wav", "night~1000-6000.wav", "night~2000-7000.wav")
    assert names == ["c0.wav", "c0.wav", "link.wav", *cuts]
    tally = bench.stager
    assert (tally.staged, tally.from_source, tally.cut_late) == (6, 0, 0)


def test_only_so_many_are_copied_ahead(tmp_path):
    bench = Bench(tmp_path, ahead=8)
    chunks = bench.files(30)
    bench.start(chunks, ready=8)
    assert [path.name for path in bench.copies] == [f"c{n}.wav" for n in range(8)]
    for chunk in chunks[:4]:
        assert bench.take(chunk) != chunk
    bench.wait(8)
    assert len(bench.copies) == 12, "four in work, eight ahead"
    bench.stager.stop()


def test_all_copies_together_stay_below_the_limit_and_what_cannot_be_one_holds_nobody_up(bench):
    large, *chunks = bench.files(11)
    Path(large.audio_path).write_bytes(bytes(10_000))
    bench.start([large, *chunks], most_bytes=3000, ready=3)
    assert bench.take(large) == large
    for number, chunk in enumerate(chunks):
        bench.wait(min(3, 10 - number))
        given = bench.take(chunk)
        assert bench.held <= 3000
        bench.stager.release(given)
    tally = bench.stager  # no one waits for a copy: one or another may not be ready when it is wanted
    assert tally.staged + tally.from_source == 11 and tally.staged >= 7


def test_no_more_than_a_quarter_of_the_free_space_is_taken(tmp_path):
    bench = Bench(tmp_path)
    with small_disk(tmp_path / "node", "4m") as disk:
        free = disk.free_bytes
        bench.start(bench.files(30, size_bytes=100_000), ready=9)
        assert free // 4 - 200_000 <= bench.held <= free // 4
        bench.stager.stop()
        assert disk.free_bytes == free


def test_only_cuts_leaves_whole_files_where_they_are(bench):
    whole, (cut, later) = Chunk("r", "all", "night.wav", str(bench.recording), 0, 60_000), bench.cuts(2)
    bench.start([whole, cut, later], ready=2, only_cuts=True)
    assert [path.name for path in bench.copies] == ["night~0-5000.wav", "night~1000-6000.wav"]
    assert bench.take(whole) == whole


def test_what_nobody_announced_or_started_is_read_where_it_lies_at_once_and_cut_when_it_is_wanted(bench):
    files = bench.files(2)
    for _ in ("not started", "not announced"):
        assert bench.take(files[1]) == files[1] and bench.stager.release(files[1]), "there is nothing to remove"
        given = bench.take(bench.cuts(1)[0])
        assert content_of(given) == [0, 1, 2, 3, 4] and len(bench.copies) in (1, 2)
        bench.stager.release(bench.cuts(1)[0])
        if not bench.coming:
            bench.start(files[:1])
    assert (bench.stager.from_source, bench.stager.cut_late) == (2, 2)


def test_a_cut_in_progress_is_waited_for_and_one_that_waits_for_room_is_made_at_once(bench):
    first, second, third = bench.cuts(3)
    bench.cutter.go_on.clear()
    bench.start([first], most_bytes=11_000, ready=0)  # one of them is 10,044 bytes
    wait_for(lambda: bench.cutter.cuts, "a cut")
    bench.coming[:] = [first, second, third]
    threading.Timer(0.1, bench.cutter.go_on.set).start()
    assert content_of(bench.take(first)) == expected(first) and bench.cutter.cuts == [0.0], "not made twice"
    assert content_of(bench.take(second)) == expected(second)
    bench.coming.clear()
    assert bench.stager.cut_late == 1
    for chunk in (first, second):
        bench.stager.release(chunk)


def test_what_cannot_be_copied_is_nobodys_failure_until_twenty_in_a_row(bench, caplog, tmp_path):
    good, *gone = bench.files(60)
    for chunk in gone:
        Path(chunk.audio_path).unlink()
    zero = make_wav(bench.audio / "zero.wav", 0)
    [cut] = bench.cuts(1)
    no_cuts = [replace(cut, chunk_id=f"bad{n}", audio_path=str(zero)) for n in range(25)]
    bench.start([*gone[:19], *no_cuts, good], ready=1)
    wait_for(
        lambda: {one.key for one in gone[:19]} <= bench.stager._not_copied, "all that cannot be copied have failed"
    )
    assert caplog.records == [] and bench.take(good) != good, "what cannot be cut is the fault of the recording"
    bench.coming[:] = gone[19:]
    wait_for(lambda: caplog.records, "a warning")
    assert "staging stops after 20 failed copies in a row: " in caplog.text and len(caplog.records) == 1
    assert bench.take(gone[50]) == gone[50]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "node").write_text("a file in the way")
    (other := Bench(tmp_path / "b")).start([good], ready=0)
    assert "audio is not staged: " in caplog.text and other.take(good) == good
    other.stager.stop()


def test_what_is_not_all_there_is_cut_as_far_as_it_goes_only_if_its_header_promised_more(bench, pages):
    [chunk], said = bench.cuts(1), ["# all of 60 s are there; recorders are not exact"]

    def cut(start_s, end_s):
        stretch = replace(chunk, start_ms=round(start_s * 1000), end_ms=round(end_s * 1000))
        try:
            given = bench.take(stretch)
            heard = f"seconds {content_of(given)}, to {given.end_ms} ms, {given.audio_s} s"
        except CannotCut as error:
            heard = f"{type(error).__name__}: {error}"
        said.append(f"{start_s}-{end_s} s: {heard}")
        bench.stager.release(stretch)

    for start_s, end_s in [(57, 62), (70, 75), (55, 60.9), (55, 61), (55, 61.001)]:
        cut(start_s, end_s)
    with bench.recording.open("r+b") as file:
        file.truncate(44 + 2 * RATE * 58)
    bench.start([replace(chunk, start_ms=55_000, end_ms=60_000)])
    said.append("# the header says 60 s, there are 58; the first is cut ahead")
    for start_s, end_s in [(55, 60), (55, 60), (58, 60), (55, 65)]:
        cut(start_s, end_s)
    assert bench.copies == []
    pages({"cuts.txt": "\n".join(said).replace(str(bench.audio), "/…")})


def test_on_a_full_disk_what_is_ready_for_others_makes_room_and_then_it_is_said(tmp_path):
    bench = Bench(tmp_path)
    chunks = bench.cuts(50, length_s=10)  # 20 kB each
    with small_disk(tmp_path / "node", "256k") as disk:
        bench.start(chunks[:3], ready=2)
        bench.coming.clear()
        for number in (40, 41):
            disk.fill()
            with pytest.raises(OSError) as refusal:
                bench.stager.take(chunks[number])
            assert refusal.value.errno == errno.ENOSPC
            bench.stager.drop()
            if number == 40:
                assert content_of(bench.stager.take(chunks[40])) == expected(chunks[40])
        disk.make_room()
        assert content_of(bench.stager.take(chunks[41])) == expected(chunks[41])
        bench.stager.stop()


def test_results_and_errors_carry_the_chunk_as_it_was_and_no_copy_outlives_them(bench):
    files, cuts = bench.files(2), bench.cuts(3)
    bench.start([*files, cuts[0]])
    given = []

    def listen(chunk):
        assert not chunk.is_cut and Path(chunk.audio_path).is_relative_to(bench.node)
        given.append(replace(chunk, audio_path=str(content_of(chunk))))
        return replace(failed(chunk), error=f"cannot read {chunk.audio_path}!") if len(given) in (2, 4) else done(chunk)

    def crash(given):
        raise SessionBroken("engine_crash", f"died at {given.audio_path}")

    results = bench.results(listen, [*files, *cuts])
    assert [one.chunk for one in results] == [*files, *cuts]
    assert [one.audio_path for one in given] == [str(expected(one)) for one in [*files, *cuts]]
    name, what = files[1].audio_path, "it does not begin like any audio format"
    assert [(one.error_class, one.error, one.charged) for one in results if one.error] == [
        ("not_audio", f"cannot read {name}!\n{name}: {what}", True),
        ("exit_code", f"cannot read {bench.recording} from 1 s to 6 s!", True),
    ]
    for chunks, what in ((files, f"{files[0].audio_path}$"), (cuts, r"night\.wav from 0 s to 5 s")):
        with pytest.raises(SessionBroken, match=f"died at .*{what}"):
            bench.results(crash, chunks)
    stopped = bench.session(done)
    stopped.interrupt()
    assert list(stopped.process(cuts)) == [], "nothing new is cut for one that is to stop"
    assert bench.copies == []


def test_a_copy_that_was_spoilt_is_not_handed_out_and_a_failure_with_one_is_not_charged(bench):
    (first, second, third), [cut] = bench.files(3), bench.cuts(1)
    bench.start([first, second, third, cut])
    bench.copies[0].write_bytes(b"cut")
    for copy in (bench.copies[1], bench.copies[3]):
        copy.unlink()
    assert [bench.take(first), bench.take(second)] == [first, second]
    assert content_of(bench.take(cut)) == expected(cut), "it is made again"
    bench.stager.release(cut)

    def spoil(given):
        shutil.rmtree(bench.node)
        return failed(given, "bad_audio")

    assert [one.charged for one in bench.results(spoil, [third])] == [False]
    assert [one.charged for one in bench.results(failed, [second])] == [True], "that was the original"
    bench.node.mkdir()
    bench.coming[:] = [third, cut]
    bench.wait(1)
    assert [path.name for path in bench.copies] == ["night~0-5000.wav"] and bench.take(third) == third


def test_a_chunk_that_cannot_be_cut_or_was_replaced_after_it_was_listed_fails_alone_and_says_why(bench, pages):
    bad, good, later = bench.cuts(3)
    gone = replace(later, chunk_id="gone", audio_path=str(bench.folder / "night 2.wav"))
    Path(gone.audio_path).symlink_to(".git/annex/objects/x/y")
    lines = []

    def reported(name, *batch, more=()):
        bench.coming.clear()
        events = bench.session(done).process(batch, lambda wanted, idle=0: [*more])
        results = [one for one in events if isinstance(one, ChunkResult)]
        lines.append(f"# {name}")
        lines.extend(f"{one.chunk.chunk_id}: {one.error_class}, charged {one.charged}: {one.error}" for one in results)
        assert bench.copies == []

    for problem in [
        CannotCut("night.wav has no audio in it"), NoDecoder("it needs ffmpeg"),
        OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied"),
    ]:  # fmt: skip
        bench.cutter.refusals = {0.0: problem}
        reported(type(problem).__name__, bad, good, more=[later, gone])
    bench.cutter.refusals = {}
    status = bench.recording.stat()
    listed = replace(good, fingerprint=Fingerprint(status.st_size, status.st_mtime_ns))
    for name in ("as it was listed", "replaced"):
        for is_cut in (True, False):
            reported(f"{name}, {'cut' if is_cut else 'whole'}", replace(listed, is_cut=is_cut))
        os.utime(bench.recording, ns=(1, 1))
    pages({"results.txt": "\n".join(lines).replace(str(bench.folder), "/…")})
