"""Messages of the argument checks, and that the entries use them."""

import jax.numpy as jnp
import pytest

from ddtree_jax.pallas import int4_grouped_swiglu, tree_mla_attention
from ddtree_jax.pallas.checks import check_ranks, check_shapes
from ddtree_jax.quant import Int4Weight


def test_first_wrong_rank_is_named():
    check_ranks("op", {"a": ((1, 2), 2), "b": ((), 0)})
    message = r"op: b has shape \(3,\), expected 2 dimensions"
    with pytest.raises(ValueError, match=message):
        check_ranks("op", {"a": ((1, 2), 2), "b": ((3,), 2)})


def test_first_wrong_shape_is_named_with_what_was_expected():
    check_shapes("op", {"a": ((1,), (1,))}, basis="q (1,)")
    message = r"op: a has shape \(1,\), expected \(2,\) from q \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        check_shapes("op", {"a": ((1,), (2,))}, basis="q (2, 3)")


def test_entries_check_ranks_before_they_read_sizes():
    flat = jnp.zeros((4, 8))
    with pytest.raises(ValueError, match=r"q_latent has shape \(4, 8\), expected 4"):
        tree_mla_attention(
            flat,
            flat,
            flat,
            flat,
            flat,
            flat,
            tail_latent=flat,
            tail_rope=flat,
            ancestor_bits=flat,
            softmax_scale=1.0,
        )
    one_layer = Int4Weight(
        jnp.zeros((2, 8, 4), jnp.int32), jnp.zeros((2, 8, 1), jnp.bfloat16)
    )
    with pytest.raises(ValueError, match=r"gate has shape \(2, 8, 32\), expected 4"):
        int4_grouped_swiglu(
            flat, one_layer, one_layer, one_layer, jnp.int32(0), flat, flat
        )
