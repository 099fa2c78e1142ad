"""How fast ``badcjobs merge`` is, against a plain sqlite-utils loop and against ``cat``, all in one run on one machine.

python tests/bench/merge.py            1,000 task files of 14,400 samples: about 4 minutes, 4 GB of disk
python tests/bench/merge.py --small    6 shorter ones: seconds
"""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import sqlite_utils
from rooms.report import summarize_database
from support.measured import Promises, main
from support.synthetic_job import write_tasks
from support.task_files import merge_run


def merge_all(folder: Path) -> dict[str, float]:
    """Merge a folder as the command does: rows, chunks, detections, figures, row check; then summarise."""
    started_s = time.perf_counter()
    outcome = merge_run(folder)
    merge_s = time.perf_counter() - started_s
    assert not any(file.lost_something for file in outcome.files)
    summarize_database(folder / "job.sqlite")
    total_s = time.perf_counter() - started_s
    peak_kb = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]
    return {"merge_s": merge_s, "total_s": total_s, "read": outcome.read, "mb": int(peak_kb) / 1024}


def merge_apart(folder: Path) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(merge_all, folder).result()


def time_loop(files: list[Path], target: Path) -> float:
    """Do what one would write first: for each file, for each table, insert_all; return the seconds for a file."""
    started_s, merged = time.perf_counter(), sqlite_utils.Database(target)
    for path in files:
        source = sqlite_utils.Database(path)
        for table in (table for table in source.table_names() if table != "meta"):
            merged[table].insert_all(source[table].rows)
        source.close()
    merged.close()
    target.unlink()
    return (time.perf_counter() - started_s) / len(files)


def time_cat(files: list[Path], target: Path) -> float:
    """Return the seconds that ``cat`` takes for the same bytes, until they are on disk: merge syncs what it writes."""
    started_s = time.perf_counter()
    with target.open("wb") as out:
        subprocess.run(["xargs", "-0", "cat"], input="\0".join(map(str, files)).encode(), stdout=out, check=True)
        os.fsync(out.fileno())
    target.unlink()
    return time.perf_counter() - started_s


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Merge a hundredth of the files, then all of them from nothing, and a few more on top."""
    files, more, few, seconds = (6, 1, 3, 300) if small else (1000, 10, 10, 3600)
    print(f"merge: {files:,} task files of about {4 * seconds:,} samples, {seconds:,} host samples and 240 chunks each")
    written = write_tasks(folder / "few", range(few), seconds) + write_tasks(folder / "all", range(few, files), seconds)
    write_tasks(folder / "late", range(files, files + more), seconds)
    loops_s = [time_loop(written[: 1 if small else 10], folder / "plain.sqlite")]
    cat_s = min(time_cat(written, folder / "cat") for _ in range(3))
    among_few_s = merge_apart(folder / "few")["merge_s"] / few
    for path in written[:few]:
        path.rename(folder / "all" / "tasks" / path.name)
    full = merge_apart(folder / "all")
    written = sorted((folder / "all" / "tasks").iterdir())
    loops_s.append(time_loop(written[-1 if small else -10 :], folder / "plain.sqlite"))
    loop_s = sum(loops_s) / 2  # before and after: a machine is not equally fast at all times
    promises.at_least("everything, against sqlite-utils insert_all", loop_s / (full["total_s"] / files), 12, "×")
    promises.at_most("everything, in times of cat (both synced)", full["total_s"] / cat_s, 60, "×")
    promises.at_most("peak memory", full["mb"], 200, "MB", is_time=False)
    promises.at_most("summary of the whole array", full["total_s"] - full["merge_s"], 10, "s")
    promises.at_most(f"a file of {files:,}, against one of {few}", full["merge_s"] / files / among_few_s, 1.5, "×")
    for path in (folder / "late" / "tasks").iterdir():
        path.rename(folder / "all" / "tasks" / path.name)
    again = merge_apart(folder / "all")
    assert again["read"] == more
    share, allowed = 100 * again["merge_s"] / full["merge_s"], 300 * more / files
    promises.at_most(f"{more} more on top of {files:,}, of the full merge", share, allowed, "%")
    promises.just("samples per second", files * 4 * seconds / full["merge_s"], "")


if __name__ == "__main__":
    main(__doc__, bench)
