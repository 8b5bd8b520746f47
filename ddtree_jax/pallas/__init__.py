"""Owns the kernels: one folder an operation, each behind a checked entry.

Does not know about Kimi, about meshes or collectives (shapes are per device),
or what a tree is (it sees bits). Read `tree_mla/__init__.py` first.
"""

from ddtree_jax.pallas.device import compute_capability
from ddtree_jax.pallas.int4_matmul import (
    Int4Tiles,
    from_tiles,
    int4_grouped_swiglu,
    int4_matmul,
    to_tiles,
    unsupported_grouped,
)
from ddtree_jax.pallas.tree_mla import pack_bits, tree_mla_attention

__all__ = [
    "Int4Tiles",
    "compute_capability",
    "from_tiles",
    "int4_grouped_swiglu",
    "int4_matmul",
    "pack_bits",
    "to_tiles",
    "tree_mla_attention",
    "unsupported_grouped",
]
