"""Owns the way from a canonical checkpoint directory to sharded parameters.

The directory is documented in docs/checkpoint.md; `convert` writes it. Its
manifest is written last, so a directory without one is not complete. Does not
know about other checkpoint formats or the names in them.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Literal, TypeGuard

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import CheckpointError
from ddtree_jax.hf_config import read_draft_config, read_model_config
from ddtree_jax.model.params import (
    DFlash,
    KimiK2,
    check_divisible,
    map_parameters,
    named_parameters,
    with_shardings,
)

MANIFEST = "manifest.json"
PARAMS = "params"
FORMAT = "ddtree_jax-checkpoint"
VERSION = 2
# Of stored arrays, by NumPy's names.
_DTYPES = ("bfloat16", "float16", "float32", "int32", "int64", "uint8")

type Kind = Literal["target", "draft"]


def restore_target(
    directory: Path,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    latent_norm_eps: float | None = None,
) -> tuple[ModelConfig, KimiK2]:
    """Returns the target's configuration, and its parameters as arrays on `mesh`.

    Args:
      directory: A checkpoint directory of kind "target".
      dtype: Of the parameters stored as bfloat16. INT4 scales keep bfloat16.
      latent_norm_eps: As in `read_model_config`.

    Raises:
      CheckpointError: The directory is incomplete, damaged or of another kind.
      ConfigError: `mesh` does not divide the model, or config.json is unusable.
    """
    manifest = read_manifest(directory, kind="target")
    config = read_model_config(directory, latent_norm_eps=latent_norm_eps)
    check_divisible(config, mesh.size)
    return config, _restore(directory, manifest, KimiK2(config), mesh, dtype)


def restore_draft(
    directory: Path,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    rope_amplitude: float | None = None,
) -> tuple[DraftConfig, DFlash]:
    """Returns the drafter's configuration, and its parameters as arrays on `mesh`.

    Args:
      directory: A checkpoint directory of kind "draft".
      dtype: Of the parameters, which are stored as bfloat16.
      rope_amplitude: As in `read_draft_config`.

    Raises:
      CheckpointError: The directory is incomplete, damaged or of another kind.
      ConfigError: `mesh` does not divide the model, or config.json is unusable.
    """
    manifest = read_manifest(directory, kind="draft")
    config = read_draft_config(directory, rope_amplitude=rope_amplitude)
    check_divisible(config, mesh.size)
    return config, _restore(directory, manifest, DFlash(config), mesh, dtype)


def read_manifest(directory: Path, *, kind: Kind | None = None) -> dict:
    """Returns the manifest of a complete checkpoint directory.

    Args:
      kind: What the checkpoint has to be; None takes either.

    Raises:
      CheckpointError: There is none, or it is of another format, version or kind.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is not a {FORMAT}, or its conversion "
            "did not finish; make it with `python -m convert hf`"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')!r}; expected {VERSION}; "
            "convert the source again"
        )
    if kind is not None and manifest.get("kind") != kind:
        raise CheckpointError(
            f"{path}: kind {manifest.get('kind')!r}; expected {kind!r}"
        )
    if not isinstance(manifest.get("tensors"), dict):
        raise CheckpointError(f"{path}: tensors is missing; expected an object")
    return manifest


def _restore[M: nnx.Module](
    directory: Path, manifest: dict, model: M, mesh: Mesh, dtype: DTypeLike
) -> M:
    check_manifest(directory, manifest, model)
    check_arrays(directory / PARAMS, manifest["tensors"], nested=True)
    abstract = with_shardings(model, mesh, dtype=dtype)
    tree: dict = {}
    for path, parameter in named_parameters(abstract).items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = parameter.get_value()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore((directory / PARAMS).absolute(), tree)
    except Exception as error:  # Orbax raises the bare class for unreadable chunks
        reason = " ".join(str(error.__cause__ or error).split())
        raise CheckpointError(
            f"{directory / PARAMS} cannot be restored: {reason}"
        ) from error
    arrays = {
        "/".join(key.key for key in keys): array
        for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    return map_parameters(lambda path, _: arrays[path], abstract)


def check_manifest(directory: Path, manifest: dict, model: nnx.Module) -> None:
    """Raises CheckpointError unless the stored arrays are those of `model`."""
    path = directory / MANIFEST
    stored = manifest["tensors"]
    wanted = named_parameters(model)
    for name in sorted(stored.keys() ^ wanted.keys()):
        what = "unknown" if name in stored else "missing"
        raise CheckpointError(f"{path}: {name} is {what}; config.json does not fit")
    for name, parameter in wanted.items():
        _check_entry(f"{path}: {name}", stored[name])
        got = (stored[name].get("dtype"), stored[name].get("shape"))
        expected = (str(parameter.dtype), list(parameter.shape))
        if got != expected:
            raise CheckpointError(
                f"{path}: {name} is {got[0]} {got[1]}; expected {expected[0]} "
                f"{expected[1]} from config.json"
            )


def check_arrays(directory: Path, entries: dict, *, nested: bool) -> None:
    """Raises CheckpointError unless every chunk is there, and as long as it must be.

    Orbax finds this too, but only while it reads, and says it at great length.

    Args:
      directory: An Orbax checkpoint, `params` or `extra`.
      entries: The manifest's, by array.
      nested: Whether "/" in a name means a subtree.
    """
    for name, entry in entries.items():
        array = directory / (name.replace("/", ".") if nested else name)
        _check_entry(f"{directory.parent / MANIFEST}: {name}", entry)
        _check_header(array / "zarr.json", entry)
        itemsize = jax.numpy.dtype(entry["dtype"]).itemsize
        nbytes = math.prod(entry["chunk"]) * itemsize
        counts = zip(entry["shape"], entry["chunk"], strict=True)
        for index in itertools.product(*(range(n // c) for n, c in counts)):
            path = array.joinpath("c", *map(str, index))
            if (size := _size(path)) != nbytes:
                raise CheckpointError(f"{path} has {size} bytes; expected {nbytes}")


def _check_entry(what: str, entry: object) -> None:
    """Raises CheckpointError unless a manifest's entry describes an array."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{what} is {entry!r}; expected an object")
    shape, chunk = entry.get("shape"), entry.get("chunk")
    if not (_naturals(shape) and all(shape)):
        raise CheckpointError(f"{what} has the shape {shape!r}; expected numbers ≥ 1")
    if not (
        _naturals(chunk)
        and len(chunk) == len(shape)
        and all(c and n % c == 0 for n, c in zip(shape, chunk, strict=True))
    ):
        raise CheckpointError(
            f"{what} has the chunk {chunk!r}; expected a divisor of {shape}"
        )
    if not any(entry.get("dtype") == dtype for dtype in _DTYPES):
        raise CheckpointError(
            f"{what} has the dtype {entry.get('dtype')!r}; expected one of "
            f"{', '.join(_DTYPES)}"
        )


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_header(path: Path, entry: dict) -> None:
    _size(path)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        grid = header["chunk_grid"]["configuration"]["chunk_shape"]
        got = (header["data_type"], header["shape"], grid)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a zarr3 array's: {error!r}") from None
    expected = (entry["dtype"], entry["shape"], entry["chunk"])
    if got != expected:
        raise CheckpointError(f"{path} says {got}; expected {expected}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path} is missing; the manifest names it") from None
