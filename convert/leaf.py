"""Owns lazy leaves: a canonical array that is read from its sources in slabs.

A leaf's leading dimensions (layer, expert) number its source tensors; the rest
is one source tensor, seen in the leaf's shape. A slab is a block of the leaf
that is contiguous in memory, so reading it needs no copy, and hashing the slabs
in turn hashes the whole. A slab is written as whole chunks.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.tensor import Tensor, check_finite

# Splits of an axis that a mesh divides: a device of eight, or of any divisor,
# reads whole chunks.
CHUNK_SPLITS = 8
MAX_CHUNK_BYTES = 16 * 2**20

type Block = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class RowSlice:
    """Rows start … stop-1 of every `period` rows of a source tensor."""

    period: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the checkpoint that is about to be written.

    Attributes:
      path: Its place in the tree, parts joined by "/".
      dtype: Of the leaf and of every source; nothing is converted.
      split_axis: The axis that a mesh divides, or None.
      lead: Number of leading dimensions that number the sources.
      sources: The source tensors, in the order of the leading dimensions.
      pattern: The sources' names in short, for the manifest.
      rows: The part of each source that belongs to this leaf; None is all.
      check_finite: Whether NaN and infinity are refused.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    split_axis: int | None
    lead: int
    sources: tuple[Tensor, ...]
    pattern: str
    rows: RowSlice | None = None
    check_finite: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a chunk and of a slab.

        A slab is one index in the axes before some axis, a run of that axis and
        all of the later ones; a chunk is that, the split axis divided. Both
        divide the leaf. A chunk never crosses a layer.
        """
        if not self.shape:
            return (), ()
        split = self.split_axis
        if split is not None and self.shape[split] % CHUNK_SPLITS:
            split = None
        unit = [
            n // CHUNK_SPLITS if i == split else n for i, n in enumerate(self.shape)
        ]
        axis = min(1, self.lead)
        while axis < self.lead and self._bytes(unit[axis + 1 :]) > MAX_CHUNK_BYTES:
            axis += 1
        inner = self._bytes(unit[axis + 1 :])
        run = _largest_divisor(unit[axis], MAX_CHUNK_BYTES // inner)
        before = (1,) * axis + (run,)
        return (*before, *unit[axis + 1 :]), (*before, *self.shape[axis + 1 :])

    def slabs(self) -> Iterator[Block]:
        """Yields the slabs in the order of the leaf's memory."""
        _, slab = self.layout()
        counts = [n // s for n, s in zip(self.shape, slab, strict=True)]
        for index in itertools.product(*map(range, counts)):
            yield tuple(
                slice(i * s, (i + 1) * s) for i, s in zip(index, slab, strict=True)
            )

    def read(self, block: Block, out: np.ndarray) -> None:
        """Fills `out` with one slab, read from the source files.

        Raises:
          CheckpointError: A file is truncated, or a value is not finite.
        """
        starts = [s.start for s in block]
        first = starts[self.lead] if len(block) > self.lead else 0
        for index in np.ndindex(out.shape[: self.lead]):
            piece = out[(*index, ...)]
            source = self.sources[self._number(starts, index)]
            self._read_piece(source, first, piece)
            if self.check_finite:
                check_finite(piece, source)

    def file(self, block: Block) -> Path:
        """Returns the file that a slab's first bytes come from."""
        starts = [s.start for s in block]
        return self.sources[self._number(starts, (0,) * self.lead)].file

    def _read_piece(self, source: Tensor, first: int, piece: np.ndarray) -> None:
        """Fills `piece`, which begins at index `first` of the axis after the lead."""
        view = memoryview(piece.reshape(-1).view(np.uint8))
        if self.rows is None:
            row_bytes = self._bytes(self.shape[self.lead + 1 :])
            source.read_into(view, first * row_bytes)
            return
        row_bytes = self._bytes(self.shape[self.lead + 2 :])
        size = (self.rows.stop - self.rows.start) * row_bytes
        for i in range(len(piece)):
            row = (first + i) * self.rows.period + self.rows.start
            source.read_into(view[i * size : (i + 1) * size], row * row_bytes)

    def _number(self, starts: list[int], index: tuple[int, ...]) -> int:
        number = 0
        for axis, i in enumerate(index):
            number = number * self.shape[axis] + starts[axis] + i
        return number

    def _bytes(self, shape) -> int:
        return math.prod(shape) * self.dtype.itemsize


def _largest_divisor(n: int, limit: int) -> int:
    return max((d for d in range(1, min(n, limit) + 1) if n % d == 0), default=1)
