"""Owns the comparison of two records of one topic."""

import json

from ddtree_jax.errors import ConfigError
from ddtree_jax.research.record import Record

# Figure → whether more of it is better.
_FIGURES = {"us": False, "acceptance_length": True}


def compare(old: Record, new: Record, *, threshold: float) -> tuple[list[str], bool]:
    """Returns a table, and whether `new` is as good as `old` within the threshold.

    A case that `new` lacks counts as worse; one that `old` lacks is only listed.

    Args:
      threshold: Tolerated loss, as a share of the old figure.

    Raises:
      ConfigError: The records are of different topics or hold no known figure.
    """
    if old["topic"] != new["topic"]:
        raise ConfigError(f"topics differ: {old['topic']} and {new['topic']}")
    before, after = _by_case(old), _by_case(new)
    lines = [f"{old['topic']}: {old['device']} → {new['device']}"]
    good = True
    for case in [*before, *(c for c in after if c not in before)]:
        if case not in after:
            lines.append(f"{case}  {before[case][1]:.4g} → missing  WORSE")
            good = False
        elif case not in before:
            lines.append(f"{case}  new: {after[case][1]:.4g}")
        else:
            more_is_better, a = before[case]
            _, b = after[case]
            loss = (a - b if more_is_better else b - a) / a
            worse = loss > threshold
            good &= not worse
            mark = "  WORSE" if worse else ""
            lines.append(f"{case}  {a:.4g} → {b:.4g}  ({b / a - 1:+.1%}){mark}")
    return lines, good


def _by_case(record: Record) -> dict[str, tuple[bool, float]]:
    found = {}
    for row in record["rows"]:
        figure = next((name for name in _FIGURES if name in row), None)
        if figure is None:
            expected = " or ".join(_FIGURES)
            raise ConfigError(f"{record['topic']}: a row has no {expected}")
        case = json.dumps(row["case"], sort_keys=True, ensure_ascii=False)
        found[case] = _FIGURES[figure], row[figure]
    return found
