"""Owns the response bodies and the server-sent events.

A reply knows its endpoint's shapes; `collect` and `events` run a generation through
one. Text of all chunks of a choice, joined, is the text of the complete response.
Does not know about requests.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ddtree_jax.engine import Delta
from ddtree_jax.serve.bridge import Generation
from ddtree_jax.serve.http_errors import as_http_error, error_body

PING_S = 15.0
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

FinishReason = Literal["stop", "length"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, all its prompts together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice of a completion, complete or one chunk of it."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/completions, and of each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """What the model answered."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """A complete choice of a chat completion."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message; the role comes with the first one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One chunk of a choice of a chat completion."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """The served model."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "ddtree_jax"


class ModelList(msgspec.Struct, frozen=True):
    """The body of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in every body and chunk of a reply."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Output:
    """The text of one prompt, growing, and why it ended."""

    def __init__(self):
        self._parts: list[str] = []
        self.finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Appends what `delta` brings."""
        self._parts.append(delta.text)
        self.finish_reason = _reason(delta)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)


def _reason(delta: Delta) -> FinishReason | None:
    # `Generation.deltas` raises on "error" before anyone gets here.
    assert delta.finish_reason != "error"
    return delta.finish_reason


class CompletionReply:
    """The shapes of /v1/completions for one request."""

    def __init__(self, stamp: Stamp):
        self._stamp = msgspec.structs.asdict(stamp)

    def complete(self, outputs: Sequence[Output], usage: Usage) -> Completion:
        """Returns the whole response."""
        choices = [
            CompletionChoice(index, output.text, output.finish_reason)
            for index, output in enumerate(outputs)
        ]
        return Completion(**self._stamp, choices=choices, usage=usage)

    def chunk(
        self, index: int, delta: Delta, usage: UnsetType | None = UNSET
    ) -> Completion:
        """Returns the chunk that adds `delta` to choice `index`."""
        choice = CompletionChoice(index, delta.text, _reason(delta))
        return Completion(**self._stamp, choices=[choice], usage=usage)

    def usage_chunk(self, usage: Usage) -> Completion:
        """Returns the last chunk of a stream that asked for token counts."""
        return Completion(**self._stamp, choices=[], usage=usage)


class ChatReply:
    """The shapes of /v1/chat/completions for one request."""

    def __init__(self, stamp: Stamp):
        self._stamp = msgspec.structs.asdict(stamp)
        self._introduced: set[int] = set()

    def complete(self, outputs: Sequence[Output], usage: Usage) -> ChatCompletion:
        """Returns the whole response."""
        choices = [
            ChatChoice(
                index, ChatMessage("assistant", output.text), output.finish_reason
            )
            for index, output in enumerate(outputs)
        ]
        return ChatCompletion(**self._stamp, choices=choices, usage=usage)

    def chunk(
        self, index: int, delta: Delta, usage: UnsetType | None = UNSET
    ) -> ChatChunk:
        """Returns the chunk that adds `delta` to choice `index`."""
        is_first = index not in self._introduced
        self._introduced.add(index)
        message = ChatDelta(
            role="assistant" if is_first else UNSET,
            content=delta.text if is_first or delta.text else UNSET,
        )
        choice = ChatChunkChoice(index, message, _reason(delta))
        return ChatChunk(**self._stamp, choices=[choice], usage=usage)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Returns the last chunk of a stream that asked for token counts."""
        return ChatChunk(**self._stamp, choices=[], usage=usage)


Reply = CompletionReply | ChatReply


def usage_of(generation: Generation) -> Usage:
    """Returns the token counts of `generation` so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return Usage(prompt, completion, prompt + completion)


async def collect(reply: Reply, generation: Generation) -> bytes:
    """Returns the complete response once every prompt has ended."""
    outputs = [Output() for _ in generation.finish_reasons]
    async with aclosing(generation.deltas()) as deltas:
        async for item in deltas:
            if item is not None:
                index, delta = item
                outputs[index].add(delta)
    return _encode(reply.complete(outputs, usage_of(generation)))


async def events(
    reply: Reply, generation: Generation, *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """Yields the stream's events: chunks, the usage if asked for, `[DONE]`.

    A comment line goes out whenever nothing else did for `PING_S`. An error after the
    start ends the stream with an error event and without `[DONE]`.
    """
    pending_usage = None if include_usage else UNSET
    try:
        async with aclosing(generation.deltas(idle_s=PING_S)) as deltas:
            async for item in deltas:
                if item is None:
                    yield PING
                    continue
                index, delta = item
                if delta.text or delta.finish_reason is not None:
                    yield _event(reply.chunk(index, delta, pending_usage))
    except Exception as error:
        as_http = as_http_error(error)
        if as_http.code is None:
            _log.exception("a stream failed")
        yield _event(error_body(as_http))
        return
    if include_usage:
        yield _event(reply.usage_chunk(usage_of(generation)))
    yield DONE


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"
