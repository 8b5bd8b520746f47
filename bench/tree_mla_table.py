"""Owns the table of a tree-MLA record: a line a case, implementations side by side."""

from bench.tree_mla_cases import PEERS
from ddtree_jax.research.record import Record


def table(record: Record) -> str:
    """Returns the record's rows in microseconds, as Markdown."""
    cases: dict[str, dict[str, dict]] = {}
    for row in record["rows"]:
        named = cases.setdefault(row["case"]["name"], {})
        named[row["case"]["implementation"]] = row
    heads = [
        *("heads", "batch", "nodes", "context", "kernel", "p10–p90", "kernels alone"),
        *("XLA bf16", "reference", "floor", "× floor", *PEERS, "must", "aim"),
    ]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    lines += [f"| {' | '.join(_cells(rows))} |" for rows in cases.values()]
    return "\n".join(lines)


def _cells(rows: dict[str, dict]) -> list[str]:
    """Returns a line's cells; "–" is what was not measured, or not set."""
    some = next(iter(rows.values()))
    ours = rows.get("pallas", {})
    case, kernels = some["case"], ours.get("kernels_us") or {}
    spread = f"{_us(ours['p10'])}–{_us(ours['p90'])}" if ours else "–"
    chain = " (chain)" if case["form"] == "chain" else ""
    return [
        *(str(case["heads"]), str(case["batch"]), f"{case['nodes']}{chain}"),
        f"{case['context']:,}",
        _us(ours.get("us")),
        spread,
        _us(sum(kernels.values()) if kernels else None),
        *(_us(rows.get(name, {}).get("us")) for name in ("xla bfloat16", "reference")),
        _us(some["floor_us"]),
        f"{ours['x_floor']:.1f}" if ours else "–",
        *(_us(ours.get("peers_us", {}).get(peer)) for peer in PEERS),
        _judged(ours, "must_us"),
        _judged(ours, "aim_us"),
    ]


def _us(us: float | None) -> str:
    if us is None:
        return "–"
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _judged(row: dict, name: str) -> str:
    """Returns the goal, and whether it was missed."""
    goal = row.get(name)
    if goal is None:
        return "–"
    return f"{goal:g}" if row["us"] <= goal else f"{goal:g}, missed"
