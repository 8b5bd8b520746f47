"""Owns the reading of a canonical checkpoint's arrays, from their chunk files.

The arrays are zarr3 without compression (docs/checkpoint.md): a chunk file is the
chunk's little-endian bytes in C order, so any rows of it are one range of bytes.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ddtree_jax.errors import CheckpointError

_PIECE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of `params` or `extra`, on disk.

    Attributes:
      directory: Of this array; its chunks are below `c`.
      chunk: Shape of a chunk; divides `shape`.
      seen: Is told of all that is read: the array, the offset in bytes of its first
        element in C order, and the elements, which follow it.
    """

    directory: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    seen: "Callable[[StoredArray, int, np.ndarray], None] | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Yields arguments of `read` that give the whole array in C order."""
        if not self.shape:
            yield (), 0, 1
            return
        axis = 0
        while axis < len(self.shape) - 1 and self._row_bytes(axis) > _PIECE_BYTES:
            axis += 1
        step = max(1, _PIECE_BYTES // max(self._row_bytes(axis), 1))
        for lead in np.ndindex(self.shape[:axis]):
            for start in range(0, self.shape[axis], step):
                yield lead, start, min(start + step, self.shape[axis])

    def _row_bytes(self, axis: int) -> int:
        return math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize

    def read(self, lead: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        """Returns entries start … stop-1 of the axis after `lead`.

        Args:
          lead: Indices into the first axes, which the result does not have.

        Raises:
          CheckpointError: A chunk is missing or not as long as it must be.
        """
        out = self._read(lead, start, stop)
        if self.seen is not None:
            self.seen(self, self.offset(lead, start), out)
        return out

    def offset(self, lead: tuple[int, ...], start: int) -> int:
        """Returns how many bytes in C order are before entry `start` after `lead`."""
        row = 0
        for i, n in zip((*lead, start), self.shape or (1,), strict=False):
            row = row * n + i
        return row * self._row_bytes(len(lead))

    def _read(self, lead: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        if not self.shape:
            return self._read_into((), 0, np.empty((), self.dtype))
        axis = len(lead)
        step, *inner = self.chunk[axis:]
        out = np.empty((stop - start, *self.shape[axis + 1 :]), self.dtype)
        outer = tuple(i // c for i, c in zip(lead, self.chunk, strict=False))
        within = 0
        for i, c in zip(lead, self.chunk, strict=False):
            within = within * c + i % c
        counts = [n // c for n, c in zip(out.shape[1:], inner, strict=True)]
        for number in range(start // step, -(-stop // step)):
            first = max(start, number * step)
            last = min(stop, (number + 1) * step)
            offset = (within * step + first - number * step) * math.prod(inner)
            for grid in np.ndindex(*counts):
                columns = (
                    slice(i * c, (i + 1) * c) for i, c in zip(grid, inner, strict=True)
                )
                place = out[(slice(first - start, last - start), *columns)]
                self._read_into((*outer, number, *grid), offset, place)
        return out

    def _read_into(
        self, index: tuple[int, ...], offset: int, out: np.ndarray
    ) -> np.ndarray:
        """Fills `out` from element `offset` of the chunk at `index`; returns it."""
        buffer = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        path = self.directory.joinpath("c", *map(str, index))
        expected = math.prod(self.chunk) * self.dtype.itemsize
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    raise CheckpointError(
                        f"{path} has {size} bytes; expected {expected}"
                    )
                view = memoryview(buffer.reshape(-1).view(np.uint8))
                done, at = 0, offset * self.dtype.itemsize
                while done < view.nbytes:
                    got = os.preadv(file.fileno(), [view[done:]], at + done)
                    if got == 0:
                        raise CheckpointError(f"{path} is truncated")
                    done += got
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; the manifest names it") from None
        if buffer is not out:
            out[...] = buffer
        return out
