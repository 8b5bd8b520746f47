"""Owns the way from an HTTP body to engine requests.

Bodies are read here and nowhere else, counted as they arrive. Does not know about
responses.
"""

import asyncio
from functools import partial

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request

import ddtree_jax.engine as engine_api
from ddtree_jax.engine import Engine, SamplingParams
from ddtree_jax.errors import RequestError
from ddtree_jax.serve.http_errors import HttpError
from ddtree_jax.serve.schema import ChatRequest, CompletionRequest

MAX_BODY_BYTES = 16 * 2**20
BODY_TIMEOUT_S = 60.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

# Text is tokenised off the event loop, one body at a time: a long prompt must not
# hold up the streams, and more than one thread would only share the same core.
_tokenising = anyio.CapacityLimiter(1)


async def read_json(request: Request) -> object:
    """Returns the parsed body of `request`.

    Raises:
      HttpError: 413 past `MAX_BODY_BYTES`, 408 when the body takes too long.
      RequestError: The body is empty or not JSON.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _close(413, f"the body is above {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds"
        raise _close(408, message) from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away") from None
    if not body:
        raise RequestError("the body is empty; expected a JSON object")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _close(status: int, message: str) -> HttpError:
    # The rest of the body is still on its way: the connection cannot be reused.
    return HttpError(status, message, headers={"connection": "close"})


async def completion_prompts(
    engine: Engine, body: CompletionRequest
) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt, in order."""
    return [
        tuple(await _off_loop(partial(engine.tokenizer.encode, prompt)))
        if isinstance(prompt, str)
        else tuple(prompt)
        for prompt in body.prompts
    ]


async def chat_prompts(engine: Engine, body: ChatRequest) -> list[tuple[int, ...]]:
    """Returns the token ids of the rendered conversation, as the only prompt."""
    template = engine.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template; use /v1/completions", param="messages"
        )
    kwargs: dict[str, object] = {**(body.chat_template_kwargs or {})}
    encode = partial(template.encode, body.messages, tools=None, kwargs=kwargs)
    return [tuple(await _off_loop(encode))]


async def _off_loop(function: partial) -> list[int]:
    return await anyio.to_thread.run_sync(function, limiter=_tokenising)


def engine_requests(
    engine: Engine,
    body: CompletionRequest | ChatRequest,
    prompts: list[tuple[int, ...]],
    request_id: str,
) -> list[engine_api.Request]:
    """Returns one engine request per prompt. The engine has the last word on them."""
    given = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "seed")
        if (value := getattr(body, name)) is not None
    }
    flags = {
        name: value
        for name in ("ignore_eos", "skip_special_tokens")
        if (value := getattr(body, name)) is not None
    }
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return [
        engine_api.Request(
            request_id=f"{request_id}-{index}",
            prompt_ids=prompt_ids,
            max_tokens=_max_tokens(engine, body, len(prompt_ids)),
            sampling=SamplingParams(**given),
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            **flags,
        )
        for index, prompt_ids in enumerate(prompts)
    ]


def _max_tokens(
    engine: Engine, body: CompletionRequest | ChatRequest, prompt_len: int
) -> int:
    _, asked = body.token_limit
    if asked is not None:
        return asked
    # At least 1, so that a prompt that fills the context is refused by the engine.
    left = max(1, engine.max_context_len - prompt_len)
    if isinstance(body, ChatRequest):
        return left
    return min(DEFAULT_COMPLETION_TOKENS, left)


def public_param(
    error: RequestError, body: CompletionRequest | ChatRequest
) -> RequestError:
    """Returns `error` with the engine's field name replaced by the caller's."""
    names = {"max_tokens": body.token_limit[0]}
    if isinstance(body, ChatRequest):
        names["prompt"] = "messages"
    param = error.param and names.get(error.param, error.param)
    return RequestError(str(error), param=param)
