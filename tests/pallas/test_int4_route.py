"""Which tokens go to which expert: the lists against a loop, on a CPU and on a GPU."""

import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas.int4_matmul.route import Routing, max_tiles, route
from ddtree_jax.pallas.int4_matmul.route_kernel import MAX_EXPERTS, route_on_device
from tests.support.compare import assert_bit_equal

COLUMNS = 8
EXTREMES = (-1, np.iinfo(np.int32).min, np.iinfo(np.int32).max)

_route = jax.jit(route, static_argnames=("experts", "columns"))
_on_device = jax.jit(route_on_device, static_argnames=("experts", "columns"))


def on_device(*arguments, **sizes) -> Routing:
    """Returns what the kernel gives; skips where it does not run."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs one NVIDIA GPU: JAX_PLATFORMS=cuda scripts/test -m gpu")
    return _on_device(*arguments, **sizes)


everywhere = pytest.mark.parametrize(
    "run",
    [
        pytest.param(_route, id="jnp"),
        pytest.param(on_device, id="gpu", marks=pytest.mark.gpu),
    ],
)


def lists(
    ids: np.ndarray, weights: np.ndarray, experts: int, columns: int
) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yields expert, tokens and weights of each tile, as defined."""
    for expert in range(experts):
        pairs = [tuple(pair) for pair in np.argwhere(ids == expert)]
        for some in itertools.batched(pairs, columns):
            unused = [~int(pairs[0][0])] * (columns - len(some))
            yield expert, [t for t, _ in some] + unused, [weights[p] for p in some]


def check(run, ids: np.ndarray, experts: int, columns: int = COLUMNS) -> int:
    """Asserts that the lists of these ids are as defined; returns how many tiles."""
    weights = np.random.default_rng(1).standard_normal(ids.shape).astype(np.float32)
    # What picks nothing is in no list.
    weights[(ids < 0) | (ids >= experts)] = np.nan
    got = Routing(*jax.device_get(run(ids, weights, experts=experts, columns=columns)))
    tiles = max_tiles(*ids.shape, experts, columns)
    kinds = [(x.shape, x.dtype) for x in got]
    assert kinds == [
        ((1,), np.int32),
        ((tiles,), np.int32),
        ((tiles, columns), np.int32),
        ((tiles, columns), np.float32),
        ((2,), np.int32),
    ]
    assert got.arrived.tolist() == [0, 0]
    want = list(lists(ids, weights, experts, columns))
    [count] = got.count
    assert count == len(want) <= tiles
    for tile, (expert, slots, of_tokens) in enumerate(want):
        assert got.experts[tile] == expert
        assert got.slots[tile].tolist() == slots
        assert_bit_equal(got.weights[tile, : len(of_tokens)], np.stack(of_tokens))
    return count


def random_ids(
    rng: np.random.Generator, tokens: int, choices: int, experts: int, outside: int
) -> np.ndarray:
    """Returns distinct ids a token, of `experts` and of some on either side."""
    ids = [
        rng.permutation(experts + 2 * outside)[:choices] - outside
        for _ in range(tokens)
    ]
    return np.stack(ids).astype(np.int32)


def column(tokens: int, *ids: int) -> np.ndarray:
    """Returns ids where every token picks the same."""
    return np.tile(np.asarray(ids, np.int32), (tokens, 1))


def uneven() -> np.ndarray:
    """Returns a busy expert, experts with a token, and holes in between."""
    ids = column(17, 2, -1, 6)
    ids[3] = (5, 2, 0)
    ids[7] = (6, -1, 8)
    ids[16] = (*EXTREMES,)
    return ids


def of_nines() -> np.ndarray:
    """Returns ids that give 16 experts 9 tokens each: two tiles, one nearly empty."""
    ids = np.full((18, 8), -1, np.int32)
    ids[:9], ids[9:] = np.arange(8), np.arange(8, 16)
    return ids


# Ids, experts and tiles in use.
CASES = {
    "one token, the only expert": (column(1, 0), 1, 1),
    "all to the first": (column(17, 0, 6, -1), 6, 3),
    "all to the last": (column(17, 7, 5, -1), 6, 3),
    "all to the same three": (column(17, 5, 1, 3), 6, 9),
    "a full tile": (column(8, 3, 6, -1), 6, 1),
    "two full tiles": (column(16, 3, 6, -1), 6, 2),
    "one past a full tile": (column(9, 3, 6, -1), 6, 2),
    "one each": (np.arange(136, dtype=np.int32)[::-1].reshape(17, 8).copy(), 200, 136),
    "nobody": (column(17, 6, -1, 7), 6, 0),
    "extreme ids": (column(17, *EXTREMES), 6, 0),
    "uneven": (uneven(), 6, 4),
    "nines": (of_nines(), 16, 32),
    "more tokens than bits of a word": (column(70, 1, -1, 0), 2, 18),
    "of a prefill": (column(256, *range(8)), 8, 256),
}


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_lists(run, name):
    ids, experts, tiles = CASES[name]
    assert check(run, ids, experts) == tiles


@everywhere
@pytest.mark.parametrize("tokens", [1, 9, 33, 256])
def test_random_lists(run, tokens):
    """Of all experts; and of an eighth of them, with the others' ids outside."""
    ids = random_ids(np.random.default_rng(tokens), tokens, 8, 384, outside=0)
    check(run, ids, 384)
    check(run, ids - 336, 48)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", range(1, 34))
def test_every_number_of_tokens(tokens):
    rng = np.random.default_rng(tokens)
    check(_route, random_ids(rng, tokens, 3, 5, outside=1), 5)


@everywhere
@pytest.mark.parametrize("experts", [31, 128, 129, MAX_EXPERTS])
def test_numbers_of_experts(run, experts):
    """Threads of the kernel are as many, in whole warpgroups."""
    rng = np.random.default_rng(2)
    ids = random_ids(rng, 40, 4, experts, outside=3)
    ids[:9, 0] = experts - 1
    ids[:9, 1:] = np.minimum(ids[:9, 1:], -1)
    check(run, ids, experts)


@everywhere
def test_other_columns(run):
    rng = np.random.default_rng(3)
    check(run, random_ids(rng, 40, 3, 5, outside=1), 5, columns=16)


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(5, 2, 3), (8, 3, 4), (17, 2, 3), (33, 4, 7)]),
    outside=st.sampled_from([2, 30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ids(shape, outside, seed):
    rng = np.random.default_rng(seed)
    check(_route, random_ids(rng, *shape, outside), shape[2])


def most_tiles(tokens: int, choices: int, experts: int, columns: int) -> int:
    """Returns how many tiles there can be: one token opens one, then `columns` do."""
    pairs = tokens * choices
    opened = min(pairs, experts)
    more = opened * (-(-tokens // columns) - 1)
    return opened + min(more, (pairs - opened) // columns)


@pytest.mark.parametrize("columns", [1, 8, 16])
def test_no_routing_exceeds_the_bound(columns):
    sizes = itertools.product(
        (*range(1, 80), 127, 128, 129, 255, 256, 257, 2048),
        (1, 2, 3, 8),
        (1, 2, 5, 48, 63, 64, 65, 127, 128, 129, 250, 256, 384, 1024),
    )
    for tokens, choices, experts in sizes:
        bound = max_tiles(tokens, choices, experts, columns)
        most = most_tiles(tokens, choices, experts, columns)
        assert bound % 128 == 0
        assert bound >= most, (tokens, choices, experts)
        if tokens <= columns:
            assert bound - most < 128, (tokens, choices, experts)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "tiles"),
    [(1, 8, 384, 8), (9, 8, 384, 72), (8, 1, 3, 3), (9, 2, 2, 4)],
)
def test_the_most_is_reached(tokens, choices, experts, tiles):
    """So that the test above asks for no more than there is."""
    ids = np.arange(tokens * choices).reshape(tokens, choices) % experts
    assert most_tiles(tokens, choices, experts, COLUMNS) == tiles
    assert check(_route, ids.astype(np.int32), experts) == tiles
