"""The kernel of one INT4 weight: in the interpreter with race detection, on a GPU.

As in `test_int4_kernel`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.int4_matmul.cases import DENSE_CASES, DenseCase
from ddtree_jax.pallas.int4_matmul.config import GroupedConfig
from ddtree_jax.pallas.int4_matmul.kernel import int4_matmul_pallas
from ddtree_jax.pallas.int4_matmul.reference import int4_matmul_reference
from ddtree_jax.pallas.int4_matmul.tiles import to_tiles
from ddtree_jax.quant import Int4Weight
from tests.pallas.machines import GPU, on_every_machine, quiet_arithmetic
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.interpreter import DETECTING_RACES, no_races
from tests.support.weights import dequantised, random_int4

BF16 = ml_dtypes.bfloat16
pytestmark = quiet_arithmetic


class Cut(NamedTuple):
    """One shape, and how the work on it is cut."""

    tokens: int
    inputs: int
    outputs: int
    config: GroupedConfig


def cut(
    *, tokens: int, inputs: int, outputs: int, warpgroups: int = 4, slots: int = 2
) -> Cut:
    config = GroupedConfig(row_tiles=1, warpgroups=warpgroups, slots=slots, blocks=1)
    return Cut(tokens, inputs, outputs, config)


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(x, weight: Int4Weight, config: GroupedConfig | None, interpret):
    return int4_matmul_pallas(x, to_tiles(weight), config=config, interpret=interpret)


def run(machine: str, x, weight: Int4Weight, config: GroupedConfig | None):
    """Returns the result; in the interpreter, the kernel may have no race."""
    if machine == "gpu":
        return jax.device_get(_run(x, weight, config, None))
    with no_races(kernels=1):
        return jax.device_get(_run(x, weight, config, DETECTING_RACES))


def draw(cut: Cut) -> tuple[np.ndarray, Int4Weight]:
    """Returns activations and a weight; results are of order 1."""
    rng = np.random.default_rng(1)
    x = 2 * rng.standard_normal((cut.tokens, cut.inputs)) / cut.inputs**0.5
    return x.astype(BF16), random_int4(rng, (cut.outputs, cut.inputs))


def check(got, x, weight: Int4Weight) -> None:
    assert got.dtype == BF16
    want = x.astype(np.float64) @ dequantised(weight).T
    assert_close("int4_matmul kernel", got, want)


# The normal suite has of each property one; the interpreter takes seconds for each.
CUTS = {
    "fewer units than warpgroups, a stage of one part": cut(
        tokens=1, inputs=256, outputs=32
    ),
    "a stage and a part, a ring used again": cut(tokens=9, inputs=1280, outputs=112),
}
SLOW_CUTS = {
    "8 tokens, whole stages": cut(tokens=8, inputs=1024, outputs=64, warpgroups=3),
    "17 tokens, a ring of one": cut(tokens=17, inputs=512, outputs=80, slots=1),
    "65 tokens, more slots than stages": cut(
        tokens=65, inputs=256, outputs=16, slots=6
    ),
    "33 tokens, three stages": cut(
        tokens=33, inputs=2304, outputs=48, warpgroups=3, slots=5
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
    cut = (CUTS | SLOW_CUTS)[name]
    x, weight = draw(cut)
    config = dataclasses.replace(cut.config, blocks=blocks)
    check(run(machine, x, weight, config), x, weight)


# One compiled shape, on which the tests below vary the values.
SHAPE = cut(tokens=11, inputs=512, outputs=96)
BLOCKS = {"interpreter": 1, "gpu": 5}


def given(machine: str, x, weight: Int4Weight):
    """Returns what the kernel makes of arguments of `SHAPE`."""
    config = dataclasses.replace(SHAPE.config, blocks=BLOCKS[machine])
    return run(machine, x, weight, config)


@functools.cache
def clean(machine: str):
    """Returns what `draw(SHAPE)` gives."""
    return given(machine, *draw(SHAPE))


@on_every_machine
def test_two_runs_are_bit_identical(machine):
    x, weight = draw(SHAPE)
    again = given(machine, x, weight)
    assert_bit_equal(again, clean(machine))
    check(again, x, weight)


@on_every_machine
def test_the_order_of_tokens_does_not_matter(machine):
    x, weight = draw(SHAPE)
    order = np.random.default_rng(2).permutation(SHAPE.tokens)
    assert_bit_equal(given(machine, x[order], weight), clean(machine)[order])


@on_every_machine
@pytest.mark.parametrize("token", [0, 10])
def test_nan_in_a_token_surfaces_in_it_only(machine, token):
    """Of the last token there are copies in the last tile of tokens."""
    x, weight = draw(SHAPE)
    x[token, 300] = np.nan
    want = clean(machine).copy()
    want[token] = np.nan
    got = given(machine, x, weight)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = ~np.isnan(want)
    assert_bit_equal(got[fine], want[fine])


@on_every_machine
def test_nan_in_a_scale_surfaces_in_its_output_only(machine):
    x, weight = draw(SHAPE)
    spoiled = dataclasses.replace(weight, scale=weight.scale.at[37, 11].set(jnp.nan))
    want = clean(machine).copy()
    want[:, 37] = np.nan
    got = given(machine, x, spoiled)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = ~np.isnan(want)
    assert_bit_equal(got[fine], want[fine])


IDENTITY = cut(tokens=256, inputs=256, outputs=32, slots=3)


@pytest.mark.parametrize(
    "machine",
    [pytest.param("interpreter", marks=pytest.mark.slow), GPU],
    indirect=True,
)
def test_identity_reads_back_the_weight(machine):
    """Scales of all mantissas and many exponents; x = 1 selects each input in turn."""
    rng = np.random.default_rng(3)
    _, weight = draw(IDENTITY)
    scale = np.ldexp(
        1 + rng.integers(0, 128, weight.scale.shape) / 128,
        rng.integers(-60, 60, weight.scale.shape),
    )
    weight = dataclasses.replace(weight, scale=jnp.asarray(scale.astype(BF16)))
    x = np.eye(256).astype(BF16)
    got = run(machine, x, weight, IDENTITY.config)
    np.testing.assert_array_equal(got.astype(np.float64).T, dequantised(weight))


def _kimi(case: DenseCase):
    quick = case.tokens == 9 or (case.inputs, case.outputs) == (7168, 2048)
    return pytest.param(case, id=case.name, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("machine", [GPU], indirect=True)
@pytest.mark.parametrize("case", [_kimi(c) for c in DENSE_CASES if c.size == "kimi"])
def test_kimi(machine, case):
    """The chosen cut against the reference on the same GPU, in float32."""
    x, weight = draw(cut(tokens=case.tokens, inputs=case.inputs, outputs=case.outputs))
    got = run(machine, x, weight, None)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(int4_matmul_reference)(x.astype(np.float32), weight)
    assert_close("int4_matmul kernel", got, want)
