"""Options that several commands have: each is declared once, those of ``badcjobs run`` in the table of settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from badcjobs.settings import settings_by_key

ConfigWords = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="FILE|KEY=VALUE",
        help="Settings file, or one setting such as run.grace_s=60; repeatable. Options win over it.",
    ),
]
JsonWanted = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Sources = Annotated[
    list[str] | None, typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list of either.")
]

DEVICES = ("simulate", "simulate_script", "replay")
ENGINE = ("engine", "command", "engine_arg", "hawkears_python", "hawkears_root")
CHUNKS = ("root", "chunk_length", "overlap")


def with_settings(*keys: str, but: tuple[str, ...] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of these settings for its ``**settings``; without keys, all that have one.

    They reach the command by their TOML names; None: not given.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters
        known = settings_by_key()
        wanted = [key for key in keys or known if key not in own and key not in but]
        parameters = [one for one in own.values() if one.kind is not one.VAR_KEYWORD]
        parameters += [_parameter(key, known[key].metadata) for key in wanted if known[key].metadata["option"]]

        def with_all(*context: Any, **given: Any) -> int:
            return command(*context, **{name: None if value == [] else value for name, value in given.items()})

        with_all.__doc__ = command.__doc__
        with_all.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
        with_all.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        return with_all

    return decorate


def _parameter(key: str, described: Any) -> inspect.Parameter:
    name, kind = key.replace("_", "-"), described["kind"]
    shown = typer.Option(f"--{name}/--no-{name}" if kind is bool else f"--{name}", help=described["option"])
    annotation = Annotated[(list[str] if kind is list else kind) | None, shown]  # type: ignore[valid-type]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
