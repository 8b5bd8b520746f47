"""The config files of tests/golden/tiny_k26, key for key as K2.6 has them on disk."""

from tiny.tokenizer_files import special_token_id

HIDDEN, VOCAB, LAYERS = 128, 512, 4
HEADS, Q_LORA, KV_LORA, NOPE, ROPE, VALUE = 8, 96, 64, 32, 16, 32
EXPERTS, TOP_K, MOE_INTER, DENSE_INTER = 16, 4, 256, 256
VISION_HIDDEN, VISION_LAYERS, VISION_HEADS, VISION_INTER, GRID = 32, 2, 2, 64, 8
# As in the real files, `eos` of config.json is not the token that ends a turn, which
# only generation_config.json names.
BOS, EOS, END_OF_TURN, MEDIA, PAD = map(
    special_token_id, ("[BOS]", "[EOS]", "<|im_end|>", "<|media_pad|>", "[PAD]")
)

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "re:.*lm_head.*",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:vision_tower.*",
        "re:mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

TEXT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": BOS,
    "dtype": "bfloat16",
    "eos_token_id": EOS,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": DENSE_INTER,
    "kv_lora_rank": KV_LORA,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": MOE_INTER,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 0,
    "pad_token_id": PAD,
    "pretraining_tp": 1,
    "q_lora_rank": Q_LORA,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "quantization_config": QUANTIZATION,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": VALUE,
    "vocab_size": VOCAB,
}

VISION_CONFIG = {
    "init_pos_emb_height": GRID,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": GRID,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": VISION_HIDDEN,
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": HIDDEN,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": VISION_HIDDEN,
    "vt_intermediate_size": VISION_INTER,
    "vt_num_attention_heads": VISION_HEADS,
    "vt_num_hidden_layers": VISION_LAYERS,
    # transformers reads only its own names and would build the full-size tower.
    "hidden_size": VISION_HIDDEN,
    "intermediate_size": VISION_INTER,
    "num_attention_heads": VISION_HEADS,
    "num_hidden_layers": VISION_LAYERS,
    "pos_emb_height": GRID,
    "pos_emb_time": 4,
    "pos_emb_width": GRID,
}

CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": BOS,
    "dtype": "bfloat16",
    "eos_token_id": EOS,
    "ignore_index": -100,
    "media_placeholder_token_id": MEDIA,
    "model_type": "kimi_k25",
    "pad_token_id": PAD,
    "projection_hidden_size": VISION_HIDDEN,
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": VISION_CONFIG,
}

GENERATION_CONFIG = {"max_length": 262144, "eos_token_id": END_OF_TURN}
