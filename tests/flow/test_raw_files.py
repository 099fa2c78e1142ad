"""``badcjobs run --keep-raw``: the engine's own files stay in the run folder, and never stop the work."""

from __future__ import annotations

import sys

from support.badcjobs_program import ON_CPU, Site
from support.fake_hawkears1 import make_fake_hawkears1

ONE_WORKER = ("--cpu-workers", 1, "--no-emit-gpu-telemetry")
PROGRAM = """
    case $BADCJOBS_CHUNK_ID in
    c001) printf 'broken' > "$2" ;;
    c002) exit 3 ;;
    *) printf 'start_time,end_time,label,score,mood\\r\\n0.5,1.25,AMRO,0.9,good\\r\\n' > "$2" ;;
    esac"""


def raw_files(site: Site) -> dict[str, str]:
    raw = site.out / "raw"
    return {str(path.relative_to(raw)): path.read_bytes().decode() for path in raw.rglob("*") if path.is_file()}


def program(site: Site) -> tuple[object, ...]:
    return "--command", f"{site.script('engine.sh', PROGRAM)} {{input}} {{output}}", *ONE_WORKER, "--retries", 1


def test_files_of_a_program_are_kept_as_they_are_also_those_that_cannot_be_read(site: Site) -> None:
    done = site.run(site.manifest(4), *program(site), "--keep-raw")
    assert done.exit_code == 1
    table = "start_time,end_time,label,score,mood\r\n0.5,1.25,AMRO,0.9,good\r\n"
    assert raw_files(site) == {"rec0/c000.csv": table, "rec0/c001.csv": "broken", "rec1/c003.csv": table}
    assert "keep_raw" not in (site.out / "run.toml").read_text()


def test_files_of_hawkears_1_are_kept(site: Site) -> None:
    root = make_fake_hawkears1(site.folder / "HawkEars")
    hawkears = ("--engine", "hawkears1", "--hawkears-root", root, "--hawkears-python", sys.executable)
    done = site.run(site.manifest(2), *hawkears, *ONE_WORKER, "--config", "run.keep_raw=true")
    assert done.exit_code == 0, done.stderr
    kept = raw_files(site)
    assert sorted(kept) == ["rec0/c000.csv", "rec0/c001.csv"]
    assert all(text.startswith("filename,start_time,end_time,class_name,class_code,score") for text in kept.values())


def test_without_the_option_there_is_no_folder(site: Site) -> None:
    assert site.run(site.manifest(1), *program(site)).exit_code == 0
    assert not (site.out / "raw").exists()


def test_an_engine_without_files_says_so_in_the_log(site: Site) -> None:
    done = site.run(site.manifest(1), *ON_CPU, "--keep-raw")
    assert done.exit_code == 0, done.stderr
    assert "--keep-raw: the engine demo writes no output files" in log_of(site)
    assert not (site.out / "raw").exists()


def test_a_folder_that_cannot_be_written_does_not_stop_the_work(site: Site) -> None:
    site.out.mkdir()
    (site.out / "raw").write_text("a file")
    done = site.run(site.manifest(1), *program(site), "--keep-raw")
    assert done.exit_code == 0, done.stderr
    assert log_of(site).count("cannot be written (Not a directory); the work continues") == 1


def log_of(site: Site) -> str:
    (log,) = site.out.glob("tasks/*.log")
    return log.read_text()
