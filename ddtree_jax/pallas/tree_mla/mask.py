"""Owns which keys a row sees, and that unseen values cannot spoil a sum.

An unseen key has probability 0, but 0 · NaN is NaN, so the latents of keys that
nobody may see are zeroed in shared memory before they are summed.
"""

from collections.abc import Callable

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import Buffers, Inputs, Problem, Work, slot_of
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.reference import WORD_BITS
from ddtree_jax.pallas.warpgroup import (
    hidden_zero,
    load_columns,
    synchronise_warpgroup,
)

# Stands for minus infinity: differences of two of them are 0 and not NaN.
LOWEST = -1e30
# Of a slot that are in registers at once.
_COLUMNS = 64


def mask_context(problem: Problem, w: Work, s: Buffers, i: Array, x: Array) -> Array:
    """Returns the logits of a context tile; keys past the context are unseen."""
    seen = w.context_len - (w.first + i) * problem.tile

    def partly():
        _keep(problem, s, i, lambda _, key: key < seen)
        return jnp.where(_logit_keys(problem, x) < seen, x, LOWEST)

    return lax.cond(seen < problem.tile, partly, lambda: x)


def mask_tail(problem: Problem, w: Work, s: Buffers, i: Array, x: Array) -> Array:
    """Returns the logits of a tail tile: a row sees its node's ancestors.

    `stage_words` has to have run for this tile. A latent that is not finite makes
    every logit of its key so, and with it the rows that see the key. For the others
    it is zeroed.
    """
    tile = w.first + i - w.context_tiles
    valid = problem.nodes - tile * problem.tile

    def words(number):
        vector = load_columns(
            s.words.at[number], layout=problem.by_row, interpret=problem.interpret
        )
        return plgpu.layout_cast(problem.spread(vector, x.shape), problem.layout)

    key = _logit_keys(problem, x)
    if problem.tile > WORD_BITS:
        word = jnp.where(key < WORD_BITS, words(0), words(1))
    else:
        word = words(0)
    bit = lax.shift_right_logical(word, lax.bitwise_and(key, 31))
    seen = (lax.bitwise_and(bit, 1) == 1) & (key < valid)
    _keep(problem, s, i, lambda latent, key: _finite(latent) & (key < valid))
    # An infinite latent can give -inf, which must not pass for probability 0.
    return jnp.where(seen, jnp.where(x == -jnp.inf, jnp.nan, x), LOWEST)


def stage_words(problem: Problem, w: Work, g: Inputs, s: Buffers, i: Array) -> None:
    """Writes the words that each row has for the keys of tail tile `i`."""
    # A hidden 0, so that none of this is computed before it is needed.
    zero = hidden_zero(w.context_len + i)
    tile = w.first + i - w.context_tiles
    rows, heads = problem.config.rows, problem.heads
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=problem.by_row)
    begin = w.row_block * rows + zero
    node = lax.div(row + begin, jnp.int32(heads))
    first = lax.div(begin, jnp.int32(heads))
    last_word = g.bits.shape[-1] - 1
    words_a_tile = problem.tile // WORD_BITS
    for part in range(words_a_tile):
        words = plgpu.layout_cast(jnp.zeros((rows,), jnp.int32), problem.by_row)
        for j in range((rows - 1) // heads + 2):
            # Past the last node or word nothing is seen, whatever is read.
            place = jnp.minimum(first + j, problem.nodes - 1)
            number = jnp.minimum(tile * words_a_tile + part, last_word)
            word = g.bits[w.request, place, number]
            word = lax.bitcast_convert_type(word, jnp.int32)
            words = jnp.where(node == first + j, word, words)
        s.words[part, :] = words


def _keep(
    problem: Problem,
    s: Buffers,
    i: Array,
    condition: Callable[[Array, Array], Array],
) -> None:
    """Zeroes the latents of tile `i` that do not fulfil a condition.

    Args:
      condition: Of latents and of the numbers of their keys.
    """
    if not problem.interpret:
        # Other warps may not be done with the products for the logits.
        synchronise_warpgroup()
    key = _keys(problem, (problem.tile, _COLUMNS), 0)
    parts = SLOT_COLUMNS // _COLUMNS

    def part(number, _):
        chunk, column = (f(number, jnp.int32(parts)) for f in (lax.div, lax.rem))
        columns = pl.ds(pl.multiple_of(column * _COLUMNS, _COLUMNS), _COLUMNS)
        ref = s.ring.at[slot_of(problem, i, chunk), :, columns]
        x = ref[...] if problem.interpret else plgpu.load(ref, layout=problem.layout)
        ref[...] = jnp.where(condition(x, key), x, jnp.zeros_like(x))

    lax.fori_loop(0, problem.chunks * parts, part, None)


def _finite(x: Array) -> Array:
    return jnp.abs(x) < jnp.inf


def _logit_keys(problem: Problem, x: Array) -> Array:
    """Returns the number of each logit's key in its tile."""
    return _keys(problem, x.shape, 1 - problem.config.rows_axis)


def _keys(problem: Problem, shape: tuple[int, ...], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=problem.layout)
