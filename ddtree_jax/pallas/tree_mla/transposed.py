"""Owns Hopper's kernel for few rows: keys are the 64-row operand of `wgmma`.

The products are transposed: keys, and later latent columns, are the rows of the
product, and query rows its N. So 8 rows cost what 8 rows need, where rows as the
64-row operand would be padded: 72 rows (8 heads, 9 nodes) fill 56 % of two such tiles.
For many rows, `wide.py` is the other way round.

Three warpgroups work on different tiles at once, and one warp of a fourth loads:

    score   S = K Qᵀ, masks, P = 2^(S - m)
    weigh   two of them, each half of the columns of every slot: O += Vᵀ P

A slot is freed when both have summed it.

Source: the transposed product of FlashMLA-ETAP (arXiv 2506.01969).
"""

import functools

from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import Buffers, barriers, buffers
from ddtree_jax.pallas.tree_mla.score import score
from ddtree_jax.pallas.tree_mla.weigh import add_product, weigh
from ddtree_jax.pallas.warpgroup import LAYOUT

_WEIGH = functools.partial(weigh, product=add_product, layout=LAYOUT)

VARIANT = Variant(
    name="tree_mla_attend",
    roles=(score, _WEIGH, _WEIGH),
    scratch=buffers,
    buffers=Buffers,
    barriers=barriers,
    # What one warpgroup gives up, others take.
    registers=(136, 176, 176, 24),
    options={},
)
