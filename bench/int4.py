"""Owns the timing of INT4 products on a GPU, beside XLA with INT4 and with bfloat16.

In stages, of which everything is compiled first, by several threads, and then timed,
so that no compiler runs beside a measurement. A job that fails is reported and the
others go on.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench.device_time import DeviceTiming, kernel_times, time_trains
from bench.int4_arms import Arm, Job, compile_arms
from bench.int4_cases import BenchCase, Load, floor
from bench.int4_truth import Exacts, kind_of, truth
from bench.limits import Deadline, noted
from ddtree_jax.errors import ConfigError
from ddtree_jax.pallas.int4_matmul.cases import GroupedCase

# Against float32; rounding to bfloat16 alone gives 0.0017.
MAX_ERROR = 0.01
# Of a grouped layer, the numbers of tokens that XLA is timed with as well.
BASELINE_TOKENS = 1, 9, 65
BASELINES = (
    "xla and bfloat16: weights of a layer each, INT4 to be dequantised or bfloat16 "
    "already; tp8 at 1 and 9 tokens and ep8 at 1 by sums over the weights of each "
    "token's experts, others by products of all tokens with all experts; at 17, 33 and "
    "256 tokens not run, to save time; lax.ragged_dot not run: XLA makes of it the "
    "same products with all experts, with a masked copy of the tokens for each"
)
_REPEATS, _BASELINE_REPEATS = 20, 5
_COPY_BYTES = 256 * 2**20


def require_hopper() -> None:
    """Checks that there is a GPU like the one that the goals were set for.

    Raises:
      ConfigError: There is none.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        raise ConfigError(
            f"int4: expected a GPU of compute capability 9.0, found "
            f"{device.device_kind}; absolute times count only there"
        )


def copy_gbps(size: int = _COPY_BYTES, repeats: int = _REPEATS) -> float:
    """Returns how many 10⁹ bytes a second a copy reads and writes on the device.

    Args:
      size: In bytes, of what is copied.
    """
    sources = [jnp.full(size // 4, i, jnp.float32) for i in range(2)]
    # Adding a number that the compiler does not know, so that it cannot alias.
    copy, zero = jax.jit(jnp.add), jnp.float32(0)
    timing = time_trains(
        copy, [(source, zero) for source in sources], calls=1, repeats=repeats
    )
    return 2 * size / timing.device.us / 1e3


def stages(cases: Sequence[BenchCase]) -> tuple[list[list[Job]], list[list[Job]]]:
    """Returns the jobs by stage, and those of baselines that may come too late."""
    grouped = [case for case in cases if isinstance(case.shape, GroupedCase)]
    tp8 = [case for case in grouped if case.name.startswith("kimi-tp8")]
    ep8 = [case for case in grouped if case not in tp8]
    dense = [case for case in cases if case not in grouped]
    first = [
        [Job(case, "pallas") for case in tp8],
        [Job(case, "pallas") for case in (*dense, *ep8)],
        [Job(case, name) for case in dense for name in ("bfloat16", "xla")],
    ]
    last = [
        [
            Job(case, name)
            for case in of_layout
            if case.tokens in BASELINE_TOKENS
            for name in ("xla", "bfloat16")
        ]
        for of_layout in (tp8, ep8)
    ]
    return first, last


def measure(
    cases: Sequence[BenchCase],
    rows: list[dict],
    *,
    gbps: float,
    save: Callable[[], None],
    deadline: Deadline,
) -> list[str]:
    """Returns what went wrong, a line each; adds a row for each job that did not.

    Args:
      rows: Gets one row a case and implementation.
      gbps: 10⁹ bytes a second of a copy.
      save: Called whenever rows have changed.
    """
    wrong: list[str] = []
    exacts: Exacts = {}

    def run(stage: list[Job]) -> list[tuple[Job, Arm, dict]]:
        timed = []
        arms = compile_arms(stage, exacts, wrong, deadline)
        for job in (job for job in stage if job.name in arms):
            with noted(wrong, job.name):
                deadline.check()
                arm, expected = arms[job.name].result(), None
                # Times without an error are worth having, and say so.
                with noted(wrong, f"{job.name}, reference"):
                    expected = _expected(job, arm, exacts)
                row = time_arm(job, arm, expected, gbps=gbps)
                rows.append(row)
                print(progress(row), flush=True)
                save()
                timed.append((job, arm, row))
        return timed

    first, last = stages(cases)
    timed = [of_job for stage in first for of_job in run(stage)]
    # Late, so that CUPTI has no part in the times before.
    for job, arm, row in timed:
        if arm.plain is not None:
            with noted(wrong, f"{job.name}, kernels alone"):
                deadline.check()
                row["kernels_us"] = kernel_times(
                    arm.plain, arm.arguments, calls=arm.calls
                )
                save()
    del timed
    for stage in last:
        run(stage)
    return wrong


def _expected(job: Job, arm: Arm, exacts: Exacts) -> np.ndarray:
    kind = kind_of(job.case.shape)
    x, _, draws = arm.arguments
    return truth(exacts[kind], kind, x, draws[0])


def time_arm(job: Job, arm: Arm, expected: np.ndarray | None, *, gbps: float) -> dict:
    """Returns the row of one job.

    Raises:
      ValueError: A result is wrong.
    """
    error = check(arm.train(*arm.arguments), expected)
    repeats = _REPEATS if job.implementation == "pallas" else _BASELINE_REPEATS
    timing = time_trains(arm.train, [arm.arguments], calls=arm.calls, repeats=repeats)
    row = row_of(job, arm.load, timing, calls=arm.calls, gbps=gbps)
    return row | {"error": None if error is None else float(f"{error:.2g}")}


def check(results: Sequence[jax.Array], expected: np.ndarray | None) -> float | None:
    """Returns the relative error of the first result, where it is known.

    Raises:
      ValueError: It is too large, or any result is not finite.
    """
    first, *others = (np.asarray(result, np.float32) for result in results)
    if not all(np.isfinite(result).all() for result in (first, *others)):
        raise ValueError("a result is not finite")
    if expected is None:
        return None
    error = float(np.linalg.norm(first - expected) / np.linalg.norm(expected))
    if not error < MAX_ERROR:
        raise ValueError(
            f"the result differs from float32 by {error:.2g}; expected less than "
            f"{MAX_ERROR}"
        )
    return error


def row_of(
    job: Job, load: Load | None, timing: DeviceTiming, *, calls: int, gbps: float
) -> dict:
    """Returns the row of a time; the kernel's has what it is held against."""
    case, least = job.case, floor(job.case, load, gbps=gbps)
    us = timing.device.us
    row = {
        "case": case_of(job),
        **{name: round(us, 2) for name, us in timing.device._asdict().items()},
        "host_us": round(timing.host_us, 2),
        "floor_us": round(least.us, 2),
        "compute_us": round(least.compute_us, 2),
        "bound": "memory" if least.memory_us > least.compute_us else "compute",
        "x_floor": round(us / least.us, 2),
        "distinct_calls": calls,
    }
    if load is not None:
        row |= {"experts": round(load.experts, 1), "pairs": round(load.pairs, 1)}
    if job.implementation == "pallas":
        achieved = least.bytes / us / 1e3
        row |= {
            "megabytes": round(least.bytes / 1e6, 2),
            "gbps": round(achieved),
            "copy_share": round(achieved / gbps, 3),
            "peers_us": dict(case.peers),
            "must_us": case.must,
            "aim_us": case.aim,
        }
    return row


def case_of(job: Job) -> dict:
    """Returns what a row is of."""
    shape = job.case.shape
    if isinstance(shape, GroupedCase):
        sizes = {"experts": shape.experts, "inputs": shape.hidden, "inner": shape.inner}
        product = shape.layout
    else:
        sizes = {"inputs": shape.inputs, "outputs": shape.outputs}
        product = "dense"
    return {
        "name": job.case.name,
        "product": product,
        "tokens": shape.tokens,
        **sizes,
        "implementation": job.implementation,
    }


def progress(row: dict) -> str:
    """Returns the row in a line."""
    case = row["case"]
    return (
        f"{case['name']}  {case['implementation']}  {row['us']:.1f} us "
        f"[{row['p10']:.1f}, {row['p90']:.1f}]  {row['x_floor']:.2f} x floor  "
        f"error {row['error']}"
    )
