"""Reads a job script for the preflight: what it asks of Slurm, and how it starts badcjobs.

The shell in it is ``shell_lines.py``'s business, single options of sbatch are ``scheduler/``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from badcjobs.errors import BadInput
from badcjobs.preflight.facts import Asked, ScriptFacts, Start, WarningSignal
from badcjobs.scheduler.array_spec import parse_array
from badcjobs.scheduler.job_script import count_gpus, parse_limit, parse_signal, sbatch_words
from badcjobs.scheduler.local_options import FLAGS, OPTIONAL, SHORT, VALUES
from badcjobs.shell_lines import Lines, code_of, logical_lines, read_flags, split_words

_RUN = re.compile(r"""badcjobs\b["'}]*\s+run\b""", re.IGNORECASE)
_OTHER = re.compile(r"""badcjobs\b["'}]*\s+(merge|report|record|export|gpus|demo)\b""", re.IGNORECASE)
_MODULES = re.compile(r"^\s*(?:module\s+(?:load|add)|ml)\s+(.+)$")
_AFTEROK = re.compile(r"\bafterok:")
_BYTES = {"K": 2**-20, "M": 2**-10, "G": 1.0, "T": 2.0**10}


@dataclass(frozen=True, slots=True)
class ReadScript:
    """A script, and what it asks for."""

    facts: ScriptFacts
    asked: Asked


def read_script(text: str, name: str, environ: Mapping[str, str]) -> ReadScript:
    """Read a script as sbatch and its shell would; whatever sbatch would refuse is among its mistakes."""
    mistakes: list[str] = []
    if not text.startswith("#!"):
        mistakes.append("its first line is not #! and an interpreter, so sbatch refuses it")
    if "\r\n" in text:
        mistakes.append(r"its lines end as on Windows, so sbatch refuses it; try: sed -i 's/\r$//'")
    given = _options(text, mistakes)
    lines = list(logical_lines(text))
    modules = [word for _, line in lines if (found := _MODULES.match(line)) for word in split_words(found[1])]
    facts = ScriptFacts(
        name=name,
        start=find_start(lines, text, environ),
        signal=_signal(given, mistakes),
        append=given.get("open-mode", "").startswith("a"),
        modules=tuple(word for word in modules if not word.startswith("-")),
        output=given.get("output"),
        chdir=given.get("chdir"),
        other_commands=tuple(found[1] for _, line in lines if (found := _OTHER.search(code_of(line)))),
        late_options=tuple(_late_options(text)),
        afterok=_AFTEROK.search(" ".join([given.get("dependency", ""), *(line for _, line in lines)])) is not None,
    )
    asked = read_asked(given, mistakes)
    if asked.gpus_per_task == 0 and not _wants_gpus(facts.start):
        asked = replace(asked, gpus_per_task=None)
    return ReadScript(replace(facts, mistakes=tuple(mistakes)), asked)


def _wants_gpus(start: Start | None) -> bool:
    """Say whether a script would miss GPUs: one that only merges would not, nor one that works without."""
    return start is not None and not {"--cpu-workers", "--simulate"} & start.flags.keys()


def read_asked(given: Mapping[str, str], mistakes: list[str]) -> Asked:
    """Return what sbatch options ask for, each under its long name."""
    asked: dict[str, object] = {"account": given.get("account")}
    try:
        if given.get("array"):
            array = parse_array(given["array"])
            asked |= {"tasks": len(array.indices), "last_index": array.indices[-1]}
        gpus = count_gpus(given)
        nodes = _whole(given.get("nodes", "1").partition("-")[0]) or 1
        asked["gpus_per_task"] = gpus if "gpus" in given else gpus * nodes
        asked["time_s"] = parse_limit(given["time"]) if "time" in given else None
        cores = _whole(given.get("cpus-per-task"))
        asked["cpus"] = None if cores is None else cores * (_whole(given.get("ntasks")) or 1)
        asked["memory_gb"] = _memory_gb(given, gpus, cores)
    except BadInput as error:
        mistakes.append(f"{error.what}: {error.why}")
    except ValueError as error:
        mistakes.append(str(error))
    return Asked(**asked)  # type: ignore[arg-type]


def parse_memory_gb(text: str) -> float:
    """Read a size as sbatch does: megabytes unless a K, M, G or T follows; 0 is all of the node."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"--mem={text} is no size; write 16G or 16000M")
    return float(found[1]) * _BYTES[found[2].upper() or "M"]


def _memory_gb(given: Mapping[str, str], gpus: int, cores: int | None) -> float | None:
    if "mem" in given:
        return parse_memory_gb(given["mem"])
    if "mem-per-gpu" in given:
        return parse_memory_gb(given["mem-per-gpu"]) * gpus
    if "mem-per-cpu" in given:
        return parse_memory_gb(given["mem-per-cpu"]) * (cores or 1)
    return None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def _signal(given: Mapping[str, str], mistakes: list[str]) -> WarningSignal | None:
    if "signal" not in given:
        return None
    try:
        found = parse_signal(given["signal"])
    except ValueError as error:
        mistakes.append(str(error))
        return None
    return WarningSignal(found.signum.name.removeprefix("SIG"), found.lead_s, found.to_script)


def _options(text: str, mistakes: list[str]) -> dict[str, str]:
    """Return sbatch's options under their long names; the last one counts."""
    given: dict[str, str] = {}
    try:
        words = sbatch_words(text)
    except ValueError as error:  # a quotation mark too many
        mistakes.append(f"a #SBATCH line cannot be read: {error}")
        return given
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and word.startswith("-") and word[1:2] in SHORT:
            name, value = SHORT[word[1]], word[2:]
            equals = "=" if value else ""
        if name not in VALUES | FLAGS | OPTIONAL:
            mistakes.append(f"sbatch knows no option {word}")
            continue
        given[name] = words.pop(0) if name in VALUES and not equals and words else value
    return given


def _late_options(text: str) -> Iterator[int]:
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        if begun and line.startswith("#SBATCH"):
            yield number
        begun = begun or bool(line.strip() and not line.startswith("#"))


def find_start(lines: Lines, text: str, environ: Mapping[str, str]) -> Start | None:
    """Return the last line that starts ``badcjobs run``."""
    found = None
    for number, line in lines:
        for part in re.split(r"&&|\|\||;", code_of(line)):
            run = _RUN.search(part)
            if run and not part.lstrip().startswith(("echo ", "printf ")):
                before = [word for word in part[: run.start()].split() if not re.match(r"\w+=", word)]
                flags = read_flags(part[run.end() :], text, lines, environ)
                first = before[0] if before else ""
                found = Start(number, part.strip(), first == "exec", "srun" in before[:2], flags)
    return found
