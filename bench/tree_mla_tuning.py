"""Owns the tuning of tree-MLA attention: which kernel for which sizes.

Every candidate is timed at every shape; the rule for a shape is the candidate that
takes the least, over its contexts. The first candidate is the one that others have to
agree with, and stays where no other is faster by more than a measurement varies.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bench import device_time
from bench.limits import Deadline, noted
from bench.record import bench_record, fill, results_path
from bench.tree_mla import MAX_ERROR, require_hopper
from bench.tree_mla_arms import lower_train, make_trains
from bench.tree_mla_cases import BENCH_CASES, BenchCase, chosen, floor
from bench.tree_mla_inputs import make_pool, make_shared
from ddtree_jax.pallas.tree_mla import tuned
from ddtree_jax.pallas.tree_mla.kernel import cut, tree_mla_attention_pallas
from ddtree_jax.research.record import Record

TABLE = Path(tuned.__file__).with_name("tuned.json")
CAPABILITY = "9.0"
CANDIDATES = ("transposed", "wide")
# What must be gained before another than the first candidate is taken.
MIN_GAIN = 0.03
_CALLS, _REPEATS, _COMPILERS = 16, 10, 8
# After so many nothing new is begun; what is under way ends within 60.
_SECONDS = 240


class Shape(NamedTuple):
    """What a rule is chosen by."""

    rows: int
    batch: int

    @classmethod
    def of(cls, case: BenchCase) -> "Shape":
        """Returns that of a case."""
        return cls(case.shape.nodes * case.shape.heads, len(case.shape.context_len))


def run(patterns: Sequence[str], output: Path | None, argv: Sequence[str]) -> None:
    """Times the candidates and, where all cases were meant, writes the table anew.

    Raises:
      ConfigError: No case matches, or there is no such GPU.
      DDTreeError: Something was not measured; the table is as it was.
    """
    deadline = Deadline.after(_SECONDS)
    cases = chosen(patterns)
    require_hopper()
    path = output or results_path("tree_mla_tuning")
    made = bench_record("tree_mla_tuning", [], argv)
    made["method"] = device_time.METHOD
    fill(made, path, partial(measure, cases, deadline=deadline), _table)
    if cases == BENCH_CASES:
        write_table(TABLE, CAPABILITY, rules_of(made["rows"]))
        print(f"{TABLE} written")


def _table(record: Record) -> str:
    """Returns the rules that the times give, a line each."""
    return "\n".join(map(str, rules_of(record["rows"])))


def measure(
    cases: Sequence[BenchCase],
    rows: list[dict],
    *,
    save: Callable[[], None],
    deadline: Deadline,
) -> list[str]:
    """Returns what went wrong, a line each; adds a row a case and candidate.

    Args:
      rows: Gets one row a case and candidate.
      save: Called whenever rows have changed.
    """
    pool, wrong = make_pool(cases[0]), []
    for case in cases:
        truth, trains = None, make_trains(case, make_shared(case, pool), _CALLS)
        for candidate, compiled in compile_candidates(case, trains[0], wrong):
            with noted(wrong, f"{case.name} {candidate}"):
                deadline.check()
                train = compiled.result()
                result = np.asarray(train(*trains[0])[0], np.float32)
                truth = result if truth is None else truth
                row = _row(case, candidate, trains, train, check(result, truth))
                rows.append(row)
                print(_progress(case, candidate, row), flush=True)
                save()
    return wrong


def compile_candidates(
    case: BenchCase, arguments: tuple, wrong: list[str]
) -> list[tuple[str, Future[jax.stages.Compiled]]]:
    """Returns each candidate with a train of it, which `arguments` are for."""
    shape, made = case.shape, []
    with ThreadPoolExecutor(_COMPILERS) as compilers:
        for candidate in CANDIDATES:
            with noted(wrong, f"{case.name} {candidate}"):
                config = cut(
                    CAPABILITY,
                    candidate,
                    batch=len(shape.context_len),
                    heads=shape.heads,
                    nodes=shape.nodes,
                    latent=shape.latent,
                    rope=shape.rope,
                    held=shape.pages_per_request * shape.page_size,
                )
                call = partial(tree_mla_attention_pallas, config=config)
                lowered = lower_train(call, arguments)
                made.append((candidate, compilers.submit(lowered.compile)))
    return made


def check(result: np.ndarray, truth: np.ndarray) -> float:
    """Returns the relative difference of two candidates' outputs.

    Raises:
      ValueError: It is too large, or not a number.
    """
    error = float(np.linalg.norm(result - truth) / np.linalg.norm(truth))
    if not error < MAX_ERROR:
        raise ValueError(f"differs from the first candidate by {error:.2g}")
    return error


def rules_of(rows: Sequence[Mapping]) -> list[tuned.Rule]:
    """Returns the rules that the times give; large batches first, then few rows.

    A shape's times count as multiples of the first candidate's at the same context.
    More rows than were timed in a batch are done as in smaller ones.
    """
    shares: dict[Shape, dict[str, list[float]]] = {}
    first: dict[str, float] = {}
    for row in rows:
        case = row["case"]
        base = first.setdefault(case["name"], row["us"])
        kernels = shares.setdefault(Shape(case["rows"], case["batch"]), {})
        kernels.setdefault(case["kernel"], []).append(row["us"] / base)
    kept: list[tuple[Shape, str]] = []
    for shape in sorted(shares, key=lambda shape: (-shape.batch, shape.rows)):
        means = {k: float(np.mean(v)) for k, v in shares[shape].items()}
        best = min(means, key=means.__getitem__)
        winner = best if means[best] < 1 - MIN_GAIN else CANDIDATES[0]
        while kept and kept[-1][1] == winner and kept[-1][0].rows <= shape.rows:
            # What that one says of fewer rows, or of larger batches, this one does.
            kept.pop()
        kept.append((shape, winner))
    rules = [tuned.Rule(kernel, *shape) for shape, kernel in kept]
    return [*rules[:-1], *(rule._replace(rows=None, batch=1) for rule in rules[-1:])]


def write_table(path: Path, capability: str, rules: Sequence[tuned.Rule]) -> None:
    """Puts the rules of one compute capability in the place of those in a file."""
    changed = {capability: [rule._asdict() for rule in rules]}
    table = json.loads(path.read_text()) | changed
    lines = [
        f' "{name}": [\n'
        + ",\n".join(f"  {json.dumps(rule)}" for rule in of_gpu)
        + "\n ]"
        for name, of_gpu in table.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _row(
    case: BenchCase,
    candidate: str,
    trains: Sequence[tuple],
    train: jax.stages.Compiled,
    difference: float,
) -> dict:
    timing = device_time.time_trains(train, trains, calls=_CALLS, repeats=_REPEATS)
    shape = Shape.of(case)
    return {
        "case": {
            "name": case.name,
            **shape._asdict(),
            "context": max(case.shape.context_len),
            "kernel": candidate,
        },
        **{name: round(us, 2) for name, us in timing.device._asdict().items()},
        "host_us": round(timing.host_us, 2),
        "x_floor": round(timing.device.us / floor(case.shape).us, 2),
        "difference": float(f"{difference:.2g}"),
    }


def _progress(case: BenchCase, candidate: str, row: dict) -> str:
    return (
        f"{case.name}  {candidate}  {row['us']:.1f} us "
        f"[{row['p10']:.1f}, {row['p90']:.1f}]  {row['x_floor']:.1f} x floor"
    )
