"""Owns the files of sharded_state: model-rank-R-part-P.safetensors.

Each rank of a tensor-parallel engine has its own parts, numbered from 0. There is no
index: how many ranks there are is how many have files.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from convert.safetensors_file import FileTensor, read_header
from convert.sglang.names import KV_B_ALIAS
from convert.sglang.vision import view_name
from convert.tensor import DTYPES, FiniteTensor, Tensor
from ddtree_jax.errors import CheckpointError

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
GLOB = "model-rank-*-part-*.safetensors"
_NAME = re.compile(r"model-rank-(0|[1-9]\d*)-part-(0|[1-9]\d*)\.safetensors")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """What every rank of an engine holds.

    Attributes:
      directory: Where config.json is.
      format: Name of the form, for people.
      tensors: Of each rank, by SGLang's names; the same names on all. Numbers that
        are not finite are refused as they are read, but for an image's.
    """

    directory: Path
    format: str
    tensors: tuple[Mapping[str, Tensor], ...]
    files: tuple[Path, ...]

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.tensors)


def read_ranks(directory: Path) -> Ranks:
    """Returns the tensors of a sharded_state directory, after checking every header.

    Raises:
      CheckpointError: A rank or part is missing, or a file not as declared.
    """
    parts: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path} is no file of an SGLang sharded_state; expected "
                f"{PATTERN.format(rank='R', part='P')}"
            )
        rank, part = map(int, match.groups())
        parts.setdefault(rank, {})[part] = path
    files = []
    for rank in range(max(parts) + 1):
        own = parts.get(rank, {})
        for part in range(max(own, default=0) + 1):
            if part not in own:
                missing = directory / PATTERN.format(rank=rank, part=part)
                raise CheckpointError(f"{missing} is missing; later files are there")
        files.append([own[part] for part in sorted(own)])
    tensors = tuple(_read_parts(own) for own in files)
    count = len(tensors)
    return check_ranks(
        Ranks(
            directory=directory,
            format=f"SGLang sharded_state of {count} rank{'s' * (count > 1)}",
            tensors=tensors,
            files=tuple(path for own in files for path in own),
        )
    )


def check_ranks(ranks: Ranks) -> Ranks:
    """Returns `ranks`, with one name for what has two, after comparing the names.

    Raises:
      CheckpointError: A rank lacks a tensor that another one has.
    """
    tensors = tuple(
        {name: _checked(tensor) for name, tensor in _without_alias(own).items()}
        for own in ranks.tensors
    )
    first = tensors[0]
    for rank, own in enumerate(tensors):
        for name in first.keys() ^ own.keys():
            has, lacks = (0, rank) if name in first else (rank, 0)
            raise CheckpointError(
                f"{tensors[has][name].file}: {name} is of rank {has} and not of rank "
                f"{lacks}; expected the same tensors on all {len(tensors)} ranks"
            )
    return dataclasses.replace(ranks, tensors=tensors)


def _read_parts(paths: list[Path]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for path in paths:
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{path}: {tensor.name} is in {tensors[tensor.name].file.name} "
                    "too; expected it once"
                )
            tensors[tensor.name] = tensor
    return tensors


def _without_alias(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors` by the loadable name of what has two, scalars refused."""
    alias, name = KV_B_ALIAS
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        real = key.removesuffix(alias) + name if key.endswith(alias) else key
        if real != key and real in tensors:
            raise CheckpointError(
                f"{tensor.file}: {key} and {real} are both there; expected one"
            )
        if not tensor.shape:
            raise CheckpointError(
                f"{tensor.file}: {key} is a scalar; expected at least one axis"
            )
        out[real] = tensor
    return out


def _checked(tensor: Tensor) -> Tensor:
    is_image = view_name(tensor.name) is not None
    return tensor if is_image or tensor.dtype not in DTYPES else FiniteTensor(tensor)
