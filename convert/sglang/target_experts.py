"""Owns the routed experts of SGLang's ranks, as they are made from the view."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from convert.sglang.cache import BlockCache
from convert.sglang.division import Division, What, Which, view_shape
from convert.sglang.layouts import Form
from convert.sglang.names import Routed
from convert.sglang.pieces import read_rows
from convert.tensor import DTYPES, DerivedTensor, Tensor


@dataclasses.dataclass(frozen=True)
class RankExperts:
    """What one rank holds of a layer's experts.

    Attributes:
      cache: Shared by the ranks, which all take columns of the same rows.
    """

    view: Mapping[str, Tensor]
    routed: Routed
    division: Division
    rank: int
    cache: BlockCache

    def tensors(self) -> list[Tensor]:
        """Returns them all: weights, and what SGLang keeps beside them."""
        kinds = self.division.kinds(self.routed)
        assert kinds is not None
        file = self._of_view(0, "gate", "packed").file
        out: list[Tensor] = []
        for name, (dtype, shape) in kinds.items():
            what: What = "packed" if name.endswith("packed") else "scale"
            rows = partial(self._inward if ".w13_" in name else self._outward, what)
            out.append(DerivedTensor(name, file, dtype, shape, rows))
        for name, (dtype, shape) in self.division.bookkeeping(self.routed).items():
            stated = name.endswith("_weight_shape")
            # In Marlin layout the input order is empty, so SGLang does not save it.
            if stated or self.division.layout.name != "marlin":
                row = self._full_shape(name) if stated else [0] * shape[1]
                rows = partial(_repeated, np.array(row).astype(DTYPES[dtype]))
                out.append(DerivedTensor(name, file, dtype, shape, rows))
        return out

    def _inward(self, what: What, start: int, stop: int) -> np.ndarray:
        """Returns experts start … stop-1 of w13: gate rows, then up rows."""
        form: Form = getattr(self.division.layout, what)
        inner = self.routed.inner // self.division.width
        _, number = self.division.place(self.rank)
        own = number * inner, (number + 1) * inner
        blocks = []
        for expert in range(start, stop):
            gate, up = (self._of_view(expert, which, what) for which in ("gate", "up"))
            rows = np.concatenate([read_rows(gate, *own), read_rows(up, *own)])
            blocks.append(form.encode(rows))
        return np.stack(blocks)

    def _outward(self, what: What, start: int, stop: int) -> np.ndarray:
        """Returns experts start … stop-1 of w2: their columns of down."""
        form: Form = getattr(self.division.layout, what)
        width = view_shape(self.routed, "down", what)[1] // self.division.width
        _, number = self.division.place(self.rank)
        own = slice(number * width, (number + 1) * width)
        blocks = []
        for expert in range(start, stop):
            tensor = self._of_view(expert, "down", what)
            read = partial(read_rows, tensor, 0, tensor.shape[0])
            down = self.cache.get(tensor.name, read)
            blocks.append(form.encode(np.ascontiguousarray(down[:, own])))
        return np.stack(blocks)

    def _of_view(self, local: int, which: Which, what: What) -> Tensor:
        """Returns the view's tensor of the rank's expert number `local`."""
        group, _ = self.division.place(self.rank)
        expert = group * self.routed.experts // self.division.groups + local
        return self.view[f"{self.routed.view}{expert}.{which}_proj.weight_{what}"]

    def _full_shape(self, name: str) -> list[int]:
        """Returns outputs and inputs of the last weight that SGLang loads there."""
        inward = [self.routed.inner, self.routed.hidden]
        return inward if ".w13_" in name else inward[::-1]


def _repeated(row: np.ndarray, start: int, stop: int) -> np.ndarray:
    return np.tile(row, (stop - start, 1))
