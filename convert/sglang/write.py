"""Owns the writing of all ranks' files, side by side.

Ranks take their share of the same tensors, so the files grow together: what is read
of the source for one rank is at hand for the next.
"""

import concurrent.futures
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from convert import interrupt
from convert.durable import sync
from convert.hf_target import file_head, widest_first
from convert.progress import Reporter
from convert.sequential import SequentialFile
from convert.sglang.pieces import row_size
from convert.sglang.ranks import PATTERN
from convert.staging import Staging
from convert.tensor import Tensor

# Of one rank's tensor at a time, unless a row is larger.
_STEP_BYTES = 4 * 2**20
_THREADS = 4


def write_ranks(
    directory: Path,
    ranks: Sequence[Sequence[Tensor]],
    part_bytes: int,
    staging: Staging,
    reporter: Reporter,
) -> None:
    """Writes the files of every rank.

    Args:
      ranks: Tensors of each rank, of the same names and shapes in the same order.
      part_bytes: Bytes of tensors in a file, at most; a larger tensor stands alone.
    """
    for part, chosen in enumerate(part_indices(ranks[0], part_bytes)):
        paths = [
            directory / PATTERN.format(rank=rank, part=part)
            for rank in range(len(ranks))
        ]
        # Wide dtypes first, so that every tensor is aligned.
        chosen.sort(key=lambda index: widest_first(ranks[0][index]))
        tensors = [[own[index] for index in chosen] for own in ranks]
        key = staging.key(paths[-1])
        if staging.journal.noted(key) and all(path.is_file() for path in paths):
            reporter.advance(sum(t.nbytes for own in tensors for t in own))
            continue
        reporter.at(PATTERN.format(rank="*", part=part))
        _write_part(paths, tensors, reporter)
        staging.journal.note([(key, "")])


def part_indices(tensors: Sequence[Tensor], part_bytes: int) -> list[list[int]]:
    """Returns the indices of the tensors of each part, in order."""
    parts: list[list[int]] = []
    room = 0
    for index, tensor in enumerate(tensors):
        if not parts or tensor.nbytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append(index)
        room -= tensor.nbytes
    return parts


def _write_part(
    paths: Sequence[Path], tensors: Sequence[Sequence[Tensor]], reporter: Reporter
) -> None:
    """Writes one file of each rank; they are on disk on return."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(SequentialFile(path)) for path in paths]
        for file, own in zip(files, tensors, strict=True):
            file.write(memoryview(file_head(list(own))))
        threads = min(_THREADS, os.cpu_count() or 1)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(threads))
        for held in zip(*tensors, strict=True):
            for start, stop in _steps(held[0]):
                interrupt.check()
                writes = [
                    pool.submit(_write_rows, file, tensor, start, stop)
                    for file, tensor in zip(files, held, strict=True)
                ]
                for write in writes:
                    reporter.advance(write.result())
    sync([paths[0].parent])


def _steps(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yields the ranges of bytes, whole rows, that are written in turn."""
    row = row_size(tensor)
    step = max(1, _STEP_BYTES // row) * row
    for start in range(0, tensor.nbytes, step):
        yield start, min(start + step, tensor.nbytes)


def _write_rows(file: SequentialFile, tensor: Tensor, start: int, stop: int) -> int:
    """Appends some bytes of `tensor` to `file` and returns how many."""
    data = np.empty(stop - start, np.uint8)
    tensor.read_into(memoryview(data), start)
    file.write(memoryview(data))
    return data.nbytes
