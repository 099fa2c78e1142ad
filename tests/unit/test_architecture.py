"""The shape of the package, read from its source: who may import whom, and who may touch the world."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import badcjobs

PACKAGE = Path(badcjobs.__file__).parent
STAGES = (
    "allocation",
    "audio",
    "gpu",
    "manifest",
    "workers",
    "telemetry",
    "store",
    "report",
    "scheduler",
    "plan",
    "preflight",
    "probe",
    "monitor",
    "web",
)
GROUND = {"badcjobs", "badcjobs.model", "badcjobs.seams", "badcjobs.errors", "badcjobs.clock"}

# Entrances besides the command line: other people's Python has nobody above it who reads the environment.
ENTRANCES = {"badcjobs.api.here": "the surroundings of a Python program that uses Recorder or list_devices"}
# Processes of their own that a task starts; they have no command line above them.
PROGRAMS = {
    "badcjobs.recording": "the recorder's process: reads its order from sys.argv, logs and answers on its own pipes",
    "badcjobs.workers.hawkears_worker": "runs in HawkEars' own Python: options from sys.argv, answers on its own pipe",
    "badcjobs.workers.demo_worker": "the demo engine's process: parses --engine-arg, answers on stdout",
}


def module_name(path: Path) -> str:
    parts = ("badcjobs", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(tree: ast.Module, name: str) -> set[str]:
    """Return what of ours a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
    return {one for one in found if one.split(".")[0] == "badcjobs"}


def part(name: str) -> str:
    """Return the stage, cli, or top-level module that a module belongs to."""
    return ".".join(name.split(".")[1:2])


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for every use of the outside world that belongs to the command line."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Attribute):
            words = [f"{ast.unparse(node.value)}.{node.attr}", f".{node.attr}"]
        elif isinstance(node, ast.Name):
            words = [imported.get(node.id, node.id)]
        elif isinstance(node, ast.Import):
            words = [f"import {alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            words = [f"import {node.module}"]
        yield from ((node.lineno, word) for word in words)


CLI_ONLY = {
    "os.environ", "os.environb", "os.getenv", "os.putenv", "sys.exit", "exit", "quit", "SystemExit", "os._exit",
    "sys.argv", "import argparse", "import getopt", "import optparse", "import click", "import typer", "import rich",
    "logging.basicConfig", "logging.StreamHandler", "logging.FileHandler", "import logging.config",
    "import logging.handlers", ".addHandler", ".setLevel",
}  # fmt: skip


def forbidden(tree: ast.Module, words: set[str]) -> list[str]:
    return sorted({f"line {line}: {word}" for line, word in uses(tree) if word in words})


# --- who imports whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) == "model"])
def test_the_nouns_import_nothing_of_ours_but_each_other(name: str) -> None:
    assert {part(one) for one in imports(parsed(name), name)} <= {"model"}


@pytest.mark.parametrize("name", ["seams", "errors", "clock"])
def test_the_ground_stands_on_the_nouns_alone(name: str) -> None:
    full = f"badcjobs.{name}"
    assert imports(parsed(full), full) <= {"badcjobs.model", "badcjobs.errors"}


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) in STAGES])
def test_a_stage_imports_only_itself_and_the_ground(name: str) -> None:
    strangers = {one for one in imports(parsed(name), name) if part(one) != part(name)}
    assert strangers <= GROUND


def test_only_the_program_itself_imports_the_command_line() -> None:
    importers = {name for name in MODULES if any(part(one) == "cli" for one in imports(parsed(name), name))}
    assert {name for name in importers if part(name) != "cli"} == {"badcjobs.__main__"}


def test_every_stage_of_the_design_is_there_and_has_no_unnamed_corner() -> None:
    assert {part(name) for name in MODULES} >= set(STAGES)
    nobody_named = {"core", "util", "utils", "helpers", "common", "misc"}
    assert not {name for name in MODULES if name.split(".")[-1] in nobody_named}


# --- who touches the world --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in MODULES if part(name) != "cli" and name not in (*PROGRAMS, *ENTRANCES)]
)
def test_only_the_command_line_reads_the_environment_exits_parses_arguments_or_sets_up_logging(name: str) -> None:
    assert forbidden(parsed(name), CLI_ONLY) == []


@pytest.mark.parametrize("name", sorted(ENTRANCES))
def test_an_entrance_reads_the_environment_and_nothing_else(name: str) -> None:
    assert forbidden(parsed(name), CLI_ONLY - {"os.environ"}) == []


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_of_its_own_reads_no_environment_and_never_exits_by_hand(name: str) -> None:
    allowed = {"sys.argv", "import argparse", "logging.basicConfig"}
    assert forbidden(parsed(name), CLI_ONLY - allowed) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != "badcjobs.clock"])  # it is the clock
def test_nobody_but_the_clock_asks_for_the_wall_time(name: str) -> None:
    wall_time = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow", ".utcnow"}
    assert forbidden(parsed(name), wall_time) == []


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) != "cli" and name not in PROGRAMS])
def test_only_the_command_line_prints(name: str) -> None:
    prints = [
        f"line {node.lineno}"
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        and not any(keyword.arg == "file" for keyword in node.keywords)
    ]  # fmt: skip
    assert prints == []
    assert forbidden(parsed(name), {"sys.stdout", "sys.stderr"}) == []


def test_these_rules_see_what_they_forbid() -> None:
    tree = ast.parse(
        "import os, sys, argparse\nfrom os import environ as e\nfrom sys import exit\nimport logging\n"
        "x = os.environ['A']\ny = e['A']\nexit(1)\nlogging.getLogger('a').addHandler(x)\n"
        "def f():\n    from badcjobs.store.merging import merge\n"
        "    from badcjobs import task\n    import badcjobs.cli.run\n"
    )
    assert forbidden(tree, CLI_ONLY) == [
        "line 1: import argparse", "line 5: os.environ", "line 6: os.environ", "line 7: sys.exit",
        "line 8: .addHandler",
    ]  # fmt: skip
    assert imports(tree, "badcjobs.x") == {"badcjobs.store.merging.merge", "badcjobs.task", "badcjobs.cli.run"}
    assert imports(ast.parse("from . import plan\nfrom ..store.merging import merge"), "badcjobs.workers.x") == {
        "badcjobs.workers.plan",
        "badcjobs.store.merging.merge",
    }


# --- what every file says about itself --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_why_it_exists(name: str) -> None:
    assert ast.get_docstring(parsed(name))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_public_function_and_class_says_in_one_sentence_what_it_does(name: str) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    silent = [
        f"line {node.lineno}: {node.name}"
        for node in parsed(name).body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    endless = [
        f"line {node.lineno}: {node.name}"
        for node in ast.walk(parsed(name))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and not text.splitlines()[0].endswith(".")
    ]
    assert silent == []
    assert endless == []


# --- a quick answer ---------------------------------------------------------------------------------------------------

HEAVY = ("pynvml", "submitit", "sqlite_utils", "psutil", "sqlite3", "numpy", "bokeh", "starlette", "uvicorn")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['badcjobs', '--help']\nfrom badcjobs.cli import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print(sorted(set({HEAVY!r}) & set(sys.modules)), 'badcjobs.cli.run' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Usage: badcjobs" in done.stdout
    assert done.stderr == "[] True\n"
    assert done.returncode == 0


def test_help_answers_in_at_most_three_times_the_time_of_importing_typer() -> None:
    def time_s(*arguments: str) -> float:
        """Return the time it has a core for: how long it waits for one, others decide."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(time_s("-c", "import typer"), time_s("-m", "badcjobs", "--help")) for _ in range(6)]
    typer_s, help_s = (min(times) for times in zip(*pairs, strict=True))
    assert help_s <= 3 * typer_s
