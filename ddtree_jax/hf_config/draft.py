"""Owns the drafter's config.json: DFlash with Qwen3-style layers."""

from pathlib import Path

from ddtree_jax.config import DraftConfig, ModelConfig, YarnConfig
from ddtree_jax.errors import ConfigError
from ddtree_jax.hf_config.fields import Fields, Json, config_path, read_json
from ddtree_jax.hf_config.rope import read_yarn

_ARCHITECTURE = "DFlashDraftModel"

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "num_target_layers",
)

# Keys that would change the arithmetic, with the values that this engine computes.
SUPPORTED: dict[str, tuple[Json, ...]] = {
    "model_type": ("qwen3",),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (None, False),
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "is_causal": (None, False),
    "attention_sink_bias": (None, False),
    "mask_embedding": (None, False),
    "is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "quantization_config": (None,),
}

# Keys without influence on the drafter's arithmetic, and why.
UNUSED: dict[str, str] = {
    "_name_or_path": "a label",
    "attention_dropout": "training only",
    "auto_map": "remote code is never run",
    "bos_token_id": "the target's decides",
    "dtype": "each tensor states its own",
    "eos_token_id": "the target's decides",
    "max_window_layers": "layer_types decides",
    "output_attentions": "a run-time option of another library",
    "output_hidden_states": "a run-time option of another library",
    "pad_token_id": "the target's decides",
    "return_dict": "a run-time option of another library",
    "tie_word_embeddings": "the drafter has no embedding and no head of its own",
    "torch_dtype": "each tensor states its own",
    "transformers_version": "a label",
    "use_cache": "a run-time option of another library",
}


def read_draft_config(
    path: Path, *, rope_amplitude: float | None = None
) -> DraftConfig:
    """Returns the drafter's configuration from its config.json.

    Args:
      path: The file, or the directory that holds it.
      rope_amplitude: Factor on cos and sin. By default 0.1 ln(factor) + 1, with
        which the published acceptance of Kimi's drafter was measured; other
        engines honour mscale and mscale_all_dim, which gives 1.

    Raises:
      ConfigError: A key is missing, contradictory or unsupported; it and the
        file are named.
    """
    config = read_json(config_path(path))
    if config.get("architectures") != [_ARCHITECTURE]:
        raise config.error(
            f"architectures is {config.get('architectures')!r}; "
            f'expected ["{_ARCHITECTURE}"]'
        )
    for key in ("model_type", "attention_bias", "hidden_act"):
        if key not in config:
            raise config.error(f"{key} is missing; expected {SUPPORTED[key][0]!r}")
    for key, allowed in SUPPORTED.items():
        config.expect(key, *allowed)
    sizes = {key: config.integer(key) for key in _INTEGERS}
    _check_attention(config, sizes["num_hidden_layers"])
    if config.get("draft_vocab_size") is not None:
        config.expect("draft_vocab_size", sizes["vocab_size"])
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise config.error(
            f"num_attention_heads is {sizes['num_attention_heads']}; expected a "
            f"multiple of num_key_value_heads, {sizes['num_key_value_heads']}"
        )
    rope = read_yarn(config)
    inner = _dflash_fields(config)
    return DraftConfig(
        **sizes,
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=rope,
        rope_amplitude=_amplitude(rope, rope_amplitude),
        draft_block_size=_block_size(config, inner),
        target_layer_ids=_target_layer_ids(
            inner, sizes["num_target_layers"], sizes["num_hidden_layers"]
        ),
        mask_token_id=_mask_token_id(inner, sizes["vocab_size"]),
        initializer_range=config.number("initializer_range"),
    )


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Returns the feature layers of a drafter that names none.

    They are spread evenly from layer 1 to the third layer from the end; a
    single one is the middle layer.

    Example:
      >>> default_target_layer_ids(61, 6)
      (1, 12, 24, 35, 47, 58)
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def check_draft_fits(draft: DraftConfig, target: ModelConfig) -> None:
    """Raises ConfigError when the drafter was not made for a target of this shape."""
    pairs = {
        "hidden_size": (draft.hidden_size, target.hidden_size),
        "vocab_size": (draft.vocab_size, target.vocab_size),
        "num_target_layers": (draft.num_target_layers, target.num_hidden_layers),
    }
    for key, (got, expected) in pairs.items():
        if got != expected:
            raise ConfigError(
                f"the drafter's {key} is {got}; expected the target's, {expected}"
            )


def _dflash_fields(config: Fields) -> Fields:
    inner = config.child("dflash_config")
    known = {"target_layer_ids", "mask_token_id", "block_size", "causal"}
    for key in inner.values:
        if key not in known:
            raise inner.error(f"{key} is not supported; expected {sorted(known)}")
    inner.expect("causal", None, False)
    return inner


def _check_attention(config: Fields, num_layers: int) -> None:
    """Raises ConfigError unless every layer sees its whole context."""
    layers = config.get("layer_types")
    if layers is not None and layers != ["full_attention"] * num_layers:
        raise config.error(
            f"layer_types is {layers!r}; expected {num_layers} times full_attention, "
            "the only supported type"
        )
    if config.get("use_sliding_window") is not False:
        config.expect("sliding_window", None)


def _amplitude(rope: YarnConfig, override: float | None) -> float:
    if override is None:
        return rope.attention_multiplier(1.0)
    return Fields({"rope_amplitude": override}, "argument").number("rope_amplitude")


def _block_size(config: Fields, inner: Fields) -> int:
    holders = [place for place in (config, inner) if "block_size" in place]
    sizes = [place.integer("block_size", minimum=2) for place in holders or [config]]
    if len(set(sizes)) > 1:
        raise config.error(
            f"block_size is {sizes[0]} here and {sizes[1]} in dflash_config; "
            "expected one value"
        )
    return sizes[0]


def _target_layer_ids(inner: Fields, layers: int, draft_layers: int) -> tuple[int, ...]:
    if inner.get("target_layer_ids") is None:
        return default_target_layer_ids(layers, draft_layers)
    ids = inner.integers("target_layer_ids")
    if max(ids) >= layers or len(set(ids)) != len(ids):
        raise inner.error(
            f"target_layer_ids is {list(ids)}; expected distinct ids below "
            f"num_target_layers, {layers}"
        )
    return ids


def _mask_token_id(inner: Fields, vocab_size: int) -> int:
    token = inner.integer("mask_token_id", minimum=0)
    if token >= vocab_size:
        raise inner.error(
            f"mask_token_id is {token}; expected less than vocab_size, {vocab_size}"
        )
    return token
