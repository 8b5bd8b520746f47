"""Owns the writing of lazy leaves into an Orbax checkpoint, several at a time.

A slab is noted in the journal when its chunks are on disk, with the digest of the
leaf up to there. So a run that goes on reads what is there of an unfinished leaf,
compares it with those digests, and has the last of them to go on with.
"""

import concurrent.futures
import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from convert import interrupt
from convert.chunk_files import is_whole, read_slab, write_chunks, write_header
from convert.digest import Digest
from convert.durable import Scratch, sync
from convert.leaf import Block, Leaf
from convert.orbax_tree import TREE_FILE, write_tree
from convert.progress import Reporter
from convert.staging import Staging
from convert.stored import StoredArray
from ddtree_jax.errors import CheckpointError

# Leaves that are written at a time: while one is hashed, others are read and written.
LANES = 4
# What a lane writes before it syncs and notes it, and so may lose.
MAX_UNNOTED_BYTES = 512 * 2**20


def write_leaves(
    directory: Path,
    leaves: Sequence[Leaf],
    *,
    nested: bool,
    staging: Staging,
    reporter: Reporter,
) -> dict[str, str]:
    """Writes a checkpoint and returns the hash of each leaf by its path.

    Args:
      directory: Made here, below `staging`, or left there by a stopped run.
      nested: Whether "/" in a path means a subtree, or the tree is flat.
    """
    tree_key = staging.key(directory / TREE_FILE)
    if not staging.journal.noted(tree_key):
        write_tree(directory, leaves, nested=nested)
        staging.journal.note([(tree_key, "")])
    # The largest first, so that the lanes end together.
    waiting: queue.SimpleQueue[tuple[Leaf, Path]] = queue.SimpleQueue()
    for leaf in sorted(leaves, key=_size, reverse=True):
        name = leaf.path.replace("/", ".") if nested else leaf.path
        waiting.put((leaf, directory / name))
    stop = threading.Event()
    digests: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(LANES) as pool:
        lanes = [
            pool.submit(_Lane(staging, reporter, stop).run, waiting)
            for _ in range(min(LANES, len(leaves)))
        ]
        try:
            for lane in concurrent.futures.as_completed(lanes):
                digests |= lane.result()
        except BaseException:
            stop.set()
            raise
    interrupt.check()
    return digests


class _Lane:
    """Writes one leaf after another, in memory of its own."""

    def __init__(self, staging: Staging, reporter: Reporter, stop: threading.Event):
        self._staging = staging
        self._reporter = reporter
        self._stop = stop
        self._slab = Scratch()
        self._chunk = Scratch()
        self._notes: list[tuple[str, str]] = []
        self._changed: set[Path] = set()
        self._unnoted_bytes = 0

    def run(self, waiting: "queue.SimpleQueue[tuple[Leaf, Path]]") -> dict[str, str]:
        """Returns the digests of the leaves that this lane has taken and written."""
        digests = {}
        while not self._is_stopped():
            try:
                leaf, directory = waiting.get_nowait()
            except queue.Empty:
                break
            digests[leaf.path] = self._write(leaf, directory)
        self._note()
        return digests

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or interrupt.has_come()

    def _write(self, leaf: Leaf, directory: Path) -> str:
        """Writes a leaf, or the rest of it, and returns its digest."""
        array = StoredArray(directory, leaf.shape, leaf.dtype, leaf.layout()[0])
        key = self._staging.key(directory)
        noted = self._staging.journal.noted(key)
        blocks = list(leaf.slabs())
        if len(noted) == len(blocks) and is_whole(array):
            self._reporter.advance(leaf.nbytes)
            return noted[-1]
        digest = _digest_of(array, blocks[: len(noted)], noted)
        if digest is None:
            print(f"{key}: not as noted; it is written anew", file=sys.stderr)
            self._staging.journal.forget(key)
            digest, noted = Digest(), ()
        self._reporter.advance(leaf.nbytes * len(noted) // len(blocks))
        self._changed |= write_header(array)
        for block in blocks[len(noted) :]:
            if self._is_stopped():
                break
            self._reporter.at(leaf.file(block).name)
            slab = self._slab.array(tuple(s.stop - s.start for s in block), leaf.dtype)
            leaf.read(block, slab)
            digest.add(slab)
            self._changed |= write_chunks(array, block, slab, self._chunk)
            self._notes.append((key, digest.hex()))
            self._unnoted_bytes += slab.nbytes
            if self._unnoted_bytes >= MAX_UNNOTED_BYTES:
                self._note()
            self._reporter.advance(slab.nbytes)
        return digest.hex()

    def _note(self) -> None:
        """Makes durable what was written, and then notes it."""
        sync(self._changed)
        self._staging.journal.note(self._notes)
        self._notes.clear()
        self._changed.clear()
        self._unnoted_bytes = 0


def _digest_of(
    array: StoredArray, blocks: Sequence[Block], noted: Sequence[str]
) -> Digest | None:
    """Returns the hash over the slabs that are noted, or None if one differs."""
    digest = Digest()
    for block, expected in zip(blocks, noted, strict=True):
        interrupt.check()
        try:
            digest.add(read_slab(array, block))
        except CheckpointError:
            return None
        if digest.hex() != expected:
            return None
    return digest


def _size(item: Leaf) -> int:
    return item.nbytes
