"""Owns the picture of the budget curve."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_budgets(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Writes a PNG: acceptance length over budget, one curve a temperature and shape.

    Bars are the confidence intervals; a shape of one budget is a single mark.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    curves: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["case"]["temperature"], row["case"]["shape"]
        curves.setdefault(key, []).append(row)
    for (temperature, shape), points in curves.items():
        points.sort(key=_budget)
        length = [p["acceptance_length"] for p in points]
        low = [p["acceptance_length"] - p["ci_low"] for p in points]
        high = [p["ci_high"] - p["acceptance_length"] for p in points]
        axes.errorbar(
            [_budget(p) for p in points],
            length,
            yerr=[low, high],
            label=f"{shape}, T = {temperature:g}",
            marker="o" if temperature == 0 else "s",
            capsize=3,
        )
    axes.set_xlabel("budget (draft nodes, without the root)")
    axes.set_ylabel("tokens per decoding step, bonus included")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _budget(row: dict[str, Any]) -> int:
    return row["case"]["budget"]
