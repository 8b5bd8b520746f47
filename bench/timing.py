"""Owns the timer: host clock around calls whose results are waited for."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_COPY_BYTES = 256 * 2**20


class Timing(NamedTuple):
    """Microseconds of one call: median, and the 10th and 90th percentile."""

    us: float
    p10: float
    p90: float


def time_call(
    call: Callable[[], Any], *, warm_up: int = 3, repeats: int = 50
) -> Timing:
    """Returns how long `call` takes until its arrays are there.

    The first `warm_up` calls compile and fill caches and do not count. Dispatch is
    part of the time, as it is part of using the function.
    """
    times = []
    for i in range(warm_up + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        if i >= warm_up:
            times.append((time.perf_counter() - begin) * 1e6)
    p10, median, p90 = np.quantile(times, [0.1, 0.5, 0.9])
    return Timing(float(median), float(p10), float(p90))


def copy_gbps() -> float:
    """Returns how many 10⁹ bytes a second a copy reads and writes on one device."""
    source = jnp.zeros(_COPY_BYTES // 4, jnp.float32)
    # Adding a number that the compiler does not know, so that it cannot alias.
    copy = jax.jit(jnp.add)
    zero = jnp.float32(0)
    timing = time_call(lambda: copy(source, zero), repeats=20)
    return 2 * source.nbytes / timing.us / 1e3
