"""The OpenAPI document of the server, put together from its operations and schemas. Pure."""

from __future__ import annotations

from typing import Any

from badcjobs import __version__
from badcjobs.web.operations import JSON, OPERATIONS, Operation
from badcjobs.web.parameters import Parameter
from badcjobs.web.schemas import SCHEMAS

_MEANINGS = {
    400: "A parameter is unknown, repeated or out of range.",
    401: "The token is missing or wrong.",
    403: "The header Host names another machine (only where the server listens on loopback).",
    404: "There is no such task or device.",
    405: "Only GET and HEAD are answered.",
    503: "Looking takes too long or fails, or too many listen; ask again later.",
}


def document() -> dict[str, Any]:
    """Return the document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "badcjobs serve",
            "version": __version__,
            "description": "A run of bird-sound detectors, or this machine's GPUs, as it is now. null: nobody knows.",
        },
        "security": [{}, {"token": []}],
        "paths": {operation.path: {"get": _describe(operation)} for operation in OPERATIONS},
        "components": {
            "schemas": SCHEMAS,
            "responses": {f"Problem{status}": _problem(words) for status, words in _MEANINGS.items()},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "What was given as --token."}
            },
        },
    }


def _describe(operation: Operation) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{operation.schema}"} if operation.schema else _any(operation.media)
    answers: dict[str, Any] = {
        "200": {"description": operation.summary + ".", "content": {operation.media: {"schema": schema}}},
        **{str(status): {"$ref": f"#/components/responses/Problem{status}"} for status in operation.statuses},
    }
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "description": operation.help,
        "parameters": [*map(_query, operation.parameters), *([_NAME] if operation.of_task else [])],
        "responses": answers,
    }


_NAME = {
    "name": "name", "in": "path", "required": True, "description": "name of a task, from /api/tasks",
    "schema": {"type": "string", "minLength": 1}, "example": "4821_7.r0.gpu1",
}  # fmt: skip


def _any(media: str) -> dict[str, Any]:
    return {"type": "object" if media == JSON else "string"}


def _query(parameter: Parameter) -> dict[str, Any]:
    example = {} if parameter.example is None else {"example": parameter.example}
    return {
        "name": parameter.name,
        "in": "query",
        "required": False,
        "description": parameter.help,
        "schema": parameter.schema,
        **example,
    }


def _problem(words: str) -> dict[str, Any]:
    return {"description": words, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
