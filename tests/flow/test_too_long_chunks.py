"""A chunk that is too long for the GPU among many that are not, and others that are broken: all is told apart."""

from __future__ import annotations

import sys
from pathlib import Path

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


def test_a_chunk_that_is_too_long_is_done_in_pieces_and_a_later_task_starts_with_them(site: Site) -> None:
    manifest = with_a_long_chunk(site.manifest(60), "c025")
    broken = {"c017": b"#fake SIGSEGV", "c043": b"RIFF, but not for long", "c051": b""}
    for name, content in broken.items():
        (site.folder / "audio" / f"{name}.wav").write_bytes(content)
    mixed = run(site, manifest)
    assert mixed.exit_code == 1, mixed.stderr
    assert {chunk["chunk_id"]: chunk["error_class"] for chunk in mixed.json["failed"]} == {
        "c017": "engine_crash", "c043": "bad_audio", "c051": "bad_audio",
    }  # fmt: skip
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status ORDER BY 1") == [
        ("done", 57), ("failed", 2), ("poison", 1),
    ]  # fmt: skip
    heard = site.rows("SELECT start_ms, end_ms FROM detection WHERE chunk_id = 'c025' ORDER BY start_ms")
    assert heard == [(5000, 6000), (19_500, 22_000), (35_000, 36_000)], "those of both halves, on its own time"
    assert site.rows("SELECT audio_s, detections FROM chunk WHERE chunk_id = 'c025'") == [(LONG_S, 3)]
    attempts = site.rows(
        "SELECT outcome, error_class, pieces FROM attempt WHERE chunk_id = 'c025' AND outcome != 'lost'"
        " ORDER BY attempt_id"
    )
    assert attempts == [("failed", "out_of_memory", None), ("failed", "out_of_memory", None), ("done", None, 2)]
    ((seconds, why),) = site.rows("SELECT value, reason FROM decision WHERE kind = 'memory_limit'")
    assert seconds == LONG_S
    assert why.startswith("a chunk ran out of memory: ") and f"{LONG_S} s or more is cut into pieces" in why
    assert not list(site.folder.rglob("*~*s.wav")), "no piece is left behind"

    before = set(site.task_databases())
    manifest = with_a_long_chunk(site.manifest(60, prefix="d"), "d030")
    done = run(site, manifest, "--shard", "0/5", "--no-resume")
    assert done.exit_code == 0, done.stderr
    (database,) = set(site.task_databases()) - before
    found = rows(database, "SELECT chunk_id, attempts, detections FROM chunk WHERE audio_s = ?", LONG_S)
    assert found == [("d030", 1, 3)]
    assert rows(database, "SELECT pieces FROM attempt WHERE chunk_id = 'd030'") == [(2,)]
    ((why,),) = rows(database, "SELECT reason FROM decision WHERE kind = 'memory_limit'")
    assert why.startswith("learned by an earlier task: audio of ")
