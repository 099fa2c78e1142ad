"""``badcjobs cluster``: free GPUs per partition and node, from one Slurm query."""

from __future__ import annotations

from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs cluster --gpus 4 --kind v100"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="cluster", short_help="Show the free GPUs of the cluster.", epilog=_EXAMPLE)(cluster)


def cluster(
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs a task needs, for the advice.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Only GPUs of this kind: v100, a100, or a node feature.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Show free and used GPUs per partition and node, and where a task of so many GPUs would start.

    Asks sinfo once. Exit code 3 without Slurm, without any such GPU, or when no node has so many (the advice then says
    which is the most, and what to ask for instead); 5 when sinfo refuses.
    """
    from badcjobs.cli.output import print_json, say
    from badcjobs.cli.world import environ
    from badcjobs.cluster.nodes import cluster_text, look_at_cluster
    from badcjobs.errors import ExitCode

    found = look_at_cluster(environ(), gpus=gpus, kind=kind)
    if json_wanted:
        print_json(found)
    else:
        say(cluster_text(found))
    return int(ExitCode.DONE if found["fits"] else ExitCode.NOT_HERE)
