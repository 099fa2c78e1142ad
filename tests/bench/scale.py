"""Whether an array task costs as much among 10,000 as among 100: time and memory of merge and report, size of the page.

python tests/bench/scale.py            100, 1,000 and 10,000 tasks of 4 devices: about 20 minutes, 7 GB of disk
python tests/bench/scale.py --small    10 and 100: seconds
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.measured import Measured, Promises, main, measure
from support.synthetic_job import DEVICES, write_job

CHUNKS = 48  # of each task: enough for a device to be compared with others
# At the small scale; a page shows all of a small job, but only a part of a large one.
GROWTH_MB = {"merge": 24, "report --html": 24}
COMMANDS = {
    "merge": ("merge", "june"),
    "report": ("report", "june"),
    "report --json": ("report", "june", "--json"),
    "report --html": ("report", "june", "--html", "page.html"),
    "report --prometheus": ("report", "june", "--prometheus", "june.prom"),
}


def measure_job(folder: Path, files: list[Path]) -> dict[str, Measured]:
    """Run every command on a job of these task databases; print what they cost."""
    (folder / "june" / "tasks").mkdir(parents=True)
    for file in files:
        os.link(file, folder / "june" / "tasks" / file.name)
    found = {name: measure(*words, cwd=folder) for name, words in COMMANDS.items()}
    for name, one in found.items():
        figures = f"{one.seconds:>7.1f} s {one.cpu_s:>7.1f} s of a core {one.memory_mb:>5} MB"
        print(f"  {len(files):>6,} tasks: {name:<20} {figures}", flush=True)
    return found


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Compare what a task costs in the largest job with what it costs in the smallest."""
    sizes = (10, 100) if small else (100, 1_000, 10_000)
    print(f"scale: {' / '.join(f'{size:,}' for size in sizes)} array tasks of {DEVICES} devices and {CHUNKS} chunks")
    files = write_job(folder / "all", sizes[-1], chunks=CHUNKS, nodes=sizes[-1])  # a node for each task
    found = {size: measure_job(folder / str(size), files[:size]) for size in sizes}
    fewest, most = sizes[0], sizes[-1]
    for name in COMMANDS:
        few, many = found[fewest][name], found[most][name]
        times = many.cpu_s / most / (few.cpu_s / fewest)  # other programs do not change the time of a core
        promises.at_most(f"{name}: a task of {most:,} against one of {fewest}", times, 1.3, "×")
        if small:
            promises.at_most(f"{name}: memory, {most} against {fewest}", many.memory_mb - few.memory_mb,
                             GROWTH_MB.get(name, 4), "MB more", is_time=False)  # fmt: skip
        else:
            promises.at_most(f"{name}: memory", many.memory_mb, 300, "MB", is_time=False)
    page_mb = (folder / str(most) / "page.html").stat().st_size / 1e6
    promises.at_most("size of the page", page_mb, 8, "MB", is_time=False)


if __name__ == "__main__":
    main(__doc__, bench)
