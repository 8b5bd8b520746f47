"""Makes formats.npz: FP8 blocks and INT4 quantising by torch and compressed-tensors.

NumPy has neither bfloat16 nor float8, so `*_bits` keys hold the values' 16 bits as
uint16 and `*_codes` their 8 bits as uint8.
"""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme

from . import int4
from .draw import Draw

BLOCK = 128
# 576 = 4.5 blocks of rows, as kv_a_proj_with_mqa has; a partial block on both axes.
FP8_SHAPES = ((576, 40), (130, 140), (1, 1))

_FP8_BLOCK = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
_COMPRESSOR = BaseCompressor.get_value_from_registry("float-quantized")


def _bits(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.uint16).numpy()


def _codes(draw: Draw, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Random E4M3 bytes; the two that are NaN are made zero."""
    codes = torch.from_numpy(draw.integers(name, shape, below=256)).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    return codes


def _spread(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return whole[: shape[0], : shape[1]]


def _fp8_case(draw: Draw, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """One weight, dequantised as DeepSeek's own code and as the library do."""
    name = f"fp8_{shape[0]}x{shape[1]}"
    codes = _codes(draw, name, shape)
    weight = codes.view(torch.float8_e4m3fn)
    blocks = tuple(-(-n // BLOCK) for n in shape)
    scale = draw.float32(f"{name}_scale", blocks, std=2e-4, mean=5e-4)
    own = (weight.float() * _spread(scale, shape)).to(torch.bfloat16)
    narrow = scale.to(torch.bfloat16)
    read = _COMPRESSOR.decompress(
        {"weight": weight, "weight_scale": narrow}, _FP8_BLOCK
    )["weight"]
    assert read.shape == weight.shape, read.shape
    return {
        f"{name}_codes": codes.numpy(),
        f"{name}_scale": scale.numpy(),
        f"{name}_dequantised_bits": _bits(own),
        f"{name}_narrow_scale_bits": _bits(narrow),
        f"{name}_narrow_dequantised_bits": _bits(read.to(torch.bfloat16)),
    }


def _hard_weight() -> torch.Tensor:
    """Groups whose scales or quotients are at an edge of the rule."""
    ramp = torch.linspace(-1, 1, int4.GROUP_SIZE)
    ties = torch.arange(int4.GROUP_SIZE) % 16 * 0.5 - 3.5
    ties[0] = 7.5  # the scale is 1, and half of the quotients are ties
    rows = [
        torch.zeros(int4.GROUP_SIZE),
        -torch.zeros(int4.GROUP_SIZE),
        ties,
        -ties,
        ramp,
        ramp.abs(),
        -ramp.abs(),
        ramp * 2.0**120,
        ramp * 2.0**-120,
        ramp * 2.0**-130,  # the weights are subnormal
        ramp * 2.0**-133,  # the scale is, or is zero
        torch.where(torch.arange(int4.GROUP_SIZE) == 5, 3.0, 0.0),
    ]
    return torch.stack(rows).reshape(6, 2 * int4.GROUP_SIZE).to(torch.bfloat16)


def _quantise_case(name: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    stored = int4.compress(weight, int4.scales(weight))
    return {
        f"{name}_weight_bits": _bits(weight),
        f"{name}_scale_bits": _bits(stored["weight_scale"]),
        f"{name}_packed": stored["weight_packed"].numpy(),
    }


def build(directory: Path) -> None:
    """Writes formats.npz into `directory`."""
    draw = Draw("golden_formats")
    arrays = _quantise_case("quantise_hard", _hard_weight())
    weight = draw.bfloat16("quantise_random", (48, 256), std=0.03)
    arrays |= _quantise_case("quantise_random", weight)
    for shape in FP8_SHAPES:
        arrays |= _fp8_case(draw, shape)
    np.savez_compressed(directory / "formats.npz", **arrays)
