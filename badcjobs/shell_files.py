"""Tells commands of a job script that may leave files behind from those that only set something up, or speak.

A source that is not there yet may be made by the first kind; whoever is in doubt is of the first kind.
"""

from __future__ import annotations

import re
from collections.abc import Set

from badcjobs.shell_commands import Command

_HARMLESS = {
    "echo", "printf", "module", "ml", "cd", "pushd", "popd", "export", "declare", "local", "readonly", "typeset", "set",
    "shopt", "source", ".", "conda", "mamba", "micromamba", "mkdir", "unset", "read", ":", "[", "[[", "test", "trap",
    "ulimit", "umask", "hostname", "date", "pwd", "env", "printenv", "nvidia-smi", "which", "type", "command", "true",
    "false", "sleep", "exit", "return", "wait", "nproc", "uname", "whoami", "id", "scontrol", "squeue", "case", "for",
    "badcjobs", "exec", "rm", "ls", "cat", "head", "tail", "wc", "grep", "df", "du", "free", "lscpu", "ps",
}  # fmt: skip
_COMPARING = {"==", "=", "!=", "=~", "-eq", "-ne", "-lt", "-le", "-gt", "-ge"}
_ASSIGNING = re.compile(r"\w+\+?=")
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*\"""")
_INTO_FILE = re.compile(r"(?<![0-9&<-])>[>|]?\s*(?![&>(|\s]|/dev/)")


def may_make_files(command: Command, functions: Set[str] = frozenset()) -> bool:
    """Say whether a command may leave files behind; what ``functions`` of the script do is among its commands."""
    words = [word for word in command.words if not _ASSIGNING.match(word)]
    if not words or words[-1] == "]]" or words[0].startswith("-") or {*words[1:2]} & _COMPARING:
        return False  # nothing at all, or a part of [[ … && … ]]
    if words[0] not in _HARMLESS and words[0] not in functions:
        return True
    return _INTO_FILE.search(_QUOTED.sub("''", command.text)) is not None
