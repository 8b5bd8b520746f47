"""Owns how routed experts lie on SGLang's ranks: in which layout, and on which rank.

Expert parallelism divides the experts, tensor parallelism each expert's width. Rank
numbers run, from slow to fast, over copies, experts and width.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from convert.sglang.layouts import LAYOUTS, Form, Layout
from convert.sglang.names import Kind, Routed
from convert.tensor import Tensor
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD

type Which = Literal["gate", "up", "down"]
type What = Literal["packed", "scale"]


@dataclasses.dataclass(frozen=True)
class Division:
    """How a layer's experts lie on the ranks.

    Attributes:
      width: Ranks that divide each expert (moe_tp_size).
      groups: Groups of ranks that divide the experts (moe_ep_size).
    """

    layout: Layout
    width: int
    groups: int

    def kinds(self, routed: Routed) -> dict[str, Kind] | None:
        """Returns dtype and shape of a rank's four arrays, or None if it cannot be."""
        if self.problem(routed) is not None:
            return None
        experts, inner = routed.experts // self.groups, routed.inner // self.width
        out = {}
        for matrix, outputs, inputs in (
            ("w13", 2 * inner, routed.hidden),
            ("w2", routed.hidden, inner),
        ):
            for what in ("packed", "scale"):
                form: Form = getattr(self.layout, what)
                shape = (experts, *form.shape(outputs, inputs))
                out[f"{routed.name}{matrix}_weight_{what}"] = (form.dtype, shape)
        return out

    def bookkeeping(self, routed: Routed) -> dict[str, Kind]:
        """Returns dtype and shape of what else a rank may hold for the experts.

        Stated shapes, and the input order, which has no meaning here.
        """
        experts, inner = routed.experts // self.groups, routed.inner // self.width
        out: dict[str, Kind] = {}
        for matrix, inputs in (("w13", routed.hidden), ("w2", inner)):
            out[f"{routed.name}{matrix}_weight_shape"] = ("BF16", (experts, 2))
            for name in ("weight_g_idx", "g_idx_sort_indices"):
                out[f"{routed.name}{matrix}_{name}"] = ("I32", (experts, inputs))
        return out

    def problem(self, routed: Routed) -> str | None:
        """Says which dimension does not divide, or None."""
        inner = routed.inner // self.width
        run, step = self.layout.run, max(self.layout.step, GROUP_SIZE)
        if routed.experts % self.groups:
            return f"n_routed_experts {routed.experts} by ep {self.groups}"
        if routed.inner % (self.width * step) or 2 * inner % run:
            return (
                f"moe_intermediate_size {routed.inner} by {self.width} ranks × {step}"
            )
        if routed.hidden % max(run, GROUP_SIZE):
            return f"hidden_size {routed.hidden} by {max(run, GROUP_SIZE)}"
        return None

    def place(self, rank: int) -> tuple[int, int]:
        """Returns which group of experts and which part of the width a rank has."""
        return divmod(rank % (self.groups * self.width), self.width)


def find_division(stored: Sequence[Mapping[str, Tensor]], routed: Routed) -> Division:
    """Returns the layout and division that dtypes and shapes tell.

    Raises:
      UnsupportedFormatError: It is a layout that is refused.
      CheckpointError: No layout and division has these shapes, or one is missing.
    """
    first = stored[0]
    _refuse_by_name(first, routed)
    arrays = [
        routed.name + f"{matrix}_weight_{what}"
        for matrix in ("w13", "w2")
        for what in ("packed", "scale")
    ]
    for name in arrays:
        if name not in first:
            file = next(iter(first.values())).file
            raise CheckpointError(f"{file}: tensors missing (1): {name}")
    found = {name: (first[name].dtype, first[name].shape) for name in arrays}
    count = len(stored)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for layout, groups, width in itertools.product(
        LAYOUTS.values(), divisors, divisors
    ):
        division = Division(layout, width, groups)
        if count % (groups * width) == 0 and division.kinds(routed) == found:
            return division
    listed = [f"{n} {dtype}{list(shape)}" for n, (dtype, shape) in found.items()]
    raise CheckpointError(
        f"{first[arrays[0]].file}: {', '.join(listed)} are in no layout of {count} "
        f"ranks (marlin, raw, triton) for hidden_size {routed.hidden}, "
        f"moe_intermediate_size {routed.inner} and {routed.experts} experts; padded "
        "or foreign layouts are not read"
    )


def _refuse_by_name(stored: Mapping[str, Tensor], routed: Routed) -> None:
    """Raises UnsupportedFormatError for layouts that are known and not read."""
    npu = "SGLang's Ascend NPU layout"
    marks = {
        "w13_weight_offset": npu,
        "w13_weight_scale_inv": "FP8 experts in blocks",
        "w13_weight_global_scale": "NVFP4 experts",
        "w13_weight_scale_2": "NVFP4 experts",
    }
    for mark, kind in marks.items():
        if routed.name + mark in stored:
            raise _refusal(stored[routed.name + mark], kind)
    plain = stored.get(f"{routed.name}w13_weight")
    if plain is not None:
        words = plain.dtype in ("I8", "I32")
        raise _refusal(plain, npu if words else "experts that are not INT4")
    packed = stored.get(f"{routed.name}w13_weight_packed")
    if packed is not None and packed.dtype == "U8" and len(packed.shape) == 4:
        # Inputs in blocks of 128 bytes make an axis of their own; only this has it.
        raise _refusal(packed, "FlashInfer's shuffled MXINT4 layout")


def _refusal(tensor: Tensor, kind: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{tensor.file}: unsupported layout: {kind} ({tensor.name} is {tensor.dtype} "
        f"{list(tensor.shape)}); expected INT4 experts in Marlin, raw or Triton layout"
    )


def view_shape(routed: Routed, which: Which, what: What) -> tuple[int, int]:
    """Returns the shape of one expert's tensor in the view."""
    per_entry = NIBBLES_PER_WORD if what == "packed" else GROUP_SIZE
    if which == "down":
        return routed.hidden, routed.inner // per_entry
    return routed.inner, routed.hidden // per_entry
