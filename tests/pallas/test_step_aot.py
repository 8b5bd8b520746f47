"""A whole step compiled for GPUs that are not there: it is made of our kernels."""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ddtree_jax.mesh import make_mesh
from ddtree_jax.model import tiling
from ddtree_jax.model.params import DFlash, KimiK2, with_shardings
from ddtree_jax.spec import Params, abstract_state, make_step
from tests.support.aot import compile_for
from tests.support.random_model import gpu_configs

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="the compilers exist for Linux only; continuous integration runs it",
    ),
    pytest.mark.skipif(
        os.environ["JAX_PLATFORMS"] != "cpu",
        reason="compiles without a GPU; scripts/test without JAX_PLATFORMS runs it",
    ),
]

BUDGET = 8


def abstract(mesh: Mesh):
    """Returns the abstract arguments of a step on `mesh`."""
    config, draft_config = gpu_configs()
    target = with_shardings(KimiK2(config), mesh, dtype=jnp.bfloat16)
    for weight in tiling.int4_weights(target):
        weight.in_tiles = tiling.takes_tiles(config, mesh, jnp.bfloat16)
    draft = with_shardings(DFlash(draft_config), mesh, dtype=jnp.bfloat16)
    state = abstract_state(
        config,
        draft_config,
        mesh,
        slots=2,
        pages_per_slot=4,
        num_pages=8,
        page_size=64,
        dtype=jnp.bfloat16,
    )
    return Params(target, draft), state


def step(*leaves):
    """Runs a step on the device that JAX has as its default."""
    mesh = Mesh(np.array([jax.config.jax_default_device]), ("tensor",))
    config, draft_config = gpu_configs()
    structure = jax.tree.structure(abstract(mesh))
    run = make_step(config, draft_config, mesh, num_nodes=1 + BUDGET)
    return run(*jax.tree.unflatten(structure, leaves))


@pytest.mark.parametrize(
    ("target", "attend"),
    [("h200", "tree_mla_attend"), ("rtx_pro_6000", "tree_mla_attend_mma")],
)
def test_a_step_runs_the_kernels_of_its_gpu(target, attend):
    leaves = jax.tree.leaves(abstract(make_mesh(1)))
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    kernels = compile_for(target, functools.partial(step), *shapes).kernels
    experts = {"int4_route", "int4_grouped_swiglu"}
    assert set(kernels) == {attend, "tree_mla_combine", *experts}
