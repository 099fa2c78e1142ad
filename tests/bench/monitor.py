"""What the live view costs: ``badcjobs monitor`` at a terminal, over a run whose tasks publish all the time.

    python tests/bench/monitor.py            100 tasks for a minute
    python tests/bench/monitor.py --small    for some seconds

The share of a core is the processor time over the time on the wall: the median of stretches of a few seconds.
"""

import itertools
import os
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from rooms.live import open_run_view
from rooms.root import SystemClock
from support.live_run import write_live_run
from support.measured import Promises, main
from support.terminal import Terminal

TASKS, PUBLISH_EVERY_S = 100, 30.0
STRETCH_S = 2.5  # a refresh, sometimes two


def publish_again_and_again(files: list[Path], over: threading.Event) -> None:
    """Put a new copy in the place of each file once per interval, evenly, as that many tasks would."""
    for path in itertools.cycle(files):
        copy = path.with_name(f".{path.name}.copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
        if over.wait(PUBLISH_EVERY_S / len(files)):
            return


def share_of_a_core(process: psutil.Process, terminal: Terminal) -> float:
    before, at_s = process.cpu_times(), time.monotonic()
    while (left_s := at_s + STRETCH_S - time.monotonic()) > 0:
        terminal.read(min(0.2, left_s))
    after, wall_s = process.cpu_times(), time.monotonic() - at_s
    return (after.user + after.system - before.user - before.system) / wall_s


def watch(folder: Path, promises: Promises, seconds: float) -> None:
    started_s = time.monotonic()
    command = [sys.executable, "-m", "badcjobs", "monitor", str(folder)]
    terminal = Terminal(command, dict(os.environ), folder, columns=120, lines=40)
    try:
        terminal.wait_for(lambda text: "4821_" in text, "the first tasks", timeout_s=120)
        promises.just("until the first tasks are shown", time.monotonic() - started_s, "s")
        terminal.wait_for(lambda text: "reading " not in text, "all tasks", timeout_s=300)
        promises.just("until all are", time.monotonic() - started_s, "s")
        process = psutil.Process(terminal.process.pid)
        shares = [share_of_a_core(process, terminal) for _ in range(round(seconds / STRETCH_S))]
        promises.at_most("share of a core", 100 * statistics.median(shares), 3, "%")
        promises.at_most("memory", process.memory_info().rss / 2**20, 100, "MiB", is_time=False)
        terminal.type("q")
        assert terminal.end() == 0
    finally:
        terminal.close()


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Watch a run of a hundred tasks, each of which publishes every half minute; then look when nothing has changed."""
    print(f"monitor: {TASKS} tasks that publish every {PUBLISH_EVERY_S:g} s")
    files, over = write_live_run(folder / "run", TASKS, now_ms=SystemClock().now_ms()), threading.Event()
    with ThreadPoolExecutor() as pool:
        publishing = pool.submit(publish_again_and_again, files, over)
        try:
            watch(folder / "run", promises, STRETCH_S if small else 60)
        finally:
            over.set()
    publishing.result()
    view = open_run_view(folder / "run", SystemClock())
    view.look()
    before_s = time.process_time()
    for _ in range(10):
        view.look()
    idle_ms = (time.process_time() - before_s) * 100
    promises.at_most("one look when nothing has changed", idle_ms, 20, "ms")


if __name__ == "__main__":
    main(__doc__, bench)
