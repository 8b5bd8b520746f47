"""Rows enter the pages where they belong, and nothing else changes by a bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.hf_config import read_draft_config, read_model_config
from ddtree_jax.model.cache import (
    DraftCache,
    LatentCache,
    abstract_draft_cache,
    abstract_latent_cache,
    commit_rows,
)
from tests.support.compare import assert_bit_equal
from tests.support.weights import GOLDEN

LAYERS, PAGES, SIZE, T = 2, 12, 4, 6
WIDTHS = {LatentCache: ((8,), (3,)), DraftCache: ((2, 5), (2, 5))}
TABLE = np.array([[7, 2, 9], [0, 11, 5], [3, 1, 8]], np.int32)

commit = jax.jit(commit_rows)


def make(kind, dtype=np.float32, rows_dtype=None, batch: int = 3):
    """Returns a cache with NaN of all sorts among its values, and new rows."""
    rng = np.random.default_rng(0)
    cache = kind(
        *(
            rng.standard_normal((LAYERS, PAGES, SIZE, *width)).astype(dtype)
            for width in WIDTHS[kind]
        )
    )
    for pages in cache:
        pages[:, ::3, 1] = np.nan
        pages[:, 1::3, 2] = -np.nan
        pages[:, 2::3, 3] = -0.0
    rows = kind(
        *(
            rng.standard_normal((LAYERS, batch, T, *width)).astype(rows_dtype or dtype)
            for width in WIDTHS[kind]
        )
    )
    return cache, rows


def expected(cache, rows, table, start, count):
    """Returns the cache after writing row by row what has a page."""
    out = [pages.copy() for pages in cache]
    for b in range(len(start)):
        for i in range(count[b]):
            column, row = divmod(start[b] + i, SIZE)
            if column < table.shape[1] and table[b, column] < PAGES:
                for pages, new in zip(out, rows, strict=True):
                    pages[:, table[b, column], row] = new[:, b, i]
    return out


def check(kind, start, count, table=TABLE, **dtypes):
    cache, rows = make(kind, batch=len(start), **dtypes)
    start, count = np.asarray(start, np.int32), np.asarray(count, np.int32)
    got = commit(cache, rows, table, start, count)
    assert type(got) is kind
    want = expected(cache, rows, table, start, count)
    for pages, after, before in zip(got, want, cache, strict=True):
        assert_bit_equal(pages, after)
        written = count.any()
        assert (np.asarray(pages).tobytes() != before.tobytes()) == written


@pytest.mark.parametrize("kind", [LatentCache, DraftCache])
@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param((0, 0, 0), (0, 0, 0), id="nothing"),
        pytest.param((0, 3, 5), (1, 1, 1), id="one row each"),
        pytest.param((0, 1, 2), (4, 3, 2), id="up to the border"),
        pytest.param((3, 2, 1), (2, 4, 6), id="across borders"),
        pytest.param((0, 6, 3), (6, 6, 6), id="all rows"),
        pytest.param((5, 4, 3), (0, 6, 0), id="one request only"),
    ],
)
def test_rows_land_at_their_tokens(kind, start, count):
    check(kind, start, count)


@pytest.mark.parametrize("count", range(T + 1))
def test_each_count(count):
    check(LatentCache, (2,), (count,), TABLE[:1])


@pytest.mark.parametrize("kind", [LatentCache, DraftCache])
def test_rows_without_a_page_are_dropped(kind):
    """Past the table's end, and at ids past the pool."""
    check(kind, (10, 12, 9), (6, 6, 3))
    table = TABLE.copy()
    table[0, 1] = PAGES
    table[1, 0] = 2**30
    check(kind, (2, 2, 2), (6, 6, 6), table)


def test_rows_are_rounded_to_the_pages_dtype():
    cache, rows = make(LatentCache, ml_dtypes.bfloat16, np.float32)
    start, count = np.array([0, 3, 5], np.int32), np.array([6, 2, 1], np.int32)
    got = commit(cache, rows, TABLE, start, count)
    rounded = LatentCache(*(new.astype(ml_dtypes.bfloat16) for new in rows))
    for pages, want in zip(
        got, expected(cache, rounded, TABLE, start, count), strict=True
    ):
        assert_bit_equal(pages, want)


def test_abstract_caches():
    size = {"num_pages": 5, "page_size": 16, "dtype": jnp.bfloat16}
    target = abstract_latent_cache(read_model_config(GOLDEN / "tiny_k26"), **size)
    draft = abstract_draft_cache(read_draft_config(GOLDEN / "tiny_draft"), **size)
    assert [a.shape for a in target] == [(4, 5, 16, 64), (4, 5, 16, 16)]
    assert [a.shape for a in draft] == [(2, 5, 16, 8, 16)] * 2
    assert {a.dtype for a in (*target, *draft)} == {jnp.dtype(jnp.bfloat16)}
