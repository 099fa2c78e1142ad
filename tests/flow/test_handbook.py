"""The handbook with the real HawkEars: its first page works as it is pasted, and no option of HawkEars is forgotten."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from rooms.cli import read_topic
from rooms.root import BadInput, Launcher, NotHere, SystemClock
from rooms.workers import EngineStart, HawkEarsEngine, python_of
from support.audio import make_wav
from support.badcjobs_program import rows
from support.needs import find_hawkears
from support.stand_ins import install

RATE = 28_000  # what the models want: resampling would compile for half a minute first
IMPORT = """
import json
from pathlib import Path
from hawkears.gui.services.class_catalog import load_class_catalog
from hawkears.gui.services.result_importer import parse_hawkears_output
catalog = load_class_catalog(Path("hawkears/data/classes.csv"), Path("hawkears/data/taxonomy.csv"))
recordings = sorted(Path("july").rglob("*.wav"))
labels = parse_hawkears_output(Path("labels"), recordings, catalog, recording_root=Path("july"))
print(json.dumps([[one.recording_path.stem, one.raw_species, one.start_seconds] for one in labels.detections]))
"""


@pytest.mark.timeout(400)
def test_the_first_page_leads_from_recordings_and_places_to_species_and_labels(site):
    """Its files are written and its commands run word for word; the installation is linked, and no window is opened."""
    program, root = find_hawkears()
    blocks = [dedent(block) for block in re.findall(r"(?m)(?:^    .*\n)+", read_topic("start"))]
    [places] = [block for block in blocks if block.startswith("filename,")]
    [settings] = [block for block in blocks if block.startswith("[run]")]
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("badcjobs ")]
    (site.folder / "places.csv").write_text(places)
    (site.folder / "badcjobs.toml").write_text(settings)
    given = list(csv.DictReader(places.splitlines()))
    for row in given:
        make_wav(site.folder / "july" / row["filename"][:4] / row["filename"], 4, RATE, loud=[(0.2, 2)])
    (site.folder / "hawkears").mkdir()
    for file in (*program.parents[1].iterdir(), *root.iterdir()):  # as the installation of the page
        (site.folder / "hawkears" / file.name).symlink_to(file)
    install(site.folder / "bin" / "badcjobs", f'#!/bin/sh\nexec {sys.executable} -m badcjobs "$@"\n')
    env = site.environ({"PATH": f"{site.folder / 'bin'}:{os.environ['PATH']}"})
    lines = ["bash", "-exc", "\n".join(commands)]
    done = subprocess.run(lines, env=env, cwd=site.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    placed = rows(
        site.folder / "runs" / "july" / "job.sqlite", "SELECT recorded_on, region FROM recording ORDER BY 1, 2"
    )
    assert placed == sorted((row["recording_date"], row["region"]) for row in given)
    with (site.folder / "july.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert {row["location"] for row in table} == {"G-07", "K-12"}
    imported = json.loads(subprocess.check_output([python_of(program), "-Ic", IMPORT], cwd=site.folder, text=True))
    found = [[Path(row["recording_id"]).name, row["species_code"], float(row["start_s"])] for row in table]
    assert sorted(imported) == sorted(found) != []


def options_of(text, indent):
    rows = re.findall(rf"(?m)^ {{{indent}}}(-.*?)(?:  |$)", text)
    return {option for row in rows for option in re.findall(r"--?[a-z][\w-]*", row)}


def test_every_option_of_hawkears_is_on_the_page_and_what_it_calls_refused_is_refused():
    program, root = find_hawkears()
    reported = options_of(subprocess.check_output([program, "analyze", "--help"], cwd=root, text=True), 2)
    section = read_topic("engines").partition("## Every option of hawkears analyze\n")[2].partition("\n## ")[0]
    assert options_of(section, 4) == reported
    refused = set()
    for option in reported:
        engine = HawkEarsEngine(EngineStart((option,), {}, Launcher("x"), SystemClock()), None, root)
        with pytest.raises((BadInput, NotHere)) as answer:  # it has no Python
            engine.check()
        refused |= {option} if answer.type is BadInput else set()
    assert options_of(section.partition("\nRefused")[2], 4) == refused
