"""Experts in the order of the kernels: the same weights, in the same memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddtree_jax.mesh import make_mesh
from ddtree_jax.model import tiling
from ddtree_jax.pallas import Int4Tiles, from_tiles
from tests.support.compare import assert_bit_equal
from tests.support.random_model import random_tiny

NAMES = ("gate", "up", "down")


def copied(model):
    """Returns a model that can be given away."""
    return jax.tree.map(jnp.copy, model)


@pytest.mark.parametrize("devices", [1, 2])
def test_every_device_has_its_own_part_in_tiles(devices):
    tiny = random_tiny(make_mesh(devices))
    target = tiny.params.target
    tiled = tiling.put_in_tiles(copied(target), tiny.mesh)
    for name in NAMES:
        before = getattr(target.moe.experts, name)
        after = getattr(tiled.moe.experts, name)
        assert not before.in_tiles
        assert after.in_tiles
        assert isinstance(after.weight, Int4Tiles)
        assert after.packed.sharding == before.packed.sharding
        shards = zip(
            before.packed.addressable_shards,
            before.scale.addressable_shards,
            after.packed.addressable_shards,
            after.scale.addressable_shards,
            strict=True,
        )
        for packed, scale, words, scales in shards:
            assert (np.asarray(words.data) != np.asarray(packed.data)).any()
            part = from_tiles(Int4Tiles(words.data, scales.data))
            assert_bit_equal(part.packed, packed.data)
            assert_bit_equal(part.scale, scale.data)


def test_nothing_else_changes_and_the_model_given_stays_canonical():
    tiny = random_tiny(make_mesh(1))
    given = copied(tiny.params.target)
    tiled = tiling.put_in_tiles(given, tiny.mesh)
    assert not given.moe.experts.gate.in_tiles
    states = (
        dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        for model in (tiny.params.target, tiled)
    )
    before, after = states
    assert before.keys() == after.keys()
    for path, value in before.items():
        if "experts" not in path:
            assert_bit_equal(after[path][...], value[...])


def test_conversion_needs_no_second_copy(monkeypatch):
    """The arrays are donated, and the program works in them."""
    tiny = random_tiny(make_mesh(1))
    experts = copied(tiny.params.target).moe.experts
    old = experts.gate.packed[...].unsafe_buffer_pointer()
    tiling._put_in_tiles(experts.gate, tiny.mesh)
    assert experts.gate.packed[...].unsafe_buffer_pointer() == old


def test_on_a_cpu_a_model_stays_as_it_is():
    tiny = random_tiny(make_mesh(1))
    target = tiny.params.target
    got = tiling.for_devices(target, tiny.config, tiny.mesh, jnp.bfloat16)
    assert got is target
