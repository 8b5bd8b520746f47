"""Owns Hopper's kernel for many rows: as `attend.py`, not transposed.

Query rows are the 64-row operand of `wgmma`, so a block has 64 of them, however many
are used. What that buys: a thread has two rows, so it keeps a reference and a sum for
each in registers, and a maximum over keys is found within four lanes.

    score   S = Q Kᵀ, masks, P = 2^(S - m)
    weigh   O += P V     two of them, each every other slot of a tile

A reference is raised only for the rows that need it, so what a row gets does not
depend on the other rows of its block.

Making the next tile's logits beside the softmax of this one, as FlashAttention-3 does,
was slower: products of `weigh` keep the tensor cores busy, and a tile that is waited
for early is not there earlier.

Source: as `attend.py`; queries as the 64-row operand are FlashMLA's.
"""

import functools

from ddtree_jax.pallas.tree_mla.attend import HOPPER
from ddtree_jax.pallas.tree_mla.block import barriers
from ddtree_jax.pallas.tree_mla.wide_score import score
from ddtree_jax.pallas.tree_mla.wide_weigh import weigh

VARIANT = HOPPER._replace(
    name="tree_mla_attend_wide",
    score=score,
    weigh=weigh,
    barriers=functools.partial(barriers, slot_readers=1),
    registers=(160, 160, 32),
    options={"reduction_scratch_bytes": 0},
)
