"""The program: its commands, and the one place where every error becomes a message and an exit code."""

from __future__ import annotations

import signal
import sys
import traceback
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer

from badcjobs import __version__
from badcjobs.cli import (
    check,
    cluster,
    demo,
    export,
    gpus,
    guide,
    merge,
    monitor,
    plan,
    probe,
    record,
    report,
    run,
    serve,
    submit,
    template,
)
from badcjobs.errors import BadcjobsError, ExitCode

# Typer brings its own copy of click's errors, or click's; this is their common ancestor in both.
UsageError: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="badcjobs",
    help="Run bird-sound detectors inside Slurm: every GPU busy, every reading written down, every number explained.",
    epilog="First steps: badcjobs demo, then badcjobs guide start.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time of the boxed one, and readable in a Slurm log
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    demo,
    gpus,
    run,
    submit,
    template,
    record,
    monitor,
    serve,
    merge,
    report,
    export,
    check,
    plan,
    probe,
    cluster,
    guide,
):
    module.add_to(app)


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
        _ignore_signals()
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


def _ignore_signals() -> None:
    """Keep the exit code: a signal in the moment in which Python leaves would turn it into the signal's own."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _complain(error: BadcjobsError, debug: bool) -> int:
    """Say what went wrong, after the traceback of what is being handled if that is wanted; return the exit code."""
    from badcjobs.cli.output import safe_error, safe_lines

    if debug:
        print(safe_lines(traceback.format_exc()), file=sys.stderr)
    print(safe_error(error), file=sys.stderr)
    return int(error.exit_code)


def _as_ours(error: Any) -> BadcjobsError:
    command = error.ctx.command_path if getattr(error, "ctx", None) else _command_on_the_line()
    value = _given_for(getattr(error, "param", None))
    message = " ".join(error.format_message().split())  # a list of choices comes with tabs and lines
    said = message if value is None or value in message else f"{message} (given: {value})"
    ours = BadcjobsError(said, fix=f"{command} --help")
    ours.exit_code = ExitCode.USAGE
    return ours


def _command_on_the_line() -> str:
    """Return whose help is wanted, where the error does not know."""
    names = {command.name for command in app.registered_commands}
    return " ".join(["badcjobs", *(word for word in sys.argv[1:2] if word in names)])


def _given_for(parameter: Any) -> str | None:
    """Return what the command line gives for an option; None: nothing, or it is no option."""
    names = tuple(getattr(parameter, "opts", ()))
    for word, following in pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name.startswith("-") and name in names:
            return value if equals else following
    return None
