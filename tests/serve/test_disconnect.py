"""A client that goes away frees its slot within two steps, streaming or not."""

import contextlib
import json
import random
import socket
import threading

import httpx
import pytest

from tests.serve.support import MODEL, EngineDouble, LiveServer, until

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
ENDPOINTS = [("/v1/completions", {"prompt": "hello"}), ("/v1/chat/completions", CHAT)]


def send(server, path: str, **fields) -> socket.socket:
    """Returns a connection on which the request has been sent."""
    body = json.dumps({"model": MODEL, "max_tokens": 400} | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(server.address, timeout=5)
    connection.sendall(head.encode() + body)
    return connection


@pytest.fixture
def slow():
    with LiveServer(EngineDouble(step_s=0.05, slots=2)) as live:
        yield live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "what"), ENDPOINTS)
def test_slot_is_free_within_two_steps(slow, path, what, stream):
    engine = slow.engine
    connection = send(slow, path, stream=stream, **what)
    assert until(lambda: len(engine.running) == 1)
    connection.close()
    steps = engine.steps
    assert until(lambda: engine.busy() == 0)
    assert engine.steps <= steps + 2
    assert engine.cancelled == [engine.submitted[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_gone_before_the_first_delta(slow, stream):
    # The engine stands still, as in a long prefill: nothing is ever written.
    slow.engine.gate.clear()
    with send(slow, "/v1/completions", prompt="hello", stream=stream):
        assert until(lambda: slow.engine.busy() == 1)
    assert until(lambda: slow.engine.busy() == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_gone_while_waiting_for_a_slot(slow, stream):
    staying = [send(slow, "/v1/completions", prompt="a") for _ in range(2)]
    assert until(lambda: len(slow.engine.running) == 2)
    with send(slow, "/v1/completions", prompt=["b", "c"], stream=stream):
        assert until(lambda: len(slow.engine.waiting) == 2)
    assert until(lambda: len(slow.engine.waiting) == 0)
    assert len(slow.engine.running) == 2
    for connection in staying:
        connection.close()
    assert until(lambda: slow.engine.busy() == 0)


def test_gone_while_the_body_is_on_its_way(slow):
    with socket.create_connection(slow.address, timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
        )
    assert httpx.get(slow.url + "/health").status_code == 200
    assert slow.engine.submitted == []


def test_a_finished_request_is_not_cancelled(server):
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    for stream in (False, True):
        httpx.post(server.url + "/v1/completions", json=body | {"stream": stream})
    assert server.engine.cancelled == []


def test_storm_returns_to_baseline(server):
    """Clients leave at random moments; the last word belongs to one that stays."""
    engine, draw = server.engine, random.Random(5)
    engine.step_s = 0.001

    def visit(seed: int) -> None:
        rng = random.Random(seed)
        path, what = rng.choice(ENDPOINTS)
        connection = send(server, path, stream=rng.random() < 0.5, **what)
        connection.settimeout(rng.random() * 0.1)
        with contextlib.suppress(TimeoutError):
            while connection.recv(65536):
                pass
        connection.close()

    visitors = [
        threading.Thread(target=visit, args=(draw.getrandbits(32),)) for _ in range(40)
    ]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(10)
    assert until(lambda: engine.busy() == 0)
    assert len(engine.submitted) == 40
    assert 0 < len(engine.cancelled) <= 40
    reply = httpx.post(
        server.url + "/v1/completions", json={"model": MODEL, "prompt": "ok"}
    )
    assert reply.json()["choices"][0]["text"] == "OK" * 8
