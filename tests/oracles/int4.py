"""INT4 through the real compressed-tensors library. Knows no model."""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

GROUP_SIZE = 32

_ARGS = QuantizationArgs(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP_SIZE
)
_SCHEME = QuantizationScheme(targets=["Linear"], weights=_ARGS)
_COMPRESSOR = BaseCompressor.get_value_from_registry("pack-quantized")


def scales(weight: torch.Tensor) -> torch.Tensor:
    """Returns the library's own scale of every group of 32 inputs."""
    groups = weight.unflatten(-1, (-1, GROUP_SIZE))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), _ARGS)
    return scale.to(torch.bfloat16)


def compress(weight: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns `weight_packed`, `weight_scale`, `weight_shape` as in Kimi's files."""
    out = _COMPRESSOR.compress({"weight": weight, "weight_scale": scale}, _SCHEME)
    # The library writes int64; Moonshot's files hold int32.
    return out | {"weight_shape": out["weight_shape"].to(torch.int32)}


def decompress(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the bfloat16 weight that the three stored tensors stand for."""
    return _COMPRESSOR.decompress(dict(tensors), _SCHEME)["weight"]
