"""The drafter's figures position by position, against whole-text passes in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ddtree_jax.errors import EngineError
from ddtree_jax.mesh import make_mesh
from ddtree_jax.research.draft_slots import _against, _entropy, measure_slots
from tests.research.replay import chain_dflash, prompts

COUNT = 14
HORIZON = 7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(replay, prompts) -> list[dict[str, list[float]]]:
    """Returns what each position's figures are the means of."""
    seen = [
        {"cross_entropy_bits": [], "target_entropy_bits": [], "rank": [], "right": []}
        for _ in range(HORIZON)
    ]
    for prompt in prompts:
        text, _ = chain_dflash(replay, prompt, count=COUNT)
        text = text[:COUNT]
        log_p = log_softmax(replay.target([*prompt, *text])[0])
        entropy = -(np.exp(log_p) * log_p).sum(-1) / np.log(2)
        for i, root in enumerate(text[:-1]):
            log_q = log_softmax(replay.draft([*prompt, *text[:i]], root=root))
            future = text[i + 1 : i + 1 + HORIZON]
            right = True
            for j, token in enumerate(future):
                row = log_q[j]
                seen[j]["cross_entropy_bits"].append(-row[token] / np.log(2))
                seen[j]["target_entropy_bits"].append(entropy[len(prompt) + i + j])
                seen[j]["rank"].append((row > row[token]).sum())
                right &= row.argmax() == token
                if len(future) == HORIZON:
                    seen[j]["right"].append(right)
    return seen


def test_slots_are_what_whole_passes_give(replay, decoder):
    # More prompts than slots, and not a multiple.
    rows = measure_slots(decoder, prompts(8), max_tokens=COUNT, case={"model": "m"})
    for j, (row, want) in enumerate(
        zip(rows, by_hand(replay, prompts(8)), strict=True)
    ):
        assert row["case"] == {"model": "m", "slot": j + 1}
        assert row["tokens"] == len(want["rank"]) == 5 * (COUNT - 1 - j)
        for name in ("cross_entropy_bits", "target_entropy_bits"):
            assert row[name] == pytest.approx(np.mean(want[name]), rel=1e-4)
        rank = np.asarray(want["rank"])
        assert row["accuracy_at_1"] == pytest.approx((rank < 1).mean())
        assert row["accuracy_at_8"] == 1.0  # eight tokens are all there are
        assert row["survival"] == pytest.approx(np.mean(want["right"]))
    assert 0 < rows[0]["survival"] < 1


def test_texts_too_short_for_a_draft_are_refused(decoder):
    with pytest.raises(
        EngineError, match="no text is longer than a draft, 7: --max-tokens"
    ):
        measure_slots(decoder, prompts(8), max_tokens=7, case={})


def test_split_vocabulary_gives_the_same_figures():
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (2, 3, 32)).astype(np.float32)  # with ties
    future = rng.integers(0, 32, (2, 3)).astype(np.int32)

    def both(logits, future):
        return *_against(logits, future), _entropy(logits)

    mapped = jax.shard_map(
        both,
        mesh=make_mesh(8),
        in_specs=(P(None, None, "tensor"), P()),
        out_specs=P(),
        check_vma=False,
    )
    loss, rank, entropy = jax.jit(mapped)(jnp.asarray(logits), jnp.asarray(future))
    log_p = log_softmax(logits)
    true = np.take_along_axis(log_p, future[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss, -true, rtol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-5)
    order = np.argsort(-logits, axis=-1, kind="stable")
    np.testing.assert_array_equal(rank, (order == future[..., None]).argmax(-1))
