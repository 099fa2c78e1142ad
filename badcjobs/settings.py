"""All settings: one definition for options, badcjobs.toml, run.toml, help and ``badcjobs guide settings``.

Each table of badcjobs.toml is a class here (``[alerts]`` is in ``model``), each key a field with its kind, default and
help. A setting with a heading is also an option; one without a heading is only a key of the file.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.errors import BadInput
from badcjobs.masking import mask_value
from badcjobs.model import (
    AlertHooks,
    AlertLimits,
    Billing,
    Cutting,
    NamePattern,
    ProjectPlaces,
    StandIn,
    parse_patterns,
    parse_stop_after,
    parse_time_zone,
)
from badcjobs.paths import shell_line, user_name
from badcjobs.small_files import DamagedFile, check_document, read_with_status

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("hawkears", "hawkears1", "command", "demo")  # each is a module badcjobs/workers/engine_NAME.py
AUTO = "auto"
JOB_SCRIPTS = (".sbatch", ".sh")  # endings of a SOURCE that is a job script
_MOST_TOML_BYTES = 4 << 20
_NO_KEY = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?""")  # comments and quoted texts
_MOST_DOTS = 60
OPTIONS_ONLY = ("shard",)  # of no use in a file: different in every call
_MOST_WORKERS = 64  # per device; each is a process with its own models
_MEMORY = re.compile(r"[0-9]+(?:[KMGT]B?)?", re.IGNORECASE)  # as sbatch takes it
_ALWAYS = ("",)  # see Setting.runs
_TIME = "minutes, H:M:S or D-H:M:S, such as 90 or 12:00:00"

# kind: the type of its values, and its name in messages
_KINDS: dict[str, tuple[type, str]] = {
    "text": (str, "a string"),
    "texts": (tuple, "a list of strings"),
    "count": (int, "a whole number"),
    "number": (float, "a number"),
    "numbers": (tuple, "a list of two numbers"),
    "switch": (bool, "true or false"),
    "table": (dict, 'tables: [recordings.study_areas."NAME"]'),
}
_KIND_OF_FIELD = {  # by its annotation
    "Path": "text",
    "str": "text",
    "tuple[str, ...]": "texts",
    "int": "count",
    "float": "number",
    "tuple[float, float]": "numbers",
    "bool": "switch",
}
_METAVARS = {"count": "N", "number": "S"}  # the default metavar of an option


@dataclass(frozen=True)
class Setting:
    """One setting; ``heading`` is that of its option on the help page, None: it is only a key of the file."""

    kind: str
    help: str
    heading: str | None = None
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    among: tuple[str, ...] = ()
    check: Callable[[Any], str | None] | None = None  # returns the problem of a value of this kind, or None
    unset: object = None  # a value in the file that means "not set"
    frozen: bool = False  # all tasks of a run share it; stored in run.toml
    path: bool = False  # a path; a relative one starts at the file
    short: str = ""  # one letter: -o
    runs: tuple[str, ...] = ()  # endings of the values that name a program, or code that one runs; "": all values
    secret: bool = False  # never shown in a message
    example: Any = None  # for a new badcjobs.toml, if there is no default
    key: str = ""
    name: str = ""  # of the attribute
    default: Any = None

    @property
    def option(self) -> str:
        """Its option, whether or not it has one."""
        return f"--{self.key.replace('_', '-')}"


def _setting(default: Any, help: str, heading: str | None = None, key: str = "", **more: Any) -> Any:
    """Describe one setting; its key is the name of the field, unless only the field has a unit."""
    return field(default=default, metadata={"help": help, "heading": heading, "key": key, **more})


def _check_time(text: str) -> str | None:
    if parse_stop_after(text) is None:
        return f"must be {_TIME}"
    return None


def _check_memory(text: str) -> str | None:
    if not _MEMORY.fullmatch(text):
        return "must be an amount of memory, such as 16G or 16000M"
    return None


def _check_workers(text: str) -> str | None:
    is_count = text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_WORKERS
    if text != AUTO and not is_count:
        return f"must be a whole number from 1 to {_MOST_WORKERS}, or auto"
    return None


def _check_patterns(texts: Sequence[str]) -> str | None:
    mistakes = parse_patterns(texts)[1]
    return f"must be patterns, but {'; '.join(mistakes)}" if mistakes else None


def _check_time_zone(text: str) -> str | None:
    try:
        parse_time_zone(text)
    except ValueError:
        return "must be an offset such as -07:00 or a time zone such as America/Yellowknife"
    return None


def _check_study_areas(areas: Mapping[str, Any]) -> str | None:
    if not all(isinstance(keys, dict) for keys in areas.values()):
        return 'must be tables: [recordings.study_areas."NAME"]'
    return None


def _check_simulate(text: str) -> str | None:
    is_no_device = text.lstrip("-").isdecimal() and int(text) < 1
    if not text or is_no_device:
        return "must be at least 1, or a file"
    return None


# --- the tables -------------------------------------------------------------------------------------------------------

_OPTIONS = "Options"
_ENGINE = "Engine"
_AUDIO = "Audio"
_GPUS = "GPUs"
_ARRAY = "Array"
_TASK = "Each task"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The table [run]: how one array task works."""

    out: Path = _setting(  # noqa: RUF009 - it returns a field
        None, "Run folder: run.toml, tasks/, job.sqlite.", _OPTIONS, example="runs/first", path=True, short="o"
    )
    source: tuple[str, ...] = _setting(
        (), "What SOURCE would be.", example=["manifest.csv"], frozen=True, path=True, runs=JOB_SCRIPTS
    )
    resume: bool = _setting(True, "Skip chunks that are already done [on].", _OPTIONS)
    retries: int = _setting(2, "Retries of a failed chunk [2].", _OPTIONS, least=0, frozen=True)
    shard: str | None = _setting(None, "Do part I (from 0) of N; overrides the array.", _OPTIONS, metavar="I/N")
    engine: str = _setting(
        "hawkears",
        f"{', '.join(ENGINES)} [hawkears].",
        _ENGINE,
        metavar="NAME",
        frozen=True,
        among=ENGINES,
        runs=("hawkears1",),  # analyze.py in the working folder
    )
    hawkears_python: str | None = _setting(
        None,
        "Python that has HawkEars [the one on PATH].",
        _ENGINE,
        example="hawkears/bin/python",
        metavar="PATH",
        path=True,
        runs=_ALWAYS,
    )
    hawkears_root: str | None = _setting(
        None, "Folder with HawkEars' data/ and yaml/.", _ENGINE, example="hawkears", path=True, runs=_ALWAYS
    )
    engine_args: tuple[str, ...] = _setting(
        (),
        "Argument for the engine; repeatable.",
        _ENGINE,
        "engine_arg",
        example=["--region=CA-NT"],
        metavar="ARG",
        frozen=True,
        runs=_ALWAYS,
    )
    engine_prefix: str | None = _setting(
        None,
        "Run the engine under CMD: nsys, numactl, ...",
        _ENGINE,
        example="numactl --interleave=all",
        metavar="CMD",
        runs=_ALWAYS,
    )
    command: str | None = _setting(
        None,
        "Your own program: 'prog {input} {output}'.",
        _ENGINE,
        example="prog {input} {output}",
        metavar="CMD",
        frozen=True,
        runs=_ALWAYS,
    )
    root: str | None = _setting(
        None, "Folder that relative source_paths start from.", _AUDIO, example="audio", path=True, frozen=True
    )
    filelist: str | None = _setting(
        None,
        "Places and dates of the recordings, as CSV.",
        _AUDIO,
        example="places.csv",
        metavar="FILE",
        path=True,
    )
    chunk_length_s: float | None = _setting(
        None, "Cut recordings into chunks of S seconds.", _AUDIO, "chunk_length", example=294, frozen=True
    )
    overlap_s: float = _setting(0.0, "Seconds that neighbouring chunks share [0].", _AUDIO, "overlap", frozen=True)
    max_gpus: int | None = _setting(None, "Use at most N GPUs [all granted].", _GPUS, example=2, least=1)
    workers_per_gpu: str = _setting(
        AUTO, "Engine processes per GPU [auto].", _GPUS, metavar="N|auto", check=_check_workers
    )
    cpu_workers: int = _setting(0, "Without a GPU: N workers on the CPU [0].", _GPUS, least=0)
    mps: str = _setting(
        AUTO,
        "NVIDIA MPS for workers on one GPU [auto].",
        _GPUS,
        metavar="auto|on|off",
        among=(AUTO, "on", "off"),
    )
    simulate: str | None = _setting(
        None,
        "Use simulated GPUs: N, or as FILE describes.",
        _GPUS,
        example=2,
        metavar="N|FILE",
        path=True,
        check=_check_simulate,
    )
    interval_s: float = _setting(1.0, "Seconds between GPU samples [1].", _GPUS, "interval", least=0.01, frozen=True)
    telemetry: bool = _setting(True, "Record the GPUs [on].", _GPUS, "emit_gpu_telemetry")
    keep_raw: bool = _setting(False, "keep the engine's own output files, in OUT/raw")
    filelist_digest: str | None = _setting(
        None, "set by submit: checksum of filelist; a task refuses another list", example="0123abcd"
    )
    retry_failed: bool = _setting(True, "false: skip chunks that failed for good in earlier tasks")
    cut: bool | None = _setting(
        None, 'manifest rows are parts of longer files: "auto" (check), true, false', unset=AUTO, frozen=True
    )
    stage: str = _setting(
        AUTO, "copy audio to node-local disk before use: auto, always, never", among=(AUTO, "always", "never")
    )
    live_mode: str = _setting(
        AUTO,
        "live databases on node-local disk or in the run folder: auto, local, shared",
        among=(AUTO, "local", "shared"),
    )
    stop_after: str | None = _setting(
        None,
        'stop cleanly after this time, as in sbatch; "": when the Slurm job ends',
        check=_check_time,
        unset="",
    )
    min_memory_mib: int = _setting(
        0, "outside Slurm, with max_gpus: choose GPUs with at least this much free memory", least=0
    )
    max_utilization_percent: float = _setting(
        100.0,
        "outside Slurm, with max_gpus: choose GPUs that are at most this busy (percent)",
        key="max_utilization",
        least=0.0,
        most=100.0,
    )
    wait_s: float = _setting(0.0, "outside Slurm, with max_gpus: wait this long for free GPUs", least=0.0)
    backoff_s: float = _setting(1.0, "pause before the first retry; doubles with each retry", least=0.0)
    grace_s: float = _setting(20.0, "time for running chunks after SIGTERM or Ctrl-C", least=0.0)
    publish_every_s: float = _setting(30.0, "interval between copies of the task database in the run folder", least=0.1)
    heartbeat_every_s: float = _setting(60.0, "interval between heartbeat lines in the task log", least=0.1)
    alerts: AlertLimits = AlertLimits()  # the table [alerts]
    hooks: AlertHooks = AlertHooks()  # more keys of the same table
    patterns: tuple[NamePattern, ...] = ()  # of the table [recordings]
    places: ProjectPlaces = ProjectPlaces()  # of the same table
    origin: str = field(default="", compare=False)  # the project file
    billing: Billing | None = None  # of the site

    @property
    def workers_wanted(self) -> int | None:
        """The number of workers per device; None: chosen by measured speed."""
        if self.workers_per_gpu == AUTO:
            return None
        return int(self.workers_per_gpu)

    @property
    def cutting(self) -> Cutting:
        """How recordings are cut into chunks."""
        return Cutting(self.cut, self.chunk_length_s, self.overlap_s)

    @property
    def recordings(self) -> dict[str, object]:
        """The keys of the table [recordings] that all tasks of a run share."""
        return {"patterns": tuple(pattern.text for pattern in self.patterns), **self.places.to_keys()}

    def stand_in(self, cwd: Path) -> StandIn:
        """Return the devices that replace the real ones, with absolute paths."""
        return stand_in(cwd, self.simulate)

    def to_json(self, cwd: Path) -> str:
        """Return the settings by key, to store with the results; paths are absolute, secrets are hidden."""
        masked = {key: mask_value(getattr(self, setting.name)) for key, setting in SETTINGS["run"].items()}
        values = absolute_paths(masked, "run", cwd)
        alerts = {**asdict(self.alerts), **self.hooks.without_secrets()}
        return json.dumps({**values, "out": str(self.out), "alerts": alerts, "recordings": self.recordings})


@dataclass(frozen=True, slots=True)
class SubmitSettings:
    """The table [submit]: the array, and what each task requests from Slurm; None: not set."""

    cluster: str = _setting(
        "slurm",
        "Slurm, or emulated on this machine [slurm].",
        _OPTIONS,
        metavar="slurm|local",
        among=("slurm", "local"),
    )
    tasks: int | None = _setting(None, "Array tasks that share SOURCE [1].", _ARRAY, example=20, least=1)
    parallel: int | None = _setting(None, "Tasks that run at a time [all].", _ARRAY, example=10, least=1)
    gpus_per_task: int | None = _setting(None, "GPUs [1].", _TASK, example=1, least=0)
    cpus: int | None = _setting(None, "CPU cores [one per worker].", _TASK, example=2, least=1)
    mem: str | None = _setting(
        None, "Memory [what the workers need].", _TASK, example="4G", metavar="SIZE", check=_check_memory
    )
    time: str | None = _setting(
        None, "Time limit [12:00:00].", _TASK, example="12:00:00", metavar="TIME", check=_check_time
    )
    account: str | None = _setting(None, "Slurm account.", _TASK, example="st-lab-1-gpu", metavar="NAME")
    constraint: str | None = _setting(
        None, "Node feature, such as gpu_mem_32.", _TASK, example="gpu_mem_32", metavar="FEATURE"
    )
    sbatch: tuple[str, ...] = _setting(
        (),
        "Any other sbatch option; repeatable.",
        _TASK,
        metavar="OPTION",
        example=["--qos=high"],
        runs=_ALWAYS,
    )
    setup: tuple[str, ...] = _setting((), "shell lines before the work", example=["module load gcc cuda"], runs=_ALWAYS)
    requeues: int = _setting(10, "restarts of a task that stopped cleanly with work left", least=0)
    merge_account: str | None = _setting(
        None, "account of the merge job; default: account without the site's GPU ending", example="st-lab-1"
    )
    merge_mem: str | None = _setting(None, "memory of the merge job; default: 4G", example="4G", check=_check_memory)
    merge_time: str | None = _setting(
        None, "time limit of the merge job; default: 1:00:00", example="1:00:00", check=_check_time
    )
    share_gpus: bool = _setting(False, "--cluster local: several tasks may use one GPU")
    kill_wait_s: float = _setting(30.0, "--cluster local: seconds between TERM and KILL", least=0.0)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The table [plan]."""

    prefer: str = _setting(
        "cheapest", "cheapest: the lowest bill; fastest: one worker per core", among=("cheapest", "fastest")
    )
    margin: float | None = _setting(
        None,
        "assume tasks up to this many times slower than the mean; default: as measured, else 1.5",
        example=1.5,
        least=1.0,
    )
    template: str | None = _setting(
        None, "template for the job scripts of --out; default: the site's, else array", example="array"
    )


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The table [probe]."""

    lengths_s: tuple[float, float] = _setting((60.0, 3600.0), "shortest and longest trial", least=3.0, most=86_400.0)
    margin_percent: float = _setting(
        10.0, "a safe chunk is this much shorter than the longest that fits", least=0.0, most=90.0
    )
    trial_s: float = _setting(3.0, "duration of one trial", least=0.001, most=3600.0)
    keep: str | None = _setting(None, "folder that keeps the task database of the trials", unset="", path=True)


TABLES = {"run": RunSettings, "submit": SubmitSettings, "plan": PlanSettings, "probe": ProbeSettings}


def _described(kind: type) -> dict[str, Setting]:
    """Return the settings of a table by key."""
    settings = {}
    for of_field in fields(kind):
        facts = dict(of_field.metadata)
        if not facts:  # a field that other tables fill
            continue
        facts["kind"] = _KIND_OF_FIELD[str(of_field.type).removesuffix(" | None")]
        facts["key"] = facts.get("key") or of_field.name
        facts.setdefault("metavar", "DIR" if "path" in facts else _METAVARS.get(facts["kind"], ""))
        settings[facts["key"]] = Setting(name=of_field.name, default=of_field.default, **facts)
    return settings


# Every setting, by table and key; "" is the top of the file.
SETTINGS: dict[str, dict[str, Setting]] = {
    "": {"site": Setting("text", "rules of the cluster: a known site, or a TOML file", example="sockeye", path=True)},
    **{table: _described(kind) for table, kind in TABLES.items()},
    "alerts": _described(AlertLimits) | _described(AlertHooks),
    "recordings": {
        "patterns": Setting(
            "texts",
            "what paths mean, most specific first: badcjobs guide audio",
            default=(),
            example=["{study_area}/{location}/*"],
            check=_check_patterns,
        ),
        "time_zone": Setting(
            "text",
            "of the recorders' clocks: -07:00, America/Yellowknife; for UTC in exports",
            default="",
            example="-07:00",
            check=_check_time_zone,
        ),
        "region": Setting("text", "eBird region of the recordings, for the filter of species", example="CA-NT"),
        "latitude": Setting("number", "instead of region, with longitude", example=61.2),
        "longitude": Setting("number", "instead of region, with latitude", example=-115.1),
        "date": Setting("text", "date of the recordings; default: in their names", example="2024-06-01"),
        "study_areas": Setting(
            "table",
            "these four keys by study area",
            example={"Horn": {"region": "CA-NT"}},
            check=_check_study_areas,
        ),
    },
}


# --- values -----------------------------------------------------------------------------------------------------------


def check_values(
    table: str, given: Mapping[str, Any], place_of: Callable[[str], str], mistakes: list[str]
) -> dict[str, Any]:
    """Return the values of known settings in their types; add wrong ones to ``mistakes``."""
    values: dict[str, Any] = {}
    for key, given_value in given.items():
        setting = SETTINGS[table].get(key)
        if setting is None:
            continue
        value = convert(setting, given_value)
        if setting.unset is not None and value == setting.unset:
            values[key] = None
        elif problem := find_problem(setting, value):
            shown = "" if setting.secret else f" = {to_toml(value)}"
            mistakes.append(f"{place_of(key)}{shown} {problem}")
        else:
            values[key] = value
    return values


def convert(setting: Setting, value: Any) -> Any:
    """Return a value in the type of its setting, if TOML or a caller may write it in another one."""
    is_number = type(value) in (int, float)
    if is_number and setting.kind == "text" and setting.check is not None:
        return str(value)
    if is_number and setting.kind == "number":
        return float(value)
    if isinstance(value, date) and setting.kind == "text":
        return str(value)
    if not isinstance(value, list | tuple):
        return value
    if setting.kind == "texts" and all(isinstance(text, str) for text in value):
        return tuple(value)
    if setting.kind == "numbers" and all(type(number) in (int, float) for number in value):
        return tuple(map(float, value))
    return value


def find_problem(setting: Setting, value: Any) -> str | None:
    """Return the problem of a converted value; None: it is right."""
    kind: Any
    kind, description = _KINDS[setting.kind]
    if setting.among and value not in setting.among:
        return f"must be one of {', '.join(setting.among)}"
    if type(value) is not kind or (setting.kind == "numbers" and len(value) != 2):
        if setting.unset:
            description += f", or {to_toml(setting.unset)}"
        if setting.kind == "texts" and isinstance(value, str):
            description += f": {to_toml([value])}"
        return f"must be {description}"
    problem = setting.check and setting.check(value)
    if problem:
        return problem
    if setting.kind in ("text", "texts") and any("\ud800" <= letter <= "\udfff" for letter in "".join(value)):
        return "is not UTF-8"  # neither TOML nor SQLite can store it
    if setting.kind not in ("count", "number", "numbers"):
        return None
    for number in value if setting.kind == "numbers" else [value]:
        if not math.isfinite(number):
            return "must be a finite number"
        if setting.least is not None and number < setting.least:
            return f"must be at least {setting.least:g}"
        if setting.most is not None and number > setting.most:
            return f"must be at most {setting.most:g}"
    return None


def contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between the settings of a run."""
    engine = values.get("engine")
    command = values.get("command")
    if not command and (engine == "command" or command is not None):
        yield "--engine command needs --command 'program {input} {output}'"
    if engine not in (None, "command") and command:
        yield f"--command needs --engine command, not {engine}"
    yield from Cutting(None, values.get("chunk_length"), values.get("overlap", 0.0)).problems()
    if values.get("chunk_length") and any(arg.startswith("--start") for arg in values.get("engine_arg", ())):
        yield "--engine-arg=--start with --chunk-length would skip the beginning of every chunk"
    if values.get("filelist") == "":
        yield "--filelist has no value: leave it out, or name a file"
    if values.get("retry_failed") is False and values.get("resume") is False:
        yield "retry_failed = false needs --resume: with --no-resume earlier tasks are not read"
    if not values.get("source"):
        yield "SOURCE is missing: a manifest CSV, a folder of audio, or a list"
    out = values.get("out")
    sources = [absolute(Path(), source) for source in values.get("source", ())]
    if out and absolute(Path(), out) in sources:
        yield f"--out {out} is also a SOURCE: results need a folder of their own, as --out results"


def refuse(mistakes: Sequence[str], fix: str, what: str = "these settings cannot be used") -> None:
    """Raise BadInput with all mistakes, if there are any; ``what`` is the headline for several."""
    if len(mistakes) > 1:
        raise BadInput(what, why="\n".join(mistakes), fix=fix)
    if mistakes:
        raise BadInput(mistakes[0], fix=fix)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar name; None: there is no similar one."""
    similar = difflib.get_close_matches(name, names, n=1)
    return similar[0] if similar else None


def stand_in(cwd: Path, simulate: str | None) -> StandIn:
    """Return the devices that replace the real ones: N simulated ones, or those of a script (.toml) or a recording."""
    if simulate is None:
        return StandIn()
    if problem := _check_simulate(simulate):
        raise BadInput(f"--simulate {simulate} {problem}", fix="--simulate 2")
    if simulate.isascii() and simulate.isdecimal():
        return StandIn(simulate=int(simulate))
    path = str(cwd / simulate)
    if path.endswith(".toml"):
        return StandIn(script=path)
    return StandIn(replay=path)


# --- paths, options and TOML ------------------------------------------------------------------------------------------


def absolute_paths(values: Mapping[str, Any], table: str, folder: Path) -> dict[str, Any]:
    """Return the values with absolute paths, which start at ``folder``; links are not followed."""
    absolute_values = dict(values)
    for key, setting in SETTINGS[table].items():
        value = values.get(key)
        if not setting.path or not value:
            continue
        if isinstance(value, tuple):
            absolute_values[key] = tuple(absolute(folder, path) for path in value)
        elif _is_path(key, str(value)):
            absolute_values[key] = absolute(folder, str(value))
    return absolute_values


def _is_path(key: str, text: str) -> bool:
    """Say whether a value is a path, and not a number, a known site or a program on PATH."""
    if key == "simulate":
        return not text.isdecimal()
    if key == "site":
        return text.endswith(".toml")
    if key == "hawkears_python":
        return "/" in text
    return True


def absolute(folder: Path, path: str) -> str:
    """Return an absolute path without "..", which leads to the same file.

    Links are followed only if there is a "..", and never the last one: resolve() would turn a git-annex link into its
    key.
    """
    full = (folder / path).absolute()
    if ".." not in full.parts:
        return str(full)
    if full.name == "..":
        return os.path.realpath(full)
    return os.path.join(os.path.realpath(full.parent), full.name)  # noqa: PTH118 - a text


def option_words(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of ``badcjobs run`` that give these values, by key; SOURCE and --out are left out."""
    for key, setting in SETTINGS["run"].items():
        value = values.get(key)
        if key in ("source", "out") or value is None:
            continue
        if setting.heading is None or (value is False and not setting.default):
            yield f"--config=run.{key}={value_text(value)}"
        elif value is True:
            yield setting.option
        elif value is False:
            yield setting.option.replace("--", "--no-", 1)
        elif isinstance(value, list | tuple):
            yield from (f"{setting.option}={text}" for text in value)
        else:
            yield f"{setting.option}={value}"


def value_text(value: Any) -> str:
    """Return a value for ``--config KEY=VALUE``; a text without quotation marks if possible."""
    if isinstance(value, str) and parse_value(value) == value:
        return value
    return to_toml(value)


def to_toml(value: Any) -> str:
    """Return a value in TOML."""
    if value is None:
        return "(not set)"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_toml(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, str | int | float):  # a date
        return str(value)
    # Strings, numbers, true and false are the same in JSON and TOML, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_value(text: str) -> Any:
    """Parse a value of TOML; anything else, such as a bare word or a time, is a text."""
    try:
        document = parse_toml(f"value = {text}")
    except DamagedFile:
        return text
    value = document["value"]
    if len(document) == 1 and isinstance(value, str | int | float | list):
        return value
    return text


class TomlFile(NamedTuple):
    """A TOML file that was read."""

    document: dict[str, Any]
    text: str
    status: os.stat_result  # of the descriptor that was read


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raise DamagedFile for anything else, for deep nesting and for impossible values."""
    try:
        # The time of the parser is quadratic in the parts of a key.
        if any(line.count(".") > _MOST_DOTS for line in re.split("[,\n]", _NO_KEY.sub("", text))):
            raise ValueError("a key has too many parts")
        document = tomllib.loads(text)
        check_document(document)
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedFile(str(error) or "too large") from error
    return document


def read_toml(path: Path) -> TomlFile:
    """Read a TOML file."""
    try:
        content, status = read_with_status(path, _MOST_TOML_BYTES)
        text = content.decode()
        return TomlFile(parse_toml(text), text, status)
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist", fix=shell_line("ls", path.parent)) from error
    except PermissionError as error:
        owner = user_name(path.stat().st_uid)
        raise BadInput(f"{path} cannot be read: it belongs to {owner}", fix=shell_line("ls", "-l", path)) from error
    except (OSError, ValueError) as error:  # not TOML, or not UTF-8
        raise BadInput(f"{path} cannot be read", why=str(error), fix=shell_line("less", path)) from error
