"""The Hopper kernels on one shape each, with values of all kinds."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla import tree_mla_attention
from ddtree_jax.pallas.tree_mla.config import TreeMlaConfig
from tests.pallas.machines import GPU, on_every_machine, quiet_arithmetic
from tests.pallas.tree_mla import (
    BF16,
    SCALE,
    assert_equal_bits_where,
    attend,
    cut,
    falling,
    first_is_low,
    rising,
    set_levels,
    wide,
    zigzag,
)
from tests.support import trees
from tests.support.tree_mla import Arrays, check, make, split_arguments

# One compiled shape, on which the tests below vary the values. The first split of
# the long request has four context tiles, its second three and the tail.
SHAPE = cut(
    heads=2, nodes=9, page=16, context=(70, 390), rows=24, splits=2, tail_rows=11
)
with_both_kernels = pytest.mark.parametrize(
    "config", [SHAPE.config, wide(SHAPE).config], ids=["transposed", "wide"]
)


def draw(seed: int = 2) -> tuple[Arrays, list[trees.Tree]]:
    rng = np.random.default_rng(seed)
    n = SHAPE.case.nodes
    whole = trees.random_tree(n, rng)
    padded = trees.padded(trees.random_tree(n, rng), n - 2)
    return make(SHAPE.case, rng, [whole, padded], BF16, SHAPE.tail_rows)


@functools.cache
def clean(machine: str, config: TreeMlaConfig):
    """Returns what `draw()` gives."""
    return attend(machine, draw()[0], config)


@on_every_machine
@with_both_kernels
def test_two_runs_are_bit_identical(machine, config):
    arrays, tree_list = draw()
    again = attend(machine, arrays, config)
    everywhere = np.ones(again[0].shape[:2], bool)
    assert_equal_bits_where(everywhere, again, clean(machine, config))
    check("tree_mla kernel", again, arrays, tree_list, SCALE)


@on_every_machine
@with_both_kernels
@pytest.mark.parametrize("filler", [3e38, np.inf])
@quiet_arithmetic
def test_what_must_not_be_read_does_not_matter(machine, config, filler):
    """NaN is what `draw` puts there."""
    arrays, tree_list = draw()
    for name, array in arrays.items():
        if array.dtype == BF16:
            arrays[name] = np.where(np.isnan(array), BF16(filler), array)
    used = np.stack([tree.used for tree in tree_list])
    got = attend(machine, arrays, config)
    assert_equal_bits_where(used, got, clean(machine, config))


@on_every_machine
@with_both_kernels
@pytest.mark.parametrize(("pages", "token"), [("latent_cache", 389), ("rope_cache", 0)])
def test_nan_in_a_committed_row_surfaces_in_that_request_only(
    machine, config, pages, token
):
    arrays, _ = draw()
    page = arrays["page_table"][1, token // SHAPE.case.page_size]
    arrays[pages][page, token % SHAPE.case.page_size, 7] = np.nan
    out, lse = attend(machine, arrays, config)
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    request_0 = np.arange(2)[:, None] + np.zeros(out.shape[1]) == 0
    assert_equal_bits_where(request_0, (out, lse), clean(machine, config))


@on_every_machine
@with_both_kernels
@pytest.mark.parametrize(
    ("tail", "value"),
    [
        ("tail_latent", np.nan),
        ("tail_latent", np.inf),
        ("tail_latent", -np.inf),
        ("tail_rope", np.nan),
        ("tail_rope", np.inf),
    ],
)
@quiet_arithmetic
def test_a_bad_tail_row_surfaces_in_the_nodes_that_see_it_only(
    machine, config, tail, value
):
    arrays, tree_list = draw()
    above = trees.ancestors(tree_list[0])
    # Of the nodes that some see and some do not, the one with most descendants.
    bad = 1 + int(above[:, 1:].sum(axis=0).argmax())
    sees = above[:, bad]
    assert 1 < sees.sum() < len(sees)
    arrays[tail][0, bad, 7] = value
    out, lse = attend(machine, arrays, config)
    assert np.isnan(out[0][sees]).all()
    assert np.isnan(lse[0][sees]).all()
    others = np.stack([tree.used for tree in tree_list])
    others[0] &= ~sees
    assert_equal_bits_where(others, (out, lse), clean(machine, config))


@on_every_machine
@with_both_kernels
@pytest.mark.parametrize("level", [rising, falling, first_is_low, zigzag])
def test_rescaling(machine, config, level: Callable[[int], float]):
    """Logits of whole tiles differ by 40 and more, in some rows, up and down."""
    arrays, tree_list = draw()
    set_levels(arrays, level, config.tile)
    got = attend(machine, arrays, config)
    check("tree_mla kernel", got, arrays, tree_list, SCALE)


@on_every_machine
@with_both_kernels
def test_neighbours_do_not_matter(machine, config):
    """Another request 0: other values, other length, other pages, another tree."""
    arrays, tree_list = draw()
    others, _ = draw(seed=3)
    size = SHAPE.case.page_size
    mine = arrays["page_table"][1, : -(-arrays["context_len"][1] // size)]
    free = np.setdiff1d(np.arange(len(arrays["latent_cache"])), mine)
    for name, array in arrays.items():
        if name in ("latent_cache", "rope_cache"):
            array[free] = others[name][others["page_table"][1, 0]]
        else:
            array[0] = others[name][0]
    arrays["context_len"][0] = 40
    arrays["page_table"][0] = free[0]
    out, lse = attend(machine, arrays, config)
    used = np.stack([tree.used for tree in tree_list])
    assert (out[0] != clean(machine, config)[0][0]).any()
    used[0] = False
    assert_equal_bits_where(used, (out, lse), clean(machine, config))


@pytest.mark.parametrize("machine", [GPU], indirect=True)
def test_auto_is_the_kernel_on_a_hopper_gpu(machine):
    arrays, tree_list = draw()
    positional, keywords = split_arguments(arrays)
    run = jax.jit(functools.partial(tree_mla_attention, softmax_scale=SCALE))
    got = jax.device_get(run(*positional, **keywords))
    used = np.stack([tree.used for tree in tree_list])
    assert_equal_bits_where(used, got, attend(machine, arrays, None))
