"""A chunk that is too long for the GPU among many that are not, and others that are broken: all is told apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import Outcome, Site, rows
from support.fake_hawkears import make_fake_root
from support.fake_hawkears_package import fake_package_environ

LONG_S = 40
# Two threads have no room for it, one has not either, and for its pieces of 24 s one has.
ROOM = {"FAKE_HAWKEARS_ROOM_S": "30", "FAKE_HAWKEARS_EARS": "loud", "HOME": "/nonexistent"}
LOUD = [(5.0, 6.0), (19.5, 22.0), (35.0, 36.0)]  # the second lies across the joint, at 21 s


def with_a_long_chunk(manifest: Path, chunk_id: str) -> Path:
    """Make one chunk of a manifest a long one."""
    lines = manifest.read_text().splitlines()
    for number, line in enumerate(lines):
        recording_id, found, audio, *_ = line.split(",")
        if found == chunk_id:
            make_wav(audio, LONG_S, 1000, loud=LOUD, tone_hz=100)
            lines[number] = f"{recording_id},{chunk_id},{audio},0,{LONG_S * 1000},0,,"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def run(site: Site, manifest: Path, *others: object) -> Outcome:
    root = site.folder / "root"
    if not root.exists():
        make_fake_root(root)
    options = ("--engine", "hawkears", "--hawkears-python", sys.executable, "--hawkears-root", root, "--simulate", 2)
    environ = {**fake_package_environ(), **ROOM}
    return site.run(manifest, *options, "--engine-arg=--threads=2", "--json", *others, env=environ, timeout_s=90)


@pytest.fixture(scope="module")
def mixed(shared_site: Site) -> Outcome:
    """A run of 500 chunks, four of which are not like the others."""
    manifest = with_a_long_chunk(shared_site.manifest(500), "c250")
    broken = {"c017": b"#fake SIGSEGV", "c063": b"RIFF, but not for long", "c101": b""}
    for name, content in broken.items():
        (shared_site.folder / "audio" / f"{name}.wav").write_bytes(content)
    return run(shared_site, manifest)


def test_poison_corrupt_and_empty_are_named_and_the_long_one_is_done(mixed: Outcome, shared_site: Site) -> None:
    assert mixed.exit_code == 1, mixed.stderr
    assert {chunk["chunk_id"]: chunk["error_class"] for chunk in mixed.json["failed"]} == {
        "c017": "engine_crash", "c063": "bad_audio", "c101": "bad_audio",
    }  # fmt: skip
    assert shared_site.rows("SELECT status, count(*) FROM chunk GROUP BY status ORDER BY 1") == [
        ("done", 497), ("failed", 2), ("poison", 1),
    ]  # fmt: skip


def test_the_long_one_has_the_detections_of_both_halves_on_its_own_time(mixed: Outcome, shared_site: Site) -> None:
    heard = shared_site.rows("SELECT start_ms, end_ms FROM detection WHERE chunk_id = 'c250' ORDER BY start_ms")
    assert heard == [(5000, 6000), (19_500, 22_000), (35_000, 36_000)]
    assert shared_site.rows("SELECT audio_s, detections FROM chunk WHERE chunk_id = 'c250'") == [(LONG_S, 3)]


def test_each_step_down_is_an_attempt(mixed: Outcome, shared_site: Site) -> None:
    attempts = shared_site.rows(
        "SELECT try_number, outcome, error_class, pieces FROM attempt WHERE chunk_id = 'c250' AND outcome != 'lost'"
        " ORDER BY attempt_id"
    )
    assert [attempt[1:] for attempt in attempts] == [
        ("failed", "out_of_memory", None), ("failed", "out_of_memory", None), ("done", None, 2),
    ]  # fmt: skip
    ((seconds, why),) = shared_site.rows("SELECT value, reason FROM decision WHERE kind = 'memory_limit'")
    assert seconds == LONG_S
    assert why.startswith("a chunk ran out of memory: ") and f"{LONG_S} s or more is cut into pieces" in why


def test_no_piece_is_left_behind(mixed: Outcome, shared_site: Site) -> None:
    assert not list(shared_site.folder.rglob("*~*s.wav"))


def test_a_later_task_of_the_run_starts_with_the_halves(mixed: Outcome, shared_site: Site) -> None:
    before = set(shared_site.task_databases())
    manifest = with_a_long_chunk(shared_site.manifest(500, prefix="d"), "d300")
    done = run(shared_site, manifest, "--shard", "0/5", "--no-resume")
    assert done.exit_code == 0, done.stderr
    (database,) = set(shared_site.task_databases()) - before
    found = rows(database, "SELECT chunk_id, attempts, detections FROM chunk WHERE audio_s = ?", LONG_S)
    assert found == [("d300", 1, 3)]
    assert rows(database, "SELECT pieces FROM attempt WHERE chunk_id = 'd300'") == [(2,)]
    ((why,),) = rows(database, "SELECT reason FROM decision WHERE kind = 'memory_limit'")
    assert why.startswith("learned by an earlier task: audio of ")
