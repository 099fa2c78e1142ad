"""What stand-ins for programs and libraries share: how they are written, built and steered."""

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from support.needs import missing


def install(path: Path, text: str) -> Path:
    """Write a program and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@cache
def build(source: Path, name: str) -> Path:
    """Build a library once per test session, in a folder of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc") or missing("cc", f"no C compiler for {source.name}")
    library = Path(tempfile.mkdtemp(prefix="stand-in-"), name)
    atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    subprocess.run([compiler, "-std=gnu11", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Steered:
    """A stand-in in the process of a test, steered by the environment until the test ends."""

    prefix: str

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def set(self, **settings: object) -> None:
        """Change how it answers from the next call on; None takes a setting away."""
        for name, value in settings.items():
            if value is None:
                self._monkeypatch.delenv(f"{self.prefix}{name.upper()}", raising=False)
            else:
                self._monkeypatch.setenv(f"{self.prefix}{name.upper()}", str(value))
