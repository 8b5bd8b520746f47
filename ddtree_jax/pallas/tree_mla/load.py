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
)
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.warpgroup import hidden_zero

# Most elements of a dimension that a copy can have.
_BOX = 256

type Pages = tuple[Array, ...]


class Loader(NamedTuple):
    """Fills the ring: chunk k of the block's work goes to slot k mod slots."""

    problem: Problem
    w: Work
    g: Inputs
    s: Buffers
    b: Barriers

    def run(self) -> None:
        """Issues all loads of the block, each as soon as there is room for it.

        One warp does, so that the others take nothing of the multiprocessor.
        """
        plgpu.warp_map(lambda warp: pl.when(warp == 0)(self._run))

    def _run(self) -> None:
        @pl.when(self.w.tiles > 0)
        def _():
            self._queries()

        def tile(i, pages):
            # Read now, so that it is there when the next tile needs it.
            following = self.pages(self.w.first + i + 1)
            if ahead := self.problem.config.tiles_ahead:
                self._prefetch(i + ahead)
            self._tile(i, pages)
            return following

        lax.fori_loop(0, self.w.tiles, tile, self.pages(self.w.first))
        self._drain()

    def pages(self, tile: Array) -> Pages:
        """Returns the page ids of a tile; of pages not in use, those of page 0.

        The latter are loaded, so that every tile has as many pieces, and masked.
        """
        pieces, size = self.problem.pieces, self.problem.page_size
        used = lax.div(self.w.context_len + (size - 1), jnp.int32(size))

        def page(piece):
            place = tile * pieces + piece
            if self._tiles_a_page > 1:
                place = lax.div(place, jnp.int32(self._tiles_a_page))
            place = jnp.where(place < used, place, 0)
            return self.g.page_table[self.w.request, place]

        return tuple(map(page, range(pieces)))

    @property
    def _tiles_a_page(self) -> int:
        return self.problem.page_size // self.problem.piece

    def _queries(self) -> None:
        rows = self.problem.config.rows
        block = pl.ds(self.w.row_block * rows, rows)
        for source, target in (
            (self.g.q_latent, self.s.q_latent),
            (self.g.q_rope, self.s.q_rope.at[0]),
        ):
            plgpu.copy_gmem_to_smem(
                source.at[self.w.request, block], target, self.b.queries
            )

    def _tile(self, i: Array, pages: Pages) -> None:
        chunks, slots = self.problem.chunks, jnp.int32(self.problem.config.slots)

        def chunk(c, _):
            k = i * chunks + c

            @pl.when(k >= slots)
            def _():
                plgpu.barrier_wait(self.b.slot_free.at[lax.rem(k, slots)])

            self._latents(k, pages)

        lax.fori_loop(0, chunks + hidden_zero(self.w.context_len + i), chunk, None)

        @pl.when(i > 0)
        def _():
            plgpu.barrier_wait(self.b.rope_free)

        self._rope(i, pages)

    def _drain(self) -> None:
        """Waits until all that was loaded has been read."""
        slots, last = (
            jnp.int32(self.problem.config.slots),
            self.w.tiles * self.problem.chunks,
        )

        def chunk(k, _):
            plgpu.barrier_wait(self.b.slot_free.at[lax.rem(k, slots)])

        lax.fori_loop(jnp.maximum(last - slots, 0), last, chunk, None)

        @pl.when(self.w.tiles > 0)
        def _():
            plgpu.barrier_wait(self.b.rope_free)

    def _latents(self, k: Array, pages: Pages) -> None:
        tile, chunk = (f(k, jnp.int32(self.problem.chunks)) for f in (lax.div, lax.rem))
        columns = pl.ds(chunk * SLOT_COLUMNS, SLOT_COLUMNS)
        slot = lax.rem(k, jnp.int32(self.problem.config.slots))
        sources = self.g.latent_pages, self.g.tail_latent
        target, barrier = self.s.ring.at[slot], self.b.slot_full.at[slot]
        self._copy(tile, pages, sources, columns, target, barrier)

    def _prefetch(self, i: Array) -> None:
        """Asks the second-level cache for a tile of the context.

        One row block does for all, which read the same tiles at about the same time.
        """
        tile = self.w.first + i
        in_context = (i < self.w.tiles) & (tile < self.w.context_tiles)

        @pl.when(in_context & (self.w.row_block == 0))
        def _():
            rows, latent = self._rows(tile), self.problem.latent
            for page in self.pages(tile):
                for begin in range(0, latent, _BOX):
                    columns = pl.ds(begin, min(_BOX, latent - begin))
                    plgpu.async_prefetch(self.g.latent_pages.at[page, rows, columns])
                plgpu.async_prefetch(self.g.rope_pages.at[page, rows])

    def _rows(self, tile: Array) -> Any:
        """Returns those of its pages that a tile of the context has, as an index."""
        if self._tiles_a_page == 1:
            return slice(None)
        size = self.problem.piece
        return pl.ds(lax.rem(tile, jnp.int32(self._tiles_a_page)) * size, size)

    def _rope(self, tile: Array, pages: Pages) -> None:
        columns = pl.ds(0, self.problem.rope)
        sources = self.g.rope_pages, self.g.tail_rope
        barrier = self.b.rope_full.at[lax.rem(tile, 2)]
        self._copy(tile, pages, sources, columns, self.s.rope.at[0], barrier)

    def _copy(self, tile, pages: Pages, sources, columns, target, barrier) -> None:
        """Copies some columns of a tile, which is in the pages or in the tail."""
        paged, tail = sources
        tile = self.w.first + tile
        size = self.problem.piece
        in_context = tile < self.w.context_tiles

        def part(piece):
            return target.at[pl.ds(piece * size, size)]

        @pl.when(in_context)
        def _():
            rows = self._rows(tile)
            for piece, page in enumerate(pages):
                source = paged.at[page, rows, columns]
                plgpu.copy_gmem_to_smem(source, part(piece), barrier)

        @pl.when(jnp.logical_not(in_context))
        def _():
            begin = (tile - self.w.context_tiles) * self.problem.tile
            for piece in range(self.problem.pieces):
                rows = pl.ds(begin + piece * size, size)
                source = tail.at[self.w.request, rows, columns]
                plgpu.copy_gmem_to_smem(source, part(piece), barrier)
