"""Grouped INT4 SwiGLU against float64, with NaN in all that nobody may read."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import int4_grouped_swiglu
from ddtree_jax.pallas.int4_matmul.cases import GROUPED_CASES, GroupedCase
from ddtree_jax.quant import Int4Weight
from tests.support import poison
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.weights import dequantised, random_int4

LAYER = 1


class Routed(NamedTuple):
    """Arguments of `int4_grouped_swiglu`, in its order."""

    x: np.ndarray
    gate: Int4Weight
    up: Int4Weight
    down: Int4Weight
    layer: np.ndarray
    expert_ids: np.ndarray
    expert_weights: np.ndarray


@partial(jax.jit, static_argnames="implementation")
def grouped(arguments: Routed, implementation="auto"):
    return int4_grouped_swiglu(*arguments, implementation=implementation)


TOKENS = 12
CASE = GroupedCase(
    size="ci",
    layout="whole",
    tokens=TOKENS,
    layers=3,
    experts=6,
    routed_experts=6,
    experts_per_token=3,
    hidden=64,
    inner=32,
)


def draw_ids(case: GroupedCase, rng) -> np.ndarray:
    """Returns distinct experts for every token."""
    ids = [
        rng.permutation(case.routed_experts)[: case.experts_per_token]
        for _ in range(case.tokens)
    ]
    return np.stack(ids).astype(np.int32)


def make(case: GroupedCase, ids: np.ndarray, seed: int = 4) -> Routed:
    """Returns arguments with NaN in all that `ids` do not pick."""
    rng = np.random.default_rng(seed)
    lead = (case.layers, case.experts)
    picked = set(ids.flatten().tolist()) & set(range(case.experts))

    def stack(out: int, inputs: int) -> Int4Weight:
        weight = random_int4(rng, (*lead, out, inputs))
        packed, scale = poison.poison_experts(
            np.asarray(weight.packed), np.asarray(weight.scale), LAYER, picked
        )
        return Int4Weight(jnp.asarray(packed), jnp.asarray(scale))

    x = rng.standard_normal((len(ids), case.hidden)).astype(np.float32)
    mine = (ids >= 0) & (ids < case.experts)
    x[~mine.any(axis=1)] = np.nan
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    # The weight of an id that picks nothing is not read either.
    weights[~mine] = np.nan
    return Routed(
        x,
        stack(case.inner, case.hidden),
        stack(case.inner, case.hidden),
        stack(case.hidden, case.inner),
        np.int32(LAYER),
        ids,
        weights,
    )


def oracle(a: Routed) -> np.ndarray:
    """Returns the weighted sums, token by token and expert by expert, in float64."""
    gate, up, down = (dequantised(w)[LAYER] for w in (a.gate, a.up, a.down))
    out = np.zeros(a.x.shape)
    for t, k in np.ndindex(a.expert_ids.shape):
        e = a.expert_ids[t, k]
        if 0 <= e < len(gate):
            x = a.x[t].astype(np.float64)
            g = gate[e] @ x
            hidden = g / (1 + np.exp(-g)) * (up[e] @ x)
            out[t] += a.expert_weights[t, k] * (down[e] @ hidden)
    return out


def check(a: Routed) -> None:
    got = grouped(a)
    assert got.dtype == jnp.float32
    assert_close("int4_grouped_swiglu", got, oracle(a))
    assert_bit_equal(grouped(a), got)
    assert_bit_equal(grouped(a, "reference"), got)


@pytest.mark.parametrize(
    "case", [c for c in GROUPED_CASES if c.size == "ci"], ids=lambda c: c.name
)
def test_grouped_cases(case):
    check(make(case, draw_ids(case, np.random.default_rng(5))))


def column(*experts: int) -> np.ndarray:
    """Returns ids where every token picks the same experts."""
    return np.tile(np.asarray(experts, np.int32), (TOKENS, 1))


def uneven() -> np.ndarray:
    """Returns one busy expert, one with a single token, and holes in between."""
    ids = column(2, 6, 6)
    ids[3] = (5, 2, 0)
    ids[7] = (6, 6, 6)
    ids[11] = (-1, 2, 1000)
    return ids


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(column(5, 6, 6), id="all on the last expert"),
        pytest.param(column(0, 6, 6), id="all on the first expert"),
        pytest.param(column(6, 6, 6), id="nobody"),
        pytest.param(column(-1, 7, 2**30), id="ids outside"),
        pytest.param(uneven(), id="uneven"),
        pytest.param(draw_ids(CASE, np.random.default_rng(6)), id="random"),
    ],
)
def test_any_routing(ids):
    check(make(CASE, ids))


def test_tokens_that_pick_nothing_get_zero():
    ids = uneven()
    got = np.asarray(grouped(make(CASE, ids)))
    assert_bit_equal(got[7], np.zeros(CASE.hidden, np.float32))
    assert (got[3] != 0).any()


def test_experts_of_another_device_pick_nothing():
    case = dataclasses.replace(CASE, layout="ep8", experts=2, routed_experts=16)
    check(make(case, draw_ids(case, np.random.default_rng(7))))


@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_index_selects(layer):
    a = make(CASE, uneven())
    stacks = [
        jax.tree.map(lambda leaf: jnp.roll(leaf, layer - LAYER, axis=0), stack)
        for stack in (a.gate, a.up, a.down)
    ]
    moved = Routed(a.x, *stacks, np.int32(layer), a.expert_ids, a.expert_weights)
    assert_bit_equal(grouped(moved), grouped(a))
    assert np.isnan(grouped(moved._replace(layer=np.int32(LAYER)))).any()


def test_the_order_of_tokens_does_not_matter():
    a = make(CASE, uneven())
    order = np.random.default_rng(8).permutation(TOKENS)
    permuted = a._replace(
        x=a.x[order],
        expert_ids=a.expert_ids[order],
        expert_weights=a.expert_weights[order],
    )
    assert_bit_equal(grouped(permuted), np.asarray(grouped(a))[order])


def test_the_order_of_choices_does_not_matter():
    a = make(CASE, draw_ids(CASE, np.random.default_rng(9)))
    reversed_ = a._replace(
        expert_ids=a.expert_ids[:, ::-1].copy(),
        expert_weights=a.expert_weights[:, ::-1].copy(),
    )
    assert_bit_equal(grouped(reversed_), grouped(a))


def test_nan_in_a_picked_expert_surfaces_in_its_tokens_only():
    a = make(CASE, uneven())
    spoiled = dataclasses.replace(a.down, scale=a.down.scale.at[LAYER, 5].set(jnp.nan))
    got, want = np.asarray(grouped(a._replace(down=spoiled))), np.asarray(grouped(a))
    assert np.isnan(got[3]).all()
    others = np.arange(TOKENS) != 3
    assert_bit_equal(got[others], want[others])


@pytest.mark.parametrize(
    ("name", "change", "got", "want"),
    [
        ("x", lambda a: a[:, :32], (12, 32), (12, 64)),
        ("expert_ids", lambda a: a[:4], (4, 3), (12, 3)),
        ("expert_weights", lambda a: a[:, :2], (12, 2), (12, 3)),
        ("up", lambda w: _cut(w, np.s_[:, :5]), (3, 5, 32, 64), (3, 6, 32, 64)),
        ("down", lambda w: _cut(w, np.s_[:, :, :32]), (3, 6, 32, 32), (3, 6, 64, 32)),
    ],
)
def test_grouped_shapes_are_named(name, change, got, want):
    a = make(CASE, uneven())
    wrong = a._replace(**{name: change(getattr(a, name))})
    if name == "expert_ids":
        wrong = wrong._replace(expert_weights=a.expert_weights[:4])
    with pytest.raises(ValueError) as error:
        grouped(wrong)
    assert str(error.value) == (
        f"int4_grouped_swiglu: {name} has shape {got}, expected {want} "
        "from gate (3, 6, 32, 64)"
    )


def _cut(weight: Int4Weight, index) -> Int4Weight:
    return jax.tree.map(lambda leaf: leaf[index], weight)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_grouped_refuses_a_broken_weight(name):
    a = make(CASE, uneven())
    weight = getattr(a, name)
    broken = dataclasses.replace(weight, scale=weight.scale.astype(jnp.float32))
    message = (
        "Int4Weight expects int32 packed and bfloat16 scale, got int32 and float32"
    )
    with pytest.raises(ValueError, match=message):
        grouped(a._replace(**{name: broken}))
