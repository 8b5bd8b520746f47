"""Owns the writing of a Hugging Face checkpoint: safetensors files and their index.

    model-00001-of-000NN.safetensors     whole tensors, in the order of the layers
    model.safetensors.index.json         tensor → file, and the bytes of all
    config.json, tokenizer files, …      the source's

Names are the view's, so they are those of the checkpoint that the source was made
from. A file begins with the widest dtype, so that every tensor is aligned.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint, report_losses
from convert.data_files import copy_data_files
from convert.durable import sync
from convert.hf_source import FORMAT, INDEX
from convert.identity import identify
from convert.journal import Job
from convert.plan import make_plan
from convert.progress import Reporter, make_reporter
from convert.rules import is_extra, reading_order
from convert.sequential import SequentialFile
from convert.staging import Staging, check_apart, check_space, staged
from convert.stream import Piece, read_pieces
from convert.tensor import DTYPES, Tensor, check_finite
from ddtree_jax.errors import CheckpointError


def convert_to_hf(
    source: Checkpoint,
    destination: Path,
    *,
    draft: Checkpoint | None,
    part_bytes: int,
) -> None:
    """Writes `source` as a Hugging Face directory, or nothing.

    Args:
      source: A target or a drafter, from any format.
      destination: The directory to make; it must not exist.
      draft: A drafter, written into `destination`/draft.
      part_bytes: Bytes of tensors in a file, at most; a larger tensor stands alone.

    Raises:
      DDTreeError: The source is not usable; the message names file and tensor.
    """
    jobs = [(source, Path()), *([(draft, Path(DRAFT))] if draft else [])]
    for checkpoint, _ in jobs:
        check_apart(checkpoint.directory, destination)
        make_plan(checkpoint).check_stated_shapes()
        report_losses(checkpoint)
    total = sum(checkpoint.nbytes for checkpoint, _ in jobs)
    check_space(destination, total)
    job = _identify(jobs, part_bytes)
    apart = [checkpoint.directory for checkpoint, _ in jobs]
    reporting = contextlib.closing(make_reporter("writing", total))
    with staged(destination, job) as staging, reporting as reporter:
        for checkpoint, place in reversed(jobs):
            directory = staging.directory / place
            directory.mkdir(exist_ok=True)
            copy_data_files(checkpoint, directory, apart=apart)
            _write_parts(checkpoint, directory, part_bytes, staging, reporter)
        if _identify(jobs, part_bytes) != job:
            raise CheckpointError(f"{source.directory} has changed meanwhile")
    print(f"{destination}: {total} bytes written")


def split_in_parts(tensors: list[Tensor], part_bytes: int) -> list[list[Tensor]]:
    """Returns the tensors of each file: as many as fit, in the order of the layers."""
    parts: list[list[Tensor]] = []
    room = 0
    for tensor in sorted(tensors, key=_position):
        if not parts or tensor.nbytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(tensor)
        room -= tensor.nbytes
    return parts


def file_head(tensors: list[Tensor]) -> bytes:
    """Returns the head of a safetensors file that holds `tensors`, in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def widest_first(tensor: Tensor) -> int:
    """Returns the key by which a file's tensors are sorted, so that all are aligned."""
    return -DTYPES[tensor.dtype].itemsize


def _write_parts(
    source: Checkpoint,
    directory: Path,
    part_bytes: int,
    staging: Staging,
    reporter: Reporter,
) -> None:
    parts = split_in_parts(list(source.tensors.values()), part_bytes)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        path = directory / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        weight_map |= dict.fromkeys((tensor.name for tensor in part), path.name)
        if staging.journal.noted(staging.key(path)) and path.is_file():
            reporter.skip(sum(tensor.nbytes for tensor in part))
            continue
        reporter.at(path.name)
        write_part(path, sorted(part, key=widest_first), reporter)
        staging.journal.note([(staging.key(path), "")])
    index = {
        "metadata": {"total_size": source.nbytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_part(path: Path, tensors: list[Tensor], reporter: Reporter) -> None:
    """Writes a safetensors file with `tensors` in this order; it is durable on return.

    Raises:
      CheckpointError: A tensor cannot be read, or holds NaN or infinity.
    """
    with SequentialFile(path) as file:
        file.write(memoryview(file_head(tensors)))
        for piece in _checked(tensors):
            file.write(memoryview(piece.data))
            reporter.advance(piece.data.nbytes)
    sync([path.parent])


def _checked(tensors: list[Tensor]) -> Iterator[Piece]:
    """Yields the bytes of `tensors`, after a look for NaN and infinity."""
    for piece in read_pieces(tensors):
        tensor = piece.tensor
        if not is_extra(tensor.name):
            check_finite(piece.data.view(DTYPES[tensor.dtype]), tensor)
        yield piece


def _position(tensor: Tensor) -> list[tuple[int, str]]:
    return reading_order(tensor.name)


def _identify(jobs: list[tuple[Checkpoint, Path]], part_bytes: int) -> Job:
    """Returns all that the result depends on."""
    sources = {
        place.name or "source": identify(
            checkpoint,
            [(t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()],
        )
        for checkpoint, place in jobs
    }
    return {"to": FORMAT, "part_bytes": part_bytes, **sources}
