"""Tree attention against a float64 loop, with traps in all that must not be read."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from ddtree_jax.pallas.tree_mla import pack_bits, tree_mla_attention, unpack_bits
from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase
from tests.support import poison, trees
from tests.support.compare import assert_bit_equal, assert_close

CI_CASES = [case for case in CASES if case.size == "ci"]
NAMES = (
    "q_latent",
    "q_rope",
    "latent_cache",
    "rope_cache",
    "page_table",
    "context_len",
    "tail_latent",
    "tail_rope",
    "ancestor_bits",
)
SCALE = 0.3


@partial(jax.jit, static_argnames="implementation")
def attend(arrays: dict, implementation="auto"):
    a = dict(arrays)
    positional = [a.pop(name) for name in NAMES[:6]]
    return tree_mla_attention(
        *positional, **a, softmax_scale=SCALE, implementation=implementation
    )


def make(case: TreeMlaCase, rng, tree_list=None, dtype=np.float32):
    """Returns the poisoned arrays of a case by name, and its trees."""
    batch, n, size = len(case.context_len), case.nodes, case.page_size
    if tree_list is None:
        kinds = [trees.chain(n), trees.star(n), trees.random_tree(n, rng)]
        kinds.append(trees.padded(kinds[2], max(1, n // 2)))
        tree_list = [kinds[b % len(kinds)] for b in range(batch)]
    num_pages = batch * case.pages_per_request + 3
    table = rng.permutation(num_pages)[: batch * case.pages_per_request]
    table = table.reshape(batch, -1).astype(np.int32)
    length = np.asarray(case.context_len, np.int32)
    committed = poison.committed_rows(table, length, num_pages, size)
    used = np.stack([tree.used for tree in tree_list])

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    latent_cache = normal(num_pages, size, case.latent)
    rope_cache = normal(num_pages, size, case.rope)
    mask = np.stack([trees.ancestors(tree) for tree in tree_list])
    return {
        "q_latent": normal(batch, n, case.heads, case.latent),
        "q_rope": normal(batch, n, case.heads, case.rope),
        "latent_cache": poison.poison_rows(latent_cache, committed),
        "rope_cache": poison.poison_rows(rope_cache, committed),
        "page_table": poison.poison_table(table, length, size),
        "context_len": length,
        "tail_latent": poison.poison_tail(normal(batch, n, case.latent), used),
        "tail_rope": poison.poison_tail(normal(batch, n, case.rope), used),
        "ancestor_bits": np.asarray(pack_bits(jnp.asarray(mask))),
    }, tree_list


def oracle(a: dict, tree_list, b: int):
    """Returns output and log-sum-exp of one request: a loop over visible keys."""
    size = a["latent_cache"].shape[1]
    n, heads, latent = a["q_latent"].shape[1:]
    out, lse = np.zeros((n, heads, latent)), np.zeros((n, heads))
    context = []
    for t in range(a["context_len"][b]):
        page, row = a["page_table"][b, t // size], t % size
        context.append((a["latent_cache"][page, row], a["rope_cache"][page, row]))
    above = trees.ancestors(tree_list[b])
    for i in range(n):
        keys = context + [
            (a["tail_latent"][b, j], a["tail_rope"][b, j])
            for j in range(n)
            if above[i, j]
        ]
        values = np.stack([key for key, _ in keys]).astype(np.float64)
        ropes = np.stack([rope for _, rope in keys]).astype(np.float64)
        for h in range(heads):
            logits = values @ a["q_latent"][b, i, h].astype(np.float64)
            logits += ropes @ a["q_rope"][b, i, h].astype(np.float64)
            logits *= SCALE
            peak = logits.max()
            weights = np.exp(logits - peak)
            out[i, h] = weights @ values / weights.sum()
            lse[i, h] = peak + np.log(weights.sum())
    return out, lse


def check(arrays, tree_list, requests=None):
    """Asserts that every used node of these requests is as the loop says."""
    out, lse = attend(arrays)
    assert out.dtype == arrays["q_latent"].dtype
    assert lse.dtype == jnp.float32
    for b in range(len(tree_list)) if requests is None else requests:
        used = tree_list[b].used
        want_out, want_lse = oracle(arrays, tree_list, b)
        assert_close("tree_mla", out[b][used], want_out[used])
        assert_close("tree_mla lse", lse[b][used], want_lse[used])


@pytest.mark.parametrize("case", CI_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_cases(case, dtype):
    check(*make(case, np.random.default_rng(1), dtype=dtype))


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


def test_an_implementation_that_is_not_there_is_refused():
    arrays, _ = make(CI_CASES[0], np.random.default_rng(9))
    with pytest.raises(NotImplementedError) as error:
        attend(arrays, "pallas")
    assert str(error.value) == (
        "tree_mla_attention: no 'pallas' implementation; available: reference"
    )


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
