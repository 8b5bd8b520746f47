"""The bundled model in the engine writes what transformers writes with it."""

import json
import threading
from pathlib import Path

import pytest

from convert.__main__ import main
from ddtree_jax.engine import Engine, EngineConfig, Request, SamplingParams

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "tiny" / "model"
GOLDEN = json.loads((TESTS / "golden" / "bundled.json").read_text())


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundled") / "tiny"
    assert (
        main(["hf", str(MODEL), str(directory), "--draft", str(MODEL / "draft")]) == 0
    )
    engine = Engine.load(
        EngineConfig(
            model=directory,
            devices=8,
            slots=6,
            tree_budget=31,
            page_size=16,
            max_context_len=256,
            dtype="float32",
        )
    )
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def answers(engine):
    """The answers to all golden prompts, asked for at once."""
    found = {}

    def ask(number: int, prompt: str):
        ids = engine.tokenizer.encode(prompt, allow_special=True)
        found[number] = engine.generate(
            Request(
                request_id=str(number),
                prompt_ids=tuple(ids),
                max_tokens=48,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
        )

    threads = [
        threading.Thread(target=ask, args=(number, entry["prompt"]))
        for number, entry in enumerate(GOLDEN)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(GOLDEN))]


def test_prompts_have_the_same_tokens(engine, golden):
    data = golden("bundled")
    for number, entry in enumerate(GOLDEN):
        ids = engine.tokenizer.encode(entry["prompt"], allow_special=True)
        assert ids == data[f"prompt_{number}"].tolist(), entry["prompt"]


def test_answers_equal_transformers(answers, golden):
    data = golden("bundled")
    assert len(answers) == 6
    for number, (answer, entry) in enumerate(zip(answers, GOLDEN, strict=True)):
        assert answer.error is None
        assert list(answer.token_ids) == data[f"tokens_{number}"].tolist()
        assert answer.text == entry["text"]


def test_the_tree_saves_steps(answers):
    """Every step adds what it accepts and a bonus token."""
    accepted = [count for answer in answers for count in answer.num_accepted]
    assert 1 + sum(accepted) / len(accepted) >= 3.3
