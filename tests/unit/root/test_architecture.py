"""The shape of the package, read from its source: who may import whom, and who may touch the world."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import badcjobs

PACKAGE = Path(badcjobs.__file__).parent

# The rooms, from the roof down. A room imports only rooms on lower lines; rooms on one line do not import each other.
HOUSE = (
    ("cli", "api"),
    ("planning", "live"),
    ("cluster",),
    ("task",),
    ("report",),
    ("workers", "telemetry"),
    ("store",),
    ("devices", "sources"),
    ("run_toml", "project", "settings", "paths", "processes"),
    ("seams", "errors", "clock"),
    ("model",),
)
GROUND = {name for line in HOUSE[-3:] for name in line}  # these may stand on each other
FLOOR = {room: number for number, line in enumerate(HOUSE) for room in line}
FACADE = {"badcjobs", "badcjobs.__main__"}  # names for other people's Python, and python -m badcjobs

# Entrances besides the command line: Python programs that use Recorder or list_devices have no cli above them.
ENTRANCES = {"badcjobs.api.python"}
# Processes of their own that a task starts; they parse their own arguments and answer on their own pipes.
PROGRAMS = {
    "badcjobs.telemetry.recorder_process",
    "badcjobs.workers.hawkears_worker",
    "badcjobs.workers.hawkears1",
    "badcjobs.workers.demo_worker",
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


def room(name: str) -> str:
    """Return the room or ground module that a module belongs to."""
    return ".".join(name.split(".")[1:2])


def dotted(node: ast.expr) -> str:
    """Return a.b.c for such an expression, and nothing for others."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for every name that a module uses: a.b, .b, and what an import calls it."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        words = []
        if isinstance(node, ast.Attribute):
            words = [dotted(node), f".{node.attr}"]
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


@cache
def used(name: str) -> frozenset[tuple[int, str]]:
    return frozenset(uses(parsed(name)))


def forbidden(used: Iterable[tuple[int, str]], words: set[str]) -> list[str]:
    return sorted({f"line {line}: {word}" for line, word in used if word in words})


def violations(rule: Callable[[str], list[str]], modules: Iterable[str] = MODULES) -> list[str]:
    return [f"{name}: {found}" for name in modules for found in rule(name)]


# --- who imports whom -------------------------------------------------------------------------------------------------


def imports_upwards(name: str) -> list[str]:
    def allowed(other: str) -> bool:
        if other == "badcjobs" or room(other) == room(name) or {room(name), room(other)} <= GROUND:
            return True
        return FLOOR[room(other)] > FLOOR[room(name)]

    return sorted(other for other in imports(parsed(name), name) if not allowed(other))


def test_a_room_imports_only_rooms_below_it() -> None:
    assert {room(name) for name in MODULES if name not in FACADE} == set(FLOOR)
    assert violations(imports_upwards, (name for name in MODULES if name not in FACADE)) == []


# --- who touches the world --------------------------------------------------------------------------------------------


def test_only_the_command_line_reads_the_environment_exits_parses_arguments_or_sets_up_logging() -> None:
    def rule(name: str) -> list[str]:
        allowed = {"os.environ"} if name in ENTRANCES else set()
        if name in PROGRAMS:
            allowed = {"sys.argv", "import argparse", "logging.basicConfig"}
        return forbidden(used(name), CLI_ONLY - allowed)

    assert violations(rule, (name for name in MODULES if room(name) != "cli")) == []


def test_only_the_clock_reads_the_wall_time() -> None:
    wall_time = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow", ".utcnow"}
    others = (name for name in MODULES if name != "badcjobs.clock")
    assert violations(lambda name: forbidden(used(name), wall_time), others) == []


def test_only_the_command_line_prints() -> None:
    def rule(name: str) -> list[str]:
        prints = [
            f"line {node.lineno}: print"
            for node in ast.walk(parsed(name))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            and not any(keyword.arg == "file" for keyword in node.keywords)
        ]  # fmt: skip
        return prints + forbidden(used(name), {"sys.stdout", "sys.stderr"})

    assert violations(rule, (name for name in MODULES if room(name) != "cli" and name not in PROGRAMS)) == []


def test_these_rules_see_what_they_forbid() -> None:
    tree = ast.parse(
        "import os, sys, argparse\nfrom os import environ as e\nfrom sys import exit\nimport logging\n"
        "x = os.environ['A']\ny = e['A']\nexit(1)\nlogging.getLogger('a').addHandler(x)\n"
        "def f():\n    from badcjobs.store import schema\n"
        "    from badcjobs import task\n    import badcjobs.cli.run\n"
    )
    assert forbidden(uses(tree), CLI_ONLY) == [
        "line 1: import argparse", "line 5: os.environ", "line 6: os.environ", "line 7: sys.exit",
        "line 8: .addHandler",
    ]  # fmt: skip
    assert imports(tree, "badcjobs.x") == {"badcjobs.store.schema", "badcjobs.task", "badcjobs.cli.run"}
    relative = ast.parse("from . import recorder\nfrom ..store import schema")
    assert imports(relative, "badcjobs.telemetry.x") == {"badcjobs.telemetry.recorder", "badcjobs.store.schema"}


# --- tests ------------------------------------------------------------------------------------------------------------


def test_tests_see_rooms_and_the_public_names_but_no_modules_and_nothing_private() -> None:
    """So a function may move or be renamed inside its room, and a module be split, and no test changes."""

    def rule(tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names if one.name.startswith("badcjobs."))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("badcjobs", "rooms"):
                names = [one.name for one in node.names]
                known = badcjobs.__all__ if node.module == "badcjobs" else names
                yield from (name for name in names if name not in known or (name.startswith("_") and name[1] != "_"))
                if str(node.module).startswith("badcjobs."):
                    yield str(node.module)

    files = sorted(one for one in Path(__file__).parents[2].rglob("*.py") if one.name != "test_preflight.py")
    assert [f"{path.name}: {found}" for path in files for found in rule(ast.parse(path.read_text()))] == []
    wrong = [
        "from badcjobs.store import x",
        "import badcjobs.cli.run",
        "from rooms.store import _x",
        "from badcjobs import y",
    ]
    assert [*rule(ast.parse("\n".join(wrong)))] == ["badcjobs.store", "badcjobs.cli.run", "_x", "y"]


# --- what every file says about itself --------------------------------------------------------------------------------


def test_every_module_public_function_and_class_says_in_one_sentence_what_it_does() -> None:
    assert [name for name in MODULES if not ast.get_docstring(parsed(name))] == []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def rule(name: str) -> list[str]:
        tree = parsed(name)
        public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
        silent = [node for node in public if not ast.get_docstring(node)]
        documented = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node)]
        endless = [node for node in documented if not (ast.get_docstring(node) or "").splitlines()[0].endswith(".")]
        return [f"line {node.lineno}: {node.name}" for node in (*silent, *endless)]

    assert violations(rule) == []


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
    assert done.stderr == "[] False\n"
    assert done.returncode == 0
