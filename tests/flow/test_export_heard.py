"""From recordings in the lab's folders to one table per study area, through the real command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import ON_CPU, Site, array_task, assert_refused, rows

COLUMNS = [
    "study_area", "location", "recording_date_time", "start_s", "end_s", "species_code", "species_name", "score",
    "recording_id", "chunk_id",
]  # fmt: skip
CALLS_S = [(0.5, 1.0), (3.2, 3.8), (6.0, 10.5)]  # across a joint; across two of them
PATTERNS = ["{study_area}/**/{location}_0+1_{date}?{time}.wav", "{study_area}/ARU_data/SM/{location}/*/Data/*"]
FORT_SMITH = "Fort Smith/ARU_data/SM/FS-01/A/Data/S4A10293_20220501_060000"
SAMBAA = "Sambaa K'e 2018/b2/x/SK-7_0+1_20180612$053000"
UNDATED = "Edehzhie/E-07/E-07_20221399_060000"
LOOSE = "loose_20220501_060000"
CUT = ("--chunk-length", 4, "--overlap", 1)


@pytest.fixture(scope="module")
def job(shared_site: Site) -> Site:
    """Two tasks of an array, their chunks cut on the fly with an overlap, and merged."""
    site = shared_site
    for name in (FORT_SMITH, SAMBAA, UNDATED, LOOSE):
        make_wav(site.folder / "data" / f"{name}.wav", 12.0, 1000, loud=CALLS_S, tone_hz=100)
    make_wav(site.folder / "data" / ".trash" / "x.wav", 1.0, 1000)
    (site.folder / "lab.toml").write_text(f"[recordings]\npatterns = {PATTERNS}\n")
    words = (*ON_CPU, *CUT, "--config", site.folder / "lab.toml")
    site.run_tasks(site.folder / "data", *words, envs=[array_task(index, [0, 1]) for index in (0, 1)])
    site.merged()
    return site


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_recording_has_its_place_and_date_and_what_its_path_does_not_tell_is_counted(job: Site) -> None:
    columns = "recording_id, study_area, location, recorded_at, duration_s, sample_rate_hz, channels"
    header = (12.0, 1000, 1)
    assert sorted(rows(job.out / "job.sqlite", f"SELECT {columns} FROM recording")) == sorted([
        (FORT_SMITH, "Fort Smith", "FS-01", "2022-05-01T06:00:00", *header),
        (SAMBAA, "Sambaa K'e 2018", "SK-7", "2018-06-12T05:30:00", *header),
        (UNDATED, "Edehzhie", "E-07", None, *header),
        (LOOSE, None, None, "2022-05-01T06:00:00", *header),
    ])  # fmt: skip
    logs = "".join(path.read_text() for path in job.out.glob("tasks/*.log"))
    assert logs.count("1 hidden name is skipped (the first: .trash/)") == 2
    assert f"1 of 2 recordings has no date in the name, e.g. {UNDATED}.wav (badcjobs guide audio)" in logs
    names = job.badcjobs("report", job.out, "--json").json["recording_names"]
    assert (names["recordings"], names["undated"], names["untimed"], names["no_study_area"]) == (4, 1, 0, 1)
    again = job.run(job.folder / "data", *ON_CPU, *CUT, env=array_task(1, [0, 1]))
    both = ('[recordings] patterns was ["{study_area}/**/{location}_0+1_{date}?{time}.wav", ', "now []")
    assert_refused(again, 2, "[recordings] patterns: different from", *both, "badcjobs export --config FILE")


def test_one_file_per_study_area_and_one_for_all_and_what_an_earlier_export_left_is_named(job: Site) -> None:
    folder = job.folder / "july"
    done = job.badcjobs("export", job.out, "--format", "csv", "--by-study-area", "-o", folder)
    assert done.exit_code == 0, done.stderr
    names = ["Edehzhie.csv", "Fort Smith.csv", "Sambaa K'e 2018.csv", "all_study_areas.csv", "no_study_area.csv"]
    assert sorted(path.name for path in folder.iterdir()) == names
    everything = read_csv(folder / "all_study_areas.csv")
    assert list(everything[0]) == COLUMNS
    assert everything == [row for name in (names[4], *names[:3]) for row in read_csv(folder / name)]
    heard = [(float(row["start_s"]), float(row["end_s"])) for row in read_csv(folder / "Sambaa K'e 2018.csv")]
    assert heard == CALLS_S  # each once, on the recording's clock, though five chunks have heard them
    assert f"1 of 4 recordings has no study area in the path, e.g. {LOOSE}.wav" in done.stderr
    other = job.folder / "stations.toml"
    other.write_text('[recordings]\npatterns = ["Fort Smith/**/{study_area}/A/Data/*"]\n')
    renamed = job.badcjobs("export", job.out, "--by-study-area", "--config", other, "-o", folder)
    assert renamed.exit_code == 0, renamed.stderr
    said = f"1 file is in {folder} that this export did not write, perhaps from an earlier one: Fort Smith.csv;"
    assert said in renamed.stderr
    assert len(read_csv(folder / "FS-01.csv")) == len(read_csv(folder / "Fort Smith.csv")) == 3
