"""run.toml: the settings that all tasks of a run share, frozen by its first task."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import ArrayShape, Cutting
from badcjobs.paths import is_there
from badcjobs.project import Project
from badcjobs.settings import SETTINGS, RunSettings, absolute_paths, option_words, read_toml, to_toml

_OF_ONE_TASK = ("shard", "resume", "retry_failed", "stop_after")  # what one task does, not how
_PATTERNS = "[recordings] patterns"
_LONGEST_COMMAND = 4000  # letters; a terminal takes about as many in one line


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """What run.toml holds."""

    settings: dict[str, Any]
    array: ArrayShape | None
    patterns: tuple[str, ...] = ()  # what paths of recordings mean

    @classmethod
    def of(cls, settings: RunSettings, array: ArrayShape | None, cwd: Path) -> FrozenRun:
        """Return what this task would freeze; paths are absolute, so that tasks may start anywhere."""
        frozen = {key: getattr(settings, one.name) for key, one in SETTINGS["run"].items() if one.frozen}
        values = absolute_paths(frozen, "run", cwd)
        if values["chunk_length"] is None:
            del values["overlap"]  # of nothing
        patterns = tuple(pattern.text for pattern in settings.patterns)
        return cls({key: value for key, value in values.items() if value is not None}, array, patterns)

    @classmethod
    def read(cls, path: Path) -> FrozenRun | None:
        """Read run.toml; None when no task has written it yet."""
        if not is_there(path):
            return None
        (document, text), mistakes, project = read_toml(path), list[str](), Project()
        try:
            project = Project.parse(document, text, path)
        except BadInput as error:
            mistakes += (error.why or error.what).splitlines()
        array = None
        try:
            array = ArrayShape(**document["array"]) if "array" in document else None
        except TypeError as error:
            mistakes.append(f"[array]: {error}")
        if array and not (type(array.first) is type(array.step) is type(array.count) is int and array.step > 0):
            mistakes.append("[array] must hold whole numbers")
        if mistakes:
            raise BadInput(
                f"{path} is not as the first task of the run wrote it",
                why="\n".join(mistakes),
                fix="put it back, or use another --out for a new run",
            )
        return cls(dict(project.values["run"]), array, tuple(pattern.text for pattern in project.patterns))

    @property
    def cutting(self) -> Cutting:
        """How this run's recordings become chunks."""
        of_run = self.settings
        return Cutting(of_run.get("cut"), of_run.get("chunk_length"), of_run.get("overlap", 0.0))

    def to_toml(self, version: str) -> str:
        """Return the file's text."""
        lines = ["# The settings that every task of this run shares, frozen by its first task.", ""]
        lines += [f"written_by = {to_toml(f'badcjobs {version}')}", "", "[run]"]
        lines += [f"{key} = {to_toml(value)}" for key, value in self.settings.items()]
        lines += ["", "[recordings]", f"patterns = {to_toml(self.patterns)}"]
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

        def line(*words: str, values: Mapping[str, Any]) -> str:
            given = {key: values.get(key) for key, one in SETTINGS["run"].items() if values.get(key) != one.default}
            return shlex.join(["badcjobs", "run", *words, f"--out={out}", *option_words(given)])

        whole = line(*self.settings.get("source", ()), values={**others, **self.settings})
        if len(whole) <= _LONGEST_COMMAND and whole.isprintable() and not self.patterns:
            return whole
        return line(f"--config={out / 'run.toml'}", values=others)


def check_against(frozen: FrozenRun, mine: FrozenRun, path: Path) -> None:
    """Refuse a task whose settings differ from the run's, naming every key."""
    first, now = ({**run.settings, _PATTERNS: run.patterns} for run in (frozen, mine))
    differing = [key for key in sorted(set(first) | set(now)) if first.get(key) != now.get(key)]
    if differing:
        named = _PATTERNS in differing  # for which there is no flag
        anew = "; badcjobs export --config FILE reads names anew" if named else ""
        same = f"use the same settings{f' (--config={shlex.quote(str(path))} has them)' if named else ''}"
        raise BadInput(
            f"{', '.join(differing)}: not as in {path}",
            why="\n".join(f"{key} was {to_toml(first.get(key))}, now {to_toml(now.get(key))}" for key in differing),
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
    except OSError:  # a filesystem without hard links
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(mine.to_toml(version))  # a few lines: one write, so that no other task reads half of them
    finally:
        temporary.unlink()
    frozen = FrozenRun.read(path)
    assert frozen is not None
    return frozen
