"""Trees for tests: hypothesis strategies, and ancestors found by walking up."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

# One node; a full mask word; one bit into the second; one into the third.
SIZES = (1, 32, 33, 65)


class Tree(NamedTuple):
    """One request's tree as `parent` and `used` of a `DraftTree`."""

    parent: np.ndarray
    used: np.ndarray


def chain(n: int) -> Tree:
    return Tree(np.arange(n, dtype=np.int32) - 1, np.ones(n, bool))


def star(n: int) -> Tree:
    parent = np.zeros(n, np.int32)
    parent[0] = -1
    return Tree(parent, np.ones(n, bool))


def random_tree(n: int, rng: np.random.Generator) -> Tree:
    """Returns a tree in which every node hangs on any earlier one."""
    parent = [-1, *(int(rng.integers(i)) for i in range(1, n))]
    return Tree(np.asarray(parent, np.int32), np.ones(n, bool))


def padded(tree: Tree, count: int) -> Tree:
    """Returns the first `count` nodes as the tree; the others are padding."""
    used = np.arange(len(tree.parent)) < count
    return Tree(np.where(used, tree.parent, 0).astype(np.int32), used)


def ancestors(tree: Tree) -> np.ndarray:
    """Returns `[N, N]`: whether `j` is `i` or above it, by walking up."""
    n = len(tree.parent)
    mask = np.zeros((n, n), bool)
    for i in range(n):
        j = i
        while j >= 0:
            mask[i, j] = True
            j = int(tree.parent[j])
    return mask


def depths(tree: Tree) -> np.ndarray:
    """Returns the number of steps from each used node to the root, 0 for padding."""
    return np.where(tree.used, ancestors(tree).sum(axis=1) - 1, 0).astype(np.int32)


@st.composite
def trees(draw, sizes: tuple[int, ...] = SIZES) -> Tree:
    """Chains, stars and random trees of one of these sizes, whole and padded."""
    n = draw(st.sampled_from(sizes))
    kind = draw(st.sampled_from(("chain", "star", "random")))
    if kind == "random":
        above = [draw(st.integers(0, i - 1)) for i in range(1, n)]
        tree = Tree(np.asarray([-1, *above], np.int32), np.ones(n, bool))
    else:
        tree = chain(n) if kind == "chain" else star(n)
    return padded(tree, draw(st.just(n) | st.integers(1, n)))
