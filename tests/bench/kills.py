"""Nothing is lost, done twice or left when processes of a run are killed: on a GPU, with a real HawkEars and MPS.

    tests/hawkears/install --gpu DIR
    python tests/bench/kills.py --hawkears DIR --kills 14

A run is left alone first. Then ``kill -9`` ends one kind of process of an equal run after the other, and sometimes all;
if that ends the run, the same command starts again. The exit code is 1 if the second result differs from the first, a
chunk was done twice, or a process or folder is left. ``tests/faults`` does more of this, with stand-ins.
"""

import argparse
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.by_hand import Nights
from support.measured import Promises

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("worker", "parent", "server", "wrapper", "daemon", "recorder", "all")  # without its server, a run drops MPS
MARK, MPS_FOLDERS = "BADCJOBS_TASK", "badcjobs-mps-*"
SAME_SCORE = 0.0015  # HawkEars writes three decimals
RECORDING_S, CHUNK_S = 1800, 300
QUIET_S = 40.0  # after so long without its wrapper a recorder has published, and ended everything


class Kills:
    """The command, in a folder of its own with a disk of the node, and those whom it starts."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder, self._local = args, folder, folder / "local"
        self._local.mkdir()
        nights = Nights(folder).files(args.recordings, RECORDING_S * args.scale, 4)
        (folder / "recordings.txt").write_text("".join(f"{path}\n" for path in nights))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(self._local), "SLURM_TMPDIR": str(self._local)}
        self._marks: set[str] = set()
        self.wrapper: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self, out: str) -> None:
        """Run the command, or run it again."""
        args = self._args
        words = ["run", "recordings.txt", "--out", out, "--chunk-length", str(CHUNK_S * args.scale), "--mps", "on",
                 "--workers-per-gpu", str(args.workers), "--config", "run.publish_every_s=1", "--engine", "hawkears",
                 "--hawkears-python", str(args.hawkears / "venv" / "bin" / "python"),
                 "--hawkears-root", str(args.hawkears / "root")]  # fmt: skip
        self.starts += 1
        with (self._folder / f"{out}{self.starts}.log").open("wb") as log:
            command = [sys.executable, "-m", "badcjobs", *words]
            self.wrapper = subprocess.Popen(command, cwd=self._folder, env=self._environ, stdout=log, stderr=log)

    def wait(self, out: str) -> None:
        """Wait for its end, which must be success."""
        if self.wrapper is not None and (code := self.wrapper.wait()):
            raise SystemExit(f"exit code {code}\n{(self._folder / f'{out}{self.starts}.log').read_text()[-4000:]}")

    def wait_for_workers(self, kills: int) -> None:
        """Wait until the run has workers; start it again if its wrapper was killed."""
        while True:
            if self.wrapper is not None and (code := self.wrapper.poll()) is not None:
                if code == 0:
                    raise SystemExit(f"the work is over after {kills} kills: give it more --recordings")
                self.start("out")
            elif self.everybody().get("worker"):
                return
            time.sleep(0.2)

    def everybody(self) -> dict[str, list[psutil.Process]]:
        """Return our processes by what they are."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                is_wrapper = self.wrapper is not None and process.pid == self.wrapper.pid
                if is_wrapper or environ.get("SLURM_TMPDIR") == str(self._local):
                    self._marks |= {environ[MARK]} if MARK in environ else set()
                    found.setdefault("wrapper" if is_wrapper else kind_of(process), []).append(process)
        return found

    def kill(self, victim: str) -> bool:
        """Kill one of a kind, or all; return False if there is none."""
        everybody = self.everybody()
        chosen = list(itertools.chain(*everybody.values())) if victim == "all" else everybody.get(victim, [])[:1]
        for process in chosen:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        return bool(chosen)

    def left(self) -> list[str]:
        """Return what is left on the node after the end, when the last recorder had its time."""
        end_s = time.monotonic() + QUIET_S
        while (running := self.everybody()) and time.monotonic() < end_s:
            time.sleep(0.5)
        owners = Path("/tmp").glob(f"{MPS_FOLDERS}/owner.json")  # also of others on this machine
        folders = [
            *self._local.iterdir(),
            *(own.parent for own in owners if any(m in own.read_text() for m in self._marks)),
        ]
        return [*(f"{kind} {one.pid}" for kind, those in running.items() for one in those), *map(str, folders)]

    def query(self, out: str, sql: str) -> list[tuple[Any, ...]]:
        """Merge a run, and ask it."""
        command = [sys.executable, "-m", "badcjobs", "merge", out]
        subprocess.run(command, cwd=self._folder, env=self._environ, check=True, capture_output=True)
        with closing(sqlite3.connect(self._folder / out / "job.sqlite")) as db:
            return db.execute(sql).fetchall()


def kind_of(process: psutil.Process) -> str:
    """Return what a process of a task is."""
    words = process.cmdline()
    if "nvidia-cuda-mps-" in " ".join(words):
        return "server" if "server" in " ".join(words) else "daemon" if "-d" in words else "question"
    if any("recorder_process" in word for word in words):
        return "recorder"
    if "--parent" in words:  # a forked worker has the command line of its parent
        parent = process.parent()
        return "worker" if parent is not None and "--parent" in parent.cmdline() else "parent"
    if any(word.endswith("hawkears_worker.py") for word in words):  # started alone, after its parent was killed
        return "worker"
    return "other"


def differences(calm: list[tuple[Any, ...]], killed: list[tuple[Any, ...]]) -> list[str]:
    """Return the detections that are in one of them only, or have another score."""
    ours, wanted = ({row[:-1]: row[-1] for row in rows} for rows in (killed, calm))
    differ = [key for key in ours.keys() | wanted.keys() if abs(ours.get(key, -1) - wanted.get(key, -1)) > SAME_SCORE]
    return [f"{key}: {ours.get(key)}, left alone {wanted.get(key)}" for key in sorted(differ)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hawkears", type=Path, required=True, metavar="DIR", help="as tests/hawkears/install made it")
    parser.add_argument("--kills", type=int, default=14, metavar="N", help="kill so often [14]")
    parser.add_argument("--workers", type=int, default=6, metavar="N", help="workers per GPU [6]")
    parser.add_argument("--recordings", type=int, default=80, metavar="N", help="so many half hours of audio [80]")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="so much shorter recordings and chunks [1]")
    parser.add_argument("--pause", type=float, default=4, metavar="S", help="the longest time between kills [4]")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), metavar="N", help="repeats a campaign")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    args.hawkears = args.hawkears.absolute()
    chance, promises, made = random.Random(args.seed), Promises(), []
    print(f"kills: seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        kills = Kills(args, Path(folder))
        kills.start("calm")
        kills.wait("calm")
        kills.start("out")
        for victim in itertools.islice(itertools.cycle(VICTIMS), args.kills):
            for _ in range(2):  # the workers of a killed wrapper may have been seen before they ended
                kills.wait_for_workers(len(made))
                time.sleep(chance.uniform(args.pause / 4, args.pause))
                if is_killed := kills.kill(victim):
                    made.append(victim)
                    break
            print(f"  {time.strftime('%T')} kill -9: {victim}{'' if is_killed else ': there was none'}", flush=True)
        while kills.wrapper is not None and kills.wrapper.wait() == -signal.SIGKILL:
            kills.start("out")
        kills.wait("out")
        left = kills.left()
        found = "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection"
        calm, killed = (kills.query(out, found) for out in ("calm", "out"))
        chunks = "SELECT count(*), sum(status = 'done'), (SELECT count(*) FROM (SELECT 1 FROM attempt WHERE outcome ="
        ((many, done, twice),) = kills.query(
            "out", f"{chunks} 'done' GROUP BY chunk_id HAVING count(*) > 1)) FROM chunk"
        )
        kinds = ", ".join(f"{victim} {made.count(victim)}" for victim in VICTIMS)
        promises.just(f"kills ({kinds})", len(made), "", f"at least {args.kills - 2}", kept=len(made) >= args.kills - 2)
        promises.just("chunks not done", many - done, "", "at most 0", kept=many == done > 0)
        promises.just("chunks done twice", twice, "", "at most 0", kept=twice == 0)
        differ = differences(calm, killed)
        alike = bool(calm) and not differ
        promises.just(f"of {len(calm):,} detections differ", len(differ), "", "at most 0, of some", kept=alike)
        promises.just("processes and folders left", len(left), "", "at most 0", kept=not left)
        print(*differ, *left, sep="\n")
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
