"""Owns the timing of tree-MLA attention on a GPU, beside XLA and the reference.

Everything of one implementation is compiled first, by several threads, and then
timed, so that no compiler runs beside a measurement. A case that fails is reported
and the others go on.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from bench.device_time import DeviceTiming, kernel_times, time_trains
from bench.limits import Deadline, noted
from bench.tree_mla_arms import IMPLEMENTATIONS, Arm, compile_arms
from bench.tree_mla_cases import BenchCase, floor
from bench.tree_mla_inputs import make_pool
from ddtree_jax.errors import ConfigError

# Of the outputs, against float32; rounding to bfloat16 alone gives 0.0017.
MAX_ERROR = 0.01

type Result = tuple[np.ndarray, np.ndarray]


def require_hopper() -> None:
    """Checks that there is a GPU that has the kernel.

    Raises:
      ConfigError: There is none.
    """
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        raise ConfigError(
            f"tree-mla: expected a GPU of compute capability 9.0, found "
            f"{device.device_kind}; absolute times count only there"
        )


def measure(
    cases: Sequence[BenchCase],
    rows: list[dict],
    *,
    save: Callable[[], None],
    deadline: Deadline,
) -> list[str]:
    """Returns what went wrong, a line each; adds a row for each case that did not.

    Args:
      rows: Gets one row a case and implementation.
      save: Called whenever rows have changed.
    """
    pool, wrong, truth = make_pool(cases[0]), [], {}
    for implementation in IMPLEMENTATIONS:
        arms = compile_arms(cases, pool, implementation, wrong, deadline)
        timed = []
        for case in (case for case in cases if case.name in arms):
            with noted(wrong, f"{case.name} {implementation}"):
                deadline.check()
                arm = arms[case.name].result()
                if arm.exact is not None:
                    truth[case.name] = _on_host(arm.exact(*arm.trains[0]))
                row = time_arm(case, implementation, arm, truth[case.name])
                rows.append(row)
                print(progress(row), flush=True)
                save()
                timed.append((case, arm, row))
        # Afterwards, so that CUPTI has no part in the times above.
        for case, arm, row in timed:
            if arm.plain is not None:
                with noted(wrong, f"{case.name} kernels alone"):
                    deadline.check()
                    row["kernels_us"] = kernel_times(
                        arm.plain, arm.trains[0], calls=arm.calls
                    )
                    save()
    return wrong


def time_arm(case: BenchCase, implementation: str, arm: Arm, truth: Result) -> dict:
    """Returns the row of one implementation of one case.

    Raises:
      ValueError: A result is wrong.
    """
    error, lse_error = check(arm.train(*arm.trains[0]), truth)
    calls = arm.calls
    timing = time_trains(arm.train, arm.trains, calls=calls)
    return row_of(case, implementation, timing, calls=calls * len(arm.trains)) | {
        "error": float(f"{error:.2g}"),
        "lse_error": float(f"{lse_error:.2g}"),
    }


def check(result: tuple, truth: Result) -> tuple[float, float]:
    """Returns the relative error of the first output, and the largest of its sums.

    Raises:
      ValueError: It is too large, or any result of the train is not finite.
    """
    first, last, lse = jax.tree.map(lambda x: np.asarray(x, np.float32), result)
    if not all(np.isfinite(x).all() for x in (first, last, *lse)):
        raise ValueError("a result is not finite")
    output, sums = truth
    error = float(np.linalg.norm(first - output) / np.linalg.norm(output))
    lse_error = float(np.abs(lse[0] - sums).max())
    if not (error < MAX_ERROR and lse_error < MAX_ERROR):
        raise ValueError(
            f"output differs from float32 by {error:.2g}, log-sum-exp by "
            f"{lse_error:.2g}; expected less than {MAX_ERROR}"
        )
    return error, lse_error


def _on_host(result: tuple) -> Result:
    output, lse = result
    return np.asarray(output), np.asarray(lse)


def row_of(
    case: BenchCase, implementation: str, timing: DeviceTiming, *, calls: int
) -> dict:
    """Returns the row of a time; the kernel's has what it is held against."""
    shape, least = case.shape, floor(case.shape)
    row = {
        "case": {
            "name": case.name,
            "heads": shape.heads,
            "batch": len(shape.context_len),
            "nodes": shape.nodes,
            "context": max(shape.context_len),
            "form": case.form,
            "implementation": implementation,
        },
        **{name: round(us, 2) for name, us in timing.device._asdict().items()},
        "host_us": round(timing.host_us, 2),
        "floor_us": round(least.us, 2),
        "bound": least.bound,
        "x_floor": round(timing.device.us / least.us, 2),
        "distinct_calls": calls,
    }
    if implementation == "pallas":
        row |= {"peers_us": dict(case.peers), "must_us": case.must, "aim_us": case.aim}
    return row


def progress(row: dict) -> str:
    """Returns the row in a line."""
    case = row["case"]
    return (
        f"{case['name']}  {case['implementation']}  {row['us']:.1f} us "
        f"[{row['p10']:.1f}, {row['p90']:.1f}]  {row['x_floor']:.1f} x floor"
    )
