"""Owns what a measurement's figures are computed with."""

from collections.abc import Sequence

import numpy as np

# Half of the 4-grams repeat others of the same text: a loop, not language.
DEGENERATE_BELOW = 0.5


def bootstrap_interval(
    total: Sequence[int],
    count: Sequence[int],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Returns the confidence interval of Σ total / Σ count over drawn prompts.

    Prompts are drawn with replacement, because steps of one text depend on each
    other; percentiles, and the same draws at every call.
    """
    totals, counts = np.asarray(total), np.asarray(count)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(totals), (resamples, len(totals)))
    ratio = totals[drawn].sum(1) / np.maximum(counts[drawn].sum(1), 1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratio, [tail, 1 - tail])
    return float(low), float(high)


def distinct_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Returns distinct n-grams of each text over all its n-grams, summed over texts.

    1 when nothing repeats within a text; NaN when no text has n tokens.
    """
    distinct = every = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        distinct += len(set(grams))
        every += len(grams)
    return distinct / every if every else float("nan")
