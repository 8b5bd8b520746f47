"""Owns the forms in which SGLang keeps a routed expert's INT4 weight in memory.

Which one a checkpoint has depends on the GPU it was saved on, under the same names.
All are rearrangements of the Hugging Face form, packed [N, K / 8] and scales
[N, K / 32] for N outputs and K inputs; nothing is lost either way.

    marlin   packed I32 [K / 16, 2 N]   scales [K / 32, N], permuted    Hopper, Ada, …
    raw      packed I32 [K / 8, N]      scales [K / 32, N]              as loaded
    triton   packed U8 [N, K / 2]       scales [N, K / 32]              SM100, ROCm
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from convert.sglang import marlin
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD

type _Change = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Form:
    """How one of the two arrays of a weight is kept.

    Attributes:
      dtype: By safetensors' name.
      outputs_last: Whether the axis of the outputs is the last, and not the first.
      width: Entries of that axis for each output.
      inputs: Inputs for each entry of the other axis.
      decode: Gives the Hugging Face form of one weight.
      encode: Its inverse.
    """

    dtype: str
    outputs_last: bool
    width: int
    inputs: int
    decode: _Change
    encode: _Change

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Returns the shape of one weight."""
        across, along = outputs * self.width, inputs // self.inputs
        return (along, across) if self.outputs_last else (across, along)

    def outputs(self, block: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Returns the part of `block` for outputs start … stop-1."""
        part = slice(start * self.width, stop * self.width)
        return block[:, part] if self.outputs_last else block[part]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of SGLang's layouts.

    Attributes:
      run: Outputs that are kept together; N and every cut of it are multiples.
      step: Inputs that are kept together.
    """

    name: str
    packed: Form
    scale: Form
    run: int
    step: int


def _transpose(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous transpose, made in tiles that fit in a cache."""
    rows, columns = array.shape
    out = np.empty((columns, rows), array.dtype)
    for at in range(0, columns, 64):
        out[at : at + 64] = np.ascontiguousarray(array[:, at : at + 64]).T
    return out


def _decode_marlin_scale(scales: np.ndarray) -> np.ndarray:
    return _transpose(marlin.permute_scales(scales))


def _encode_marlin_scale(scales: np.ndarray) -> np.ndarray:
    return marlin.permute_scales(_transpose(scales))


def _words_of_bytes(packed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(packed).view(np.int32)


def _bytes_of_words(packed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(packed).view(np.uint8)


MARLIN = Layout(
    "marlin",
    Form("I32", True, 2, 16, marlin.decode, marlin.encode),
    Form("BF16", True, 1, GROUP_SIZE, _decode_marlin_scale, _encode_marlin_scale),
    run=64,
    step=16,
)
RAW = Layout(
    "raw",
    Form("I32", True, 1, NIBBLES_PER_WORD, _transpose, _transpose),
    Form("BF16", True, 1, GROUP_SIZE, _transpose, _transpose),
    run=1,
    step=NIBBLES_PER_WORD,
)
TRITON = Layout(
    "triton",
    Form("U8", False, 1, 2, _words_of_bytes, _bytes_of_words),
    Form("BF16", False, 1, GROUP_SIZE, np.ascontiguousarray, np.ascontiguousarray),
    run=1,
    step=NIBBLES_PER_WORD,
)
LAYOUTS = {layout.name: layout for layout in (MARLIN, RAW, TRITON)}
