"""Owns the reading of many tensors in turn, in bounded pieces, ahead of their use."""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from convert import interrupt
from convert.tensor import Tensor

PIECE_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some bytes of a tensor.

    Attributes:
      data: The bytes, as uint8; whole elements. Only until the next piece is asked for.
      last: Whether the tensor ends here.
    """

    tensor: Tensor
    data: np.ndarray
    last: bool


def read_ahead[T](reads: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yields what `reads` return, in order; the next one runs while one is in use."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        following = None
        for read in reads:
            interrupt.check()
            current, following = following, pool.submit(read)
            if current is not None:
                yield current.result()
        if following is not None:
            yield following.result()


def read_pieces(tensors: Iterable[Tensor]) -> Iterator[Piece]:
    """Yields the bytes of `tensors` in order; one without elements, as one piece.

    A piece's memory is used again for the piece after the next: touching fresh memory
    costs about as much as filling it.
    """
    # One is in use while the other is filled.
    buffers = itertools.cycle([np.empty(PIECE_BYTES, np.uint8) for _ in range(2)])
    return read_ahead(
        functools.partial(_read, tensor, start, next(buffers))
        for tensor in tensors
        for start in range(0, max(tensor.nbytes, 1), PIECE_BYTES)
    )


def _read(tensor: Tensor, start: int, buffer: np.ndarray) -> Piece:
    data = buffer[: min(PIECE_BYTES, tensor.nbytes - start)]
    if data.size:
        tensor.read_into(memoryview(data), start)
    return Piece(tensor, data, start + data.size == tensor.nbytes)
