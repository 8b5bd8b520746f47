"""Owns the files of an array that is being written: its header and its chunks.

The arrays are zarr3 without compression, of which `convert.stored` is the reader.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.durable import Scratch, aligned_runs, write_file
from convert.leaf import Block
from convert.stored import StoredArray


def write_header(array: StoredArray) -> set[Path]:
    """Writes zarr.json and returns the paths to sync."""
    header = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": array.chunk},
        },
        "chunk_key_encoding": {"name": "default"},
        # INT4 words and bfloat16 weights hardly compress.
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": 0 if array.dtype.kind in "iu" else 0.0,
    }
    array.directory.mkdir(exist_ok=True)
    path = array.directory / "zarr.json"
    path.write_text(json.dumps(header), encoding="utf-8")
    return {path, array.directory, array.directory.parent}


def write_chunks(
    array: StoredArray, block: Block, slab: np.ndarray, memory: Scratch
) -> set[Path]:
    """Writes the chunks of a slab and returns the paths to sync.

    Args:
      memory: Holds one chunk at a time, if it must be put together.
    """
    changed = {array.directory}
    nbytes = math.prod(array.chunk) * array.dtype.itemsize
    for path, place in _chunks(array, block):
        parts = aligned_runs(slab[place])
        if parts is None:
            memory.array(array.chunk, array.dtype)[...] = slab[place]
            parts = [memory.padded(nbytes)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, parts, nbytes)
        changed.add(path)
        changed.update(itertools.takewhile(array.directory.__ne__, path.parents))
    return changed


def read_slab(array: StoredArray, block: Block) -> np.ndarray:
    """Returns a slab as its chunks have it.

    Raises:
      CheckpointError: A chunk is missing or not as long as it must be.
    """
    if not block:
        return array.read((), 0, 1)
    # A slab has one index of the first axes, a run of one, and all of the later ones.
    whole = [s.stop - s.start == n for s, n in zip(block, array.shape, strict=True)]
    axis = max((i for i, is_whole in enumerate(whole) if not is_whole), default=0)
    lead = tuple(s.start for s in block[:axis])
    return array.read(lead, block[axis].start, block[axis].stop)


def is_whole(array: StoredArray) -> bool:
    """Returns whether every chunk's file is there, and as long as it must be."""
    nbytes = math.prod(array.chunk) * array.dtype.itemsize
    counts = (n // c for n, c in zip(array.shape, array.chunk, strict=True))
    paths = (_chunk_path(array, index) for index in np.ndindex(*counts))
    return all(path.is_file() and path.stat().st_size == nbytes for path in paths)


def _chunks(array: StoredArray, block: Block) -> Iterator[tuple[Path, Block]]:
    """Yields the file of each chunk of a slab, and where in the slab it is."""
    slab_shape = [s.stop - s.start for s in block]
    counts = [n // c for n, c in zip(slab_shape, array.chunk, strict=True)]
    first = [s.start // c for s, c in zip(block, array.chunk, strict=True)]
    for index in np.ndindex(*counts):
        place = tuple(f + i for f, i in zip(first, index, strict=True))
        part = tuple(
            slice(i * c, (i + 1) * c) for i, c in zip(index, array.chunk, strict=True)
        )
        yield _chunk_path(array, place), part


def _chunk_path(array: StoredArray, index: tuple[int, ...]) -> Path:
    return array.directory.joinpath("c", *map(str, index))
