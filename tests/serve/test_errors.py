"""Every error has the error body, the right status, and leaves the server serving."""

import re
import socket

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from ddtree_jax.serve import intake
from tests.serve.support import (
    CRASH_PROMPT,
    FAULT_PROMPT,
    MARKUP,
    MODEL,
    EngineDouble,
    LiveServer,
    until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def detail(response: httpx.Response, status: int) -> dict:
    """Returns the error object, after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert error["type"] == kind
    return error


def complete(http, **fields) -> httpx.Response:
    return http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a"} | fields)


def routes(server) -> list[APIRoute]:
    app = server._server.config.app
    found = [r for r in app.routes if isinstance(r, APIRoute)]
    assert {r.path for r in found} >= {"/health", "/v1/models", COMPLETIONS, CHAT}
    return found


def test_walk_over_all_routes(http, server):
    for route in routes(server):
        path = re.sub(r"\{.*\}", "nobody", route.path)
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}:
            response = http.request(method, path, content=b"{")
            if method not in route.methods:
                detail(response, 405)
                assert response.headers["allow"]
            elif method == "POST":
                detail(response, 400)
            elif path.endswith("nobody"):
                assert detail(response, 404)["code"] == "model_not_found"
            else:
                assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/completions/", "/docs", "/%00", "/é"]
)
def test_unknown_paths(http, path):
    assert detail(http.get(path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object, not list"),
        (b"null", "must be a JSON object, not null"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_request(http, path, body, message):
    assert message in detail(http.post(path, content=body), 400)["message"]


def test_errors_reach_the_openai_client(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", n=3)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_refusals_name_the_callers_field(http, server, stream):
    error = detail(complete(http, prompt="", stream=stream), 400)
    assert (error["message"], error["param"]) == ("the prompt is empty", "prompt")
    error = detail(complete(http, prompt=[300], stream=stream), 400)
    assert error["param"] == "prompt"
    error = detail(complete(http, max_tokens=512, stream=stream), 400)
    assert error["param"] == "max_tokens"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 500}]}
    response = http.post(CHAT, json=body | {"max_completion_tokens": 9})
    assert detail(response, 400)["param"] == "max_completion_tokens"
    body["messages"] *= 2
    assert detail(http.post(CHAT, json=body), 400)["param"] == "messages"
    assert server.engine.busy() == 0


def test_one_refused_prompt_cancels_the_others(http, server):
    server.engine.gate.clear()
    detail(complete(http, prompt=["a", "b", ""]), 400)
    assert server.engine.busy() == 0
    assert server.engine.cancelled == [r.request_id for r in server.engine.submitted]


def test_bad_messages_and_template_options(http):
    body = {"model": MODEL, "messages": [{"role": "king", "content": "x"}]}
    assert detail(http.post(CHAT, json=body), 400)["param"] == "messages"
    body["messages"] = [{"role": "user", "content": "x"}]
    body["chat_template_kwargs"] = {"messages": []}
    error = detail(http.post(CHAT, json=body), 400)
    assert error["param"] == "chat_template_kwargs"


def test_markup_in_user_text_stays_text(http, server):
    complete(http, prompt=MARKUP)
    assert bytes(server.engine.submitted[-1].prompt_ids).decode() == MARKUP


def test_no_chat_template(http, server):
    server.engine.chat_template = None
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    error = detail(http.post(CHAT, json=body), 400)
    assert "no chat template" in error["message"]


def test_a_fault_of_one_request(http, client, server):
    error = detail(complete(http, prompt=FAULT_PROMPT), 500)
    assert (error["message"], error["code"]) == ("non-finite logits", "engine_error")
    response = complete(http, prompt=[FAULT_PROMPT, "b"], stream=True, max_tokens=99)
    assert response.status_code == 200
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last.startswith('data: {"error":{"message":"non-finite logits"')
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError, match="non-finite logits"):
        list(client.completions.create(model=MODEL, prompt=FAULT_PROMPT, stream=True))
    assert until(lambda: server.engine.busy() == 0), "the other prompt still runs"
    assert complete(http).status_code == 200


def test_a_bug_is_a_500_that_tells_nothing(http):
    response = complete(http, prompt=CRASH_PROMPT)
    error = detail(response, 500)
    assert response.headers["connection"] == "close"
    assert error["message"] == "internal server error; the server's log says more"
    assert complete(http).status_code == 200


def test_failed_engine(http, server):
    assert http.get("/health").json()["status"] == "ok"
    server.engine.failed = "device lost"
    for response in (complete(http), http.get("/health")):
        error = detail(response, 503)
        assert error["message"] == "the engine has failed: device lost"
        assert error["code"] == "engine_failed"


def test_stopping_server(http, server):
    server.served.stopping = True
    for response in (complete(http), http.get("/health")):
        assert detail(response, 503)["code"] == "stopping"


def test_probes_never_enter_the_queue(http, server):
    server.engine.gate.clear()  # as in a long prefill
    for _ in range(300):
        assert http.get("/health").status_code == 200
    assert server.engine.submitted == [] and server.engine.busy() == 0


def too_large() -> bytes:
    return b'{"prompt": "' + b"x" * intake.MAX_BODY_BYTES + b'"}'


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_large_bodies(http, path):
    detail(http.post(path, content=too_large()), 413)
    chunks = (too_large()[i : i + 2**20] for i in range(0, 17 * 2**20, 2**20))
    detail(http.post(path, content=chunks), 413)
    assert complete(http).status_code == 200


def test_slow_bodies(server, monkeypatch):
    monkeypatch.setattr(intake, "BODY_TIMEOUT_S", 0.1)
    with socket.create_connection(server.address, timeout=5) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        sock.sendall(head)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive within 0.1 seconds" in answer


def test_large_headers(server):
    with socket.create_connection(server.address, timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-big: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(64):
                sock.sendall(b"x" * 65536)
            assert sock.recv(4096).startswith(b"HTTP/1.1 400 ")
            sock.sendall(b"x" * 65536)
            sock.sendall(b"x" * 65536)
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200


def test_openapi_document_is_truthful(http, server):
    document = http.get("/openapi.json").json()
    refs = set(
        re.findall(r'"#/components/schemas/(\w+)"', http.get("/openapi.json").text)
    )
    assert refs <= set(document["components"]["schemas"])
    for route in routes(server):
        for method in route.methods:
            operation = document["paths"][re.sub(":path", "", route.path)][
                method.lower()
            ]
            assert "500" in operation["responses"]
            assert "422" not in operation["responses"]
    post = document["paths"][CHAT]["post"]
    assert set(post["responses"]) == {
        *("200", "400", "404", "408", "413", "499", "500", "503")
    }
    assert set(post["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "messages"]


def test_the_engine_is_closed_with_the_server():
    engine = EngineDouble()
    with LiveServer(engine):
        assert engine.thread.is_alive()
    assert engine.closed.is_set() and not engine.thread.is_alive()
