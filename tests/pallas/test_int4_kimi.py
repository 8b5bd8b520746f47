"""The INT4 kernels at Kimi K2.6's sizes, and as the entries choose them: on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import int4_grouped_swiglu, int4_matmul
from ddtree_jax.pallas.int4_matmul import to_tiles
from ddtree_jax.pallas.int4_matmul.cases import GROUPED_CASES, GroupedCase
from ddtree_jax.pallas.int4_matmul.reference import int4_grouped_swiglu_reference
from ddtree_jax.quant import Int4Weight
from tests.pallas import test_int4_dense_kernel as dense
from tests.pallas import test_int4_kernel as grouped
from tests.pallas.machines import GPU
from tests.pallas.test_int4_grouped import LAYER, Routed, draw_ids
from tests.support.compare import assert_bit_equal, assert_close

on_a_gpu = pytest.mark.parametrize("machine", [GPU], indirect=True)
NAMES = ("gate", "up", "down")


@functools.partial(jax.jit, static_argnums=1)
def random_stack(key, shape: tuple[int, ...]) -> Int4Weight:
    """Returns what `random_int4` does, made on the GPU."""
    words, scales = jax.random.split(key)
    *lead, inputs = shape
    packed = jax.random.bits(words, (*lead, inputs // 8), jnp.uint32)
    scale = jax.random.uniform(scales, (*lead, inputs // 32), minval=0.02, maxval=0.2)
    packed = jax.lax.bitcast_convert_type(packed, jnp.int32)
    return Int4Weight(packed, scale.astype(jnp.bfloat16))


# One layout's at a time.
@functools.lru_cache(maxsize=1)
def stacks(layers: int, experts: int, hidden: int, inner: int) -> dict[str, Int4Weight]:
    """Returns gate, up and down of all layers."""
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        name: random_stack(key, (layers, experts, *size))
        for name, key, size in zip(NAMES, keys, sizes, strict=True)
    }


@jax.jit
def poisoned(weight: Int4Weight, picked) -> Int4Weight:
    """Returns the weight with NaN in what is not picked [layers, experts]."""
    scale = jnp.where(picked[..., None, None], weight.scale, jnp.nan)
    return Int4Weight(weight.packed, scale)


def draw(case: GroupedCase) -> Routed:
    """Returns arguments with NaN in all that no token picks; results of order 1."""
    rng = np.random.default_rng(1)
    ids = draw_ids(case, rng)
    mine = ids < case.experts
    x = 2 * rng.standard_normal((case.tokens, case.hidden)) / case.hidden**0.5
    x[~mine.any(axis=1)] = np.nan
    weights = rng.uniform(0.1, 1, ids.shape) / case.inner**0.5
    weights[~mine] = np.nan
    picked = np.zeros((case.layers, case.experts), bool)
    picked[LAYER, ids[mine]] = True
    whole = stacks(case.layers, case.experts, case.hidden, case.inner)
    return Routed(
        x.astype(grouped.BF16),
        **{name: poisoned(weight, picked) for name, weight in whole.items()},
        layer=np.int32(LAYER),
        expert_ids=ids,
        expert_weights=weights.astype(np.float32),
    )


@jax.jit
def reference(a: Routed):
    with jax.default_matmul_precision("highest"):
        return int4_grouped_swiglu_reference(*a)


def _kimi(case: GroupedCase):
    quick = case.tokens in (1, 9, 65, 256)
    return pytest.param(case, id=case.name, marks=[] if quick else pytest.mark.slow)


@on_a_gpu
@pytest.mark.parametrize("case", [_kimi(c) for c in GROUPED_CASES if c.size == "kimi"])
def test_kimi(machine, case):
    """The chosen cut against the reference on the same GPU, in float32."""
    a = draw(case)
    got = grouped.run(machine, a, None)
    want = jax.device_get(reference(a))
    assert np.isfinite(want).all()
    assert_close("int4_grouped_swiglu kernel", got, want)
    assert_bit_equal(grouped.run(machine, a, None), got)


@on_a_gpu
def test_many_tokens_are_done_in_parts(machine):
    """Each part gives what it gives alone."""
    case = dataclasses.replace(grouped.SHAPE.case, tokens=300)
    ids = np.tile(grouped.even(), (30, 1))
    a = grouped.draw(case, ids)
    got = grouped.run(machine, a, None)
    grouped.check(got, a)
    last = np.arange(256, 300)
    assert_bit_equal(grouped.run(machine, grouped.reordered(a, last), None), got[last])


@on_a_gpu
def test_auto_is_the_kernel_for_tiles(machine):
    a = grouped.draw(grouped.SHAPE.case, grouped.uneven())
    tiled = a._replace(**{name: to_tiles(getattr(a, name)) for name in NAMES})
    got = jax.jit(int4_grouped_swiglu)(*tiled)
    assert_bit_equal(got, grouped.run(machine, a, None))
    x, weight = dense.draw(dense.SHAPE)
    got = jax.jit(int4_matmul)(x, to_tiles(weight))
    assert_bit_equal(got, dense.run(machine, x, weight, None))


@on_a_gpu
def test_auto_is_the_reference_for_canonical_weights(machine):
    """To the bit; so it is on a CPU, where the other tests of the entries run."""
    a = grouped.draw(grouped.SHAPE.case, grouped.uneven())
    run = functools.partial(jax.jit, static_argnames="implementation")
    got = run(int4_grouped_swiglu)(*a)
    want = run(int4_grouped_swiglu)(*a, implementation="reference")
    assert_bit_equal(got, want)
