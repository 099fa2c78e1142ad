"""The web application: endpoints and their handlers; errors are JSON with a reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from badcjobs.live.access import Guard, is_same_secret
from badcjobs.live.documents import Documents, LiveSource, json_text
from badcjobs.live.hub import Hub, unavailable
from badcjobs.live.snapshot import STATES, Document, mean_of_known, sum_of_known
from badcjobs.model import load_word, not_none
from badcjobs.store.connect import grouped
from badcjobs.version import __version__

_LOG = logging.getLogger(__name__)
_ASSETS = Path(__file__).parent / "assets"
_MAX_LISTENERS = 256
JSON, HTML, SCRIPT = "application/json", "text/html", "text/javascript"
# The page loads its scripts and styles from this server only, and connects to no other server.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
# Not an HTTP redirect: a browser that followed a link on another site would not send the SameSite=Strict cookie.
_TOKEN_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">'
    '<title>badcjobs</title><link rel="icon" href="icon.svg"></head>'
    '<body><p><a href="./">Continue to the live page</a></p></body></html>\n'
)


# --- endpoints --------------------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """A query parameter: the pattern of its text, the same in words, and its type."""

    name: str
    pattern: str
    allowed: str
    type: Callable[[str], Any] = str
    default: Any = None


def _is_true(text: str) -> bool:
    return text in ("true", "1")


class Endpoint(NamedTuple):
    """A path for GET; ``name`` is a method of Handlers or a file. ``badcjobs guide live`` lists all paths."""

    name: str
    path: str
    media: str = JSON
    parameters: Sequence[Parameter] = ()


_TEXT = (".{0,200}", "at most 200 characters")
_BOOLEAN = ("true|false|1|0", "true or false", _is_true)
_OF_METRICS = (
    Parameter("task", *_TEXT),
    Parameter("device", *_TEXT),
    Parameter("alive", *_BOOLEAN),
    Parameter("trail", *_BOOLEAN, default=True),
)
_OF_TASKS = (
    Parameter("state", "|".join(STATES), f"one of {', '.join(STATES)}"),
    Parameter("limit", "[1-9][0-9]{0,5}", "a whole number from 1 to 999999", int),
    Parameter("offset", "[0-9]{1,8}", "a whole number", int, default=0),
)
_OF_LOG = (Parameter("lines", "[1-9][0-9]{0,3}", "a whole number from 1 to 9999", int, default=200),)

ENDPOINTS = (
    Endpoint("page", "/", HTML, [Parameter("token", *_TEXT)]),
    Endpoint("health", "/api/health"),
    Endpoint("summary", "/api/gpu/summary"),
    Endpoint("metrics", "/api/gpu/metrics", JSON, _OF_METRICS),
    Endpoint("tasks", "/api/tasks", JSON, _OF_TASKS),
    Endpoint("one_task", "/api/tasks/{name}"),
    Endpoint("log", "/api/tasks/{name}/log", JSON, _OF_LOG),
    Endpoint("alerts", "/api/alerts"),
    Endpoint("ws", "/ws"),
    Endpoint("prometheus", "/metrics", "text/plain; version=0.0.4"),
    Endpoint("live.js", "/live.js", SCRIPT),
    Endpoint("words.js", "/words.js", SCRIPT),
    Endpoint("devices.js", "/devices.js", SCRIPT),
    Endpoint("tasks.js", "/tasks.js", SCRIPT),
    Endpoint("live.css", "/live.css", "text/css"),
    Endpoint("icon.svg", "/icon.svg", "image/svg+xml"),
)


# --- application ------------------------------------------------------------------------------------------------------


def make_app(hub: Hub, source: LiveSource, guard: Guard) -> ASGIApp:
    """Return the application: the guard checks every request, and every response has our headers."""
    handlers = Handlers(hub, source, guard)
    routes = [_route(endpoint, handlers) for endpoint in ENDPOINTS]
    errors: dict[Any, Any] = {HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=errors)
    app.router.redirect_slashes = False

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            guard.check(scope)
            answer = app if scope["type"] == "http" else _listener(hub, scope["path"])
        except HTTPException as error:
            answer = error_response(error.status_code, error.detail, error.headers)
        try:
            await answer(scope, receive, send)
        except Exception:
            # The response has been sent already. Do not log the query: it may contain a token.
            _LOG.exception("internal error at %s", scope["path"])

    return guarded_app


def _listener(hub: Hub, path: str) -> ASGIApp:
    """Return the application for a WebSocket; raise HTTPException if it is refused."""
    if path != "/ws":
        raise HTTPException(404, "the only WebSocket is /ws")
    if hub.listeners >= _MAX_LISTENERS:
        raise unavailable(f"too many listeners ({hub.listeners})")
    return hub.follow


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as a JSON response."""
    return _response(json_text({"status": status, "error": message}), JSON, status, headers)


def _response(body: str, media: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    if media != JSON:
        media = f"{media}; charset=utf-8"  # without it, browsers would read scripts as Latin-1
    encoded = body.encode("utf-8", "replace")  # a file name may not be valid Unicode
    return Response(encoded, status, {**_HEADERS, "content-type": media, **(headers or {})})


def _http_error(request: Request, error: HTTPException) -> Response:
    if error.detail == "Not Found":  # Starlette's text for an unknown path
        return error_response(404, f"{request.url.path[:80]} does not exist: badcjobs guide live lists all paths")
    if error.status_code == 405:
        return error_response(405, f"{request.method[:20]} is not supported, only GET and HEAD", {"allow": "GET, HEAD"})
    return error_response(error.status_code, error.detail, error.headers)


def _internal_error(_request: Request, _error: Exception) -> Response:
    return error_response(500, "internal error; see the terminal of the server")


def _route(endpoint: Endpoint, handlers: Handlers) -> Route:
    handler = getattr(handlers, endpoint.name, None)

    async def respond(request: Request) -> Response:
        query = _parse_query(endpoint, request.query_params)
        if handler is None:
            return _response(_read_asset(endpoint.name), endpoint.media)
        content = await handler({**request.path_params, **query})
        if isinstance(content, Response):
            return content
        text = content if isinstance(content, str) else json_text(content)
        return _response(text, endpoint.media)

    return Route(endpoint.path, respond, methods=["GET"])


def _read_asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _parse_query(endpoint: Endpoint, query: QueryParams) -> dict[str, Any]:
    """Return the value of each parameter; raise a 400 for a wrong one."""
    names = [parameter.name for parameter in endpoint.parameters]
    for name in query:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise HTTPException(400, f"unknown parameter {name[:40]!r} (known: {allowed})")
    values = {}
    for name, pattern, allowed, read, default in endpoint.parameters:
        text = query.get(name)
        if text is not None and not re.fullmatch(pattern, text, re.DOTALL):
            raise HTTPException(400, f"{name}={text[:20]}: must be {allowed}")
        values[name] = default if text is None else read(text)
    return values


Values = Mapping[str, Any]  # of the path and the parameters of a request


class Handlers(NamedTuple):
    """One method for each endpoint that is not a file."""

    hub: Hub
    source: LiveSource
    guard: Guard

    async def page(self, values: Values) -> str | Response:
        """Return the live page; a token in the URL becomes a cookie."""
        if values["token"] is None or self.guard.token is None:
            return _read_asset("live.html")
        if not is_same_secret(values["token"], self.guard.token):
            raise HTTPException(401, "the token is wrong")
        return _response(_TOKEN_PAGE, HTML, headers={"set-cookie": self.guard.cookie})

    async def health(self, _values: Values) -> Document:
        """Return the state of the server, without waiting for new data."""
        hub = self.hub
        last = hub.last and hub.last.snapshot
        status = "ok" if last else "starting"
        if hub.trouble:
            status = "stale"
        hub.refresh()  # so that the next request sees the result, even without listeners
        return {
            "status": status,
            "version": __version__,
            "at_ms": last and last.at_ms,
            "age_s": hub.age_s,
            "looks": hub.looks,
            "listeners": hub.listeners,
            "uptime_s": hub.clock.monotonic_s() - hub.started_at_s,
            "trouble": hub.trouble,
        }

    async def summary(self, _values: Values) -> Document:
        """Return the totals of all devices, and by model."""
        documents = await self.hub.latest()
        devices = [item.document for item in documents.devices.values()]
        alive = [device for device in devices if device["alive"]]
        by_model = grouped((device["name"] or "", device) for device in alive)
        models = [{"name": name or None, **_device_totals(by_model[name])} for name in sorted(by_model)]
        return {
            "at_ms": documents.state["at_ms"],
            **_device_totals(alive),
            "ended": len(devices) - len(alive),
            "models": models,
        }

    async def metrics(self, values: Values) -> Document:
        """Return each device with its processes."""
        documents = await self.hub.latest()
        if values["task"] is not None:
            _task(documents, values["task"])
        devices = [item.document for item in documents.devices.values() if _is_selected(item.document, values)]
        if values["device"] is not None and not devices:
            raise HTTPException(404, f"device {values['device']} does not exist")
        processes = await self.hub.read(lambda: self.source.processes(devices))
        devices = [{**device, "processes": processes.get(device["key"], device["processes"])} for device in devices]
        if not values["trail"]:
            devices = [{**device, "trail": None} for device in devices]
        return {"at_ms": documents.state["at_ms"], "devices": devices}

    async def tasks(self, values: Values) -> Document:
        """Return the matching tasks, page by page, and the totals of all tasks."""
        documents = await self.hub.latest()
        tasks = [item.document for item in documents.tasks.values()]
        if values["state"] is not None:
            tasks = [task for task in tasks if task["state"] == values["state"]]
        page = tasks[values["offset"] :]
        return {**documents.state, "matched": len(tasks), "tasks": page[: values["limit"]]}

    async def one_task(self, values: Values) -> Document:
        """Return a task with its devices and alerts."""
        documents = await self.hub.latest()
        name = values["name"]
        devices = [item.document for item in documents.devices.values()]
        return {
            "at_ms": documents.state["at_ms"],
            "task": _task(documents, name),
            "devices": [device for device in devices if device["task"] == name],
            "alerts": [alert for alert in documents.state["alerts"] if alert["task"] == name],
        }

    async def log(self, values: Values) -> Document:
        """Return the end of a task's log."""
        name = values["name"]
        _task(await self.hub.latest(), name)
        log_end = await self.hub.read(lambda: self.source.log_end(name, values["lines"]))
        if log_end is None:
            raise HTTPException(404, f"{name} has no readable log")
        lines, whole = log_end
        return {"task": name, "lines": list(lines), "whole": whole}

    async def alerts(self, _values: Values) -> Document:
        """Return the open alerts."""
        documents = await self.hub.latest()
        return {"at_ms": documents.state["at_ms"], "alerts": documents.state["alerts"]}

    async def ws(self, _values: Values) -> Response:
        """Refuse a plain HTTP request."""
        headers = {"upgrade": "websocket", "connection": "upgrade"}
        return error_response(426, "/ws is a WebSocket; /api/tasks answers plain requests", headers)

    async def prometheus(self, _values: Values) -> str:
        """Return the metrics for Prometheus."""
        documents = await self.hub.latest()
        return await self.hub.read(lambda: self.source.prometheus(documents))


def _task(documents: Documents, name: str) -> Document:
    if name not in documents.tasks:
        raise HTTPException(404, f"task {name[:80]!r} does not exist")
    return documents.tasks[name].document


def _is_selected(device: Document, values: Values) -> bool:
    """Return whether a device matches the parameters ``task``, ``alive`` and ``device`` of a request."""
    names = (str(device["index"]), device["uuid"], device["token"], device["key"])
    return (
        values["task"] in (None, device["task"])
        and values["alive"] in (None, device["alive"])
        and values["device"] in (None, *names)
    )


def _device_totals(devices: Sequence[Document]) -> Document:
    readings = [device["reading"] for device in devices]
    utilization_percent = mean_of_known(reading["utilization_percent"] for reading in readings)
    return {
        "devices": len(devices),
        "readable": sum(d["trouble"] is None and d["read_at_ms"] is not None for d in devices),
        "utilization_percent": utilization_percent,
        "load": load_word(utilization_percent),
        "memory_used_bytes": sum_of_known(reading["memory_used_bytes"] for reading in readings),
        "memory_total_bytes": sum_of_known(device["memory_total_bytes"] for device in devices),
        "temperature_max_c": max(not_none(reading["temperature_c"] for reading in readings), default=None),
        "power_w": sum_of_known(reading["power_w"] for reading in readings),
    }
