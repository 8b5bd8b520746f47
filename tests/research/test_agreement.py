"""Agreement is what replaying both models gives, and planted differences are found."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.errors import EngineError
from ddtree_jax.research.__main__ import main
from ddtree_jax.research.agreement import (
    Difference,
    first_difference,
    measure,
    near_tie_bound,
)
from ddtree_jax.research.decode import Answer, Decoder
from tests.research.replay import Replay, prompts

COUNT, BUDGET = 20, 2
ULP_AT = {0.75: 2**-8, 1.0: 2**-7, 1.9: 2**-7, 30.9: 2**-3, 32.0: 2**-2}


@pytest.fixture(scope="module")
def planted(models):
    """The models, with a token that is more probable than it should be."""
    # A tree of its own: the arrays of the other models stay as they are.
    target = jax.tree.map(jnp.asarray, models.params.target)
    head = np.array(target.head[...])
    head[7] *= 1.5
    target.head.set_value(jax.device_put(head, target.head[...].sharding))
    return models._replace(params=models.params._replace(target=target))


@pytest.fixture(scope="module")
def measured(decoder, planted):
    """Rows and margins with the planted models as those tested; in float32."""
    tested = Decoder(planted, slots=3, max_rows=80)
    return measure(
        decoder,
        tested,
        prompts(8),
        budget=BUDGET,
        max_tokens=COUNT,
        case={"model": "m"},
    )


def greedy(replay: Replay, prompt: list[int]) -> tuple[list[int], list[np.ndarray]]:
    """Returns the text, and the logits that each of its tokens is chosen by."""
    text, chosen_by = [], []
    while len(text) < COUNT:
        chosen_by.append(replay.target([*prompt, *text])[0][-1])
        text.append(int(chosen_by[-1].argmax()))
    return text, chosen_by


def test_planted_differences_are_what_replaying_gives(measured, replay, planted):
    (trees, plain, among), margins = measured
    differences, tokens, gaps = [], 0, []
    other_replay = Replay(planted)
    for i, prompt in enumerate(prompts(8)):
        text, logits = greedy(replay, prompt)
        other, _ = greedy(other_replay, prompt)
        gaps += [np.diff(np.sort(row)[-2:])[0] for row in logits]
        places = [j for j in range(COUNT) if text[j] != other[j]]
        tokens += places[0] + 1 if places else COUNT
        if places:
            j = places[0]
            margin = float(logits[j][text[j]] - logits[j][other[j]])
            differences.append({"prompt": i, "token": j, "margin": margin})
    # Some texts must agree and others not, not only at once.
    assert [(d["prompt"], d["token"]) for d in differences] == [
        (1, 10),
        (3, 14),
        (4, 5),
    ]
    for row in (trees, plain):
        got = row["differences"]
        assert [d | {"margin": 0, "bound": 0} for d in got] == [
            d | {"margin": 0, "bound": 0} for d in differences
        ]
        want = [d["margin"] for d in differences]
        assert [d["margin"] for d in got] == pytest.approx(want, abs=1e-4)
        assert row["margin_max"] == pytest.approx(max(want), abs=1e-4)
        assert row["margin_median"] == pytest.approx(np.median(want), abs=1e-4)
        assert (row["tokens"], row["texts"]) == (tokens, 5)
        assert row["diverged"] == len(want) / 5
        assert row["per_1000_tokens"] == 1000 * len(want) / tokens
        beyond = sum(d["margin"] > d["bound"] for d in got)
        assert row["beyond_near_ties"] == beyond > 0
    # The planted models agree with themselves.
    assert among["differences"] == [] and among["tokens"] == 5 * COUNT
    assert among["margin_max"] is among["margin_median"] is None
    assert margins["tokens"] == 5 * COUNT
    for name, percent in (("p1", 1), ("p5", 5), ("median", 50)):
        want = np.percentile(gaps, percent)
        assert margins[name] == pytest.approx(want, abs=1e-4)


def test_cases_name_what_is_compared(measured):
    names = ["float32 plain", "float32 ddtree"]
    assert [row["case"] for row in measured[0]] == [
        {"model": "m", "reference": names[0], "tested": names[1], "budget": BUDGET},
        {"model": "m", "reference": names[0], "tested": names[0], "budget": 0},
        {"model": "m", "reference": names[0], "tested": names[1], "budget": BUDGET},
    ]


def test_near_ties_are_units_of_eight_bits():
    for largest, ulp in ULP_AT.items():
        logits = np.asarray([[0.5, -largest], [largest, 0.0]], np.float32)
        assert near_tie_bound(logits).tolist() == [2 * ulp, 2 * ulp]
    assert Difference(0, 0, -0.25, 0.25).is_near_tie
    assert not Difference(0, 0, -0.26, 0.25).is_near_tie


def test_the_first_difference_counts():
    logits = np.asarray([[9, 1, 2, 3], [9, 1, 4, 16], [9, 1, 2, 3]], np.float32)
    assert first_difference(7, [0, 3], [0, 3], logits) is None
    # The second text ended with its stop token.
    got = first_difference(7, [0, 3, 1], [0, 2], logits)
    assert got == (7, 1, 12.0, 0.25)


def test_a_reference_that_contradicts_itself_is_refused(decoder, monkeypatch):
    def astray(*arguments, **named):
        first, second = answers(*arguments, **named)
        return [first, Answer([(second.tokens[0] + 1) % 8], [])]

    answers = decoder.answers
    monkeypatch.setattr(decoder, "answers", astray)
    message = r"token 0 of the reference's text of prompt 1 is .* nats below the most"
    with pytest.raises(EngineError, match=message):
        # One token needs no step: texts end in prefill.
        measure(decoder, decoder, prompts(8)[:2], budget=1, max_tokens=1, case={})


@pytest.fixture
def precision():
    """The command raises JAX's matmul precision for its process."""
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


def test_only_float32_is_decoded_with_highest_precision(decoder, models, precision):
    rounded = Decoder(models, slots=1, max_rows=80)
    rounded.models = models._replace(dtype="bfloat16")
    jax.config.update("jax_default_matmul_precision", "highest")
    seen = []

    def see():
        seen.append(jax.config.jax_default_matmul_precision)

    given = {"budget": 1, "max_tokens": 1, "case": {}, "on_answer": see}
    measure(decoder, rounded, prompts(8)[:1], **given)
    assert seen == ["highest", None, None, "highest"]


@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_agree_writes_a_record(tiny_checkpoint, tmp_path, capsys, precision, count):
    prompt_file, out = tmp_path / "prompts.jsonl", tmp_path / "agreement.json"
    lines = [{"prompt_ids": ids} for ids in ([1, 2, 3], [4], [5, 6])]
    prompt_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["agree", "--model", str(tiny_checkpoint), "--prompts"]
    arguments += [str(prompt_file), "--output", str(out), "--devices", "1"]
    arguments += ["--num-prompts", "2", "--max-tokens", str(count), "--budget", "8"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "units of the last place, in bfloat16" in printed
    assert "bfloat16 ddtree 8 against float32 plain: " in printed
    got = json.loads(out.read_text())
    assert got["topic"] == "agreement" and got["definition"] in printed
    assert got["settings"]["num_prompts"] == 2 and "dtype" not in got["settings"]
    case = {"model": "tiny", "prompts": "prompts.jsonl"}
    names = ["float32 plain", "bfloat16 plain", "bfloat16 ddtree"]
    assert [row["case"] for row in got["rows"]] == [
        {**case, "reference": names[0], "tested": names[2], "budget": 8},
        {**case, "reference": names[0], "tested": names[1], "budget": 0},
        {**case, "reference": names[1], "tested": names[2], "budget": 8},
    ]
    assert 2 <= got["float32_margins"]["tokens"] <= 2 * count
    for row in got["rows"]:
        # Random weights: how far bfloat16 leads is not asked here.
        beyond = sum(abs(d["margin"]) > d["bound"] for d in row["differences"])
        assert row["texts"] == 2 and row["beyond_near_ties"] == beyond
        assert f"of 2 texts differ, {row['per_1000_tokens']:.2f} per 1000" in printed
