"""``badcjobs probe``: how long may a chunk be on the GPUs that are here, and which length is the best?"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from badcjobs.planning.probe import ProbeEnd, ProbeOrder

_EXAMPLE = "Example: badcjobs probe july/GNWT-01.wav --hawkears-root /scratch/lab/hawkears --html probe.html"
_OWN = ("audio", "max_minutes", "max_length", "start_length", "margin", "trial_seconds", "store", "keep")
_INTERVAL_S = 0.1  # a trial may be short, and its peak shorter


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="probe", short_help="Find how long a chunk may be on each GPU model.", epilog=_EXAMPLE)(probe)


def probe(
    audio: Annotated[
        list[str],
        typer.Argument(metavar="AUDIO", help="Recordings to try with; they are repeated where they are too short."),
    ],
    engine: Annotated[str | None, typer.Option(help="hawkears (default), hawkears1, command or demo.")] = None,
    command: Annotated[str | None, typer.Option(help="For --engine command: 'prog {input} {output}'.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="An argument for the engine; repeatable.")] = None,
    hawkears_python: Annotated[str | None, typer.Option(help="The Python that has HawkEars.")] = None,
    hawkears_root: Annotated[str | None, typer.Option(help="Folder with HawkEars' data/ and yaml/.")] = None,
    simulate: Annotated[int | None, typer.Option(help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their names, memory and faults.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Use at most N of the granted devices.")] = None,
    workers_per_gpu: Annotated[
        str | None, typer.Option(help="Engine processes per device, as the run will have; default 1.")
    ] = None,
    cpu_workers: Annotated[
        int | None, typer.Option(help="Without any GPU, measure N workers on the CPU: time, and memory of the node.")
    ] = None,
    max_minutes: Annotated[float, typer.Option(help="Stop after so many minutes; the same command goes on.")] = 10.0,
    max_length: Annotated[float, typer.Option(help="Try nothing longer than so many seconds.")] = 3600.0,
    start_length: Annotated[float, typer.Option(help="Begin with so many seconds.")] = 60.0,
    margin: Annotated[float, typer.Option(help="Percent by which a safe chunk is shorter than the longest.")] = 10.0,
    trial_seconds: Annotated[float, typer.Option(help="Let the chunks of a trial take about so long.")] = 3.0,
    emit_gpu_telemetry: Annotated[
        bool | None, typer.Option("--emit-gpu-telemetry/--no-emit-gpu-telemetry", help="Record the devices.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the result there; default: probe.toml in the user's cache."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the task database of the trials in this folder.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Forget what was found before.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the curve as a page.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [run]; flags win over it.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Find the longest chunk that each GPU model can take with this engine and its settings, and the best one.

    Doubles the length until the memory runs out, then searches in between. What is found is kept: later runs cut
    what is longer before it fails. More: badcjobs guide probe.
    """
    given = dict(locals())
    order = _order(given, config)
    _refuse_data(store, html, [*map(Path, audio), *([] if config is None else [config])])
    _try_page(html)
    return _probe(order, html, json_wanted)


def _refuse_data(store: Path | None, html: Path | None, inputs: list[Path]) -> None:
    from badcjobs.cli.targets import Target, refuse_data

    refuse_data([Target("--store", store, "probe.toml"), Target("--html", html, "probe.html")], inputs)


def _order(given: dict[str, Any], config: Path | None) -> ProbeOrder:
    from badcjobs.errors import BadInput
    from badcjobs.planning.probe import ProbeOrder
    from badcjobs.planning.probe_search import Bounds
    from badcjobs.settings import make_settings

    mistakes = [
        f"--{name.replace('_', '-')} {given[name]:g} must be {words}" for name, good, words in _rules(given) if not good
    ]
    if mistakes:
        several = len(mistakes) > 1
        raise BadInput(
            "these options cannot be used" if several else mistakes[0],
            why="\n".join(mistakes) if several else None,
            fix="badcjobs probe --help",
        )
    others = ("again", "html", "config", "json_wanted")
    flags = {name: value for name, value in given.items() if name not in (*_OWN, *others) and value != []}
    flags |= {"source": given["audio"], "interval": _INTERVAL_S}
    return ProbeOrder(
        make_settings(given["keep"] or Path("probe"), flags, config, "probe"),
        Bounds(given["start_length"], given["max_length"]),
        margin_percent=given["margin"],
        most_s=given["max_minutes"] * 60,
        trial_s=given["trial_seconds"],
        store=given["store"],
        keep=given["keep"],
        again=given["again"],
    )


def _rules(given: dict[str, Any]) -> list[tuple[str, bool, str]]:
    return [
        ("max_minutes", 0 < given["max_minutes"] < 10_000, "a number of minutes above 0"),
        ("start_length", 3 <= given["start_length"] <= 86_400, "from 3 to 86400 seconds"),
        ("max_length", 3 <= given["max_length"] <= 86_400, "from 3 to 86400 seconds"),
        ("margin", 0 <= given["margin"] <= 90, "from 0 to 90 percent"),
        ("trial_seconds", 0 < given["trial_seconds"] <= 3600, "a number of seconds above 0"),
    ]


def _probe(order: ProbeOrder, html: Path | None, json_wanted: bool) -> int:
    import logging

    from badcjobs.cli.output import log_to_stderr, print_json, say, shown
    from badcjobs.cli.world import read_world
    from badcjobs.planning.probe import run_probe
    from badcjobs.planning.probe_page import probe_text
    from badcjobs.workers.learned import readers_of

    log_to_stderr()
    # A chunk that does not fit is what we are after: no error, and said in a line of our own.
    for noisy in ("supervise", "stream_session"):
        logging.getLogger(f"badcjobs.workers.{noisy}").setLevel(logging.CRITICAL)
    world = read_world()
    end = run_probe(order, world)
    known = [probed for probed in end.probes if probed.trials]
    if end.problems and not known:
        raise end.problems[0]
    if json_wanted:
        print_json(_document(end))
    else:
        kept = f"{shown(end.store)}; {readers_of(end.store, world.environ)}"
        say(probe_text(known, kept, end.notes))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        _write_page(end, html)
    return end.exit_code


def _document(end: ProbeEnd) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "version": 1,
        "exit_code": end.exit_code,
        "store": str(end.store),
        "set_aside": None if end.aside is None else str(end.aside),
        "gpus": [
            {**asdict(probed.key), "at": probed.at, "finished": probed.finished,
             "result": None if probed.result is None else asdict(probed.result),
             "trials": [asdict(trial) for trial in sorted(probed.trials, key=lambda one: (one.lean, one.length_s))]}
            for probed in end.probes
        ],
        "problems": [{"what": problem.what, "why": problem.why, "fix": problem.fix} for problem in end.problems],
        "notes": list(end.notes),
    }  # fmt: skip


def _try_page(path: Path | None) -> None:
    """Refuse a page that cannot be written, before minutes of trials."""
    import tempfile

    from badcjobs.errors import BadInput
    from badcjobs.store.atomic_write import cannot_write

    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return  # a pipe or a device is written as it is
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        problem = cannot_write(path, error)
        raise BadInput(f"--html {problem.what}", why=problem.why, fix=problem.fix) from error


def _write_page(end: ProbeEnd, path: Path) -> None:
    from badcjobs.errors import BadInput
    from badcjobs.planning.probe_page import probe_page
    from badcjobs.report.job import write_whole

    try:
        write_whole(path, probe_page([probed for probed in end.probes if probed.trials], end.notes))
    except BadInput as error:
        raise BadInput(f"--html {error.what}", why=error.why, fix="--html probe.html") from error
