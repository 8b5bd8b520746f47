"""Owns how good the drafter is at each position, along the target's own greedy text.

The drafter is asked at every token of the text, not only where a step would start, so
its positions are compared on the same text whatever is accepted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ddtree_jax.arrays import F32, I32, Array, along_last
from ddtree_jax.errors import EngineError
from ddtree_jax.mesh import TENSOR
from ddtree_jax.model.draft import draft_hidden
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.transformer import forward
from ddtree_jax.research.decode import Decoder
from ddtree_jax.research.shapes import Shape, step_of
from ddtree_jax.spec import Params, SpecState, param_specs
from ddtree_jax.spec.tree import chain, chain_bits

DEFINITION = (
    "slot j predicts the j-th token after the known one; accuracy_at_k = share of "
    "tokens among its k most probable; survival = share of drafts whose slots 1 .. j "
    "are all right, so a chain that starts at any token emits 1 + Σ survival on "
    "average; target_entropy_bits = of the target's own distribution of those tokens"
)

_LOG2E = float(np.log2(np.e))


class Probe(NamedTuple):
    """What both models say at one token of each slot's text.

    Attributes:
      cross_entropy: Of each drafted position, in nats.
      rank: Tokens that the drafter holds more probable than the true one.
      entropy: Of the target's distribution of the next token, in nats.
    """

    cross_entropy: F32[Array, "B D"]
    rank: I32[Array, "B D"]
    entropy: F32[Array, "B"]


def make_probe(decoder: Decoder) -> Callable[..., Probe]:
    """Returns `probe(params, state, future)`, jitted; the state stays as it is.

    `future` holds the D tokens after the root token.
    """
    c, dc, _, mesh, *_ = decoder.models

    def body(params: Params, state: SpecState, future: I32[Array, "B D"]) -> Probe:
        draft, draft_cache = params.draft, state.draft_cache
        assert draft is not None and draft_cache is not None, "Models has a drafter"
        place = {"page_table": state.page_table, "context_len": state.context_len}
        hidden = draft_hidden(
            draft,
            dc,
            params.target.embed[...],
            root_token=state.root_token,
            cache=draft_cache,
            **place,
        )
        head = params.target.head[...]
        root = chain(state.root_token[:, None], jnp.ones_like(state.root_token))
        out = forward(
            params.target,
            c,
            tokens=root.tokens,
            positions=state.context_len[:, None],
            ancestor_bits=chain_bits(root.tokens.shape[0], 1),
            used=root.used & state.active[:, None],
            cache=state.cache,
            feature_layers=(),
            **place,
        )
        loss, rank = _against(head_logits(head, hidden), future)
        return Probe(loss, rank, _entropy(head_logits(head, out.hidden))[:, 0])

    state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, decoder.abstract)
    everywhere = PartitionSpec()

    def mapped(params: Params, state: SpecState, future: Array):
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(param_specs(params), state_specs, everywhere),
            out_specs=everywhere,
            check_vma=False,
        )
        return run(params, state, future)

    return jax.jit(mapped)


def _log_total(logits: F32[Array, "B N V_local"]) -> F32[Array, "B N 1"]:
    local = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    whole = jax.lax.all_gather(local, TENSOR, axis=2, tiled=True)
    return jax.nn.logsumexp(whole, axis=-1, keepdims=True)


def _against(
    logits: F32[Array, "B D V_local"], future: I32[Array, "B D"]
) -> tuple[F32[Array, "B D"], I32[Array, "B D"]]:
    """Returns the cross-entropy and the rank of the true tokens; collective."""
    v_local = logits.shape[-1]
    first = jax.lax.axis_index(TENSOR) * v_local
    ids = along_last(first + jnp.arange(v_local, dtype=jnp.int32), 3)
    future = future[..., None]
    true = jnp.sum(jnp.where(ids == future, logits, 0), axis=-1, keepdims=True)
    true = jax.lax.psum(true, TENSOR)
    # Of equals the smaller id comes first, as in top_log_probs.
    ahead = (logits > true) | ((logits == true) & (ids < future))
    rank = jax.lax.psum(jnp.sum(ahead, axis=-1, dtype=jnp.int32), TENSOR)
    return (_log_total(logits) - true)[..., 0], rank


def _entropy(logits: F32[Array, "B N V_local"]) -> F32[Array, "B N"]:
    log_p = logits - _log_total(logits)
    return jax.lax.psum(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1), TENSOR)


def measure_slots(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    case: dict[str, Any],
    on_answer: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Returns one row a drafted position; see DEFINITION."""
    plain = step_of(decoder.models, Shape("plain", 0))
    answers = decoder.answers(
        plain, prompts, budget=0, temperature=0.0, max_tokens=max_tokens
    )
    texts = [a.tokens[:max_tokens] for a in answers]
    horizon = decoder.models.draft_config.draft_horizon
    if max(map(len, texts)) <= horizon:
        raise EngineError(f"no text is longer than a draft, {horizon}: --max-tokens")
    probe = make_probe(decoder)
    parts: list[tuple[np.ndarray, ...]] = []
    for begin in range(0, len(prompts), decoder.slots):
        group = slice(begin, begin + decoder.slots)
        parts += _walk(decoder, plain, probe, prompts[group], texts[group])
        for _ in prompts[group]:
            if on_answer is not None:
                on_answer()
    loss, rank, entropy, known = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    return _rows(loss, rank, entropy, known, case)


def _walk(decoder: Decoder, plain, probe, prompts, texts):
    """Yields loss, rank, entropy and validity, each `[token, D]`, of each prompt."""
    horizon = decoder.models.draft_config.draft_horizon
    # One column more than the text: what is asked beyond its end is masked out.
    length = max(map(len, texts))
    padded = np.zeros((decoder.slots, length + horizon), np.int32)
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        padded[slot, : len(text)] = text
        decoder.start(slot, prompt, budget=0, temperature=0.0, seed=0)
    seen = []
    for i in range(length - 1):
        future = padded[:, i + 1 : i + 1 + horizon]
        seen.append(
            jax.device_get(
                probe(decoder.models.params, decoder.state, jnp.asarray(future))
            )
        )
        decoder.step(plain)
    for slot, text in enumerate(texts):
        decoder.stop(slot)
        count = len(text) - 1
        if not count:
            continue
        loss = np.stack([p.cross_entropy[slot] for p in seen[:count]])
        rank = np.stack([p.rank[slot] for p in seen[:count]])
        entropy = np.full(count + horizon, np.nan, np.float32)
        entropy[:count] = [p.entropy[slot] for p in seen[:count]]
        # Entry i is of token i + 1; slot j of draft i is of token i + 1 + j.
        place = np.arange(count)[:, None] + np.arange(horizon)[None]
        yield loss, rank, entropy[place], place < count


def _rows(loss, rank, entropy, known, case) -> list[dict[str, Any]]:
    right = np.logical_and.accumulate((rank == 0) & known, axis=1)
    # A draft counts for survival only where all its positions lie in the text.
    whole = known[:, -1]
    rows = []
    for j in range(loss.shape[1]):
        at = known[:, j]
        rows.append(
            {
                "case": {**case, "slot": j + 1},
                "accuracy_at_1": float((rank[at, j] < 1).mean()),
                "accuracy_at_8": float((rank[at, j] < 8).mean()),
                "cross_entropy_bits": float(loss[at, j].mean() * _LOG2E),
                "target_entropy_bits": float(entropy[at, j].mean() * _LOG2E),
                "survival": float(right[whole, j].mean()),
                "tokens": int(at.sum()),
            }
        )
    return rows
