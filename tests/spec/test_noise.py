"""The noise: whose it is, that it is Gumbel's, and that its extremes are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.spec.sampling import gumbel_noise
from tests.spec.statistics import kolmogorov_p
from tests.support.compare import assert_bit_equal

LEAST_P = 1e-4


def noise(seeds, position, ids) -> np.ndarray:
    return np.asarray(
        _noise(
            jnp.asarray(seeds, jnp.uint32),
            jnp.asarray(position, jnp.int32),
            jnp.asarray(ids, jnp.int32),
        )
    )


_noise = jax.jit(gumbel_noise)


def test_noise_belongs_to_seed_position_and_token_id():
    seeds, ids = [5, 6, 2**32 - 1], np.arange(64)
    whole = noise(seeds, [[0, 1, 262143]] * 3, ids)
    # Another place in the batch, other nodes, another shard.
    assert_bit_equal(noise([6], [[262143, 7]], ids)[0, 0], whole[1, 2])
    assert_bit_equal(noise(seeds, [[0, 1, 262143]] * 3, ids[24:32]), whole[..., 24:32])
    assert_bit_equal(noise([9, 5], [[1], [1]], ids)[1, 0], whole[0, 1])
    # Each of the three matters.
    assert len(np.unique(whole)) == whole.size


@pytest.mark.parametrize("axis", ["seed", "position", "token_id"])
def test_noise_is_gumbel_along_each_axis(axis):
    n = 50_000
    many = np.arange(n)
    match axis:
        case "seed":
            drawn = noise(many, np.full((n, 1), 17), [3]).ravel()
        case "position":
            drawn = noise([11], many[None], [3]).ravel()
        case "token_id":
            drawn = noise([11], [[17]], many).ravel()
    assert kolmogorov_p(drawn, lambda x: np.exp(-np.exp(-x))) > LEAST_P
    # Standard errors: of the mean π / √(6n), of the variance √(4.4 / n) π² / 6.
    assert abs(drawn.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * n)
    assert abs(drawn.var() / (np.pi**2 / 6) - 1) < 4 * np.sqrt(4.4 / n)
    # Neighbours are not alike.
    for lag in (1, 2, 8):
        assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 4 / np.sqrt(n)


# Found by search: seed 0, (position, token id), the 32 bits drawn there.
SMALLEST_BITS = (5, 530397273, 0)
LARGEST_BITS = (0, 22480688, 0xFFFFFF95)


@pytest.mark.parametrize(
    ("case", "uniform"),
    [(SMALLEST_BITS, 2.0**-33), (LARGEST_BITS, 1 - 2.0**-24)],
    ids=["smallest", "largest"],
)
def test_extreme_noise_is_finite(case, uniform):
    """float32 would round the one to 0 and the other to 1 without care."""
    position, token_id, bits = case
    key = jax.random.fold_in(jax.random.key(jnp.uint32(0)), position)
    assert int(jax.random.key_data(jax.random.fold_in(key, token_id))[0]) == bits
    got = noise([0], [[position]], [token_id]).item()
    assert got == pytest.approx(-np.log(-np.log1p(-uniform)), rel=1e-6)
