"""Products with INT4 weights, dense and grouped by expert: the checked entries."""

from collections.abc import Callable, Mapping

from jax import lax

from ddtree_jax.arrays import F32, I32, Array, Float
from ddtree_jax.pallas.checks import check_ranks, check_shapes
from ddtree_jax.pallas.device import compute_capability
from ddtree_jax.pallas.int4_matmul.kernel import (
    int4_grouped_swiglu_pallas,
    int4_matmul_pallas,
    unsupported_dense,
    unsupported_grouped,
)
from ddtree_jax.pallas.int4_matmul.reference import (
    int4_grouped_swiglu_reference,
    int4_matmul_reference,
)
from ddtree_jax.pallas.int4_matmul.tiles import Int4Tiles, from_tiles, to_tiles
from ddtree_jax.pallas.select import Implementation, select
from ddtree_jax.quant import Int4Weight

__all__ = [
    "Int4Tiles",
    "from_tiles",
    "int4_grouped_swiglu",
    "int4_matmul",
    "to_tiles",
    "unsupported_grouped",
]

_DENSE = {"pallas": int4_matmul_pallas, "reference": int4_matmul_reference}
_GROUPED = {
    "pallas": int4_grouped_swiglu_pallas,
    "reference": int4_grouped_swiglu_reference,
}


def int4_matmul(
    x: Float[Array, "T inputs"],
    weight: Int4Weight | Int4Tiles,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "T out"]:
    """Returns `x @ w.T` for the bfloat16 weight w that `weight` stands for.

    Numerics: w is bfloat16(q · scale); products are accumulated in float32 and
    rounded once to the dtype of `x`.

    Args:
      weight: In tiles for "pallas".
      implementation: "auto" takes "pallas" for tiles and bfloat16 on a GPU that has the
        kernel, and "reference" otherwise.

    Raises:
      ValueError: The inner sizes differ; both shapes are named.
      NotImplementedError: The chosen implementation does not exist.
    """
    weight.validate()
    if x.ndim != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"int4_matmul: x has shape {x.shape}, expected [T, inputs] for a weight "
            f"[out, inputs] of shape {weight.shape}"
        )
    fits = unsupported_dense(weight.shape[1], x.dtype) is None
    return _run(
        "int4_matmul", _DENSE, implementation, (x, weight), (weight,), fits=fits
    )


def int4_grouped_swiglu(
    x: Float[Array, "T M"],
    gate: Int4Weight | Int4Tiles,
    up: Int4Weight | Int4Tiles,
    down: Int4Weight | Int4Tiles,
    layer: I32[Array, ""],
    expert_ids: I32[Array, "T k"],
    expert_weights: F32[Array, "T k"],
    *,
    implementation: Implementation = "auto",
) -> F32[Array, "T M"]:
    """Returns each token's weighted sum of its experts' SwiGLU feed-forwards.

        y[t] = sum over k of weight[t, k] · down_e( silu(gate_e x[t]) · up_e x[t] ),
        e = expert_ids[t, k]

    The weights are whole stacks `[layers, experts, out, in]` and `layer` selects
    one, so that no layer is ever copied out. An id outside 0 .. experts - 1
    picks nothing; experts that nobody picks are not read and may hold NaN.
    A token picks an expert at most once.

    Shapes are per device: with the inner width split over devices the result is
    a partial sum. The function contains no collective.

    Numerics: weights as in `int4_matmul`; float32 accumulation; the result is
    float32, for the caller to add the shared expert to before rounding. "pallas" rounds
    silu(gate x) · up x to bfloat16.

    Args:
      gate: In tiles for "pallas", like `up` and `down`.
      implementation: As of `int4_matmul`; sizes have to fit `unsupported_grouped`.

    Raises:
      ValueError: The arguments contradict each other; both shapes are named.
      NotImplementedError: The chosen implementation does not exist.
    """
    name = "int4_grouped_swiglu"
    for weight in (gate, up, down):
        weight.validate()
    ranks = {"gate": (gate.shape, 4), "x": (x.shape, 2)}
    check_ranks(name, ranks | {"expert_ids": (expert_ids.shape, 2)})
    layers, experts, inner, hidden = gate.shape
    check_shapes(
        name,
        {
            "up": (up.shape, gate.shape),
            "down": (down.shape, (layers, experts, hidden, inner)),
            "x": (x.shape, (x.shape[0], hidden)),
            "expert_ids": (expert_ids.shape, (x.shape[0], expert_ids.shape[1])),
            "expert_weights": (expert_weights.shape, expert_ids.shape),
        },
        basis=f"gate {gate.shape}",
    )
    fits = unsupported_grouped(hidden, inner, experts, x.dtype) is None
    arguments = x, gate, up, down, layer, expert_ids, expert_weights
    return _run(name, _GROUPED, implementation, arguments, (gate, up, down), fits=fits)


def _run(
    name: str,
    available: Mapping[str, Callable[..., Array]],
    implementation: Implementation,
    arguments: tuple,
    weights: tuple[Int4Weight | Int4Tiles, ...],
    *,
    fits: bool,
) -> Array:
    """Returns what the chosen implementation does with the arguments."""

    def reference(*arguments):
        canonical = [
            from_tiles(a) if isinstance(a, Int4Tiles) else a for a in arguments
        ]
        return available["reference"](*canonical)

    tiled = all(isinstance(weight, Int4Tiles) for weight in weights)
    if implementation == "auto" and tiled and fits and compute_capability():
        return lax.platform_dependent(
            *arguments, cuda=available["pallas"], default=reference
        )
    if implementation in ("auto", "reference"):
        return reference(*arguments)
    return select(name, implementation, available)(*arguments)
