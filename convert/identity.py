"""Owns what a conversion's result depends on, so that a stopped one can go on."""

import hashlib
import os
from pathlib import Path

from convert.checkpoint import Checkpoint
from ddtree_jax.model.restore import MANIFEST

# Read of both ends of a file: its header, and weights that a fine-tuned twin of the
# same size and time would not share.
_END_BYTES = 2**20


def identify(source: Checkpoint, view: object) -> dict[str, object]:
    """Returns what tells `source` from any other, as JSON.

    A weight file is known by name, size, time of modification and the hash of its
    first and last MiB; where it lies does not matter. A canonical checkpoint is known
    by its manifest, which has the hash of everything.

    Args:
      view: What is taken from it: names, shapes and dtypes in order.
    """
    manifest = source.directory / MANIFEST
    files = [path for path in (*source.files, manifest) if path.is_file()]
    return {
        "files": {path.name: _identify_file(path) for path in files},
        "losses": list(source.losses),
        "view": hashlib.sha256(repr(view).encode()).hexdigest(),
    }


def _identify_file(path: Path) -> list[object]:
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(_END_BYTES, state.st_size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return [state.st_size, state.st_mtime_ns, digest.hexdigest()]
