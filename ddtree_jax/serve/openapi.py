"""Owns the document behind /openapi.json. Does not know what the routes do.

Routes read and write their bodies themselves, so they say here what those are; the
schemas come from the request models and response structs.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from ddtree_jax.serve import wire
from ddtree_jax.serve.http_errors import ErrorBody
from ddtree_jax.serve.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{}"
_REQUESTS = (CompletionRequest, ChatRequest)
_RESPONSES = (
    wire.Completion,
    wire.ChatCompletion,
    wire.ChatChunk,
    wire.ModelCard,
    wire.ModelList,
    ErrorBody,
)
_ERRORS = {
    400: "The body is not JSON, or a field is unknown, unsupported or wrong.",
    404: "No such path or model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    499: "The client went away.",
    500: "A fault in the server or the engine.",
    503: "The server is stopping or the engine has failed.",
}


def _content(kind: type, media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": _REF.format(kind.__name__)}}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        status: {"description": _ERRORS[status], "content": _content(ErrorBody)}
        for status in statuses
    }


def answers(response: type) -> dict[str, Any]:
    """Returns the route arguments for a GET that answers with `response`."""
    ok = {"description": "OK", "content": _content(response)}
    return {"responses": {200: ok, **_errors(404, 500)}}


def health() -> dict[str, Any]:
    """Returns the route arguments for the health check."""
    content = {"application/json": {"schema": {"type": "object"}}}
    ok = {"description": "Requests are served.", "content": content}
    return {"responses": {200: ok, **_errors(500, 503)}}


def generates(request: type, response: type, chunk: type) -> dict[str, Any]:
    """Returns the route arguments for a POST that generates text."""
    ok = {
        "description": "The reply; with stream: true, server-sent events of chunks.",
        "content": _content(response) | _content(chunk, "text/event-stream"),
    }
    body = {"required": True, "content": _content(request)}
    return {
        "responses": {200: ok, **_errors(*_ERRORS)},
        "openapi_extra": {"requestBody": body},
    }


def install(app: FastAPI) -> None:
    """Makes `app` describe its bodies in full."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, routes=app.routes
            )
            for operations in schema["paths"].values():
                for operation in operations.values():
                    # Added by the framework for any path with a parameter; a model's
                    # name can be any string.
                    operation["responses"].pop("422", None)
            schema["components"] = {"schemas": _schemas()}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document


def _schemas() -> dict[str, Any]:
    _, requests = models_json_schema(
        [(model, "validation") for model in _REQUESTS],
        ref_template=_REF.format("{model}"),
    )
    _, responses = msgspec.json.schema_components(
        _RESPONSES, ref_template=_REF.format("{name}")
    )
    return requests["$defs"] | responses
