"""Owns a small store of what was read last, so that it is not read twice in a row."""

import collections
import threading
from collections.abc import Callable, Hashable

import numpy as np


class BlockCache:
    """Arrays by key, the least recently used dropped beyond `limit_bytes`.

    Arrays are shared: whoever gets one must not write to it.
    """

    def __init__(self, limit_bytes: int):
        self._limit = limit_bytes
        self._blocks: collections.OrderedDict[Hashable, np.ndarray] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the array of `key`, from `read` if it is not held.

        Two threads that miss at once both read.
        """
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        block = read()
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = block
                self._bytes += block.nbytes
            while self._bytes > self._limit and len(self._blocks) > 1:
                _, dropped = self._blocks.popitem(last=False)
                self._bytes -= dropped.nbytes
        return block
