"""Owns the routes, and what happens when a client goes away.

A handler reads the body (`intake`), starts a `Generation` (`bridge`) and writes the
reply (`wire`). Does not know how the engine works or how the process is run.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree_jax.engine import Engine
from ddtree_jax.errors import EngineError, RequestError
from ddtree_jax.serve import http_errors, intake, openapi, wire
from ddtree_jax.serve.bridge import Generation
from ddtree_jax.serve.http_errors import REQUEST_ID_HEADER, HttpError
from ddtree_jax.serve.schema import ChatRequest, CompletionRequest, parse

_log = logging.getLogger("ddtree_jax.serve.requests")


@dataclass(kw_only=True)
class Served:
    """What is being served.

    Attributes:
      engine: Loaded; the app starts and closes it.
      model_name: The only name that requests may use.
      fingerprint: Changes when the model or the way it is run changes.
      stopping: Set once by the process when it begins to shut down.
      created: Start of the server, seconds since 1970.
    """

    engine: Engine
    model_name: str
    fingerprint: str
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_running(self) -> None:
        """Raises a 503 if nothing can be generated any more."""
        if self.stopping:
            raise HttpError(503, "the server is stopping", code="stopping")
        failed = self.engine.status()["failed"]
        if failed is not None:
            message = f"the engine has failed: {failed}"
            raise HttpError(503, message, code="engine_failed")


def create_app(served: Served) -> FastAPI:
    """Returns the ASGI application that serves `served`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(served.engine.close)

    app = FastAPI(
        title="ddtree_jax",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(_RequestIds)
    http_errors.install(app)
    _add_state_routes(app, served)
    _add_generation_routes(app, served)
    openapi.install(app)
    return app


def _add_state_routes(app: FastAPI, served: Served) -> None:
    card = wire.ModelCard(
        served.model_name, served.created, served.engine.max_context_len
    )

    @app.get("/health", **openapi.health())
    async def health() -> Response:
        served.check_running()
        status = served.engine.status()
        return _json({"status": "ok"} | status)

    @app.get("/v1/models", **openapi.answers(wire.ModelList))
    async def models() -> Response:
        return _json(wire.ModelList([card]))

    @app.get("/v1/models/{model_id:path}", **openapi.answers(wire.ModelCard))
    async def model(model_id: str) -> Response:
        _check_model(served, model_id)
        return _json(card)


def _add_generation_routes(app: FastAPI, served: Served) -> None:
    @app.post(
        "/v1/completions",
        **openapi.generates(CompletionRequest, wire.Completion, wire.Completion),
    )
    async def completions(request: Request) -> Response:
        served.check_running()
        body = parse(CompletionRequest, await intake.read_json(request))
        _check_model(served, body.model)
        prompts = await intake.completion_prompts(served.engine, body)
        reply = wire.CompletionReply(_stamp(served, f"cmpl-{uuid.uuid4().hex}"))
        return await _answer(served, request, body, prompts, reply)

    @app.post(
        "/v1/chat/completions",
        **openapi.generates(ChatRequest, wire.ChatCompletion, wire.ChatChunk),
    )
    async def chat(request: Request) -> Response:
        served.check_running()
        body = parse(ChatRequest, await intake.read_json(request))
        _check_model(served, body.model)
        prompts = await intake.chat_prompts(served.engine, body)
        reply = wire.ChatReply(_stamp(served, f"chatcmpl-{uuid.uuid4().hex}"))
        return await _answer(served, request, body, prompts, reply)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _check_model(served: Served, name: str) -> None:
    if name != served.model_name:
        message = f"no model {name!r}; this server has {served.model_name!r}"
        raise HttpError(404, message, param="model", code="model_not_found")


def _stamp(served: Served, reply_id: str) -> wire.Stamp:
    return wire.Stamp(
        id=reply_id,
        created=int(time.time()),
        model=served.model_name,
        system_fingerprint=served.fingerprint,
    )


async def _answer(
    served: Served,
    request: Request,
    body: CompletionRequest | ChatRequest,
    prompts: list[tuple[int, ...]],
    reply: wire.Reply,
) -> Response:
    """Returns the response, complete or about to be streamed."""
    request_id = request.state.request_id
    requests = intake.engine_requests(served.engine, body, prompts, request_id)
    try:
        generation = Generation(served.engine, requests)
    except RequestError as error:
        raise intake.public_param(error, body) from None
    except EngineError as error:
        raise HttpError(503, str(error), code="engine_failed") from None
    record = _Record(request, body, generation)
    if body.stream:
        events = wire.events(reply, generation, include_usage=body.include_usage)
        return _EventStream(events, record)
    with record:
        return await _unless_disconnected(request, wire.collect(reply, generation))


async def _unless_disconnected(
    request: Request, collecting: Coroutine[None, None, bytes]
) -> Response:
    # The web framework runs a handler to its end even if the client has gone, so the
    # work races the disconnect message. The body has been read: nothing else comes.
    work = asyncio.ensure_future(collecting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise HttpError(499, "the client went away", code="disconnected")
        return Response(work.result(), media_type="application/json")
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Record:
    """Closes a generation and writes its log line, whatever way it ends."""

    def __init__(
        self,
        request: Request,
        body: CompletionRequest | ChatRequest,
        generation: Generation,
    ):
        self._started = time.monotonic()
        self._generation = generation
        self._facts = {
            "request_id": request.state.request_id,
            "path": request.url.path,
            "user": body.user,
            "stream": bool(body.stream),
        }

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        generation = self._generation
        generation.close()
        facts = self._facts | {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.completion_tokens,
            "finish_reasons": generation.finish_reasons,
            "seconds": round(time.monotonic() - self._started, 3),
        }
        # JSON, so that nothing a caller wrote can look like a line of its own.
        _log.info(msgspec.json.encode(facts).decode())


class _EventStream(StreamingResponse):
    """Streams events and closes the generation even if none was ever asked for."""

    def __init__(self, events: AsyncGenerator[bytes], record: _Record):
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._events = events
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Cancellation may strike in `send`, where the generator does not see it.
        with self._record:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


class _RequestIds:
    """Gives every request an id, in `request.state` and in the response's header."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
