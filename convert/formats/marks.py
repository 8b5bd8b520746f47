"""Owns the marks of quantised formats that are recognised and refused by name."""

from collections.abc import Iterable

from convert.tensor import Tensor
from ddtree_jax.errors import UnsupportedFormatError

READ = "INT4 pack-quantized, FP8 in blocks, GPTQ INT4 or bfloat16"

# The last part of a tensor's name → the format that alone writes it.
_BY_SUFFIX = {
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_global_scale": "NVFP4 (compressed-tensors)",
    "input_global_scale": "NVFP4 (compressed-tensors)",
    "input_scale": "FP8 or NVFP4 with stored activation scales",
    "weight_zero_point": "asymmetric INT4",
    "weight_g_idx": "INT4 with activation order",
    "weight_offset": "Ascend NPU",
    "k_scale": "a quantised KV cache",
    "v_scale": "a quantised KV cache",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}
_BY_DTYPE = {
    "F8_E5M2": "FP8 E5M2",
    "F8_E4M3FNUZ": "FP8 E4M3FNUZ",
    "F8_E5M2FNUZ": "FP8 E5M2FNUZ",
    "F8_E8M0": "MXFP4 or MXFP8",
    "F4": "FP4",
    "I8": "INT8 or Ascend NPU",
}
# Nibbles of two FP4 numbers, or FP4's scales as exponents.
_U8 = (".weight", ".weight_packed", ".weight_scale")


def refuse_foreign_formats(tensors: Iterable[Tensor]) -> None:
    """Raises UnsupportedFormatError if a tensor is foreign; names format and file."""
    ordered = list(tensors)
    for tensor in ordered:
        suffix = tensor.name.rsplit(".", 1)[-1]
        if suffix in _BY_SUFFIX:
            raise foreign(tensor, _BY_SUFFIX[suffix])
    for tensor in ordered:
        if tensor.dtype == "U8" and tensor.name.endswith(_U8):
            raise foreign(tensor, "MXFP4")
        if tensor.dtype in _BY_DTYPE:
            raise foreign(tensor, _BY_DTYPE[tensor.dtype])


def foreign(tensor: Tensor, kind: str, *, expected: str = READ):
    """Returns the error that refuses `tensor` as being of the format `kind`."""
    return UnsupportedFormatError(
        f"{tensor.file}: unsupported quantisation format {kind} ({tensor.name} is "
        f"{tensor.dtype} {list(tensor.shape)}); expected {expected}"
    )
