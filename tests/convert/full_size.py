"""Writes all of Kimi K2.6's files as holes: true names, shapes, dtypes and offsets.

From the published list of tensors; nothing here imports the converter. Only the
headers, the index and the `weight_shape` tensors are real bytes.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.convert.support import DTYPES, INDEX, TINY, read_config

TENSORS = 208_550
FILES = 64
NBYTES = 595_148_192_736
LAYERS, DENSE, EXPERTS, HIDDEN, INNER, VOCAB = 61, 1, 384, 7168, 2048, 163_840
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": DENSE,
}

type Shapes = dict[str, tuple[str, tuple[int, ...]]]


def layer(index: int) -> Shapes:
    """Returns one layer's tensors; the stated shapes first, so that they are near."""
    at = f"language_model.model.layers.{index}"
    out: Shapes = {}
    if index >= DENSE:
        for expert in range(EXPERTS):
            for which in ("gate", "up", "down"):
                base = f"{at}.mlp.experts.{expert}.{which}_proj"
                out[f"{base}.weight_shape"] = ("I32", (2,))
    for name, shape in {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_a_proj": (1536, HIDDEN),
        "self_attn.q_a_layernorm": (1536,),
        "self_attn.q_b_proj": (12_288, 1536),
        "self_attn.kv_a_proj_with_mqa": (576, HIDDEN),
        "self_attn.kv_a_layernorm": (512,),
        "self_attn.kv_b_proj": (16_384, 512),
        "self_attn.o_proj": (HIDDEN, 8192),
    }.items():
        out[f"{at}.{name}.weight"] = ("BF16", shape)
    inner = 18_432 if index < DENSE else INNER
    mlp = "mlp" if index < DENSE else "mlp.shared_experts"
    for which in ("gate", "up"):
        out[f"{at}.{mlp}.{which}_proj.weight"] = ("BF16", (inner, HIDDEN))
    out[f"{at}.{mlp}.down_proj.weight"] = ("BF16", (HIDDEN, inner))
    if index < DENSE:
        return out
    out[f"{at}.mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
    out[f"{at}.mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    for expert in range(EXPERTS):
        for which in ("gate", "up", "down"):
            base = f"{at}.mlp.experts.{expert}.{which}_proj"
            packed, scale = (
                ((HIDDEN, 256), (HIDDEN, 64))
                if which == "down"
                else ((INNER, 896), (INNER, 224))
            )
            out[f"{base}.weight_packed"] = ("I32", packed)
            out[f"{base}.weight_scale"] = ("BF16", scale)
    return out


def vision_tower() -> Shapes:
    shapes = {
        "patch_embed.proj.weight": (1152, 3, 14, 14),
        "patch_embed.proj.bias": (1152,),
        "patch_embed.pos_emb.weight": (64, 64, 1152),
    }
    for block in range(27):
        at = f"encoder.blocks.{block}"
        for norm in ("norm0", "norm1"):
            shapes |= {f"{at}.{norm}.weight": (1152,), f"{at}.{norm}.bias": (1152,)}
        for name, out, inputs in (
            ("wqkv", 3456, 1152),
            ("wo", 1152, 1152),
            ("mlp.fc0", 4304, 1152),
            ("mlp.fc1", 1152, 4304),
        ):
            shapes |= {
                f"{at}.{name}.weight": (out, inputs),
                f"{at}.{name}.bias": (out,),
            }
    for part in ("weight", "bias"):
        shapes[f"encoder.final_layernorm.{part}"] = (1152,)
    return {f"vision_tower.{name}": ("BF16", shape) for name, shape in shapes.items()}


def files() -> Iterator[Shapes]:
    """Yields the tensors of each of the 64 files."""
    for index in range(LAYERS):
        yield layer(index)
    yield {
        "language_model.model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN)),
        "language_model.model.norm.weight": ("BF16", (HIDDEN,)),
        "language_model.lm_head.weight": ("BF16", (VOCAB, HIDDEN)),
    }
    yield {
        "mm_projector.pre_norm.weight": ("BF16", (1152,)),
        "mm_projector.pre_norm.bias": ("BF16", (1152,)),
        "mm_projector.proj.0.weight": ("BF16", (4608, 4608)),
        "mm_projector.proj.0.bias": ("BF16", (4608,)),
        "mm_projector.proj.2.weight": ("BF16", (HIDDEN, 4608)),
        "mm_projector.proj.2.bias": ("BF16", (HIDDEN,)),
    }
    yield vision_tower()


def write_full_size(directory: Path) -> tuple[int, int]:
    """Returns how many tensors it wrote, and their bytes."""
    directory.mkdir()
    config = read_config(TINY)
    config["text_config"] |= TEXT
    config["vision_config"]["vt_num_attention_heads"] = 16
    (directory / "config.json").write_text(json.dumps(config))
    weight_map, total = {}, 0
    for number, shapes in enumerate(files(), start=1):
        name = f"model-{number:05d}-of-{FILES:06d}.safetensors"
        total += write_holes(directory / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    return len(weight_map), total


def write_holes(path: Path, shapes: Shapes) -> int:
    """Writes one file and returns the bytes of its tensors."""
    header, at, stated = {}, 0, []
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        if name.endswith("weight_shape"):
            stated += [HIDDEN, INNER] if "down_proj" in name else [INNER, HIDDEN]
        at = end
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.write(np.array(stated, np.int32).tobytes())
        file.truncate(8 + len(encoded) + at)
    return at
