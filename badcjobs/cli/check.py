"""``badcjobs check``: preflight; what would go wrong, each with the line that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from badcjobs.cluster.job_script import ParsedWords
    from badcjobs.cluster.sbatch_options import Asked

_EXAMPLE = "Example: badcjobs check manifest.csv --out /scratch/st-lab-1/july --site sockeye --script job.sbatch"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="check", short_help="Say what would go wrong, before anything is submitted.", epilog=_EXAMPLE)(
        check
    )


def check(
    context: typer.Context,
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list of either."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run folder; default: what the script says.")] = None,
    site: Annotated[str | None, typer.Option(help="sockeye, or a site file of your own: ./mysite.toml.")] = None,
    script: Annotated[str | None, typer.Option(help="The job script that would be submitted.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks of the array; default: the script's --array.")] = None,
    gpus_per_task: Annotated[int | None, typer.Option(min=1, help="GPUs of each task, on all its nodes.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of each task, on one node.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task on one node, as sbatch takes it: 16G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time of each task, as sbatch takes it: 12:00:00.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    merge_account: Annotated[str | None, typer.Option(help="The one that pays for submit's merge job.")] = None,
    root: Annotated[str | None, typer.Option(help="Where relative source_paths start from.")] = None,
    cut: Annotated[
        bool | None, typer.Option("--cut/--no-cut", help="Whether rows of a manifest are cut out of longer files.")
    ] = None,
    chunk_length: Annotated[float | None, typer.Option(help="Cut whole recordings into chunks of S seconds.")] = None,
    overlap: Annotated[float | None, typer.Option(help="With --chunk-length: seconds that neighbours share.")] = None,
    engine: Annotated[str | None, typer.Option(help="hawkears (default), hawkears1, command or demo.")] = None,
    command: Annotated[str | None, typer.Option(help="For --engine command: 'prog {input} {output}'.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="An argument for the engine; repeatable.")] = None,
    hawkears_python: Annotated[str | None, typer.Option(help="The Python that has HawkEars.")] = None,
    hawkears_root: Annotated[str | None, typer.Option(help="Folder with HawkEars' data/ and yaml/.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Read the source, but look at no audio file.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Say what would go wrong, each with the line that fixes it; nothing is submitted, nothing is left behind.

    Exit code 0 when nothing is a problem (there may be warnings), 1 when something is, 2 for wrong usage.
    """
    from dataclasses import replace
    from pathlib import Path

    from badcjobs.cli.output import RowCounter, log_to_stderr, print_json, say
    from badcjobs.cli.world import environ
    from badcjobs.clock import SystemClock
    from badcjobs.model import Cutting
    from badcjobs.planning.check import CheckOrder, Here
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text

    log_to_stderr(quiet=True)
    order = CheckOrder(
        sources=tuple(source or ()),
        out=out,
        root=root,
        cutting=Cutting(cut, chunk_length, overlap or 0.0),
        site=site,
        script=script,
        engine=engine,
        engine_args=tuple(engine_arg or ()),
        command=command,
        hawkears_python=hawkears_python,
        hawkears_root=hawkears_root,
        asked=replace(
            _asked(mem, time, cpus),
            tasks=tasks,
            gpus_per_task=gpus_per_task,
            account=account,
            merge_account=merge_account,
        ),
        quick=quick,
    )
    parse = make_parser(context.find_root().command)
    here = Here(environ(), SystemClock(), Path.cwd(), RowCounter("chunks looked at"), parse)
    found = check_all(order, here)
    if json_wanted:
        print_json(found.to_dict())
    else:
        say(remarks_text(found.findings))
    return int(found.exit_code)


def _asked(mem: str | None, time: str | None, cpus: int | None) -> Asked:
    from badcjobs.cluster.sbatch_options import Asked, parse_limit, parse_memory
    from badcjobs.errors import BadInput

    try:
        time_s = None if time is None else parse_limit(time)
        memory_gb = None if mem is None else parse_memory(mem) / 1024
    except ValueError as error:
        raise BadInput(str(error), fix="badcjobs check … --time 12:00:00 --mem 16G") from error
    return Asked(
        cpus_per_node=cpus,
        memory_gb_per_node=memory_gb,
        time_s=time_s,
        no_time_limit=time is not None and time_s is None,
    )


def make_parser(group: Any) -> Callable[[Sequence[str]], ParsedWords]:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    from badcjobs.cluster.job_script import ParsedWords, nearest

    def parse(words: Sequence[str]) -> ParsedWords:
        found = _parse(group, words, "badcjobs")
        if found.wrong or not found.operands:
            return found
        said, *rest = found.operands
        name = said if said in group.commands else nearest(said, group.commands)
        if name is None:
            return ParsedWords(wrong=(f"badcjobs has no command {said}", said, ""))
        parsed = _parse(group.commands[name], rest, f"badcjobs {name}")
        wrong = (f"badcjobs has no command {said}", said, name) if name != said else parsed.wrong
        return ParsedWords(name, parsed.values, parsed.operands, wrong)

    return parse


def _parse(command: Any, words: Sequence[str], whose: str) -> ParsedWords:
    from badcjobs.cluster.job_script import ParsedWords, nearest, parse_plainly

    context = command.context_class(command, info_name=whose)
    try:
        values, operands, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # another error than wrong usage
            raise
        wrong = getattr(error, "option_name", None) or ""
        near = nearest(wrong, getattr(error, "possibilities", None) or ())
        if "does not take a value" in error.format_message():
            wrong, near = next((word for word in words if word.startswith(f"{wrong}=")), wrong), wrong
        said = f"{whose}: {error.format_message()}"
        return ParsedWords(values=parse_plainly(words).values, wrong=(said, wrong, near or ""))
    listed = [word for name, value in values.items() if isinstance(value, tuple) for word in value]
    kept = {name: value for name, value in values.items() if value is not None and not isinstance(value, tuple)}
    return ParsedWords(values=kept, operands=(*listed, *operands))
