"""What tests of the tree-MLA kernels share: runs, cuts, and the reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla import tree_mla_attention
from ddtree_jax.pallas.tree_mla.cases import TreeMlaCase
from ddtree_jax.pallas.tree_mla.config import SLOT_COLUMNS, TreeMlaConfig
from ddtree_jax.pallas.tree_mla.kernel import tree_mla_attention_pallas
from ddtree_jax.pallas.tree_mla.wide_config import ROWS, TreeMlaWideConfig
from tests.support.compare import assert_bit_equal
from tests.support.interpreter import DETECTING_RACES, no_races
from tests.support.tree_mla import Arrays, split_arguments

SCALE = 0.1
BF16 = ml_dtypes.bfloat16


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def _run(arrays: Arrays, config: TreeMlaConfig | None, interpret):
    positional, keywords = split_arguments(arrays)
    return tree_mla_attention_pallas(
        *positional,
        **keywords,
        softmax_scale=SCALE,
        config=config,
        interpret=interpret,
    )


def attend(machine: str, arrays: Arrays, config: TreeMlaConfig | None):
    """Returns output and log-sum-exp; in the interpreter, no kernel may have a race."""
    if machine == "gpu":
        return jax.device_get(_run(arrays, config, None))
    with no_races(kernels=2):
        return jax.device_get(_run(arrays, config, DETECTING_RACES))


class Cut(NamedTuple):
    """One shape, how the work on it is cut, and how many rows its tail has."""

    case: TreeMlaCase
    config: TreeMlaConfig
    tail_rows: int


def cut(
    *,
    heads: int,
    nodes: int,
    page: int,
    context: tuple[int, ...],
    latent: int = 128,
    rows: int,
    splits: int,
    slots: int = 2,
    warpgroups: int = 1,
    tail_rows: int | None = None,
) -> Cut:
    case = TreeMlaCase(
        size="ci",
        heads=heads,
        nodes=nodes,
        context_len=context,
        latent=latent,
        rope=64,
        page_size=page,
    )
    config = TreeMlaConfig(
        rows=rows,
        row_blocks=-(-heads * nodes // rows),
        splits=splits,
        slots=slots,
        combine_warpgroups=warpgroups,
    )
    return Cut(case, config, nodes if tail_rows is None else tail_rows)


def wide(cut: Cut) -> Cut:
    """Returns the cut for the wide kernel: 64 rows a block, two tiles in the ring."""
    rows = cut.case.heads * cut.case.nodes
    sizes = dataclasses.asdict(cut.config) | {"rows": ROWS}
    sizes["row_blocks"] = -(-rows // ROWS)
    sizes["slots"] = 2 * cut.case.latent // SLOT_COLUMNS
    return cut._replace(config=TreeMlaWideConfig(**sizes))


def ragged(page: int, longest: int) -> tuple[int, ...]:
    """Returns contexts around the page border, none included, and a long one."""
    return (0, 1, page - 1, page, page + 1, longest)


def assert_equal_bits_where(places: np.ndarray, got, want) -> None:
    for x, y in zip(got, want, strict=True):
        assert_bit_equal(x[places], y[places])


def rising(tile):
    return 40.0 * tile


def falling(tile):
    return -40.0 * tile


def first_is_low(tile):
    return -400.0 if tile == 0 else 0.0


def zigzag(tile):
    return 60.0 * tile * (-1) ** tile


def set_levels(arrays: Arrays, level: Callable[[int], float], tile: int) -> None:
    """Gives the logits of two heads whole tiles' levels, or their negatives."""
    # The column sets the logits: `level` for head 0, its negative for head 1.
    column, weight = 5, 8.0
    arrays["q_latent"][..., column] = np.asarray([weight, -weight], BF16)
    table, size = arrays["page_table"], arrays["latent_cache"].shape[1]
    for b, length in enumerate(arrays["context_len"]):
        for t in range(length):
            row = table[b, t // size], t % size
            arrays["latent_cache"][(*row, column)] = level(t // tile) / weight / SCALE


# Trying algorithms for it takes longer than all else in a test on a GPU.
@functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
def _reference(arrays: Arrays):
    positional, keywords = split_arguments(arrays)
    with jax.default_matmul_precision("highest"):
        return tree_mla_attention(
            *positional, **keywords, softmax_scale=SCALE, implementation="reference"
        )


def reference(arrays: Arrays, case: TreeMlaCase):
    """Returns what the reference gives in float32, by 8 heads of one request."""
    out = np.empty(arrays["q_latent"].shape, np.float32)
    lse = np.empty(out.shape[:3], np.float32)
    for b in range(len(case.context_len)):
        one = {
            name: array if name.endswith("cache") else array[b : b + 1]
            for name, array in arrays.items()
        }
        for first in range(0, case.heads, 8):
            heads = np.s_[:, :, first : first + 8]
            for name in ("q_latent", "q_rope"):
                one[name] = np.asarray(arrays[name][b : b + 1][heads], np.float32)
            got = jax.device_get(_reference(one))
            out[b : b + 1][heads], lse[b : b + 1][heads] = got
    return out, lse


def kimi(case: TreeMlaCase):
    marks = [pytest.mark.slow] if max(case.context_len) > 16_384 else []
    return pytest.param(case, id=case.name, marks=marks)
