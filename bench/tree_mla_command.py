"""Owns the command `tree-mla`: what it records, prints and writes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import device_time, tree_mla, tree_mla_cases
from bench.limits import Deadline
from bench.record import bench_record, fill, results_path
from bench.tree_mla_table import table

# After so many nothing new is begun; what is under way ends within 150.
_SECONDS = 135


def run(patterns: Sequence[str], output: Path | None, argv: Sequence[str]) -> None:
    """Times the cases that match; the record is written anew after each.

    Raises:
      ConfigError: No case matches, or there is no such GPU.
      DDTreeError: Something was not measured.
    """
    deadline = Deadline.after(_SECONDS)
    cases = tree_mla_cases.chosen(patterns)
    tree_mla.require_hopper()
    path = output or results_path("tree_mla")
    made = bench_record("tree_mla", [], argv)
    made |= {
        "method": device_time.METHOD,
        "floors": tree_mla_cases.FLOORS,
        "peers": tree_mla_cases.PEERS_SOURCE,
    }
    fill(made, path, partial(tree_mla.measure, cases, deadline=deadline), table)
