"""Owns the writing of lazy leaves into an Orbax checkpoint.

Orbax makes the directory, the metadata and the commit. A leaf's data is written
by `_LeafHandler`, slab by slab through TensorStore, as zarr3 in the layout of
Orbax's NumPy handler, so that the standard handlers restore it.
"""

import asyncio
import concurrent.futures
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from convert import interrupt
from convert.leaf import Leaf
from convert.progress import Reporter
from ddtree_jax.errors import CheckpointError


def write_leaves(
    directory: Path, leaves: Sequence[Leaf], *, nested: bool, reporter: Reporter
) -> dict[str, str]:
    """Writes a checkpoint and returns the SHA-256 of each leaf by its path.

    The digest is over the array's little-endian bytes in C order.

    Args:
      directory: Made here.
      nested: Whether "/" in a path means a subtree, or the tree is flat.
    """
    tree: dict = {}
    for leaf in leaves:
        *parents, name = leaf.path.split("/") if nested else [leaf.path]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    handler = _LeafHandler(reporter)
    registry = ocp.type_handlers.create_type_handler_registry((Leaf, handler))
    checkpointer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, type_handler_registry=registry
        )
    )
    with checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree))
    return handler.digests


class _LeafHandler(ocp.type_handlers.TypeHandler):
    """Saves `Leaf`s; what it saves is restored as arrays by Orbax's own handlers."""

    def __init__(self, reporter: Reporter):
        self.digests: dict[str, str] = {}
        self._reporter = reporter
        # Orbax starts all leaves at once; each holds slabs, so memory would add up.
        self._one_at_a_time = asyncio.Lock()

    def typestr(self) -> str:
        return ocp.type_handlers.NumpyHandler().typestr()

    async def serialize(self, values, infos, args=None):
        # Written here and not in a returned future: futures run in a thread of
        # their own, which would go on writing after an interrupt.
        for leaf, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            try:
                async with self._one_at_a_time:
                    self.digests[leaf.path] = await self._write(leaf, info.path)
            except ValueError as error:  # TensorStore's, for a full disk and the like
                raise CheckpointError(f"{leaf.path}: not written: {error}") from error
        return []

    async def _write(self, leaf: Leaf, path) -> str:
        store = await ts.open(_zarr3_spec(leaf, str(path)), create=True)
        digest = hashlib.sha256()
        for block, slab in _read_ahead(leaf):
            interrupt.check()
            # Hashed while it is being written, and while the next one is read.
            writing = store[block].write(
                slab, can_reference_source_data_indefinitely=True
            )
            digest.update(slab.reshape(-1).view(np.uint8))
            await writing
            self._reporter.advance(slab.nbytes)
        return digest.hexdigest()

    async def metadata(self, infos):
        raise NotImplementedError("restored by Orbax's own handlers")

    async def deserialize(self, infos, args=None):
        raise NotImplementedError("restored by Orbax's own handlers")


def _read_ahead(leaf: Leaf) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Yields the slabs of `leaf`; the next one is read while one is in use."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        blocks = list(leaf.slabs())
        following = pool.submit(leaf.read, blocks[0])
        for i, block in enumerate(blocks):
            slab = following.result()
            if i + 1 < len(blocks):
                following = pool.submit(leaf.read, blocks[i + 1])
            yield block, slab


def _zarr3_spec(leaf: Leaf, path: str) -> dict:
    chunk, _ = leaf.layout()
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": path},
        "metadata": {
            "shape": leaf.shape,
            "data_type": leaf.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk},
            },
            # INT4 words and bfloat16 weights hardly compress.
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
        # A missing chunk must be an error when reading, never zeros.
        "store_data_equal_to_fill_value": True,
    }
