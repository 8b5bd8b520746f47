"""A spine-only tree is chain DFlash, token for token and round for round."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.research.shapes import Shape, shapes_to_compare, spine, step_of
from tests.research.replay import chain_dflash, prompts

COUNT = 28


@pytest.mark.parametrize("mask_slot_0", [False, True])
def test_spine_equals_chain_dflash(models, decoder, replay, mask_slot_0):
    mask = models.draft_config.mask_token_id if mask_slot_0 else None
    answers = decoder.answers(
        step_of(models, Shape("chain", 7), mask_slot_0=mask_slot_0),
        prompts(8),
        budget=7,
        temperature=0.0,
        max_tokens=COUNT,
    )
    for prompt, answer in zip(prompts(8), answers, strict=True):
        want = chain_dflash(replay, prompt, count=COUNT, slot_0=mask)
        assert (answer.tokens, answer.emitted) == want
    # Drafts must have been accepted and rejected, or this proves nothing.
    assert {1, 2} <= {n for answer in answers for n in answer.emitted}


def test_what_slot_0_holds_matters(models, replay):
    prompt = prompts(8)[3]
    mask = models.draft_config.mask_token_id
    with_root, with_mask = (replay.draft(prompt, root=token) for token in (2, mask))
    assert np.abs(with_root - with_mask).max() > 0.1


@pytest.mark.parametrize(
    ("budget", "want"), [(0, [9]), (1, [9, 10]), (3, [9, 10, 20, 30])]
)
def test_spine_is_cut_at_the_budget(budget, want):
    token_ids = jnp.asarray([[[10, 11], [20, 21], [30, 31]]], jnp.int32)
    tree = spine(
        jnp.zeros(token_ids.shape),
        token_ids,
        jnp.asarray([9], jnp.int32),
        jnp.asarray([budget], jnp.int32),
        num_nodes=6,
    )
    used = np.asarray(tree.used[0])
    assert np.asarray(tree.tokens[0])[used].tolist() == want
    assert np.asarray(tree.parent[0])[used].tolist() == list(range(-1, budget))
    assert np.asarray(tree.depth[0])[used].tolist() == list(range(budget + 1))
    assert used.shape == (6,)


def test_only_ddtree_takes_the_budgets():
    assert shapes_to_compare(["chain", "ddtree", "plain"], [16, 8, 16], 7) == [
        ("chain", 7),
        ("ddtree", 16),
        ("ddtree", 8),
        ("plain", 0),
    ]
