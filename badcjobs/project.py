"""The project file: the nearest badcjobs.toml, from the working folder upwards, and the values of ``--config``.

Every command but demo and guide reads it. Priority: option, ``--config KEY=VALUE``, file, default. Relative paths in
the file start at the file. Unknown keys and wrong values are refused, all of them in one message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import tzinfo
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import AlertHooks, AlertLimits, NamePattern, parse_patterns, parse_time_zone
from badcjobs.paths import shell_line
from badcjobs.settings import (
    OPTIONS_ONLY,
    SETTINGS,
    TABLES,
    PlanSettings,
    ProbeSettings,
    RunSettings,
    SubmitSettings,
    absolute_paths,
    check_values,
    contradictions,
    nearest,
    option_words,
    parse_value,
    read_toml,
    refuse,
    to_toml,
    value_text,
)
from badcjobs.trust import Trust

NAME = "badcjobs.toml"
_KEY_VALUE = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_FOUND = "found:"  # before a file that submit has found, so that each task checks it again
_OF_RUN_TOML = ("array", "billing", "origin", "written_by")  # --config accepts a run.toml
_MORE_OF_RUN = ("alerts.", "recordings.", "site")  # keys that a run reads besides those of [run]
Made = TypeVar("Made", RunSettings, SubmitSettings, PlanSettings, ProbeSettings)


@dataclass(frozen=True, slots=True)
class Project:
    """The checked settings of the project file and of ``--config``; options are added by ``make``."""

    file: Path | None = None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by table and key; paths are absolute
    keys: Mapping[str, Any] = field(default_factory=dict)  # of --config: "run.grace_s" → 60
    alerts: AlertLimits = field(default_factory=AlertLimits)
    hooks: AlertHooks = field(default_factory=AlertHooks)
    patterns: tuple[NamePattern, ...] = ()
    time_zone: tzinfo | None = None  # of the recorders' clocks; None: not known
    programs: Mapping[str, str] = field(default_factory=dict)  # of the file, by key: "run.command"
    word: str | None = None  # of --config, for the file, and for tasks to find it; "": no file

    @classmethod
    def read(cls, words: Sequence[str], cwd: Path, trust: Trust | None = None, tables: tuple[str, ...] = ()) -> Project:
        """Read the values of ``--config``, each FILE or KEY=VALUE; without a FILE, the nearest badcjobs.toml.

        An empty FILE means no file. ``trust``: refuse programs in these tables of a file that is not named.
        """
        found = [(word, _KEY_VALUE.fullmatch(word)) for word in words]
        files = [word for word, pair in found if pair is None]
        keys = {pair[1]: parse_value(pair[2]) for _, pair in found if pair is not None}
        if "" in files:
            return replace(cls.parse({}, keys=keys), word="")
        if len(files) > 1:
            raise BadInput(
                f"--config names {len(files)} files: {', '.join(files)}",
                why="settings come from one file; single keys can be added",
                fix=f"--config {shell_line(files[0])} --config run.grace_s=60",
            )
        file = cwd / files[0].removeprefix(_FOUND) if files else find_project_file(cwd)
        table, _, key = files[0].rpartition(".") if files else ("", "", "")
        if file is not None and key in SETTINGS.get(table, ()) and not file.exists():
            raise BadInput(f"--config {files[0]} has no value", fix=f"--config {files[0]}=VALUE")
        if file is None:
            return cls.parse({}, keys=keys)
        document, text, status = read_toml(file)
        project = replace(cls.parse(document, text, file, keys), word=str(file))
        if trust is None or (files and not files[0].startswith(_FOUND)):
            return project
        programs = {key: value for key, value in project.programs.items() if key.startswith(tables)}
        if trust.check(file, status, programs, warn=not files):
            return project
        return replace(project, word=f"{_FOUND}{file}")

    @classmethod
    def parse(
        cls,
        document: Mapping[str, Any],
        text: str = "",
        file: Path | None = None,
        keys: Mapping[str, Any] | None = None,
    ) -> Project:
        """Check a document and single keys; ``text`` is that of the file, for line numbers in messages."""
        source = _Source(document, text, file, keys or {})
        mistakes = [*source.unknown()]
        values: dict[str, dict[str, Any]] = {}
        for table in ("", *TABLES):
            in_file = check_values(table, source.in_file(table), partial(source.place, table), mistakes)
            values[table] = absolute_paths(in_file, table, file.parent) if file else in_file
            values[table] |= check_values(table, source.alone(table), partial(_key_place, table), mistakes)
        limits, hooks = source.alerts(mistakes)
        patterns, time_zone = source.recordings(mistakes)
        refuse(mistakes, "badcjobs guide settings   (lists every key)")
        return cls(file, values, source.keys, limits, hooks, patterns, time_zone, dict(source.programs()))

    @property
    def site(self) -> str | None:
        """The rules of the cluster: the name of a site, or the path of a TOML file."""
        return self.values.get("", {}).get("site")

    @property
    def origin(self) -> str:
        """The file and the program that it puts before the engine; empty without a file."""
        prefix = self.get("run", "engine_prefix")
        return f"{self.file or ''}{f'; engine_prefix = {prefix}' if self.file and prefix else ''}"

    def get(self, table: str, key: str) -> Any:
        """Return one value; None: not set."""
        return self.values.get(table, {}).get(key)

    def make(self, kind: type[Made], flags: Mapping[str, Any], command: str, collect: list[str] | None = None) -> Made:
        """Return a table with these options, by key (None: not given); all mistakes are in one message.

        ``collect``: mistakes are added to it instead, and the values that are wrong are left out.
        """
        table = next(name for name, one in TABLES.items() if one is kind)
        mistakes: list[str] = [] if collect is None else collect
        given = {key: value for key, value in flags.items() if value is not None}
        values: dict[str, Any] = {**self.values.get(table, {})}
        values |= check_values(table, given, lambda key: SETTINGS[table][key].option, mistakes)
        more: dict[str, Any] = {}
        if kind is RunSettings:
            mistakes += contradictions(values)
            values.setdefault("engine", "command" if values.get("command") else "hawkears")
            more = {"alerts": self.alerts, "hooks": self.hooks, "patterns": self.patterns, "origin": self.origin}
            if out := values.pop("out", None):  # "": an empty shell variable
                values["out"] = Path(out)
        if collect is None:
            refuse(mistakes, f"badcjobs {command} --help")
        return kind(**{SETTINGS[table][key].name: value for key, value in values.items()}, **more)

    def words(self) -> list[str]:
        """Return the project as values of ``--config``."""
        keys = [f"{key}={value_text(value)}" for key, value in self.keys.items()]
        return keys if self.word is None else [self.word, *keys]

    def run_words(self, flags: Mapping[str, Any], cwd: Path) -> list[str]:
        """Return it, and these options by key, as options of a ``badcjobs run`` that may start in any folder."""
        more = {k: one for k, one in self.keys.items() if k.startswith(_MORE_OF_RUN)}
        others = replace(self, keys=absolute_paths(more, "", cwd))
        alone = {k.removeprefix("run."): one for k, one in self.keys.items() if k.startswith("run.")}
        given = alone | {key: value for key, value in flags.items() if value is not None}
        return [
            *(f"--config={word}" for word in others.words()),
            *option_words(absolute_paths(given, "run", cwd)),
        ]


def find_project_file(cwd: Path) -> Path | None:
    """Return the nearest badcjobs.toml, from a folder upwards; None: there is none."""
    folder = cwd.absolute()
    # Unlike Path.is_file, os.path.isfile does not raise where a folder above cannot be searched.
    return next((one / NAME for one in (folder, *folder.parents) if os.path.isfile(one / NAME)), None)  # noqa: PTH113


def is_config_file(word: str) -> bool:
    """Say whether a value of ``--config`` is a file, not a key."""
    return _KEY_VALUE.fullmatch(word) is None


def _key_place(table: str, key: str) -> str:
    return f"--config {_dotted(table, key)}"


def _dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


@dataclass(frozen=True, slots=True)
class _Source:
    """A document and the keys of ``--config``, before the check."""

    document: Mapping[str, Any]
    text: str
    file: Path | None
    keys: Mapping[str, Any]

    def in_file(self, table: str) -> dict[str, Any]:
        """Return a table of the file; "" is its top."""
        if not table:
            return {key: value for key, value in self.document.items() if key in SETTINGS[""]}
        found = self.document.get(table, {})
        return dict(found) if isinstance(found, dict) else {}

    def alone(self, table: str) -> dict[str, Any]:
        """Return the keys of ``--config`` that belong to a table."""
        split = [(key.rpartition("."), value) for key, value in self.keys.items()]
        return {key: value for (owner, _, key), value in split if owner == table}

    def programs(self) -> Iterator[tuple[str, str]]:
        """Yield each key that names programs, with its value."""
        for table, keys in SETTINGS.items():
            for key, value in self.in_file(table).items():
                texts = [value] if isinstance(value, str) else value
                if keys[key].runs and any(text.endswith(keys[key].runs) for text in texts):
                    yield _dotted(table, key), to_toml(value)

    def place(self, table: str, key: str) -> str:
        """Return the place of a value: file, line and key."""
        line = _lines_of(self.text).get(_dotted(table, key))
        return f"{self.file}{'' if line is None else f', line {line}'}: {f'[{table}] ' if table else ''}{key}"

    def unknown(self) -> Iterator[str]:
        """Yield each unknown key with the nearest known one."""
        known = [_dotted(table, key) for table, keys in SETTINGS.items() for key in keys]
        names = {key.rpartition(".")[2]: key for key in reversed(known)}
        tables = [table for table in SETTINGS if table]
        places = {key: f"--config {key}" for key in self.keys}
        for name, value in self.document.items():
            if name in tables and isinstance(value, dict):
                places |= {f"{name}.{key}": self.place(name, key) for key in value}
            elif name in tables:
                yield f"{self.place('', name)} must be a table: [{name}]"
            elif name not in _OF_RUN_TOML:
                places[name] = self.place("", name)
        for key, place in places.items():
            bare = key.rpartition(".")[2]
            if bare in OPTIONS_ONLY:
                yield f"{place}: this can only be an option, --{bare}, because it is different in every call"
            elif key in tables:
                yield f"{place} is a table: --config {key}.KEY=VALUE"
            elif key not in known:
                near = bare if bare in names else nearest(bare, [*names, *tables])
                yield f"{place}: unknown key" + (f"; did you mean {names.get(near, near)}?" if near else "")

    def alerts(self, mistakes: list[str]) -> tuple[AlertLimits, AlertHooks]:
        """Return the table [alerts]."""
        table = self.in_file("alerts") | self.alone("alerts")
        parts = [{f.name: table[f.name] for f in fields(kind) if f.name in table} for kind in (AlertLimits, AlertHooks)]
        limits, hooks = AlertLimits(**parts[0]), AlertHooks(**parts[1])
        mistakes += [self._placed("alerts", problem) for problem in (*limits.problems(), *hooks.problems())]
        whole = {key: float(value) for key, value in asdict(limits).items() if type(value) is int}
        return replace(limits, **whole), hooks

    def recordings(self, mistakes: list[str]) -> tuple[tuple[NamePattern, ...], tzinfo | None]:
        """Return the patterns and the time zone of the table [recordings]."""
        table, zone = self.in_file("recordings") | self.alone("recordings"), None
        texts = table.get("patterns", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            mistakes.append(self._placed("recordings", f"patterns = {texts!r} must be a list of strings"))
            texts = []
        found, wrong = parse_patterns(texts)
        mistakes += [self._placed("recordings", f"patterns: {words}") for words in wrong]
        try:
            zone = parse_time_zone(str(table.get("time_zone", "")))
        except ValueError as error:
            mistakes.append(self._placed("recordings", f"time_zone: {error}"))
        return found, zone

    def _placed(self, table: str, problem: str) -> str:
        """Replace the key at the beginning of a problem by its place."""
        key = re.split("[ :]", problem)[0]
        if f"{table}.{key}" in self.keys:
            return f"--config {table}.{problem}"
        return self.place(table, key) + problem[len(key) :]


@lru_cache(1)
def _lines_of(text: str) -> Mapping[str, int]:
    """Return the number of the line that sets each key, or begins each table."""
    current = ""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            current = header[1]
            lines.setdefault(current, number)
        if pair := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
            lines.setdefault(_dotted(current, pair[1]), number)
    return lines
