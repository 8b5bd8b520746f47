"""Owns when tiles are loaded, and from where."""

from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import (
    Barriers,
    Buffers,
    Inputs,
    Problem,
    Work,
    slot_columns,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import TILE
from ddtree_jax.pallas.warpgroup import hidden_zero

type Pages = tuple[Array, ...]


class Loader(NamedTuple):
    """Fills the ring: chunk k of the block's work goes to slot k mod slots.

    At the start all slots are filled. From then on tile i - 1, once weighed, makes
    room for as many chunks, of tiles i and i + 1.
    """

    problem: Problem
    w: Work
    g: Inputs
    s: Buffers
    b: Barriers

    def pages(self, tile: Array) -> Pages:
        """Returns the page ids of a tile; of pages not in use, those of page 0.

        The latter are loaded, so that every tile has as many pieces, and masked.
        """
        pieces, size = self.problem.pieces, self.problem.page_size
        used = lax.div(self.w.context_len + (size - 1), jnp.int32(size))

        def page(piece):
            place = tile * pieces + piece
            place = jnp.where(place < used, place, 0)
            return self.g.page_table[self.w.request, place]

        return tuple(map(page, range(pieces)))

    def start(self, here: Pages, following: Pages) -> None:
        """Issues the loads of the queries and of all slots."""
        rows, chunks = self.problem.config.rows, self.problem.chunks
        block = pl.ds(pl.multiple_of(self.w.row_block * rows, 8), rows)
        for source, target in (
            (self.g.q_latent, self.s.q_latent),
            (self.g.q_rope, self.s.q_rope),
        ):
            plgpu.copy_gmem_to_smem(
                source.at[self.w.request, block], target, self.b.queries
            )
        self._run(0, chunks, here)
        self._rope(jnp.int32(0), here)
        ahead = jnp.minimum(self.problem.config.slots, self.w.tiles * chunks)
        self._run(chunks, ahead, following)

    def refill(self, i: Array, here: Pages, following: Pages) -> None:
        """Issues the loads that take the place of tile i - 1, as it is weighed."""
        chunks, slots = self.problem.chunks, self.problem.config.slots
        last = self.w.tiles * chunks

        def chunk(c, _):
            k = (i - 1) * chunks + slots + c
            plgpu.barrier_wait(self.b.slot_free.at[lax.rem(k, jnp.int32(slots))])
            ours = k < (i + 1) * chunks
            pages = tuple(
                jnp.where(ours, a, b) for a, b in zip(here, following, strict=True)
            )

            @pl.when(k < last)
            def _():
                self._latents(k, pages)

        lax.fori_loop(0, chunks + hidden_zero(self.w.context_len + i), chunk, None)

    def next_rope(self, i: Array, following: Pages) -> None:
        """Issues the load of the next tile's rotary keys; those of tile i are read."""

        @pl.when(i + 1 < self.w.tiles)
        def _():
            self._rope(i + 1, following)

    def finish(self) -> None:
        """Waits until the last tile is weighed."""
        for chunk in range(self.problem.chunks):
            slot = slot_of(self.problem, self.w.tiles - 1, chunk)
            plgpu.barrier_wait(self.b.slot_free.at[slot])

    def _run(self, begin: int, end: Any, pages: Pages) -> None:
        """Issues the loads of chunks `begin` … `end` - 1, all of one tile."""

        def chunk(k, _):
            self._latents(k, pages)

        lax.fori_loop(begin, end, chunk, None)

    def _latents(self, k: Array, pages: Pages) -> None:
        tile, chunk = (f(k, jnp.int32(self.problem.chunks)) for f in (lax.div, lax.rem))
        columns = slot_columns(chunk)
        slot = lax.rem(k, jnp.int32(self.problem.config.slots))
        sources = self.g.latent_pages, self.g.tail_latent
        target, barrier = self.s.ring.at[slot], self.b.slot_full.at[slot]
        self._copy(tile, pages, sources, columns, target, barrier)

    def _rope(self, tile: Array, pages: Pages) -> None:
        columns = pl.ds(0, self.problem.rope)
        sources = self.g.rope_pages, self.g.tail_rope
        self._copy(tile, pages, sources, columns, self.s.rope, self.b.rope_full)

    def _copy(self, tile, pages: Pages, sources, columns, target, barrier) -> None:
        """Copies some columns of a tile, which is in the pages or in the tail."""
        paged, tail = sources
        tile = self.w.first + tile
        size = self.problem.page_size
        in_context = tile < self.w.context_tiles

        def part(piece):
            return target.at[pl.ds(piece * size, size)]

        @pl.when(in_context)
        def _():
            for piece, page in enumerate(pages):
                source = paged.at[page, :, columns]
                plgpu.copy_gmem_to_smem(source, part(piece), barrier)

        @pl.when(jnp.logical_not(in_context))
        def _():
            begin = (tile - self.w.context_tiles) * TILE
            for piece in range(self.problem.pieces):
                rows = pl.ds(pl.multiple_of(begin + piece * size, 8), size)
                source = tail.at[self.w.request, rows, columns]
                plgpu.copy_gmem_to_smem(source, part(piece), barrier)
