"""The router against its formula and transformers; experts on 1 and 8 devices."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors import safe_open

from ddtree_jax.hf_config import read_model_config
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.layers import all_reduce
from ddtree_jax.model.moe import moe_partial, route
from ddtree_jax.model.params import Experts, Mlp, partition_specs
from ddtree_jax.model.rope import yarn_inv_freq
from tests.support.compare import assert_bit_equal, assert_close
from tests.support.weights import GOLDEN, dequantised, random_parameters

CONFIG = read_model_config(GOLDEN / "tiny_k26")
E, K, M = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok, CONFIG.hidden_size


def run_route(x, router, bias, **changes):
    c = dataclasses.replace(CONFIG, **changes)
    ids, weights = route(jnp.asarray(x), jnp.asarray(router), jnp.asarray(bias), c)
    assert weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def oracle(x, router, bias):
    """Returns ids by falling biased score, and weights, in float64."""
    x, router, bias = (np.asarray(a).astype(np.float64) for a in (x, router, bias))
    scores = 1 / (1 + np.exp(-(x @ router.T)))
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :K]
    chosen = np.take_along_axis(scores, ids, axis=-1)
    return ids, chosen / chosen.sum(-1, keepdims=True) * CONFIG.routed_scaling_factor


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_route(dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, M)).astype(dtype)
    router = (0.1 * rng.standard_normal((E, M))).astype(dtype)
    bias = rng.uniform(-0.2, 0.2, E).astype(np.float32)
    want_ids, want_weights = oracle(x, router, bias)
    ids, weights = run_route(x, router, bias)
    assert ids.tolist() == want_ids.tolist()
    assert_close("router weights", weights, want_weights)
    np.testing.assert_allclose(weights.sum(-1), 2.827, rtol=1e-6)
    unbiased, _ = oracle(x, router, np.zeros(E))
    assert (np.sort(unbiased) != np.sort(ids)).any(), "the bias changed no choice"


def test_the_bias_chooses_but_does_not_weigh():
    x = np.array([[1.0]], np.float32)
    router = np.array([[0.0], [2.0], [-2.0]], np.float32)
    bias = np.array([0.0, 0.0, 10.0], np.float32)
    changes = {"num_experts_per_tok": 2, "routed_scaling_factor": 1.0}
    ids, weights = run_route(x, router, bias, **changes)
    assert ids.tolist() == [[2, 1]]
    sigmoid = 1 / (1 + np.exp([2.0, -2.0]))
    assert_close("router weights", weights[0], sigmoid / sigmoid.sum())


def test_scores_of_zero_give_zero_not_nan():
    """Every sigmoid underflows; the 1e-20 in the sum keeps 0 / 0 out."""
    x, router = np.ones((1, 1), np.float32), np.full((E, 1), -1e4, np.float32)
    _, weights = run_route(x, router, np.zeros(E, np.float32))
    assert weights.tolist() == [[0.0] * K]


@pytest.mark.parametrize("factor", [1.0, 2.827])
def test_weights_sum_to_the_scaling_factor(factor):
    x = np.ones((1, 1), np.float32)
    router = np.linspace(-1, 1, E, dtype=np.float32)[:, None]
    _, weights = run_route(
        x, router, np.zeros(E, np.float32), routed_scaling_factor=factor
    )
    np.testing.assert_allclose(weights.sum(), factor, rtol=1e-6)


def test_ties_go_to_the_smaller_id():
    router = np.zeros((E, 1), np.float32)
    router[9] = 1.0
    ids, _ = run_route(np.ones((2, 1), np.float32), router, np.zeros(E, np.float32))
    assert ids.tolist() == [[9, 0, 1, 2]] * 2


def test_bfloat16_inputs_are_routed_in_float32():
    """The logits ½ and ½ + 2⁻¹² are one number in bfloat16, and would tie."""
    x = np.ones((1, 2), ml_dtypes.bfloat16)
    router = np.array([[0.5, 0.0], [0.5, 2**-12]], ml_dtypes.bfloat16)
    ids, _ = run_route(x, router, np.zeros(2, np.float32), num_experts_per_tok=1)
    assert ids.tolist() == [[1]]


# Against transformers: its residual stream before a layer, our router after it.


def tensor(name: str) -> np.ndarray:
    """Returns a golden tensor of the language model in float64."""
    for path in sorted((GOLDEN / "tiny_k26").glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
            if (full := f"language_model.model.{name}") in names:
                return file.get_tensor(full).astype(np.float64)
    raise AssertionError(f"{name} is in no golden file")


def norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Returns complex pairs `[T, …, R / 2]`, turned to positions 0, 1, …"""
    angle = np.arange(len(x))[:, None] * inv_freq
    factor = np.exp(1j * angle).reshape(len(x), *[1] * (x.ndim - 2), -1)
    return (x[..., 0::2] + 1j * x[..., 1::2]) * factor


def after_attention(x: np.ndarray, layer: int, inv_freq: np.ndarray) -> np.ndarray:
    """Returns the residual stream after MLA, in expanded form and float64."""
    c, prefix = CONFIG, f"layers.{layer}."
    heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank

    def weight(name: str) -> np.ndarray:
        return tensor(f"{prefix}self_attn.{name}.weight")

    h = norm(x, tensor(prefix + "input_layernorm.weight"), c.rms_norm_eps)
    low = norm(h @ weight("q_a_proj").T, weight("q_a_layernorm"), c.latent_norm_eps)
    query = (low @ weight("q_b_proj").T).reshape(len(x), heads, -1)
    latent, key_rope = np.split(h @ weight("kv_a_proj_with_mqa").T, [rank], axis=-1)
    latent = norm(latent, weight("kv_a_layernorm"), c.latent_norm_eps)
    expanded = (latent @ weight("kv_b_proj").T).reshape(len(x), heads, -1)
    key, value = np.split(expanded, [nope], axis=-1)
    scores = np.einsum("thd,shd->hts", query[..., :nope], key)
    turned = rotate(query[..., nope:], inv_freq), rotate(key_rope, inv_freq).conj()
    scores += np.einsum("thd,sd->hts", *turned).real
    scores *= c.softmax_scale
    scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), value)
    return x + mixed.reshape(len(x), -1) @ weight("o_proj").T


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_golden_experts(layer):
    golden = np.load(GOLDEN / "target_forward.npz")
    inv_freq = yarn_inv_freq(CONFIG.rope, CONFIG.qk_rope_head_dim)
    before = golden["hidden_states_0"][layer].astype(np.float64)
    post_norm = tensor(f"layers.{layer}.post_attention_layernorm.weight")
    x = norm(after_attention(before, layer, inv_freq), post_norm, CONFIG.rms_norm_eps)
    gate = f"layers.{layer}.mlp.gate."
    ids, weights = run_route(
        x.astype(np.float32),
        tensor(gate + "weight").astype(ml_dtypes.bfloat16),
        tensor(gate + "e_score_correction_bias").astype(np.float32),
    )
    order = np.argsort(ids, axis=-1)
    chosen = np.take_along_axis(ids, order, axis=-1)
    assert_bit_equal(chosen.astype(np.int32), golden["experts_0"][layer - 1])
    assert_close(
        "golden router weights",
        np.take_along_axis(weights, order, axis=-1),
        golden["expert_weights_0"][layer - 1],
    )


# The whole mixture.

LAYERS, HIDDEN, INNER = 2, 64, 256


def mixture():
    """Returns abstract and random experts and shared expert, router and bias."""
    rng = np.random.default_rng(2)
    abstract = Experts(LAYERS, E, HIDDEN, INNER), Mlp(LAYERS, HIDDEN, INNER)
    experts, shared = (random_parameters(module, rng) for module in abstract)
    router = (0.2 * rng.standard_normal((E, HIDDEN))).astype(np.float32)
    bias = rng.uniform(-0.2, 0.2, E).astype(np.float32)
    return abstract, experts, shared, router, bias


def run_mixture(devices: int, h, used, layer: int) -> np.ndarray:
    abstract, experts, shared, router, bias = mixture()

    def body(h, used, router, bias, experts, shared):
        partial = moe_partial(
            h,
            used,
            CONFIG,
            router=router,
            router_bias=bias,
            experts=experts,
            shared=jax.tree.map(lambda leaf: leaf[layer], shared),
            layer=jnp.int32(layer),
        )
        return all_reduce(partial, h.dtype)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        body,
        mesh=make_mesh(devices),
        in_specs=(*[everywhere] * 4, *map(partition_specs, abstract)),
        out_specs=everywhere,
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(h, used, router, bias, experts, shared))


def swiglu(x, gate, up, down):
    g = gate @ x
    return down @ (g / (1 + np.exp(-g)) * (up @ x))


def mixture_oracle(h, used, layer: int) -> np.ndarray:
    _, experts, shared, router, bias = mixture()
    routed = [
        dequantised(p.weight)[layer] for p in (experts.gate, experts.up, experts.down)
    ]
    common = [
        np.asarray(p[...][layer], np.float64)
        for p in (shared.gate, shared.up, shared.down)
    ]
    out = np.zeros(h.shape)
    for place in np.ndindex(used.shape):
        x = h[place].astype(np.float64)
        out[place] = swiglu(x, *common)
        ids, weights = oracle(x[None], router, bias)
        for e, weight in zip(ids[0], weights[0], strict=True):
            if used[place]:
                out[place] += weight * swiglu(x, *(stack[e] for stack in routed))
    return out


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("layer", [0, 1])
def test_mixture(devices, layer):
    h = np.random.default_rng(3).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    used = np.ones((2, 5), bool)
    used[1, 3:] = False
    got = run_mixture(devices, h, used, layer)
    assert_close("moe", got, mixture_oracle(h, used, layer))
