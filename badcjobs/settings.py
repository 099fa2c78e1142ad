"""The settings of a run: defaults, then the TOML file given by --config, then the flags.

``RunSettings`` is the one description of every setting; ``make_settings`` puts them together and names all mistakes at
once; ``FrozenRun`` is what the tasks of a run have to agree on, as run.toml holds it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
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
    parse_time_left,
)
from badcjobs.paths import is_there

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("hawkears", "hawkears1", "command", "demo")
LIVE_MODES = ("auto", "local", "shared")
AUTO = "auto"  # of --workers-per-gpu: as many as pay
_MOST_WORKERS = 64  # per device; each has a process, and models of its own
STAGE_MODES = ("auto", "always", "never")
_PATHS = ("hawkears_python", "hawkears_root", "simulate_script", "replay")
_TABLES = ("run", "alerts", "recordings", "array", "written_by")  # the last two: a run.toml may be given as it is
_KIND_NAMES = {list: "a list of texts", str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_OF_ONE_TASK = ("shard", "resume", "retry_failed", "time_left")  # what one task is to do, not how
_PATTERNS = "[recordings] patterns"
_LONGEST_COMMAND = 4000  # letters; a terminal takes about as many in one line


def _setting(key: str, default: Any, *, kind: type, least: float | None = None, frozen: bool = False) -> Any:
    """Describe one setting: its name in TOML and as a flag, its least value, and whether all tasks must agree on it."""
    return field(default=default, metadata={"key": key, "kind": kind, "least": least, "frozen": frozen})


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of ``badcjobs run``; the first word of each is its key in TOML and its flag."""

    out: Path
    source: tuple[str, ...] = _setting("source", (), kind=list, frozen=True)
    root: str | None = _setting("root", None, kind=str, frozen=True)
    engine: str = _setting("engine", "hawkears", kind=str, frozen=True)
    engine_args: tuple[str, ...] = _setting("engine_arg", (), kind=list, frozen=True)
    command: str | None = _setting("command", None, kind=str, frozen=True)
    interval_s: float = _setting("interval", 1.0, kind=float, least=0.01, frozen=True)
    retries: int = _setting("retries", 2, kind=int, least=0, frozen=True)
    cut: bool | None = _setting("cut", None, kind=bool, frozen=True)
    chunk_length_s: float | None = _setting("chunk_length", None, kind=float, frozen=True)
    overlap_s: float = _setting("overlap", 0.0, kind=float, frozen=True)
    hawkears_python: str | None = _setting("hawkears_python", None, kind=str)
    hawkears_root: str | None = _setting("hawkears_root", None, kind=str)
    simulate: int | None = _setting("simulate", None, kind=int, least=1)
    simulate_script: str | None = _setting("simulate_script", None, kind=str)
    replay: str | None = _setting("replay", None, kind=str)
    max_gpus: int | None = _setting("max_gpus", None, kind=int, least=1)
    workers_per_gpu: str = _setting("workers_per_gpu", "1", kind=str)
    cpu_workers: int = _setting("cpu_workers", 0, kind=int, least=0)
    backoff_s: float = _setting("backoff", 1.0, kind=float, least=0.0)
    publish_every_s: float = _setting("publish_every", 30.0, kind=float, least=0.1)
    heartbeat_every_s: float = _setting("heartbeat_every", 60.0, kind=float, least=0.1)
    grace_s: float = _setting("grace", 20.0, kind=float, least=0.0)
    shard: str | None = _setting("shard", None, kind=str)
    resume: bool = _setting("resume", True, kind=bool)
    retry_failed: bool = _setting("retry_failed", True, kind=bool)
    time_left: str | None = _setting("time_left", None, kind=str)
    live_mode: str = _setting("live_mode", "auto", kind=str)
    stage: str = _setting("stage", "auto", kind=str)
    engine_prefix: str | None = _setting("engine_prefix", None, kind=str)
    telemetry: bool = _setting("emit_gpu_telemetry", True, kind=bool)
    free: int | None = _setting("free", None, kind=int, least=1)
    min_memory_mib: int | None = _setting("min_memory_mib", None, kind=int, least=1)
    max_utilization_percent: float | None = _setting("max_utilization", None, kind=float, least=0.0)
    wait_s: float = _setting("wait", 0.0, kind=float, least=0.0)
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
        """Return the settings under their TOML names, to be kept with the results.

        Paths are absolute: the run may be resumed from another folder.
        """
        values = {key: getattr(self, f.name) for key, f in settings_by_key().items()}
        for key in (key for key in _PATHS if values[key]):
            if key != "hawkears_python" or "/" in values[key]:  # else a program that is looked for on PATH
                values[key] = os.path.abspath(cwd / values[key])  # noqa: PTH100 - links stay: a venv's Python is one
        alerts = {**asdict(self.alerts), **self.hooks.without_secrets()}
        recordings = {"patterns": [pattern.text for pattern in self.patterns]}
        return json.dumps({"out": str(self.out), **values, "alerts": alerts, "recordings": recordings})


def stand_in(cwd: Path, simulate: int | None, script: str | None, replay: str | None) -> StandIn:
    """Return what takes the place of the real devices, with paths made absolute."""
    return StandIn(simulate, script and str(cwd / script), replay and str(cwd / replay))


def settings_by_key() -> dict[str, Field[Any]]:
    """Return the description of every setting under its TOML name."""
    return {f.metadata["key"]: f for f in fields(RunSettings) if f.metadata}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist", fix="--config FILE.toml, with its right path") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read", why=str(error), fix=shlex.join(["less", str(path)])) from error


def make_settings(out: Path, flags: Mapping[str, Any], config: Path | None, command: str = "run") -> RunSettings:
    """Put defaults, file and flags together; all mistakes are named at once.

    ``flags`` holds what the command line gave, by TOML name; None means not given.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    alerts, hooks, patterns = AlertLimits(), AlertHooks(), tuple[NamePattern, ...]()
    if config is not None:
        document = read_toml(config)
        values.update(_checked(_run_table(document, config, mistakes), f"{config}: [run] ", mistakes))
        alerts, hooks = read_alerts(document.get("alerts", {}), config, mistakes)
        patterns = _name_patterns(document.get("recordings", {}), config, mistakes)
    values.update(_checked({k: v for k, v in flags.items() if v is not None}, "--", mistakes))
    values.setdefault("engine", "command" if values.get("command") else "hawkears")
    mistakes += _contradictions(values)
    if mistakes:
        raise BadInput(
            "these settings cannot be used" if len(mistakes) > 1 else mistakes[0],
            why="\n".join(mistakes) if len(mistakes) > 1 else None,
            fix=f"badcjobs {command} --help",
        )
    names = {key: f.name for key, f in settings_by_key().items()}
    given = {names[key]: value for key, value in values.items()}
    return RunSettings(out=out, alerts=alerts, hooks=hooks, patterns=patterns, **given)


def _run_table(document: Mapping[str, Any], config: Path, mistakes: list[str]) -> dict[str, Any]:
    for name in document:
        if name not in _TABLES:
            mistakes.append(f"{config}: unknown key {name!r}; settings of a run are in the tables [run] and [alerts]")
    table = document.get("run", {})
    if not isinstance(table, dict):
        mistakes.append(f"{config}: run must be a table: [run]")
        return {}
    return table


def read_alerts(table: object, config: Path, mistakes: list[str]) -> tuple[AlertLimits, AlertHooks]:
    """Return the limits and the command of a table [alerts]; add what is wrong to ``mistakes``."""
    if not isinstance(table, dict):
        mistakes.append(f"{config}: alerts must be a table: [alerts]")
        return AlertLimits(), AlertHooks()
    of_limits, of_hooks = ([f.name for f in fields(kind)] for kind in (AlertLimits, AlertHooks))
    known = ", ".join(of_limits + of_hooks)
    wrong = [f"{key}: unknown key; known are {known}" for key in table if key not in of_limits + of_hooks]
    limits = AlertLimits(**{key: value for key, value in table.items() if key in of_limits})
    hooks = AlertHooks(**{key: value for key, value in table.items() if key in of_hooks})
    mistakes += [f"{config}: [alerts] {problem}" for problem in (*wrong, *limits.problems(), *hooks.problems())]
    whole = {key: float(value) for key, value in asdict(limits).items() if type(value) is int}
    return replace(limits, **whole), hooks


def read_name_patterns(config: Path) -> tuple[NamePattern, ...]:
    """Read what the paths of recordings mean from the table [recordings] of a TOML file, with all its mistakes."""
    mistakes: list[str] = []
    patterns = _name_patterns(read_toml(config).get("recordings", {}), config, mistakes)
    if not patterns and not mistakes:
        mistakes.append(f"{config}: [recordings] has no patterns")
    if mistakes:
        raise BadInput(f"{config} cannot be used", why="\n".join(mistakes), fix="badcjobs guide recordings")
    return patterns


def _name_patterns(table: object, config: Path, mistakes: list[str]) -> tuple[NamePattern, ...]:
    if not isinstance(table, dict):
        mistakes.append(f"{config}: recordings must be a table: [recordings]")
        return ()
    mistakes += [f"{config}: [recordings] {key}: unknown key; known is patterns" for key in table if key != "patterns"]
    try:
        texts = _pattern_texts(table)
    except ValueError as error:
        mistakes.append(f"{config}: {error}")
        return ()
    patterns, wrong = parse_patterns(texts)
    mistakes += [f"{config}: [recordings] patterns: {words}" for words in wrong]
    return patterns


def _checked(given: Mapping[str, Any], where: str, mistakes: list[str]) -> dict[str, Any]:
    """Return the values with their right types; add what is wrong to ``mistakes``."""
    known = settings_by_key()
    values = {}
    for key, value in given.items():
        label = where + (key.replace("_", "-") if where == "--" else key)
        if key not in known:
            mistakes.append(f"{label}: unknown key; known are {', '.join(sorted(known))}")
            continue
        kind, least = known[key].metadata["kind"], known[key].metadata["least"]
        if kind is float and type(value) is int:
            value = float(value)
        if (key == "time_left" and type(value) in (int, float)) or (key == "workers_per_gpu" and type(value) is int):
            value = str(value)  # a number, as a TOML file may well say it
        if kind is list and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if complaint := _complaint(key, kind, least, value):
            mistakes.append(f"{label} = {value!r} {complaint}")
        else:
            values[key] = value
    return values


def _complaint(key: str, kind: type, least: float | None, value: Any) -> str | None:
    """Return what is wrong with a value; None: nothing."""
    is_a = type(value)
    if key == "workers_per_gpu" and not _is_worker_count(value):
        return f"must be a whole number from 1 to {_MOST_WORKERS}, or auto"
    if key == "time_left" and (is_a is not str or not _is_time(value)):
        return "must be seconds, M:S or H:M:S, such as 5400 or 1:30:00; in TOML in quotes"
    if is_a is not (tuple if kind is list else kind):
        return f"must be {_KIND_NAMES[kind]}"
    if kind is float and not math.isfinite(value):
        return "must be a finite number"
    if least is not None and value < least:
        return f"must be at least {least}"
    if kind in (str, list) and not _is_utf8(value):
        return "is not UTF-8"  # neither TOML nor SQLite could hold it
    return None


def _is_worker_count(value: Any) -> bool:
    if value == AUTO:
        return True
    return isinstance(value, str) and value.isascii() and value.isdecimal() and 1 <= int(value) <= _MOST_WORKERS


def _is_time(text: str) -> bool:
    try:
        parse_time_left(text)
    except ValueError:
        return False
    return True


def _is_utf8(value: str | tuple[str, ...]) -> bool:
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    mistakes = []
    if values["engine"] not in ENGINES:
        mistakes.append(f"--engine {values['engine']} is not known; engines are {', '.join(ENGINES)}")
    if values["engine"] == "command" and not values.get("command"):
        mistakes.append("--engine command needs --command 'program {input} {output}'")
    if values["engine"] in ENGINES and values["engine"] != "command" and values.get("command"):
        mistakes.append(f"--command goes with --engine command, not with {values['engine']}")
    if values.get("live_mode", "auto") not in LIVE_MODES:
        mistakes.append(f"--live-mode {values['live_mode']} is not known; modes are {', '.join(LIVE_MODES)}")
    if values.get("stage", "auto") not in STAGE_MODES:
        mistakes.append(f"--stage {values['stage']} is not known; it is one of {', '.join(STAGE_MODES)}")
    loose = [key for key in ("min_memory_mib", "max_utilization", "wait") if key in values and "free" not in values]
    if loose:
        mistakes.append(f"{', '.join('--' + key.replace('_', '-') for key in loose)} goes with --free")
    mistakes += Cutting(None, values.get("chunk_length"), values.get("overlap", 0.0)).problems()
    if values.get("retry_failed") is False and values.get("resume") is False:
        mistakes.append("--no-retry-failed goes with --resume; with --no-resume earlier tasks are not looked at")
    if not values.get("source"):
        mistakes.append("no SOURCE was given: a manifest CSV, a folder of audio, or a list")
    return mistakes


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
        values = {k: getattr(settings, f.name) for k, f in settings_by_key().items() if f.metadata["frozen"]}
        values["source"] = tuple(_absolute(cwd, path) for path in values["source"])
        if values["root"] is not None:
            values["root"] = _absolute(cwd, values["root"])
        if values["chunk_length"] is None:
            del values["overlap"]  # of nothing
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
            patterns = _pattern_texts(document.get("recordings", {}))
            return cls(settings, None if array is None else _parse_array(array), patterns)
        except (AttributeError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is not as the first task of the run wrote it",
                why=str(error),
                fix="put it back, or use another --out for a new run",
            ) from error

    @property
    def cutting(self) -> Cutting:
        """How this run's recordings become chunks; raise BadInput where run.toml was changed."""
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
    for key, setting in settings_by_key().items():
        value, flag = settings.get(key), key.replace("_", "-")
        if key == "source" or value is None or value == setting.default:
            continue
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
            continue
        for one in value if isinstance(value, list | tuple) else (value,):
            yield f"--{flag}={shlex.quote(str(one))}"


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
            file.write(text)  # a few lines: one write, so that no other task reads half of them
    except FileExistsError:
        pass


def _parse_array(table: dict[str, int]) -> ArrayShape:
    shape = ArrayShape(**table)
    if not (type(shape.first) is type(shape.step) is type(shape.count) is int and shape.step > 0):
        raise ValueError("[array] must hold whole numbers")
    return shape


def _pattern_texts(table: Mapping[str, Any]) -> tuple[str, ...]:
    texts = table.get("patterns", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"[recordings] patterns = {texts!r} must be a list of texts")
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
