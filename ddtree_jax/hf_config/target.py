"""Owns the target's config.json: K2, K2-Thinking, K2.5, K2.6 and re-saves."""

from pathlib import Path

from ddtree_jax.config import ModelConfig
from ddtree_jax.hf_config.fields import Fields, Json, config_path, read_json
from ddtree_jax.hf_config.rope import read_yarn

# Hugging Face's modelling code builds q_a_layernorm and kv_a_layernorm with its
# norm class's own epsilon, whatever rms_norm_eps says.
HF_LATENT_NORM_EPS = 1e-6

_NESTED_TYPES = ("kimi_k25",)
_TEXT_TYPES = ("kimi_k2", "deepseek_v3")

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
    "max_position_embeddings",
)

# Keys that would change the arithmetic, with the values that this engine computes.
SUPPORTED: dict[str, tuple[Json, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "n_group": (1,),
    "topk_group": (1,),
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "norm_topk_prob": (True,),
    "moe_layer_freq": (1,),
    "hidden_act": ("silu",),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0,),
    "rope_interleave": (True,),
    "partial_rotary_factor": (None, 1.0),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "layer_types": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "index_topk": (None,),
    "index_n_heads": (None,),
    "index_head_dim": (None,),
}
# Classes of other readers take another value when one of these is absent.
_NEEDED = ("n_group", "topk_group", "norm_topk_prob", "hidden_act")

# Keys without influence on the text model's arithmetic, and why.
UNUSED: dict[str, str] = {
    "_name_or_path": "a label",
    "architectures": "model_type decides",
    "attention_dropout": "training only",
    "auto_map": "remote code is never run",
    "aux_loss_alpha": "training only",
    "dtype": "each tensor states its own",
    "ep_size": "a run-time layout of another engine",
    "head_dim": "MLA states its widths separately",
    "output_attentions": "a run-time option of another library",
    "output_hidden_states": "a run-time option of another library",
    "output_router_logits": "a run-time option of another library",
    "pretraining_tp": "training only",
    "return_dict": "a run-time option of another library",
    "seq_aux": "training only",
    "torch_dtype": "each tensor states its own",
    "transformers_version": "a label",
    "use_cache": "a run-time option of another library",
}


def read_model_config(
    path: Path, *, latent_norm_eps: float | None = None
) -> ModelConfig:
    """Returns the target's configuration from its config.json, nested or flat.

    Args:
      path: The file, or the directory that holds it.
      latent_norm_eps: Replaces Hugging Face's 1e-6 in the two latent norms.

    Raises:
      ConfigError: A key is missing, contradictory or unsupported; it and the
        file are named.
    """
    top = read_json(config_path(path))
    text = text_fields(top)
    for key in _NEEDED:
        if key not in text:
            raise text.error(f"{key} is missing; expected {SUPPORTED[key][0]!r}")
    # The class of the nested form ties when the key is absent.
    if "tie_word_embeddings" not in top:
        raise top.error("tie_word_embeddings is missing; expected false")
    top.expect("tie_word_embeddings", False)
    for key, allowed in SUPPORTED.items():
        text.expect(key, *allowed)
    config = ModelConfig(
        **{key: text.integer(key) for key in _INTEGERS},
        routed_scaling_factor=text.number("routed_scaling_factor"),
        rms_norm_eps=text.number("rms_norm_eps"),
        latent_norm_eps=_latent_norm_eps(latent_norm_eps),
        rope=read_yarn(text),
        bos_token_id=_token_ids(top, text, "bos_token_id")[0],
        eos_token_ids=_token_ids(top, text, "eos_token_id"),
        pad_token_id=_pad_token_id(top, text),
        initializer_range=text.number("initializer_range"),
    )
    _check_sizes(text, config)
    return config


def read_stop_token_ids(directory: Path) -> tuple[int, ...]:
    """Returns the ids that end a text: config.json's and generation_config.json's.

    Raises:
      ConfigError: An id is no integer of the vocabulary.
    """
    config = read_model_config(directory)
    ids = list(config.eos_token_ids)
    path = directory / "generation_config.json"
    if path.exists():
        generation = read_json(path)
        if generation.get("eos_token_id") is not None:
            for token in generation.integers("eos_token_id"):
                if token >= config.vocab_size:
                    raise _outside(generation, "eos_token_id", token, config.vocab_size)
                if token not in ids:
                    ids.append(token)
    return tuple(ids)


def text_fields(top: Fields) -> Fields:
    """Returns the object that describes the text model: nested, or `top` itself."""
    nested = "text_config" in top
    types = _NESTED_TYPES if nested else _TEXT_TYPES
    top.expect("model_type", *types)
    if "model_type" not in top:
        raise top.error(f"model_type is missing; expected {' or '.join(types)}")
    if not nested:
        return top
    text = top.child("text_config")
    text.expect("model_type", *_TEXT_TYPES)
    return text


def _latent_norm_eps(override: float | None) -> float:
    if override is None:
        return HF_LATENT_NORM_EPS
    return Fields({"latent_norm_eps": override}, "argument").number("latent_norm_eps")


def _token_ids(top: Fields, text: Fields, key: str) -> tuple[int, ...]:
    """Returns the ids under `key`, which both levels state alike if both do."""
    holders = [place for place in (top, text) if place.get(key) is not None]
    if not holders:
        raise top.error(f"{key} is missing; expected a token id")
    found = [place.integers(key) for place in holders]
    if set(found[0]) != set(found[-1]):
        raise top.error(
            f"{key} is {list(found[0])} here and {list(found[-1])} in text_config; "
            "expected one value"
        )
    vocab_size = text.integer("vocab_size")
    for token in found[0]:
        if token >= vocab_size:
            raise _outside(top, key, token, vocab_size)
    return found[0]


def _pad_token_id(top: Fields, text: Fields) -> int | None:
    if all(place.get("pad_token_id") is None for place in (top, text)):
        return None
    return _token_ids(top, text, "pad_token_id")[0]


def _outside(place: Fields, key: str, token: int, vocab_size: int):
    return place.error(f"{key} is {token}; expected less than vocab_size, {vocab_size}")


def _check_sizes(text: Fields, c: ModelConfig) -> None:
    if c.first_k_dense_replace >= c.num_hidden_layers:
        raise text.error(
            f"first_k_dense_replace is {c.first_k_dense_replace}; expected less than "
            f"num_hidden_layers, {c.num_hidden_layers}"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise text.error(
            f"num_experts_per_tok is {c.num_experts_per_tok}; expected at most "
            f"n_routed_experts, {c.n_routed_experts}"
        )
    if c.qk_rope_head_dim % 2:
        raise text.error(
            f"qk_rope_head_dim is {c.qk_rope_head_dim}; expected an even number"
        )
    # Under MLA every head has a key of its own, made from the shared latent.
    text.expect("num_key_value_heads", c.num_attention_heads)
    text.expect("qk_head_dim", c.qk_head_dim)
