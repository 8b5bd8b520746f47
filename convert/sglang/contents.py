"""Owns the checksums of a presharded dump's contents, by which its tensors are called.

A tensor's key is the hash of its shape and dtype, as PyTorch writes them, and of its
bytes: xxh3_128, or SHA-1 in the versions of SGLang that have that.
"""

import contextlib
import hashlib
import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from convert.progress import make_reporter
from convert.safetensors_file import FileTensor, read_header
from convert.stream import read_pieces
from ddtree_jax.errors import CheckpointError

_SHA1_DIGITS, _XXH3_DIGITS = 40, 32
# safetensors' name → PyTorch's.
_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
}


def is_dumped(path: Path) -> bool:
    """Says whether a weight file is one of a presharded dump."""
    return path.suffix == ".safetensor"


def check_contents(files: Iterable[Path]) -> tuple[str, list[str]]:
    """Returns what was hashed of a dump, and the tensors that are not as their keys.

    Raises:
      CheckpointError: A key is no checksum of a known kind.
    """
    stored = [tensor for file in files for tensor in read_header(file)]
    hashed = [tensor for tensor in stored if _can_hash(tensor)]
    total = sum(tensor.nbytes for tensor in hashed)
    bad: list[str] = []
    digest = None
    with contextlib.closing(make_reporter("hashing", total)) as reporter:
        for piece in read_pieces(hashed):
            tensor = piece.tensor
            reporter.at(tensor.file.name)
            digest = digest or _begun(tensor.name, tensor.dtype, tensor.shape)
            digest.update(piece.data)
            reporter.advance(piece.data.nbytes)
            if piece.last:
                if digest.hexdigest() != tensor.name:
                    bad.append(f"{tensor.name} ({tensor.file})")
                digest = None
    what = f"{len(hashed)} stored tensors, {total} bytes, hashed"
    if len(hashed) < len(stored):
        what += (
            f"; {len(stored) - len(hashed)} not: their keys are xxh3_128, which needs "
            "the package xxhash"
        )
    return what, bad


def _can_hash(tensor: FileTensor) -> bool:
    if len(tensor.name) not in (_SHA1_DIGITS, _XXH3_DIGITS):
        raise CheckpointError(
            f"{tensor.file}: the key {tensor.name} has {len(tensor.name)} characters; "
            "expected 32 (xxh3_128) or 40 (SHA-1)"
        )
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is {tensor.dtype}; expected one of "
            f"{', '.join(_DTYPES)}"
        )
    is_sha1 = len(tensor.name) == _SHA1_DIGITS
    return is_sha1 or importlib.util.find_spec("xxhash") is not None


def _begun(key: str, dtype: str, shape: tuple[int, ...]):
    """Returns the hash of a tensor before its bytes."""
    made = hashlib.sha1 if len(key) == _SHA1_DIGITS else _xxh3_128()
    return made(f"{shape}torch.{_DTYPES[dtype]}".encode())


def _xxh3_128():
    return importlib.import_module("xxhash").xxh3_128
