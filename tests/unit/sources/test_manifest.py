from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from rooms.model import Chunk, Fingerprint
from rooms.root import BadInput
from rooms.sources import WHOLE, Remarks, Shard, open_sources
from support.audio import make_wav
from support.powerless import powerless_folder

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with one recording, a.wav, of two seconds."""
    monkeypatch.chdir(tmp_path)
    make_wav(tmp_path / "a.wav", seconds=2)
    return tmp_path


def manifest(rows: Iterable[str], header: str = HEADER, name: str = "m.csv") -> Path:
    path = Path(name)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def read(*paths: Path, shard: Shard = WHOLE, root: Path | None = None) -> list[Chunk]:
    return list(open_sources(paths, root=root).chunks(shard))


def refusal(*paths: Path, shard: Shard = WHOLE, root: Path | None = None) -> BadInput:
    with pytest.raises(BadInput) as refused:
        read(*paths, shard=shard, root=root)
    return refused.value


def test_a_row_becomes_a_chunk(work: Path) -> None:
    source = manifest(["r1,c1,a.wav,500,1500,0,abc,windy"])
    assert read(source) == [Chunk("r1", "c1", "a.wav", str(work / "a.wav"), 500, 1500)]
    assert open_sources([source], root=None).descriptions == ("manifest m.csv",)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("A1" * 32, "a1" * 32), (f" {'0b' * 32} ", "0b" * 32), ("", None), ("n/a", None), ("abc", None), ("g" * 64, None)],
)
def test_a_chunk_carries_the_fingerprint_of_its_audio(work: Path, given: str, kept: str | None) -> None:
    status = (work / "a.wav").stat()
    [chunk] = read(manifest([f"r1,c1,a.wav,0,1500,0,{given},"]))
    assert chunk.fingerprint == Fingerprint(status.st_size, status.st_mtime_ns, kept)


def test_of_two_columns_with_checksums_neither_is_believed(work: Path) -> None:
    header = "recording_id,chunk_id,source_path,sha256,sha256"
    [chunk] = read(manifest([f"r,c,a.wav,{'0' * 64},{'1' * 64}"], header=header))
    assert chunk.fingerprint.audio_sha256 is None


def test_the_fingerprint_of_a_link_is_that_of_the_audio(work: Path) -> None:
    (work / "link.wav").symlink_to("a.wav")
    os.utime(work / "a.wav", ns=(5, 7))
    [chunk] = read(manifest(["r,c,link.wav,0,10,,,"]))
    assert (chunk.fingerprint.audio_mtime_ns, chunk.fingerprint.audio_bytes) == (7, (work / "a.wav").stat().st_size)


def test_without_an_end_the_audio_header_gives_it(work: Path) -> None:
    chunks = read(manifest(["r1,c1,a.wav,,,,,", "r1,c2,a.wav,500,,,,"]))
    assert [(chunk.start_ms, chunk.end_ms) for chunk in chunks] == [(0, 2000), (500, 2000)]


def test_times_are_optional_columns_and_others_are_allowed_in_any_order(work: Path) -> None:
    [chunk] = read(manifest(["birds,a.wav,c1,r1"], header="project, source_path,chunk_id ,recording_id"))
    assert (chunk.key, chunk.start_ms, chunk.end_ms) == (("r1", "c1"), 0, 2000)


def test_a_header_is_not_read_when_the_row_has_an_end(work: Path) -> None:
    (work / "a.wav").write_text("not audio at all")
    assert [chunk.end_ms for chunk in read(manifest(["r,c1,a.wav,0,9000,,,", "r,c2,a.wav,,,,,"]))] == [9000, None]


def test_an_empty_audio_file_is_left_to_the_engine_to_judge(work: Path) -> None:
    (work / "a.wav").write_bytes(b"")
    assert [chunk.end_ms for chunk in read(manifest(["r,c,a.wav,,,,,"]))] == [None]


def test_whole_milliseconds_written_by_pandas_count_as_whole(work: Path) -> None:
    assert [(c.start_ms, c.end_ms) for c in read(manifest(["r,c,a.wav,1000.0,2000.0,,,"]))] == [(1000, 2000)]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_bom_and_any_line_ends_are_fine(work: Path, bom: bytes, line_end: str) -> None:
    make_wav("Sambaa K’e/été.wav")
    text = line_end.join(
        [HEADER, "Sambaa K’e,été,Sambaa K’e/été.wav,0,10,,,", "", "r2,c2,a.wav,0,10,,,", ",,,,,,,", ""]
    )
    Path("m.csv").write_bytes(bom + text.encode())
    assert [chunk.key for chunk in read(Path("m.csv"))] == [("Sambaa K’e", "été"), ("r2", "c2")]


def test_a_text_file_with_a_manifest_header_is_a_manifest_whatever_its_name(work: Path) -> None:
    assert [chunk.key for chunk in read(manifest(["r,c,a.wav,0,10,,,"], name="chunks.txt"))] == [("r", "c")]


def test_notes_may_hold_commas_and_line_ends(work: Path) -> None:
    source = manifest(['r,c1,a.wav,0,10,,,"two, with\na second line"', "r,c1,a.wav,0,10,,,"])
    assert refusal(source).why == "line 4: chunk id 'c1' of recording 'r' is already on line 2"


def test_relative_audio_is_taken_from_the_working_directory_then_from_the_manifests_folder(work: Path) -> None:
    make_wav(work / "data" / "a.wav")
    make_wav(work / "data" / "b.wav")
    source = manifest(["r,c1,a.wav,0,1,,,", "r,c2,./b.wav,0,1,,,", f"r,c3,{work}/a.wav,0,1,,,"], name="data/m.csv")
    chunks = read(source)
    assert [chunk.audio_path for chunk in chunks] == [f"{work}/a.wav", f"{work}/data/b.wav", f"{work}/a.wav"]
    assert [chunk.source_path for chunk in chunks] == ["a.wav", "./b.wav", f"{work}/a.wav"]


def test_a_root_is_the_only_place_for_relative_audio(work: Path) -> None:
    make_wav(work / "data" / "b.wav")
    source = manifest(["r,c1,b.wav,0,1,,,", "r,c2,a.wav,0,1,,,"])
    refused = refusal(source, root=Path("data"))
    assert refused.why == "line 3: no such file: a.wav"
    assert refused.fix == "badcjobs run m.csv --root DIR …   (DIR: the folder that its source_paths are relative to)"
    assert refusal(source, root=Path("nowhere")).what == "no such folder: nowhere"


def test_shards_are_disjoint_and_complete_over_several_sources(work: Path) -> None:
    one = manifest([f"r1,c{number},a.wav,0,1,,," for number in range(7)], name="one.csv")
    two = manifest([f"r2,c{number},a.wav,0,1,,," for number in range(6)], name="two.csv")
    shares = [read(one, two, shard=Shard(index, 4)) for index in range(4)]
    assert sorted(map(len, shares)) == [3, 3, 3, 4]
    assert {chunk.key for share in shares for chunk in share} == {chunk.key for chunk in read(one, two)}


def test_every_row_is_checked_but_only_our_audio_is_looked_at(work: Path) -> None:
    source = manifest(["r,c0,a.wav,0,1,,,", "r,c1,gone.wav,0,1,,,"])
    assert [chunk.chunk_id for chunk in read(source, shard=Shard(0, 2))] == ["c0"]
    assert refusal(source, shard=Shard(1, 2)).why == "line 3: no such file: gone.wav"
    source = manifest(["r,c0,a.wav,0,1,,,", "r,c1,gone.wav,0,x,,,"])
    assert refusal(source, shard=Shard(0, 2)).why == "line 3: end_ms 'x' is not a whole number"


def test_all_mistakes_are_told_at_once_with_their_lines(work: Path) -> None:
    rows = [
        "r1,c1,a.wav,0,10,,,",
        ",c2,a.wav,0,10,,,",
        "r1,c3,a.wav,abc,1.5,,,",
        "r1,c4,a.wav,20,10,,,",
        "r1,c5,a.wav,-5,10,,,",
        "r1,c6,a.wav,0,10",
        "r1,c7,gone.wav,0,10,,,",
        "r1,c1,a.wav,0,10,,,",
        "r1,c8, ,0,99999999999999999999,,,",
        "r1,c9,a.wav,5000,,,,",
        "r1,c10,.,0,10,,,",
    ]
    refused = refusal(manifest(rows))
    assert refused.what == "m.csv has 12 mistakes"
    assert (refused.why or "").splitlines() == [
        "line 3: recording_id is empty",
        "line 4: end_ms '1.5' is not a whole number",
        "line 4: start_ms 'abc' is not a whole number",
        "line 5: end_ms 10 is not after start_ms 20",
        "line 6: start_ms -5 is negative",
        "line 7: 5 fields where the header has 8",
        "line 8: no such file: gone.wav",
        "line 9: chunk id 'c1' of recording 'r1' is already on line 2",
        "line 10: end_ms 99999999999999999999 is too large",
        "line 10: source_path is empty",
        "line 11: start_ms 5000 is not before the end of the audio at 2000 ms",
        "line 12: a folder, not an audio file: .",
    ]
    assert refused.exit_code == 2


def test_only_the_first_twenty_mistakes_are_shown(work: Path) -> None:
    refused = refusal(manifest([f"r,c{number},a.wav,5,1,,," for number in range(1254)]))
    lines = (refused.why or "").splitlines()
    assert refused.what == "m.csv has 1,254 mistakes"
    assert (len(lines), lines[19][:8], lines[20]) == (21, "line 21:", "… and 1,234 more")
    assert refused.fix == "sed -n '2p;3p;4p;5p;6p' m.csv"


def test_a_manifest_pasted_twice_counts_every_repeat(work: Path) -> None:
    rows = [f"r,c{number},a.wav,0,1,,," for number in range(3000)]
    refused = refusal(manifest(rows + rows))
    assert refused.what == "m.csv has 3,000 mistakes"
    for line in (refused.why or "").splitlines()[:20]:
        number = int(line.split("'c")[1].split("'")[0])
        assert line == f"line {number + 3002}: chunk id 'c{number}' of recording 'r' is already on line {number + 2}"


def test_a_repeat_in_another_source_names_both(work: Path) -> None:
    one, two = (manifest(["r,c,a.wav,0,1,,,", f"{n},c,a.wav,0,1,,,"], name=n) for n in ("one.csv", "two.csv"))
    refused = refusal(one, two)
    assert refused.what == "two.csv has 1 mistake"
    assert refused.why == "line 2: chunk id 'c' of recording 'r' is already on line 2 of one.csv"


def test_mistakes_in_several_sources_carry_their_names(work: Path) -> None:
    one, two = (manifest([f"{n},c,{n}.wav,0,1,,,"], name=f"{n}.csv") for n in ("one", "two"))
    refused = refusal(one, two)
    assert refused.what == "2 sources have 2 mistakes"
    assert refused.why == "one.csv line 2: no such file: one.wav\ntwo.csv line 2: no such file: two.wav"


def test_all_missing_columns_are_named_with_the_header_that_was_found(work: Path) -> None:
    refused = refusal(manifest(["x,y"], header="recording;chunk,source_path"))
    assert refused.what == "m.csv lacks the columns recording_id, chunk_id"
    assert refused.why == "its header is 'recording;chunk,source_path'"
    assert HEADER in (refused.fix or "")


def test_a_column_that_is_there_twice_is_refused(work: Path) -> None:
    refused = refusal(manifest(["r,c,a.wav,d"], header="recording_id,chunk_id,source_path,chunk_id"))
    assert refused.what == "m.csv has more than one column chunk_id"


def test_bytes_that_are_not_utf8_are_found_by_line(work: Path) -> None:
    rows = [HEADER.encode(), b"r,c1,a.wav,0,1,,,\xe9t\xe9", "r,c2,a.wav,0,1,,,été".encode(), b"r\0,c3,a.wav,0,1,,,"]
    Path("m.csv").write_bytes(b"\n".join(rows))
    refused = refusal(Path("m.csv"))
    assert refused.why == "line 2: is not UTF-8\nline 4: has a NUL byte"
    assert refused.fix == "iconv -f latin1 -t utf-8 m.csv > m.utf8.csv"


def test_utf16_from_a_spreadsheet_is_one_mistake(work: Path) -> None:
    Path("m.csv").write_text(f"{HEADER}\nr,c,a.wav,0,1,,,\n", encoding="utf-16")
    assert refusal(Path("m.csv")).what == "m.csv is UTF-16, not UTF-8"


def test_what_comes_before_the_mistake_never_breaks_a_database(work: Path) -> None:
    Path("m.csv").write_bytes(HEADER.encode() + b"\nr\xe9,c1,a.wav,0,1,,,\n")
    chunks = open_sources([Path("m.csv")], root=None).chunks(WHOLE)
    assert next(chunks).recording_id.encode()
    with pytest.raises(BadInput, match="1 mistake"):
        next(chunks)


def test_a_quote_that_is_never_closed_is_found_where_it_opens(work: Path) -> None:
    rows = ["r,c1,a.wav,0,1,,,", 'r,c2,"a.wav,0,1,,,', *(f"r,d{number},a.wav,0,1,,," for number in range(9))]
    assert (
        refusal(manifest(rows)).why == "line 3: 3 fields where the header has 8; a quote is opened here and not closed"
    )
    rows += [f"r,e{number},a.wav,0,1,,,{'x' * 200}" for number in range(1000)]
    assert "line 3: cannot be read as CSV" in (refusal(manifest(rows)).why or "")


@pytest.mark.parametrize(
    ("text", "what"), [("", "is empty"), ("\n\n", "is empty"), (HEADER, "has a header but no rows")]
)
def test_a_manifest_without_rows_is_refused(work: Path, text: str, what: str) -> None:
    Path("m.csv").write_text(text)
    assert refusal(Path("m.csv")).what == f"m.csv {what}"


def test_all_sources_that_cannot_be_used_are_named_at_once(work: Path) -> None:
    Path("empty.csv").touch()
    os.mkfifo("pipe.csv")
    refused = refusal(Path("gone.csv"), Path("empty.csv"), Path("pipe.csv"))
    assert refused.what == "3 sources have 3 mistakes"
    assert (refused.why or "").splitlines()[:2] == ["gone.csv does not exist", "empty.csv is empty"]
    assert refusal(Path("gone.csv")).what == "gone.csv does not exist"
    assert refusal().what == "no SOURCE given"


def test_a_manifest_we_may_not_read_is_refused() -> None:
    with powerless_folder():
        source = manifest(["r,c,a.wav,0,1,,,"])
        source.chmod(0)
        assert refusal(source).what == "m.csv cannot be read"
        assert refusal(source).why == "Permission denied"


def test_a_manifest_that_vanishes_before_it_is_read_is_told(work: Path) -> None:
    source = manifest(["r,c,a.wav,0,1,,,"])
    sources = open_sources([source], root=None)
    source.unlink()
    with pytest.raises(BadInput, match=r"m\.csv cannot be read"):
        list(sources.chunks(WHOLE))


def test_audio_that_git_annex_has_not_fetched_comes_with_the_command_that_fetches_it(work: Path) -> None:
    Path("b.wav").symlink_to(".git/annex/objects/x/y/SHA256E-s1--z.wav")
    refused = refusal(manifest(["r,c,b.wav,0,1,,,"]))
    assert refused.why == "line 2: git-annex has not fetched the content of b.wav"
    assert refused.fix == f"git -C {work} annex get ."


def test_some_missing_files_are_listed_for_a_run_and_named_but_a_source_without_any_audio_is_refused(
    work: Path,
) -> None:
    Path("b.wav").symlink_to(".git/annex/objects/x/y/SHA256E-s1--z.wav")
    os.mkfifo("pipe.wav")  # whoever opens it waits for ever
    rows = ["r,c0,a.wav,0,2000,,,", "r,c1,gone.wav,0,2000,,,", "r,c2,b.wav,0,2000,,,", "r,c4,pipe.wav,0,,,,"]
    sources, remarks = open_sources([manifest(rows)], root=None), Remarks(keeps_missing=True)
    listed = [(chunk.chunk_id, chunk.audio_path, chunk.is_cut) for chunk in sources.chunks(WHOLE, remarks)]
    missing = [(f"c{number}", f"{work}/{name}.wav", True) for number, name in ((1, "gone"), (2, "b"), (4, "pipe"))]
    assert listed == [("c0", f"{work}/a.wav", False), *missing]
    (line,) = remarks.lines()
    assert line.startswith(
        "the audio of 3 rows is missing or cannot be used; they will fail, all others are processed: "
    )
    assert "processed: m.csv line 3: no such file: gone.wav" in line
    assert "line 5: a pipe, a socket or a device, not an audio file: pipe.wav" in line
    assert refusal(Path("m.csv")).what == "m.csv has 3 mistakes"
    for wrong in ([*rows, "r,c3,a.wav,0,x,,,"], rows[1:]):  # another mistake beside them; nothing is there
        with pytest.raises(BadInput):
            list(open_sources([manifest(wrong)], root=None).chunks(WHOLE, Remarks(keeps_missing=True)))


def test_a_file_nobody_may_look_at_and_a_folder_in_its_place_fail_alone_each_with_its_reason() -> None:
    with powerless_folder() as folder:
        make_wav("a.wav", 2)
        make_wav("closed/b.wav", 2)
        Path("closed").chmod(0)
        Path("loop.wav").symlink_to("loop.wav")
        rows = ["r,c0,a.wav,0,2000,,,", "r,c1,closed/b.wav,0,2000,,,", "r,c2,closed,0,,,,", "r,c3,loop.wav,0,2000,,,"]
        remarks = Remarks(keeps_missing=True)
        listed = list(open_sources([manifest(rows)], root=None).chunks(WHOLE, remarks))
        odd = [("c1", "closed/b.wav"), ("c2", "closed"), ("c3", "loop.wav")]
        assert [(chunk.chunk_id, chunk.audio_path, chunk.is_cut) for chunk in listed] == [
            ("c0", f"{folder}/a.wav", False),
            *((chunk_id, f"{folder}/{path}", True) for chunk_id, path in odd),
        ]
        (line,) = remarks.lines()
        assert "line 3: cannot access closed/b.wav: Permission denied, " in line
        assert "line 4: a folder, not an audio file: closed, " in line
        assert line.endswith(f"; try: ls -ld {folder}/closed/b.wav")
        assert refusal(manifest(rows[1:])).what == "m.csv has 3 mistakes"


def test_one_missing_file_is_named_as_one(work: Path) -> None:
    remarks = Remarks(keeps_missing=True)
    sources = open_sources([manifest(["r,c0,a.wav,0,2000,,,", "r,c1,no.wav,0,2000,,,"])], root=None)
    assert len(list(sources.chunks(WHOLE, remarks))) == 2
    (line,) = remarks.lines()
    assert line.startswith("the audio of 1 row is missing or cannot be used; it will fail, all others are processed: ")


def test_a_file_that_comes_from_two_sources_under_two_names_is_remarked(work: Path) -> None:
    make_wav("rec/x/a.wav")
    remarks = Remarks()
    assert len(list(open_sources([Path("rec"), Path("rec/x")], root=None).chunks(WHOLE, remarks))) == 2
    assert remarks.lines() == [f"1 file has two names in two sources and will be processed twice: {work}/rec/x/a.wav"]
