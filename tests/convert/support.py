"""Reads and writes Hugging Face checkpoints byte by byte, well-formed or not.

Independent of the converter: nothing here imports `convert`.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
TINY, TINY_DRAFT = GOLDEN / "tiny_k26", GOLDEN / "tiny_draft"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}


@dataclasses.dataclass(frozen=True)
class Raw:
    """A tensor as its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)


def raw(array: np.ndarray) -> Raw:
    name = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return Raw(name, array.shape, array.tobytes())


def read_file(path: Path) -> dict[str, Raw]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: Raw(
            v["dtype"],
            tuple(v["shape"]),
            content[start + v["data_offsets"][0] : start + v["data_offsets"][1]],
        )
        for name, v in header.items()
    }


def read_checkpoint(directory: Path) -> dict[str, Raw]:
    tensors: dict[str, Raw] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= read_file(path)
    return tensors


def read_config(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def header_of(tensors: dict[str, Raw]) -> dict:
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    return header


def write_file(
    path: Path,
    tensors: dict[str, Raw],
    *,
    edit: Callable[[dict], None] | None = None,
    text: Callable[[str], str] | None = None,
) -> None:
    """Writes a safetensors file, its header spoilt by `edit`, or its text by `text`."""
    header = header_of(tensors)
    if edit is not None:
        edit(header)
    encoded = json.dumps(header)
    if text is not None:
        encoded = text(encoded)
    body = b"".join(tensor.data for tensor in tensors.values())
    encoded_bytes = encoded.encode()
    path.write_bytes(len(encoded_bytes).to_bytes(8, "little") + encoded_bytes + body)


def write_checkpoint(
    directory: Path, tensors: dict[str, Raw], config: dict, *, shards: int = 3
) -> Path:
    """Writes a whole checkpoint with its index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    size = math.ceil(len(names) / shards)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        write_file(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    return directory


def renamed(tensors: dict[str, Raw], *, text: str, head: str) -> dict[str, Raw]:
    """Returns the golden tensors under another prefix of the text model."""
    out = {}
    for name, tensor in tensors.items():
        name = name.replace("language_model.lm_head.", head)
        out[name.replace("language_model.model.", text)] = tensor
    return out


def write_sparse(directory: Path, config: dict) -> int:
    """Writes a target whose bytes are a hole of the file system; returns its size."""
    c = config["text_config"]
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        shapes[name] = (dtype, shape)

    m, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    v, q = c["v_head_dim"], c["q_lora_rank"]

    def mlp(name: str, inner: int) -> None:
        add(f"{name}.gate_proj.weight", inner, m)
        add(f"{name}.up_proj.weight", inner, m)
        add(f"{name}.down_proj.weight", m, inner)

    root = "language_model.model."
    add(f"{root}embed_tokens.weight", c["vocab_size"], m)
    add("language_model.lm_head.weight", c["vocab_size"], m)
    add(f"{root}norm.weight", m)
    for index in range(c["num_hidden_layers"]):
        layer = f"{root}layers.{index}"
        add(f"{layer}.input_layernorm.weight", m)
        add(f"{layer}.post_attention_layernorm.weight", m)
        add(f"{layer}.self_attn.q_a_proj.weight", q, m)
        add(f"{layer}.self_attn.q_a_layernorm.weight", q)
        add(f"{layer}.self_attn.q_b_proj.weight", heads * (nope + rope), q)
        add(f"{layer}.self_attn.kv_a_proj_with_mqa.weight", latent + rope, m)
        add(f"{layer}.self_attn.kv_a_layernorm.weight", latent)
        add(f"{layer}.self_attn.kv_b_proj.weight", heads * (nope + v), latent)
        add(f"{layer}.self_attn.o_proj.weight", m, heads * v)
        if index < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        inner, experts = c["moe_intermediate_size"], c["n_routed_experts"]
        add(f"{layer}.mlp.gate.weight", experts, m)
        add(f"{layer}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        mlp(f"{layer}.mlp.shared_experts", inner)
        for e in range(experts):
            for which, out, inp in (
                ("gate", inner, m),
                ("up", inner, m),
                ("down", m, inner),
            ):
                expert = f"{layer}.mlp.experts.{e}.{which}_proj"
                add(f"{expert}.weight_packed", out, inp // 8, dtype="I32")
                add(f"{expert}.weight_scale", out, inp // 32)
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    encoded = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + at)
    return at
