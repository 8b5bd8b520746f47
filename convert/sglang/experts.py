"""Owns the routed experts of the view, as they are read from SGLang's ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from convert.sglang.cache import BlockCache
from convert.sglang.division import Division, What, Which, view_shape
from convert.sglang.layouts import Form
from convert.sglang.names import Routed
from convert.sglang.pieces import read_rows, same
from convert.tensor import DerivedTensor, Tensor

# w13 of one K2.6 expert is 15 MB on all ranks together.
_CACHE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Store:
    """The experts of one layer, as its ranks hold them.

    Attributes:
      stored: The four arrays of each rank, by SGLang's names.
      cache: Blocks of experts, shared by all layers: gate and up lie in one.
    """

    routed: Routed
    division: Division
    stored: Sequence[Mapping[str, Tensor]]
    cache: BlockCache

    def rows(self, expert: int, which: Which, what: What, start: int, stop: int):
        """Returns rows start … stop-1 of one weight in Hugging Face form."""
        if which == "down":
            parts = [
                self._outputs(expert, "w2", what, rank, start, stop)
                for rank in range(self.division.width)
            ]
            return np.concatenate(parts, axis=1)
        inner = self.routed.inner // self.division.width
        offset = inner if which == "up" else 0
        parts = []
        for number in range(start // inner, -(-stop // inner)):
            first = max(start - number * inner, 0) + offset
            last = min(stop - number * inner, inner) + offset
            parts.append(self._outputs(expert, "w13", what, number, first, last))
        return np.concatenate(parts)

    def _outputs(
        self, expert: int, matrix: str, what: What, number: int, start: int, stop: int
    ) -> np.ndarray:
        """Returns outputs start … stop-1 of one rank's part of a weight."""
        form: Form = getattr(self.division.layout, what)
        local = self.routed.experts // self.division.groups
        group, index = divmod(expert, local)
        tensor = self._holder(
            f"{self.routed.name}{matrix}_weight_{what}", group, number
        )
        key = (tensor.file, tensor.name, index)
        block = self.cache.get(key, partial(read_rows, tensor, index, index + 1))[0]
        # Layouts mix the outputs of a run, so whole runs are decoded.
        run = self.division.layout.run
        first, last = start // run * run, -(-stop // run) * run
        return form.decode(form.outputs(block, first, last))[
            start - first : stop - first
        ]

    def _holder(self, name: str, group: int, number: int) -> Tensor:
        place = (group, number)
        return same(
            [
                own[name]
                for rank, own in enumerate(self.stored)
                if self.division.place(rank) == place
            ]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of the view: packed words or scales of one expert's weight."""

    name: str
    store: Store
    expert: int
    which: Which
    what: What

    @property
    def file(self) -> Path:
        """That of the first rank."""
        matrix = "w2" if self.which == "down" else "w13"
        own = self.store.stored[0]
        return own[f"{self.store.routed.name}{matrix}_weight_{self.what}"].file

    @property
    def dtype(self) -> str:
        """By safetensors' name."""
        return "I32" if self.what == "packed" else "BF16"

    @property
    def shape(self) -> tuple[int, ...]:
        """Outputs and words, or outputs and groups."""
        return view_shape(self.store.routed, self.which, self.what)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        rows, columns = self.shape
        return rows * columns * (4 if self.what == "packed" else 2)

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the array's bytes from `start` on."""
        rows = partial(self.store.rows, self.expert, self.which, self.what)
        whole = DerivedTensor(self.name, self.file, self.dtype, self.shape, rows)
        whole.read_into(out, start)


def make_cache() -> BlockCache:
    """Returns the store of blocks for the experts of a checkpoint."""
    return BlockCache(_CACHE_BYTES)
