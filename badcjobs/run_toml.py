"""run.toml: the settings that all tasks of a run share, frozen by its first task."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from badcjobs.errors import BadInput
from badcjobs.masking import mask_value, mask_words, write_new_text
from badcjobs.model import ArrayShape, Billing, Cutting, known_values
from badcjobs.paths import is_there, shell_line
from badcjobs.project import Project
from badcjobs.settings import SETTINGS, RunSettings, absolute_paths, option_words, read_toml, to_toml
from badcjobs.small_files import parse_fields
from badcjobs.trust import Trust

_OF_ONE_TASK = ("shard", "resume", "retry_failed", "stop_after", "filelist_digest")  # they may differ between tasks
_PLACES = ("source", "root")
_RECORDINGS = "[recordings]"
_LONGEST_COMMAND = 4000  # characters; about the limit of one line in a terminal
Noun = TypeVar("Noun", ArrayShape, Billing)


@dataclass(frozen=True)
class FrozenRun:
    """The content of run.toml."""

    settings: dict[str, Any]
    array: ArrayShape | None
    recordings: Mapping[str, object] = field(default_factory=dict)  # the table [recordings]
    billing: Billing | None = None  # of the site, so that a report needs no site file
    origin: str = ""  # of the settings of the first task; not read again
    filelist_sha256: str = ""  # of the list of the first task; later lists may have more rows

    @classmethod
    def of(cls, settings: RunSettings, array: ArrayShape | None, cwd: Path) -> FrozenRun:
        """Return the frozen settings of this task; paths are absolute, so that tasks may start in any folder."""
        frozen = {key: getattr(settings, setting.name) for key, setting in SETTINGS["run"].items() if setting.frozen}
        if frozen["chunk_length"] is None:
            del frozen["overlap"]  # without effect
        values = absolute_paths(frozen, "run", cwd)
        return cls(
            settings=known_values(values),
            array=array,
            recordings=settings.recordings,
            billing=settings.billing,
            origin=settings.origin,
            filelist_sha256=digest_filelist(settings, cwd),
        )

    @classmethod
    def read(cls, path: Path, trust: Trust | None = None) -> FrozenRun | None:
        """Read run.toml; None: no task has written it yet. ``trust``: refuse programs if it is not trusted."""
        if not is_there(path) and not path.is_symlink():
            return None
        document, text, status = read_toml(path)
        try:
            project = Project.parse(document, text, path)
            billing = _parse_table(Billing, document, "billing")
            array = _parse_table(ArrayShape, document, "array")
        except BadInput as error:
            raise BadInput(
                f"{path} was changed after the first task wrote it",
                why=error.why or error.what,
                fix="restore it, or use another --out for a new run",
            ) from error
        if trust is not None:
            trust.check(path, status, project.programs)
        return cls(
            settings=dict(project.values["run"]),
            array=array,
            recordings={"patterns": (), **project.values["recordings"]},
            billing=billing,
            filelist_sha256=str(document.get("filelist_sha256", "")),
        )

    @property
    def cutting(self) -> Cutting:
        """How the recordings of this run are cut into chunks."""
        settings = self.settings
        return Cutting(settings.get("cut"), settings.get("chunk_length"), settings.get("overlap", 0.0))

    @property
    def compared(self) -> dict[str, Any]:
        """All that must not change; of the list only whether there is one, because it may get more rows."""
        recordings = {f"{_RECORDINGS} {key}": value for key, value in self.recordings.items()}
        return {**self.settings, **recordings, "filelist given": bool(self.filelist_sha256)}

    def to_toml(self, version: str) -> str:
        """Return the text of the file."""
        top = {"written_by": f"badcjobs {version}", "origin": self.origin}
        if self.filelist_sha256:
            top["filelist_sha256"] = self.filelist_sha256
        tables = {"": top, "[run]": self.settings, _RECORDINGS: self.recordings}
        if self.billing is not None:
            tables["[billing]"] = asdict(self.billing)
        if self.array is not None:
            tables["[array]"] = asdict(self.array)
        lines = ["# The settings that every task of this run shares, frozen by its first task."]
        for header, table in tables.items():
            lines += ["", header] if header else [""]
            lines += [f"{key} = {to_toml(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"

    def command_line(self, out: Path, also: Mapping[str, Any]) -> str:
        """Return the ``badcjobs run`` for the complete source with these settings, ready to paste.

        ``also`` has settings of a task that are not frozen, by key. The line uses ``--config run.toml`` if it would be
        too long, has unprintable characters or a secret, or needs keys of [recordings], which have no option.
        """
        not_frozen = {key: value for key, value in also.items() if key not in (*self.settings, *_OF_ONE_TASK)}
        options = _changed_options({**not_frozen, **self.settings})
        words = ["badcjobs", "run", *self.settings.get("source", ()), f"--out={out}", *options]
        line = shell_line(*words)
        has_secret = mask_words(words) != words
        needs_file = has_secret or any(self.recordings.values())
        if len(line) <= _LONGEST_COMMAND and line.isprintable() and not needs_file:
            return line
        return shell_line(
            "badcjobs", "run", f"--config={out / 'run.toml'}", f"--out={out}", *_changed_options(not_frozen)
        )


def _parse_table(noun: type[Noun], document: Mapping[str, Any], name: str) -> Noun | None:
    """Return a table of the file; None: there is none."""
    if name not in document:
        return None
    try:
        return parse_fields(noun, document[name])
    except ValueError as error:
        raise BadInput(f"[{name}] {error}") from error


def _changed_options(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options for the values that differ from their defaults."""
    settings = SETTINGS["run"]
    return option_words(
        {key: value for key, value in values.items() if key in settings and value != settings[key].default}
    )


def digest_filelist(settings: RunSettings, cwd: Path) -> str:
    """Return a checksum of --filelist; empty without one."""
    if not settings.filelist:
        return ""
    try:
        return hashlib.sha256((cwd / settings.filelist).read_bytes()).hexdigest()
    except OSError:  # the reader of the list reports it
        return "not readable"


def check_against(frozen: FrozenRun, mine: FrozenRun, path: Path) -> None:
    """Refuse a task whose settings differ from those of the run; name every key. Secrets may differ."""
    first = {key: mask_value(value) for key, value in frozen.compared.items()}
    now = {key: mask_value(value) for key, value in mine.compared.items()}
    unmoved = {key for key in _PLACES if real_places(first.get(key)) == real_places(now.get(key))}
    differing = [key for key in sorted({*first, *now} - unmoved) if first.get(key) != now.get(key)]
    if not differing:
        return
    raise BadInput(
        f"{', '.join(differing)}: different from {path}",
        why="\n".join(f"{key} was {to_toml(first.get(key))}, now {to_toml(now.get(key))}" for key in differing),
        fix=f"use the same settings (--config={shell_line(path)} has them), or another --out for a new run",
    )


def real_places(value: str | tuple[str, ...] | None) -> list[str]:
    """Return what a ``source`` or ``root`` names, without links: a run may be resumed by any path to it."""
    paths = (value,) if isinstance(value, str) else value or ()
    return [os.path.realpath(path) for path in paths]


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
