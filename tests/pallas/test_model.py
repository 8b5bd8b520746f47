"""A whole model in bfloat16, as its device has it by default: with kernels on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.mesh import make_mesh
from ddtree_jax.model import tiling
from ddtree_jax.model.params import map_parameters
from ddtree_jax.spec import Params
from tests.pallas.machines import GPU
from tests.support.models import Tiny, make_forward, poisoned_cache, run_in_chunks
from tests.support.random_model import DRAFT, gpu_configs, random_target

on_every_device = pytest.mark.parametrize(
    "machine", [pytest.param("cpu", id="cpu"), GPU], indirect=True
)
CONFIG, _ = gpu_configs()


def in_bfloat16() -> Tiny:
    mesh = make_mesh(1)
    target = random_target(CONFIG, mesh, jnp.bfloat16)
    target = tiling.for_devices(target, CONFIG, mesh, jnp.bfloat16)
    return Tiny(CONFIG, DRAFT, Params(target, None), mesh)


def in_float32() -> Tiny:
    """Returns the same weights, bit for bit; kernels do not take them."""
    mesh = make_mesh(1)

    def widen(path, param):
        x = param[...]
        is_int4 = x.dtype == jnp.int32 or path.endswith("/scale")
        return x if is_int4 else x.astype(jnp.float32)

    target = map_parameters(widen, random_target(CONFIG, mesh, jnp.bfloat16))
    return Tiny(CONFIG, DRAFT, Params(target, None), mesh)


@on_every_device
def test_logits_in_bfloat16_are_those_of_float32(machine):
    ids = np.random.default_rng(3).integers(2, 32, 70)
    chunks = [33, 1, 36]
    want = run_in_chunks(in_float32(), ids, chunks).logits[0]
    got = run_in_chunks(in_bfloat16(), ids, chunks, dtype=jnp.bfloat16).logits[0]
    assert np.isfinite(got).all()
    errors = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    # Three layers round to 8 bits; 1 to 3 % of the norm. Where two experts are almost
    # equally good, rounding may choose the other one, and nothing else is expected.
    assert np.quantile(errors, 0.9) < 0.05


@on_every_device
def test_kernels_are_what_a_gpu_takes(machine):
    tiny = in_bfloat16()
    table, tokens = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 9), jnp.int32)
    run = make_forward(tiny, ())
    cache = poisoned_cache(CONFIG, 1, jnp.bfloat16)
    lowered = run.func.lower(*run.args, cache, table, jnp.zeros(1, jnp.int32), tokens)
    # Attention in both kinds of layers; experts in one.
    attention, experts = ("attend", "combine"), ("route", "swiglu")
    want = 0 if jax.default_backend() == "cpu" else 2 * len(attention) + len(experts)
    assert lowered.compile().as_text().count('target="mosaic_gpu') == want
