"""The program: its commands, and the one place where every error becomes a message and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from badcjobs import __version__
from badcjobs.errors import BadcjobsError, BadInput, ExitCode

# Typer brings its own copy of click's errors, or click's; this is their common ancestor in both.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

# Of each command: the module with the function of the same name, and what it is for.
COMMANDS = {
    "demo": ("start", "The whole path on this machine, on simulated GPUs."),
    "gpus": ("machine", "Show the devices this task really has."),
    "run": ("run", "Run one array task, inside sbatch or outside."),
    "submit": ("submit", "Submit an array and its merge job."),
    "template": ("start", "Fill in a batch script for sbatch."),
    "record": ("machine", "Record the devices, alone or around a command."),
    "monitor": ("live", "Watch a run, or this machine's GPUs, in a terminal."),
    "serve": ("live", "Show a run, or this machine's GPUs, in a browser."),
    "merge": ("results", "Join task databases and say what happened."),
    "report": ("results", "Say what a merged job's numbers mean."),
    "export": ("results", "Write tables for other programs."),
    "check": ("before", "Say what would go wrong, before anything is submitted."),
    "plan": ("before", "Say what a campaign takes; write its shards and scripts."),
    "probe": ("before", "Find how long a chunk may be on each GPU model."),
    "cluster": ("machine", "Show the free GPUs of the cluster."),
    "guide": ("start", "Show a page of the handbook."),
}


class Commands(TyperGroup):
    """The commands; the module of one is imported when it is called, so that the program answers at once."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS, self)  # only the names count: they are listed and suggested

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one of them; None: there is none such."""
        if cmd_name not in COMMANDS:
            return None
        module, about = COMMANDS[cmd_name]
        function = getattr(import_module(f"badcjobs.cli.{module}"), cmd_name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name=cmd_name, short_help=about)(function)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of ``badcjobs --help``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])


app = typer.Typer(
    cls=Commands,
    name="badcjobs",
    help="Run bird-sound detectors inside Slurm: every GPU busy, every reading written down, every number explained.",
    epilog="First steps: badcjobs demo, then badcjobs guide start.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time of the boxed one, and readable in a Slurm log
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"badcjobs {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (put it before the command).")] = False,
) -> None:
    pass


def run_program() -> NoReturn:
    """Run the command line and leave with the exit code of the contract."""
    debug = "--debug" in sys.argv[1:2]
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a log in ASCII shows ? for ×
    try:
        code = app(standalone_mode=False)
        # Keep the exit code: a signal in the moment in which Python leaves would turn it into the signal's own.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except UsageError as error:
        sys.exit(_complain(_as_ours(error), debug))
    except BadcjobsError as error:
        sys.exit(_complain(error, debug))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        bug = BadcjobsError(
            f"{type(error).__name__}: {error}",
            why="this is a bug in badcjobs",
            fix="the same command with --debug:  badcjobs --debug " + " ".join(sys.argv[1:2]) + " …",
        )
        sys.exit(_complain(bug, debug))


def _complain(error: BadcjobsError, debug: bool) -> int:
    """Say what went wrong, after the traceback of what is being handled if that is wanted; return the exit code."""
    from badcjobs.cli.output import safe_error, safe_lines

    if debug:
        print(safe_lines(traceback.format_exc()), file=sys.stderr)
    print(safe_error(error), file=sys.stderr)
    return int(error.exit_code)


def _as_ours(error: Any) -> BadcjobsError:
    """Return wrong usage as an error of ours; for an option that is a key now, with what to write instead."""
    from badcjobs.settings import replaced_option

    named = next((word for word in sys.argv[1:2] if word in COMMANDS), None)
    command = error.ctx.command_path if getattr(error, "ctx", None) else " ".join(filter(None, ["badcjobs", named]))
    value = _given_for(getattr(getattr(error, "param", None), "opts", ()))
    message = " ".join(error.format_message().split())  # a list of choices comes with tabs and lines
    said = message if value is None or value in message else f"{message} (given: {value})"
    ours = BadInput(said, fix=f"{command} --help")
    if "No such option" in message and (instead := replaced_option(error.option_name, sys.argv[1:])):
        ours = BadInput(f"No such option: {error.option_name}", why="it is a key of the table [run]", fix=instead[1])
    return ours


def _given_for(options: Any) -> str | None:
    """Return what the command line gives for an option; None: nothing, or it is no option."""
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name in options:
            return value if equals else following
    return None
