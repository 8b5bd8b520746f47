"""Every field works or is refused by name; values that ask for nothing pass."""

import math

import pytest

from ddtree_jax.errors import RequestError
from ddtree_jax.serve.schema import ChatRequest, CompletionRequest, parse

COMPLETION = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
BASE = {CompletionRequest: COMPLETION, ChatRequest: CHAT}
BOTH = (CompletionRequest, ChatRequest)


def refusal(request_model, /, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(request_model, BASE[request_model] | fields)
    return caught.value


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("name", ["foo", "repetition_penalty", "best-of", "", "Model"])
@pytest.mark.parametrize("value", [1, None])
def test_unknown_fields_are_named(model, name, value):
    error = refusal(model, **{name: value})
    assert (error.param, str(error)) == (name, f"unknown field {name}")


def test_unknown_nested_field_is_named():
    error = refusal(ChatRequest, stream=True, stream_options={"chunk_tokens": 3})
    assert error.param == "stream_options.chunk_tokens"


REFUSED = [
    (BOTH, "n", 2, "only 1 is accepted"),
    (BOTH, "n", True, "only 1 is accepted"),
    (BOTH, "logit_bias", {"5": 1}, "only {} is accepted"),
    (BOTH, "presence_penalty", 0.1, "only 0 is accepted"),
    (BOTH, "frequency_penalty", -2, "only 0 is accepted"),
    (BOTH, "logprobs", True, ""),
    ((CompletionRequest,), "logprobs", 0, "leave it out"),
    ((CompletionRequest,), "best_of", 2, "only 1 is accepted"),
    ((CompletionRequest,), "echo", True, "only false is accepted"),
    ((CompletionRequest,), "echo", 0, "only false is accepted"),
    ((CompletionRequest,), "suffix", "x", "leave it out"),
    ((ChatRequest,), "top_logprobs", 3, "only 0 is accepted"),
    ((ChatRequest,), "tools", [{"type": "function"}], "only [] is accepted"),
    ((ChatRequest,), "tool_choice", "auto", 'only "none" is accepted'),
    ((ChatRequest,), "parallel_tool_calls", True, "leave it out"),
    ((ChatRequest,), "functions", [{}], "only [] is accepted"),
    ((ChatRequest,), "function_call", "auto", 'only "none" is accepted'),
    ((ChatRequest,), "response_format", {"type": "json_object"}, '{"type": "text"}'),
    ((ChatRequest,), "response_format", {"type": "text", "x": 1}, '{"type": "text"}'),
    ((ChatRequest,), "modalities", ["audio"], 'only ["text"] is accepted'),
    ((ChatRequest,), "audio", {"voice": "x"}, "leave it out"),
    ((ChatRequest,), "reasoning_effort", "low", "leave it out"),
    ((ChatRequest,), "store", True, "only false is accepted"),
    ((ChatRequest,), "metadata", {"a": "b"}, "only {} is accepted"),
    ((ChatRequest,), "service_tier", "flex", "leave it out"),
]


@pytest.mark.parametrize(("models", "name", "value", "hint"), REFUSED)
def test_unsupported_fields_are_named(models, name, value, hint):
    for model in models:
        error = refusal(model, **{name: value})
        assert error.param == name
        assert str(error).startswith(f"{name} is not supported: ")
        assert hint in str(error)


def test_every_refused_field_has_a_case():
    tried = {(model, name) for models, name, _, _ in REFUSED for model in models}
    untried = {(model, name) for model in BOTH for name in model.refused} - tried
    only_null = {
        "prediction",
        "verbosity",
        "web_search_options",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
    assert untried == {(ChatRequest, name) for name in only_null}
    for name in only_null:
        assert refusal(ChatRequest, **{name: "x"}).param == name


NEUTRAL = {
    "n": 1,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
}
NEUTRAL_CHAT = NEUTRAL | {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "metadata": {},
}
NEUTRAL_COMPLETION = NEUTRAL | {"best_of": 1, "echo": False}


def test_values_that_ask_for_nothing_pass():
    parse(ChatRequest, CHAT | NEUTRAL_CHAT)
    parse(CompletionRequest, COMPLETION | NEUTRAL_COMPLETION)


@pytest.mark.parametrize("model", BOTH)
def test_null_means_left_out(model):
    optional = [n for n, f in model.model_fields.items() if not f.is_required()]
    assert parse(model, BASE[model] | dict.fromkeys(optional)) == parse(
        model, BASE[model]
    )


BAD_VALUES = [
    ("model", 3),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 1.0),
    ("max_tokens", "7"),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", False),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -1),
    ("top_k", 2**31),
    ("min_p", 1),
    ("min_p", -0.1),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 257),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("skip_special_tokens", "false"),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("user", "x" * 257),
    ("user", 4),
]


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_values_are_named(model, name, value):
    error = refusal(model, **{name: value})
    assert error.param == name
    assert name in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("value", [[-1], [2**31], ["1"], [True], [1] * 65])
def test_bad_stop_token_ids_are_named(value):
    error = refusal(CompletionRequest, stop_token_ids=value)
    assert error.param.split(".")[0] == "stop_token_ids"


@pytest.mark.parametrize(
    "prompt",
    [None, 1, {}, [], [[]], [1, "a"], ["a", 1], [[1], "a"], [[[1]]]],
)
def test_bad_prompt_forms_say_what_is_expected(prompt):
    error = refusal(CompletionRequest, prompt=prompt)
    assert error.param == "prompt"
    assert "expected a string, a non-empty list of token ids" in str(error)


@pytest.mark.parametrize(
    "prompt",
    [[-1], [2**31], [1.0], [True], [10**30], ["a"] * 65, [[1]] * 65, [[1], [-1]]],
)
def test_bad_prompt_values_say_what_is_expected(prompt):
    error = refusal(CompletionRequest, prompt=prompt)
    assert error.param == "prompt"
    assert "expected a string, a non-empty list of token ids" in str(error)


@pytest.mark.parametrize(
    "prompt", ["", "a", [1, 2], ["a"], ["a", "b"], [[1], [2, 3]], ["a"] * 64]
)
def test_good_prompts_pass_unchanged(prompt):
    assert parse(CompletionRequest, COMPLETION | {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("messages", [None, [], "hi", ["hi"], [None], {}])
def test_bad_messages_are_named(messages):
    error = refusal(ChatRequest, messages=messages)
    assert error.param.split(".")[0] == "messages"


@pytest.mark.parametrize(
    ("model", "missing"),
    [(CompletionRequest, "prompt"), (ChatRequest, "messages"), (ChatRequest, "model")],
)
def test_missing_fields_are_named(model, missing):
    body = {k: v for k, v in BASE[model].items() if k != missing}
    with pytest.raises(RequestError, match=f"^{missing}: Field required$"):
        parse(model, body)


@pytest.mark.parametrize(
    ("body", "kind"), [([], "list"), (None, "null"), ("x", "str"), (3, "int")]
)
def test_body_must_be_an_object(body, kind):
    with pytest.raises(RequestError, match=f"must be a JSON object, not {kind}"):
        parse(ChatRequest, body)


def test_two_token_limits_must_agree():
    error = refusal(ChatRequest, max_tokens=3, max_completion_tokens=4)
    assert error.param == "max_completion_tokens"
    both = parse(ChatRequest, CHAT | {"max_tokens": 3, "max_completion_tokens": 3})
    assert both.token_limit == ("max_completion_tokens", 3)
    assert parse(ChatRequest, CHAT | {"max_tokens": 5}).token_limit == ("max_tokens", 5)
    assert refusal(CompletionRequest, max_completion_tokens=4).param == (
        "max_completion_tokens"
    )
