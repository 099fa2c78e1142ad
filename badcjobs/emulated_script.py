"""A job script before it is emulated: its text, where its results go, and what of this machine it must be told.

What its ``#SBATCH`` lines ask for is ``scheduler``'s business, how its commands are read ``script_facts.py``'s.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.config import read_toml
from badcjobs.errors import BadInput
from badcjobs.model import StandIn
from badcjobs.preflight.facts import Start
from badcjobs.scheduler.job_script import JobRequest
from badcjobs.scheduler.local_environment import inherited
from badcjobs.script_facts import read_script as read_script_facts
from badcjobs.shell_commands import read_commands
from badcjobs.this_machine import LocalWish, Tell
from badcjobs.world import World

_ARGUMENTS = "BADCJOBS_ARGS"  # our templates pass it on to badcjobs run, cut at spaces
_NAMES_DEVICES = {"--simulate", "--simulate-script", "--replay", "--no-emit-gpu-telemetry"}
_DEVICE_SETTINGS = {"simulate", "simulate_script", "replay"}
_SHELL = re.compile(r"#!.*\b(?:ba|da|k|z)?sh\b")


@dataclass(frozen=True, slots=True)
class ScriptOrder:
    """A job script, as ``sbatch OPTIONS SCRIPT ARGUMENTS`` would get it."""

    script: Path
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    source: str | None = None  # for SOURCE, which our templates read; one path, whatever letters are in it
    out: Path | None = None  # for OUT; None: whatever the environment or --export says


def read_script(script: Path, world: World) -> str:
    """Return the text of a job script."""
    try:
        return (world.cwd / script).read_bytes().decode()  # with the line ends that it has
    except (OSError, UnicodeDecodeError) as error:
        seen = script.parent if isinstance(error, FileNotFoundError) else script
        look = f"ls -l {shlex.quote(str(seen))}"
        raise BadInput(f"the job script {script} cannot be read", why=str(error), fix=look) from error


def with_paths(order: ScriptOrder, world: World) -> World:
    """Return the world with the SOURCE and OUT of an order in its environment."""
    given = {} if order.source is None else {"SOURCE": order.source}
    given |= {} if order.out is None else {"OUT": str(world.cwd / order.out)}
    return replace(world, environ={**world.environ, **given})


def find_out(text: str, request: JobRequest, world: World) -> Path | None:
    """Return the run folder of a script: what its badcjobs gets as --out, else its OUT; None: it does not say."""
    environ = inherited(world.environ, request.export)
    starts = _starts(text, environ, world.cwd)
    out = (starts[-1].flags.get("--out") if starts else None) or environ.get("OUT")
    return None if not out else world.cwd / (request.chdir or "") / out


def submit_words_of(order: ScriptOrder, wish: LocalWish, world: World) -> tuple[str, ...]:
    """Return the command that emulates a script once more."""
    devices = wish.stand_in
    flags = {"out": order.out, "simulate-script": devices.script, "replay": devices.replay}
    return (
        *("badcjobs", "submit", *([] if order.source is None else [str(world.cwd / order.source)])),
        *("--cluster=local", f"--script={world.cwd / order.script}"),
        *(f"--{name}={world.cwd / path}" for name, path in flags.items() if path is not None),
        *([] if devices.simulate is None else [f"--simulate={devices.simulate}"]),
        *(f"--sbatch={shlex.quote(option)}" for option in order.options),
        *wish.options,
    )


# --- devices that are not there ---------------------------------------------------------------------------------------


def with_devices(text: str, request: JobRequest, devices: StandIn, script: Path, world: World) -> World:
    """Return the world in which the badcjobs inside a script knows the devices that stand in for real ones.

    One that knew nothing of them would find none of the cards that it was granted, and record nothing. Our templates
    take it from a variable; whatever else starts badcjobs has to say it, and is refused where it does not.
    """
    words = _run_options(devices)
    if not words or not (request.gpus or request.exclusive) or not _unaware(text, request, world):
        return world
    told = " ".join([*world.environ.get(_ARGUMENTS, "").split(), *words])
    told_world = replace(world, environ={**world.environ, _ARGUMENTS: told})
    lost = _unaware(text, request, told_world)
    if lost or any(len(word.split()) != 1 for word in words):
        line, option = (lost[0].line if lost else "?"), words[0].partition("=")[0]
        raise BadInput(
            f"{script}, line {line}: the badcjobs there knows nothing of {option}",
            why="it would find none of the devices that its task is given, and record nothing of them",
            fix=f"add {shlex.join(words)} to that line, or take {option} away to use this machine's own devices",
        )
    return told_world


def _run_options(devices: StandIn) -> list[str]:
    given = {"simulate": devices.simulate, "simulate-script": devices.script, "replay": devices.replay}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _unaware(text: str, request: JobRequest, world: World) -> list[Start]:
    """Return where a script starts badcjobs without a word about its devices; what cannot be seen has said it."""
    starts = _starts(text, inherited(world.environ, request.export), world.cwd)
    return [
        start
        for start in starts
        if not (start.hidden or _NAMES_DEVICES & start.named or _config_names_devices(start, request, world))
    ]


def _config_names_devices(start: Start, request: JobRequest, world: World) -> bool:
    """Say whether the settings file of a run names what stands in for its devices, or wants nothing of them."""
    if "--config" not in start.named:
        return False
    if (config := start.flags.get("--config")) is None:
        return True  # nobody here knows which file that will be
    try:
        table = read_toml(world.cwd / (request.chdir or "") / config).get("run")
    except BadInput:
        return True  # the run will say what is wrong with it
    said = table if isinstance(table, dict) else {}
    return said.get("emit_gpu_telemetry") is False or not said.keys().isdisjoint(_DEVICE_SETTINGS)


def _starts(text: str, environ: Mapping[str, str], cwd: Path) -> tuple[Start, ...]:
    return read_script_facts(text, "", environ, str(cwd)).facts.starts


# --- what is not there at all -----------------------------------------------------------------------------------------


def tell_of_srun(text: str, world: World, tell: Tell) -> None:
    """Say before a script starts that its srun is nobody's: there are no steps here, and no Slurm to make them."""
    commands = read_commands(text) if _SHELL.match(text) else []
    line = next((command.line for command in commands if _is_srun(command.words)), None)
    if line is None:
        return
    lacking = shutil.which("srun", path=world.environ.get("PATH")) is None
    why = "there is no srun here" if lacking else "srun knows nothing of an emulated job"
    tell(f"line {line} of the script calls srun, and {why}: expect it to fail (badcjobs guide local)")


def _is_srun(words: list[str]) -> bool:
    """Say whether a command is srun, also behind exec, time and the like, or a variable before it."""
    before = [word for word in words if not re.match(r"\w+=", word)][:2]
    return any(word.rpartition("/")[2] == "srun" for word in before[: 2 if before[:1] in (["exec"], ["time"]) else 1])
