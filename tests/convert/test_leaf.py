"""The chunks of the real model: whole for a device of eight, bounded, one layer."""

import itertools
import math

import numpy as np
import pytest

from convert.leaf import CHUNK_SPLITS, MAX_CHUNK_BYTES, Leaf
from convert.rules import target_rules
from ddtree_jax.config import ModelConfig, YarnConfig
from ddtree_jax.hf_config.doctor import PUBLISHED_ROPE, PUBLISHED_TARGET
from ddtree_jax.mesh import MESH_AXES
from ddtree_jax.model.params import KimiK2, named_parameters

# kimi-k2.6's language model without its weight_shape tensors of 2 int32 each.
PUBLISHED_BYTES = 594_205_904_896 - 60 * 384 * 3 * 8


@pytest.fixture(scope="module")
def leaves() -> list[tuple[Leaf, tuple]]:
    published = dict(PUBLISHED_TARGET)
    config = ModelConfig(
        **{k: v for k, v in published.items() if k != "eos_token_id"},
        latent_norm_eps=1e-6,
        rope=YarnConfig(**PUBLISHED_ROPE),
        eos_token_ids=(published["eos_token_id"],),
    )
    lead = {rule.path: rule.lead for rule in target_rules(config, ())}
    out = []
    for path, p in named_parameters(KimiK2(config)).items():
        split = [i for i, a in enumerate(p.axes) if MESH_AXES[a] is not None]
        leaf = Leaf(
            path=path,
            shape=p.shape,
            dtype=np.dtype(p.dtype),
            split_axis=split[0] if split else None,
            lead=lead[path],
            sources=(),
            pattern="",
        )
        out.append((leaf, p.axes))
    return out


def test_bytes_are_the_published_ones(leaves):
    assert sum(leaf.nbytes for leaf, _ in leaves) == PUBLISHED_BYTES


def test_chunks(leaves):
    for leaf, axes in leaves:
        chunk, slab = leaf.layout()
        for n, c, s in zip(leaf.shape, chunk, slab, strict=True):
            assert n % s == 0 and s % c == 0, leaf
        size = math.prod(chunk) * leaf.dtype.itemsize
        assert size <= max(MAX_CHUNK_BYTES, 2 * 1536 * 7168), (leaf.path, size)
        assert math.prod(slab) <= CHUNK_SPLITS * math.prod(chunk)
        if axes[0] == "layer":
            assert chunk[0] == slab[0] == 1
        if leaf.split_axis is not None:
            part = leaf.shape[leaf.split_axis] // CHUNK_SPLITS
            assert part % chunk[leaf.split_axis] == 0, leaf.path


def test_expert_chunks_are_worth_a_file(leaves):
    packed = next(leaf for leaf, _ in leaves if leaf.path == "moe/experts/gate/packed")
    assert packed.layout()[0] == (1, 16, 256, 896)


@pytest.mark.parametrize(
    ("shape", "split", "lead"),
    [
        ((3, 16, 32, 8), 2, 2),
        ((3, 16, 8, 32), 3, 2),
        ((5, 6, 7), None, 1),
        ((9,), 0, 0),
    ],
)
def test_slabs_are_contiguous_and_in_order(monkeypatch, shape, split, lead):
    monkeypatch.setattr("convert.leaf.MAX_CHUNK_BYTES", 64)
    leaf = Leaf("x", shape, np.dtype(np.int32), split, lead, (), "")
    numbers = np.arange(math.prod(shape)).reshape(shape)
    read = itertools.chain.from_iterable(
        numbers[block].reshape(-1).tolist() for block in leaf.slabs()
    )
    assert list(read) == list(range(numbers.size))
