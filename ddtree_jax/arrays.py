"""Owns the axis letters and array aliases used in annotations.

    B requests (slots)      N tree nodes, root included    T tokens (any leading use)
    H attention heads       L latent width (512)           R rope width (64)
    P pages per request     S page size, tokens            V vocabulary
    E experts               D draft horizon                W = ceil(N / 32) mask words
    M hidden width          F features (target layers)     K kept candidates
    I feed-forward width    Q query low rank               G = inputs / 32 scale groups

Sizes in a function's annotation are per device when the function runs inside
`shard_map`. The numbers in brackets are Kimi K2.6's.
"""

from jaxtyping import (
    Array,
    BFloat16,
    Bool,
    Float,
    Float32,
    Int32,
    Num,
    UInt32,
)

BF16 = BFloat16
F32 = Float32
I32 = Int32
U32 = UInt32

__all__ = [
    "BF16",
    "F32",
    "I32",
    "U32",
    "Array",
    "Bool",
    "Float",
    "Num",
    "along_last",
]


def along_last(vector: Num[Array, "n"], ndim: int) -> Num[Array, "*ones n"]:
    """Returns the vector as the last axis of an array of rank `ndim`.

    Broadcasting between ranks is written out in this project (and raises in its
    tests), since an accidental one is silent.
    """
    return vector.reshape((1,) * (ndim - 1) + (-1,))
