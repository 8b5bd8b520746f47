"""The Hopper kernels: in the interpreter with race detection, and on a GPU.

Each test of a kernel runs on the `machine` that its parameter names. The GPU's need
one; there they are run by `JAX_PLATFORMS=cuda scripts/test -m gpu`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla import tree_mla_attention
from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase
from ddtree_jax.pallas.tree_mla.config import TreeMlaConfig
from ddtree_jax.pallas.tree_mla.kernel import tree_mla_attention_pallas
from ddtree_jax.pallas.tree_mla.wide_config import (
    ROWS,
    TreeMlaWideConfig,
    choose_wide,
)
from tests.support import trees
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.interpreter import DETECTING_RACES, no_races
from tests.support.tree_mla import Arrays, check, make, split_arguments

SCALE = 0.1
BF16 = ml_dtypes.bfloat16

INTERPRETER = pytest.param("interpreter", id="interpreter")
GPU = pytest.param("gpu", id="gpu", marks=pytest.mark.gpu)
# The interpreter multiplies with NumPy.
quiet_arithmetic = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)
on_every_machine = pytest.mark.parametrize("machine", [INTERPRETER, GPU], indirect=True)


@pytest.fixture
def machine(request) -> str:
    """Where the kernel runs."""
    if request.param == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("needs one Hopper GPU: JAX_PLATFORMS=cuda scripts/test -m gpu")
    if request.param == "interpreter" and jax.default_backend() != "cpu":
        pytest.skip("the interpreter runs on a CPU: scripts/test tests/pallas")
    return request.param


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(arrays: Arrays, config: TreeMlaConfig | None, interpret):
    positional, keywords = split_arguments(arrays)
    return tree_mla_attention_pallas(
        *positional,
        **keywords,
        softmax_scale=SCALE,
        config=config,
        interpret=interpret,
    )


def attend(machine: str, arrays: Arrays, config: TreeMlaConfig | None):
    """Returns output and log-sum-exp; in the interpreter, no kernel may have a race."""
    if machine == "gpu":
        return jax.device_get(_run(arrays, config, None))
    with no_races(kernels=2):
        return jax.device_get(_run(arrays, config, DETECTING_RACES))


class Cut(NamedTuple):
    """One shape, how the work on it is cut, and how many rows its tail has."""

    case: TreeMlaCase
    config: TreeMlaConfig
    tail_rows: int


def cut(
    *,
    heads: int,
    nodes: int,
    page: int,
    context: tuple[int, ...],
    latent: int = 128,
    rows: int,
    splits: int,
    slots: int = 2,
    warpgroups: int = 1,
    tail_rows: int | None = None,
) -> Cut:
    case = TreeMlaCase(
        size="ci",
        heads=heads,
        nodes=nodes,
        context_len=context,
        latent=latent,
        rope=64,
        page_size=page,
    )
    config = TreeMlaConfig(
        rows=rows,
        row_blocks=-(-heads * nodes // rows),
        splits=splits,
        slots=slots,
        combine_warpgroups=warpgroups,
    )
    return Cut(case, config, nodes if tail_rows is None else tail_rows)


def wide(cut: Cut) -> Cut:
    """Returns the cut for the wide kernel, whose blocks have 64 rows."""
    rows = cut.case.heads * cut.case.nodes
    sizes = dataclasses.asdict(cut.config) | {"rows": ROWS}
    sizes["row_blocks"] = -(-rows // ROWS)
    return cut._replace(config=TreeMlaWideConfig(**sizes))


def ragged(page: int, longest: int) -> tuple[int, ...]:
    """Returns contexts around the page border, none included, and a long one."""
    return (0, 1, page - 1, page, page + 1, longest)


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


def assert_equal_bits_where(places: np.ndarray, got, want) -> None:
    for x, y in zip(got, want, strict=True):
        assert_bit_equal(x[places], y[places])


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


def rising(tile):
    return 40.0 * tile


def falling(tile):
    return -40.0 * tile


def first_is_low(tile):
    return -400.0 if tile == 0 else 0.0


def zigzag(tile):
    return 60.0 * tile * (-1) ** tile


@on_every_machine
@with_both_kernels
@pytest.mark.parametrize("level", [rising, falling, first_is_low, zigzag])
def test_rescaling(machine, config, level: Callable[[int], float]):
    """Logits of whole tiles differ by 40 and more, in some rows, up and down."""
    arrays, tree_list = draw()
    # The column sets the logits: `level` for head 0, its negative for head 1.
    column, weight = 5, 8.0
    arrays["q_latent"][..., column] = np.asarray([weight, -weight], BF16)
    table, size = arrays["page_table"], SHAPE.case.page_size
    for b, length in enumerate(arrays["context_len"]):
        for t in range(length):
            row = table[b, t // size], t % size
            arrays["latent_cache"][(*row, column)] = level(t // 64) / weight / SCALE
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


@jax.jit
def _reference(arrays: Arrays):
    positional, keywords = split_arguments(arrays)
    with jax.default_matmul_precision("highest"):
        return tree_mla_attention(
            *positional, **keywords, softmax_scale=SCALE, implementation="reference"
        )


def reference(arrays: Arrays, case: TreeMlaCase):
    """Returns what the reference gives in float32, by 8 heads of one request."""
    out = np.empty(arrays["q_latent"].shape, np.float32)
    lse = np.empty(out.shape[:3], np.float32)
    for b in range(len(case.context_len)):
        one = {
            name: array if name.endswith("cache") else array[b : b + 1]
            for name, array in arrays.items()
        }
        for first in range(0, case.heads, 8):
            heads = np.s_[:, :, first : first + 8]
            for name in ("q_latent", "q_rope"):
                one[name] = np.asarray(arrays[name][b : b + 1][heads], np.float32)
            got = jax.device_get(_reference(one))
            out[b : b + 1][heads], lse[b : b + 1][heads] = got
    return out, lse


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


def _kimi(case: TreeMlaCase):
    marks = [pytest.mark.slow] if max(case.context_len) > 16_384 else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("machine", [GPU], indirect=True)
@pytest.mark.parametrize("choice", [None, choose_wide], ids=["tuned", "wide"])
@pytest.mark.parametrize("case", [_kimi(case) for case in CASES if case.size == "kimi"])
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


@pytest.mark.parametrize("machine", [GPU], indirect=True)
def test_auto_is_the_kernel_on_a_hopper_gpu(machine):
    arrays, tree_list = draw()
    positional, keywords = split_arguments(arrays)
    run = jax.jit(functools.partial(tree_mla_attention, softmax_scale=SCALE))
    got = jax.device_get(run(*positional, **keywords))
    used = np.stack([tree.used for tree in tree_list])
    assert_equal_bits_where(used, got, attend(machine, arrays, None))
