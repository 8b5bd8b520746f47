"""The whole path as a user has it: a checkpoint, a process, the `openai` client.

Greedy answers are compared with transformers' (tests/golden), sampled ones with the
engine run in this process without speculation, one request at a time.
"""

import json
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
GOLDEN = ROOT / "tests" / "golden"
START_S = 120
NAME = "tiny"
CONFIG = {"slots": 8, "dtype": "float32", "max_context_len": 256}
PROMPTS = [f"Request {i} counts: " + "one two three " * (i % 3 + 1) for i in range(8)]


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


def streamed_completion(client, prompt, **options) -> tuple[str, str]:
    text, reason = "", None
    for chunk in client.completions.create(
        model=NAME, prompt=prompt, stream=True, **options
    ):
        [choice] = chunk.choices
        assert reason is None, "a chunk after the end"
        text, reason = text + choice.text, choice.finish_reason
    return text, reason


def streamed_chat(client, messages: list[dict], **options) -> tuple[str, str]:
    text, reason = "", None
    for chunk in client.chat.completions.create(
        model=NAME, messages=messages, stream=True, **options
    ):
        [choice] = chunk.choices
        assert reason is None, "a chunk after the end"
        text, reason = text + (choice.delta.content or ""), choice.finish_reason
    return text, reason


def read_golden(name: str) -> list[dict]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def greedy_cases(greedy) -> list[tuple[object, str, str]]:
    """Returns (prompt, text, finish reason) of eight completions, as transformers
    gives them: four prompts as text, four as token ids.
    """
    cases = [
        (case["prompt"], case["text"], case["finish_reason"])
        for case in read_golden("completions.json")
    ]
    for index in range(8 - len(cases)):
        tokens = greedy[f"tokens_{index}"].tolist()
        end = next((i for i, t in enumerate(tokens) if t in (257, 258)), None)
        # Ids below 256 are bytes, the others are special and not shown.
        said = bytes(token for token in tokens[:end] if token < 256)
        reason = "length" if end is None else "stop"
        text = said.decode("utf-8", errors="replace")
        cases.append((greedy[f"prompt_{index}"].tolist(), text, reason))
    return cases


def test_eight_streamed_completions_equal_transformers(client, golden):
    cases = greedy_cases(golden("greedy"))
    with ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(
                lambda case: streamed_completion(
                    client, case[0], temperature=0, max_tokens=48
                ),
                cases,
            )
        )
    assert got == [case[1:] for case in cases]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_equal_transformers(client, stream):
    def ask(case: dict) -> tuple[str, str]:
        options = {
            "max_tokens": case["max_tokens"],
            "temperature": 0,
            "extra_body": {"chat_template_kwargs": case["chat_template_kwargs"]},
        }
        if stream:
            return streamed_chat(client, case["messages"], **options)
        reply = client.chat.completions.create(
            model=NAME, messages=case["messages"], **options
        )
        assert reply.usage.completion_tokens == case["completion_tokens"]
        assert reply.usage.prompt_tokens == len(case["prompt_ids"])
        [choice] = reply.choices
        return choice.message.content, choice.finish_reason

    cases = read_golden("chat.json")
    with ThreadPoolExecutor(len(cases)) as pool:
        got = list(pool.map(ask, cases))
    assert got == [(case["text"], case["finish_reason"]) for case in cases]


def test_eight_sampled_completions_equal_plain_decoding(client, engine):
    options = {"temperature": 1, "seed": 3}
    with ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(
                lambda p: streamed_completion(client, p, max_tokens=24, **options),
                PROMPTS,
            )
        )
    for index, prompt in enumerate(PROMPTS):
        ids = engine.tokenizer.encode(prompt)
        want = plain(engine, ids, SamplingParams(**options), f"completion-{index}")
        assert got[index] == (want.text, want.finish_reason)


def test_complete_equals_streamed(client):
    options = {"max_tokens": 24, "temperature": 0}
    prompt = PROMPTS[0]
    reply = client.completions.create(model=NAME, prompt=prompt, **options)
    [choice] = reply.choices
    streamed = streamed_completion(client, prompt, **options)
    assert (choice.text, choice.finish_reason) == streamed


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
