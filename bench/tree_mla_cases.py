"""Owns which tree-MLA calls are timed, their floors, and what they are held against."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ddtree_jax.errors import ConfigError
from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase

# What one H200 was measured to do: a copy's reads and writes, a bfloat16 product.
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12
FLOORS = (
    "4.3 TB/s and 790 TFLOP/s, both measured on an H200; rows of keys once, queries "
    "and outputs once, products of all pairs"
)
_BYTES = 2  # of a bfloat16

PEERS = ("FlashMLA", "FA3", "cascade", "SGLang decode")
PEERS_SOURCE = (
    "microseconds on one H200, 2026-11-29, torch 2.11.0+cu130, replayed CUDA graphs "
    "over rotated inputs: FlashMLA 9241ae3 and FlashAttention-3 0251105 (with qv), "
    "chains without a tree mask; trees by FlashMLA on the prefix with a tree part of "
    "sglang 0.5.23 and a merge (cascade), and by sglang's decode kernel over one index "
    "list a node (32 splits)"
)


class Floor(NamedTuple):
    """Least time of a call by bytes or by products, whichever takes longer."""

    us: float
    bound: Literal["memory", "compute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A call that is timed.

    Attributes:
      form: "chain" is a prefill chunk; the peers' chains are not meant.
      peers: Microseconds of other kernels at this shape, by `PEERS`.
      must: Microseconds that may not be exceeded, None where nothing was set.
      aim: Microseconds that are aimed at.
    """

    shape: TreeMlaCase
    form: Literal["tree", "chain"]
    peers: Mapping[str, float]
    must: float | None
    aim: float | None

    @property
    def name(self) -> str:
        """What `--cases` selects by."""
        return self.shape.name

    @property
    def set_bytes(self) -> int:
        """Bytes of the pages that one call reads."""
        s = self.shape
        row = (s.latent + s.rope) * _BYTES
        return len(s.context_len) * s.pages_per_request * s.page_size * row


def floor(case: TreeMlaCase) -> Floor:
    """Returns the floor: rows of keys once, queries and outputs once, all products.

    Pairs that the mask rules out count, as in the figures of the peers.
    """
    rows, latent, width = case.nodes * case.heads, case.latent, case.latent + case.rope
    keys = sum(length + case.nodes for length in case.context_len)
    queries = len(case.context_len) * rows * (width + latent) * _BYTES
    memory = (keys * width * _BYTES + queries) / BYTES_PER_S
    compute = 2 * rows * keys * (width + latent) / FLOPS_PER_S
    if memory > compute:
        return Floor(memory * 1e6, "memory")
    return Floor(compute * 1e6, "compute")


def chosen(patterns: Sequence[str]) -> tuple[BenchCase, ...]:
    """Returns the cases whose names match a pattern, or all where none is given.

    Raises:
      ConfigError: A pattern matches no case; all names are listed.
    """
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in BENCH_CASES], pattern):
            names = ", ".join(case.name for case in BENCH_CASES)
            raise ConfigError(f"--cases {pattern!r} matches none of {names}")
    return tuple(
        case
        for case in BENCH_CASES
        if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)
    )


def _case(
    heads: int,
    nodes: int,
    context: int,
    *peers: float | None,
    batch: int = 1,
    must: float | None = None,
    aim: float | None = None,
) -> BenchCase:
    """Returns the shared case of these sizes, with the peers' times in order."""
    [shape] = (
        case
        for case in CASES
        if (case.size, case.heads, case.nodes) == ("kimi", heads, nodes)
        and case.context_len == (context,) * batch
    )
    named = zip(PEERS, peers, strict=True)
    known = {name: us for name, us in named if us is not None}
    return BenchCase(shape=shape, form="tree", peers=known, must=must, aim=aim)


def _prefill_chunk(heads: int, nodes: int, context: int) -> BenchCase:
    shape = dataclasses.replace(
        _case(heads, 1, 1_024, None, None, None, None).shape,
        nodes=nodes,
        context_len=(context,),
    )
    return BenchCase(shape=shape, form="chain", peers={}, must=None, aim=None)


BENCH_CASES: tuple[BenchCase, ...] = (
    _case(8, 9, 1_024, 14.0, 15.8, 36.3, 18.3, must=18, aim=10),
    _case(8, 9, 5_632, 22.3, 19.8, 44.8, 46.4, must=30, aim=14),
    _case(8, 9, 16_384, 30.3, 25.3, 54.2, 130.6, must=40, aim=20),
    _case(8, 9, 65_536, 49.8, 47.8, 74.0, 475.7, must=60, aim=32),
    _case(8, 9, 200_000, 102.0, 107.0, 127.1, None, must=115, aim=75),
    _case(8, 9, 5_632, 84.8, 93.4, 159.0, None, batch=32, must=110, aim=65),
    _case(64, 9, 65_536, 129.6, 149.3, 171.5, 1177.0, must=160, aim=120),
    _case(8, 65, 65_536, 125.7, 142.6, 172.9, None, must=160, aim=115),
    _case(8, 17, 5_632, 21.9, 21.4, 46.2, None),
    _case(8, 17, 65_536, 57.1, 63.6, 82.5, None),
    _case(8, 33, 5_632, 22.4, 26.3, 48.1, None),
    _case(8, 33, 65_536, 76.8, 91.7, 104.2, None),
    _case(8, 1, 5_632, 27.3, 16.0, None, 32.3),
    _case(8, 1, 65_536, 52.0, 37.6, None, 234.4),
    _prefill_chunk(8, 512, 4_096),
)
