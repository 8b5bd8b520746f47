"""Owns the tables in README.md: each is made of the records and of nothing else."""

import re
from collections.abc import Callable
from pathlib import Path

from bench.int4_table import table as int4_rows
from bench.record import RESULTS, read_record
from bench.tree_mla_table import table as tree_mla_rows
from ddtree_jax.errors import ConfigError
from ddtree_jax.research.record import Record
from ddtree_jax.research.statistics import DEGENERATE_BELOW

README = Path(__file__).parents[1] / "README.md"


def updated(text: str, results: Path = RESULTS) -> str:
    """Returns README's text with the tables between its markers made anew.

    Raises:
      ConfigError: A pair of markers is missing, or a record is unusable.
    """
    for name, make in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ConfigError(f"README.md: expected one block {start} … {end}")
        block = f"{start}\n{make(results)}\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def acceptance_table(results: Path) -> str:
    """Returns the acceptance lengths, with the definition above them."""
    path = results / "acceptance.json"
    if not path.exists():
        return "Acceptance has not been measured yet."
    record = read_record(path)
    lines = [
        _origin(record),
        "",
        f"{record['definition']}.",
        "",
        "| model | prompts | T | shape | budget | acceptance_length (95 % CI) "
        "| distinct 4-grams |",
        "|---|---|---:|---|---:|---|---|",
    ]
    for row in record["rows"]:
        case = row["case"]
        known = {"model", "prompts", "temperature", "shape", "budget"}
        if unknown := case.keys() - known:
            raise ConfigError(f"{path}: {min(unknown)!r} is no case of this table")
        loops = row["distinct_4grams"] < DEGENERATE_BELOW
        length = f"{row['acceptance_length']:.2f}"
        # A loop is easily drafted: its figure is no headline.
        length = f"({length}, degenerate text)" if loops else f"**{length}**"
        lines.append(
            f"| {case['model']} | {case['prompts']} | {case['temperature']:g} "
            f"| {case['shape']} | {case['budget']} | {length} "
            f"[{row['ci_low']:.2f}, {row['ci_high']:.2f}] "
            f"| {row['distinct_4grams']:.2f} |"
        )
    return "\n".join(lines)


def tree_build_table(results: Path) -> str:
    """Returns the builder's times on every device it was measured on."""

    def head(record):
        return (
            f"{_origin(record)}; one request, microseconds:",
            "| horizon | budget | kept | builder | median | p10 | p90 |",
            "|---:|---:|---:|---|---:|---:|---:|",
        )

    def line(row):
        case = row["case"]
        return (
            f"| {case['horizon']} | {case['budget']} | {case['vocab']} "
            f"| {case['implementation']} | {row['us']:.0f} | {row['p10']:.0f} "
            f"| {row['p90']:.0f} |"
        )

    tables = _tables(results, "tree_build", head, line)
    return tables or "The tree builder has not been timed yet."


def tree_mla_table(results: Path) -> str:
    """Returns the attention kernel's times, beside XLA's and other people's."""
    return _kernel_table(results, "tree_mla", tree_mla_rows)


def int4_table(results: Path) -> str:
    """Returns the INT4 kernels' times, beside XLA's and other people's."""
    return _kernel_table(results, "int4", int4_rows)


def agreement_table(results: Path) -> str:
    """Returns how far greedy text in bfloat16 agrees with that of float32."""

    def head(record):
        near_ties = record["float32_margins"]["near_ties"]
        return (
            f"{_origin(record)}; {near_ties:.0%} of the places of the float32 texts "
            "are near-ties:",
            "| model | tested | against | budget | texts that differ "
            "| differences in 1,000 tokens | margin: median | largest "
            "| beyond near-ties |",
            "|---|---|---|---:|---:|---:|---:|---:|---:|",
        )

    tables = _tables(results, "agreement", head, _agreement_line)
    return tables or "Agreement has not been measured yet."


def _agreement_line(row: dict) -> str:
    case = row["case"]
    differ = len(row["differences"])
    margins = (row["margin_median"], row["margin_max"])
    median, largest = ("–" if m is None else f"{m:.3f}" for m in margins)
    return (
        f"| {case['model']} | {case['tested']} | {case['reference']} "
        f"| {case['budget']} | {differ} of {row['texts']} "
        f"| {row['per_1000_tokens']:.1f} | {median} | {largest} "
        f"| {row['beyond_near_ties']} |"
    )


def convert_table(results: Path) -> str:
    """Returns how fast checkpoints are converted, beside `cp`, and restored."""

    def head(record):
        return (
            f"{_origin(record)}:",
            "| from | to | GB | page cache | GB/s | of `cp` (repeats) "
            "| peak memory, GB |",
            "|---|---|---:|---|---:|---|---:|",
        )

    tables = _tables(results, "convert", head, _convert_line)
    return tables or "Conversion has not been timed yet."


def _convert_line(row: dict) -> str:
    case, of_cp = row["case"], "–"
    if "ratio" in row:
        low, high = row["ratios"][0], row["ratios"][-1]
        of_cp = f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})"
    return (
        f"| {case['source']} | {case['target']} | {case['bytes'] / 1e9:.1f} "
        f"| {case.get('cache', '–')} | {row['gbps']:.2f} | {of_cp} "
        f"| {row['peak_rss_mb'] / 1e3:.1f} |"
    )


def _tables(
    results: Path,
    topic: str,
    head: Callable[[Record], tuple[str, str, str]],
    line: Callable[[dict], str],
) -> str:
    """Returns a table a record of a topic.

    Args:
      head: Returns what is said above the table, and its first two lines.
      line: Returns a row's line.
    """
    parts = []
    for path in sorted(results.glob(f"{topic}-*.json")):
        record = read_record(path)
        above, *names = head(record)
        parts.append("\n".join([above, "", *names, *map(line, record["rows"])]))
    return "\n\n".join(parts)


def _kernel_table(results: Path, topic: str, rows: Callable[[Record], str]) -> str:
    parts = []
    for path in sorted(results.glob(f"{topic}-*.json")):
        record = read_record(path)
        parts.append(f"{_origin(record)}; microseconds:\n\n{rows(record)}")
    return "\n\n".join(parts) or "The kernel has not been timed yet."


def _origin(record: Record) -> str:
    return (
        f"`{record['command']}` on {record['device']}, {record['date']}, "
        f"jax {record['versions']['jax']}"
    )


TABLES: dict[str, Callable[[Path], str]] = {
    "acceptance": acceptance_table,
    "tree build": tree_build_table,
    "tree mla": tree_mla_table,
    "int4": int4_table,
    "agreement": agreement_table,
    "convert": convert_table,
}
