"""What the command line takes, read from the commands themselves; nothing is run."""

from __future__ import annotations

from typing import Any

from badcjobs.own_line import Grammar

_HELP = {"-h": False, "--help": False}


def read_grammar(group: Any) -> Grammar:
    """Return every command of the program with its options, as its parser knows them."""
    return Grammar(_options(group), {name: _options(command) for name, command in group.commands.items()})


def _options(command: Any) -> dict[str, bool]:
    """Return option → whether a value follows it."""
    found = dict(_HELP)
    for parameter in command.params:
        if parameter.param_type_name == "option":
            takes_value = not (parameter.is_flag or parameter.count)
            found |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), takes_value)
    return found
