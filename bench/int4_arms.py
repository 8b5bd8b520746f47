"""Owns what is compiled to time INT4 products."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from bench import int4_baselines as baselines
from bench.device_time import NO_GRAPH
from bench.int4_baselines import Draw
from bench.int4_cases import BenchCase, Load, expert_bytes
from bench.int4_inputs import (
    DENSE_WEIGHTS,
    activations,
    bfloat16_dense,
    bfloat16_layers,
    dense_weights,
    draws,
    grouped_weights,
    load_of,
)
from bench.int4_truth import Exacts, kind_of, submit_exact
from bench.limits import Deadline, noted
from ddtree_jax.arrays import Array
from ddtree_jax.pallas.int4_matmul import int4_grouped_swiglu, int4_matmul
from ddtree_jax.pallas.int4_matmul.cases import DenseCase, GroupedCase

type Implementation = Literal["pallas", "bfloat16", "xla"]

# A train of the kernel reads several times what L2 holds, and hides its launch.
_TRAIN_BYTES, _FEWEST_CALLS, _MOST_CALLS = 600e6, 6, 24
# Of a train of XLA's, the first where few weights are read, and dense products.
_SHORT_CALLS, _LONG_CALLS, _DENSE_CALLS = 12, 2, 16
_FEW_TOKENS = 8
_COMPILERS = 8
# Of a result, what is added to the next x.
_STEP = 1e-3


class Job(NamedTuple):
    """One implementation of one case."""

    case: BenchCase
    implementation: Implementation

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.case.name} {self.implementation}"


class Product(NamedTuple):
    """What a train calls.

    Attributes:
      run: Of x, a weight and a draw.
      weights: Taken in turn.
      draws: A `Draw` for each call, or () of a dense product.
    """

    run: Callable[..., Array]
    weights: Sequence[Any]
    draws: Sequence[Any]


class Arm(NamedTuple):
    """A job, ready to run.

    Attributes:
      arguments: Of `train`: x, the weights and the draws.
      load: None of a dense product.
      plain: The train without a CUDA graph, where kernels are looked at one by one.
    """

    arguments: tuple
    load: Load | None
    train: jax.stages.Compiled
    plain: jax.stages.Compiled | None

    @property
    def calls(self) -> int:
        """Of a train."""
        return len(self.arguments[2])


def compile_arms(
    jobs: Sequence[Job], exacts: Exacts, wrong: list[str], deadline: Deadline
) -> dict[str, Future[Arm]]:
    """Returns the arms by their jobs' names, compiled, or why they could not be.

    Args:
      exacts: Gets those of the jobs' kinds that are not in it.
    """
    arms, exact = {}, {}
    begin = time.monotonic()
    with ThreadPoolExecutor(_COMPILERS) as compilers:
        for job in jobs:
            with noted(wrong, job.name):
                deadline.check()
                arms[job.name] = _submit(compilers, job)
        kinds = {kind_of(job.case.shape) for job in jobs if job.name in arms}
        for kind in kinds - exacts.keys():
            with noted(wrong, f"{kind.name} exact"):
                exact[kind] = submit_exact(compilers, kind)
    for kind, compiled in exact.items():
        with noted(wrong, f"{kind.name} exact"):
            exacts[kind] = compiled.result()
    took = time.monotonic() - begin
    print(f"{len(arms)} arms compiled in {took:.0f} s", flush=True)
    return arms


def _submit(compilers: ThreadPoolExecutor, job: Job) -> Future[Arm]:
    """Returns the arm to come; lowered here, since Python lowers one at a time."""
    arguments, load, lowered = lower(job)
    dense = isinstance(job.case.shape, DenseCase)
    looked_at = job.implementation == "pallas" or dense

    def build() -> Arm:
        train = lowered.compile()
        plain = lowered.compile(NO_GRAPH) if looked_at else None
        return Arm(arguments, load, train, plain)

    return compilers.submit(build)


def lower(job: Job) -> tuple[tuple, Load | None, jax.stages.Lowered]:
    """Returns the arguments of a job's train, their load, and the train."""
    shape = job.case.shape
    if isinstance(shape, GroupedCase):
        product = grouped_product(job, shape)
        load = load_of(shape, product.draws)
        width = shape.hidden
    else:
        product, load, width = dense_product(job, shape), None, shape.inputs
    arguments = activations(shape.tokens, width), product.weights, product.draws
    return arguments, load, lower_train(product.run, arguments)


def lower_train(run: Callable[..., Array], arguments: tuple) -> jax.stages.Lowered:
    """Returns calls of which each needs the result of the one before.

    So none can overlap with another. A grouped product gets its expert ids from it, as
    a router would give them, or else XLA would route for all calls at first; a dense
    one its x. The result is what each call gave.
    """

    x, _, (first, *_) = arguments
    if isinstance(first, Draw):
        width, dtype = first.expert_ids.shape[1], jnp.float32
    else:
        width, dtype = 1, x.dtype

    # A function of its own, so that it is traced and lowered once.
    @jax.jit
    def call(before, x, weight, draw):
        if isinstance(draw, Draw):
            # No result is NaN, which XLA does not know.
            ids = draw.expert_ids + jnp.isnan(before).astype(jnp.int32)
            return run(x, weight, draw._replace(expert_ids=ids))
        return run(x + before * _STEP, weight, draw)

    def train(x, weights, draws):
        results = []
        before = jnp.zeros((x.shape[0], width), dtype)
        for i, draw in enumerate(draws):
            results.append(call(before, x, weights[i % len(weights)], draw))
            before = results[-1][:, :width]
        return results

    return jax.jit(train).lower(*arguments)


def grouped_product(job: Job, shape: GroupedCase) -> Product:
    """Returns what a grouped job's train calls."""
    kind = kind_of(shape)
    if job.implementation == "pallas":
        tiles = grouped_weights(kind).stacks
        layers = [(tiles, jnp.int32(i)) for i in range(shape.layers)]
        return Product(_grouped_pallas, layers, draws(job.case, calls_of(shape)))
    calls = _SHORT_CALLS if shape.tokens <= _FEW_TOKENS else _LONG_CALLS
    made = draws(job.case, calls)
    by_pair = shape.tokens * shape.experts_per_token < shape.experts
    run = baselines.by_pair if by_pair else baselines.by_expert
    if job.implementation == "xla":
        return Product(run, grouped_weights(kind).layers, made)
    layers = bfloat16_layers(kind)
    if by_pair:
        return Product(run, layers, made)
    moved = [baselines.down_by_output(layer) for layer in layers]
    return Product(baselines.by_expert_by_output, moved, made)


def calls_of(shape: GroupedCase) -> int:
    """Returns the calls of a train of the grouped kernel, by what the first reads."""
    most = min(shape.tokens * shape.experts_per_token, shape.routed_experts)
    here = most * shape.experts / shape.routed_experts
    wanted = math.ceil(_TRAIN_BYTES / (here * expert_bytes(shape)))
    return min(max(wanted, _FEWEST_CALLS), _MOST_CALLS)


def dense_product(job: Job, shape: DenseCase) -> Product:
    """Returns what a dense job's train calls."""
    kind = kind_of(shape)
    if job.implementation == "pallas":
        weights = dense_weights(kind).tiles
        return Product(_dense_pallas, weights, [()] * DENSE_WEIGHTS)
    if job.implementation == "xla":
        weights = dense_weights(kind).canonical
    else:
        weights = bfloat16_dense(kind)
    return Product(_dense_xla, weights[:_DENSE_CALLS], [()] * _DENSE_CALLS)


def _grouped_pallas(x, weight, draw):
    tiles, layer = weight
    return int4_grouped_swiglu(
        x,
        tiles.gate,
        tiles.up,
        tiles.down,
        layer,
        draw.expert_ids,
        draw.expert_weights,
        implementation="pallas",
    )


def _dense_pallas(x, weight, _):
    return int4_matmul(x, weight, implementation="pallas")


def _dense_xla(x, weight, _):
    return baselines.dense(x, weight)
