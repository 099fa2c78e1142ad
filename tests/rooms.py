"""The rooms of badcjobs as tests see them: ``from rooms.store import merge`` finds the name wherever it stands there.

So a function may move and a module be split inside its room, and no test changes. ``rooms.root`` are the modules that
stand in the package itself.
"""

import ast
import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import badcjobs

_HOUSE = Path(badcjobs.__file__).parent


class Room(ModuleType):
    """One room; its attributes are the names that its modules define."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(f"rooms.{name}")
        self._package = ".".join(("badcjobs", *folder.relative_to(_HOUSE).parts))
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        homes = [path.stem for path in sorted(self._folder.glob("*.py")) if name in _defined(path)]
        if len(homes) != 1:
            raise AttributeError(f"{name} is defined in {len(homes)} modules of {self._package}: {', '.join(homes)}")
        return getattr(importlib.import_module(f"{self._package}.{homes[0]}"), name)


@functools.cache
def _defined(path: Path) -> frozenset[str]:
    """Return the names that a module defines itself, not those that it imports."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return frozenset(names)


__path__: list[str] = []  # a package, whose modules are made here
for _folder in [path.parent for path in _HOUSE.glob("*/__init__.py")]:
    sys.modules[f"rooms.{_folder.name}"] = Room(_folder.name, _folder)
sys.modules["rooms.root"] = Room("root", _HOUSE)
