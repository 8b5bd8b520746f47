"""Owns keeping a GPU busy for a while, so that what is launched meanwhile waits."""

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref

from ddtree_jax.arrays import I32, Array
from ddtree_jax.pallas import registers as reg

# A thread asks the clock of the GPU, in nanoseconds, and sleeps in between.
_WAIT = """{
.reg .u64 now, end;
.reg .pred before;
mul.wide.u32 end, $1, 1000;
mov.u64 now, %globaltimer;
add.u64 end, end, now;
again:
nanosleep.u32 500;
mov.u64 now, %globaltimer;
setp.lt.u64 before, now, end;
@before bra again;
mov.u32 $0, $1;
}"""


def hold(seconds: float) -> None:
    """Launches what keeps one block of the GPU busy; returns at once."""
    _compiled()(np.asarray([seconds * 1e6], np.int32))


@functools.cache
def _compiled() -> jax.stages.Compiled:
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.jit(wait).lower(shape).compile()


def wait(microseconds: I32[Array, "1"]) -> I32[Array, "1"]:
    """Returns its argument after so many microseconds."""
    kernel = plgpu.kernel(
        _body,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="hold",
    )
    return kernel(microseconds)


def _body(microseconds: Any, out: Any) -> None:
    @reg.inline(arg_types=(reg.REF, reg.REF))
    def run(_, microseconds, out):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.BLOCK):
            kind = ir.IntegerType.get_signless(32)
            value = memref.load(microseconds, [reg.at(0)])
            waited = llvm.inline_asm(
                kind, [value], _WAIT, "=r,r", has_side_effects=True
            )
            memref.store(waited, out, [reg.at(0)])

    run(microseconds, out)
