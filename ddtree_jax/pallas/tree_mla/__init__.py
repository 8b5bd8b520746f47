"""Tree-masked MLA attention over paged latents and a tail: the checked entry."""

from jax import lax

from ddtree_jax.arrays import F32, I32, U32, Array, Float
from ddtree_jax.pallas.checks import check_ranks, check_shapes
from ddtree_jax.pallas.select import Implementation, select
from ddtree_jax.pallas.tree_mla import kernel
from ddtree_jax.pallas.tree_mla.reference import (
    WORD_BITS,
    pack_bits,
    tree_mla_attention_reference,
    unpack_bits,
)

__all__ = ["pack_bits", "tree_mla_attention", "unpack_bits"]

_IMPLEMENTATIONS = {
    "pallas": kernel.tree_mla_attention_pallas,
    "reference": tree_mla_attention_reference,
}


def tree_mla_attention(
    q_latent: Float[Array, "B N H L"],
    q_rope: Float[Array, "B N H R"],
    latent_cache: Float[Array, "pages S L"],
    rope_cache: Float[Array, "pages S R"],
    page_table: I32[Array, "B P"],
    context_len: I32[Array, "B"],
    *,
    tail_latent: Float[Array, "B T L"],
    tail_rope: Float[Array, "B T R"],
    ancestor_bits: U32[Array, "B N W"],
    softmax_scale: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B N H L"], F32[Array, "B N H"]]:
    """Attends every tree node to its context and to its own ancestors.

    Node `i` of request `b` sees all `context_len[b]` committed tokens, plus
    tree node `j` exactly when bit `j` of `ancestor_bits[b, i]` is set. A node
    must be marked as its own ancestor. With a chain-shaped tree this is
    ordinary causal attention.

    The pages hold tokens 0 .. context_len[b] - 1 and nothing else: token `t`
    of request `b` is row `t % S` of page `page_table[b, t // S]`. Page rows at
    or past `context_len[b]`, and table entries past the last page in use, are
    never read and may hold anything, NaN included. The pages of several layers
    may share one array: the caller adds the layer's first page to the table.

    The tail holds the N nodes of this layer and this step: row `j` belongs to
    node `j`, normalised and rotated to that node's position. Tail row `j`
    affects only nodes that have bit `j` set. It may have more than N rows, which
    are not read: a multiple of 64 saves the kernel a copy. Nothing is written:
    moving accepted rows into the pages is the commit's work.

    Shapes are per device: heads are split by the caller, caches and tail are
    replicated. The function contains no collective.

    Numerics: logits, maximum and sum in float32, over context and tail in one
    softmax. Equal inputs give bit-equal outputs.

    Args:
      q_latent: Queries already multiplied by the key up-projection.
      q_rope: Rotary part of the queries, rotated to the nodes' positions.
      latent_cache: Normalised latents of committed tokens, key and value both.
      rope_cache: The one rotated rotary key of each committed token.
      page_table: Page ids; entries past the last page in use are ignored.
      context_len: Committed tokens of each request.
      tail_latent: Normalised latents of the nodes, as in `latent_cache`.
      tail_rope: Rotary keys of the nodes, as in `rope_cache`.
      ancestor_bits: Bit `j % 32` of word `j // 32`: node sees tail row `j`.
      softmax_scale: Multiplies the logits; includes YaRN's correction.
      implementation: "auto" takes "pallas" on GPUs of compute capability 9.0 (Hopper)
        or 12.0 (RTX PRO 6000) for bfloat16 of widths that the kernels have (latents
        in 128s up to 512, rotary keys of 64), and "reference" otherwise.

    Returns:
      The attention output before the value up-projection, and the natural
      log-sum-exp of the scaled logits, for merging partial results.

    Raises:
      ValueError: The arguments contradict each other; both shapes are named.
      NotImplementedError: The chosen implementation does not exist.
    """
    name = "tree_mla_attention"
    ranks = {"q_latent": (q_latent.shape, 4), "q_rope": (q_rope.shape, 4)}
    ranks |= {"latent_cache": (latent_cache.shape, 3)}
    ranks |= {"page_table": (page_table.shape, 2)}
    ranks |= {"tail_latent": (tail_latent.shape, 3)}
    check_ranks(name, ranks)
    b, n, h, latent = q_latent.shape
    rope, tail = q_rope.shape[-1], tail_latent.shape[1]
    pages, page_size = latent_cache.shape[:2]
    check_shapes(
        name,
        {
            "q_rope": (q_rope.shape, (b, n, h, rope)),
            "latent_cache": (latent_cache.shape, (pages, page_size, latent)),
            "rope_cache": (rope_cache.shape, (pages, page_size, rope)),
            "page_table": (page_table.shape, (b, page_table.shape[1])),
            "context_len": (context_len.shape, (b,)),
            "tail_latent": (tail_latent.shape, (b, max(n, tail), latent)),
            "tail_rope": (tail_rope.shape, (b, max(n, tail), rope)),
            "ancestor_bits": (ancestor_bits.shape, (b, n, -(-n // WORD_BITS))),
        },
        basis=f"q_latent {q_latent.shape}",
    )
    return _run(
        q_latent,
        q_rope,
        latent_cache,
        rope_cache,
        page_table,
        context_len,
        tail_latent,
        tail_rope,
        ancestor_bits,
        implementation=implementation,
        softmax_scale=softmax_scale,
    )


def _run(*arrays: Array, implementation: Implementation, softmax_scale: float):
    """Returns what the chosen implementation does with the entry's arrays."""

    def call(function):
        def run(*arrays):
            *leading, tail_latent, tail_rope, bits = arrays
            return function(
                *leading,
                tail_latent=tail_latent,
                tail_rope=tail_rope,
                ancestor_bits=bits,
                softmax_scale=softmax_scale,
            )

        return run

    known = kernel.compute_capability() is not None
    fits = kernel.unsupported(*arrays[:4], *arrays[6:8]) is None
    if implementation == "auto" and known and fits:
        return lax.platform_dependent(
            *arrays,
            cuda=call(_IMPLEMENTATIONS["pallas"]),
            default=call(_IMPLEMENTATIONS["reference"]),
        )
    if implementation == "auto":
        implementation = "reference"
    return call(select("tree_mla_attention", implementation, _IMPLEMENTATIONS))(*arrays)
