"""Owns timing on a GPU without the host: trains of calls, and kernels by CUPTI.

A *train* is one executable of many calls, each of which needs the result of the one
before, as a model's layers do; XLA launches it as one CUDA graph.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from bench.hold import hold
from bench.timing import Timing

METHOD = (
    "us: a CUDA graph of dependent calls over rotated inputs (a train), launched many "
    "times while a kernel that only waits holds the GPU; the wall time of a long run "
    "less that of a short one, by the calls that it has more. host_us: what the host "
    "took to launch a call, which is not in us. kernels_us: CUPTI's durations of the "
    "kernels of the same train without its graph, a call; copies are not in it."
)
# Graphs are launched singly at first, and recorded, and only then replayed.
_WARM_UP = 4
# Of the short run, which the long one has too.
_LEAD = 2
# What a long run takes more than a short one; at most as many trains as are queued.
_SPAN_S, _MOST = 5e-3, 16
# The device is held for so many times what the host takes to launch a long run.
_HOLD = 3
_CUPTI_RUNS = 3
# So that XLA makes no graph: of fewer steps it makes none.
NO_GRAPH = {"xla_gpu_graph_min_graph_size": 1_000_000}


class DeviceTiming(NamedTuple):
    """Microseconds of one call on the device, and of launching it on the host.

    The device was held until all was launched, so the first are without the second.
    """

    device: Timing
    host_us: float


def time_trains(
    run: Callable[..., Any],
    arguments: Sequence[tuple],
    *,
    calls: int,
    repeats: int = 20,
) -> DeviceTiming:
    """Returns the time of each of `calls` calls that `run` makes.

    Args:
      arguments: Of `run`, taken in turn.

    Raises:
      RuntimeError: The host became so slow that launches would have been timed.
    """
    lists = itertools.cycle(arguments)

    def wall(trains: int, held: float) -> tuple[float, float]:
        begin = time.perf_counter()
        if held:
            hold(held)
        result = None
        for _ in range(trains):
            result = run(*next(lists))
        launched = time.perf_counter() - begin
        jax.block_until_ready(result)
        return launched, time.perf_counter() - begin

    wall(max(_WARM_UP, len(arguments)), 0)
    one = wall(_WARM_UP, 0)[1] / _WARM_UP
    more = min(max(math.ceil(_SPAN_S / one), 2), _MOST)
    held = _HOLD * wall(_LEAD + more, 0)[0]
    device, host = [], []
    for _ in range(repeats):
        _, short = wall(_LEAD, held)
        launched, long = wall(_LEAD + more, held)
        host.append(launched / ((_LEAD + more) * calls) * 1e6)
        if launched < held:
            device.append((long - short) / (more * calls) * 1e6)
    if 2 * len(device) < repeats:
        raise RuntimeError(
            f"launching a call took {np.median(host):.0f} us, more than {_HOLD} times "
            "as long as at first, and would have been timed; is the host busy?"
        )
    p10, median, p90 = np.quantile(device, [0.1, 0.5, 0.9])
    timing = Timing(float(median), float(p10), float(p90))
    return DeviceTiming(timing, float(np.median(host)))


def kernel_times(
    run: jax.stages.Compiled, arguments: tuple, *, calls: int
) -> dict[str, float]:
    """Returns the microseconds that each kernel takes of one call, by CUPTI.

    Args:
      run: A train compiled with `NO_GRAPH`.

    Raises:
      RuntimeError: CUPTI cannot be used here.
    """
    measured = profiler.measure(run, aggregate=False, iterations=_CUPTI_RUNS)
    _, runs = measured(*arguments)
    if runs is None:
        raise RuntimeError("CUPTI saw no kernel")
    return by_kernel(runs, calls=calls)


def by_kernel(
    runs: Sequence[Sequence[tuple[str, float]]], *, calls: int
) -> dict[str, float]:
    """Returns each kernel's microseconds a call, from milliseconds of launches.

    Args:
      runs: The launches of each run of a train; the median run counts.
    """
    sums = [dict.fromkeys((name for name, _ in run), 0.0) for run in runs]
    for total, run in zip(sums, runs, strict=True):
        for name, ms in run:
            total[name] += ms * 1e3 / calls
    return {
        name.removesuffix("_mosaic_gpu_kernel"): float(
            np.median([total[name] for total in sums])
        )
        for name in sums[0]
    }
