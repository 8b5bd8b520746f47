"""Kimi K2.6 at full size: bytes and shapes on eight devices; nothing is allocated."""

import json
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

from ddtree_jax.hf_config import check_draft_fits, read_draft_config, read_model_config
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.cache import abstract_draft_cache, abstract_latent_cache
from ddtree_jax.model.params import (
    DFlash,
    KimiK2,
    check_divisible,
    named_parameters,
    with_shardings,
)
from ddtree_jax.spec import Params, abstract_state, make_prefill, make_step

YARN = {
    "type": "yarn",
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
TARGET_JSON = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "attention_bias": False,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ["re:.*lm_head.*", "re:.*self_attn.*"],
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": WEIGHTS,
                }
            },
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": YARN,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {},
}
DRAFT_JSON = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {
        "mask_token_id": 163838,
        "target_layer_ids": [1, 12, 24, 35, 47, 58],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN,
    "rope_theta": 50000.0,
    "vocab_size": 163840,
}

# Published: tensor bytes of the language model in the INT4 checkpoint. Its
# weight_shape tensors, two int32 for each of 3 matrices of 384 experts in 60
# layers, are bookkeeping that no parameter here stands for.
CHECKPOINT_BYTES = 594_205_904_896
WEIGHT_SHAPE_BYTES = 60 * 384 * 3 * 2 * 4

# What one of eight SGLang ranks holds of the language model, which is split in the
# same way. Its files have 184,320 bytes more: w13_weight_shape and w2_weight_shape,
# bfloat16 [384, 2] in each of 60 layers.
SGLANG_RANK_BYTES = 76_182_593_536

SLOTS, TOKENS, PAGE, NODES, HORIZON = 8, 8192, 64, 33, 7


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kimi")
    for name, config in (("target", TARGET_JSON), ("draft", DRAFT_JSON)):
        (directory / f"{name}.json").write_text(json.dumps(config))
    target = read_model_config(directory / "target.json")
    draft = read_draft_config(directory / "draft.json")
    check_draft_fits(draft, target)
    return target, draft


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(8)


def total_bytes(arrays: Iterable) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def device_bytes(arrays: Iterable) -> int:
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays
    )


def test_the_mesh_divides_the_models(configs):
    for config in configs:
        check_divisible(config, 8)


def test_target_bytes_are_the_checkpoints(configs):
    assert WEIGHT_SHAPE_BYTES == 552_960
    model = KimiK2(configs[0])
    assert total_bytes(jax.tree.leaves(model)) == CHECKPOINT_BYTES - WEIGHT_SHAPE_BYTES
    experts = total_bytes(jax.tree.leaves(model.moe.experts))
    assert experts == 570_761_441_280 - WEIGHT_SHAPE_BYTES


def test_target_bytes_of_one_device(configs, mesh):
    """The hand count, SGLang's count and the shardings agree to the byte."""
    bf16, hidden, experts, layers, moe_layers = 2, 7168, 384, 61, 60
    attention = bf16 * (
        hidden  # input norm
        + 1536 * hidden  # q_a
        + 1536  # its norm
        + 8 * 192 * 1536  # q_b, 8 of 64 heads
        + 576 * hidden  # kv_a
        + 512  # its norm
        + 8 * 256 * 512  # k_up and v_up
        + hidden * 8 * 128  # o
    )
    shared = bf16 * 3 * 256 * hidden
    # Half a byte a weight, and two bytes for each 32 of them.
    routed = experts * 3 * 256 * hidden * (16 + 2) // 32
    router = experts * hidden * bf16 + experts * 4
    want = (
        2 * 163840 // 8 * hidden * bf16  # embedding and head
        + layers * (attention + hidden * bf16)  # with the second norm
        + bf16 * 3 * 2304 * hidden  # dense feed-forward of layer 0
        + moe_layers * (shared + routed + router)
        + hidden * bf16  # final norm
    )
    placed = jax.tree.leaves(with_shardings(KimiK2(configs[0]), mesh))
    assert device_bytes(placed) == want
    assert want == SGLANG_RANK_BYTES


def test_replicated_bytes(configs, mesh):
    """Eight devices hold the checkpoint once, and seven more copies of the rest."""
    placed = jax.tree.leaves(with_shardings(KimiK2(configs[0]), mesh))
    replicated = [a for a in placed if a.sharding.is_fully_replicated]
    copies = 8 * device_bytes(placed) - total_bytes(placed)
    assert copies == 7 * total_bytes(replicated)


def test_draft_parameters(configs, mesh):
    model = with_shardings(DFlash(configs[1]), mesh)
    fc = named_parameters(model)["fc"].get_value()
    assert fc.shape == (7168, 6, 7168)
    assert fc.sharding.shard_shape(fc.shape) == (896, 6, 7168)
    count = total_bytes(jax.tree.leaves(model)) // 2
    attention = 7168 * 128 * (64 + 8 + 8 + 64)
    layer = attention + 3 * 18432 * 7168 + 2 * 7168 + 2 * 128
    assert count == 6 * layer + 6 * 7168 * 7168 + 2 * 7168
    assert round(count / 1e9, 2) == 3.48


def test_cache_bytes_of_a_token(configs):
    size = {"num_pages": 1, "page_size": PAGE, "dtype": jnp.bfloat16}
    assert total_bytes(abstract_latent_cache(configs[0], **size)) == PAGE * 70_272
    assert total_bytes(abstract_draft_cache(configs[1], **size)) == PAGE * 24_576


def test_float32_doubles_all_but_int4_and_bias(configs, mesh):
    model = KimiK2(configs[0])
    kept = sum(
        math.prod(p.shape) * p.dtype.itemsize
        for path, p in named_parameters(model).items()
        if "experts/" in path or path.endswith("router_bias")
    )
    single = total_bytes(
        jax.tree.leaves(with_shardings(model, mesh, dtype=jnp.float32))
    )
    assert single == 2 * (CHECKPOINT_BYTES - WEIGHT_SHAPE_BYTES - kept) + kept


@pytest.fixture(scope="module")
def abstract(configs, mesh):
    target, draft = configs
    params = Params(
        with_shardings(KimiK2(target), mesh), with_shardings(DFlash(draft), mesh)
    )
    state = abstract_state(
        target,
        draft,
        mesh,
        slots=SLOTS,
        pages_per_slot=TOKENS // PAGE,
        num_pages=SLOTS * TOKENS // PAGE,
        page_size=PAGE,
        dtype=jnp.bfloat16,
    )
    return params, state


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_state_bytes_of_one_device(abstract):
    """Latent pages are replicated, draft pages split by their 8 heads."""
    _, state = abstract
    tokens = SLOTS * TOKENS
    assert device_bytes(state.cache) == tokens * 70_272
    assert device_bytes(state.draft_cache) == tokens * 24_576 // 8


def test_step_shapes(configs, mesh, abstract):
    params, state = abstract
    step = make_step(*configs, mesh, num_nodes=NODES)
    after, result = jax.eval_shape(step, params, state)
    assert shapes(after) == shapes(state)
    i32 = jnp.dtype(jnp.int32)
    assert shapes(result) == type(result)(
        tokens=((SLOTS, HORIZON + 1), i32),
        num_tokens=((SLOTS,), i32),
        status=((SLOTS,), i32),
    )


def test_prefill_shapes(configs, mesh, abstract):
    params, state = abstract
    prefill = make_prefill(*configs, mesh)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    chunk = jax.ShapeDtypeStruct((256,), jnp.int32)
    is_last = jax.ShapeDtypeStruct((), jnp.bool_)
    after, result = jax.eval_shape(
        prefill, params, state, scalar, chunk, scalar, is_last
    )
    assert shapes(after) == shapes(state)
    assert result.tokens.shape == (1, 1)
    assert result.num_tokens.shape == result.status.shape == (1,)
