"""The race detection that kernel tests rely on finds a race, in any kernel."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support.interpreter import DETECTING_RACES, no_races


@jax.jit
def exchange(x):
    """Returns x + 1 by two warpgroups, one of which waits for the other."""
    return _exchange(x, waits=True)


@jax.jit
def racing_then_not(x):
    return _exchange(_exchange(x, waits=False), waits=True)


def _exchange(x, *, waits):
    def body(x_ref, out_ref, shared, written):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            shared[...] = x_ref[...] + 1
            plgpu.barrier_arrive(written)
            if not waits:
                plgpu.barrier_wait(written)

        @pl.when(warpgroup == 1)
        def _():
            if waits:
                plgpu.barrier_wait(written)
            out_ref[...] = shared[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        num_threads=2,
        thread_name="warpgroup",
        interpret=DETECTING_RACES,
    )(x)


X = jnp.arange(128, dtype=jnp.float32)


def test_a_kernel_without_a_race_passes():
    with no_races(kernels=1):
        got = jax.device_get(exchange(X))
    assert (got == X + 1).all()


def test_a_race_in_the_first_of_two_kernels_is_found():
    message = "^a race in kernel 1, printed above$"
    with pytest.raises(AssertionError, match=message), no_races(kernels=2):
        jax.block_until_ready(racing_then_not(X))


def test_a_kernel_that_did_not_run_is_missed():
    message = "^1 kernels, expected 2$"
    with pytest.raises(AssertionError, match=message), no_races(kernels=2):
        jax.block_until_ready(exchange(X))
