"""Owns the call of the kernels with the arguments of the entry.

The one that attends has three variants: two with `wgmma` for Hopper, and one with
`mma` for GPUs that have little shared memory; `tuned.py` says which takes a call. The
one that combines splits serves all.
"""

import math
from typing import Any

from jax import numpy as jnp

from ddtree_jax.arrays import BF16, F32, I32, U32, Array
from ddtree_jax.pallas.device import compute_capability
from ddtree_jax.pallas.tree_mla import mma, transposed, wide
from ddtree_jax.pallas.tree_mla.attend import attend
from ddtree_jax.pallas.tree_mla.block import Inputs, Problem
from ddtree_jax.pallas.tree_mla.combine import combine
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS, TILE, TreeMlaConfig, choose
from ddtree_jax.pallas.tree_mla.mma_config import TreeMlaMmaConfig, choose_mma
from ddtree_jax.pallas.tree_mla.tuned import kernel_for
from ddtree_jax.pallas.tree_mla.wide_config import TreeMlaWideConfig, choose_wide

# By compute capability: multiprocessors of an H200, of an RTX PRO 6000. A GPU with
# fewer takes more than one wave.
_CORES = {"9.0": 132, "12.0": 188}
# By the name in the table of rules: keys of a tile, and what cuts the work.
_CUTS = {
    "transposed": (TreeMlaConfig.tile, choose),
    "wide": (TreeMlaWideConfig.tile, choose_wide),
    "mma": (TreeMlaMmaConfig.tile, choose_mma),
}
# By the class of the config.
_VARIANTS = {
    TreeMlaConfig: transposed.VARIANT,
    TreeMlaWideConfig: wide.VARIANT,
    TreeMlaMmaConfig: mma.VARIANT,
}


def unsupported(
    q_latent: Array,
    q_rope: Array,
    latent_cache: Array,
    rope_cache: Array,
    tail_latent: Array,
    tail_rope: Array,
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    arrays = q_latent, q_rope, latent_cache, rope_cache, tail_latent, tail_rope
    latent, rope, page = q_latent.shape[-1], q_rope.shape[-1], latent_cache.shape[1]
    dtypes = {str(x.dtype) for x in arrays}
    if dtypes != {"bfloat16"}:
        return f"dtypes {', '.join(sorted(dtypes))}; expected bfloat16"
    if latent % SLOT_COLUMNS or latent > 512 or rope != 64:
        return (
            f"latents of {latent} and rotary keys of {rope}; expected a multiple of "
            f"{SLOT_COLUMNS} up to 512, and 64"
        )
    if TILE % page or page % 8:
        return f"pages of {page} tokens; expected 8, 16, 32 or 64"
    return None


def tree_mla_attention_pallas(
    q_latent: BF16[Array, "B N H L"],
    q_rope: BF16[Array, "B N H R"],
    latent_cache: BF16[Array, "pages S L"],
    rope_cache: BF16[Array, "pages S R"],
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
    *,
    tail_latent: BF16[Array, "B T L"],
    tail_rope: BF16[Array, "B T R"],
    ancestor_bits: U32[Array, "B N W"],
    softmax_scale: float,
    config: TreeMlaConfig | None = None,
    interpret: Any = None,
) -> tuple[BF16[Array, "B N H L"], F32[Array, "B N H"]]:
    """Returns what `tree_mla_attention` documents, on a GPU that has a kernel.

    Args:
      config: How the work is cut, and by its class for which kernel; None chooses for
        the GPU.
      interpret: Parameters of the interpreter, which runs the kernels on a CPU.

    Raises:
      ValueError: The kernels do not take these arguments, or do not know the GPU.
    """
    reason = unsupported(
        q_latent, q_rope, latent_cache, rope_cache, tail_latent, tail_rope
    )
    if reason:
        raise ValueError(f"tree_mla_attention: implementation 'pallas' got {reason}")
    b, n, h, latent = q_latent.shape
    rows, rope = n * h, q_rope.shape[-1]
    page_size = latent_cache.shape[1]
    if config is None:
        capability = _capability()
        config = cut(
            capability,
            kernel_for(capability, rows=rows, batch=b),
            batch=b,
            heads=h,
            nodes=n,
            latent=latent,
            rope=rope,
            held=page_table.shape[1] * page_size,
        )
    problem = Problem(
        nodes=n,
        heads=h,
        latent=latent,
        rope=rope,
        page_size=page_size,
        tail_tiles=-(-n // config.tile),
        log2_scale=softmax_scale * math.log2(math.e),
        config=config,
        interpret=interpret is not None,
    )
    inputs = Inputs(
        # TMA reads rows by eights.
        _padded(q_latent.reshape(b, rows, latent), 8),
        _padded(q_rope.reshape(b, rows, rope), 8),
        latent_cache,
        rope_cache,
        page_table,
        context_len,
        _padded(tail_latent, config.tile),
        _padded(tail_rope, config.tile),
        ancestor_bits,
    )
    variant = _VARIANTS[type(config)]
    partial, peaks, totals = attend(variant, problem, inputs, interpret=interpret)
    out, lse = combine(
        problem, partial, peaks, totals, context_len, interpret=interpret
    )
    out, lse = out[:, :rows], lse[:, :rows]
    return out.reshape(b, n, h, latent), lse.reshape(b, n, h)


def cut(
    capability: str,
    kernel: str,
    *,
    batch: int,
    heads: int,
    nodes: int,
    latent: int,
    rope: int,
    held: int,
) -> TreeMlaConfig:
    """Returns how a call is cut for a kernel, on GPUs of a compute capability.

    Args:
      kernel: As in the table of rules.
      held: Tokens that a request's page table can hold.
    """
    tile, choose_cut = _CUTS[kernel]
    return choose_cut(
        batch=batch,
        rows=nodes * heads,
        latent=latent,
        rope=rope,
        max_tiles=-(-held // tile) - (-nodes // tile),
        cores=_CORES[capability],
    )


def _capability() -> str:
    """Returns the compute capability of the GPUs there are."""
    capability = compute_capability()
    if capability is None:
        raise ValueError(
            "tree_mla_attention: implementation 'pallas' got no GPU that it has a "
            f"kernel for; expected compute capability {' or '.join(_CORES)} of all"
        )
    return capability


def _padded(x: Array, multiple: int) -> Array:
    """Returns `x` [B, rows, columns] with rows added up to a multiple."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x
