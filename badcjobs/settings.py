"""The settings of a run: defaults, then the file of --config, then its single keys, then the options.

``RunSettings`` is the one table of every setting, with the text of its option; a setting without one is a key of the
table [run] only. ``make_settings`` puts them together and names all mistakes at once; ``FrozenRun`` is what the tasks
of a run have to agree on, as run.toml holds it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import (
    AlertHooks,
    AlertLimits,
    ArrayShape,
    Cutting,
    NamePattern,
    StandIn,
    parse_patterns,
    parse_stop_after,
)
from badcjobs.paths import is_there

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("hawkears", "hawkears1", "command", "demo")
AUTO = "auto"  # of --workers-per-gpu: as many as pay
_MOST_WORKERS = 64  # per device; each has a process, and models of its own
_PATHS = ("root", "hawkears_python", "hawkears_root", "simulate_script", "replay")
_KIND_NAMES = {list: "a list of texts", str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_OF_ONE_TASK = ("shard", "resume", "retry_failed", "stop_after")  # what one task is to do, not how
_NOT_SET = {"cut": AUTO, "stop_after": ""}  # how a file says that a setting has its default
_PATTERNS = "[recordings] patterns"
_KEY_VALUE = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_LONGEST_COMMAND = 4000  # letters; a terminal takes about as many in one line


def _setting(key: str, default: Any, kind: type, option: str | None = None, **more: Any) -> Any:
    """Describe one setting: its name in TOML, its type, and the help of its option; None: it is a key only.

    ``more``: its ``least`` value, ``among`` what it must be; ``frozen``: all tasks of a run agree on it.
    """
    usual = {"least": None, "among": (), "frozen": False}
    return field(default=default, metadata={"key": key, "kind": kind, "option": option, **usual, **more})


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of ``badcjobs run``; the first word of each is its key in TOML and its option."""

    out: Path
    source: tuple[str, ...] = _setting("source", (), list, frozen=True)
    root: str | None = _setting("root", None, str, "Folder that relative source_paths start from.", frozen=True)
    engine: str = _setting(
        "engine", "hawkears", str, "hawkears (default), hawkears1, command or demo.", frozen=True, among=ENGINES
    )
    engine_args: tuple[str, ...] = _setting(
        "engine_arg", (), list, "Argument for the engine; repeatable: --engine-arg=--threads=3.", frozen=True
    )
    command: str | None = _setting(
        "command", None, str, "Your own program: 'prog {input} {output}', or {inputs} {outputs}.", frozen=True
    )
    interval_s: float = _setting("interval", 1.0, float, "Seconds between samples; default 1.", frozen=True, least=0.01)
    retries: int = _setting("retries", 2, int, "Retries of a failed chunk; default 2.", frozen=True, least=0)
    cut: bool | None = _setting("cut", None, bool, frozen=True)
    chunk_length_s: float | None = _setting(
        "chunk_length", None, float, "Cut recordings into chunks of so many seconds.", frozen=True
    )
    overlap_s: float = _setting("overlap", 0.0, float, "Seconds that neighbouring chunks share.", frozen=True)
    hawkears_python: str | None = _setting("hawkears_python", None, str, "Python that has HawkEars; default: on PATH.")
    hawkears_root: str | None = _setting("hawkears_root", None, str, "Folder with HawkEars' data/ and yaml/.")
    simulate: int | None = _setting("simulate", None, int, "Pretend that this machine has N GPUs.", least=1)
    simulate_script: str | None = _setting("simulate_script", None, str, "TOML file: their load and faults.")
    replay: str | None = _setting("replay", None, str, "Pretend that the devices are those of a task database.")
    free: int | None = _setting("free", None, int, "Without Slurm: take the N devices that are most free.", least=1)
    max_gpus: int | None = _setting("max_gpus", None, int, "Use at most N of the granted devices.", least=1)
    workers_per_gpu: str = _setting(
        "workers_per_gpu", "1", str, "Engine processes per device: N, or auto (as many as pay); default 1."
    )
    cpu_workers: int = _setting("cpu_workers", 0, int, "Without any GPU: N workers on the CPU.", least=0)
    shard: str | None = _setting("shard", None, str, "I/N: do part I (from 0) of N; overrides the array.")
    resume: bool = _setting("resume", True, bool, "Skip chunks that are done in --out already; default: skip.")
    engine_prefix: str | None = _setting(
        "engine_prefix", None, str, "Run the engine under a program: 'nsys profile -o OUT/{worker}', numactl, …."
    )
    telemetry: bool = _setting("emit_gpu_telemetry", True, bool, "Record the devices; default: record.")
    # Keys of the table [run] only, as cut above: they are set once.
    retry_failed: bool = _setting("retry_failed", True, bool)
    stop_after: str | None = _setting("stop_after", None, str)
    stage: str = _setting("stage", AUTO, str, among=(AUTO, "always", "never"))
    live_mode: str = _setting("live_mode", AUTO, str, among=(AUTO, "local", "shared"))
    backoff_s: float = _setting("backoff_s", 1.0, float, least=0.0)
    grace_s: float = _setting("grace_s", 20.0, float, least=0.0)
    publish_every_s: float = _setting("publish_every_s", 30.0, float, least=0.1)
    heartbeat_every_s: float = _setting("heartbeat_every_s", 60.0, float, least=0.1)
    min_memory_mib: int | None = _setting("min_memory_mib", None, int, least=0)
    max_utilization_percent: float | None = _setting("max_utilization", None, float, least=0.0)
    wait_s: float = _setting("wait_s", 0.0, float, least=0.0)
    alerts: AlertLimits = field(default_factory=AlertLimits)  # the table [alerts]
    hooks: AlertHooks = field(default_factory=AlertHooks)  # more keys of the same table
    patterns: tuple[NamePattern, ...] = ()  # of the table [recordings]: what paths mean

    @property
    def workers_wanted(self) -> int | None:
        """How many workers each device gets; None: as many as pay."""
        return None if self.workers_per_gpu == AUTO else int(self.workers_per_gpu)

    @property
    def cutting(self) -> Cutting:
        """How recordings become chunks."""
        return Cutting(self.cut, self.chunk_length_s, self.overlap_s)

    def stand_in(self, cwd: Path) -> StandIn:
        """Return what takes the place of the real devices, with paths made absolute."""
        return stand_in(cwd, self.simulate, self.simulate_script, self.replay)

    def to_json(self, cwd: Path) -> str:
        """Return the settings under their TOML names, to be kept with the results; right from any folder."""
        values = _with_absolute_paths({key: getattr(self, f.name) for key, f in settings_by_key().items()}, cwd)
        alerts = {**asdict(self.alerts), **self.hooks.without_secrets()}
        recordings = {"patterns": [pattern.text for pattern in self.patterns]}
        return json.dumps({"out": str(self.out), **values, "alerts": alerts, "recordings": recordings})


def stand_in(cwd: Path, simulate: int | None, simulate_script: str | None, replay: str | None) -> StandIn:
    """Return what takes the place of the real devices, with paths made absolute."""
    if simulate is not None and simulate < 1:
        raise BadInput(f"--simulate = {simulate} must be at least 1", fix="--simulate 2")
    return StandIn(simulate, simulate_script and str(cwd / simulate_script), replay and str(cwd / replay))


def settings_by_key() -> dict[str, Field[Any]]:
    """Return the description of every setting under its TOML name."""
    return {f.metadata["key"]: f for f in fields(RunSettings) if f.metadata}


def _with_absolute_paths(values: Mapping[str, Any], cwd: Path) -> dict[str, Any]:
    """Return the values of settings, by TOML name, as they are right from any folder; links stay links."""
    absolute = dict(values)
    for key in (key for key in _PATHS if values.get(key)):
        if key != "hawkears_python" or "/" in values[key]:  # else a program that is looked for on PATH
            absolute[key] = _absolute(cwd, values[key])
    return absolute


# --- what --config gives ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Config:
    """What ``--config`` gives: at most one TOML file, and single keys, which win over it."""

    file: Path | None = None
    document: Mapping[str, Any] = field(default_factory=dict)  # what the file says
    keys: Mapping[str, Any] = field(default_factory=dict)  # "run.grace_s" → 60

    @classmethod
    def read(cls, words: Sequence[str] | None, cwd: Path = Path()) -> Config:
        """Read the values of ``--config``, each ``FILE`` or ``KEY=VALUE``."""
        found = [(word, _KEY_VALUE.fullmatch(word)) for word in words or ()]
        files = [word for word, pair in found if pair is None]
        if len(files) > 1:
            raise BadInput(
                f"--config names {len(files)} files: {', '.join(files)}",
                why="settings come from one file; single keys may be added to it",
                fix=f"--config {shlex.quote(files[0])} --config run.grace_s=60",
            )
        keys = {pair[1]: _parse_value(pair[2]) for _, pair in found if pair is not None}
        file = Path(files[0]) if files else None
        return cls(file, {} if file is None else read_toml(cwd / file), keys)

    def table(self, name: str) -> dict[str, Any]:
        """Return a table as it is with the single keys; not checked."""
        return self._in_file(name) | self._alone(name)

    def _in_file(self, name: str) -> dict[str, Any]:
        table = self.document.get(name, {})
        return dict(table) if isinstance(table, dict) else {}

    def _alone(self, name: str) -> dict[str, Any]:
        return {key.removeprefix(f"{name}."): value for key, value in self.keys.items() if key.startswith(f"{name}.")}

    def read_tables(
        self, mistakes: list[str]
    ) -> tuple[dict[str, Any], AlertLimits, AlertHooks, tuple[NamePattern, ...]]:
        """Return what the tables [run], [alerts] and [recordings] say; add what is wrong to ``mistakes``."""
        mistakes += self._unknown()
        values = _checked(self._in_file("run"), lambda key: f"{self.file}: [run] {key}", mistakes)
        values |= _checked(self._alone("run"), lambda key: f"--config run.{key}", mistakes)
        limits, hooks = self._alerts(mistakes)
        patterns, texts = tuple[NamePattern, ...](), self.table("recordings").get("patterns", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            mistakes.append(self._placed("recordings", f"patterns = {texts!r} must be a list of texts"))
        else:
            patterns, wrong = parse_patterns(texts)
            mistakes += [self._placed("recordings", f"patterns: {words}") for words in wrong]
        return values, limits, hooks, patterns

    def _unknown(self) -> Iterator[str]:
        """Yield each key that there is not, with the nearest one that there is."""
        for name, table in self.document.items():
            if name not in (*_KEYS, "array", "written_by"):  # the last two: a run.toml may be given as it is
                yield f"{self.file}: unknown key {name!r}; settings are in the tables [{'], ['.join(_KEYS)}]"
            elif name in _KEYS and not isinstance(table, dict):
                yield f"{self.file}: {name} must be a table: [{name}]"
        known = [f"{table}.{key}" for table, keys in _KEYS.items() for key in keys]
        places = {key: f"--config {key}" for key in self.keys}
        places |= {f"{name}.{key}": f"{self.file}: [{name}] {key}" for name in _KEYS for key in self._in_file(name)}
        for key, place in places.items():
            if key not in known:
                near = nearest(key, known)
                yield f"{place}: unknown key; " + (f"did you mean {near}?" if near else f"known are {', '.join(known)}")

    def _alerts(self, mistakes: list[str]) -> tuple[AlertLimits, AlertHooks]:
        table, names = self.table("alerts"), {f.name for f in fields(AlertLimits)}
        limits = AlertLimits(**{key: value for key, value in table.items() if key in names})
        hooks = AlertHooks(**{key: table[key] for key in _KEYS["alerts"] if key in table and key not in names})
        mistakes += [self._placed("alerts", problem) for problem in (*limits.problems(), *hooks.problems())]
        whole = {key: float(value) for key, value in asdict(limits).items() if type(value) is int}
        return replace(limits, **whole), hooks

    def _placed(self, table: str, problem: str) -> str:
        """Return a problem, which begins with its key, with the place where that is said."""
        key = re.split("[ :]", problem)[0]
        return f"--config {table}.{problem}" if f"{table}.{key}" in self.keys else f"{self.file}: [{table}] {problem}"

    def words(self) -> list[str]:
        """Return it as values of ``--config``."""
        keys = [f"{key}={_value_text(value)}" for key, value in self.keys.items()]
        return [*([] if self.file is None else [str(self.file)]), *keys]

    def run_words(self, flags: Mapping[str, Any], cwd: Path) -> list[str]:
        """Return it, and these flags by TOML name, as options of a ``badcjobs run`` that may start in any folder."""
        file = None if self.file is None else cwd / self.file
        others = replace(self, file=file, keys={k: one for k, one in self.keys.items() if not k.startswith("run.")})
        given = self._alone("run") | {key: value for key, value in flags.items() if value is not None}
        return [*(f"--config={word}" for word in others.words()), *option_words(_with_absolute_paths(given, cwd))]


_KEYS = {
    "run": tuple(f.metadata["key"] for f in fields(RunSettings) if f.metadata),
    "alerts": tuple(f.name for kind in (AlertLimits, AlertHooks) for f in fields(kind)),
    "recordings": ("patterns",),
}


def is_config_file(word: str) -> bool:
    """Say whether a value of ``--config`` is a file, and not one key."""
    return _KEY_VALUE.fullmatch(word) is None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _parse_value(text: str) -> Any:
    """Read a value of TOML; what is none, such as a bare word or a time, is a text."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    return value if len(document) == 1 and isinstance(value, str | int | float | list) else text


def _value_text(value: Any) -> str:
    """Return a value so that ``_parse_value`` reads it; a text without quotation marks where it may be."""
    return value if isinstance(value, str) and _parse_value(value) == value else _toml(value)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist", fix="--config FILE.toml, with its right path") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read", why=str(error), fix=shlex.join(["less", str(path)])) from error


# --- all of them together ---------------------------------------------------------------------------------------------


def make_settings(
    out: Path, flags: Mapping[str, Any], config: Config | None = None, command: str = "run"
) -> RunSettings:
    """Put defaults, ``--config`` and options together; all mistakes are named at once.

    ``flags`` holds what the command line gave, by TOML name; None means not given.
    """
    mistakes: list[str] = []
    values, alerts, hooks, patterns = (config or Config()).read_tables(mistakes)
    given = {key: value for key, value in flags.items() if value is not None}
    values |= _checked(given, lambda key: f"--{key.replace('_', '-')}", mistakes)
    mistakes += _contradictions(values)
    refuse(mistakes, f"badcjobs {command} --help")
    values.setdefault("engine", "command" if values.get("command") else "hawkears")
    names = {key: f.name for key, f in settings_by_key().items()}
    return RunSettings(
        out=out, alerts=alerts, hooks=hooks, patterns=patterns, **{names[key]: value for key, value in values.items()}
    )


def refuse(mistakes: Sequence[str], fix: str, what: str = "these settings cannot be used") -> None:
    """Raise BadInput with all mistakes, if there are any; ``what`` is said of several."""
    if len(mistakes) > 1:
        raise BadInput(what, why="\n".join(mistakes), fix=fix)
    if mistakes:
        raise BadInput(mistakes[0], fix=fix)


def _checked(given: Mapping[str, Any], place_of: Callable[[str], str], mistakes: list[str]) -> dict[str, Any]:
    """Return the values of known settings with their right types; add what is wrong to ``mistakes``."""
    known = settings_by_key()
    values: dict[str, Any] = {}
    for key in (key for key in given if key in known):
        value, described = given[key], known[key].metadata
        if described["kind"] is float and type(value) is int:
            value = float(value)
        if key in ("stop_after", "workers_per_gpu") and type(value) in (int, float):
            value = str(value)  # as a TOML file may well say it
        if described["kind"] is list and isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            value = tuple(value)
        if value == _NOT_SET.get(key, ...):
            values[key] = None
        elif complaint := _complaint(key, described, value):
            mistakes.append(f"{place_of(key)} = {value!r} {complaint}")
        else:
            values[key] = value
    return values


def _complaint(key: str, described: Mapping[str, Any], value: Any) -> str | None:
    """Return what is wrong with a value; None: nothing."""
    kind: Any = described["kind"]
    least, among = described["least"], described["among"]
    if key == "workers_per_gpu":
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else 0
        right = value == AUTO or 1 <= number <= _MOST_WORKERS
        return None if right else f"must be a whole number from 1 to {_MOST_WORKERS}, or auto"
    if type(value).__name__ != ("tuple" if kind is list else kind.__name__):
        return f"must be {_KIND_NAMES[kind]}"
    if key == "stop_after" and parse_stop_after(value) is None:
        return "must be minutes, M:S, H:M:S or D-H:M:S, such as 90 or 1:30:00"
    if among and value not in among:
        return f"must be one of {', '.join(among)}"
    if kind is float and not math.isfinite(value):
        return "must be a finite number"
    if least is not None and value < least:
        return f"must be at least {least}"
    if kind in (str, list) and any("\ud800" <= letter <= "\udfff" for letter in "".join(value)):
        return "is not UTF-8"  # neither TOML nor SQLite could hold it
    return None


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    engine, command = values.get("engine"), values.get("command")
    if engine == "command" and not command:
        yield "--engine command needs --command 'program {input} {output}'"
    if engine not in (None, "command") and command:
        yield f"--command goes with --engine command, not with {engine}"
    yield from Cutting(None, values.get("chunk_length"), values.get("overlap", 0.0)).problems()
    if values.get("retry_failed") is False and values.get("resume") is False:
        yield "retry_failed = false goes with --resume; with --no-resume earlier tasks are not looked at"
    if not values.get("source"):
        yield "no SOURCE was given: a manifest CSV, a folder of audio, or a list"


def option_words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of ``badcjobs run`` that give these values, by TOML name; sources are no option."""
    for key, setting in settings_by_key().items():
        value, name = values.get(key), key.replace("_", "-")
        if key == "source" or value is None:
            continue
        if setting.metadata["option"] is None:
            yield f"--config=run.{key}={_value_text(value)}"
        elif isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}={one}" for one in (value if isinstance(value, list | tuple) else (value,)))


def replaced_option(option: str, words: Sequence[str]) -> tuple[str, str] | None:
    """Return an option that is a key now as these words give it, and what to write instead; None: it never was one."""
    name = {"--time-left": "stop_after"}.get(option, option.removeprefix("--").removeprefix("no-").replace("-", "_"))
    known = {key: f for key, f in settings_by_key().items() if f.metadata["option"] is None and key != "source"}
    key = next((key for key in (name, f"{name}_s") if key in known), None)
    given = next(((a, b) for a, b in pairwise([*words, ""]) if a.partition("=")[0] == option), None)
    if key is None or given is None:
        return None
    if known[key].metadata["kind"] is bool:
        return option, f"--config run.{key}={'false' if option.startswith('--no-') else 'true'}"
    equals, value = given[0].partition("=")[1:]
    said = given[0] if equals else " ".join(filter(None, given))
    return said, f"--config run.{key}={value if equals else given[1]}"


# --- what all tasks of a run share ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrozenRun:
    """What run.toml holds."""

    settings: dict[str, Any]
    array: ArrayShape | None
    patterns: tuple[str, ...] = ()  # what paths of recordings mean

    @classmethod
    def of(cls, settings: RunSettings, array: ArrayShape | None, cwd: Path) -> FrozenRun:
        """Return what this task would freeze; paths are absolute, so that tasks may start anywhere."""
        frozen = {k: getattr(settings, f.name) for k, f in settings_by_key().items() if f.metadata["frozen"]}
        values = _with_absolute_paths(frozen, cwd)
        values["source"] = tuple(_absolute(cwd, path) for path in values["source"])
        if values["chunk_length"] is None:
            del values["overlap"]  # of nothing
        patterns = tuple(pattern.text for pattern in settings.patterns)
        return cls({key: value for key, value in values.items() if value is not None}, array, patterns)

    @classmethod
    def read(cls, path: Path) -> FrozenRun | None:
        """Read run.toml; None when no task has written it yet."""
        if not is_there(path):
            return None
        document, mistakes = read_toml(path), list[str]()
        values, _, _, patterns = Config(path, document).read_tables(mistakes)
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
        return cls(values, array, tuple(pattern.text for pattern in patterns))

    @property
    def cutting(self) -> Cutting:
        """How this run's recordings become chunks."""
        of_run = self.settings
        return Cutting(of_run.get("cut"), of_run.get("chunk_length"), of_run.get("overlap", 0.0))

    def to_toml(self, version: str) -> str:
        """Return the file's text."""
        lines = ["# The settings that every task of this run shares, frozen by its first task.", ""]
        lines += [f"written_by = {_toml(f'badcjobs {version}')}", "", "[run]"]
        lines += [f"{key} = {_toml(value)}" for key, value in self.settings.items()]
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

        def line(*words: str, values: Mapping[str, Any]) -> str:
            given = {key: values.get(key) for key, f in settings_by_key().items() if values.get(key) != f.default}
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
    except OSError:  # a filesystem without hard links
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(mine.to_toml(version))  # a few lines: one write, so that no other task reads half of them
    finally:
        temporary.unlink()
    frozen = FrozenRun.read(path)
    assert frozen is not None
    return frozen


def _absolute(cwd: Path, path: str) -> str:
    return os.path.abspath(cwd / path)  # noqa: PTH100 - resolve() would turn a git-annex link into its key


def _toml(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's texts, numbers, true and false are TOML's too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one letter that only TOML refuses
