"""Parse a job script: its ``#SBATCH`` lines and the lines that call ``badcjobs``. Pure; nothing is run.

This is not a shell. It understands what our templates use: plain assignments (``OUT=results``,
``: "${OUT:=results}"``, ``ARGS=(...)``), ``module load``, ``source .../bin/activate`` and calls of badcjobs, each as a
line of its own. A word with any other variable is unknown; without a call that can be read, lines that name
badcjobs are in ``unread``.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.cluster.templates import example_of
from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.project import is_config_file
from badcjobs.settings import JOB_SCRIPTS, nearest, refuse

CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter"}
SPREADING = {"srun", "mpirun", "mpiexec", "pdsh", "clush", "ssh", "parallel", "prun"}
# Tested: they end at USR1 without passing it on to the program that they started (conda: its issue 10351).
KEEPING = {"timeout", "time", "setsid", "flock", "xargs", "strace", "conda", "mamba", "micromamba"}
_PLAINLY = {"exec", "command", "nohup", "python", "-m"}
_LAUNCHING = CONTAINERS | SPREADING | KEEPING | _PLAINLY | {"env", "nice", "stdbuf", "uv", "pixi"}

# Options that sbatch reads from its environment; they override the lines of the script.
_INPUT_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_GPUS": "gpus", "SBATCH_GRES": "gres",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_OPEN_MODE": "open-mode", "SBATCH_PARTITION": "partition", "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
_SBATCH = re.compile(r"^(?:[ \t]*#[ \t]*SBATCH|#sbatch)[ \t]+(?P<words>\S.*?)[ \t\r]*$", re.M)
_COMMAND = re.compile(r"^[ \t]*[^#\s].*", re.M)
_NEXT_JOB = re.compile(r"^#SBATCH\s+(?:hetjob|packjob)\s*$.*", re.M | re.S)
_OPTION = re.compile(r"(?<![\w-])(?P<word>(?P<name>--?[A-Za-z][\w-]*)(?:=\S*)?)")

_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*\\?[\"']?(\w+)[^\n]*\n(.*?^\t*\1)[ \t]*$", re.M | re.S)
_LOGICAL_LINE = re.compile(r"(?:[^\\\n]|\\.)+", re.S)
_QUOTED = re.compile(r"""'[^']*'|"[^"$`]*"|(?<!\S)#.*""")  # and comments
_OTHER_SHELL = re.compile(r"[;&|`]|\$\(")  # a line with several commands, or with the output of one
_REDIRECTION = re.compile(r"(?:(?<=\s)|^)(?:\d|&)?(?:>>|>\||<<<|<|>)(?:&\d|\s*[^\s<>()]+)")
_ASSIGNED = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)=([^(\n].*|)$", re.M)
_DEFAULTED = re.compile(r'^[ \t]*:[ \t]+"?\$\{(\w+):?=(.*)\}"?[ \t]*$', re.M)
_ARRAY = re.compile(r"^[ \t]*(\w+)=\((.*?)\)", re.M | re.S)
_READ_ARRAY = re.compile(r"^[ \t]*read[ \t]+(?:-r[ \t]+)?-a[ \t]+(\w+)[ \t]*<<<[ \t]*(.+)$", re.M)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
_ALL_OF_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_BADCJOBS = re.compile(r"(?:.*[^A-Za-z0-9])?badcjobs", re.I | re.S)
_NAMED = re.compile(r"^[^#\n]*badcjobs", re.I | re.M)
_MODULES = re.compile(r"(?:^|[;&|])[ \t]*(?:module|ml)[ \t]+(?:load|add)[ \t]+([^\n;&|>#]+)", re.M)
_VENV = re.compile(r"^[ \t]*(?:source|\.)[ \t]+\"?([^\s\"]+)/bin/activate\b", re.M)
_SETTING_UP = re.compile(
    r"^[ \t]*((?:source|\.)[ \t]+(?!\S+/bin/activate).*|(?:conda|mamba|micromamba|spack|eval|module use)\b.*|"
    r"(?:module|ml)\b.*(?:python|conda|mamba|forge|hawkears|badc).*)$",
    re.M | re.I,
)
_MOVING = re.compile(r"(?:^|[;&|])[ \t]*(?:cd|pushd)\b(?![ \t]+\"?\$\{?SLURM_SUBMIT_DIR\}?\"?[ \t]*$)", re.M)
_MADE = re.compile(r"^[^#\n]*>[ \t]*[\"']?([^\s\"';&|]+)", re.M)
_TRAP = re.compile(r"^[^#\n]*\btrap\b", re.M)
_TO_SET = re.compile(r'^: "\$\{(SOURCE|OUT|IMAGE):=\}"', re.MULTILINE)
_TMPDIR = re.compile(r"^[^#\n]*(?:\bTMPDIR=|\bunset\b.*\bTMPDIR\b)", re.M)
_SRUN = re.compile(r"^[ \t]*(?:\w+=\S*[ \t]+)*(?:(?:exec|time)[ \t]+)?(?:\S*/)?srun\b", re.M)
_OWN_TO_THE_JOB = ("SLURM", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")
_ALWAYS_EXPORTED = ("HOME", "USER", "LOGNAME", "SHELL", "PATH")
_PATHS = ("out", "root", "hawkears_root")


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a script."""

    text: str
    fix: str  # a line to paste


@dataclass(frozen=True, slots=True)
class ParsedWords:
    """The parsed words after ``badcjobs``; values may have unknown variables."""

    command: str | None = None  # if its name is misspelled: the nearest command
    values: dict[str, Any] = field(default_factory=dict)  # "engine_arg" → its value; True for a flag
    operands: tuple[str, ...] | None = None
    wrong: tuple[str, str, str] | None = None  # the message, the wrong word, the right one (empty: not known)


Parser = Callable[[Sequence[str]], ParsedWords]


@dataclass(frozen=True, slots=True)
class Call:
    """A line of a script that calls badcjobs."""

    line: int
    text: str
    command: str = "run"
    before: tuple[str, ...] = ()  # the words before badcjobs, programs by their names
    values: dict[str, Any] = field(default_factory=dict)  # "out" → the value of --out, if it has no unknown variable
    named: frozenset[str] = frozenset()  # all options, also those with an unknown value
    hidden: bool = False  # a variable may have more options
    sources: tuple[str, ...] | None = None  # None: one of them has an unknown variable

    def may_set(self, key: str) -> bool:
        """Say whether the call sets a setting of ``badcjobs run``, or a file of ``--config`` may set it."""
        configs = self.values.get("config", ["?"] if "config" in self.named else [])
        return key in self.named or any(is_config_file(one) or one.startswith(f"run.{key}=") for one in configs)

    @property
    def by_exec(self) -> bool:
        """Whether it replaces the shell of the job."""
        return self.before[:1] == ("exec",)

    @property
    def by_srun(self) -> bool:
        """Whether it runs as a step of the job."""
        return "srun" in self.before

    @property
    def spread(self) -> bool:
        """Whether a program starts it on several nodes."""
        return not SPREADING.isdisjoint(self.before)

    @property
    def contained(self) -> bool:
        """Whether it runs in a container, with the engine of its image."""
        return not CONTAINERS.isdisjoint(self.before)

    @property
    def keeper(self) -> str | None:
        """Return the program before it that does not pass signals on; timeout -s does."""
        found = next((name for name in self.before if name in KEEPING), None)
        return None if found == "timeout" and any(word.startswith(("-s", "--s")) for word in self.before) else found


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A parsed job script."""

    name: str
    options: dict[str, str]  # of sbatch, under their long names
    asked: sbatch.Asked = field(default_factory=sbatch.Asked)
    signal: sbatch.EarlySignal | None = None
    calls: tuple[Call, ...] = ()
    mistakes: tuple[Mistake, ...] = ()  # options that sbatch would refuse
    ignored: tuple[Mistake, ...] = ()  # lines that look like options, but are comments for sbatch
    wrong_calls: tuple[Mistake, ...] = ()  # calls that badcjobs would refuse
    unread: tuple[int, ...] = ()  # lines with the word badcjobs, if no call could be parsed
    modules: tuple[str, ...] = ()
    venvs: tuple[str, ...] = ()  # virtual environments that it activates
    out: str | None = None  # the value of its variable OUT, which our templates use
    unset: tuple[str, ...] = ()  # the variables of our templates that have no value yet
    set_up_by: str | None = None  # a line that may add programs to PATH which cannot be found here
    srun_line: int | None = None  # the first that calls srun
    traps_signals: bool = False
    sets_tmpdir: bool = False
    sets_cache: bool = False

    @property
    def starts(self) -> list[Call]:
        """Return the calls of ``badcjobs run``."""
        return [call for call in self.calls if call.command == "run"]

    @property
    def start(self) -> Call | None:
        """Return the last call of ``badcjobs run``."""
        return self.starts[-1] if self.starts else None


def is_job_script(source: str) -> bool:
    """Say whether a SOURCE is a job script, by its ending."""
    return source.endswith(JOB_SCRIPTS)


def read_text(script: Path, cwd: Path) -> str:
    """Return the text of a job script, with its own line ends."""
    try:
        return (cwd / script).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        seen = script.parent if isinstance(error, FileNotFoundError) else script
        look = shell_line("ls", "-l", seen)
        raise BadInput(f"the job script {script} cannot be read", why=str(error), fix=look) from error


def parse_plainly(words: Sequence[str]) -> ParsedWords:
    """Parse words without the options of badcjobs: a word after ``--name`` that does not start with - is its value."""
    command = next((word for word in words if not word.startswith("-")), None)
    values: dict[str, Any] = {}
    for word, following in pairwise([*words, "-"]):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            given = True if following.startswith("-") else following
            key, said = name.replace("-", "_"), value if equals else given
            values[key] = [*values.get(key, ()), said] if key == "config" else said
    return ParsedWords(command, values)


def read_script(
    text: str,
    name: str,
    environ: Mapping[str, str],
    cwd: str = "",
    parse: Parser = parse_plainly,
    options: Sequence[str] = (),
) -> BatchScript:
    """Parse a script; ``parse`` is the parser of the command line, without which sources are unknown.

    ``options`` are those on the command line of sbatch, which override the script.
    """
    said: list[str] = []
    words = [word for _, line in _option_lines(_NEXT_JOB.sub("", text)) for word in _split(line)]
    given = sbatch.read_options(words, said)  # the environment overrides the script
    given |= {option: environ[name] for name, option in _INPUT_VARIABLES.items() if environ.get(name)}
    given |= sbatch.read_options(options, said)
    values = sbatch.read_values(given, said)
    asked = sbatch.read_asked(given, values, said)
    is_shell = re.match(r"#!.*\b(?:ba|da|k|z)?sh\b|(?!#!)", text) is not None
    plain = _HERE_DOCUMENT.sub(lambda one: "\n" * one[0].count("\n"), text)
    names, exports = sbatch.parse_export(given.get("export", "ALL"))  # the variables that sbatch passes on to the job
    passed = {name: value for name, value in environ.items() if "ALL" in names or name in (*_ALWAYS_EXPORTED, *names)}
    variables = Variables(plain, passed | exports, cwd, given.get("chdir", ""))
    modules = " ".join(_MODULES.findall(_REDIRECTION.sub("", plain)))
    found = list(_read_calls(plain, variables, parse)) if is_shell else []
    calls = tuple(one for one in found if isinstance(one, Call))
    start = next((call for call in reversed(calls) if call.command == "run"), None)
    if asked.gpus_per_task == 0 and (start is None or start.hidden or start.may_set("cpu_workers")):
        asked = replace(asked, gpus_per_task=None)  # it is not certain that the task needs a GPU
    return BatchScript(
        name=name,
        options=given,
        asked=asked,
        signal=values.get("signal"),
        calls=calls,
        mistakes=(*_form_mistakes(text, name), *(_option_mistake(one, text, name) for one in said)),
        ignored=tuple(_ignored_options(plain)),
        wrong_calls=tuple(one for one in found if isinstance(one, Mistake)),
        unread=() if found else tuple(_line_of(plain, one.end()) for one in _NAMED.finditer(plain)),
        modules=tuple(word for word in modules.split() if word[0] not in "-$\"'"),
        venvs=tuple(one for one in map(variables.value_of, _VENV.findall(plain)) if one),
        out=variables.place_of(variables.value_of("$OUT") or "$OUT"),
        unset=tuple(name for name in _TO_SET.findall(plain) if not variables.value_of(f"${name}")),
        set_up_by=next(iter(_SETTING_UP.findall(plain)), None),
        srun_line=next((_line_of(plain, one.start()) for one in _SRUN.finditer(plain)), None),
        traps_signals=_TRAP.search(plain) is not None,
        sets_tmpdir=_TMPDIR.search(plain) is not None,
        sets_cache="XDG_CACHE_HOME=" in plain,
    )


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def uses_variable(text: str, name: str) -> bool:
    """Say whether a script uses the value that a variable has at its start."""
    text = re.sub(r"(?<!\S)#.*", "", text)
    overwritten = re.search(rf"^[ \t]*(?:export[ \t]+)?{name}=(?![^;&|\n]*\$\{{?{name}\b)", text, re.M)
    return overwritten is None and re.search(rf"\$\{{?{name}\b|[\"']{name}[\"']|\bprintenv {name}\b", text) is not None


# --- the options of sbatch ------------------------------------------------------------------------------------------


def _option_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each ``#SBATCH`` line before the first command."""
    first = _COMMAND.search(text)
    for found in _SBATCH.finditer(text, 0, first.start() if first else len(text)):
        if found[0].startswith("#SBATCH"):
            yield _line_of(text, found.start()), found["words"]


def _ignored_options(text: str) -> Iterator[Mistake]:
    """Yield the lines that look like options, but are not at the beginning of a line or before the first command."""
    read = dict(_option_lines(text))
    for found in _SBATCH.finditer(text):
        if (number := _line_of(text, found.start())) not in read and found["words"].startswith("-"):
            yield Mistake(
                f" line {number}: sbatch reads this as a comment: an option starts with #SBATCH at the beginning of a"
                " line, before the first command",
                f"#SBATCH {found['words']}   (above the first command; or ##SBATCH for a comment)",
            )


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation mark that is not closed
        return []


def _form_mistakes(text: str, name: str) -> Iterator[Mistake]:
    """Yield the mistakes that keep sbatch from reading the options of a script."""
    file = shell_line(Path(name))
    if not text.startswith("#!"):
        yield Mistake(
            ": its first line is not #! with an interpreter, so sbatch refuses it", f"sed -i '1i #!/bin/bash' {file}"
        )
    if "\r\n" in text:
        yield Mistake(": it has Windows line ends (CRLF), so sbatch refuses it", rf"sed -i 's/\r$//' {file}")
    for number, line in _option_lines(text):
        if not _split(line) and not line.startswith("#"):
            closed = next((line + mark for mark in "\"'" if _split(line + mark)), line)
            yield Mistake(f" line {number}: a quotation mark is not closed", f"#SBATCH {closed}")


def _option_mistake(said: str, text: str, name: str) -> Mistake:
    """Return the mistake in an option, with its corrected line if there is an example."""
    found = _OPTION.search(said)
    option, word = (found["name"], found["word"].rstrip(":;,")) if found else ("?", "?")
    number, line = next(((n, one) for n, one in _option_lines(text) if word in one), (0, ""))
    right = nearest(option.removeprefix("--"), sbatch.VALUES | sbatch.FLAGS | sbatch.OPTIONAL)
    if said.startswith("sbatch has no option"):
        right = line.replace(option, f"--{right}", 1) if right else None
    else:
        example = example_of(option.removeprefix("--"))
        right = line.replace(word, f"{option}={example}") or f"{option}={example}" if example else None
    ask = f"sbatch --test-only {shell_line(Path(name))}   (shows the message of sbatch)"
    return Mistake(f" line {number}: {said}" if number else f": {said}", f"#SBATCH {right}" if right else ask)


# --- the lines that call badcjobs -----------------------------------------------------------------------------------


class Variables:
    """The variables of a script, from its plain assignments and its environment."""

    def __init__(self, text: str, environ: Mapping[str, str], cwd: str, chdir: str) -> None:
        self._known = {name: value for name, value in environ.items() if not name.startswith(_OWN_TO_THE_JOB)}
        self._known |= {"SLURM_SUBMIT_DIR": cwd, "PWD": posixpath.join(cwd, chdir)}
        self._folder = None if _MOVING.search(text) else chdir  # None: the script changes its folder
        self._arrays = {name: _split(re.sub("`[^`]*`", "$?", body)) for name, body in _ARRAY.findall(text)}
        for name, default in _DEFAULTED.findall(text):
            if not self._known.get(name):
                unquoted = re.sub(r"\\(.)", r"\1", default).replace('"\'"', "'")
                self._assign(name, self.value_of(unquoted) if re.search(r"(?<!\\)[$`]", default) else unquoted)
        seen: dict[str, str | None] = {}
        for name, raw in _ASSIGNED.findall(text):
            words = _split(raw) or [""]
            value = self.value_of(words[0]) if len(words) == 1 else None
            self._assign(name, value if seen.setdefault(name, value) == value else None)  # two values: unknown
        for name, raw in _READ_ARRAY.findall(text):
            value = self.value_of("".join(_split(raw)))
            self._arrays |= {} if value is None else {name: value.split()}

    def _assign(self, name: str, value: str | None) -> None:
        self._known.pop(name, None)
        self._known |= {} if value is None else {name: value}

    def value_of(self, word: str) -> str | None:
        """Replace variables by their values; None: one of them is unknown."""
        if word == "~" or word.startswith("~/"):
            word = "${HOME}" + word[1:]
        values = [self._known.get(one[1] or one[2], one[3]) or one[3] for one in _VARIABLE.finditer(word)]
        if None in values or word.startswith("~"):
            return None
        left = iter(values)
        expanded = _VARIABLE.sub(lambda _: next(left), word)
        return None if "$" in expanded or "`" in expanded else expanded

    def words_of(self, text: str) -> list[str]:
        """Return the words of a command: arrays expanded, known variables replaced."""
        words: list[str] = []
        for word in _split(text):
            array = _ALL_OF_ARRAY.fullmatch(word)
            words += self._arrays.get(array[1], [word]) if array else [word]
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        return [word if (value := self.value_of(word)) is None else value for word in words]

    def place_of(self, path: str) -> str | None:
        """Return a path relative to the folder of submission; None: not known."""
        if "$" in path or (self._folder is None and not posixpath.isabs(path)):
            return None
        return posixpath.join(self._folder or "", path)


def _read_calls(text: str, variables: Variables, parse: Parser) -> Iterator[Call | Mistake]:
    """Yield each call of badcjobs, and its mistakes."""
    text = _ARRAY.sub(lambda one: "\n" * one[0].count("\n"), text)
    for found in _LOGICAL_LINE.finditer(text):
        line = re.sub(r"\s*\\\r?\n\s*", " ", found[0]).strip()
        bare = _REDIRECTION.sub("", line)
        several = _OTHER_SHELL.search(_QUOTED.sub("", bare)) is not None
        words = [] if line.startswith("#") or several else variables.words_of(bare)
        at = _place_of_badcjobs(words, parse)
        if at is not None:
            call = Call(_line_of(text, found.start()), line, before=tuple(map(_program, words[:at])))
            made = _MADE.findall(text, 0, found.start())
            yield from _read_words(call, words[at + 1 :], variables, parse(words[at + 1 :]), made)


def _place_of_badcjobs(words: Sequence[str], parse: Parser) -> int | None:
    """Return the position of the program badcjobs: the first such word before a command; others may be folder names."""
    named = [n for n, word in enumerate(words) if "=" not in word and _BADCJOBS.fullmatch(word.rstrip("}"))]
    if not named or (named[0] and _program(words[0]) not in _LAUNCHING):
        return None
    plainly = _PLAINLY.issuperset(map(_program, words[: named[0]]))
    called = (n for n in named if (said := parse(words[n + 1 :])).command and said.command in words[n + 1 :])
    return next(called, named[0] if plainly else None)


def _program(word: str) -> str:
    """Return a program's name without its folder and version."""
    name = word.rpartition("/")[2].strip("${}").lower()
    return re.sub(r"^python[\d.]*$", "python", name)


def _read_words(
    call: Call, words: Sequence[str], variables: Variables, said: ParsedWords, made: Sequence[str]
) -> Iterator[Call | Mistake]:
    """Yield the parsed call; a source that an earlier line writes (``made``) does not exist yet."""
    hidden = any(re.match(r"\$[{@*]?\w*(?:\[[@*]\])?\}?$", word) for word in said.operands or ())
    if said.wrong is not None and not any("$" in word for word in words):
        what, wrong, right = said.wrong
        better = re.sub(rf"(?<![\w-]){re.escape(wrong)}(?![\w-])", lambda _: right, call.text, count=1)
        helps = " ".join(filter(None, ("badcjobs", said.command, "--help")))
        yield Mistake(f" line {call.line}: {what}", better if right and better != call.text else helps)
    if said.command is None:
        return
    unseen = [bool({*"*?[{"} & {*one}) or one in made for one in said.operands or ()]
    places = [None if no else variables.place_of(one) for no, one in zip(unseen, said.operands or (), strict=True)]
    values = {name: variables.place_of(one) if name in _PATHS else one for name, one in said.values.items()}
    configs = [variables.place_of(one) if is_config_file(one) else one for one in said.values.get("config", ())]
    values["config"] = configs if configs and None not in configs else None
    yield replace(
        call,
        command=said.command,
        values={name: one for name, one in values.items() if one is not None and "$" not in str(one)},
        named=frozenset(said.values),
        hidden=hidden or (said.operands is None and any(word.startswith("$") for word in words)),
        sources=None if said.operands is None or None in places else tuple(one for one in places if one is not None),
    )


# --- the request for the emulation ----------------------------------------------------------------------------------

_UNDERSTOOD = {
    "array", "time", "signal", "output", "error", "open-mode", "job-name", "gpus-per-node", "gres", "gpus",
    "gpus-per-task", "cpus-per-task", "ntasks", "ntasks-per-node", "nodes", "chdir", "export", "requeue", "no-requeue",
}  # fmt: skip
# The script would behave differently without these options, so they are refused, not ignored.
_REFUSED = {
    "exclusive": "ask for the GPUs and cores by number: --gpus-per-node, --cpus-per-task",
    "export-file": "use --export=ALL,NAME=VALUE",
    "gpus-per-socket": "use --gpus-per-node",
    "input": "read the file in the script",
    "tres-per-task": "use --gpus-per-node",
    "wrap": "write the command into the script",
}
_WAYS_TO_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task")


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job requests, as far as one machine can provide it."""

    given: sbatch.Options
    array: sbatch.ArraySpec | None = None
    time_s: int | None = None  # None: no limit
    warning: sbatch.EarlySignal | None = None
    gpus: int = 0
    cpus: int | None = None  # --cpus-per-task
    ntasks: int | None = None
    mem_mib: int | None = None  # not enforced, but in the environment of the task; None: all memory
    exports: Mapping[str, str] = field(default_factory=dict)  # variables that --export sets

    @property
    def ignored(self) -> list[str]:
        """The options without effect here."""
        return sorted(self.given.keys() - _UNDERSTOOD)

    @property
    def cores(self) -> int:
        """The cores of one array task."""
        return (self.cpus or 1) * (self.ntasks or 1)

    @property
    def indices(self) -> tuple[int | None, ...]:
        """The indices of the array; without an array, one task with index None."""
        return (None,) if self.array is None else self.array.indices


def read_request(script: str, options: Sequence[str] = ()) -> JobRequest:
    """Return what a script requests; ``options`` override it. All mistakes are in one message."""
    for wrong in _form_mistakes(script, "SCRIPT"):
        raise BadInput(f"the batch script{wrong.text}", fix=wrong.fix)
    mistakes: list[str] = []
    words = [word for _, line in _option_lines(script) for word in _split(line)]
    given = sbatch.read_options(words, mistakes) | sbatch.read_options(options, mistakes)
    read = sbatch.read_values(given, mistakes)
    exported, exports = sbatch.parse_export(given.get("export", "ALL"))
    if "ALL" not in exported:
        mistakes.append(f"--export={given['export']}: the emulation passes all variables on; write --export=ALL,…")
    request = JobRequest(
        given=given,
        array=read.get("array"),
        time_s=read.get("time"),
        warning=read.get("signal"),
        gpus=sbatch.try_parse(mistakes, sbatch.count_gpus, given) or 0,
        cpus=sbatch.try_parse(mistakes, sbatch.parse_positive, given, "cpus-per-task"),
        ntasks=sbatch.try_parse(mistakes, sbatch.count_tasks, given),
        mem_mib=sbatch.try_parse(mistakes, sbatch.parse_memory, given.get("mem", "0")) or None,
        exports=exports,
    )
    mistakes += [f"--{name}: not supported by the emulation; {_REFUSED[name]}" for name in given if name in _REFUSED]
    ways = [name for name in _WAYS_TO_GPUS if given.get(name)]
    alone = [{one: given[one] for one in given if one == name or one not in ways} for name in ways]
    if len({sbatch.try_parse(mistakes, sbatch.count_gpus, one) for one in alone}) > 1:
        names = " and ".join(f"--{name}={given[name]}" for name in ways)
        mistakes.append(f"{names} do not agree; write only --gpus-per-node")
    if (nodes := given.get("nodes", "1").partition("-")[0]) != "1":
        mistakes.append(f"--nodes={nodes}: the emulation is one machine")
    if len(mistakes) == 1 and re.match(r"--\S+ is not |sbatch has no option", mistakes[0]):
        what, _, why = re.sub("; |: ", "\n", mistakes[0], count=1).partition("\n")
        fix = _option_mistake(mistakes[0], script, "SCRIPT").fix
        raise BadInput(what, why=why or "sbatch would refuse it", fix=fix)
    fix = "badcjobs guide local   (lists the options that have an effect)"
    refuse(mistakes, fix, "options of this job are wrong")
    return request
