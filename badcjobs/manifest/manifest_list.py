"""A text file of manifests: each array task takes the one on its line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.manifest.mistakes import Mistakes, quoted, shown
from badcjobs.manifest.path_list import read_list


@dataclass(frozen=True, slots=True)
class ManifestList:
    """The manifests that a file lists, each with its line number and as it is written there."""

    path: Path
    manifests: tuple[tuple[int, str], ...]

    def pick(self, position: int | None) -> tuple[tuple[int, Path], ...]:
        """Return line and place of the manifest at this position, counted from 0; of all when it is None."""
        wanted = self.manifests if position is None else (self._at(position),)
        mistakes = Mistakes([str(self.path)])
        found = [(line, self._find(line, text, mistakes)) for line, text in wanted]
        mistakes.raise_any()
        return tuple(found)

    def _at(self, position: int) -> tuple[int, str]:
        count = len(self.manifests)
        if not 0 <= position < count:
            raise BadInput(
                f"{self.path} has no manifest for position {position}: it lists {count}",
                why=f"an array task takes the manifest at its position, counted from 0; the last is {count - 1}",
                fix=f"#SBATCH --array=0-{count - 1}",
            )
        return self.manifests[position]

    def _find(self, line: int, text: str, mistakes: Mistakes) -> Path:
        """Return where a manifest is: seen from the working directory, otherwise from the folder of the list."""
        # Not from --root: that is where the recordings are.
        for place in (Path(text), self.path.parent / text):
            if os.path.exists(place):  # noqa: PTH110  (Path.exists raises for a folder we may not enter)
                return place
        mistakes.add(line, f"no such manifest: {shown(text)}")
        return Path(text)


def read_manifest_list(path: Path, mistakes: Mistakes) -> ManifestList:
    """Read all lines: a list of manifests is about as long as an array has tasks."""
    line_of: dict[str, int] = {}
    for line, text in read_list(path, mistakes):
        if not is_manifest(text):
            mistakes.add(line, f"{quoted(text)} is not a manifest (.csv) like the first line")
        elif text in line_of:
            mistakes.add(line, f"{quoted(text)} is already on line {line_of[text]}")
        else:
            line_of[text] = line
    return ManifestList(path, tuple((line, text) for text, line in line_of.items()))


def is_manifest(name: str) -> bool:
    """Say whether a name ends like a manifest."""
    return name.lower().endswith(".csv")
