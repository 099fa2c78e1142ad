"""Labels out, read by HawkEars: its own importer, and the files that it writes itself."""

import csv
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from rooms.report import ExportOrder, export
from rooms.workers import python_of
from support.audio import make_wav
from support.databases import change
from support.labelled_job import LABELLED, make_labelled
from support.needs import find_hawkears
from support.pages import tree

pytestmark = pytest.mark.timeout(400)
IMPORT = """
import json, sys
from pathlib import Path
from hawkears.gui.services.class_catalog import load_class_catalog
from hawkears.gui.services.result_importer import parse_hawkears_output

catalog = load_class_catalog(*(Path(sys.argv[1], "data", name) for name in ("classes.csv", "taxonomy.csv")))
for folder, audio in json.load(sys.stdin):
    paths = [path for path in Path(audio).rglob("*") if path.is_file()]
    read = parse_hawkears_output(Path(folder), paths, catalog, recording_root=Path(audio))
    rows = [(d.start_seconds, d.end_seconds, d.species.species_code, d.score, str(d.recording_path))
            for d in read.detections]
    print(json.dumps([read.format_name, rows]))
"""


@pytest.fixture
def hawkears():
    """Return the program and its folder."""
    return find_hawkears()


def read_back(hawkears, folders):
    """Let HawkEars import each folder of labels, with the folder of its recordings."""
    program, root = hawkears
    words = [python_of(program), "-c", IMPORT, root]
    done = subprocess.run(words, input=json.dumps(folders), text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hawkears_imports_each_label_for_the_recording_in_which_it_was_heard(hawkears, tmp_path):
    folders, expected = [], []
    for case in LABELLED.keys() - {"an id that leads outside"}:
        job, lines = tmp_path / case, LABELLED[case]
        heard = make_labelled(job, lines)
        [*roots] = {line.split(" | ")[0] for line in lines}
        audio = job / "audio" / (roots[0] if len(roots) == 1 else "")
        # Audacity's labels of a link have its own name, for people; HawkEars would look for its target.
        for form in ("hawkears",) if "link" in case else ("hawkears", "audacity"):
            export(ExportOrder(job, form, job / form), None)
            folders.append((str(job / form), str(audio)))
            rows = [[second, second + 0.5, "AMRO", 0.5, str(path)] for second, path in heard.items()]
            expected.append([form.replace("hawkears", "csv"), rows])
    found = [[form, sorted(rows)] for form, rows in read_back(hawkears, folders)]
    assert found == expected


def test_one_label_that_hawkears_would_refuse_does_not_spoil_the_folder(hawkears, tmp_path):
    heard = make_labelled(tmp_path, ["season | A/x.wav", "season | A/back\\slash.wav", "season |  B/x.wav"])
    job = tmp_path / "job.sqlite"
    settings = json.dumps({"hawkears_root": str(hawkears[1])})
    change(job, "INSERT INTO task_meta SELECT task_id, 'settings', ? FROM task", settings)
    for label in ("Noise", "own call", "amro"):
        change(
            job, "INSERT INTO detection SELECT task_id, 'season/A/x.wav', 'a.wav', 1, 2, ?, '', 0.5 FROM task", label
        )
    _, notes = export(ExportOrder(job, "hawkears", tmp_path / "labels"), None)
    [[_, rows]] = read_back(hawkears, [(str(tmp_path / "labels"), str(tmp_path / "audio" / "season"))])
    assert [row[2:] for row in rows] == [["AMRO", 0.5, str(heard[1.0])]] * 2
    assert "2 detections left out (Noise, own call): not a species in HawkEars' list; --format csv has all" in notes


def test_the_files_are_those_that_hawkears_writes_for_the_same_recordings(hawkears, site):
    program, root = hawkears
    audio, own = site.folder / "audio", site.folder / "own"
    for number, name in enumerate(("A/x.wav", "B/x.wav", "B/Grün.2024.wav")):
        make_wav(audio / name, 3.0 + number, 28_000, loud=[(0.2, 2.0)], tone_hz=1500 + 700 * number)
    options = ("--models=1", "--min_score=0.5", "--threads=1")
    words = [program, "analyze", audio, "--recurse", "-o", own, "--rtype", "csv+audacity+raven", *options]
    ours = (
        "--engine",
        "hawkears",
        "--hawkears-python",
        python_of(program),
        "--hawkears-root",
        root,
        "--cpu-workers",
        1,
    )
    environ = {"PATH": os.environ["PATH"], "HOME": str(site.folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor() as pool:
        alone = pool.submit(subprocess.run, words, cwd=root, env=environ, check=True, capture_output=True)
        done = site.run(audio, *ours, *(f"--engine-arg={option}" for option in options))
        assert done.exit_code == 0, done.stderr
        alone.result()
    site.merged()
    for form in ("hawkears", "audacity", "raven"):
        assert site.badcjobs("export", site.out, "--format", form, "-o", site.folder / form).exit_code == 0
    written = tree(own)
    assert len(written["scores.csv"].splitlines()) > 100
    assert tree(site.folder / "hawkears") == {"scores.csv": written["scores.csv"]}
    labels = {name: text for name, text in written.items() if name.endswith("_scores.txt")}
    assert tree(site.folder / "audacity") == labels and len(labels) == 3
    for name, table in tree(site.folder / "raven").items():
        assert_same_table(table, written[name.replace(".selection", ".HawkEars.selection")])
    assert len(tree(site.folder / "raven")) == 3


def assert_same_table(ours, own):
    """Compare two tables of Raven: we keep three decimals of a score, and random models have no scientific names."""
    ours, own = (list(csv.DictReader(text.splitlines(), delimiter="\t")) for text in (ours, own))
    assert [list(row) for row in ours] == [list(row) for row in own]
    for row, wanted in zip(ours, own, strict=True):
        assert float(row["Confidence"]) == pytest.approx(float(wanted["Confidence"]), abs=0.0006)
        same = row.keys() - {"Confidence", "Scientific Name", "eBird Code"}
        assert {name: row[name] for name in same} == {name: wanted[name] for name in same}
