"""Full disks, no disks, readers who leave: what was done stays done, and the exit code tells the truth."""

from __future__ import annotations

import signal
import subprocess
import sys

from support.audio import make_wav
from support.badcjobs_program import ON_CPU, Site, assert_refused
from support.slow_files import slow_files, somebody_waits
from support.waiting import wait_for

LITTLE_SPACE = 400 * 1024  # bytes a process may write into one file


def shell(site: Site, line: str) -> int:
    """Run a line with $BADCJOBS in it, with the pipes and redirections that people use."""
    env = site.environ({"BADCJOBS": f"{sys.executable} -m badcjobs", "PYTHONIOENCODING": "ascii"})
    return subprocess.run(["bash", "-c", line], env=env, cwd=site.folder, stderr=subprocess.DEVNULL).returncode


def test_a_result_that_nobody_reads_changes_no_exit_code(site: Site) -> None:
    """A pipe that is closed, a full disk, no stdout at all; and all of it in ASCII."""
    site.manifest(1)
    for number, where in enumerate(["| head -c 1; exit ${PIPESTATUS[0]}", "> /dev/full", ">&-", "> read.txt"]):
        assert shell(site, f"$BADCJOBS run manifest.csv --out run{number} {' '.join(ON_CPU)} {where}") == 0
        site.out = site.folder / f"run{number}"
        assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]
    assert "? real time" in (site.folder / "read.txt").read_text()


def test_a_local_disk_that_fills_up_costs_readings_and_the_run_goes_on(site: Site) -> None:
    """The limit on file size stands for the disk: SQLite hears of both in the same way."""
    site.manifest(100)
    little = f"trap '' XFSZ; ulimit -f {LITTLE_SPACE // 1024}"
    line = f"{little}; exec $BADCJOBS run manifest.csv --out run --config run.publish_every_s=60"
    assert shell(site, f"{line} --interval 0.01 --engine demo --simulate 1 --engine-arg=--burn-s=0.03") == 0
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 100)]
    assert site.rows("SELECT count(*) FROM gap WHERE reason LIKE 'could not be written%'") == [(1,)]
    assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]


def test_a_recording_that_could_not_be_written_is_not_called_one(site: Site) -> None:
    folder = site.folder / "vanishing"
    folder.mkdir()
    refused = site.badcjobs("record", "--out", "x.sqlite", "--simulate", 1, "--interval", "inf")
    assert_refused(refused, 2, "not in the range")
    program = site.start("record", "--out", folder / "x.sqlite", "--simulate", 1, "--duration", 1)
    wait_for((folder / "x.sqlite").exists, "the first publication")
    (folder / "x.sqlite").unlink()
    folder.rmdir()
    done = program.wait()
    assert done.exit_code == 4
    assert "not published" in done.stdout


def test_a_signal_before_the_work_has_begun_ends_it_with_nothing_started(site: Site) -> None:
    """During a long listing; and while a filesystem does not answer."""
    manifest = site.manifest(2)
    header, row = manifest.read_text().splitlines()[:2]
    recording, _, *rest = row.split(",")
    lines = (",".join((recording, f"n{number}", *rest)) for number in range(200_000))
    manifest.write_text("\n".join([header, *lines]) + "\n")
    program = site.start_run(manifest, *ON_CPU)
    wait_for(lambda: list(site.out.glob("tasks/*.log")), "the listing to begin")
    program.send(signal.SIGTERM)
    assert_refused(program.wait(60), 75, "SIGTERM arrived before any work was started")
    assert (site.out.exists(), list(site.local.iterdir())) == (False, [])
    for number in range(40):
        make_wav(site.folder / "audio" / f"{number}-slow.wav", 1, 100)
    program = site.start_run(site.folder / "audio", *ON_CPU, env=slow_files(site))
    wait_for(lambda: somebody_waits(site), "a listing that reads a header")
    program.send(signal.SIGINT)
    assert_refused(program.wait(60), 130, "SIGINT arrived before any work was started")
    assert not site.out.exists()


def test_the_mode_is_chosen_by_the_disk_or_by_the_user_and_told(site: Site) -> None:
    nowhere = site.folder / "nowhere"
    modes = {
        "auto": ({}, "local", ("INFO", str(site.local), "WAL on node-local disk")),
        "too": ({"TMPDIR": str(nowhere)}, "shared", ("safe mode", f"there is no node-local folder {nowhere}")),
        "shared": ({}, "shared", ("safe mode", "run.live_mode = shared", f"{site.folder}/shared/tasks/.live-")),
    }
    for name, (env, mode, words) in modes.items():
        site.out = site.folder / name
        option = ("--config", "run.live_mode=shared") if name == "shared" else ()
        ended = site.run(site.manifest(2), "--engine", "demo", "--simulate", 2, *option, env=env)
        assert ended.exit_code == 0, ended.stderr
        (line,) = [line for line in ended.stderr.splitlines() if "live files: " in line]
        assert [word for word in words if word not in line] == []
        meta = dict(site.rows("SELECT key, value FROM meta WHERE key LIKE 'live%'"))
        where = site.local if mode == "local" else site.out / "tasks"
        assert (meta["live_mode"], meta["live_folder"].startswith(str(where))) == (mode, True)
        assert sorted(path.suffix for path in (site.out / "tasks").iterdir()) == [".log", ".sqlite"]
    refused = site.run(site.manifest(1), "--engine", "demo", "--simulate", 2, "--config", "run.live_mode=fast")
    assert refused.exit_code == 2
    assert '--config run.live_mode = "fast" must be one of auto, local, shared' in refused.stderr
