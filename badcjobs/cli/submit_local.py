"""``badcjobs submit --cluster local``: the array on this machine, in the foreground, to its verdict."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from badcjobs.emulating import Emulation, LocalWish
    from badcjobs.model import StandIn
    from badcjobs.scheduler.wishes import Wishes
    from badcjobs.submitting import Command
    from badcjobs.world import World


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How to emulate, and what to print."""

    share_gpus: bool = False
    kill_wait_s: float = 30.0
    requeues: int = 10
    again: bool = False
    dry_run: bool = False
    json_wanted: bool = False

    def wish(self, stand_in: StandIn) -> LocalWish:
        """Return the same for the emulation."""
        from badcjobs.emulating import LocalWish
        from badcjobs.errors import BadInput

        if not 0 <= self.kill_wait_s < math.inf:
            raise BadInput(f"--kill-wait {self.kill_wait_s} is no number of seconds", fix="--kill-wait 30")
        return LocalWish(stand_in, self.share_gpus, self.requeues, self.kill_wait_s)


def submit_here(command: Command, wishes: Wishes, options: LocalOptions) -> int:
    """Run a source as an array on this machine; exit with its verdict."""
    from badcjobs.cli.output import RowCounter, remark
    from badcjobs.config import make_settings
    from badcjobs.emulating import emulate_order
    from badcjobs.scheduler.local_text import array_text
    from badcjobs.submitting import make_plan

    world = _read_world()
    _refuse_another_clusters_run(world.cwd / command.out, options)
    plan = make_plan(command, wishes, world.cwd, world.clock, RowCounter("rows of the source read"))
    if options.dry_run:
        return _show_script(array_text(plan.order), options)
    stand_in = make_settings(command.out, command.flags, command.config).stand_in(world.cwd)
    return _tell_end(emulate_order(plan.order, options.wish(stand_in), world, remark), options)


def submit_script(
    script: Path, out: Path | None, flags: Mapping[str, Any], wishes: Wishes, options: LocalOptions
) -> int:
    """Run somebody's job script on this machine as sbatch would; exit with its verdict."""
    from badcjobs.cli.output import remark
    from badcjobs.config import stand_in
    from badcjobs.emulating import ScriptOrder, emulate_script, read_script

    world = _read_world()
    if options.dry_run:
        return _show_script(read_script(script, world), options)
    devices = stand_in(world.cwd, flags.get("simulate"), flags.get("simulate_script"), flags.get("replay"))
    order = ScriptOrder(script, _sbatch_options(wishes), source=tuple(flags.get("source", ())), out=out)
    return _tell_end(emulate_script(order, options.wish(devices), world, remark), options)


def _read_world() -> World:
    """Return the world; whoever has said nohup wants the work to outlive the terminal."""
    from badcjobs.cli.world import read_world

    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    world = read_world()
    if deaf:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return world


def _sbatch_options(wishes: Wishes) -> tuple[str, ...]:
    """Return what of the command line goes before the script's own lines: its array, and --sbatch."""
    from badcjobs.errors import BadInput

    if wishes.parallel is not None and wishes.array is None:
        raise BadInput("--parallel goes with --array where a script is given", fix="--array 0-9 --parallel 4")
    array = wishes.array or (None if wishes.tasks is None else f"0-{wishes.tasks - 1}")
    if array is not None and wishes.parallel is not None:
        array = f"{array.partition('%')[0]}%{wishes.parallel}"
    words = [word for option in wishes.sbatch for word in shlex.split(option)]
    return (*([] if array is None else [f"--array={array}"]), *words)


def _refuse_another_clusters_run(out: Path, options: LocalOptions) -> None:
    from badcjobs.errors import BadInput
    from badcjobs.scheduler.submitted_file import read_record

    record = read_record(out)
    if record is not None and record.cluster != "local" and not options.again:
        raise BadInput(
            f"{out} has a job already, {record.job.job_id} of --cluster {record.cluster}",
            why="both would do the same chunks",
            fix="the same command with --again, once that job has ended",
        )


def _show_script(text: str, options: LocalOptions) -> int:
    from badcjobs.cli.output import print_json, say

    if options.json_wanted:
        print_json({"script": text})
    else:
        say(text.rstrip("\n"))
    return 0


def _tell_end(done: Emulation, options: LocalOptions) -> int:
    from badcjobs.cli.output import print_json, say, shown
    from badcjobs.report.as_text import summary_text

    if options.json_wanted:
        print_json(done.to_dict())
        return done.exit_code
    if done.job is None:
        say(f"job {done.job_id}: {done.verdict}")
        return done.exit_code
    say(summary_text(done.job.summary, f"job {done.job_id}"))
    say(f"\n  database    {shown(done.job.database)}\n  report      {shown(done.job.report)}")
    if done.exit_code:
        say("\n  the same command does what is left")
    return done.exit_code
