"""Without node-local disk: the safe mode beside the run folder, and told; what it survives is in tests/faults."""

from __future__ import annotations

from support.badcjobs_program import Site

ENGINE = ("--engine", "demo", "--simulate", 2)


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
        ended = site.run(site.manifest(2), *ENGINE, *option, env=env)
        assert ended.exit_code == 0, ended.stderr
        (line,) = [line for line in ended.stderr.splitlines() if "live files: " in line]
        assert [word for word in words if word not in line] == []
        meta = dict(site.rows("SELECT key, value FROM meta WHERE key LIKE 'live%'"))
        where = site.local if mode == "local" else site.out / "tasks"
        assert (meta["live_mode"], meta["live_folder"].startswith(str(where))) == (mode, True)
        assert sorted(path.suffix for path in (site.out / "tasks").iterdir()) == [".log", ".sqlite"]
    refused = site.run(site.manifest(1), *ENGINE, "--config", "run.live_mode=fast")
    assert refused.exit_code == 2
    assert '--config run.live_mode = "fast" must be one of auto, local, shared' in refused.stderr
