"""``badcjobs guide``: the handbook, for machines without a network."""

from __future__ import annotations

from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs guide sbatch"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="guide", short_help="Show a page of the handbook.", epilog=_EXAMPLE)(guide)


def guide(
    topic: Annotated[str | None, typer.Argument(help="Which page; without one, the list of pages.")] = None,
) -> int:
    """Show a page of the handbook, or the list of pages."""
    from badcjobs.cli.handbook import list_topics, read_topic
    from badcjobs.cli.output import hand_out

    hand_out(list_topics() if topic is None else read_topic(topic))
    return 0
