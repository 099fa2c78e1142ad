"""Read a job script: its ``#SBATCH`` lines, its plain assignments and the lines that call badcjobs; nothing is run.

This is not a shell. It reads our templates, the script in the README and others that are as plain. A line with several
commands is not read, nor is a script with a here-document; a variable that is assigned twice is not known.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.devices.allocation import sbatch_options
from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.project import is_config_file
from badcjobs.seams import Environ
from badcjobs.settings import JOB_SCRIPTS, refuse

CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter"}
SPREADING = {"srun", "mpirun", "mpiexec"}
_PLAIN = {"exec", "command", "nohup", "python"}

_SBATCH = re.compile(r"^[ \t]*#[ \t]*SBATCH[ \t]+(?P<options>-.*?)[ \t\r]*$", re.M)
_END_OF_OPTIONS = re.compile(r"^[ \t]*[^#\s]", re.M)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)")
_OPTION = re.compile(r"(?<![\w-])--?(?P<name>[A-Za-z][\w-]*)(?:=\S*)?")

_LOGICAL_LINE = re.compile(r"(?:[^\\\n]|\\.)+", re.S)
_ASSIGNMENT = re.compile(r"^[ \t]*(?:export[ \t]+)?(?P<name>\w+)=(?P<value>[^(\n].*|)$", re.M)
_DEFAULT = re.compile(r'^: "\$\{(?P<name>\w+):=(?P<value>[^\\\n]*)\}"$', re.M)
_ARRAY = re.compile(r"^(\w+)=\(([^()]*)\)", re.M)
_READ_ARRAY = re.compile(r'^read -r -a (\w+) <<<"\$\{(\w+):-\}"$', re.M)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ALL_OF_ARRAY = re.compile(r"\$\{(\w+)\[@\]\}")
_ALONE = re.compile(r"\$\{?[\w@*]+(?:\[[@*]\])?\}?")  # a word that is only a variable
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`]*\"|(?<!\S)#.*")  # and comments
_OPERATOR = re.compile(r"[;&|`<>]|\$\(")  # several commands, the output of one, or a redirection
_NAMED = re.compile(r"^[^#\n]*badcjobs", re.I | re.M)
_MODULES = re.compile(r"(?:^|[;&|])[ \t]*(?:module|ml)[ \t]+(?:load|add)[ \t]+([^\n;&|>#]+)", re.M)
_SETTING_UP = re.compile(r"^[ \t]*((?:source|\.|conda|mamba|micromamba|spack|eval)[ \t].*)", re.M)
_MOVING = re.compile(r"\b(?:cd|pushd)\b(?![ \t]+\"?\$\{?SLURM_SUBMIT_DIR)")
_TRAP = re.compile(r"^[^#\n]*\btrap\b", re.M)
_TMPDIR = re.compile(r"^[^#\n]*(?:\bTMPDIR=|\bunset\b.*\bTMPDIR\b)", re.M)
_TEMPLATE_VARIABLES = ("SOURCE", "OUT", "IMAGE")  # our templates stop without them
_OF_THE_JOB = ("SLURM", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")
_PATHS = ("out", "root", "hawkears_root")
Words = Sequence[str]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a script."""

    text: str
    fix: str  # a line to paste


class WrongWord(NamedTuple):
    """A word of the command line that badcjobs refuses."""

    message: str
    fix: str  # the right word, or a line to paste
    word: str = ""  # the one to replace


@dataclass(frozen=True, slots=True)
class ParsedWords:
    """The parsed words after ``badcjobs``; values may have unknown variables."""

    command: str | None = None  # if its name is misspelled: the nearest command
    values: dict[str, Any] = field(default_factory=dict)  # "engine_arg" → its value; True for a flag
    operands: tuple[str, ...] = ()
    wrong: WrongWord | None = None


Parser = Callable[[Words], ParsedWords]


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


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A job script, as far as it can be read."""

    name: str
    options: dict[str, str]  # of sbatch, under their long names
    asked: sbatch.Asked = field(default_factory=sbatch.Asked)
    signal: sbatch.EarlySignal | None = None
    calls: tuple[Call, ...] = ()
    mistakes: tuple[Mistake, ...] = ()  # options that sbatch would refuse
    ignored: tuple[Mistake, ...] = ()  # lines that look like options, but are comments for sbatch
    wrong_calls: tuple[Mistake, ...] = ()  # calls that badcjobs would refuse
    unread: tuple[int, ...] = ()  # lines that name badcjobs, if no call can be read
    modules: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()  # the variables of our templates that have no value yet
    set_up_by: str | None = None  # a line that may add programs to PATH which cannot be found here
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
        place = script.parent if isinstance(error, FileNotFoundError) else script
        look = shell_line("ls", "-l", place)
        raise BadInput(f"the job script {script} cannot be read", why=str(error), fix=look) from error


def read_script(text: str, name: str, environ: Environ, cwd: str, parse: Parser, options: Words = ()) -> BatchScript:
    """Read a script; ``parse`` parses the words after badcjobs.

    ``options`` are those on the command line of sbatch, which override the environment, which overrides the script.
    """
    wrong: list[str] = []
    requested = sbatch.read_options(_option_words(text))
    requested |= sbatch_options(environ)
    requested |= sbatch.read_options(options)
    values = sbatch.read_values(requested, wrong)
    asked = sbatch.read_asked(requested, values, wrong)

    plain = _HERE_DOCUMENT.split(text, maxsplit=1)[0]
    variables = _Variables(plain, requested, environ, cwd)
    lines = [_read_call(number, line, variables, parse) for number, line in _logical_lines(plain)]
    calls = [line for line in lines if isinstance(line, Call)]
    wrong_calls = [line for line in lines if isinstance(line, Mistake)]
    unread: list[int] = []
    if not calls and not wrong_calls:
        unread = [_line_of(text, named.end()) for named in _NAMED.finditer(text)]
    script = BatchScript(
        name=name,
        options=requested,
        asked=asked,
        signal=values.get("signal"),
        calls=tuple(calls),
        mistakes=(*_form_mistakes(text, name), *(_option_mistake(message, text, name) for message in wrong)),
        ignored=tuple(_ignored_options(plain)),
        wrong_calls=tuple(wrong_calls),
        unread=tuple(unread),
        modules=tuple(module for module in _modules_of(text) if module[0].isalpha()),
        unset=tuple(variable for variable in _TEMPLATE_VARIABLES if variables.values.get(variable) == ""),
        set_up_by=next(iter(_SETTING_UP.findall(text)), None),
        traps_signals=_TRAP.search(text) is not None,
        sets_tmpdir=_TMPDIR.search(text) is not None,
        sets_cache="XDG_CACHE_HOME=" in text,
    )
    return script if _needs_gpu(script) else replace(script, asked=replace(asked, gpus_per_task=None))


def _needs_gpu(script: BatchScript) -> bool:
    """Say whether a task needs a GPU for certain, or asks for some."""
    if script.asked.gpus_per_task != 0:
        return True
    start = script.start
    return start is not None and not start.hidden and start.named.isdisjoint({"cpu_workers", "config"})


def _modules_of(text: str) -> list[str]:
    return " ".join(_MODULES.findall(text)).split()


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


# --- the options of sbatch ------------------------------------------------------------------------------------------


def _option_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each ``#SBATCH`` line before the first command."""
    last = _END_OF_OPTIONS.search(text)
    end = last.start() if last else len(text)
    for line in _SBATCH.finditer(text, 0, end):
        if line[0].startswith("#SBATCH"):
            yield _line_of(text, line.start()), line["options"]


def _option_words(text: str) -> list[str]:
    return [word for _, line in _option_lines(text) for word in _split(line)]


def _split(line: str) -> list[str]:
    """Split a line into words, as a shell does; none if a quotation mark is not closed."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def _ignored_options(text: str) -> Iterator[Mistake]:
    """Yield the lines that look like options, but are not at the beginning of a line or before the first command."""
    read = dict(_option_lines(text))
    for line in _SBATCH.finditer(text):
        number = _line_of(text, line.start())
        if number not in read:
            yield Mistake(
                f" line {number}: sbatch reads this as a comment: an option starts with #SBATCH at the beginning of a"
                " line, before the first command",
                f"#SBATCH {line['options']}   (above the first command; or ##SBATCH for a comment)",
            )


def _form_mistakes(text: str, name: str) -> Iterator[Mistake]:
    """Yield the mistakes that keep sbatch from reading the options of a script."""
    file = shell_line(Path(name))
    if not text.startswith("#!"):
        interpreter = f"sed -i '1i #!/bin/bash' {file}"
        yield Mistake(": its first line is not #! with an interpreter, so sbatch refuses it", interpreter)
    if "\r\n" in text:
        yield Mistake(": it has Windows line ends (CRLF), so sbatch refuses it", rf"sed -i 's/\r$//' {file}")
    for number, line in _option_lines(text):
        if not _split(line):
            yield Mistake(f" line {number}: a quotation mark is not closed", _test_line(name))


def _option_mistake(message: str, text: str, name: str) -> Mistake:
    """Return a mistake in the value of an option, with its line in the script."""
    for number, line in _option_lines(text):
        if any(word in message for word in _split(line)):
            return Mistake(f" line {number}: {message}", _test_line(name))
    return Mistake(f": {message}", _test_line(name))


def _test_line(name: str) -> str:
    return f"sbatch --test-only {shell_line(Path(name))}   (shows the message of sbatch)"


# --- the lines that call badcjobs -----------------------------------------------------------------------------------


class _Variables:
    """The variables and arrays of a script, from its environment and from assignments as our templates have them."""

    def __init__(self, text: str, given: sbatch.Options, environ: Environ, cwd: str) -> None:
        chdir = given.get("chdir", "")
        exports = sbatch.parse_export(given.get("export", ""))
        self.values = {name: value for name, value in environ.items() if not name.startswith(_OF_THE_JOB)}
        self.values |= exports | {"SLURM_SUBMIT_DIR": cwd, "PWD": posixpath.join(cwd, chdir)}
        self._text = text
        self._folder = None if _MOVING.search(text) else chdir  # None: the script changes its folder

        for default in _DEFAULT.finditer(text):
            self.values[default["name"]] = self.values.get(default["name"]) or default["value"]
        assignments = list(_ASSIGNMENT.finditer(text))
        times_assigned = Counter(assignment["name"] for assignment in assignments)
        for assignment in assignments:
            name = assignment["name"]
            self.values.pop(name, None)
            first, *rest = _split(assignment["value"]) or [""]
            value = self.value_of(first)
            if times_assigned[name] == 1 and not rest and value is not None:
                self.values[name] = value

        self._arrays = {name: _split(body) for name, body in _ARRAY.findall(text)}
        for name, variable in _READ_ARRAY.findall(text):
            self._arrays[name] = self.values.get(variable, "").split()

    def value_of(self, word: str) -> str | None:
        """Replace variables by their values; None: one of them is unknown."""
        expanded = _VARIABLE.sub(lambda match: self.values.get(match[1] or match[2]) or match[0], word)
        return None if "$" in expanded or "`" in expanded else expanded

    def words_of(self, line: str) -> list[str]:
        """Return the words of a command: arrays expanded, known variables replaced."""
        expanded: list[str] = []
        for word in _split(line):
            array = _ALL_OF_ARRAY.fullmatch(word)
            if array is not None and array[1] in self._arrays:
                expanded += self._arrays[array[1]]
            else:
                expanded.append(word)
        while expanded and re.match(r"\w+=", expanded[0]):
            expanded.pop(0)
        return [self.value_of(word) or word for word in expanded]

    def path_of(self, path: str) -> str | None:
        """Return a path relative to the folder of submission; None: not known."""
        if "$" in path or (self._folder is None and not posixpath.isabs(path)):
            return None
        return posixpath.join(self._folder or "", path)

    def source_of(self, operand: str) -> str | None:
        """Return the path of a source; None: it is a pattern, or the script itself writes it."""
        if not {"*", "?", "[", "{"}.isdisjoint(operand) or re.search(rf">\s*[\"']?{re.escape(operand)}", self._text):
            return None
        return self.path_of(operand)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, with its continuations; none if it is not a shell script."""
    interpreter = text.partition("\n")[0]
    if interpreter.startswith("#!") and "sh" not in interpreter:
        return
    for line in _LOGICAL_LINE.finditer(text):
        yield _line_of(text, line.start()), re.sub(r"\s*\\\r?\n\s*", " ", line[0]).strip()


def _read_call(number: int, line: str, variables: _Variables, parse: Parser) -> Call | Mistake | None:
    """Return the call of badcjobs in a line, or its mistake; a line with several commands is not read."""
    if line.startswith("#") or _OPERATOR.search(_QUOTED.sub("", line)):
        return None
    command = variables.words_of(line)
    for at, word in enumerate(command):
        if _program(word) != "badcjobs":
            continue
        after = command[at + 1 :]
        before = tuple(map(_program, command[:at]))
        launcher = next((name for name in before if name not in _PLAIN and not name.startswith("-")), None)
        if launcher is not None and launcher not in CONTAINERS | SPREADING:
            return None
        parsed = parse(after)
        if parsed.wrong is not None and "$" in " ".join(after):
            return None  # a variable may have the rest of an option
        if parsed.wrong is not None and (launcher is None or parsed.command in after):
            fix = parsed.wrong.fix
            if parsed.wrong.word:
                fix = line.replace(parsed.wrong.word, fix, 1)
            return Mistake(f" line {number}: {parsed.wrong.message}", fix)
        if parsed.command is not None and parsed.command in after:
            return _call_of(Call(number, line, parsed.command, before), parsed, variables)
    return None


def _call_of(call: Call, parsed: ParsedWords, variables: _Variables) -> Call:
    """Return a call with its options and sources."""
    values = {}
    for name, value in parsed.values.items():
        if name in _PATHS:
            value = variables.path_of(value)
        elif name == "config":
            value = [variables.path_of(config) if is_config_file(config) else config for config in value]
            value = None if None in value else value
        if value is not None and "$" not in str(value):
            values[name] = value
    sources = [variables.source_of(operand) for operand in parsed.operands]
    return replace(
        call,
        values=values,
        named=frozenset(parsed.values),
        hidden=any(map(_ALONE.fullmatch, parsed.operands)),
        sources=None if None in sources else tuple(filter(None, sources)),
    )


def _program(word: str) -> str:
    """Return a program's name without its folder and version."""
    name = word.rpartition("/")[2].strip("${}").lower()
    return re.sub(r"^python[\d.]*$", "python", name)


# --- the request for the emulation ----------------------------------------------------------------------------------

_UNDERSTOOD = {
    "array", "time", "signal", "output", "error", "open-mode", "job-name", "gpus-per-node", "gres", "gpus",
    "gpus-per-task", "cpus-per-task", "mem", "ntasks", "ntasks-per-node", "nodes", "chdir", "export", "requeue",
    "no-requeue",
}  # fmt: skip
# The script would behave differently without these options, so they are refused, not ignored.
_REFUSED = ("exclusive", "export-file", "gpus-per-socket", "input", "tres-per-task", "wrap")


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a job requests, as far as one machine can provide it."""

    given: sbatch.Options
    asked: sbatch.Asked
    array: sbatch.ArraySpec | None = None
    warning: sbatch.EarlySignal | None = None

    @property
    def ignored(self) -> list[str]:
        """The options without effect here."""
        return sorted(self.given.keys() - _UNDERSTOOD)

    @property
    def parallel(self) -> int | None:
        """How many tasks may run at a time; None: no limit."""
        return None if self.array is None else self.array.parallel

    @property
    def gpus(self) -> int:
        """The GPUs of one array task."""
        return self.asked.gpus_per_task or 0

    @property
    def ntasks(self) -> int | None:
        """The number of processes that srun would start; None: not given."""
        return sbatch.count_tasks(self.given)

    @property
    def cores(self) -> int:
        """The cores of one array task."""
        return self.asked.cpus or self.ntasks or 1

    @property
    def indices(self) -> tuple[int | None, ...]:
        """The indices of the array; without an array, one task with index None."""
        return (None,) if self.array is None else self.array.indices


def read_request(script: str, options: Words = ()) -> JobRequest:
    """Return what a script requests; ``options`` override it. All mistakes are in one message."""
    for mistake in _form_mistakes(script, "SCRIPT"):
        raise BadInput(f"the batch script{mistake.text}", fix=mistake.fix)
    mistakes: list[str] = []
    requested = sbatch.read_options(_option_words(script)) | sbatch.read_options(options)
    values = sbatch.read_values(requested, mistakes)
    asked = sbatch.read_asked(requested, values, mistakes)
    if "ALL" not in requested.get("export", "ALL").split(","):
        mistakes.append(f"--export={requested['export']}: the emulation passes all variables on; write --export=ALL,…")
    mistakes += [f"--{name}: not supported by the emulation" for name in requested if name in _REFUSED]
    if asked.nodes not in (None, 1):
        mistakes.append(f"--nodes={requested['nodes']}: the emulation is one machine")
    refuse(mistakes, "badcjobs guide local   (lists the options that have an effect)", "options of this job are wrong")
    return JobRequest(requested, asked, values.get("array"), values.get("signal"))
