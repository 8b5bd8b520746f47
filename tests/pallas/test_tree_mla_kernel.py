"""The Hopper kernels: in the interpreter with race detection, and on a GPU."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase
from ddtree_jax.pallas.tree_mla.config import TreeMlaConfig
from ddtree_jax.pallas.tree_mla.wide_config import choose_wide
from tests.pallas.machines import GPU, on_every_machine, quiet_arithmetic
from tests.pallas.tree_mla import (
    BF16,
    SCALE,
    attend,
    cut,
    kimi,
    ragged,
    reference,
    wide,
)
from tests.support.compare import assert_close
from tests.support.tree_mla import check, make

# The normal suite has of each property one; a compilation takes seconds.
CUTS = {
    "ring of two slots used six times": cut(
        heads=1, nodes=9, page=16, context=ragged(16, 300), rows=16, splits=1
    ),
    "row blocks, an empty split, tiles across the ring's end": cut(
        heads=2,
        nodes=33,
        page=32,
        context=(0, 300, 33),
        latent=256,
        rows=40,
        splits=2,
        slots=3,
        warpgroups=2,
        tail_rows=64,
    ),
    "two tail tiles": cut(
        heads=1,
        nodes=65,
        page=64,
        context=(63, 65, 0),
        rows=72,
        splits=2,
        tail_rows=65,
    ),
    "one node, more splits than tiles": cut(
        heads=8,
        nodes=1,
        page=16,
        context=(0, 150),
        rows=8,
        splits=6,
        warpgroups=4,
        tail_rows=128,
    ),
}
SLOW_CUTS = {
    "32 nodes": cut(
        heads=2, nodes=32, page=32, context=ragged(32, 200), rows=64, splits=2
    ),
    "33 nodes, one row block a node": cut(
        heads=8, nodes=33, page=64, context=(64, 130), rows=8, splits=1, tail_rows=40
    ),
    "65 nodes, 8 heads": cut(
        heads=8, nodes=65, page=16, context=(17, 100), rows=72, splits=3
    ),
    "pages of 64": cut(
        heads=2, nodes=9, page=64, context=ragged(64, 400), rows=24, splits=3
    ),
    "pages of 8": cut(
        heads=2, nodes=9, page=8, context=ragged(8, 90), rows=24, splits=2
    ),
    "32 tiles, of one tile a split": cut(
        heads=1,
        nodes=3,
        page=64,
        context=(31 * 64,),
        rows=8,
        splits=40,
        warpgroups=4,
    ),
    "33 tiles, of two tiles a split": cut(
        heads=1,
        nodes=3,
        page=64,
        context=(31 * 64 + 1,),
        rows=8,
        splits=40,
        warpgroups=4,
    ),
    "widths of 384": cut(
        heads=1,
        nodes=4,
        page=64,
        context=(300, 1),
        latent=384,
        rows=8,
        splits=1,
        slots=5,
    ),
    "no slot is ahead": cut(
        heads=1,
        nodes=4,
        page=64,
        context=(300, 1),
        latent=256,
        rows=8,
        splits=1,
    ),
    "as Kimi K2.6": cut(
        heads=8,
        nodes=9,
        page=64,
        context=(600, 64, 0),
        latent=512,
        rows=72,
        splits=2,
        slots=7,
        tail_rows=64,
    ),
}


BOTH = {f"{name}, wide": wide(cut) for name, cut in (CUTS | SLOW_CUTS).items()}
BOTH |= CUTS | SLOW_CUTS


def _interpreted(name: str):
    slow = name.removesuffix(", wide") in SLOW_CUTS
    marks = [pytest.mark.slow] if slow else []
    return pytest.param("interpreter", name, id=name, marks=marks)


def _on_gpu(name: str):
    return pytest.param("gpu", name, id=f"{name}, gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("machine", "name"),
    [*map(_interpreted, BOTH), *map(_on_gpu, BOTH)],
    indirect=["machine"],
)
def test_cuts(machine, name):
    """Chains, stars, random and padded trees, with traps in all that is not read."""
    case, config, tail_rows = BOTH[name]
    rng = np.random.default_rng(1)
    arrays, tree_list = make(case, rng, dtype=BF16, tail_rows=tail_rows)
    got = attend(machine, arrays, config)
    check("tree_mla kernel", got, arrays, tree_list, SCALE)


@on_every_machine
@pytest.mark.parametrize(
    "name",
    [pytest.param("two tail tiles", marks=pytest.mark.slow), "two tail tiles, wide"],
)
@quiet_arithmetic
def test_rows_that_see_nothing_of_a_tile_add_nothing(machine, name):
    """The second tail tile has one node; the rest is as large as can be."""
    case, config, _ = BOTH[name]
    rng = np.random.default_rng(1)
    arrays, tree_list = make(case, rng, dtype=BF16, tail_rows=128)
    for tail in ("tail_latent", "tail_rope"):
        arrays[tail] = np.where(np.isnan(arrays[tail]), BF16(3e38), arrays[tail])
    got = attend(machine, arrays, config)
    check("tree_mla kernel", got, arrays, tree_list, SCALE)


def chosen(choice: Callable[..., TreeMlaConfig], case: TreeMlaCase) -> TreeMlaConfig:
    """Returns the cut that an H200 would get."""
    held = case.pages_per_request * case.page_size
    return choice(
        batch=len(case.context_len),
        rows=case.nodes * case.heads,
        latent=case.latent,
        rope=case.rope,
        max_tiles=-(-held // 64) - (-case.nodes // 64),
        cores=132,
    )


@pytest.mark.parametrize("machine", [GPU], indirect=True)
@pytest.mark.parametrize("choice", [None, choose_wide], ids=["tuned", "wide"])
@pytest.mark.parametrize("case", [kimi(case) for case in CASES if case.size == "kimi"])
def test_kimi(machine, case, choice):
    """The tuned cut against the reference on the same GPU, in float32."""
    arrays, tree_list = make(
        case, np.random.default_rng(4), dtype=BF16, tail_rows=-(-case.nodes // 64) * 64
    )
    arrays = jax.device_put(arrays)
    config = choice and chosen(choice, case)
    out, lse = attend(machine, arrays, config)
    want_out, want_lse = reference(arrays, case)
    used = np.stack([tree.used for tree in tree_list])
    assert_close("tree_mla kernel", out[used], want_out[used])
    assert_close("tree_mla kernel lse", lse[used], want_lse[used])
