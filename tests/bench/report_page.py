"""How large the page of a report is and how long it takes, for a job of 100,000 chunks in 1,000 array tasks.

python tests/bench/report_page.py            about a minute, 1 GB of disk
python tests/bench/report_page.py --small    10 tasks: seconds
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.browser import Browser
from support.databases import change
from support.measured import Promises, main, measure
from support.synthetic_job import CHUNKS, DEVICES, write_job

_LONG_MESSAGE = "Traceback (most recent call last):\n" + '  File "engine.py", line 1, in <module>\n' * 200
_FAIL = """UPDATE chunk SET status = 'failed', error_class = 'crash', error = ?
           WHERE rowid IN (SELECT rowid FROM chunk LIMIT 1000)"""


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Make the job and its page, also with a thousand chunks that failed with the longest message."""
    tasks = 10 if small else 1000
    print(f"report page: {tasks:,} array tasks, {tasks * DEVICES:,} devices, {tasks * CHUNKS:,} chunks")
    write_job(folder / "june", tasks)
    measure("merge", "june", cwd=folder)
    made = measure("report", "june", "--html", "page.html", cwd=folder)
    promises.at_most("badcjobs report --html, the whole command", made.seconds, 10, "s")
    promises.at_most("size of the page", (folder / "page.html").stat().st_size / 1e6, 6, "MB", is_time=False)
    with Browser() as browser:
        began_s = time.perf_counter()
        browser.open((folder / "page.html").as_uri(), ready="document.documentElement.dataset.ready === 'yes'")
        promises.at_most("in the browser, until it can be used", time.perf_counter() - began_s, 10, "s")
    change(folder / "june" / "job.sqlite", _FAIL, _LONG_MESSAGE)
    measure("report", "june", "--html", "failed.html", cwd=folder)
    failed_mb = (folder / "failed.html").stat().st_size / 1e6
    promises.at_most("size with 1,000 failed chunks, a long message each", failed_mb, 6, "MB", is_time=False)


if __name__ == "__main__":
    main(__doc__, bench)
