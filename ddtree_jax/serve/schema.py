"""Owns the request bodies: which fields exist, their bounds, and what is refused.

Every field either works or is refused by name. A field that OpenAI defines and
this server does not have is declared in a `…Refused` class, where its type admits
only the values that ask for nothing; a field in no class is unknown. `null` always
means "left out". Does not know about the engine or about HTTP.
"""

from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ddtree_jax.errors import RequestError

MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_MESSAGES = 10_000
MAX_USER_CHARS = 256
MAX_INT32 = 2**31 - 1


def _must_be_false(value: bool) -> bool:
    if value:
        raise PydanticCustomError("not_false", "Input should be false")
    return value


TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT32)]

# The values of unsupported fields that ask for nothing.
Off = Annotated[
    bool, AfterValidator(_must_be_false), Field(json_schema_extra={"const": False})
]
One = Annotated[int, Field(ge=1, le=1)]
ZeroInt = Annotated[int, Field(ge=0, le=0)]
Zero = Annotated[float, Field(ge=0, le=0)]
EmptyList = Annotated[list[JsonValue], Field(max_length=0)]
EmptyObject = Annotated[dict[str, JsonValue], Field(max_length=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True
    )


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = Field(
        None, description="Send a last chunk with the token counts."
    )


class TextFormat(_Strict):
    """The only response format there is: free text."""

    type: Literal["text"]


class CompletionRefused(_Strict):
    """Fields of /v1/completions that only accept the value asking for nothing."""

    n: One | None = Field(None, description="1")
    best_of: One | None = Field(None, description="1")
    echo: Off | None = Field(None, description="false")
    logprobs: None = Field(None, description="null")
    suffix: None = Field(None, description="null")
    logit_bias: EmptyObject | None = Field(None, description="{}")
    presence_penalty: Zero | None = Field(None, description="0")
    frequency_penalty: Zero | None = Field(None, description="0")


class ChatRefused(_Strict):
    """Fields of /v1/chat/completions that only accept a value asking for nothing."""

    n: One | None = Field(None, description="1")
    logprobs: Off | None = Field(None, description="false")
    top_logprobs: ZeroInt | None = Field(None, description="0")
    logit_bias: EmptyObject | None = Field(None, description="{}")
    presence_penalty: Zero | None = Field(None, description="0")
    frequency_penalty: Zero | None = Field(None, description="0")
    tools: EmptyList | None = Field(None, description="[]")
    tool_choice: Literal["none"] | None = Field(None, description='"none"')
    parallel_tool_calls: None = Field(None, description="null")
    functions: EmptyList | None = Field(None, description="[]")
    function_call: Literal["none"] | None = Field(None, description='"none"')
    response_format: TextFormat | None = Field(None, description='{"type": "text"}')
    modalities: list[Literal["text"]] | None = Field(None, description='["text"]')
    audio: None = Field(None, description="null")
    prediction: None = Field(None, description="null")
    reasoning_effort: None = Field(None, description="null")
    verbosity: None = Field(None, description="null")
    web_search_options: None = Field(None, description="null")
    store: Off | None = Field(None, description="false")
    metadata: EmptyObject | None = Field(None, description="{}")
    service_tier: None = Field(None, description="null")
    prompt_cache_key: None = Field(None, description="null")
    prompt_cache_retention: None = Field(None, description="null")
    safety_identifier: None = Field(None, description="null")


class _Common(_Strict):
    """What both endpoints understand."""

    refused: ClassVar[frozenset[str]]

    model: str = Field(description="the served model's name")
    max_tokens: PositiveInt | None = Field(
        None, description="most tokens to generate for a prompt"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 to 2; 0 is greedy; default 1"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="above 0, at most 1; default 1"
    )
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = Field(
        None, description="a number of tokens; 0, the default, is off"
    )
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="0 to below 1; default 0"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="a 64-bit integer; without it every call differs"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = (
        Field(
            None,
            description=f"a string of 1 to {MAX_STOP_CHARS} characters or a list of "
            f"at most {MAX_STOPS} of them",
        )
    )
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
        | None
    ) = Field(None, description=f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    ignore_eos: bool | None = Field(
        None, description="go on after the model's end token; default false"
    )
    skip_special_tokens: bool | None = Field(
        None, description="leave special tokens out of the text; default true"
    )
    stream: bool | None = Field(
        None, description="send server-sent events; default false"
    )
    stream_options: StreamOptions | None = Field(
        None, description="only with stream: true"
    )
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] | None = Field(
        None, description="a label of the caller's own, written to the server's log"
    )

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _conflict("stream_options", "is allowed only when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value if the caller gave one."""
        return "max_tokens", self.max_tokens


class CompletionRequest(CompletionRefused, _Common):
    """The body of POST /v1/completions."""

    refused = frozenset(CompletionRefused.model_fields)

    prompt: (
        str
        | TokenIds
        | Annotated[
            list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
        ]
        | Annotated[
            list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
        ]
    ) = Field(
        description="a string, a non-empty list of token ids, or a list of 1 to "
        f"{MAX_PROMPTS} of either kind"
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts in order, whatever form they came in."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [cast("str | list[int]", prompt)]
        return cast("list[str | list[int]]", prompt)


class ChatRequest(ChatRefused, _Common):
    """The body of POST /v1/chat/completions."""

    refused = frozenset(ChatRefused.model_fields)

    messages: Annotated[
        list[dict[str, JsonValue]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    ] = Field(description=f"a list of 1 to {MAX_MESSAGES} message objects")
    max_completion_tokens: PositiveInt | None = Field(
        None, description="the newer name of max_tokens"
    )
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="an object of the chat template's own options"
    )

    @model_validator(mode="after")
    def _one_token_limit(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _conflict(
                "max_completion_tokens", "and max_tokens are both given and differ"
            )
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value if the caller gave one."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit


def parse[T: _Common](model: type[T], data: object) -> T:
    """Returns `data` as a checked request.

    Raises:
      RequestError: Names the first field that is unknown, unsupported or wrong.
    """
    if not isinstance(data, dict):
        kind = "null" if data is None else type(data).__name__
        raise RequestError(f"the body must be a JSON object, not {kind}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _as_request_error(model, error) from None


def _conflict(field: str, message: str) -> PydanticCustomError:
    said = f"{field} {message}"
    return PydanticCustomError("conflict", "{what}", {"field": field, "what": said})


def _as_request_error(model: type[_Common], error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["type"] == "conflict":
        return RequestError(first["msg"], param=first.get("ctx", {})["field"])
    field = str(first["loc"][0])
    path = ".".join(str(part) for part in first["loc"])
    if field in model.refused:
        neutral = model.model_fields[field].description
        allowed = "leave it out" if neutral == "null" else f"only {neutral} is accepted"
        return RequestError(f"{field} is not supported: {allowed}", param=field)
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {path}", param=path)
    if sum(e["loc"][0] == field for e in errors) > 1:
        # A union reports one complaint per member; say what the field takes.
        expected = model.model_fields[field].description
        return RequestError(f"{field}: expected {expected}", param=field)
    return RequestError(f"{path}: {first['msg']}", param=path)
