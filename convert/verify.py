"""Owns the proof that two checkpoints hold the same: a hash of every tensor of both.

The formats may differ: what is compared is the Hugging Face view. The prefix of the
text model is a matter of form, so names are compared under the published one. Of a
canonical checkpoint the arrays and files are held against its own manifest, too.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convert.checkpoint import DRAFT, Checkpoint
from convert.detect import open_checkpoint, open_draft
from convert.ours_source import is_ours, stated_files, stored_arrays
from convert.progress import Reporter, make_reporter
from convert.rules import published_names
from convert.stored import StoredArray
from convert.stream import read_ahead, read_pieces
from convert.tensor import Tensor
from ddtree_jax.errors import CheckpointError

_SHOWN = 5


def verify(first: Path, second: Path, *, quantise_experts: bool = False) -> bool:
    """Returns whether two directories hold the same weights; prints what differs.

    A drafter inside is compared if both have one, and otherwise said not to be.

    Args:
      quantise_experts: As in `open_checkpoint`, for the first.

    Raises:
      DDTreeError: One of them is incomplete or refused; the message says why.
    """
    opened = open_checkpoint(first, quantise_experts=quantise_experts)
    pairs = [(opened, open_checkpoint(second), "")]
    drafts = [d for d in map(open_draft, (first, second)) if d is not None]
    if len(drafts) == 2:
        pairs.append((drafts[0], drafts[1], f"{DRAFT}: "))
    directories = dict.fromkeys(c.directory for *both, _ in pairs for c in both)
    same = True
    for directory in filter(is_ours, directories):
        same &= _report(f"{directory}: ", check_own_hashes(directory))
    for a, b, what in pairs:
        same &= _report(what, compare(a, b))
    if len(drafts) == 1:
        print(f"{drafts[0].directory} not compared: only one of the two has a drafter")
    print("equal" if same else "different")
    return same


def compare(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Returns lines that say what was compared and how two checkpoints differ.

    A line that tells a difference begins with "!".
    """
    a, b = _by_published_name(first), _by_published_name(second)
    common = [name for name in a if name in b]
    alike = [n for n in common if (a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape)]
    total = sum(a[name].nbytes for name in alike)
    reporting = contextlib.closing(make_reporter("comparing", 2 * total))
    with reporting as reporter:
        hashes = list(
            _hash_pairs([a[n] for n in alike], [b[n] for n in alike], reporter)
        )
    differ = [
        f"{name} (SHA-256 {x[:12]}… and {y[:12]}…)"
        for name, (x, y) in zip(alike, hashes, strict=True)
        if x != y
    ]
    shapes = [
        f"{n} ({a[n].dtype} {list(a[n].shape)} and {b[n].dtype} {list(b[n].shape)})"
        for n in common
        if (a[n].dtype, a[n].shape) != (b[n].dtype, b[n].shape)
    ]
    return [
        f"{first.directory} ({first.format}) and {second.directory} "
        f"({second.format}): {len(alike)} tensors, {total} bytes compared",
        *_difference("of different bytes", differ),
        *_difference("of different shape or dtype", shapes),
        *_difference(f"only in {first.directory}", [n for n in a if n not in b]),
        *_difference(f"only in {second.directory}", [n for n in b if n not in a]),
    ]


def check_own_hashes(directory: Path) -> list[str]:
    """Returns lines that say which arrays and files are not as the manifest says.

    Args:
      directory: A canonical checkpoint.
    """
    arrays = list(stored_arrays(directory))
    total = sum(array.nbytes for _, array, _ in arrays)
    with contextlib.closing(make_reporter("hashing", total)) as reporter:
        bad_arrays = [
            f"{name} ({array.directory})"
            for name, array, stated in arrays
            if _hash_array(name, array, reporter) != stated
        ]
    files = list(stated_files(directory))
    bad_files = [path.name for path, stated in files if _hash_file(path) != stated]
    return [
        f"{len(arrays)} arrays, {total} bytes, and {len(files)} files hashed",
        *_difference("not as the manifest says", bad_arrays, what="arrays"),
        *_difference("not as the manifest says", bad_files, what="files"),
    ]


def _hash_array(name: str, array: StoredArray, reporter: Reporter) -> str:
    reporter.at(name)
    digest = hashlib.sha256()
    reads = (functools.partial(array.read, *place) for place in array.pieces())
    for piece in read_ahead(reads):
        digest.update(piece.reshape(-1).view(np.uint8))
        reporter.advance(piece.nbytes)
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_published_name(checkpoint: Checkpoint) -> dict[str, Tensor]:
    names = published_names(checkpoint.tensors, is_target=checkpoint.is_target)
    found: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        other = found.setdefault(names[name], tensor)
        if other is not tensor:
            raise CheckpointError(
                f"{tensor.file}: {name} and {other.name} are the same tensor of the "
                "published checkpoint; expected one"
            )
    return found


def _hash_pairs(
    first: list[Tensor], second: list[Tensor], reporter: Reporter
) -> Iterator[tuple[str, str]]:
    """Yields the SHA-256 of each tensor and of its partner, which is as long."""
    digests = (hashlib.sha256(), hashlib.sha256())
    pieces = zip(read_pieces(first), read_pieces(second), strict=True)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        for a, b in pieces:
            reporter.at(a.tensor.file.name)
            other = pool.submit(digests[1].update, b.data)
            digests[0].update(a.data)
            other.result()
            reporter.advance(a.data.nbytes + b.data.nbytes)
            if a.last:
                yield digests[0].hexdigest(), digests[1].hexdigest()
                digests = (hashlib.sha256(), hashlib.sha256())


def _difference(how: str, names: list[str], *, what: str = "tensors") -> list[str]:
    if not names:
        return []
    more = f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"! {len(names)} {what} {how}: {', '.join(names[:_SHOWN])}{more}"]


def _report(what: str, lines: list[str]) -> bool:
    """Prints the lines and returns whether none tells a difference."""
    for line in lines:
        print(what + line)
    return not any(line.startswith("!") for line in lines)
