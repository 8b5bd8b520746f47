"""Tree attention against a float64 loop, with traps in all that must not be read."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from ddtree_jax.pallas.select import Implementation
from ddtree_jax.pallas.tree_mla import (
    kernel,
    pack_bits,
    tree_mla_attention,
    unpack_bits,
)
from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase
from tests.support import trees
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.tree_mla import check as check_against_loop
from tests.support.tree_mla import make, split_arguments

CI_CASES = [case for case in CASES if case.size == "ci"]
SCALE = 0.3


def call(arrays: dict, implementation: Implementation = "auto"):
    positional, keywords = split_arguments(arrays)
    return tree_mla_attention(
        *positional, **keywords, softmax_scale=SCALE, implementation=implementation
    )


attend = jax.jit(call, static_argnames="implementation")


def check(arrays, tree_list, requests=None):
    """Asserts that every used node of these requests is as the loop says."""
    check_against_loop("tree_mla", attend(arrays), arrays, tree_list, SCALE, requests)


@pytest.mark.parametrize("case", CI_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("dtype", "tail_rows"),
    [(np.float32, None), (ml_dtypes.bfloat16, 70)],
    ids=["f32", "bf16"],
)
def test_cases(case, dtype, tail_rows):
    rng = np.random.default_rng(1)
    check(*make(case, rng, dtype=dtype, tail_rows=tail_rows))


@settings(max_examples=12)
@given(tree=trees.trees())
def test_any_tree(tree):
    case = TreeMlaCase(
        size="ci",
        heads=2,
        nodes=len(tree.parent),
        context_len=(17,),
        latent=8,
        rope=8,
        page_size=16,
    )
    check(*make(case, np.random.default_rng(2), [tree]))


def test_a_node_sees_itself_and_all_context_only_through_its_bits():
    """With one visible key the output is that key, and lse its logit."""
    case = CI_CASES[0]
    arrays, _ = make(case, np.random.default_rng(3))
    out, lse = attend(arrays)
    assert case.context_len[0] == 0
    a = arrays
    want = np.broadcast_to(a["tail_latent"][0, :, None], out[0].shape)
    assert_close("tree_mla", out[0], want)
    logit = (a["q_latent"][0] * a["tail_latent"][0, :, None]).sum(-1)
    logit += (a["q_rope"][0] * a["tail_rope"][0, :, None]).sum(-1)
    assert_close("tree_mla lse", lse[0], SCALE * logit)


@pytest.mark.parametrize("pages", ["latent_cache", "rope_cache"])
def test_nan_in_a_committed_row_surfaces_in_that_request_only(pages):
    case = CI_CASES[1]
    arrays, tree_list = make(case, np.random.default_rng(4))
    bad = 5
    row = arrays["page_table"][bad, 1], 3
    arrays[pages][row] = np.nan
    out, lse = attend(arrays)
    used = tree_list[bad].used
    assert np.isnan(out[bad][used]).all()
    assert np.isnan(lse[bad][used]).all()
    check(arrays, tree_list, requests=range(bad))


@pytest.mark.parametrize("tail", ["tail_latent", "tail_rope"])
def test_nan_in_a_tail_row_surfaces_in_the_nodes_that_see_it_only(tail):
    case = CI_CASES[1]
    stars = [trees.star(case.nodes)] * len(case.context_len)
    arrays, _ = make(case, np.random.default_rng(5), stars)
    clean_out, clean_lse = attend(arrays)
    arrays[tail][2, 4] = np.nan
    out, lse = attend(arrays)
    assert np.isnan(out[2, 4]).all()
    assert np.isnan(lse[2, 4]).all()
    others = np.ones(out.shape[:2], bool)
    others[2, 4] = False
    assert_bit_equal(out[others], clean_out[others])
    assert_bit_equal(lse[others], clean_lse[others])


def test_the_pages_of_layers_may_share_one_array():
    case = CI_CASES[2]
    rng = np.random.default_rng(6)
    arrays, _ = make(case, rng)
    want = attend(arrays)
    first = arrays["latent_cache"].shape[0]
    for name in ("latent_cache", "rope_cache"):
        before = np.full_like(arrays[name], np.nan)
        arrays[name] = np.concatenate([before, arrays[name], before])
    # An int32 sum, so that impossible ids wrap as they would in the caller.
    arrays["page_table"] = arrays["page_table"] + np.int32(first)
    for got, expected in zip(attend(arrays), want, strict=True):
        assert_bit_equal(got, expected)


def test_equal_inputs_give_equal_bits():
    arrays, _ = make(CI_CASES[3], np.random.default_rng(7))
    for once, again in zip(attend(arrays), attend(arrays), strict=True):
        assert_bit_equal(once, again)
    for auto, named in zip(attend(arrays), attend(arrays, "reference"), strict=True):
        assert_bit_equal(auto, named)


@pytest.mark.parametrize(
    ("name", "cut", "got", "want"),
    [
        ("q_rope", np.s_[:, :8], (6, 8, 1, 16), (6, 9, 1, 16)),
        ("latent_cache", np.s_[..., :31], (27, 16, 31), (27, 16, 32)),
        ("rope_cache", np.s_[:, :15], (27, 15, 16), (27, 16, 16)),
        ("rope_cache", np.s_[1:], (26, 16, 16), (27, 16, 16)),
        ("page_table", np.s_[1:], (5, 4), (6, 4)),
        ("context_len", np.s_[:5], (5,), (6,)),
        ("tail_latent", np.s_[:, :8], (6, 8, 32), (6, 9, 32)),
        ("tail_rope", np.s_[..., :8], (6, 9, 8), (6, 9, 16)),
        ("ancestor_bits", np.s_[..., :0], (6, 9, 0), (6, 9, 1)),
    ],
)
def test_a_wrong_shape_is_named(name, cut, got, want):
    arrays, _ = make(CI_CASES[1], np.random.default_rng(8))
    arrays[name] = arrays[name][cut]
    with pytest.raises(ValueError) as error:
        attend(arrays)
    assert str(error.value) == (
        f"tree_mla_attention: {name} has shape {got}, expected {want} "
        "from q_latent (6, 9, 1, 32)"
    )


KERNEL_CASE = TreeMlaCase(
    size="ci",
    heads=2,
    nodes=5,
    context_len=(20, 0),
    latent=128,
    rope=64,
    page_size=16,
)


@pytest.mark.parametrize("beside_a_gpu", [False, True])
def test_auto_is_the_reference_on_a_cpu(beside_a_gpu, monkeypatch):
    """Also of what the kernel takes, and where the process has a GPU as well."""
    capability = "9.0" if beside_a_gpu else None
    monkeypatch.setattr(kernel, "compute_capability", lambda: capability)
    arrays, _ = make(KERNEL_CASE, np.random.default_rng(9), dtype=ml_dtypes.bfloat16)
    # A new function, which nothing was compiled for.
    run = jax.jit(partial(call))
    for auto, named in zip(run(arrays), attend(arrays, "reference"), strict=True):
        assert_bit_equal(auto, named)


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        ({}, np.float32, "dtypes float32; expected bfloat16"),
        (
            {"latent": 96},
            ml_dtypes.bfloat16,
            "latents of 96 and rotary keys of 64; "
            "expected a multiple of 128 up to 512, and 64",
        ),
        (
            {"latent": 640},
            ml_dtypes.bfloat16,
            "latents of 640 and rotary keys of 64; "
            "expected a multiple of 128 up to 512, and 64",
        ),
        (
            {"rope": 32},
            ml_dtypes.bfloat16,
            "latents of 128 and rotary keys of 32; "
            "expected a multiple of 128 up to 512, and 64",
        ),
        (
            {"page_size": 24},
            ml_dtypes.bfloat16,
            "pages of 24 tokens; expected 8, 16, 32 or 64",
        ),
        (
            {"page_size": 128},
            ml_dtypes.bfloat16,
            "pages of 128 tokens; expected 8, 16, 32 or 64",
        ),
        (
            {"page_size": 4},
            ml_dtypes.bfloat16,
            "pages of 4 tokens; expected 8, 16, 32 or 64",
        ),
    ],
)
def test_the_kernel_refuses_what_it_cannot_take(change, dtype, reason):
    case = dataclasses.replace(KERNEL_CASE, **change)
    arrays, _ = make(case, np.random.default_rng(9), dtype=dtype)
    with pytest.raises(ValueError) as error:
        attend(arrays, "pallas")
    message = f"tree_mla_attention: implementation 'pallas' got {reason}"
    assert str(error.value) == message
    attend(arrays)


@pytest.mark.parametrize(
    ("seen", "n", "words"),
    [
        ([0], 1, [1]),
        ([0, 3], 4, [0b1001]),
        ([31], 32, [0x80000000]),
        ([32], 33, [0, 1]),
        ([0, 33, 64], 65, [1, 2, 1]),
        ([], 40, [0, 0]),
    ],
)
def test_bit_order_by_literals(seen, n, words):
    mask = np.zeros(n, bool)
    mask[seen] = True
    packed = pack_bits(jnp.asarray(mask))
    assert packed.dtype == jnp.uint32
    assert packed.tolist() == words
    assert unpack_bits(packed, n).tolist() == mask.tolist()


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65])
def test_unpack_is_the_inverse_of_pack(n):
    mask = np.random.default_rng(n).random((2, 3, n)) < 0.5
    assert_bit_equal(unpack_bits(pack_bits(jnp.asarray(mask)), n), mask)
