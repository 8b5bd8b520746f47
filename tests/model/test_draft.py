"""The drafter against PyPI `dflash`, with both YaRN amplitudes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ddtree_jax.mesh import partition_spec
from ddtree_jax.model.cache import (
    DRAFT_AXES,
    DraftCache,
    abstract_draft_cache,
    commit_rows,
)
from ddtree_jax.model.draft import context_rows, draft_hidden
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.params import DFlash, partition_specs
from tests.support.compare import assert_close
from tests.support.models import PAGE_SIZE

CACHE_SPEC = DraftCache(*map(partition_spec, DRAFT_AXES))


def run_round(tiny, config, cache, *, features, start, count, root_token):
    """Absorbs features of the tokens before `start`, then drafts from there."""

    def body(draft, embedding, head, cache, features, first, root_token):
        positions = first[:, None] + jnp.arange(features.shape[1])[None]
        rows = context_rows(draft, config, features, positions)
        n = jnp.full(1, features.shape[1], jnp.int32)
        cache = commit_rows(cache, rows, table, first, n)
        hidden = draft_hidden(
            draft,
            config,
            embedding,
            root_token=root_token,
            cache=cache,
            page_table=table,
            context_len=first + n,
        )
        return head_logits(head, hidden), cache

    table = jnp.asarray([[1, 0, 2]], jnp.int32)
    mapped = jax.shard_map(
        body,
        mesh=tiny.mesh,
        in_specs=(
            partition_specs(DFlash(config)),
            P("tensor"),
            P("tensor"),
            CACHE_SPEC,
            P(),
            P(),
            P(),
        ),
        out_specs=(P(None, None, "tensor"), CACHE_SPEC),
        check_vma=False,
    )
    target = tiny.params.target
    return jax.jit(mapped)(
        tiny.params.draft,
        target.embed[...],
        target.head[...],
        cache,
        jnp.asarray(features)[None],
        jnp.asarray([start - count], jnp.int32),
        jnp.asarray([root_token], jnp.int32),
    )


@pytest.mark.parametrize("amplitude", ["plain", "scaled"])
def test_two_rounds_equal_dflash(tiny, golden, amplitude):
    data = golden("dflash")
    config = dataclasses.replace(
        tiny.draft_config, rope_amplitude=float(data[f"{amplitude}_amplitude"])
    )
    shapes = abstract_draft_cache(
        config, num_pages=2, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    cache = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)
    features = data["features"].reshape(14, 3, -1)
    begin = 0
    for index, start in enumerate(data["starts"].tolist()):
        block = data["block_ids"][index]
        assert (block[1:] == config.mask_token_id).all()
        logits, cache = run_round(
            tiny,
            config,
            cache,
            features=features[begin:start],
            start=start,
            count=start - begin,
            root_token=block[0],
        )
        want = data[f"{amplitude}_logits"][index]
        assert_close("golden draft", logits[0], want)
        begin = start
    # Page 1 holds tokens 0 .. 15; only 14 of its rows are written.
    for pages, name in zip(cache, ("keys", "values"), strict=True):
        rows = np.asarray(pages)[:, 1].transpose(0, 2, 1, 3)
        assert_close("golden draft", rows[:, :, :14], data[f"{amplitude}_{name}"])
        assert np.isnan(rows[:, :, 14:]).all()
        assert np.isnan(np.asarray(pages)[:, 0]).all()
