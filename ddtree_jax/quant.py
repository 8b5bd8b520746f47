"""Owns the INT4 bit layout. Does not know about models, files or kernels' tiles.

The layout is compressed-tensors' `pack-quantized` (the form of Kimi's files):
a weight `[..., out, in]` is stored as nibbles u = q + 8 with q in -8 .. 7,

    packed[..., o, j] = sum over k in 0..7 of u[..., o, 8 j + k] << 4 k      int32
    scale[..., o, g]  belongs to inputs 32 g .. 32 g + 31                  bfloat16

and means w[o, i] = bfloat16(q[o, i] * scale[o, i // 32]).
"""

import dataclasses

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import BF16, I32, Array, along_last

GROUP_SIZE = 32
NIBBLES_PER_WORD = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Weight:
    """A group-quantised weight: w ≈ q · scale, one scale per `GROUP_SIZE` inputs.

    Attributes:
      packed: Eight nibbles a word, lowest nibble = lowest input.
      scale: One factor per output and group of inputs.

    Invariants:
      1. `packed` is int32 and `scale` bfloat16.
      2. Their leading dimensions, output included, are equal.
      3. `packed` has four words per scale: 8 · words = 32 · groups.
    """

    packed: I32[Array, "*lead out words"]
    scale: BF16[Array, "*lead out groups"]

    def validate(self) -> None:
        """Raises ValueError, naming both shapes, when an invariant is broken."""
        packed, scale = self.packed, self.scale
        if packed.dtype != jnp.int32 or scale.dtype != jnp.bfloat16:
            raise ValueError(
                "Int4Weight expects int32 packed and bfloat16 scale, "
                f"got {packed.dtype} and {scale.dtype}"
            )
        if packed.shape[:-1] != scale.shape[:-1]:
            raise ValueError(
                "Int4Weight expects equal leading dimensions, "
                f"got packed {packed.shape} and scale {scale.shape}"
            )
        words, groups = packed.shape[-1], scale.shape[-1]
        if words * NIBBLES_PER_WORD != groups * GROUP_SIZE:
            raise ValueError(
                f"Int4Weight expects {GROUP_SIZE // NIBBLES_PER_WORD} words per "
                f"scale, got packed {packed.shape} and scale {scale.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that this stands for, `[..., out, in]`."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * NIBBLES_PER_WORD)


def _shifts() -> I32[Array, "8"]:
    return 4 * jnp.arange(NIBBLES_PER_WORD, dtype=jnp.int32)


def unpack(packed: I32[Array, "*lead words"]) -> I32[Array, "*lead inputs"]:
    """Returns q in -8 .. 7 for every input, in input order."""
    shifts = along_last(_shifts(), packed.ndim + 1)
    nibbles = (packed[..., None] >> shifts) & 0xF
    return nibbles.reshape(*packed.shape[:-1], -1) - 8


def pack(q: I32[Array, "*lead inputs"]) -> I32[Array, "*lead words"]:
    """Returns the words of q; the inverse of `unpack`.

    Args:
      q: Values in -8 .. 7; the number of inputs is a multiple of 8.
    """
    nibbles = (q + 8).reshape(*q.shape[:-1], -1, NIBBLES_PER_WORD)
    shifts = along_last(_shifts(), nibbles.ndim)
    # The nibbles do not overlap, so the sum is the bitwise or.
    return jnp.sum(nibbles << shifts, axis=-1, dtype=jnp.int32)


def dequantise(weight: Int4Weight) -> BF16[Array, "*lead out inputs"]:
    """Returns bfloat16(q · scale), the meaning of the stored weight."""
    q = unpack(weight.packed)
    scale = jnp.repeat(weight.scale, GROUP_SIZE, axis=-1)
    product = q.astype(jnp.float32) * scale.astype(jnp.float32)
    # A cast alone is not enough: where the caller widens the result again, XLA may
    # drop the rounding, and does so for some shapes and not for others.
    rounded = jax.lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16)
