"""Whole outputs for people, compared with files that ``pytest --update-pages`` rewrites and a reviewer reads."""

import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path

PAGES = Path(__file__).parents[1] / "pages"


class Pages:
    """The recorded pages of one test: a folder under the name of its file and its own."""

    def __init__(self, file: str, test: str, *, update: bool) -> None:
        name = test.removeprefix("test_").replace("[", "/").rstrip("]")
        self._folder = PAGES / file.removeprefix("test_") / name
        self._update = update

    def __call__(self, said: Mapping[str, str]) -> None:
        """Compare all pages of this test, by file name, with the recorded ones."""
        said = {name: text if text.endswith("\n") else text + "\n" for name, text in said.items()}
        if self._update:
            self._write(said)
        known = tree(self._folder) if self._folder.is_dir() else {}
        differences: list[str] = []
        for name in sorted({*known, *said}):
            before, after = (one.get(name, "").splitlines() for one in (known, said))
            differences += difflib.unified_diff(before, after, f"recorded/{name}", f"now/{name}", lineterm="", n=2)
        text = "\n".join(differences)
        assert not differences, f"pages of {self._folder.name} differ (right? pytest --update-pages):\n{text}"

    def _write(self, said: Mapping[str, str]) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, text in said.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def tree(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
