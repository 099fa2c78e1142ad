"""The input of commands: options from the table of settings, the project file, run options after ``--``, files."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from badcjobs.cli.output import environ, remark, this_command
from badcjobs.errors import BadInput
from badcjobs.model import StandIn, known_values
from badcjobs.paths import RunFolder, is_there, run_of, shell_line
from badcjobs.project import Project
from badcjobs.run_toml import FrozenRun
from badcjobs.settings import SETTINGS, stand_in, to_toml
from badcjobs.trust import Trust


def option(metavar: str, text: str, *names: str, default: Any = None, **limits: Any) -> Any:
    """Return an option that takes a value; ``names``: if they are not made from the name of the parameter."""
    return typer.Option(default, *names, metavar=metavar, help=text, **limits)


def flag(name: str, text: str) -> Any:
    """Return an option that takes no value."""
    return typer.Option(False, name, help=text)


JsonWanted = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Sources = Annotated[list[str] | None, typer.Argument(metavar="SOURCE")]
Root = Annotated[str | None, typer.Option(metavar="DIR", help="Folder that relative source_paths start from.")]
Simulate = Annotated[str | None, typer.Option(metavar="N|FILE", help="Use simulated GPUs: N, or as FILE describes.")]

CONFIG = "badcjobs.config"  # keys of the context of a call
RUN_OPTIONS = "badcjobs.run_options"
_NOT_AFTER_DASHES = ("-o", "--out", "--shard", "--json", "--config", "--wait", "--again", "--dry-run", "--cluster")
Targets = Mapping[str, Path | None]  # output files by their options; None: not requested
_STDOUT = frozenset(map(Path, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))
_AUDIO_MAGIC = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
# A typing error (--html job.sqlite) must not replace the results of weeks.
_OF_A_RUN = ("run.toml", "job.sqlite", "submitted.json", "tasks", "logs")
_SIGNS_OF_A_RUN = ("run.toml", "job.sqlite", "submitted.json", "logs/emulation.lock")
_TYPES: dict[str, Any] = {"text": str, "texts": list[str], "count": int, "number": float, "switch": bool}


def with_settings(table: str, *, hidden: bool = False) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add the options of a table to a command; its ``**settings`` get them by key, None: not given.

    ``hidden``: leave them out of the help page.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters
        parameters = [parameter for parameter in own.values() if parameter.kind is not parameter.VAR_KEYWORD]
        for key, setting in SETTINGS[table].items():
            if not setting.heading or key in own:
                continue
            name = setting.option
            names = [f"{name}/--no-{name[2:]}" if setting.default is True else name]
            if setting.short:
                names.append(f"-{setting.short}")
            shown = typer.Option(
                None,
                *names,
                help=setting.help,
                metavar=setting.metavar or None,
                rich_help_panel=setting.heading,
                hidden=hidden,
            )
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(key, kind, default=shown, annotation=_TYPES[setting.kind] | None))

        def with_all(**given: Any) -> int:
            return command(**{name: None if value == [] else value for name, value in given.items()})

        with_all.__doc__ = command.__doc__
        with_all.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": int}
        with_all.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        return with_all

    return decorate


# --- the values of a call --------------------------------------------------------------------------------------------


def read_project(context: typer.Context, *tables: str) -> Project:
    """Read the project file and ``--config``; refuse programs in these tables of a file that is not trusted."""
    return Project.read(context.meta.get(CONFIG, ()), Path.cwd(), read_trust("--config", ""), tables)


def read_trust(*without: str) -> Trust:
    """Return whom this user trusts; ``without``: an option with which this command needs no file of others."""
    return Trust.read(os.geteuid(), environ(), shell_line(*this_command(*without)))


def check_run_folder(out: Path, project: Project, *executed: str) -> None:
    """Refuse to continue a run if its run.toml names programs, or these folders hold some, and it is not trusted."""
    run = RunFolder(Path.cwd() / out)
    trust = read_trust("--out", f"{out}-2")
    if project.file != run.run_toml:
        FrozenRun.read(run.run_toml, trust)
    for folder in filter(Path.is_dir, map(run.path.joinpath, executed)):
        trust.check(folder, folder.stat(), {folder.name: "the work of array tasks"})


def run_options(context: typer.Context, **own: object) -> dict[str, Any]:
    """Return the options of run after --, and those of the command itself, by key; those not given are left out."""
    return {**context.meta.get(RUN_OPTIONS, {}), **known_values(own)}


def find_run(given: Path | None, project: Project, command: str) -> Path:
    """Return the run folder or file that a command reads: its argument, else ``[run] out`` of the project file."""
    return require_out(given or project.get("run", "out"), command, "DIR", "runs/first")


def require_out(
    out: str | Path | None, command: str, option: str = "--out DIR", example: str = "SOURCE --out runs/first"
) -> Path:
    """Return the run folder of a command; raise BadInput if neither the command line nor badcjobs.toml has it."""
    if out:  # not None, and not an empty shell variable
        return Path(out)
    why = "no settings file with [run] out was found, or it does not have that key"
    raise BadInput(f"{option} is missing", why=why, fix=f"{shell_line(*other_command(command))} {example}")


def find_stand_in(project: Project, simulate: str | None) -> StandIn:
    """Return the devices that replace the real ones; print a remark if only the project file asks for them."""
    if simulate is None and (simulate := project.get("run", "simulate")) is not None:
        remark(f"simulated GPUs: [run] simulate = {simulate} in {project.file or '--config'}")
    return stand_in(Path.cwd(), simulate)


def parse_run_options(run: Any, command: str, words: Sequence[str]) -> Mapping[str, Any]:
    """Parse the words after -- with the parser of ``badcjobs run``; return the options that are given, by key."""
    for word in words:
        name = word.partition("=")[0]
        of_submit = SETTINGS["submit"].get(_key_of(name))
        if name in _NOT_AFTER_DASHES or (of_submit is not None and of_submit.heading):
            why = "only options of run can be given there; an array divides SOURCE itself"
            raise BadInput(f"{name} cannot be given after --", why=why, fix=f"badcjobs {command} --help")
    values = run.make_context(f"badcjobs {command} … --", list(words)).params
    options = {key: value for key, value in values.items() if key in SETTINGS["run"] and value not in (None, [], ())}
    if sources := options.pop("source", None):
        raise BadInput(
            f"{' '.join(sources)}: only options of run can be given after --",
            fix=f"badcjobs {command} {shell_line(*map(Path, sources))} … -- …",
        )
    return options


def explain_moved_option(option: str, words: Sequence[str], command: str) -> tuple[str, str] | None:
    """Return the reason and the line to paste for an option of run before --, or for a key of badcjobs.toml.

    It may also be an option of submit. None: it is none of them.
    """
    key = _key_of(option)
    value = next(_values_of(option, words), "") or "…"
    of_run = SETTINGS["run"].get(key)
    if of_run is not None and of_run.heading and command in ("submit", "check", "plan", "probe"):
        text = option if of_run.kind == "switch" else shell_line(option, value)
        return "it is an option of run, which must be given after --", f"badcjobs {command} … -- {text}"
    of_submit = SETTINGS["submit"].get(key)
    if command == "run" and of_submit is not None and of_submit.heading:
        return "it is an option of submit", f"badcjobs submit … {shell_line(option, value)}"
    for table in ("run", command, "submit", "plan", "probe"):
        for name in (key, f"{key}_s"):
            setting = SETTINGS.get(table, {}).get(name)
            if setting is None or (setting.heading is not None and setting.default is not False):
                continue
            if setting.kind == "switch":
                value = "false" if option.startswith("--no-") else "true"
            elif setting.kind == "texts":
                value = to_toml([value])
            line = f"--config {shell_line(f'{table}.{name}={value}')}"
            return f"it is a key of the table [{table}] of badcjobs.toml", line
    return None


def _key_of(option: str) -> str:
    """Return the key of a setting that an option would have."""
    return option.removeprefix("--").removeprefix("no-").replace("-", "_")


def _values_of(option: str, words: Iterable[str]) -> Iterator[str]:
    """Yield the values that a command line gives to an option."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            yield value if equals else following


def other_command(name: str, *words: str | Path) -> list[str | Path]:
    """Return the words of another command, with the settings file that this one was given."""
    own_words = takewhile(lambda word: word != "--", sys.argv)
    files = [f"--config={value}" for value in _values_of("--config", own_words) if "=" not in value]
    return ["badcjobs", *files, name, *words]


# --- output files must not replace data -------------------------------------------------------------------------------


def is_stdout(path: Path | None) -> bool:
    """Say whether a path is stdout, by any of its names."""
    return path in _STDOUT


def refuse_data(targets: Targets, inputs: Iterable[Path] = (), *, whatever_it_holds: bool = False) -> None:
    """Raise BadInput for an output file that has data, is an input of the command, or is given twice.

    ``whatever_it_holds``: protect only the files of a run; another database may be replaced.
    """
    inputs = [Path(os.path.realpath(path)) for path in inputs]
    taken: dict[Path, str] = {}
    for option, path in targets.items():
        if path is None or is_stdout(path):
            continue
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file() and not place.is_dir():
            continue  # a pipe or a device stores nothing
        why = _why_protected(place, inputs)
        if place in taken:
            why = f"{taken[place]} names it as well"
        if why is None and not whatever_it_holds:
            why = _why_by_content(place)
        if why is not None:
            raise BadInput(f"{option} {path} is not written", why=why, fix=f"the same command with another {option}")
        taken[place] = option


def _why_protected(place: Path, inputs: Iterable[Path]) -> str | None:
    """Return why a file is protected by its place; None: it is not."""
    if place.is_file() and any(path.exists() and place.samefile(path) for path in inputs):
        return "this command, or its run, reads it"
    for folder in place.parents:
        inside = place.relative_to(folder).parts[0]
        if inside in _OF_A_RUN and any((folder / sign).exists() for sign in _SIGNS_OF_A_RUN):
            return f"it belongs to the run {folder}"
    return None


def _why_by_content(place: Path) -> str | None:
    from badcjobs.store.connect import is_database

    if is_database(place):
        return "it is a database"
    try:
        with place.open("rb") as file:
            is_audio = file.read(4).startswith(_AUDIO_MAGIC)
    except OSError:
        return None  # it does not exist, or cannot be read
    if is_audio:
        return "it is a recording"
    return None


def sources_of(job: Path) -> list[Path]:
    """Return the source files of a run, if they are known; ``job``: its folder or database."""
    folder = job.absolute().parent
    if is_there(job) and job.is_dir():
        folder = job
    try:
        frozen = FrozenRun.read(RunFolder(run_of(folder)).run_toml)
    except BadInput:
        return []
    return [] if frozen is None else [Path(source) for source in frozen.settings.get("source", ())]
