"""Sources of every kind as a run and a plan read them: a case is a folder of files, and its page what comes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rooms.model import NO_CUTTING, Cutting
from rooms.planning import check_source
from rooms.root import BadInput
from rooms.sources import WHOLE, Mistakes, Remarks, Shard, Sources, open_sources, survey, survey_again
from support.audio import make_wav
from support.pages import Pages
from support.powerless import powerless_folder
from support.source_files import HEADER, Files, link, listen, rows, truncated, unfinished, write

Case = tuple[Files, str] | tuple[Files, str, dict[str, Any]]  # files, sources, options
SHORT_HEADER = b"RIFF\0\0\0\0WAVEfmt "


def told(sources: str, *, position: int | None = None, root: str | None = None, cutting: Cutting = NO_CUTTING) -> str:
    """Return what a run and a plan make of sources, the identities that others read, and all that is remarked."""
    lines = [f"$ {sources}"]
    try:
        paths = [Path(name) for name in sources.split()]
        found = open_sources(paths, root=None if root is None else Path(root), position=position, cutting=cutting)
    except BadInput as error:
        return "\n".join([*lines, *refusal(error)])
    more = (found.picked_by_position and "picked", found.manifests_listed and f"{found.manifests_listed} listed")
    lines += [
        *found.descriptions,
        *filter(None, more),
        "run:",
        *some(run_lines(found)),
        "plan:",
        *some(plan_lines(found)),
    ]
    return "\n".join(lines).replace(str(Path.cwd()), "HERE")


def some(lines: list[str]) -> list[str]:
    """Return lines that are each one line, and of many the first and the last."""
    lines = [repr(line)[1:-1] if "\n" in line else line for line in lines]
    return lines if len(lines) < 26 else [*lines[:3], f"  ({len(lines) - 7} more)", *lines[-4:]]


def run_lines(sources: Sources) -> list[str]:
    remarks, lines, keys = Remarks(keeps_missing=True), list[str](), list[tuple[str, str]]()
    try:
        for one in sources.chunks(WHOLE, remarks):
            keys.append(one.key)
            header, mark = one.fingerprint.header, one.fingerprint
            about = [f"{one.start_ms}-{one.end_ms}", "cut" if one.is_cut else "", f"{mark.audio_bytes} bytes"]
            about += [f"sha {mark.audio_sha256[:4]}" if mark.audio_sha256 else "", str(header.duration_s or "")]
            about += [f"only {header.there_s}" if header.there_s is not None else "", header.unreadable]
            about += ["unfinished" if header.unfinished else ""]
            shown = " | ".join([*one.key, one.source_path, one.audio_path, ", ".join(filter(None, about))])
            lines.append(f"  {shown}")
        lines += [f"  remark: {line}" for line in (*remarks.lines(), *remarks.notes())]
    except BadInput as error:
        keys, lines = [], [f"  {line}" for line in refusal(error)]
    identities: list[tuple[str, str]] = []
    try:
        again = sources.read_identities(lambda row, part, key: identities.append(key))
        assert not keys or (identities, again.notes()) == (keys, remarks.notes())
    except BadInput:
        assert not keys, "whoever reads the names alone refuses less"
    return lines


def plan_lines(sources: Sources) -> list[str]:
    mistakes = Mistakes([part.name for part in sources.parts])
    read, walk = survey(sources, mistakes)
    found = list(read)
    if (again := survey_again(sources, walk)) is not None:
        found = list(again)
    lines = []
    for row in found:
        fields = row._asdict()
        shown = [str(fields.pop(name)) for name in ("recording_id", "chunk_id", "base", "path")]
        shown.append(f"{fields.pop('start_ms')}-{fields.pop('end_ms')}")
        shown += [
            f"{name}={value}" for name, value in zip(fields.pop("further_names"), fields.pop("further"), strict=True)
        ]
        shown += [f"{name}={value}" for name, value in fields.items() if value not in ("", None) and value is not False]
        lines.append(f"  {' | '.join(shown)}")
    lines += [f"  left out: {line}" for line in mistakes.examples(20)[0]]
    lines += [f"  {mistakes.count} mistakes, {mistakes.missing} missing"] if mistakes.count else []
    rates = ", ".join(f"{many} with {hz} Hz" for hz, many in walk.rates_hz.items())
    return [*lines, *(f"  not there: {one}" for one in walk.not_there), f"  headers: {walk.measured}; {rates}"]


def refusal(error: BadInput) -> list[str]:
    assert error.exit_code == 2
    return [f"refused: {error.what}", *(f"  {line}" for line in (error.why or "").splitlines()), f"  try: {error.fix}"]


A = {"a.wav": 2}
SHA = "A1" * 32
LONG = {"long.wav": 60, "chunk.wav": 10}
STRETCHES = [f"r,c{n},long.wav,{n * 20000},{n * 20000 + 20000},,," for n in range(5)]
MISTAKES = [
    "r1,c1,a.wav,0,10,,,", ",c2,a.wav,0,10,,,", "r1,c3,a.wav,abc,1.5,,,", "r1,c4,a.wav,10,10,,,",
        "r1,c5,a.wav,-5,10,,,",
    "r1,c6,a.wav,0,10", "r1,c7,gone.wav,0,10,,,", "r1,c1,a.wav,0,10,,,", "r1,c8, ,0,1000000000000001,,,",
    "r1,c9,a.wav,2000,,,,", "r1,c10,.,0,10,,,", "r1,c11,a.wav,1999,,,,", "r1,c12,a.wav,0,1000000000000000,,,",
]  # fmt: skip
PASTED = [f"r,c{number},a.wav,0,1,,," for number in range(1100)]
CASES: dict[str, dict[str, Case]] = {
    "manifests": {
        "rows, checksums, times": ({**A, "m.csv": rows(
            f"r1,c1,a.wav,500,1500,0,{SHA},windy", "r1,c2,a.wav,,,,n/a,", "r1,c3,a.wav,500,,,abc,",
            "r1,c4,a.wav,1000.0,2000.0,,,", f"r1,c5,a.wav,0,2000,0, {SHA} ,", f"r1,c6,a.wav,0,2000,0,{'g' * 64},")},
            "m.csv"),
        "columns in any order, times missing": (
            {**A, "x.txt": rows("birds,a.wav,c1,r1", header="project, source_path,chunk_id ,recording_id")}, "x.txt"),
        "two checksums": ({**A, "m.csv": rows(
            f"r,c,a.wav,{SHA},{SHA}", header="recording_id,chunk_id,source_path,sha256,sha256")}, "m.csv"),
        "marks, line ends, blank lines": ({**A, "Sambaa K’e/été.wav": 1, "m.csv": "\ufeff" + "\r\n".join((
            HEADER, "Sambaa K’e,été,Sambaa K’e/été.wav,0,10,,,", "", "r2,c2,a.wav,0,10,,,", ",,,,,,,", ""))}, "m.csv"),
        "working directory, then the manifest's folder": ({**A, "data/a.wav": 1, "data/b.wav": 1, "data/m.csv": rows(
            "r,c1,a.wav,0,1,,,", "r,c2,./b.wav,0,1,,,", "r,c3,./b.wav,0,,,,")}, "data/m.csv"),
        "only the root": ({**A, "data/b.wav": 1, "m.csv": rows("r,c1,b.wav,0,1,,,", "r,c2,a.wav,0,1,,,")}, "m.csv",
                          {"root": "data"}),
        "no such root": ({**A, "m.csv": rows("r,c1,b.wav,0,1,,,")}, "m.csv", {"root": "nowhere"}),
        "an end beside no audio, and none beside it": (
            {"a.wav": b"no audio at all", "b.wav": b"",
             "m.csv": rows("r,c1,a.wav,0,9000,,,", "r,c2,a.wav,,,,,", "r,c3,b.wav,,,,,")}, "m.csv"),
        "missing files": ({**A, "b.wav": link(".git/annex/objects/x/SHA256E-s1--z.wav"), "pipe.wav": os.mkfifo,
            "m.csv": rows(
            "r,c0,a.wav,0,2000,,,", "r,c1,gone.wav,0,2000,,,", "r,c2,b.wav,0,2000,,,", "r,c4,pipe.wav,0,,,,")},
            "m.csv"),
        "one missing file": ({**A, "m.csv": rows("r,c0,a.wav,0,2000,,,", "r,c1,no.wav,0,2000,,,")}, "m.csv"),
        "only missing files": ({"m.csv": rows("r,c1,no.wav,0,2000,,,")}, "m.csv"),
        "git-annex has nothing": ({"b.wav": link(".git/annex/x.wav"), "m.csv": rows("r,c2,b.wav,0,2000,,,")}, "m.csv"),
    },
    "mistakes": {
        "every kind": ({**A, "m.csv": rows(*MISTAKES)}, "m.csv"),
        "a missing file beside a mistake": ({**A, "m.csv": rows("r,c0,a.wav,0,1,,,", "r,c1,no.wav,0,1,,,",
            "r,c2,a.wav,x,,,,")}, "m.csv"),
        "twenty are shown": ({**A, "m.csv": rows(*(f"r,c{n},a.wav,5,1,,," for n in range(1254)))}, "m.csv"),
        "pasted twice": ({**A, "m.csv": rows(*PASTED, *PASTED[:1001])}, "m.csv"),
        "two sources": ({"m1.csv": rows("1,c,1.wav,0,1,,,"), "m2.csv": rows("2,c,2.wav,0,1,,,")}, "m1.csv m2.csv"),
        "a repeat in another source": (
            {**A, "m1.csv": rows("r,c,a.wav,0,1,,,"), "m2.csv": rows("r,d,a.wav,0,1,,,", "r,c,a.wav,0,1,,,")},
                "m1.csv m2.csv"),
        "a repeat behind a note of two lines": (
            {**A, "m.csv": rows('r,c1,a.wav,0,10,,,"two, with\na second line"', "r,c1,a.wav,0,10,,,")}, "m.csv"),
        "columns missing": ({"m.csv": rows("x,y", header="recording;chunk,source_path")}, "m.csv"),
        "one column missing": ({"m.csv": rows("x,y", header="recording_id,chunk_id")}, "m.csv"),
        "a column twice": ({"m.csv": rows("r,c,a,d", header="recording_id,chunk_id,source_path,chunk_id")}, "m.csv"),
        "not UTF-8, and a NUL": ({**A, "m.csv": b"\n".join((
            HEADER.encode(), b"r,c1,a.wav,0,1,,,\xe9t\xe9", "r,c2,a.wav,0,1,,,été".encode(), b"r\0,c3,a.wav,0,1,,,",
                b"\xe9,c,a.wav,0,1,,,"))},
            "m.csv"),
        "UTF-16": ({"m.csv": HEADER.encode("utf-16")}, "m.csv"),
        "a quote not closed": ({**A, "m.csv": rows("r,c1,a.wav,0,1,,,", 'r,c2,"a.wav,0,1,,,', "r,c3,a.wav,0,1,,,")},
            "m.csv"),
        "a quote far from closed": (
            {**A, "m.csv": rows("r,c1,a.wav,0,1,,,", 'r,c2,"a.wav,0,1,,,',
                *(["r,c3,a.wav,0,1,,," + "x" * 2000] * 70))}, "m.csv"),
        "no rows": ({"m.csv": HEADER}, "m.csv"),
        "empty": ({"m.csv": "\n\n"}, "m.csv"),
        "what cannot be a source": ({"empty.csv": "", "pipe.csv": os.mkfifo}, "gone.csv empty.csv pipe.csv"),
        "gone": ({}, "gone.csv"),
        "none": ({}, ""),
        "a spoiled shard": ({**A, "m.csv": rows("r,c,a.wav,0,1,,,,perhaps", "r,d,a.wav,0,1,,,,as 1-x",
            header=f"{HEADER},badcjobs_cut")}, "m.csv"),
    },
    "folders": {
        "order, endings, names": (
            {f"audio/{name}": 1 for name in ("b/2.wav", "b/1.FLAC", "b-c/1.WAV", "a.wav", "été/x.flac")} | {
                "audio/b/notes.csv": "", "audio/s/b.WAV": 1, "audio/s/b.wav": 1, "audio/a.wav.wav": 1,
                    "audio/.wav/c.wav": 1,
                "audio/a.flac": 2, "audio/t/.x": ""}, "audio"),
        "hidden names and links": (
            {"audio/.hidden.wav": 1, "audio/.git/x.wav": 1, "real.wav": 3, "audio/link.wav": link("../real.wav"),
             "audio/loop": link("."), "audio/folder.wav/._x.wav": 1, "audio/.DS_Store": "",
             "audio/circle": link("circle")},
            "audio"),
        "what is no file": (
            {"audio/a.wav": 1, "audio/pipe.wav": os.mkfifo, "audio/notes.txt": os.mkfifo, "audio/s.flac": listen,
             "audio/folder.wav": link("."), "audio/gone.wav": link("nowhere.wav")}, "audio"),
        "no audio": ({"audio/x.txt": ""}, "audio/"),
        "a name that is not UTF-8": ({"audio/a.wav": 1, os.fsdecode(b"audio/\xe9.wav"): 1,
            os.fsdecode(b"audio/\xe8/b.wav"): 1}, "audio"),
        "equal names in two folders": ({"one/x.wav": 1, "two/x.wav": 1, "two/y.wav": 1}, "one two"),
        "one file by two names": ({"rec/x/a.wav": 1}, "rec rec/x"),
        "damaged files": (
            {"r/a.wav": truncated(60, 30), "r/b.wav": truncated(8, 0), "r/c.wav": unfinished(5), "r/d.wav": 0,
                "r/e.wav": b"",
             "r/f.wav": SHORT_HEADER, "r/g.wav": truncated(3, 2), "r/h.wav": truncated(3, 1.999),
             "r/i.wav": unfinished(0)}, "r"),
        "four truncated": ({f"r/{n}.wav": truncated(8, n) for n in range(4)}, "r"),
    },
    "lists": {
        "relative to its own folder": (
            {"data/s/ø.wav": 1, "data/b.flac": 1, "data/list.txt": "# the good ones\n\n  s/ø.wav\n./b.flac\r\n"},
                "data/list.txt"),
        "the working directory goes first": ({"s/a.wav": 1, "data/s/a.wav": 2, "data/list.txt": "s/a.wav\n"},
            "data/list.txt"),
        "relative to the root": ({"data/s/a.wav": 1, "b.wav": 1, "list.txt": "s/a.wav\n"}, "list.txt",
            {"root": "data"}),
        "the same file twice": ({**A, "list.txt": "a.wav\n# again\n./a.wav\n"}, "list.txt"),
        "mistakes": ({**A, "list.txt": b"a.wav\ngone.wav\nm.csv\nsong.mp3\n\xe9.wav\n"}, "list.txt"),
        "nothing": ({"list.txt": "# nothing\n\n"}, "list.txt"),
        "neither": ({"list.txt": "song.mp3\n"}, "list.txt"),
        "no text": ({"list.txt": b"ID3\0\0\0"}, "list.txt"),
        "recordings themselves": ({"d/s/a.wav": 1, "d/t/a.wav": 1, "d/t/a.flac": 1},
            "d/s/a.wav d/t/a.wav d/s/a.wav d/t/a.flac"),
        "one recording": ({"d/s/a.wav": 1}, "d/s/a.wav"),
        "recordings below a root": ({"d/t/a.wav": 1}, "d/t/a.wav", {"root": "."}),
    },
    "lists of manifests": {
        "all in turn": ({**A, "1.csv": rows("r1,c,a.wav,0,1,,,"), "2.csv": rows("r2,c,a.wav,0,1,,,"),
            "l.txt": "1.csv\n2.csv\n"}, "l.txt"),
        "the one at a position": ({**A, "d/1.csv": rows("r1,c,a.wav,0,1,,,"),
            "d/l.txt": "# no line\ngone.csv\n1.csv\n"}, "d/l.txt", {"position": 1}),
        "one that is not there": ({**A, "d/1.csv": rows("r1,c,a.wav,0,1,,,"),
            "d/l.txt": "# no line\ngone.csv\n1.csv\n"}, "d/l.txt"),
        "a position behind the last": ({"1.csv": rows("r1,c,a.wav,0,1,,,"), "l.txt": "1.csv\n"}, "l.txt",
            {"position": 1}),
        "a position before the first": ({"1.csv": "", "2.csv": "", "l.txt": "1.csv\n2.csv\n"}, "l.txt",
            {"position": -1}),
        "an empty one": ({"1.csv": "", "l.txt": "1.csv\n"}, "l.txt"),
        "nothing else, and nothing twice": ({"1.csv": rows("r1,c,a.wav,0,1,,,"), "l.txt": "1.csv\na.wav\n1.csv\n"},
            "l.txt"),
        "not the only source": ({"1.csv": rows("r1,c,a.wav,0,1,,,"), "l.txt": "1.csv\n"}, "l.txt 1.csv"),
        "a chunk in two of them": ({**A, "1.csv": rows("r,c,a.wav,0,1,,,"), "2.csv": rows("r,c,a.wav,0,1,,,"),
            "l.txt": "1.csv\n2.csv\n"}, "l.txt"),
        "a position for another source": ({"audio/a.wav": 1}, "audio", {"position": 7}),
    },
    "rows cut out of files": {
        "stretches, whole files, and what is not there": ({**LONG, "m.csv": rows(
            *STRETCHES, "r,d0,chunk.wav,50000,60000,,,", "r,d1,chunk.wav,0,9000,,,", "r,d2,chunk.wav,0,8999,,,",
                "r,e0,long.wav,0,60000,,,",
            "r,e1,chunk.wav,0,11000,,,", "r,e2,chunk.wav,5000,11001,,,")}, "m.csv"),
        "never": ({**LONG, "odd.wav": b"?", "m.csv": rows(*STRETCHES[:2], "r,o,odd.wav,0,10,,,")}, "m.csv",
            {"cutting": Cutting(False)}),
        "always": ({**LONG, "m.csv": rows(
            "r,c0,chunk.wav,0,10000,,,", "r,c1,chunk.wav,0,9999,,,", "r,c2,chunk.wav,1,10000,,,",
            "r,c3,chunk.wav,5000,11000,,,",
            "r,c4,chunk.wav,1000,,,,")}, "m.csv", {"cutting": Cutting(True)}),
        "always, beyond the end": ({**LONG, "m.csv": rows("r,c0,chunk.wav,0,11001,,,", "r,c1,chunk.wav,0,9000,,,")},
            "m.csv", {"cutting": Cutting(True)}),
        "files without a length": (
            {**LONG, "b.wav": SHORT_HEADER, "c.wav": b"fLaC", "m.csv": rows("r,a,b.wav,0,9,,,", "r,b,c.wav,0,9,,,",
                STRETCHES[0])}, "m.csv"),
        "files without a length, always": ({"b.wav": b"", "m.csv": rows("r,a,b.wav,0,9,,,")}, "m.csv",
            {"cutting": Cutting(True)}),
        "without an end": ({**LONG, "m.csv": rows("r,a,long.wav,,,,,", "r,b,long.wav,59000,,,,",
            "r,c,long.wav,58999,,,,")}, "m.csv"),
        "damaged files": (
            {"a.wav": truncated(60, 30), "b.wav": unfinished(50), "c.wav": unfinished(0), "m.csv": rows(
                "r,a,a.wav,0,10000,,,", "r,b,a.wav,50000,60000,,,", "r,c,b.wav,0,,,,", "r,d,b.wav,0,50000,,,",
                "r,e,c.wav,0,,,,",
                "r,f,a.wav,,,,,", "r,g,b.wav,0,51001,,,")}, "m.csv"),
        "damaged files, never": ({"b.wav": unfinished(50), "m.csv": rows("r,c,b.wav,0,,,,", "r,d,b.wav,0,50000,,,")},
            "m.csv", {"cutting": Cutting(False)}),
        "as a plan has written": ({**LONG, "m.csv": rows(
            "r,a,long.wav,60000,80000,,,,as 0-20000", "r,b,chunk.wav,0,10000,,,,yes",
            header=f"{HEADER},badcjobs_cut")}, "m.csv"),
        "chunk length without effect": ({**LONG, "m.csv": rows(*STRETCHES[:1])}, "m.csv", {"cutting": Cutting(None,
            2.0)}),
    },
    "whole recordings cut": {
        "by length and overlap": (
            {"r/A/s_1.wav": 25, "r/Tsá/s_1.wav": 8, "r/Tsá/鳥.wav": lambda path: make_wav(path, 13.0004, 5000),
                "r/z.wav": 0, "r/y.wav": b"", "r/t.wav": truncated(12, 5),
             "r/u.wav": unfinished(4)}, "r", {"cutting": Cutting(None, 10.0, 2.0)}),
        "of a list beside a manifest": (
            {**LONG, "m.csv": rows(STRETCHES[0]), "l.txt": "long.wav\nchunk.wav\n"}, "m.csv l.txt",
                {"cutting": Cutting(None, 30.0)}),
        "rows are needed": ({**A}, "a.wav", {"cutting": Cutting(True)}),
        "rows are needed to forbid it": ({**A}, "a.wav", {"cutting": Cutting(False)}),
        "with an overlap that is too long": ({**A}, "a.wav", {"cutting": Cutting(None, 10.0, 9.5)}),
    },
}  # fmt: skip


@pytest.mark.parametrize("topic", CASES)
def test_a_source_is_listed_planned_or_refused(
    topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Pages
) -> None:
    said = []
    for number, (name, case) in enumerate(CASES[topic].items()):
        files, sources, *options = case
        (tmp_path / f"{number:02}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number:02}")
        write(files)
        said.append(f"## {name}\n{told(sources, **(options[0] if options else {}))}\n")  # type: ignore[arg-type]
    pages({"listing.txt": "\n".join(said)})


def test_what_may_not_be_read_costs_only_itself_and_says_why(pages: Pages) -> None:
    with powerless_folder() as folder:
        write({"audio/good.wav": 2, "audio/empty.wav": b"", "audio/silent.wav": 0, "audio/secret.wav": 1,
            "closed/b.wav": 2,
               "audio/noise.wav": b"no header at all", "audio/shut/x.wav": 1, "audio/loop.wav": link("loop.wav"),
               "m.csv": rows("r,c0,audio/good.wav,0,2000,,,", "r,c1,closed/b.wav,0,2000,,,", "r,c2,closed,0,,,,",
                             "r,c3,audio/loop.wav,0,2000,,,", "r,c4,audio/secret.wav,,,,,",
                             "r,c5,audio/secret.wav,0,900,,,"),
               "secret.csv": ""})  # fmt: skip
        closed = ("closed", "audio/shut", "audio/secret.wav", "secret.csv")
        for name in closed:
            Path(name).chmod(0)
        said = {f"{name.partition('.')[0]}.txt": told(name) for name in ("audio", "closed", "m.csv", "secret.csv")}
        for name in closed[:2]:
            Path(name).chmod(0o700)
        Path("audio/loop.wav").unlink()
        kept = "\n".join(
            line for line in Path("m.csv").read_text().splitlines() if "c2" not in line and "c3" not in line
        )
        Path("m.csv").write_text(kept)
        for name in ("audio", "m.csv"):
            for quick in (False, True):
                counted: list[int] = []
                facts, found = check_source([Path(name)], None, progress=counted.append, quick=quick)
                assert facts is not None and counted == list(range(1, facts.chunks + 1))
                listed = "\n".join(f"{one.severity} {one.text} {one.details} try: {one.fix}" for one in found)
                said[f"check-{name[:1]}{'-quick' * quick}.txt"] = f"{facts}\n{listed}".replace(str(folder), "HERE")
    pages({name: text.replace(str(folder), "HERE") for name, text in said.items()})


def test_a_list_names_recordings_alike_wherever_it_is_read_from_and_the_advice_for_equal_names_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write({"one/x.wav": 1, "two/x.wav": 1, "other/b.wav": 1, "two/list.txt": "x.wav\n../other/b.wav\n"})
    with pytest.raises(BadInput) as refused:
        list(open_sources([Path("one"), Path("two")], root=None).chunks(WHOLE))
    assert os.system(refused.value.fix or "") == 0

    def ids(name: str, root: Path | None = None) -> list[str]:
        return [chunk.recording_id for chunk in open_sources([Path(name)], root=root).chunks(WHOLE)]

    assert ids("recordings.txt") == ["one/x", "two/x"]
    outside = f"{tmp_path}/other/b".lstrip("/")
    assert ids("two/list.txt") == ids("two/list.txt", tmp_path / "two") == ["x", outside]
    monkeypatch.chdir(tmp_path / "two")
    assert ids("list.txt") == ["x", outside]


def test_only_the_audio_of_a_shard_is_looked_at_but_every_row_is_checked(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 2, 1000, tone_hz=100)
    manifest = tmp_path / "m.csv"
    for last, whys in (
        ("1", (None, "line 3: no such file: gone.wav")),
        ("x", ("line 3: end_ms 'x' is not a whole number",) * 2),
    ):
        manifest.write_text(rows("r,c0,a.wav,0,1,,,", f"r,c1,gone.wav,0,{last},,,"))
        for index, why in enumerate(whys):
            try:
                found = list(open_sources([manifest], root=None).chunks(Shard(index, 2)))
                assert [chunk.chunk_id for chunk in found] == ["c0"]
                assert why is None
            except BadInput as refused:
                assert refused.why == why
    sources = open_sources([manifest], root=None)
    manifest.unlink()
    with pytest.raises(BadInput, match=r"m\.csv cannot be read"):
        list(sources.chunks(WHOLE))
    os.utime(tmp_path / "a.wav", ns=(5, 7))
    (tmp_path / "link.wav").symlink_to("a.wav")
    (linked,) = open_sources([tmp_path / "link.wav"], root=None).chunks(WHOLE)
    assert linked.fingerprint.audio_mtime_ns == 7, "of the audio, not of the link"
