"""Owns the target's forward pass in training: whole sequences, no cache, one device.

The same function of the same parameters as `ddtree_jax.model.transformer.forward`,
with keys and values expanded and every expert computed for every token.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array, Bool, Float
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.layers import rms_norm
from ddtree_jax.model.moe import route
from ddtree_jax.model.rope import cos_sin, rotate_interleaved, yarn_inv_freq
from tiny.train.parameters import Params, layer

type Attention = Literal["cudnn", "xla"]


class Output(NamedTuple):
    """What a forward pass yields.

    Attributes:
      hidden: After the final norm, ready for the head.
      features: Residual stream after each feature layer.
      load: Tokens that each expert of each MoE layer got.
    """

    hidden: Float[Array, "B T M"]
    features: Float[Array, "B T F M"]
    load: F32[Array, "layers E"]


class Rows(NamedTuple):
    """One layer's queries, and the rows that a cache would keep."""

    q_nope: Float[Array, "B T H nope"]
    q_rope: Float[Array, "B T H R"]
    latent: Float[Array, "B T L"]
    rope: Float[Array, "B T R"]


def forward(
    params: Params,
    c: ModelConfig,
    tokens: I32[Array, "B T"],
    *,
    feature_layers: tuple[int, ...] = (),
    attention: Attention = "xla",
) -> Output:
    """Returns hidden states, features and expert loads of whole sequences."""
    rotation = target_rotation(c, jnp.arange(tokens.shape[1])[None])
    x = params["embed"][tokens]
    features, loads = {}, []
    for index in range(c.num_hidden_layers):
        p = target_layer(params, c, index)
        rows = query_rows(x, p, c, rotation)
        x += attend(rows, p, c, attention)
        x, load = feed_forward(x, p, c)
        loads += [] if load is None else [load]
        features[index] = x
    hidden = rms_norm(x, params["norm"], c.rms_norm_eps)
    chosen = [features[index] for index in feature_layers]
    stacked = jnp.stack(chosen, axis=2) if chosen else x[:, :, None][:, :, :0]
    return Output(hidden, stacked, jnp.stack(loads))


def target_layer(params: Params, c: ModelConfig, index: int) -> Params:
    """Returns the parameters of the layer `index`, counted over both kinds."""
    dense = c.first_k_dense_replace
    if index < dense:
        return layer(params, "dense/", index)
    return layer(params, "moe/", index - dense)


def target_rotation(c: ModelConfig, positions: I32[Array, "B T"]):
    """Returns cos and sin of the rope width."""
    inv_freq = yarn_inv_freq(c.rope, c.qk_rope_head_dim)
    return cos_sin(positions, inv_freq, c.rope.amplitude)


def query_rows(x: Float[Array, "B T M"], p: Params, c: ModelConfig, rotation) -> Rows:
    """Returns what attention needs of its input."""
    cos, sin = rotation
    h = rms_norm(x, p["attention/input_norm"], c.rms_norm_eps)
    low = jnp.einsum("btm,qm->btq", h, p["attention/q_a"])
    low = rms_norm(low, p["attention/q_a_norm"], c.latent_norm_eps)
    query = jnp.einsum("btq,hdq->bthd", low, p["attention/q_b"])
    q_nope, q_rope = jnp.split(query, [c.qk_nope_head_dim], axis=-1)
    latent, rope = jnp.split(
        jnp.einsum("btm,lm->btl", h, p["attention/kv_a"]), [c.kv_lora_rank], axis=-1
    )
    return Rows(
        q_nope,
        rotate_interleaved(q_rope, cos[:, :, None], sin[:, :, None]),
        rms_norm(latent, p["attention/kv_a_norm"], c.latent_norm_eps),
        rotate_interleaved(rope, cos, sin),
    )


def attend(
    rows: Rows, p: Params, c: ModelConfig, implementation: Attention
) -> Float[Array, "B T M"]:
    """Returns causal attention with the latents expanded to keys and values."""
    k_nope = jnp.einsum("btl,hdl->bthd", rows.latent, p["attention/k_up"])
    value = jnp.einsum("btl,hdl->bthd", rows.latent, p["attention/v_up"])
    shared = jnp.broadcast_to(rows.rope[:, :, None], rows.q_rope.shape)
    query = jnp.concatenate([rows.q_nope, rows.q_rope], axis=-1)
    # The library wants values as wide as keys.
    padding = c.qk_head_dim - c.v_head_dim
    mixed = jax.nn.dot_product_attention(
        query,
        jnp.concatenate([k_nope, shared], axis=-1),
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, padding))),
        scale=c.softmax_scale,
        is_causal=True,
        implementation=implementation,
    )
    mixed = mixed[..., : c.v_head_dim]
    return jnp.einsum("bthd,mhd->btm", mixed, p["attention/o"])


def choose_attention(c: ModelConfig) -> Attention:
    """Returns cuDNN's attention where it runs, and says so where it does not."""
    if jax.default_backend() != "gpu":
        return "xla"
    head = jnp.ones((1, 128, c.num_attention_heads, c.qk_head_dim), jnp.bfloat16)

    def total(query):
        mixed = jax.nn.dot_product_attention(
            query, head, head, is_causal=True, implementation="cudnn"
        )
        return jnp.sum(mixed.astype(jnp.float32))

    try:
        jax.block_until_ready(jax.jit(jax.grad(total))(head))
    except Exception as error:  # Whatever cuDNN, XLA or JAX says about it.
        reason = str(error).partition("\n")[0]
        print(f"attention through XLA, since cuDNN's does not run: {reason}")
        return "xla"
    return "cudnn"


def feed_forward(
    x: Float[Array, "B T M"], p: Params, c: ModelConfig
) -> tuple[Float[Array, "B T M"], F32[Array, "E"] | None]:
    """Returns the stream after the layer's second half, and its experts' loads."""
    h = rms_norm(x, p["post_norm"], c.rms_norm_eps)
    if "router" not in p:
        return x + swiglu(h, p, "mlp/"), None
    tokens = h.reshape(-1, h.shape[-1])
    ids, chosen = route(tokens, p["router"], p["router_bias"], c)
    picked = jax.nn.one_hot(ids, c.n_routed_experts, dtype=jnp.float32)
    weights = jnp.sum(picked * chosen[..., None], axis=1)
    gate = jnp.einsum("tm,eim->tei", tokens, p["experts/gate"])
    up = jnp.einsum("tm,eim->tei", tokens, p["experts/up"])
    inner = jax.nn.silu(gate) * up * weights.astype(h.dtype)[..., None]
    routed = jnp.einsum("tei,emi->tm", inner, p["experts/down"])
    x = x + routed.reshape(x.shape) + swiglu(h, p, "shared/")
    return x, jnp.sum(picked, axis=(0, 1))


def swiglu(h: Float[Array, "B T M"], p: Params, prefix: str) -> Float[Array, "B T M"]:
    """Returns down(silu(gate h) · up h)."""
    gate = jnp.einsum("btm,im->bti", h, p[f"{prefix}gate"])
    up = jnp.einsum("btm,im->bti", h, p[f"{prefix}up"])
    return jnp.einsum("bti,mi->btm", jax.nn.silu(gate) * up, p[f"{prefix}down"])


class Losses(NamedTuple):
    """How well the labels were foreseen.

    Attributes:
      nll: Minus the logarithm of each label's probability.
      divisor: Logarithm of each softmax's divisor.
      right: Whether the label is the most probable token.
    """

    nll: F32[Array, "B T"]
    divisor: F32[Array, "B T"]
    right: Bool[Array, "B T"]


def token_losses(
    head: Float[Array, "V M"],
    hidden: Float[Array, "B T M"],
    labels: I32[Array, "B T"],
) -> Losses:
    """Returns the losses of labels under the head's softmax."""
    logits = jnp.einsum("btm,vm->btv", hidden, head).astype(jnp.float32)
    divisor = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return Losses(divisor - chosen, divisor, jnp.argmax(logits, axis=-1) == labels)
