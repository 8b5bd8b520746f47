"""Owns when and how the experts of a model are put in the order of the kernels."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ddtree_jax.arrays import Array
from ddtree_jax.config import ModelConfig
from ddtree_jax.mesh import named_sharding, partition_spec
from ddtree_jax.model.params import Int4Param, KimiK2
from ddtree_jax.pallas import compute_capability, to_tiles, unsupported_grouped
from ddtree_jax.quant import Int4Weight


def for_devices(
    model: KimiK2, config: ModelConfig, mesh: Mesh, dtype: DTypeLike
) -> KimiK2:
    """Returns the model with its experts as the devices of `mesh` want them.

    That is in tiles on GPUs that have the kernel, if it takes such experts and
    activations, and unchanged otherwise.

    Args:
      model: Not to be used again: its experts may be converted in place.
      dtype: Of the activations.
    """
    return put_in_tiles(model, mesh) if takes_tiles(config, mesh, dtype) else model


def put_in_tiles(model: KimiK2, mesh: Mesh) -> KimiK2:
    """Returns the model with its experts in tiles, in the memory that they had.

    Their canonical arrays are donated: `model` cannot be used again.
    """
    model = nnx.merge(*nnx.split(model))
    for weight in int4_weights(model):
        _put_in_tiles(weight, mesh)
    return model


def int4_weights(model: KimiK2) -> tuple[Int4Param, ...]:
    """Returns the weights that can be in tiles."""
    experts = model.moe.experts
    return experts.gate, experts.up, experts.down


def takes_tiles(config: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> bool:
    """Says whether the devices have a kernel that takes such experts, in tiles.

    Args:
      dtype: Of the activations.
    """
    gate = KimiK2(config).moe.experts.gate.packed
    _, experts, inner, _ = named_sharding(mesh, gate.axes).shard_shape(gate.shape)
    reason = unsupported_grouped(config.hidden_size, inner, experts, jnp.dtype(dtype))
    on_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return reason is None and on_gpu and compute_capability() is not None


def _put_in_tiles(weight: Int4Param, mesh: Mesh) -> None:
    specs = partition_spec(weight.packed.axes), partition_spec(weight.scale.axes)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    def convert(packed: Array, scale: Array) -> tuple[Array, Array]:
        experts = packed.shape[1]

        def one(i, arrays):
            # One expert at a time: little memory is needed beside the arrays.
            index = jnp.stack([lax.div(i, experts), lax.rem(i, experts), 0, 0])
            sizes = [(1, 1, *array.shape[2:]) for array in arrays]
            parts = [
                lax.dynamic_slice(array, index, size)
                for array, size in zip(arrays, sizes, strict=True)
            ]
            tiles = to_tiles(Int4Weight(*parts))
            moved = tiles.words, tiles.scales
            return tuple(
                lax.dynamic_update_slice(array, part, index)
                for array, part in zip(arrays, moved, strict=True)
            )

        return lax.fori_loop(0, packed.shape[0] * experts, one, (packed, scale))

    packed, scale = convert(weight.packed[...], weight.scale[...])
    weight.packed.set_value(packed)
    weight.scale.set_value(scale)
    weight.in_tiles = True
