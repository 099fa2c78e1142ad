"""The server: who may ask, which questions there are, and their answers; a wrong question gets a reason in JSON."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import signal
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from badcjobs import __version__
from badcjobs.live.answers import Document, json_text
from badcjobs.live.hub import EVENTS, HEADERS, Hub
from badcjobs.live.snapshot import STATES, mean_of_known, sum_of_known

if TYPE_CHECKING:
    from badcjobs.live.answers import LiveSource, Look

_LOG = logging.getLogger(__name__)
_ASSETS = Path(__file__).parent / "assets"
JSON, HTML = "application/json", "text/html"
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_LONGEST = 200
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
        """Return the value, or raise a 400 with what would be right."""
        if self.kind is bool:
            right, wanted = text in _BOOLEANS, "true or false"
        elif self.kind is int:
            low, high = self.among
            right = text.isascii() and text.isdecimal() and len(text) <= 12 and low <= int(text) <= high
            wanted = f"a whole number from {low} to {high}"
        elif self.among:
            right, wanted = text in self.among, f"one of {', '.join(self.among)}"
        else:
            right, wanted = len(text) <= _LONGEST, f"at most {_LONGEST} characters"
        if not right:
            raise HTTPException(400, f"{self.name}={text[:20]}: must be {wanted}")
        return _BOOLEANS[text] if self.kind is bool else self.kind(text)


@dataclass(frozen=True, slots=True)
class Question:
    """One path, always with GET; ``badcjobs guide serve`` lists them all. Its name is a method of Answers or a file."""

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
    Question("prometheus", "/metrics", "text/plain; version=0.0.4"),
    *(Question(name, f"/{name}", "text/javascript") for name in ("live.js", "words.js", "devices.js", "tasks.js")),
    Question("live.css", "/live.css", "text/css"),
    Question("icon.svg", "/icon.svg", "image/svg+xml"),
)  # fmt: skip


def parse_query(pairs: Sequence[tuple[str, str]], known: Sequence[Parameter]) -> Mapping[str, Any]:
    """Return the values of all parameters; raise a 400 for what is unknown, repeated or out of range."""
    names, given = [one.name for one in known], dict(pairs)
    for name in given:
        if name not in names:
            there = f"there is {', '.join(names)}" if names else "there is none here"
            raise HTTPException(400, f"unknown parameter {name[:40]!r}: {there}")
        if sum(name == other for other, _ in pairs) > 1:
            raise HTTPException(400, f"parameter {name} is given twice")
    return {one.name: one.parse(given[one.name]) if one.name in given else one.default for one in known}


# --- who may ask ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server."""

    token: str | None
    loopback: bool  # bound to an address that only this machine reaches
    port: int

    def knows_host(self, header: str | None) -> bool:
        """Whether we were asked for by a name of this machine.

        A page from elsewhere can make its own name point to 127.0.0.1 and then read what we say. It cannot choose what
        the browser writes into the header Host. Another port is fine: that is how a tunnel looks.
        """
        if not self.loopback:
            return True
        try:
            name = urlsplit(f"//{header or ''}").hostname or ""
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def lets_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the token, as a header or as our cookie."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same(given.strip(), self.token):
            return True
        name, _, wanted = self.cookie.partition(";")[0].partition("=")
        return is_same(cookie_parser(headers.get("cookie", "")).get(name, ""), wanted)

    @property
    def cookie(self) -> str:
        """The header that lets a browser in until it is closed; no script can read it, no other site can send it.

        Its value can only be made from the token, but is not the token. Its name has the port: browsers share cookies
        between the ports of a host.
        """
        value = hmac.new((self.token or "").encode(), b"badcjobs cookie", hashlib.sha256).hexdigest()
        return f"badcjobs_{self.port}={value}; HttpOnly; SameSite=Strict; Path=/"

    def refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that is not let in; None: it is."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.knows_host(headers.get("host")):
            return problem(403, "this server is asked for as localhost or 127.0.0.1")
        brings_token = scope["path"] == "/" and b"token=" in scope["query_string"]  # the page itself looks at it
        if self.lets_in(headers) or brings_token:
            return None
        words = "the token is missing or wrong: Authorization: Bearer TOKEN, or /?token=TOKEN in a browser"
        return problem(401, words, {"www-authenticate": 'Bearer realm="badcjobs"'})


def is_same(given: str, wanted: str) -> bool:
    """Compare in a time that says nothing about how much of it was right."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


# --- application ------------------------------------------------------------------------------------------------------


def make_app(hub: Hub, source: LiveSource, guard: Guard) -> ASGIApp:
    """Return the application: nothing is answered but what the guard lets in, and nothing without our headers."""
    answers = Answers(hub, source, guard)
    routes = [Route(one.path, _endpoint(one, answers), methods=["GET"], name=one.name) for one in QUESTIONS]
    handlers: dict[Any, Any] = {
        HTTPException: _refuse,
        Exception: lambda request, error: problem(500, "a bug in badcjobs; its terminal says more"),
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other kind of connection is ever accepted
        try:
            await (guard.refusal(scope) or app)(scope, receive, send)
        except Exception:
            # It has been answered already. Without the query: there may be a token in it.
            _LOG.exception("a bug in badcjobs, at %s", scope["path"])

    return door


def problem(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer to a wrong question."""
    return _response(json_text({"status": status, "error": message}), JSON, status=status, headers=headers)


def _response(body: str, media: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # A script without its charset would be read as if it were Latin.
    kind = media if media == JSON else f"{media}; charset=utf-8"
    encoded = body.encode("utf-8", "replace")  # a file may have a name that no text can have
    return Response(encoded, status, {**HEADERS, "content-type": kind, **(headers or {})})


def _refuse(request: Request, error: HTTPException) -> Response:
    if error.detail == "Not Found":  # Starlette's own words: no such path
        return problem(404, f"there is no {request.url.path[:80]}: badcjobs guide serve lists what there is")
    if error.status_code == 405:
        return problem(405, f"{request.method[:20]} is not answered, only GET and HEAD", {"allow": "GET, HEAD"})
    return problem(error.status_code, error.detail, error.headers)


def _endpoint(question: Question, answers: Answers) -> Callable[[Request], Awaitable[Response]]:
    answer: Callable[[Request, Mapping[str, Any]], Awaitable[Any]] | None = getattr(answers, question.name, None)
    file = None if answer else (_ASSETS / question.name).read_text(encoding="utf-8")

    async def endpoint(request: Request) -> Response:
        values = parse_query(request.query_params.multi_items(), question.parameters)
        found = await answer(request, values) if answer else file
        if isinstance(found, Response):
            return found
        return _response(found if isinstance(found, str) else json_text(found), question.media)

    return endpoint


@dataclass(frozen=True, slots=True)
class Answers:
    """One method for each question that is not a file; it gets the values of the question's parameters."""

    hub: Hub
    source: LiveSource
    guard: Guard

    async def page(self, request: Request, wanted: Mapping[str, Any]) -> str | Response:
        """Return the live page; a token in its address becomes a cookie."""
        if wanted["token"] is None or self.guard.token is None:
            return (_ASSETS / "live.html").read_text(encoding="utf-8")
        if not is_same(wanted["token"], self.guard.token):
            raise HTTPException(401, "the token is wrong")
        return _response(_COME_IN, HTML, headers={"set-cookie": self.guard.cookie})

    async def health(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return how the server is, without waiting for a look."""
        hub = self.hub
        last = None if hub.last is None else hub.last.snapshot
        hub.look_soon()  # so that the next one who asks hears how it went, even without listeners
        return {
            "status": "stale" if hub.trouble else "ok" if last else "starting",
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

    async def summary(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return all devices together, and by model."""
        look = await self.hub.latest()
        every = [item.document for item in look.devices.values()]
        alive = [device for device in every if device["alive"]]
        models: dict[str, list[Document]] = defaultdict(list)
        for device in alive:
            models[device["name"] or ""].append(device)
        return {
            "at_ms": look.snapshot.at_ms,
            "title": look.snapshot.title,
            "of_run": look.snapshot.of_run,
            **_together(alive),
            "ended": len(every) - len(alive),
            "alerts": len(look.alerts),
            "models": [{"name": name or None, **_together(devices)} for name, devices in sorted(models.items())],
        }

    async def metrics(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return the devices one by one, each with its processes."""
        look = await self.hub.latest()
        processes = await self.hub.read(lambda: self.source.processes(look))
        task, device, alive = wanted["task"], wanted["device"], wanted["alive"]
        if task is not None:
            _task(look, task)
        without = {} if wanted["trail"] else {"trail": None}
        found = [
            {**one, "processes": processes.get(one["key"], one["processes"]), **without}
            for one in (item.document for item in look.devices.values())
            if task in (None, one["task"])
            and device in (None, str(one["index"]), one["uuid"], one["token"], one["key"])
            and alive in (None, one["alive"])
        ]
        if device is not None and not found:
            raise HTTPException(404, f"there is no device {device}")
        return {"at_ms": look.snapshot.at_ms, "devices": found}

    async def tasks(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return the tasks that are wanted, some at a time, and the total of all."""
        look = await self.hub.latest()
        every = (item.document for item in look.tasks.values())
        found = [task for task in every if wanted["state"] in (None, task["state"])]
        first, limit = wanted["offset"], wanted["limit"]
        return {
            "at_ms": look.snapshot.at_ms,
            "title": look.snapshot.title,
            "total": look.total,
            "matched": len(found),
            "tasks": found[first : None if limit is None else first + limit],
            "remarks": list(look.snapshot.remarks),
        }

    async def one_task(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return a task with its devices and alerts."""
        look, name = await self.hub.latest(), request.path_params["name"]
        return {
            "at_ms": look.snapshot.at_ms,
            "task": _task(look, name),
            "devices": [item.document for item in look.devices.values() if item.document["task"] == name],
            "alerts": [alert for alert in look.alerts if alert["task"] == name],
        }

    async def log(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return the end of the log of a task that is there."""
        name = request.path_params["name"]
        _task(await self.hub.latest(), name)
        found = await self.hub.read(lambda: self.source.log_end(name, wanted["lines"]))
        if found is None:
            raise HTTPException(404, f"{name} has no log that can be read")
        return {"task": name, "lines": list(found[0]), "whole": found[1]}

    async def alerts(self, request: Request, wanted: Mapping[str, Any]) -> Document:
        """Return the alerts that go on."""
        look = await self.hub.latest()
        return {"at_ms": look.snapshot.at_ms, "alerts": list(look.alerts)}

    async def events(self, request: Request, wanted: Mapping[str, Any]) -> Response:
        """Return a stream of what changes."""
        if request.method == "HEAD":
            return _response("", EVENTS)
        return self.hub.join(request.headers.get("last-event-id"))

    async def prometheus(self, request: Request, wanted: Mapping[str, Any]) -> str:
        """Return what Prometheus reads."""
        look = await self.hub.latest()
        return await self.hub.read(lambda: self.source.prometheus(look))


def _task(look: Look, name: str) -> Document:
    if name not in look.tasks:
        raise HTTPException(404, f"there is no task {name[:80]!r}")
    return look.tasks[name].document


def _together(devices: Sequence[Document]) -> Document:
    readings = [device["reading"] for device in devices]
    heat = [reading["temperature_c"] for reading in readings if reading["temperature_c"] is not None]
    return {
        "devices": len(devices),
        "readable": sum(d["trouble"] is None and d["read_at_ms"] is not None for d in devices),
        "utilization_percent": mean_of_known(reading["utilization_percent"] for reading in readings),
        "memory_used_bytes": sum_of_known(reading["memory_used_bytes"] for reading in readings),
        "memory_total_bytes": sum_of_known(device["memory_total_bytes"] for device in devices),
        "temperature_max_c": max(heat, default=None),
        "power_w": sum_of_known(reading["power_w"] for reading in readings),
    }


# --- server -----------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server that says when it begins to answer, and lets its listeners go before it ends."""

    def __init__(self, config: uvicorn.Config, *, started: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell_started = started
        self._tell_ending = ending
        self.interrupted = False  # by Ctrl-C

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then say so."""
        await super().startup(sockets)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the listeners go first: their connections never end by themselves."""
        self._tell_ending()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in an orderly way; at a second signal at once. Ctrl-C is remembered, TERM is an ordinary end."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True


class Connection(H11Protocol):
    """A connection that can be cut, even while something is waiting to be sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; an answer that is under way is given up."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
