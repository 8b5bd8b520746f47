"""Owns the description of a checkpoint directory, of whatever kind it is."""

from collections import Counter
from pathlib import Path

from convert.hf import DRAFT, read_config
from convert.plan import make_plan
from convert.source import open_source
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.restore import FORMAT, MANIFEST, read_manifest


def describe(directory: Path) -> list[str]:
    """Returns lines that say what `directory` holds.

    Raises:
      DDTreeError: It is nothing known, incomplete, or refused; the message says why.
    """
    if (directory / MANIFEST).exists():
        return _describe_canonical(directory)
    return _describe_hf(directory)


def _describe_canonical(directory: Path) -> list[str]:
    manifest = read_manifest(directory)
    lines = [
        f"{FORMAT} version {manifest['version']}, {manifest['kind']}, complete",
        f"made from {manifest['source']['format']} {manifest['source']['directory']!r}",
        f"{len(manifest['tensors'])} arrays, {len(manifest['extra'])} extra tensors, "
        f"{manifest['total_bytes']} bytes",
        f"files: {', '.join(manifest['files'])}",
    ]
    if (directory / DRAFT).exists():
        inner = _describe_canonical(directory / DRAFT)
        lines += [f"{DRAFT}: {line}" for line in inner]
    return lines


def _describe_hf(directory: Path) -> list[str]:
    source = open_source(directory)
    config = read_config(directory)
    plan = make_plan(source, config)
    if isinstance(config, ModelConfig):
        what = (
            f"target, {config.num_hidden_layers} layers, "
            f"{config.n_routed_experts} experts, INT4 pack-quantized"
        )
    else:
        what = (
            f"DFlash drafter, {config.num_hidden_layers} layers, "
            f"block of {config.draft_block_size}"
        )
    dtypes = Counter(tensor.dtype for tensor in source.tensors.values())
    return [
        f"Hugging Face safetensors, {what}",
        f"{len(source.tensors)} tensors in {len(source.files)} files, "
        f"{source.nbytes} bytes, complete",
        ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())),
        f"{len(plan.extra)} tensors of the image path",
    ]
