"""Owns the way back: a canonical checkpoint, read as the Hugging Face view.

The inverse of `rules.py`, from the same rules. The names are the source's own: the
manifest keeps them, with whatever prefix they had. `weight_shape` tensors are made
from the packed shapes, in the dtype that the manifest states.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from convert import digest
from convert.checkpoint import Checkpoint, read_config
from convert.data_files import DATA_FILES
from convert.rules import Rule, draft_rules, source_shape, target_rules
from convert.safetensors_file import NAME
from convert.stored import StoredArray
from convert.tensor import DTYPE_NAMES, DTYPES, DerivedTensor
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError
from ddtree_jax.model.params import DFlash, KimiK2
from ddtree_jax.model.restore import (
    FORMAT,
    MANIFEST,
    PARAMS,
    Kind,
    check_arrays,
    check_manifest,
    read_manifest,
)
from ddtree_jax.quant import NIBBLES_PER_WORD

EXTRA = "extra"

type Rows = Callable[[int, int], np.ndarray]
type Seen = Callable[[StoredArray, int, np.ndarray], None]


def open_ours(directory: Path, *, seen: Seen | None = None) -> Checkpoint:
    """Returns a canonical checkpoint directory as the Hugging Face view.

    Args:
      seen: As in `StoredArray`, for every array.

    Raises:
      CheckpointError: It is incomplete, or not as its manifest says.
      ConfigError: config.json is missing or unsupported.
    """
    config = read_config(directory)
    is_target = isinstance(config, ModelConfig)
    manifest = _read(directory, "target" if is_target else "draft")
    model = KimiK2(config) if isinstance(config, ModelConfig) else DFlash(config)
    check_manifest(directory, manifest, model)
    params, extra = _stored(directory, manifest, seen)
    names = [str(e.get("source")) for e in manifest["tensors"].values()]
    if isinstance(config, ModelConfig):
        rules = target_rules(config, names)
    else:
        rules = draft_rules(names)
    _check_names(directory, manifest, rules)
    tensors = [*_tensors(rules, params), *map(_extra_tensor, extra.items())]
    if manifest["weight_shape_dtype"] is not None:
        tensors += _stated_shapes(tensors, manifest["weight_shape_dtype"])
    return Checkpoint(
        directory=directory,
        format=FORMAT,
        config=config,
        tensors={tensor.name: tensor for tensor in tensors},
        files=tuple(a.directory for a in (*params.values(), *extra.values())),
        losses=tuple(manifest["losses"]),
    )


def is_ours(directory: Path) -> bool:
    """Says whether a directory is a canonical checkpoint, or means to be one."""
    return (directory / MANIFEST).exists()


def stated_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yields path and stated hash of every data file of a canonical directory."""
    for name, entry in _read(directory)["files"].items():
        yield directory / name, str(entry.get(digest.NAME))


def stored_arrays(
    directory: Path, *, seen: Seen
) -> Iterator[tuple[str, StoredArray, str]]:
    """Yields name, array and stated hash of every array of a canonical directory.

    Args:
      seen: As in `open_ours`.
    """
    manifest = _read(directory)
    params, extra = _stored(directory, manifest, seen)
    for key, arrays in (("tensors", params), ("extra", extra)):
        for name, array in arrays.items():
            yield name, array, str(manifest[key][name].get(digest.NAME))


def _read(directory: Path, kind: Kind | None = None) -> dict:
    """Returns the manifest, checked as far as it is used here."""
    manifest = read_manifest(directory, kind=kind)
    path = directory / MANIFEST
    for key in ("extra", "files", "source"):
        if not isinstance(manifest.get(key), dict):
            raise CheckpointError(f"{path}: {key} is missing; expected an object")
    for name in manifest["extra"]:
        if not NAME.fullmatch(name):
            raise CheckpointError(
                f"{path}: extra names {name!r}; expected letters, digits, _ and "
                "single dots"
            )
    for name, entry in manifest["files"].items():
        if name not in DATA_FILES or not isinstance(entry, dict):
            raise CheckpointError(
                f"{path}: files names {name!r}; expected a data file and its hash"
            )
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory / name} is missing; {path.name} names it"
            )
    losses = manifest.get("losses")
    if not isinstance(losses, list) or not all(isinstance(x, str) for x in losses):
        raise CheckpointError(f"{path}: losses is {losses!r}; expected a list of lines")
    if "weight_shape_dtype" not in manifest:
        raise CheckpointError(f"{path}: weight_shape_dtype is missing")
    if manifest["weight_shape_dtype"] not in (None, "I32", "I64"):
        raise CheckpointError(
            f"{path}: weight_shape_dtype is {manifest['weight_shape_dtype']!r}; "
            "expected I32, I64 or null"
        )
    return manifest


def _stored(
    directory: Path, manifest: dict, seen: Seen | None
) -> tuple[dict[str, StoredArray], dict[str, StoredArray]]:
    """Returns the arrays of `params` and `extra`, after a look at all their files."""
    found = []
    for place, key, nested in ((PARAMS, "tensors", True), (EXTRA, "extra", False)):
        check_arrays(directory / place, manifest[key], nested=nested)
        found.append(
            {
                name: StoredArray(
                    directory / place / (name.replace("/", ".") if nested else name),
                    tuple(entry["shape"]),
                    np.dtype(entry["dtype"]),
                    tuple(entry["chunk"]),
                    seen,
                )
                for name, entry in manifest[key].items()
            }
        )
    params, extra = found
    total = sum(array.nbytes for array in (*params.values(), *extra.values()))
    if manifest.get("total_bytes") != total:
        raise CheckpointError(
            f"{directory / MANIFEST}: total_bytes is {manifest.get('total_bytes')!r}; "
            f"its arrays have {total}"
        )
    return params, extra


def _check_names(directory: Path, manifest: dict, rules: list[Rule]) -> None:
    for rule in rules:
        entry = manifest["tensors"][rule.path]
        expected = rule.summary(tuple(entry["shape"]))
        if entry.get("source") != expected:
            raise CheckpointError(
                f"{directory / MANIFEST}: {rule.path} has the source "
                f"{entry.get('source')!r}; expected {expected!r}"
            )


def _tensors(
    rules: list[Rule], arrays: dict[str, StoredArray]
) -> Iterator[DerivedTensor]:
    values = {
        (rule.pattern, rule.first_layer): rule.path
        for rule in rules
        if rule.shape == "values"
    }
    for rule in rules:
        if rule.shape == "values":
            continue  # with its keys
        array = arrays[rule.path]
        parts, head_rows = [array], 0
        if rule.shape == "keys":
            parts.append(arrays[values[rule.pattern, rule.first_layer]])
            head_rows = sum(part.shape[rule.lead + 1] for part in parts)
        shape = source_shape(rule, array.shape, head_rows)
        for lead, name in zip(
            np.ndindex(array.shape[: rule.lead]), rule.names(array.shape), strict=True
        ):
            yield DerivedTensor(
                name=name,
                file=array.directory,
                dtype=DTYPE_NAMES[array.dtype],
                shape=shape,
                rows=_rows(rule, parts, lead),
            )


def _rows(rule: Rule, parts: list[StoredArray], lead: tuple[int, ...]) -> Rows:
    """Returns what gives rows of the source tensor at `lead`."""
    match rule.shape:
        case "same":
            return functools.partial(parts[0].read, lead)
        case "columns":
            return functools.partial(_columns, parts[0], lead)
        case "rows" | "keys" | "values":
            return functools.partial(_head_rows, parts, lead)


def _columns(
    array: StoredArray, lead: tuple[int, ...], start: int, stop: int
) -> np.ndarray:
    return array.read(lead, start, stop).reshape(stop - start, -1)


def _head_rows(
    parts: list[StoredArray], lead: tuple[int, ...], start: int, stop: int
) -> np.ndarray:
    """Returns rows of the tensor in which each head has the rows of all `parts`."""
    period = sum(part.shape[len(lead) + 1] for part in parts)
    first, last = start // period, -(-stop // period)
    heads = np.concatenate([p.read(lead, first, last) for p in parts], axis=1)
    rows = heads.reshape(-1, *heads.shape[2:])
    return rows[start - first * period : stop - first * period]


def _extra_tensor(item: tuple[str, StoredArray]) -> DerivedTensor:
    name, array = item
    return DerivedTensor(
        name=name,
        file=array.directory,
        dtype=DTYPE_NAMES[array.dtype],
        shape=array.shape,
        rows=functools.partial(array.read, ()),
    )


def _stated_shapes(tensors: list[DerivedTensor], dtype: str) -> Iterator[DerivedTensor]:
    suffix = ".weight_packed"
    for tensor in tensors:
        if not tensor.name.endswith(suffix):
            continue
        out, words = tensor.shape
        stated = np.array([out, words * NIBBLES_PER_WORD], DTYPES[dtype])
        yield DerivedTensor(
            name=f"{tensor.name.removesuffix(suffix)}.weight_shape",
            file=tensor.file,
            dtype=dtype,
            shape=(2,),
            rows=functools.partial(_slice, stated),
        )


def _slice(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    return array[start:stop]
