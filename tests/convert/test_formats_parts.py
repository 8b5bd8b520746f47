"""The parts of one weight make it, or are refused by the format's name in one line."""

import numpy as np
import pytest

from convert.formats import view_as_int4
from convert.hf_source import read_directory
from convert.tensor import read_array
from ddtree_jax.errors import CheckpointError, DDTreeError, UnsupportedFormatError
from tests.convert.other_formats import (
    BF16,
    to_gptq,
    words,
)
from tests.convert.support import (
    Raw,
    raw,
    write_checkpoint,
)


def view(tmp_path, tensors: dict[str, Raw], **options):
    directory = write_checkpoint(tmp_path / "w", tensors, {}, shards=1)
    return view_as_int4(read_directory(directory).tensors, **options)


def refused(
    tmp_path,
    tensors: dict[str, Raw],
    match: str,
    kind: type[DDTreeError] = UnsupportedFormatError,
    **options,
) -> None:
    """Checks that a view, or the reading of it, is refused in one line."""
    with pytest.raises(kind, match=match) as info:
        for tensor in view(tmp_path, tensors, **options).tensors.values():
            read_array(tensor)
    message = str(info.value)
    assert "\n" not in message and "model-00001-of-00001.safetensors: " in message


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
         r"NVFP4 \(ModelOpt\) \(w\.weight_scale_2 is F32 \[2\]\)"),
        ({"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale":
          "F32"}, r"NVFP4 \(compressed-tensors\) \(w\.weight_global_scale"),
        ({"weight": "U8", "weight_scale": "U8"}, r"MXFP4 \(w\.weight"),
        ({"weight_packed": "U8", "weight_scale": "U8"}, r"MXFP4 \(w\.weight_packed"),
        ({"weight": "U8", "weight_scale": "F8_E8M0"}, "MXFP4"),
        ({"weight": "F8_E4M3", "weight_scale": "F8_E8M0"}, "MXFP4 or MXFP8"),
        ({"weight": "F4"}, "FP4"),
        ({"weight": "F8_E5M2", "weight_scale": "F32"}, "FP8 E5M2 "),
        ({"weight": "F8_E4M3FNUZ", "weight_scale": "F32"}, "FP8 E4M3FNUZ"),
        ({"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
         "FP8 or NVFP4 with stored activation scales"),
        ({"weight": "F8_E4M3"}, r"FP8 without scales \(w\.weight is F8_E4M3"),
        ({"weight_packed": "I32", "weight_scale": "BF16", "weight_zero_point": "I32"},
         r"asymmetric INT4 \(w\.weight_zero_point"),
        ({"weight_packed": "I32", "weight_scale": "BF16", "weight_g_idx": "I32"},
         r"INT4 with activation order \(w\.weight_g_idx"),
        ({"weight": "I8", "weight_scale": "BF16", "weight_offset": "BF16"},
         r"Ascend NPU \(w\.weight_offset"),
        ({"weight": "I8", "weight_scale": "BF16"}, "INT8 or Ascend NPU"),
        ({"k_scale": "F32"}, "a quantised KV cache"),
        ({"weight": "U8", "absmax": "F32"}, "bitsandbytes"),
    ],
)  # fmt: skip
def test_foreign_formats_are_refused_by_name(tmp_path, parts, kind):
    bits = {"F4": 4, "U8": 8, "I8": 8, "BF16": 16, "F32": 32, "I32": 32}
    tensors = {
        f"w.{part}": Raw(dtype, (2,), bytes(2 * bits.get(dtype, 8) // 8))
        for part, dtype in parts.items()
    }
    match = f"unsupported quantisation format {kind}.*; expected INT4 pack-quantized"
    refused(tmp_path, tensors, match)


@pytest.mark.parametrize("shape", [(2, 1), (1,), (130, 1), (2, 2)])
def test_fp8_scales_that_are_not_for_blocks(tmp_path, shape):
    size = int(np.prod(shape))
    tensors = {
        "w.weight": Raw("F8_E4M3", (130, 64), bytes(130 * 64)),
        "w.weight_scale": raw(np.ones(size, np.float32).reshape(shape)),
    }
    if shape == (2, 1):
        assert read_array(view(tmp_path, tensors).tensors["w.weight"]).shape == (
            130,
            64,
        )
        return
    refused(
        tmp_path,
        tensors,
        r"FP8 with other scales than one for each block of 128 × 128 "
        r"\(w\.weight_scale is F32 .*expected \[2, 1\] for w\.weight",
    )


def gptq_weight(outputs: int = 16, inputs: int = 64) -> dict[str, Raw]:
    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (outputs, inputs))
    scale = rng.integers(1, 255, (outputs, inputs // 32)) * 2.0**-12
    int4 = {
        "w.weight_packed": raw(words(q)),
        "w.weight_scale": raw(scale.astype(BF16)),
    }
    return to_gptq(int4, zero=7)


def test_gptq_pieces(tmp_path):
    """Rows of a transposed tensor are read by themselves."""
    made = view(tmp_path, gptq_weight()).tensors["w.weight"]
    whole = read_array(made).tobytes()
    for start, stop in ((77, 177), (700, 1500), (2047, 2048)):
        piece = bytearray(stop - start)
        made.read_into(memoryview(piece), start)
        assert bytes(piece) == whole[start:stop]


def changed(tensors: dict[str, Raw], part: str, at: int, value) -> dict[str, Raw]:
    name = f"w.{part}"
    dtype = np.float16 if tensors[name].dtype == "F16" else np.int32
    values = np.frombuffer(tensors[name].data, dtype).copy()
    values[at] = value
    return tensors | {
        name: Raw(tensors[name].dtype, tensors[name].shape, values.tobytes())
    }


@pytest.mark.parametrize(
    ("part", "at", "value", "match", "kind"),
    [
        ("g_idx", 63, 0, r"GPTQ with activation order \(w\.g_idx is I32 \[64\]\)",
         UnsupportedFormatError),
        ("g_idx", 0, 1, "GPTQ with activation order", UnsupportedFormatError),
        ("qzeros", 3, 0x77777776, r"asymmetric INT4 \(GPTQ\) \(w\.qzeros is I32",
         UnsupportedFormatError),
        ("qzeros", 0, -0x77777778, "asymmetric INT4", UnsupportedFormatError),
        ("scales", 31, 1 + 2**-10, r"w\.scales holds 1\.0009765625 at \[1, 15\]; "
         "expected float16 values that bfloat16 holds exactly", CheckpointError),
        ("scales", 0, np.nan, r"w\.scales holds NaN or infinity", CheckpointError),
        ("scales", 7, -np.inf, r"w\.scales holds NaN or infinity", CheckpointError),
    ],
)  # fmt: skip
def test_gptq_data_that_are_refused(tmp_path, part, at, value, match, kind):
    refused(tmp_path, changed(gptq_weight(), part, at, value), match, kind)


@pytest.mark.parametrize(("stored", "other"), [(7, 8), (8, 7)])
def test_gptq_zero_of_the_other_convention(tmp_path, stored, other):
    good = gptq_weight()
    word = np.uint32(stored * 0x11111111).view(np.int32)
    zeros = np.full(good["w.qzeros"].shape, word, np.int32)
    tensors = good | {"w.qzeros": raw(zeros)}
    expected = read_array(view(tmp_path, good).tensors["w.weight"])
    for zero in (stored, None):
        made = view(tmp_path, tensors, gptq_zero=zero).tensors["w.weight"]
        np.testing.assert_array_equal(read_array(made), expected)
    refused(
        tmp_path,
        tensors,
        rf"asymmetric INT4 .*the zero point 8 for all, stored as {other}$",
        gptq_zero=other,
    )


I32 = np.int32


@pytest.mark.parametrize(
    ("change", "match", "kind"),
    [
        ({"w.qweight": raw(np.zeros((64, 2), I32))}, r"AWQ \(w\.qweight is I32",
         UnsupportedFormatError),
        ({"w.qweight": raw(np.zeros((16, 16), I32))},
         "GPTQ in other groups than 32, or not of 4 bits", UnsupportedFormatError),
        ({"w.qweight": raw(np.zeros((8, 16, 1), I32))}, "expected an I32 matrix",
         CheckpointError),
        ({"w.scales": raw(np.zeros((2, 16), np.float32))}, "expected an F16 or BF16",
         CheckpointError),
        ({"w.qzeros": raw(np.zeros((2, 16), I32))}, r"expected I32 \[2, 2\]",
         CheckpointError),
        ({"w.g_idx": raw(np.zeros(63, I32))}, r"expected I32 \[64\]", CheckpointError),
        ({"w.scales": None}, r"w\.scales is missing", CheckpointError),
        ({"w.qzeros": None}, r"w\.qzeros is missing", CheckpointError),
        ({"w.weight": raw(np.zeros((16, 64), BF16))}, "w.weight is there in two",
         CheckpointError),
    ],
)  # fmt: skip
def test_gptq_parts_that_do_not_fit(tmp_path, change, match, kind):
    tensors = {n: t for n, t in (gptq_weight() | change).items() if t is not None}
    refused(tmp_path, tensors, match, kind)


def int4_weight() -> dict[str, Raw]:
    return {
        "w.weight_packed": raw(np.zeros((4, 8), I32)),
        "w.weight_scale": raw(np.ones((4, 2), BF16)),
        "w.weight_shape": raw(np.array([4, 64], I32)),
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w.weight_packed": raw(np.zeros((4, 8), np.int64))}, "expected an I32 matr"),
        ({"w.weight_scale": raw(np.ones((4, 2), np.float32))}, r"expected BF16 \[4, 2"),
        ({"w.weight_scale": raw(np.ones((4, 1), BF16))}, r"expected BF16 \[4, 2\]"),
        (
            {"w.weight_scale": raw(np.full((4, 2), np.inf, BF16))},
            "w.weight_scale holds",
        ),
        (
            {"w.weight_shape": raw(np.array([64, 4], I32))},
            r"is \[64, 4\]; expected \[4",
        ),
        ({"w.weight_shape": raw(np.ones(3, I32))}, r"expected I32 or I64 \[2\]"),
        ({"w.weight": raw(np.zeros((4, 64), BF16))}, "w.weight is there in two"),
    ],
)
def test_int4_parts_that_do_not_fit(tmp_path, change, match):
    assert read_array(view(tmp_path, int4_weight()).tensors["w.weight"]).shape == (
        4,
        64,
    )
    refused(tmp_path, int4_weight() | change, match, CheckpointError)


@pytest.mark.parametrize(
    "weight",
    [raw(np.ones((4, 48), BF16)), raw(np.ones((4, 64), np.float32))],
)
def test_experts_that_cannot_be_quantised(tmp_path, weight):
    tensors = {"m.mlp.experts.0.up_proj.weight": weight}
    match = "expected a BF16 matrix, its inputs a multiple of 32"
    refused(tmp_path, tensors, match, CheckpointError, quantise_experts=True)
