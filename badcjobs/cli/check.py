"""``badcjobs check``: preflight; what would go wrong, each with the line that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import CHUNKS, ENGINE, ConfigWords, JsonWanted, Sources, with_settings
from badcjobs.cli.output import Pace, answer, environ, log_to_stderr
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.settings import Config, nearest, refuse, replaced_option

if TYPE_CHECKING:
    from badcjobs.cluster.job_script import ParsedWords


@with_settings(*CHUNKS, *ENGINE)
def check(
    context: typer.Context,
    source: Sources = None,
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
    quick: Annotated[bool, typer.Option("--quick", help="Read the source, but look at no audio file.")] = False,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Say what would go wrong, each with the line that fixes it; nothing is submitted, nothing is left behind.

    Exit code 0 when nothing is a problem (there may be warnings), 1 when something is, 2 for wrong usage.

    Example: badcjobs check manifest.csv --out /scratch/st-lab-1/july --site sockeye --script job.sbatch
    """
    from pathlib import Path

    from badcjobs.cluster.sbatch_options import Asked, parse_limit, parse_memory
    from badcjobs.model import Cutting
    from badcjobs.planning.check import CheckOrder, Here
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text

    log_to_stderr(quiet=True)
    try:
        time_s = None if time is None else parse_limit(time)
        memory_gb = None if mem is None else parse_memory(mem) / 1024
    except ValueError as error:
        raise BadInput(str(error), fix="badcjobs check … --time 12:00:00 --mem 16G") from error
    mistakes: list[str] = []
    said = Config.read(config).read_tables(mistakes)[0]
    refuse(mistakes, "badcjobs check --help")
    said |= {key: value for key, value in settings.items() if value is not None}
    order = CheckOrder(
        sources=tuple(source or said.get("source", ())),
        out=out,
        cutting=Cutting(said.get("cut"), said.get("chunk_length"), said.get("overlap") or 0.0),
        site=site,
        script=script,
        engine_args=tuple(said.get("engine_arg", ())),
        **{key: said.get(key) for key in ("root", "engine", "command", "hawkears_python", "hawkears_root")},
        asked=Asked(
            tasks=tasks,
            gpus_per_task=gpus_per_task,
            cpus_per_node=cpus,
            memory_gb_per_node=memory_gb,
            time_s=time_s,
            no_time_limit=time is not None and time_s is None,
            account=account,
            merge_account=merge_account,
        ),
        quick=quick,
    )
    parse = make_parser(context.find_root().command)
    here = Here(environ(), SystemClock(), Path.cwd(), Pace("chunks looked at"), parse)
    found = check_all(order, here)
    answer(json_wanted, found.to_dict, lambda: remarks_text(found.findings))
    return int(found.exit_code)


def make_parser(group: Any) -> Callable[[Sequence[str]], ParsedWords]:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    from badcjobs.cluster.job_script import ParsedWords

    names = group.list_commands(None)

    def parse(words: Sequence[str]) -> ParsedWords:
        found = _parse(group, words, "badcjobs")
        if found.wrong or not found.operands:
            return found
        said, *rest = found.operands
        name = said if said in names else nearest(said, names)
        if name is None:
            return ParsedWords(wrong=(f"badcjobs has no command {said}", said, ""))
        parsed = _parse(group.get_command(None, name), rest, f"badcjobs {name}")
        wrong = (f"badcjobs has no command {said}", said, name) if name != said else parsed.wrong
        return ParsedWords(name, parsed.values, parsed.operands, wrong)

    return parse


def _parse(command: Any, words: Sequence[str], whose: str) -> ParsedWords:
    from badcjobs.cluster.job_script import ParsedWords, parse_plainly

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
        wrong, near = replaced_option(wrong, words) or (wrong, near)
        return ParsedWords(values=parse_plainly(words).values, wrong=(said, wrong, near or ""))
    listed = [word for name, value in values.items() if isinstance(value, tuple) for word in value]
    kept = {name: value for name, value in values.items() if value is not None and not isinstance(value, tuple)}
    return ParsedWords(values=kept, operands=(*listed, *operands))
