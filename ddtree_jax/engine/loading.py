"""Owns the way from an EngineConfig to compiled programs on a mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ddtree_jax.config import (
    DEFAULT_MAX_CONTEXT_LEN,
    DraftConfig,
    EngineConfig,
)
from ddtree_jax.engine.runner import Runner
from ddtree_jax.errors import ConfigError
from ddtree_jax.hf_config import check_draft_fits
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.params import DFlash
from ddtree_jax.model.restore import restore_draft, restore_target
from ddtree_jax.model.tiling import for_devices
from ddtree_jax.spec import Params

_SMALL_CHUNK = 32  # a short prompt need not pay for the largest chunk


class Loaded(NamedTuple):
    """A runner, and what its model allows."""

    runner: Runner
    max_context_len: int
    vocab_size: int


def load_runner(config: EngineConfig) -> Loaded:
    """Returns both models restored, and the programs compiled.

    Raises:
      ConfigError: The options contradict the checkpoint or the devices.
      CheckpointError: The checkpoint is unusable.
    """
    dtype = jnp.dtype(config.dtype)
    if dtype == jnp.float32:
        # TF32 would make float32 on a GPU something else.
        jax.config.update("jax_default_matmul_precision", "highest")
    mesh = make_mesh(config.devices)
    model_config, target = restore_target(
        config.model, mesh, dtype=dtype, latent_norm_eps=config.latent_norm_eps
    )
    target = for_devices(target, model_config, mesh, dtype)
    max_context_len = _max_context_len(config, model_config.max_position_embeddings)
    draft_config, draft = _restore_draft(config, mesh, dtype)
    if draft_config is not None:
        check_draft_fits(draft_config, model_config)
    pages_per_slot = -(-max_context_len // config.page_size)
    chunks = {min(_SMALL_CHUNK, config.prefill_chunk), config.prefill_chunk}
    runner = Runner(
        Params(target, draft),
        model_config,
        draft_config,
        mesh,
        slots=config.slots,
        pages_per_slot=pages_per_slot,
        num_pages=config.num_pages or config.slots * pages_per_slot,
        page_size=config.page_size,
        num_nodes=1 + config.tree_budget,
        prefill_chunks=tuple(chunks),
        dtype=dtype,
    )
    return Loaded(runner, max_context_len, model_config.vocab_size)


def _restore_draft(
    config: EngineConfig, mesh: Mesh, dtype
) -> tuple[DraftConfig | None, DFlash | None]:
    beside = config.model / "draft"
    directory = config.draft or (beside if beside.is_dir() else None)
    if directory is not None:
        return restore_draft(
            directory, mesh, dtype=dtype, rope_amplitude=config.rope_amplitude
        )
    if config.tree_budget > 0:
        raise ConfigError(
            f"tree_budget = {config.tree_budget} needs a drafter, and {beside} does "
            "not exist; name one (--draft) or set the budget to 0"
        )
    return None, None


def _max_context_len(config: EngineConfig, limit: int) -> int:
    if config.max_context_len is None:
        return min(limit, DEFAULT_MAX_CONTEXT_LEN)
    if config.max_context_len > limit:
        raise ConfigError(
            f"max_context_len = {config.max_context_len} is more than the model's "
            f"max_position_embeddings = {limit}"
        )
    return config.max_context_len
