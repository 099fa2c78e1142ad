"""run.toml: the settings that all tasks of a run share, frozen by the first one."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.config import RunSettings, read_toml, settings_by_key
from badcjobs.errors import BadInput
from badcjobs.manifest import Cutting
from badcjobs.model import ArrayShape
from badcjobs.paths import is_there

_LONGEST_COMMAND = 4000  # letters; a terminal takes about as many in one line
# They say what one task is to do, not how.
_OF_ONE_TASK = ("shard", "resume", "retry_failed", "time_left", "profile", "profile_chunks")
_PATTERNS = "[recordings] patterns"


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """What run.toml holds."""

    settings: dict[str, Any]
    array: ArrayShape | None
    patterns: tuple[str, ...] | None = None  # what paths of recordings mean; None: a version froze it that did not say

    @classmethod
    def of(cls, settings: RunSettings, array: ArrayShape | None, cwd: Path) -> FrozenRun:
        """Return what this task would freeze; paths are absolute, so that tasks may start anywhere."""
        values = {k: getattr(settings, f.name) for k, f in settings_by_key().items() if f.metadata["frozen"]}
        values["source"] = tuple(_absolute(cwd, path) for path in values["source"])
        if values["root"] is not None:
            values["root"] = _absolute(cwd, values["root"])
        if values["chunk_length"] is None:
            del values["overlap"]  # of nothing; a run of a version that could not cut has none either
        patterns = tuple(pattern.text for pattern in settings.patterns)
        return cls({key: value for key, value in values.items() if value is not None}, array, patterns)

    @classmethod
    def read(cls, path: Path) -> FrozenRun | None:
        """Read run.toml; None when no task has written it yet."""
        if not is_there(path):
            return None
        document = read_toml(path)
        array = document.get("array")
        try:
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in document.get("run", {}).items()}
            patterns = _parse_patterns(document.get("recordings", {}))
            return cls(settings, None if array is None else _parse_array(array), patterns)
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is not as the first task of the run wrote it",
                why=str(error),
                fix="put it back, or use another --out for a new run",
            ) from error

    @property
    def cutting(self) -> Cutting:
        """How this run's recordings become chunks; raise BadInput where nobody could have frozen that."""
        rows, length_s, overlap_s = (self.settings.get(key) for key in ("cut", "chunk_length", "overlap"))
        numbers = [value for value in (length_s, overlap_s) if value is not None]
        if not isinstance(rows, bool | None) or not all(type(value) in (int, float) for value in numbers):
            raise BadInput(
                "run.toml does not say how recordings were cut", fix="put it back as its first task wrote it"
            )
        return Cutting(rows, length_s, overlap_s or 0.0)

    def to_toml(self, version: str) -> str:
        """Return the file's text."""
        lines = ["# The settings that every task of this run shares, frozen by its first task.", ""]
        lines += [f"written_by = {_toml(f'badcjobs {version}')}", "", "[run]"]
        lines += [f"{key} = {_toml(value)}" for key, value in self.settings.items()]
        if self.patterns is not None:
            lines += ["", "[recordings]", f"patterns = {_toml(self.patterns)}"]
        if self.array is not None:
            shape = self.array
            lines += ["", "[array]", f"first = {shape.first}", f"step = {shape.step}", f"count = {shape.count}"]
        return "\n".join(lines) + "\n"

    def command_line(self, out: Path, also: Mapping[str, Any]) -> str:
        """Return the ``badcjobs run`` that takes the whole source with these settings, ready to paste.

        ``also`` holds settings that are not frozen, by TOML name, as a task was told. Where the line would be too long
        to paste, or hold letters that do not print, the settings are left in run.toml; so are patterns of names, for
        which there is no flag.
        """
        others = {key: value for key, value in also.items() if key not in self.settings and key not in _OF_ONE_TASK}
        source = " ".join(shlex.quote(path) for path in self.settings.get("source", ()))
        into = f"--out={shlex.quote(str(out))}"
        line = " ".join(["badcjobs run", source, into, *_flags({**others, **self.settings})])
        if len(line) <= _LONGEST_COMMAND and line.isprintable() and not self.patterns:
            return line
        config = shlex.quote(str(out / "run.toml"))
        return " ".join(["badcjobs run", f"--config={config}", into, *_flags(others)])


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, field in settings_by_key().items():
        value, flag = settings.get(key), key.replace("_", "-")
        if key == "source" or value is None or value == field.default:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            yield f"--{flag}={shlex.quote(str(one))}"


def check_against(frozen: FrozenRun, mine: FrozenRun, path: Path) -> None:
    """Refuse a task whose settings differ from the run's, naming every key."""
    first, now = dict(frozen.settings), dict(mine.settings)
    if frozen.patterns is not None:
        first[_PATTERNS], now[_PATTERNS] = frozen.patterns, mine.patterns
    differing = [key for key in sorted(set(first) | set(now)) if first.get(key) != now.get(key)]
    if differing:
        named = _PATTERNS in differing  # for which there is no flag
        anew = "; badcjobs export --config FILE reads names anew" if named else ""
        same = f"use the same settings{f' (--config={shlex.quote(str(path))} has them)' if named else ''}"
        raise BadInput(
            f"{', '.join(differing)}: not as in {path}",
            why="\n".join(f"{key} was {_toml(first.get(key))}, now {_toml(now.get(key))}" for key in differing),
            fix=f"{same}, or another --out for a new run{anew}",
        )


def freeze(path: Path, mine: FrozenRun, version: str) -> FrozenRun:
    """Write run.toml unless another task was first; return what stands in it."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    temporary.write_text(mine.to_toml(version), encoding="utf-8")
    try:
        os.link(temporary, path)  # unlike a rename this fails when the file is there: exactly one task is first
    except FileExistsError:
        pass
    except OSError:
        _write_where_nothing_is(path, mine.to_toml(version))  # a filesystem without hard links
    finally:
        temporary.unlink()
    frozen = FrozenRun.read(path)
    assert frozen is not None
    return frozen


def _write_where_nothing_is(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)  # a few lines: one write, so that nobody reads half of them
    except FileExistsError:
        pass


def _parse_array(table: dict[str, int]) -> ArrayShape:
    shape = ArrayShape(**table)
    if not (type(shape.first) is type(shape.step) is type(shape.count) is int and shape.step > 0):
        raise ValueError("[array] must hold whole numbers")
    return shape


def _parse_patterns(table: dict[str, Any]) -> tuple[str, ...] | None:
    if (texts := table.get("patterns")) is None:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("[recordings] patterns must be a list of texts")
    return tuple(texts)


def _absolute(cwd: Path, path: str) -> str:
    return os.path.abspath(cwd / path)  # noqa: PTH100 - resolve() would turn a git-annex link into its key


def _toml(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's texts, numbers, true and false are TOML's too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one letter that only TOML refuses
