"""YaRN's frequencies against golden values, both rotations against complex numbers."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.config import YarnConfig
from ddtree_jax.hf_config import read_model_config
from ddtree_jax.model.rope import (
    cos_sin,
    rotate_halves,
    rotate_interleaved,
    yarn_inv_freq,
)
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.weights import GOLDEN

GOLDEN_ROPE = json.loads((GOLDEN / "rope.json").read_text())
TARGETS = [name for name, entry in GOLDEN_ROPE.items() if "softmax_scale" in entry]


def yarn(name: str) -> YarnConfig:
    p = GOLDEN_ROPE[name]["rope_parameters"]
    return YarnConfig(
        theta=p["rope_theta"],
        factor=p["factor"],
        beta_fast=p["beta_fast"],
        beta_slow=p["beta_slow"],
        # Frequencies do not depend on these two, which drafters may lack.
        mscale=p.get("mscale", 1.0),
        mscale_all_dim=p.get("mscale_all_dim", 0.0),
        original_max_position_embeddings=p["original_max_position_embeddings"],
    )


@pytest.mark.parametrize("name", GOLDEN_ROPE)
def test_golden_frequencies(name):
    entry = GOLDEN_ROPE[name]
    got = yarn_inv_freq(yarn(name), entry["rotary_dim"])
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, entry["inv_freq"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", GOLDEN_ROPE)
def test_golden_amplitudes(name):
    assert yarn(name).amplitude == pytest.approx(
        GOLDEN_ROPE[name]["amplitude"], rel=1e-12
    )


@pytest.mark.parametrize("name", TARGETS)
def test_golden_softmax_scales(name):
    entry = GOLDEN_ROPE[name]
    config = dataclasses.replace(
        read_model_config(GOLDEN / "tiny_k26"),
        rope=yarn(name),
        qk_rope_head_dim=entry["rotary_dim"],
        qk_nope_head_dim=entry["query_dim"] - entry["rotary_dim"],
    )
    assert config.softmax_scale == pytest.approx(entry["softmax_scale"], rel=1e-12)


def test_known_softmax_scales():
    """Of Kimi K2.6 and of K2-Instruct: equal models but for YaRN."""
    scales = {name: GOLDEN_ROPE[name]["softmax_scale"] for name in TARGETS}
    assert scales["k26"] == pytest.approx(0.14467962580268923, rel=1e-12)
    assert scales["k2_instruct"] == pytest.approx(0.13086079996, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("k26", 8, 20), ("k2_instruct", 19, 20), ("draft_plain", 17, 39)],
)
def test_where_the_ramp_runs(name, low, high):
    """Kept up to `low`, divided by the factor from `high` on, in between between."""
    rope, dim = yarn(name), GOLDEN_ROPE[name]["rotary_dim"]
    plain = rope.theta ** (-np.arange(0, dim, 2) / dim)
    ratio = plain / yarn_inv_freq(rope, dim)
    np.testing.assert_allclose(ratio[: low + 1], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[high:], rope.factor, rtol=1e-12)
    inside = ratio[low + 1 : high]
    assert ((inside > 1.001) & (inside < rope.factor - 0.001)).all()


def test_without_extension_nothing_is_scaled():
    rope = dataclasses.replace(yarn("k26"), factor=1.0)
    np.testing.assert_allclose(
        yarn_inv_freq(rope, 64), 50000.0 ** (-np.arange(32) / 32), rtol=1e-12
    )
    assert rope.amplitude == 1.0
    assert rope.attention_multiplier(1.0) == 1.0


def test_equal_ramp_bounds_do_not_divide_by_zero():
    """A whole number of dimensions: low = high, a step between two frequencies."""
    length = 64
    beta = length / (2 * np.pi)  # turns whose dimension is 0 exactly
    rope = dataclasses.replace(
        yarn("k26"),
        beta_fast=beta,
        beta_slow=beta,
        original_max_position_embeddings=length,
    )
    ratio = rope.theta ** (-np.arange(0, 16, 2) / 16) / yarn_inv_freq(rope, 16)
    np.testing.assert_allclose(ratio, [1, 64, 64, 64, 64, 64, 64, 64], rtol=1e-12)


@pytest.mark.parametrize("amplitude", [1.0, 1.4158883083])
def test_cos_sin(amplitude):
    """Exact up to the library's cosine of the angle, which is a float32 product."""
    inv_freq = yarn_inv_freq(yarn("k26"), 64)
    positions = np.array([[0, 1, 63], [4096, 100_000, 262_143]], np.int32)
    cos, sin = cos_sin(jnp.asarray(positions), inv_freq, amplitude)
    angle = positions[..., None].astype(np.float32) * inv_freq.astype(np.float32)
    assert angle.dtype == np.float32
    assert_close("cos_sin", cos, amplitude * np.cos(angle.astype(np.float64)))
    assert_close("cos_sin", sin, amplitude * np.sin(angle.astype(np.float64)))


def turn(dim: int, amplitude: float = 1.0):
    """Returns cos and sin of 3 positions with an axis for heads, and e^(i·angle)."""
    positions = jnp.asarray([[0, 5, 200]], jnp.int32)
    cos, sin = cos_sin(positions, yarn_inv_freq(yarn("k26"), dim), amplitude)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return cos, sin, np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("amplitude", [1.0, 1.4158883083])
def test_interleaved_pairs_turn_as_complex_numbers(dtype, amplitude):
    x = np.random.default_rng(1).standard_normal((1, 3, 2, 16)).astype(dtype)
    cos, sin, factor = turn(16, amplitude)
    pairs = x.astype(np.float64).reshape(1, 3, 2, 8, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * factor
    got = rotate_interleaved(jnp.asarray(x), cos, sin)
    assert got.dtype == dtype
    assert_close("rotate", got, np.concatenate([turned.real, turned.imag], axis=-1))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("amplitude", [1.0, 1.4158883083])
def test_halves_turn_as_complex_numbers(dtype, amplitude):
    x = np.random.default_rng(2).standard_normal((1, 3, 2, 16)).astype(dtype)
    cos, sin, factor = turn(16, amplitude)
    turned = (
        x[..., :8].astype(np.float64) + 1j * x[..., 8:].astype(np.float64)
    ) * factor
    got = rotate_halves(jnp.asarray(x), cos, sin)
    assert got.dtype == dtype
    assert_close("rotate", got, np.concatenate([turned.real, turned.imag], axis=-1))


def test_position_zero_turns_nothing():
    x = jnp.arange(16, dtype=jnp.float32).reshape(1, 1, 16)
    cos, sin = cos_sin(
        jnp.zeros((1, 1), jnp.int32), yarn_inv_freq(yarn("k26"), 16), 1.0
    )
    assert_bit_equal(rotate_halves(x, cos, sin), x)
    reordered = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    assert_bit_equal(rotate_interleaved(x, cos, sin), reordered)


@pytest.mark.parametrize("rotate", [rotate_interleaved, rotate_halves])
def test_scores_depend_on_the_distance_only(rotate):
    rng = np.random.default_rng(3)
    query, key = (
        jnp.asarray(rng.standard_normal((1, 1, 64)), jnp.float32) for _ in range(2)
    )
    inv_freq = yarn_inv_freq(yarn("k26"), 64)

    def score(query_position: int, key_position: int):
        turned = [
            rotate(x, *cos_sin(jnp.asarray([[position]], jnp.int32), inv_freq, 1.0))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return np.asarray(turned[0] * turned[1]).sum()

    want = score(17, 5)
    for shift in (1, 100, 900):
        assert_close("rope scores", score(17 + shift, 5 + shift), np.asarray(want))
    assert abs(score(18, 5) - want) > 0.1
