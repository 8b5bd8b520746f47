"""What the INT4 kernels cost, by compiling them for GPUs that are not there."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from ddtree_jax.pallas.int4_matmul import Int4Tiles
from ddtree_jax.pallas.int4_matmul.config import GroupedConfig
from ddtree_jax.pallas.int4_matmul.kernel import (
    int4_grouped_swiglu_pallas,
    int4_matmul_pallas,
)
from tests.pallas import test_aot
from tests.support.aot import Compiled, Kernel, compile_for, shared_memory_limit
from tests.support.hlo import Program

pytestmark = test_aot.pytestmark

LAYERS, HIDDEN, CHOICES = 60, 7168, 8
# What a multiprocessor's 65,536 registers give each thread of five warpgroups, of which
# one only loads, and of four: in eights, and without moving any between warpgroups.
MAX_REGISTERS = {"h200": 96, "rtx_pro_6000": 128}
# Bytes of a thread's registers that a kernel may store to memory, by target and tokens.
# Else 0. Here one is stored when the kernel starts, and read once by the warpgroup that
# loads.
SPILLS = {("h200", 256): 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Static sizes of one call for the experts of one device."""

    tokens: int
    experts: int = 384
    inner: int = 256

    def __str__(self):
        return f"tokens{self.tokens}-experts{self.experts}-inner{self.inner}"

    def shapes(self) -> list[tuple]:
        """Returns the arguments of `swiglu`: all layers' experts in each array."""
        lead = LAYERS, self.experts
        stacks = [(self.inner, HIDDEN)] * 2 + [(HIDDEN, self.inner)]
        pairs = self.tokens, CHOICES
        return [
            ((self.tokens, HIDDEN), jnp.bfloat16),
            *(array for size in stacks for array in tiles((*lead, *size))),
            ((), jnp.int32),
            (pairs, jnp.int32),
            (pairs, jnp.float32),
        ]


def tiles(shape: tuple[int, ...]) -> list[tuple]:
    """Returns the arrays of a weight in tiles."""
    *lead, inputs = shape
    return [
        ((*lead, inputs // 8), jnp.int32),
        ((*lead, inputs // 32), jnp.bfloat16),
    ]


TP8 = [Bucket(tokens=tokens) for tokens in (1, 8, 9, 64, 65, 256)]
EP8 = [Bucket(tokens=tokens, experts=48, inner=2048) for tokens in (1, 9, 64, 65, 256)]
BUCKETS = [
    pytest.param(
        bucket,
        id=str(bucket),
        marks=[] if bucket in TP8 or bucket.tokens == 9 else pytest.mark.slow,
    )
    for bucket in (*TP8, *EP8)
]
# More tokens are done in several launches there.
SMALL = [b for b in BUCKETS if b.values[0].tokens <= 64]


def swiglu(x, *arrays, config: GroupedConfig | None = None):
    weights = [Int4Tiles(*arrays[i : i + 2]) for i in (0, 2, 4)]
    return int4_grouped_swiglu_pallas(x, *weights, *arrays[6:], config=config)


@functools.cache
def compiled(target: str, bucket: Bucket) -> Compiled:
    return compile_for(target, swiglu, *bucket.shapes())


def assert_fits(target: str, kernel: Kernel, *, spills: int = 0) -> None:
    assert 0 < kernel.registers <= MAX_REGISTERS[target]
    assert max(kernel.spill_stores, kernel.spill_loads) <= spills
    assert 0 < kernel.shared_memory <= shared_memory_limit(target)


ON_TARGETS = [
    *(
        pytest.param("h200", *b.values, id=f"h200-{b.id}", marks=b.marks)
        for b in BUCKETS
    ),
    *(
        pytest.param(
            "rtx_pro_6000", *b.values, id=f"rtx_pro_6000-{b.id}", marks=b.marks
        )
        for b in SMALL
    ),
]


@pytest.mark.parametrize(("target", "bucket"), ON_TARGETS)
def test_kernels_of_the_experts_keep_within_a_target(target, bucket):
    kernels = compiled(target, bucket).kernels
    assert set(kernels) == {"int4_route", "int4_grouped_swiglu"}
    assert_fits(target, kernels["int4_route"])
    spills = SPILLS.get((target, bucket.tokens), 0)
    assert_fits(target, kernels["int4_grouped_swiglu"], spills=spills)


@pytest.mark.parametrize(("target", "bucket"), ON_TARGETS)
def test_call_is_two_kernels_and_copies_no_weights(target, bucket):
    hlo = compiled(target, bucket).hlo
    found = test_aot.launches(hlo)
    calls = [line for line in found if 'custom_call_target="mosaic_gpu_v2"' in line]
    assert len(calls) == 2
    assert found == calls
    for code, line in Program(hlo).instructions():
        if code not in ("parameter", "bitcast"):
            # The activations between the products are the largest.
            assert test_aot.largest_result(line) < 2**24, line


def product(x, *arrays):
    return int4_matmul_pallas(x, Int4Tiles(*arrays))


@pytest.mark.parametrize("target", MAX_REGISTERS)
@pytest.mark.parametrize("tokens", [1, 9, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(7168, 2048), (2048, 7168)])
def test_kernel_of_one_weight_keeps_within_a_target(target, tokens, inputs, outputs):
    shapes = [((tokens, inputs), jnp.bfloat16), *tiles((outputs, inputs))]
    got = compile_for(target, product, *shapes)
    assert set(got.kernels) == {"int4_matmul"}
    assert_fits(target, got.kernels["int4_matmul"])
    assert len(test_aot.launches(got.hlo)) == 1
