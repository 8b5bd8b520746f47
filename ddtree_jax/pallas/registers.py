"""Owns short names for what MLIR makes long: values of one thread, and fragments.

A fragment is an array spread over the registers of a warpgroup's 128 threads. All
functions here run while a kernel is traced, inside what `inline` decorates.
"""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

type Values = list[ir.Value]

# Its annotations lack the context that it hands to the decorated function.
inline: Any = plgpu.inline_mgpu
REF = plgpu.RefType()
SPLAT = plgpu.Layout.WG_SPLAT(())
THREADS = 128


def per_thread(count: int, vec_size: int = 1) -> Any:
    """Returns the layout of `count` values of each thread, in no order that matters."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=vec_size)


def per_thread_type(count: int, dtype: Any, vec_size: int = 1) -> Any:
    """Returns the type of an array in that layout."""
    return plgpu.ShapeDtypeStruct(
        (THREADS * count,), dtype, per_thread(count, vec_size)
    )


def fragment(
    registers: Values,
    layout: Any,
    shape: tuple[int, ...],
    *,
    signed: bool | None = None,
) -> mgpu.FragmentedArray:
    """Returns the fragment that consists of these registers of each thread.

    Args:
      registers: Vectors, or scalars where a register holds one value.
      signed: Of integers only.
    """
    kind = layout.to_mgpu()
    if not isinstance(registers[0].type, ir.VectorType):
        registers = [vector_of([value]) for value in registers]
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object).reshape(
            kind.registers_shape(shape)
        ),
        _layout=kind,
        _is_signed=signed,
    )


def values(array: mgpu.FragmentedArray) -> Values:
    """Returns this thread's elements of a fragment, register by register."""
    return [value for register in array.registers.flat for value in elements(register)]


def elements(register: ir.Value) -> Values:
    """Returns the elements of a vector."""
    return [
        vector.extract(
            register,
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([i]),
        )
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def vector_of(items: Values) -> ir.Value:
    """Returns a vector of scalars."""
    return vector.from_elements(ir.VectorType.get((len(items),), items[0].type), items)


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """Returns the value of a fragment that is one for all threads."""
    [value] = array.registers.flat
    return value


def i32(value: int) -> ir.Value:
    """Returns a constant."""
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def at(value: ir.Value | int) -> ir.Value:
    """Returns an index."""
    if isinstance(value, int):
        return mgpu.utils.c(value, ir.IndexType.get())
    return arith.index_cast(ir.IndexType.get(), value)


def thread() -> ir.Value:
    """Returns the number of this thread in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), i32(THREADS))


def lane() -> ir.Value:
    """Returns the number of this thread in its warp."""
    return arith.remui(thread(), i32(32))


def warp() -> ir.Value:
    """Returns the number of this thread's warp in its warpgroup."""
    return arith.divui(thread(), i32(32))


def plus(a: ir.Value, b: ir.Value | int) -> ir.Value:
    """Returns a sum of integers."""
    return arith.addi(a, i32(b) if isinstance(b, int) else b)


def times(a: ir.Value, b: int) -> ir.Value:
    """Returns a product of integers."""
    return arith.muli(a, i32(b))


def asm(code: str, *operands: ir.Value) -> ir.Value:
    """Returns the 32 bits that PTX code, without side effects, makes of others."""
    constraints = ",".join(["=r", *["r"] * len(operands)])
    kind = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        kind, list(operands), code, constraints, has_side_effects=False
    )
