"""Every question of the API as data: its address, parameters and answers. The server and its documents read this."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.web.parameters import Parameter
from badcjobs.web.schemas import TASK_STATES

JSON, TEXT, HTML, EVENTS = "application/json", "text/plain", "text/html", "text/event-stream"
CSS, SCRIPT, SVG = "text/css", "text/javascript", "image/svg+xml"


@dataclass(frozen=True, slots=True)
class Operation:
    """One question, always with GET."""

    name: str
    path: str
    summary: str
    help: str
    media: str = JSON
    schema: str | None = None  # of the answer, in SCHEMAS
    parameters: tuple[Parameter, ...] = ()
    of_task: bool = False  # the path holds the name of a task
    looks: bool = True  # needs a look at the run or machine

    @property
    def statuses(self) -> tuple[int, ...]:
        """The answers besides 200 that it may give."""
        wrong = (400, 401, 403) + ((404,) if self.of_task or self.name == "metrics" else ())
        return (*wrong, 405, *((503,) if self.looks else ()))


_TASK = Parameter("task", "string", "only devices of the task with this name", example="4821_7.r0.gpu1")
_DEVICE = Parameter("device", "string", "only this device: index, UUID, token or key", example="0")
_ALIVE = Parameter("alive", "boolean", "only devices of tasks that go on (true) or have ended (false)")
_TRAIL = Parameter("trail", "boolean", "with what went before, for charts", default=True)
_STATE = Parameter("state", "string", "only tasks in this state", choices=TASK_STATES)
_LIMIT = Parameter("limit", "integer", "at most so many tasks", low=1, high=100_000)
_OFFSET = Parameter("offset", "integer", "leave out so many at the beginning", default=0, low=0, high=10_000_000)
_LINES = Parameter("lines", "integer", "how many lines of the end", default=200, low=1, high=2000)
_TOKEN = Parameter("token", "string", "the token; it becomes a cookie, and the address forgets it")

OPERATIONS = (
    Operation("page", "/", "The live page", "For people. Updates come by themselves.", HTML,
              parameters=(_TOKEN,), looks=False),
    Operation("health", "/api/health", "How the server fares", "Looks at nothing, so it answers even if a disk hangs.",
              schema="Health", looks=False),
    Operation("summary", "/api/gpu/summary", "All devices together", "Those of tasks that go on, or of this machine.",
              schema="Summary"),
    Operation("metrics", "/api/gpu/metrics", "Devices one by one",
              "The last reading of each, with its processes and what went before.",
              schema="Metrics", parameters=(_TASK, _DEVICE, _ALIVE, _TRAIL)),
    Operation("tasks", "/api/tasks", "Array tasks and the total", "State, progress, rate and end of each.",
              schema="Tasks", parameters=(_STATE, _LIMIT, _OFFSET)),
    Operation("one_task", "/api/tasks/{name}", "One array task", "With its devices and alerts.",
              schema="OneTask", of_task=True),
    Operation("log", "/api/tasks/{name}/log", "The end of a task's log", "As it is in the run folder.",
              schema="Log", parameters=(_LINES,), of_task=True),
    Operation("alerts", "/api/alerts", "Trouble that goes on", "As in the table alert.", schema="Alerts"),
    Operation("events", "/api/events", "What changes, as it changes",
              "Server-sent events. snapshot (schema Snapshot) comes first, then change (Change) for what is new, and"
              " beat (Beat) when nothing is. Who comes back with Last-Event-ID gets what was missed, or a new snapshot."
              " Who does not read is disconnected.", EVENTS),
    Operation("prometheus", "/metrics", "For Prometheus", "The same names as badcjobs report --prometheus.", TEXT),
    Operation("openapi", "/openapi.json", "This document", "OpenAPI 3.1.", looks=False),
    Operation("script", "/live.js", "Script of the page", "Served from here: the page asks nobody else.", SCRIPT,
              looks=False),
    Operation("script_words", "/words.js", "Its words", "A part of the script.", SCRIPT, looks=False),
    Operation("script_devices", "/devices.js", "Its devices", "A part of the script.", SCRIPT, looks=False),
    Operation("script_tasks", "/tasks.js", "Its tasks", "A part of the script.", SCRIPT, looks=False),
    Operation("style", "/live.css", "Style of the page", "The same colours as the report.", CSS, looks=False),
    Operation("icon", "/icon.svg", "Icon of the page", "A bird on a chart.", SVG, looks=False),
)  # fmt: skip
