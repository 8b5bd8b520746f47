"""Writes the INT4 checkpoint in other formats, independently of the converter.

Nothing here imports `convert`. Each writer takes Hugging Face tensors and returns
those of the other format, which stand for the same weights or for rounded ones.
"""

import re

import ml_dtypes
import numpy as np

from tests.convert.support import Raw, raw

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP, BLOCK = 32, 128
EXPERT = re.compile(r".*\.experts\.\d+\.(gate|up|down)_proj")
ATTENTION = re.compile(r".*self_attn\.((q_a|q_b|kv_b|o)_proj|kv_a_proj_with_mqa)")
DENSE = re.compile(rf"{ATTENTION.pattern}|.*mlp(\.shared_experts)?\.\w+_proj")

FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
FP8_BLOCK_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": True, "num_bits": 8, "type": "float"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "block_structure": [128, 128],
                "dynamic": False,
                "num_bits": 8,
                "strategy": "block",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
}


def bases(tensors: dict[str, Raw], pattern: re.Pattern, part: str) -> list[str]:
    """Returns the weights that match `pattern` and have the part `part`."""
    found = (n.rpartition(".") for n in tensors)
    return [base for base, _, last in found if last == part and pattern.fullmatch(base)]


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns q in -8 … 7 of words [out, in / 8]."""
    out = np.empty((packed.shape[0], packed.shape[1] * 8), np.int64)
    for k in range(8):
        out[:, k::8] = (packed.astype(np.int64) >> 4 * k & 0xF) - 8
    return out


def words(q: np.ndarray) -> np.ndarray:
    """Returns the int32 words of q in -8 … 7, [out, in]."""
    total = sum((q[:, k::8].astype(np.int64) + 8) << 4 * k for k in range(8))
    return np.asarray(total).astype(np.uint32).view(np.int32)


def spread(scale: np.ndarray) -> np.ndarray:
    return np.repeat(scale.astype(np.float64), GROUP, axis=1)


def multiplied_out(tensors: dict[str, Raw], base: str) -> np.ndarray:
    """Returns the bfloat16 weight of an INT4 one."""
    q = nibbles(tensors[f"{base}.weight_packed"].array())
    return (q * spread(tensors[f"{base}.weight_scale"].array())).astype(BF16)


def to_bfloat16(tensors: dict[str, Raw]) -> dict[str, Raw]:
    """Returns the checkpoint with its experts multiplied out."""
    out = dict(tensors)
    for base in bases(tensors, EXPERT, "weight_packed"):
        out[f"{base}.weight"] = raw(multiplied_out(tensors, base))
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del out[f"{base}.{part}"]
    return out


def to_int4(tensors: dict[str, Raw], pattern: re.Pattern) -> dict[str, Raw]:
    """Returns the checkpoint with the weights of `pattern` in INT4, rounded."""
    out = dict(tensors)
    for base in bases(tensors, pattern, "weight"):
        weight = out.pop(f"{base}.weight").array().astype(np.float64)
        groups = np.abs(weight.reshape(len(weight), -1, GROUP))
        scale = (groups.max(axis=-1) / 7).astype(BF16)
        q = np.clip(np.rint(weight / spread(scale)), -8, 7).astype(np.int64)
        out[f"{base}.weight_packed"] = raw(words(q))
        out[f"{base}.weight_scale"] = raw(scale)
        out[f"{base}.weight_shape"] = raw(np.array(weight.shape, np.int32))
    return out


def to_gptq(
    tensors: dict[str, Raw], *, zero: int, scales: str = "F16", order: bool = True
) -> dict[str, Raw]:
    """Returns an INT4 checkpoint in GPTQ's form.

    Args:
      zero: What stands for the zero point 8.
      scales: The dtype of the scales.
      order: Whether `g_idx` is there.
    """
    out = dict(tensors)
    for base in bases(tensors, re.compile(".*"), "weight_packed"):
        q = nibbles(out.pop(f"{base}.weight_packed").array())
        scale = out.pop(f"{base}.weight_scale")
        out.pop(f"{base}.weight_shape", None)
        outputs, inputs = q.shape
        qweight = np.zeros((inputs // 8, outputs), np.int64)
        for i in range(inputs):
            qweight[i // 8] |= (q[:, i] + 8) << 4 * (i % 8)
        out[f"{base}.qweight"] = raw(qweight.astype(np.uint32).view(np.int32))
        turned = np.ascontiguousarray(scale.array().T)
        if scales == "F16":
            narrow = turned.astype(np.float16)
            assert (narrow.astype(np.float32) == turned.astype(np.float32)).all()
            out[f"{base}.scales"] = Raw("F16", narrow.shape, narrow.tobytes())
        else:
            out[f"{base}.scales"] = raw(turned)
        zeros = np.full((inputs // GROUP, outputs // 8), zero * 0x11111111, np.uint32)
        out[f"{base}.qzeros"] = raw(zeros.view(np.int32))
        if order:
            groups = np.arange(inputs, dtype=np.int32) // GROUP
            out[f"{base}.g_idx"] = raw(groups)
    return out


def to_fp8(
    tensors: dict[str, Raw],
    pattern: re.Pattern,
    *,
    part: str = "weight_scale_inv",
    dtype=np.float32,
) -> tuple[dict[str, Raw], dict[str, np.ndarray]]:
    """Returns the checkpoint with FP8 weights, and what they stand for by name."""
    out, means = dict(tensors), {}
    for base in bases(tensors, pattern, "weight"):
        weight = out.pop(f"{base}.weight").array().astype(np.float64)
        rows, columns = (-(-n // BLOCK) for n in weight.shape)
        codes = np.zeros(weight.shape, E4M3)
        scale = np.zeros((rows, columns), dtype)
        mean = np.zeros(weight.shape, BF16)
        for i in range(rows):
            for j in range(columns):
                block = np.s_[BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)]
                scale[i, j] = np.abs(weight[block]).max() / 448
                factor = float(scale[i, j])
                codes[block] = np.clip(weight[block] / factor, -448, 448).astype(E4M3)
                product = codes[block].astype(np.float64) * factor
                mean[block] = product.astype(np.float32).astype(BF16)
        out[f"{base}.weight"] = Raw("F8_E4M3", codes.shape, codes.tobytes())
        out[f"{base}.{part}"] = raw(scale)
        means[f"{base}.weight"] = mean
    return out, means


def own_rule(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns words and scales of a bfloat16 weight, in ml_dtypes' own arithmetic."""
    groups = weight.reshape(len(weight), -1, 32)
    scale = np.abs(groups).max(axis=-1) / BF16.type(7.5)
    quotient = groups / scale[..., None]
    assert quotient.dtype == scale.dtype == BF16
    q = np.clip(np.rint(quotient.astype(np.float64)), -8, 7).astype(np.int64)
    return words(q.reshape(weight.shape)), scale
