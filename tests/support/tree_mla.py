"""Arguments of tree attention, poisoned, and what it should give: a float64 loop."""

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ddtree_jax.pallas.tree_mla import pack_bits
from ddtree_jax.pallas.tree_mla.cases import TreeMlaCase
from tests.support import poison, trees
from tests.support.compare import assert_close

# The arguments without a default, in their order.
POSITIONAL = (
    "q_latent",
    "q_rope",
    "latent_cache",
    "rope_cache",
    "page_table",
    "context_len",
)
type Arrays = dict[str, np.ndarray]


def split_arguments(arrays: Arrays) -> tuple[list, dict]:
    """Returns positional and keyword arguments of `tree_mla_attention`."""
    keywords = dict(arrays)
    return [keywords.pop(name) for name in POSITIONAL], keywords


def make(
    case: TreeMlaCase,
    rng: np.random.Generator,
    tree_list: list[trees.Tree] | None = None,
    dtype: npt.DTypeLike = np.float32,
    tail_rows: int | None = None,
) -> tuple[Arrays, list[trees.Tree]]:
    """Returns the poisoned arrays of a case by name, and its trees.

    Args:
      tail_rows: Of the tail, at least the nodes, which None means.
    """
    batch, n, size = len(case.context_len), case.nodes, case.page_size
    if tree_list is None:
        kinds = [trees.chain(n), trees.star(n), trees.random_tree(n, rng)]
        kinds.append(trees.padded(kinds[2], max(1, n // 2)))
        tree_list = [kinds[b % len(kinds)] for b in range(batch)]
    num_pages = batch * case.pages_per_request + 3
    table = rng.permutation(num_pages)[: batch * case.pages_per_request]
    table = table.reshape(batch, -1).astype(np.int32)
    length = np.asarray(case.context_len, np.int32)
    committed = poison.committed_rows(table, length, num_pages, size)
    used = np.stack([tree.used for tree in tree_list])
    tail = n if tail_rows is None else tail_rows
    in_tail = np.pad(used, ((0, 0), (0, tail - n)))

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    latent_cache = normal(num_pages, size, case.latent)
    rope_cache = normal(num_pages, size, case.rope)
    mask = np.stack([trees.ancestors(tree) for tree in tree_list])
    return {
        "q_latent": poison.poison_tail(normal(batch, n, case.heads, case.latent), used),
        "q_rope": poison.poison_tail(normal(batch, n, case.heads, case.rope), used),
        "latent_cache": poison.poison_rows(latent_cache, committed),
        "rope_cache": poison.poison_rows(rope_cache, committed),
        "page_table": poison.poison_table(table, length, size),
        "context_len": length,
        "tail_latent": poison.poison_tail(normal(batch, tail, case.latent), in_tail),
        "tail_rope": poison.poison_tail(normal(batch, tail, case.rope), in_tail),
        "ancestor_bits": np.array(pack_bits(jnp.asarray(mask))),
    }, tree_list


def oracle(
    a: Arrays, tree: trees.Tree, b: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns output and log-sum-exp of one request: a loop over its used nodes.

    Nodes that are padding have NaN.
    """
    size, length = a["latent_cache"].shape[1], a["context_len"][b]
    n, heads, latent = a["q_latent"].shape[1:]
    out = np.full((n, heads, latent), np.nan)
    lse = np.full((n, heads), np.nan)
    token = np.arange(length)
    place = a["page_table"][b, token // size], token % size
    above = trees.ancestors(tree)

    def keys(cache, tail, seen):
        rows = np.concatenate([a[cache][place], a[tail][b][: len(seen)][seen]])
        return rows.astype(np.float64)

    for i in np.flatnonzero(tree.used):
        values = keys("latent_cache", "tail_latent", above[i])
        ropes = keys("rope_cache", "tail_rope", above[i])
        logits = a["q_latent"][b, i].astype(np.float64) @ values.T
        logits += a["q_rope"][b, i].astype(np.float64) @ ropes.T
        logits *= scale
        peak = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - peak)
        total = weights.sum(axis=1, keepdims=True)
        out[i] = weights @ values / total
        lse[i] = (peak + np.log(total))[:, 0]
    return out, lse


def check(
    operation: str,
    got,
    arrays: Arrays,
    tree_list: list[trees.Tree],
    scale: float,
    requests=None,
) -> None:
    """Asserts that every used node of these requests is as the loop says.

    Args:
      operation: Row of the tolerances; that of the log-sum-exp has " lse" behind it.
      requests: None means all.
    """
    out, lse = (np.asarray(x) for x in got)
    assert out.dtype == arrays["q_latent"].dtype
    assert lse.dtype == np.float32
    for b in range(len(tree_list)) if requests is None else requests:
        used = tree_list[b].used
        want_out, want_lse = oracle(arrays, tree_list[b], b, scale)
        assert_close(operation, out[b][used], want_out[used])
        assert_close(f"{operation} lse", lse[b][used], want_lse[used])
