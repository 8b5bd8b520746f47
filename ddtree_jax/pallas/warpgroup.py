"""Owns what kernels need of a warpgroup's registers and Mosaic GPU lacks.

A warpgroup is 128 threads. An accumulator of shape [64, N] is spread over them
in `Layout.WGMMA`: each thread holds two rows of N / 4 columns. Functions here
work on those registers, so none of them exists on a CPU: with `interpret`, each
is computed by what it means.
"""

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ddtree_jax.arrays import Array
from ddtree_jax.pallas import registers as reg

LAYOUT = plgpu.Layout.WGMMA
# Of a vector with one element a column, in every thread that holds the column.
COLUMNS = LAYOUT.reduce(0)
WARPS = 4


def hidden_zero(value: Array) -> Array:
    """Returns 0 for a `value` ≥ 0, as an int32 that no compiler can foresee.

    Loops of known length are unrolled, and constants made in a loop are kept in
    registers across it. Both cost registers, and spilling is very slow here: the
    shared memory that these kernels take leaves the first-level cache too small.
    """
    return lax.shift_right_arithmetic(value, 31)


def overlap_launches(*, interpret: bool) -> None:
    """Lets this kernel start before the one before it has ended; waits for its end.

    To be called first: what comes after may read what that kernel wrote. Programmatic
    dependent launch hides part of a launch behind the end of the kernel before.
    """
    if not interpret:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def synchronise_warpgroup() -> None:
    """Waits for all threads of the warpgroup; what they wrote is visible then."""

    @reg.inline()
    def wait(_):
        mgpu.utils.warpgroup_barrier()

    wait()


def load_columns(ref: Any, *, layout: Any = COLUMNS, interpret: bool) -> Array:
    """Returns a vector of memory with one element a column of an accumulator."""
    if interpret:
        return ref[...]
    return plgpu.load(ref, layout=layout, optimized=False)


def any_above(
    x: Array, limit: float, *, layout: Any = LAYOUT, interpret: bool
) -> Array:
    """Returns whether any element of `x` is above `limit`; NaN is not."""
    if interpret:
        return jnp.any(x > limit)

    @reg.inline(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )
    def vote(_, x):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        values = reg.values(x)
        highest = _fold(values, lambda a, b: _ptx_max("max.f32", a, b))
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        found = llvm.inline_asm(
            i32,
            [highest, mgpu.utils.c(limit, f32), barrier],
            "{\n.reg .pred a, b;\nsetp.gt.f32 a, $1, $2;\n"
            "barrier.cta.red.or.pred b, $3, 128, a;\nselp.b32 $0, 1, 0, b;\n}",
            "=r,f,f,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return vote(x) > 0


def fold_rows(x: Array, operation: str, *, interpret: bool) -> Array:
    """Returns partial results [N] of each thread's two rows of `x` [64, N].

    They differ between threads, so only element-wise arithmetic may touch them
    before `reduce_folded`.

    Args:
      operation: "max", which keeps NaN, or "sum".
    """
    if interpret:
        return x.max(axis=0) if operation == "max" else x.sum(axis=0)
    columns = x.shape[1]

    @reg.inline(
        arg_types=(LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, COLUMNS),
    )
    def fold(_, x):
        pairs = x.registers.reshape(columns // 8, 2)
        return _vector([_elementwise(operation, a, b) for a, b in pairs], columns)

    return fold(x)


def reduce_folded(folded: Array, operation: str, scratch, *, interpret: bool) -> Array:
    """Returns the result over all 64 rows of what `fold_rows` gave, in all threads.

    Args:
      scratch: Shared memory, float32 [WARPS, N], for this warpgroup alone.
    """
    if interpret:
        return folded
    columns = folded.shape[0]

    @reg.inline(
        arg_types=(COLUMNS, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, COLUMNS),
    )
    def reduce(_, folded, scratch):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        pair = ir.VectorType.get((2,), ir.F32Type.get())

        def constant(n):
            return mgpu.utils.c(n, i32)

        thread = arith.remui(mgpu.utils.thread_idx(), constant(128))
        lane = arith.remui(thread, constant(32))
        warp = arith.index_cast(index, arith.divui(thread, constant(32)))
        first = arith.muli(arith.remui(lane, constant(4)), constant(2))
        places = [
            arith.index_cast(index, arith.addi(first, constant(8 * k)))
            for k in range(columns // 8)
        ]
        # Lanes 4 apart hold other rows of the same columns.
        sums = []
        for register in folded.registers.flat:
            for distance in (4, 8, 16):
                other = mgpu.utils.shfl_bfly(register, distance)
                register = _elementwise(operation, register, other)
            sums.append(register)
        mgpu.utils.warpgroup_barrier()  # scratch may still be in use
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, lane, constant(4))):
            for place, value in zip(places, sums, strict=True):
                vector.store(value, scratch, [warp, place])
        mgpu.utils.warpgroup_barrier()
        results = []
        for place in places:
            parts = [
                vector.load(pair, scratch, [mgpu.utils.c(w, index), place])
                for w in range(WARPS)
            ]
            results.append(_fold(parts, lambda a, b: _elementwise(operation, a, b)))
        return _vector(results, columns)

    return reduce(folded, scratch)


def relabel(x: Array, source, target, shape: tuple[int, ...]) -> Array:
    """Returns the float32 registers of `x` under another layout; nothing moves.

    Elements change places as a permutation does, which the reverse call undoes.
    There is no CPU form: any fixed permutation would do.
    """

    @reg.inline(
        arg_types=(source,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, target),
    )
    def change(_, x):
        layout = target.to_mgpu()
        strided = isinstance(layout, mgpu.WGStridedFragLayout)
        length = layout.vec_size if strided else layout.vector_length
        kind = ir.VectorType.get((length,), ir.F32Type.get())
        values = reg.values(x)
        registers = np.empty(len(values) // length, dtype=object)
        for i in range(len(registers)):
            part = values[i * length : (i + 1) * length]
            registers[i] = vector.from_elements(kind, part)
        return mgpu.FragmentedArray(
            _registers=registers.reshape(layout.registers_shape(shape)),
            _layout=layout,
            _is_signed=None,
        )

    return change(x)


def _vector(registers: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    layout = COLUMNS.to_mgpu()
    array = np.array(registers, dtype=object)
    return mgpu.FragmentedArray(
        _registers=array.reshape(layout.registers_shape((columns,))),
        _layout=layout,
        _is_signed=None,
    )


def _elementwise(operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    if operation == "sum":
        return arith.addf(a, b)
    values = [
        _ptx_max("max.NaN.f32", x, y)
        for x, y in zip(reg.elements(a), reg.elements(b), strict=True)
    ]
    return vector.from_elements(a.type, values)


def _fold(values: list[ir.Value], operation) -> ir.Value:
    """Combines neighbours until one is left: a tree, always of the same order."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        odd = values[-1:] if len(values) % 2 else []
        values = [operation(a, b) for a, b in pairs] + odd
    return values[0]


def _ptx_max(instruction: str, a: ir.Value, b: ir.Value) -> ir.Value:
    f32 = ir.F32Type.get()
    return llvm.inline_asm(f32, [a, b], f"{instruction} $0, $1, $2;", "=f,f,f")
