"""Owns the builder and the walk in slow, plain Python, for tests and research only.

What `tree.build` and `accept.walk` must agree with. A prefix is written as its rank
path: `(0, 2)` is the best token of position 1, then the third best of position 2.
Does not know about JAX, batches or padding.
"""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

type RankPath = tuple[int, ...]


def heap_prefixes(log_probs: np.ndarray, budget: int) -> dict[RankPath, float]:
    """Returns the `budget` most probable prefixes, best first, with their scores.

    Best-first search: a popped path is followed by its next sibling and its first
    child, so each prefix is pushed once. Ties go to the lexicographically smallest
    path. Prefixes of probability 0 do not exist.

    Args:
      log_probs: `[D, K]`, descending in each row, at most 0.
    """
    rows = [[float(x) for x in row] for row in log_probs]
    heap: list[tuple[float, RankPath]] = []

    def push(path: RankPath) -> None:
        depth, rank = len(path), path[-1]
        if depth > len(rows) or rank >= len(rows[depth - 1]):
            return
        score = prefix_score(rows, path)
        if score > -math.inf:
            heapq.heappush(heap, (-score, path))

    best: dict[RankPath, float] = {}
    push((0,))
    while heap and len(best) < budget:
        negative, path = heapq.heappop(heap)
        best[path] = -negative
        push((*path[:-1], path[-1] + 1))
        push((*path, 0))
    return best


def brute_force_prefixes(log_probs: np.ndarray, budget: int) -> dict[RankPath, float]:
    """Returns what `heap_prefixes` does, by sorting all K + K² + … + K^D prefixes."""
    horizon, kept = log_probs.shape
    every = [
        (prefix_score(log_probs, path), path)
        for depth in range(1, horizon + 1)
        for path in itertools.product(range(kept), repeat=depth)
    ]
    every = [(score, path) for score, path in every if score > -math.inf]
    every.sort(key=_best_first)
    return {path: score for score, path in every[:budget]}


def _best_first(entry: tuple[float, RankPath]) -> tuple[float, RankPath]:
    score, path = entry
    return -score, path


def prefix_score(log_probs, path: RankPath) -> float:
    """Returns the log-probability of a prefix under independent positions."""
    return math.fsum(float(log_probs[d][rank]) for d, rank in enumerate(path))


def walk(
    tokens: Sequence[int],
    parent: Sequence[int],
    used: Sequence[bool],
    choice: Sequence[int],
    room: int,
) -> tuple[list[int], list[int]]:
    """Returns the accepted path from the root on, and the target's token at each node.

    The last token is the bonus token.

    Args:
      choice: The target's token after each node.
      room: Most nodes of the path, at least 1.
    """
    child = {
        (int(parent[node]), int(tokens[node])): node
        for node in range(1, len(tokens))
        if used[node]
    }
    path = [0]
    while len(path) < room:
        following = child.get((path[-1], int(choice[path[-1]])))
        if following is None:
            break
        path.append(following)
    return path, [int(choice[node]) for node in path]
