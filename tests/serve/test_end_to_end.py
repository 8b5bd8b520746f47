"""The whole path as a user has it: a checkpoint, a process, the `openai` client.

Needs the fixture `tiny_checkpoint`: the directory of a converted target checkpoint
with a drafter and a chat template. What the texts are compared with is the engine
run in this process on the same directory, one request at a time.
"""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from ddtree_jax.engine import Engine, EngineConfig, Request, SamplingParams
from tests.serve.support import until

ROOT = Path(__file__).parents[2]
START_S = 120
NAME = "tiny"
CONFIG = {"slots": 8, "dtype": "float32", "max_context_len": 256}
PROMPTS = [f"Request {i} counts: " + "one two three " * (i % 3 + 1) for i in range(8)]


def conversation(prompt: str) -> list[dict]:
    return [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": prompt},
    ]


@pytest.fixture(scope="module")
def url(tiny_checkpoint):
    options = {"model": tiny_checkpoint, "model_name": NAME, "tree_budget": 15} | CONFIG
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax.serve", "--port=0", *flags],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    # A server that never gets ready is ended, and then its output ends.
    alarm = threading.Timer(START_S, process.kill)
    alarm.start()
    try:
        line = process.stdout.readline()
        alarm.cancel()
        assert line.startswith("ddtree_jax is ready: "), "see the server's stderr above"
        yield line.split()[3]
        process.terminate()
        assert process.wait(60) == 0, "SIGTERM did not end the server in order"
    finally:
        alarm.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    engine = Engine.load(EngineConfig(model=tiny_checkpoint, tree_budget=0, **CONFIG))
    engine.start()
    yield engine
    engine.close()


def plain(engine: Engine, prompt_ids: list[int], sampling: SamplingParams, name: str):
    return engine.generate(
        Request(
            request_id=name,
            prompt_ids=tuple(prompt_ids),
            max_tokens=24,
            sampling=sampling,
        )
    )


def streamed_completion(client, prompt: str, **options) -> tuple[str, str]:
    text, reason = "", None
    for chunk in client.completions.create(
        model=NAME, prompt=prompt, max_tokens=24, stream=True, **options
    ):
        [choice] = chunk.choices
        assert reason is None, "a chunk after the end"
        text, reason = text + choice.text, choice.finish_reason
    return text, reason


def streamed_chat(client, prompt: str, **options) -> tuple[str, str]:
    text, reason = "", None
    for chunk in client.chat.completions.create(
        model=NAME, messages=conversation(prompt), max_tokens=24, stream=True, **options
    ):
        [choice] = chunk.choices
        assert reason is None, "a chunk after the end"
        text, reason = text + (choice.delta.content or ""), choice.finish_reason
    return text, reason


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_eight_streamed_completions_equal_plain_decoding(client, engine, options):
    with ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(lambda p: streamed_completion(client, p, **options), PROMPTS)
        )
    for index, prompt in enumerate(PROMPTS):
        ids = engine.tokenizer.encode(prompt)
        want = plain(engine, ids, SamplingParams(**options), f"completion-{index}")
        assert got[index] == (want.text, want.finish_reason)


def test_eight_streamed_chats_equal_plain_decoding(client, engine):
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda p: streamed_chat(client, p, temperature=0), PROMPTS))
    for index, prompt in enumerate(PROMPTS):
        ids = engine.chat_template.encode(conversation(prompt), tools=None, kwargs={})
        want = plain(engine, ids, SamplingParams(temperature=0), f"chat-{index}")
        assert got[index] == (want.text, want.finish_reason)


def test_complete_equals_streamed(client):
    options = {"max_tokens": 24, "temperature": 0}
    prompt = PROMPTS[0]
    reply = client.completions.create(model=NAME, prompt=prompt, **options)
    [choice] = reply.choices
    streamed = streamed_completion(client, prompt, temperature=0)
    assert (choice.text, choice.finish_reason) == streamed
    reply = client.chat.completions.create(
        model=NAME, messages=conversation(prompt), **options
    )
    [choice] = reply.choices
    streamed = streamed_chat(client, prompt, temperature=0)
    assert (choice.message.content, choice.finish_reason) == streamed


def test_usage_counts_the_tokens(client, engine):
    prompt = PROMPTS[0]
    reply = client.completions.create(
        model=NAME, prompt=prompt, max_tokens=24, temperature=0
    )
    ids = engine.tokenizer.encode(prompt)
    want = plain(engine, ids, SamplingParams(temperature=0), "usage")
    assert reply.usage.prompt_tokens == len(ids)
    assert reply.usage.completion_tokens == len(want.token_ids)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [2**31 - 1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 10_000}, "max_tokens"),
        ({"prompt": "one two " * 400}, "prompt"),
        ({"prompt": "a", "stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ],
)
def test_the_engine_refuses_by_name(url, options, param):
    reply = httpx.post(url + "/completions", json={"model": NAME} | options)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_frees_its_slot(url, stream):
    health = url.removesuffix("/v1") + "/health"
    body = {"model": NAME, "prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/completions", json=body | {"stream": stream}, timeout=0.02)

    def is_idle() -> bool:
        state = httpx.get(health).json()
        return state["running"] == state["waiting"] == 0

    assert until(is_idle, timeout_s=20)
