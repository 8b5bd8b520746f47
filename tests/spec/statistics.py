"""How improbable counts are under a law: the chi-square and Kolmogorov tests."""

import math

import numpy as np
from jax.scipy.special import gammaincc

# Pearson's statistic is chi-square distributed when cells are expected this often.
_LEAST_EXPECTED = 5


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Returns the chance of counts at least this far off, rare cells pooled."""
    counts = np.asarray(counts, np.float64).ravel()
    probabilities = np.asarray(probabilities, np.float64).ravel()
    expected = probabilities * (counts.sum() / probabilities.sum())
    if counts[expected == 0].any():
        return 0.0
    rare = expected < _LEAST_EXPECTED
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    # What is pooled may still be rare: then it joins the rarest of the others.
    if expected[-1] < _LEAST_EXPECTED:
        rarest = np.argmin(expected[:-1])
        counts[rarest] += counts[-1]
        expected[rarest] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) == 1:
        return 1.0
    statistic = np.sum((counts - expected) ** 2 / expected)
    return float(gammaincc((len(counts) - 1) / 2, statistic / 2))


def kolmogorov_p(sample: np.ndarray, distribution) -> float:
    """Returns the chance of a sample at least this far from a continuous law.

    Args:
      distribution: The cumulative distribution function.
    """
    ordered = distribution(np.sort(np.asarray(sample, np.float64).ravel()))
    n = len(ordered)
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - ordered), np.max(ordered - steps[:-1]))
    lam = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * lam) ** 2) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * sum(terms)))
