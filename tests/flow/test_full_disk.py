"""Full disks and vanished folders: the run goes on; the loss is a gap and a warning."""

import shutil

import pytest
from support.badcjobs_program import rows
from support.filesystems import read_only, small_disk
from support.waiting import wait_for

CHUNKS = 20
DONE = "status = 'done'"
ENGINE = ("--engine", "demo", "--engine-arg=--burn-s=0.1", "--simulate", 2)


@pytest.fixture
def local_disk(site):
    with small_disk(site.local) as disk:
        yield disk


def start(site):
    """Start a run and hold its workers in the middle of it: the rest comes with ``go_on``."""
    program = site.start_run(site.manifest(CHUNKS), *ENGINE)
    wait_for(lambda: site.count_now("chunk", DONE) >= 2, "some chunks are done")
    for worker in site.workers():
        worker.suspend()
    wait_for(lambda: done(site) >= 2 and site.count("sample") > 2, "this is published")
    assert done(site) < CHUNKS - 1, "there is some left"
    return program


def go_on(site):
    for worker in site.workers():
        worker.resume()


def done(site):
    return site.count("chunk", DONE)


def warnings(outcome):
    """Return all but that of a machine too busy for ten readings a second."""
    said = [line.split("WARNING ")[1].strip() for line in outcome.stderr.splitlines() if "WARNING" in line]
    return [words for words in said if not words.startswith("the recorder was late")]


def assert_all_done(ended, database):
    assert ended.exit_code == 0, ended.stderr
    assert rows(database, "PRAGMA integrity_check") == [("ok",)]
    assert rows(database, "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", CHUNKS)]
    assert rows(database, "SELECT outcome, count(*) FROM attempt GROUP BY outcome") == [("done", CHUNKS)]
    heard = dict(rows(database, "SELECT chunk_id, count(*) FROM detection GROUP BY chunk_id"))
    assert heard == {f"c{i:03d}": i % 3 for i in range(CHUNKS) if i % 3}
    assert rows(database, "SELECT verdict, exit_code, ended_at_ms > started_at_ms FROM task") == [("done", 0, 1)]
    assert {path.suffix for path in database.parent.iterdir()} == {".log", ".sqlite"}


def test_a_full_local_disk_pauses_the_run_and_costs_readings_and_nothing_else(site, local_disk):
    program = start(site)
    local_disk.stay_full()
    wait_for(lambda: "readings cannot be written" in program.stderr, "the disk to refuse")
    go_on(site)
    wait_for(lambda: "the work pauses" in program.stderr, "the disk to refuse results")
    local_disk.make_room()
    ended = program.wait()
    assert_all_done(ended, site.task_database())
    lost = site.rows("SELECT from_ms, to_ms FROM gap WHERE reason LIKE 'could not be written%' ORDER BY from_ms")
    for from_ms, to_ms in lost:
        assert site.count("sample", f"at_ms > {from_ms} AND at_ms < {to_ms}") == 0
    assert lost
    assert list(site.local.iterdir()) == []
    assert "telemetry incomplete" in ended.stdout and "could not be written" in ended.stdout
    assert 1 <= len(warnings(ended)) <= len(lost) + 2, ended.stderr


def test_a_local_folder_that_is_tidied_away_is_not_missed(site):
    """Its files have no name any more, but the process that writes them has them open."""
    program = start(site)
    (folder,) = site.local.iterdir()
    while folder.exists():  # a file may have come while we were at it
        shutil.rmtree(folder, ignore_errors=True)
    go_on(site)
    assert_all_done(program.wait(), site.task_database())
    [(last_ms, last_chunk_ms)] = site.rows("SELECT max(at_ms), (SELECT max(ended_at_ms) FROM attempt) FROM sample")
    assert last_ms >= last_chunk_ms, "the readings of all the time are there"


def test_a_run_folder_that_refuses_is_published_to_later_and_at_the_end_it_is_said_what_is_missing(site):
    with small_disk(site.out, "8m") as run_disk:
        program = start(site)
        run_disk.stay_full()
        wait_for(lambda: "could not be published" in program.stderr, "the folder to refuse")
        samples = site.count_now("sample")
        wait_for(lambda: site.count_now("sample") > samples, "it records on")
        run_disk.make_room()
        wait_for(lambda: "is published again" in program.stderr, "it is published")
        assert site.gaps() == []
        run_disk.stay_full()
        go_on(site)
        ended = program.wait()
        assert (ended.exit_code, f"chunks      {CHUNKS} done of {CHUNKS}" in ended.stdout) == (4, True)
        assert rows(site.task_database(), "PRAGMA integrity_check") == [("ok",)], "the old file"
        assert "the last publication failed" in ended.stdout
        (folder,) = site.local.iterdir()
        assert f"the task's own files stay in {folder}" in ended.stdout
        assert len(warnings(ended)) <= 2, "one warning each time, not one per interval"
        samples_there = rows(folder / "recorder.sqlite", "SELECT count(*) FROM sample")
        job = site.folder / "elsewhere.sqlite"
        assert site.badcjobs("merge", site.out, folder, "-o", job).exit_code == 0
    assert rows(job, "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", CHUNKS)]
    assert rows(job, "SELECT count(*) FROM sample") == samples_there, "what stayed on the node is merged, too"


WRITES = 'head -c 200000 /dev/zero > "$2.part" || exit 1; echo start_time,end_time,label,score > "$2"; rm "$2.part"'
NOT_DONE = "SELECT DISTINCT outcome FROM attempt WHERE outcome <> 'done'"


@pytest.mark.parametrize("trouble", ["full", "read-only", "full for a while"])
@pytest.mark.parametrize("needs_disk", ["the program", "cutting"])
def test_a_node_without_a_usable_disk_pauses_then_stops_and_no_chunk_is_charged(site, local_disk, trouble, needs_disk):
    """What a program or a cut needs the disk for fails; the disk may be too full for the program's own words."""
    script = site.script("slow.sh", f"while [ ! -e {site.folder}/gate ]; do sleep 0.02; done; {WRITES}")
    engine = ("--command", f"{script} {{input}} {{output}}")
    manifest, gate = site.manifest(6), site.folder / "gate"
    if needs_disk == "cutting":
        manifest.write_text(manifest.read_text().replace(",600,1200,", ",0,300,").replace(",1200,1800,", ",0,300,"))
    options = ("--cpu-workers", 1, "--no-emit-gpu-telemetry", "--retries", 0, "--config", "run.backoff_s=0.2")
    program = site.start_run(manifest, *engine, *options)
    wait_for(lambda: site.count_now("attempt"), "a chunk is begun")
    if trouble == "read-only":
        with read_only(site.local):
            gate.touch()
            ended = program.wait()
    else:
        local_disk.stay_full()
        gate.touch()
        wait_for(lambda: "a fault of this node, not of a chunk" in program.stderr, "it is noticed")
        if trouble == "full for a while":
            local_disk.make_room()
        ended = program.wait()
        local_disk.let_be()
    expected = (0, 6) if trouble == "full for a while" else (75, 0)
    assert (ended.exit_code, done(site)) == expected, ended.stderr
    assert site.count("chunk", "status = 'pending'") == 6 - expected[1]
    not_written = [] if trouble == "full" else [("lost",)]
    assert site.rows(NOT_DONE) == not_written, "no try is charged"
    assert ("this node cannot work now" in ended.stdout) == (ended.exit_code == 75)
