"""Acceptance is what counting by hand gives, and is refused when texts differ."""

import dataclasses
import math

import pytest

from ddtree_jax.errors import ConfigError, EngineError
from ddtree_jax.research import shapes
from ddtree_jax.research.acceptance import figures, measure
from ddtree_jax.research.decode import Answer, Decoder
from ddtree_jax.research.models import shift_features
from ddtree_jax.research.shapes import Shape, shapes_to_compare
from ddtree_jax.research.statistics import bootstrap_interval, distinct_ngrams
from tests.research.replay import prompts
from tests.support.models import Decoder as PlainDecoder
from tests.support.models import Tiny

COUNT = 28
STOP = 6  # some steps emit it before their last token, and a prefill does


def counted(models, *, budget: int, temperature: float) -> tuple[int, int]:
    """Returns tokens and steps, one prompt after the other, up to stop or COUNT."""
    tiny = Tiny(models.config, models.draft_config, models.params, models.mesh)
    decoder = PlainDecoder(tiny, num_nodes=1 + budget, slots=1)
    tokens = steps = 0
    for seed, prompt in enumerate(prompts(8)):
        text = [decoder.start(0, prompt, temperature=temperature, seed=seed)]
        while len(text) < COUNT and text[-1] != STOP:
            result = decoder.step()
            new = result.tokens[0, : result.num_tokens[0]].tolist()
            if STOP in new:
                new = new[: new.index(STOP) + 1]
            text += new
            tokens += len(new)
            steps += 1
    return tokens, steps


@pytest.fixture(scope="module")
def rows(models, decoder) -> list[dict]:
    """All shapes at both temperatures, with a stop token; T = 0 comes first."""
    stopping = models._replace(stop_token_ids=(STOP,))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "models", stopping)
        rows = measure(
            decoder,
            prompts(8),
            shapes=shapes_to_compare(["plain", "chain", "ddtree"], [8], 7),
            temperatures=[0.0, 1.0],
            max_tokens=COUNT,
            case={"model": "random"},
            on_row=seen.append,
        )
    assert seen == rows and len(rows) == 6
    return rows


def test_acceptance_is_what_counting_gives(models, rows):
    for temperature, row in zip((0.0, 1.0), rows[2::3], strict=True):
        tokens, steps = counted(models, budget=8, temperature=temperature)
        assert (row["tokens"], row["steps"]) == (tokens, steps)
        assert row["acceptance_length"] == tokens / steps > 1.1
        assert row["ci_low"] < row["acceptance_length"] < row["ci_high"]
        assert row["case"] == {
            "model": "random",
            "temperature": temperature,
            "shape": "ddtree",
            "budget": 8,
        }


def test_shapes_share_text_and_plain_is_one(rows):
    for plain, chain, tree in (rows[:3], rows[3:]):
        assert plain["acceptance_length"] == 1.0
        assert 1 < chain["acceptance_length"] < tree["acceptance_length"]
        assert {row["diverged"] for row in (plain, chain, tree)} == {0.0}


@pytest.fixture
def wrong_spine(monkeypatch):
    """A chain whose nodes all claim the root's position."""

    def spine(*arguments, num_nodes):
        tree = right(*arguments, num_nodes=num_nodes)
        return tree._replace(depth=tree.depth * 0)

    right = shapes.spine
    monkeypatch.setattr(shapes, "spine", spine)


def test_a_shape_that_changes_text_is_counted_or_refused(decoder, wrong_spine):
    rows = []
    message = r"greedy text of chain 7 differs from that of plain 0 at prompt \d, token"
    with pytest.raises(EngineError, match=message):
        measure(
            decoder,
            prompts(8),
            shapes=[Shape("plain", 0), Shape("chain", 7)],
            temperatures=[1.0, 0.0],
            max_tokens=COUNT,
            case={},
            on_row=rows.append,
        )
    # T = 1: plain and chain. T = 0: plain; the chain's is not reported.
    assert [row["diverged"] > 0.3 for row in rows] == [False, True, False]


def test_figures_pool_steps_and_spare_what_prefill_ended():
    answers = [Answer([1, 2, 3, 4], [2, 1]), Answer([1, 2], [1]), Answer([5], [])]
    got = figures(answers, [a.tokens for a in answers])
    assert (got["tokens"], got["steps"]) == (4, 3)
    assert got["acceptance_length"] == 4 / 3
    with pytest.raises(EngineError, match="every text ended in prefill"):
        figures(answers[2:], [[5]])


def test_bootstrap_of_two_prompts():
    # Resampled ratios are 1, 2, 3 with probabilities 1/4, 1/2, 1/4.
    assert bootstrap_interval([10, 30], [10, 10]) == (1.0, 3.0)
    assert bootstrap_interval([10, 30], [10, 10], confidence=0.4) == (2.0, 2.0)
    assert bootstrap_interval([20, 40], [10, 20]) == (2.0, 2.0)


def test_bootstrap_is_the_normal_interval_of_many_prompts():
    total = [10 + (i % 2) * 20 for i in range(400)]
    low, high = bootstrap_interval(total, [10] * 400)
    # Mean 2, standard deviation 1, of 400: ± 1.96 / 20.
    assert (low, high) == (
        pytest.approx(1.902, abs=6e-3),
        pytest.approx(2.098, abs=6e-3),
    )


def test_distinct_ngrams():
    assert distinct_ngrams([[1, 2, 3, 4, 1, 2, 3, 4]]) == 4 / 5
    # What two texts share is no repetition.
    assert distinct_ngrams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 1.0
    assert distinct_ngrams([[7] * 8]) == 1 / 5
    assert math.isnan(distinct_ngrams([[1, 2, 3]]))


def test_features_are_shifted(models):
    def shifted(ids, offset):
        config = dataclasses.replace(models.draft_config, target_layer_ids=ids)
        assert config.num_target_layers == 3
        return shift_features(config, offset).target_layer_ids

    assert shift_features(models.draft_config, 0) == models.draft_config
    assert shifted((1,), 1) == (2,)
    assert shifted((1,), -1) == (0,)
    # A layer at the end stays; the others move.
    assert shifted((0, 2), 1) == (1, 2)
    assert shifted((0, 2), -1) == (0, 1)
    message = r"--feature-offset 1: .* layers \(2, 2\); expected each once"
    with pytest.raises(ConfigError, match=message):
        shifted((1, 2), 1)


@pytest.mark.parametrize(
    ("names", "budgets", "message"),
    [
        (["tree"], [8], "--shapes: 'tree' is unknown; expected plain, chain or ddtree"),
        (["ddtree"], [8, 0], "--budgets: 0 is below 1"),
    ],
)
def test_unknown_shapes_are_refused(names, budgets, message):
    with pytest.raises(ConfigError, match=message):
        shapes_to_compare(names, budgets, 7)


def test_more_rows_than_positions_are_refused(models):
    with pytest.raises(ConfigError, match=r"needs 5000 positions .* models have 4096"):
        Decoder(models, slots=1, max_rows=5000)
