"""Makes int4.npz: packing and dequantising by the real compressed-tensors.

NumPy has no bfloat16, so `*_bits` keys hold the values' 16 bits as uint16.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch

from . import int4
from .draw import Draw

# Outputs × inputs; one group, several groups, odd numbers of outputs.
RANDOM_SHAPES = ((1, 32), (5, 96), (7, 160), (64, 128))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.uint16).numpy()


def _case(name: str, weight: torch.Tensor, scale: torch.Tensor) -> dict:
    """What the library stores for `weight`, and what it reads back."""
    stored = int4.compress(weight, scale)
    packed = stored["weight_packed"]
    nibbles = torch.stack([packed >> 4 * k & 0xF for k in range(8)], dim=-1)
    return {
        f"{name}_weight_bits": _bits(weight),
        f"{name}_scale_bits": _bits(stored["weight_scale"]),
        f"{name}_packed": packed.numpy(),
        f"{name}_q": (nibbles.flatten(-2) - 8).numpy().astype(np.int8),
        f"{name}_dequantised_bits": _bits(int4.decompress(stored)),
    }


def _formula_case() -> dict:
    """The vector u[n, k] = (7k + 3n) mod 16 with all scales one.

    Its words and digest are known from another run of the library; they are
    checked here so that a change of the library's layout cannot pass unseen.
    """
    n, k = torch.arange(128)[:, None], torch.arange(64)[None]
    q = (7 * k + 3 * n) % 16 - 8
    scale = torch.ones(128, 2, dtype=torch.bfloat16)
    case = _case("formula", q.to(torch.bfloat16), scale)
    packed = case["formula_packed"]
    assert (case["formula_q"] == q.numpy()).all()
    words = packed[:2, :2].view(np.uint32).tolist()
    assert words == [[0x1A3C5E70, 0x92B4D6F8], [0x4D6F81A3, 0xC5E7092B]], words
    known = ((packed, "3e4d2487ad4dc16b"), (packed.T, "17682ab2a99fcfd8"))
    for layout, prefix in known:
        digest = hashlib.sha256(layout.astype("<i4").tobytes()).hexdigest()
        assert digest.startswith(prefix), (digest, prefix)
    return case


def _all_values_case() -> dict:
    """Every q times scales from 2⁻¹⁰⁰ to 2¹⁰⁰ that use all mantissa bits."""
    q = torch.arange(64).remainder(16).sub(8).expand(40, 64)
    exponent = torch.linspace(-100, 100, 80).round().reshape(40, 2)
    mantissa = 1 + torch.arange(80).remainder(128).reshape(40, 2) / 128
    scale = (torch.ldexp(mantissa, exponent)).to(torch.bfloat16)
    weight = q * scale.repeat_interleave(int4.GROUP_SIZE, dim=-1)
    case = _case("all_values", weight.to(torch.bfloat16), scale)
    assert (case["all_values_q"] == q.numpy()).all()
    return case


def build(directory: Path) -> None:
    """Writes int4.npz into `directory`."""
    draw = Draw("golden_int4")
    arrays = _formula_case() | _all_values_case()
    for shape in RANDOM_SHAPES:
        name = f"random_{shape[0]}x{shape[1]}"
        weight = draw.bfloat16(name, shape, std=0.05)
        arrays |= _case(name, weight, int4.scales(weight))
    np.savez_compressed(directory / "int4.npz", **arrays)
