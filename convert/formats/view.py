"""Owns what becomes of each weight of a source, decided by the parts that it has."""

import dataclasses
import re
from collections.abc import Mapping

from convert.formats import fp8, gptq, int4
from convert.formats.marks import foreign, refuse_foreign_formats
from convert.formats.parts import Int4
from convert.tensor import Tensor
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError

_ROUTED = re.compile(r"(.*\.)?mlp\.experts\.\d+\.(gate|up|down)_proj")
_PLAIN = frozenset(("weight",))
_PACKED = frozenset(("weight_packed", "weight_scale", "weight_shape"))
_FP8_SCALES = ("weight_scale_inv", "weight_scale")
_PARTS = _PLAIN | _PACKED | gptq.PARTS | frozenset(_FP8_SCALES)

_FP8_LOSS = "FP8 in blocks, multiplied out and rounded to bfloat16"
_INT4_LOSS = "INT4, stored as the bfloat16 numbers that it means"
_QUANTISED = "quantised to INT4 in groups of 32, as --quantise-experts asks"


@dataclasses.dataclass(frozen=True)
class View:
    """A source as Kimi K2.6's own INT4 checkpoint.

    Attributes:
      tensors: Every tensor by its Hugging Face name.
      losses: One line for each kind of thing that is not carried bit for bit.
      is_stored: Whether all tensors are the stored ones, and none is computed.
    """

    tensors: dict[str, Tensor]
    losses: tuple[str, ...]
    is_stored: bool


def view_as_int4(
    tensors: Mapping[str, Tensor],
    *,
    gptq_zero: int | None = None,
    quantise_experts: bool = False,
) -> View:
    """Returns the view of a target's tensors, of which there is at least one.

    Args:
      gptq_zero: As in `Quantisation`.
      quantise_experts: Whether routed experts that are not INT4 are quantised.

    Raises:
      UnsupportedFormatError: The format of a weight, or experts that are not INT4.
      CheckpointError: A weight's parts do not fit each other, or there is nothing to
        quantise though it was asked for.
    """
    refuse_foreign_formats(tensors.values())
    weights: dict[str, dict[str, Tensor]] = {}
    made: list[Tensor] = []
    for name, tensor in tensors.items():
        base, _, part = name.rpartition(".")
        if part in _PARTS:
            weights.setdefault(base, {})[part] = tensor
        else:
            made.append(tensor)
    presenter = _Presenter(gptq_zero=gptq_zero, quantise_experts=quantise_experts)
    for base, parts in weights.items():
        made += presenter.present(base, parts)
    if quantise_experts and _QUANTISED not in presenter.losses:
        directory = next(iter(tensors.values())).file.parent
        raise CheckpointError(
            f"{directory}: no routed expert is FP8 or bfloat16; expected some, since "
            "--quantise-experts was given"
        )
    return View(_by_name(made), presenter.lines(), presenter.is_stored)


class _Presenter:
    """Makes the view of one weight after the other, and notes what that loses."""

    def __init__(self, *, gptq_zero: int | None, quantise_experts: bool):
        self.losses: dict[str, list[str]] = {}
        self.is_stored = True
        self._gptq_zero = gptq_zero
        self._quantise_experts = quantise_experts

    def present(self, base: str, parts: dict[str, Tensor]) -> list[Tensor]:
        """Returns the tensors of one weight in the view.

        Parts that belong to no format stay: what is missing or left over is the
        plan's to say.
        """
        weight, used = self._read(base, parts)
        if weight is None:
            return [*parts.values()]
        is_routed = _ROUTED.fullmatch(base) is not None
        if isinstance(weight, Int4) and not is_routed:
            self._note(_INT4_LOSS, base)
            weight = int4.dequantised(base, weight)
        elif is_routed and not isinstance(weight, Int4):
            if not self._quantise_experts:
                raise _not_int4(parts["weight"])
            self._note(_QUANTISED, base)
            weight = int4.quantised(base, weight)
        made = [t for t in weight if t] if isinstance(weight, Int4) else [weight]
        return made + [t for part, t in parts.items() if part not in used]

    def lines(self) -> tuple[str, ...]:
        """Returns a line for each kind of loss: how many weights, the first, what."""
        return tuple(
            f"{len(bases)} weights ({bases[0]}{', …' if bases[1:] else ''}): {loss}"
            for loss, bases in self.losses.items()
        )

    def _read(
        self, base: str, parts: dict[str, Tensor]
    ) -> tuple[Int4 | Tensor | None, frozenset[str]]:
        """Returns a weight, in INT4 or as one tensor, and the parts that it is of."""
        if "qweight" in parts:
            self.is_stored = False
            return gptq.GptqWeight(parts, self._gptq_zero).as_int4(base), gptq.PARTS
        if {"weight_packed", "weight_scale"} <= parts.keys():
            packed, scale = parts["weight_packed"], parts["weight_scale"]
            return Int4(packed, scale, parts.get("weight_shape")), _PACKED
        if "weight" not in parts:
            return None, frozenset()
        weight = parts["weight"]
        if weight.dtype != "F8_E4M3":
            return weight, _PLAIN
        for part in _FP8_SCALES:
            if part in parts:
                self._note(_FP8_LOSS, base)
                return fp8.dequantised(weight, parts[part]), _PLAIN | {part}
        raise foreign(weight, "FP8 without scales")

    def _note(self, loss: str, base: str) -> None:
        self.is_stored = False
        self.losses.setdefault(loss, []).append(base)


def _by_name(tensors: list[Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for tensor in tensors:
        if tensor.name in out:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is there in two formats; expected one"
            )
        out[tensor.name] = tensor
    return out


def _not_int4(stored: Tensor) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{stored.file}: the routed expert {stored.name} is {stored.dtype}; expected "
        "INT4, or the flag --quantise-experts, which makes INT4 of it with a loss"
    )
