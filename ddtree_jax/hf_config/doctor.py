"""Owns the published values, and says in what a config.json differs from them.

The values below are only compared with; nothing is computed from them.
"""

from pathlib import Path

from ddtree_jax.errors import DDTreeError
from ddtree_jax.hf_config import draft, quantisation, target
from ddtree_jax.hf_config.fields import Fields, Json, config_path, read_json, same
from ddtree_jax.hf_config.rope import read_yarn

# Sources: moonshotai/Kimi-K2.5's config.json; Moonshot's deployment guide says that
# K2.6 shares its architecture, and three readers of K2.6's file quote equal values.
PUBLISHED_TARGET: dict[str, Json] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "initializer_range": 0.02,
}
# Source: z-lab/Kimi-K2.5-DFlash's config.json.
PUBLISHED_DRAFT: dict[str, Json] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "num_target_layers": 61,
    "block_size": 8,
}
PUBLISHED_DFLASH: dict[str, Json] = {
    "target_layer_ids": [1, 12, 24, 35, 47, 58],
    "mask_token_id": 163838,
}
PUBLISHED_QUANTISATION = quantisation.INT4
PUBLISHED_ROPE: dict[str, float] = {
    "theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
# Keys of the nested form's outer level that concern images, tokens or labels.
_OUTER_UNUSED = {
    "ignore_index": "training only",
    "image_token_id": "this engine reads text only",
    "media_placeholder_token_id": "this engine reads text only",
    "projection_hidden_act": "this engine reads text only",
    "projection_hidden_size": "this engine reads text only",
    "projection_layer_norm_eps": "this engine reads text only",
    "use_unified_vision_chunk": "this engine reads text only",
    "video_placeholder": "this engine reads text only",
    "video_token_id": "this engine reads text only",
    "vision_config": "this engine reads text only",
    "vision_end_token_id": "this engine reads text only",
    "vision_start_token_id": "this engine reads text only",
}
_EVERYWHERE = {
    *("rope_scaling", "rope_parameters", "rope_theta", "model_type"),
    *("quantization_config", "initializer_range"),
}


def config_deviations(path: Path) -> list[str]:
    """Returns one line for each way in which a config.json is not as published.

    Lines say what differs from Kimi K2.6 (or from Kimi's DFlash drafter), what
    this engine refuses, and which keys it does not know and so does not use. The
    list is empty for the published file.

    Args:
      path: A config.json, or the directory that holds it.

    Raises:
      ConfigError: The file cannot be read at all.
    """
    config = read_json(config_path(path))
    if config.get("architectures") == ["DFlashDraftModel"]:
        return _refusals(path, draft.read_draft_config) + _draft_lines(config)
    lines = _refusals(path, target.read_model_config, quantisation.read_quantisation)
    try:
        text = target.text_fields(config)
    except DDTreeError:
        return lines
    return lines + _quantisation_differences(path) + _target_lines(config, text)


def _refusals(path: Path, *readers) -> list[str]:
    lines = []
    for reader in readers:
        try:
            reader(path)
        except DDTreeError as error:
            lines.append(f"refused: {error}")
    return lines


def _target_lines(top: Fields, text: Fields) -> list[str]:
    lines = _differences(text, PUBLISHED_TARGET, fallback=top)
    lines += _rope_differences(text)
    known = {*PUBLISHED_TARGET, *target.SUPPORTED, *target.UNUSED, *_EVERYWHERE}
    known |= {"num_key_value_heads", "qk_head_dim"}
    lines += _unknown_keys(text, known)
    if top is not text:
        lines += _unknown_keys(top, known | {*_OUTER_UNUSED, "text_config"})
    return lines


def _draft_lines(config: Fields) -> list[str]:
    lines = _differences(config, PUBLISHED_DRAFT, fallback=config)
    if isinstance(config.get("dflash_config"), dict):
        inner = config.child("dflash_config")
        lines += _differences(inner, PUBLISHED_DFLASH, fallback=inner)
    lines += _rope_differences(config)
    known = {*PUBLISHED_DRAFT, *draft.SUPPORTED, *draft.UNUSED, *_EVERYWHERE}
    known |= {"architectures", "dflash_config", "layer_types", "sliding_window"}
    return lines + _unknown_keys(config, known | {"draft_vocab_size"})


def _differences(
    fields: Fields, published: dict[str, Json], *, fallback: Fields
) -> list[str]:
    lines = []
    for key, value in published.items():
        holder = fields if key in fields else fallback
        if key not in holder:
            lines.append(f"{fields.name}: {key} is absent; published {value}")
        elif not same(holder.get(key), value):
            lines.append(
                f"{holder.name}: {key} is {holder.get(key)}; published {value}"
            )
    return lines


def _quantisation_differences(path: Path) -> list[str]:
    try:
        schemes = quantisation.read_quantisation(path).schemes
    except DDTreeError:
        return []  # _refusals has said it
    if set(schemes) <= {PUBLISHED_QUANTISATION}:
        return []
    return [
        f"{config_path(path)}: quantization_config is {' and '.join(schemes)}; "
        f"published {PUBLISHED_QUANTISATION}"
    ]


def _rope_differences(fields: Fields) -> list[str]:
    try:
        rope = read_yarn(fields)
    except DDTreeError:
        return []  # _refusals has said it
    return [
        f"{fields.name}: rope {key} is {getattr(rope, key)}; published {value}"
        for key, value in PUBLISHED_ROPE.items()
        if getattr(rope, key) != value
    ]


def _unknown_keys(fields: Fields, known: set[str]) -> list[str]:
    return [
        f"{fields.name}: {key} is unknown and not used"
        for key in fields.values
        if key not in known
    ]
