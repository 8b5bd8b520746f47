"""Owns the command `int4`: what it records, prints and writes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import device_time, int4, int4_cases
from bench.int4_table import table
from bench.limits import Deadline
from bench.record import fill, results_path
from ddtree_jax.research.record import make_record

# After so many nothing new is begun; what is under way ends within 150.
_SECONDS = 125


def run(patterns: Sequence[str], output: Path | None, argv: Sequence[str]) -> None:
    """Times the cases that match; the record is written anew after each.

    Raises:
      ConfigError: No case matches, or there is no such GPU.
      DDTreeError: Something was not measured.
    """
    deadline = Deadline.after(_SECONDS)
    cases = int4_cases.chosen(patterns)
    int4.require_hopper()
    path = output or results_path("int4")
    gbps = int4.copy_gbps()
    made = make_record("int4", [], program="bench", argv=argv)
    made |= {
        "copy_gbps": round(gbps, 2),
        "method": device_time.METHOD,
        "work": int4_cases.WORK,
        "floors": int4_cases.FLOORS,
        "baselines": int4.BASELINES,
        "peers": int4_cases.PEERS_SOURCE,
    }
    print(f"copy: {gbps:.0f} GB/s", flush=True)
    measure = partial(int4.measure, cases, gbps=gbps, deadline=deadline)
    fill(made, path, measure, table)
