"""The builder against a heap and brute force; masks and chains against a walk up."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas.tree_mla import unpack_bits
from ddtree_jax.spec import oracle
from ddtree_jax.spec.tree import DraftTree, ancestor_mask, build, chain, chain_bits
from tests.support import trees
from tests.support.compare import assert_bit_equal

ROOT = 7777
BUDGETS = (1, 7, 8, 31, 64)
# Scores closer than this may change places in float32.
TIE = 1e-5
OBJECTIVE_ERROR = 1e-6

build_jit = functools.partial(jax.jit, static_argnames="num_nodes")(build)


def descending(logits: np.ndarray) -> np.ndarray:
    """Returns float32 log-probabilities of each row, largest first."""
    logits = logits.astype(np.float64)
    largest = logits.max(-1, keepdims=True)
    total = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    return -np.sort(-(logits - total), axis=-1).astype(np.float32)


def drafts(kind: str, rng, horizon: int, kept: int) -> np.ndarray:
    """Returns `[D, K]` log-probabilities, descending in each row."""
    normal = rng.standard_normal((horizon, kept))
    match kind:
        case "random":
            return descending(normal * rng.choice([0.5, 2.0, 6.0]))
        case "ties":
            return -np.sort(rng.integers(0, 5, (horizon, kept))).astype(np.float32)
        case "equal":
            return np.full((horizon, kept), -2, np.float32)
        case "certain":
            rows = descending(normal)
            rows[rng.random(horizon) < 0.6] = [0.0] + [-np.inf] * (kept - 1)
            return rows
        case "certain with ties":
            rows = -np.sort(rng.integers(0, 3, (horizon, kept))).astype(np.float32)
            rows[:, 0] = 0
            return rows
        case "few":
            rows = descending(normal)
            rows[np.arange(kept)[None] >= rng.integers(1, 4, (horizon, 1))] = -np.inf
            return rows
        case "above zero":
            rows = descending(normal * 30)
            rows[:, 0] = np.float32(1.2e-7) * rng.integers(0, 3, horizon)
            return rows
    raise AssertionError(kind)


KINDS = (
    "random",
    "ties",
    "equal",
    "certain",
    "certain with ties",
    "few",
    "above zero",
)


def make_batch(horizon: int, kept: int, *, repeats: int = 2, seed: int = 0):
    """Returns drafts of every kind, their tokens, distinct over positions, too."""
    rng = np.random.default_rng([seed, horizon, kept])
    kinds = KINDS * repeats
    log_probs = np.stack([drafts(kind, rng, horizon, kept) for kind in kinds])
    ids = np.stack(
        [rng.permutation(horizon * kept).reshape(horizon, kept) for _ in kinds]
    )
    return log_probs, ids.astype(np.int32)


def run_build(log_probs, ids, budget, *, num_nodes: int) -> DraftTree:
    batch = len(log_probs)
    tree = build_jit(
        jnp.asarray(log_probs),
        jnp.asarray(ids),
        jnp.arange(batch, dtype=jnp.int32) + ROOT,
        jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (batch,)),
        num_nodes=num_nodes,
    )
    return jax.tree.map(np.asarray, tree)


def rank_paths(tree: DraftTree, b: int, ids: np.ndarray) -> list[oracle.RankPath]:
    """Returns the rank path of each used node but the root, by walking up."""
    rank_of = [{int(t): rank for rank, t in enumerate(row)} for row in ids]
    paths = []
    for node in range(1, int(tree.used[b].sum())):
        path, at = [], node
        while at > 0:
            path.append(rank_of[tree.depth[b, at] - 1][int(tree.tokens[b, at])])
            at = int(tree.parent[b, at])
        assert len(path) == tree.depth[b, node]
        paths.append(tuple(reversed(path)))
    return paths


def check_invariants(tree: DraftTree, b: int, log_probs, ids) -> None:
    """Asserts what `DraftTree` promises of used nodes and of padding."""
    tokens, parent, depth, used = (a[b] for a in tree)
    count = int(used.sum())
    np.testing.assert_array_equal(used, np.arange(len(used)) < count)
    assert (tokens[0], parent[0], depth[0]) == (ROOT + b, -1, 0)
    for node in range(1, count):
        assert 0 <= parent[node] < node
        assert depth[node] == depth[parent[node]] + 1
    children = list(zip(parent[1:count], tokens[1:count], strict=True))
    assert len(set(children)) == len(children)
    for padding in (tokens[count:], parent[count:], depth[count:]):
        assert not padding.any()
    scores = [oracle.prefix_score(log_probs, p) for p in rank_paths(tree, b, ids)]
    assert all(math.isfinite(s) for s in scores)
    assert np.all(np.diff(scores) <= TIE)


def check_best(tree: DraftTree, b: int, log_probs, ids, budget: int, search) -> bool:
    """Asserts the best set of nodes; returns whether no tie left it open."""
    capped = np.minimum(log_probs, 0)
    best = search(capped, budget + 1)
    wanted = list(best)[:budget]
    paths = rank_paths(tree, b, ids)
    assert len(paths) == len(set(paths)) == len(wanted)
    got = math.fsum(math.exp(oracle.prefix_score(capped, p)) for p in paths)
    want = math.fsum(math.exp(best[p]) for p in wanted)
    assert abs(got - want) <= OBJECTIVE_ERROR * want
    scores = list(best.values())
    tied = len(scores) > budget and scores[budget - 1] - scores[budget] < TIE
    if not tied:
        assert set(paths) == set(wanted)
    if np.all(-np.diff(scores) > TIE):
        assert paths == wanted
    return not tied


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("horizon", [1, 3, 7])
def test_build_is_the_heap(horizon, budget):
    log_probs, ids = make_batch(horizon, budget)
    tree = run_build(log_probs, ids, budget, num_nodes=budget + 1)
    decided = []
    for b in range(len(log_probs)):
        check_invariants(tree, b, log_probs[b], ids[b])
        decided.append(
            check_best(tree, b, log_probs[b], ids[b], budget, oracle.heap_prefixes)
        )
    assert sum(decided) >= len(KINDS) // 2


@pytest.mark.parametrize("horizon", [2, 4, 5, 6])
def test_build_is_the_heap_at_other_horizons(horizon):
    test_build_is_the_heap(horizon, 8)


@pytest.mark.parametrize("budget", [8, 31])
@pytest.mark.parametrize(("horizon", "kept"), [(1, 5), (3, 4), (7, 2), (7, 1)])
def test_small_vocabularies_are_searched_completely(horizon, kept, budget):
    log_probs, ids = make_batch(horizon, kept, repeats=4)
    tree = run_build(log_probs, ids, budget, num_nodes=budget + 1)
    for b in range(len(log_probs)):
        check_invariants(tree, b, log_probs[b], ids[b])
        for search in (oracle.brute_force_prefixes, oracle.heap_prefixes):
            check_best(tree, b, log_probs[b], ids[b], budget, search)


def test_more_candidates_than_needed_change_nothing():
    log_probs, ids = make_batch(3, 20)
    wide = run_build(log_probs, ids, 8, num_nodes=9)
    narrow = run_build(log_probs[..., :8], ids[..., :8], 8, num_nodes=9)
    for got, want in zip(wide, narrow, strict=True):
        assert_bit_equal(got, want)


@pytest.mark.parametrize("budget", [0, 1, 5, 8, 31])
def test_a_smaller_budget_is_the_start_of_a_larger_one(budget):
    log_probs, ids = make_batch(7, 31, repeats=6)
    whole = run_build(log_probs, ids, 31, num_nodes=32)
    cut = run_build(log_probs, ids, budget, num_nodes=32)
    alone = run_build(log_probs, ids, budget, num_nodes=budget + 1)
    for of_whole, of_cut, of_alone in zip(whole, cut, alone, strict=True):
        assert_bit_equal(of_cut[:, : budget + 1], of_whole[:, : budget + 1])
        assert_bit_equal(of_cut[:, : budget + 1], of_alone)
        assert not of_cut[:, budget + 1 :].any()


def test_budgets_are_each_requests_own():
    log_probs, ids = make_batch(3, 8)
    budgets = np.arange(len(log_probs)) % 9
    mixed = run_build(log_probs, ids, budgets, num_nodes=9)
    for b, budget in enumerate(budgets):
        alone = run_build(log_probs, ids, budget, num_nodes=9)
        for got, want in zip(mixed, alone, strict=True):
            assert_bit_equal(got[b], want[b])
        check_invariants(mixed, b, log_probs[b], ids[b])


@pytest.mark.parametrize("num_nodes", [1, 9])
def test_budget_0_is_a_lone_root(num_nodes):
    log_probs, ids = make_batch(3, 8)
    tree = run_build(log_probs, ids, 0, num_nodes=num_nodes)
    alone = np.arange(num_nodes)[None] == 0
    np.testing.assert_array_equal(tree.used, np.repeat(alone, len(ids), axis=0))
    for b in range(len(ids)):
        check_invariants(tree, b, log_probs[b], ids[b])


def test_nothing_possible_is_a_lone_root():
    log_probs = np.full((1, 3, 8), -np.inf, np.float32)
    ids = np.arange(24, dtype=np.int32).reshape(1, 3, 8)
    tree = run_build(log_probs, ids, 8, num_nodes=9)
    assert tree.used.sum() == 1
    check_invariants(tree, 0, log_probs[0], ids[0])


def test_a_known_tree():
    log_probs = np.log(np.asarray([[[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]]], np.float32))
    ids = np.asarray([[[5, 6, 7], [8, 5, 6]]], np.int32)
    tree = run_build(log_probs, ids, 6, num_nodes=7)
    # .6, .42, .3, .21, .12, .1
    assert tree.tokens[0].tolist() == [ROOT, 5, 8, 6, 8, 5, 7]
    assert tree.parent[0].tolist() == [-1, 0, 1, 0, 3, 1, 0]
    assert tree.depth[0].tolist() == [0, 1, 2, 1, 2, 2, 1]


def test_a_parent_wins_a_tie_with_its_child():
    log_probs = np.zeros((1, 3, 1), np.float32)
    tree = run_build(log_probs, np.asarray([[[1], [2], [3]]], np.int32), 2, num_nodes=3)
    assert tree.tokens[0].tolist() == [ROOT, 1, 2]
    assert tree.parent[0].tolist() == [-1, 0, 1]


# --- masks and chains


@pytest.mark.parametrize("n", trees.SIZES)
def test_ancestor_mask_is_the_walk_up(n):
    rng = np.random.default_rng(n)
    random = [trees.random_tree(n, rng) for _ in range(4)]
    whole = [trees.chain(n), trees.star(n), *random]
    every = [trees.padded(t, count) for t in whole for count in {1, -(-n // 2), n}]
    check_ancestor_mask(every, max_depth=n - 1)
    # No pass more than the deepest node needs.
    check_ancestor_mask(random, max_depth=max(trees.depths(t).max() for t in random))


def check_ancestor_mask(every: list[trees.Tree], *, max_depth: int) -> None:
    parent = jnp.asarray(np.stack([tree.parent for tree in every]))
    mask = ancestor_mask(parent, max_depth=max_depth)
    np.testing.assert_array_equal(mask, np.stack([trees.ancestors(t) for t in every]))


def test_padding_sees_the_root_and_itself_and_is_seen_by_nobody():
    parent = jnp.asarray([[-1, 0, 1, 0, 0]], jnp.int32)
    mask = ancestor_mask(parent, max_depth=2)[0].astype(int).tolist()
    assert mask[3:] == [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    assert [row[3:] for row in mask[:3]] == [[0, 0]] * 3


def test_chain():
    tokens = jnp.asarray([[4, 5, 6, 7]] * 3, jnp.int32)
    tree = chain(tokens, jnp.asarray([4, 2, 1], jnp.int32))
    assert tree.tokens.tolist() == [[4, 5, 6, 7], [4, 5, 0, 0], [4, 0, 0, 0]]
    assert tree.parent.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    assert tree.depth.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert tree.used.sum(axis=1).tolist() == [4, 2, 1]
    assert tree.used[:, 0].all()


@pytest.mark.parametrize("n", trees.SIZES)
def test_chain_bits(n):
    words = np.asarray(chain_bits(2, n))
    assert words.shape == (2, n, -(-n // 32))
    for i in range(n):
        value = sum(int(word) << 32 * w for w, word in enumerate(words[1, i]))
        assert value == 2 ** (i + 1) - 1
    mask = np.asarray(unpack_bits(jnp.asarray(words), n))
    np.testing.assert_array_equal(mask[0], trees.ancestors(trees.chain(n)))
