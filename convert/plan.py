"""Owns the bijection: each source tensor used once, each canonical array made once."""

import dataclasses

import numpy as np

from convert.checkpoint import Checkpoint
from convert.leaf import Leaf, RowSlice
from convert.rules import Rule, draft_rules, is_extra, source_shape, target_rules
from convert.tensor import DTYPE_NAMES, DTYPES, Tensor, read_array
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError
from ddtree_jax.mesh import MESH_AXES
from ddtree_jax.model.params import DFlash, KimiK2, named_parameters
from ddtree_jax.quant import NIBBLES_PER_WORD

_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
      params: The canonical arrays.
      extra: Tensors that the text engine does not use, under their own names.
      stated_shapes: The `weight_shape` tensors, of one dtype, each with the packed
        tensor whose [out, in] it states. They follow from it and are not stored.
    """

    params: tuple[Leaf, ...]
    extra: tuple[Leaf, ...]
    stated_shapes: tuple[tuple[Tensor, Tensor], ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All arrays that are written."""
        return (*self.params, *self.extra)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are written."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def weight_shape_dtype(self) -> str | None:
        """Dtype of the `weight_shape` tensors; None when the source has none."""
        return self.stated_shapes[0][0].dtype if self.stated_shapes else None

    def check_stated_shapes(self) -> None:
        """Raises CheckpointError if a `weight_shape` states another shape.

        The one check of a plan that reads tensors, and not only headers.
        """
        for tensor, packed in self.stated_shapes:
            stated = read_array(tensor).tolist()
            out, words = packed.shape
            if stated != [out, words * NIBBLES_PER_WORD]:
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name} is {stated}; expected "
                    f"{[out, words * NIBBLES_PER_WORD]} from {packed.name}"
                )


def make_plan(source: Checkpoint) -> Plan:
    """Returns how to make every canonical array from `source`; reads no tensor.

    Raises:
      CheckpointError: Tensors are missing, left over, or of another shape or dtype.
    """
    config = source.config
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
    names = {p: by_path[p].names(a.shape) for p, a in parameters.items()}
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
    stated = _stated_shapes(source, names, shapes)
    return Plan(tuple(params), tuple(map(_extra_leaf, extra)), stated)


def _unused(source: Checkpoint, names: dict[str, list[str]]) -> dict[str, Tensor]:
    """Returns the tensors that no rule names, after refusing if any is missing."""
    wanted = {name for group in names.values() for name in group}
    missing = sorted(wanted - source.tensors.keys())
    if missing:
        raise CheckpointError(
            f"{source.directory}: tensors missing ({len(missing)}): {_first(missing)}"
        )
    return {n: t for n, t in source.tensors.items() if n not in wanted}


def _stated_shapes(
    source: Checkpoint, names: dict[str, list[str]], shapes: dict[str, Tensor]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns each weight_shape tensor with the packed tensor that it describes."""
    if not shapes:
        return ()
    suffix = ".weight_packed"
    packed = {
        f"{name.removesuffix(suffix)}.weight_shape": source.tensors[name]
        for group in names.values()
        for name in group
        if name.endswith(suffix)
    }
    for what, wrong in (
        ("missing", sorted(packed.keys() - shapes.keys())),
        ("left over", sorted(shapes.keys() - packed.keys())),
    ):
        if wrong:
            raise CheckpointError(
                f"{source.directory}: tensors {what} ({len(wrong)}): {_first(wrong)}"
            )
    for tensor in shapes.values():
        if tensor.dtype not in ("I32", "I64") or tensor.shape != (2,):
            raise _wrong(tensor, "I32 or I64 [2]")
    if len({tensor.dtype for tensor in shapes.values()}) > 1:
        raise CheckpointError(
            f"{source.directory}: weight_shape tensors are I32 and I64; expected one"
        )
    return tuple((shapes[name], packed[name]) for name in packed)


def _leaf(
    source: Checkpoint, rule: Rule, array, names: list[str], head: tuple[int, int]
):
    sources = tuple(source.tensors[name] for name in names)
    dtype = np.dtype(array.dtype)
    expected = source_shape(rule, array.shape, sum(head))
    for tensor in sources:
        if tensor.dtype != DTYPE_NAMES[dtype] or tensor.shape != expected:
            raise _wrong(tensor, f"{DTYPE_NAMES[dtype]} {list(expected)}")
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
        pattern=rule.summary(array.shape),
        rows=parts.get(rule.shape),
    )


def _extra_leaf(tensor: Tensor) -> Leaf:
    if tensor.dtype not in DTYPES or tensor.nbytes == 0:
        raise _wrong(tensor, f"one of {', '.join(DTYPES)} and at least one element")
    return Leaf(
        path=tensor.name,
        shape=tensor.shape,
        dtype=DTYPES[tensor.dtype],
        split_axis=None,
        lead=0,
        sources=(tensor,),
        pattern=tensor.name,
        check_finite=False,  # carried bit for bit, whatever it holds
    )


def _wrong(tensor: Tensor, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.file}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
        f"expected {expected}"
    )


def _first(names: list[str]) -> str:
    more = ", …" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
