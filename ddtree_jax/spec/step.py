"""Owns the step: draft → build → verify → accept → commit as one XLA program.

`make_step` and `make_prefill` return jitted functions whose state is donated;
inside, everything is per-device code under one `shard_map`. There is no host
callback and no transfer in them. Plain decoding is the same step with budget 0.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ddtree_jax.arrays import I32, Array, Bool, Float
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.mesh import TENSOR, partition_spec
from ddtree_jax.model.cache import LatentCache, commit_rows
from ddtree_jax.model.draft import context_rows, draft_hidden
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.params import partition_specs
from ddtree_jax.model.transformer import Output, forward
from ddtree_jax.pallas import pack_bits
from ddtree_jax.spec.accept import walk
from ddtree_jax.spec.sampling import Sampling, choose, top_log_probs
from ddtree_jax.spec.state import (
    Params,
    SpecState,
    StepResult,
    StepStatus,
    state_axes,
)
from ddtree_jax.spec.tree import DraftTree, ancestor_mask, build, chain, chain_bits

type StepFunction = jax.stages.Wrapped
type PrefillFunction = jax.stages.Wrapped
type TreeBuilder = Callable[..., DraftTree]  # takes what `tree.build` takes


def make_step(
    config: ModelConfig,
    draft_config: DraftConfig | None,
    mesh: Mesh,
    *,
    num_nodes: int,
    build_tree: TreeBuilder = build,
) -> StepFunction:
    """Returns `step(params, state) -> (state, result)`, jitted, state donated.

    Args:
      num_nodes: Static size of the tree, root included. With 1 nothing is
        drafted, which is plain decoding; more need a drafter.
      build_tree: Makes the tree of what was drafted. What comes out does not
        depend on it, only how fast; its trees keep `DraftTree`'s invariants 1-3.
    """
    if num_nodes > 1 and draft_config is None:
        raise ValueError(f"num_nodes = {num_nodes} needs a drafter, and there is none")
    body = partial(
        _step, c=config, dc=draft_config, num_nodes=num_nodes, build_tree=build_tree
    )
    return _compile(body, draft_config, mesh)


def make_prefill(
    config: ModelConfig, draft_config: DraftConfig | None, mesh: Mesh
) -> PrefillFunction:
    """Returns `prefill(params, state, slot, tokens, count, is_last)`, as `make_step`.

    Commits the first `count` of `tokens` `[chunk]` to `slot`, a chain as the
    tree. After the last chunk the slot is active, its root token is sampled, and
    the result holds that token; `num_tokens` is 0 after the others.
    """
    body = partial(_prefill, c=config, dc=draft_config)
    return _compile(body, draft_config, mesh)


def param_specs(params: Params) -> Params:
    """Returns a PartitionSpec for every parameter.

    From the parameters and not from their configuration, since they know in what order
    their experts are.
    """
    draft = None if params.draft is None else partition_specs(params.draft)
    return Params(partition_specs(params.target), draft)


def _compile(body, dc: DraftConfig | None, mesh: Mesh):
    state_specs = jax.tree.map(
        partition_spec,
        state_axes(with_draft=dc is not None),
        is_leaf=lambda axes: type(axes) is tuple,
    )
    everywhere = PartitionSpec()

    def mapped(params: Params, state: SpecState, *inputs: Array):
        specs = param_specs(params)
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, state_specs, *[everywhere] * len(inputs)),
            out_specs=(state_specs, everywhere),
            check_vma=False,
        )
        return run(params, state, *inputs)

    return jax.jit(mapped, donate_argnums=1)


def _step(
    params: Params,
    state: SpecState,
    *,
    c: ModelConfig,
    dc: DraftConfig | None,
    num_nodes: int,
    build_tree: TreeBuilder,
) -> tuple[SpecState, StepResult]:
    horizon = dc.draft_horizon if dc is not None and num_nodes > 1 else 0
    tree, misdrafted = _draft_tree(params, state, dc, num_nodes, build_tree=build_tree)
    with jax.named_scope("verify"):
        out = _verify(params, state, tree, c, dc, max_depth=horizon)
        logits = head_logits(params.target.head[...], out.hidden)
    with jax.named_scope("accept"):
        # The token after a node at depth d stands at context_len + d + 1.
        position = state.context_len[:, None] + tree.depth + 1
        choice = choose(logits, position, state.sampling)
        room = state.max_context_len - state.context_len
        accepted = walk(tree, choice, room, horizon=horizon)
        path = accepted.accepted_path
        bad = jnp.take_along_axis(_non_finite(logits), path, axis=1)
        status = _status(state.active, room, jnp.any(bad, axis=1), misdrafted)
        num_tokens = jnp.where(
            status == StepStatus.OK, accepted.num_accepted + 1, 0
        ).astype(jnp.int32)
    with jax.named_scope("commit"):
        rows = LatentCache(
            *(jnp.take_along_axis(a, path[None, ..., None], axis=2) for a in out.tail)
        )
        features = jnp.take_along_axis(out.features, path[..., None, None], axis=1)
        state = _commit(
            params,
            state,
            dc,
            rows,
            features,
            page_table=state.page_table,
            start=state.context_len,
            count=num_tokens,
        )
        last = jnp.maximum(num_tokens - 1, 0)[:, None]
        bonus = jnp.take_along_axis(accepted.tokens, last, axis=1)[:, 0]
        state = state._replace(
            context_len=state.context_len + num_tokens,
            root_token=jnp.where(num_tokens > 0, bonus, state.root_token),
        )
    return state, StepResult(accepted.tokens, num_tokens, status)


def _draft_tree(
    params: Params,
    state: SpecState,
    dc: DraftConfig | None,
    num_nodes: int,
    *,
    build_tree: TreeBuilder,
) -> tuple[DraftTree, Bool[Array, "B"]]:
    """Returns the trees, and for which slots the drafter's logits are not finite."""
    draft, draft_cache = params.draft, state.draft_cache
    if num_nodes == 1 or dc is None or draft is None or draft_cache is None:
        lone = chain(state.root_token[:, None], jnp.ones_like(state.root_token))
        return lone, jnp.zeros_like(state.active)
    with jax.named_scope("draft"):
        hidden = draft_hidden(
            draft,
            dc,
            params.target.embed[...],
            root_token=state.root_token,
            cache=draft_cache,
            page_table=state.page_table,
            context_len=state.context_len,
        )
        logits = head_logits(params.target.head[...], hidden)
        log_probs, token_ids = top_log_probs(logits, num_nodes - 1)
    with jax.named_scope("build"):
        # An idle slot is a lone root, so that it costs no expert weights.
        budget = jnp.where(state.active, state.tree_budget, 0)
        # One NaN spoils the sum that every log-probability of its row contains.
        misdrafted = jnp.any(~jnp.isfinite(log_probs[..., 0]), axis=1) & (budget > 0)
        tree = build_tree(
            log_probs, token_ids, state.root_token, budget, num_nodes=num_nodes
        )
    return tree, misdrafted


def _verify(
    params: Params,
    state: SpecState,
    tree: DraftTree,
    c: ModelConfig,
    dc: DraftConfig | None,
    *,
    max_depth: int,
) -> Output:
    return forward(
        params.target,
        c,
        tokens=tree.tokens,
        positions=state.context_len[:, None] + tree.depth,
        ancestor_bits=pack_bits(ancestor_mask(tree.parent, max_depth=max_depth)),
        used=tree.used & state.active[:, None],
        cache=state.cache,
        page_table=state.page_table,
        context_len=state.context_len,
        feature_layers=_feature_layers(dc),
    )


def _prefill(
    params: Params,
    state: SpecState,
    slot: I32[Array, ""],
    tokens: I32[Array, "chunk"],
    count: I32[Array, ""],
    is_last: Bool[Array, ""],
    *,
    c: ModelConfig,
    dc: DraftConfig | None,
) -> tuple[SpecState, StepResult]:
    def of_slot(array: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, slot, 1)

    start = of_slot(state.context_len)
    tree = chain(tokens[None], count[None])
    with jax.named_scope("verify"):
        out = forward(
            params.target,
            c,
            tokens=tree.tokens,
            positions=start[:, None] + tree.depth,
            ancestor_bits=chain_bits(1, tokens.shape[0]),
            used=tree.used,
            cache=state.cache,
            page_table=of_slot(state.page_table),
            context_len=start,
            feature_layers=_feature_layers(dc),
        )
    with jax.named_scope("accept"):
        last = jax.lax.dynamic_slice_in_dim(out.hidden, count - 1, 1, axis=1)
        logits = head_logits(params.target.head[...], last)
        sampling = Sampling(*map(of_slot, state.sampling))
        choice = choose(logits, (start + count)[:, None], sampling)
        # Without room for the whole chunk nothing of it is committed.
        room = of_slot(state.max_context_len) - start - (count - 1)
        always = jnp.ones(1, bool)
        status = _status(always, room, _non_finite(logits)[:, 0], ~always)
        ok = status == StepStatus.OK
    with jax.named_scope("commit"):
        written = jnp.where(ok, count, 0).astype(jnp.int32)
        state = _commit(
            params,
            state,
            dc,
            out.tail,
            out.features,
            page_table=of_slot(state.page_table),
            start=start,
            count=written,
        )
        state = state._replace(
            context_len=state.context_len.at[slot].add(written[0]),
            root_token=state.root_token.at[slot].set(choice[0, 0]),
            active=state.active.at[slot].set(is_last & ok[0]),
        )
    num_tokens = (ok & is_last).astype(jnp.int32)
    return state, StepResult(choice, num_tokens, status)


def _feature_layers(dc: DraftConfig | None) -> tuple[int, ...]:
    return () if dc is None else dc.target_layer_ids


def _non_finite(logits: Float[Array, "B N V_local"]) -> Bool[Array, "B N"]:
    bad = jnp.sum(~jnp.isfinite(logits), axis=-1, dtype=jnp.int32)
    return jax.lax.psum(bad, TENSOR) > 0


def _status(
    active: Array, room: Array, non_finite: Array, misdrafted: Array
) -> I32[Array, "B"]:
    """Returns a StepStatus a slot; the first reason of its declaration order wins."""
    status = jnp.where(misdrafted, StepStatus.DRAFT_NON_FINITE, StepStatus.OK)
    status = jnp.where(room < 1, StepStatus.NO_ROOM, status)
    status = jnp.where(non_finite, StepStatus.NON_FINITE, status)
    return jnp.where(active, status, StepStatus.IDLE).astype(jnp.int32)


def _commit(
    params: Params,
    state: SpecState,
    dc: DraftConfig | None,
    rows: LatentCache,
    features: Float[Array, "B T F M"],
    *,
    page_table: I32[Array, "B P"],
    start: I32[Array, "B"],
    count: I32[Array, "B"],
) -> SpecState:
    """Returns the state with the first `count` rows in the pages of both models."""
    cache = commit_rows(state.cache, rows, page_table, start, count)
    draft_cache = state.draft_cache
    if dc is not None and params.draft is not None and draft_cache is not None:
        positions = start[:, None] + jnp.arange(features.shape[1])[None]
        draft_rows = context_rows(params.draft, dc, features, positions)
        draft_cache = commit_rows(draft_cache, draft_rows, page_table, start, count)
    return state._replace(cache=cache, draft_cache=draft_cache)
