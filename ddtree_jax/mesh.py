"""Owns the device mesh and the one table from logical axes to mesh axes.

Does not know about models. A parameter or cache names its dimensions with
logical axes; this table alone says which of them are split, and over what.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.errors import ConfigError

TENSOR = "tensor"

# Logical axis → mesh axis. `None` means replicated.
MESH_AXES: dict[str, str | None] = {
    "layer": None,
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "expert_mlp": TENSOR,
    "feature_out": TENSOR,
    "expert": None,
    "embed": None,
    "feature": None,
    "q_lora": None,
    "latent": None,
    "rope": None,
    "head_dim": None,
    "page": None,
    "page_row": None,
}


def make_mesh(num_devices: int | None = None) -> Mesh:
    """Returns a one-axis mesh over the first `num_devices` devices (all, if None).

    Raises:
      ConfigError: Fewer devices exist than asked for.
    """
    devices = jax.devices()
    count = len(devices) if num_devices is None else num_devices
    if not 1 <= count <= len(devices):
        raise ConfigError(
            f"a mesh of {count} devices was asked for, but {len(devices)} "
            f"{devices[0].platform} device(s) exist"
        )
    # Auto axes: the collectives inside shard_map are written by hand.
    return Mesh(
        np.asarray(devices[:count]),
        (TENSOR,),
        axis_types=(jax.sharding.AxisType.Auto,),
    )


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Returns the mesh axes of an array whose dimensions have these logical axes."""
    split = [None if a is None else MESH_AXES[a] for a in axes]
    # As jit writes it: a spec that means the same but differs would be a new program.
    while split and split[-1] is None:
        split.pop()
    return PartitionSpec(*split)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Returns where an array with these logical axes lives on `mesh`."""
    return NamedSharding(mesh, partition_spec(axes))
