"""Owns the parameter trees: path → shape, dtype, logical axes. No arithmetic.

Initialisation, sharding, restore and the converter's checks all derive from
these modules. Layers of one kind are stacked along a leading `layer` axis, so
one compiled body serves all of them. Weights keep Hugging Face's `[out, in]`
order; `q_b`, `k_up`, `v_up` and `o` have their heads as an axis of their own.

Does not know about Hugging Face tensor names, files, or what is computed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import ConfigError
from ddtree_jax.mesh import named_sharding, partition_spec
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD, Int4Weight

if TYPE_CHECKING:
    from ddtree_jax.pallas import Int4Tiles

type Axes = tuple[str | None, ...]


def _param(shape: tuple[int, ...], axes: Axes, dtype=jnp.bfloat16) -> nnx.Param:
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


class Int4Param(nnx.Module):
    """An INT4 weight `[lead…, out, in]` as its two stored arrays.

    Attributes:
      in_tiles: Whether each device's part is in the order of the kernels, as
        `Int4Tiles`; otherwise it is canonical, as in checkpoints.
    """

    def __init__(self, shape: tuple[int, ...], axes: Axes):
        *lead, inputs = shape
        self.in_tiles = False
        self.packed = _param((*lead, inputs // NIBBLES_PER_WORD), axes, jnp.int32)
        self.scale = _param((*lead, inputs // GROUP_SIZE), axes)

    @property
    def weight(self) -> "Int4Weight | Int4Tiles":
        """The pair as one value."""
        if not self.in_tiles:
            return Int4Weight(self.packed[...], self.scale[...])
        # Not above: the converter starts seconds sooner without the kernels.
        from ddtree_jax.pallas import Int4Tiles

        return Int4Tiles(self.packed[...], self.scale[...])


class Mlp(nnx.Module):
    """A SwiGLU feed-forward of bfloat16 weights, stacked over layers."""

    def __init__(self, layers: int, hidden: int, inner: int):
        self.gate = _param((layers, inner, hidden), ("layer", "mlp", "embed"))
        self.up = _param((layers, inner, hidden), ("layer", "mlp", "embed"))
        self.down = _param((layers, hidden, inner), ("layer", "embed", "mlp"))


class Experts(nnx.Module):
    """The routed experts' INT4 SwiGLU weights, stacked over layers."""

    def __init__(self, layers: int, experts: int, hidden: int, inner: int):
        inward = ("layer", "expert", "expert_mlp", "embed")
        outward = ("layer", "expert", "embed", "expert_mlp")
        self.gate = Int4Param((layers, experts, inner, hidden), inward)
        self.up = Int4Param((layers, experts, inner, hidden), inward)
        self.down = Int4Param((layers, experts, hidden, inner), outward)


class MlaAttention(nnx.Module):
    """Multi-head latent attention, its input norm included, stacked over layers."""

    def __init__(self, c: ModelConfig, layers: int):
        n, m, q, latent = layers, c.hidden_size, c.q_lora_rank, c.kv_lora_rank
        heads = c.num_attention_heads
        self.input_norm = _param((n, m), ("layer", "embed"))
        self.q_a = _param((n, q, m), ("layer", "q_lora", "embed"))
        self.q_a_norm = _param((n, q), ("layer", "q_lora"))
        self.q_b = _param(
            (n, heads, c.qk_head_dim, q), ("layer", "heads", "head_dim", "q_lora")
        )
        self.kv_a = _param(
            (n, latent + c.qk_rope_head_dim, m), ("layer", "latent", "embed")
        )
        self.kv_a_norm = _param((n, latent), ("layer", "latent"))
        up_axes = ("layer", "heads", "head_dim", "latent")
        self.k_up = _param((n, heads, c.qk_nope_head_dim, latent), up_axes)
        self.v_up = _param((n, heads, c.v_head_dim, latent), up_axes)
        self.o = _param(
            (n, m, heads, c.v_head_dim), ("layer", "embed", "heads", "head_dim")
        )


class DenseLayers(nnx.Module):
    """The first layers: attention and a dense feed-forward."""

    def __init__(self, c: ModelConfig):
        n = c.first_k_dense_replace
        self.attention = MlaAttention(c, n)
        self.post_norm = _param((n, c.hidden_size), ("layer", "embed"))
        self.mlp = Mlp(n, c.hidden_size, c.intermediate_size)


class MoeLayers(nnx.Module):
    """The other layers: attention, router, routed experts and shared expert."""

    def __init__(self, c: ModelConfig):
        n, m = c.num_moe_layers, c.hidden_size
        self.attention = MlaAttention(c, n)
        self.post_norm = _param((n, m), ("layer", "embed"))
        self.router = _param((n, c.n_routed_experts, m), ("layer", "expert", "embed"))
        # float32 on disk too: rounding it changes which experts are chosen.
        self.router_bias = _param(
            (n, c.n_routed_experts), ("layer", "expert"), jnp.float32
        )
        self.experts = Experts(n, c.n_routed_experts, m, c.moe_intermediate_size)
        self.shared = Mlp(n, m, c.moe_intermediate_size * c.n_shared_experts)


class KimiK2(nnx.Module):
    """The target's parameters: `embed`, `dense`, `moe`, `norm`, `head`."""

    def __init__(self, c: ModelConfig):
        self.embed = _param((c.vocab_size, c.hidden_size), ("vocab", "embed"))
        self.dense = DenseLayers(c)
        self.moe = MoeLayers(c)
        self.norm = _param((c.hidden_size,), ("embed",))
        self.head = _param((c.vocab_size, c.hidden_size), ("vocab", "embed"))


class DFlash(nnx.Module):
    """The drafter's parameters; it borrows embedding and head from the target."""

    def __init__(self, c: DraftConfig):
        n, m, d = c.num_hidden_layers, c.hidden_size, c.head_dim
        features = len(c.target_layer_ids)
        self.fc = _param((m, features, m), ("feature_out", "feature", "embed"))
        self.hidden_norm = _param((m,), ("embed",))
        self.layers = DraftLayers(c, n, m, d)
        self.norm = _param((m,), ("embed",))


class DraftLayers(nnx.Module):
    """The drafter's layers: grouped-query attention and SwiGLU, stacked."""

    def __init__(self, c: DraftConfig, n: int, m: int, d: int):
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        kv_axes = ("layer", "kv_heads", "head_dim", "embed")
        self.input_norm = _param((n, m), ("layer", "embed"))
        self.q = _param((n, heads, d, m), ("layer", "heads", "head_dim", "embed"))
        self.k = _param((n, kv_heads, d, m), kv_axes)
        self.v = _param((n, kv_heads, d, m), kv_axes)
        self.o = _param((n, m, heads, d), ("layer", "embed", "heads", "head_dim"))
        self.q_norm = _param((n, d), ("layer", "head_dim"))
        self.k_norm = _param((n, d), ("layer", "head_dim"))
        self.post_norm = _param((n, m), ("layer", "embed"))
        self.mlp = Mlp(n, m, c.intermediate_size)


def named_parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Returns every parameter by its path, such as `moe/experts/gate/packed`."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): param for path, param in flat}


def map_parameters[M: nnx.Module](
    function: Callable[[str, nnx.Param], object], model: M
) -> M:
    """Returns `model` with `function(path, param)` in place of every value."""
    names = named_parameters(model)
    values = [function(path, param) for path, param in names.items()]
    paths = {path: value for path, value in zip(names, values, strict=True)}

    def replace(key_path, _):
        return paths["/".join(k.name for k in key_path[:-1])]

    return jax.tree_util.tree_map_with_path(replace, model)


def partition_specs[M: nnx.Module](model: M) -> M:
    """Returns `model` with a PartitionSpec in place of every value."""
    return map_parameters(lambda _, p: partition_spec(p.axes), model)


def with_shardings[M: nnx.Module](model: M, mesh: Mesh, *, dtype=None) -> M:
    """Returns the abstract `model` with where each parameter lives on `mesh`.

    Args:
      dtype: Replaces bfloat16 (float32 for exact tests). INT4 scales keep
        theirs, since they define the weights' values.
    """

    def place(path: str, p: nnx.Param):
        cast = dtype is not None and p.dtype == jnp.bfloat16
        keep = not cast or path.endswith("/scale")
        return jax.ShapeDtypeStruct(
            p.shape,
            p.dtype if keep else dtype,
            sharding=named_sharding(mesh, p.axes),
        )

    return map_parameters(place, model)


def check_divisible(config: ModelConfig | DraftConfig, num_devices: int) -> None:
    """Raises ConfigError when `num_devices` do not split what the mesh splits."""
    units = {
        "vocab_size": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
    }
    if isinstance(config, ModelConfig):
        # An expert's down projection is cut between two scale groups.
        units["moe_intermediate_size"] = GROUP_SIZE
    else:
        units |= {"num_key_value_heads": 1, "hidden_size": 1}
    for name, unit in units.items():
        size = getattr(config, name)
        if size % (unit * num_devices):
            per_device = f" in groups of {unit}" if unit > 1 else ""
            raise ConfigError(
                f"{name} = {size} does not split over {num_devices} devices{per_device}"
            )
