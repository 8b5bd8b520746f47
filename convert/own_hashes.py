"""Owns what a checkpoint states of its own bytes, held against the bytes.

A canonical checkpoint's manifest has the BLAKE3 of every array and file. The arrays'
are taken from what is read of them anyway, when it is read in order.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.digest import Digest, hash_file
from convert.ours_source import stated_files, stored_arrays
from convert.progress import make_reporter
from convert.stored import StoredArray
from convert.stream import read_ahead

_SHOWN = 5


class ArrayHashes:
    """Hashes of arrays, each read once from its first byte to its last.

    It is told of reads, as `StoredArray.seen`, by any thread. What was read before is
    left out, and so is what leaves a hole, which `finish` reads again.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._begun: dict[Path, tuple[Digest, int]] = {}

    def __call__(self, array: StoredArray, start: int, data: np.ndarray) -> None:
        """Takes elements that begin at byte `start` of an array."""
        with self._lock:
            digest, at = self._begun.get(array.directory, (Digest(), 0))
            if start <= at < start + data.nbytes:
                digest.add(data.reshape(-1).view(np.uint8)[at - start :])
                at = start + data.nbytes
            self._begun[array.directory] = digest, at

    def missing(self, array: StoredArray) -> int:
        """Returns how many bytes of an array were not taken yet."""
        _, at = self._begun.get(array.directory, (None, 0))
        return array.nbytes - at

    def finish(self, array: StoredArray) -> Iterator[int]:
        """Reads what is missing of an array, which tells of it; yields bytes read."""
        at = array.nbytes - self.missing(array)
        reads = (
            functools.partial(array.read, *place)
            for place in array.pieces()
            if array.offset(place[0], place[2]) > at
        )
        for piece in read_ahead(reads):
            yield piece.nbytes

    def digest(self, array: StoredArray) -> str:
        """Returns the hash of an array of which nothing is missing."""
        assert not self.missing(array), array.directory
        return self._begun[array.directory][0].hex()


def check_own_hashes(directory: Path, hashes: ArrayHashes) -> list[str]:
    """Returns lines that say which arrays and files are not as the manifest says.

    Args:
      directory: A canonical checkpoint.
      hashes: What was read of its arrays already.
    """
    arrays = list(stored_arrays(directory, seen=hashes))
    total = sum(array.nbytes for _, array, _ in arrays)
    missing = sum(hashes.missing(array) for _, array, _ in arrays)
    if missing:
        with contextlib.closing(make_reporter("hashing", missing)) as reporter:
            for name, array, _ in arrays:
                reporter.at(name)
                for nbytes in hashes.finish(array):
                    reporter.advance(nbytes)
    bad_arrays = [
        f"{name} ({array.directory})"
        for name, array, stated in arrays
        if hashes.digest(array) != stated
    ]
    files = list(stated_files(directory))
    bad_files = [path.name for path, stated in files if hash_file(path) != stated]
    return [
        f"{len(arrays)} arrays, {total} bytes, and {len(files)} files hashed",
        *difference("not as the manifest says", bad_arrays, what="arrays"),
        *difference("not as the manifest says", bad_files, what="files"),
    ]


def difference(how: str, names: list[str], *, what: str = "tensors") -> list[str]:
    """Returns a line that tells a difference, which begins with "!", or none."""
    if not names:
        return []
    more = f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"! {len(names)} {what} {how}: {', '.join(names[:_SHOWN])}{more}"]
