"""Owns what the warpgroups of a block share: its work, its buffers, its barriers."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import I32, Array
from ddtree_jax.pallas.tree_mla.config import (
    SLOT_COLUMNS,
    TILE,
    TreeMlaConfig,
    tiles_per_split,
)
from ddtree_jax.pallas.warpgroup import LAYOUT, WARPS

_transforms: Any = plgpu  # whose annotations make two of its classes abstract


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is known when a call is compiled.

    Attributes:
      log2_scale: Turns a product into the exponent of 2.
      interpret: Whether the kernel runs in the interpreter, on a CPU.
    """

    nodes: int
    heads: int
    latent: int
    rope: int
    page_size: int
    tail_tiles: int
    log2_scale: float
    config: TreeMlaConfig
    interpret: bool

    @property
    def chunks(self) -> int:
        """Slots of a tile."""
        return self.latent // SLOT_COLUMNS

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        return self.config.tile

    @property
    def piece(self) -> int:
        """Keys that are copied at once: a page, or the part of it in a tile."""
        return min(self.page_size, self.tile)

    @property
    def pieces(self) -> int:
        """Copies that fill a slot."""
        return self.tile // self.piece

    @property
    def layout(self) -> Any:
        """How a warpgroup holds logits, and keys × any columns."""
        warps = self.tile // 16
        if warps == WARPS:
            return LAYOUT
        return plgpu.Layout.MMA_ACC(jnp.float32, m_warps=warps)

    @property
    def by_row(self) -> Any:
        """How a warpgroup holds an array of one element a row."""
        return self.layout.reduce(1 - self.config.rows_axis)

    def spread(self, vector: Array, shape: tuple[int, ...]) -> Array:
        """Returns an array of one element a row in the shape of logits or sums."""
        return lax.broadcast_in_dim(vector, shape, [self.config.rows_axis])


class Work(NamedTuple):
    """What one block does: `tiles` tiles from `first` on; context comes first.

    Attributes:
      context_tiles: Of the request; the tiles from here on are its tail.
    """

    request: Array
    row_block: Array
    split: Array
    context_len: Array
    context_tiles: Array
    first: Array
    tiles: Array


class Inputs(NamedTuple):
    """Arrays in global memory, as `attend` takes them."""

    q_latent: Any
    q_rope: Any
    latent_pages: Any
    rope_pages: Any
    page_table: Any
    context_len: Any
    tail_latent: Any
    tail_rope: Any
    bits: Any


class Outputs(NamedTuple):
    """Arrays in global memory, as `attend` returns them."""

    partial: Any
    peaks: Any
    totals: Any


class Buffers(NamedTuple):
    """Arrays in shared memory.

    Attributes:
      ring: Latents of the tiles in work, in slots.
      q_rope, rope: With a first dimension of 1.
      probabilities: P of one tile, rows × keys.
      peaks: Reference logit of each row, as exponents of 2, where registers are short.
      growth: By what `weigh` scales its sums, for the tiles of even and odd number.
      grew: Whether it has to.
      words: Ancestor bits of the rows, for both halves of a tail tile.
      scratch: For sums that cross warps, or warpgroups.
    """

    q_latent: Any
    q_rope: Any
    ring: Any
    rope: Any
    probabilities: Any
    peaks: Any
    growth: Any
    grew: Any
    words: Any
    scratch: Any


class Barriers(NamedTuple):
    """`full`: there to be read. `free`: no longer read.

    Those of slots are one a slot; rotary keys have one for the tiles of even number
    and one for the odd ones. A warpgroup that waits for a barrier observes each of its
    completions.
    """

    queries: Any
    slot_full: Any
    slot_free: Any
    rope_full: Any
    rope_free: Any
    probabilities_full: Any
    probabilities_free: Any


def swizzled(*shape: int) -> Any:
    """Returns shared memory in bfloat16, for a scratch or a part of it.

    TMA writes it and tensor cores read it without bank conflicts.
    """
    columns = min(shape[-1], 64)
    transforms = (
        _transforms.TilingTransform((8, columns)),
        _transforms.SwizzleTransform(2 * columns),
    )
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def buffers(problem: Problem) -> Buffers:
    """Returns the shared memory of a block on Hopper."""
    rows, slots = problem.config.rows, problem.config.slots
    return Buffers(
        q_latent=swizzled(rows, problem.latent),
        q_rope=swizzled(1, rows, problem.rope),
        ring=swizzled(slots, TILE, SLOT_COLUMNS),
        rope=swizzled(1, TILE, problem.rope),
        probabilities=swizzled(rows, TILE),
        peaks=plgpu.SMEM((1, rows), jnp.float32),
        growth=plgpu.SMEM((2, rows), jnp.float32),
        grew=plgpu.SMEM((2,), jnp.int32),
        words=plgpu.SMEM((2, rows), jnp.int32),
        scratch=plgpu.SMEM((WARPS, rows), jnp.float32),
    )


def barriers(problem: Problem, *, slot_readers: int = 2) -> Barriers:
    """Returns the barriers of a block.

    Args:
      slot_readers: Warpgroups that sum what is in one slot.
    """
    slots, pieces = problem.config.slots, problem.pieces
    return Barriers(
        queries=plgpu.Barrier(num_arrivals=2),
        slot_full=plgpu.Barrier(num_arrivals=pieces, num_barriers=slots),
        slot_free=plgpu.Barrier(num_arrivals=slot_readers, num_barriers=slots),
        rope_full=plgpu.Barrier(num_arrivals=pieces, num_barriers=2),
        rope_free=plgpu.Barrier(),
        probabilities_full=plgpu.Barrier(),
        probabilities_free=plgpu.Barrier(num_arrivals=2),
    )


def work(problem: Problem, context_len: Any) -> Work:
    """Returns what this block does, from the real length of its request."""
    request, row_block, split = (
        lax.axis_index(name) for name in ("request", "row_block", "split")
    )
    length = context_len[request]
    tile = problem.tile
    context_tiles = lax.div(length + (tile - 1), jnp.int32(tile))
    total = context_tiles + problem.tail_tiles
    share = tiles_per_split(total, problem.config.splits)
    first = split * share
    tiles = jnp.clip(total - first, 0, share)
    return Work(request, row_block, split, length, context_tiles, first, tiles)


def slot_of(problem: Problem, tile: I32[jax.Array, ""], chunk) -> Array:
    """Returns the slot of a chunk of a tile, counted within this block's work."""
    return lax.rem(tile * problem.chunks + chunk, jnp.int32(problem.config.slots))


def slot_columns(chunk: Array) -> Any:
    """Returns the latent columns of a chunk, as an index."""
    return pl.ds(pl.multiple_of(chunk * SLOT_COLUMNS, SLOT_COLUMNS), SLOT_COLUMNS)
