"""The parameter trees: paths, shapes, dtypes, sharding, and what does not divide."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ddtree_jax.errors import ConfigError
from ddtree_jax.hf_config import read_draft_config, read_model_config
from ddtree_jax.mesh import TENSOR, make_mesh
from ddtree_jax.model.params import (
    DFlash,
    KimiK2,
    check_divisible,
    map_parameters,
    named_parameters,
    partition_specs,
    with_shardings,
)
from tests.support.weights import GOLDEN

CONFIG = read_model_config(GOLDEN / "tiny_k26")
DRAFT_CONFIG = read_draft_config(GOLDEN / "tiny_draft")

# Path → shape and the axis that is split, if one is.
TARGET = {
    "embed": ((512, 128), 0),
    "dense/attention/input_norm": ((1, 128), None),
    "dense/attention/q_a": ((1, 96, 128), None),
    "dense/attention/q_a_norm": ((1, 96), None),
    "dense/attention/q_b": ((1, 8, 48, 96), 1),
    "dense/attention/kv_a": ((1, 80, 128), None),
    "dense/attention/kv_a_norm": ((1, 64), None),
    "dense/attention/k_up": ((1, 8, 32, 64), 1),
    "dense/attention/v_up": ((1, 8, 32, 64), 1),
    "dense/attention/o": ((1, 128, 8, 32), 2),
    "dense/post_norm": ((1, 128), None),
    "dense/mlp/gate": ((1, 256, 128), 1),
    "dense/mlp/up": ((1, 256, 128), 1),
    "dense/mlp/down": ((1, 128, 256), 2),
    "moe/attention/input_norm": ((3, 128), None),
    "moe/attention/q_a": ((3, 96, 128), None),
    "moe/attention/q_a_norm": ((3, 96), None),
    "moe/attention/q_b": ((3, 8, 48, 96), 1),
    "moe/attention/kv_a": ((3, 80, 128), None),
    "moe/attention/kv_a_norm": ((3, 64), None),
    "moe/attention/k_up": ((3, 8, 32, 64), 1),
    "moe/attention/v_up": ((3, 8, 32, 64), 1),
    "moe/attention/o": ((3, 128, 8, 32), 2),
    "moe/post_norm": ((3, 128), None),
    "moe/router": ((3, 16, 128), None),
    "moe/router_bias": ((3, 16), None),
    "moe/experts/gate/packed": ((3, 16, 256, 16), 2),
    "moe/experts/gate/scale": ((3, 16, 256, 4), 2),
    "moe/experts/up/packed": ((3, 16, 256, 16), 2),
    "moe/experts/up/scale": ((3, 16, 256, 4), 2),
    "moe/experts/down/packed": ((3, 16, 128, 32), 3),
    "moe/experts/down/scale": ((3, 16, 128, 8), 3),
    "moe/shared/gate": ((3, 256, 128), 1),
    "moe/shared/up": ((3, 256, 128), 1),
    "moe/shared/down": ((3, 128, 256), 2),
    "norm": ((128,), None),
    "head": ((512, 128), 0),
}
DRAFT = {
    "fc": ((128, 3, 128), 0),
    "hidden_norm": ((128,), None),
    "layers/input_norm": ((2, 128), None),
    "layers/q": ((2, 16, 16, 128), 1),
    "layers/k": ((2, 8, 16, 128), 1),
    "layers/v": ((2, 8, 16, 128), 1),
    "layers/o": ((2, 128, 16, 16), 2),
    "layers/q_norm": ((2, 16), None),
    "layers/k_norm": ((2, 16), None),
    "layers/post_norm": ((2, 128), None),
    "layers/mlp/gate": ((2, 256, 128), 1),
    "layers/mlp/up": ((2, 256, 128), 1),
    "layers/mlp/down": ((2, 128, 256), 2),
    "norm": ((128,), None),
}
MODELS = pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(KimiK2(CONFIG), TARGET, id="target"),
        pytest.param(DFlash(DRAFT_CONFIG), DRAFT, id="draft"),
    ],
)


def expected_dtype(path: str, bfloat16=jnp.bfloat16):
    if path.endswith("/packed"):
        return jnp.dtype(jnp.int32)
    if path == "moe/router_bias":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16 if path.endswith("/scale") else bfloat16)


@MODELS
def test_paths_shapes_and_dtypes(model, expected):
    got = {path: p.shape for path, p in named_parameters(model).items()}
    assert got == {path: shape for path, (shape, _) in expected.items()}
    for path, p in named_parameters(model).items():
        assert p.dtype == expected_dtype(path), path


@MODELS
def test_what_is_split(model, expected):
    specs = named_parameters(partition_specs(model))
    for path, (_, split) in expected.items():
        axes = [] if split is None else [None] * split + [TENSOR]
        assert specs[path].get_value() == PartitionSpec(*axes), path


@MODELS
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_with_shardings(model, expected, dtype):
    """Scales keep bfloat16 and the router's bias float32, whatever is asked for."""
    mesh = make_mesh(8)
    placed = named_parameters(with_shardings(model, mesh, dtype=dtype))
    assert placed.keys() == expected.keys()
    for path, (shape, split) in expected.items():
        leaf = placed[path].get_value()
        assert leaf.shape == shape
        assert leaf.dtype == expected_dtype(path, dtype or jnp.bfloat16), path
        local = tuple(n // 8 if i == split else n for i, n in enumerate(shape))
        assert leaf.sharding.shard_shape(shape) == local, path
        assert leaf.sharding.mesh == mesh


def test_router_bias_is_never_rounded():
    placed = with_shardings(KimiK2(CONFIG), make_mesh(1), dtype=jnp.bfloat16)
    assert named_parameters(placed)["moe/router_bias"].dtype == jnp.float32


@MODELS
def test_map_parameters_puts_each_value_at_its_path(model, expected):
    mapped = map_parameters(lambda path, p: np.array([path, str(p.shape)]), model)
    assert type(mapped) is type(model)
    values = {
        path: p.get_value().tolist() for path, p in named_parameters(mapped).items()
    }
    assert values == {path: [path, str(shape)] for path, (shape, _) in expected.items()}


def test_map_parameters_leaves_its_argument_alone():
    model = KimiK2(CONFIG)
    map_parameters(lambda *_: 0, model)
    assert model.norm.get_value() == jax.ShapeDtypeStruct((128,), jnp.bfloat16)


def test_int4_parameters_stand_for_out_in():
    experts = KimiK2(CONFIG).moe.experts
    zeros = map_parameters(lambda _, p: jnp.zeros(p.shape, p.dtype), experts)
    assert zeros.gate.weight.shape == (3, 16, 256, 128)
    assert zeros.down.weight.shape == (3, 16, 128, 256)
    zeros.down.weight.validate()


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_the_tiny_models_divide(devices):
    check_divisible(CONFIG, devices)
    check_divisible(DRAFT_CONFIG, devices)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (CONFIG, {"vocab_size": 516}, "vocab_size = 516 does not split over 8 devices"),
        (
            CONFIG,
            {"num_attention_heads": 12},
            "num_attention_heads = 12 does not split over 8 devices",
        ),
        (
            CONFIG,
            {"intermediate_size": 260},
            "intermediate_size = 260 does not split over 8 devices",
        ),
        (
            CONFIG,
            {"moe_intermediate_size": 128},
            "moe_intermediate_size = 128 does not split over 8 devices in groups of 32",
        ),
        (
            DRAFT_CONFIG,
            {"num_key_value_heads": 4},
            "num_key_value_heads = 4 does not split over 8 devices",
        ),
        (
            DRAFT_CONFIG,
            {"hidden_size": 132},
            "hidden_size = 132 does not split over 8 devices",
        ),
        (
            DRAFT_CONFIG,
            {"num_attention_heads": 20},
            "num_attention_heads = 20 does not split over 8 devices",
        ),
    ],
)
def test_what_does_not_divide_is_named(config, change, message):
    with pytest.raises(ConfigError) as error:
        check_divisible(dataclasses.replace(config, **change), 8)
    assert str(error.value) == message
    check_divisible(dataclasses.replace(config, **change), 1)
