"""Owns the kernel for GPUs without `wgmma`: as `attend.py`, with `mma`, in 99 KB.

Roles, order and results are those of the Hopper kernel, in tiles of 32 keys. Both
products stay transposed: keys, and later latent columns, are the rows of the
product, query rows its columns.

    score   S = K Qᵀ     two warps on 16 keys each, two on half of the rows each
    weigh   O += Vᵀ P    four warps on 16 latent columns each, all rows

`mma` reads registers. The queries' come from shared memory for each tile again, P's
once a tile, and each key and value is loaded twice by `score` and once by `weigh`.

Every warpgroup has the 128 registers a thread that it starts with: for sm_120,
`ptxas` ignores a change of them in a kernel with TMA loads as Mosaic GPU writes them.
"""

from ddtree_jax.pallas.tree_mla.attend import Variant
from ddtree_jax.pallas.tree_mla.block import barriers, packed_buffers, packed_scratch
from ddtree_jax.pallas.tree_mla.mma_score import score
from ddtree_jax.pallas.tree_mla.mma_weigh import weigh

VARIANT = Variant(
    name="tree_mla_attend_mma",
    score=score,
    weigh=weigh,
    scratch=packed_scratch,
    buffers=packed_buffers,
    barriers=barriers,
    registers=None,
    options={"reduction_scratch_bytes": 1_024},
)
