"""What the live view costs: ``badcjobs monitor`` at a terminal, over a run whose tasks publish all the time.

    python tests/bench/monitor.py --tasks 100 --seconds 60

Prints one JSON document: seconds to the first lines and to all of them; the share of a core afterwards (processor time
of the process over time on the wall: median of stretches of a few seconds, and mean); bytes per second that went to the
terminal; milliseconds of one look when nothing has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rooms.live import open_run_view
from rooms.root import SystemClock
from support.live_run import write_live_run
from support.terminal import Terminal

_STRETCH_S = 2.5  # a refresh, sometimes two


def publish_again_and_again(files: list[Path], every_s: float, over: threading.Event) -> None:
    """Put a new copy in the place of each file once per interval, evenly, as that many tasks would."""
    while True:
        for path in files:
            copy = path.with_name(f".{path.name}.copy")
            shutil.copyfile(path, copy)
            copy.replace(path)
            if over.wait(every_s / len(files)):
                return


def share_of_a_core(process: psutil.Process, terminal: Terminal, seconds: float) -> float:
    """Return the processor time of a process over the time on the wall, during so many seconds."""
    before, at_s = process.cpu_times(), time.monotonic()
    while (left_s := at_s + seconds - time.monotonic()) > 0:
        terminal.read(min(0.2, left_s))
    after, wall_s = process.cpu_times(), time.monotonic() - at_s
    return (after.user + after.system - before.user - before.system) / wall_s


def watch(folder: Path, seconds: float, columns: int, lines: int) -> dict[str, float]:
    """Return what a monitor of this folder costs."""
    started_s = time.monotonic()
    terminal = Terminal(
        [sys.executable, "-m", "badcjobs", "monitor", str(folder)],
        dict(os.environ),
        folder,
        columns=columns,
        lines=lines,
    )
    try:
        terminal.wait_for(lambda text: "4821_" in text, "the first tasks", timeout_s=120)
        first_s = time.monotonic() - started_s
        terminal.wait_for(lambda text: "still to be read" not in text, "all tasks", timeout_s=300)
        all_s = time.monotonic() - started_s
        process = psutil.Process(terminal.process.pid)
        sent, at_s = len(terminal.raw), time.monotonic()
        shares = []
        while time.monotonic() < at_s + seconds:
            shares.append(share_of_a_core(process, terminal, min(_STRETCH_S, seconds)))
        wall_s, memory = time.monotonic() - at_s, process.memory_info().rss
        terminal.type("q")
        assert terminal.end() == 0
    finally:
        terminal.close()
    return {
        "first_tasks_s": round(first_s, 2),
        "all_tasks_s": round(all_s, 2),
        "core_percent": round(100 * statistics.median(shares), 2),
        "core_mean_percent": round(100 * statistics.mean(shares), 2),
        "terminal_bytes_per_s": round((len(terminal.raw) - sent) / wall_s),
        "memory_mib": round(memory / 2**20),
    }


def idle_look_ms(folder: Path) -> float:
    """Return what one more look costs when nothing has changed."""
    view = open_run_view(folder, SystemClock())
    view.look()
    before_s = time.process_time()
    for _ in range(10):
        view.look()
    return round((time.process_time() - before_s) * 100, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--publish-every", type=float, default=30.0, help="of each task")
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        files = write_live_run(folder, given.tasks, now_ms=SystemClock().now_ms())
        over = threading.Event()
        publisher = threading.Thread(target=publish_again_and_again, args=(files, given.publish_every, over))
        publisher.start()
        try:
            costs = watch(folder, given.seconds, given.columns, given.lines)
        finally:
            over.set()
            publisher.join()
        print(json.dumps({"tasks": given.tasks, **costs, "idle_look_ms": idle_look_ms(folder)}, indent=2))


if __name__ == "__main__":
    main()
