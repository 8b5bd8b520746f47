"""Owns which keys a row sees, and that unseen values cannot spoil a sum.

An unseen key has probability 0, but 0 · NaN is NaN, so the latents of keys that
nobody may see are zeroed in shared memory before they are summed.
"""

from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.arrays import Array
from ddtree_jax.pallas.tree_mla.block import Buffers, Inputs, Problem, Work, slot_of
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS
from ddtree_jax.pallas.tree_mla.reference import WORD_BITS
from ddtree_jax.pallas.warpgroup import hidden_zero, load_columns

# Stands for minus infinity: differences of two of them are 0 and not NaN.
LOWEST = -1e30


def mask_context(problem: Problem, w: Work, s: Buffers, i: Array, x: Array) -> Array:
    """Returns the logits of a context tile; keys past the context are unseen."""
    seen = w.context_len - (w.first + i) * problem.tile

    def partly():
        _zero_unless(problem, s, i, _keys(problem, SLOT_COLUMNS) < seen)
        return jnp.where(_keys(problem, x.shape[1]) < seen, x, LOWEST)

    return lax.cond(seen < problem.tile, partly, lambda: x)


def mask_tail(problem: Problem, w: Work, s: Buffers, i: Array, x: Array) -> Array:
    """Returns the logits of a tail tile: a row sees its node's ancestors.

    `stage_words` has to have run for this tile. A latent that is not finite makes
    every logit of its key so, and with it the rows that see the key. For the others
    it is zeroed.
    """
    rows = x.shape[1]
    tile = w.first + i - w.context_tiles
    valid = problem.nodes - tile * problem.tile

    def words(number):
        vector = load_columns(
            s.words.at[number],
            layout=problem.layout.reduce(0),
            interpret=problem.interpret,
        )
        words = lax.broadcast_in_dim(vector, x.shape, [1])
        return plgpu.layout_cast(words, problem.layout)

    key = _keys(problem, rows)
    if problem.tile > WORD_BITS:
        word = jnp.where(key < WORD_BITS, words(0), words(1))
    else:
        word = words(0)
    bit = lax.shift_right_logical(word, lax.bitwise_and(key, 31))
    seen = (lax.bitwise_and(bit, 1) == 1) & (key < valid)
    finite = jnp.where(jnp.abs(x) < jnp.inf, 1.0, 0.0).max(axis=1)
    finite = lax.broadcast_in_dim(finite, (problem.tile, SLOT_COLUMNS), [0])
    finite = plgpu.layout_cast(finite, problem.layout) > 0
    _zero_unless(problem, s, i, finite & (_keys(problem, SLOT_COLUMNS) < valid))
    # An infinite latent can give -inf, which must not pass for probability 0.
    return jnp.where(seen, jnp.where(x == -jnp.inf, jnp.nan, x), LOWEST)


def stage_words(problem: Problem, w: Work, g: Inputs, s: Buffers, i: Array) -> None:
    """Writes the words that each row has for the keys of tail tile `i`."""
    # A hidden 0, so that none of this is computed before it is needed.
    zero = hidden_zero(w.context_len + i)
    tile = w.first + i - w.context_tiles
    rows, heads = problem.config.rows, problem.heads
    columns = problem.layout.reduce(0)
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=columns)
    begin = w.row_block * rows + zero
    node = lax.div(row + begin, jnp.int32(heads))
    first = lax.div(begin, jnp.int32(heads))
    last_word = g.bits.shape[-1] - 1
    words_a_tile = problem.tile // WORD_BITS
    for part in range(words_a_tile):
        words = plgpu.layout_cast(jnp.zeros((rows,), jnp.int32), columns)
        for j in range((rows - 1) // heads + 2):
            # Past the last node or word nothing is seen, whatever is read.
            place = jnp.minimum(first + j, problem.nodes - 1)
            number = jnp.minimum(tile * words_a_tile + part, last_word)
            word = g.bits[w.request, place, number]
            word = lax.bitcast_convert_type(word, jnp.int32)
            words = jnp.where(node == first + j, word, words)
        s.words[part, :] = words


def _zero_unless(problem: Problem, s: Buffers, i: Array, keep: Array) -> None:
    """Zeroes the latents of tile `i` whose place in `keep` [tile, 128] is false."""

    def chunk(c, _):
        slot = slot_of(problem, i, c)
        if problem.interpret:
            x = s.ring[slot]
        else:
            x = plgpu.load(s.ring.at[slot], layout=problem.layout)
        s.ring[slot] = jnp.where(keep, x, jnp.zeros_like(x))

    lax.fori_loop(0, problem.chunks, chunk, None)


def _keys(problem: Problem, columns: int) -> Array:
    """Returns the number of each element's key in its tile."""
    shape = problem.tile, columns
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=problem.layout)
