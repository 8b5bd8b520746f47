"""Owns the writing of a checkpoint's manifest, its mark of success."""

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from convert import digest
from convert.checkpoint import Checkpoint
from convert.leaf import Leaf
from convert.plan import Plan
from ddtree_jax.model.restore import FORMAT, MANIFEST, VERSION

_TOOLS = ("jax", "numpy", "orbax-checkpoint", "tensorstore")


def write_manifest(
    directory: Path,
    *,
    source: Checkpoint,
    plan: Plan,
    digests: Mapping[str, str],
    files: Sequence[str],
) -> None:
    """Writes manifest.json, which makes `directory` a complete checkpoint.

    Args:
      digests: Hash of every leaf of `plan`, by path.
      files: The data files that were copied.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "target" if source.is_target else "draft",
        "source": {"format": source.format, "directory": source.directory.name},
        "losses": list(source.losses),
        "tools": {name: importlib.metadata.version(name) for name in _TOOLS},
        "total_bytes": plan.nbytes,
        "weight_shape_dtype": plan.weight_shape_dtype,
        "files": {name: _file_entry(directory / name) for name in files},
        "tensors": {leaf.path: _entry(leaf, digests) for leaf in plan.params},
        "extra": {leaf.path: _entry(leaf, digests) for leaf in plan.extra},
    }
    temporary = directory / f".{MANIFEST}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / MANIFEST)


def _entry(leaf: Leaf, digests: Mapping[str, str]) -> dict[str, object]:
    return {
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "chunk": list(leaf.layout()[0]),
        digest.NAME: digests[leaf.path],
        "source": leaf.pattern,
    }


def _file_entry(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, digest.NAME: digest.hash_file(path)}
