"""How large the page of a report is and how long it takes, for a job of 100,000 chunks in 1,000 array tasks.

    python tests/bench/report_page.py                 about a minute, 1 GB of disk
    python tests/bench/report_page.py --tasks 100

Prints a table of what was measured, the promise and whether it was kept; exits with 1 when one was not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import Browser
from support.synthetic_job import CHUNKS, DEVICES, write_job

_READY = "document.documentElement.dataset.ready === 'yes'"
_MADE_S, _SIZE_MB, _READY_S = 10.0, 6.0, 10.0
_LONG_MESSAGE = "Traceback (most recent call last):\n" + '  File "engine.py", line 1, in <module>\n' * 200


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, metavar="N", help="array tasks, of 100 chunks each")
    tasks = parser.parse_args().tasks
    with tempfile.TemporaryDirectory() as folder:
        return judge(Path(folder) / "june", tasks)


def judge(folder: Path, tasks: int) -> int:
    """Make the job and its page, and hold them against what was promised."""
    print(f"report page: {tasks:,} array tasks, {tasks * DEVICES:,} devices, {tasks * CHUNKS:,} chunks")
    write_job(folder, tasks)
    run("merge", str(folder))
    target = folder / "again.html"
    made_s = min(run("report", str(folder), "--html", str(target)) for _ in range(2))
    size_mb = target.stat().st_size / 1e6
    spoil(folder / "job.sqlite")
    run("report", str(folder), "--html", str(folder / "spoilt.html"))
    spoilt_mb = (folder / "spoilt.html").stat().st_size / 1e6
    lines = [
        ("badcjobs report --html, the whole command", made_s, "s", _MADE_S),
        ("size of the page", size_mb, "MB", _SIZE_MB),
        ("size with 1,000 failed chunks and a long message each", spoilt_mb, "MB", _SIZE_MB),
        ("in the browser, until it can be used", time_browser(target), "s", _READY_S),
    ]
    for name, value, unit, most in lines:
        print(f"  {name:56} {value:6.2f} {unit:2}   at most {most:g} {unit:2}   {'ok' if value <= most else 'BROKEN'}")
    return 1 if any(value > most for _, value, _, most in lines) else 0


def run(*arguments: str) -> float:
    """Run badcjobs and return how many seconds it took."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "badcjobs", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_s


def spoil(database: Path) -> None:
    """Let a thousand chunks fail with as long a message as an engine may give."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(database)) as db, db:
        db.execute(
            """UPDATE chunk SET status = 'failed', error_class = 'crash', error = ?
               WHERE rowid IN (SELECT rowid FROM chunk LIMIT 1000)""",
            (_LONG_MESSAGE,),
        )


def time_browser(page: Path) -> float:
    """Return how long Chromium takes until the charts are there and the tables can be sorted."""
    with Browser() as browser:
        started_s = time.perf_counter()
        browser.open(page.as_uri(), ready=_READY)
        return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
