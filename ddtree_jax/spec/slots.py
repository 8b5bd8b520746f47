"""Owns how a slot of the state is handed to a request and taken back."""

from typing import Any, NamedTuple

import jax

from ddtree_jax.arrays import F32, I32, U32, Array
from ddtree_jax.spec.sampling import Sampling
from ddtree_jax.spec.state import SpecState


class Assignment(NamedTuple):
    """What a request brings into its slot; see `SpecState` and `Sampling`.

    The arrays may be NumPy's: they come from the host.
    """

    page_table: I32[Any, "P"]
    max_context_len: I32[Any, ""]
    tree_budget: I32[Any, ""]
    temperature: F32[Any, ""]
    top_k: I32[Any, ""]
    top_p: F32[Any, ""]
    min_p: F32[Any, ""]
    seed: U32[Any, ""]


def assign(state: SpecState, slot: I32[Array, ""], a: Assignment) -> SpecState:
    """Returns the state with `slot` empty, idle and owned by a new request."""
    new = Sampling(a.temperature, a.top_k, a.top_p, a.min_p, a.seed)
    return state._replace(
        page_table=state.page_table.at[slot].set(a.page_table),
        context_len=state.context_len.at[slot].set(0),
        max_context_len=state.max_context_len.at[slot].set(a.max_context_len),
        tree_budget=state.tree_budget.at[slot].set(a.tree_budget),
        active=state.active.at[slot].set(False),
        sampling=jax.tree.map(lambda old, x: old.at[slot].set(x), state.sampling, new),
    )


def release(state: SpecState, slot: I32[Array, ""]) -> SpecState:
    """Returns the state with `slot` idle and without pages."""
    return state._replace(
        context_len=state.context_len.at[slot].set(0),
        max_context_len=state.max_context_len.at[slot].set(0),
        active=state.active.at[slot].set(False),
    )
