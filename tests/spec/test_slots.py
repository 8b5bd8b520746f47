"""Handing a slot to a request and taking it back, field by field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.mesh import make_mesh
from ddtree_jax.spec import Assignment, abstract_state, assign, init_state, release
from tests.support.random_model import random_tiny

ASSIGNMENT = Assignment(
    page_table=np.asarray([5, 3, 9], np.int32),
    max_context_len=np.int32(40),
    tree_budget=np.int32(7),
    temperature=np.float32(0.5),
    top_k=np.int32(4),
    top_p=np.float32(0.9),
    min_p=np.float32(0.1),
    seed=np.uint32(2**32 - 1),
)
OF_SLOT = {
    "page_table": [5, 3, 9],
    "context_len": 0,
    "max_context_len": 40,
    "tree_budget": 7,
    "active": False,
}
SAMPLING = {
    "temperature": np.float32(0.5),
    "top_k": 4,
    "top_p": np.float32(0.9),
    "min_p": np.float32(0.1),
    "seed": 2**32 - 1,
}


@pytest.fixture
def state():
    """A state in which every number of every slot differs from zero."""
    tiny = random_tiny(make_mesh(1))
    abstract = abstract_state(
        tiny.config,
        tiny.draft_config,
        tiny.mesh,
        slots=3,
        pages_per_slot=3,
        num_pages=10,
        page_size=16,
        dtype=jnp.float32,
    )
    return jax.tree.map(jnp.ones_like, init_state(abstract))


def others(array) -> np.ndarray:
    return np.asarray(array)[[0, 2]]


def test_assign_sets_its_slot_and_leaves_the_rest(state):
    new = assign(state, np.int32(1), ASSIGNMENT)
    for name, want in OF_SLOT.items():
        assert np.asarray(getattr(new, name))[1].tolist() == want, name
    for name, want in SAMPLING.items():
        assert np.asarray(getattr(new.sampling, name))[1] == want, name
    slots = (*new[2:8], *new.sampling)
    assert all((others(array) == 1).all() for array in slots)
    pages = jax.tree.leaves((new.cache, new.draft_cache))
    assert all((np.asarray(array) == 1).all() for array in pages)


def test_release_makes_its_slot_idle_and_without_room(state):
    new = release(state, np.int32(1))
    changed = {"context_len": 0, "max_context_len": 0, "active": False}
    for name, want in changed.items():
        assert np.asarray(getattr(new, name))[1].tolist() == want, name
        assert (others(getattr(new, name)) == 1).all(), name
    kept = {f: getattr(new, f) for f in new._fields if f not in changed}
    assert all((np.asarray(a) == 1).all() for a in jax.tree.leaves(kept))
