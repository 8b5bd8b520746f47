"""Owns the bijection: each source tensor used once, each canonical array made once."""

import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from convert.formats import refuse_foreign_formats
from convert.leaf import Leaf, RowSlice
from convert.rules import Rule, draft_rules, is_extra, source_shape, target_rules
from convert.safetensors_file import Tensor
from convert.source import Source
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError
from ddtree_jax.mesh import MESH_AXES
from ddtree_jax.model.params import DFlash, KimiK2, named_parameters
from ddtree_jax.quant import NIBBLES_PER_WORD

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
      params: The canonical arrays.
      extra: Tensors that the text engine does not use, under their own names.
      weight_shape_dtype: Of the `weight_shape` tensors, which follow from the
        packed shapes and are not stored; None when the source has none.
    """

    params: tuple[Leaf, ...]
    extra: tuple[Leaf, ...]
    weight_shape_dtype: str | None


def make_plan(source: Source, config: ModelConfig | DraftConfig) -> Plan:
    """Returns how to make every canonical array from `source`.

    Raises:
      CheckpointError: Tensors are missing, left over, or of another shape or dtype.
      UnsupportedFormatError: The weights are quantised in another way.
    """
    refuse_foreign_formats(source.tensors.values())
    if isinstance(config, ModelConfig):
        rules = target_rules(config, source.tensors)
        parameters = named_parameters(KimiK2(config))
        head = (config.qk_nope_head_dim, config.v_head_dim)
    else:
        rules, parameters = (
            draft_rules(source.tensors),
            named_parameters(DFlash(config)),
        )
        head = (0, 0)
    by_path = {rule.path: rule for rule in rules}
    assert by_path.keys() == parameters.keys(), by_path.keys() ^ parameters.keys()
    names = {p: _source_names(by_path[p], a.shape) for p, a in parameters.items()}
    _refuse_other_quantisation(source, names)
    unused = _unused(source, names)
    shapes = {n: t for n, t in unused.items() if n.endswith(".weight_shape")}
    extra = [t for n, t in unused.items() if is_extra(n)]
    left = [t for n, t in unused.items() if n not in shapes and not is_extra(n)]
    if left:
        raise CheckpointError(
            f"{left[0].file}: tensors left over ({len(left)}): "
            f"{_first([t.name for t in left])}; expected only the model's"
        )
    params = [
        _leaf(source, by_path[path], array, names[path], head)
        for path, array in parameters.items()
    ]
    weight_shape_dtype = _check_weight_shapes(source, names, shapes)
    return Plan(tuple(params), tuple(map(_extra_leaf, extra)), weight_shape_dtype)


def _source_names(rule: Rule, shape: Sequence[int]) -> list[str]:
    layers = range(shape[0]) if rule.lead > 0 else (0,)
    experts = range(shape[1]) if rule.lead > 1 else (0,)
    return [
        rule.pattern.format(layer=layer + rule.first_layer, expert=expert)
        for layer in layers
        for expert in experts
    ]


def _unused(source: Source, names: dict[str, list[str]]) -> dict[str, Tensor]:
    """Returns the tensors that no rule names, after refusing if any is missing."""
    wanted = {name for group in names.values() for name in group}
    missing = sorted(wanted - source.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{source.directory}: tensors missing ({len(missing)}): {_first(missing)}"
        )
    return {n: t for n, t in source.tensors.items() if n not in wanted}


def _refuse_other_quantisation(source: Source, names: dict[str, list[str]]) -> None:
    """Raises UnsupportedFormatError unless exactly the routed experts are packed."""
    for group in names.values():
        for name in group:
            base, _, last = name.rpartition(".")
            if name in source.tensors:
                continue
            if last == "weight_packed" and f"{base}.weight" in source.tensors:
                plain = source.tensors[f"{base}.weight"]
                raise UnsupportedFormatError(
                    f"{plain.file}: unquantised experts ({plain.name} is "
                    f"{plain.dtype}) are not supported; expected {name}"
                )
            if last == "weight" and f"{base}.weight_packed" in source.tensors:
                packed = source.tensors[f"{base}.weight_packed"]
                raise UnsupportedFormatError(
                    f"{packed.file}: unsupported quantisation of {base}; only routed "
                    "experts may be INT4"
                )


def _check_weight_shapes(
    source: Source, names: dict[str, list[str]], shapes: dict[str, Tensor]
) -> str | None:
    """Returns the dtype of the weight_shape tensors, each of which states [out, in]."""
    if not shapes:
        return None
    suffix = ".weight_packed"
    packed = [n for group in names.values() for n in group if n.endswith(suffix)]
    dtypes = set()
    for name in packed:
        shape_name = f"{name.removesuffix(suffix)}.weight_shape"
        if shape_name not in shapes:
            raise CheckpointError(
                f"{source.directory}: tensors missing (1): {shape_name}"
            )
        tensor = shapes[shape_name]
        if tensor.dtype not in ("I32", "I64") or tensor.shape != (2,):
            raise _wrong(tensor, "I32 or I64 [2]")
        stated = np.empty(2, _DTYPES[tensor.dtype])
        tensor.read_into(memoryview(stated.view(np.uint8)), 0)
        out, words = source.tensors[name].shape
        if stated.tolist() != [out, words * NIBBLES_PER_WORD]:
            raise CheckpointError(
                f"{tensor.file}: {shape_name} is {stated.tolist()}; expected "
                f"{[out, words * NIBBLES_PER_WORD]} from {name}"
            )
        dtypes.add(tensor.dtype)
    if len(shapes) != len(packed):
        over = sorted(
            shapes.keys() - {f"{n.removesuffix(suffix)}.weight_shape" for n in packed}
        )
        raise CheckpointError(
            f"{source.directory}: tensors left over ({len(over)}): {_first(over)}"
        )
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{source.directory}: weight_shape tensors are I32 and I64; expected one"
        )
    return dtypes.pop()


def _leaf(source: Source, rule: Rule, array, names: list[str], head: tuple[int, int]):
    sources = tuple(source.tensors[name] for name in names)
    dtype = np.dtype(array.dtype)
    expected = source_shape(rule, array.shape, sum(head))
    for tensor in sources:
        if tensor.dtype != _NAMES[dtype] or tensor.shape != expected:
            raise _wrong(tensor, f"{_NAMES[dtype]} {list(expected)}")
    split = [i for i, axis in enumerate(array.axes) if MESH_AXES.get(axis) is not None]
    keys, values = head
    parts = {
        "keys": RowSlice(keys + values, 0, keys),
        "values": RowSlice(keys + values, keys, keys + values),
    }
    return Leaf(
        path=rule.path,
        shape=tuple(array.shape),
        dtype=dtype,
        split_axis=split[0] if split else None,
        lead=rule.lead,
        sources=sources,
        pattern=_range_pattern(rule, array.shape),
        rows=parts.get(rule.shape),
    )


def _extra_leaf(tensor: Tensor) -> Leaf:
    if tensor.dtype not in _DTYPES or tensor.nbytes == 0:
        raise _wrong(tensor, f"one of {', '.join(_DTYPES)} and at least one element")
    return Leaf(
        path=tensor.name,
        shape=tensor.shape,
        dtype=_DTYPES[tensor.dtype],
        split_axis=None,
        lead=0,
        sources=(tensor,),
        pattern=tensor.name,
        check_finite=False,  # carried bit for bit, whatever it holds
    )


def _range_pattern(rule: Rule, shape: Sequence[int]) -> str:
    """Returns the sources' names in one: layers.{1..60}.mlp.experts.{0..383}.…"""
    ranges = {"layer": "", "expert": ""}
    if rule.lead > 0:
        last = rule.first_layer + shape[0] - 1
        ranges["layer"] = f"{{{rule.first_layer}..{last}}}"
    if rule.lead > 1:
        ranges["expert"] = f"{{0..{shape[1] - 1}}}"
    return rule.pattern.format(**ranges)


def _wrong(tensor: Tensor, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
        f"expected {expected}"
    )


def _first(names: list[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
