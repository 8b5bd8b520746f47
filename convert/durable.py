"""Owns writes that survive a loss of power: past the page cache, then synced.

Past it, because a conversion writes more than memory holds and reads none of it
again: filling the cache with it costs more time than the disk does.
"""

import errno
import mmap
import os
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import numpy as np

# Memory, offsets and lengths of direct writes are multiples of this.
_ALIGNMENT = mmap.PAGESIZE
# Of one call; Linux allows 1024.
_MAX_PARTS = 512


class Scratch:
    """Memory that is used again and again, aligned for `write_file`.

    Touching fresh memory costs about as much as copying into it.
    """

    def __init__(self):
        self._bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array in this memory, in place of the one returned before."""
        return (
            self.bytes(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
        )

    def bytes(self, nbytes: int) -> np.ndarray:
        """Returns the first `nbytes` of this memory, after making it large enough."""
        if self._bytes.size < _padded(nbytes):
            self._bytes = np.frombuffer(mmap.mmap(-1, _padded(nbytes)), np.uint8)
        return self._bytes[:nbytes]

    def padded(self, nbytes: int) -> memoryview:
        """Returns them with what follows up to the alignment."""
        return memoryview(self._bytes[: _padded(nbytes)])


def aligned_runs(array: np.ndarray) -> list[memoryview] | None:
    """Returns what is contiguous of `array`, in order, or None if it is not aligned.

    Then `write_file` takes it.
    """
    axis = array.ndim
    while axis and array[(0,) * (axis - 1)].flags.c_contiguous:
        axis -= 1
    address, _ = array.__array_interface__["data"]
    nbytes = array[(0,) * axis].nbytes
    if any(n % _ALIGNMENT for n in (address, nbytes, *array.strides[:axis])):
        return None
    return [
        memoryview(array[index].reshape(-1).view(np.uint8))
        for index in np.ndindex(array.shape[:axis])
    ]


def write_file(path: Path, parts: Sequence[memoryview], nbytes: int) -> None:
    """Writes a whole file; `sync` makes it durable.

    Args:
      parts: What it holds, one after the other; each is aligned.
      nbytes: Length of the file; what is more in the last of `parts` is padding.

    Raises:
      OSError: With the path, whatever fails.
    """
    try:
        try:
            _write(path, parts, nbytes, getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system has no direct writes; through the cache, then.
            _write(path, parts, nbytes, 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, parts: Sequence[memoryview], nbytes: int, flags: int) -> None:
    flags |= os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    rest, at = list(parts), 0
    try:
        while rest:
            done = os.pwritev(descriptor, rest[:_MAX_PARTS], at)
            at += done
            while rest and done >= rest[0].nbytes:
                done -= rest.pop(0).nbytes
            if done:
                rest[0] = rest[0][done:]
        os.ftruncate(descriptor, nbytes)
    finally:
        os.close(descriptor)


def sync(paths: Iterable[Path]) -> None:
    """Makes files, and the entries of directories, durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(directory: Path, *, but: Container[Path] = ()) -> None:
    """Makes all files and directories in `directory` durable.

    Args:
      but: Files and directories that are durable already.
    """
    for parent, directories, files in os.walk(directory):
        here = Path(parent)
        directories[:] = [name for name in directories if here / name not in but]
        sync(path for name in files if (path := here / name) not in but)
        sync([here])


def _padded(nbytes: int) -> int:
    return max(1, -(-nbytes // _ALIGNMENT)) * _ALIGNMENT
