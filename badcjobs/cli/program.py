"""The program: its commands, their help pages, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import inspect
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from badcjobs.errors import BadcjobsError, BadInput, ExitCode
from badcjobs.version import __version__

# Typer has its own copy of click's errors, or uses click's; this is their common ancestor in both.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

# For each command: the module with the function of the same name, the usage after its name, and its purpose.
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
_FOOTER = "Every command also takes --config FILE|KEY=VALUE and --debug."
_COLUMN = 30  # of the texts on a help page
_WIDTH = 80  # of a help page


class Command(TyperCommand):
    """A command with its own options, ``--config``, ``--debug`` and, for some, options of run after --."""

    usage = ""  # what follows the name of the command
    parse_run_options: Callable[[Sequence[str]], Mapping[str, Any]] | None = None  # None: it takes none

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        debug = TyperOption(
            param_decls=["--debug"],
            is_flag=True,
            default=False,
            expose_value=False,
            hidden=True,
        )
        self.params += [config_option(hidden=self.name != "run"), debug]  # the program itself looks for --debug

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; if the command takes options of run, parse those after the first -- with its parser."""
        if self.parse_run_options is not None and "--" in args:
            from badcjobs.cli.options import RUN_OPTIONS

            at = args.index("--")
            ctx.meta[RUN_OPTIONS] = self.parse_run_options(args[at + 1 :])
            args = args[:at]
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page: usage, text, options, one example, one footer."""
        text, _, example = inspect.cleandoc(self.help or "").partition("Example:")
        usage = f"Usage: badcjobs {self.name} {self.usage}".rstrip()
        lines = [usage, "", *textwrap.wrap(" ".join(text.split()), _WIDTH)]
        groups: dict[str, list[Any]] = {"Options": []}
        parameter: Any
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option" and not parameter.hidden:
                heading = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(heading, []).append(parameter)
        groups["Options"].sort(key=lambda option: option.opts[0] in ("--json", "-h", "--help"))
        for heading, options in groups.items():
            lines += ["", f"{heading}:"]
            for option in options:
                lines += option_lines(option)
        lines += ["", "Example:", *(f"  {line.strip()}" for line in example.strip().splitlines()), "", _FOOTER]
        formatter.write("\n".join(lines) + "\n")


def option_lines(option: Any) -> Iterator[str]:
    """Yield the line of an option on a help page: name, metavar, text with its default in brackets."""
    names = sorted(option.opts, key=len)
    if option.secondary_opts:
        names = [f"--[no-]{option.opts[0].removeprefix('--')}"]
    help_option = "--help" in names
    metavar = "" if option.is_flag or help_option else f" {option.metavar or option.type.name.upper()}"
    label = f"  {', '.join(names)}{metavar}"
    text = "Show this help." if help_option else option.help or ""
    if len(label) > _COLUMN - 2:
        yield label
        label = ""
    yield f"{label:<{_COLUMN}}{text}"


def config_option(*, hidden: bool) -> TyperOption:
    """Return the repeatable option ``--config``, which may be given before or after the name of the command."""

    def keep(ctx: Any, param: Any, value: Any) -> Any:
        from badcjobs.cli.options import CONFIG

        ctx.meta.setdefault(CONFIG, []).extend(value or ())

    return TyperOption(
        param_decls=["--config"],
        type=str,
        multiple=True,
        expose_value=False,
        callback=keep,
        hidden=hidden,
        metavar="FILE|KEY=VALUE",
        help="Settings file, or one setting; repeatable.",
    )


class Commands(TyperGroup):
    """The commands; the module of a command is imported when it is called, so that the program starts fast."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(BY_NAME, self)  # only the names are used, for lists and suggestions
        self.params.append(config_option(hidden=False))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None: there is no such command."""
        if cmd_name not in BY_NAME:
            return None
        module, usage, _ = BY_NAME[cmd_name]
        function = getattr(import_module(f"badcjobs.cli.{module}"), cmd_name)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name=cmd_name, cls=Command)(function)
        command = typer.main.get_command(alone)
        assert isinstance(command, Command)
        command.usage = usage
        if cmd_name in _RUN_OPTIONS_AFTER_DASHES:
            from badcjobs.cli.options import parse_run_options

            run = partial(self.get_command, None, "run")  # loaded only if there are such options
            command.parse_run_options = lambda words: parse_run_options(run(), cmd_name, words)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write ``badcjobs --help``."""
        about = "Run bird-sound detectors inside Slurm, record the GPUs, explain the results."
        lines = ["Usage: badcjobs COMMAND …", "", about]
        for section, commands in COMMANDS.items():
            lines += ["", f"{section}:", *(f"  {name:<10}  {about}" for name, (_, _, about) in commands.items())]
        lines += ["", "Options:"]
        option: Any
        for option in self.get_params(ctx):
            if not option.hidden:
                lines += option_lines(option)
        lines += ["", "First steps: badcjobs demo, then badcjobs guide start."]
        formatter.write("\n".join(lines) + "\n")


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
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    pass


def run_program() -> NoReturn:
    """Run the command line and exit with the code of the contract."""
    debug = "--debug" in list(takewhile(lambda word: word != "--", sys.argv[1:]))
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a log in ASCII shows ? for ×
    try:
        code = app(standalone_mode=False)
        # A signal while Python exits would change the exit code.
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except UsageError as error:
        sys.exit(_print_error(_convert_usage_error(error), debug))
    except BadcjobsError as error:
        sys.exit(_print_error(error, debug))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        fix = "the same command with --debug:  badcjobs --debug " + " ".join(sys.argv[1:2]) + " …"
        fix = "report it, with the traceback above" if debug else fix
        bug = BadcjobsError(f"{type(error).__name__}: {error}", why="this is a bug in badcjobs", fix=fix)
        sys.exit(_print_error(bug, debug))


def _print_error(error: BadcjobsError, debug: bool) -> int:
    """Print an error, with ``debug`` after the traceback of the current exception; return the exit code."""
    from badcjobs.cli.output import safe_error, safe_lines

    if debug:
        print(safe_lines(traceback.format_exc()), file=sys.stderr)
    print(safe_error(error), file=sys.stderr)
    return error.exit_code


def _convert_usage_error(error: Any) -> BadcjobsError:
    """Convert a usage error of click to BadInput; for an option that has moved, with the line to paste."""
    from badcjobs.cli.options import explain_moved_option

    command = next((word for word in sys.argv[1:] if word in BY_NAME), "")
    message = " ".join(error.format_message().split())  # a list of choices comes with tabs and lines
    for word, plain_word in (("valid int", "whole number"), ("valid float", "number"), ("number range", "number")):
        message = message.replace(word, plain_word)
    option = getattr(error, "option_name", None)
    moved = option and explain_moved_option(option, sys.argv[1:], command)
    if moved:
        return BadInput(f"No such option: {option}", why=moved[0], fix=moved[1])
    return BadInput(message, fix=" ".join(filter(None, ["badcjobs", command, "--help"])))
