"""``badcjobs probe``: how long may a chunk be on the GPUs that are here, and which length is the best?"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import ENGINE, ConfigWords, JsonWanted, with_settings
from badcjobs.cli.output import answer, log_to_stderr, read_world, shown
from badcjobs.cli.targets import Target, refuse_data
from badcjobs.errors import BadInput
from badcjobs.settings import Config, make_settings, refuse

if TYPE_CHECKING:
    from badcjobs.planning.probe import ProbeEnd, ProbeOrder

_DEVICES = ("simulate", "simulate_script", "max_gpus", "workers_per_gpu", "cpu_workers", "emit_gpu_telemetry")
_INTERVAL_S = 0.1  # a trial may be short, and its peak shorter
# Of the options that are numbers: from where, to where, and in words.
_LIMITS = {
    "max_minutes": (1e-9, 9_999, "a number of minutes above 0"),
    "start_length": (3, 86_400, "from 3 to 86400 seconds"),
    "max_length": (3, 86_400, "from 3 to 86400 seconds"),
    "margin": (0, 90, "from 0 to 90 percent"),
    "trial_seconds": (1e-9, 3600, "a number of seconds above 0"),
}


@with_settings(*ENGINE, *_DEVICES)
def probe(
    audio: Annotated[list[str], typer.Argument(metavar="AUDIO", help="Recordings to try with; short ones repeat.")],
    max_minutes: Annotated[float, typer.Option(help="Stop after so many minutes; the same command goes on.")] = 10.0,
    max_length: Annotated[float, typer.Option(help="Try nothing longer than so many seconds.")] = 3600.0,
    start_length: Annotated[float, typer.Option(help="Begin with so many seconds.")] = 60.0,
    margin: Annotated[float, typer.Option(help="Percent by which a safe chunk is shorter than the longest.")] = 10.0,
    trial_seconds: Annotated[float, typer.Option(help="Let the chunks of a trial take about so long.")] = 3.0,
    store: Annotated[Path | None, typer.Option(metavar="FILE", help="Result file [probe.toml in the cache].")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the database of the trials.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Forget what was found before.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the curve as a page.")] = None,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Find the longest chunk that each GPU model can take with this engine and its settings, and the best one.

    Doubles the length until the memory runs out, then searches in between. What is found is kept: later runs cut
    what is longer before it fails. More: badcjobs guide probe.

    Example: badcjobs probe july/GNWT-01.wav --hawkears-root /scratch/lab/hawkears --html probe.html
    """
    from badcjobs.planning.probe import ProbeOrder
    from badcjobs.planning.probe_search import Bounds

    given, chosen = dict(locals()), Config.read(config)
    refuse(
        [
            f"--{name.replace('_', '-')} {given[name]:g} must be {words}"
            for name, (least, most, words) in _LIMITS.items()
            if not least <= given[name] <= most
        ],
        "badcjobs probe --help",
    )
    flags = {"source": audio, "interval": _INTERVAL_S, **settings}
    order = ProbeOrder(
        make_settings(keep or Path("probe"), flags, chosen, "probe"),
        Bounds(start_length, max_length),
        margin_percent=margin,
        most_s=max_minutes * 60,
        trial_s=trial_seconds,
        store=store,
        keep=keep,
        again=again,
    )
    inputs = [*map(Path, audio), *([] if chosen.file is None else [chosen.file])]
    refuse_data([Target("--store", store, "probe.toml"), Target("--html", html, "probe.html")], inputs)
    _try_page(html)
    return _probe(order, html, json_wanted)


def _probe(order: ProbeOrder, html: Path | None, json_wanted: bool) -> int:
    import logging

    from badcjobs.planning.probe import run_probe
    from badcjobs.planning.probe_page import probe_page, probe_text
    from badcjobs.report.job import write_whole
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
    kept = f"{shown(end.store)}; {readers_of(end.store, world.environ)}"
    answer(json_wanted, lambda: _document(end), lambda: probe_text(known, kept, end.notes))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        try:
            write_whole(html, probe_page(known, end.notes))
        except BadInput as error:
            raise BadInput(f"--html {error.what}", why=error.why, fix="--html probe.html") from error
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
