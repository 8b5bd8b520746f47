"""Makes tests/golden/tiny_draft: a small random DFlash drafter for tiny_k26."""

import math
import sys
from pathlib import Path

import torch

from tiny.tokenizer_files import special_token_id

from .checkpoint_files import write_json, write_tensors
from .draw import Draw

HIDDEN, VOCAB, LAYERS = 128, 512, 2
HEADS, KV_HEADS, HEAD_DIM, INTER = 16, 8, 16, 256
BLOCK_SIZE, TARGET_LAYER_IDS = 8, [0, 1, 3]
MASK = special_token_id("[UNK]")

CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": BLOCK_SIZE,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": TARGET_LAYER_IDS,
    },
    "dtype": "bfloat16",
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTER,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 262144,
    "max_window_layers": LAYERS,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_target_layers": 4,
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
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}


def _tensors(draw: Draw) -> dict[str, torch.Tensor]:
    tensors = {}

    def linear(name: str, outputs: int, inputs: int, *, gain: float = 1.0) -> None:
        full = f"{name}.weight"
        std = gain / math.sqrt(inputs)
        tensors[full] = draw.bfloat16(full, (outputs, inputs), std=std)

    def norm(name: str, size: int) -> None:
        full = f"{name}.weight"
        tensors[full] = draw.bfloat16(full, (size,), std=0.15, mean=1.0)

    linear("fc", HIDDEN, len(TARGET_LAYER_IDS) * HIDDEN)
    norm("hidden_norm", HIDDEN)
    norm("norm", HIDDEN)
    for index in range(LAYERS):
        name = f"layers.{index}"
        norm(f"{name}.input_layernorm", HIDDEN)
        norm(f"{name}.post_attention_layernorm", HIDDEN)
        linear(f"{name}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN)
        linear(f"{name}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        linear(f"{name}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        linear(f"{name}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        norm(f"{name}.self_attn.q_norm", HEAD_DIM)
        norm(f"{name}.self_attn.k_norm", HEAD_DIM)
        linear(f"{name}.mlp.gate_proj", INTER, HIDDEN, gain=1.5)
        linear(f"{name}.mlp.up_proj", INTER, HIDDEN, gain=1.5)
        linear(f"{name}.mlp.down_proj", HIDDEN, INTER)
    return tensors


def build(directory: Path) -> None:
    """Writes the checkpoint into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", CONFIG)
    write_tensors(directory / "model.safetensors", _tensors(Draw("tiny_draft")))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
