"""A random target and drafter of 32 tokens, whose drafts are often accepted.

A drafter that knows nothing is right once in 32; a tree of 31 nodes or more holds
every first token, so steps of several tokens occur without any training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ddtree_jax.config import DraftConfig, ModelConfig, YarnConfig
from ddtree_jax.model.params import (
    DFlash,
    KimiK2,
    check_divisible,
    map_parameters,
    with_shardings,
)
from ddtree_jax.spec import Params
from tests.support.models import Tiny

ROPE = YarnConfig(
    theta=50000.0,
    factor=64.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=4096,
)
TARGET = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=256,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-6,
    max_position_embeddings=4096,
    rope=ROPE,
    bos_token_id=0,
    eos_token_ids=(1,),
    pad_token_id=None,
    initializer_range=0.02,
)
DRAFT = DraftConfig(
    vocab_size=32,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=16,
    intermediate_size=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
    rope=ROPE,
    rope_amplitude=1.0,
    draft_block_size=8,
    num_target_layers=3,
    target_layer_ids=(0, 2),
    mask_token_id=31,
    initializer_range=0.02,
)


def gpu_configs() -> tuple[ModelConfig, DraftConfig]:
    """Returns configurations of the smallest models that the GPU kernels take."""
    sizes = {"hidden_size": 512, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return (
        dataclasses.replace(TARGET, **sizes),
        dataclasses.replace(DRAFT, hidden_size=512),
    )


def random_tiny(mesh: Mesh, *, vocab_size: int = 32) -> Tiny:
    """Returns both models with random weights, in float32 on `mesh`."""
    config = dataclasses.replace(TARGET, vocab_size=vocab_size)
    draft_config = dataclasses.replace(
        DRAFT, vocab_size=vocab_size, mask_token_id=vocab_size - 1
    )
    for each in (config, draft_config):
        check_divisible(each, mesh.size)
    target = random_target(config, mesh, jnp.float32)
    draft = _draw(with_shardings(DFlash(draft_config), mesh, dtype=jnp.float32), seed=1)
    return Tiny(config, draft_config, Params(target, draft), mesh)


def random_target(config: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> KimiK2:
    """Returns a target with random weights; the same ones, but for the rounding."""
    return _draw(with_shardings(KimiK2(config), mesh, dtype=dtype), seed=0)


def _draw(model, seed: int):
    rng = np.random.default_rng(seed)

    def value(path: str, param):
        shape, dtype = param.shape, param.dtype
        if dtype == jnp.int32:
            drawn = rng.integers(-(2**31), 2**31, shape, dtype=np.int32)
        elif path.endswith("/scale"):
            drawn = rng.uniform(0.01, 0.03, shape)
        elif path.endswith("norm"):
            drawn = rng.normal(1.0, 0.15, shape)
        elif path.endswith("router_bias"):
            drawn = rng.normal(0.0, 0.1, shape)
        else:
            fan_in = shape[-1] if path != "moe/attention/o" else shape[-1] * shape[-2]
            drawn = rng.normal(0.0, fan_in**-0.5, shape)
        if path == "head":
            drawn *= 3.0
        return jax.device_put(jnp.asarray(drawn, dtype), param.sharding)

    return map_parameters(value, model)
