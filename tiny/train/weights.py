"""Owns the files of a training run: states that resume, weights that travel.

A state is one safetensors file of a pytree's leaves. Weights are numbered files of
at most 15 MB, so that they pass where larger files do not.
"""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

PIECE_BYTES = 15_000_000


def save_state(path: Path, tree: Any, facts: dict[str, Any]) -> None:
    """Writes a pytree of arrays, and facts beside it in the header."""
    leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    tensors = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    save_file(tensors, scratch, metadata={"facts": json.dumps(facts)})
    os.replace(scratch, path)


def load_state(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what `save_state` wrote, in the form of `like`, and the facts."""
    with safe_open(path, "numpy") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors = load_file(path)

    def take(key, leaf):
        tensor = tensors.pop(jax.tree_util.keystr(key))
        if tensor.shape != leaf.shape:
            raise ValueError(
                f"{path}: {jax.tree_util.keystr(key)} is {tensor.shape}; "
                f"expected {leaf.shape}"
            )
        return jax.numpy.asarray(tensor, leaf.dtype)

    tree = jax.tree_util.tree_map_with_path(take, like)
    if tensors:
        raise ValueError(f"{path}: unexpected {min(tensors)}; from another model?")
    return tree, facts


def save_pieces(
    directory: Path,
    name: str,
    tensors: dict[str, np.ndarray],
    *,
    piece_bytes: int = PIECE_BYTES,
) -> list[Path]:
    """Writes name-0.safetensors, name-1.safetensors, … and returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for path, tensor in sorted(tensors.items()):
        if filled and filled + tensor.nbytes > piece_bytes:
            pieces.append({})
            filled = 0
        pieces[-1][path] = tensor
        filled += tensor.nbytes
    for old in directory.glob(f"{name}-*.safetensors"):
        old.unlink()
    paths = []
    for number, piece in enumerate(pieces):
        path = directory / f"{name}-{number}.safetensors"
        save_file(piece, path, metadata={"pieces": str(len(pieces))})
        paths.append(path)
    return paths


def load_pieces(directory: Path, name: str) -> dict[str, np.ndarray]:
    """Returns the tensors of all of a set of pieces.

    Raises:
      FileNotFoundError: A piece is missing.
    """
    first = directory / f"{name}-0.safetensors"
    with safe_open(first, "numpy") as file:
        count = int(file.metadata()["pieces"])
    tensors: dict[str, np.ndarray] = {}
    for number in range(count):
        tensors |= load_file(directory / f"{name}-{number}.safetensors")
    return tensors
