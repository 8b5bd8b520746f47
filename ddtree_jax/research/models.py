"""Owns the way from a checkpoint to both models, with the ablations of the drafter."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import ConfigError
from ddtree_jax.hf_config import check_draft_fits, read_stop_token_ids
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.restore import restore_draft, restore_target
from ddtree_jax.model.tiling import for_devices
from ddtree_jax.spec import Params

type DtypeName = Literal["bfloat16", "float32"]


class Models(NamedTuple):
    """A target with its drafter, and where they live."""

    config: ModelConfig
    draft_config: DraftConfig
    params: Params
    mesh: Mesh
    dtype: DtypeName
    stop_token_ids: tuple[int, ...]


def load_models(
    directory: Path,
    *,
    devices: int | None,
    dtype: DtypeName,
    rope_amplitude: float | None = None,
    feature_offset: int = 0,
) -> Models:
    """Returns the models of a checkpoint that has its drafter in `draft/`.

    Args:
      rope_amplitude: Replaces `DraftConfig.rope_amplitude`.
      feature_offset: Added to every target layer the drafter gets features from.

    Raises:
      ConfigError: The options contradict the checkpoint or the devices.
      CheckpointError: The checkpoint is unusable.
    """
    if dtype == "float32":
        # TF32 would make float32 on a GPU something else.
        jax.config.update("jax_default_matmul_precision", "highest")
    mesh = make_mesh(devices)
    config, target = restore_target(directory, mesh, dtype=jnp.dtype(dtype))
    target = for_devices(target, config, mesh, jnp.dtype(dtype))
    draft_config, draft = restore_draft(
        directory / "draft", mesh, dtype=jnp.dtype(dtype), rope_amplitude=rope_amplitude
    )
    check_draft_fits(draft_config, config)
    return Models(
        config,
        shift_features(draft_config, feature_offset),
        Params(target, draft),
        mesh,
        dtype,
        read_stop_token_ids(directory),
    )


def shift_features(draft_config: DraftConfig, offset: int) -> DraftConfig:
    """Returns the drafter's configuration with features from other target layers.

    A layer that would leave the target stays where it is, so that a drafter which
    looks at the first or the last layer can be ablated too.

    Raises:
      ConfigError: Two features would come from one layer.
    """
    last = draft_config.num_target_layers - 1
    ids = tuple(
        layer + offset if 0 <= layer + offset <= last else layer
        for layer in draft_config.target_layer_ids
    )
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"--feature-offset {offset}: features would come from layers {ids}; "
            "expected each once"
        )
    return dataclasses.replace(draft_config, target_layer_ids=ids)
