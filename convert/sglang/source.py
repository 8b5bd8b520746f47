"""Owns the Hugging Face view of what SGLang's ranks hold.

How a tensor is divided is inferred from its shape, one by one: attention is whole on
each rank under data-parallel attention, experts may be divided instead of their
widths, and the image path may be whole. What more than one rank holds must be equal;
that is checked as it is read.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from convert.checkpoint import Checkpoint, read_config
from convert.sglang.division import find_division
from convert.sglang.experts import ExpertTensor, Store, make_cache
from convert.sglang.names import (
    Parameter,
    Routed,
    draft_parameters,
    target_parameters,
)
from convert.sglang.pieces import RowRange, Rows, join_columns, same
from convert.sglang.presharded import find_dump, read_presharded
from convert.sglang.ranks import GLOB, Ranks, read_ranks
from convert.sglang.vision import stored_kinds, vision_parameters
from convert.tensor import DerivedTensor, Tensor
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError
from ddtree_jax.hf_config.quantisation import read_quantisation

_SHOWN = 3
# Where SGLang has fused_qkv_a_proj_with_mqa.
_VLLM = ".self_attn.fused_qkv_a_proj.weight"


def is_sglang(directory: Path) -> bool:
    """Says whether the weights in a directory are in a form of SGLang's only."""
    if any(directory.glob(GLOB)):
        return True
    return not any(directory.glob("*.safetensors")) and find_dump(directory) is not None


def open_sglang(directory: Path) -> Checkpoint:
    """Returns a sharded_state or presharded checkpoint, of a target or a drafter.

    Raises:
      CheckpointError: Files or tensors are missing, left over or of another shape.
      UnsupportedFormatError: Its layout is refused.
      ConfigError: config.json is missing or unsupported.
    """
    if any(directory.glob(GLOB)):
        ranks = read_ranks(directory)
    elif (dump := find_dump(directory)) is not None:
        ranks = read_presharded(dump)
    else:
        raise CheckpointError(
            f"{directory} has neither {GLOB} nor a presharded dump; expected what "
            "SGLang saves as sharded_state or presharded"
        )
    _refuse_vllm(ranks)
    config = read_config(ranks.directory)
    if isinstance(config, ModelConfig):
        read_quantisation(ranks.directory)
        parameters = target_parameters(config, _embedding(ranks))
        vision = vision_parameters(stored_kinds(ranks.tensors[0]), ranks.directory)
        parameters += vision
    else:
        parameters = draft_parameters(config, ())
    return Checkpoint(
        directory=ranks.directory,
        format=ranks.format,
        config=config,
        tensors=_view(ranks, parameters),
        files=ranks.files,
    )


def _refuse_vllm(ranks: Ranks) -> None:
    """Raises UnsupportedFormatError for vLLM's files, which are named as SGLang's."""
    for name, tensor in ranks.tensors[0].items():
        if name.endswith(_VLLM):
            raise UnsupportedFormatError(
                f"{tensor.file}: unsupported format: vLLM's sharded_state ({name}); "
                "expected SGLang's"
            )


def _embedding(ranks: Ranks) -> list[str]:
    """Returns the view's names of embedding and head, which tell the prefix."""
    inner = "language_model.model.embed_tokens.weight"
    if inner in ranks.tensors[0]:
        return [inner, "language_model.lm_head.weight"]
    return ["model.embed_tokens.weight", "lm_head.weight"]


def _view(ranks: Ranks, parameters: Sequence[Parameter | Routed]) -> dict[str, Tensor]:
    """Returns the view, after checking that every tensor belongs to it."""
    used: set[str] = set()
    view: dict[str, Tensor] = {}
    cache = make_cache()
    for parameter in parameters:
        if isinstance(parameter, Routed):
            division = find_division(ranks.tensors, parameter)
            store = Store(parameter, division, ranks.tensors, cache)
            used |= _check_experts(ranks, store)
            view |= _experts(store)
        else:
            used.add(parameter.name)
            view |= _divided(ranks, parameter)
    left = [t for name, t in ranks.tensors[0].items() if name not in used]
    if left:
        names = ", ".join(t.name for t in left[:_SHOWN])
        more = ", …" if len(left) > _SHOWN else ""
        raise CheckpointError(
            f"{left[0].file}: tensors left over ({len(left)}): {names}{more}; expected "
            "only the model's"
        )
    return view


def _divided(ranks: Ranks, parameter: Parameter) -> dict[str, Tensor]:
    """Returns the tensors of the view that one parameter of all ranks holds."""
    stored = _of_all(ranks, parameter.name)
    split = _split(parameter, stored)
    if parameter.axis == 1:
        (part,) = parameter.parts
        pieces = [same(stored[number::split]) for number in range(split)]
        return {part.tensor: join_columns(part.tensor, pieces)}
    ranges: dict[str, list[RowRange]] = {}
    at = 0
    for part in parameter.parts:
        cuts = part.cuts(split) or 1
        size = part.size // cuts
        for number in range(cuts):
            # Ranks beyond `split` repeat; of those within, neighbours share a cut.
            holders = [
                tensor
                for rank, tensor in enumerate(stored)
                if rank % split * cuts // split == number
            ]
            piece = RowRange(same(holders), at, at + size)
            ranges.setdefault(part.tensor, []).append(piece)
        at += size
    return {name: Rows(name, tuple(pieces)) for name, pieces in ranges.items()}


def _split(parameter: Parameter, stored: list[Tensor]) -> int:
    """Returns how many ranks divide a parameter; it lies whole on them together."""
    first, count = stored[0], len(stored)
    shapes = {n: parameter.shape_of(n) for n in range(1, count + 1) if count % n == 0}
    for split, shape in shapes.items():
        if (first.dtype, first.shape) == (parameter.dtype, shape):
            return split
    known = [str(list(shape)) for shape in shapes.values() if shape is not None]
    raise CheckpointError(
        f"{first.file}: {first.name} is {first.dtype} {list(first.shape)}; expected "
        f"{parameter.dtype} {' or '.join(known)} on {count} rank{'s' * (count > 1)}"
    )


def _of_all(ranks: Ranks, name: str) -> list[Tensor]:
    """Returns one tensor of every rank, all of one dtype and shape."""
    if name not in ranks.tensors[0]:
        raise CheckpointError(f"{ranks.directory}: tensors missing (1): {name}")
    stored = [own[name] for own in ranks.tensors]
    first = stored[0]
    for other in stored:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CheckpointError(
                f"{other.file}: {name} is {other.dtype} {list(other.shape)}; expected "
                f"{first.dtype} {list(first.shape)} as in {first.file.name}"
            )
    return list(stored)


def _check_experts(ranks: Ranks, store: Store) -> set[str]:
    """Returns the names of a layer's experts, after checking dtypes and shapes."""
    names = set(store.division.kinds(store.routed) or ())
    for name in names:
        _of_all(ranks, name)
    for name, kind in store.division.bookkeeping(store.routed).items():
        if name not in ranks.tensors[0]:
            continue
        for tensor in _of_all(ranks, name):
            if (tensor.dtype, tensor.shape) != kind:
                raise CheckpointError(
                    f"{tensor.file}: {name} is {tensor.dtype} {list(tensor.shape)}; "
                    f"expected {kind[0]} {list(kind[1])}"
                )
        names.add(name)
    return names


def _experts(store: Store) -> dict[str, Tensor]:
    """Returns a layer's tensors of the view; weight_shape follows from the rest."""
    routed = store.routed
    inward = np.array([routed.inner, routed.hidden], np.int32)
    outward = np.ascontiguousarray(inward[::-1])
    view: dict[str, Tensor] = {}
    for expert in range(routed.experts):
        for which in ("gate", "up", "down"):
            name = f"{routed.view}{expert}.{which}_proj.weight_"
            for what in ("packed", "scale"):
                tensor = ExpertTensor(name + what, store, expert, which, what)
                view[tensor.name] = tensor
            stated = outward if which == "down" else inward
            rows = partial(_stated, stated)
            file = view[f"{name}packed"].file
            view[f"{name}shape"] = DerivedTensor(
                f"{name}shape", file, "I32", (2,), rows
            )
    return view


def _stated(shape: np.ndarray, start: int, stop: int) -> np.ndarray:
    return shape[start:stop]
