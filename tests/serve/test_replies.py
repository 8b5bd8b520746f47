"""Responses and streams, as the `openai` client and as raw bytes."""

import json
import threading

import msgspec
import openai
import pytest

from tests.serve.support import MODEL, until

CHAT = [{"role": "user", "content": "count"}]


def sse(response) -> list:
    """Returns the parsed events; the framing itself is checked."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    payloads = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ") and "\n" not in event
        payloads.append(event.removeprefix("data: "))
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


def test_completion(client, server):
    reply = client.completions.create(model=MODEL, prompt="abc")
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-") and reply.model == MODEL
    assert reply.system_fingerprint == "fp_test"
    [choice] = reply.choices
    assert (choice.index, choice.text) == (0, "ABCABCABCABCABCA")
    assert choice.finish_reason == "length"
    assert reply.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
    }


def test_prompts_become_choices_in_order(client):
    reply = client.completions.create(
        model=MODEL, prompt=["ab", "cde", "f"], max_tokens=4
    )
    texts = [(c.index, c.text) for c in reply.choices]
    assert texts == [(0, "ABAB"), (1, "CDEC"), (2, "FFFF")]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 12)


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]], ["ab"], "ab"])
def test_prompt_forms_mean_the_same(client, server, prompt):
    reply = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3)
    assert [c.text for c in reply.choices] == ["ABA"]
    assert server.engine.submitted[-1].prompt_ids == (97, 98)


def test_chat(client):
    reply = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=7
    )
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    [choice] = reply.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.finish_reason) == ("USER:CO", "length")


def test_chat_may_fill_the_context(client, server):
    reply = client.chat.completions.create(model=MODEL, messages=CHAT)
    assert reply.usage.total_tokens == server.engine.max_context_len


def test_default_completion_length_shrinks_at_the_end_of_the_context(client):
    reply = client.completions.create(model=MODEL, prompt="a" * 505)
    assert reply.usage.completion_tokens == 7


def test_every_field_reaches_the_engine(client, server):
    client.completions.create(
        model=MODEL,
        prompt="a",
        max_tokens=2,
        temperature=0,
        top_p=0.5,
        seed=-7,
        stop=["x", "yz"],
        user="me",
        extra_body={
            "top_k": 4,
            "min_p": 0.25,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "skip_special_tokens": False,
        },
    )
    [request] = server.engine.submitted
    assert request.max_tokens == 2
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert (request.sampling.top_k, request.sampling.min_p) == (4, 0.25)
    assert request.sampling.seed == -7
    assert (request.stop, request.stop_token_ids) == (("x", "yz"), (9,))
    assert (request.ignore_eos, request.skip_special_tokens) == (True, False)


def test_left_out_fields_keep_the_engines_defaults(client, server):
    client.completions.create(model=MODEL, prompt="a", stop="q")
    [request] = server.engine.submitted
    fields = type(request.sampling).__dataclass_fields__
    assert {name: getattr(request.sampling, name) for name in fields} == {
        name: field.default for name, field in fields.items()
    }
    assert request.stop == ("q",)
    assert (request.ignore_eos, request.skip_special_tokens) == (False, True)


def test_stop_reason_is_passed_on(client):
    reply = client.completions.create(model=MODEL, prompt="abc", stop="BC")
    assert reply.choices[0].finish_reason == "stop"


def test_completion_stream_equals_the_complete_text(client):
    prompts = ["hello", "w", "streams"]
    options = {"model": MODEL, "prompt": prompts, "max_tokens": 23}
    complete = client.completions.create(**options)
    texts, reasons = ["", "", ""], [[], [], []]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                reasons[choice.index].append(choice.finish_reason)
    assert texts == [c.text for c in complete.choices]
    assert reasons == [["length"]] * 3


def test_chat_stream_equals_the_complete_text(client):
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 31}
    complete = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == complete.choices[0].message.content
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", None]


def test_chat_stream_bytes(http):
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "stream": True}
    response = http.post("/v1/chat/completions", json=body)
    *chunks, done = sse(response)
    assert done == "[DONE]"
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["system_fingerprint"]) for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)
    choices = [c["choices"][0] for c in chunks]
    assert ["role" in c["delta"] for c in choices] == [True] + [False] * (
        len(choices) - 1
    )
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    # A delta of the engine without text is not sent.
    assert all(c["delta"].get("content") for c in choices[:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_is_the_last_chunk(http, path):
    what = {"prompt": "abc"} if path == "/v1/completions" else {"messages": CHAT}
    body = {"model": MODEL, "stream": True, "max_tokens": 9} | what
    body["stream_options"] = {"include_usage": True}
    *chunks, last, done = sse(http.post(path, json=body))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9
    assert last["usage"]["total_tokens"] == 9 + last["usage"]["prompt_tokens"]
    assert all(c["usage"] is None and c["choices"] for c in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_request_ids_are_distinct(http, stream):
    body = {"model": MODEL, "prompt": "a", "stream": stream}
    ids = [
        http.post("/v1/completions", json=body).headers["x-request-id"]
        for _ in range(2)
    ]
    assert ids[0] != ids[1] and all(i.startswith("req-") for i in ids)


def test_eight_streams_run_side_by_side(client, server):
    server.engine.slots = 8
    server.engine.step_s = 0.005
    server.engine.gate.clear()
    texts = {}

    def read(name: str) -> None:
        stream = client.completions.create(
            model=MODEL, prompt=name, max_tokens=40, stream=True
        )
        texts[name] = "".join(c.choices[0].text for c in stream)

    names = [chr(97 + i) * (i + 1) for i in range(8)]
    threads = [threading.Thread(target=read, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    assert until(lambda: server.engine.busy() == 8)
    server.engine.gate.set()
    for thread in threads:
        thread.join(20)
    assert texts == {name: name[0].upper() * 40 for name in names}
    assert server.engine.most_running == 8


def test_pings_while_nothing_comes(http, server, monkeypatch):
    monkeypatch.setattr("ddtree_jax.serve.wire.PING_S", 0.02)
    server.engine.gate.clear()
    threading.Timer(0.2, server.engine.gate.set).start()
    body = {"model": MODEL, "prompt": "a", "stream": True}
    events = http.post("/v1/completions", json=body).text.split("\n\n")
    assert events[:3] == [": ping"] * 3
    assert events[-2] == "data: [DONE]"


def test_log_line_holds_no_prompt_and_no_second_line(http, caplog):
    body = {"model": MODEL, "prompt": "secret", "user": 'x"}\n{"forged": 1'}
    with caplog.at_level("INFO", logger="ddtree_jax.serve.requests"):
        response = http.post("/v1/completions", json=body)
        assert until(lambda: caplog.records)
    [record] = caplog.records
    assert "\n" not in record.message and "secret" not in record.message
    facts = msgspec.json.decode(record.message)
    assert facts["user"] == body["user"]
    assert facts["request_id"] == response.headers["x-request-id"]
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (6, 16)
    assert facts["finish_reasons"] == ["length"]


def test_models(client, server):
    [card] = client.models.list().data
    assert (card.id, card.object) == (MODEL, "model")
    assert card.max_model_len == server.engine.max_context_len
    assert client.models.retrieve(MODEL) == card
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
