"""The golden models on a mesh, and small ways to run parts of them."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.model.cache import (
    LatentCache,
    abstract_latent_cache,
    commit_rows,
)
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.params import partition_specs
from ddtree_jax.model.restore import restore_draft, restore_target
from ddtree_jax.model.transformer import forward
from ddtree_jax.spec import (
    Assignment,
    Params,
    SpecState,
    abstract_state,
    assign,
    init_state,
    make_prefill,
    make_step,
)
from ddtree_jax.spec.tree import chain_bits

PAGE_SIZE = 16


class Tiny(NamedTuple):
    """Both models and where they live."""

    config: ModelConfig
    draft_config: DraftConfig
    params: Params
    mesh: Mesh


def load_tiny(checkpoint: Path, mesh: Mesh) -> Tiny:
    """Returns the models of a checkpoint in float32."""
    config, target = restore_target(checkpoint, mesh, dtype=jnp.float32)
    draft_config, draft = restore_draft(checkpoint / "draft", mesh, dtype=jnp.float32)
    return Tiny(config, draft_config, Params(target, draft), mesh)


class ForwardResult(NamedTuple):
    """One forward pass of one request, whole vocabulary."""

    logits: jax.Array
    hidden: jax.Array
    features: jax.Array
    cache: LatentCache


def make_forward(tiny: Tiny, feature_layers: tuple[int, ...]):
    """Returns `run(cache, page_table, context_len, tokens)`, which also commits."""
    c = tiny.config

    def body(target, cache, page_table, context_len, tokens):
        n = tokens.shape[1]
        out = forward(
            target,
            c,
            tokens=tokens,
            positions=context_len[:, None] + jnp.arange(n)[None],
            ancestor_bits=chain_bits(1, n),
            used=jnp.ones(tokens.shape, bool),
            cache=cache,
            page_table=page_table,
            context_len=context_len,
            feature_layers=feature_layers,
        )
        logits = head_logits(target.head[...], out.hidden)
        count = jnp.full(1, n, jnp.int32)
        committed = commit_rows(cache, out.tail, page_table, context_len, count)
        return ForwardResult(logits, out.hidden, out.features, committed)

    mapped = jax.shard_map(
        body,
        mesh=tiny.mesh,
        in_specs=(partition_specs(tiny.params.target), P(), P(), P(), P()),
        out_specs=ForwardResult(P(None, None, "tensor"), P(), P(), P()),
        check_vma=False,
    )
    return functools.partial(jax.jit(mapped), tiny.params.target)


def poisoned_cache(
    c: ModelConfig, num_pages: int, dtype: DTypeLike = jnp.float32
) -> LatentCache:
    """Returns pages full of NaN: whatever is read before it is written shows."""
    shapes = abstract_latent_cache(
        c, num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype
    )
    return jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)


def run_in_chunks(
    tiny: Tiny,
    ids: np.ndarray,
    chunk_sizes: list[int],
    feature_layers: tuple[int, ...] = (),
    dtype: DTypeLike = jnp.float32,
) -> ForwardResult:
    """Returns the passes over consecutive chunks of `ids`, put together.

    Args:
      dtype: Of the parameters, and so of the cache.
    """
    run = make_forward(tiny, feature_layers)
    pages = -(-len(ids) // PAGE_SIZE)
    # Pages out of order, and an id that no page has behind the last.
    table = jnp.asarray([[*np.arange(pages)[::-1], pages]], jnp.int32)
    cache = poisoned_cache(tiny.config, pages, dtype)
    done, parts = 0, []
    for size in chunk_sizes:
        tokens = jnp.asarray(ids[None, done : done + size], jnp.int32)
        result = run(cache, table, jnp.asarray([done], jnp.int32), tokens)
        cache, done = result.cache, done + size
        parts.append(result)
    assert done == len(ids)
    joined = [
        np.concatenate(a, axis=1) for a in zip(*[p[:3] for p in parts], strict=True)
    ]
    return ForwardResult(*joined, cache)


class Decoder:
    """Slots of a poisoned state and the compiled functions that change them."""

    def __init__(
        self,
        tiny: Tiny,
        *,
        num_nodes: int,
        slots: int = 4,
        pages_per_slot: int = 10,
        chunk: int = 32,
    ):
        self.tiny, self.num_nodes, self.chunk = tiny, num_nodes, chunk
        self.pages_per_slot = pages_per_slot
        self.num_pages = slots * pages_per_slot
        self.abstract = abstract_state(
            tiny.config,
            tiny.draft_config,
            tiny.mesh,
            slots=slots,
            pages_per_slot=pages_per_slot,
            num_pages=self.num_pages,
            page_size=PAGE_SIZE,
            dtype=jnp.float32,
        )
        self.state = poison(init_state(self.abstract))
        self.step_function = _step(tiny.config, tiny.draft_config, tiny.mesh, num_nodes)
        self._prefill = _prefill(tiny.config, tiny.draft_config, tiny.mesh)

    def start(
        self,
        slot: int,
        prompt: np.ndarray,
        *,
        max_rows: int | None = None,
        tree_budget: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> int:
        """Prefills `prompt` into `slot`; returns the first token of the answer."""
        # Slots' pages interleave, so a wrong table shows.
        slots = self.num_pages // self.pages_per_slot
        pages = slot + slots * np.arange(self.pages_per_slot, dtype=np.int32)
        rows = self.pages_per_slot * PAGE_SIZE if max_rows is None else max_rows
        used = -(-rows // PAGE_SIZE)
        pages[used:] = self.num_pages
        budget = self.num_nodes - 1 if tree_budget is None else tree_budget
        assignment = Assignment(
            pages,
            np.int32(rows),
            np.int32(budget),
            np.float32(temperature),
            np.int32(top_k),
            np.float32(top_p),
            np.float32(min_p),
            np.uint32(seed),
        )
        self.state = _assign(self.state, np.int32(slot), assignment)
        for begin in range(0, len(prompt), self.chunk):
            tokens = np.full(self.chunk, -7, np.int32)
            part = prompt[begin : begin + self.chunk]
            tokens[: len(part)] = part
            is_last = begin + self.chunk >= len(prompt)
            self.state, result = self._prefill(
                self.tiny.params,
                self.state,
                np.int32(slot),
                tokens,
                np.int32(len(part)),
                np.bool_(is_last),
            )
        assert int(result.status[0]) == 0, result
        return int(result.tokens[0, 0])

    def step(self):
        """Runs one step of all slots; returns its result on the host."""
        self.state, result = self.step_function(self.tiny.params, self.state)
        return jax.device_get(result)

    def decode(self, first: dict[int, int], count: int) -> dict[int, list[int]]:
        """Returns `count` tokens of each slot, its first one included."""
        answers = {slot: [token] for slot, token in first.items()}
        while min(map(len, answers.values())) < count:
            result = self.step()
            for slot, answer in answers.items():
                assert result.status[slot] == 0, result
                answer += result.tokens[slot, : result.num_tokens[slot]].tolist()
        return {slot: answer[:count] for slot, answer in answers.items()}


def poison(state: SpecState) -> SpecState:
    """Returns the state with NaN in every page."""

    def fill(pages):
        return jax.tree.map(
            lambda a: jax.device_put(jnp.full_like(a, jnp.nan), a.sharding), pages
        )

    return state._replace(cache=fill(state.cache), draft_cache=fill(state.draft_cache))


_assign = jax.jit(assign, donate_argnums=0)


@functools.cache
def _step(config, draft_config, mesh, num_nodes):
    return make_step(config, draft_config, mesh, num_nodes=num_nodes)


@functools.cache
def _prefill(config, draft_config, mesh):
    return make_prefill(config, draft_config, mesh)
