"""The figures that docs/tiny.md states are those of the committed records."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tiny.md").read_text(encoding="utf-8")


def rows_of(name: str) -> list[dict]:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["rows"]


def test_ablations_are_the_records():
    lines = re.findall(
        r"^\| .* \| `(acceptance-[\w-]+)` \| (.*) \| (.*) \|$", TEXT, re.M
    )
    assert len(lines) == 4
    for name, *cells in lines:
        by_shape = {row["case"]["shape"]: row for row in rows_of(name)}
        for cell, shape in zip(cells, ("chain", "ddtree"), strict=True):
            row = by_shape[shape]
            figures = row["acceptance_length"], row["ci_low"], row["ci_high"]
            assert cell == "{:.2f} [{:.2f}, {:.2f}]".format(*figures), (name, shape)


def test_slots_are_the_record():
    keys = "accuracy_at_1 accuracy_at_8 cross_entropy_bits target_entropy_bits survival"
    for row in rows_of("draft_slots"):
        figures = " | ".join(f"{row[key]:.2f}" for key in keys.split())
        assert f"| {row['case']['slot']} | {figures} |" in TEXT
