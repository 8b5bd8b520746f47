"""Owns the proof that two checkpoints hold the same: a hash of every tensor of both.

The formats may differ: what is compared is the Hugging Face view. The prefix of the
text model is a matter of form, so names are compared under the published one. What a
checkpoint states of its own bytes is checked, too (`own_hashes.py`, and
`sglang/contents.py`).
"""

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint
from convert.detect import open_checkpoint, open_draft
from convert.digest import Digest
from convert.ours_source import is_ours
from convert.own_hashes import ArrayHashes, check_own_hashes, difference
from convert.progress import Reporter, make_reporter
from convert.rules import published_names, reading_order
from convert.sglang.contents import check_contents, is_dumped
from convert.stream import read_pieces
from convert.tensor import Tensor
from ddtree_jax.errors import CheckpointError


def verify(first: Path, second: Path, *, quantise_experts: bool = False) -> bool:
    """Returns whether two directories hold the same weights; prints what differs.

    A drafter inside is compared if both have one, and otherwise said not to be.

    Args:
      quantise_experts: As in `open_checkpoint`, for the first.

    Raises:
      DDTreeError: One of them is incomplete or refused; the message says why.
    """
    hashes = ArrayHashes()
    opened = open_checkpoint(first, quantise_experts=quantise_experts, seen=hashes)
    pairs = [(opened, open_checkpoint(second, seen=hashes), "")]
    drafts = [
        draft
        for directory in (first, second)
        if (draft := open_draft(directory, seen=hashes)) is not None
    ]
    if len(drafts) == 2:
        pairs.append((drafts[0], drafts[1], f"{DRAFT}: "))
    compared = [(what, compare(a, b)) for a, b, what in pairs]
    opened_once = {c.directory: c for *both, _ in pairs for c in both}
    same = True
    for directory, checkpoint in opened_once.items():
        same &= _report(f"{directory}: ", _check_own(checkpoint, hashes))
    for what, lines in compared:
        same &= _report(what, lines)
    if len(drafts) == 1:
        print(f"{drafts[0].directory} not compared: only one of the two has a drafter")
    print("equal" if same else "different")
    return same


def compare(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Returns lines that say what was compared and how two checkpoints differ.

    A line that tells a difference begins with "!".
    """
    a, b = _by_published_name(first), _by_published_name(second)
    # In this order each array of a canonical checkpoint is read from its beginning on.
    common = sorted((name for name in a if name in b), key=reading_order)
    alike = [n for n in common if (a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape)]
    total = sum(a[name].nbytes for name in alike)
    reporting = contextlib.closing(make_reporter("comparing", 2 * total))
    with reporting as reporter:
        hashes = list(
            _hash_pairs([a[n] for n in alike], [b[n] for n in alike], reporter)
        )
    differ = [
        f"{name} (BLAKE3 {x[:12]}… and {y[:12]}…)"
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
        *difference("of different bytes", differ),
        *difference("of different shape or dtype", shapes),
        *difference(f"only in {first.directory}", [n for n in a if n not in b]),
        *difference(f"only in {second.directory}", [n for n in b if n not in a]),
    ]


def _check_own(checkpoint: Checkpoint, hashes: ArrayHashes) -> list[str]:
    """Returns lines that say whether a checkpoint is as it says itself."""
    if is_ours(checkpoint.directory):
        return check_own_hashes(checkpoint.directory, hashes)
    if is_dumped(checkpoint.files[0]):
        what, bad = check_contents(checkpoint.files)
        return [what, *difference("not as their keys say", bad)]
    return []


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
    """Yields the hash of each tensor and of its partner, which is as long."""
    digests = (Digest(), Digest())
    pieces = zip(read_pieces(first), read_pieces(second), strict=True)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        for a, b in pieces:
            reporter.at(a.tensor.file.name)
            other = pool.submit(digests[1].add, b.data)
            digests[0].add(a.data)
            other.result()
            reporter.advance(a.data.nbytes + b.data.nbytes)
            if a.last:
                yield digests[0].hex(), digests[1].hex()
                digests = (Digest(), Digest())


def _report(what: str, lines: list[str]) -> bool:
    """Prints the lines and returns whether none tells a difference."""
    for line in lines:
        print(what + line)
    return not any(line.startswith("!") for line in lines)
