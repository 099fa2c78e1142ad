"""Change the product in one small place at a time and see whether the tests notice; run by hand, not in CI.

    python tests/mutate.py badcjobs/workers/retry.py badcjobs/store/merge.py -n 20 --seed 7
    python tests/mutate.py badcjobs/report/*.py -n 30 -- tests/unit/report tests/flow/test_behaviour_pack.py

Without tests after ``--``, those of the file's room and the behaviour pack are run. Prints every change that nothing
noticed, and the share that was caught.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OTHER = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "//",
}  # fmt: skip
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPEECH = ("log", "_log", "logger", "warnings")  # what is only said may be left out


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    path: Path
    line: int
    start: int  # bytes of the source
    end: int
    text: str

    def describe(self) -> str:
        old = self.path.read_bytes()[self.start : self.end].decode()
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}: {' '.join(old.split())[:90]}  →  {self.text[:90]}"


def mutations(path: Path) -> list[Mutation]:
    """Return every change that we know of for a file."""
    source = path.read_bytes()
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    def text_of(node: ast.expr | ast.stmt) -> str:
        start, end = place(node)
        return source[start:end].decode()

    found = []
    for node in working_nodes(tree):
        for target, text in changes(node, text_of):
            found.append(Mutation(path, target.lineno, *place(target), text))
    return found


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


def changes(node: ast.AST, text_of) -> Iterator[tuple[ast.expr | ast.stmt, str]]:  # type: ignore[no-untyped-def]
    """Return what a node may become."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OTHER:
            yield node, f"({text_of(left)} {OTHER[type(op)]} {text_of(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER and not is_text(left, right):
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
    return any(isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple)) for node in nodes) or any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes
    )


class Copy:
    """A copy of the repository, by hard links, of which one file at a time is different."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # some tests work as the user nobody
        self._folder = folder / "repository"
        kept_back = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache", "node_modules")
        shutil.copytree(REPOSITORY, self._folder, copy_function=os.link, ignore=kept_back)

    def run(self, tests: list[str], timeout_s: float | None) -> bool:
        """Return whether the tests pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        env = {**os.environ, "PYTHONPATH": str(self._folder)}
        try:
            done = subprocess.run(
                [*command, "--tb=no", *tests], cwd=self._folder, env=env, capture_output=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def is_noticed(self, mutation: Mutation, tests: list[str], timeout_s: float) -> bool:
        source = mutation.path.read_bytes()
        changed = self._folder / mutation.path.relative_to(REPOSITORY)
        changed.unlink()
        changed.write_bytes(source[: mutation.start] + mutation.text.encode() + source[mutation.end :])
        try:
            return not self.run(tests, timeout_s)
        finally:
            changed.write_bytes(source)


def tests_of(path: Path) -> list[str]:
    room = REPOSITORY / "tests" / "unit" / path.parent.name
    own = room if room.is_dir() else REPOSITORY / "tests" / "unit" / "root"
    return [str(own.relative_to(REPOSITORY)), "tests/flow/test_behaviour_pack.py"]


def main() -> int:
    own = sys.argv[1:]
    tests = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="product files to change")
    parser.add_argument("-n", type=int, default=20, help="how many changes to try (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="another number chooses other places")
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    every = [mutation for path in args.files for mutation in mutations(path.resolve())]
    chosen = random.Random(args.seed).sample(every, min(args.n, len(every)))
    clean_s: dict[tuple[str, ...], float] = {}
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Copy(Path(folder))
        for number, mutation in enumerate(chosen, 1):
            asked = tests or tests_of(mutation.path)
            if tuple(asked) not in clean_s:
                started_s = time.monotonic()
                if not copy.run(asked, None):
                    print(f"the tests fail without any change: {' '.join(asked)}")
                    return 2
                clean_s[tuple(asked)] = time.monotonic() - started_s
            if not copy.is_noticed(mutation, asked, 60 + 5 * clean_s[tuple(asked)]):
                survivors += 1
                print(f"SURVIVED  {mutation.describe()}", flush=True)
            if number % 10 == 0:
                print(f"  … {number} of {len(chosen)} tried, {number - survivors} caught", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught ({1 - survivors / len(chosen):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
