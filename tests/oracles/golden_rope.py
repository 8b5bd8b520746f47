"""Makes rope.json: YaRN's frequencies and factors for every model concerned.

transformers computes frequencies in float32 only. The float64 values come from
the closed form below, and are checked against transformers' float32 ones and,
for K2.6, against values known from elsewhere.
"""

import dataclasses
import math
from pathlib import Path

from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from .checkpoint_files import write_json

_ORIGINAL_LENGTH, _THETA = 4096, 50000.0
# Float32's rounding in transformers' own computation.
_FLOAT32_RELATIVE = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One model's rotary numbers; `query_dim` sets the plain softmax scale."""

    rotary_dim: int
    query_dim: int
    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float | None = 1.0
    mscale_all_dim: float | None = 1.0


CASES = {
    "k26": Case(64, 192, 64.0, 32.0, 1.0),
    "k2_instruct": Case(64, 192, 32.0, 1.0, 1.0),
    "tiny_k26": Case(16, 48, 64.0, 32.0, 1.0),
    # The drafters, with their two mscale keys and without: see README.md.
    "draft_plain": Case(128, 128, 64.0, 32.0, 1.0),
    "draft_scaled": Case(128, 128, 64.0, 32.0, 1.0, None, None),
    "tiny_draft_plain": Case(16, 16, 64.0, 32.0, 1.0),
    "tiny_draft_scaled": Case(16, 16, 64.0, 32.0, 1.0, None, None),
}

KNOWN_K26 = {
    0: 1.0,
    1: 0.713111084911932,
    8: 0.0668740304976422,
    9: 0.04377665595133869,
    14: 0.0044658487485676485,
    19: 0.00015837499102694852,
    20: 1.8070233867863153e-05,
    31: 4.382206455794937e-07,
}


def _rope_parameters(c: Case) -> dict:
    optional = {"mscale": c.mscale, "mscale_all_dim": c.mscale_all_dim}
    return {
        "rope_type": "yarn",
        "rope_theta": _THETA,
        "factor": c.factor,
        "beta_fast": c.beta_fast,
        "beta_slow": c.beta_slow,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    } | {key: value for key, value in optional.items() if value is not None}


def _ramp_bounds(c: Case) -> tuple[int, int]:
    def dimension(rotations: float) -> float:
        turns = math.log(_ORIGINAL_LENGTH / (2 * math.pi * rotations))
        return c.rotary_dim * turns / (2 * math.log(_THETA))

    low = max(math.floor(dimension(c.beta_fast)), 0)
    high = min(math.ceil(dimension(c.beta_slow)), c.rotary_dim - 1)
    assert low < high, c
    return low, high


def _inv_freq(c: Case) -> list[float]:
    low, high = _ramp_bounds(c)
    values = []
    for i in range(c.rotary_dim // 2):
        plain = _THETA ** (-2 * i / c.rotary_dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        values.append(plain * (1 - ramp) + plain / c.factor * ramp)
    return values


def _close(got: float, want: float, relative: float, what: str) -> None:
    if not math.isclose(got, want, rel_tol=relative):
        raise SystemExit(f"golden_rope: {what}: got {got!r}, expected {want!r}")


def _entry(name: str, c: Case) -> dict:
    parameters = _rope_parameters(c)
    config = DeepseekV3Config(
        qk_rope_head_dim=c.rotary_dim,
        max_position_embeddings=262144,
        rope_parameters=parameters,
    )
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    inv_freq = _inv_freq(c)
    for i, (exact, single) in enumerate(zip(inv_freq, theirs.tolist(), strict=True)):
        _close(single, exact, _FLOAT32_RELATIVE, f"{name}: inv_freq[{i}]")
    low, high = _ramp_bounds(c)
    entry = {
        "rotary_dim": c.rotary_dim,
        "query_dim": c.query_dim,
        "rope_parameters": parameters,
        "ramp_low": low,
        "ramp_high": high,
        "inv_freq": inv_freq,
        "amplitude": amplitude,
    }
    if not name.removeprefix("tiny_").startswith("draft"):
        # Only the target's attention folds YaRN into its softmax scale.
        entry["softmax_scale"] = yarn_apply_mscale(parameters, c.query_dim**-0.5)
    return entry


def build(directory: Path) -> None:
    """Writes rope.json into `directory`."""
    entries = {name: _entry(name, case) for name, case in CASES.items()}
    for i, value in KNOWN_K26.items():
        _close(entries["k26"]["inv_freq"][i], value, 1e-12, f"k26: inv_freq[{i}]")
    known_scales = {"k26": 0.14467962580268923, "k2_instruct": 0.13086079996}
    for name, scale in known_scales.items():
        _close(entries[name]["softmax_scale"], scale, 1e-10, f"{name}: softmax_scale")
    write_json(directory / "rope.json", entries)
