"""Owns which INT4 products are timed, their floors, and what they are held against."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bench.tree_mla_cases import FLOPS_PER_S
from ddtree_jax.errors import ConfigError
from ddtree_jax.pallas.int4_matmul.cases import (
    DENSE_CASES,
    GROUPED_CASES,
    DenseCase,
    GroupedCase,
)
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD

FLOORS = (
    "memory: the weights that the draws need, with scales, once, x in and y out, at "
    "copy_gbps, measured in the same run (reads and writes, 256 MiB each, launched "
    "without waiting); compute: all products at 790 TFLOP/s, measured on an H200 for "
    "bfloat16; the larger of both. Those of a baseline are the same, those of INT4"
)
WORK = (
    "grouped: from the router's choice to the float32 sum; uniform routing, top 8 of "
    "384, another draw for every call, stacks of two layers in turn; ep8 is the rank "
    "of experts 0 to 47. Part of each call is what makes it wait for the one before, "
    "in kernels_us a kernel of its own: of a grouped product it writes the expert ids, "
    "of a dense one x"
)
PEERS = ("Humming", "Marlin", "cuBLAS bf16")
PEERS_SOURCE = (
    "microseconds on one H200, 2026-11-29, torch 2.11.0+cu130, replayed CUDA graphs "
    "over rotated inputs; of layers without routing alignment"
)
# A word of nibbles, and a bfloat16 for each group.
_WEIGHT_BYTES = 4 / NIBBLES_PER_WORD + 2 / GROUP_SIZE

type Layout = Literal["tp8", "ep8"]


class Load(NamedTuple):
    """What a call has to do, the mean over a train.

    Attributes:
      experts: That some token picked.
      pairs: Of token and expert.
    """

    experts: float
    pairs: float


class Floor(NamedTuple):
    """Bytes of a call, and its least times in microseconds."""

    bytes: float
    memory_us: float
    compute_us: float

    @property
    def us(self) -> float:
        """Returns the larger."""
        return max(self.memory_us, self.compute_us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A call that is timed.

    Attributes:
      peers: Microseconds of other kernels at this shape, by `PEERS`.
      must: Microseconds that may not be exceeded, None where nothing was set.
      aim: Microseconds that are aimed at.
    """

    shape: DenseCase | GroupedCase
    peers: Mapping[str, float]
    must: float | None = None
    aim: float | None = None

    @property
    def name(self) -> str:
        """What `--cases` selects by."""
        return self.shape.name

    @property
    def tokens(self) -> int:
        """Rows of x."""
        return self.shape.tokens


def expert_bytes(shape: GroupedCase) -> float:
    """Returns the bytes of gate, up and down of one expert."""
    return 3 * shape.hidden * shape.inner * _WEIGHT_BYTES


def floor(case: BenchCase, load: Load | None, *, gbps: float) -> Floor:
    """Returns the floor of a case.

    Args:
      load: Of a grouped case.
      gbps: 10⁹ bytes a second that a copy reads and writes.
    """
    shape = case.shape
    if isinstance(shape, GroupedCase):
        if load is None:
            raise ValueError(f"{case.name}: a grouped case has a load")
        weights = load.experts * expert_bytes(shape)
        # bfloat16 in, float32 out.
        moved = weights + shape.tokens * shape.hidden * (2 + 4)
        products = load.pairs * 3 * shape.hidden * shape.inner
    else:
        products = shape.inputs * shape.outputs
        moved = products * _WEIGHT_BYTES
        moved += shape.tokens * (shape.inputs + shape.outputs) * 2
        products *= shape.tokens
    return Floor(moved, moved / gbps / 1e3, 2 * products / FLOPS_PER_S * 1e6)


def chosen(patterns: Sequence[str]) -> tuple[BenchCase, ...]:
    """Returns the cases whose names match a pattern, or all where none is given.

    Raises:
      ConfigError: A pattern matches no case; all names are listed.
    """
    names = [case.name for case in BENCH_CASES]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"--cases {pattern!r} matches none of {', '.join(names)}")
    return tuple(
        case
        for case in BENCH_CASES
        if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)
    )


def _grouped(
    layout: Layout,
    tokens: int,
    humming: float,
    marlin: float,
    must: float | None = None,
    aim: float | None = None,
) -> BenchCase:
    [shape] = (
        c
        for c in GROUPED_CASES
        if (c.size, c.layout, c.tokens) == ("kimi", layout, tokens)
    )
    peers = {"Humming": humming, "Marlin": marlin}
    return BenchCase(shape=shape, peers=peers, must=must, aim=aim)


def _dense(tokens: int, inputs: int, outputs: int, *peers: float) -> BenchCase:
    [shape] = (
        c
        for c in DENSE_CASES
        if (c.size, c.tokens, c.inputs, c.outputs) == ("kimi", tokens, inputs, outputs)
    )
    return BenchCase(shape=shape, peers=dict(zip(PEERS, peers, strict=True)))


# In the order of their importance, should the time run out.
BENCH_CASES: tuple[BenchCase, ...] = (
    _grouped("tp8", 9, 68.3, 78.7, must=80, aim=58),
    _grouped("tp8", 1, 22.4, 21.2, must=24, aim=12),
    _grouped("tp8", 65, 245.4, 284.9, must=290, aim=228),
    _grouped("tp8", 17, 114.2, 131.3, must=130, aim=100),
    _grouped("tp8", 33, 174.0, 202.3, must=200, aim=158),
    _grouped("tp8", 256, 370.4, 429.8, must=450, aim=340),
    _grouped("ep8", 9, 67.4, 72.0),
    _grouped("ep8", 1, 26.8, 23.6),
    _grouped("ep8", 65, 249.7, 258.9),
    _dense(9, 7168, 2048, 9.00, 15.1, 12.8),
    _dense(9, 2048, 7168, 9.90, 9.84, 9.90),
    _dense(1, 7168, 2048, 8.10, 13.9, 12.7),
    _dense(1, 2048, 7168, 9.54, 8.95, 9.95),
    _dense(64, 7168, 2048, 14.6, 50.5, 13.3),
    _dense(64, 2048, 7168, 12.0, 22.9, 10.6),
)
