"""How fast ``badcjobs merge`` is, against a plain sqlite-utils loop and against ``cat``, all in one run on one machine.

    python tests/bench/merge.py                 1,000 task files of 14,400 samples: about 4 minutes, 4 GB of disk
    python tests/bench/merge.py --scale 1/50    20 of them: seconds

Prints a table of what was measured, the promise and whether it was kept; exits with 1 when one was not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.databases import canonical
from support.many_tasks import write_tasks

FILES, BASELINE_FILES, ROUNDS = 1000, 20, 5


# --- what is timed, each in a process of its own ----------------------------------------------------------------------


def merge_all(folder: Path) -> dict[str, float]:
    """Merge a folder as the command does: rows, chunks, detections, figures, row check; then summarise."""
    from rooms.report import summarize_database
    from rooms.root import SystemClock
    from rooms.store import MergeOrder, merge

    started_s = time.perf_counter()
    outcome = merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    merged_s = time.perf_counter()
    assert not any(file.lost_something for file in outcome.files)
    summarize_database(folder / "job.sqlite")
    return {"merge_s": merged_s - started_s, "summary_s": time.perf_counter() - merged_s, "read": outcome.read}


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


class Report:
    """A line per figure, with its promise."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self.broken = 0

    def at_least(self, what: str, figure: float, least: float, form: str) -> None:
        """Promise that a figure is large enough."""
        self._add(what, figure, f"at least {form.format(least)}", form, kept=figure * self._slack >= least)

    def at_most(self, what: str, figure: float, most: float, form: str) -> None:
        """Promise that a figure is small enough."""
        self._add(what, figure, f"at most {form.format(most)}", form, kept=figure <= most * self._slack)

    def just(self, what: str, figure: float, form: str) -> None:
        """Say a figure that nothing is promised about."""
        self._add(what, figure, "", form)

    def _add(self, what: str, figure: float, promise: str, form: str, *, kept: bool = True) -> None:
        self.broken += not kept
        verdict = "" if not promise else "kept" if kept else "BROKEN"
        print(f"  {what:<48} {form.format(figure):>10}   {promise:<18} {verdict}".rstrip(), flush=True)


def run(folder: Path, scale: Fraction, slack: float) -> int:
    files = max(10, int(FILES * scale))
    more = max(1, files // 100)
    print(f"merge: {files:,} task files of 14,400 samples, 3,600 host samples and 240 chunks each (scale {scale})")
    written = write_tasks(folder / "all", range(files + more))
    late = written[files:]
    (folder / "late").mkdir()
    for path in late:
        path.rename(folder / "late" / path.name)
    report = Report(slack)
    full, per_file_s = judge_full_merge(report, folder, written[:files], scale)
    judge_flatness(report, per_file_s)
    for path in late:
        (folder / "late" / path.name).rename(path)
    judge_more_files(report, folder, full["merge_s"], more, files)
    print(f"  ({full['merge_s']:.1f} s, {files * 14_400 / full['merge_s']:,.0f} samples/s)")
    return 1 if report.broken else 0


def judge_full_merge(
    report: Report, folder: Path, written: list[Path], scale: Fraction
) -> tuple[dict[str, float], dict[int, float]]:
    """Measure a full merge against the loop and ``cat``; return it, and the time of a file among few and many."""
    everything, files = folder / "all", len(written)
    baseline = BASELINE_FILES if scale == 1 else ROUNDS
    faster_rows = compare_rows(everything, baseline // ROUNDS)
    # The loop before and after: a machine is not equally fast at all times.
    before = measure("sqlite_utils_loop", everything, "all", 0, (baseline + 1) // 2)
    cat_s = time_cat(written, folder / "cat")
    full = time_merge(everything, again=files < 100)
    after = measure("sqlite_utils_loop", everything, "all", (baseline + 1) // 2, baseline // 2)
    loop_s = (before["seconds"] + after["seconds"]) / (before["files"] + after["files"])
    total_s = full["merge_s"] + full["summary_s"]
    few = [n for n in (files // 100, files // 10) if n >= 2]
    per_file_s = {**{n: time_some(folder, written, n) for n in few}, files: full["merge_s"] / files}

    report.at_least("rows alone, against sqlite-utils insert_all", faster_rows, 25, "{:.0f} ×")
    report.at_least("everything, against sqlite-utils insert_all", loop_s / (total_s / files), 12, "{:.0f} ×")
    report.at_most("everything, in times of cat (both synced)", total_s / cat_s, 60, "{:.0f} ×")
    report.at_most("peak memory", full["memory_mb"], 200, "{:.0f} MB")
    report.at_most("summary of the whole array", full["summary_s"], 10, "{:.1f} s")
    return full, per_file_s


def compare_rows(folder: Path, baseline: int) -> float:
    """Copy the samples of all files and of a few by the loop, in turns; return how many times faster we are."""
    loop_s = loop_rows = our_s = our_rows = 0.0
    for part in range(ROUNDS):
        loop = measure("sqlite_utils_loop", folder, "sample", part * baseline, baseline)
        loop_s, loop_rows = loop_s + loop["seconds"], loop_rows + loop["rows"]
        ours = measure("merge_samples", folder, part)
        our_s, our_rows = our_s + ours["seconds"], our_rows + ours["rows"]
    return (loop_s / loop_rows) / (our_s / our_rows)


def judge_flatness(report: Report, per_file_s: dict[int, float]) -> None:
    """Compare a file among many with one among few; few files also pay for what is done once."""
    for n, seconds in per_file_s.items():
        report.just(f"a file, of {n:,}", seconds * 1000, "{:.0f} ms")
    many = max(per_file_s)
    worst = max(per_file_s[many] / seconds for seconds in per_file_s.values())
    report.at_most("a file of all, against one of few", worst, 1.5, "{:.2f} ×")


def judge_more_files(report: Report, folder: Path, full_s: float, more: int, files: int) -> None:
    """Add a hundredth of the files to a merged job."""
    job, before = folder / "all" / "job.sqlite", folder / "before.sqlite"
    shutil.copyfile(job, before)
    seconds = []
    for _ in range(3 if files < 100 else 1):  # a short merge three times, of which the best counts, like the full one
        shutil.copyfile(before, job)
        again = measure("merge_all", folder / "all")
        assert again["read"] == more
        seconds.append(again["merge_s"])
    before.unlink()
    share, allowed = min(seconds) / full_s, 3 * more / files
    report.at_most(f"{more} more on top of {files:,}, of the full merge", share, allowed, "{:.1%}")
    idle = measure("merge_all", folder / "all")
    report.just("nothing new, of the full merge", idle["merge_s"] / full_s, "{:.1%}")
    if files <= 50:
        assert same_as_in_one_go(folder), "merging in two goes gives another content than in one"


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


def same_as_in_one_go(folder: Path) -> bool:
    by_parts = folder / "all" / "job.sqlite"
    kept = folder / "by-parts.sqlite"
    by_parts.rename(kept)
    measure("merge_all", folder / "all")
    return canonical(kept) == canonical(by_parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=Fraction, default=Fraction(1), help="share of the 1,000 files, like 1/50")
    parser.add_argument("--slack", type=float, default=1, help="forgive a factor, on a machine that is busy otherwise")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part[0], args.part[1:])
        return 0
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        return run(Path(folder), args.scale, args.slack)


if __name__ == "__main__":
    sys.exit(main())
