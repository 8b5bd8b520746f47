"""Owns the small models' tensors: names, shapes and random values, as on disk.

Names and shapes are those of Kimi K2.6 and of its DFlash drafter. Values depend
on the seed and on the tensor's own name, so adding one does not change another.
"""

import zlib
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from tiny.forms import Json

GROUP_SIZE = 32

type Tensors = dict[str, np.ndarray]
type Entry = tuple[str, tuple[int, ...], Callable[..., Tensors]]


def target_shards(config: Json, seed: int) -> Iterator[Tensors]:
    """Yields each file's tensors: one file a layer, then embedding, head and norm."""
    text = config["text_config"]
    for layer in range(text["num_hidden_layers"]):
        yield _draw(_target_layer(text, layer), seed)
    vocabulary = (text["vocab_size"], text["hidden_size"])
    yield _draw(
        [
            ("language_model.model.embed_tokens.weight", vocabulary, _matrix),
            ("language_model.model.norm.weight", vocabulary[1:], _norm),
            ("language_model.lm_head.weight", vocabulary, _matrix),
        ],
        seed,
    )


def draft_tensors(c: Json, seed: int) -> Tensors:
    """Returns the drafter's tensors; embedding and head are the target's."""
    hidden, head_dim = c["hidden_size"], c["head_dim"]
    features = len(c["dflash_config"]["target_layer_ids"])
    q_width = c["num_attention_heads"] * head_dim
    kv_width = c["num_key_value_heads"] * head_dim
    entries: list[Entry] = [
        ("fc.weight", (hidden, features * hidden), _matrix),
        ("hidden_norm.weight", (hidden,), _norm),
        ("norm.weight", (hidden,), _norm),
    ]
    for layer in range(c["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        attention = prefix + "self_attn."
        entries += [
            *_block_norms(prefix, hidden),
            (attention + "q_proj.weight", (q_width, hidden), _matrix),
            (attention + "k_proj.weight", (kv_width, hidden), _matrix),
            (attention + "v_proj.weight", (kv_width, hidden), _matrix),
            (attention + "o_proj.weight", (hidden, q_width), _matrix),
            (attention + "q_norm.weight", (head_dim,), _norm),
            (attention + "k_norm.weight", (head_dim,), _norm),
            *_mlp(prefix + "mlp.", hidden, c["intermediate_size"], _matrix),
        ]
    return _draw(entries, seed)


def _target_layer(c: Json, layer: int) -> list[Entry]:
    prefix = f"language_model.model.layers.{layer}."
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    entries = [
        *_block_norms(prefix, hidden),
        *_mla(prefix + "self_attn.", c),
    ]
    mlp = prefix + "mlp."
    if layer < c["first_k_dense_replace"]:
        return entries + _mlp(mlp, hidden, c["intermediate_size"], _matrix)
    experts = c["n_routed_experts"]
    shared = inner * c["n_shared_experts"]
    entries += [
        (mlp + "gate.weight", (experts, hidden), _matrix),
        (mlp + "gate.e_score_correction_bias", (experts,), _router_bias),
        *_mlp(mlp + "shared_experts.", hidden, shared, _matrix),
    ]
    for expert in range(experts):
        entries += _mlp(f"{mlp}experts.{expert}.", hidden, inner, _int4)
    return entries


def _mla(prefix: str, c: Json) -> list[Entry]:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    q_rank, latent = c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return [
        (prefix + "q_a_proj.weight", (q_rank, hidden), _matrix),
        (prefix + "q_a_layernorm.weight", (q_rank,), _norm),
        (prefix + "q_b_proj.weight", (heads * (nope + rope), q_rank), _matrix),
        (prefix + "kv_a_proj_with_mqa.weight", (latent + rope, hidden), _matrix),
        (prefix + "kv_a_layernorm.weight", (latent,), _norm),
        (prefix + "kv_b_proj.weight", (heads * (nope + v), latent), _matrix),
        (prefix + "o_proj.weight", (hidden, heads * v), _matrix),
    ]


def _block_norms(prefix: str, hidden: int) -> list[Entry]:
    return [
        (prefix + "input_layernorm.weight", (hidden,), _norm),
        (prefix + "post_attention_layernorm.weight", (hidden,), _norm),
    ]


def _mlp(
    prefix: str, hidden: int, inner: int, kind: Callable[..., Tensors]
) -> list[Entry]:
    return [
        (prefix + "gate_proj.weight", (inner, hidden), kind),
        (prefix + "up_proj.weight", (inner, hidden), kind),
        (prefix + "down_proj.weight", (hidden, inner), kind),
    ]


def _draw(entries: list[Entry], seed: int) -> Tensors:
    tensors: Tensors = {}
    for name, shape, kind in entries:
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())])
        tensors |= kind(name, noise.standard_normal(shape, dtype=np.float32))
    return tensors


def _matrix(name: str, noise: np.ndarray) -> Tensors:
    # 1 / sqrt(inputs) keeps activations and logits of order one, at any size.
    scaled = noise / np.sqrt(np.float32(noise.shape[-1]))
    return {name: scaled.astype(ml_dtypes.bfloat16)}


def _norm(name: str, noise: np.ndarray) -> Tensors:
    # Not all ones, so that a norm left out or taken for another shows.
    return {name: (1 + np.float32(0.1) * noise).astype(ml_dtypes.bfloat16)}


def _router_bias(name: str, noise: np.ndarray) -> Tensors:
    return {name: np.float32(0.1) * noise}


def _int4(name: str, noise: np.ndarray) -> Tensors:
    [(name, weight)] = _matrix(name, noise).items()
    packed, scale = quantise(weight)
    return {
        name + "_packed": packed,
        name + "_scale": scale,
        name + "_shape": np.array(weight.shape, np.int32),
    }


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed INT4 words and scales of a bfloat16 `[out, in]` matrix.

    Each group of 32 inputs has the scale max |w| / 7.5; q = w / scale to the
    nearest of -8 .. 7. Eight nibbles q + 8 a word, lowest nibble = lowest input.
    """
    groups = weight.astype(np.float32).reshape(len(weight), -1, GROUP_SIZE)
    amax = np.abs(groups).max(axis=-1)
    scale = (amax / np.float32(7.5)).astype(ml_dtypes.bfloat16)
    q = np.rint(groups / scale.astype(np.float32)[..., None]).clip(-8, 7)
    nibbles = (q.reshape(weight.shape) + 8).astype(np.uint8)
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return pairs.view("<i4"), scale
