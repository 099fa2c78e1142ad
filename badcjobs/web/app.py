"""The server's application: each question of the table finds its answer, and every wrong one gets a reason in JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from badcjobs import __version__
from badcjobs.errors import BadcjobsError
from badcjobs.web import answers
from badcjobs.web.access import HEADERS, Guard
from badcjobs.web.background import Background
from badcjobs.web.hub import Hub, NoLook
from badcjobs.web.look import Look, json_text
from badcjobs.web.openapi import document
from badcjobs.web.operations import EVENTS, HTML, JSON, OPERATIONS, Operation
from badcjobs.web.parameters import WrongQuestion, parse_query
from badcjobs.web.stream import EventStream

Found = TypeVar("Found")
_LOG = logging.getLogger(__name__)
_ASSETS = Path(__file__).parent / "assets"
_FILES = {
    "page": "live.html", "script": "live.js", "script_words": "words.js", "script_devices": "devices.js",
    "script_tasks": "tasks.js", "style": "live.css", "icon": "icon.svg",
}  # fmt: skip
_RETRY_S = "5"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# A page that was opened from another site may not send our cookie; one that we open ourselves may.
_COME_IN = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">'
    '<title>badcjobs</title><link rel="icon" href="icon.svg"></head>'
    '<body><p><a href="./">Go on to the live page</a></p></body></html>\n'
)


class Source(Protocol):
    """What the answers need besides looks. All of it may block."""

    def prometheus(self, look: Look) -> str:
        """Return a look in Prometheus' words."""
        ...

    def processes(self, look: Look) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the processes by device key, for devices that do not tell theirs in a look."""
        ...

    def log_end(self, task: str, lines: int) -> tuple[Sequence[str], bool] | None:
        """Return the last lines of a task's log, and whether these are all; None: it has none."""
        ...


class Asked:
    """One request, understood."""

    def __init__(self, request: Request, operation: Operation) -> None:
        self.values = parse_query(request.query_params.multi_items(), operation.parameters)
        self.task = str(request.path_params.get("name", ""))
        self.last_event_id = request.headers.get("last-event-id")
        self.head = request.method == "HEAD"


def make_app(hub: Hub, source: Source, background: Background, guard: Guard) -> ASGIApp:
    """Return the application."""
    desk = _Desk(hub, source, background, guard)
    routes = [
        Route(operation.path, _endpoint(operation, getattr(desk, operation.name, None) or desk.file_of(operation)),
              methods=["GET"], name=operation.name)
        for operation in OPERATIONS
    ]  # fmt: skip
    handlers: dict[Any, Any] = {
        WrongQuestion: lambda request, error: problem(error.status, error.message),
        NoLook: lambda request, error: problem(503, str(error), {"retry-after": _RETRY_S}),
        HTTPException: _http_problem,
        Exception: lambda request, error: problem(500, "a bug in badcjobs; its terminal says more"),
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Door(app, guard)


class Door:
    """Lets in who may ask, and sees to it that nothing leaves without its headers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other kind of connection is ever accepted
        try:
            refusal = self._refusal(scope)
            await (refusal or self._app)(scope, receive, send)
        except Exception:
            # Who asked has been told already. Without the query: there may be a token in it.
            _LOG.exception("a bug in badcjobs, at %s", scope["path"])

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._guard.knows_host(headers.get("host")):
            return problem(403, "this server is asked for as localhost or 127.0.0.1")
        if self._guard.lets_in(headers) or _brings_token(scope):
            return None
        words = "the token is missing or wrong: Authorization: Bearer TOKEN, or /?token=TOKEN in a browser"
        return problem(401, words, {"www-authenticate": 'Bearer realm="badcjobs"'})


def _brings_token(scope: Scope) -> bool:
    """Whether the page itself is asked for with a token in its address; it is looked at there."""
    return bool(scope["path"] == "/" and b"token=" in scope["query_string"])


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer to a wrong question."""
    return _response(json_text({"status": status, "error": message}), JSON, status=status, headers=headers)


def _response(body: str, media: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # A script without its charset would be read as if it were Latin.
    kind = media if media == JSON or "charset" in media else f"{media}; charset=utf-8"
    encoded = body.encode("utf-8", "replace")  # a file may have a name that no text can have
    return Response(encoded, status, {**HEADERS, "content-type": kind, **(headers or {})})


async def _http_problem(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        return problem(404, f"there is no {request.url.path[:80]}: /openapi.json lists what there is")
    if status == 405:
        return problem(405, f"{request.method[:20]} is not answered, only GET and HEAD", {"allow": "GET, HEAD"})
    return problem(status, str(getattr(error, "detail", "")))


def _endpoint(
    operation: Operation, answer: Callable[[Asked], Awaitable[Any]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        found = await answer(Asked(request, operation))
        # A stream is an application of its own; to Starlette that is as good as a response.
        return (
            found
            if isinstance(found, (Response, EventStream))
            else _response(  # type: ignore[return-value]
                found if isinstance(found, str) else json_text(found), operation.media
            )
        )

    return endpoint


class _Desk:
    """One method for each operation that is not a file."""

    def __init__(self, hub: Hub, source: Source, background: Background, guard: Guard) -> None:
        self._hub = hub
        self._source = source
        self._background = background
        self._guard = guard
        self._files = {name: (_ASSETS / file).read_text(encoding="utf-8") for name, file in _FILES.items()}
        self._openapi = document()

    def file_of(self, operation: Operation) -> Callable[[Asked], Awaitable[str]]:
        async def answer(asked: Asked) -> str:
            return self._files[operation.name]

        return answer

    async def page(self, asked: Asked) -> str | Response:
        given = asked.values["token"]
        if given is None or self._guard.token is None:
            return self._files["page"]
        if not self._guard.is_token(given):
            raise WrongQuestion(401, "the token is wrong")
        return _response(_COME_IN, HTML, headers={"set-cookie": self._guard.cookie})

    async def health(self, asked: Asked) -> dict[str, Any]:
        hub, last = self._hub, self._hub.last
        hub.look_soon()  # so that the next one who asks hears how it went, though nobody else looks
        status = "stale" if hub.trouble else "ok" if last else "starting"
        return {
            "status": status,
            "version": __version__,
            "title": last and last.title,
            "of_run": None if last is None else last.of_run,
            "at_ms": last and last.at_ms,
            "age_s": hub.age_s,
            "look_ms": hub.look_ms,
            "looks": hub.looks,
            "listeners": len(hub.listeners),
            "interval_s": hub.interval_s,
            "uptime_s": hub.uptime_s,
            "trouble": hub.trouble,
        }

    async def summary(self, asked: Asked) -> dict[str, Any]:
        return answers.summary(await self._hub.latest())

    async def metrics(self, asked: Asked) -> dict[str, Any]:
        look = await self._hub.latest()
        processes = await self._aside(lambda: self._source.processes(look))
        return answers.metrics(look, asked.values, processes)

    async def tasks(self, asked: Asked) -> dict[str, Any]:
        return answers.tasks(await self._hub.latest(), asked.values)

    async def one_task(self, asked: Asked) -> dict[str, Any]:
        return answers.one_task(await self._hub.latest(), asked.task)

    async def log(self, asked: Asked) -> dict[str, Any]:
        answers.one_task(await self._hub.latest(), asked.task)  # only of tasks that are there
        found = await self._aside(lambda: self._source.log_end(asked.task, asked.values["lines"]))
        if found is None:
            raise WrongQuestion(404, f"{asked.task} has no log that can be read")
        return {"task": asked.task, "lines": list(found[0]), "whole": found[1]}

    async def alerts(self, asked: Asked) -> dict[str, Any]:
        return answers.alerts(await self._hub.latest())

    async def events(self, asked: Asked) -> EventStream | Response:
        if asked.head:
            return _response("", EVENTS)
        return EventStream(self._hub, self._hub.join(asked.last_event_id))

    async def prometheus(self, asked: Asked) -> Response:
        look = await self._hub.latest()
        return _response(await self._aside(lambda: self._source.prometheus(look)), _PROMETHEUS)

    async def openapi(self, asked: Asked) -> dict[str, Any]:
        return self._openapi

    async def _aside(self, read: Callable[[], Found]) -> Found:
        """Read something besides the look; raise NoLook where that fails or takes too long."""
        patience_s = self._hub.patience_s
        try:
            return await asyncio.wait_for(self._background.call(read), patience_s)
        except asyncio.TimeoutError:
            raise NoLook(f"no answer within {patience_s:g} s: a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since the look
            raise NoLook(error.what if isinstance(error, BadcjobsError) else str(error)) from error
