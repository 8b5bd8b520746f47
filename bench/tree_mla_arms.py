"""Owns what is compiled to time tree-MLA attention, and within what time."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.device_time import NO_GRAPH
from bench.limits import Deadline, noted
from bench.tree_mla_cases import BenchCase
from bench.tree_mla_inputs import (
    SOFTMAX_SCALE,
    Pool,
    Shared,
    make_shared,
    page_tables,
    xla_attention,
)
from ddtree_jax.pallas import tree_mla_attention

# In the order of their importance, should the time run out.
IMPLEMENTATIONS: dict[str, Callable] = {
    "pallas": partial(tree_mla_attention, implementation="pallas"),
    "xla bfloat16": xla_attention,
    "reference": partial(tree_mla_attention, implementation="reference"),
}
# A train of the kernel reads more than L2 holds, and hides its launch.
_TRAIN_BYTES, _FEWEST_CALLS, _MOST_CALLS = 128e6, 16, 96
# XLA's own take many kernels a call.
_BASELINE_CALLS = 4
_COMPILERS = 6


class Arm(NamedTuple):
    """One implementation of one case, ready to run.

    Attributes:
      plain: The train without a CUDA graph; of the kernel only, like `exact`.
      exact: A single call in float32.
    """

    trains: Sequence[tuple]
    train: jax.stages.Compiled
    plain: jax.stages.Compiled | None
    exact: jax.stages.Compiled | None

    @property
    def calls(self) -> int:
        """Of a train."""
        return len(self.trains[0][1])


def compile_arms(
    cases: Sequence[BenchCase],
    pool: Pool,
    implementation: str,
    wrong: list[str],
    deadline: Deadline,
) -> dict[str, Future[Arm]]:
    """Returns the arms of all cases by name, compiled, or why they could not be."""
    arms = {}
    begin = time.monotonic()
    with ThreadPoolExecutor(_COMPILERS) as compilers:
        for case in cases:
            with noted(wrong, f"{case.name} {implementation}"):
                deadline.check()
                arms[case.name] = _submit(compilers, case, pool, implementation)
    took = time.monotonic() - begin
    print(f"{implementation}: compiled in {took:.0f} s", flush=True)
    return arms


def _submit(
    compilers: ThreadPoolExecutor, case: BenchCase, pool: Pool, implementation: str
) -> Future[Arm]:
    """Returns the arm to come; lowered here, since Python lowers one at a time."""
    shared = make_shared(case, pool)
    ours = implementation == "pallas"
    trains = make_trains(case, shared, _calls_of(case) if ours else _BASELINE_CALLS)
    lowered = lower_train(IMPLEMENTATIONS[implementation], trains[0])
    if not ours:
        return compilers.submit(lambda: Arm(trains, lowered.compile(), None, None))
    exact = jax.jit(exact_call).lower(*trains[0])

    def build() -> Arm:
        train, plain = lowered.compile(), lowered.compile(NO_GRAPH)
        # The fastest algorithms are not sought for what is not timed.
        return Arm(trains, train, plain, exact.compile({"xla_gpu_autotune_level": 0}))

    return compilers.submit(build)


def _calls_of(case: BenchCase) -> int:
    """Returns the calls of a train of the kernel."""
    wanted = math.ceil(_TRAIN_BYTES / case.set_bytes)
    return min(max(wanted, _FEWEST_CALLS), _MOST_CALLS)


def make_trains(case: BenchCase, shared: Shared, calls: int) -> list[tuple]:
    """Returns the arguments of as many trains as read all pages of the pool."""
    pages = shared.pool.latent.shape[0]
    used = case.set_bytes * pages // _bytes(shared.pool)
    trains = math.ceil(pages / (used * calls))
    tables = page_tables(case, pages, calls * trains)
    groups = (tables[i * calls : (i + 1) * calls] for i in range(trains))
    return [(shared, group) for group in groups]


def _bytes(pool: Pool) -> int:
    return pool.latent.nbytes + pool.rope.nbytes


def lower_train(attention: Callable, arguments: tuple) -> jax.stages.Lowered:
    """Returns calls of which each has the output of the one before as its queries.

    So none can overlap with another. The result is the output of the first, that of
    the last, and the log-sum-exp of each.
    """

    # A function of its own, so that it is traced and lowered once.
    @jax.jit
    def call(q_latent, shared: Shared, table):
        return attention(
            q_latent,
            shared.q_rope,
            *shared.pool,
            table,
            shared.context_len,
            tail_latent=shared.tail_latent,
            tail_rope=shared.tail_rope,
            ancestor_bits=shared.ancestor_bits,
            softmax_scale=SOFTMAX_SCALE,
        )

    def train(shared: Shared, tables):
        queries, outputs, lse = shared.q_latent, [], []
        for table in tables:
            queries, sums = call(queries, shared, table)
            outputs.append(queries)
            lse.append(sums)
        return outputs[0], outputs[-1], lse

    return jax.jit(train).lower(*arguments)


def exact_call(shared: Shared, tables: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Returns the first call of a train by the reference, in float32 throughout."""
    with jax.default_matmul_precision("highest"):
        return tree_mla_attention(
            shared.q_latent.astype(jnp.float32),
            shared.q_rope.astype(jnp.float32),
            *shared.pool,
            tables[0],
            shared.context_len,
            tail_latent=shared.tail_latent,
            tail_rope=shared.tail_rope,
            ancestor_bits=shared.ancestor_bits,
            softmax_scale=SOFTMAX_SCALE,
            implementation="reference",
        )
