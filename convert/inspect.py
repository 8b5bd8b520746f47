"""Owns the description of a checkpoint directory, of whatever format it is."""

from collections import Counter
from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint
from convert.detect import open_checkpoint, open_draft
from convert.ours_source import is_ours
from convert.plan import make_plan
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.restore import read_manifest


def describe(directory: Path, *, quantise_experts: bool = False) -> list[str]:
    """Returns lines that say what `directory` holds, and a drafter inside it.

    Args:
      quantise_experts: As in `open_checkpoint`.

    Raises:
      DDTreeError: It is nothing known, incomplete, or refused; the message says why.
    """
    lines = _describe(open_checkpoint(directory, quantise_experts=quantise_experts))
    draft = open_draft(directory)
    if draft is not None:
        lines += [f"{DRAFT}: {line}" for line in _describe(draft)]
    return lines


def _describe(checkpoint: Checkpoint) -> list[str]:
    plan = make_plan(checkpoint)
    dtypes = Counter(tensor.dtype for tensor in checkpoint.tensors.values())
    files = "arrays" if is_ours(checkpoint.directory) else "files"
    return [
        f"{checkpoint.format}, {_kind(checkpoint)}",
        *(_manifest_lines(checkpoint) if is_ours(checkpoint.directory) else []),
        f"{len(checkpoint.tensors)} tensors in {len(checkpoint.files)} {files}, "
        f"{checkpoint.nbytes} bytes, complete",
        ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())),
        f"{len(plan.extra)} tensors of the image path",
        *(f"not bit for bit: {loss}" for loss in checkpoint.losses),
    ]


def _kind(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    if isinstance(config, ModelConfig):
        return (
            f"target, {config.num_hidden_layers} layers, "
            f"{config.n_routed_experts} experts, INT4 pack-quantized"
        )
    return (
        f"DFlash drafter, {config.num_hidden_layers} layers, "
        f"block of {config.draft_block_size}"
    )


def _manifest_lines(checkpoint: Checkpoint) -> list[str]:
    manifest = read_manifest(checkpoint.directory)
    source = manifest["source"]
    return [
        f"version {manifest['version']}, made from {source.get('format')} "
        f"{source.get('directory')!r}",
        f"{len(manifest['tensors'])} arrays, {len(manifest['extra'])} extra tensors, "
        f"{manifest.get('total_bytes')} bytes",
        f"files: {', '.join(manifest['files'])}",
    ]
