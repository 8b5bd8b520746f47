"""Compares golden files with rebuilt ones, key by key."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

# Checkpoints, texts, integers and masks must be equal. Floats of the .npz files come
# from float32 kernels, whose order of summation depends on the CPU. The builders
# check that the models' outputs lie within FLOAT32_NOISE of float64's, so those of
# two machines lie within twice that of each other.
FLOAT32_NOISE = 3e-6
# Floats of the .json files come from a few float64 operations and libm calls.
FLOAT64_RELATIVE = 1e-12


def distance(got, want) -> float:
    """Returns max |got - want|, in units of the largest value (or 1) in `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / max(1.0, np.max(np.abs(want))))


def differences(golden: Path, rebuilt: Path) -> list[str]:
    """Returns one line per key in which the two files differ."""
    compare = {".npz": _npz, ".json": _json, ".safetensors": _safetensors}
    found = compare.get(golden.suffix, _bytes)(golden, rebuilt)
    return [f"{golden}: {line}" for line in found]


def _bytes(golden: Path, rebuilt: Path) -> list[str]:
    """The first line that differs, line ends included."""
    lines = (p.read_bytes().splitlines(keepends=True) for p in (golden, rebuilt))
    for number, (want, got) in enumerate(itertools.zip_longest(*lines), start=1):
        if want != got:
            return [f"line {number}: {want!r} became {got!r}"]
    return []


def _keys(golden, rebuilt) -> tuple[list[str], list[str]]:
    """The keys of both, and a line for each that only one has."""
    lines = [f"{key}: not rebuilt" for key in sorted(set(golden) - set(rebuilt))]
    lines += [f"{key}: missing" for key in sorted(set(rebuilt) - set(golden))]
    return [key for key in golden if key in rebuilt], lines


def _npz(golden: Path, rebuilt: Path) -> list[str]:
    with np.load(golden) as want, np.load(rebuilt) as got:
        common, lines = _keys(want.files, got.files)
        for key in common:
            lines += [f"{key}: {fault}" for fault in _array(want[key], got[key])]
    return lines


def _array(want: np.ndarray, got: np.ndarray) -> list[str]:
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return [f"{want.dtype}{want.shape} became {got.dtype}{got.shape}"]
    if want.dtype.kind != "f":
        count = int((want != got).sum())
        return [f"{count} of {want.size} values differ"] if count else []
    found, allowed = distance(got, want), 2 * FLOAT32_NOISE
    # Written so that NaN is a difference.
    if found <= allowed:
        return []
    worst = np.argmax(np.abs(want.astype(np.float64) - got))
    where = tuple(map(int, np.unravel_index(worst, want.shape)))
    return [f"differs by {found:.1e} of its size at {where}, allowed {allowed:.0e}"]


def _safetensors(golden: Path, rebuilt: Path) -> list[str]:
    want, got = load_file(golden), load_file(rebuilt)
    common, lines = _keys(want, got)
    lines += [
        f"{key}: {tuple(want[key].shape)} of {want[key].dtype} is not bit-equal to "
        f"{tuple(got[key].shape)} of {got[key].dtype}"
        for key in common
        if not _bit_equal(want[key], got[key])
    ]
    if not lines and golden.read_bytes() != rebuilt.read_bytes():
        lines.append("tensors are equal but the file's header is not")
    return lines


def _bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _json(golden: Path, rebuilt: Path) -> list[str]:
    want, got = (json.loads(path.read_text()) for path in (golden, rebuilt))
    lines = [f"{path or 'top level'}: {fault}" for path, fault in _walk("", want, got)]
    if want == got and not lines:
        lines = [f"values are equal, but {x}" for x in _bytes(golden, rebuilt)]
    return lines


def _walk(path: str, want, got):
    """Yields (path, fault) for every leaf that differs."""
    if isinstance(want, dict) and isinstance(got, dict):
        common, lines = _keys(want, got)
        yield from ((path, line) for line in lines)
        for key in common:
            yield from _walk(f"{path}.{key}" if path else key, want[key], got[key])
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for index, pair in enumerate(zip(want, got, strict=True)):
            yield from _walk(f"{path}[{index}]", *pair)
    elif isinstance(want, float) and isinstance(got, float):
        if not math.isclose(want, got, rel_tol=FLOAT64_RELATIVE):
            yield path, f"{want!r} became {got!r}"
    elif type(want) is not type(got) or want != got:
        yield path, f"{want!r} became {got!r}"
