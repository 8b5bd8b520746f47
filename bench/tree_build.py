"""Owns the timing of the tree builder, beside the heap that defines its meaning."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.timing import time_call
from ddtree_jax.spec import oracle
from ddtree_jax.spec.tree import build

HORIZON = 7
BUDGETS = (8, 16, 32, 64, 128)
_LOGITS = 4096


def measure() -> list[dict]:
    """Returns rows of one request; `vocab` is what top-k kept, which is the budget.

    Log-probabilities are of normal logits with a standard deviation of 3, whose trees
    have both a spine and branches.
    """
    rows = []
    logits = 3 * np.random.default_rng(0).standard_normal((1, HORIZON, _LOGITS))
    log_probs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    for budget in BUDGETS:
        kept, ids = jax.lax.top_k(log_probs, budget)
        root, wanted = jnp.zeros(1, jnp.int32), jnp.full(1, budget, jnp.int32)
        jitted = jax.jit(partial(build, num_nodes=1 + budget))
        on_host = np.asarray(kept[0], np.float64)
        calls = {
            "xla": partial(jitted, kept, ids, root, wanted),
            "python heap": partial(oracle.heap_prefixes, on_host, budget),
        }
        for implementation, call in calls.items():
            case = {
                "horizon": HORIZON,
                "budget": budget,
                "vocab": budget,
                "implementation": implementation,
            }
            timing = time_call(call, warm_up=10, repeats=200)
            rows.append(
                {"case": case, **{k: round(v, 1) for k, v in timing._asdict().items()}}
            )
    return rows
