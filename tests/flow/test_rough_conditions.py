"""Full disks, readers who leave, files in the way: what was done stays done, and the exit code tells the truth."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise

import pytest
from support.audio import make_wav
from support.badcjobs_program import Site, assert_refused, rows
from support.slow_files import slow_files, somebody_waits
from support.waiting import wait_for

ON_TWO = ("--engine", "demo", "--simulate", 2)
LITTLE_SPACE = 400 * 1024  # bytes a process may write into one file


def shell(site: Site, line: str) -> int:
    """Run a line with $BADCJOBS in it, with the pipes and redirections that people use."""
    env = site.environ({"BADCJOBS": f"{sys.executable} -m badcjobs"})
    return subprocess.run(["bash", "-c", line], env=env, cwd=site.folder, stderr=subprocess.DEVNULL).returncode


@pytest.mark.parametrize("where", ["| head -c 1; exit ${PIPESTATUS[0]}", "> /dev/full", ">&-"])
def test_a_result_that_nobody_reads_changes_no_exit_code(site: Site, where: str) -> None:
    site.manifest(4)
    assert shell(site, f"$BADCJOBS run manifest.csv --out run --engine demo --simulate 1 {where}") == 0
    assert rows(site.task_database(), "SELECT verdict, exit_code FROM task") == [("done", 0)]


def test_a_log_in_ascii_is_no_reason_to_fail(site: Site) -> None:
    done = site.run(site.manifest(4), *ON_TWO, env={"PYTHONIOENCODING": "ascii"})
    assert (done.exit_code, "? real time" in done.stdout) == (0, True)


def test_a_local_disk_that_fills_up_costs_readings_and_the_run_goes_on(site: Site) -> None:
    """The limit on file size stands for the disk: SQLite hears of both in the same way."""
    site.manifest(150)
    little = f"trap '' XFSZ; ulimit -f {LITTLE_SPACE // 1024}"
    line = f"{little}; exec $BADCJOBS run manifest.csv --out run --config run.publish_every_s=60"
    code = shell(site, f"{line} --interval 0.01 --engine demo --simulate 1 --engine-arg=--burn-s=0.02")
    assert code == 0
    assert rows(site.task_database(), "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 150)]
    assert rows(site.task_database(), "SELECT count(*) FROM gap WHERE reason LIKE 'could not be written%'") == [(1,)]
    assert rows(site.task_database(), "SELECT verdict, exit_code FROM task") == [("done", 0)]


def test_a_program_that_makes_its_output_a_folder_costs_its_own_chunk_alone(site: Site) -> None:
    script = site.script(
        "engine.sh",
        'case $1 in *c001.wav) mkdir "$2";; *) echo start_time,end_time,label,score > "$2";; esac',
    )
    done = site.run(
        site.manifest(5),
        "--command",
        f"{script} {{input}} {{output}}",
        "--simulate",
        1,
        "--config",
        "run.backoff_s=0.01",
    )
    assert done.exit_code == 1
    assert site.rows("SELECT chunk_id, error_class FROM chunk WHERE status != 'done'") == [("c001", "bad_output")]


def test_a_recorder_that_stood_still_leaves_a_gap_as_long_as_the_hole(site: Site) -> None:
    out = site.folder / "still.sqlite"
    program = site.start("record", "--out", out, "--simulate", 1, "--interval", 0.1, "--duration", 4)
    recorder = wait_for(lambda: next(iter(site.recorders()), None), "a recorder")
    wait_for(lambda: site.count_now("sample") > 2, "the first samples")
    recorder.send_signal(signal.SIGSTOP)
    wait_for(lambda: recorder.status() == "stopped", "the recorder to stand still")
    subprocess.run(["sleep", "1"], check=True)
    recorder.send_signal(signal.SIGCONT)
    assert program.wait().exit_code == 0
    times = [at_ms for (at_ms,) in rows(out, "SELECT at_ms FROM sample ORDER BY at_ms")]
    hole_ms = max(after - before for before, after in pairwise(times))
    assert hole_ms >= 1000
    gaps = rows(out, "SELECT to_ms - from_ms FROM gap WHERE reason LIKE 'the recorder was late%'")
    assert max(length for (length,) in gaps) == hole_ms


def test_the_first_share_of_the_cpu_is_unknown_not_zero(site: Site) -> None:
    out = site.folder / "host.sqlite"
    site.badcjobs("record", "--out", out, "--simulate", 1, "--interval", 0.1, "--duration", 0.5)
    shares = [share for (share,) in rows(out, "SELECT cpu_percent FROM host_sample ORDER BY at_ms")]
    assert shares[0] is None
    assert all(share is not None for share in shares[1:-1])  # the last may follow the one before at once


def test_a_recording_that_could_not_be_written_is_not_called_one(site: Site) -> None:
    folder = site.folder / "vanishing"
    folder.mkdir()
    program = site.start("record", "--out", folder / "x.sqlite", "--simulate", 1, "--duration", 2)
    wait_for((folder / "x.sqlite").exists, "the first publication")
    (folder / "x.sqlite").unlink()
    folder.rmdir()
    done = program.wait()
    assert done.exit_code == 4
    assert "not published" in done.stdout


def test_numbers_that_have_no_end_are_refused(site: Site) -> None:
    assert_refused(
        site.badcjobs("record", "--out", "x.sqlite", "--simulate", 1, "--interval", "inf"), 2, "not in the range"
    )


def test_a_page_that_cannot_be_written_is_an_error(site: Site) -> None:
    site.run(site.manifest(2), *ON_TWO)
    site.merged()
    assert_refused(site.badcjobs("report", site.out, "--html", "/no/such/folder/x.html"), 2, "x.html cannot be written")


def test_without_a_command_the_help_is_shown(site: Site) -> None:
    done = site.badcjobs()
    assert (done.exit_code, done.stderr) == (0, "")
    assert "badcjobs demo" in done.stdout


def test_an_id_from_a_file_does_not_steer_the_terminal(site: Site) -> None:
    manifest = site.manifest(2)
    manifest.write_text(manifest.read_text().replace("c001,", "c001\x1b[2Jx,", 1))
    (site.folder / "audio" / "c001.wav").write_bytes(b"broken")
    done = site.run(manifest, *ON_TWO, "--retries", 0)
    assert done.exit_code == 1
    assert "\x1b" not in done.stdout


def test_a_signal_during_a_long_listing_ends_it_with_nothing_started(site: Site) -> None:
    manifest = site.manifest(2)
    header, row = manifest.read_text().splitlines()[:2]
    recording, _, *rest = row.split(",")
    lines = (",".join((recording, f"n{number}", *rest)) for number in range(300_000))
    manifest.write_text("\n".join([header, *lines]) + "\n")
    program = site.start_run(manifest, *ON_TWO)
    wait_for(lambda: list(site.out.glob("tasks/*.log")), "the listing to begin")
    program.send(signal.SIGTERM)
    done = program.wait(60)
    assert_refused(done, 75, "SIGTERM arrived before any work was started")
    assert not site.out.exists()


def test_a_signal_is_heard_while_a_run_waits_for_a_filesystem_that_does_not_answer(site: Site) -> None:
    for number in range(40):
        make_wav(site.folder / "audio" / f"{number}-slow.wav", 1, 100)
    program = site.start_run(site.folder / "audio", *ON_TWO, env=slow_files(site))
    wait_for(lambda: somebody_waits(site), "a listing that reads a header")
    program.send(signal.SIGINT)
    assert_refused(program.wait(60), 130, "SIGINT arrived before any work was started")
    assert not site.out.exists()
