"""One thread for what may block: a file system that hangs does not stop the server, nor keep it from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class Background:
    """Calls functions one after the other, away from the event loop."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        # A thread of an executor would be waited for at exit.
        threading.Thread(target=self._work, name="looking", daemon=True).start()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._jobs.put((loop, future, function))
        return await future

    def _work(self) -> None:
        while True:
            loop, future, function = self._jobs.get()
            try:
                settle, outcome = _give, function()
            except Exception as error:  # whoever asked gets it
                settle, outcome = _fail, error
            try:
                loop.call_soon_threadsafe(settle, future, outcome)
            except RuntimeError:
                return  # the loop is closed: the server has ended


def _give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_exception(result)
