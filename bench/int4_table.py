"""Owns the table of an INT4 record: a line a case, implementations side by side."""

from bench.int4_cases import PEERS
from ddtree_jax.research.record import Record


def table(record: Record) -> str:
    """Returns the record's rows in microseconds, as Markdown."""
    cases: dict[str, dict[str, dict]] = {}
    for row in record["rows"]:
        named = cases.setdefault(row["case"]["name"], {})
        named[row["case"]["implementation"]] = row
    heads = [
        *("product", "tokens", "experts hit", "kernel", "p10–p90", "kernels alone"),
        *("XLA INT4", "XLA bf16", "floor", "× floor", "GB/s", "of a copy", "error"),
        *(*PEERS, "must", "aim"),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += [
        f"| {' | '.join(_cells(rows))} |" for rows in sorted(cases.values(), key=_place)
    ]
    return "\n".join(lines)


def _place(rows: dict[str, dict]) -> tuple:
    """Returns what lines are ordered by."""
    case = next(iter(rows.values()))["case"]
    products = "tp8", "ep8", "dense"
    return products.index(case["product"]), -case["inputs"], case["tokens"]


def _cells(rows: dict[str, dict]) -> list[str]:
    """Returns a line's cells; "–" is what was not measured, or not set."""
    some = next(iter(rows.values()))
    ours = rows.get("pallas", {})
    kernels = ours.get("kernels_us") or {}
    spread = f"{_us(ours['p10'])}–{_us(ours['p90'])}" if ours else "–"
    return [
        _product(some["case"]),
        str(some["case"]["tokens"]),
        f"{some['experts']:g}" if "experts" in some else "–",
        _us(ours.get("us")),
        spread,
        _us(sum(kernels.values()) if kernels else None),
        *(_us(rows.get(name, {}).get("us")) for name in ("xla", "bfloat16")),
        _us(some["floor_us"]),
        f"{ours['x_floor']:.2f}" if ours else "–",
        f"{ours['gbps']:,}" if ours else "–",
        f"{ours['copy_share']:.0%}" if ours else "–",
        "–" if ours.get("error") is None else str(ours["error"]),
        *(_us(ours.get("peers_us", {}).get(peer)) for peer in PEERS),
        _judged(ours, "must_us"),
        _judged(ours, "aim_us"),
    ]


def _product(case: dict) -> str:
    if case["product"] == "dense":
        return f"dense {case['inputs']} × {case['outputs']}"
    return f"{case['product'].upper()} {case['experts']} × {case['inner']}"


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
