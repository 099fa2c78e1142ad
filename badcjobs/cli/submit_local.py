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
    from badcjobs.submitting import Command, Plan
    from badcjobs.world import World


# Of submit: what a job script says for itself, and what only a job under Slurm has.
_NOT_OF_SCRIPTS = ("setup", "merge_account", "merge_mem", "merge_time")
# Of run: what reaches a script, or the emulation; all others are for the badcjobs that the script starts.
_FOR_SCRIPTS = ("source", "simulate", "simulate_script", "replay")
_WAYS_TO_GPUS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket")


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
        return LocalWish(stand_in, self.share_gpus, self.requeues, self.kill_wait_s, again=self.again)


def submit_here(command: Command, wishes: Wishes, options: LocalOptions) -> int:
    """Run a source as an array on this machine; exit with its verdict."""
    from badcjobs.cli.output import RowCounter, remark
    from badcjobs.config import make_settings
    from badcjobs.emulating import emulate_order, refuse_here
    from badcjobs.scheduler.local_text import array_text
    from badcjobs.submitting import make_plan

    world = _read_world()
    plan = make_plan(command, wishes, world.cwd, world.clock, RowCounter("rows of the source read"), find=False)
    for words in filter(None, (idle_words(plan), look_words(plan))):
        if not options.json_wanted:
            remark(words)
    if options.dry_run:
        refuse_here(plan.order.out, again=options.again)
        return _show_script(array_text(plan.order), options)
    stand_in = make_settings(command.out, command.flags, command.config).stand_in(world.cwd)
    done = emulate_order(plan.order, options.wish(stand_in), world, remark)
    return _tell_end(done, options, {"chunks": plan.chunks, "idle_tasks": plan.idle, "audio_looked_at": plan.looked_at})


def idle_words(plan: Plan) -> str | None:
    """Return how many tasks have nothing to do; None: all have something."""
    from badcjobs.report.words import count

    if not plan.idle:
        return None
    idle = f"{plan.idle:,} {'has' if plan.idle == 1 else 'have'} nothing to do"
    return f"{plan.order.tasks:,} tasks for {count(plan.chunks, 'chunk')}: {idle}; --tasks {plan.chunks} is enough"


def look_words(plan: Plan) -> str | None:
    """Return how much of the audio was looked at; None: all, or now none."""
    if plan.looked_at is None or plan.looked_at >= plan.chunks:
        return None
    return f"looked at the audio of {plan.looked_at:,} of {plan.chunks:,} chunks; badcjobs check looks at all"


def submit_script(
    script: Path, out: Path | None, flags: Mapping[str, Any], wishes: Wishes, options: LocalOptions
) -> int:
    """Run somebody's job script on this machine as sbatch would; exit with its verdict."""
    from badcjobs.cli.output import remark
    from badcjobs.config import stand_in
    from badcjobs.emulating import ScriptOrder, emulate_script, read_script, refuse_script_here

    world = _read_world()
    source = _check_script_options(script, flags, wishes)
    order = ScriptOrder(script, _sbatch_options(wishes), source=source, out=out)
    if options.dry_run:
        refuse_script_here(order, world, again=options.again)
        return _show_script(read_script(script, world), options)
    devices = stand_in(world.cwd, flags.get("simulate"), flags.get("simulate_script"), flags.get("replay"))
    return _tell_end(emulate_script(order, options.wish(devices), world, remark), options)


def _check_script_options(script: Path, flags: Mapping[str, Any], wishes: Wishes) -> str | None:
    """Refuse what would never reach a script; return its one SOURCE."""
    from badcjobs.errors import BadInput

    lost = [name for name in _NOT_OF_SCRIPTS if getattr(wishes, name)] + [n for n in flags if n not in _FOR_SCRIPTS]
    if lost:
        names = ", ".join(f"--{'no-' if flags.get(name) is False else ''}{name.replace('_', '-')}" for name in lost)
        raise BadInput(
            f"{names}: not with --script",
            why="the script itself says how badcjobs is started and what comes before",
            fix=f"edit {shlex.quote(str(script))}, or leave --script out: badcjobs submit SOURCE --out DIR …",
        )
    given = flags.get("source") or [None]
    if len(given) > 1:
        raise BadInput(
            f"{len(given)} sources, but a job script takes one",
            why="it reaches the script as the variable SOURCE, which is one path, blanks and all",
            fix="write the paths of audio, or of manifests, into a text file, one per line; that is the SOURCE",
        )
    source: str | None = given[0]
    return source


def _read_world() -> World:
    """Return the world; whoever has said nohup wants the work to outlive the terminal."""
    from badcjobs.cli.world import read_world

    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    world = read_world()
    if deaf:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return world


def _sbatch_options(wishes: Wishes) -> tuple[str, ...]:
    """Return what of the command line goes before the script's own lines, as options of sbatch."""
    from badcjobs.errors import BadInput

    if wishes.parallel is not None and wishes.array is None:
        raise BadInput("--parallel goes with --array where a script is given", fix="--array 0-9 --parallel 4")
    array = wishes.array or (None if wishes.tasks is None else f"0-{wishes.tasks - 1}")
    if array is not None and wishes.parallel is not None:
        array = f"{array.partition('%')[0]}%{wishes.parallel}"
    given = {
        "array": array, "job-name": wishes.job_name, "cpus-per-task": wishes.cpus, "mem": wishes.mem,
        "time": wishes.time, "account": wishes.account, "partition": wishes.partition, "constraint": wishes.constraint,
    }  # fmt: skip
    if wishes.gpus_per_task is not None:  # in whichever of the ways that there are the script asks for them
        given |= {**dict.fromkeys(_WAYS_TO_GPUS, ""), "gpus-per-node": wishes.gpus_per_task}
    words = [word for option in wishes.sbatch for word in shlex.split(option)]
    return (*(f"--{name}={value}" for name, value in given.items() if value is not None), *words)


def _show_script(text: str, options: LocalOptions) -> int:
    from badcjobs.cli.output import hand_out, print_json

    if options.json_wanted:
        print_json({"script": text})
    else:
        hand_out(text.rstrip("\n"))
    return 0


def _tell_end(done: Emulation, options: LocalOptions, facts: Mapping[str, Any] | None = None) -> int:
    from badcjobs.cli.colour import colour_wanted
    from badcjobs.cli.merge import files_text
    from badcjobs.cli.output import print_json, say
    from badcjobs.ends import end_lines, headline
    from badcjobs.report.as_text import summary_text

    if options.json_wanted:
        print_json({**done.to_dict(), **(facts or {})})
        return done.exit_code
    if done.job is None:
        say(f"job {done.job_id}: {done.verdict}")
        return done.exit_code
    whole = done.job.summary.verdict == "done"
    if whole and (words := headline(done.job_id, done.verdict, done.ends)):
        say("\n".join([words, *(f"  {line}" for line in end_lines(done.job_id, done.ends)), ""]))
    title = f"job {done.job_id}" if done.verdict == done.job.summary.verdict else "the whole run"
    say(summary_text(done.job.summary, title, colour=colour_wanted()), painted=True)
    say("\n" + files_text(done.job))
    if done.exit_code:
        say("\n  the same command " + ("starts those tasks once more" if whole else "does what is left"))
    return done.exit_code
