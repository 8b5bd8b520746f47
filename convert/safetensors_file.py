"""Owns the safetensors format: its header, strictly checked, and bounded reads.

    8 bytes  little-endian length n of the header, at most 100 MB
    n bytes  JSON object: name → {dtype, shape, data_offsets [begin, end)}
    the data: every byte belongs to exactly one tensor

The file is untrusted. Nothing is mapped and no shard is ever read whole.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from ddtree_jax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F4": 4,
}
# Of a tensor. It names a directory, too, and must stay within its parent.
NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclasses.dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a safetensors file: where its bytes are.

    Attributes:
      begin: Offset of the first byte, counted from the start of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    def read_into(self, out: memoryview, start: int) -> None:
        """Fills `out` with the bytes from `start` of the tensor on.

        Raises:
          CheckpointError: The file has become shorter than its header says.
        """
        assert start >= 0 and start + out.nbytes <= self.nbytes
        done = 0
        with open(self.file, "rb", buffering=0) as file:
            while done < out.nbytes:
                at = self.begin + start + done
                got = os.preadv(file.fileno(), [out[done:]], at)
                if got == 0:
                    raise CheckpointError(f"{self.file}: {self.name} is truncated")
                done += got


def read_header(path: Path) -> list[FileTensor]:
    """Returns the tensors of a safetensors file in the order of their bytes.

    Raises:
      CheckpointError: The file is not exactly what its header declares.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise CheckpointError(f"{path} has {size} bytes; expected at least 8")
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: header of {length} bytes; expected at most {MAX_HEADER_BYTES}"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: {size} bytes; its header alone has {8 + length}"
            )
        header = _parse(path, file.read(length))
    tensors = [_tensor(path, name, v, 8 + length) for name, v in header.items()]
    tensors.sort(key=_position)
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique(path))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: the header is not valid JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object")
    # Free text of the writer ("format": "pt"); it says nothing about the tensors.
    header.pop("__metadata__", None)
    return header


def _unique(path: Path) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, value in pairs:
            if key in values:
                raise CheckpointError(f"{path}: {key} stands twice in the header")
            values[key] = value
        return values

    return build


def _tensor(path: Path, name: str, value: object, data: int) -> FileTensor:
    if not NAME.fullmatch(name):
        raise CheckpointError(
            f"{path}: tensor name {name!r}; expected letters, digits, _ and single dots"
        )
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path}: {name} is declared without exactly dtype, shape, data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise CheckpointError(f"{path}: {name} has the bad shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has the bad data_offsets {offsets!r}")
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BITS[dtype]
    if (end - begin) * 8 != expected:
        raise CheckpointError(
            f"{path}: {name} {dtype}{shape} has {end - begin} bytes; "
            f"expected {expected / 8:g}"
        )
    return FileTensor(name, path, dtype, tuple(shape), data + begin, end - begin)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _position(tensor: FileTensor) -> tuple[int, int]:
    return tensor.begin, tensor.nbytes


def _check_layout(path: Path, tensors: list[FileTensor], start: int, size: int) -> None:
    """Raises CheckpointError unless the tensors fill the file from `start` on."""
    at = start
    for tensor in tensors:
        if tensor.begin < at:
            raise CheckpointError(
                f"{path}: {tensor.name} overlaps the tensor before it by "
                f"{at - tensor.begin} bytes"
            )
        if tensor.begin > at:
            raise CheckpointError(
                f"{path}: hole of {tensor.begin - at} bytes before {tensor.name}"
            )
        at += tensor.nbytes
    if size < at:
        raise CheckpointError(f"{path} is truncated: {size} bytes; expected {at}")
    if size > at:
        raise CheckpointError(f"{path} has {size - at} bytes after its last tensor")
