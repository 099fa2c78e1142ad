"""The settings of a run: defaults, then the TOML file given by --config, then the flags."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from badcjobs.allocation.end_time import parse_time_left
from badcjobs.errors import BadInput
from badcjobs.manifest.cutting import Cutting
from badcjobs.manifest.name_patterns import NamePattern, parse_patterns
from badcjobs.model import AlertLimits, StandIn
from badcjobs.report.factors import Factors
from badcjobs.telemetry.alert_hooks import AlertHooks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("hawkears", "hawkears1", "command", "demo")
LIVE_MODES = ("auto", "local", "shared")
AUTO = "auto"  # of --workers-per-gpu: as many as pay
_MOST_WORKERS = 64  # per device; each has a process, and models of its own
_LARGEST_FACTOR = 1e9  # beyond this it is a slip, and sums may not be finite any more
_LONGEST_CURRENCY = 12
STAGE_MODES = ("auto", "always", "never")
PROFILERS = ("nsys", "ncu")
_PATHS = ("hawkears_python", "hawkears_root", "simulate_script", "replay")
# The last two, so that a run.toml may be given as it is.
_TABLES = ("run", "alerts", "recordings", "report", "array", "written_by")


def _setting(key: str, default: Any, *, kind: type, frozen: bool = False) -> Any:
    """Describe one setting: its name in TOML and as a flag, and whether all tasks of a run must agree on it."""
    return field(default=default, metadata={"key": key, "kind": kind, "frozen": frozen})


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Everything ``badcjobs run`` can be told."""

    out: Path
    source: tuple[str, ...] = _setting("source", (), kind=list, frozen=True)
    root: str | None = _setting("root", None, kind=str, frozen=True)
    engine: str = _setting("engine", "hawkears", kind=str, frozen=True)
    engine_args: tuple[str, ...] = _setting("engine_arg", (), kind=list, frozen=True)
    command: str | None = _setting("command", None, kind=str, frozen=True)
    interval_s: float = _setting("interval", 1.0, kind=float, frozen=True)
    retries: int = _setting("retries", 2, kind=int, frozen=True)
    cut: bool | None = _setting("cut", None, kind=bool, frozen=True)
    chunk_length_s: float | None = _setting("chunk_length", None, kind=float, frozen=True)
    overlap_s: float = _setting("overlap", 0.0, kind=float, frozen=True)
    hawkears_python: str | None = _setting("hawkears_python", None, kind=str)
    hawkears_root: str | None = _setting("hawkears_root", None, kind=str)
    simulate: int | None = _setting("simulate", None, kind=int)
    simulate_script: str | None = _setting("simulate_script", None, kind=str)
    replay: str | None = _setting("replay", None, kind=str)
    max_gpus: int | None = _setting("max_gpus", None, kind=int)
    workers_per_gpu: str = _setting("workers_per_gpu", "1", kind=str)
    cpu_workers: int = _setting("cpu_workers", 0, kind=int)
    backoff_s: float = _setting("backoff", 1.0, kind=float)
    publish_every_s: float = _setting("publish_every", 30.0, kind=float)
    heartbeat_every_s: float = _setting("heartbeat_every", 60.0, kind=float)
    grace_s: float = _setting("grace", 20.0, kind=float)
    shard: str | None = _setting("shard", None, kind=str)
    resume: bool = _setting("resume", True, kind=bool)
    retry_failed: bool = _setting("retry_failed", True, kind=bool)
    time_left: str | None = _setting("time_left", None, kind=str)
    live_mode: str = _setting("live_mode", "auto", kind=str)
    stage: str = _setting("stage", "auto", kind=str)
    profile: str | None = _setting("profile", None, kind=str)
    profile_chunks: int = _setting("profile_chunks", 20, kind=int)
    telemetry: bool = _setting("emit_gpu_telemetry", True, kind=bool)
    free: int | None = _setting("free", None, kind=int)
    min_memory_mib: int | None = _setting("min_memory_mib", None, kind=int)
    max_utilization_percent: float | None = _setting("max_utilization", None, kind=float)
    wait_s: float = _setting("wait", 0.0, kind=float)
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

        Paths are absolute: whoever goes on with the run may be in another folder.
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


_SMALLEST = {
    "interval": 0.01, "retries": 0, "simulate": 1, "max_gpus": 1, "cpu_workers": 0,
    "backoff": 0.0, "publish_every": 0.1, "heartbeat_every": 0.1, "grace": 0.0,
    "profile_chunks": 1, "free": 1, "min_memory_mib": 1, "max_utilization": 0.0, "wait": 0.0,
}  # fmt: skip


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
    """Return what a table [alerts] says: where alerts begin, and who is called; add what is wrong to ``mistakes``."""
    if not isinstance(table, dict):
        mistakes.append(f"{config}: alerts must be a table: [alerts]")
        return AlertLimits(), AlertHooks()
    of_hooks = [f.name for f in fields(AlertHooks)]
    hooks = AlertHooks(**{key: value for key, value in table.items() if key in of_hooks})
    limits = _alert_limits({key: value for key, value in table.items() if key not in of_hooks}, config, mistakes)
    mistakes += [f"{config}: [alerts] {problem}" for problem in hooks.problems()]
    return limits, hooks


def _alert_limits(table: Mapping[str, Any], config: Path, mistakes: list[str]) -> AlertLimits:
    known = [f.name for f in fields(AlertLimits)]
    limits = {}
    for key, value in table.items():
        if key not in known:
            all_known = ", ".join(known + [f.name for f in fields(AlertHooks)])
            mistakes.append(f"{config}: [alerts] {key}: unknown key; known are {all_known}")
        elif type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            mistakes.append(f"{config}: [alerts] {key} = {value!r} must be a number above 0")
        else:
            limits[key] = float(value)
    found = AlertLimits(**limits)
    mistakes += [f"{config}: [alerts] {problem}" for problem in found.problems()]
    return found


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
    texts = table.get("patterns", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        mistakes.append(f"{config}: [recordings] patterns = {texts!r} must be a list of texts")
        return ()
    patterns, wrong = parse_patterns(texts)
    mistakes += [f"{config}: [recordings] patterns: {words}" for words in wrong]
    return patterns


def read_factors(config: Path) -> Factors:
    """Read what energy and device time cost from the table [report] of a TOML file; all mistakes are named at once."""
    document = read_toml(config)
    table = document.get("report", {})
    mistakes = [f"unknown key {name!r}; factors are in the table [report]" for name in document if name not in _TABLES]
    factors: dict[str, Any] = {}
    if not isinstance(table, dict):
        mistakes.append("report must be a table: [report]")
        table = {}
    for key, value in table.items():
        complaint = _factor_complaint(key, value)
        if complaint is None:
            factors[key] = value if key == "currency" else float(value)
        else:
            mistakes.append(f"[report] {key} = {value!r}: {complaint}")
    if mistakes:
        raise BadInput(f"{config} cannot be used", why="\n".join(mistakes), fix="badcjobs guide report")
    return Factors(**factors)


def _factor_complaint(key: str, value: Any) -> str | None:
    known = [f.name for f in fields(Factors)]
    if key not in known:
        return f"unknown key; known are {', '.join(known)}"
    if key == "currency":
        good = isinstance(value, str) and 0 < len(value) <= _LONGEST_CURRENCY and value.isprintable()
        return None if good else f"must be a text of at most {_LONGEST_CURRENCY} letters"
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST_FACTOR:
        return f"must be a number from 0 to {_LARGEST_FACTOR:,.0f}"
    return None


def _checked(given: Mapping[str, Any], where: str, mistakes: list[str]) -> dict[str, Any]:
    """Return the values with their right types; add what is wrong to ``mistakes``."""
    known = settings_by_key()
    values = {}
    for key, value in given.items():
        label = where + (key.replace("_", "-") if where == "--" else key)
        if key not in known:
            mistakes.append(f"{label}: unknown key; known are {', '.join(sorted(known))}")
            continue
        kind = known[key].metadata["kind"]
        if kind is float and type(value) is int:
            value = float(value)
        if (key == "time_left" and type(value) in (int, float)) or (key == "workers_per_gpu" and type(value) is int):
            value = str(value)  # a number, as a TOML file may well say it
        if kind is list and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if complaint := _complaint(key, kind, value):
            mistakes.append(f"{label} = {value!r} {complaint}")
        else:
            values[key] = value
    return values


def _complaint(key: str, kind: type, value: Any) -> str | None:
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
    if key in _SMALLEST and value < _SMALLEST[key]:
        return f"must be at least {_SMALLEST[key]}"
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


_KIND_NAMES = {list: "a list of texts", str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


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
    if values.get("profile", "nsys") not in PROFILERS:
        mistakes.append(f"--profile {values['profile']} is not known; profilers are {', '.join(PROFILERS)}")
    if "profile_chunks" in values and "profile" not in values:
        mistakes.append("--profile-chunks goes with --profile")
    loose = [key for key in ("min_memory_mib", "max_utilization", "wait") if key in values and "free" not in values]
    if loose:
        mistakes.append(f"{', '.join('--' + key.replace('_', '-') for key in loose)} goes with --free")
    mistakes += Cutting(None, values.get("chunk_length"), values.get("overlap", 0.0)).problems()
    if values.get("retry_failed") is False and values.get("resume") is False:
        mistakes.append("--no-retry-failed goes with --resume; with --no-resume nobody asks what failed before")
    if not values.get("source"):
        mistakes.append("no SOURCE was given: a manifest CSV, a folder of audio, or a list")
    return mistakes
