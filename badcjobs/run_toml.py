"""run.toml: the settings that all tasks of a run share, frozen by its first task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.masking import mask_value, mask_words, write_new_text
from badcjobs.model import ArrayShape, Billing, Cutting
from badcjobs.paths import is_there, shell_line
from badcjobs.project import Project
from badcjobs.settings import SETTINGS, RunSettings, absolute_paths, option_words, read_toml, to_toml
from badcjobs.trust import Trust

_OF_ONE_TASK = ("shard", "resume", "retry_failed", "stop_after")  # they may differ between tasks
_PLACES = ("source", "root")
_PATTERNS = "[recordings] patterns"
_MOST_INDICES = 4_000_001  # of an array in Slurm
_LONGEST_COMMAND = 4000  # characters; about the limit of one line in a terminal


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """The content of run.toml."""

    settings: dict[str, Any]
    array: ArrayShape | None
    patterns: tuple[str, ...] = ()  # the meaning of recording paths
    billing: Billing | None = None  # of the site, so that a report needs no site file
    origin: str = ""  # of the settings of the first task; not read again

    @classmethod
    def of(cls, settings: RunSettings, array: ArrayShape | None, cwd: Path) -> FrozenRun:
        """Return the frozen settings of this task; paths are absolute, so that tasks may start in any folder."""
        frozen = {key: getattr(settings, one.name) for key, one in SETTINGS["run"].items() if one.frozen}
        values = absolute_paths(frozen, "run", cwd)
        if values["chunk_length"] is None:
            del values["overlap"]  # without effect
        patterns = tuple(pattern.text for pattern in settings.patterns)
        given = {k: value for k, value in values.items() if value is not None}
        return cls(given, array, patterns, settings.billing, settings.origin)

    @classmethod
    def read(cls, path: Path, trust: Trust | None = None) -> FrozenRun | None:
        """Read run.toml; None: no task has written it yet. ``trust``: refuse programs if it is not trusted."""
        if not is_there(path) and not path.is_symlink():
            return None
        (document, text, status), mistakes, project = read_toml(path), list[str](), Project()
        try:
            project = Project.parse(document, text, path)
        except BadInput as error:
            mistakes += (error.why or error.what).splitlines()
        shape, array, billing = document.get("array"), None, None
        try:
            billing = Billing(**document["billing"]) if "billing" in document else None
            *weights, rule = astuple(billing or Billing(0))
            if rule not in ("max", "sum") or not all(type(one) in (int, float) and 0 <= one <= 1e9 for one in weights):
                raise TypeError
        except TypeError:
            mistakes.append("[billing] must have gpu, memory_gb and cpu, numbers from 0 to 1e9, and rule, max or sum")
        if (
            isinstance(shape, dict)
            and {*shape} == {"first", "step", "count"}
            and all(type(value) is int and 0 <= value <= _MOST_INDICES for value in shape.values())
            and shape["step"] > 0
        ):
            array = ArrayShape(**shape)
        elif shape is not None:
            mistakes.append("[array] must have the whole numbers first, step (above 0) and count")
        if mistakes:
            raise BadInput(
                f"{path} was changed after the first task wrote it",
                why="\n".join(mistakes),
                fix="restore it, or use another --out for a new run",
            )
        if trust is not None:
            trust.check(path, status, project.programs)
        return cls(dict(project.values["run"]), array, tuple(pattern.text for pattern in project.patterns), billing)

    @property
    def cutting(self) -> Cutting:
        """How the recordings of this run are cut into chunks."""
        of_run = self.settings
        return Cutting(of_run.get("cut"), of_run.get("chunk_length"), of_run.get("overlap", 0.0))

    def to_toml(self, version: str) -> str:
        """Return the text of the file."""
        lines = ["# The settings that every task of this run shares, frozen by its first task.", ""]
        lines += [f"written_by = {to_toml(f'badcjobs {version}')}", f"origin = {to_toml(self.origin)}", "", "[run]"]
        lines += [f"{key} = {to_toml(value)}" for key, value in self.settings.items()]
        lines += ["", "[recordings]", f"patterns = {to_toml(self.patterns)}"]
        for name, table in (("billing", self.billing), ("array", self.array)):
            if table is not None:
                lines += ["", f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in asdict(table).items())]
        return "\n".join(lines) + "\n"

    def command_line(self, out: Path, also: Mapping[str, Any]) -> str:
        """Return the ``badcjobs run`` for the complete source with these settings, ready to paste.

        ``also`` has settings of a task that are not frozen, by key. The line uses ``--config run.toml`` if it would be
        too long, has unprintable characters or a secret, or needs patterns of names, which have no option.
        """
        others = {key: value for key, value in also.items() if key not in self.settings and key not in _OF_ONE_TASK}

        def words(*begin: str, values: Mapping[str, Any]) -> list[str]:
            given = {key: values.get(key) for key, one in SETTINGS["run"].items() if values.get(key) != one.default}
            return ["badcjobs", "run", *begin, f"--out={out}", *option_words(given)]

        all_words = words(*self.settings.get("source", ()), values={**others, **self.settings})
        whole = shell_line(*all_words)
        has_secret = mask_words(all_words) != all_words
        if len(whole) <= _LONGEST_COMMAND and whole.isprintable() and not self.patterns and not has_secret:
            return whole
        return shell_line(*words(f"--config={out / 'run.toml'}", values=others))


def check_against(frozen: FrozenRun, mine: FrozenRun, path: Path) -> None:
    """Refuse a task whose settings differ from those of the run; name every key. Secrets may differ."""
    settings = ({**run.settings, _PATTERNS: run.patterns} for run in (frozen, mine))
    first, now = ({key: mask_value(value) for key, value in one.items()} for one in settings)
    unmoved = {key for key in _PLACES if real_places(first.get(key)) == real_places(now.get(key))}
    differing = [key for key in sorted({*first, *now} - unmoved) if first.get(key) != now.get(key)]
    if differing:
        named = _PATTERNS in differing  # without an option
        other_patterns = "; badcjobs export --config FILE uses other patterns" if named else ""
        same = f"use the same settings{f' (--config={shell_line(path)} has them)' if named else ''}"
        raise BadInput(
            f"{', '.join(differing)}: different from {path}",
            why="\n".join(f"{key} was {to_toml(first.get(key))}, now {to_toml(now.get(key))}" for key in differing),
            fix=f"{same}, or another --out for a new run{other_patterns}",
        )


def real_places(value: str | tuple[str, ...] | None) -> list[str]:
    """Return what a ``source`` or ``root`` names, without links: a run may be resumed by any path to it."""
    return [os.path.realpath(path) for path in ((value,) if isinstance(value, str) else value or ())]


def freeze(path: Path, mine: FrozenRun, version: str) -> FrozenRun:
    """Write run.toml unless another task has written it; return its content."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    write_new_text(temporary, mine.to_toml(version))
    try:
        os.link(temporary, path)  # unlike a rename, this fails if the file exists: exactly one task writes it
    except FileExistsError:
        pass
    except OSError:  # a filesystem without hard links
        with suppress(FileExistsError):
            write_new_text(path, mine.to_toml(version))  # in one write, so that no other task reads a part of it
    finally:
        temporary.unlink()
    frozen = FrozenRun.read(path)
    assert frozen is not None
    return frozen
