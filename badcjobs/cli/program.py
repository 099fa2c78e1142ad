"""The program: its commands, and the one place where every error becomes a message and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from importlib import import_module
from itertools import pairwise, takewhile
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from badcjobs import __version__
from badcjobs.errors import BadcjobsError, BadInput, ExitCode

# Typer brings its own copy of click's errors, or click's; this is their common ancestor in both.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

# Of each command: the module with the function of the same name, what follows its name, and what it is for.
COMMANDS = {
    "Start": {
        "init": ("start", "", "Write a commented badcjobs.toml for this folder."),
        "demo": ("start", "", "Run a small array here, on simulated GPUs."),
        "guide": ("start", "[TOPIC]", "Show a page of the handbook."),
    },
    "Before a job": {
        "check": ("before", "[SOURCE…] [-- RUN OPTIONS]", "Find what would go wrong, and how to fix it."),
        "plan": ("before", "SOURCE… [-- RUN OPTIONS]", "Estimate GPU-hours, tasks, memory and the end date."),
        "probe": ("before", "AUDIO… [-- RUN OPTIONS]", "Find the longest chunk that fits each GPU model."),
        "cluster": ("machine", "", "Show the free GPUs of the cluster."),
        "template": ("start", "[NAME]", "Fill in a job script for sbatch."),
    },
    "Jobs": {
        "run": ("run", "SOURCE…", "Run one array task, inside sbatch or outside."),
        "submit": ("submit", "SOURCE… [-- RUN OPTIONS]", "Submit an array and its merge job."),
    },
    "GPUs and running jobs": {
        "gpus": ("machine", "", "Show the GPUs that this task has."),
        "record": ("machine", "--out FILE [-- COMMAND…]", "Record the GPUs, alone or around a command."),
        "monitor": ("live", "[DIR|FILE]", "Watch a run, or this machine's GPUs, in a terminal."),
        "serve": ("live", "[DIR|FILE]", "Show a run, or this machine's GPUs, in a browser."),
    },
    "Results": {
        "merge": ("results", "[DIR|FILE…]", "Join task databases and print the summary."),
        "report": ("results", "[DIR|FILE]", "Print or write the summary of a job."),
        "export": ("results", "[DIR|FILE] --out PATH", "Write detections and tables for other programs."),
    },
}
BY_NAME = {name: about for section in COMMANDS.values() for name, about in section.items()}
_RUN_OPTIONS_AFTER_DASHES = ("submit", "check", "plan", "probe")


class Commands(TyperGroup):
    """The commands; the module of one is imported when it is called, so that the program starts fast."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(BY_NAME, self)  # only the names count: they are listed and suggested
        from badcjobs.cli.command import config_option

        self.params.append(config_option(hidden=False))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None: there is no such command."""
        from badcjobs.cli.command import Command

        if cmd_name not in BY_NAME:
            return None
        module, usage, about = BY_NAME[cmd_name]
        function = getattr(import_module(f"badcjobs.cli.{module}"), cmd_name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name=cmd_name, short_help=about, cls=Command)(function)
        command = typer.main.get_command(alone)
        assert isinstance(command, Command)
        command.usage = usage
        if cmd_name in _RUN_OPTIONS_AFTER_DASHES:
            from badcjobs.cli.options import make_run_parser

            command.parse_run_options = make_run_parser(self.get_command(ctx, "run"), cmd_name)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write ``badcjobs --help``."""
        from badcjobs.cli.command import option_lines

        lines = ["Usage: badcjobs COMMAND …", "", _ABOUT]
        for section, commands in COMMANDS.items():
            lines += ["", f"{section}:", *(f"  {name:<10}  {about}" for name, (_, _, about) in commands.items())]
        parameters: list[Any] = list(self.get_params(ctx))
        options = [one for one in parameters if not one.hidden]
        lines += ["", "Options:", *(line for one in options for line in option_lines(one))]
        lines += ["", "First steps: badcjobs demo, then badcjobs guide start."]
        formatter.write("\n".join(lines) + "\n")


_ABOUT = "Run bird-sound detectors inside Slurm, record the GPUs, explain the results."

app = typer.Typer(
    cls=Commands,
    name="badcjobs",
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
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    pass


def run_program() -> NoReturn:
    """Run the command line and leave with the exit code of the contract."""
    debug = "--debug" in list(takewhile(lambda word: word != "--", sys.argv[1:]))
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
    """Return wrong usage as an error of ours; for an option that has moved, with the line to paste."""
    from badcjobs.cli.options import instead_of

    named = next((word for word in sys.argv[1:] if word in BY_NAME), None)
    command = " ".join(filter(None, ["badcjobs", named]))
    value = _given_for(getattr(getattr(error, "param", None), "opts", ()))
    message = " ".join(error.format_message().split())  # a list of choices comes with tabs and lines
    said = message if value is None or value in message else f"{message} (given: {value})"
    if "No such option" in message and (moved := instead_of(error.option_name, sys.argv[1:], named or "")):
        return BadInput(f"No such option: {error.option_name}", why=moved[0], fix=moved[1])
    return BadInput(said, fix=f"{command} --help")


def _given_for(options: Any) -> str | None:
    """Return what the command line gives for an option; None: nothing, or it is no option."""
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name in options:
            return value if equals else following
    return None
