"""Owns a count in global memory by which blocks wait for each other.

No such thing exists in the interpreter.
"""

from typing import Any

from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from ddtree_jax.arrays import Array
from ddtree_jax.pallas import registers as reg


def load_shared_count(count: Any) -> Array:
    """Returns the count, int32 [1] in global memory, as it is at some time."""

    @reg.inline(
        arg_types=(reg.REF,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, reg.SPLAT),
    )
    def load(_, count):
        value = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [mgpu.utils.memref_ptr(count)],
            "ld.relaxed.gpu.global.u32 $0, [$1];",
            "=r,l,~{memory}",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return load(count)


def add_to_shared_count(count: Any) -> None:
    """Adds one for this warpgroup, which has met all others of its block.

    Who then finds the new count sees what these have written.
    """

    @reg.inline(arg_types=(reg.REF,))
    def add(_, count):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            _run(
                "fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [$0], 1;",
                "l",
                mgpu.utils.memref_ptr(count),
            )

    add(count)


def wait_for_shared_count(count: Any, target: Array) -> None:
    """Returns when the count has come to `target`, for the whole warpgroup."""

    @reg.inline(arg_types=(reg.REF, reg.SPLAT))
    def wait(_, count, target):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            _run(
                "{\n.reg .pred p;\n.reg .b32 v;\nwait_${:uid}:\n"
                "ld.acquire.gpu.global.u32 v, [$0];\nsetp.lt.s32 p, v, $1;\n"
                "@p bra wait_${:uid};\n}",
                "l,r",
                mgpu.utils.memref_ptr(count),
                reg.scalar(target),
            )
        mgpu.utils.warpgroup_barrier()

    wait(count, target)


def _run(code: str, constraints: str, *operands: ir.Value) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        list(operands),
        code,
        f"{constraints},~{{memory}}",
        has_side_effects=True,
    )
