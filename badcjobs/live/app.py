"""The web application: access control, endpoints and their handlers; errors are JSON with a reason."""

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
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from badcjobs import __version__
from badcjobs.live.hub import EVENTS, HEADERS, Documents, Hub, LiveSource, json_text
from badcjobs.live.snapshot import STATES, Document, mean_of_known, sum_of_known
from badcjobs.model import load_word

_LOG = logging.getLogger(__name__)
_ASSETS = Path(__file__).parent / "assets"
JSON, HTML = "application/json", "text/html"
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_MAX_LENGTH = 200
# Not an HTTP redirect: a browser that followed a link on another site would not send the SameSite=Strict cookie.
_TOKEN_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">'
    '<title>badcjobs</title><link rel="icon" href="icon.svg"></head>'
    '<body><p><a href="./">Continue to the live page</a></p></body></html>\n'
)


# --- endpoints --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter; ``among`` is the minimum and maximum of an int, or the allowed words of a str."""

    name: str
    kind: type = str
    among: tuple[Any, ...] = ()
    default: int | bool | str | None = None

    def parse(self, text: str) -> int | bool | str:
        """Return the value; raise a 400 that states what is allowed."""
        if self.kind is bool:
            valid, allowed = text in _BOOLEANS, "true or false"
        elif self.kind is int:
            low, high = self.among
            valid = text.isascii() and text.isdecimal() and len(text) <= 12 and low <= int(text) <= high
            allowed = f"a whole number from {low} to {high}"
        elif self.among:
            valid, allowed = text in self.among, f"one of {', '.join(self.among)}"
        else:
            valid, allowed = len(text) <= _MAX_LENGTH, f"at most {_MAX_LENGTH} characters"
        if not valid:
            raise HTTPException(400, f"{self.name}={text[:20]}: must be {allowed}")
        return _BOOLEANS[text] if self.kind is bool else self.kind(text)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path for GET; ``name`` is a method of Handlers or a file. ``badcjobs guide live`` lists all paths."""

    name: str
    path: str
    media: str = JSON
    parameters: tuple[Parameter, ...] = ()


ENDPOINTS = (
    Endpoint("page", "/", HTML, (Parameter("token"),)),
    Endpoint("health", "/api/health"),
    Endpoint("summary", "/api/gpu/summary"),
    Endpoint("metrics", "/api/gpu/metrics", parameters=(
        Parameter("task"), Parameter("device"), Parameter("alive", bool), Parameter("trail", bool, default=True))),
    Endpoint("tasks", "/api/tasks", parameters=(
        Parameter("state", str, STATES), Parameter("limit", int, (1, 100_000)),
        Parameter("offset", int, (0, 10_000_000), default=0))),
    Endpoint("one_task", "/api/tasks/{name}"),
    Endpoint("log", "/api/tasks/{name}/log", parameters=(Parameter("lines", int, (1, 2000), default=200),)),
    Endpoint("alerts", "/api/alerts"),
    Endpoint("events", "/api/events", EVENTS),
    Endpoint("ws", "/ws", parameters=(Parameter("last_event_id"),)),
    Endpoint("prometheus", "/metrics", "text/plain; version=0.0.4"),
    *(Endpoint(name, f"/{name}", "text/javascript") for name in ("live.js", "words.js", "devices.js", "tasks.js")),
    Endpoint("live.css", "/live.css", "text/css"),
    Endpoint("icon.svg", "/icon.svg", "image/svg+xml"),
)  # fmt: skip


# --- access control ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard:
    """The access rules of one server."""

    token: str | None
    loopback: bool  # bound to an address that only this machine can reach
    port: int

    def is_allowed_host(self, header: str | None) -> bool:
        """Return whether the Host header names this machine.

        This prevents DNS rebinding: a page of another site can make its own name resolve to 127.0.0.1 and read our
        answers, but it cannot choose the Host header. Any port is allowed, because an SSH tunnel may use another one.
        """
        if not self.loopback:
            return True
        try:
            name = urlsplit(f"//{header or ''}").hostname or ""
            return name == "localhost" or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False

    def is_authorized(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request carries the token, in a header or as our cookie."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same_secret(given.strip(), self.token):
            return True
        name, _, wanted = self.cookie.partition(";")[0].partition("=")
        return is_same_secret(cookie_parser(headers.get("cookie", "")).get(name, ""), wanted)

    @property
    def cookie(self) -> str:
        """The Set-Cookie header for a browser session: not readable by scripts, not sent by other sites.

        Its value is derived from the token. Its name contains the port, because browsers share cookies between the
        ports of a host.
        """
        value = hmac.new((self.token or "").encode(), b"badcjobs cookie", hashlib.sha256).hexdigest()
        return f"badcjobs_{self.port}={value}; HttpOnly; SameSite=Strict; Path=/"

    def refusal(self, scope: Scope) -> Response | None:
        """Return the error response for a request that is not allowed; None: it is allowed."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.is_allowed_host(headers.get("host")):
            return error_response(403, "open this server as localhost or 127.0.0.1")
        # Browsers let a page of any site open a WebSocket and read it.
        origin = headers.get("origin") if scope["type"] == "websocket" else None
        if origin is not None and origin.partition("://")[2].lower() != headers["host"].lower():
            return error_response(403, "a page of another server may not open this WebSocket")
        has_token_in_url = scope["path"] == "/" and b"token=" in scope["query_string"]  # the page checks it
        if self.is_authorized(headers) or has_token_in_url:
            return None
        words = "token missing or wrong: send Authorization: Bearer TOKEN, or open /?token=TOKEN in a browser"
        return error_response(401, words, {"www-authenticate": 'Bearer realm="badcjobs"'})


def is_same_secret(given: str, wanted: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


# --- application ------------------------------------------------------------------------------------------------------


def make_app(hub: Hub, source: LiveSource, guard: Guard) -> ASGIApp:
    """Return the application: the guard checks every request, and every response has our headers."""
    routes = [_route(endpoint, Handlers(hub, source, guard)) for endpoint in ENDPOINTS]
    errors: dict[Any, Any] = {
        HTTPException: _handle_http_error,
        Exception: lambda request, error: error_response(500, "internal error; see the terminal of the server"),
    }
    app = Starlette(routes=routes, exception_handlers=errors)
    app.router.redirect_slashes = False

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = guard.refusal(scope) or (app if scope["type"] == "http" else _socket(hub, scope))
            await answer(scope, receive, send)
        except Exception:
            # The response has been sent already. Do not log the query: it may contain a token.
            _LOG.exception("internal error at %s", scope["path"])

    return guarded_app


def _socket(hub: Hub, scope: Scope) -> Response:
    """Return the stream of changes for a WebSocket, or the reason for its refusal."""
    if scope["path"] != "/ws":
        return error_response(404, "the only WebSocket is /ws")
    try:
        return hub.join(QueryParams(scope["query_string"]).get("last_event_id"))
    except HTTPException as error:
        return error_response(error.status_code, error.detail, error.headers)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as a JSON response."""
    return _response(json_text({"status": status, "error": message}), JSON, status=status, headers=headers)


def _response(body: str, media: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # Without a charset, browsers would read scripts as Latin-1.
    kind = media if media == JSON else f"{media}; charset=utf-8"
    encoded = body.encode("utf-8", "replace")  # a file name may not be valid Unicode
    return Response(encoded, status, {**HEADERS, "content-type": kind, **(headers or {})})


def _handle_http_error(request: Request, error: HTTPException) -> Response:
    if error.detail == "Not Found":  # Starlette's text for an unknown path
        return error_response(404, f"{request.url.path[:80]} does not exist: badcjobs guide live lists all paths")
    if error.status_code == 405:
        return error_response(405, f"{request.method[:20]} is not supported, only GET and HEAD", {"allow": "GET, HEAD"})
    return error_response(error.status_code, error.detail, error.headers)


def _route(endpoint: Endpoint, handlers: Handlers) -> Route:
    handler: Callable[[Request, Values], Awaitable[Any]] | None = getattr(handlers, endpoint.name, None)
    file = None if handler else (_ASSETS / endpoint.name).read_text(encoding="utf-8")

    async def respond(request: Request) -> Response:
        pairs, known = request.query_params.multi_items(), endpoint.parameters
        names, given = [one.name for one in known], dict(pairs)
        for name in given:
            if name not in names:
                known_names = f"known: {', '.join(names)}" if names else "this path has none"
                raise HTTPException(400, f"unknown parameter {name[:40]!r} ({known_names})")
            if sum(name == other for other, _ in pairs) > 1:
                raise HTTPException(400, f"parameter {name} is given twice")
        values = {one.name: one.parse(given[one.name]) if one.name in given else one.default for one in known}
        found = await handler(request, values) if handler else file
        if isinstance(found, Response):
            return found
        return _response(found if isinstance(found, str) else json_text(found), endpoint.media)

    return Route(endpoint.path, respond, methods=["GET"], name=endpoint.name)


Values = Mapping[str, Any]  # of the parameters of a request


@dataclass(frozen=True, slots=True)
class Handlers:
    """One method for each endpoint that is not a file; ``wanted`` holds the values of its parameters."""

    hub: Hub
    source: LiveSource
    guard: Guard

    async def page(self, request: Request, wanted: Values) -> str | Response:
        """Return the live page; a token in the URL becomes a cookie."""
        if wanted["token"] is None or self.guard.token is None:
            return (_ASSETS / "live.html").read_text(encoding="utf-8")
        if not is_same_secret(wanted["token"], self.guard.token):
            raise HTTPException(401, "the token is wrong")
        return _response(_TOKEN_PAGE, HTML, headers={"set-cookie": self.guard.cookie})

    async def health(self, request: Request, wanted: Values) -> Document:
        """Return the state of the server, without waiting for new data."""
        hub = self.hub
        last = None if hub.last is None else hub.last.snapshot
        hub.refresh()  # so that the next request sees the result, even without listeners
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
            "uptime_s": hub.clock.monotonic_s() - hub.started_at_s,
            "trouble": hub.trouble,
        }

    async def summary(self, request: Request, wanted: Values) -> Document:
        """Return the totals of all devices, and by model."""
        documents = await self.hub.latest()
        every = [item.document for item in documents.devices.values()]
        alive = [device for device in every if device["alive"]]
        models: dict[str, list[Document]] = defaultdict(list)
        for device in alive:
            models[device["name"] or ""].append(device)
        return {
            "at_ms": documents.snapshot.at_ms,
            "title": documents.snapshot.title,
            "of_run": documents.snapshot.of_run,
            **_device_totals(alive),
            "ended": len(every) - len(alive),
            "alerts": len(documents.alerts),
            "models": [{"name": name or None, **_device_totals(devices)} for name, devices in sorted(models.items())],
        }

    async def metrics(self, request: Request, wanted: Values) -> Document:
        """Return each device with its processes."""
        documents = await self.hub.latest()
        processes = await self.hub.read(lambda: self.source.processes(documents))
        task, device, alive = wanted["task"], wanted["device"], wanted["alive"]
        if task is not None:
            _task(documents, task)
        without = {} if wanted["trail"] else {"trail": None}
        found = [
            {**one, "processes": processes.get(one["key"], one["processes"]), **without}
            for one in (item.document for item in documents.devices.values())
            if task in (None, one["task"])
            and device in (None, str(one["index"]), one["uuid"], one["token"], one["key"])
            and alive in (None, one["alive"])
        ]
        if device is not None and not found:
            raise HTTPException(404, f"device {device} does not exist")
        return {"at_ms": documents.snapshot.at_ms, "devices": found}

    async def tasks(self, request: Request, wanted: Values) -> Document:
        """Return the matching tasks, page by page, and the totals of all tasks."""
        documents = await self.hub.latest()
        every = (item.document for item in documents.tasks.values())
        found = [task for task in every if wanted["state"] in (None, task["state"])]
        first, limit = wanted["offset"], wanted["limit"]
        return {
            "at_ms": documents.snapshot.at_ms,
            "title": documents.snapshot.title,
            "verdict": documents.verdict,
            "reading": documents.snapshot.reading,
            "total": documents.total,
            "matched": len(found),
            "tasks": found[first : None if limit is None else first + limit],
            "remarks": list(documents.snapshot.remarks),
        }

    async def one_task(self, request: Request, wanted: Values) -> Document:
        """Return a task with its devices and alerts."""
        documents, name = await self.hub.latest(), request.path_params["name"]
        return {
            "at_ms": documents.snapshot.at_ms,
            "task": _task(documents, name),
            "devices": [item.document for item in documents.devices.values() if item.document["task"] == name],
            "alerts": [alert for alert in documents.alerts if alert["task"] == name],
        }

    async def log(self, request: Request, wanted: Values) -> Document:
        """Return the end of a task's log."""
        name = request.path_params["name"]
        _task(await self.hub.latest(), name)
        found = await self.hub.read(lambda: self.source.log_end(name, wanted["lines"]))
        if found is None:
            raise HTTPException(404, f"{name} has no readable log")
        return {"task": name, "lines": list(found[0]), "whole": found[1]}

    async def alerts(self, request: Request, wanted: Values) -> Document:
        """Return the open alerts."""
        documents = await self.hub.latest()
        return {"at_ms": documents.snapshot.at_ms, "alerts": list(documents.alerts)}

    async def events(self, request: Request, wanted: Values) -> Response:
        """Return a stream of changes."""
        if request.method == "HEAD":
            return _response("", EVENTS)
        return self.hub.join(request.headers.get("last-event-id"))

    async def ws(self, request: Request, wanted: Values) -> Response:
        """Refuse a plain HTTP request."""
        words = "/ws is a WebSocket; /api/events sends the same messages over HTTP"
        return error_response(426, words, {"upgrade": "websocket", "connection": "upgrade"})

    async def prometheus(self, request: Request, wanted: Values) -> str:
        """Return the metrics for Prometheus."""
        documents = await self.hub.latest()
        return await self.hub.read(lambda: self.source.prometheus(documents))


def _task(documents: Documents, name: str) -> Document:
    if name not in documents.tasks:
        raise HTTPException(404, f"task {name[:80]!r} does not exist")
    return documents.tasks[name].document


def _device_totals(devices: Sequence[Document]) -> Document:
    readings = [device["reading"] for device in devices]
    temperatures = [reading["temperature_c"] for reading in readings if reading["temperature_c"] is not None]
    return {
        "devices": len(devices),
        "readable": sum(d["trouble"] is None and d["read_at_ms"] is not None for d in devices),
        "utilization_percent": (busy := mean_of_known(reading["utilization_percent"] for reading in readings)),
        "load": load_word(busy),
        "memory_used_bytes": sum_of_known(reading["memory_used_bytes"] for reading in readings),
        "memory_total_bytes": sum_of_known(device["memory_total_bytes"] for device in devices),
        "temperature_max_c": max(temperatures, default=None),
        "power_w": sum_of_known(reading["power_w"] for reading in readings),
    }


# --- server -----------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server with a callback when it is ready; it disconnects its listeners before it ends."""

    def __init__(self, config: uvicorn.Config, *, started: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = started
        self._on_ending = ending
        self.interrupted = False  # whether Ctrl-C ended it

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then call the callback."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Disconnect the listeners first: their connections never end by themselves."""
        self._on_ending()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully, or immediately at the second signal; remember Ctrl-C. TERM is a normal end."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.force_exit = self.should_exit
        self.should_exit = True


_REQUEST_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 512  # with the files that are open, fewer than the usual limit of 1,024
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(H11Protocol):
    """A connection that must send its request in time, and can be aborted even while data is waiting to be sent."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.write(_TOO_MANY)
            transport.close()
        self._time_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timing()

    def _time_request(self) -> None:
        """Close the connection if a request that has begun is not complete in time, however slowly it arrives."""
        is_websocket = self.transport.get_protocol() is not self  # its request is complete, whatever h11 says
        if is_websocket or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timing()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_timing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def send_400_response(self, msg: str) -> None:
        """Reject input that is not HTTP; a response in progress is abandoned."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
