"""The one table of tolerances: (operation, dtype of the result) → bounds and why.

A value passes when it is within `absolute` or within `relative` of what is wanted.
`cosine` bounds the distance of the whole array, 1 − 2 x·y / (x·x + y·y), which
single elements near zero cannot hide.
"""

from typing import NamedTuple


class Tolerance(NamedTuple):
    absolute: float
    relative: float
    cosine: float
    reason: str


# Units of the last place of one value: 2⁻²⁴ ≈ 6e-8 and 2⁻⁹ ≈ 2e-3.
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("tree_mla", "float32"): Tolerance(
        2e-6, 2e-6, 1e-12, "sums of up to 300 products of order 1, in float32"
    ),
    ("tree_mla", "bfloat16"): Tolerance(
        1e-5, 4e-3, 4e-6, "float32 arithmetic, one rounding of the result to 8 bits"
    ),
    ("tree_mla lse", "float32"): Tolerance(
        2e-6, 1e-6, 1e-12, "the logarithm of such a sum; logits are of order 1"
    ),
    ("tree_mla kernel", "bfloat16"): Tolerance(
        8e-3,
        8e-3,
        1e-5,
        "probabilities rounded to 8 bits, each by up to 2⁻⁹ of itself, products summed "
        "in float32, and one rounding of the result: 2e-3 of the norm",
    ),
    ("tree_mla kernel lse", "float32"): Tolerance(
        2e-5,
        2e-6,
        1e-11,
        "sums of float32 probabilities; the GPU's exponentials are good to 2⁻²²",
    ),
    ("int4_matmul", "float32"): Tolerance(
        2e-5, 2e-6, 1e-12, "sums of up to 256 products of order 4, in float32"
    ),
    ("int4_matmul", "bfloat16"): Tolerance(
        2e-5, 4e-3, 4e-6, "float32 arithmetic, one rounding of the result to 8 bits"
    ),
    ("int4_grouped_swiglu", "float32"): Tolerance(
        1e-4, 5e-6, 1e-11, "three such sums in a row; values reach 100"
    ),
    ("int4_matmul kernel", "bfloat16"): Tolerance(
        1e-3, 4e-3, 4e-6, "sums of order 10 in float32, one rounding to 8 bits"
    ),
    ("int4_grouped_swiglu kernel", "float32"): Tolerance(
        2e-2,
        4e-3,
        4e-6,
        "activations rounded to 8 bits between the products, each by up to 2⁻⁹ of "
        "itself: 1.6e-3 of the norm; values are of order 1, the largest 10",
    ),
    ("cos_sin", "float32"): Tolerance(
        3e-7, 3e-7, 1e-12, "library cosine of an exactly known float32 angle"
    ),
    ("rotate", "float32"): Tolerance(
        1e-6, 1e-6, 1e-12, "two products and a sum of order 4, in float32"
    ),
    ("rotate", "bfloat16"): Tolerance(
        1e-6, 4e-3, 4e-6, "float32 arithmetic, one rounding of the result to 8 bits"
    ),
    ("rope scores", "float32"): Tolerance(
        2e-3, 1e-5, 1e-8, "angles up to 1e3 carry float32's 1e3 · 2⁻²⁴ each"
    ),
    ("router weights", "float32"): Tolerance(
        1e-6, 2e-6, 1e-12, "a sum of 8 sigmoids and a division, in float32"
    ),
    ("golden router weights", "float32"): Tolerance(
        2e-5, 2e-5, 1e-9, "the oracle's own float32 through the layers before"
    ),
    ("rms_norm", "float32"): Tolerance(
        1e-6, 1e-6, 1e-12, "a mean of 64 squares, in float32"
    ),
    ("rms_norm", "bfloat16"): Tolerance(
        1e-6, 8e-3, 2e-5, "rounded to 8 bits twice: before the weight and after"
    ),
    ("project", "float32"): Tolerance(
        2e-5, 2e-6, 1e-12, "sums of up to 256 products of order 4, in float32"
    ),
    ("swiglu", "float32"): Tolerance(
        1e-4, 1e-5, 1e-11, "three such sums in a row, summed over devices"
    ),
    ("moe", "float32"): Tolerance(
        2e-4, 1e-5, 1e-11, "the experts' and the shared SwiGLU, summed over devices"
    ),
    ("head", "float32"): Tolerance(
        2e-5, 2e-6, 1e-12, "sums of 64 products of order 4, in float32"
    ),
    ("golden logits", "float32"): Tolerance(
        1e-4, 0.0, 1e-9, "the promise; two float32 programs differ by 2e-5 of 9"
    ),
    ("golden hidden states", "float32"): Tolerance(
        1e-4, 1e-5, 1e-9, "values reach 21, whose float32 noise is 3e-5"
    ),
    ("golden draft", "float32"): Tolerance(
        2e-5, 2e-5, 1e-9, "two float32 programs over two layers; values reach 6"
    ),
}
