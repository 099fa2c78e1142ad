"""Finds the files that come with badcjobs: installed from a wheel, or in a checkout."""

from __future__ import annotations

from pathlib import Path

from badcjobs.errors import NotHere

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder ``templates``, ``slurm`` or ``guide``.

    A wheel carries the first two inside the package; in a checkout they lie beside it, where users look for them.
    """
    for candidate in (_PACKAGE / "_shipped" / name, _PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise NotHere(
        f"the folder {name}/ is missing from this installation",
        why=f"it is neither inside {_PACKAGE} nor beside it",
        fix="pip install --force-reinstall badcjobs",
    )
