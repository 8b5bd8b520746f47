"""Writes the files of a Hugging Face checkpoint. Knows no model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_json(path: Path, value) -> None:
    """Writes `value` as indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Writes one safetensors file per shard, and the index of all."""
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_tensors(directory / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_json(directory / "model.safetensors.index.json", index)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes one safetensors file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it readable by its owner only
