"""The server's application: each question of the table finds its answer, and every wrong one gets a reason in JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
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
from badcjobs.live import answers
from badcjobs.live.answers import Look, WrongQuestion, json_text
from badcjobs.live.connections import EVENTS, HEADERS, Guard
from badcjobs.live.hub import Background, EventStream, Hub, NoLook
from badcjobs.live.snapshot import STATES

Found = TypeVar("Found")
_LOG = logging.getLogger(__name__)
_ASSETS = Path(__file__).parent / "assets"
JSON, HTML = "application/json", "text/html"
_RETRY_S = "5"
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_LONGEST = 200
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# A page that was opened from another site may not send our cookie; one that we open ourselves may.
_COME_IN = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">'
    '<title>badcjobs</title><link rel="icon" href="icon.svg"></head>'
    '<body><p><a href="./">Go on to the live page</a></p></body></html>\n'
)


# --- questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """One query parameter; ``kind`` is int, bool or str, and ``among`` the smallest and largest number or all words."""

    name: str
    kind: type = str
    among: tuple[Any, ...] = ()
    default: int | bool | str | None = None

    def parse(self, text: str) -> int | bool | str:
        """Return the value, or raise WrongQuestion with what would be right."""
        if self.kind is bool:
            if text not in _BOOLEANS:
                raise self._wrong(text, "true or false")
            return _BOOLEANS[text]
        if self.kind is int:
            low, high = self.among
            if not (text.isascii() and text.isdecimal() and len(text) <= 12):
                raise self._wrong(text, "a whole number")
            if not low <= int(text) <= high:
                raise self._wrong(text, f"from {low} to {high}")
            return int(text)
        if self.among and text not in self.among:
            raise self._wrong(text, f"one of {', '.join(self.among)}")
        if len(text) > _LONGEST:
            raise self._wrong(text, f"at most {_LONGEST} characters")
        return text

    def _wrong(self, text: str, wanted: str) -> WrongQuestion:
        return WrongQuestion(400, f"{self.name}={text[:20]}: must be {wanted}")


@dataclass(frozen=True, slots=True)
class Question:
    """One path, always with GET; ``badcjobs guide serve`` lists them all. Its name is a method of ours or a file."""

    name: str
    path: str
    media: str = JSON
    parameters: tuple[Parameter, ...] = ()


QUESTIONS = (
    Question("page", "/", HTML, (Parameter("token"),)),
    Question("health", "/api/health"),
    Question("summary", "/api/gpu/summary"),
    Question("metrics", "/api/gpu/metrics", parameters=(
        Parameter("task"), Parameter("device"), Parameter("alive", bool), Parameter("trail", bool, default=True))),
    Question("tasks", "/api/tasks", parameters=(
        Parameter("state", str, STATES), Parameter("limit", int, (1, 100_000)),
        Parameter("offset", int, (0, 10_000_000), default=0))),
    Question("one_task", "/api/tasks/{name}"),
    Question("log", "/api/tasks/{name}/log", parameters=(Parameter("lines", int, (1, 2000), default=200),)),
    Question("alerts", "/api/alerts"),
    Question("events", "/api/events", EVENTS),
    Question("prometheus", "/metrics", "text/plain"),
    *(Question(name, f"/{name}", "text/javascript") for name in ("live.js", "words.js", "devices.js", "tasks.js")),
    Question("live.css", "/live.css", "text/css"),
    Question("icon.svg", "/icon.svg", "image/svg+xml"),
)  # fmt: skip


def parse_query(pairs: Sequence[tuple[str, str]], known: Sequence[Parameter]) -> Mapping[str, Any]:
    """Return the values of all parameters; raise WrongQuestion for what is unknown, repeated or out of range."""
    by_name = {parameter.name: parameter for parameter in known}
    given = dict(pairs)
    for name in given:
        if name not in by_name:
            there = f"there is {', '.join(by_name)}" if by_name else "there is none here"
            raise WrongQuestion(400, f"unknown parameter {name[:40]!r}: {there}")
    if len(given) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise WrongQuestion(400, f"parameter {twice} is given twice")
    return {one.name: one.parse(given[one.name]) if one.name in given else one.default for one in known}


# --- application ------------------------------------------------------------------------------------------------------


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

    def __init__(self, request: Request, question: Question) -> None:
        self.values = parse_query(request.query_params.multi_items(), question.parameters)
        self.task = str(request.path_params.get("name", ""))
        self.last_event_id = request.headers.get("last-event-id")
        self.head = request.method == "HEAD"


def make_app(hub: Hub, source: Source, background: Background, guard: Guard) -> ASGIApp:
    """Return the application."""
    endpoints = _Endpoints(hub, source, background, guard)
    routes = [Route(one.path, _endpoint(one, endpoints), methods=["GET"], name=one.name) for one in QUESTIONS]
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
        return problem(404, f"there is no {request.url.path[:80]}: badcjobs guide serve lists what there is")
    if status == 405:
        return problem(405, f"{request.method[:20]} is not answered, only GET and HEAD", {"allow": "GET, HEAD"})
    return problem(status, str(getattr(error, "detail", "")))


def _endpoint(question: Question, endpoints: _Endpoints) -> Callable[[Request], Awaitable[Response]]:
    answer: Callable[[Asked], Awaitable[Any]] | None = getattr(endpoints, question.name, None)
    file = None if answer else (_ASSETS / question.name).read_text(encoding="utf-8")

    async def endpoint(request: Request) -> Response:
        asked = Asked(request, question)
        found = await answer(asked) if answer else file
        if isinstance(found, (Response, EventStream)):
            return found  # type: ignore[return-value]  # a stream is an application, to Starlette as good as a response
        return _response(found if isinstance(found, str) else json_text(found), question.media)

    return endpoint


class _Endpoints:
    """One method for each question that is not a file."""

    def __init__(self, hub: Hub, source: Source, background: Background, guard: Guard) -> None:
        self._hub = hub
        self._source = source
        self._background = background
        self._guard = guard
        self._page = (_ASSETS / "live.html").read_text(encoding="utf-8")

    async def page(self, asked: Asked) -> str | Response:
        given = asked.values["token"]
        if given is None or self._guard.token is None:
            return self._page
        if not self._guard.is_token(given):
            raise WrongQuestion(401, "the token is wrong")
        return _response(_COME_IN, HTML, headers={"set-cookie": self._guard.cookie})

    async def health(self, asked: Asked) -> dict[str, Any]:
        hub = self._hub
        last = None if hub.last is None else hub.last.snapshot
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
        look = await self._hub.latest()
        return {"at_ms": look.snapshot.at_ms, "alerts": list(look.alerts)}

    async def events(self, asked: Asked) -> EventStream | Response:
        if asked.head:
            return _response("", EVENTS)
        return self._hub.join(asked.last_event_id)

    async def prometheus(self, asked: Asked) -> Response:
        look = await self._hub.latest()
        return _response(await self._aside(lambda: self._source.prometheus(look)), _PROMETHEUS)

    async def _aside(self, read: Callable[[], Found]) -> Found:
        """Read something besides the look; raise NoLook where that fails or takes too long."""
        patience_s = self._hub.patience_s
        try:
            return await asyncio.wait_for(self._background.call(read), patience_s)
        except asyncio.TimeoutError:
            raise NoLook(f"no answer within {patience_s:g} s: a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since the look
            raise NoLook(error.what if isinstance(error, BadcjobsError) else str(error)) from error
