"""Owns the turns that the wide kernel's two warpgroups take at a block's tiles.

Warpgroup 0 scores the tiles of even number, warpgroup 1 the odd ones, and each sums
every other chunk of the latent columns of all tiles. In its turn at tile i one does

    S = Q Kᵀ of tile i        starts
    O += P V of tile i - 1    as soon as the other one has made that P
    P = 2^(S - m) of tile i   while the tensor cores work for the other one
    O += P V of tile i

A P is read by both, and tile i + 2 is scored when tile i + 1 was, which comes after
the other's products with tile i. So P, growth and flag of a warpgroup are free when
its next turn needs them, and only one warpgroup at a time looks at the references.
The ring has two tiles, so each warpgroup scores from slots of its own.

How soon a slot is free counts most. So products are waited for before P is made: to
make it beside them was slower.

Source: the schedule is FlashMLA's for Hopper ("seesaw"), with lazy references.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import (
    Buffers,
    Inputs,
    Outputs,
    Problem,
    Work,
    slot_of,
)
from ddtree_jax.pallas.tree_mla.config import GROWTH, SLOT_COLUMNS, TILE
from ddtree_jax.pallas.tree_mla.mask import (
    LOWEST,
    mask_context,
    mask_tail,
    stage_words,
)
from ddtree_jax.pallas.tree_mla.score import start_logits
from ddtree_jax.pallas.tree_mla.weigh import HALF, Sums, scaled, store_sums
from ddtree_jax.pallas.warpgroup import LAYOUT, any_above, hidden_zero, load_columns


class TurnBarriers(NamedTuple):
    """As `Barriers`; P of even and of odd tiles, and at last one half of the totals."""

    queries: Any
    slot_full: Any
    slot_free: Any
    rope_full: Any
    rope_free: Any
    probabilities_full: Any
    totals_full: Any


class Carry(NamedTuple):
    """Sums over tiles: of values, and of this warpgroup's probabilities."""

    sums: Sums
    total: Array


def take_turns(
    number: int,
    problem: Problem,
    w: Work,
    g: Inputs,
    s: Buffers,
    b: TurnBarriers,
    out: Outputs,
) -> None:
    """Does a warpgroup's part of a block's work.

    Args:
      number: Of the warpgroup, 0 or 1.
    """
    turns = _Turns(number, problem, w, g, s, b)

    def filled(value):
        vector = jnp.full((problem.config.rows,), value, jnp.float32)
        return plgpu.layout_cast(vector, problem.by_row)

    @pl.when(w.tiles > 0)
    def _():
        if number == 0:
            s.peaks[0, :] = filled(LOWEST)
        plgpu.barrier_wait(b.queries)
        zeros = jnp.zeros((problem.config.rows, SLOT_COLUMNS), jnp.float32)
        sums = (plgpu.layout_cast(zeros, LAYOUT),) * len(turns.chunks)
        carry = Carry(sums, filled(0.0))
        if number == 0:
            carry = turns.turn(hidden_zero(w.tiles), carry, follows=False)
        begin = 2 - number
        more = lax.div(jnp.maximum(w.tiles - begin + 1, 0), jnp.int32(2))
        carry = lax.fori_loop(0, more, lambda k, c: turns.turn(begin + 2 * k, c), carry)
        last = w.tiles - 1
        follow = functools.partial(turns.follow, last)
        carry = lax.cond(lax.rem(last, 2) != number, follow, _same, carry)
        turns.store(carry, out)

    if number == 0:

        @pl.when(w.tiles == 0)
        def _():
            place = w.request, w.row_block, w.split, slice(None)
            out.peaks[place], out.totals[place] = filled(LOWEST), filled(0.0)


class _Turns(NamedTuple):
    """What one warpgroup does with tiles."""

    number: int
    problem: Problem
    w: Work
    g: Inputs
    s: Buffers
    b: TurnBarriers

    @property
    def chunks(self) -> range:
        """Those of the latent columns that it sums.

        So the first slots of a tile are free soonest. An odd number of chunks leaves
        one more to the first warpgroup.
        """
        return range(self.number, self.problem.chunks, 2)

    def turn(self, i: Array, carry: Carry, *, follows: bool = True) -> Carry:
        """Returns the sums with tile `i` added, and the one before if it follows."""
        problem, w, s, b = self.problem, self.w, self.s, self.b

        def beside(accs, carry):
            start_logits(problem, w, s, b, i, accs[0])
            return self.follow(i - 1, carry) if follows else carry

        zero = hidden_zero(w.context_len + i).astype(jnp.float32)
        start = lax.broadcast_in_dim(zero, (problem.config.rows, TILE), [])
        [x], carry = _multiply(problem, (start,), carry, beside)
        plgpu.barrier_arrive(b.rope_free)

        def tail(x):
            stage_words(problem, w, self.g, s, i)
            return mask_tail(problem, w, s, i, x)

        context = functools.partial(mask_context, problem, w, s, i)
        in_context = w.first + i < w.context_tiles
        x = lax.cond(in_context, context, tail, x * problem.log2_scale)
        grew, total = self._probabilities(x, carry.total)
        sums = lax.cond(grew, self._grown(self.number), _same, carry.sums)
        return Carry(self._add(i, self.number, sums), total)

    def follow(self, i: Array, carry: Carry) -> Carry:
        """Returns the sums with tile `i` added, which the other one scores."""
        other = 1 - self.number
        plgpu.barrier_wait(self.b.probabilities_full.at[other])

        def grown(carry):
            total = carry.total * self._vector(self.s.growth.at[other])
            return Carry(self._grown(other)(carry.sums), total)

        carry = lax.cond(self.s.grew[other] > 0, grown, _same, carry)
        return carry._replace(sums=self._add(i, other, carry.sums))

    def store(self, carry: Carry, out: Outputs) -> None:
        """Stores the sums, and how to combine them with those of other splits."""
        w, s = self.w, self.s
        place = w.request, w.row_block, w.split, slice(None)
        if self.number == 0:
            plgpu.barrier_wait(self.b.totals_full)
            out.peaks[place] = self._vector(s.peaks.at[0])
            out.totals[place] = carry.total + self._vector(s.scratch)
        else:
            s.scratch[:] = carry.total
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.b.totals_full)
        parts = SLOT_COLUMNS // HALF
        numbered = [
            (chunk * parts + part, x[:, part * HALF : (part + 1) * HALF])
            for chunk, x in zip(self.chunks, carry.sums, strict=True)
            for part in range(parts)
        ]
        store_sums(self.problem, w, LAYOUT, numbered, out.partial)

    def _vector(self, ref: Any) -> Array:
        layout, interpret = self.problem.by_row, self.problem.interpret
        return load_columns(ref, layout=layout, interpret=interpret)

    def _grown(self, turn: int) -> Callable[[Sums], Sums]:
        return functools.partial(scaled, self.problem, self.s, turn, LAYOUT)

    def _add(self, i: Array, turn: int, sums: Sums) -> Sums:
        """Returns the sums with tile `i` added; frees its slots.

        Args:
          turn: The warpgroup that has made its P.
        """
        problem, s, b = self.problem, self.s, self.b
        slots = [slot_of(problem, i, chunk) for chunk in self.chunks]

        def beside(accs, _):
            # At a place that is not known before: else its address is kept.
            p = s.probabilities.at[turn + hidden_zero(i)]
            for acc, slot in zip(accs, slots, strict=True):
                plgpu.wgmma(acc, p, s.ring.at[slot])
            for pending, slot in zip(reversed(range(len(slots))), slots, strict=True):
                plgpu.wgmma_wait(pending)
                plgpu.barrier_arrive(b.slot_free.at[slot])

        sums, _ = _multiply(problem, sums, None, beside)
        return sums

    def _probabilities(self, x: Array, total: Array) -> tuple[Array, Array]:
        """Hands over P of logits; returns whether references grew, and the total.

        A reference is raised only for the rows that need it, so what a row gets does
        not depend on the other rows of its block.
        """
        problem, s, number = self.problem, self.s, self.number
        peak = self._vector(s.peaks.at[0])
        highest = x.max(axis=1)
        above = highest - peak
        layout, interpret = problem.by_row, problem.interpret
        grew = any_above(above, GROWTH, layout=layout, interpret=interpret)

        def raised():
            new = jnp.where(above > GROWTH, highest, peak)
            growth = jnp.exp2(peak - new)
            s.peaks[0, :] = new
            s.growth[number, :] = growth
            return new, total * growth

        peak, total = lax.cond(grew, raised, lambda: (peak, total))
        p = jnp.exp2(x - problem.spread(peak, x.shape))
        s.probabilities[number] = p.astype(jnp.bfloat16)
        s.grew[number] = grew.astype(jnp.int32)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.b.probabilities_full.at[number])
        return grew, total + p.sum(axis=1)


def _multiply[Values](
    problem: Problem,
    sums: Sums,
    values: Values,
    body: Callable[[Sequence[Any], Values], Values],
) -> tuple[Sums, Values]:
    """Returns sums and values after a body that starts products into the sums.

    Args:
      body: Gets accumulators and values, and returns values.
    """
    result: Any
    count = len(sums)
    if not sums:
        return sums, body((), values)
    if problem.interpret:

        def scoped(*accs):
            after = body(accs, values)
            return [acc[...] for acc in accs], after

        shapes = [(x.shape[0], x.shape[1]) for x in sums]
        kinds = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes]
        products, result = pl.run_scoped(scoped, *kinds)
        return tuple(map(operator.add, sums, products)), result

    flat, tree = jax.tree.flatten(values)

    def state(refs):
        accs, kept = refs[:count], refs[count:]
        after = body(accs, jax.tree.unflatten(tree, [ref[...] for ref in kept]))
        for ref, value in zip(kept, jax.tree.leaves(after), strict=True):
            ref[...] = value

    starts = [
        plgpu.WGMMAAccumulatorRef.init(plgpu.layout_cast(x, LAYOUT)) for x in sums
    ]
    result = pl.run_state(state)((*starts, *flat))
    return tuple(result[:count]), jax.tree.unflatten(tree, result[count:])


def _same[Kept](kept: Kept) -> Kept:
    return kept
