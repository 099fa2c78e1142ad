"""HawkEars 1: a preset of the command engine; the program ``hawkears1`` translates between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.model import WorkerPlan
from badcjobs.processes import PYTHON, fingerprint_of
from badcjobs.seams import EngineTraits
from badcjobs.settings import RunSettings
from badcjobs.workers.engine_command import CommandEngine
from badcjobs.workers.engine_hawkears import (
    HAWKEARS_PATTERNS,
    find_python,
    has_real_device,
    hawkears_environment,
    refuse_arguments,
    sized_arguments,
    split_options,
    threads_of,
)
from badcjobs.workers.program_start import EngineStart, HangTimeout

_RESERVED = ("-i", "--input", "-o", "--output", "--rtype", "-d", "--debug", "--filelist", "--recurse")
TRAITS = EngineTraits(error_patterns=HAWKEARS_PATTERNS, reads_places=True, writes_tables=True)


def make_engine(settings: RunSettings, start: EngineStart) -> HawkEars1Engine:
    """Return HawkEars 1 as the settings describe it."""
    return HawkEars1Engine(
        replace(start, args=split_options(start.args)),
        settings.hawkears_python or "python3",
        start.cwd / (settings.hawkears_root or ""),
    )


class HawkEars1Engine(CommandEngine):
    """Runs the user's own HawkEars 1: a folder with ``analyze.py``, and a Python that can run it."""

    name = "hawkears1"
    traits = TRAITS
    wants = 256  # results come only at the end of a batch, so it must not be long
    receives_term = False

    def __init__(self, start: EngineStart, python: str, root: Path) -> None:
        super().__init__(start, "{inputs} {outputs}")
        # It may print only one line per recording, and compiles at its start: allow minutes of silence.
        self.hang_timeout = HangTimeout(least_s=600.0)
        self._python = python
        self._root = root.absolute()

    @property
    def version(self) -> str | None:
        """A fingerprint of its program and models, because it has no version number."""
        files = [self._root / "analyze.py", *(self._root / "data" / "ckpt").glob("*")]
        fingerprint = fingerprint_of(files, content=False)
        return fingerprint and f"analyze.py {fingerprint}"

    def check(self) -> None:
        """Check Python, analyze.py, and that no option is given that badcjobs sets itself."""
        refuse_arguments(self.start, _RESERVED)
        find_python(self._python, self.start)
        script = self._root / "analyze.py"
        if not script.is_file():
            raise NotHere(
                f"{script} does not exist",
                why="HawkEars 1 is a folder with analyze.py, its data and its models",
                fix="badcjobs run … --engine hawkears1 --hawkears-root /path/to/HawkEars",
            )

    def chunks_at_once(self, plan: WorkerPlan) -> int:
        """Return the number of threads of analyze.py."""
        return threads_of(sized_arguments(self.start.args, plan))

    def argv_template(self, plan: WorkerPlan) -> list[str]:
        """Return the command line: our program ``hawkears1``, then analyze.py with its options."""
        args = self.start.args
        device = "cuda" if has_real_device(plan) and not self.start.allow_cpu else "any"
        analyze = [str(self._root), find_python(self._python, self.start), "analyze.py"]
        if not {"-m", "--merge"}.intersection(args):
            analyze += ["--merge", "0"]
        analyze += sized_arguments(args, plan)
        own = [*_literal(PYTHON), "-m", "badcjobs.workers.hawkears1", "{inputs}", "{outputs}", device]
        return [*own, *_literal(analyze)]

    def environment(self, plan: WorkerPlan, scratch: Path) -> dict[str, str]:
        """Return the environment of one worker's programs, with thread limits for its cores."""
        return hawkears_environment(self.start.environ, plan, sized_arguments(self.start.args, plan), scratch)


def _literal(words: Sequence[str]) -> list[str]:
    """Return words for a template, in which braces mark a placeholder."""
    return [word.replace("{", "{{").replace("}", "}}") for word in words]
