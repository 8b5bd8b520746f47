"""Owns the marks of quantised formats that are recognised and refused by name."""

from collections.abc import Iterable

from convert.safetensors_file import Tensor
from ddtree_jax.errors import UnsupportedFormatError

# The last part of a tensor's name → the format that alone writes it.
_BY_SUFFIX = {
    "weight_scale_inv": "FP8 in blocks (DeepSeek)",
    "g_idx": "GPTQ",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "input_global_scale": "NVFP4 (compressed-tensors)",
    "weight_zero_point": "asymmetric INT4",
    "weight_g_idx": "INT4 with activation order",
}
_BY_DTYPE = {
    "F8_E4M3": "FP8",
    "F8_E5M2": "FP8",
    "F8_E4M3FNUZ": "FP8",
    "F8_E5M2FNUZ": "FP8",
    "F8_E8M0": "MXFP4",
    "F4": "FP4",
}


def refuse_foreign_formats(tensors: Iterable[Tensor]) -> None:
    """Raises UnsupportedFormatError if a tensor is foreign; names format and file."""
    ordered = list(tensors)
    for tensor in ordered:
        suffix = tensor.name.rsplit(".", 1)[-1]
        if suffix in _BY_SUFFIX:
            raise _refusal(tensor, _BY_SUFFIX[suffix])
    for tensor in ordered:
        if tensor.dtype == "U8" and tensor.name.endswith((".weight", ".weight_scale")):
            raise _refusal(tensor, "MXFP4")
        if tensor.dtype in _BY_DTYPE:
            raise _refusal(tensor, _BY_DTYPE[tensor.dtype])


def _refusal(tensor: Tensor, kind: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{tensor.file}: unsupported quantisation format {kind} ({tensor.name} is "
        f"{tensor.dtype}); expected INT4 pack-quantized experts and bfloat16"
    )
