"""How fast ``badcjobs merge`` is, against a plain sqlite-utils loop and against ``cat``, all in one run on one machine.

python tests/bench/merge.py            1,000 task files of 14,400 samples: about 4 minutes, 4 GB of disk
python tests/bench/merge.py --small    10 of them: seconds
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.many_tasks import write_tasks
from support.measured import Promises, main

FILES, BASELINE_FILES, ROUNDS = 1000, 20, 5


# --- what is timed, each in a process of its own ----------------------------------------------------------------------


def merge_all(folder: Path) -> dict[str, float]:
    """Merge a folder as the command does: rows, chunks, detections, figures, row check; then summarise."""
    from rooms.report import summarize_database
    from rooms.root import SystemClock
    from rooms.store import MergeOrder, merge

    started_s, used_s = time.perf_counter(), time.process_time()
    outcome = merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    merged_s, used_s = time.perf_counter(), time.process_time() - used_s
    assert not any(file.lost_something for file in outcome.files)
    summarize_database(folder / "job.sqlite")
    summary_s = time.perf_counter() - merged_s
    return {"merge_s": merged_s - started_s, "cpu_s": used_s, "summary_s": summary_s, "read": outcome.read}


def merge_samples(folder: Path, part: str) -> dict[str, float]:
    """Copy the samples of a part of the files alone, by the same statements, and index them as merge does."""
    from rooms.store import copy_table, index_samples, open_draft, read_only_uri

    files = sorted((folder / "tasks").glob("*.sqlite"), key=task_id_of)[int(part) :: ROUNDS]
    started_s = time.perf_counter()
    with closing(open_draft(folder / "samples.sqlite", new=True)) as db:
        for path in files:
            db.execute("ATTACH ? AS source", (read_only_uri(path, sealed=True),))
            db.execute("BEGIN")
            copy_table(db, "source", "sample")
            db.execute("COMMIT")
            db.execute("DETACH source")
        index_samples(db)
        spent_s = time.perf_counter() - started_s
        (rows,) = db.execute("SELECT count(*) FROM sample").fetchone()
    (folder / "samples.sqlite").unlink()
    return {"seconds": spent_s, "rows": rows}


def task_id_of(path: Path) -> int:
    from rooms.model import stable_id

    return stable_id(path.stem)


def sqlite_utils_loop(folder: Path, tables: str, first: str, files: str) -> dict[str, float]:
    """Do what one would write first: for each of some files, for each table, insert_all."""
    import sqlite_utils

    paths = sorted((folder / "tasks").glob("*.sqlite"))[int(first) :][: int(files)]
    target = sqlite_utils.Database(folder / "plain.sqlite")
    rows = 0
    started_s = time.perf_counter()
    for path in paths:
        source = sqlite_utils.Database(path)
        for table in source.table_names():
            if table != "meta" and tables in ("all", table) and source[table].count:
                target[table].insert_all(source[table].rows)
                rows += source[table].count
        source.close()
    spent_s = time.perf_counter() - started_s
    target.close()
    (folder / "plain.sqlite").unlink()
    return {"seconds": spent_s, "rows": rows, "files": len(paths)}


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "merge_all": merge_all,
    "merge_samples": merge_samples,
    "sqlite_utils_loop": sqlite_utils_loop,
}


def measure(part: str, *args: object) -> dict[str, float]:
    """Run one part in a process of its own and return what it measured, with its peak memory."""
    done = subprocess.run([sys.executable, __file__, "--part", part, *map(str, args)], check=True, capture_output=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def run_part(part: str, args: list[str]) -> None:
    result = PARTS[part](Path(args[0]), *args[1:])
    status = Path("/proc/self/status").read_text()  # not ru_maxrss: that is inherited from who started us
    result["memory_mb"] = int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) / 1024
    print(json.dumps(result))


# --- the run ----------------------------------------------------------------------------------------------------------


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Merge from nothing, some of the files, and a few more on top."""
    files = FILES // 100 if small else FILES
    more = max(1, files // 100)
    print(f"merge: {files:,} task files of 14,400 samples, 3,600 host samples and 240 chunks each")
    written = write_tasks(folder / "all", range(files + more))
    late = written[files:]
    (folder / "late").mkdir()
    for path in late:
        path.rename(folder / "late" / path.name)
    full, per_file_s = judge_full_merge(promises, folder, written[:files])
    judge_flatness(promises, per_file_s)
    for path in late:
        (folder / "late" / path.name).rename(path)
    judge_more_files(promises, folder, full, more, files)
    promises.just("samples per second", files * 14_400 / full["merge_s"], "")


def judge_full_merge(
    promises: Promises, folder: Path, written: list[Path]
) -> tuple[dict[str, float], dict[int, float]]:
    """Measure a full merge against the loop and ``cat``; return it, and the time of a file among few and many."""
    everything, files = folder / "all", len(written)
    rounds, baseline = (1, 2) if files < 100 else (ROUNDS, BASELINE_FILES)
    faster_rows = compare_rows(everything, rounds, baseline // ROUNDS or 1)
    # The loop before and after: a machine is not equally fast at all times.
    before = measure("sqlite_utils_loop", everything, "all", 0, (baseline + 1) // 2)
    cat_s = time_cat(written, folder / "cat")
    full = time_merge(everything, again=files < 100)
    after = measure("sqlite_utils_loop", everything, "all", (baseline + 1) // 2, baseline // 2)
    loop_s = (before["seconds"] + after["seconds"]) / (before["files"] + after["files"])
    total_s = full["merge_s"] + full["summary_s"]
    few = [n for n in (files // 100, files // 10) if n >= 2]
    per_file_s = {**{n: time_some(folder, written, n) for n in few}, files: full["merge_s"] / files}

    promises.at_least("rows alone, against sqlite-utils insert_all", faster_rows, 25, "×")
    promises.at_least("everything, against sqlite-utils insert_all", loop_s / (total_s / files), 12, "×")
    promises.at_most("everything, in times of cat (both synced)", total_s / cat_s, 60, "×")
    promises.at_most("peak memory", full["memory_mb"], 200, "MB", is_time=False)
    promises.at_most("summary of the whole array", full["summary_s"], 10, "s")
    return full, per_file_s


def compare_rows(folder: Path, rounds: int, baseline: int) -> float:
    """Copy the samples of all files and of a few by the loop, in turns; return how many times faster we are."""
    loop_s = loop_rows = our_s = our_rows = 0.0
    for part in range(rounds):
        loop = measure("sqlite_utils_loop", folder, "sample", part * baseline, baseline)
        loop_s, loop_rows = loop_s + loop["seconds"], loop_rows + loop["rows"]
        ours = measure("merge_samples", folder, part)
        our_s, our_rows = our_s + ours["seconds"], our_rows + ours["rows"]
    return (loop_s / loop_rows) / (our_s / our_rows)


def judge_flatness(promises: Promises, per_file_s: dict[int, float]) -> None:
    """Compare a file among many with one among few; few files also pay for what is done once."""
    for n, seconds in per_file_s.items():
        promises.just(f"a file, of {n:,}", seconds * 1000, "ms")
    many = max(per_file_s)
    worst = max(per_file_s[many] / seconds for seconds in per_file_s.values())
    promises.at_most("a file of all, against one of few", worst, 1.5, "×")


def judge_more_files(promises: Promises, folder: Path, full: dict[str, float], more: int, files: int) -> None:
    """Add a hundredth of the files to a merged job."""
    again = measure("merge_all", folder / "all")
    assert again["read"] == more
    key = "cpu_s" if files < 100 else "merge_s"  # a short merge mostly waits for the disk, which others use, too
    share, allowed = 100 * again[key] / full[key], 300 * more / files
    promises.at_most(f"{more} more on top of {files:,}, of the full merge", share, allowed, "%")
    idle = measure("merge_all", folder / "all")
    promises.just("nothing new, of the full merge", 100 * idle[key] / full[key], "%")


def time_merge(folder: Path, *, again: bool) -> dict[str, float]:
    """Merge from nothing; a short merge three times, of which the best counts."""
    runs = []
    for _ in range(3 if again else 1):
        (folder / "job.sqlite").unlink(missing_ok=True)
        runs.append(measure("merge_all", folder))
    return min(runs, key=lambda result: result["merge_s"])


def time_cat(files: list[Path], target: Path) -> float:
    """Return the seconds that ``cat`` takes for the same bytes, until they are on disk: merge syncs what it writes."""
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        with target.open("wb") as out:
            subprocess.run(["xargs", "-0", "cat"], input="\0".join(map(str, files)).encode(), stdout=out, check=True)
            os.fsync(out.fileno())
        seconds.append(time.perf_counter() - started_s)
        target.unlink()
    return min(seconds)


def time_some(folder: Path, written: list[Path], n: int) -> float:
    """Return the seconds for each of the first ``n`` files, merged alone."""
    place = folder / f"first{n}"
    (place / "tasks").mkdir(parents=True)
    for path in written[:n]:
        (place / "tasks" / path.name).hardlink_to(path)
    seconds = time_merge(place, again=n <= 100)["merge_s"] / n
    shutil.rmtree(place)
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        run_part(sys.argv[2], sys.argv[3:])
    else:
        main(__doc__, bench)
