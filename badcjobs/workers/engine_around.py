"""What every engine around another engine has in common: it is called the same, wants as much, and is checked alike."""

from __future__ import annotations

from badcjobs.seams import Engine


class EngineAround:
    """Passes on what it does not change; how sessions are opened is each one's own."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self._engine = engine

    @property
    def wants(self) -> int:
        """As many as the engine itself."""
        return self._engine.wants

    def check(self) -> None:
        """Check the engine."""
        self._engine.check()
