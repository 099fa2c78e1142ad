"""A command of the program: it takes ``--config`` and ``--debug`` everywhere, and its help page fits on one screen."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperOption

CONFIG, RUN_OPTIONS = "badcjobs.config", "badcjobs.run_options"  # in the context of a call
_FOOTER = "Every command also takes --config FILE|KEY=VALUE and --debug."
_COLUMN, _WIDTH = 30, 80  # of a help page: where texts begin, and its width


class Command(TyperCommand):
    """A command; it takes ``--config`` and ``--debug`` besides its own options, and some take those of run after --."""

    usage = ""  # what follows the name of the command
    parse_run_options: Callable[[Sequence[str]], Mapping[str, Any]] | None = None  # None: it takes none

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += [config_option(hidden=self.name != "run"), debug_option()]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; those after the first -- with the parser of ``badcjobs run``, where it takes them."""
        if self.parse_run_options is not None and "--" in args:
            at = args.index("--")
            ctx.meta[RUN_OPTIONS] = self.parse_run_options(args[at + 1 :])
            args = args[:at]
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page: usage, text, options, one example, one footer."""
        text, _, example = inspect.cleandoc(self.help or "").partition("Example:")
        usage = f"Usage: badcjobs {self.name} {self.usage}".rstrip()
        lines = [usage, "", *textwrap.wrap(" ".join(text.split()), _WIDTH)]
        for heading, options in self._options_by_heading(ctx).items():
            lines += ["", f"{heading}:", *(line for one in options for line in option_lines(one))]
        lines += ["", "Example:", *(f"  {line.strip()}" for line in example.strip().splitlines()), "", _FOOTER]
        formatter.write("\n".join(lines) + "\n")

    def _options_by_heading(self, ctx: Any) -> dict[str, list[Any]]:
        options: dict[str, list[Any]] = {"Options": []}
        parameters: list[Any] = list(self.get_params(ctx))
        for one in parameters:
            if one.param_type_name == "option" and not one.hidden:
                options.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(one)
        options["Options"].sort(key=lambda one: one.opts[0] in ("--json", "-h", "--help"))
        return options


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
    """Return the option ``--config``, which may be given before or after the name of the command, repeatedly."""

    def keep(ctx: Any, param: Any, value: Any) -> Any:
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


def debug_option() -> TyperOption:
    """Return the option ``--debug``; the program itself looks for it."""
    return TyperOption(param_decls=["--debug"], is_flag=True, default=False, expose_value=False, hidden=True)
