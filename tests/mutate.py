"""Change the product in one small place at a time and see whether the tests notice; run by hand, not in CI.

    python tests/mutate.py badcjobs/workers/policy.py badcjobs/store/merge.py -n 20 --seed 7
    python tests/mutate.py badcjobs/report/*.py -n 30 -- tests/unit/report tests/flow/test_behaviour_pack.py

Without tests after ``--``, those of the files' rooms and the behaviour pack are run, and for files that hardly any unit
test calls, those of whole programs. Prints every change that nothing noticed, and the share that was caught.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "//",
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
ENGINE = ("tests/contract/test_engine.py",)
KILLS = ("tests/faults/test_kill_one.py",)
WHOLE_PROGRAMS = {  # files of which unit tests call less than a third → the tests that do
    "before": ("tests/flow/test_planning_commands.py",),
    "engine_command": ENGINE, "hawkears1": ENGINE, "hawkears_worker": ENGINE,
    "live": ("tests/flow/test_live_commands.py",), "machine": ("tests/flow/test_devices.py",),
    "recorder_process": KILLS, "records": KILLS,
    "results": ("tests/flow/test_merge_command.py", "tests/flow/test_report_command.py"),
    "run": ("tests/flow/test_run_settings.py",), "run_task": (*KILLS, "tests/flow/test_run_signals.py"),
    "sidecar": (*KILLS, "tests/flow/test_telemetry.py"), "stream_session": ENGINE,
    "startup": ("tests/flow/test_run_signals.py", "tests/faults/test_twins.py"),
    "submit": ("tests/flow/test_submit_stories.py",),
}  # fmt: skip
SPEECH = ("log", "_log", "logger", "warnings")  # what is only said may be left out


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    path: Path
    line: int
    start: int  # bytes of the source
    end: int
    text: str

    def __str__(self) -> str:
        old = self.path.read_bytes()[self.start : self.end].decode()
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}: {' '.join(old.split())[:90]}  →  {self.text[:90]}"


def mutations(path: Path) -> list[Mutation]:
    """Return every change that we know of for a file."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    offsets = [0, *accumulate(map(len, lines))]

    def place(node: Any) -> tuple[int, int]:
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    def text_of(node: ast.AST) -> str:
        return source[slice(*place(node))].decode()

    nodes = working_nodes(ast.parse(source))
    return [
        Mutation(path, target.lineno, *place(target), text)
        for node in nodes for target, text in changes(node, text_of)
    ]  # fmt: skip


def working_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that do something: no annotations, docstrings, imports or lines of the log."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
                continue
            if isinstance(child, ast.Expr) and (isinstance(child.value, ast.Constant) or is_speech(child.value)):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            yield child
            yield from working_nodes(child)


def is_speech(node: ast.expr) -> bool:
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in SPEECH


def changes(node: ast.AST, text_of: Callable[[ast.AST], str]) -> Iterator[tuple[Any, str]]:
    """Return what a node may become."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right) if type(
            op
        ) in OTHER and not (isinstance(node, ast.BinOp) and is_text(left, right)):
            yield node, f"({text_of(left)} {OTHER[type(op)]} {text_of(right)})"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield node, "(" + other.join(text_of(value) for value in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({text_of(operand)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() as value):
            yield node, str(value + 1)
        case ast.Constant(value=float() as value):
            yield node, str(value * 2 or 1.0)
        case ast.Call(func=ast.Name(id=name) as func) if name in OTHER_NAME:
            yield func, OTHER_NAME[name]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({text_of(test)}))"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield value, "None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield node, "pass"
        case ast.Continue():
            yield node, "break"
        case ast.Break():
            yield node, "continue"


def is_text(*nodes: ast.expr) -> bool:
    """Return whether an operand is a text or a list, for which the other operator is only a crash."""
    kinds = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(isinstance(node, kinds) or isinstance(getattr(node, "value", None), str) for node in nodes)


def make_copy(folder: Path) -> Path:
    """Copy the repository by hard links."""
    folder.chmod(0o755)  # some tests work as the user nobody
    kept_back = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache", "node_modules")
    return Path(shutil.copytree(REPOSITORY, folder / "repository", copy_function=os.link, ignore=kept_back))


def passes(copy: Path, tests: list[str], timeout_s: float | None = None) -> bool:
    """Return whether the tests pass in a copy."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        return subprocess.run(words, cwd=copy, env=env, capture_output=True, timeout=timeout_s).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def is_noticed(copy: Path, mutation: Mutation, tests: list[str], timeout_s: float) -> bool:
    source = mutation.path.read_bytes()
    changed = copy / mutation.path.relative_to(REPOSITORY)
    changed.unlink()
    changed.write_bytes(source[: mutation.start] + mutation.text.encode() + source[mutation.end :])
    try:
        return not passes(copy, tests, timeout_s)
    finally:
        changed.write_bytes(source)


def tests_of(path: Path) -> Iterator[str]:
    room = f"tests/unit/{path.resolve().parent.name}"
    yield room if (REPOSITORY / room).is_dir() else "tests/unit/root"
    yield from WHOLE_PROGRAMS.get(path.stem, ())


def main() -> int:
    words = [*sys.argv[1:], "--"]
    before, after = words[: words.index("--")], words[words.index("--") + 1 : -1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="product files to change")
    parser.add_argument("-n", type=int, default=20, help="how many changes to try (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="another number chooses other places")
    args = parser.parse_args(before)
    of_files = {test for path in args.files for test in tests_of(path)}
    tests = after or [*sorted(of_files), "tests/flow/test_behaviour_pack.py"]
    every = [mutation for path in args.files for mutation in mutations(path.resolve())]
    chosen = random.Random(args.seed).sample(every, min(args.n, len(every)))
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy, started_s = make_copy(Path(folder)), time.monotonic()
        if not passes(copy, tests):
            print(f"the tests fail without any change: {' '.join(tests)}")
            return 2
        timeout_s = 60 + 5 * (time.monotonic() - started_s)
        for number, mutation in enumerate(chosen, 1):
            if not is_noticed(copy, mutation, tests, timeout_s):
                survivors += 1
                print(f"SURVIVED  {mutation}", flush=True)
            if number % 10 == 0:
                print(f"  … {number} of {len(chosen)} tried, {number - survivors} caught", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught ({1 - survivors / len(chosen):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
