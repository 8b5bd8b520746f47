"""Owns the kernels: one folder an operation, each behind a checked entry.

Does not know about Kimi, about meshes or collectives (shapes are per device),
or what a tree is (it sees bits). Read `tree_mla/__init__.py` first.
"""

from ddtree_jax.pallas.int4_matmul import int4_grouped_swiglu, int4_matmul
from ddtree_jax.pallas.tree_mla import pack_bits, tree_mla_attention

__all__ = [
    "int4_grouped_swiglu",
    "int4_matmul",
    "pack_bits",
    "tree_mla_attention",
]
