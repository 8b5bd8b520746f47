"""Owns which kernel takes a call on which GPU: a table, as `tuned.json` has it.

`python -m bench tune-tree-mla` measures the candidates and writes the table. For a
compute capability it has rules, of which the first that a call fits counts.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """Which kernel takes calls of some sizes.

    Attributes:
      kernel: "transposed" or "wide" on Hopper, "mma" with little shared memory.
      rows: Of a request at most, nodes × heads; None is any.
      batch: Requests at least.
    """

    kernel: str
    rows: int | None = None
    batch: int = 1

    def fits(self, *, rows: int, batch: int) -> bool:
        """Says whether the rule is for such a call."""
        return batch >= self.batch and (self.rows is None or rows <= self.rows)


def kernel_for(capability: str, *, rows: int, batch: int) -> str:
    """Returns which kernel takes a call; the last rule of every GPU fits any."""
    rules = table()[capability]
    return next(rule.kernel for rule in rules if rule.fits(rows=rows, batch=batch))


@functools.cache
def table() -> Mapping[str, tuple[Rule, ...]]:
    """Returns all rules, by compute capability."""
    text = importlib.resources.files(__package__).joinpath("tuned.json").read_text()
    return {
        capability: tuple(Rule(**rule) for rule in rules)
        for capability, rules in json.loads(text).items()
    }
