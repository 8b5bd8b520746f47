"""Makes tests/golden/tiny_k26: K2.6's on-disk form, small and random.

Every tensor name, dtype and config key of the real text model occurs; the
vision tower and the projector are there, so that a reader must cope with them.
The tokenizer files are those of the package `tiny`.
"""

import math
import sys
from pathlib import Path

from tiny.tokenizer_files import write_tokenizer

from . import int4
from .checkpoint_files import write_json, write_shards
from .draw import Draw
from .tiny_target_config import (
    CONFIG,
    DENSE_INTER,
    EXPERTS,
    GENERATION_CONFIG,
    GRID,
    HEADS,
    HIDDEN,
    KV_LORA,
    LAYERS,
    MOE_INTER,
    NOPE,
    Q_LORA,
    ROPE,
    TEXT_CONFIG,
    VALUE,
    VISION_HIDDEN,
    VISION_INTER,
    VISION_LAYERS,
    VOCAB,
)

MERGED = 4 * VISION_HIDDEN
# The first tried with this vocabulary: golden_target.py's margins hold.
_SEED = "tiny_k26/1"


class _Tensors:
    """The tensors of one shard, drawn as they are named."""

    def __init__(self, draw: Draw):
        self._draw = draw
        self.tensors = {}

    def matrix(self, name: str, shape, *, std: float) -> None:
        self.tensors[name] = self._draw.bfloat16(name, shape, std=std)

    def linear(self, name: str, outputs: int, inputs: int, *, gain: float = 1.0):
        """A projection that keeps the size of its input, times `gain`."""
        self.matrix(f"{name}.weight", (outputs, inputs), std=gain / math.sqrt(inputs))

    def biased(self, name: str, outputs: int, inputs: int) -> None:
        self.linear(name, outputs, inputs)
        self.matrix(f"{name}.bias", (outputs,), std=0.1)

    def norm(self, name: str, size: int) -> None:
        full = f"{name}.weight"
        self.tensors[full] = self._draw.bfloat16(full, (size,), std=0.15, mean=1.0)

    def biased_norm(self, name: str, size: int) -> None:
        self.norm(name, size)
        self.matrix(f"{name}.bias", (size,), std=0.1)

    def float32(self, name: str, shape, *, std: float) -> None:
        self.tensors[name] = self._draw.float32(name, shape, std=std)

    def int4_linear(self, name: str, outputs: int, inputs: int, *, gain: float):
        weight = self._draw.bfloat16(
            name, (outputs, inputs), std=gain / math.sqrt(inputs)
        )
        packed = int4.compress(weight, int4.scales(weight))
        self.tensors |= {f"{name}.{key}": value for key, value in packed.items()}

    def swiglu(self, name: str, inner: int, *, linear) -> None:
        linear(f"{name}.gate_proj", inner, HIDDEN, gain=1.5)
        linear(f"{name}.up_proj", inner, HIDDEN, gain=1.5)
        linear(f"{name}.down_proj", HIDDEN, inner, gain=1.0)


def _attention(t: _Tensors, name: str) -> None:
    t.linear(f"{name}.q_a_proj", Q_LORA, HIDDEN)
    t.norm(f"{name}.q_a_layernorm", Q_LORA)
    t.linear(f"{name}.q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
    t.linear(f"{name}.kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
    t.norm(f"{name}.kv_a_layernorm", KV_LORA)
    t.linear(f"{name}.kv_b_proj", HEADS * (NOPE + VALUE), KV_LORA)
    t.linear(f"{name}.o_proj", HIDDEN, HEADS * VALUE)


def _layer(t: _Tensors, index: int) -> None:
    name = f"language_model.model.layers.{index}"
    t.norm(f"{name}.input_layernorm", HIDDEN)
    t.norm(f"{name}.post_attention_layernorm", HIDDEN)
    _attention(t, f"{name}.self_attn")
    if index < TEXT_CONFIG["first_k_dense_replace"]:
        t.swiglu(f"{name}.mlp", DENSE_INTER, linear=t.linear)
        return
    t.linear(f"{name}.mlp.gate", EXPERTS, HIDDEN)
    # Of the size of the scores' spread, so that it changes which are chosen.
    t.float32(f"{name}.mlp.gate.e_score_correction_bias", (EXPERTS,), std=0.1)
    t.swiglu(f"{name}.mlp.shared_experts", MOE_INTER, linear=t.linear)
    for expert in range(EXPERTS):
        t.swiglu(f"{name}.mlp.experts.{expert}", MOE_INTER, linear=t.int4_linear)


def _vision(t: _Tensors) -> None:
    width, name = VISION_HIDDEN, "vision_tower"
    t.matrix(f"{name}.patch_embed.proj.weight", (width, 3, 14, 14), std=0.04)
    t.matrix(f"{name}.patch_embed.proj.bias", (width,), std=0.1)
    t.matrix(f"{name}.patch_embed.pos_emb.weight", (GRID, GRID, width), std=0.5)
    for index in range(VISION_LAYERS):
        block = f"{name}.encoder.blocks.{index}"
        t.biased_norm(f"{block}.norm0", width)
        t.biased_norm(f"{block}.norm1", width)
        t.biased(f"{block}.wqkv", 3 * width, width)
        t.biased(f"{block}.wo", width, width)
        t.biased(f"{block}.mlp.fc0", VISION_INTER, width)
        t.biased(f"{block}.mlp.fc1", width, VISION_INTER)
    t.biased_norm(f"{name}.encoder.final_layernorm", width)
    t.biased_norm("mm_projector.pre_norm", width)
    t.biased("mm_projector.proj.0", MERGED, MERGED)
    t.biased("mm_projector.proj.2", HIDDEN, MERGED)


def build(directory: Path) -> None:
    """Writes the checkpoint into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", GENERATION_CONFIG)
    write_tokenizer(directory)
    draw = Draw(_SEED)
    shards = [_Tensors(draw) for _ in range(3)]
    for index in range(LAYERS):
        _layer(shards[2 * index // LAYERS], index)
    last = shards[-1]
    last.matrix("language_model.model.embed_tokens.weight", (VOCAB, HIDDEN), std=1.0)
    last.norm("language_model.model.norm", HIDDEN)
    last.linear("language_model.lm_head", VOCAB, HIDDEN, gain=2.0)
    _vision(last)
    write_shards(directory, [shard.tensors for shard in shards])


if __name__ == "__main__":
    build(Path(sys.argv[1]))
