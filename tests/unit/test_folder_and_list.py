from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.audio import make_wav
from support.powerless import powerless_folder

from badcjobs.errors import BadInput
from badcjobs.manifest import WHOLE, Shard, Sources, open_sources
from badcjobs.model import Chunk

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
    assert [(chunk.recording_id, chunk.end_ms) for chunk in read("audio")] == [("link", 3000)]


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
    assert refusal("audio").what == "audio has no audio below it (WAV, FLAC)"


def test_a_link_to_nothing_is_a_mistake_of_the_shard_that_owns_it(work: Path) -> None:
    make_wav("audio/a.wav")
    Path("audio/b.wav").symlink_to("gone.wav")
    assert [chunk.recording_id for chunk in read("audio", shard=Shard(0, 2))] == ["a"]
    assert "a link to a file that does not exist: b.wav" in refusal("audio").what


def test_a_file_name_that_is_not_utf8_is_a_mistake(work: Path) -> None:
    make_wav("audio/a.wav")
    Path(os.fsdecode(b"audio/\xe9.wav")).touch()
    assert refusal("audio").what == r"audio has a file whose name is not UTF-8: '\udce9.wav'"


def test_a_folder_we_may_not_read_is_a_mistake() -> None:
    with powerless_folder():
        make_wav("audio/a.wav")
        Path("audio/closed").mkdir(mode=0)
        assert refusal("audio").what == "audio has a folder that cannot be read: closed/"


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
        "line 3: 'm.csv' is not audio (.wav, .flac) like the first line",
        "line 4: 'song.mp3' is not audio (.wav, .flac) like the first line",
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
    assert refused.what == f"list.txt has no manifest for position {position}: it lists 2"
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
        "line 2: 'a.wav' is not a manifest (.csv) like the first line",
        "line 3: 'one.csv' is already on line 1",
    ]


def test_a_list_of_manifests_has_to_be_the_only_source(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1"))
    assert refusal("list.txt", "one.csv").what == "list.txt is a list of manifests, which has to be the only SOURCE"


def test_a_chunk_in_two_listed_manifests_is_found(work: Path) -> None:
    write_list(write_manifest("one.csv", "r1"), write_manifest("two.csv", "r1"))
    assert refusal("list.txt").why == "line 2: chunk id 'c' of recording 'r1' is already on line 2 of one.csv"
