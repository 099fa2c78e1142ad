"""The project file: the nearest badcjobs.toml, from the working folder upwards, and the values of ``--config``.

Every command but demo and guide reads it. Priority: option, ``--config KEY=VALUE``, file, default. Relative paths in
the file start at the file. Unknown keys and wrong values are refused, all of them in one message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import tzinfo
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from badcjobs.errors import BadInput
from badcjobs.model import (
    AlertHooks,
    AlertLimits,
    NamePattern,
    ProjectPlaces,
    known_values,
    parse_patterns,
    parse_place,
    parse_time_zone,
)
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
_OF_RUN_TOML = ("array", "billing", "filelist_sha256", "origin", "written_by")  # --config accepts a run.toml
_MORE_OF_RUN = ("alerts.", "recordings.", "site")  # keys that a run reads besides those of [run]
_OF_A_PLACE = ("region", "latitude", "longitude", "date")
Settings = TypeVar("Settings", RunSettings, SubmitSettings, PlanSettings, ProbeSettings)


@dataclass(frozen=True)
class Project:
    """The checked settings of the project file and of ``--config``; options are added by ``make``."""

    file: Path | None = None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by table and key; paths are absolute
    keys: Mapping[str, Any] = field(default_factory=dict)  # of --config: "run.grace_s" → 60
    alerts: AlertLimits = AlertLimits()
    hooks: AlertHooks = AlertHooks()
    patterns: tuple[NamePattern, ...] = ()
    time_zone: tzinfo | None = None  # of the recorders' clocks; None: not known
    places: ProjectPlaces = ProjectPlaces()
    programs: Mapping[str, str] = field(default_factory=dict)  # of the file, by key: "run.command"
    word: str | None = None  # of --config, for the file, and for tasks to find it; "": no file

    @classmethod
    def read(cls, words: Sequence[str], cwd: Path, trust: Trust | None = None, tables: tuple[str, ...] = ()) -> Project:
        """Read the values of ``--config``, each FILE or KEY=VALUE; without a FILE, the nearest badcjobs.toml.

        An empty FILE means no file. ``trust``: refuse programs in these tables of a file that is not named.
        """
        files = []
        keys = {}
        for word in words:
            if _KEY_VALUE.fullmatch(word) is None:
                files.append(word)
            else:
                key, _, text = word.partition("=")
                keys[key] = parse_value(text)
        if len(files) > 1:
            raise BadInput(
                f"--config names {len(files)} files: {', '.join(files)}",
                why="settings come from one file; single keys can be added",
                fix=f"--config {shell_line(files[0])} --config run.grace_s=60",
            )
        named = files[0] if files else None
        file = find_project_file(cwd) if named is None else cwd / named.removeprefix(_FOUND)
        if file is None or named == "":
            return replace(cls.parse({}, keys=keys), word=named)

        document, text, status = read_toml(file)
        project = replace(cls.parse(document, text, file, keys), word=str(file))
        is_named = named is not None and not named.startswith(_FOUND)
        if trust is None or is_named:
            return project
        programs = {key: value for key, value in project.programs.items() if key.startswith(tables)}
        if trust.check(file, status, programs, warn=named is None):
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
        mistakes = list(source.find_unknown())
        values = {table: source.check(table, mistakes) for table in SETTINGS}
        alerts = dict(values["alerts"])
        hooks = AlertHooks(**{part.name: alerts.pop(part.name) for part in fields(AlertHooks) if part.name in alerts})
        places = source.places(values["recordings"], mistakes)
        refuse(mistakes, "badcjobs guide settings   (lists every key)")
        return cls(
            file,
            values,
            source.keys,
            AlertLimits(**alerts),
            hooks,
            patterns=parse_patterns(values["recordings"].get("patterns", ()))[0],
            time_zone=parse_time_zone(values["recordings"].get("time_zone", "")),
            places=places,
            programs=dict(source.programs()),
        )

    @property
    def site(self) -> str | None:
        """The rules of the cluster: the name of a site, or the path of a TOML file."""
        return self.values.get("", {}).get("site")

    @property
    def origin(self) -> str:
        """The file; empty without one."""
        return str(self.file or "")

    def get(self, table: str, key: str) -> Any:
        """Return one value; None: not set."""
        return self.values.get(table, {}).get(key)

    def make(
        self, kind: type[Settings], flags: Mapping[str, Any], command: str, collect: list[str] | None = None
    ) -> Settings:
        """Return a table with these options, by key (None: not given); all mistakes are in one message.

        ``collect``: mistakes are added to it instead, and the values that are wrong are left out.
        """
        table = next(name for name, settings in TABLES.items() if settings is kind)
        mistakes = [] if collect is None else collect
        values = dict(self.values.get(table, {}))
        options = known_values(flags)
        values |= check_values(table, options, lambda key: SETTINGS[table][key].option, mistakes)
        of_project = {}
        if kind is RunSettings:
            mistakes += contradictions(values)
            values.setdefault("engine", "command" if values.get("command") else "hawkears")
            out = values.pop("out", None)
            if out:  # "": an empty shell variable
                values["out"] = Path(out)
            of_project = {name: getattr(self, name) for name in ("alerts", "hooks", "patterns", "places", "origin")}
        if collect is None:
            refuse(mistakes, f"badcjobs {command} --help")
        return kind(**{SETTINGS[table][key].name: value for key, value in values.items()}, **of_project)

    def words(self) -> list[str]:
        """Return the project as values of ``--config``."""
        words = [f"{key}={value_text(value)}" for key, value in self.keys.items()]
        if self.word is not None:
            words.insert(0, self.word)
        return words

    def run_words(self, flags: Mapping[str, Any], cwd: Path) -> list[str]:
        """Return it, and these options by key, as options of a ``badcjobs run`` that may start in any folder."""
        more = {key: value for key, value in self.keys.items() if key.startswith(_MORE_OF_RUN)}
        without_run = replace(self, keys=absolute_paths(more, "", cwd))
        options = {key[4:]: value for key, value in self.keys.items() if key.startswith("run.")}
        options |= known_values(flags)
        return [
            *(f"--config={word}" for word in without_run.words()),
            *option_words(absolute_paths(options, "run", cwd)),
        ]


def find_project_file(cwd: Path) -> Path | None:
    """Return the nearest badcjobs.toml, from a folder upwards; None: there is none."""
    folder = cwd.absolute()
    # Unlike Path.is_file, os.path.isfile does not raise where a folder above cannot be searched.
    for ancestor in (folder, *folder.parents):
        if os.path.isfile(ancestor / NAME):  # noqa: PTH113
            return ancestor / NAME
    return None


def _dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


_KEYS = [_dotted(table, key) for table in SETTINGS for key in SETTINGS[table]]
_TABLES = [table for table in SETTINGS if table]


def _find_key_problem(key: str) -> str | None:
    """Return why there is no such key, to continue its place; None: it exists."""
    name = key.rpartition(".")[2]
    if name in OPTIONS_ONLY:
        return f": this can only be an option, --{name}, because it is different in every call"
    if key in _TABLES:
        return f" is a table: --config {key}.KEY=VALUE"
    if key in _KEYS:
        return None
    keys_by_name = {known.rpartition(".")[2]: known for known in reversed(_KEYS)}
    similar = name if name in keys_by_name else nearest(name, [*keys_by_name, *_TABLES])
    if similar is None:
        return ": unknown key"
    return f": unknown key; did you mean {keys_by_name.get(similar, similar)}?"


@dataclass(frozen=True)
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
        values = self.document.get(table, {})
        return dict(values) if isinstance(values, dict) else {}

    def check(self, table: str, mistakes: list[str]) -> dict[str, Any]:
        """Return the checked values of a table; relative paths in the file start at the file."""
        in_file = self.in_file(table)
        by_word = {key: self.keys[_dotted(table, key)] for key in SETTINGS[table] if _dotted(table, key) in self.keys}
        values = check_values(table, in_file | by_word, partial(self.place, table), mistakes)
        if self.file is None:
            return values
        of_file = {key: value for key, value in values.items() if _dotted(table, key) not in self.keys}
        return values | absolute_paths(of_file, table, self.file.parent)

    def programs(self) -> Iterator[tuple[str, str]]:
        """Yield each key that names programs, with its value."""
        for table, keys in SETTINGS.items():
            for key, value in self.in_file(table).items():
                texts = value if isinstance(value, list) else [str(value)]
                if keys[key].runs and any(text.endswith(keys[key].runs) for text in texts):
                    yield _dotted(table, key), to_toml(value)

    def place(self, table: str, key: str) -> str:
        """Return the place of a value: its option, or file, line and key."""
        if _dotted(table, key) in self.keys:
            return f"--config {_dotted(table, key)}"
        place = str(self.file)
        line = _lines_of(self.text).get(_dotted(table, key))
        if line is not None:
            place += f", line {line}"
        if table:
            return f"{place}: [{table}] {key}"
        return f"{place}: {key}"

    def find_unknown(self) -> Iterator[str]:
        """Yield each unknown key with the nearest known one."""
        places = {key: f"--config {key}" for key in self.keys}
        for name, value in self.document.items():
            if name in _TABLES and isinstance(value, dict):
                places |= {f"{name}.{key}": self.place(name, key) for key in value}
            elif name in _TABLES:
                yield f"{self.place('', name)} must be a table: [{name}]"
            elif name not in _OF_RUN_TOML:
                places[name] = self.place("", name)
        for key, place in places.items():
            problem = _find_key_problem(key)
            if problem is not None:
                yield place + problem

    def places(self, recordings: Mapping[str, Any], mistakes: list[str]) -> ProjectPlaces:
        """Return the places in the table [recordings]: of all recordings, and by study area."""
        everywhere, problems = parse_place({key: recordings[key] for key in _OF_A_PLACE if key in recordings})
        for problem in problems:
            key, _, sentence = problem.partition(" ")
            mistakes.append(f"{self.place('recordings', key)} {sentence}")
        study_areas = {}
        problems = []
        for name, keys in recordings.get("study_areas", {}).items():
            study_areas[name], problems_here = parse_place(keys)
            problems_here += [f"{key}: unknown key" for key in keys if key not in _OF_A_PLACE]
            problems += [f"{name}: {problem}" for problem in problems_here]
        if study_areas and not any("{study_area}" in pattern for pattern in recordings.get("patterns", ())):
            problems.append("no pattern says which recordings are in them")
        mistakes += [f"{self.place('recordings', 'study_areas')}: {problem}" for problem in problems]
        return ProjectPlaces(everywhere, study_areas)


@lru_cache(1)
def _lines_of(text: str) -> Mapping[str, int]:
    """Return the number of the line that sets each key, or begins each table."""
    current = ""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if header:
            current = header[1]
            lines.setdefault(current, number)
        assignment = re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line)
        if assignment:
            lines.setdefault(_dotted(current, assignment[1]), number)
    return lines
