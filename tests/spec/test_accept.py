"""The walk on trees drawn by hand, and on random ones against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.spec import oracle
from ddtree_jax.spec.accept import Accepted, walk
from ddtree_jax.spec.tree import DraftTree

walk_jit = functools.partial(jax.jit, static_argnames="horizon")(walk)

#   0 ─┬─ 1 (7) ─┬─ 4 (4) ─── 6 (9)
#      │         └─ 5 (7)
#      └─ 2 (9) ─── 3 (7) ─── 7 (4)        8, 9: padding
TOKENS = [3, 7, 9, 7, 4, 7, 9, 4, 0, 0]
PARENT = [-1, 0, 0, 2, 1, 1, 4, 3, 0, 0]
DEPTH = [0, 1, 1, 2, 2, 2, 3, 3, 0, 0]
USED = 8
HORIZON = 4


def run(choice, *, room=99, horizon=HORIZON, tokens=TOKENS, parent=PARENT, used=USED):
    """Returns path, number accepted and tokens of one request, as lists."""
    n = len(tokens)
    tree = DraftTree(
        tokens=jnp.asarray([tokens], jnp.int32),
        parent=jnp.asarray([parent], jnp.int32),
        depth=jnp.asarray([DEPTH[:n]], jnp.int32),
        used=jnp.arange(n)[None] < used,
    )
    room = jnp.asarray([room], jnp.int32)
    accepted = walk_jit(tree, jnp.asarray([choice], jnp.int32), room, horizon=horizon)
    assert [a.dtype for a in accepted] == [jnp.int32] * 3
    assert [a.shape for a in accepted] == [(1, horizon + 1), (1,), (1, horizon + 1)]
    path, count, new = (a[0].tolist() for a in accepted)
    return path, count, new


def choices(**at: int) -> list[int]:
    """Returns 99, which no node carries, everywhere but after the nodes named."""
    given = {int(name[1:]): token for name, token in at.items()}
    return [given.get(node, 99) for node in range(len(TOKENS))]


# Choices after the nodes → path, accepted drafts, new tokens.
HAND_DRAWN = {
    "nothing": (choices(), [0, 0, 0, 0, 0], 0, [99, 0, 0, 0, 0]),
    "one": (choices(n0=9), [0, 2, 0, 0, 0], 1, [9, 99, 0, 0, 0]),
    "first_child": (choices(n0=7, n1=4), [0, 1, 4, 0, 0], 2, [7, 4, 99, 0, 0]),
    "second_child": (choices(n0=7, n1=7), [0, 1, 5, 0, 0], 2, [7, 7, 99, 0, 0]),
    "deepest": (
        choices(n0=9, n2=7, n3=4, n7=5),
        [0, 2, 3, 7, 0],
        3,
        [9, 7, 4, 5, 0],
    ),
    # 7 and then 9 are in the tree, but not as parent and child.
    "other_branch": (choices(n0=7, n1=9), [0, 1, 0, 0, 0], 1, [7, 9, 0, 0, 0]),
    # A grandchild carries it.
    "skipped_level": (choices(n0=4), [0, 0, 0, 0, 0], 0, [4, 0, 0, 0, 0]),
    # The root's own token.
    "root_token": (choices(n0=3), [0, 0, 0, 0, 0], 0, [3, 0, 0, 0, 0]),
    # What is chosen after nodes off the path does not matter.
    "off_path": (choices(n0=9, n1=4, n4=9), [0, 2, 0, 0, 0], 1, [9, 99, 0, 0, 0]),
    # The padding carries 0 and hangs on the root.
    "token_0": (choices(n0=0), [0, 0, 0, 0, 0], 0, [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", HAND_DRAWN)
def test_hand_drawn(name):
    choice, path, count, new = HAND_DRAWN[name]
    assert run(choice) == (path, count, new)


def test_unused_nodes_never_match():
    deepest = choices(n0=9, n2=7, n3=4, n7=5)
    # The same tokens and parents; nodes 3 and 7 are not used.
    assert run(deepest, used=3) == ([0, 2, 0, 0, 0], 1, [9, 7, 0, 0, 0])
    # A used node wins over unused ones before and after it that look the same.
    tokens, parent = [3, 0, 0, 0], [-1, 0, 0, 0]
    tree = DraftTree(
        tokens=jnp.asarray([tokens], jnp.int32),
        parent=jnp.asarray([parent], jnp.int32),
        depth=jnp.asarray([[0, 1, 1, 1]], jnp.int32),
        used=jnp.asarray([[True, False, True, False]]),
    )
    choice = jnp.asarray([[0, 5, 6, 7]], jnp.int32)
    accepted = walk_jit(tree, choice, jnp.asarray([9], jnp.int32), horizon=1)
    assert accepted.accepted_path.tolist() == [[0, 2]]
    assert accepted.tokens.tolist() == [[0, 6]]


@pytest.mark.parametrize("room", range(1, 11))
def test_room_cuts_the_path(room):
    """A chain of 7 drafts, all of them chosen."""
    tokens = [10, 11, 12, 13, 14, 15, 16, 17]
    choice = [11, 12, 13, 14, 15, 16, 17, 18]
    count = min(room, 8)
    path, accepted, new = run(
        choice, room=room, horizon=7, tokens=tokens, parent=list(range(-1, 7)), used=8
    )
    assert accepted == count - 1
    assert path == [*range(count), *[0] * (8 - count)]
    assert new == [*choice[:count], *[0] * (8 - count)]


def test_horizon_0_yields_the_bonus_token():
    one_node = {"tokens": [3], "parent": [-1], "used": 1}
    assert run([5], horizon=0, **one_node) == ([0], 0, [5])


def random_case(rng, n: int, vocabulary: int):
    """Returns a tree of distinct siblings, and choices that often follow it."""
    parent, tokens, depth = [-1], [int(rng.integers(vocabulary))], [0]
    while len(parent) < n:
        above = int(rng.integers(len(parent)))
        taken = {t for t, p in zip(tokens, parent, strict=True) if p == above}
        free = sorted(set(range(vocabulary)) - taken)
        if not free or depth[above] == HORIZON:
            continue
        parent.append(above)
        tokens.append(int(rng.choice(free)))
        depth.append(depth[above] + 1)
    choice = rng.integers(0, vocabulary, n)
    for node in range(n):
        children = [j for j in range(n) if parent[j] == node]
        if children and rng.random() < 0.85:
            choice[node] = tokens[int(rng.choice(children))]
    return [np.asarray(a, np.int32) for a in (tokens, parent, depth, choice)]


@pytest.mark.parametrize(("n", "vocabulary"), [(1, 4), (9, 4), (33, 3)])
def test_random_trees_are_walked_as_the_oracle_does(n, vocabulary):
    rng, batch = np.random.default_rng(n), 200
    cases = [random_case(rng, n, vocabulary) for _ in range(batch)]
    tokens, parent, depth, choice = (np.stack(a) for a in zip(*cases, strict=True))
    # Not the padding of `build`: unused nodes keep tokens and parents.
    used = np.arange(n)[None] < rng.integers(1, n + 1, (batch, 1))
    room = rng.integers(1, HORIZON + 3, batch).astype(np.int32)
    tree = DraftTree(*map(jnp.asarray, (tokens, parent, depth, used)))
    accepted = walk_jit(tree, jnp.asarray(choice), jnp.asarray(room), horizon=HORIZON)
    paths, counts, new = map(np.asarray, accepted)
    for b in range(batch):
        path, walked = oracle.walk(tokens[b], parent[b], used[b], choice[b], room[b])
        padding = [0] * (HORIZON + 1 - len(path))
        assert paths[b].tolist() == path + padding
        assert new[b].tolist() == walked + padding
        assert counts[b] == len(path) - 1
    if n > 1:
        assert set(counts.tolist()) == set(range(HORIZON + 1))


def test_requests_do_not_mix():
    choice = np.asarray([case[0] for case in HAND_DRAWN.values()], np.int32)
    batch = len(choice)

    def repeat(row):
        return jnp.broadcast_to(jnp.asarray(row)[None], (batch, len(TOKENS)))

    tree = DraftTree(
        tokens=repeat(np.asarray(TOKENS, np.int32)),
        parent=repeat(np.asarray(PARENT, np.int32)),
        depth=repeat(np.asarray(DEPTH, np.int32)),
        used=repeat(np.arange(len(TOKENS)) < USED),
    )
    room = jnp.full(batch, 99, jnp.int32)
    accepted = walk_jit(tree, jnp.asarray(choice), room, horizon=HORIZON)
    wanted = Accepted(*zip(*[case[1:] for case in HAND_DRAWN.values()], strict=True))
    for got, want in zip(accepted, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
