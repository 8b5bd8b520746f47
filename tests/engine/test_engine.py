"""The engine on the golden model: what it answers, and what it survives."""

import dataclasses
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from ddtree_jax.engine import Engine, EngineConfig, Request, SamplingParams
from ddtree_jax.errors import ConfigError, EngineError, RequestError

GREEDY = SamplingParams(temperature=0.0)
_ids = itertools.count()


def request(prompt, max_tokens=48, *, sampling=GREEDY, ignore_eos=True, **fields):
    return Request(
        request_id=f"r{next(_ids)}",
        prompt_ids=tuple(int(i) for i in prompt),
        max_tokens=max_tokens,
        sampling=sampling,
        ignore_eos=ignore_eos,
        **fields,
    )


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return EngineConfig(
        model=tiny_checkpoint,
        devices=8,
        slots=4,
        tree_budget=8,
        page_size=16,
        max_context_len=192,
        num_pages=40,
        prefill_chunk=48,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def engine(config):
    engine = Engine.load(config)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test all slots and pages are free again."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        wait_until(lambda: engine.status()["running"] + engine.status()["waiting"] == 0)
        assert engine.status()["free_pages"] == 40
        assert engine.status()["failed"] is None


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def together(engine, requests):
    """Returns the answers of requests submitted at once."""
    answers = {}

    def run(r):
        answers[r.request_id] = engine.generate(r)

    threads = [threading.Thread(target=run, args=(r,)) for r in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[r.request_id] for r in requests]


def test_eight_at_once_equal_transformers(engine, golden):
    data = golden("greedy")
    answers = together(engine, [request(data[f"prompt_{n}"]) for n in range(8)])
    for n, answer in enumerate(answers):
        assert list(answer.token_ids) == data[f"tokens_{n}"].tolist()
        assert answer.finish_reason == "length"
        assert sum(answer.num_accepted) + len(answer.num_accepted) + 1 == 48


def test_nothing_compiles_after_loading(engine, golden):
    data = golden("greedy")
    compilations = []

    def listen(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        gone = request(data["prompt_3"], 100)
        engine.submit(gone, lambda delta: engine.cancel(gone.request_id))
        samplings = [
            GREEDY,
            SamplingParams(temperature=1.0, seed=1),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        ]
        requests = [
            request(data[f"prompt_{n}"], 1 + 11 * (n % 4), sampling=samplings[n % 3])
            for n in range(8)
        ]
        together(engine, requests)
        assert not compilations
        jax.jit(lambda x: x * 5)(jnp.ones(11))
        assert compilations, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_stop_token_ends_the_answer(engine, golden):
    data = golden("greedy")
    stops = {257, 258}
    seen = 0
    for n in range(8):
        want = data[f"tokens_{n}"].tolist()
        end = next((i for i, t in enumerate(want) if t in stops), None)
        answer = engine.generate(request(data[f"prompt_{n}"], ignore_eos=False))
        if end is None:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 48)
        else:
            assert list(answer.token_ids) == want[: end + 1]
            assert answer.finish_reason == "stop"
            seen += 1
    assert seen >= 2


def test_own_stop_token_and_cap(engine, golden):
    data = golden("greedy")
    want = data["tokens_1"].tolist()
    stopped = engine.generate(request(data["prompt_1"], stop_token_ids=(want[5],)))
    assert list(stopped.token_ids) == want[: want.index(want[5]) + 1]
    for cap in (1, 2, 7):
        capped = engine.generate(request(data["prompt_1"], cap))
        assert list(capped.token_ids) == want[:cap]
        assert capped.finish_reason == "length"


def test_seeded_answers_repeat_and_unseeded_ones_differ(engine, golden):
    prompt = golden("greedy")["prompt_1"]
    seeded = SamplingParams(temperature=1.0, seed=2**40 + 3)
    other = dataclasses.replace(seeded, seed=3)
    free = SamplingParams(temperature=1.0)
    answers = together(
        engine,
        [request(prompt, 24, sampling=s) for s in (seeded, seeded, other, free, free)],
    )
    texts = [answer.token_ids for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_cancelled_request_frees_its_slot_within_two_steps(engine, golden):
    deltas, at_cancel = [], []

    def on_delta(delta):
        deltas.append(delta)
        if len(deltas) == 3:
            at_cancel.append(engine.status()["steps"])
            engine.cancel(leaving.request_id)

    leaving = request(golden("greedy")["prompt_1"], 150)
    engine.submit(leaving, on_delta)
    wait_until(lambda: engine.status()["running"] == 0 and deltas)
    assert engine.status()["steps"] <= at_cancel[0] + 2
    assert len(deltas) == 3
    assert deltas[-1].finish_reason is None
    engine.cancel(leaving.request_id)
    engine.cancel("never heard of")


def test_cancelled_while_waiting(engine, golden):
    prompt = golden("greedy")["prompt_1"]
    running = [request(prompt, 60) for _ in range(4)]
    finished, deltas = [], []
    for each in running:
        engine.submit(each, lambda d: finished.append(d) if d.finish_reason else None)
    waiting = request(prompt, 60)
    engine.submit(waiting, deltas.append)
    engine.cancel(waiting.request_id)
    wait_until(lambda: len(finished) == 4)
    assert not deltas


def test_failing_callback_ends_its_own_request_only(engine, golden, caplog):
    data = golden("greedy")

    def fail(delta):
        raise ZeroDivisionError("a caller's fault")

    engine.submit(request(data["prompt_1"], 100), fail)
    answer = engine.generate(request(data["prompt_2"]))
    assert list(answer.token_ids) == data["tokens_2"].tolist()
    assert "a caller's fault" in caplog.text


BAD = {
    "empty prompt": (request([]), "prompt", "the prompt is empty"),
    "id too large": (request([1, 512]), "prompt", "token id 512 is outside"),
    "id negative": (request([-1]), "prompt", "token id -1 is outside"),
    "stop id": (
        request([1], stop_token_ids=(512,)),
        "stop_token_ids",
        "token id 512 is outside",
    ),
    "too long": (
        request([1] * 100, 93),
        "max_tokens",
        "100 tokens and max_tokens is 93, together 193; at most 192 fit",
    ),
    "prompt too long": (request([1] * 192, 1), "prompt", "together 193"),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_requests_are_refused(engine, case):
    bad, param, message = BAD[case]
    with pytest.raises(RequestError, match=message) as caught:
        engine.submit(bad, print)
    assert caught.value.param == param


def test_request_id_in_use_is_refused(engine, golden):
    done = threading.Event()
    first = request(golden("greedy")["prompt_1"], 60)
    engine.submit(first, lambda d: done.set() if d.finish_reason else None)
    with pytest.raises(RequestError, match="is in use"):
        engine.submit(first, print)
    assert done.wait(60)


def test_fault_of_one_request_leaves_the_others(engine, golden):
    data = golden("greedy")
    reached, done = threading.Event(), threading.Event()
    deltas = []

    def on_delta(delta):
        deltas.append(delta)
        if len(deltas) == 2:
            # On the engine's thread, so between two steps.
            runner, slot = engine._runner, victim_slot()
            page = int(runner.state.page_table[slot, 0])
            cache = runner.state.cache
            latent = cache.latent.at[2, page, 0, 0].set(jnp.nan)
            latent = jax.device_put(latent, cache.latent.sharding)
            runner.state = runner.state._replace(cache=cache._replace(latent=latent))
            reached.set()
        if delta.finish_reason:
            done.set()

    victim = request(data["prompt_1"], 100)

    def victim_slot():
        return next(
            slot
            for slot, s in engine._scheduler.decoding()
            if s.request.request_id == victim.request_id
        )

    engine.submit(victim, on_delta)
    answer = engine.generate(request(data["prompt_2"]))
    assert done.wait(60) and reached.is_set()
    assert deltas[-1].finish_reason == "error"
    assert "NON_FINITE" in deltas[-1].error
    assert list(answer.token_ids) == data["tokens_2"].tolist()
    # Its pages are used again, and what it left in them does not matter.
    answers = together(engine, [request(data[f"prompt_{n}"]) for n in range(4)])
    for n, answer in enumerate(answers):
        assert list(answer.token_ids) == data[f"tokens_{n}"].tolist()


def test_closing_ends_requests_with_an_error(config, golden):
    plain = dataclasses.replace(config, devices=1, tree_budget=0, slots=1)
    engine = Engine.load(plain)
    engine.start()
    prompt = golden("greedy")["prompt_1"]
    last = []

    def on_delta(delta):
        if delta.finish_reason:
            last.append(delta)

    for _ in range(3):
        engine.submit(request(prompt, 170), on_delta)
    engine.close()
    assert [d.error for d in last] == ["the engine was closed"] * 3
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request(prompt), print)


def test_options_that_cannot_be_are_refused(config, tmp_path):
    cases = {
        r"max_context_len = 262145 is more than": {"max_context_len": 262145},
        r"9 devices was asked for, but 8 cpu": {"devices": 9},
        r"vocab_size = 512 does not split over 3 devices": {"devices": 3},
    }
    for message, change in cases.items():
        with pytest.raises(ConfigError, match=message):
            Engine.load(dataclasses.replace(config, **change))
    for field in ("slots", "page_size", "prefill_chunk", "num_pages"):
        with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
            dataclasses.replace(config, **{field: 0})
    with pytest.raises(ConfigError, match="dtype must be bfloat16 or float32"):
        dataclasses.replace(config, dtype="float16")


def test_a_budget_without_a_drafter_is_refused(config, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    for path in config.model.iterdir():
        if path.name != "draft":
            (target / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="tree_budget = 8 needs a drafter"):
        Engine.load(dataclasses.replace(config, model=target))
