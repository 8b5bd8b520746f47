"""Owns the error body: every error of the server has the one shape OpenAI uses.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

Does not know which route failed.
"""

import http

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ddtree_jax.errors import EngineError, RequestError

REQUEST_ID_HEADER = "x-request-id"


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in the words of OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorDetail


class HttpError(Exception):
    """An answer other than success, decided by a route; it ends the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def as_http_error(error: Exception) -> HttpError:
    """Returns the HTTP form of `error`; what it does not know becomes a plain 500."""
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), param=error.param)
        case EngineError():
            return HttpError(500, str(error), code="engine_error")
        case HTTPException():
            headers = dict(error.headers) if error.headers else None
            return HttpError(error.status_code, str(error.detail), headers=headers)
        case _:
            return HttpError(500, "internal server error; the server's log says more")


def error_body(error: HttpError) -> ErrorBody:
    """Returns the body that reports `error`."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return ErrorBody(ErrorDetail(str(error), kind, error.param, error.code))


def error_response(error: Exception) -> Response:
    """Returns the response that reports `error`."""
    as_http = as_http_error(error)
    return Response(
        msgspec.json.encode(error_body(as_http)),
        status_code=as_http.status,
        headers=as_http.headers,
        media_type="application/json",
    )


def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        phrase = http.HTTPStatus(error.status_code).phrase.lower()
        message = f"{phrase}: {request.method} {request.url.path}"
        error = HttpError(
            error.status_code,
            message,
            code=phrase.replace(" ", "_"),
            headers=dict(error.headers) if error.headers else None,
        )
    return error_response(error)


def _handle_unexpected(request: Request, error: Exception) -> Response:
    # This handler runs outside the middleware that sets the id; and the error goes on
    # to the HTTP server, which logs it and then drops the connection.
    response = error_response(error)
    response.headers[REQUEST_ID_HEADER] = request.state.request_id
    response.headers["connection"] = "close"
    return response


def install(app: FastAPI) -> None:
    """Makes every error of `app` carry the error body."""
    for kind in (HttpError, RequestError, EngineError, HTTPException):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _handle_unexpected)
