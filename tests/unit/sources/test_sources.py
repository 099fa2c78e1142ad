"""Sources of every kind as a run and a plan read them: cases in tests/data/sources, and what comes of them in pages."""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import pytest
from rooms import sources as room
from rooms.cli import read_topic
from rooms.model import Cutting, NameGaps, parse_patterns
from rooms.planning import PlanOrder, check_source, plan_sources
from rooms.root import BadInput, PlanSettings, Project, RunSettings, SubmitSettings
from rooms.sources import WHOLE, open_sources, open_sources_of, place_reader
from support.brief import line, literal
from support.cases import read_data
from support.filesystems import powerless_folder
from support.source_files import read_cases, write_files


def order_of(sources):
    return PlanOrder({"source": sources}, Project(), SubmitSettings(), PlanSettings(), None, 400.0, None, None)


def reported(sources, **options):
    """Return what a run and a plan make of sources, the identities that others read, and all that is remarked."""
    lines = [f"$ {' '.join([sources, *(f'{name}={value}' for name, value in options.items())])}"]
    length_s, root, position = (options.get(name) for name in ("length", "root", "position"))
    rows = {"yes": True, "no": False}.get(options.get("cut", ""))
    cutting = Cutting(rows, length_s and float(length_s), float(options.get("overlap", 0)))
    where = {"root": root and Path(root), "position": position and int(position)}
    try:
        found = open_sources([Path(name) for name in sources.split()], **where, cutting=cutting)
    except BadInput as error:
        return "\n".join([*lines, *refusal(error)])
    more = (found.picked_by_position and "picked", found.manifests_listed and f"{found.manifests_listed} listed")
    lines += [*found.descriptions, *filter(None, more), "run:", *some(run_lines(found, options.get("shard")))]
    return "\n".join([*lines, "plan:", *some(plan_lines(found))]).replace(str(Path.cwd()), "HERE")


def some(lines):
    """Return lines that are each one line, and of many the first and the last."""
    lines = [repr(line)[1:-1] if "\n" in line else line for line in lines]
    return lines if len(lines) < 26 else [*lines[:3], f"  ({len(lines) - 7} more)", *lines[-4:]]


def run_lines(sources, shard):
    remarks, lines, keys = room.Remarks(keeps_missing=True), list[str](), list[tuple[str, str]]()
    try:
        for one in sources.chunks(room.parse_shard(shard) if shard else WHOLE, remarks):
            keys.append(one.key)
            header, mark = one.fingerprint.header, one.fingerprint
            about = [f"{one.start_ms}-{one.end_ms}", "cut" if one.is_cut else "", f"{mark.audio_bytes} bytes"]
            about += [f"sha {mark.audio_sha256[:4]}" if mark.audio_sha256 else "", str(header.duration_s or "")]
            about += [
                f"only {header.there_s}" if header.there_s is not None else "",
                header.problem if header.fault else "",
            ]
            about += ["unfinished" if header.unfinished else ""]
            lines.append("  " + " | ".join([*one.key, one.source_path, one.audio_path, ", ".join(filter(None, about))]))
        lines += [f"  remark: {line}" for line in (*remarks.lines(), *remarks.notes())]
    except BadInput as error:
        keys, lines = [], [f"  {line}" for line in refusal(error)]
    identities = []
    try:
        again = sources.read_identities(identities.append)
        assert shard or not keys or (identities, again.notes()) == (keys, remarks.notes())
    except BadInput:
        assert not keys, "a reader of the names alone refuses less"
    return lines


def plan_lines(sources):
    mistakes = room.Mistakes([part.name for part in sources.parts])
    read, walk = room.survey(sources, mistakes)
    found, lines = list(read), []
    if room.note_repeats(sources.parts, walk):
        return refusal(mistakes.error())
    for row in found:
        fields = row._asdict()
        shown = [str(fields.pop(name)) for name in ("recording_id", "chunk_id", "base", "path")]
        shown.append(f"{fields.pop('start_ms')}-{fields.pop('end_ms')}")
        values, cut = (fields.pop(name) for name in ("carried", "cut"))
        shown += [f"badcjobs_cut={cut}"] if cut else []
        fields = {**dict(zip(("overlap_ms", "sha256", "notes", *room.OF_A_PLACE), values, strict=False)), **fields}
        shown += [f"{name}={value}" for name, value in fields.items() if value not in ("", None) and value is not False]
        lines.append(f"  {' | '.join(shown)}")
    lines += [f"  left out: {line}" for line in mistakes.examples(20)[0]]
    lines += [f"  {mistakes.count} mistakes, {mistakes.missing} missing"] if mistakes.count else []
    rates = ", ".join(f"{many} with {hz} Hz" for hz, many in walk.rates_hz.items())
    size, guess = walk.size, walk.size.guessed_s()
    rates += f"; {size.known_bytes} bytes in {size.files} files, {size.unsized} of unknown size"
    rates += f"; {size.not_here} not here" + (f", about {guess:g} s" if guess else "") if size.not_here else ""
    return [*lines, *(f"  not there: {one}" for one in walk.not_there), f"  headers: {walk.measured}; {rates}"]


def refusal(error):
    assert error.exit_code == 2
    return [f"refused: {error.what}", *(f"  {line}" for line in (error.why or "").splitlines()), f"  try: {error.fix}"]


TOPICS = ("manifests", "mistakes", "folders", "lists", "lists_of_manifests", "rows_cut", "recordings_cut")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_source_is_listed_planned_or_refused(topic, tmp_path, monkeypatch, pages):
    said = []
    for number, (name, files, sources, options) in enumerate(read_cases(topic)):
        (tmp_path / f"{number:02}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number:02}")
        write_files(files)
        said.append(f"## {name}\n{reported(' '.join(sources), **options)}\n")
    pages({"listing.txt": "\n".join(said)})


def test_what_may_not_be_read_costs_only_itself_and_says_why(pages):
    with powerless_folder() as folder:
        files = read_cases("closed")[0].files
        write_files(files)
        closed = ("closed", "audio/shut", "audio/secret.wav", "secret.csv")
        for name in closed:
            Path(name).chmod(0)
        said = {f"{name.partition('.')[0]}.txt": reported(name) for name in ("audio", "closed", "m.csv", "secret.csv")}
        plans = []
        for names in (["audio", "closed"], ["o.csv"], ["n.csv"], ["audio/secret.wav"]):
            try:
                found = plan_sources(order_of(names), {}, folder, print).plan.remarks
                listed = [f"{one.severity} {one.subject}: {one.text} {one.details} try: {one.fix}" for one in found]
            except BadInput as error:
                listed = refusal(error)
            plans += [f"$ {' '.join(names)}", *listed]
        said["plans.txt"] = "\n".join(plans)
        for name in closed[:2]:
            Path(name).chmod(0o700)
        Path("audio/loop.wav").unlink()
        write_files(re.sub("  r,c[23].*\n", "", files[files.index("m.csv") :]))
        planned = plan_sources(order_of(["audio"]), {}, folder, print).plan
        facts, _ = check_source(RunSettings(source=("audio",), out=None), Path(), progress=print, quick=False)
        assert facts.audio_s == planned.audio_hours * 3600 > 0
        for name, quick in itertools.product(("audio", "m.csv"), (False, True)):
            counted = []
            order = RunSettings(source=(name,), out=None)
            facts, found = check_source(order, Path(), progress=counted.append, quick=quick)
            assert facts is not None and counted == (list(range(1, facts.chunks + 1)) if quick else [])
            listed = "\n".join(f"{one.severity} {one.text} {one.details} try: {one.fix}" for one in found)
            said[f"check-{name[:1]}{'-quick' * quick}.txt"] = f"{facts}\n{listed}"
    pages({name: text.replace(str(folder), "HERE") for name, text in said.items()})


def test_what_only_ffmpeg_can_read_is_cut_with_it_and_named_by_check_without_it(tmp_path, monkeypatch):
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x18ftypM4A ")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    settings = RunSettings(source=("a.m4a",), out=None, chunk_length_s=60.0)

    def look():
        facts, findings = check_source(settings, tmp_path, progress=print, quick=False)
        return facts.chunks, [one.details for one in findings if (one.severity, one.subject) == ("warning", "ffmpeg")]

    assert look() == (1, [[f"{tmp_path}/a.m4a"]])
    (tmp_path / "bin" / "ffprobe").write_text("#!/bin/sh\necho 150.0\n")
    (tmp_path / "bin" / "ffprobe").chmod(0o755)
    assert look() == (3, [])


def test_a_list_names_recordings_alike_wherever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files("one/x.wav: 1 s\ntwo/x.wav: 1 s\nother/b.wav: 1 s\ntwo/list.txt: lines\n  x.wav\n  ../other/b.wav")
    with pytest.raises(BadInput) as refused:
        list(open_sources([Path("one"), Path("two")], root=None).chunks(WHOLE))
    assert os.system(refused.value.fix or "") == 0

    def ids(name, root=None):
        return [chunk.recording_id for chunk in open_sources([Path(name)], root=root).chunks(WHOLE)]

    assert ids("recordings.txt") == ["one/x", "two/x"]
    outside = f"{tmp_path}/other/b".lstrip("/")
    assert ids("two/list.txt") == ids("two/list.txt", tmp_path / "two") == ["x", outside]
    monkeypatch.chdir(tmp_path / "two")
    assert ids("list.txt") == ["x", outside]


def test_a_source_that_is_gone_is_refused_and_a_link_is_as_old_as_its_audio(tmp_path):
    write_files("a.wav: 2 s\nlink.wav: link a.wav\nm.csv: rows\n  r,c0,a.wav,0,1,,,", tmp_path)
    sources = open_sources([tmp_path / "m.csv"], root=None)
    (tmp_path / "m.csv").unlink()
    with pytest.raises(BadInput, match=r"m\.csv cannot be read"):
        list(sources.chunks(WHOLE))
    os.utime(tmp_path / "a.wav", ns=(5, 7))
    (linked,) = open_sources([tmp_path / "link.wav"], root=None).chunks(WHOLE)
    assert linked.fingerprint.audio_mtime_ns == 7


def test_a_row_whose_audio_is_missing_keeps_its_place_and_its_number(tmp_path):
    header = "recording_id,chunk_id,source_path,start_ms,end_ms,region"
    lines = ("r,c0,gone.wav,0,9,CA-AB", "s,c1,a.wav,0,9,CA-ON", "t,c2,a.wav,9,18,CA-QC")
    write_files("a.wav: 2 s", tmp_path)
    (tmp_path / "m.csv").write_text("\n".join((header, *lines)))
    sources, remarks = open_sources([tmp_path / "m.csv"], root=None), room.Remarks(keeps_missing=True)
    shards = [[(one.name, one.place.region) for one in sources.chunks(room.Shard(n, 2), remarks)] for n in range(2)]
    assert shards == [[("r/c0", "CA-AB"), ("t/c2", "CA-QC")], [("s/c1", "CA-ON")]]


def test_a_file_that_a_later_row_looks_at_counts_once(tmp_path):
    """The first rows have an end, and nothing is looked at any more; or rows of a recording between are left out."""
    write_files("a.wav: 2 of 9 s\nm.csv: rows\n  r,c0,a.wav,0,1000,,,\n  r,c1,a.wav,1000,,,,", tmp_path)
    write_files("n.csv: rows\n  r,c0,a.wav,0,1000,,,\n  s,c1,b.wav,0,9,,,\n  r,c2,a.wav,1000,2000,,,", tmp_path)
    for name, looks in (("m.csv", 0), ("n.csv", 9)):
        sources = replace(open_sources([tmp_path / name], root=None), left_out=frozenset("s"))
        read, walk = room.survey(sources, room.Mistakes([name]))
        walk.looks_left = looks
        assert len(list(read)) == 2
        counts = (walk.size.files, walk.size.unsized, walk.measured, len(walk.remarks.faults["broken_audio"]))
        assert (counts, walk.size.measured_s) == ((1, 0, 1, 1), 0.0), name


def test_links_are_followed_before_dots(tmp_path):
    """link/.. is the folder above what the link leads to."""
    write_files("real/far/x.wav: 1 s\nreal/real_1.wav: 1 s\nlink: link real/far\nalias: link real", tmp_path)
    path = f"{tmp_path}/link/../real_1.wav"
    assert room.NameReader(()).read("x", path, path).location == "real"
    patterns = {"recordings": {"patterns": ["{study_area}/*"]}}
    made = Project.parse(patterns).make(RunSettings, {"source": ["m.csv"], "root": "alias"}, "run")
    above = f"{tmp_path}/alias/far/../far/x.wav"
    assert room.name_reader(made, tmp_path).read("x", above, above).study_area == "far"

    with pytest.raises(BadInput, match="is inside another SOURCE"):
        open_sources([tmp_path / "alias", tmp_path / "real" / "far"], root=None)
    open_sources([tmp_path / "real" / "far", tmp_path / "link" / ".." / "real_1.wav"], root=None)
    (tmp_path / "places.csv").write_text(f"filename,region\n{path},CA-AB\n")
    settings = RunSettings(source=(str(tmp_path / "real"),), filelist=str(tmp_path / "places.csv"), out=None)
    chunks = open_sources_of(settings, tmp_path).chunks(WHOLE)
    assert [place_reader(settings, tmp_path).of(one).place.region for one in chunks] == [None, "CA-AB"]


CASES = read_data("recording_names.txt").split("\n=== ")[1:]


def read(text, patterns):
    """Return what is read of a path, as it stands on a page."""
    path, *options = re.split(r" (?=id=|root=)", text)
    values = [option.partition("=")[::2] for option in options]
    recording_id = dict(values).get("id", path.rpartition(".")[0])
    parsed, wrong = parse_patterns(patterns)
    assert wrong == []
    reader = room.NameReader(parsed, tuple(value for name, value in values if name == "root"))
    return line(reader.read(recording_id, path, str(Path("/data", path.removeprefix("../")))))


def test_places_and_times_are_read_by_the_patterns_of_the_guide_and_nothing_is_guessed(pages):
    (block,) = re.findall(r"(?sm)^    \[recordings\]\n    patterns = (\[.*?^    \])$", read_topic("audio"))
    guide, said = literal(block), []
    for heading, *lines in (case.splitlines() for case in CASES):
        said.append(f"=== {heading}")
        patterns = {"guide": guide, "no pattern": []}.get(heading, [heading])
        for one in lines:
            found = room.find_moment(one) if heading == "moments" else read(one, patterns)
            assert heading == "moments" or read(normalize("NFD", one), patterns) == found, "however ì is written"
            said.append(f"{one} → {found}")
            if heading == "guide":
                said.append(f"    built in → {read(one, [])}")
    pages({"names.txt": "\n".join(said)})


def test_absolute_paths_count_from_the_root_or_from_where_the_source_stands(tmp_path):
    path = f"{tmp_path}/Gameti/G-07/G-07_x.wav"
    patterns = {"recordings": {"patterns": ["{study_area}/{location}/*"]}}
    for options, study_area in (({}, "Gameti"), ({"root": "Gameti"}, None)):
        made = Project.parse(patterns).make(RunSettings, {"source": ["list.txt"], **options}, "run")
        found = room.name_reader(made, tmp_path).read("x", path, path)
        assert (found.study_area, found.location) == (study_area, "G-07")


def test_gaps_are_counted_with_an_example(pages):
    many, one = NameGaps(9, 1, "a", 3000, "c", 2, "b"), NameGaps(1, 1, "a", 0, None, 0, None)
    said = [*room.gap_lines(many, ["{date}"], nameless="x.csv"), "--", *room.gap_lines(many, []), "--"]
    pages({"gaps.txt": "\n".join([*said, *room.gap_lines(one, ["x"], nameless="y")])})
