"""Owns the small models' configurations, in the form of their config.json.

Every number that is not a size is Kimi K2.6's, YaRN included; the sizes are the
smallest that eight devices can share: 256 expert inputs are eight groups of 32.
"""

from typing import Any

from tiny.tokenizer_files import special_token_id

type Json = dict[str, Any]

LAYERS = 4
VOCAB_SIZE = 512


def _rope() -> Json:
    return {
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }


def _tokens() -> Json:
    return {
        "bos_token_id": special_token_id("[BOS]"),
        "eos_token_id": special_token_id("[EOS]"),
        "pad_token_id": special_token_id("[PAD]"),
    }


def _quantization() -> Json:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:vision_tower.*",
            "re:mm_projector.*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "actorder": None,
                    "block_structure": None,
                },
            }
        },
    }


def _text_config() -> Json:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        **_rope(),
        **_tokens(),
        "tie_word_embeddings": False,
        "use_cache": True,
        "ep_size": 1,
        "pretraining_tp": 1,
        "dtype": "bfloat16",
        "quantization_config": _quantization(),
    }


def target_config() -> Json:
    """Returns the target's config.json: nested as K2.6's, without a vision tower."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        **_tokens(),
        "ignore_index": -100,
        "media_placeholder_token_id": special_token_id("<|media_pad|>"),
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": _text_config(),
    }


def generation_config() -> Json:
    """Returns generation_config.json, which names the token that ends a turn."""
    return {"max_length": 8192, "eos_token_id": special_token_id("<|im_end|>")}


def draft_config() -> Json:
    """Returns the DFlash drafter's config.json."""
    layers = 2
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        **_rope(),
        **_tokens(),
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "block_size": 8,
        "num_target_layers": LAYERS,
        "dflash_config": {
            "mask_token_id": special_token_id("[UNK]"),
            "target_layer_ids": [0, 1, 3],
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
    }
