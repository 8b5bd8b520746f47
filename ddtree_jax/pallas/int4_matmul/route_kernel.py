"""Owns the kernel that makes `route`'s lists: one block, one launch.

Which tokens picked an expert is a set of bits in shared memory, so neither the order
in which threads come nor any sort takes part.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf

from ddtree_jax.arrays import F32, I32, Array
from ddtree_jax.pallas import registers as reg
from ddtree_jax.pallas.int4_matmul.route import Routing, max_tiles
from ddtree_jax.pallas.warpgroup import overlap_launches

_BITS = 32
# A thread for each expert.
MAX_EXPERTS = 1024


def route_on_device(
    expert_ids: I32[Array, "T k"],
    expert_weights: F32[Array, "T k"],
    *,
    experts: int,
    columns: int,
) -> Routing:
    """Returns what `route` does; weights of unused slots are arbitrary."""
    tokens, choices = expert_ids.shape
    tiles = max_tiles(tokens, choices, experts, columns)
    warpgroups = -(-experts // reg.THREADS)

    def body(ids, weights, *refs):
        overlap_launches(interpret=False)
        places, (masks, starts, sums) = Routing(*refs[:5]), refs[5:]
        _route(ids, weights, places, masks, starts, sums)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((1,), jnp.int32),
                ((tiles,), jnp.int32),
                ((tiles, columns), jnp.int32),
                ((tiles, columns), jnp.float32),
                ((2,), jnp.int32),
            )
        ),
        scratch_types=[
            plgpu.SMEM((experts, -(-tokens // _BITS)), jnp.int32),
            plgpu.SMEM((experts,), jnp.int32),
            plgpu.SMEM((warpgroups * reg.THREADS // 32,), jnp.int32),
        ],
        grid=(1,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="int4_route",
    )
    return Routing(*kernel(expert_ids, expert_weights))


def _route(ids, weights, places: Routing, masks, starts, sums) -> None:
    @reg.inline(arg_types=(reg.REF,) * 10)
    def run(_, ids, weights, count, experts, slots, out, arrived, *shared):
        masks, starts, sums = shared
        columns = ir.MemRefType(slots.type).shape[1]
        _clear(masks)
        gpu.barrier()
        for _, expert, token in _pairs(ids, masks):
            word, bit = _place(token)
            mask = arith.shli(reg.i32(1), bit)
            where = [reg.at(expert), reg.at(word)]
            memref.atomic_rmw(arith.AtomicRMWKind.ori, mask, masks, where)
        gpu.barrier()
        mine, first = _count_and_first(masks)
        tiles = arith.divui(reg.plus(mine, columns - 1), reg.i32(columns))
        start, total = _exclusive_sum(tiles, sums)
        _list_tiles(mine, tiles, start, first, experts, slots, starts)
        with mgpu.utils.when(_is_zero(_thread())):
            memref.store(total, count, [reg.at(0)])
            for i in range(ir.MemRefType(arrived.type).shape[0]):
                memref.store(reg.i32(0), arrived, [reg.at(i)])
        gpu.barrier()
        for pair, expert, token in _pairs(ids, masks):
            begin = memref.load(starts, [reg.at(expert)])
            place = arith.addi(reg.times(begin, columns), _rank(masks, expert, token))
            where = [reg.at(x) for x in _divided(place, columns)]
            memref.store(token, slots, where)
            memref.store(memref.load(weights, pair), out, where)

    run(ids, weights, *places, masks, starts, sums)


def _clear(masks) -> None:
    experts, words = ir.MemRefType(masks.type).shape
    with _loop(_thread(), reg.i32(experts * words), _threads()) as i:
        where = [reg.at(x) for x in _divided(i, words)]
        memref.store(reg.i32(0), masks, where)


def _pairs(ids, masks) -> Iterator[tuple[list, ir.Value, ir.Value]]:
    """Yields, once, this thread's pairs: index, expert and token; others are left out.

    The code after a `yield` is traced once, inside a loop.
    """
    tokens, choices = ir.MemRefType(ids.type).shape
    experts = ir.MemRefType(masks.type).shape[0]
    with _loop(_thread(), reg.i32(tokens * choices), _threads()) as i:
        token, choice = _divided(i, choices)
        pair = [reg.at(token), reg.at(choice)]
        expert = memref.load(ids, pair)
        exists = arith.cmpi(arith.CmpIPredicate.ult, expert, reg.i32(experts))
        with mgpu.utils.when(exists):
            yield pair, expert, token


def _count_and_first(masks) -> tuple[ir.Value, ir.Value]:
    """Returns how many tokens this thread's expert has, and its first."""
    experts, words = ir.MemRefType(masks.type).shape
    expert = reg.at(arith.minsi(_thread(), reg.i32(experts - 1)))

    def add(i, count, first):
        # From the last word to the first, so that the first token stays.
        word = arith.subi(reg.i32(words - 1), i)
        mask = memref.load(masks, [expert, reg.at(word)])
        lowest = arith.addi(reg.times(word, _BITS), _lowest(mask))
        first = arith.select(_is_zero(mask), first, lowest)
        return arith.addi(count, _ones(mask)), first

    count, first = _fold(reg.i32(words), [reg.i32(0), reg.i32(0)], add)
    exists = arith.cmpi(arith.CmpIPredicate.ult, _thread(), reg.i32(experts))
    return arith.select(exists, count, reg.i32(0)), first


def _exclusive_sum(value: ir.Value, sums) -> tuple[ir.Value, ir.Value]:
    """Returns the sum over the threads before this one, and over all."""
    inclusive = value
    for distance in (1, 2, 4, 8, 16):
        inclusive = _asm_with_others(
            "{\n.reg .pred p;\n.reg .b32 t;\n"
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;\n"
            "@!p mov.b32 t, 0;\nadd.s32 $0, $1, t;\n}",
            inclusive,
        )
    warp, lane = _divided(_thread(), 32)
    last = arith.cmpi(arith.CmpIPredicate.eq, lane, reg.i32(31))
    with mgpu.utils.when(last):
        memref.store(inclusive, sums, [reg.at(warp)])
    gpu.barrier()
    before, total = reg.i32(0), reg.i32(0)
    for other in range(ir.MemRefType(sums.type).shape[0]):
        part = memref.load(sums, [reg.at(other)])
        earlier = arith.cmpi(arith.CmpIPredicate.ult, reg.i32(other), warp)
        before = arith.addi(before, arith.select(earlier, part, reg.i32(0)))
        total = arith.addi(total, part)
    return arith.addi(before, arith.subi(inclusive, value)), total


def _list_tiles(mine, tiles, start, first, experts, slots, starts) -> None:
    """Writes what this thread knows of its expert's tiles."""
    columns = ir.MemRefType(slots.type).shape[1]
    end = arith.addi(start, tiles)
    exists = arith.cmpi(arith.CmpIPredicate.ugt, tiles, reg.i32(0))
    with mgpu.utils.when(exists):
        memref.store(start, starts, [reg.at(_thread())])
    with _loop(start, end, reg.i32(1)) as tile:
        memref.store(_thread(), experts, [reg.at(tile)])
    used = arith.addi(reg.times(start, columns), mine)
    unused = arith.xori(first, reg.i32(-1))
    with _loop(used, reg.times(end, columns), reg.i32(1)) as place:
        where = [reg.at(x) for x in _divided(place, columns)]
        memref.store(unused, slots, where)


def _rank(masks, expert: ir.Value, token: ir.Value) -> ir.Value:
    """Returns how many tokens before this one the expert has."""
    word, bit = _place(token)

    def mask(i):
        return memref.load(masks, [reg.at(expert), reg.at(i)])

    def add(i, count):
        return (arith.addi(count, _ones(mask(i))),)

    [earlier] = _fold(word, [reg.i32(0)], add)
    below = arith.subi(arith.shli(reg.i32(1), bit), reg.i32(1))
    return arith.addi(earlier, _ones(arith.andi(mask(word), below)))


def _fold(count: ir.Value, start: reg.Values, step: Callable) -> reg.Values:
    """Returns what `step(i, *values)` makes of the start, for i = 0 .. count - 1."""
    loop = scf.ForOp(reg.i32(0), count, reg.i32(1), start)
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(list(step(loop.induction_variable, *loop.inner_iter_args)))
    return list(loop.results)


@contextlib.contextmanager
def _loop(start: ir.Value, stop: ir.Value, step: ir.Value) -> Iterator[ir.Value]:
    loop = scf.ForOp(start, stop, step, [])
    with ir.InsertionPoint(loop.body):
        yield loop.induction_variable
        scf.YieldOp([])


def _thread() -> ir.Value:
    return mgpu.utils.thread_idx()


def _threads() -> ir.Value:
    return arith.index_cast(
        ir.IntegerType.get_signless(32), gpu.block_dim(gpu.Dimension.x)
    )


def _divided(value: ir.Value, by: int) -> tuple[ir.Value, ir.Value]:
    return arith.divui(value, reg.i32(by)), arith.remui(value, reg.i32(by))


def _place(token: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns the word and the bit of a token."""
    return _divided(token, _BITS)


def _is_zero(value: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, value, reg.i32(0))


def _ones(mask: ir.Value) -> ir.Value:
    return reg.asm("popc.b32 $0, $1;", mask)


def _lowest(mask: ir.Value) -> ir.Value:
    """Returns the number of the lowest bit that is set."""
    return reg.asm("{\n.reg .b32 a;\nbrev.b32 a, $1;\nclz.b32 $0, a;\n}", mask)


def _asm_with_others(code: str, value: ir.Value) -> ir.Value:
    """Returns what PTX makes of the values of a whole warp."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32), [value], code, "=r,r", has_side_effects=True
    )
