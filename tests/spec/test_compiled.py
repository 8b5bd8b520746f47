"""What the compiled step is made of: collectives, aliasing, nothing of the host."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.mesh import make_mesh
from ddtree_jax.spec import abstract_state, init_state, make_prefill, make_step
from tests.support.hlo import COLLECTIVES, HOST, Program
from tests.support.random_model import random_tiny

# Far larger than anything else in the program, so that a copy of it stands out.
NUM_PAGES = 4096


@pytest.fixture(scope="module")
def model():
    """Both random models on eight devices."""
    return random_tiny(make_mesh(8), vocab_size=32)


@pytest.fixture(scope="module")
def abstract(model):
    """A state whose pages are nearly all of its bytes."""
    return abstract_state(
        model.config,
        model.draft_config,
        model.mesh,
        slots=4,
        pages_per_slot=8,
        num_pages=NUM_PAGES,
        page_size=16,
        dtype=jnp.float32,
    )


@pytest.fixture(scope="module", params=["plain", "tree", "prefill"])
def compiled(request, model, abstract):
    """The three programs of a server."""
    arguments = (model.params, abstract)
    if request.param == "prefill":
        jitted = make_prefill(model.config, model.draft_config, model.mesh)
        tokens = jax.ShapeDtypeStruct((32,), jnp.int32)
        arguments += (np.int32(0), tokens, np.int32(1), np.bool_(True))
    else:
        num_nodes = {"plain": 1, "tree": 33}[request.param]
        jitted = make_step(
            model.config, model.draft_config, model.mesh, num_nodes=num_nodes
        )
    return request.param, jitted.lower(*arguments).compile()


def test_two_all_reduces_a_layer_and_no_other_collective(compiled, model):
    name, executable = compiled
    program = Program(executable.as_text())
    bodies = [program.count(body) for body in program.loop_bodies()]
    layer_loops = [b for b in bodies if any(b[c] for c in COLLECTIVES)]
    # The target's expert layers, and the drafter's layers where it drafts. The one
    # dense layer is a loop of one, which XLA unrolls.
    assert model.config.first_k_dense_replace == 1
    assert len(layer_loops) == (2 if name == "tree" else 1)
    for body in layer_loops:
        assert body["all-reduce"] == 2
        assert sum(body[c] for c in COLLECTIVES) == 2
    # Outside: the dense layer's two, an embedding for each model that runs, and
    # the check for non-finite logits.
    outside = program.count()["all-reduce"] - 2 * len(layer_loops)
    assert outside == 2 + (2 if name == "tree" else 1) + 1


def test_nothing_of_the_host_takes_part(compiled):
    _, executable = compiled
    program = Program(executable.as_text())
    counts = program.count()
    assert not [code for code in HOST if counts[code]]
    targets = set(re.findall(r'custom_call_target="([^"]+)"', program.text))
    assert targets <= {"TopK"}


def test_pages_are_updated_in_place(compiled, abstract):
    _, executable = compiled
    program = Program(executable.as_text())
    pages = jax.tree.leaves((abstract.cache, abstract.draft_cache))
    local = [p.sharding.shard_shape(p.shape) for p in pages]
    page_bytes = [4 * int(np.prod(shape)) for shape in local]
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(page_bytes)
    assert memory.temp_size_in_bytes < min(page_bytes) / 2
    shapes = {f"f32[{','.join(map(str, shape))}]" for shape in local}
    copies = [
        line
        for code, line in program.instructions()
        if code in ("copy", "copy-start")
        and any(line.split(" = ")[1].startswith(shape) for shape in shapes)
    ]
    assert not copies


def test_every_state_buffer_is_donated(compiled, abstract):
    _, executable = compiled
    header = executable.as_text().splitlines()[0]
    aliases = re.search(r"input_output_alias=\{(.*?) \}, ", header)[1]
    assert aliases.count("-alias") == len(jax.tree.leaves(abstract))


def test_donated_buffers_are_gone(model, abstract):
    step = make_step(model.config, model.draft_config, model.mesh, num_nodes=1)
    state = init_state(abstract)
    pointer = state.cache.latent.addressable_shards[3].data.unsafe_buffer_pointer()
    with jax.transfer_guard("disallow"):
        new, _ = step(model.params, state)
    assert state.cache.latent.is_deleted()
    shard = new.cache.latent.addressable_shards[3].data
    assert shard.unsafe_buffer_pointer() == pointer


def test_one_executable_serves_every_state(model, abstract):
    step = make_step(model.config, model.draft_config, model.mesh, num_nodes=9)
    state = init_state(abstract)
    compilations = []

    def listen(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    state, _ = step(model.params, state)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            state, _ = step(model.params, state)
        assert step._cache_size() == 1
        assert not compilations
        # The listener would have heard: this is a new program.
        jax.jit(lambda x: x + 3)(jnp.ones(7))
        assert compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
