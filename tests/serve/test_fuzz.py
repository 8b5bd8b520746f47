"""Whatever the body is, the answer is a success or names the fault: never a 500."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.serve.schema import ChatRequest, CompletionRequest
from tests.serve.support import MODEL, EngineDouble, LiveServer, until

# The same bodies every time: the test also asserts which outcomes they reach.
RUN = settings(max_examples=150, derandomize=True)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1e308, -0.0, 5e-324])
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "king"]) | values},
        optional={"content": texts | values, "name": values},
    ),
    max_size=3,
)
plausible = {
    "model": st.sampled_from([MODEL] * 7 + ["other"]),
    "prompt": texts | st.lists(texts | st.integers(0, 300), max_size=3),
    "messages": messages,
    "max_tokens": st.integers(1, 20),
    "max_completion_tokens": st.integers(1, 20),
    "temperature": st.floats(0, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": texts | st.lists(texts, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "n": st.just(1),
}


def bodies(model) -> st.SearchStrategy[dict]:
    """Objects that are nearly requests: mostly sound fields, a few strange ones."""
    names = list(model.model_fields)
    sound = {n: s for n, s in plausible.items() if n in names}
    required = {
        n: sound.pop(n) for n in list(sound) if n in ("model", "prompt", "messages")
    }
    strange = st.dictionaries(st.sampled_from(names) | texts, values, max_size=2)
    return st.builds(
        lambda base, odd: base | odd,
        st.fixed_dictionaries(required, optional=sound),
        strange,
    )


@pytest.fixture(scope="module")
def live():
    with LiveServer(EngineDouble()) as server:
        yield server


@pytest.fixture(scope="module")
def module_http(live):
    with httpx.Client(base_url=live.url, timeout=20) as client:
        yield client


def check(response: httpx.Response) -> int:
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.json()["usage"]["completion_tokens"] > 0
    return response.status_code


@pytest.mark.parametrize(
    ("path", "model"),
    [("/v1/completions", CompletionRequest), ("/v1/chat/completions", ChatRequest)],
)
def test_nearly_requests(live, module_http, path, model):
    seen = set()

    @RUN
    @given(body=bodies(model))
    def post(body):
        seen.add(check(module_http.post(path, json=body)))

    post()
    assert seen == {200, 400, 404}, "the bodies do not reach every outcome"
    assert until(lambda: live.engine.busy() == 0)


@RUN
@given(body=values.map(json.dumps).map(str.encode) | st.binary(max_size=40))
def test_any_body(module_http, body):
    assert check(module_http.post("/v1/chat/completions", content=body)) == 400
