"""The `mma` kernel, as `test_tree_mla_kernel` tests the Hopper kernel.

A GPU that has Hopper's kernel runs this one as well, so the GPU tests need none other.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase
from ddtree_jax.pallas.tree_mla.mma_config import TreeMlaMmaConfig, choose_mma
from tests.pallas import tree_mla as hopper
from tests.pallas.machines import GPU, on_every_machine, quiet_arithmetic
from tests.pallas.tree_mla import (
    BF16,
    SCALE,
    assert_equal_bits_where,
    attend,
    ragged,
)
from tests.support import trees
from tests.support.compare import assert_close
from tests.support.tree_mla import Arrays, check, make


def cut(**sizes) -> hopper.Cut:
    """Returns what `hopper.cut` does, for this kernel."""
    case, config, tail_rows = hopper.cut(**sizes)
    config = TreeMlaMmaConfig(**dataclasses.asdict(config))
    return hopper.Cut(case, config, tail_rows)


# The normal suite has of each property one; a compilation takes seconds.
CUTS = {
    "ring of two slots": cut(
        heads=1, nodes=9, page=16, context=ragged(16, 150), rows=16, splits=1
    ),
    "row blocks, pages of two tiles, tiles across the ring's end": cut(
        heads=2,
        nodes=17,
        page=64,
        context=(0, 140, 65),
        latent=256,
        rows=32,
        splits=2,
        slots=3,
        warpgroups=2,
        tail_rows=64,
    ),
    "two tail tiles": cut(
        heads=1, nodes=33, page=32, context=(31, 33, 0), rows=48, splits=2, tail_rows=33
    ),
    "one node, more splits than tiles": cut(
        heads=8,
        nodes=1,
        page=8,
        context=(0, 70),
        rows=16,
        splits=6,
        warpgroups=4,
        tail_rows=128,
    ),
}
SLOW_CUTS = {
    "32 nodes": cut(
        heads=2, nodes=32, page=32, context=ragged(32, 200), rows=32, splits=2
    ),
    "33 nodes, one row block for two of them": cut(
        heads=8, nodes=33, page=64, context=(64, 130), rows=16, splits=1, tail_rows=40
    ),
    "65 nodes, 8 heads": cut(
        heads=8, nodes=65, page=16, context=(17, 100), rows=32, splits=3
    ),
    "pages of 64": cut(
        heads=2, nodes=9, page=64, context=ragged(64, 400), rows=32, splits=3
    ),
    "32 tiles, of one tile a split": cut(
        heads=1,
        nodes=3,
        page=64,
        context=(31 * 32,),
        rows=16,
        splits=40,
        warpgroups=4,
    ),
    "33 tiles, of two tiles a split": cut(
        heads=1,
        nodes=3,
        page=64,
        context=(31 * 32 + 1,),
        rows=16,
        splits=40,
        warpgroups=4,
    ),
    "widths of 384": cut(
        heads=1,
        nodes=4,
        page=64,
        context=(200, 1),
        latent=384,
        rows=16,
        splits=1,
        slots=5,
    ),
    "as Kimi K2.6": cut(
        heads=8,
        nodes=9,
        page=64,
        context=(300, 64, 0),
        latent=512,
        rows=32,
        splits=2,
        slots=6,
        tail_rows=32,
    ),
}


def _interpreted(name: str):
    marks = [pytest.mark.slow] if name in SLOW_CUTS else []
    return pytest.param("interpreter", name, id=name, marks=marks)


def _on_gpu(name: str):
    return pytest.param("gpu", name, id=f"{name}, gpu", marks=pytest.mark.gpu)


NAMES = (*CUTS, *SLOW_CUTS)


@pytest.mark.parametrize(
    ("machine", "name"),
    [*map(_interpreted, NAMES), *map(_on_gpu, NAMES)],
    indirect=["machine"],
)
def test_cuts(machine, name):
    """Chains, stars, random and padded trees, with traps in all that is not read."""
    case, config, tail_rows = (CUTS | SLOW_CUTS)[name]
    rng = np.random.default_rng(1)
    arrays, tree_list = make(case, rng, dtype=BF16, tail_rows=tail_rows)
    got = attend(machine, arrays, config)
    check("tree_mla kernel", got, arrays, tree_list, SCALE)


# One compiled shape, on which the tests below vary the values. The first split of
# the long request has three context tiles, its second two and the tail.
SHAPE = cut(
    heads=2, nodes=9, page=16, context=(40, 150), rows=32, splits=2, tail_rows=11
)


def draw() -> tuple[Arrays, list[trees.Tree]]:
    rng = np.random.default_rng(2)
    n = SHAPE.case.nodes
    whole = trees.random_tree(n, rng)
    padded = trees.padded(trees.random_tree(n, rng), n - 2)
    return make(SHAPE.case, rng, [whole, padded], BF16, SHAPE.tail_rows)


@functools.cache
def clean(machine: str):
    """Returns what `draw()` gives."""
    return attend(machine, draw()[0], SHAPE.config)


@on_every_machine
def test_two_runs_are_bit_identical(machine):
    arrays, tree_list = draw()
    again = attend(machine, arrays, SHAPE.config)
    everywhere = np.ones(again[0].shape[:2], bool)
    assert_equal_bits_where(everywhere, again, clean(machine))
    check("tree_mla kernel", again, arrays, tree_list, SCALE)


@on_every_machine
@quiet_arithmetic
def test_what_must_not_be_read_does_not_matter(machine):
    """NaN is what `draw` puts there."""
    arrays, tree_list = draw()
    for name, array in arrays.items():
        if array.dtype == BF16:
            arrays[name] = np.where(np.isnan(array), BF16(np.inf), array)
    used = np.stack([tree.used for tree in tree_list])
    assert_equal_bits_where(used, attend(machine, arrays, SHAPE.config), clean(machine))


@on_every_machine
@pytest.mark.parametrize(("pages", "token"), [("latent_cache", 149), ("rope_cache", 0)])
def test_nan_in_a_committed_row_surfaces_in_that_request_only(machine, pages, token):
    arrays, _ = draw()
    page = arrays["page_table"][1, token // SHAPE.case.page_size]
    arrays[pages][page, token % SHAPE.case.page_size, 7] = np.nan
    out, lse = attend(machine, arrays, SHAPE.config)
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    request_0 = np.arange(2)[:, None] + np.zeros(out.shape[1]) == 0
    assert_equal_bits_where(request_0, (out, lse), clean(machine))


@on_every_machine
@pytest.mark.parametrize(
    ("tail", "value"),
    [("tail_latent", np.nan), ("tail_latent", -np.inf), ("tail_rope", np.inf)],
)
@quiet_arithmetic
def test_a_bad_tail_row_surfaces_in_the_nodes_that_see_it_only(machine, tail, value):
    arrays, tree_list = draw()
    above = trees.ancestors(tree_list[0])
    # Of the nodes that some see and some do not, the one with most descendants.
    bad = 1 + int(above[:, 1:].sum(axis=0).argmax())
    sees = above[:, bad]
    assert 1 < sees.sum() < len(sees)
    arrays[tail][0, bad, 7] = value
    out, lse = attend(machine, arrays, SHAPE.config)
    assert np.isnan(out[0][sees]).all()
    assert np.isnan(lse[0][sees]).all()
    others = np.stack([tree.used for tree in tree_list])
    others[0] &= ~sees
    assert_equal_bits_where(others, (out, lse), clean(machine))


@on_every_machine
@pytest.mark.parametrize(
    "level", [hopper.rising, hopper.falling, hopper.first_is_low, hopper.zigzag]
)
def test_rescaling(machine, level: Callable[[int], float]):
    """Logits of whole tiles differ by 40 and more, in some rows, up and down."""
    arrays, tree_list = draw()
    hopper.set_levels(arrays, level, SHAPE.config.tile)
    got = attend(machine, arrays, SHAPE.config)
    check("tree_mla kernel", got, arrays, tree_list, SCALE)


def chosen(case: TreeMlaCase) -> TreeMlaMmaConfig:
    """Returns the cut that an RTX PRO 6000 would get."""
    held = case.pages_per_request * case.page_size
    return choose_mma(
        batch=len(case.context_len),
        rows=case.nodes * case.heads,
        latent=case.latent,
        rope=case.rope,
        max_tiles=-(-held // 32) - (-case.nodes // 32),
        cores=188,
    )


@pytest.mark.parametrize("machine", [GPU], indirect=True)
@pytest.mark.parametrize(
    "case", [hopper.kimi(case) for case in CASES if case.size == "kimi"]
)
def test_kimi(machine, case):
    """The chosen cut against the reference on the same GPU, in float32."""
    rng, tail_rows = np.random.default_rng(4), -(-case.nodes // 32) * 32
    arrays, tree_list = make(case, rng, dtype=BF16, tail_rows=tail_rows)
    arrays = jax.device_put(arrays)
    out, lse = attend(machine, arrays, chosen(case))
    want_out, want_lse = hopper.reference(arrays, case)
    used = np.stack([tree.used for tree in tree_list])
    assert_close("tree_mla kernel", out[used], want_out[used])
    assert_close("tree_mla kernel lse", lse[used], want_lse[used])
