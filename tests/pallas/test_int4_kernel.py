"""The kernel of the routed experts: in the interpreter with race detection, on a GPU.

The interpreter runs one block; what only several blocks do, a GPU alone tests.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.int4_matmul.cases import GroupedCase
from ddtree_jax.pallas.int4_matmul.config import GroupedConfig
from ddtree_jax.pallas.int4_matmul.kernel import int4_grouped_swiglu_pallas
from ddtree_jax.pallas.int4_matmul.tiles import to_tiles
from tests.pallas.machines import on_every_machine, quiet_arithmetic
from tests.pallas.test_int4_grouped import LAYER, Routed, draw_ids, make, oracle
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.interpreter import DETECTING_RACES, no_races

BF16 = ml_dtypes.bfloat16
pytestmark = quiet_arithmetic


class Cut(NamedTuple):
    """One shape, and how the work on it is cut."""

    case: GroupedCase
    config: GroupedConfig


def cut(
    *,
    tokens: int,
    experts: int = 3,
    choices: int = 2,
    hidden: int = 512,
    inner: int = 256,
    row_tiles: int = 2,
    warpgroups: int = 4,
    slots: int = 2,
    shared_units: bool = False,
    late_blocks: int = 0,
) -> Cut:
    case = GroupedCase(
        size="ci",
        layout="whole",
        tokens=tokens,
        layers=2,
        experts=experts,
        # Some ids are another device's.
        routed_experts=experts + 1,
        experts_per_token=choices,
        hidden=hidden,
        inner=inner,
    )
    config = GroupedConfig(
        row_tiles=row_tiles,
        warpgroups=warpgroups,
        slots=slots,
        blocks=1,
        shared_units=shared_units,
        late_blocks=late_blocks,
    )
    return Cut(case, config)


def draw(case: GroupedCase, ids: np.ndarray, seed: int = 4) -> Routed:
    """Returns arguments, with NaN in all that `ids` do not pick; results of order 1."""
    a = make(case, ids, seed)
    return a._replace(
        x=(a.x * 2 / case.hidden**0.5).astype(BF16),
        expert_weights=(a.expert_weights * 4 / case.inner**0.5).astype(np.float32),
    )


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(a: Routed, config: GroupedConfig | None, interpret):
    tiles = {name: to_tiles(getattr(a, name)) for name in ("gate", "up", "down")}
    arguments = a._replace(**tiles)
    return int4_grouped_swiglu_pallas(*arguments, config=config, interpret=interpret)


def run(machine: str, a: Routed, config: GroupedConfig | None) -> np.ndarray:
    """Returns the result; in the interpreter, the kernel may have no race."""
    if machine == "gpu":
        return jax.device_get(_run(a, config, None))
    with no_races(kernels=1):
        return jax.device_get(_run(a, config, DETECTING_RACES))


def check(got: np.ndarray, a: Routed) -> None:
    assert got.dtype == np.float32
    assert_close("int4_grouped_swiglu kernel", got, oracle(a))


# The normal suite has of each property one; the interpreter takes seconds for each.
CUTS = {
    "one token, shared units": cut(
        tokens=1, hidden=1536, row_tiles=1, shared_units=True
    ),
    "8 tokens, three warpgroups, two stages a unit": cut(
        tokens=8, hidden=1024, row_tiles=1, warpgroups=3
    ),
    "17 tokens, an inner width of two parts, a ring of three": cut(
        tokens=17, inner=512, slots=3
    ),
    # Over more groups of rows than the rings can get ahead by.
    "warpgroups with more and with fewer items": cut(tokens=9, experts=5, choices=3),
    # One block has no other to wait for: here the order of its units is at stake.
    "late units": cut(tokens=17, experts=5, choices=3, late_blocks=1),
}
SLOW_CUTS = {
    "a ring of one": cut(tokens=9, slots=1),
    "more slots than stages": cut(tokens=1, row_tiles=1, warpgroups=2, slots=8),
    "33 tokens, three warpgroups": cut(
        tokens=33, experts=5, choices=3, warpgroups=3, slots=3
    ),
    "65 tokens, two experts": cut(tokens=65, experts=2, choices=1),
    "widths of 1536 and 768": cut(tokens=2, choices=1, hidden=1536, inner=768, slots=5),
    "shared units, three warpgroups": cut(
        tokens=2, hidden=1024, row_tiles=1, warpgroups=3, slots=3, shared_units=True
    ),
}
NAMES = (*CUTS, *SLOW_CUTS)


def _interpreted(name: str):
    marks = [pytest.mark.slow] if name in SLOW_CUTS else []
    return pytest.param("interpreter", name, 1, id=name, marks=marks)


def _on_gpu(name: str, blocks: int):
    label = f"{name}, gpu, {blocks} blocks"
    return pytest.param("gpu", name, blocks, id=label, marks=pytest.mark.gpu)


@pytest.mark.parametrize(
    ("machine", "name", "blocks"),
    [
        *map(_interpreted, NAMES),
        *(_on_gpu(name, blocks) for name in NAMES for blocks in (1, 132)),
    ],
    indirect=["machine"],
)
def test_cuts(machine, name, blocks):
    case, config = (CUTS | SLOW_CUTS)[name]
    a = draw(case, draw_ids(case, np.random.default_rng(5)))
    check(run(machine, a, dataclasses.replace(config, blocks=blocks)), a)


# One compiled shape, on which the tests below vary the values.
SHAPE = cut(tokens=10, experts=4, choices=3)
BLOCKS = {"interpreter": 1, "gpu": 5}


def given(machine: str, a: Routed) -> np.ndarray:
    """Returns what the kernel makes of arguments of `SHAPE`."""
    config = dataclasses.replace(SHAPE.config, blocks=BLOCKS[machine])
    return run(machine, a, config)


def column(*experts: int) -> np.ndarray:
    """Returns ids where every token picks the same experts."""
    return np.tile(np.asarray(experts, np.int32), (SHAPE.case.tokens, 1))


def uneven() -> np.ndarray:
    """Returns a busy expert with two tiles, one with a token, and one without."""
    ids = column(2, 4, 5)
    ids[3] = (3, 2, 0)
    ids[7] = (5, 4, -1)
    ids[9] = (-1, 2, 1000)
    return ids


def even() -> np.ndarray:
    """Returns ids where all experts have tokens, and some of those have none."""
    return draw_ids(SHAPE.case, np.random.default_rng(6))


@functools.cache
def clean(machine: str) -> np.ndarray:
    """Returns the result of `uneven` picks."""
    return given(machine, draw(SHAPE.case, uneven()))


@on_every_machine
def test_two_runs_are_bit_identical(machine):
    a = draw(SHAPE.case, uneven())
    again = given(machine, a)
    assert_bit_equal(again, clean(machine))
    check(again, a)
    # The token that picks nothing.
    assert_bit_equal(again[7], np.zeros(SHAPE.case.hidden, np.float32))


@on_every_machine
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(column(3, 4, 5), id="all on the last expert"),
        pytest.param(even(), id="all experts"),
    ],
)
def test_any_routing(machine, ids):
    a = draw(SHAPE.case, ids)
    check(given(machine, a), a)


@on_every_machine
def test_nobody_picks_anything(machine):
    """Then everything is NaN, and the result zero."""
    a = draw(SHAPE.case, column(4, -1, 2**30))
    assert_bit_equal(given(machine, a), np.zeros(a.x.shape, np.float32))


def reordered(a: Routed, order: np.ndarray) -> Routed:
    return a._replace(
        x=a.x[order],
        expert_ids=a.expert_ids[order],
        expert_weights=a.expert_weights[order],
    )


@on_every_machine
def test_the_order_of_tokens_and_of_choices_does_not_matter(machine):
    order = np.random.default_rng(8).permutation(SHAPE.case.tokens)
    a = reordered(draw(SHAPE.case, uneven()), order)
    for name in ("expert_ids", "expert_weights"):
        a = a._replace(**{name: getattr(a, name)[:, ::-1].copy()})
    assert_bit_equal(given(machine, a), clean(machine)[order])


@on_every_machine
def test_other_tokens_do_not_matter(machine):
    """Others pick other experts and have other activations, of which one is NaN."""
    a = draw(SHAPE.case, uneven())
    ids = np.where(np.arange(10)[:, None] % 2 == 0, a.expert_ids, [[0, 3, 4]])
    others = draw(SHAPE.case, ids.astype(np.int32), seed=9)
    mine = np.arange(SHAPE.case.tokens) % 2 == 0
    x = np.where(mine[:, None], a.x, others.x)
    x[1, 17] = np.nan
    weights = np.where(mine[:, None], a.expert_weights, others.expert_weights)
    stacks = {}
    for name in ("gate", "up", "down"):
        # Those of `a`, with what it has poisoned taken from the others.
        ours, theirs = getattr(a, name), getattr(others, name)
        bad = jnp.isnan(ours.scale).any(axis=(2, 3), keepdims=True)
        stacks[name] = jax.tree.map(functools.partial(jnp.where, bad), theirs, ours)
    got = given(
        machine,
        Routed(
            x,
            **stacks,
            layer=a.layer,
            expert_ids=ids.astype(np.int32),
            expert_weights=weights,
        ),
    )
    assert np.isnan(got[1]).all()
    assert_bit_equal(got[mine], clean(machine)[mine])
    assert (got[3] != clean(machine)[3]).any()


@on_every_machine
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_nan_in_a_picked_expert_surfaces_in_its_tokens_only(machine, name):
    a = draw(SHAPE.case, uneven())
    stack = getattr(a, name)
    row = 133
    spoiled = dataclasses.replace(
        stack, scale=stack.scale.at[LAYER, 3, row, 5].set(jnp.nan)
    )
    got = given(machine, a._replace(**{name: spoiled}))
    want = clean(machine).copy()
    want[3, [row] if name == "down" else slice(None)] = np.nan
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = ~np.isnan(want)
    assert_bit_equal(got[fine], want[fine])
