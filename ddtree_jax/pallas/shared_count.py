"""Owns counts in global memory by which blocks wait for each other.

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


def load_shared_count(counts: Any, place: int) -> Array:
    """Returns a count of `counts`, int32 in global memory, as it is at some time."""

    @reg.inline(
        arg_types=(reg.REF,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, reg.SPLAT),
    )
    def load(_, counts):
        value = llvm.inline_asm(
            ir.IntegerType.get_signless(32),
            [mgpu.utils.memref_ptr(counts)],
            f"ld.relaxed.gpu.global.u32 $0, [$1+{4 * place}];",
            "=r,l,~{memory}",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return load(counts)


def add_to_shared_count(counts: Any, place: int) -> None:
    """Adds one for this warpgroup, whose threads have waited for each other.

    Who then finds the new count sees what these have written.
    """

    @reg.inline(arg_types=(reg.REF,))
    def add(_, counts):
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            _run(
                "fence.acq_rel.gpu;\n"
                f"red.release.gpu.global.add.u32 [$0+{4 * place}], 1;",
                "l",
                mgpu.utils.memref_ptr(counts),
            )

    add(counts)


def wait_for_shared_count(counts: Any, place: int, target: Array) -> None:
    """Returns when a count has come to `target`, for the whole warpgroup."""

    @reg.inline(arg_types=(reg.REF, reg.SPLAT))
    def wait(_, counts, target):
        _poll(counts, place, "setp.lt.s32 p, v, $1;", reg.scalar(target))

    wait(counts, target)


def wait_for_shared_rounds(counts: Any, place: int, arrivals: int) -> None:
    """Returns when a count is a multiple of `arrivals`, for the whole warpgroup."""

    @reg.inline(arg_types=(reg.REF,))
    def wait(_, counts):
        code = "rem.u32 v, v, $1;\nsetp.ne.u32 p, v, 0;"
        _poll(counts, place, code, reg.i32(arrivals))

    wait(counts)


def _poll(counts: ir.Value, place: int, again: str, operand: ir.Value) -> None:
    """Reads a count until `again` makes p of it, v, and the operand, $1, false."""
    with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
        _run(
            "{\n.reg .pred p;\n.reg .b32 v;\nwait_${:uid}:\n"
            f"ld.acquire.gpu.global.u32 v, [$0+{4 * place}];\n{again}\n"
            "@p bra wait_${:uid};\n}",
            "l,r",
            mgpu.utils.memref_ptr(counts),
            operand,
        )
    mgpu.utils.warpgroup_barrier()


def _run(code: str, constraints: str, *operands: ir.Value) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        list(operands),
        code,
        f"{constraints},~{{memory}}",
        has_side_effects=True,
    )
