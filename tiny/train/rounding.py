"""Owns the step from trained parameters to the stored ones, and back."""

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.config import ModelConfig
from ddtree_jax.quant import Int4Weight, dequantise
from tiny.train.pace import Log
from tiny.train.parameters import EXPERTS, ROUTER_BIAS, Params, cast, quantise
from tiny.train.target import make_evaluation
from tiny.train.target_model import Attention
from tiny.train.weights import save_pieces

NAME = "target"


def rounded(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the stored arrays by the paths of `ddtree_jax.model.params`."""
    stored: dict[str, np.ndarray] = {}
    for path, value in params.items():
        if path in EXPERTS:
            stored[f"{path}/packed"], stored[f"{path}/scale"] = quantise(value)
        elif path == ROUTER_BIAS:
            stored[path] = value.astype(np.float32)
        else:
            stored[path] = value.astype(ml_dtypes.bfloat16)
    return stored


def usable(stored: dict[str, np.ndarray], dtype) -> Params:
    """Returns stored arrays as the parameters that they stand for."""
    params = {
        path: jnp.asarray(value)
        for path, value in stored.items()
        if not path.endswith(("/packed", "/scale"))
    }
    for path in EXPERTS:
        packed, scale = stored[f"{path}/packed"], stored[f"{path}/scale"]
        weight = Int4Weight(jnp.asarray(packed), jnp.asarray(scale))
        params[path] = dequantise(weight)
    return cast(params, dtype)


def quantise_target(
    c: ModelConfig,
    params: Params,
    data: dict[str, np.ndarray],
    out: Path,
    *,
    length: int,
    attention: Attention,
    dtype,
) -> None:
    """Writes the stored arrays in pieces, and bits per byte before and after."""
    stored = rounded({path: np.asarray(value) for path, value in params.items()})
    evaluate = make_evaluation(c, length, attention)
    heldout = data["heldout"], data["bytes_per_token"]
    before = evaluate(cast(params, dtype), *heldout)
    after = evaluate(usable(stored, dtype), *heldout)
    save_pieces(out, NAME, stored)
    Log(out / "quantise.jsonl").write(
        bits_per_byte_before=before, bits_per_byte_after=after, ratio=after / before
    )
