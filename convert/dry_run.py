"""Owns the report of what a conversion would do, made from headers alone.

Everything is checked that a conversion checks before it reads weights, except that
`weight_shape` tensors are not read: what they state is compared when converting.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from convert.checkpoint import Checkpoint
from convert.hf_target import split_in_parts
from convert.leaf import Leaf
from convert.ours_target import check_draft
from convert.plan import Plan, make_plan
from convert.sglang.target import make_division, rank_tensors
from convert.sglang.write import part_indices
from convert.staging import check_apart, check_space, free_bytes, refuse_existing
from ddtree_jax.errors import ConfigError
from ddtree_jax.model.params import check_divisible

# The machines that this is made for: devices, and the bytes of each.
MACHINES = {"8 × H200": (8, 141 * 10**9), "8 × RTX PRO 6000": (8, 96 * 10**9)}
_LARGEST = 6


def report_to_ours(
    source: Checkpoint, destination: Path, *, draft: Checkpoint | None
) -> None:
    """Prints what `convert_to_ours` of the same arguments would do.

    Raises:
      DDTreeError: It would be refused; the message says why.
    """
    checkpoints = [source]
    if draft is not None:
        check_draft(source, draft)
        checkpoints.append(draft)
    plans = [make_plan(checkpoint) for checkpoint in checkpoints]
    nbytes = sum(plan.nbytes for plan in plans)
    for checkpoint, plan in zip(checkpoints, plans, strict=True):
        print("\n".join(_describe(checkpoint, plan)))
        print("\n".join(_describe_arrays(plan)))
    print("\n".join(_memory(checkpoints, plans)))
    _check_place(checkpoints, destination, nbytes)


def report_to_hf(
    source: Checkpoint,
    destination: Path,
    *,
    draft: Checkpoint | None,
    part_bytes: int,
) -> None:
    """Prints what `convert_to_hf` of the same arguments would do.

    Raises:
      DDTreeError: It would be refused; the message says why.
    """
    checkpoints = [source, *([draft] if draft else [])]
    for checkpoint in checkpoints:
        print("\n".join(_describe(checkpoint, make_plan(checkpoint))))
        parts = split_in_parts(list(checkpoint.tensors.values()), part_bytes)
        largest = max(sum(tensor.nbytes for tensor in part) for part in parts)
        print(f"  to Hugging Face: {_files(len(parts))}, at most {largest} bytes each")
    nbytes = sum(checkpoint.nbytes for checkpoint in checkpoints)
    _check_place(checkpoints, destination, nbytes)


def report_to_sglang(
    source: Checkpoint,
    destination: Path,
    *,
    draft: Checkpoint | None,
    tp: int,
    ep: int = 1,
    layout: str = "marlin",
    part_bytes: int,
) -> None:
    """Prints what `convert_to_sglang` of the same arguments would do.

    Raises:
      DDTreeError: It would be refused; the message says why.
    """
    division = make_division(tp, ep, layout)
    checkpoints = [source, *([draft] if draft else [])]
    total = 0
    for checkpoint in checkpoints:
        print("\n".join(_describe(checkpoint, make_plan(checkpoint))))
        ranks = rank_tensors(checkpoint, tp, division)
        nbytes = sum(tensor.nbytes for tensor in ranks[0])
        print(
            f"  to SGLang sharded_state, {layout}, tp {tp}, ep {ep}: {len(ranks[0])} "
            f"tensors, {nbytes} bytes on each of {tp} ranks, "
            f"{_files(len(part_indices(ranks[0], part_bytes)))} each"
        )
        total += tp * nbytes
    _check_place(checkpoints, destination, total)


def device_bytes(leaf: Leaf, devices: int) -> int:
    """Returns the bytes of an array on each device, divided or copied."""
    return leaf.nbytes // (1 if leaf.split_axis is None else devices)


def _describe(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    tensors = checkpoint.tensors.values()
    dtypes = Counter(tensor.dtype for tensor in tensors)
    yield f"{checkpoint.directory}: {checkpoint.format}"
    yield (
        f"  {len(tensors)} tensors in {len(checkpoint.files)} files, "
        f"{checkpoint.nbytes} bytes, names, shapes and dtypes as they must be"
    )
    yield "  " + ", ".join(
        f"{count} {dtype}" for dtype, count in sorted(dtypes.items())
    )
    yield (
        f"  {len(plan.params)} arrays of the text model, "
        f"{sum(leaf.nbytes for leaf in plan.params)} bytes; {len(plan.extra)} tensors "
        f"of the image path, {sum(leaf.nbytes for leaf in plan.extra)} bytes; "
        f"{len(plan.stated_shapes)} weight_shape tensors, not read now"
    )
    for loss in checkpoint.losses:
        yield f"  not bit for bit: {loss}"
    if not checkpoint.losses:
        yield "  nothing is lost: every bit is carried"


def _describe_arrays(plan: Plan) -> Iterator[str]:
    for leaf in sorted(plan.leaves, key=_bytes, reverse=True)[:_LARGEST]:
        chunk = math.prod(leaf.layout()[0]) * leaf.dtype.itemsize
        yield (
            f"  {leaf.path} {leaf.dtype.name} {list(leaf.shape)}: {leaf.nbytes} bytes "
            f"in chunks of {chunk}"
        )


def _memory(checkpoints: Sequence[Checkpoint], plans: Sequence[Plan]) -> Iterator[str]:
    """Yields a line a machine: bytes of the weights on each device."""
    for name, (devices, capacity) in MACHINES.items():
        try:
            for checkpoint in checkpoints:
                check_divisible(checkpoint.config, devices)
        except ConfigError as error:
            yield f"{name}: {error}"
            continue
        used = sum(device_bytes(leaf, devices) for p in plans for leaf in p.params)
        left = capacity - used
        verdict = f"fits, {left} left" if left >= 0 else f"does not fit, {-left} short"
        yield f"{name}: {used} bytes of weights a device of {capacity}: {verdict}"


def _check_place(
    checkpoints: Sequence[Checkpoint], destination: Path, nbytes: int
) -> None:
    """Prints the bytes to write; raises CheckpointError if they cannot be written."""
    print(
        f"{destination}: {nbytes} bytes to write, {free_bytes(destination)} bytes free"
    )
    for checkpoint in checkpoints:
        check_apart(checkpoint.directory, destination)
    refuse_existing(destination)
    check_space(destination, nbytes)


def _files(count: int) -> str:
    return f"{count} file{'s' * (count > 1)}"


def _bytes(leaf: Leaf) -> int:
    return leaf.nbytes
