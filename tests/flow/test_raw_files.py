"""``badcjobs run --keep-raw``: the engine's own files stay in the run folder, and never stop the work."""

from __future__ import annotations

import sys

from support.badcjobs_program import ON_CPU, Site
from support.fake_hawkears1 import make_fake_hawkears1

ONE_WORKER = ("--cpu-workers", 1, "--no-emit-gpu-telemetry", "--retries", 1)
PROGRAM = """
    case $BADCJOBS_CHUNK_ID in
    c001) printf 'broken' > "$2" ;;
    c002) exit 3 ;;
    *) printf 'start_time,end_time,label,score,mood\\r\\n0.5,1.25,AMRO,0.9,good\\r\\n' > "$2" ;;
    esac"""


def raw_files(site: Site) -> dict[str, str]:
    raw = site.out / "raw"
    return {str(path.relative_to(raw)): path.read_bytes().decode() for path in raw.rglob("*") if path.is_file()}


def test_files_of_a_program_are_kept_as_they_are_and_what_cannot_be_kept_does_not_stop_the_work(site: Site) -> None:
    engine = ("--command", f"{site.script('engine.sh', PROGRAM)} {{input}} {{output}}", *ONE_WORKER)
    site.out.mkdir()
    (site.out / "raw").write_text("a file")
    blocked = site.run(site.manifest(1), *engine, "--keep-raw")
    assert blocked.exit_code == 0, blocked.stderr
    assert blocked.stderr.count("cannot be written (Not a directory); the work continues") == 1
    (site.out / "raw").unlink()
    assert site.run(site.manifest(4), *engine, "--keep-raw", "--no-resume").exit_code == 1
    table = "start_time,end_time,label,score,mood\r\n0.5,1.25,AMRO,0.9,good\r\n"
    assert raw_files(site) == {"rec0/c000.csv": table, "rec0/c001.csv": "broken", "rec1/c003.csv": table}
    assert "keep_raw" not in (site.out / "run.toml").read_text()


def test_files_of_hawkears_1_are_kept_only_when_asked_and_an_engine_without_files_is_named(site: Site) -> None:
    root = make_fake_hawkears1(site.folder / "HawkEars")
    hawkears = ("--engine", "hawkears1", "--hawkears-root", root, "--hawkears-python", sys.executable)
    for asked in ("false", "true"):
        done = site.run(site.manifest(2), *hawkears, *ONE_WORKER, "--no-resume", "--config", f"run.keep_raw={asked}")
        assert (done.exit_code, (site.out / "raw").exists()) == (0, asked == "true"), done.stderr
    kept = raw_files(site)
    assert sorted(kept) == ["rec0/c000.csv", "rec0/c001.csv"]
    assert all(text.startswith("filename,start_time,end_time,class_name,class_code,score") for text in kept.values())
    site.out = site.folder / "second"
    without = site.run(site.manifest(1), *ON_CPU, "--keep-raw")
    assert (without.exit_code, (site.out / "raw").exists()) == (0, False)
    assert "--keep-raw: the engine demo writes no output files" in without.stderr
