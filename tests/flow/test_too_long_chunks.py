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


def run(site: Site, long: str, *others: object, prefix: str = "c") -> Outcome:
    """Run 60 chunks, one of them a long one, on the stand-in package and two simulated devices."""
    manifest, root, audio = site.manifest(60, prefix=prefix), site.folder / "root", site.folder / "audio"
    make_wav(audio / f"{long}.wav", LONG_S, 1000, loud=LOUD, tone_hz=100)
    lines = manifest.read_text().splitlines()
    lines[int(long[1:]) + 1] = f"long,{long},{audio}/{long}.wav,0,{LONG_S * 1000},0,,"
    manifest.write_text("\n".join(lines) + "\n")
    broken = {"c017": b"#fake SIGSEGV", "c023": b"no audio", "c043": b"RIFF, but not for long", "c050": b"#fake oom"}
    for name, content in {**broken, "c051": b""}.items():
        Path(audio / f"{name}.wav").write_bytes(content)
    if not root.exists():
        make_fake_root(root)
    options = ("--engine", "hawkears", "--hawkears-python", sys.executable, "--hawkears-root", root, "--simulate", 2)
    env = {**fake_package_environ(), **ROOM}
    return site.run(manifest, *options, "--engine-arg=--threads=2", "--json", *others, env=env, timeout_s=90)


def test_poison_and_bad_audio_are_named_and_a_chunk_that_is_too_long_is_done_in_pieces(site: Site) -> None:
    mixed = run(site, "c025")
    assert mixed.exit_code == 1, mixed.stderr
    assert {chunk["chunk_id"]: chunk["error_class"] for chunk in mixed.json["failed"]} == {
        "c017": "engine_crash", "c023": "bad_audio", "c043": "bad_audio", "c050": "out_of_memory", "c051": "bad_audio",
    }  # fmt: skip
    assert mixed.json["chunks"] == {"done": 55, "failed": 4, "poison": 1}
    assert site.count("attempt", "outcome = 'failed' AND chunk_id = 'c017'") == 2, "twice alone, and no third time"
    lost = site.rows("SELECT count(DISTINCT chunk_id) FROM attempt WHERE outcome = 'lost'")
    assert lost[0][0] <= 4, "only what was in progress beside the poison was tried again"
    heard = site.rows("SELECT start_ms, end_ms FROM detection WHERE chunk_id = 'c025' ORDER BY start_ms")
    assert heard == [(5000, 6000), (19_500, 22_000), (35_000, 36_000)], "those of both halves, on its own time"
    assert site.rows("SELECT audio_s, detections FROM chunk WHERE chunk_id = 'c025'") == [(LONG_S, 3)]
    tries = "SELECT outcome, error_class, pieces FROM attempt WHERE chunk_id = 'c025' AND outcome != 'lost'"
    oom = ("failed", "out_of_memory", None)
    assert site.rows(f"{tries} ORDER BY attempt_id") == [oom, oom, ("done", None, 2)]
    ((seconds, why),) = site.rows("SELECT value, reason FROM decision WHERE kind = 'memory_limit'")
    assert seconds == LONG_S
    assert why.startswith("a chunk ran out of memory: ") and f"{LONG_S} s or more is cut into pieces" in why
    assert not list(site.folder.rglob("*~*s.wav")), "no piece is left behind"

    before = set(site.task_databases())
    later = run(site, "d030", "--shard", "0/5", "--no-resume", prefix="d")
    assert later.exit_code == 0, later.stderr
    (database,) = set(site.task_databases()) - before
    found = "SELECT chunk_id, a.pieces, attempts, detections FROM chunk JOIN attempt a USING (chunk_id)"
    assert rows(database, f"{found} WHERE audio_s = ?", LONG_S) == [("d030", 2, 1, 3)], "a later task starts with them"
    ((why,),) = rows(database, "SELECT reason FROM decision WHERE kind = 'memory_limit'")
    assert why.startswith("learned by an earlier task: audio of ")
