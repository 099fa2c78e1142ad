"""Hides secrets: the values of options and variables whose names have a word such as token, password or api-key."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
_SHORTEST = 4  # characters of a secret; a shorter one is also a part of other words

# A whole word of a name: between - and _, or in camel case.
_BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))"
_WORD = "(?i:token|[a-z]*passw(?:or)?d|passphrase|secret|credentials?|auth|(?:api|access|private|secret)[-_]?key)"
_END = "(?:(?![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
_NAME = rf"[\w.-]*?{_BEGIN}{_WORD}{_END}[\w.-]*"
_ARG = r"--engine-arg[=\s\0]\s*"
# In a text: a command line, or a list in TOML, JSON or Python.
_VALUE = r"""(?:'[^'\0]*'|"(?:\\.|[^"\\\0])*"|(?:\\.|[^\s'"\\\0])+)"""
_AFTER_NAME = rf"""["']?(?:\s*,\s*|\s+)(?:["']?{_ARG})?(?!--)"""
_SECRET = re.compile(rf"(?<![\w-])(-{{0,2}}{_NAME}=|--?{_NAME}{_AFTER_NAME}){_VALUE}")
_PASSWORD_IN_URL = re.compile(r"(://[^\s/@:]*:)[^\s/@]+(?=@)")
# In words that are joined with NUL, where a value may have spaces.
_SECRET_WORD = re.compile(rf"((?:^|\0)(?:{_ARG})?(?:-{{0,2}}{_NAME}=|--?{_NAME}\0(?:{_ARG})?(?!--)))[^\0]+")


def mask(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without the values of secrets, also without those that are known already."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}", _SECRET.sub(rf"\1{HIDDEN}", text))


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of secrets."""
    if not words:
        return []
    return mask(_SECRET_WORD.sub(rf"\1{HIDDEN}", "\0".join(words))).split("\0")


def mask_value(value: Any) -> Any:
    """Return the value of a setting without secrets."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, tuple):
        return tuple(mask_words(value))
    return value


def find_secrets(words: Sequence[str]) -> list[str]:
    """Return the secrets in the words of a command."""
    pairs = zip(words, mask_words(words), strict=True)
    values = [word.removeprefix(shown.removesuffix(HIDDEN)) for word, shown in pairs if shown != word]
    return [value for value in values if len(value) >= _SHORTEST]


def write_new_text(path: Path, text: str) -> None:
    """Create a file; if there is a secret in the text, only the owner may read it."""
    mode = 0o666 if mask(text) == text else 0o600
    with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
