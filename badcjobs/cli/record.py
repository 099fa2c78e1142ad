"""``badcjobs record``: the recorder alone, or around any command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs record --out training.sqlite -- python train.py"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="record", short_help="Record the devices, alone or around a command.", epilog=_EXAMPLE)(record)


def record(
    out: Annotated[Path, typer.Option(help="Where to; .sqlite, .csv or .jsonl.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Record while this command runs.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between samples.")] = 1.0,
    duration: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many seconds (a command gets SIGTERM).")
    ] = None,
    simulate: Annotated[int | None, typer.Option(min=1, help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their load and faults.")] = None,
    replay: Annotated[str | None, typer.Option(help="Pretend that the devices are those of a task database.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    live_mode: Annotated[
        str, typer.Option(help="Where the live file is: auto, local or shared (badcjobs guide store).")
    ] = "auto",
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [alerts].")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON (not with a command).")] = False,
) -> int:
    """Record every granted device until Ctrl-C, for some time, or while a command runs (whose exit code it returns)."""
    from badcjobs.cli.output import log_to_stderr, print_json, remark, say
    from badcjobs.cli.targets import Target, refuse_data
    from badcjobs.cli.world import read_world
    from badcjobs.settings import stand_in
    from badcjobs.task.record_command import read_alert_settings, run_record
    from badcjobs.task.records import RecordingOptions

    log_to_stderr(quiet=True)
    if overwrite:
        refuse_data([Target("--out", out, f"recording{out.suffix}")], whatever_it_holds=True)
    world = read_world()
    limits, hooks = read_alert_settings(config)
    options = RecordingOptions(
        interval,
        stand_in(world.cwd, simulate, simulate_script, replay),
        limits,
        lambda alert: remark(alert.words) if alert.over else None,  # the log, kept to warnings, has only their begin
        hooks,
    )
    end = run_record(
        out, options, world, command=command or (), duration_s=duration, overwrite=overwrite, live_mode=live_mode
    )
    if json_wanted:
        print_json(end)
    else:
        trouble = "" if end["telemetry"] == "on" else f"; telemetry {end['telemetry']}"
        devices = "1 device" if end["devices"] == 1 else f"{end['devices']} devices"
        said = f"{devices} recorded for {end['wall_s']:.1f} s: {end['out']}{trouble}"
        if command:
            remark(said)  # its own output stays clean
        else:
            say(f"badcjobs: {said}")
    return int(end["exit_code"])
