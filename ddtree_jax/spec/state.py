"""Owns the state of a step, its result and status codes.

Does not know how pages are allocated to requests, or what a request is.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ddtree_jax.arrays import I32, Array, Bool
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.mesh import named_sharding
from ddtree_jax.model.cache import (
    DRAFT_AXES,
    LATENT_AXES,
    DraftCache,
    LatentCache,
    abstract_array,
    abstract_draft_cache,
    abstract_latent_cache,
)
from ddtree_jax.model.params import DFlash, KimiK2
from ddtree_jax.spec.sampling import Sampling


class StepStatus(enum.IntEnum):
    """What a step says of one slot; the host raises."""

    OK = 0
    IDLE = 1  # the slot is not active; nothing was done
    NON_FINITE = 2  # logits on the accepted path hold NaN or infinity
    NO_ROOM = 3  # max_context_len is reached; nothing can be committed
    DRAFT_NON_FINITE = 4  # the drafter's logits do; its tree would be a lie


class Params(NamedTuple):
    """Parameters of both models; without a drafter only plain decoding works."""

    target: KimiK2
    draft: DFlash | None


class SpecState(NamedTuple):
    """Everything a step changes, of B slots.

    Attributes:
      cache: The target's pages.
      draft_cache: The drafter's pages, or None without a drafter.
      page_table: Page ids of each slot.
      context_len: Committed tokens, all of them in the pages and nothing else.
      max_context_len: Most tokens that may be committed; its pages are the slot's.
      root_token: Known token at position `context_len`, not yet in the pages.
      tree_budget: Draft nodes wanted, without the root; 0 is plain decoding.
      active: Whether the slot decodes.
      sampling: How its tokens are chosen.

    Invariants:
      1. 0 ≤ context_len ≤ max_context_len ≤ P · S.
      2. The first ceil(max_context_len / S) table entries are pages that no
         other slot writes to.
    """

    cache: LatentCache
    draft_cache: DraftCache | None
    page_table: I32[Array, "B P"]
    context_len: I32[Array, "B"]
    max_context_len: I32[Array, "B"]
    root_token: I32[Array, "B"]
    tree_budget: I32[Array, "B"]
    active: Bool[Array, "B"]
    sampling: Sampling


class StepResult(NamedTuple):
    """What a step yields to the host.

    Attributes:
      tokens: New tokens; the first `num_tokens` count.
      num_tokens: `num_accepted + 1`, the bonus token included; 0 unless OK.
      status: A `StepStatus`.
    """

    tokens: I32[Array, "B D1"]
    num_tokens: I32[Array, "B"]
    status: I32[Array, "B"]


def state_axes(*, with_draft: bool) -> SpecState:
    """Returns the logical axes of every array of a state."""
    slot: Any = (None,)
    page_table: Any = (None, None)
    return SpecState(
        cache=LATENT_AXES,
        draft_cache=DRAFT_AXES if with_draft else None,
        page_table=page_table,
        context_len=slot,
        max_context_len=slot,
        root_token=slot,
        tree_budget=slot,
        active=slot,
        sampling=Sampling(*[slot] * len(Sampling._fields)),
    )


def abstract_state(
    config: ModelConfig,
    draft_config: DraftConfig | None,
    mesh: Mesh,
    *,
    slots: int,
    pages_per_slot: int,
    num_pages: int,
    page_size: int,
    dtype,
) -> SpecState:
    """Returns shapes, dtypes and shardings of a state; nothing is allocated."""
    size = {"num_pages": num_pages, "page_size": page_size, "dtype": dtype}
    i32, f32, u32, boolean = (
        abstract_array((slots,), each)
        for each in (jnp.int32, jnp.float32, jnp.uint32, jnp.bool_)
    )
    shapes = SpecState(
        cache=abstract_latent_cache(config, **size),
        draft_cache=draft_config and abstract_draft_cache(draft_config, **size),
        page_table=abstract_array((slots, pages_per_slot), jnp.int32),
        context_len=i32,
        max_context_len=i32,
        root_token=i32,
        tree_budget=i32,
        active=boolean,
        sampling=Sampling(f32, i32, f32, f32, u32),
    )
    axes = state_axes(with_draft=draft_config is not None)
    return jax.tree.map(
        lambda s, a: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=named_sharding(mesh, a)
        ),
        shapes,
        axes,
        is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )


def init_state(abstract: SpecState) -> SpecState:
    """Returns an idle state: every slot inactive, every array zero."""

    def zeros() -> SpecState:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract)

    shardings = jax.tree.map(lambda s: s.sharding, abstract)
    return jax.jit(zeros, out_shardings=shardings)()
