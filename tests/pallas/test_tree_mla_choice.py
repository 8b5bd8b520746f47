"""Which tree-MLA kernel runs, and how the work of each but the first is cut."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla import kernel, tree_mla_attention
from ddtree_jax.pallas.tree_mla.cases import TreeMlaCase
from ddtree_jax.pallas.tree_mla.mma_config import choose_mma
from ddtree_jax.pallas.tree_mla.wide_config import choose_wide
from tests.support.tree_mla import make, split_arguments

CASE = TreeMlaCase(
    size="ci",
    heads=1,
    nodes=1,
    context_len=(1,),
    latent=128,
    rope=64,
    page_size=8,
)


@dataclasses.dataclass
class Device:
    compute_capability: str


@pytest.mark.parametrize(
    ("capabilities", "want"),
    [
        (["9.0"], "9.0"),
        (["12.0", "12.0"], "12.0"),
        # No kernel, or none that all can run.
        (["10.0"], None),
        (["12.1"], None),
        (["9.0", "12.0"], None),
        ([], None),
    ],
)
def test_kernels_are_known_by_the_capability_of_all_gpus(
    capabilities, want, monkeypatch
):
    def local_devices(backend):
        assert backend == "cuda"
        if not capabilities:
            raise RuntimeError("Unknown backend cuda")
        return [Device(c) for c in capabilities]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert kernel.compute_capability() == want


def test_pallas_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(kernel, "compute_capability", lambda: None)
    message = (
        "^tree_mla_attention: implementation 'pallas' got no GPU that it has a kernel "
        "for; expected compute capability 9.0 or 12.0 of all"
    )
    arrays, _ = make(CASE, np.random.default_rng(1), dtype=ml_dtypes.bfloat16)
    positional, keywords = split_arguments(arrays)
    with pytest.raises(ValueError, match=message):
        tree_mla_attention(
            *positional, **keywords, softmax_scale=0.1, implementation="pallas"
        )


def test_a_ring_that_is_not_two_tiles_is_refused_by_the_wide_kernel():
    config = choose_wide(
        batch=1, rows=1, latent=CASE.latent, rope=CASE.rope, max_tiles=2, cores=132
    )
    arrays, _ = make(CASE, np.random.default_rng(1), dtype=ml_dtypes.bfloat16)
    positional, keywords = split_arguments(arrays)
    with pytest.raises(ValueError, match="ring of 3 slots; expected two tiles, 2"):
        kernel.tree_mla_attention_pallas(
            *positional,
            **keywords,
            softmax_scale=0.1,
            config=dataclasses.replace(config, slots=3),
        )


@pytest.mark.parametrize(
    ("batch", "rows", "max_tiles", "want"),
    [
        # Rows of a block by sixteens, at most 32; a split has one tile at least.
        (1, 8, 40, (16, 1, 40, 8)),
        (1, 8, 9_000, (16, 1, 188, 8)),
        (1, 72, 9_000, (32, 3, 62, 6)),
        (1, 520, 9_000, (32, 17, 11, 6)),
        # 96 blocks: three splits in two waves, not one in half a wave.
        (32, 72, 9_000, (32, 3, 3, 6)),
        (32, 33, 9_000, (32, 2, 5, 6)),
        (200, 72, 9_000, (32, 3, 1, 6)),
    ],
)
def test_choice(batch, rows, max_tiles, want):
    config = choose_mma(
        batch=batch, rows=rows, latent=512, rope=64, max_tiles=max_tiles, cores=188
    )
    got = config.rows, config.row_blocks, config.splits, config.slots
    assert got == want


@pytest.mark.parametrize(
    ("batch", "rows", "max_tiles", "want"),
    [
        # 64 rows a block, filled or not; a split has one tile at least.
        (1, 8, 40, (64, 1, 40, 8)),
        (1, 64, 9_000, (64, 1, 132, 8)),
        (1, 65, 9_000, (64, 2, 66, 8)),
        (1, 576, 9_000, (64, 9, 14, 8)),
        (32, 576, 9_000, (64, 9, 1, 8)),
    ],
)
def test_wide_choice(batch, rows, max_tiles, want):
    config = choose_wide(
        batch=batch, rows=rows, latent=512, rope=64, max_tiles=max_tiles, cores=132
    )
    got = config.rows, config.row_blocks, config.splits, config.slots
    assert got == want
