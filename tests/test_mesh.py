"""The mesh, and the one table from logical axes to mesh axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ddtree_jax.errors import ConfigError
from ddtree_jax.mesh import (
    MESH_AXES,
    TENSOR,
    make_mesh,
    named_sharding,
    partition_spec,
)
from ddtree_jax.model.cache import DRAFT_AXES, LATENT_AXES

SPLIT = {"vocab", "heads", "kv_heads", "mlp", "expert_mlp", "feature_out"}


def test_the_mesh_has_one_axis_over_the_first_devices():
    assert make_mesh().shape == {"tensor": len(jax.devices())}
    mesh = make_mesh(2)
    assert mesh.axis_names == (TENSOR,)
    assert mesh.devices.tolist() == jax.devices()[:2]
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)


@pytest.mark.parametrize("count", [0, -1, 9])
def test_a_mesh_that_the_devices_do_not_fill_is_refused(count):
    message = (
        f"^a mesh of {count} devices was asked for, but 8 cpu device\\(s\\) exist$"
    )
    with pytest.raises(ConfigError, match=message):
        make_mesh(count)


def test_which_axes_are_split():
    assert {axis for axis, over in MESH_AXES.items() if over is not None} == SPLIT
    assert {MESH_AXES[axis] for axis in SPLIT} == {TENSOR}


def test_partition_spec_ends_with_the_last_split_axis():
    axes = ("layer", "heads", None, "latent")
    assert partition_spec(axes) == PartitionSpec(None, TENSOR)
    assert partition_spec(("layer", None)) == PartitionSpec()
    with pytest.raises(KeyError, match="head_dimension"):
        partition_spec(("head_dimension",))


def test_latent_pages_are_replicated_and_draft_pages_split_by_heads():
    for axes in LATENT_AXES:
        assert partition_spec(axes) == PartitionSpec()
    for axes in DRAFT_AXES:
        assert partition_spec(axes) == PartitionSpec(None, None, None, TENSOR)


def test_named_sharding_splits_as_the_table_says():
    array = jnp.arange(32).reshape(16, 2)
    placed = jax.device_put(array, named_sharding(make_mesh(8), ("vocab", "embed")))
    shards = {
        shard.device.id: shard.data.tolist() for shard in placed.addressable_shards
    }
    assert shards[0] == [[0, 1], [2, 3]]
    assert shards[7] == [[28, 29], [30, 31]]
