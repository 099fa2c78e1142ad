from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event, Lock, get_ident
from threading import enumerate as enumerate_threads
from time import sleep

import pytest
from rooms.model import AudioHeader, Chunk
from rooms.planning import check_source
from rooms.root import BadInput
from rooms.sources import WHOLE, Mistakes, Remarks, Shard, Sources, look_ahead, open_sources, read_header, survey
from support.audio import make_wav
from support.powerless import powerless_folder
from support.waiting import wait_for

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(*names: str, root: Path | None = None, position: int | None = None) -> Sources:
    return open_sources([Path(name) for name in names], root=root, position=position)


def read(*names: str, shard: Shard = WHOLE, root: Path | None = None, position: int | None = None) -> list[Chunk]:
    return list(opened(*names, root=root, position=position).chunks(shard))


def ids(*names: str, root: Path | None = None, position: int | None = None) -> list[str]:
    return [chunk.recording_id for chunk in read(*names, root=root, position=position)]


def refusal(*names: str, root: Path | None = None, position: int | None = None) -> BadInput:
    with pytest.raises(BadInput) as refused:
        read(*names, root=root, position=position)
    return refused.value


def write_list(*lines: str, name: str = "list.txt") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return name


def write_manifest(name: str, *recording_ids: str) -> str:
    make_wav("a.wav")
    return write_list(HEADER, *(f"{recording_id},c,a.wav,0,1" for recording_id in recording_ids), name=name)


def test_a_folder_gives_its_audio_in_the_order_of_paths(work: Path) -> None:
    for name in ("b/2.wav", "b/1.FLAC", "b-c/1.WAV", "a.wav", "été/x.flac", "b/notes.csv", "b/readme.txt"):
        make_wav(work / "audio" / name)
    chunks = read("audio")
    assert [chunk.recording_id for chunk in chunks] == ["a", "b/1", "b/2", "b-c/1", "été/x"]
    assert chunks[1] == Chunk("b/1", "b/1", "b/1.FLAC", f"{work}/audio/b/1.FLAC", 0, 1000)
    assert chunks[1].name == "b/1"
    assert opened("audio/").descriptions == ("folder audio/ (WAV, FLAC)",)


def test_hidden_names_are_skipped_and_links_to_files_followed(work: Path) -> None:
    make_wav("audio/.hidden.wav")
    make_wav("audio/.git/x.wav")
    make_wav("elsewhere/real.wav", seconds=3)
    Path("audio/link.wav").symlink_to("../elsewhere/real.wav")
    Path("audio/loop").symlink_to(".")
    Path("audio/folder.wav").mkdir()
    make_wav("audio/folder.wav/._x.wav")
    Path("audio/.DS_Store").touch()
    Path("audio/circle").symlink_to("circle")
    remarks = Remarks()
    found = [(chunk.recording_id, chunk.end_ms) for chunk in opened("audio").chunks(WHOLE, remarks)]
    assert found == [("link", 3000)]
    said = ["3 hidden names are skipped (the first: .git/)", "1 link to a folder is not followed (the first: loop)"]
    assert remarks.notes() == said
    assert opened("audio").read_identities(lambda *_: None).notes() == said
    findings = check_source([Path("audio")], None, progress=lambda _: None)[1]
    assert [one.text for one in findings if one.severity == "fine"][1:] == said


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_a_check_names_files_that_are_empty_or_that_nobody_may_read(kind: str) -> None:
    names = ["good", "empty", "silent", "secret", "noise"]
    with powerless_folder() as folder:
        for name in names:
            make_wav(f"audio/{name}.wav", 0 if name == "silent" else 1, 100)
        Path("audio/empty.wav").write_bytes(b"")
        Path("audio/noise.wav").write_bytes(b"no header at all")
        Path("audio/secret.wav").chmod(0)
        rows = [f"{name},{name}{again},audio/{name}.wav,0,1000" for again in ("", "-2") for name in names]
        write_list(HEADER, *rows, name="manifest")
        facts, findings = check_source([Path("audio" if kind == "folder" else kind)], None, progress=lambda _: None)
    assert facts is not None
    assert (facts.chunks, facts.empty, facts.unreadable) == (5 if kind == "folder" else 10, 2, 1)
    unreadable, empty = (one for one in findings if one.subject == "audio")
    assert (unreadable.severity, empty.severity) == ("problem", "warning")
    assert unreadable.text.startswith("1 file cannot be read from here")
    below = "" if kind == "folder" else "audio/"
    assert unreadable.details == (f"{below}secret.wav: Permission denied",)
    assert unreadable.fix == f"ls -l {folder / 'audio' / 'secret.wav'}"
    assert empty.text.startswith("2 files without any audio")
    assert sorted(empty.details) == [f"{below}empty.wav", f"{below}silent.wav"]


@pytest.mark.parametrize("kind", ["folder", "list", "manifest"])
def test_files_are_looked_at_many_at_a_time_and_listed_in_their_order(work: Path, kind: str) -> None:
    names = [f"{number:03}" for number in range(120)]
    for name in names:
        make_wav(work / "audio" / f"{name}.wav", 1, 100)
    (work / "audio" / "005.wav").write_bytes(b"RIFF")
    write_list(*(f"audio/{name}.wav" for name in names), name="list")
    write_list(HEADER, *(f"audio/{name},audio/{name},audio/{name}.wav,0," for name in names), name="manifest")
    many, one_at_a_time, helpers = Event(), Lock(), set()

    def read_slowly(path: str) -> AudioHeader:
        with one_at_a_time:
            helpers.add(get_ident())
            alone = len(helpers) == 1
            if len(helpers) >= 8:
                many.set()
        if alone:  # until that takes long
            sleep(0.01)
            return read_header(path)
        assert many.wait(60), "not enough others look at a file at the same time"
        sleep(0.001 * (hash(path) % 5))  # the first is not always the first to be ready
        return read_header(path)

    sources = replace(opened("audio" if kind == "folder" else kind), read_header=read_slowly)
    chunks = list(sources.chunks(WHOLE))
    assert many.is_set()
    assert [chunk.recording_id.removeprefix("audio/") for chunk in chunks] == names
    assert [chunk.end_ms for chunk in chunks if chunk.end_ms != 1000] == [None]
    assert chunks[5].end_ms is None
    rows, walk = survey(sources, Mistakes([kind]))
    assert [row.end_ms for row in rows] == [chunk.end_ms for chunk in chunks]
    assert walk.measured == 120


def test_looking_ahead_is_bounded_stops_where_it_is_told_and_keeps_what_came_before_an_error() -> None:
    read = [0]

    def endless() -> Iterator[tuple[int, int]]:
        for read[0] in count():
            yield read[0], read[0]

    def helpers() -> int:
        return sum("look-ahead" in thread.name for thread in enumerate_threads())

    quick, slow = count(0, 0.0001), count(0, 0.01)  # clocks: each look takes so long
    go_on = Event()
    for ticks, hired in ((quick, False), (slow, True)):
        looking = look_ahead(endless(), abs, monotonic_s=lambda ticks=ticks: next(ticks))  # type: ignore[misc]
        assert [next(looking) for _ in range(3000)] == [(number, number) for number in range(3000)]
        assert 3000 < read[0] < 3000 + 600
        assert (helpers() > 1) is hired
        looking.close()
    wait_for(lambda: not helpers(), "an end of the threads")
    hanging = look_ahead(
        endless(), lambda n: go_on.wait(60) if n > 200 else True, monotonic_s=lambda: next(slow)
    )  # fmt: skip
    assert next(hanging) == (0, True)
    hanging.close()
    assert helpers() and not go_on.is_set(), "nobody waits for a look that hangs"
    go_on.set()
    wait_for(lambda: not helpers(), "an end of the threads")

    # One look that takes far too long is enough; and who waits may want to go.
    go_on.clear()
    clock, heard = [0.0], count(1)

    def hang(number: int) -> int:
        if number == 200:
            clock[0] += 0.6
        if number >= 200:
            go_on.wait(60)
        return number

    def heed() -> None:
        if helpers() > 1 and next(heard) > 5:  # more than there are errands under way: now we but wait
            raise KeyError("a signal came")

    seen, given = 0, look_ahead(endless(), hang, 2, monotonic_s=lambda: clock[0], while_waiting=heed)
    with pytest.raises(KeyError, match="a signal came"):
        for seen, _ in given:
            assert seen < 200
    assert seen and helpers() == 2 and not go_on.is_set()
    go_on.set()
    wait_for(lambda: not helpers(), "an end of the threads")

    def broken() -> Iterator[tuple[str, str | None]]:
        yield from [("a", "1"), ("b", None), ("c", "2")]
        raise OSError("the disk is gone")

    looked = look_ahead(broken(), int)
    assert [next(looked) for _ in range(3)] == [("a", 1), ("b", None), ("c", 2)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(looked)
    looked = look_ahead([("a", "1"), ("b", "x"), ("c", "2")], int)
    assert next(looked) == ("a", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        next(looked)


def test_quick_looks_are_handed_over_hundreds_at_a_time_for_each_hand_over_costs_more_than_one() -> None:
    read, hand_overs = [0], set()

    def asked() -> Iterator[tuple[int, int]]:
        for read[0] in range(5000):
            yield read[0], read[0]

    def look(number: int) -> int:
        hand_overs.add(read[0])  # nobody reads on while files are looked at
        return number

    found = list(look_ahead(asked(), look, monotonic_s=lambda: 0.0))
    assert found == [(number, number) for number in range(5000)]
    assert len(hand_overs) < 50


def test_two_recordings_that_differ_only_in_their_ending_keep_it(work: Path) -> None:
    for name in ("a.wav", "a.flac", "a.wav.wav", "b.wav", "s/b.WAV", "s/b.wav"):
        make_wav(work / "audio" / name)
    found = ["a.flac", "a.wav", "a.wav.wav", "b", "s/b.WAV", "s/b.wav"]
    assert ids("audio") == found
    assert ids(write_list(*(f"audio/{chunk.source_path}" for chunk in read("audio")))) == [f"audio/{i}" for i in found]


def test_the_shards_of_a_folder_are_disjoint_and_complete(work: Path) -> None:
    for number in range(11):
        make_wav(work / "audio" / f"{number:02}.wav")
    shares = [[chunk.recording_id for chunk in read("audio", shard=Shard(index, 3))] for index in range(3)]
    assert sorted(name for share in shares for name in share) == [f"{number:02}" for number in range(11)]
    assert [len(share) for share in shares] == [4, 4, 3]


def test_a_folder_without_audio_is_refused(work: Path) -> None:
    Path("audio").mkdir()
    assert refusal("audio").what == "audio contains no audio (WAV, FLAC)"


def test_a_link_to_nothing_is_a_mistake_of_the_shard_that_owns_it(work: Path) -> None:
    make_wav("audio/a.wav")
    Path("audio/b.wav").symlink_to("gone.wav")
    assert [chunk.recording_id for chunk in read("audio", shard=Shard(0, 2))] == ["a"]
    assert "a link to a file that does not exist: b.wav" in refusal("audio").what


def test_a_pipe_or_a_socket_in_a_folder_is_a_recording_that_fails_alone_and_nobody_opens_it(work: Path) -> None:
    make_wav("audio/a.wav")
    os.mkfifo("audio/pipe.wav")  # whoever opens it waits for ever
    os.mkfifo("audio/.hidden.wav")
    os.mkfifo("audio/notes.txt")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("audio/socket.flac")
    Path("audio/folder.wav").symlink_to(".")
    remarks = Remarks(keeps_missing=True)
    found = [(chunk.recording_id, chunk.audio_path, chunk.is_cut) for chunk in opened("audio").chunks(WHOLE, remarks)]
    odd = ["folder.wav", "pipe.wav", "socket.flac"]
    assert sorted(found) == [
        ("a", f"{work}/audio/a.wav", False),
        *((name.partition(".")[0], f"{work}/audio/{name}", True) for name in odd),
    ]
    assert remarks.missing == 3
    _, (finding,) = check_source([Path("audio")], None, progress=lambda _: None)
    assert finding.severity == "problem"
    assert finding.details == (
        "audio contains audio that cannot be used: a folder, not an audio file: folder.wav",
        *(
            f"audio contains audio that cannot be used: a pipe, a socket or a device, not an audio file: {name}"
            for name in odd[1:]
        ),
    )


def test_a_file_name_that_is_not_utf8_is_a_mistake(work: Path) -> None:
    make_wav("audio/a.wav")
    Path(os.fsdecode(b"audio/\xe9.wav")).touch()
    assert refusal("audio").what == r"audio contains a file whose name is not UTF-8: '\udce9.wav'"


def test_a_folder_we_may_not_read_is_a_mistake() -> None:
    with powerless_folder():
        make_wav("audio/a.wav")
        Path("audio/closed").mkdir(mode=0)
        assert refusal("audio").what == "audio contains a folder that cannot be read: closed/"


def test_equal_names_in_two_folders_are_refused_with_a_list_that_tells_them_apart(work: Path) -> None:
    make_wav("one/x.wav")
    make_wav("two/x.wav")
    refused = refusal("one", "two")
    assert refused.what == "two has recording 'x', which is already in one"
    assert refused.fix == "find one two -iname '*.wav' -o -iname '*.flac' | sort > recordings.txt"
    assert os.system(refused.fix) == 0
    assert ids("recordings.txt") == ["one/x", "two/x"]


def test_a_list_names_audio_relative_to_its_own_folder(work: Path) -> None:
    for name in ("data/s/ø.wav", "data/b.flac"):
        make_wav(work / name)
    write_list("# the good ones", "", "  s/ø.wav", "./b.flac\r", name="data/list.txt")
    chunks = read("data/list.txt")
    assert chunks[0] == Chunk("s/ø", "s/ø", "s/ø.wav", f"{work}/data/s/ø.wav", 0, 1000)
    assert (chunks[1].recording_id, chunks[1].audio_path) == ("b", f"{work}/data/b.flac")
    assert opened("data/list.txt").descriptions == ("list of audio data/list.txt",)


def test_ids_in_a_list_start_from_the_root_or_else_from_the_top(work: Path) -> None:
    make_wav("data/s/a.wav")
    make_wav("other/b.wav")
    write_list(f"{work}/data/s/a.wav", f"{work}/other/b.wav")
    assert ids("list.txt") == ["data/s/a", "other/b"]
    assert ids("list.txt", root=Path("data")) == ["s/a", f"{work}/other/b".lstrip("/")]
    write_list("s/a.wav", "../other/b.wav")
    assert ids("list.txt", root=Path("data")) == ["s/a", f"{work}/other/b".lstrip("/")]


def test_a_path_in_a_list_names_the_same_recording_wherever_it_is_found(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wav("data/s/a.wav")
    write_list("s/a.wav", name="data/list.txt")
    seen_from_above = ids("data/list.txt")
    monkeypatch.chdir(work / "data")
    assert ids("list.txt") == seen_from_above == ["s/a"]


def test_the_same_path_twice_in_a_list_is_a_mistake_however_it_is_written(work: Path) -> None:
    make_wav("a.wav")
    write_list("a.wav", "# again", "./a.wav")
    assert refusal("list.txt").why == "line 3: recording 'a.wav' is already on line 1"


def test_all_mistakes_of_a_list_are_told_at_once(work: Path) -> None:
    make_wav("a.wav")
    write_list("a.wav", "gone.wav", "m.csv", "song.mp3")
    refused = refusal("list.txt")
    assert refused.what == "list.txt has 3 mistakes"
    assert (refused.why or "").splitlines() == [
        "line 2: no such file: gone.wav",
        "line 3: 'm.csv' is not audio (.wav, .flac), unlike the first line",
        "line 4: 'song.mp3' is not audio (.wav, .flac), unlike the first line",
    ]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"# nothing\n\n", "lists nothing"),
        (b"song.mp3\n", "lists neither audio (.wav, .flac) nor manifests (.csv)"),
        (b"ID3\0\0\0", "is neither audio (.wav, .flac) nor text"),
        (b" \n", "is empty"),
    ],
)
def test_a_file_that_lists_nothing_we_know_is_refused(work: Path, content: bytes, what: str) -> None:
    Path("list.txt").write_bytes(content)
    assert refusal("list.txt").what == f"list.txt {what}"


def test_a_line_that_is_not_utf8_is_found_in_a_list_too(work: Path) -> None:
    make_wav("a.wav")
    Path("list.txt").write_bytes(b"a.wav\n\xe9.wav\n")
    assert "line 2: is not UTF-8" in (refusal("list.txt").why or "")


def test_recordings_can_be_named_themselves(work: Path) -> None:
    make_wav("data/s/a.wav")
    make_wav("data/t/a.wav")
    make_wav("data/t/a.flac")
    assert ids("data/s/a.wav") == ["a"]
    assert ids("data/s/a.wav", "data/t/a.wav", "data/s/a.wav") == ["s/a", "t/a"]
    assert ids("data/t/a.flac", "data/t/a.wav", root=work) == ["data/t/a.flac", "data/t/a.wav"]
    assert opened("data/s/a.wav").descriptions == ("audio data/s/a.wav",)


def test_outside_an_array_a_list_of_manifests_is_all_of_them_in_turn(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1", "r2"), write_manifest("two.csv", "r3"))
    sources = opened("list.txt")
    assert [chunk.recording_id for chunk in sources.chunks(WHOLE)] == ["r1", "r2", "r3"]
    assert [chunk.recording_id for chunk in sources.chunks(Shard(0, 2))] == ["r1", "r3"]
    assert (sources.picked_by_position, sources.manifests_listed) == (False, 2)


def test_in_an_array_the_position_picks_the_manifest_which_only_the_tasks_of_a_step_share(work: Path) -> None:
    write_manifest("data/one.csv", "r1", "r2")
    write_list("# comments do not count", "gone.csv", "one.csv", name="data/list.txt")
    sources = opened("data/list.txt", position=1)
    assert (sources.picked_by_position, sources.manifests_listed) == (True, 2)
    assert [chunk.recording_id for chunk in sources.chunks(WHOLE)] == ["r1", "r2"]
    assert [chunk.recording_id for chunk in sources.chunks(Shard(1, 2))] == ["r2"]
    assert sources.descriptions == ("manifest data/one.csv (line 3 of data/list.txt)",)
    assert refusal("data/list.txt").why == "line 2: no such manifest: gone.csv"


@pytest.mark.parametrize("position", [2, -1, 100])
def test_a_position_outside_the_list_names_both_numbers_and_the_right_array(work: Path, position: int) -> None:
    write_list(write_manifest("one.csv", "r1"), write_manifest("two.csv", "r2"))
    refused = refusal("list.txt", position=position)
    assert refused.what == f"list.txt has no manifest for position {position}: it lists 2 manifests"
    assert refused.fix == "#SBATCH --array=0-1"


def test_a_position_changes_nothing_for_other_sources(work: Path) -> None:
    make_wav("audio/a.wav")
    make_wav("audio/b.wav")
    sources = opened("audio", position=7)
    assert (sources.picked_by_position, sources.manifests_listed) == (False, None)
    assert [chunk.recording_id for chunk in sources.chunks(Shard(1, 2))] == ["b"]


def test_a_list_of_manifests_may_hold_nothing_else_and_nothing_twice(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1"), "a.wav", "one.csv")
    assert (refusal("list.txt").why or "").splitlines() == [
        "line 2: 'a.wav' is not a manifest (.csv), unlike the first line",
        "line 3: 'one.csv' is already on line 1",
    ]


def test_a_list_of_manifests_has_to_be_the_only_source(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1"))
    assert refusal("list.txt", "one.csv").what == "list.txt is a list of manifests, which must be the only SOURCE"


def test_a_chunk_in_two_listed_manifests_is_found(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1"), write_manifest("two.csv", "r1"))
    assert refusal("list.txt").why == "line 2: chunk id 'c' of recording 'r1' is already on line 2 of one.csv"
