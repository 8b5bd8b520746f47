"""Owns the trained models' sizes; all else is as in `forms`.

The latent and rotary widths are Kimi K2.6's, so that its attention kernels serve
this model unchanged. Eight devices can share it.
"""

import json
from pathlib import Path

from tiny import forms
from tiny.forms import Json
from tiny.tokenizer_files import NUM_SPECIAL, special_token_id, write_tokenizer_config

RANKS = 2816
_VOCAB_SIZE = RANKS + NUM_SPECIAL
_HIDDEN_SIZE = 384
_LAYERS = 5
_TARGET_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": _HIDDEN_SIZE,
    "num_hidden_layers": _LAYERS,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 48,
    "intermediate_size": 768,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
}
_DRAFT_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": _HIDDEN_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 48,
    "intermediate_size": 768,
    "layer_types": ["full_attention"] * 3,
    "max_window_layers": 3,
    "num_target_layers": _LAYERS,
}


def _tokens() -> Json:
    return {
        "bos_token_id": special_token_id("[BOS]", ranks=RANKS),
        "eos_token_id": special_token_id("[EOS]", ranks=RANKS),
        "pad_token_id": special_token_id("[PAD]", ranks=RANKS),
    }


def target_config() -> Json:
    """Returns the trained target's config.json."""
    config = forms.target_config() | _tokens()
    media = special_token_id("<|media_pad|>", ranks=RANKS)
    text = config["text_config"] | _TARGET_SIZES | _tokens()
    return config | {"media_placeholder_token_id": media, "text_config": text}


def generation_config() -> Json:
    """Returns the trained target's generation_config.json."""
    end = special_token_id("<|im_end|>", ranks=RANKS)
    return forms.generation_config() | {"eos_token_id": end}


def draft_config() -> Json:
    """Returns the trained drafter's config.json."""
    dflash = {
        "mask_token_id": special_token_id("[UNK]", ranks=RANKS),
        "target_layer_ids": [0, 2, 4],
    }
    config = forms.draft_config() | _DRAFT_SIZES | _tokens()
    return config | {"dflash_config": dflash}


def write_forms(directory: Path) -> None:
    """Writes every file of the two checkpoints but weights and tiktoken.model."""
    (directory / "draft").mkdir(parents=True, exist_ok=True)
    for name, value in (
        ("config.json", target_config()),
        ("generation_config.json", generation_config()),
        ("draft/config.json", draft_config()),
    ):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")
    write_tokenizer_config(directory, ranks=RANKS)


if __name__ == "__main__":
    write_forms(Path(__file__).with_name("model"))
